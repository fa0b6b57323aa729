//! Servers to offer load to: good ones, and servers that misbehave in every way that a socket
//! allows.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use clap::Parser;
use downbeat_bench::Args;
use downbeat_bench::load::plan::Plan;
use downbeat_bench::load::run::{Hopeless, Outcome, run};
use downbeat_bench::results::record::ModelRecord;

/// The arguments, parsed as a command of their own.
#[derive(Parser, Debug)]
pub struct Command {
    #[command(flatten)]
    pub args: Args,
}

/// The plan of a command line, without the command's name.
pub fn plan(words: &[&str]) -> anyhow::Result<Plan> {
    Plan::resolve(&Command::try_parse_from(std::iter::once(&"bench").chain(words))?.args)
}

/// Runs the plan of a command line.
pub fn bench(words: &[&str]) -> Outcome {
    let plan = plan(words).expect("a valid command line");
    run(&plan, &plan.pace, Hopeless::default(), &mut |_| {}).expect("a run")
}

/// Checks that every request that was due ended in exactly one way.
pub fn assert_accounted(record: &ModelRecord) {
    assert_eq!(record.scheduled, record.ok + record.failed(), "{:?}", record.failures);
    assert_eq!(record.ok, record.latency.len());
    assert!(record.late <= record.ok);
}

/// A server on a port of its own; connections end with it only if the handler ends.
pub struct Server {
    pub address: SocketAddr,
    /// The number of accepted connections.
    pub connections: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Server {
    /// Starts a server. `handle` gets each connection, on a thread of its own, and the number of
    /// earlier connections.
    pub fn raw(handle: impl Fn(TcpStream, u64) + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = listener.local_addr().expect("an address");
        let stop = Arc::new(AtomicBool::new(false));
        let connections = Arc::new(AtomicU64::new(0));
        let (stopped, counter, handle) = (Arc::clone(&stop), Arc::clone(&connections), Arc::new(handle));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { continue };
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let number = counter.fetch_add(1, Ordering::Relaxed);
                let handle = Arc::clone(&handle);
                std::thread::spawn(move || handle(stream, number));
            }
        });
        Server { address, connections, stop }
    }

    /// Speaks HTTP/1.1. `answer` gets the head and body of each request, the stream to answer on,
    /// and the request's number on its connection. It returns whether the connection goes on. The
    /// server answers metadata itself, and keeps no statistics.
    pub fn http(answer: impl Fn(&str, &[u8], &mut TcpStream, u64) -> bool + Send + Sync + 'static) -> Server {
        Server::raw(move |mut stream, _| {
            let _ = stream.set_nodelay(true);
            let mut number = 0;
            while let Some((head, body)) = read_request(&mut stream) {
                let metadata = r#"{"name":"m","inputs":[{"name":"x","datatype":"FP32","shape":[-1,4]}],"outputs":[]}"#;
                let goes_on = if head.starts_with("GET ") && !head.contains("/stats") {
                    respond(&mut stream, "200 OK", metadata.as_bytes())
                } else if head.starts_with("GET ") {
                    respond(&mut stream, "404 Not Found", b"{}")
                } else {
                    number += 1;
                    answer(&head, &body, &mut stream, number)
                };
                if !goes_on {
                    return;
                }
            }
        })
    }

    /// `HOST:PORT`.
    pub fn url(&self) -> String {
        self.address.to_string()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The connection wakes the listener, which then ends.
        let _ = TcpStream::connect(self.address);
    }
}

/// Writes a response with a body of known length.
pub fn respond(stream: &mut TcpStream, status: &str, body: &[u8]) -> bool {
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(&[head.as_bytes(), body].concat()).is_ok()
}

/// Head and body of the next request; `None` once the client is gone.
pub fn read_request(stream: &mut TcpStream) -> Option<(String, Vec<u8>)> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 16 * 1024];
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            break end + 4;
        }
        let read = stream.read(&mut buffer).ok().filter(|n| *n > 0)?;
        bytes.extend_from_slice(&buffer[..read]);
    };
    let mut body = bytes.split_off(end);
    let head = String::from_utf8(bytes).ok()?;
    let length = head
        .lines()
        .find_map(|l| l.to_ascii_lowercase().strip_prefix("content-length:").map(|n| n.trim().parse::<usize>()))
        .map_or(0, |n| n.unwrap_or(0));
    while body.len() < length {
        let read = stream.read(&mut buffer).ok().filter(|n| *n > 0)?;
        body.extend_from_slice(&buffer[..read]);
    }
    Some((head, body))
}
