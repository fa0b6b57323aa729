//! The last launches on the lanes of devices.

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use downbeat_service::report::timeline::REMEMBERED;
use downbeat_service::service::Service;
use downbeat_service::work::offload;

use super::answer::{HandlerResult, HttpError, ok};
use super::scope::Scope;
use super::sender::Sender;
use super::state::HttpState;

/// The length of the timeline, unless a client asks for another.
const DEFAULT_SECONDS: f64 = 5.0;

pub(super) async fn past<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, .. }: Sender,
    RawQuery(query): RawQuery,
) -> HandlerResult {
    let most = REMEMBERED.as_secs_f64();
    let (mut seconds, mut scope) = (DEFAULT_SECONDS, Scope::default());
    for pair in query.iter().flat_map(|query| query.split('&')).filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let number = value.parse::<f64>().ok().filter(|number| *number > 0.0 && *number <= most);
        match (name, number) {
            ("seconds", Some(number)) => seconds = number,
            ("seconds", None) => {
                let message = format!("seconds must be a number above 0 and at most {most}");
                return Err(HttpError::new(StatusCode::BAD_REQUEST, message));
            }
            _ => {
                scope = Scope::of(pair).ok_or_else(|| {
                    let message = "the parameters are seconds and scope (cluster or process)";
                    HttpError::new(StatusCode::BAD_REQUEST, message.to_owned())
                })?;
            }
        }
    }
    if let Some(view) = scope.view(state.service()) {
        let timeline = view.timeline(std::time::Duration::from_secs_f64(seconds).into()).await;
        return offload::run(client, 0, move || ok(&timeline)).await?;
    }
    let work = move || match state.service().timeline(std::time::Duration::from_secs_f64(seconds)) {
        Some(timeline) => ok(&timeline),
        None => Err(HttpError::new(StatusCode::NOT_FOUND, "this server keeps no timeline".to_owned())),
    };
    offload::run(client, 0, work).await?
}
