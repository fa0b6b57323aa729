//! The health port: liveness and readiness alone, on a thread and an event loop of their own. Nothing that clients ask of
//! the other ports takes that thread's time.

use axum::Router;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::sync::watch;

use crate::connections::{ConnectionOptions, Connections, Stage};
use crate::http::{HttpState, Routed, live, ready, serve_answers, with_slashes};
use crate::service::Service;

/// Most connections of the port: probes and load balancers have a few.
const MOST_CONNECTIONS: usize = 64;

/// Answers probes until the process ends, so that the last moments of a drain are seen too.
///
/// # Errors
/// If the system has no thread or no file descriptor left.
pub fn serve<S: Service>(
    listener: TcpListener,
    options: ConnectionOptions,
    state: HttpState<S>,
) -> std::io::Result<()> {
    let listener = listener.into_std()?;
    let names = state.options().allow_host.clone();
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let routes = Router::new()
        .route("/v2/health/live", get(live::<S>))
        .route("/v2/health/ready", get(ready::<S>))
        .with_state(state);
    let connections = Connections::new(ConnectionOptions { max: MOST_CONNECTIONS, ..options });
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
