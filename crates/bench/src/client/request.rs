//! Requests as bytes, written once before the load begins.

use anyhow::{Result, bail};
use bytes::{BufMut, Bytes, BytesMut};
use downbeat_protocol::grpc::request_to_message;
use downbeat_protocol::http::{EncodedBody, RequestForm, model_path, write_request};
use downbeat_protocol::{InferRequest, InferTensor, Parameter};
use prost::Message;

/// The common part of all requests to a model.
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
        model_path(&self.model, &self.version) + endpoint
    }

    fn request(&self, inputs: &[InferTensor]) -> InferRequest {
        let timeout = self.timeout_us.map(|us| Parameter::Int64(i64::try_from(us).unwrap_or(i64::MAX)));
        let parameters = [("timeout", timeout), ("priority", self.priority.map(Parameter::Uint64))];
        InferRequest {
            model_name: self.model.clone(),
            model_version: self.version.clone(),
            parameters: parameters.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect(),
            inputs: inputs.to_vec(),
            ..InferRequest::default()
        }
    }

    /// An HTTP/1.1 request with the tensors in this form. It asks for the outputs in the same form.
    ///
    /// # Errors
    /// If JSON has no form for the data.
    pub fn http(&self, host: &str, form: RequestForm, inputs: &[InferTensor]) -> Result<Bytes> {
        let EncodedBody { bytes, header_length } = write_request(&self.request(inputs), form)?;
        let mut head = format!(
            "POST {} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: downbeat-bench\r\nContent-Length: {}\r\n",
            self.path("/infer"),
            bytes.len(),
        );
        match header_length {
            Some(length) => {
                head += "Content-Type: application/octet-stream\r\n";
                head += &format!("Inference-Header-Content-Length: {length}\r\n");
            }
            None => head += "Content-Type: application/json\r\n",
        }
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        Ok([head.as_bytes(), b"\r\n", &bytes].concat().into())
    }

    /// A `ModelInfer` message with gRPC's five bytes of prefix (not compressed, length).
    ///
    /// # Errors
    /// If the message is longer than a gRPC message can be.
    pub fn grpc(&self, inputs: &[InferTensor]) -> Result<Bytes> {
        let message = request_to_message(self.request(inputs));
        let length = message.encoded_len();
        let Ok(prefix) = u32::try_from(length) else { bail!("a request of {length} bytes is too long for gRPC") };
        let mut bytes = BytesMut::with_capacity(length + 5);
        bytes.put_u8(0);
        bytes.put_u32(prefix);
        message.encode(&mut bytes)?;
        Ok(bytes.freeze())
    }
}
