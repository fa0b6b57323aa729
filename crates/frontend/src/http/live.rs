//! The route `/v2/live`: the present counts of models and devices.

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use downbeat_service::service::Service;
use downbeat_service::work::offload;

use super::answer::{HandlerResult, HttpError, ok};
use super::scope::Scope;
use super::sender::Sender;
use super::state::HttpState;

pub(super) async fn now<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, .. }: Sender,
    RawQuery(query): RawQuery,
) -> HandlerResult {
    let (mut history, mut scope) = (false, Scope::default());
    for pair in query.iter().flat_map(|query| query.split('&')).filter(|pair| !pair.is_empty()) {
        match pair {
            "history=true" => history = true,
            "history=false" => history = false,
            pair => {
                scope = Scope::of(pair).ok_or_else(|| {
                    let message = "the parameters are history (true or false) and scope (cluster or process)";
                    HttpError::new(StatusCode::BAD_REQUEST, message.to_owned())
                })?;
            }
        }
    }
    if let Some(view) = scope.view(state.service()) {
        let live = view.live(history).await;
        return offload::run(client, 0, move || ok(&live)).await?;
    }
    // The counts of thousands of models take milliseconds.
    let work = move || match state.service().live(history) {
        Some(live) => ok(&live),
        None => Err(HttpError::new(StatusCode::NOT_FOUND, "this process runs no models; ask a server".to_owned())),
    };
    offload::run(client, 0, work).await?
}
