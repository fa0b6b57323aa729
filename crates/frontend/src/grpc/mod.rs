//! The gRPC frontend: `GRPCInferenceService`, health (`grpc.health.v1`) and reflection, over any
//! [`Service`].

mod answer;
mod call;
mod connection;
mod frontend;
mod health;
mod inference;
mod message;
mod needs;
mod settings;
mod stream;
mod timeout;

use std::sync::Arc;

use downbeat_service::budget::ByteBudget;
use downbeat_service::service::Service;
use downbeat_service::traces::Traces;
use frontend::Frontend;
use tokio::net::TcpListener;

use crate::access::Access;
use crate::connections::{Connections, Stage, Stages, reached};
use crate::shared_memory::SharedMemory;

/// The options of the gRPC frontend.
#[derive(Clone, Debug)]
pub struct GrpcOptions {
    /// Largest message taken, bytes, as sent and after decompression. Answers have no limit.
    pub max_message_bytes: usize,
    /// The budget of bytes that messages, answers and all other requests share.
    pub budget: Arc<ByteBudget>,
    /// Most requests of one `ModelStreamInfer` stream at once, at least 1. At this bound no more
    /// are read from the stream, so the client's sends wait (HTTP/2 flow control).
    pub max_stream_requests: usize,
    /// Most calls of one connection at once. Clients keep further ones to themselves.
    pub max_connection_calls: u32,
    /// Who may do what; `None`: everybody may do everything.
    pub access: Option<Arc<Access>>,
    /// Traces of requests, and their settings.
    pub traces: Arc<Traces>,
}

impl Default for GrpcOptions {
    fn default() -> Self {
        GrpcOptions {
            max_message_bytes: i32::MAX as usize,
            budget: ByteBudget::unbounded(),
            max_stream_requests: 1024,
            max_connection_calls: 4096,
            access: None,
            traces: Traces::off(),
        }
    }
}

/// Serves gRPC on `listener`, with connections among `connections`, until `stages` end it. At
/// [`Stage::Draining`] clients learn to go elsewhere (GOAWAY), calls are finished, and streams end
/// once their requests are answered.
pub async fn serve<S: Service>(
    listener: TcpListener,
    connections: Connections,
    service: Arc<S>,
    memory: Arc<SharedMemory>,
    options: GrpcOptions,
    stages: Stages,
) {
    let (drain, draining) = tokio::sync::watch::channel(false);
    let frontend = Frontend::new(service, memory, &options, draining);
    let begin_drain = async {
        reached(stages.clone(), Stage::Draining).await;
        drain.send_replace(true);
    };
    tokio::join!(connection::serve(listener, connections, frontend, &options, stages.clone()), begin_drain);
}

/// Completes once the frontend drains.
async fn drained(mut draining: tokio::sync::watch::Receiver<bool>) {
    // An error: the frontend is gone, which is draining too.
    let _ = draining.wait_for(|draining| *draining).await;
}
