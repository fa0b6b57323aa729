//! A server on a free port, and a client that sends exactly the given bytes.

use std::collections::BTreeMap;
use std::sync::Arc;

use downbeat_frontend::connections::{ConnectionOptions, Connections, FrontendThreads, Stage, bind};
use downbeat_frontend::http::{HttpOptions, HttpState, serve};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::support::MemoryService;

pub struct Server {
    pub address: std::net::SocketAddr,
    pub service: Arc<MemoryService>,
    pub stage: watch::Sender<Stage>,
    pub task: JoinHandle<()>,
}

impl Server {
    pub async fn start() -> Server {
        Server::with_options(HttpOptions::default()).await
    }

    pub async fn with_options(options: HttpOptions) -> Server {
        Server::with_connections(options, ConnectionOptions::default()).await
    }

    pub async fn with_connections(options: HttpOptions, connections: ConnectionOptions) -> Server {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let service = Arc::new(MemoryService::default());
        let (stage, stages) = watch::channel(Stage::Serving);
        let state = HttpState::new(Arc::clone(&service), Arc::default(), options);
        let task = tokio::spawn(serve(
            listener,
            Connections::on(connections, FrontendThreads::start(2).unwrap()),
            state,
            stages,
        ));
        Server { address, service, stage, task }
    }

    pub async fn connect(&self) -> Connection {
        Connection { stream: TcpStream::connect(self.address).await.unwrap(), read: Vec::new() }
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.connect().await.get(path).await
    }

    pub async fn post(&self, path: &str, body: impl AsRef<[u8]>) -> Reply {
        self.connect().await.post(path, &[], body).await
    }
}

pub struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
}

#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The message of an error reply. Checks the status and the form of the reply.
    #[track_caller]
    pub fn error(&self, status: u16) -> String {
        let text = String::from_utf8_lossy(&self.body);
        assert_eq!(self.status, status, "{text}");
        assert_eq!(self.headers["content-type"], "application/json");
        let body = self.json();
        assert_eq!(body.as_object().unwrap().len(), 1, "{text}");
        body["error"].as_str().unwrap().to_owned()
    }
}

impl Connection {
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Sends bytes. Returns whether the connection took all bytes.
    pub async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).await.is_ok()
    }

    pub async fn get(&mut self, path: &str) -> Reply {
        self.send(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")).await;
        self.reply().await
    }

    pub async fn post(&mut self, path: &str, headers: &[(&str, &str)], body: impl AsRef<[u8]>) -> Reply {
        self.send(post_bytes(path, headers, body.as_ref())).await;
        self.reply().await
    }

    pub async fn reply(&mut self) -> Reply {
        self.try_reply().await.expect("the connection ended without an answer")
    }

    /// The next answer; `None` if the connection ends first.
    pub async fn try_reply(&mut self) -> Option<Reply> {
        let (head_length, status, headers) = loop {
            let mut slots = [httparse::EMPTY_HEADER; 32];
            let mut response = httparse::Response::new(&mut slots);
            if let httparse::Status::Complete(length) = response.parse(&self.read).unwrap() {
                let headers: BTreeMap<String, String> = response
                    .headers
                    .iter()
                    .map(|h| (h.name.to_ascii_lowercase(), String::from_utf8(h.value.to_vec()).unwrap()))
                    .collect();
                break (length, response.code.unwrap(), headers);
            }
            if !self.read_more().await {
                return None;
            }
        };
        if headers.get("transfer-encoding").is_some_and(|coding| coding == "chunked") {
            self.read.drain(..head_length);
            let body = self.chunks().await;
            return Some(Reply { status, headers, body });
        }
        let size: usize = headers.get("content-length").map_or(0, |text| text.parse().unwrap());
        while self.read.len() < head_length + size {
            assert!(self.read_more().await, "the answer's body is cut off");
        }
        let rest = self.read.split_off(head_length + size);
        let body = std::mem::replace(&mut self.read, rest).split_off(head_length);
        Some(Reply { status, headers, body })
    }

    /// The body of an answer in chunks.
    async fn chunks(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        loop {
            let (start, size) = loop {
                if let Ok(httparse::Status::Complete(chunk)) = httparse::parse_chunk_size(&self.read) {
                    break chunk;
                }
                assert!(self.read_more().await, "the answer's chunks are cut off");
            };
            let end = start + size as usize;
            while self.read.len() < end + 2 {
                assert!(self.read_more().await, "the answer's chunk is cut off");
            }
            body.extend_from_slice(&self.read[start..end]);
            self.read.drain(..end + 2);
            if size == 0 {
                return body;
            }
        }
    }

    /// Reads until this text has come.
    pub async fn wait_for(&mut self, text: &str) {
        while !String::from_utf8_lossy(&self.read).contains(text) {
            assert!(self.read_more().await, "the connection ended");
        }
    }

    /// The bytes until the connection ends, which are the head of an answer without a body.
    pub async fn head(&mut self) -> String {
        while self.read_more().await {}
        String::from_utf8(std::mem::take(&mut self.read)).unwrap()
    }

    async fn read_more(&mut self) -> bool {
        let mut chunk = [0; 16 << 10];
        let count = self.stream.read(&mut chunk).await.unwrap_or(0);
        self.read.extend_from_slice(&chunk[..count]);
        count > 0
    }

    /// Whether the server has closed the connection and sent nothing more.
    pub async fn is_closed(&mut self) -> bool {
        self.read.is_empty() && !self.read_more().await
    }

    pub async fn finish_writing(&mut self) {
        self.stream.shutdown().await.unwrap();
    }
}

pub fn post_bytes(path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    [head.as_bytes(), body].concat()
}

/// A request to `simple`, in JSON: INPUT0 counts up from 0, INPUT1 is all ones.
pub fn json_request() -> Value {
    let counting: Vec<i32> = (0..16).collect();
    serde_json::json!({
        "id": "42",
        "inputs": [
            {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "data": counting},
            {"name": "INPUT1", "shape": [1, 16], "datatype": "INT32", "data": [vec![1; 16]]},
        ],
    })
}
