//! Triton's generate extension: an inference as one flat JSON object.
//!
//! `{"text_input": "Hello", "max_tokens": 20}` gives the model's input `text_input` a string, and
//! the request the parameter `max_tokens`. The answer is `{"model_name": ..., "text_output": ...}`.
//! A value is a single element or a flat list; the shape follows from the model.

use std::borrow::Cow;
use std::collections::BTreeSet;

use bytes::Bytes;
use downbeat_core::tensor::{DataType, TensorSpec};
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::header;
use super::json_writer::JsonWriter;
use super::tensor_json;
use crate::infer::{CodecError, InferRequest, InferResponse, InferTensor, Parameter, element_count};

/// Most fields of a request, those of its `parameters` included.
const MOST_FIELDS: usize = 1024;
/// The object with further fields.
const NESTED: &str = "parameters";
/// The request's id.
const ID: &str = "id";

/// Reads the body of a generate request for a model with these `inputs`. Fields that name an input
/// become tensors, and all others become parameters, also those within `parameters`. An empty body
/// has no fields. The tensors have at most `limit` bytes together.
///
/// ```
/// use downbeat_core::tensor::{DataType, TensorSpec};
/// use downbeat_protocol::http::parse_generate;
///
/// let text = TensorSpec { name: "text_input".into(), datatype: DataType::Bytes, dims: vec![-1, 1] };
/// let body = br#"{"text_input": "Hi", "max_tokens": 20}"#;
/// let request = parse_generate("llm".to_owned(), String::new(), body, &[text], 1000)?;
/// assert_eq!(request.inputs[0].shape, [1, 1]);
/// assert!(request.parameters.contains_key("max_tokens"));
/// # Ok::<(), downbeat_protocol::CodecError>(())
/// ```
///
/// # Errors
/// If the body is no JSON object of such fields, or a value does not fit its input.
pub fn parse_generate(
    model_name: String,
    model_version: String,
    body: &[u8],
    inputs: &[TensorSpec],
    limit: usize,
) -> Result<InferRequest, CodecError> {
    let request = InferRequest { model_name, model_version, ..InferRequest::default() };
    let mut reader = Reader { specs: inputs, request, fields: 0, bytes: 0, limit };
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(reader.request);
    }
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(CodecError(
            "the generate request is not a JSON object; expected {\"INPUT\": value or flat list, ...}".into(),
        ));
    }
    let mut rewritten = None;
    let Fields(fields) = header::read(body, &mut rewritten, "request")?;
    reader.take_all(fields, true)?;
    Ok(reader.request)
}

/// The fields of a JSON object in their order, with the text of their values.
struct Fields<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor;

        impl<'de> Visitor<'de> for ObjectVisitor {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object with the model's inputs and parameters")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = Vec::new();
                while let Some(Key(key)) = map.next_key()? {
                    if fields.len() == MOST_FIELDS {
                        return Err(de::Error::custom(format_args!("more than {MOST_FIELDS} fields")));
                    }
                    fields.push((key, map.next_value()?));
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(ObjectVisitor)
    }
}

/// A key, borrowed from the JSON if it has no escapes.
#[derive(serde::Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

/// A request that is being read.
struct Reader<'s> {
    specs: &'s [TensorSpec],
    request: InferRequest,
    fields: usize,
    bytes: usize,
    limit: usize,
}

impl Reader<'_> {
    fn take_all(&mut self, fields: Vec<(Cow<'_, str>, &RawValue)>, is_outer: bool) -> Result<(), CodecError> {
        for (name, value) in fields {
            self.fields += 1;
            if self.fields > MOST_FIELDS {
                return Err(CodecError(format!("the request has more than {MOST_FIELDS} fields")));
            }
            match self.specs.iter().find(|spec| spec.name == name) {
                Some(_) if is_outer && name == NESTED => {
                    return Err(CodecError(format!(
                        "Keyword '{NESTED}' for nested schema also given as input tensor name; such a model takes \
                         requests by infer"
                    )));
                }
                Some(spec) => self.input(spec, value.get())?,
                None if is_outer && name == ID => self.request.id = id(value.get())?,
                None if is_outer && name == NESTED => self.nested(value.get())?,
                None => self.parameter(name.into_owned(), value.get())?,
            }
        }
        Ok(())
    }

    fn nested(&mut self, text: &str) -> Result<(), CodecError> {
        if text == "null" {
            return Ok(());
        }
        let Fields(fields) = serde_json::from_str(text).map_err(|error| {
            CodecError(format!("Expected JSON object for keyword: '{NESTED}'; got {}: {error}", kind(text)))
        })?;
        self.take_all(fields, false)
            .map_err(|CodecError(reason)| CodecError(format!("Converting keyword: '{NESTED}': {reason}")))
    }

    fn parameter(&mut self, name: String, text: &str) -> Result<(), CodecError> {
        let value: Parameter = serde_json::from_str(text).map_err(|_| {
            CodecError(format!(
                "parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'. Got {}; the \
                 model has no input of this name",
                kind(text)
            ))
        })?;
        match self.request.parameters.contains_key(&name) {
            true => Err(CodecError(format!("parameter '{name}' already exists in request"))),
            false => {
                self.request.parameters.insert(name, value);
                Ok(())
            }
        }
    }

    fn input(&mut self, spec: &TensorSpec, text: &str) -> Result<(), CodecError> {
        let wrong = |reason: String| CodecError(format!("input '{}': {reason}", spec.name));
        if self.request.inputs.iter().any(|input| input.name == spec.name) {
            return Err(CodecError(format!("input '{}' already exists in request", spec.name)));
        }
        let count = elements(text).map_err(wrong)?;
        let shape = shape_of(&spec.dims, count).ok_or_else(|| {
            CodecError(format!(
                "The schema can not convert input '{}' to tensor with proper shape: {count} elements do not fit {:?}; \
                 give as many elements as the fixed sizes make, or send the shape by infer",
                spec.name, spec.dims
            ))
        })?;
        let least = count.checked_mul(spec.datatype.size().unwrap_or(4)).ok_or_else(|| wrong("too large".into()))?;
        self.check_bytes(&spec.name, least)?;
        let data = tensor_json::read(text.as_bytes(), spec.datatype, count).map_err(|error| {
            let words = match spec.datatype {
                DataType::Bytes => "attempt to access JSON non-string as string: ",
                DataType::Bool => "attempt to access JSON non-boolean as boolean: ",
                _ => "",
            };
            wrong(format!("{words}{} {:?}: {error}", spec.datatype, spec.dims))
        })?;
        self.check_bytes(&spec.name, data.len())?;
        self.bytes += data.len();
        let (name, datatype, parameters) = (spec.name.clone(), spec.datatype, Default::default());
        self.request.inputs.push(InferTensor { name, datatype, shape, parameters, data: Bytes::from(data) });
        Ok(())
    }

    fn check_bytes(&self, name: &str, more: usize) -> Result<(), CodecError> {
        if more <= self.limit.saturating_sub(self.bytes) {
            return Ok(());
        }
        Err(CodecError(format!(
            "request size of {} bytes with input '{name}' of size {more} bytes exceeds the maximum allowed input size \
             of {} (--max-body-bytes)",
            self.bytes, self.limit
        )))
    }
}

fn id(text: &str) -> Result<String, CodecError> {
    if text == "null" {
        return Ok(String::new());
    }
    serde_json::from_str(text)
        .map_err(|_| CodecError(format!("Unable to parse 'id': expected a string, got {}", kind(text))))
}

/// The kind of a JSON value, for messages.
fn kind(text: &str) -> &'static str {
    match text.as_bytes().first() {
        Some(b'{') => "an object",
        Some(b'[') => "a list",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number",
    }
}

/// The number of elements of a value: those of a flat list, and 1 for any other value.
fn elements(text: &str) -> Result<usize, String> {
    struct Flat;

    impl<'de> Visitor<'de> for Flat {
        type Value = usize;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a flat list")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<usize, A::Error> {
            let mut count = 0;
            while let Some(value) = list.next_element::<&RawValue>()? {
                if value.get().starts_with('[') {
                    return Err(de::Error::custom("a list within a list"));
                }
                count += 1;
            }
            Ok(count)
        }
    }

    if !text.starts_with('[') {
        return Ok(1);
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    deserializer.deserialize_seq(Flat).map_err(|error| {
        format!("{error}; a generate request has single values and flat lists, and infer takes other shapes")
    })
}

/// The shape of `count` elements in `dims`, by Triton's rule. The last varying size takes the
/// elements that the fixed sizes leave. Other varying sizes are 1. `None` if the elements do not fit.
fn shape_of(dims: &[i64], count: usize) -> Option<Vec<i64>> {
    let mut rest = i64::try_from(count).ok()?;
    for fixed in dims.iter().filter(|size| **size >= 0) {
        // A size of 0 leaves nothing that could vary.
        rest = match *fixed {
            0 => (rest == 0).then_some(1)?,
            fixed => (rest % fixed == 0).then_some(rest / fixed)?,
        };
    }
    let mut shape = dims.to_vec();
    for size in shape.iter_mut().rev().filter(|size| **size < 0) {
        *size = std::mem::replace(&mut rest, 1);
    }
    (rest == 1).then_some(shape)
}

/// Writes an answer as one flat object: the id, the model, the parameters and the outputs. An output
/// of one element is written without a list. Of several values of one name the first stays.
///
/// # Errors
/// The data of an output does not have the form of its datatype, or a BYTES element is not UTF-8.
pub fn write_generate(response: &InferResponse) -> Result<Vec<u8>, CodecError> {
    let bytes: usize = response.outputs.iter().map(|output| output.data.len()).sum();
    let mut json = JsonWriter::with_capacity(128 + 2 * bytes);
    let mut written: BTreeSet<&str> = BTreeSet::new();
    json.open_object();
    let model = [(ID, &response.id), ("model_name", &response.model_name), ("model_version", &response.model_version)];
    for (key, value) in model {
        if !value.is_empty() {
            json.field(key, value);
            written.insert(key);
        }
    }
    for (name, value) in &response.parameters {
        if written.insert(name) {
            json.parameter(name, value);
        }
    }
    for output in &response.outputs {
        if written.insert(&output.name) {
            let is_one = element_count(&output.shape) == Ok(1);
            json.value(&output.name, output.datatype, &output.data, is_one)
                .map_err(|error| CodecError(format!("output '{}': {error}", output.name)))?;
        }
    }
    json.close_object();
    Ok(json.text())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, datatype: DataType, dims: &[i64]) -> TensorSpec {
        TensorSpec { name: name.into(), datatype, dims: dims.to_vec() }
    }

    fn parse(body: &str) -> Result<InferRequest, CodecError> {
        let inputs = [
            spec("PROMPT", DataType::Bytes, &[-1, -1]),
            spec("STREAM", DataType::Bool, &[-1, 1]),
            spec("ids", DataType::Int32, &[-1, 2]),
            spec("x", DataType::Fp32, &[2, -1]),
        ];
        parse_generate("m".into(), "1".into(), body.as_bytes(), &inputs, 100)
    }

    fn error(body: &str) -> String {
        parse(body).unwrap_err().to_string()
    }

    #[test]
    fn inputs_become_tensors_and_others_parameters() {
        let request = parse(
            r#"{"id": "42", "PROMPT": ["a", "bc"], "n": 3, "temperature": 0.5,
                "parameters": {"STREAM": false, "user": "me", "big": 18446744073709551615}, "ids": [1, 2, 3, 4]}"#,
        )
        .unwrap();
        assert_eq!(
            (request.id.as_str(), request.model_name.as_str(), request.model_version.as_str()),
            ("42", "m", "1")
        );
        let shapes: Vec<_> = request.inputs.iter().map(|input| (input.name.as_str(), input.shape.clone())).collect();
        assert_eq!(shapes, [("PROMPT", vec![1, 2]), ("STREAM", vec![1, 1]), ("ids", vec![2, 2])]);
        assert_eq!(request.inputs[0].data[..], *b"\x01\0\0\0a\x02\0\0\0bc");
        assert_eq!(request.inputs[1].data[..], [0]);
        let names: Vec<_> = request.parameters.keys().map(String::as_str).collect();
        assert_eq!(names, ["big", "n", "temperature", "user"]);
        assert_eq!(request.parameters["n"], Parameter::Int64(3));
        assert_eq!(request.parameters["temperature"], Parameter::Double(0.5));
    }

    #[test]
    fn an_empty_body_has_no_fields() {
        for body in ["", " \n", "{}", r#"{"parameters": null, "id": null}"#] {
            assert_eq!(parse(body).unwrap().inputs.len(), 0, "{body:?}");
        }
    }

    #[test]
    fn words_for_numbers_are_numbers() {
        let request = parse(r#"{"x": [NaN, -Infinity]}"#).unwrap();
        assert_eq!(request.inputs[0].data[4..], f32::NEG_INFINITY.to_le_bytes());
    }

    #[test]
    fn a_mistake_is_named() {
        for (body, expected) in [
            ("[1]", "is not a JSON object"),
            ("{\"PROMPT\": ", "EOF while parsing"),
            (r#"{"PROMPT": 123}"#, "attempt to access JSON non-string as string"),
            (r#"{"STREAM": "false"}"#, "attempt to access JSON non-boolean as boolean"),
            (r#"{"PROMPT": "a", "PROMPT": "b"}"#, "input 'PROMPT' already exists in request"),
            (r#"{"PROMPT": "a", "parameters": {"PROMPT": "b"}}"#, "input 'PROMPT' already exists in request"),
            (r#"{"n": 1, "n": 2}"#, "parameter 'n' already exists in request"),
            (
                r#"{"n": [1]}"#,
                "parameter 'n' has invalid type. It should be either 'int', 'bool', or 'string'. Got a list",
            ),
            (r#"{"n": null}"#, "Got null"),
            (r#"{"parameters": 3}"#, "Expected JSON object for keyword: 'parameters'; got a number"),
            (r#"{"id": 3}"#, "Unable to parse 'id': expected a string, got a number"),
            (r#"{"ids": [[1, 2]]}"#, "a list within a list"),
            (r#"{"ids": [1, 2, 3]}"#, "The schema can not convert input 'ids' to tensor with proper shape: 3 elements"),
            (r#"{"ids": [1, 3000000000]}"#, "3000000000 is out of the range of INT32"),
            (r#"{"ids": {"a": 1}}"#, "The schema can not convert input 'ids'"),
        ] {
            let error = error(body);
            assert!(error.contains(expected), "{body}: {error}");
        }
    }

    #[test]
    fn sizes_are_bounded() {
        let most = format!(r#"{{"PROMPT": "{}"}}"#, "x".repeat(96));
        assert_eq!(parse(&most).unwrap().inputs[0].data.len(), 100);
        let long = format!(r#"{{"PROMPT": "{}"}}"#, "x".repeat(97));
        assert!(error(&long).contains("101 bytes exceeds the maximum allowed input size of 100"), "{}", error(&long));
        let many = format!(r#"{{"PROMPT": [{}]}}"#, vec!["\"\""; 26].join(","));
        assert!(error(&many).contains("exceeds the maximum allowed input size of 100"), "{}", error(&many));
        let fields: Vec<String> = (0..MOST_FIELDS + 1).map(|i| format!("\"p{i}\":1")).collect();
        assert!(error(&format!("{{{}}}", fields.join(","))).contains("more than 1024 fields"));
        let halves = format!(
            "{{{}, \"parameters\": {{{}}}}}",
            fields[..600].join(","),
            fields[600..1100.min(fields.len())].join(",")
        );
        assert!(error(&halves).contains("more than 1024 fields"));
    }

    #[test]
    fn the_shape_follows_from_the_model() {
        assert_eq!(shape_of(&[-1, -1], 5), Some(vec![1, 5]));
        assert_eq!(shape_of(&[-1, 1], 5), Some(vec![5, 1]));
        assert_eq!(shape_of(&[-1, 16], 16), Some(vec![1, 16]));
        assert_eq!(shape_of(&[2, 3], 6), Some(vec![2, 3]));
        assert_eq!(shape_of(&[2, 3], 12), None);
        assert_eq!(shape_of(&[], 1), Some(vec![]));
        assert_eq!(shape_of(&[], 2), None);
        assert_eq!(shape_of(&[-1], 0), Some(vec![0]));
        assert_eq!(shape_of(&[-1, 2], 0), Some(vec![0, 2]));
        assert_eq!(shape_of(&[-1, 0], 0), Some(vec![1, 0]));
        assert_eq!(shape_of(&[-1, 0], 1), None);
    }

    #[test]
    fn an_answer_is_one_flat_object() {
        let tensor = |name: &str, datatype, shape: &[i64], data: &'static [u8]| InferTensor {
            name: name.into(),
            datatype,
            shape: shape.to_vec(),
            parameters: Default::default(),
            data: Bytes::from_static(data),
        };
        let response = InferResponse {
            model_name: "m".into(),
            model_version: "1".into(),
            id: "42".into(),
            parameters: [("n \"1\"".to_owned(), Parameter::Int64(3)), ("id".to_owned(), Parameter::Bool(true))].into(),
            outputs: vec![
                tensor("TEXT", DataType::Bytes, &[1, 1], b"\x03\0\0\0a\"b"),
                tensor("y", DataType::Uint8, &[1, 2], &[1, 2]),
                tensor("none", DataType::Uint8, &[0], &[]),
                tensor("nan", DataType::Fp32, &[1], &[0, 0, 0xc0, 0x7f]),
                tensor("model_name", DataType::Uint8, &[1], &[9]),
            ],
        };
        let text = String::from_utf8(write_generate(&response).unwrap()).unwrap();
        assert_eq!(
            text,
            r#"{"id":"42","model_name":"m","model_version":"1","n \"1\"":3,"TEXT":"a\"b","y":[1,2],"none":[],"nan":NaN}"#
        );
        let cut = InferResponse { outputs: vec![tensor("T", DataType::Bytes, &[1], b"\xff")], ..Default::default() };
        assert!(write_generate(&cut).unwrap_err().to_string().starts_with("output 'T': "));
    }
}
