//! Accepts connections and ends them.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::time::Duration;

use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::GrpcOptions;
use super::frontend::Frontend;
use crate::shared_memory::Client;

/// Bytes a client may send ahead in one call; large tensors would otherwise wait for a round trip every 64 KiB.
const STREAM_WINDOW: u32 = 4 << 20;
/// Bytes a client may send ahead in all calls of a connection.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Largest HTTP/2 frame taken: fewer frames for a large tensor.
const MAX_FRAME: u32 = 1 << 20;
/// Bytes of answers buffered for a call whose client does not read.
const SEND_BUFFER: usize = 1 << 20;
/// Silence after which the kernel asks whether a client is still there. Not HTTP/2 pings: with them, each frame that
/// comes in reads the clock and takes a lock.
const KEEP_ALIVE: Duration = Duration::from_secs(60);
/// Between two such questions.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// How many are left unanswered before the connection is closed.
const KEEP_ALIVE_COUNT: u32 = 3;
/// Calls that a client cancels before they are looked at; more end the connection. A client that gives up a burst
/// of requests is ordinary.
const MAX_RESET_CALLS: usize = 1024;
/// Pause after `accept` fails for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

pub(super) async fn serve<F: Frontend>(
    listener: TcpListener,
    frontend: F,
    options: &GrpcOptions,
    drain: watch::Sender<bool>,
    draining: watch::Receiver<bool>,
    shutdown: impl Future<Output = ()>,
) {
    let mut http = http2::Builder::new(TokioExecutor::new());
    http.timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME)
        .max_send_buf_size(SEND_BUFFER)
        .max_concurrent_streams(options.max_connection_calls)
        .max_pending_accept_reset_streams(MAX_RESET_CALLS)
        .auto_date_header(false);
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        tokio::select! {
            biased;
            () = &mut shutdown => break,
            accepted = listener.accept() => match accepted {
                Ok((socket, peer)) => {
                    let frontend = frontend.for_client(Client::at(peer.ip()));
                    connections.spawn(connection(http.clone(), socket, frontend, draining.clone()));
                }
                Err(error) => {
                    if is_about_the_listener(&error) {
                        tracing::warn!(%error, "cannot accept gRPC connections for now");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
    drop(listener);
    drain.send_replace(true);
    let drained = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(options.drain_timeout.into(), drained).await.is_err() {
        tracing::warn!(
            connections = connections.len(),
            "gRPC calls were not done within the drain timeout; they are broken off"
        );
        connections.shutdown().await;
    }
}

/// Whether `accept` failed because of this process, and not because the client has gone already.
fn is_about_the_listener(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
    )
}

async fn connection<F: Frontend>(
    http: http2::Builder<TokioExecutor>,
    socket: TcpStream,
    frontend: F,
    draining: watch::Receiver<bool>,
) {
    if let Err(error) = prepare(&socket) {
        // The client has gone already, or this is no TCP socket as it should be; either way it still can be tried.
        tracing::debug!(%error, "cannot set the options of a gRPC connection");
    }
    let mut connection = pin!(http.serve_connection(TokioIo::new(socket), frontend));
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = super::drained(draining) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a gRPC connection ended with an error");
    }
}

fn prepare(socket: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;

    // With the delay, answers wait for the client's acknowledgement of the one before.
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEP_ALIVE)?;
    sockopt::set_tcp_keepintvl(socket, KEEP_ALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, KEEP_ALIVE_COUNT)?;
    Ok(())
}
