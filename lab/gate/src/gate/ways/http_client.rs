//! A minimal HTTP client.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context as _, Result, ensure};

use super::server::{Client, INPUTS, input_values};

/// Most bytes of an answer.
const LARGEST_ANSWER: usize = 64 << 10;

/// A connection.
pub struct HttpClient<'a> {
    stream: TcpStream,
    request: &'a [u8],
    answer: Vec<u8>,
}

impl<'a> HttpClient<'a> {
    /// Connects; each request is `request`.
    pub fn connect(address: SocketAddr, request: &'a [u8]) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(HttpClient { stream, request, answer: vec![0; LARGEST_ANSWER] })
    }
}

impl Client for HttpClient<'_> {
    fn ask(&mut self) -> Result<()> {
        self.stream.write_all(self.request)?;
        let mut there = 0;
        loop {
            let read = self.stream.read(&mut self.answer[there..])?;
            ensure!(read > 0, "the server closes the connection");
            there += read;
            let answer = &self.answer[..there];
            let Some(head) = answer.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
            let text = std::str::from_utf8(&answer[..head])?;
            ensure!(text.starts_with("HTTP/1.1 200 "), "{}", String::from_utf8_lossy(answer));
            let header = text.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = header.context("an answer without a length")?.parse()?;
            if there == head + 4 + length {
                return Ok(());
            }
        }
    }
}

fn request(headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /v2/models/m/infer HTTP/1.1\r\nhost: 127.0.0.1:8000\r\ncontent-length: {}\r\n{headers}\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// As tritonclient writes it: the tensors behind the JSON, both ways.
pub fn binary_request() -> Vec<u8> {
    let tensor: Vec<u8> = input_values().flat_map(f32::to_le_bytes).collect();
    let json = format!(
        r#"{{"inputs":[{{"name":"x","shape":[1,{INPUTS}],"datatype":"FP32","parameters":{{"binary_data_size":{}}}}}],"outputs":[{{"name":"y","parameters":{{"binary_data":true}}}}]}}"#,
        tensor.len()
    );
    let headers =
        format!("content-type: application/octet-stream\r\ninference-header-content-length: {}\r\n", json.len());
    request(&headers, &[json.as_bytes(), &tensor].concat())
}

/// As curl sends it.
pub fn json_request() -> Vec<u8> {
    let values: Vec<String> = input_values().map(|value| value.to_string()).collect();
    let json = format!(
        r#"{{"inputs":[{{"name":"x","shape":[1,{INPUTS}],"datatype":"FP32","data":[{}]}}]}}"#,
        values.join(",")
    );
    request("content-type: application/json\r\n", json.as_bytes())
}
