//! The metrics port: `GET /metrics` in Prometheus' text format.

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;

use crate::registry::Registry;

/// Answers scrapes until the process ends.
pub async fn serve(listener: TcpListener, registry: Registry) {
    let scrape = move || {
        let text = registry.metrics();
        async move {
            match text {
                Ok(text) => {
                    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
                }
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
            }
        }
    };
    let router = Router::new().route("/metrics", get(scrape));
    if let Err(error) = axum::serve(listener, router).await {
        tracing::error!(%error, "the metrics port is closed");
    }
}
