//! A process's view of its cluster.

use axum::extract::State;
use axum::http::StatusCode;
use downbeat_service::service::Service;

use super::answer::{HandlerResult, HttpError, ok};
use super::state::HttpState;

pub(super) async fn status<S: Service>(State(state): State<HttpState<S>>) -> HandlerResult {
    match state.service().cluster() {
        Some(status) => ok(&status),
        None => Err(HttpError::new(StatusCode::NOT_FOUND, "this server is not part of a cluster".to_owned())),
    }
}

pub(super) async fn plan<S: Service>(State(state): State<HttpState<S>>) -> HandlerResult {
    state.service().plan_cluster().await?;
    ok(&serde_json::json!({}))
}
