//! A port over which gRPC is spoken.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use downbeat_service::client::Client;
use downbeat_service::service::Service;
use http::Request;
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::rt::bounds::Http2ServerConnExec;
use hyper::server::conn::http2;
use hyper::service::{HttpService, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tonic::Status;

use super::GrpcOptions;
use super::frontend::Frontend;
use crate::connections::{
    self, Answering, BodyError, Connections, Driven, Framing, Protocol, Stages, WatchedBody, WatchedStream,
};

/// Bytes a client may send ahead in one call; large tensors would otherwise wait for a round trip
/// every 64 KiB.
const STREAM_WINDOW: u32 = 4 << 20;
/// Bytes a client may send ahead in all calls of a connection.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Largest HTTP/2 frame taken: fewer frames for a large tensor.
const MAX_FRAME: u32 = 1 << 20;
/// Bytes of answers buffered for a call whose client does not read.
const SEND_BUFFER: usize = 1 << 20;
/// Calls that a client cancels before they are looked at; more end the connection. A client that
/// gives up a burst of requests is ordinary.
const MAX_RESET_CALLS: usize = 1024;

/// Calls whose clients may send message after message, and take their time between them.
const CLIENT_STREAMS: [&str; 3] = [
    "/inference.GRPCInferenceService/ModelStreamInfer",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

pub(super) async fn serve<S: Service>(
    listener: TcpListener,
    connections: Connections,
    frontend: Frontend<S>,
    options: &GrpcOptions,
    stages: Stages,
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
    let connection_options = connections.options().clone();
    let frontend = Arc::new(frontend);
    connections::serve(listener, Protocol::Grpc, connections, stages, move |stream, watched, peer| {
        let (http, options) = (http.clone(), connection_options.clone());
        let (frontend, client) = (Arc::clone(&frontend), Client::at(peer));
        let of_calls = Arc::clone(&watched);
        let service = move |request: Request<Incoming>| {
            let in_request = of_calls.request();
            let is_stream = CLIENT_STREAMS.contains(&request.uri().path());
            let framing = if is_stream { Framing::messages() } else { Framing::Whole };
            let watched = Arc::clone(&of_calls);
            let request = request.map(|body| {
                WatchedBody::new(body, framing, &options, watched).map_err(status as fn(BodyError) -> Status)
            });
            let frontend = Arc::clone(&frontend);
            // The future is boxed: hyper and tokio move a call's future a dozen times before they
            // run it.
            Box::pin(async move {
                let response = frontend.call(client, request).await;
                in_request.traffic().count_grpc(response.headers());
                Ok::<_, Infallible>(response.map(|body| Answering::new(body, in_request)))
            })
        };
        connections::keep(stream, watched, move |stream| {
            Box::new(http.serve_connection(TokioIo::new(stream), service_fn(service.clone())))
        })
    })
    .await;
}

impl<S, B> Driven for http2::Connection<TokioIo<WatchedStream>, S, TokioExecutor>
where
    Self: Future<Output = hyper::Result<()>> + Unpin,
    S: HttpService<Incoming, ResBody = B, Error = Infallible>,
    B: Body<Error: Into<Box<dyn std::error::Error + Send + Sync>>> + 'static,
    TokioExecutor: Http2ServerConnExec<S::Future, B>,
{
    fn finish(&mut self) {
        Pin::new(self).graceful_shutdown();
    }

    fn rest(self: Box<Self>) -> Result<WatchedStream, Box<Self>> {
        Err(self)
    }
}

fn status(error: BodyError) -> Status {
    match error {
        slow @ BodyError::Slow { .. } => Status::deadline_exceeded(slow.to_string()),
        BodyError::Broken(error) => Status::from_error(Box::new(error)),
    }
}
