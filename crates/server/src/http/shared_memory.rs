//! Shared memory regions: of the system, and of CUDA, of which there are none.

use std::convert::Infallible;

use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use downbeat_protocol::http::{RegionBody, RegisterRegionRequest};
use serde_json::Map;

use super::HttpState;
use super::answer::{HandlerResult, HttpError, ok, parse_json};
use super::body::WholeBody;
use super::path::RegionPath;
use crate::error::ServiceError;
use crate::service::Service;
use crate::shared_memory::{Client, RegionStatus};

/// Where the connection says who is at its other end; nobody does where the router is in another server.
impl<S: Send + Sync> FromRequestParts<S> for Client {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get().copied().unwrap_or_default())
    }
}

fn done() -> HandlerResult {
    ok(&Map::new())
}

fn regions(regions: Vec<RegionStatus>) -> HandlerResult {
    let body = |region: RegionStatus| RegionBody {
        name: region.name,
        key: region.key,
        offset: region.offset,
        byte_size: region.byte_size,
    };
    ok(&regions.into_iter().map(body).collect::<Vec<_>>())
}

pub(super) async fn status_of_all<S: Service>(State(state): State<HttpState<S>>, client: Client) -> HandlerResult {
    regions(state.memory().status(client, None)?)
}

pub(super) async fn status<S: Service>(
    State(state): State<HttpState<S>>,
    client: Client,
    path: RegionPath,
) -> HandlerResult {
    regions(state.memory().status(client, Some(&path.region))?)
}

pub(super) async fn register<S: Service>(
    State(state): State<HttpState<S>>,
    client: Client,
    path: RegionPath,
    body: WholeBody,
) -> HandlerResult {
    let request: RegisterRegionRequest = parse_json(&body.bytes)?;
    state.memory().register(client, &path.region, &request.key, request.offset, request.byte_size)?;
    done()
}

pub(super) async fn unregister<S: Service>(
    State(state): State<HttpState<S>>,
    client: Client,
    path: RegionPath,
) -> HandlerResult {
    state.memory().unregister(client, &path.region)?;
    done()
}

pub(super) async fn unregister_all<S: Service>(State(state): State<HttpState<S>>, client: Client) -> HandlerResult {
    state.memory().unregister_all(client)?;
    done()
}

pub(super) async fn cuda_status_of_all() -> HandlerResult {
    regions(Vec::new())
}

pub(super) async fn cuda_status(path: RegionPath) -> HandlerResult {
    Err(ServiceError::NotFound(format!("there is no CUDA shared memory region '{}'", path.region)).into())
}

/// 400 and not 501: as with a server of Triton's that has no GPU, the client asked the wrong server.
pub(super) async fn cuda_register(path: RegionPath) -> HandlerResult {
    Err(HttpError::new(
        StatusCode::BAD_REQUEST,
        format!(
            "CUDA shared memory region '{}' cannot be registered: this server has no CUDA shared memory; expected a \
             region under /v2/systemsharedmemory",
            path.region
        ),
    ))
}

/// As with the regions of the system, there is no error if there is nothing to forget.
pub(super) async fn cuda_unregister() -> HandlerResult {
    done()
}
