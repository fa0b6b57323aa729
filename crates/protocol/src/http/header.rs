//! The JSON at the start of a body, as serde sees it: names and shapes. Tensor data stays text
//! until the datatype is known, which may come after the data.

use std::borrow::Cow;

use bytes::Bytes;
use downbeat_core::tensor::DataType;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::parameter::TensorParameters;
use super::{number_word, tensor_json};
use crate::infer::{CodecError, InferTensor, Parameter, Parameters, SHARED_MEMORY, check_data, element_count};

/// The JSON of an inference request.
#[derive(Deserialize)]
#[serde(expecting = "an inference request object with `inputs`")]
pub(super) struct RequestHeader<'a> {
    pub id: Option<String>,
    pub parameters: Option<Parameters>,
    /// The parameter of this name. It is kept apart from the others, because most requests have no
    /// others.
    #[serde(skip)]
    pub binary_data_output: Option<Parameter>,
    #[serde(borrow)]
    pub inputs: Vec<TensorHeader<'a>>,
    pub outputs: Option<Vec<OutputHeader>>,
}

/// The JSON of an inference response.
#[derive(Deserialize)]
#[serde(expecting = "an inference response object with `model_name` and `outputs`")]
pub(super) struct ResponseHeader<'a> {
    pub model_name: String,
    pub model_version: Option<String>,
    pub id: Option<String>,
    pub parameters: Option<Parameters>,
    #[serde(borrow)]
    pub outputs: Vec<TensorHeader<'a>>,
}

/// A tensor with its data, or with the place of its data.
#[derive(Deserialize)]
#[serde(expecting = "a tensor object with `name`, `datatype` and `shape`")]
pub(super) struct TensorHeader<'a> {
    pub name: String,
    #[serde(borrow)]
    pub datatype: Cow<'a, str>,
    pub shape: Vec<i64>,
    #[serde(default)]
    pub parameters: TensorParameters,
    #[serde(borrow)]
    pub data: Option<DataText<'a>>,
}

/// The JSON of a tensor's data.
pub(super) struct DataText<'a>(pub &'a [u8]);

impl<'de: 'a, 'a> Deserialize<'de> for DataText<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <&RawValue>::deserialize(deserializer).map(|text| DataText(text.get().as_bytes()))
    }
}

/// An output that the client asks for.
#[derive(Deserialize)]
#[serde(expecting = "an output object with `name`")]
pub(super) struct OutputHeader {
    pub name: String,
    pub parameters: Option<Parameters>,
}

/// The role of a tensor in the model.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// An input has data, or names the place of its data.
    Input,
    /// An output has no data if it is in shared memory.
    Output,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Role::Input => "input",
            Role::Output => "output",
        })
    }
}

/// A body, and the end of its JSON.
pub(super) struct BodyParts {
    body: Bytes,
    json_length: usize,
}

impl BodyParts {
    /// Splits a body.
    pub fn new(body: Bytes, header_length: Option<usize>) -> Result<BodyParts, CodecError> {
        let json_length = header_length.unwrap_or(body.len());
        if json_length > body.len() {
            return Err(CodecError(format!(
                "Inference-Header-Content-Length is {json_length}, but the body has only {} bytes",
                body.len()
            )));
        }
        Ok(BodyParts { body, json_length })
    }

    /// The JSON.
    pub fn json(&self) -> &[u8] {
        self.body.get(..self.json_length).unwrap_or_default()
    }
}

/// The bytes after the JSON, which are handed out in order.
struct Tail<'a> {
    body: &'a Bytes,
    /// The start of these bytes in the body.
    start: usize,
    /// The end of the bytes that were handed out, in the body.
    taken: usize,
}

impl Tail<'_> {
    fn take(&mut self, role: Role, name: &str, size: u64) -> Result<Bytes, CodecError> {
        let left = self.body.len() - self.taken;
        match usize::try_from(size) {
            Ok(size) if size <= left => {
                let start = self.taken;
                self.taken += size;
                Ok(self.body.slice(start..start + size))
            }
            _ => Err(CodecError(format!(
                "{role} '{name}': binary_data_size is {size}, but only {left} bytes are left after the JSON; expected \
                 the tensors' bytes after the JSON, whose length Inference-Header-Content-Length tells"
            ))),
        }
    }

    /// Checks that every byte belongs to a tensor.
    fn finish(self) -> Result<(), CodecError> {
        let left = self.body.len() - self.taken;
        if left > 0 {
            return Err(CodecError(format!(
                "{left} bytes at the end of the body belong to no tensor; expected {} bytes after the JSON, the sum of \
                 binary_data_size, got {}",
                self.taken - self.start,
                self.body.len() - self.start
            )));
        }
        Ok(())
    }
}

impl TensorHeader<'_> {
    /// Finds or converts the data.
    fn read(self, role: Role, tail: &mut Tail<'_>) -> Result<InferTensor, CodecError> {
        let TensorHeader { name, datatype, shape, parameters, data } = self;
        let datatype: DataType = datatype.parse().map_err(|e| CodecError(format!("{role} '{name}': {e}")))?;
        let TensorParameters { binary_data_size, others } = parameters;
        let elsewhere = others.contains_key(SHARED_MEMORY);
        let data = match (data, binary_data_size) {
            (Some(_), Some(_)) => {
                return Err(CodecError(format!(
                    "{role} '{name}' has both `data` and the parameter binary_data_size; expected one of them"
                )));
            }
            (Some(_), None) if elsewhere => {
                return Err(CodecError(format!(
                    "{role} '{name}' has both `data` and the parameter shared_memory_region; expected one of them"
                )));
            }
            (None, Some(size)) if elsewhere && size > 0 => {
                return Err(CodecError(format!(
                    "{role} '{name}' has both binary_data_size and shared_memory_region; expected one of them"
                )));
            }
            (Some(data), None) => {
                let count = element_count(&shape).map_err(|e| CodecError(format!("{role} '{name}': {e}")))?;
                if count.checked_mul(datatype.size().unwrap_or(1)).is_none() {
                    return Err(CodecError(format!("byte size overflow for {role} '{name}': {datatype} {shape:?}")));
                }
                let data = tensor_json::read(data.0, datatype, count)
                    .map_err(|e| CodecError(format!("{role} '{name}': {datatype} {shape:?}: {e}")))?;
                Bytes::from(data)
            }
            (None, _) if elsewhere => Bytes::new(),
            (None, Some(size)) => {
                let data = tail.take(role, &name, size)?;
                check_data(datatype, &shape, &data).map_err(|e| CodecError(format!("{role} '{name}': {e}")))?;
                data
            }
            (None, None) if role == Role::Output => Bytes::new(),
            (None, None) => {
                return Err(CodecError(format!(
                    "{role} '{name}' has no data; expected `data`, or the parameter binary_data_size or \
                     shared_memory_region"
                )));
            }
        };
        Ok(InferTensor { name, datatype, shape, parameters: others, data })
    }
}

/// Finds or converts the data of all tensors of a body.
pub(super) fn tensors(
    headers: Vec<TensorHeader<'_>>,
    role: Role,
    body: &BodyParts,
) -> Result<Vec<InferTensor>, CodecError> {
    let mut tail = Tail { body: &body.body, start: body.json_length, taken: body.json_length };
    let tensors = headers.into_iter().map(|tensor| tensor.read(role, &mut tail)).collect::<Result<_, _>>()?;
    tail.finish()?;
    Ok(tensors)
}

/// Reads the JSON of a body into its header. `what` ("request") is the body's kind in error
/// messages. `rewritten` keeps the text of a body with words for numbers ([`number_word`]).
///
/// # Errors
/// The mistake in the text, and its place.
pub(super) fn read<'a, H: serde::Deserialize<'a>>(
    json: &'a [u8],
    rewritten: &'a mut Option<Vec<u8>>,
    what: &str,
) -> Result<H, CodecError> {
    let parsed = match serde_json::from_slice(json) {
        Err(error) if error.is_syntax() => {
            *rewritten = number_word::words_as_objects(json);
            rewritten.as_deref().map_or(Err(error), serde_json::from_slice)
        }
        parsed => parsed,
    };
    parsed.map_err(|e| {
        let place = place_of::<H>(rewritten.as_deref().unwrap_or(json));
        let words = match rewritten {
            Some(_) if e.is_data() && e.to_string().starts_with("invalid type: map") => {
                "; NaN, Infinity and -Infinity are allowed only in `data` and as parameters"
            }
            _ => "",
        };
        CodecError(format!(
            "the {what} is not the JSON of an inference {what} ({} bytes of JSON): {place}{e}{words}",
            json.len()
        ))
    })
}

/// The place of the value in the JSON that cannot be read as a `T`, as a prefix of the message;
/// empty if the whole text is wrong. For errors only, because it reads the text once more.
fn place_of<'de, T: Deserialize<'de>>(json: &'de [u8]) -> String {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    match serde_path_to_error::deserialize::<_, T>(&mut deserializer) {
        Err(error) if error.inner().is_data() && error.path().iter().len() > 0 => format!("`{}`: ", error.path()),
        _ => String::new(),
    }
}
