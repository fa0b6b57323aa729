//! Shared memory regions: of the system, and of GPUs.

use axum::extract::State;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use downbeat_protocol::http::{RegisterCudaRegionRequest, RegisterRegionRequest};
use downbeat_service::error::ServiceError;
use downbeat_service::service::Service;
use downbeat_service::work::offload;
use serde_json::Map;

use super::answer::{HandlerResult, ok, parse_json};
use super::body::WholeBody;
use super::path::RegionPath;
use super::sender::Sender;
use super::state::HttpState;

fn done() -> HandlerResult {
    ok(&Map::new())
}

pub(super) async fn status<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, .. }: Sender,
    path: RegionPath,
) -> HandlerResult {
    ok(&state.memory().status(client, path.region())?)
}

pub(super) async fn register<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, .. }: Sender,
    path: RegionPath,
    body: WholeBody,
) -> HandlerResult {
    let request: RegisterRegionRequest = parse_json(&body.bytes)?;
    state.memory().register(client, &path.name, &request.key, request.offset, request.byte_size)?;
    done()
}

pub(super) async fn unregister<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, .. }: Sender,
    path: RegionPath,
) -> HandlerResult {
    match path.region() {
        Some(region) => state.memory().unregister(client, region)?,
        None => state.memory().unregister_all(client)?,
    }
    done()
}

pub(super) async fn cuda_status<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, .. }: Sender,
    path: RegionPath,
) -> HandlerResult {
    ok(&state.memory().cuda_status(client, path.region())?)
}

pub(super) async fn cuda_register<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, .. }: Sender,
    path: RegionPath,
    body: WholeBody,
) -> HandlerResult {
    let RegisterCudaRegionRequest { raw_handle, device_id, byte_size } = parse_json(&body.bytes)?;
    let handle = BASE64.decode(&raw_handle.b64).map_err(|_| {
        ServiceError::InvalidArgument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t".to_owned())
    })?;
    let memory = state.memory().clone();
    offload::run(client, 0, move || memory.register_cuda(client, &path.name, &handle, device_id, byte_size)).await??;
    done()
}

pub(super) async fn cuda_unregister<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, .. }: Sender,
    path: RegionPath,
) -> HandlerResult {
    let memory = state.memory().clone();
    offload::run(client, 0, move || memory.unregister_cuda(client, path.region())).await?;
    done()
}
