//! Requests as bytes, written once before the load begins.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use bytes::{BufMut, Bytes, BytesMut};
use downbeat_protocol::inference::infer_parameter::ParameterChoice;
use downbeat_protocol::inference::model_infer_request::InferInputTensor;
use downbeat_protocol::inference::{InferParameter, ModelInferRequest};
use prost::Message;
use serde_json::{Map, Value, json};

use crate::tensors::{InputTensor, to_json};

/// What is the same in every request to a model.
#[derive(Clone, Debug, Default)]
pub struct Envelope {
    /// Model name.
    pub model: String,
    /// Version; empty: the server's choice.
    pub version: String,
    /// `timeout` parameter, microseconds.
    pub timeout_us: Option<u64>,
    /// `priority` parameter.
    pub priority: Option<u64>,
    /// Further headers (HTTP).
    pub headers: Vec<(String, String)>,
}

impl Envelope {
    /// The path of an endpoint of the model: `/v2/models/NAME[/versions/VERSION]ENDPOINT`.
    pub fn path(&self, endpoint: &str) -> String {
        let version = match self.version.as_str() {
            "" => String::new(),
            version => format!("/versions/{}", escape(version)),
        };
        format!("/v2/models/{}{version}{endpoint}", escape(&self.model))
    }

    fn parameters(&self) -> Map<String, Value> {
        let mut parameters = Map::new();
        if let Some(timeout) = self.timeout_us {
            parameters.insert("timeout".into(), timeout.into());
        }
        if let Some(priority) = self.priority {
            parameters.insert("priority".into(), priority.into());
        }
        parameters
    }

    /// An HTTP/1.1 request with the tensors in the binary extension, which also asks for binary outputs.
    pub fn http_binary(&self, host: &str, tensors: &[InputTensor]) -> Bytes {
        let mut parameters = self.parameters();
        parameters.insert("binary_data_output".into(), true.into());
        let inputs: Vec<Value> = tensors
            .iter()
            .map(|t| {
                json!({"name": t.name, "shape": t.shape, "datatype": t.datatype.name(),
                       "parameters": {"binary_data_size": t.data.len()}})
            })
            .collect();
        let head = json!({"inputs": inputs, "parameters": parameters}).to_string();
        let data: Vec<&[u8]> = tensors.iter().map(|t| t.data.as_slice()).collect();
        self.http(host, &head, Some(&data.concat()))
    }

    /// An HTTP/1.1 request in JSON.
    ///
    /// # Errors
    /// For data that JSON has no form for.
    pub fn http_json(&self, host: &str, tensors: &[InputTensor]) -> Result<Bytes> {
        let mut inputs = Vec::new();
        for t in tensors {
            inputs.push(json!({"name": t.name, "shape": t.shape, "datatype": t.datatype.name(), "data": to_json(t)?}));
        }
        let mut body = Map::new();
        body.insert("inputs".into(), inputs.into());
        let parameters = self.parameters();
        if !parameters.is_empty() {
            body.insert("parameters".into(), parameters.into());
        }
        Ok(self.http(host, &Value::Object(body).to_string(), None))
    }

    fn http(&self, host: &str, json: &str, binary: Option<&[u8]>) -> Bytes {
        let mut head = format!(
            "POST {} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: downbeat-bench\r\nContent-Length: {}\r\n",
            self.path("/infer"),
            json.len() + binary.map_or(0, <[u8]>::len),
        );
        head += match binary {
            Some(_) => "Content-Type: application/octet-stream\r\n",
            None => "Content-Type: application/json\r\n",
        };
        if binary.is_some() {
            head += &format!("Inference-Header-Content-Length: {}\r\n", json.len());
        }
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += "\r\n";
        [head.as_bytes(), json.as_bytes(), binary.unwrap_or_default()].concat().into()
    }

    /// A `ModelInfer` message with gRPC's five bytes of prefix (not compressed, length).
    ///
    /// # Errors
    /// If it is longer than a gRPC message can be.
    pub fn grpc(&self, tensors: &[InputTensor]) -> Result<Bytes> {
        let parameter = |choice| InferParameter { parameter_choice: Some(choice) };
        let mut parameters = BTreeMap::new();
        if let Some(timeout) = self.timeout_us {
            let timeout = i64::try_from(timeout).unwrap_or(i64::MAX);
            parameters.insert("timeout".to_owned(), parameter(ParameterChoice::Int64Param(timeout)));
        }
        if let Some(priority) = self.priority {
            parameters.insert("priority".to_owned(), parameter(ParameterChoice::Uint64Param(priority)));
        }
        let message = ModelInferRequest {
            model_name: self.model.clone(),
            model_version: self.version.clone(),
            parameters,
            inputs: tensors
                .iter()
                .map(|t| InferInputTensor {
                    name: t.name.clone(),
                    datatype: t.datatype.name().to_owned(),
                    shape: t.shape.clone(),
                    ..InferInputTensor::default()
                })
                .collect(),
            raw_input_contents: tensors.iter().map(|t| Bytes::copy_from_slice(&t.data)).collect(),
            ..ModelInferRequest::default()
        };
        let length = message.encoded_len();
        let Ok(prefix) = u32::try_from(length) else { bail!("a request of {length} bytes is too long for gRPC") };
        let mut bytes = BytesMut::with_capacity(length + 5);
        bytes.put_u8(0);
        bytes.put_u32(prefix);
        message.encode(&mut bytes)?;
        Ok(bytes.freeze())
    }
}

/// Percent-encodes what may not stand in a path segment.
fn escape(segment: &str) -> String {
    let mut escaped = String::with_capacity(segment.len());
    for byte in segment.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            escaped.push(byte.into());
        } else {
            escaped += &format!("%{byte:02X}");
        }
    }
    escaped
}
