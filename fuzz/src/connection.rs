//! Connections of clients and peers that send any bytes.
//!
//! - To the HTTP frontend: a head, headers and a body.
//! - To the gRPC frontend: frames of HTTP/2 with messages.
//! - From an etcd server: its answers.
//!
//! The server's own code reads them.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use downbeat_frontend::connections::{Connections, Stage, bind};
use downbeat_frontend::grpc::{self, GrpcOptions};
use downbeat_frontend::http::{HttpOptions, HttpState, serve};
use downbeat_service::service::{LoadOverrides, Service};

use crate::memory_service::MemoryService;

/// The longest wait for the server after the client has sent all and closed its side. It is far
/// beyond the time that a slow machine takes.
const MOST: Duration = Duration::from_secs(60);

/// The begin of a connection of HTTP/2: the preface and an empty frame of settings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// The type of the first frame of an HTTP/2 server, and the type's place in the frame.
const SETTINGS: (usize, u8) = (3, 4);
/// Largest body of a request, before and after decompression, bytes.
const MOST_BYTES: usize = 1 << 20;

/// Frontends that live as long as the process.
struct Frontend {
    service: Arc<MemoryService>,
    address: SocketAddr,
    grpc: SocketAddr,
    runtime: tokio::runtime::Runtime,
    /// Held, because a drop would end the frontend.
    _stage: tokio::sync::watch::Sender<Stage>,
}

impl Frontend {
    fn start() -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let any = || runtime.block_on(async { bind((Ipv4Addr::LOCALHOST, 0).into()) });
        let (listener, of_grpc) = (any()?, any()?);
        let (address, grpc) = (listener.local_addr()?, of_grpc.local_addr()?);
        let service = Arc::new(MemoryService::default());
        let options = HttpOptions { max_body_bytes: MOST_BYTES, ..HttpOptions::default() };
        let (stage, stages) = tokio::sync::watch::channel(Stage::Serving);
        let state = HttpState::new(Arc::clone(&service), Arc::default(), options);
        runtime.spawn(serve(listener, Connections::new(Default::default()), state, stages.clone()));
        let options = GrpcOptions { max_message_bytes: MOST_BYTES, ..GrpcOptions::default() };
        let connections = Connections::new(Default::default());
        runtime.spawn(grpc::serve(of_grpc, connections, service.clone(), Arc::default(), options, stages));
        Ok(Frontend { service, address, grpc, runtime, _stage: stage })
    }
}

impl Frontend {
    fn get() -> Option<&'static Frontend> {
        static FRONTEND: LazyLock<std::io::Result<Frontend>> = LazyLock::new(Frontend::start);
        FRONTEND.as_ref().ok()
    }

    /// Loads again the models that a request has unloaded, so that the next bytes do not depend on
    /// earlier ones.
    fn reset(&self) {
        for model in ["simple", "echo", "scores"] {
            let _ = self.runtime.block_on(self.service.load(model, LoadOverrides::default()));
        }
        self.service.loads.lock().clear();
    }
}

/// Sends bytes to the HTTP frontend, and closes the client's side of the connection.
///
/// # Panics If the server then does not close the connection, or does not answer the next one.
pub fn http_connection(data: &[u8]) {
    let Some(frontend) = Frontend::get() else { return };
    let answer = exchange(frontend.address, data, true);
    answer.expect("the server ends a connection that its client has ended");
    let live = exchange(
        frontend.address,
        b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        false,
    );
    let live = live.expect("the server answers");
    assert!(live.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&live));
    frontend.reset();
}

/// A compressed body of an inference request. The first byte says how it is compressed.
///
/// # Panics
/// As [`http_connection`], or if the request has no answer.
pub fn compressed_body(data: &[u8]) {
    let Some(frontend) = Frontend::get() else { return };
    let Some((kind, body)) = data.split_first() else { return };
    let coding = if kind % 2 == 0 { "gzip" } else { "deflate" };
    let length = body.len();
    let head = format!(
        "POST /v2/models/simple/infer HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-encoding: {coding}\r\ncontent-length: {length}\r\n\r\n"
    );
    let answer = exchange(frontend.address, &[head.as_bytes(), body].concat(), false);
    let answer = answer.expect("the server answers");
    assert!(answer.starts_with(b"HTTP/1.1 "), "{}", String::from_utf8_lossy(&answer));
}

/// Sends bytes to the gRPC frontend, and closes the client's side of the connection.
///
/// # Panics If the server then does not close the connection, or does not answer the next one.
pub fn grpc_connection(data: &[u8]) {
    let Some(frontend) = Frontend::get() else { return };
    let answer = exchange(frontend.grpc, data, true);
    answer.expect("the server ends a connection that its client has ended");
    let settings = exchange(frontend.grpc, PREFACE, true).expect("the server answers");
    assert_eq!(settings.get(SETTINGS.0), Some(&SETTINGS.1), "{settings:?}");
    frontend.reset();
}

/// All answers of an etcd server, on each of its connections.
pub fn etcd_answer(data: &[u8]) {
    let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)) else { return };
    let (Ok(address), Ok(runtime)) =
        (listener.local_addr(), tokio::runtime::Builder::new_current_thread().enable_all().build())
    else {
        return;
    };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while let Ok((mut stream, _)) = listener.accept()
                && !over.load(Relaxed)
            {
                let mut request = [0; 4096];
                // The client may have gone.
                let _ = stream.read(&mut request).and_then(|_| stream.write_all(data));
            }
        });
        runtime.block_on(downbeat_cluster::ask_etcd(format!("http://{address}")));
        over.store(true, Relaxed);
        drop(TcpStream::connect(address));
    });
}

/// Sends, and reads to the end of the connection. `ends`: this side closes after it has sent, which
/// cancels unanswered requests.
fn exchange(address: SocketAddr, data: &[u8], ends: bool) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(MOST))?;
    stream.set_write_timeout(Some(MOST))?;
    // The server may answer and close before it has read all. Then it refuses the rest of this
    // side's bytes.
    let sent = stream.write_all(data).and_then(|()| if ends { stream.shutdown(Shutdown::Write) } else { Ok(()) });
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
            Err(error)
        }
        _ if matches!(&sent, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock) => sent.map(|()| answer),
        _ => Ok(answer),
    }
}
