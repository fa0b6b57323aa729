//! Whether a model's answers stay the same when its inputs are padded: asked once, at load.

use bytes::Bytes;
use downbeat_core::tensor::DataType;
use downbeat_engine::State;

use super::padding::Padding;
use crate::plan::{Admitted, BatchPlan, Outputs};

/// The length of the request that is asked with, and what it is padded to.
const LENGTH: u32 = 5;
const PADDED: u32 = 12;
/// How far an answer may be off, relative to its size or absolute.
const TOLERANCE: f64 = 1e-3;

/// Runs a request alone, and padded beside a longer one, and compares its answers.
///
/// # Errors
/// If they differ, or the model cannot run it.
pub fn check(
    plan: &BatchPlan,
    padding: &Padding,
    run: &mut dyn FnMut(State) -> Result<State, String>,
) -> Result<(), String> {
    let longest = padding.max_length().unwrap_or(PADDED);
    let (length, padded) = (LENGTH.min(longest), PADDED.min(longest));
    let cannot =
        |reason| format!("the model cannot run the request of ones that tells whether it may be padded: {reason}");
    let (request, longer) = (ones(plan, padding, length), ones(plan, padding, padded));
    let alone = run(padding.assemble(plan, std::iter::once(&request), length, 0)?).map_err(cannot)?;
    let alone = plan.separate(alone, &[1]).map_err(cannot)?.pop().unwrap_or_default();
    // That what varies is the length shows where it does.
    let alone = padding.cut(plan, alone, length, length)?;
    // Where the model takes no batch of two, alone and padded.
    let both: &[&Admitted] = if plan.max_batch() > 1 { &[&request, &longer] } else { &[&request] };
    let together = run(padding.assemble(plan, both.iter().copied(), padded, 0)?).map_err(cannot)?;
    let mut together = plan.separate(together, &vec![1; both.len()]).map_err(cannot)?;
    let beside = padding.cut(plan, together.swap_remove(0), length, padded)?;
    match difference(plan, &alone, &beside) {
        None => Ok(()),
        Some((output, alone, beside)) => Err(format!(
            "its answers change when its inputs are padded: output '{output}' has {alone} for a request of length {length} alone, and {beside} for the \
             same request padded with zeros to {padded}. The model needs an input that masks the padding; leave `pad` out and use the policy exclusive"
        )),
    }
}

/// A request of one item of ones, such as ids and a mask; numbers with a fraction vary a little.
fn ones(plan: &BatchPlan, padding: &Padding, length: u32) -> Admitted {
    let inputs = plan.inputs().iter().enumerate().map(|(index, binding)| {
        let item: Vec<i64> = padding.item(plan, index, length).iter().map(|d| *d as i64).collect();
        let elements = item.iter().product::<i64>().max(0) as usize;
        let bytes: Vec<u8> = (0..elements).flat_map(|at| one(binding.datatype(), at)).collect();
        (Bytes::from(bytes), item)
    });
    Admitted::of_one(inputs)
}

fn one(datatype: DataType, at: usize) -> Vec<u8> {
    let fraction = 1.0 + (at % 7) as f64 / 8.0;
    match datatype {
        DataType::Bool | DataType::Uint8 | DataType::Int8 => vec![1],
        DataType::Uint16 | DataType::Int16 => 1u16.to_le_bytes().into(),
        DataType::Uint32 | DataType::Int32 => 1u32.to_le_bytes().into(),
        DataType::Uint64 | DataType::Int64 => 1u64.to_le_bytes().into(),
        DataType::Fp16 => half::f16::from_f64(fraction).to_le_bytes().into(),
        DataType::Bf16 => half::bf16::from_f64(fraction).to_le_bytes().into(),
        DataType::Fp32 => (fraction as f32).to_le_bytes().into(),
        DataType::Fp64 => fraction.to_le_bytes().into(),
        DataType::Bytes => 0u32.to_le_bytes().into(),
    }
}

/// The first output, and the numbers, in which two answers differ.
fn difference(plan: &BatchPlan, a: &Outputs, b: &Outputs) -> Option<(String, f64, f64)> {
    for ((a, b), binding) in a.iter().zip(b).zip(plan.outputs()) {
        let (datatype, name) = (binding.datatype(), binding.client.name.clone());
        let Some(size) = datatype.size() else {
            if a.data == b.data {
                continue;
            }
            return Some((name, f64::NAN, f64::NAN));
        };
        if a.data.len() != b.data.len() {
            return Some((name, f64::NAN, f64::NAN));
        }
        for (a, b) in a.data.chunks(size).zip(b.data.chunks(size)) {
            if a == b {
                continue;
            }
            let (a, b) = (number(datatype, a), number(datatype, b));
            // Not a number is far from everything.
            let near = (a - b).abs() <= TOLERANCE * (1.0 + a.abs().max(b.abs()));
            if !near {
                return Some((name, a, b));
            }
        }
    }
    None
}

fn number(datatype: DataType, bytes: &[u8]) -> f64 {
    let mut wide = [0; 8];
    wide[..bytes.len().min(8)].copy_from_slice(&bytes[..bytes.len().min(8)]);
    let [a, b, c, d, ..] = wide;
    match datatype {
        DataType::Fp16 => half::f16::from_le_bytes([a, b]).to_f64(),
        DataType::Bf16 => half::bf16::from_le_bytes([a, b]).to_f64(),
        DataType::Fp32 => f32::from_le_bytes([a, b, c, d]).into(),
        DataType::Fp64 => f64::from_le_bytes(wide),
        DataType::Int8 => i8::from_le_bytes([a]).into(),
        DataType::Int16 => i16::from_le_bytes([a, b]).into(),
        DataType::Int32 => i32::from_le_bytes([a, b, c, d]).into(),
        DataType::Int64 => i64::from_le_bytes(wide) as f64,
        _ => u64::from_le_bytes(wide) as f64,
    }
}
