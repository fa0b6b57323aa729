//! Writes the JSON of requests and responses without a tree of values in between.

use bytes::Bytes;
use downbeat_core::tensor::DataType;
use serde::Serialize;

use super::encoded_body::EncodedBody;
use super::header::Role;
use super::{number_word, tensor_json};
use crate::infer::{CodecError, InferTensor, Parameter, Parameters};

/// JSON that is being written. Commas are added automatically.
pub(super) struct JsonWriter {
    /// The text so far.
    out: Vec<u8>,
}

impl JsonWriter {
    /// An empty text with room for `capacity` bytes.
    pub fn with_capacity(capacity: usize) -> JsonWriter {
        JsonWriter { out: Vec::with_capacity(capacity) }
    }

    /// Adds a comma if one is due. Every value ends in a quote, a digit, a letter or a closing
    /// bracket, so the last byte decides.
    fn separate(&mut self) {
        if !matches!(self.out.last(), None | Some(b'{' | b'[' | b':')) {
            self.out.push(b',');
        }
    }

    /// `{`
    pub fn open_object(&mut self) {
        self.separate();
        self.out.push(b'{');
    }

    /// `}`
    pub fn close_object(&mut self) {
        self.out.push(b'}');
    }

    /// `"key":[`
    pub fn open_list(&mut self, key: &'static str) {
        self.key(key);
        self.out.push(b'[');
    }

    /// `]`
    pub fn close_list(&mut self) {
        self.out.push(b']');
    }

    /// `"key":`, for a key without characters that need escapes.
    pub fn key(&mut self, key: &'static str) {
        self.separate();
        self.out.push(b'"');
        self.out.extend_from_slice(key.as_bytes());
        self.out.extend_from_slice(b"\":");
    }

    /// `"key":value`
    pub fn field<T: Serialize + ?Sized>(&mut self, key: &'static str, value: &T) {
        self.key(key);
        serde_json::to_writer(&mut self.out, value).expect("memory takes every write, and every map has string keys");
    }

    /// Writes `"inputs":[...]` or `"outputs":[...]`. Each tensor has its data or, if `is_binary`,
    /// the length of its bytes after the JSON. An output in shared memory has neither data nor
    /// place, as in Triton's answers. The client has named the place, and clients take any
    /// parameters of an output for parameters of binary data.
    ///
    /// # Errors
    /// If the data of a tensor does not have the form of its datatype, or is not UTF-8 and should
    /// be JSON.
    pub fn tensors(
        &mut self,
        role: Role,
        tensors: &[InferTensor],
        is_binary: impl Fn(&InferTensor) -> bool,
    ) -> Result<(), CodecError> {
        self.open_list(if role == Role::Input { "inputs" } else { "outputs" });
        for tensor in tensors {
            let binary = is_binary(tensor);
            self.open_object();
            self.field("name", &tensor.name);
            self.field("datatype", tensor.datatype.name());
            self.field("shape", &tensor.shape);
            if role == Role::Input || !tensor.is_elsewhere() {
                self.tensor_parameters(&tensor.parameters, binary.then_some(tensor.data.len()));
            }
            if !binary && !tensor.is_elsewhere() {
                self.key("data");
                tensor_json::write(&mut self.out, tensor.datatype, &tensor.data)
                    .map_err(|e| CodecError(format!("{role} '{}': {e}", tensor.name)))?;
            }
            self.close_object();
        }
        self.close_list();
        Ok(())
    }

    /// Writes `"parameters":{...}`, or nothing without parameters.
    pub fn parameters(&mut self, parameters: &Parameters) {
        if parameters.is_empty() {
            return;
        }
        self.key("parameters");
        self.out.push(b'{');
        for (key, value) in parameters {
            self.parameter(key, value);
        }
        self.out.push(b'}');
    }

    /// `"key":value`, for any key.
    pub fn parameter(&mut self, key: &str, value: &Parameter) {
        self.any_key(key);
        match value {
            Parameter::Double(value) => number_word::write(&mut self.out, *value),
            value => serde_json::to_writer(&mut self.out, value),
        }
        .expect("memory takes every write");
    }

    /// `"key":`, for any key.
    fn any_key(&mut self, key: &str) {
        self.separate();
        serde_json::to_writer(&mut self.out, key).expect("memory takes every write");
        self.out.push(b':');
    }

    /// `"key":[...]` with a tensor's elements, or `"key":element` of a single element.
    ///
    /// # Errors
    /// If the data does not have the form of its datatype, or is not UTF-8.
    pub fn value(&mut self, key: &str, datatype: DataType, data: &[u8], is_one: bool) -> Result<(), String> {
        self.any_key(key);
        let start = self.out.len();
        tensor_json::write(&mut self.out, datatype, data)?;
        // Data without the element that the shape promises stays a list.
        if is_one && self.out.len() > start + 2 {
            self.out.remove(start);
            self.out.pop();
        }
        Ok(())
    }

    /// The JSON.
    pub fn text(self) -> Vec<u8> {
        self.out
    }

    /// Writes the parameters of a tensor, with `binary_data_size` among them.
    fn tensor_parameters(&mut self, parameters: &Parameters, binary_data_size: Option<usize>) {
        if parameters.is_empty() && binary_data_size.is_none() {
            return;
        }
        self.key("parameters");
        self.out.push(b'{');
        if let Some(size) = binary_data_size {
            self.field("binary_data_size", &size);
        }
        for (key, value) in parameters.iter().filter(|(key, _)| *key != "binary_data_size") {
            self.parameter(key, value);
        }
        self.out.push(b'}');
    }

    /// The JSON as a body, followed by the bytes of the binary `tensors`.
    pub fn body(self, tensors: &[InferTensor], is_binary: impl Fn(&InferTensor) -> bool) -> EncodedBody {
        let mut out = self.out;
        let json_length = out.len();
        let mut any_binary = false;
        for tensor in tensors.iter().filter(|tensor| is_binary(tensor)) {
            any_binary = true;
            out.extend_from_slice(&tensor.data);
        }
        EncodedBody { bytes: Bytes::from(out), header_length: any_binary.then_some(json_length) }
    }
}
