//! The metrics port: `GET /metrics` in Prometheus' text format, and the probes. It has connections
//! of its own, so that load on the other ports does not block monitoring.

use std::sync::Arc;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use downbeat_service::service::Service;
use downbeat_service::work::offload;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::connections::{Connections, Stage};
use crate::http::{HttpState, Routed, Sender, admitted, serve_answers, with_slashes};

/// Makes the answer at `/metrics`.
pub type MetricsText = Arc<dyn Fn() -> Result<String, prometheus::Error> + Send + Sync>;

/// Answers scrapes, and requests of the routes `others`, until the process ends: the last moments of
/// a drain should be seen, too.
pub async fn serve<S: Service>(
    listener: TcpListener,
    connections: Connections,
    metrics: MetricsText,
    (state, others): (HttpState<S>, Router<HttpState<S>>),
) {
    let scrape = move |Sender { client, .. }: Sender| {
        let metrics = metrics.clone();
        async move {
            // The metrics of thousands of models take many milliseconds.
            match offload::run(client, 0, move || metrics()).await {
                Ok(Ok(text)) => {
                    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
                }
                Ok(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
                Err(error) => (error.http_status(), error.to_string()).into_response(),
            }
        }
    };
    let names = state.options().allow_host.clone();
    let router = admitted(Router::new().route("/metrics", get(scrape)).merge(others), state);
    let (_serving, stages) = watch::channel(Stage::Serving);
    serve_answers(listener, connections, Routed(with_slashes(router)), &names, stages).await;
}
