//! What the scheduler's queues do, and why; which model is where.

use axum::extract::State;
use axum::http::StatusCode;

use super::HttpState;
use super::answer::{HandlerResult, HttpError, ok};
use crate::service::Service;

pub(super) async fn status<S: Service>(State(state): State<HttpState<S>>) -> HandlerResult {
    match state.service().scheduler() {
        Some(status) => ok(&status),
        None => Err(HttpError::new(StatusCode::NOT_FOUND, "this server has no scheduler".to_owned())),
    }
}

pub(super) async fn devices<S: Service>(State(state): State<HttpState<S>>) -> HandlerResult {
    match state.service().devices() {
        Some(devices) => ok(&devices),
        None => Err(HttpError::new(StatusCode::NOT_FOUND, "this server has no devices".to_owned())),
    }
}
