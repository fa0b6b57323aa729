//! Which service answers a call, with which compression.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use downbeat_protocol::FILE_DESCRIPTOR_SET;
use downbeat_protocol::inference::grpc_inference_service_server::GrpcInferenceServiceServer;
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::codegen::Service as CallService;
use tonic::server::NamedService;
use tonic_health::pb::health_server::HealthServer;

use super::GrpcOptions;
use super::health::HealthService;
use super::inference::InferenceService;
use crate::service::Service;
use crate::shared_memory::{Client, SharedMemory};

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// What a connection hands its calls to.
pub(super) trait Frontend:
    hyper::service::Service<
        Request<Incoming>,
        Response = Response<Body>,
        Error = Infallible,
        Future: Future<Output = Result<Response<Body>, Infallible>> + Send + 'static,
    > + Clone
    + Send
    + Sync
    + 'static
{
    /// The same, for the connection of `client`.
    fn for_client(&self, client: Client) -> Self;
}

/// Joins the services.
pub(super) fn frontend<S: Service>(
    service: Arc<S>,
    memory: Arc<SharedMemory>,
    options: &GrpcOptions,
    draining: watch::Receiver<bool>,
) -> impl Frontend {
    let limit = options.max_message_bytes;
    let health = HealthServer::new(HealthService::new(Arc::clone(&service), draining.clone()));
    let inference = Arc::new(InferenceService::new(service, memory, options, draining));
    let plain = GrpcInferenceServiceServer::from_arc(inference)
        .max_decoding_message_size(limit)
        .max_encoding_message_size(usize::MAX)
        .accept_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Deflate);
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .inspect_err(|error| tracing::warn!(%error, "no gRPC reflection"))
        .ok();
    Calls {
        services: Arc::new(Services {
            gzip: plain.clone().send_compressed(CompressionEncoding::Gzip),
            deflate: plain.clone().send_compressed(CompressionEncoding::Deflate),
            plain,
            health,
            reflection,
        }),
        limit,
        client: Client::default(),
    }
}

struct Calls<T, H, R> {
    services: Arc<Services<T, H, R>>,
    /// Largest message, bytes.
    limit: usize,
    client: Client,
}

impl<T: Generated, H: Generated, R: Generated> Frontend for Calls<T, H, R> {
    fn for_client(&self, client: Client) -> Self {
        Calls { client, ..self.clone() }
    }
}

impl<T, H, R> Clone for Calls<T, H, R> {
    fn clone(&self) -> Self {
        Calls { services: Arc::clone(&self.services), ..*self }
    }
}

struct Services<T, H, R> {
    /// Answers without compression, as almost every client wants: most say that they *accept* gzip, and would get
    /// answers for which compressing takes longer than the model.
    plain: T,
    /// For clients that compress themselves.
    gzip: T,
    deflate: T,
    health: H,
    reflection: Option<R>,
}

/// A tonic service as its generated code makes it.
trait Generated:
    CallService<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future = Answer>
    + NamedService
    + Clone
    + Send
    + Sync
    + 'static
{
}

impl<T> Generated for T where
    T: CallService<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future = Answer>
        + NamedService
        + Clone
        + Send
        + Sync
        + 'static
{
}

impl<T: Generated, H: Generated, R: Generated> hyper::service::Service<Request<Incoming>> for Calls<T, H, R> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = LimitNamed;

    fn call(&self, mut request: Request<Incoming>) -> LimitNamed {
        request.extensions_mut().insert(self.client);
        let services = &*self.services;
        let name = request.uri().path().split('/').nth(1).unwrap_or_default();
        let answer = if name == T::NAME {
            match request.headers().get("grpc-encoding").map(|encoding| encoding.as_bytes()) {
                Some(b"gzip") => services.gzip.clone().call(request),
                Some(b"deflate") => services.deflate.clone().call(request),
                _ => services.plain.clone().call(request),
            }
        } else if name == H::NAME {
            services.health.clone().call(request)
        } else if let Some(reflection) = services.reflection.as_ref().filter(|_| name == R::NAME) {
            reflection.clone().call(request)
        } else {
            let name: String = name.chars().take(64).collect();
            let status = Status::unimplemented(format!("unknown service '{name}'; expected '{}'", T::NAME));
            Box::pin(std::future::ready(Ok(status.into_http())))
        };
        LimitNamed { answer, limit: self.limit }
    }
}

/// Turns tonic's `OUT_OF_RANGE` for a message over the limit into `RESOURCE_EXHAUSTED`, as gRPC has it.
struct LimitNamed {
    answer: Answer,
    limit: usize,
}

impl Future for LimitNamed {
    type Output = Result<Response<Body>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Ok(response) = ready!(self.answer.as_mut().poll(context));
        if is_out_of_range(response.headers()) {
            return Poll::Ready(Ok(too_large(self.limit).into_http()));
        }
        Poll::Ready(Ok(response))
    }
}

/// A successful answer has its status at its end and not here, so this costs it one look.
fn is_out_of_range(headers: &HeaderMap) -> bool {
    headers.get("grpc-status").is_some_and(|status| status.as_bytes() == b"11")
}

/// The status for a message over the limit.
pub(super) fn too_large(limit: usize) -> Status {
    Status::resource_exhausted(format!("the message is larger than the server takes: the limit is {limit} bytes"))
}
