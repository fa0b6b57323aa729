//! The protocol's gRPC messages for an inference, read into and written from [`InferRequest`] and [`InferResponse`].
//!
//! Tensors are written raw (`raw_input_contents`, `raw_output_contents`) and read raw or typed (`contents`). Raw
//! tensors are not copied: they are slices of the message they came in.

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use downbeat_core::tensor::DataType;
use prost::encoding::decode_varint;

use crate::infer::{check_data, element_count};
use crate::inference::infer_parameter::ParameterChoice;
use crate::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use crate::inference::model_infer_response::InferOutputTensor;
use crate::inference::{InferParameter, InferTensorContents, ModelInferRequest, ModelInferResponse};
use crate::{InferInput, InferOutput, InferRequest, InferResponse, Parameter, Parameters, RequestedOutput};

/// The parameter of a tensor whose data is not in the message.
const SHARED_MEMORY: &str = "shared_memory_region";

/// A message that is not an inference request or answer. The text names the tensor, what it has and what is expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MessageError(String);

/// Reads a request, on the server.
///
/// # Errors
/// An unknown datatype, a parameter without a value, raw and typed contents together, or contents that are missing,
/// left over, of another type or of another size than datatype and shape say.
pub fn request_from_message(message: ModelInferRequest) -> Result<InferRequest, MessageError> {
    let mut raw = RawContents::new(message.raw_input_contents, "input");
    let mut inputs = Vec::with_capacity(message.inputs.len());
    for input in message.inputs {
        let InferInputTensor { name, datatype, shape, parameters, contents } = input;
        let (datatype, parameters, data) = raw.tensor(&name, &datatype, &shape, parameters, contents)?;
        inputs.push(InferInput { name, datatype, shape, parameters, data });
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
pub fn response_from_message(message: ModelInferResponse) -> Result<InferResponse, MessageError> {
    // Some servers leave an empty raw tensor for what is in shared memory, others none.
    let aligned = message.raw_output_contents.len() == message.outputs.len();
    let mut raw = RawContents::new(message.raw_output_contents, "output");
    let mut outputs = Vec::with_capacity(message.outputs.len());
    for output in message.outputs {
        let InferOutputTensor { name, datatype, shape, parameters, contents } = output;
        if aligned && parameters.contains_key(SHARED_MEMORY) {
            raw.skip();
        }
        let (datatype, parameters, data) = raw.tensor(&name, &datatype, &shape, parameters, contents)?;
        outputs.push(InferOutput { name, datatype, shape, parameters, data });
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
            if !input.parameters.contains_key(SHARED_MEMORY) {
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

/// Writes an answer, on the server. Each output has a raw tensor, an empty one if its data is in shared memory, so
/// that clients find a tensor by its output's place, as in Triton's answers.
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

/// What the first bytes of a `ModelInferRequest` tell of its model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peek<'a> {
    /// Its name.
    Name(&'a str),
    /// More bytes are needed.
    Short,
    /// It is not at the start, where every client writes it, or no name.
    Unknown,
}

/// Longest name that is waited for, bytes.
const MOST_NAME: usize = 1024;

/// The model's name, if a `ModelInferRequest` starts with it.
pub fn model_name(start: &[u8]) -> Peek<'_> {
    const KEY: u8 = 1 << 3 | WIRE_BYTES as u8;
    let (Some(&key), Some(mut rest)) = (start.first(), start.get(1..)) else { return Peek::Short };
    if key != KEY {
        return Peek::Unknown;
    }
    let Ok(length) = decode_varint(&mut rest) else {
        return if start.len() < 11 { Peek::Short } else { Peek::Unknown };
    };
    let Some(length) = usize::try_from(length).ok().filter(|length| *length <= MOST_NAME) else { return Peek::Unknown };
    match rest.get(..length).map(std::str::from_utf8) {
        None => Peek::Short,
        Some(Ok(name)) => Peek::Name(name),
        Some(Err(_)) => Peek::Unknown,
    }
}

const WIRE_BYTES: u64 = 2;
/// An upper bound of the memory of one tensor, requested output or parameter without what it points to, in a list that
/// has doubled.
const ENTRY_BYTES: u64 = 640;
/// Of a raw tensor's place in its message.
const SLICE_BYTES: u64 = 64;

/// An upper bound of the memory that a `ModelInferRequest` takes once it is decoded and its tensors are brought into form,
/// besides the message, bytes. A message of nothing but empty tensors grows a hundredfold. One that is cut off or wrong is
/// bounded as far as it can be read.
pub fn decoded_bytes(message: &[u8]) -> u64 {
    fields(message)
        .map(|(number, payload)| match number {
            4 | 6 => ENTRY_BYTES.saturating_add(nested_bytes(payload)),
            5 => fields(payload)
                .map(|(number, payload)| match number {
                    5 => contents_bytes(payload),
                    _ => nested_bytes(payload),
                })
                .fold(ENTRY_BYTES, u64::saturating_add),
            7 => SLICE_BYTES,
            _ => payload.len() as u64,
        })
        .fold(0, u64::saturating_add)
}

/// Of names, shapes and parameters.
fn nested_bytes(payload: &[u8]) -> u64 {
    (payload.len() as u64).saturating_mul(32)
}

/// Of numbers that are not raw: as they are decoded, in lists that have doubled, and as tensor.
fn contents_bytes(payload: &[u8]) -> u64 {
    let bytes = |(number, payload): (u64, &[u8])| {
        let length = payload.len() as u64;
        match number {
            1 | 6 | 7 => 4 * (1 + length),
            2 | 4 => 16 * (1 + length),
            8 => 2 * SLICE_BYTES + 4 * length,
            _ => 32 * (1 + length),
        }
    };
    fields(payload).map(bytes).fold(0, u64::saturating_add)
}

/// The fields of a message with what they hold, as far as it can be read.
fn fields(mut message: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    std::iter::from_fn(move || {
        let key = decode_varint(&mut message).ok()?;
        let length = match key & 7 {
            0 => message.iter().position(|byte| byte & 0x80 == 0)? + 1,
            1 => 8,
            WIRE_BYTES => usize::try_from(decode_varint(&mut message).ok()?).ok()?,
            5 => 4,
            _ => return None,
        };
        let (payload, rest) = message.split_at_checked(length)?;
        message = rest;
        Some((key >> 3, payload))
    })
}

fn read_parameters(
    parameters: BTreeMap<String, InferParameter>,
    whose: &dyn Fn() -> String,
) -> Result<Parameters, MessageError> {
    let mut read = Parameters::new();
    for (name, parameter) in parameters {
        let value = match parameter.parameter_choice {
            Some(ParameterChoice::BoolParam(value)) => Parameter::Bool(value),
            Some(ParameterChoice::Int64Param(value)) => Parameter::Int64(value),
            Some(ParameterChoice::Uint64Param(value)) => Parameter::Uint64(value),
            Some(ParameterChoice::DoubleParam(value)) => Parameter::Double(value),
            Some(ParameterChoice::StringParam(value)) => Parameter::String(value),
            None => {
                return Err(MessageError(format!("parameter '{name}' of {} has no value; expected one", whose())));
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

/// The raw tensors of a message, given out in the order of its tensors.
struct RawContents {
    count: usize,
    rest: std::vec::IntoIter<Bytes>,
    /// `input` or `output`, for messages.
    kind: &'static str,
}

impl RawContents {
    fn new(raw: Vec<Bytes>, kind: &'static str) -> Self {
        RawContents { count: raw.len(), rest: raw.into_iter(), kind }
    }

    fn skip(&mut self) {
        self.rest.next();
    }

    fn tensor(
        &mut self,
        name: &str,
        datatype: &str,
        shape: &[i64],
        parameters: BTreeMap<String, InferParameter>,
        contents: Option<InferTensorContents>,
    ) -> Result<(DataType, Parameters, Bytes), MessageError> {
        let kind = self.kind;
        let error = |what: String| MessageError(format!("{kind} '{name}': {what}"));
        let datatype: DataType = datatype.parse().map_err(|unknown| error(format!("{unknown}")))?;
        let parameters = read_parameters(parameters, &|| format!("{kind} '{name}'"))?;
        if parameters.contains_key(SHARED_MEMORY) {
            return match contents {
                Some(_) => Err(error(format!("has both 'contents' and '{SHARED_MEMORY}'; expected one of them"))),
                None => Ok((datatype, parameters, Bytes::new())),
            };
        }
        let data = match contents {
            Some(_) if self.count > 0 => {
                return Err(error(format!(
                    "has 'contents' in a message with 'raw_{kind}_contents'; expected either for all {kind}s"
                )));
            }
            Some(contents) => typed_data(datatype, shape, contents).map_err(error)?,
            None if self.count == 0 && element_count(shape) == Ok(0) => Bytes::new(),
            None => {
                let data = self.rest.next().ok_or_else(|| {
                    error(match self.count {
                        0 => format!("has no data; expected 'contents', 'raw_{kind}_contents' or '{SHARED_MEMORY}'"),
                        count => format!("has no data: 'raw_{kind}_contents' has only {count} tensors"),
                    })
                })?;
                check_data(datatype, shape, &data).map_err(error)?;
                data
            }
        };
        Ok((datatype, parameters, data))
    }

    fn finish(mut self, tensors: usize) -> Result<(), MessageError> {
        match self.rest.next() {
            None => Ok(()),
            Some(_) => Err(MessageError(format!(
                "'raw_{kind}_contents' has {} tensors, expected one for each of the {tensors} {kind}s that is not in \
                 shared memory",
                self.count,
                kind = self.kind
            ))),
        }
    }
}

/// Brings typed contents into the binary form.
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
        // Answered above.
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
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    fn message(inputs: Vec<InferInputTensor>, raw: Vec<Bytes>) -> ModelInferRequest {
        ModelInferRequest { model_name: "m".into(), inputs, raw_input_contents: raw, ..Default::default() }
    }

    fn input(datatype: &str, shape: &[i64], contents: Option<InferTensorContents>) -> InferInputTensor {
        InferInputTensor {
            name: "x".into(),
            datatype: datatype.into(),
            shape: shape.to_vec(),
            contents,
            ..Default::default()
        }
    }

    #[test]
    fn the_model_is_told_by_the_first_bytes() {
        let bytes = message(vec![], vec![]).encode_to_vec();
        assert_eq!(bytes, b"\x0a\x01m");
        assert_eq!(model_name(&bytes), Peek::Name("m"));
        assert_eq!(model_name(b"\x0a\x01m\x12\x01"), Peek::Name("m"));
        for short in [&b""[..], b"\x0a", b"\x0a\x80", b"\x0a\x05abcd"] {
            assert_eq!(model_name(short), Peek::Short, "{short:?}");
        }
        for other in [&b"\x12\x011"[..], b"\x0a\xff\xff\xff\x7fx", b"\x0a\x01\xff", &[0xff; 20]] {
            assert_eq!(model_name(other), Peek::Unknown, "{other:?}");
        }
    }

    #[test]
    fn what_a_message_becomes_is_bounded_before_it_is_read() {
        let empty_tensors = [0x2a, 0].repeat(1000);
        assert!(decoded_bytes(&empty_tensors) >= 1000 * 2 * size_of::<InferInputTensor>() as u64);
        let empty_raw = [0x3a, 0].repeat(1000);
        assert!(decoded_bytes(&empty_raw) >= 1000 * 2 * size_of::<Bytes>() as u64);
        // A large raw tensor is a slice of its message; numbers are converted.
        let raw = message(vec![input("UINT8", &[1_000_000], None)], vec![vec![1; 1_000_000].into()]);
        assert!(decoded_bytes(&raw.encode_to_vec()) < 10_000);
        let contents = InferTensorContents { int64_contents: vec![1; 1_000_000], ..Default::default() };
        let typed = message(vec![input("INT64", &[1_000_000], Some(contents))], vec![]);
        assert!(decoded_bytes(&typed.encode_to_vec()) >= 24_000_000);
        let strings = InferTensorContents { bytes_contents: vec![Bytes::new(); 1000], ..Default::default() };
        let typed = message(vec![input("BYTES", &[1000], Some(strings))], vec![]);
        assert!(decoded_bytes(&typed.encode_to_vec()) >= 1000 * (2 * size_of::<Bytes>() as u64 + 4));
    }

    fn typed(datatype: &str, contents: InferTensorContents) -> Vec<u8> {
        let message = message(vec![input(datatype, &[2], Some(contents))], vec![]);
        request_from_message(message).unwrap().inputs[0].data.to_vec()
    }

    fn error(message: ModelInferRequest) -> String {
        request_from_message(message).unwrap_err().to_string()
    }

    #[test]
    fn typed_contents_of_every_datatype_are_read() {
        let none = InferTensorContents::default;
        let ints = || InferTensorContents { int_contents: vec![-2, 3], ..none() };
        let uints = || InferTensorContents { uint_contents: vec![2, 255], ..none() };
        assert_eq!(typed("BOOL", InferTensorContents { bool_contents: vec![true, false], ..none() }), [1, 0]);
        assert_eq!(typed("INT8", ints()), [0xfe, 3]);
        assert_eq!(typed("INT16", ints()), [0xfe, 0xff, 3, 0]);
        assert_eq!(typed("INT32", ints()), [0xfe, 0xff, 0xff, 0xff, 3, 0, 0, 0]);
        let longs = InferTensorContents { int64_contents: vec![-2, 3], ..none() };
        assert_eq!(typed("INT64", longs), [(-2_i64).to_le_bytes(), 3_i64.to_le_bytes()].concat());
        assert_eq!(typed("UINT8", uints()), [2, 255]);
        assert_eq!(typed("UINT16", uints()), [2, 0, 255, 0]);
        assert_eq!(typed("UINT32", uints()), [2, 0, 0, 0, 255, 0, 0, 0]);
        let longs = InferTensorContents { uint64_contents: vec![u64::MAX, 1], ..none() };
        assert_eq!(typed("UINT64", longs), [u64::MAX.to_le_bytes(), 1_u64.to_le_bytes()].concat());
        let floats = InferTensorContents { fp32_contents: vec![1.5, -0.0], ..none() };
        assert_eq!(typed("FP32", floats), [1.5_f32.to_le_bytes(), (-0.0_f32).to_le_bytes()].concat());
        let floats = InferTensorContents { fp64_contents: vec![1.5, f64::INFINITY], ..none() };
        assert_eq!(typed("FP64", floats), [1.5_f64.to_le_bytes(), f64::INFINITY.to_le_bytes()].concat());
        let strings = InferTensorContents { bytes_contents: vec!["ab".into(), Bytes::new()], ..none() };
        assert_eq!(typed("BYTES", strings), [2, 0, 0, 0, b'a', b'b', 0, 0, 0, 0]);
    }

    #[test]
    fn wrong_contents_are_named() {
        let ints = |values: &[i32]| InferTensorContents { int_contents: values.to_vec(), ..Default::default() };
        let uints = |values: &[u32]| InferTensorContents { uint_contents: values.to_vec(), ..Default::default() };
        let cases = [
            (message(vec![input("INT32", &[3], Some(ints(&[1, 2])))], vec![]), "shape [3] has 3 elements, got 2"),
            (
                message(vec![input("FP32", &[2], Some(ints(&[1, 2])))], vec![]),
                "FP32 has 2 elements in 'int_contents'; expected them in 'fp32_contents'",
            ),
            (
                message(vec![input("INT8", &[2], Some(ints(&[1, 128])))], vec![]),
                "element 1 is 128, which INT8 cannot hold",
            ),
            (
                message(vec![input("UINT16", &[1], Some(uints(&[65_536])))], vec![]),
                "element 0 is 65536, which UINT16 cannot hold",
            ),
            (message(vec![input("FP16", &[1], Some(ints(&[1])))], vec![]), "FP16 has no typed contents"),
            (message(vec![input("BF16", &[1], Some(ints(&[1])))], vec![]), "BF16 has no typed contents"),
            (message(vec![input("FLOAT", &[1], None)], vec![vec![0; 4].into()]), "unknown datatype 'FLOAT'"),
            (message(vec![input("INT32", &[2], None)], vec![]), "has no data; expected 'contents'"),
            (message(vec![input("INT32", &[2], None)], vec![vec![0; 7].into()]), "is 8 bytes, got 7 bytes"),
            (message(vec![input("INT32", &[-1], Some(ints(&[])))], vec![]), "negative size -1"),
            (
                message(vec![input("INT32", &[2], Some(ints(&[1, 2])))], vec![vec![0; 8].into()]),
                "has 'contents' in a message with 'raw_input_contents'",
            ),
        ];
        for (message, expected) in cases {
            let error = error(message);
            assert!(error.starts_with("input 'x': ") && error.contains(expected), "{error} / {expected}");
        }
    }

    #[test]
    fn raw_tensors_are_counted() {
        let four = || Bytes::from_static(&[0; 4]);
        let two = message(vec![input("INT32", &[1], None), input("INT32", &[1], None)], vec![four()]);
        assert_eq!(error(two), "input 'x': has no data: 'raw_input_contents' has only 1 tensors");
        let one = message(vec![input("INT32", &[1], None)], vec![four(), four()]);
        assert!(error(one).starts_with("'raw_input_contents' has 2 tensors, expected one for each of the 1 inputs"));
    }

    #[test]
    fn a_parameter_needs_a_value() {
        let mut message = message(vec![], vec![]);
        message.parameters.insert("priority".into(), InferParameter { parameter_choice: None });
        assert_eq!(error(message), "parameter 'priority' of the request has no value; expected one");
    }

    #[test]
    fn raw_tensors_are_not_copied() {
        let data = Bytes::from(vec![7; 4096]);
        let message = message(vec![input("UINT8", &[4096], None)], vec![data.clone()]);
        let request = request_from_message(message).unwrap();
        assert_eq!(request.inputs[0].data.as_ptr(), data.as_ptr());
        let message = request_to_message(request);
        assert_eq!(message.raw_input_contents[0].as_ptr(), data.as_ptr());
    }

    #[test]
    fn an_input_in_shared_memory_has_no_raw_tensor() {
        let mut shared = input("INT32", &[1], None);
        let region = InferParameter { parameter_choice: Some(ParameterChoice::StringParam("r".into())) };
        shared.parameters.insert(SHARED_MEMORY.into(), region);
        let raw = Bytes::from_static(&[1, 0, 0, 0]);
        let message = message(vec![shared.clone(), input("INT32", &[1], None)], vec![raw.clone()]);
        let request = request_from_message(message.clone()).unwrap();
        assert_eq!(request.inputs[0].data, Bytes::new());
        assert_eq!(request.inputs[1].data, raw);
        assert_eq!(request_to_message(request), message);
        shared.contents = Some(InferTensorContents::default());
        assert!(error(super::tests::message(vec![shared], vec![])).contains("has both 'contents'"));
    }

    #[test]
    fn an_output_in_shared_memory_may_have_an_empty_raw_tensor_or_none() {
        let region = InferParameter { parameter_choice: Some(ParameterChoice::StringParam("r".into())) };
        let output = |name: &str, shared: bool| InferOutputTensor {
            name: name.into(),
            datatype: "INT32".into(),
            shape: vec![1],
            parameters: shared.then(|| (SHARED_MEMORY.to_owned(), region.clone())).into_iter().collect(),
            contents: None,
        };
        let raw = Bytes::from_static(&[1, 0, 0, 0]);
        for raws in [vec![Bytes::new(), raw.clone()], vec![raw.clone()]] {
            let outputs = vec![output("a", true), output("b", false)];
            let message = ModelInferResponse { outputs, raw_output_contents: raws, ..Default::default() };
            let response = response_from_message(message).unwrap();
            assert_eq!(response.outputs[0].data, Bytes::new());
            assert_eq!(response.outputs[1].data, raw);
        }
    }

    fn parameters() -> impl Strategy<Value = Parameters> {
        let value = prop_oneof![
            any::<bool>().prop_map(Parameter::Bool),
            any::<i64>().prop_map(Parameter::Int64),
            any::<u64>().prop_map(Parameter::Uint64),
            (-1e300..1e300).prop_map(Parameter::Double),
            ".{0,8}".prop_map(Parameter::String),
        ];
        proptest::collection::btree_map("[a-z]{1,6}", value, 0..3)
    }

    /// A name, datatype, shape and data that go together.
    fn tensor() -> impl Strategy<Value = (String, DataType, Vec<i64>, Bytes)> {
        let shape = proptest::collection::vec(0_i64..4, 0..3);
        (".{0,8}", 0..DataType::ALL.len(), shape, any::<u8>()).prop_map(|(name, datatype, shape, fill)| {
            let datatype = DataType::ALL[datatype];
            let count = element_count(&shape).unwrap();
            let data = match datatype.size() {
                Some(size) => vec![fill; count * size],
                None => [3, 0, 0, 0, fill, fill, fill].repeat(count),
            };
            (name, datatype, shape, data.into())
        })
    }

    proptest! {
        #[test]
        fn a_request_survives_the_wire(
            names in proptest::array::uniform3(".{0,8}"),
            request_parameters in parameters(),
            tensors in proptest::collection::vec((tensor(), parameters()), 0..4),
            outputs in proptest::collection::vec((".{0,8}", parameters()), 0..3),
        ) {
            let [model_name, model_version, id] = names;
            let request = InferRequest {
                model_name,
                model_version,
                id,
                parameters: request_parameters,
                inputs: tensors
                    .into_iter()
                    .map(|((name, datatype, shape, data), parameters)| InferInput { name, datatype, shape, parameters, data })
                    .collect(),
                outputs: outputs.into_iter().map(|(name, parameters)| RequestedOutput { name, parameters }).collect(),
            };
            let wire = prost::Message::encode_to_vec(&request_to_message(request.clone()));
            let message = prost::Message::decode(Bytes::from(wire)).unwrap();
            prop_assert_eq!(request_from_message(message), Ok(request));
        }

        #[test]
        fn an_answer_survives_the_wire(
            names in proptest::array::uniform3(".{0,8}"),
            response_parameters in parameters(),
            tensors in proptest::collection::vec((tensor(), parameters()), 0..4),
        ) {
            let [model_name, model_version, id] = names;
            let response = InferResponse {
                model_name,
                model_version,
                id,
                parameters: response_parameters,
                outputs: tensors
                    .into_iter()
                    .map(|((name, datatype, shape, data), parameters)| InferOutput { name, datatype, shape, parameters, data })
                    .collect(),
            };
            let wire = prost::Message::encode_to_vec(&response_to_message(response.clone()));
            let message = prost::Message::decode(Bytes::from(wire)).unwrap();
            prop_assert_eq!(response_from_message(message), Ok(response));
        }

        #[test]
        fn any_bytes_are_an_answer_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(message) = prost::Message::decode(Bytes::from(bytes)) {
                let _ = request_from_message(message);
            }
        }
    }
}
