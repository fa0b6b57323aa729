//! The protocol's gRPC messages for an inference, read into and written from [`InferRequest`] and
//! [`InferResponse`].
//!
//! Tensors are written raw (`raw_input_contents`, `raw_output_contents`) and read raw or typed
//! (`contents`). Raw tensors are not copied: they are slices of the message they came in.

mod peek;

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use downbeat_core::tensor::DataType;

use crate::infer::{CodecError, SHARED_MEMORY, check_data, element_count};
use crate::inference::infer_parameter::ParameterChoice;
use crate::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use crate::inference::model_infer_response::InferOutputTensor;
use crate::inference::{InferParameter, InferTensorContents, ModelInferRequest, ModelInferResponse};
use crate::{InferRequest, InferResponse, InferTensor, Parameter, Parameters, RequestedOutput};

pub use peek::{Peek, decoded_bytes, model_name};

/// Reads a request, on the server.
///
/// # Errors
/// An unknown datatype, a parameter without a value, or raw and typed contents together. Contents
/// that are missing, left over, or of another type or size than datatype and shape demand.
pub fn request_from_message(message: ModelInferRequest) -> Result<InferRequest, CodecError> {
    let mut raw = RawContents::new(message.raw_input_contents, "input", &message.model_name);
    let mut inputs = Vec::with_capacity(message.inputs.len());
    for input in message.inputs {
        let InferInputTensor { name, datatype, shape, parameters, contents } = input;
        inputs.push(raw.tensor(name, &datatype, shape, parameters, contents)?);
    }
    raw.finish(inputs.len())?;
    let mut outputs = Vec::with_capacity(message.outputs.len());
    for output in message.outputs {
        let parameters = read_parameters(output.parameters, &|| format!("output '{}'", output.name))?;
        outputs.push(RequestedOutput { name: output.name, parameters });
    }
    Ok(InferRequest {
        model_name: message.model_name,
        model_version: message.model_version,
        id: message.id,
        parameters: read_parameters(message.parameters, &|| "the request".into())?,
        inputs,
        outputs,
    })
}

/// Reads an answer, in a client.
///
/// # Errors
/// As [`request_from_message`].
pub fn response_from_message(message: ModelInferResponse) -> Result<InferResponse, CodecError> {
    // For data in shared memory, some servers leave an empty raw tensor and others none.
    let aligned = message.raw_output_contents.len() == message.outputs.len();
    let mut raw = RawContents::new(message.raw_output_contents, "output", &message.model_name);
    let mut outputs = Vec::with_capacity(message.outputs.len());
    for output in message.outputs {
        let InferOutputTensor { name, datatype, shape, parameters, contents } = output;
        if aligned && parameters.contains_key(SHARED_MEMORY) {
            raw.rest.next();
        }
        outputs.push(raw.tensor(name, &datatype, shape, parameters, contents)?);
    }
    raw.finish(outputs.len())?;
    Ok(InferResponse {
        model_name: message.model_name,
        model_version: message.model_version,
        id: message.id,
        parameters: read_parameters(message.parameters, &|| "the answer".into())?,
        outputs,
    })
}

/// Writes a request, in a client. Inputs in shared memory have no raw tensor.
pub fn request_to_message(request: InferRequest) -> ModelInferRequest {
    let mut raw_input_contents = Vec::with_capacity(request.inputs.len());
    let inputs = request
        .inputs
        .into_iter()
        .map(|input| {
            if !input.is_elsewhere() {
                raw_input_contents.push(input.data);
            }
            InferInputTensor {
                name: input.name,
                datatype: input.datatype.name().to_owned(),
                shape: input.shape,
                parameters: write_parameters(input.parameters),
                contents: None,
            }
        })
        .collect();
    let outputs = request.outputs.into_iter().map(|output| InferRequestedOutputTensor {
        name: output.name,
        parameters: write_parameters(output.parameters),
    });
    ModelInferRequest {
        model_name: request.model_name,
        model_version: request.model_version,
        id: request.id,
        parameters: write_parameters(request.parameters),
        inputs,
        outputs: outputs.collect(),
        raw_input_contents,
    }
}

/// Writes an answer, on the server. Each output has a raw tensor, so that clients find a tensor by
/// its output's place, as in Triton's answers. The raw tensor is empty if the data is in shared
/// memory.
pub fn response_to_message(response: InferResponse) -> ModelInferResponse {
    let mut raw_output_contents = Vec::with_capacity(response.outputs.len());
    let outputs = response
        .outputs
        .into_iter()
        .map(|output| {
            raw_output_contents.push(output.data);
            InferOutputTensor {
                name: output.name,
                datatype: output.datatype.name().to_owned(),
                shape: output.shape,
                parameters: write_parameters(output.parameters),
                contents: None,
            }
        })
        .collect();
    ModelInferResponse {
        model_name: response.model_name,
        model_version: response.model_version,
        id: response.id,
        parameters: write_parameters(response.parameters),
        outputs,
        raw_output_contents,
    }
}

fn read_parameters(
    parameters: BTreeMap<String, InferParameter>,
    whose: &dyn Fn() -> String,
) -> Result<Parameters, CodecError> {
    let mut read = Parameters::new();
    for (name, parameter) in parameters {
        let value = match parameter.parameter_choice {
            Some(ParameterChoice::BoolParam(value)) => Parameter::Bool(value),
            Some(ParameterChoice::Int64Param(value)) => Parameter::Int64(value),
            Some(ParameterChoice::Uint64Param(value)) => Parameter::Uint64(value),
            Some(ParameterChoice::DoubleParam(value)) => Parameter::Double(value),
            Some(ParameterChoice::StringParam(value)) => Parameter::String(value),
            None => {
                return Err(CodecError(format!("parameter '{name}' of {} has no value; expected one", whose())));
            }
        };
        read.insert(name, value);
    }
    Ok(read)
}

fn write_parameters(parameters: Parameters) -> BTreeMap<String, InferParameter> {
    let write = |(name, value)| {
        let choice = match value {
            Parameter::Bool(value) => ParameterChoice::BoolParam(value),
            Parameter::Int64(value) => ParameterChoice::Int64Param(value),
            Parameter::Uint64(value) => ParameterChoice::Uint64Param(value),
            Parameter::Double(value) => ParameterChoice::DoubleParam(value),
            Parameter::String(value) => ParameterChoice::StringParam(value),
        };
        (name, InferParameter { parameter_choice: Some(choice) })
    };
    parameters.into_iter().map(write).collect()
}

/// The raw tensors of a message, handed out in the order of its tensors.
struct RawContents<'a> {
    count: usize,
    rest: std::vec::IntoIter<Bytes>,
    /// `input` or `output`, for messages.
    kind: &'static str,
    /// The name of the model, for messages.
    model: &'a str,
}

impl<'a> RawContents<'a> {
    fn new(raw: Vec<Bytes>, kind: &'static str, model: &'a str) -> Self {
        RawContents { count: raw.len(), rest: raw.into_iter(), kind, model }
    }

    fn tensor(
        &mut self,
        name: String,
        datatype: &str,
        shape: Vec<i64>,
        parameters: BTreeMap<String, InferParameter>,
        contents: Option<InferTensorContents>,
    ) -> Result<InferTensor, CodecError> {
        let kind = self.kind;
        let error = |what: String| CodecError(format!("{kind} '{name}': {what}"));
        let datatype: DataType = datatype.parse().map_err(|unknown| error(format!("{unknown}")))?;
        let parameters = read_parameters(parameters, &|| format!("{kind} '{name}'"))?;
        if parameters.contains_key(SHARED_MEMORY) {
            return match contents {
                Some(_) => Err(error(format!("has both 'contents' and '{SHARED_MEMORY}'; expected one of them"))),
                None => Ok(InferTensor { name, datatype, shape, parameters, data: Bytes::new() }),
            };
        }
        let data = match contents {
            Some(_) if self.count > 0 => {
                // The words are Triton's.
                return Err(error(format!(
                    "contents field must not be specified when using raw_{kind}_contents for '{name}' for model \
                     '{model}'; expected either for all {kind}s",
                    model = self.model
                )));
            }
            Some(contents) => typed_data(datatype, &shape, contents).map_err(error)?,
            None if self.count == 0 && element_count(&shape) == Ok(0) => Bytes::new(),
            None => {
                let data = self.rest.next().ok_or_else(|| {
                    error(match self.count {
                        0 => format!("has no data; expected 'contents', 'raw_{kind}_contents' or '{SHARED_MEMORY}'"),
                        count => format!("has no data: 'raw_{kind}_contents' has only {count} tensors"),
                    })
                })?;
                check_data(datatype, &shape, &data).map_err(error)?;
                data
            }
        };
        Ok(InferTensor { name, datatype, shape, parameters, data })
    }

    fn finish(mut self, tensors: usize) -> Result<(), CodecError> {
        match self.rest.next() {
            None => Ok(()),
            Some(_) => Err(CodecError(format!(
                "'raw_{kind}_contents' has {} tensors, expected one for each of the {tensors} {kind}s that is not in \
                 shared memory",
                self.count,
                kind = self.kind
            ))),
        }
    }
}

/// Converts typed contents to the binary form.
fn typed_data(datatype: DataType, shape: &[i64], contents: InferTensorContents) -> Result<Bytes, String> {
    let field = match datatype {
        DataType::Bool => "bool_contents",
        DataType::Int8 | DataType::Int16 | DataType::Int32 => "int_contents",
        DataType::Int64 => "int64_contents",
        DataType::Uint8 | DataType::Uint16 | DataType::Uint32 => "uint_contents",
        DataType::Uint64 => "uint64_contents",
        DataType::Fp32 => "fp32_contents",
        DataType::Fp64 => "fp64_contents",
        DataType::Bytes => "bytes_contents",
        DataType::Fp16 | DataType::Bf16 => {
            return Err(format!("{datatype} has no typed contents; expected 'raw_input_contents'"));
        }
    };
    let filled = [
        ("bool_contents", contents.bool_contents.len()),
        ("int_contents", contents.int_contents.len()),
        ("int64_contents", contents.int64_contents.len()),
        ("uint_contents", contents.uint_contents.len()),
        ("uint64_contents", contents.uint64_contents.len()),
        ("fp32_contents", contents.fp32_contents.len()),
        ("fp64_contents", contents.fp64_contents.len()),
        ("bytes_contents", contents.bytes_contents.len()),
    ];
    if let Some((other, count)) = filled.iter().find(|(name, count)| *name != field && *count > 0) {
        return Err(format!("{datatype} has {count} elements in '{other}'; expected them in '{field}'"));
    }
    let count: usize = filled.iter().map(|(_, count)| count).sum();
    let expected = element_count(shape)?;
    if count != expected {
        return Err(format!("shape {shape:?} has {expected} elements, got {count} in '{field}'"));
    }
    match datatype {
        DataType::Bool => Ok(contents.bool_contents.iter().map(|value| u8::from(*value)).collect()),
        DataType::Int8 => narrow(datatype, &contents.int_contents, i8::to_le_bytes),
        DataType::Int16 => narrow(datatype, &contents.int_contents, i16::to_le_bytes),
        DataType::Int32 => Ok(join(&contents.int_contents, i32::to_le_bytes)),
        DataType::Int64 => Ok(join(&contents.int64_contents, i64::to_le_bytes)),
        DataType::Uint8 => narrow(datatype, &contents.uint_contents, u8::to_le_bytes),
        DataType::Uint16 => narrow(datatype, &contents.uint_contents, u16::to_le_bytes),
        DataType::Uint32 => Ok(join(&contents.uint_contents, u32::to_le_bytes)),
        DataType::Uint64 => Ok(join(&contents.uint64_contents, u64::to_le_bytes)),
        DataType::Fp32 => Ok(join(&contents.fp32_contents, f32::to_le_bytes)),
        DataType::Fp64 => Ok(join(&contents.fp64_contents, f64::to_le_bytes)),
        DataType::Bytes => {
            let total = contents.bytes_contents.iter().map(|element| 4 + element.len()).sum();
            let mut data = BytesMut::with_capacity(total);
            for (index, element) in contents.bytes_contents.iter().enumerate() {
                let length = u32::try_from(element.len())
                    .map_err(|_| format!("element {index} has {} bytes, expected fewer than 2^32", element.len()))?;
                data.put_u32_le(length);
                data.put_slice(element);
            }
            Ok(data.freeze())
        }
        // Handled above.
        DataType::Fp16 | DataType::Bf16 => Ok(Bytes::new()),
    }
}

fn join<T: Copy, const N: usize>(values: &[T], to_bytes: impl Fn(T) -> [u8; N]) -> Bytes {
    let mut data = Vec::with_capacity(values.len() * N);
    for value in values {
        data.extend_from_slice(&to_bytes(*value));
    }
    data.into()
}

fn narrow<W, T, const N: usize>(
    datatype: DataType,
    values: &[W],
    to_bytes: impl Fn(T) -> [u8; N],
) -> Result<Bytes, String>
where
    W: Copy + std::fmt::Display,
    T: TryFrom<W>,
{
    let mut data = Vec::with_capacity(values.len() * N);
    for (index, value) in values.iter().enumerate() {
        let narrow =
            T::try_from(*value).map_err(|_| format!("element {index} is {value}, which {datatype} cannot hold"))?;
        data.extend_from_slice(&to_bytes(narrow));
    }
    Ok(data.into())
}

#[cfg(test)]
mod tests;
