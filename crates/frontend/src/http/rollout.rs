//! The rollout of a model's new version.

use axum::extract::State;
use downbeat_core::rollout::RolloutChange;
use downbeat_service::service::Service;

use super::answer::{HandlerResult, ok, parse_json};
use super::body::WholeBody;
use super::path::ModelPath;
use super::state::HttpState;

pub(super) async fn report<S: Service>(State(state): State<HttpState<S>>, path: ModelPath) -> HandlerResult {
    ok(&state.service().rollout(&path.model)?)
}

pub(super) async fn change<S: Service>(
    State(state): State<HttpState<S>>,
    path: ModelPath,
    body: WholeBody,
) -> HandlerResult {
    let change: RolloutChange = parse_json(&body.bytes)?;
    ok(&state.service().change_rollout(&path.model, &change)?)
}
