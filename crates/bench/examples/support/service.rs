//! The protocol's gRPC service with every method but a few unimplemented.

use std::future::Future;

use downbeat_protocol::inference as proto;
use downbeat_protocol::inference::grpc_inference_service_server::GrpcInferenceService;
use tonic::{Request, Response, Status};

/// The answers of a test server or an example.
pub trait Answers: Send + Sync + 'static {
    /// The answer to an inference.
    fn infer(
        &self,
        request: proto::ModelInferRequest,
    ) -> impl Future<Output = Result<proto::ModelInferResponse, Status>> + Send;

    /// Elements of the one FP32 input that every model has.
    fn elements(&self) -> i64;

    /// The answer to a request for statistics.
    fn statistics(&self) -> Result<proto::ModelStatisticsResponse, Status> {
        Err(Status::unimplemented("no statistics"))
    }
}

/// The gRPC service that gives the answers.
pub struct Service<A>(pub A);

macro_rules! service {
    ($($method:ident: $request:ident => $response:ident),* $(,)?) => {
        #[tonic::async_trait]
        impl<A: Answers> GrpcInferenceService for Service<A> {
            type ModelStreamInferStream = tokio_stream::Empty<Result<proto::ModelStreamInferResponse, Status>>;

            async fn model_infer(
                &self,
                request: Request<proto::ModelInferRequest>,
            ) -> Result<Response<proto::ModelInferResponse>, Status> {
                self.0.infer(request.into_inner()).await.map(Response::new)
            }

            async fn model_metadata(
                &self,
                request: Request<proto::ModelMetadataRequest>,
            ) -> Result<Response<proto::ModelMetadataResponse>, Status> {
                Ok(Response::new(proto::ModelMetadataResponse {
                    name: request.into_inner().name,
                    inputs: vec![proto::model_metadata_response::TensorMetadata {
                        name: "input".to_owned(),
                        datatype: "FP32".to_owned(),
                        shape: vec![-1, self.0.elements()],
                    }],
                    ..Default::default()
                }))
            }

            async fn model_statistics(
                &self,
                _: Request<proto::ModelStatisticsRequest>,
            ) -> Result<Response<proto::ModelStatisticsResponse>, Status> {
                self.0.statistics().map(Response::new)
            }

            async fn model_stream_infer(
                &self,
                _: Request<tonic::Streaming<proto::ModelInferRequest>>,
            ) -> Result<Response<Self::ModelStreamInferStream>, Status> {
                Err(Status::unimplemented("streams"))
            }

            $(async fn $method(&self, _: Request<proto::$request>) -> Result<Response<proto::$response>, Status> {
                Err(Status::unimplemented(stringify!($method)))
            })*
        }
    };
}

service! {
    server_live: ServerLiveRequest => ServerLiveResponse,
    server_ready: ServerReadyRequest => ServerReadyResponse,
    model_ready: ModelReadyRequest => ModelReadyResponse,
    server_metadata: ServerMetadataRequest => ServerMetadataResponse,
    model_config: ModelConfigRequest => ModelConfigResponse,
    repository_index: RepositoryIndexRequest => RepositoryIndexResponse,
    repository_model_load: RepositoryModelLoadRequest => RepositoryModelLoadResponse,
    repository_model_unload: RepositoryModelUnloadRequest => RepositoryModelUnloadResponse,
    system_shared_memory_status: SystemSharedMemoryStatusRequest => SystemSharedMemoryStatusResponse,
    system_shared_memory_register: SystemSharedMemoryRegisterRequest => SystemSharedMemoryRegisterResponse,
    system_shared_memory_unregister: SystemSharedMemoryUnregisterRequest => SystemSharedMemoryUnregisterResponse,
    cuda_shared_memory_status: CudaSharedMemoryStatusRequest => CudaSharedMemoryStatusResponse,
    cuda_shared_memory_register: CudaSharedMemoryRegisterRequest => CudaSharedMemoryRegisterResponse,
    cuda_shared_memory_unregister: CudaSharedMemoryUnregisterRequest => CudaSharedMemoryUnregisterResponse,
    trace_setting: TraceSettingRequest => TraceSettingResponse,
    log_settings: LogSettingsRequest => LogSettingsResponse,
}
