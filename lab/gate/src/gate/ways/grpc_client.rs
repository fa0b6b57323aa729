//! A minimal gRPC client. Its requests differ only in the stream's number.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Result, bail, ensure};
use downbeat_core::tensor::DataType;
use downbeat_protocol::inference::{ModelInferRequest, model_infer_request::InferInputTensor};
use prost::Message as _;

use super::server::{Client, INPUTS, input_values};

/// The first bytes of an HTTP/2 connection (RFC 9113 §3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Types of frames (RFC 9113 §6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
/// The growth of a connection's window at its start. No later growth is needed.
const WINDOW: u32 = (1 << 31) - (1 << 16);
/// Largest frame that a peer sends unasked (RFC 9113 §4.2).
const LARGEST_FRAME: usize = 16 << 10;

/// A connection.
pub struct GrpcClient {
    stream: TcpStream,
    next: u32,
    /// The request's message with its prefix.
    message: Vec<u8>,
    frame: Vec<u8>,
    out: Vec<u8>,
}

impl GrpcClient {
    /// Connects.
    pub fn connect(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let message = request().encode_to_vec();
        let mut prefixed = vec![0];
        prefixed.extend((message.len() as u32).to_be_bytes());
        prefixed.extend(message);
        let mut client =
            GrpcClient { stream, next: 1, message: prefixed, frame: vec![0; LARGEST_FRAME], out: Vec::new() };
        client.out.extend(PREFACE);
        client.put_frame(SETTINGS, 0, 0, &[]);
        client.put_frame(WINDOW_UPDATE, 0, 0, &WINDOW.to_be_bytes());
        Ok(client)
    }

    fn put_frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = (payload.len() as u32).to_be_bytes();
        self.out.extend(&length[1..]);
        self.out.extend([kind, flags]);
        self.out.extend(stream.to_be_bytes());
        self.out.extend(payload);
    }

    /// Reads a frame: its type, flags, stream and the length of its payload.
    fn read_frame(&mut self) -> Result<(u8, u8, u32, usize)> {
        let mut head = [0; 9];
        self.stream.read_exact(&mut head)?;
        let [l0, l1, l2, kind, flags, s @ ..] = head;
        let length = u32::from_be_bytes([0, l0, l1, l2]) as usize;
        ensure!(length <= LARGEST_FRAME, "a frame of {length} bytes");
        self.stream.read_exact(&mut self.frame[..length])?;
        Ok((kind, flags, u32::from_be_bytes(s), length))
    }
}

impl Client for GrpcClient {
    fn ask(&mut self) -> Result<()> {
        let stream = self.next;
        self.next += 2;
        let headers = headers(stream == 1);
        self.put_frame(HEADERS, END_HEADERS, stream, &headers);
        let message = std::mem::take(&mut self.message);
        self.put_frame(DATA, END_STREAM, stream, &message);
        self.message = message;
        self.stream.write_all(&self.out)?;
        self.out.clear();
        let mut answered = 0;
        loop {
            let (kind, flags, of, length) = self.read_frame()?;
            match kind {
                DATA | HEADERS if of == stream => {
                    answered += if kind == DATA { length } else { 0 };
                    if flags & END_STREAM != 0 {
                        ensure!(answered > 5, "a call has no answer, but an error");
                        return Ok(());
                    }
                }
                SETTINGS if flags & ACK == 0 => self.put_frame(SETTINGS, ACK, 0, &[]),
                PING if flags & ACK == 0 => {
                    let payload = self.frame[..length].to_vec();
                    self.put_frame(PING, ACK, 0, &payload);
                }
                SETTINGS | PING | WINDOW_UPDATE => {}
                kind => bail!("a frame of type {kind}"),
            }
        }
    }
}

fn request() -> ModelInferRequest {
    let input = InferInputTensor {
        name: "x".to_owned(),
        datatype: DataType::Fp32.name().to_owned(),
        shape: vec![1, INPUTS as i64],
        ..Default::default()
    };
    let tensor: Vec<u8> = input_values().flat_map(f32::to_le_bytes).collect();
    ModelInferRequest {
        model_name: "m".to_owned(),
        inputs: vec![input],
        raw_input_contents: vec![tensor.into()],
        ..Default::default()
    }
}

/// The headers of a call (RFC 7541). The first call puts most of them into the dynamic table, and
/// later calls refer to that table.
fn headers(first: bool) -> Vec<u8> {
    const POST: u8 = 0x83;
    const HTTP: u8 = 0x86;
    let mut block = vec![POST, HTTP];
    if !first {
        // The newest is number 62.
        block.extend([66, 65, 64, 63, 62].map(|index: u8| 0x80 | index));
        return block;
    }
    for (index, name, value) in [
        (4, "", "/inference.GRPCInferenceService/ModelInfer"),
        (1, "", "127.0.0.1:8001"),
        (31, "", "application/grpc"),
        (0, "te", "trailers"),
        (58, "", "grpc-c/48.0.0"),
    ] {
        block.push(0x40 | index);
        for text in [name, value].into_iter().filter(|text| !text.is_empty()) {
            block.push(text.len() as u8);
            block.extend(text.as_bytes());
        }
    }
    block
}
