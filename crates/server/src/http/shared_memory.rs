//! Shared memory regions: of the system, and of GPUs.

use std::convert::Infallible;

use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use downbeat_protocol::http::{RegisterCudaRegionRequest, RegisterRegionRequest};
use serde_json::Map;

use super::answer::{HandlerResult, ok, parse_json};
use super::body::WholeBody;
use super::path::RegionPath;
use super::state::HttpState;
use crate::client::Client;
use crate::error::ServiceError;
use crate::offload;
use crate::service::Service;

/// The connection has noted its client; in a router of another server there is no note, and the
/// default client stands for it.
impl<S: Send + Sync> FromRequestParts<S> for Client {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get().copied().unwrap_or_default())
    }
}

fn done() -> HandlerResult {
    ok(&Map::new())
}

pub(super) async fn status<S: Service>(
    State(state): State<HttpState<S>>,
    client: Client,
    path: RegionPath,
) -> HandlerResult {
    ok(&state.memory().status(client, path.region())?)
}

pub(super) async fn register<S: Service>(
    State(state): State<HttpState<S>>,
    client: Client,
    path: RegionPath,
    body: WholeBody,
) -> HandlerResult {
    let request: RegisterRegionRequest = parse_json(&body.bytes)?;
    state.memory().register(client, &path.name, &request.key, request.offset, request.byte_size)?;
    done()
}

pub(super) async fn unregister<S: Service>(
    State(state): State<HttpState<S>>,
    client: Client,
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
    client: Client,
    path: RegionPath,
) -> HandlerResult {
    ok(&state.memory().cuda_status(client, path.region())?)
}

pub(super) async fn cuda_register<S: Service>(
    State(state): State<HttpState<S>>,
    client: Client,
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
    client: Client,
    path: RegionPath,
) -> HandlerResult {
    let memory = state.memory().clone();
    offload::run(client, 0, move || memory.unregister_cuda(client, path.region())).await?;
    done()
}
