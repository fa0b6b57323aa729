//! The route `/v2/live`: the present counts of models and devices.

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use downbeat_service::service::Service;
use downbeat_service::work::offload;

use super::answer::{HandlerResult, HttpError, ok};
use super::sender::Sender;
use super::state::HttpState;

pub(super) async fn now<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, .. }: Sender,
    RawQuery(query): RawQuery,
) -> HandlerResult {
    let history = match query.as_deref() {
        None | Some("" | "history=false") => false,
        Some("history=true") => true,
        Some(_) => {
            let message = "the only parameter is history, which is true or false".to_owned();
            return Err(HttpError::new(StatusCode::BAD_REQUEST, message));
        }
    };
    // The counts of thousands of models take milliseconds.
    let work = move || match state.service().live(history) {
        Some(live) => ok(&live),
        None => Err(HttpError::new(StatusCode::NOT_FOUND, "this process runs no models; ask a server".to_owned())),
    };
    offload::run(client, 0, work).await?
}
