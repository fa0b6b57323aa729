//! The health port: liveness and readiness alone, on a thread and an event loop of their own.
//! Nothing that clients ask of the other ports takes that thread's time. The port says no if a part
//! of the process hangs.

use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use downbeat_service::service::Service;
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::sync::watch;

use crate::connections::{ConnectionOptions, Connections, Stage};
use crate::http::{HttpState, Routed, live, ready, serve_answers, with_slashes};
use crate::liveness::Liveness;

/// Most connections of the port. Probes and load balancers have a few. Clients that send half a
/// head take others, for a second each.
const MOST_CONNECTIONS: usize = 256;
/// How long the head of a probe may take, and its answer.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(1);

/// Answers probes until the process ends, so that the last moments of a drain are seen too.
///
/// # Errors
/// If the system has no thread or no file descriptor left.
pub fn serve<S: Service>(
    listener: TcpListener,
    options: ConnectionOptions,
    state: HttpState<S>,
    liveness: Liveness,
) -> std::io::Result<()> {
    let listener = listener.into_std()?;
    let names = state.options().allow_host.clone();
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let routes = Router::new()
        .route("/v2/health/live", get(live::<S>))
        .route("/v2/health/ready", get(ready::<S>))
        .route_layer(from_fn_with_state(liveness, check))
        .with_state(state);
    let transfer_timeout = Some(options.transfer_timeout.map_or(TRANSFER_TIMEOUT, |limit| limit.min(TRANSFER_TIMEOUT)));
    let connections = Connections::new(ConnectionOptions { max: MOST_CONNECTIONS, transfer_timeout, ..options });
    let answer = async move {
        let (_serving, stages) = watch::channel(Stage::Serving);
        match TcpListener::from_std(listener) {
            Ok(listener) => serve_answers(listener, connections, Routed(with_slashes(routes)), &names, stages).await,
            Err(error) => tracing::error!(%error, "the health port cannot be answered"),
        }
    };
    std::thread::Builder::new().name("health".to_owned()).spawn(move || runtime.block_on(answer))?;
    Ok(())
}

/// Answers a probe only if all parts of the process go on.
async fn check(State(liveness): State<Liveness>, request: Request, next: Next) -> Response {
    if liveness.go_on() {
        next.run(request).await
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "a part of this process hangs: its log names the part\n").into_response()
    }
}
