//! Which service answers a call.

use std::sync::Arc;

use axum::Router;
use downbeat_protocol::FILE_DESCRIPTOR_SET;
use downbeat_protocol::inference::grpc_inference_service_server::{GrpcInferenceServiceServer, SERVICE_NAME};
use downbeat_service::budget::ByteBudget;
use downbeat_service::client::Client;
use downbeat_service::service::Service;
use http::{Request, Response, Uri};
use http_body_util::combinators::MapErr;
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::service::Routes;
use tonic_health::pb::health_server::HealthServer;
use tower_service::Service as _;

use super::GrpcOptions;
use super::call::Inference;
use super::health::HealthService;
use super::inference::InferenceService;
use super::message::{self, MessageReader, WholeMessages};
use super::needs;
use crate::access::{Access, Caller};
use crate::connections::{self, BodyError, WatchedBody};
use crate::shared_memory::SharedMemory;

/// The calls that tonic does not see.
const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";
const STREAM_INFER: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

/// The body that a client sends in a call.
pub(super) type CallBody = MapErr<WatchedBody, fn(BodyError) -> Status>;

/// The frontend that connections hand their calls to.
pub(super) struct Frontend<S> {
    inference: Arc<Inference<S>>,
    /// Everything but inferences.
    others: Router,
    budget: Arc<ByteBudget>,
    /// Largest message, bytes.
    limit: usize,
    access: Option<Arc<Access>>,
}

impl<S: Service> Frontend<S> {
    /// Joins the services.
    pub fn new(
        service: Arc<S>,
        memory: Arc<SharedMemory>,
        options: &GrpcOptions,
        draining: watch::Receiver<bool>,
    ) -> Self {
        let limit = options.max_message_bytes;
        let health = HealthServer::new(HealthService::new(Arc::clone(&service), draining.clone()));
        let inference = Inference::new(Arc::clone(&service), Arc::clone(&memory), options, draining.clone());
        let management = GrpcInferenceServiceServer::new(InferenceService::new(
            service,
            memory,
            Arc::clone(&options.traces),
            draining,
        ))
        .max_decoding_message_size(limit)
        .max_encoding_message_size(usize::MAX)
        .accept_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Deflate);
        let routes = Routes::new(management).add_service(health);
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .build_v1();
        let routes = match reflection {
            Ok(reflection) => routes.add_service(reflection),
            Err(error) => {
                tracing::warn!(%error, "the server has no gRPC reflection");
                routes
            }
        };
        Frontend {
            inference: Arc::new(inference),
            others: routes.into_axum_router().fallback(unknown_service),
            budget: Arc::clone(&options.budget),
            limit,
            access: options.access.clone(),
        }
    }

    /// Answers a call. Dropping the future cancels it.
    pub async fn call(&self, client: Client, request: Request<CallBody>) -> Response<Body> {
        let path = request.uri().path();
        let is_inference = path == INFER || path == STREAM_INFER;
        let caller = match &self.access {
            None => Caller::default(),
            Some(access) => {
                let need = if is_inference { needs::INFERENCE } else { needs::need(path) };
                match access.admit_grpc(client, need, request.headers()) {
                    Ok(caller) => caller,
                    Err(denied) => return Status::from(denied).into_http(),
                }
            }
        };
        let inference = Arc::clone(&self.inference);
        match path {
            INFER => inference.call((client, caller), request).await.unwrap_or_else(Status::into_http),
            STREAM_INFER => inference.stream((client, caller), request).unwrap_or_else(Status::into_http),
            // The future is boxed, so that an inference's future is not as large as this one.
            _ => Box::pin(self.manage((client, caller), request)).await,
        }
    }

    async fn manage(&self, (client, caller): (Client, Caller), mut request: Request<CallBody>) -> Response<Body> {
        let budget = Arc::clone(caller.budget(&self.budget));
        request.extensions_mut().insert(client);
        request.extensions_mut().insert(caller);
        // tonic itself answers a coding that it does not know.
        let coding = message::coding(request.headers());
        let coded = !matches!(coding, Ok(None));
        let request = request.map(|body| {
            let reader = MessageReader::new(body, self.limit, coded, budget, None);
            WholeMessages::new(client, reader, coding.unwrap_or_default())
        });
        // The message holds its part of the budget until the call is answered.
        let _held = request.body().held();
        match connections::beside(self.others.clone().call(request.map(axum::body::Body::new))).await {
            Ok(answer) => answer.map(Body::new),
            Err(never) => match never {},
        }
    }
}

async fn unknown_service(uri: Uri) -> Response<axum::body::Body> {
    let name: String = uri.path().split('/').nth(1).unwrap_or_default().chars().take(64).collect();
    Status::unimplemented(format!("unknown service '{name}'; expected '{SERVICE_NAME}'")).into_http()
}
