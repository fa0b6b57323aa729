//! How many devices the server should have.

use axum::extract::State;
use axum::http::StatusCode;
use downbeat_service::service::Service;

use super::answer::{HandlerResult, HttpError, ok};
use super::state::HttpState;

pub(super) async fn advice<S: Service>(State(state): State<HttpState<S>>) -> HandlerResult {
    match state.service().autoscale() {
        Some(status) => ok(&status),
        None => Err(HttpError::new(
            StatusCode::NOT_FOUND,
            "autoscale advice is switched off: autoscale.enabled is false".to_owned(),
        )),
    }
}
