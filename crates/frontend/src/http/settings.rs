//! Handlers of the settings of traces and of the log.

use axum::extract::State;
use downbeat_service::service::Service;

use super::answer::{HandlerResult, ok, read_json};
use super::body::WholeBody;
use super::path::ModelPath;
use super::state::HttpState;
use crate::settings::{log, trace};

pub(super) async fn trace<S: Service>(State(state): State<HttpState<S>>) -> HandlerResult {
    ok(&trace::get(&state.options().traces, None))
}

pub(super) async fn change_trace<S: Service>(State(state): State<HttpState<S>>, body: WholeBody) -> HandlerResult {
    ok(&trace::change(&state.options().traces, None, &read_json(&body.bytes)?)?)
}

pub(super) async fn model_trace<S: Service>(State(state): State<HttpState<S>>, path: ModelPath) -> HandlerResult {
    state.service().model_metadata(&path.model, "")?;
    ok(&trace::get(&state.options().traces, Some(&path.model)))
}

pub(super) async fn change_model_trace<S: Service>(
    State(state): State<HttpState<S>>,
    path: ModelPath,
    body: WholeBody,
) -> HandlerResult {
    state.service().model_metadata(&path.model, "")?;
    ok(&trace::change(&state.options().traces, Some(&path.model), &read_json(&body.bytes)?)?)
}

pub(super) async fn logging() -> HandlerResult {
    ok(&log::get())
}

pub(super) async fn change_logging(body: WholeBody) -> HandlerResult {
    ok(&log::change(&read_json(&body.bytes)?)?)
}
