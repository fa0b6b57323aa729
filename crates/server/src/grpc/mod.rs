//! The gRPC frontend: `GRPCInferenceService`, health (`grpc.health.v1`) and reflection, over any [`Service`].

mod answer;
mod call;
mod connection;
mod frontend;
mod health;
mod inference;
mod message;
mod settings;
mod stream;
mod timeout;

use std::future::Future;
use std::sync::Arc;

use downbeat_core::Duration;
use tokio::net::TcpListener;

use crate::budget::ByteBudget;
use crate::service::Service;
use crate::shared_memory::SharedMemory;

/// What the gRPC frontend can be told.
#[derive(Clone, Debug)]
pub struct GrpcOptions {
    /// Largest message taken, bytes, as sent and after decompression. Answers have no limit.
    pub max_message_bytes: usize,
    /// What messages and answers may hold of the memory, together with all other requests.
    pub budget: Arc<ByteBudget>,
    /// Most requests of one `ModelStreamInfer` stream at once, at least 1. While there are as many, no more are
    /// taken from the stream, so the client's sends wait (HTTP/2 flow control).
    pub max_stream_requests: usize,
    /// Most calls of one connection at once. Clients keep further ones to themselves.
    pub max_connection_calls: u32,
    /// How long a stopping frontend waits for calls that are under way.
    pub drain_timeout: Duration,
}

impl Default for GrpcOptions {
    fn default() -> Self {
        GrpcOptions {
            max_message_bytes: i32::MAX as usize,
            budget: ByteBudget::unbounded(),
            max_stream_requests: 1024,
            max_connection_calls: 4096,
            drain_timeout: Duration::from_millis(30_000),
        }
    }
}

/// Serves gRPC until `shutdown` completes, then finishes what is under way: no new connections, no new calls, and
/// streams end once their requests are answered. Calls that are not done after the drain timeout are broken off.
pub async fn serve<S: Service>(
    listener: TcpListener,
    service: Arc<S>,
    memory: Arc<SharedMemory>,
    options: GrpcOptions,
    shutdown: impl Future<Output = ()>,
) {
    let (drain, draining) = tokio::sync::watch::channel(false);
    let frontend = frontend::frontend(service, memory, &options, draining.clone());
    connection::serve(listener, frontend, &options, drain, draining, shutdown).await;
}

/// Completes once the frontend drains.
async fn drained(mut draining: tokio::sync::watch::Receiver<bool>) {
    // An error: the frontend is gone, which is draining too.
    let _ = draining.wait_for(|draining| *draining).await;
}
