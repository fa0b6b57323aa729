//! An inference request and its answer, independent of the wire form.

use std::collections::BTreeMap;

use bytes::Bytes;
use downbeat_core::tensor::DataType;

/// A value in a `parameters` object.
#[derive(Clone, PartialEq, Debug, serde::Serialize)]
#[serde(untagged)]
#[allow(missing_docs, reason = "the variants are the protocol's types")]
pub enum Parameter {
    Bool(bool),
    Int64(i64),
    Uint64(u64),
    Double(f64),
    String(String),
}

/// A `parameters` object.
pub type Parameters = BTreeMap<String, Parameter>;

/// A request for an inference.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct InferRequest {
    /// Model name.
    pub model_name: String,
    /// Version as the client wrote it; empty: the server's choice.
    pub model_version: String,
    /// The id, which the answer repeats.
    pub id: String,
    /// `timeout` (microseconds), `priority` and all other parameters of the client.
    pub parameters: Parameters,
    /// Input tensors, in the client's order.
    pub inputs: Vec<InferTensor>,
    /// Outputs the client asked for; empty: all.
    pub outputs: Vec<RequestedOutput>,
}

/// An input or output tensor.
#[derive(Clone, PartialEq, Debug)]
pub struct InferTensor {
    /// Name.
    pub name: String,
    /// Element type.
    pub datatype: DataType,
    /// Sizes, the batch dimension included. Negative sizes are kept for the check that names them.
    pub shape: Vec<i64>,
    /// `shared_memory_region` and others.
    pub parameters: Parameters,
    /// The elements in the protocol's binary form: little-endian, row-major, each `BYTES` element
    /// preceded by its length as a little-endian `u32`. Empty while the data is in shared memory.
    pub data: Bytes,
}

impl InferTensor {
    /// Whether the tensor's data is in a shared memory region.
    pub fn is_elsewhere(&self) -> bool {
        self.parameters.contains_key(SHARED_MEMORY)
    }
}

/// The parameter of a tensor whose data is not in the message.
pub(crate) const SHARED_MEMORY: &str = "shared_memory_region";

/// An output that the client asked for.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RequestedOutput {
    /// Name.
    pub name: String,
    /// `classification`, `binary_data`, `shared_memory_region` and others.
    pub parameters: Parameters,
}

/// The answer to an [`InferRequest`].
#[derive(Clone, PartialEq, Debug, Default)]
pub struct InferResponse {
    /// Model name.
    pub model_name: String,
    /// The version that answered.
    pub model_version: String,
    /// The request's id.
    pub id: String,
    /// Parameters of the answer.
    pub parameters: Parameters,
    /// Output tensors.
    pub outputs: Vec<InferTensor>,
}

/// An error in the protocol. The message names the place, the found and the expected content.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct CodecError(pub(crate) String);

/// The number of elements of a tensor of this shape; 1 for no dimensions.
///
/// # Errors
/// If a size is negative, or the product does not fit.
pub fn element_count(shape: &[i64]) -> Result<usize, String> {
    shape.iter().try_fold(1_usize, |count, &size| {
        let size = usize::try_from(size).map_err(|_| format!("shape {shape:?} has the negative size {size}"))?;
        count.checked_mul(size).ok_or_else(|| {
            format!("shape {shape:?} causes total element count to exceed maximum size of {}", usize::MAX)
        })
    })
}

/// Appends a number in the protocol's binary form: the nearest that the datatype can hold. For
/// integers it is rounded.
pub fn push_number(data: &mut Vec<u8>, datatype: DataType, value: f64) {
    let rounded = value.round();
    match datatype {
        DataType::Bool => data.push(u8::from(value != 0.0)),
        DataType::Uint8 => data.push(rounded as u8),
        DataType::Int8 => data.extend((rounded as i8).to_le_bytes()),
        DataType::Uint16 => data.extend((rounded as u16).to_le_bytes()),
        DataType::Int16 => data.extend((rounded as i16).to_le_bytes()),
        DataType::Uint32 => data.extend((rounded as u32).to_le_bytes()),
        DataType::Int32 => data.extend((rounded as i32).to_le_bytes()),
        DataType::Uint64 => data.extend((rounded as u64).to_le_bytes()),
        DataType::Int64 => data.extend((rounded as i64).to_le_bytes()),
        DataType::Fp16 => data.extend(half::f16::from_f64(value).to_le_bytes()),
        DataType::Bf16 => data.extend(half::bf16::from_f64(value).to_le_bytes()),
        DataType::Fp32 => data.extend((value as f32).to_le_bytes()),
        DataType::Fp64 => data.extend(value.to_le_bytes()),
        DataType::Bytes => {
            let text = value.to_string();
            data.extend((text.len() as u32).to_le_bytes());
            data.extend(text.bytes());
        }
    }
}

/// Checks that `data`, in the protocol's binary form, is a tensor of this datatype and shape.
///
/// # Errors
/// If the data is too short, too long or cut off. The message has the expected and the actual size.
pub fn check_data(datatype: DataType, shape: &[i64], data: &[u8]) -> Result<(), String> {
    let count = element_count(shape)?;
    let Some(size) = datatype.size() else {
        return check_strings(shape, count, data);
    };
    if count.checked_mul(size) == Some(data.len()) {
        return Ok(());
    }
    let expected = count as u128 * size as u128;
    Err(format!("{datatype} of shape {shape:?} is {expected} bytes, got {} bytes", data.len()))
}

fn check_strings(shape: &[i64], count: usize, data: &[u8]) -> Result<(), String> {
    let mut rest = data;
    let mut found = 0_usize;
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length);
        rest = usize::try_from(length).ok().and_then(|length| after.get(length..)).ok_or_else(|| {
            format!(
                "BYTES element {found} has a length of {length} bytes, but only {} are left; expected each element \
                 after its length as a little-endian 32-bit number",
                after.len()
            )
        })?;
        found += 1;
    }
    if !rest.is_empty() {
        return Err(format!("{} bytes are left after BYTES element {found}; expected a length of 4 bytes", rest.len()));
    }
    if found != count {
        return Err(format!("BYTES of shape {shape:?} has {count} elements, got {found}"));
    }
    Ok(())
}
