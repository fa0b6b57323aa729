//! What the scheduler's models do.

use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;

use super::HttpState;
use super::answer::{HandlerResult, HttpError, ok};
use crate::driver::ModelBehaviour;
use crate::service::Service;

#[derive(Serialize)]
struct Answer {
    /// Those that the rehearsal has found something for.
    models: Vec<ModelBehaviour>,
}

pub(super) async fn behaviours<S: Service>(State(state): State<HttpState<S>>) -> HandlerResult {
    match state.service().behaviours() {
        Some(models) => ok(&Answer { models }),
        None => {
            let message = "nothing is rehearsed: rehearsal_cpu is 0".to_owned();
            Err(HttpError::new(StatusCode::NOT_FOUND, message))
        }
    }
}
