//! `GRPCInferenceService` without its inferences: messages in, calls of the [`Service`], messages
//! out.

use std::sync::Arc;

use downbeat_core::pages::Pointer;
use downbeat_core::tensor::TensorSpec;
use downbeat_protocol::inference::grpc_inference_service_server::GrpcInferenceService;
use downbeat_protocol::{Parameter, inference as pb};
use downbeat_service::client::Client;
use downbeat_service::service::{LoadOverrides, Service, UNLOAD_DEPENDENTS};
use downbeat_service::traces::Traces;
use downbeat_service::work::offload;
use futures_util::stream::Empty;
use tokio::sync::watch;
use tonic::{Request, Response, Status, Streaming};

use super::settings;
use crate::access::Caller;
use crate::extension::extensions;
use crate::shared_memory::{CudaRegionStatus, SharedMemory};

type Answer<T> = Result<Response<T>, Status>;

/// The protocol's gRPC service.
pub(super) struct InferenceService<S> {
    service: Arc<S>,
    memory: Arc<SharedMemory>,
    traces: Arc<Traces>,
    draining: watch::Receiver<bool>,
}

impl<S: Service> InferenceService<S> {
    pub(super) fn new(
        service: Arc<S>,
        memory: Arc<SharedMemory>,
        traces: Arc<Traces>,
        draining: watch::Receiver<bool>,
    ) -> Self {
        InferenceService { service, memory, traces, draining }
    }
}

/// [`Inference`](super::call::Inference) answers these calls before tonic sees them.
fn elsewhere() -> Status {
    Status::unimplemented("inferences are answered elsewhere")
}

/// The sender of a request, which its connection has noted.
fn client_of<T>(request: &Request<T>) -> Client {
    request.extensions().get().copied().unwrap_or_default()
}

/// The caller of a request, whom the frontend has admitted.
fn caller_of<T>(request: &Request<T>) -> Caller {
    request.extensions().get().cloned().unwrap_or_default()
}

/// Rejects a repository name: the server's only repository has no name.
fn check_repository(name: &str) -> Result<(), Status> {
    if name.is_empty() {
        return Ok(());
    }
    let message = "'repository_name' is not supported: all repositories of the server are one; leave it empty";
    Err(Status::unimplemented(format!("{message} ({})", Pointer::REPOSITORIES)))
}

fn tensor(spec: TensorSpec) -> pb::model_metadata_response::TensorMetadata {
    pb::model_metadata_response::TensorMetadata {
        name: spec.name,
        datatype: spec.datatype.name().to_owned(),
        shape: spec.dims,
    }
}

fn load_overrides(
    parameters: std::collections::BTreeMap<String, pb::ModelRepositoryParameter>,
) -> Result<LoadOverrides, Status> {
    use pb::model_repository_parameter::ParameterChoice as Choice;

    let mut overrides = LoadOverrides::default();
    for (name, parameter) in parameters {
        let choice = parameter
            .parameter_choice
            .ok_or_else(|| Status::invalid_argument(format!("load parameter '{name}' has no value; expected one")))?;
        if let Some(path) = name.strip_prefix("file:") {
            let Choice::BytesParam(content) = choice else {
                return Err(Status::invalid_argument(format!("load parameter '{name}' must be 'bytes_param'")));
            };
            overrides.files.insert(path.to_owned(), content);
        } else if name == "config" {
            let Choice::StringParam(config) = choice else {
                return Err(Status::invalid_argument(
                    "load parameter 'config' must be 'string_param' (the configuration as JSON)",
                ));
            };
            overrides.config = Some(config);
        } else {
            let value = match choice {
                Choice::BoolParam(value) => Parameter::Bool(value),
                Choice::Int64Param(value) => Parameter::Int64(value),
                Choice::StringParam(value) => Parameter::String(value),
                Choice::BytesParam(_) => {
                    return Err(Status::invalid_argument(format!(
                        "load parameter '{name}' is 'bytes_param', which is only for 'file:PATH' parameters"
                    )));
                }
            };
            overrides.parameters.insert(name, value);
        }
    }
    Ok(overrides)
}

#[tonic::async_trait]
impl<S: Service> GrpcInferenceService for InferenceService<S> {
    async fn server_live(&self, _request: Request<pb::ServerLiveRequest>) -> Answer<pb::ServerLiveResponse> {
        Ok(Response::new(pb::ServerLiveResponse { live: self.service.is_live() }))
    }

    async fn server_ready(&self, _request: Request<pb::ServerReadyRequest>) -> Answer<pb::ServerReadyResponse> {
        let ready = self.service.is_ready() && !*self.draining.borrow();
        Ok(Response::new(pb::ServerReadyResponse { ready }))
    }

    async fn model_ready(&self, request: Request<pb::ModelReadyRequest>) -> Answer<pb::ModelReadyResponse> {
        let caller = caller_of(&request);
        let pb::ModelReadyRequest { name, version } = request.into_inner();
        caller.check_model(&name)?;
        let ready = self.service.check_model_ready(&name, &version).await;
        Ok(Response::new(pb::ModelReadyResponse { ready }))
    }

    async fn server_metadata(
        &self,
        _request: Request<pb::ServerMetadataRequest>,
    ) -> Answer<pb::ServerMetadataResponse> {
        Ok(Response::new(pb::ServerMetadataResponse {
            name: self.service.name().into(),
            version: env!("CARGO_PKG_VERSION").into(),
            extensions: extensions(&self.memory),
        }))
    }

    async fn model_metadata(&self, request: Request<pb::ModelMetadataRequest>) -> Answer<pb::ModelMetadataResponse> {
        let caller = caller_of(&request);
        let pb::ModelMetadataRequest { name, version } = request.into_inner();
        caller.check_model(&name)?;
        let metadata = self.service.model_metadata(&name, &version)?;
        Ok(Response::new(pb::ModelMetadataResponse {
            name: metadata.name,
            versions: metadata.versions,
            platform: metadata.platform,
            inputs: metadata.signature.inputs.into_iter().map(tensor).collect(),
            outputs: metadata.signature.outputs.into_iter().map(tensor).collect(),
        }))
    }

    async fn model_infer(&self, _request: Request<pb::ModelInferRequest>) -> Answer<pb::ModelInferResponse> {
        Err(elsewhere())
    }

    type ModelStreamInferStream = Empty<Result<pb::ModelStreamInferResponse, Status>>;

    async fn model_stream_infer(
        &self,
        _request: Request<Streaming<pb::ModelInferRequest>>,
    ) -> Answer<Self::ModelStreamInferStream> {
        Err(elsewhere())
    }

    async fn model_config(&self, request: Request<pb::ModelConfigRequest>) -> Answer<pb::ModelConfigResponse> {
        let caller = caller_of(&request);
        let pb::ModelConfigRequest { name, version } = request.into_inner();
        caller.check_model(&name)?;
        let config = self.service.model_config(&name, &version)?;
        Ok(Response::new(pb::ModelConfigResponse { config: Some(config) }))
    }

    async fn model_statistics(
        &self,
        request: Request<pb::ModelStatisticsRequest>,
    ) -> Answer<pb::ModelStatisticsResponse> {
        let (client, caller, service) = (client_of(&request), caller_of(&request), Arc::clone(&self.service));
        let pb::ModelStatisticsRequest { name, version } = request.into_inner();
        if !name.is_empty() {
            caller.check_model(&name)?;
        }
        let mut model_stats = offload::run(client, 0, move || service.statistics(&name, &version)).await??;
        model_stats.retain(|statistics| caller.sees(&statistics.name));
        Ok(Response::new(pb::ModelStatisticsResponse { model_stats }))
    }

    async fn repository_index(
        &self,
        request: Request<pb::RepositoryIndexRequest>,
    ) -> Answer<pb::RepositoryIndexResponse> {
        let (client, caller) = (client_of(&request), caller_of(&request));
        let request = request.into_inner();
        check_repository(&request.repository_name)?;
        let entry = |entry: downbeat_service::service::ModelIndexEntry| pb::repository_index_response::ModelIndex {
            name: entry.name,
            version: entry.version,
            state: entry.state,
            reason: entry.reason,
        };
        // Folders are listed, and there may be thousands of models.
        let service = Arc::clone(&self.service);
        let index = move || {
            let seen = service.repository_index(request.ready).into_iter().filter(|entry| caller.sees(&entry.name));
            seen.map(entry).collect()
        };
        let models = offload::run(client, 0, index).await?;
        Ok(Response::new(pb::RepositoryIndexResponse { models }))
    }

    async fn repository_model_load(
        &self,
        request: Request<pb::RepositoryModelLoadRequest>,
    ) -> Answer<pb::RepositoryModelLoadResponse> {
        let caller = caller_of(&request);
        let request = request.into_inner();
        check_repository(&request.repository_name)?;
        caller.check_model(&request.model_name)?;
        let overrides = load_overrides(request.parameters)?;
        self.service.load(&request.model_name, overrides).await?;
        Ok(Response::new(pb::RepositoryModelLoadResponse {}))
    }

    async fn repository_model_unload(
        &self,
        request: Request<pb::RepositoryModelUnloadRequest>,
    ) -> Answer<pb::RepositoryModelUnloadResponse> {
        use pb::model_repository_parameter::ParameterChoice as Choice;

        let caller = caller_of(&request);
        let request = request.into_inner();
        check_repository(&request.repository_name)?;
        caller.check_model(&request.model_name)?;
        let parameter =
            request.parameters.get(UNLOAD_DEPENDENTS).and_then(|parameter| parameter.parameter_choice.as_ref());
        match parameter {
            Some(Choice::BoolParam(true)) => self.service.unload_with_steps(&request.model_name).await?,
            _ => self.service.unload(&request.model_name).await?,
        }
        Ok(Response::new(pb::RepositoryModelUnloadResponse {}))
    }

    async fn system_shared_memory_status(
        &self,
        request: Request<pb::SystemSharedMemoryStatusRequest>,
    ) -> Answer<pb::SystemSharedMemoryStatusResponse> {
        use pb::system_shared_memory_status_response::RegionStatus;

        let client = client_of(&request);
        let name = request.into_inner().name;
        let regions = self.memory.status(client, (!name.is_empty()).then_some(name.as_str()))?;
        let entry = |region: crate::shared_memory::RegionStatus| {
            let status = RegionStatus {
                name: region.name.clone(),
                key: region.key,
                offset: region.offset,
                byte_size: region.byte_size,
            };
            (region.name, status)
        };
        Ok(Response::new(pb::SystemSharedMemoryStatusResponse { regions: regions.into_iter().map(entry).collect() }))
    }

    async fn system_shared_memory_register(
        &self,
        request: Request<pb::SystemSharedMemoryRegisterRequest>,
    ) -> Answer<pb::SystemSharedMemoryRegisterResponse> {
        let client = client_of(&request);
        let pb::SystemSharedMemoryRegisterRequest { name, key, offset, byte_size } = request.into_inner();
        self.memory.register(client, &name, &key, offset, byte_size)?;
        Ok(Response::new(pb::SystemSharedMemoryRegisterResponse {}))
    }

    async fn system_shared_memory_unregister(
        &self,
        request: Request<pb::SystemSharedMemoryUnregisterRequest>,
    ) -> Answer<pb::SystemSharedMemoryUnregisterResponse> {
        let client = client_of(&request);
        let name = request.into_inner().name;
        if name.is_empty() {
            self.memory.unregister_all(client)?;
        } else {
            self.memory.unregister(client, &name)?;
        }
        Ok(Response::new(pb::SystemSharedMemoryUnregisterResponse {}))
    }

    async fn cuda_shared_memory_status(
        &self,
        request: Request<pb::CudaSharedMemoryStatusRequest>,
    ) -> Answer<pb::CudaSharedMemoryStatusResponse> {
        use pb::cuda_shared_memory_status_response::RegionStatus;

        let client = client_of(&request);
        let name = request.into_inner().name;
        let regions = self.memory.cuda_status(client, (!name.is_empty()).then_some(name.as_str()))?;
        let entry = |CudaRegionStatus { name, device_id, byte_size }| {
            (name.clone(), RegionStatus { name, device_id: u64::from(device_id), byte_size })
        };
        Ok(Response::new(pb::CudaSharedMemoryStatusResponse { regions: regions.into_iter().map(entry).collect() }))
    }

    async fn cuda_shared_memory_register(
        &self,
        request: Request<pb::CudaSharedMemoryRegisterRequest>,
    ) -> Answer<pb::CudaSharedMemoryRegisterResponse> {
        let client = client_of(&request);
        let pb::CudaSharedMemoryRegisterRequest { name, raw_handle, device_id, byte_size } = request.into_inner();
        // A negative number is no device.
        let device_id = u64::try_from(device_id).unwrap_or(u64::MAX);
        let memory = self.memory.clone();
        offload::run(client, 0, move || memory.register_cuda(client, &name, &raw_handle, device_id, byte_size))
            .await??;
        Ok(Response::new(pb::CudaSharedMemoryRegisterResponse {}))
    }

    async fn cuda_shared_memory_unregister(
        &self,
        request: Request<pb::CudaSharedMemoryUnregisterRequest>,
    ) -> Answer<pb::CudaSharedMemoryUnregisterResponse> {
        let client = client_of(&request);
        let name = request.into_inner().name;
        let memory = self.memory.clone();
        offload::run(client, 0, move || memory.unregister_cuda(client, (!name.is_empty()).then_some(name.as_str())))
            .await?;
        Ok(Response::new(pb::CudaSharedMemoryUnregisterResponse {}))
    }

    async fn trace_setting(&self, request: Request<pb::TraceSettingRequest>) -> Answer<pb::TraceSettingResponse> {
        let request = request.into_inner();
        if !request.model_name.is_empty() {
            self.service.model_metadata(&request.model_name, "")?;
        }
        settings::trace(&self.traces, &request).map(Response::new)
    }

    async fn log_settings(&self, request: Request<pb::LogSettingsRequest>) -> Answer<pb::LogSettingsResponse> {
        settings::log(request.get_ref()).map(Response::new)
    }
}
