//! Which service answers a call.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use downbeat_protocol::FILE_DESCRIPTOR_SET;
use downbeat_protocol::inference::grpc_inference_service_server::GrpcInferenceServiceServer;
use http::{Request, Response};
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::codegen::Service as CallService;
use tonic::server::NamedService;
use tonic_health::pb::health_server::HealthServer;

use super::GrpcOptions;
use super::call::Inference;
use super::connection::CallBody;
use super::health::HealthService;
use super::inference::InferenceService;
use super::message::{self, MessageReader, WholeMessages};
use crate::budget::ByteBudget;
use crate::connections;
use crate::service::Service;
use crate::shared_memory::{Client, SharedMemory};

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// What a connection hands its calls to.
pub(super) trait Frontend:
    hyper::service::Service<
        Request<CallBody>,
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

/// The calls that tonic does not see.
const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";
const STREAM_INFER: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

/// Joins the services.
pub(super) fn frontend<S: Service>(
    service: Arc<S>,
    memory: Arc<SharedMemory>,
    options: &GrpcOptions,
    draining: watch::Receiver<bool>,
) -> impl Frontend {
    let limit = options.max_message_bytes;
    let health = HealthServer::new(HealthService::new(Arc::clone(&service), draining.clone()));
    let inference = Inference::new(Arc::clone(&service), Arc::clone(&memory), options, draining.clone());
    let management = GrpcInferenceServiceServer::new(InferenceService::new(service, memory, draining))
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
        inference: Arc::new(inference),
        services: Arc::new(Services { management, health, reflection }),
        budget: Arc::clone(&options.budget),
        limit,
        client: Client::default(),
    }
}

struct Calls<S, T, H, R> {
    inference: Arc<Inference<S>>,
    services: Arc<Services<T, H, R>>,
    budget: Arc<ByteBudget>,
    /// Largest message, bytes.
    limit: usize,
    client: Client,
}

impl<S: Service, T: Generated, H: Generated, R: Generated> Frontend for Calls<S, T, H, R> {
    fn for_client(&self, client: Client) -> Self {
        Calls { client, ..self.clone() }
    }
}

impl<S, T, H, R> Clone for Calls<S, T, H, R> {
    fn clone(&self) -> Self {
        Calls {
            inference: Arc::clone(&self.inference),
            services: Arc::clone(&self.services),
            budget: Arc::clone(&self.budget),
            ..*self
        }
    }
}

struct Services<T, H, R> {
    management: T,
    health: H,
    reflection: Option<R>,
}

/// A tonic service as its generated code makes it.
trait Generated:
    CallService<Request<WholeMessages<CallBody>>, Response = Response<Body>, Error = Infallible, Future = Answer>
    + NamedService
    + Clone
    + Send
    + Sync
    + 'static
{
}

impl<T> Generated for T where
    T: CallService<Request<WholeMessages<CallBody>>, Response = Response<Body>, Error = Infallible, Future = Answer>
        + NamedService
        + Clone
        + Send
        + Sync
        + 'static
{
}

impl<S: Service, T: Generated, H: Generated, R: Generated> hyper::service::Service<Request<CallBody>>
    for Calls<S, T, H, R>
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn call(&self, request: Request<CallBody>) -> Answer {
        let (inference, client) = (Arc::clone(&self.inference), self.client);
        match request.uri().path() {
            INFER => {
                Box::pin(async move { Ok(inference.call(client, request).await.unwrap_or_else(Status::into_http)) })
            }
            STREAM_INFER => {
                let answer = inference.stream(client, request).unwrap_or_else(Status::into_http);
                Box::pin(std::future::ready(Ok(answer)))
            }
            _ => self.manage(request),
        }
    }
}

impl<S, T: Generated, H: Generated, R: Generated> Calls<S, T, H, R> {
    /// Calls that are no inferences.
    fn manage(&self, mut request: Request<CallBody>) -> Answer {
        request.extensions_mut().insert(self.client);
        // tonic undoes the coding, and says what it thinks of one that it does not know.
        let coded = matches!(message::coding(request.headers()), Ok(Some(_)) | Err(_));
        let request = request.map(|body| {
            WholeMessages::new(MessageReader::new(body, self.limit, coded, Arc::clone(&self.budget), None))
        });
        let held = request.body().held();
        let services = &*self.services;
        let name = request.uri().path().split('/').nth(1).unwrap_or_default();
        let answer = if name == T::NAME {
            services.management.clone().call(request)
        } else if name == H::NAME {
            services.health.clone().call(request)
        } else if let Some(reflection) = services.reflection.as_ref().filter(|_| name == R::NAME) {
            reflection.clone().call(request)
        } else {
            let name: String = name.chars().take(64).collect();
            let status = Status::unimplemented(format!("unknown service '{name}'; expected '{}'", T::NAME));
            return Box::pin(std::future::ready(Ok(status.into_http())));
        };
        Box::pin(async move {
            let answer = connections::beside(answer).await;
            // What the message holds of the budget it holds until it is dealt with.
            drop(held);
            answer
        })
    }
}
