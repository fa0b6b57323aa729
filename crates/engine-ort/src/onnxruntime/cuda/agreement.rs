//! Checks whether two answers are the same up to rounding: kernels that are chosen for a graph may
//! sum in another order.

use downbeat_core::tensor::DataType;
use downbeat_engine::tensor::Buffer;
use downbeat_engine::tensor::fill::{Random, element};
use half::{bf16, f16};

/// The quantile of a tensor's magnitudes that stands for the size of its elements. It is not the
/// largest, as masks have a few huge ones.
const TYPICAL: f64 = 0.9;

/// The allowed error of an element, as a share of itself and of the tensor's typical size. It is
/// some steps of the numbers in products. `None`: no error is allowed.
fn tolerance(datatype: DataType) -> Option<f64> {
    match datatype {
        DataType::Fp64 => Some(1e-9),
        // TF32 has 10 bits behind the leading bit.
        DataType::Fp32 => Some(2e-3),
        DataType::Fp16 => Some(1e-2),
        DataType::Bf16 => Some(4e-2),
        _ => None,
    }
}

/// Whether the elements of two tensors of a type are the same up to rounding. NaN and infinite
/// numbers must be in the same places, and integers must be equal.
pub(super) fn agree(datatype: DataType, expected: &[u8], got: &[u8]) -> bool {
    if expected.len() != got.len() {
        return false;
    }
    let Some(tolerance) = tolerance(datatype).filter(|_| expected != got) else { return expected == got };
    let (expected, got) = (numbers(datatype, expected), numbers(datatype, got));
    let mut magnitudes: Vec<f64> = expected.iter().map(|x| x.abs()).filter(|x| x.is_finite()).collect();
    let at = (magnitudes.len() as f64 * TYPICAL) as usize;
    let typical = if magnitudes.is_empty() { 0.0 } else { *magnitudes.select_nth_unstable_by(at, f64::total_cmp).1 };
    expected.iter().zip(&got).all(|(x, y)| {
        let is_close = (x - y).abs() <= tolerance * (x.abs() + typical);
        x == y || (x.is_nan() && y.is_nan()) || (x.is_finite() && y.is_finite() && is_close)
    })
}

fn numbers(datatype: DataType, bytes: &[u8]) -> Vec<f64> {
    match datatype {
        DataType::Fp64 => bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        DataType::Fp32 => bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
        DataType::Fp16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f64()).collect(),
        DataType::Bf16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f64()).collect(),
        _ => Vec::new(),
    }
}

/// Numbers between -1 and 1, to replace zeros, on which some GPUs are faster and most mistakes do
/// not show. Only for types with a fraction: integers may be indices.
pub(super) fn noise(datatype: DataType, len: usize) -> Option<Vec<u8>> {
    tolerance(datatype)?;
    let mut random = Random::new(1);
    let mut bytes = Buffer::new();
    for _ in 0..len / datatype.size()? {
        element(datatype, 0, random.fraction(), &mut bytes);
    }
    Some(bytes.as_slice().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn floats_agree_within_rounding() {
        let agrees = |a: &[f32], b: &[f32]| agree(DataType::Fp32, &floats(a), &floats(b));
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        assert!(agrees(&[1.0, -2.0, 3.0], &[1.0, -2.0, 3.0]));
        assert!(agrees(&[1.0, -2.0, 3.0], &[1.0005, -2.001, 3.0]));
        assert!(!agrees(&[1.0, -2.0, 3.0], &[1.0, -2.0, 3.1]));
        assert!(agrees(&[1.0, 0.0, 1.0], &[1.0, 1e-4, 1.0]), "as a share of what is typical");
        assert!(!agrees(&[0.0; 3], &[0.0, 1e-4, 0.0]));
        assert!(agrees(&[nan, 1.0, inf], &[-nan, 1.0, inf]));
        assert!(!agrees(&[nan, 1.0], &[1.0, 1.0]) && !agrees(&[1.0, 1.0], &[nan, 1.0]));
        assert!(!agrees(&[inf, 1.0], &[-inf, 1.0]) && !agrees(&[1.0, 1.0], &[inf, 1.0]));
        // A few huge numbers do not hide the others.
        let mut numbers = [1.0; 100];
        numbers[..5].fill(-1e30);
        let mut others = numbers;
        others[50] = 1.5;
        assert!(!agrees(&numbers, &others));
        assert!(!agrees(&[1.0], &[1.0, 1.0]));
        assert!(agrees(&[], &[]));
    }

    #[test]
    fn halves_may_be_off_by_more_and_integers_not_at_all() {
        let half = |x: f32| f16::from_f32(x).to_le_bytes();
        let brain = |x: f32| bf16::from_f32(x).to_le_bytes();
        assert!(agree(DataType::Fp16, &half(1.0), &half(1.01)) && !agree(DataType::Fp16, &half(1.0), &half(1.05)));
        assert!(agree(DataType::Bf16, &brain(1.0), &brain(1.05)) && !agree(DataType::Bf16, &brain(1.0), &brain(1.2)));
        let number = |x: f64| x.to_le_bytes();
        assert!(agree(DataType::Fp64, &number(1.0), &number(1.0 + 1e-10)));
        assert!(!agree(DataType::Fp64, &number(1.0), &number(1.0 + 1e-6)));
        assert!(agree(DataType::Int64, &7_i64.to_le_bytes(), &7_i64.to_le_bytes()));
        assert!(!agree(DataType::Int64, &700_000_i64.to_le_bytes(), &700_001_i64.to_le_bytes()));
    }

    #[test]
    fn noise_is_for_floats() {
        for datatype in [DataType::Fp64, DataType::Fp32, DataType::Fp16, DataType::Bf16] {
            let bytes = noise(datatype, 64).expect("any number will do");
            let numbers = numbers(datatype, &bytes);
            assert_eq!(bytes.len(), 64);
            assert!(numbers.iter().all(|x| x.abs() <= 1.0) && numbers.iter().any(|x| x.abs() > 0.1), "{numbers:?}");
        }
        assert_eq!(noise(DataType::Int64, 64), None);
        assert_eq!(noise(DataType::Bool, 1), None);
    }
}
