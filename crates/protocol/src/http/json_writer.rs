//! Writes the JSON of requests and responses without a tree of values in between.

use downbeat_core::tensor::DataType;
use serde::Serialize;

use crate::infer::Parameters;

/// JSON in the making. Commas put themselves.
pub(super) struct JsonWriter {
    /// What is written so far.
    pub out: Vec<u8>,
}

impl JsonWriter {
    /// An empty text with room for `capacity` bytes.
    pub fn with_capacity(capacity: usize) -> JsonWriter {
        JsonWriter { out: Vec::with_capacity(capacity) }
    }

    /// Every value ends in a quote, a digit, a letter or a closing bracket, so the last byte tells whether a comma is due.
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

    /// The fields of a tensor before its data. `binary_data_size` is written among its parameters.
    pub fn tensor_fields(
        &mut self,
        name: &str,
        datatype: DataType,
        shape: &[i64],
        parameters: &Parameters,
        binary_data_size: Option<usize>,
    ) {
        self.field("name", name);
        self.field("datatype", datatype.name());
        self.field("shape", shape);
        if parameters.is_empty() && binary_data_size.is_none() {
            return;
        }
        self.key("parameters");
        self.out.push(b'{');
        if let Some(size) = binary_data_size {
            self.field("binary_data_size", &size);
        }
        for (key, value) in parameters.iter().filter(|(key, _)| *key != "binary_data_size") {
            self.separate();
            serde_json::to_writer(&mut self.out, key).expect("memory takes every write");
            self.out.push(b':');
            serde_json::to_writer(&mut self.out, value).expect("memory takes every write");
        }
        self.out.push(b'}');
    }
}
