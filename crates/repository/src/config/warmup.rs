//! Requests that a model answers before all other requests (Triton's `model_warmup`).

use std::collections::BTreeMap;
use std::path::PathBuf;

use bytes::Bytes;
use downbeat_core::file_content::refuse_lfs_pointer;
use downbeat_core::tensor::DataType;
use downbeat_protocol::{InferRequest, InferTensor};

/// Largest generated or read input of a warm-up, bytes.
const MAX_INPUT_BYTES: usize = 1 << 30;

/// A request that is sent to a model before it becomes ready.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Warmup {
    /// Name, for the log.
    pub name: String,
    /// Batch size; at least 1, and 1 for models without a batch dimension.
    pub batch_size: u32,
    /// How often the request is sent; at least 1, at most [`Warmup::MOST_RUNS`].
    pub count: u32,
    /// Inputs by name.
    pub inputs: BTreeMap<String, WarmupInput>,
    /// Whether the model's tensors have a batch dimension.
    pub(crate) batched: bool,
}

/// An input of a [`Warmup`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WarmupInput {
    /// Element type.
    pub datatype: DataType,
    /// Sizes without the batch dimension, all known.
    pub dims: Vec<usize>,
    /// The source of the elements.
    pub data: WarmupData,
}

/// The elements of a [`WarmupInput`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WarmupData {
    /// Zeros; empty strings for `BYTES`.
    Zero,
    /// Random numbers, the same in every run: floating point in `[0, 1)`, integers from 0 to 127.
    /// Empty strings for `BYTES`.
    Random,
    /// The elements of one batch entry or of the whole batch, in the protocol's binary form.
    File(PathBuf),
}

impl Warmup {
    /// The most runs of a warm-up request: no engine is warmer after more, and the load would keep
    /// others waiting.
    pub const MOST_RUNS: u32 = 100;

    /// The request, for the model `model`.
    ///
    /// # Errors
    /// A message if a data file cannot be read or has the wrong size.
    pub fn request(&self, model: &str) -> Result<InferRequest, String> {
        let mut request = InferRequest { model_name: model.to_owned(), ..InferRequest::default() };
        for (name, input) in &self.inputs {
            let data = input
                .bytes(self.batch_size as usize)
                .map_err(|e| format!("model_warmup '{}', input '{name}': {e}", self.name))?;
            let batch = self.batched.then_some(i64::from(self.batch_size));
            let dims = input.dims.iter().map(|d| i64::try_from(*d).unwrap_or(i64::MAX));
            request.inputs.push(InferTensor {
                name: name.clone(),
                datatype: input.datatype,
                shape: batch.into_iter().chain(dims).collect(),
                parameters: Default::default(),
                data,
            });
        }
        Ok(request)
    }
}

impl WarmupInput {
    fn bytes(&self, batch: usize) -> Result<Bytes, String> {
        // An empty string consists of its length alone.
        let size = self.datatype.size().unwrap_or(4);
        let one = self
            .dims
            .iter()
            .try_fold(size, |n, d| n.checked_mul(*d))
            .filter(|n| n.checked_mul(batch).is_some_and(|all| all <= MAX_INPUT_BYTES))
            .ok_or_else(|| format!("is larger than {MAX_INPUT_BYTES} bytes"))?;
        match &self.data {
            WarmupData::Zero => Ok(vec![0; one * batch].into()),
            WarmupData::Random => Ok(random(self.datatype, one * batch).into()),
            WarmupData::File(path) => {
                let shown = path.display();
                let length = std::fs::metadata(path).map_err(|e| format!("{shown}: {e}"))?.len();
                if length > MAX_INPUT_BYTES as u64 {
                    return Err(format!("{shown} is larger than {MAX_INPUT_BYTES} bytes"));
                }
                let data = std::fs::read(path).map_err(|e| format!("{shown}: {e}"))?;
                refuse_lfs_pointer(&data).map_err(|e| format!("{shown} {e}"))?;
                match self.datatype {
                    // The number of strings is checked later, as for every request.
                    DataType::Bytes => Ok(data.into()),
                    _ if data.len() == one * batch => Ok(data.into()),
                    _ if data.len() == one => Ok(data.repeat(batch).into()),
                    _ => Err(format!(
                        "{shown} has {} bytes; expected {one} (one batch entry) or {} (the batch)",
                        data.len(),
                        one * batch
                    )),
                }
            }
        }
    }
}

/// Elements from a fixed seed, so that every start has the same warm-up.
fn random(datatype: DataType, bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    // SplitMix64.
    let mut draw = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let unit = |bits: u64| (bits >> 40) as f32 / (1 << 24) as f32;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        let bits = draw();
        match datatype {
            DataType::Bool => out.push((bits & 1) as u8),
            DataType::Bytes => out.extend_from_slice(&[0; 4]),
            DataType::Fp32 => out.extend_from_slice(&unit(bits).to_le_bytes()),
            DataType::Fp64 => out.extend_from_slice(&f64::from(unit(bits)).to_le_bytes()),
            DataType::Fp16 => out.extend_from_slice(&half::f16::from_f32(unit(bits) * 0.5).to_le_bytes()),
            DataType::Bf16 => out.extend_from_slice(&half::bf16::from_f32(unit(bits) * 0.5).to_le_bytes()),
            // Random 64-bit numbers would be out of range of every embedding table; small numbers
            // seldom are.
            DataType::Int64 | DataType::Uint64 => out.extend_from_slice(&(bits & 0x7f).to_le_bytes()),
            DataType::Int32 | DataType::Uint32 => out.extend_from_slice(&((bits & 0x7f) as u32).to_le_bytes()),
            DataType::Int16 | DataType::Uint16 => out.extend_from_slice(&((bits & 0x7f) as u16).to_le_bytes()),
            DataType::Int8 | DataType::Uint8 => out.push((bits & 0x7f) as u8),
        }
    }
    out.truncate(bytes);
    out
}
