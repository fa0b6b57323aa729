//! The state of the scheduler's queues with reasons, and the models on each device.

use axum::extract::State;
use axum::http::StatusCode;
use downbeat_service::service::Service;
use downbeat_service::work::offload;

use super::answer::{HandlerResult, HttpError, ok};
use super::sender::Sender;
use super::state::HttpState;

const NO_SCHEDULER: &str =
    "this process has no scheduler; in a cluster, ask the leading scheduler (GET /v2/cluster names it)";

pub(super) async fn status<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, .. }: Sender,
) -> HandlerResult {
    let work = move || match state.service().scheduler() {
        Some(status) => ok(&status),
        None => Err(HttpError::new(StatusCode::NOT_FOUND, NO_SCHEDULER.to_owned())),
    };
    offload::run(client, 0, work).await?
}

pub(super) async fn devices<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, .. }: Sender,
) -> HandlerResult {
    let work = move || match state.service().devices() {
        Some(devices) => ok(&devices),
        None => Err(HttpError::new(StatusCode::NOT_FOUND, "this server has no devices".to_owned())),
    };
    offload::run(client, 0, work).await?
}
