//! The metrics port: `GET /metrics` in Prometheus' text format, and the probes. It has connections of its own, so that
//! whatever clients do on the other ports the server can be looked at.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tower_service::Service as _;

use crate::connections::{Connections, Stage, WatchedBody};
use crate::http::{Answers, HttpState, health_routes, serve_answers, with_slashes};
use crate::service::Service;
use crate::shared_memory::Client;

/// Gives what is answered at `/metrics`.
pub type MetricsText = Arc<dyn Fn() -> Result<String, prometheus::Error> + Send + Sync>;

/// Answers scrapes and probes until the process ends: the last moments of a drain should be seen, too.
pub async fn serve<S: Service>(
    listener: TcpListener,
    connections: Connections,
    metrics: MetricsText,
    state: HttpState<S>,
) {
    let scrape = move || {
        let text = metrics();
        async move {
            match text {
                Ok(text) => {
                    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
                }
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
            }
        }
    };
    let names = state.options().allow_host.clone();
    let router = Router::new().route("/metrics", get(scrape)).merge(health_routes().with_state(state));
    let (_serving, stages) = watch::channel(Stage::Serving);
    serve_answers(listener, connections, Routed(with_slashes(router)), &names, stages).await;
}

struct Routed(Router);

impl Answers for Routed {
    type Body = Body;

    async fn answer(&self, _client: Client, request: Request<WatchedBody>) -> Response<Body> {
        match self.0.clone().call(request.map(Body::new)).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }

    fn whole(body: Bytes) -> Body {
        Body::from(body)
    }
}
