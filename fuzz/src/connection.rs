//! A connection to the HTTP frontend: head, path, headers, body and whatever follows, through the code that serves.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use downbeat_server::connections::{Connections, Stage, bind};
use downbeat_server::http::{HttpOptions, HttpState, serve};
use downbeat_server::service::{LoadOverrides, Service};

use crate::memory_service::MemoryService;

/// The longest wait for the server on a connection whose client has sent all and said so. Far beyond what a slow machine takes.
const MOST: Duration = Duration::from_secs(60);

/// A frontend that lives as long as the process.
struct Frontend {
    service: Arc<MemoryService>,
    address: SocketAddr,
    runtime: tokio::runtime::Runtime,
    /// Dropped, it would end the frontend.
    _stage: tokio::sync::watch::Sender<Stage>,
}

impl Frontend {
    fn start() -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let listener = runtime.block_on(async { bind((Ipv4Addr::LOCALHOST, 0).into()) })?;
        let address = listener.local_addr()?;
        let service = Arc::new(MemoryService::default());
        let options = HttpOptions { max_body_bytes: 1 << 20, ..HttpOptions::default() };
        let (stage, stages) = tokio::sync::watch::channel(Stage::Serving);
        let state = HttpState::new(Arc::clone(&service), Arc::default(), options);
        runtime.spawn(serve(listener, Connections::new(Default::default()), state, stages));
        Ok(Frontend { service, address, runtime, _stage: stage })
    }
}

/// What a client sends before it closes its side of the connection.
///
/// # Panics
/// If the server does not close the connection then, or does not answer the next one.
pub fn http_connection(data: &[u8]) {
    static FRONTEND: LazyLock<std::io::Result<Frontend>> = LazyLock::new(Frontend::start);
    let Ok(frontend) = &*FRONTEND else { return };
    let answer = exchange(frontend.address, data, true);
    answer.expect("the server ends a connection that its client has ended");
    let live = exchange(
        frontend.address,
        b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        false,
    );
    let live = live.expect("the server answers");
    assert!(live.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&live));
    // Unloaded by a request, which the next bytes should not depend on.
    for model in ["simple", "echo", "scores"] {
        let _ = frontend.runtime.block_on(frontend.service.load(model, LoadOverrides::default()));
    }
    frontend.service.loads.lock().clear();
}

/// Sends and reads to the end of the connection. `ends`: this side closes when it has sent, which cancels what is not answered yet.
fn exchange(address: SocketAddr, data: &[u8], ends: bool) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(MOST))?;
    stream.set_write_timeout(Some(MOST))?;
    // The server may answer and close before it has all, and then this side's bytes are refused.
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
