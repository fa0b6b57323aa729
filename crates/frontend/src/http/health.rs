//! Liveness and readiness. 200 or 503, as Kubernetes asks; the body says it again in JSON, as
//! KServe's client asks.

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use downbeat_service::error::ServiceError;
use downbeat_service::service::Service;
use serde_json::json;

use super::answer::{HandlerResult, HttpError, json};
use super::path::ModelPath;
use super::state::HttpState;

pub async fn live<S: Service>(State(state): State<HttpState<S>>) -> Response {
    let live = state.service().is_live();
    json(status(live), &json!({ "live": live })).map(Body::from)
}

fn status(ready: bool) -> StatusCode {
    if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

pub async fn ready<S: Service>(State(state): State<HttpState<S>>) -> Response {
    let ready = state.service().is_ready();
    json(status(ready), &json!({ "ready": ready })).map(Body::from)
}

pub(super) async fn model_ready<S: Service>(State(state): State<HttpState<S>>, path: ModelPath) -> HandlerResult {
    let ready = state.service().check_model_ready(&path.model, &path.version).await;
    // A model that does not exist, or a version that is none, is never ready: no use in asking
    // again.
    if !ready
        && let Err(error @ (ServiceError::NotFound(_) | ServiceError::InvalidArgument(_))) =
            state.service().model_metadata(&path.model, &path.version)
    {
        return Err(HttpError::from(error));
    }
    Ok(json(status(ready), &json!({ "name": path.model, "ready": ready })).map(Body::from))
}
