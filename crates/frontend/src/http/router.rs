//! The paths of the HTTP frontend.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::routing::{get, post, put};
use downbeat_service::service::Service;
use tokio::net::TcpListener;

use super::answer::HttpError;
use super::host_names::HostNames;
use super::slashes::with_slashes;
use super::state::HttpState;
use super::{
    autoscale, cluster, docs_page, generate, health, infer, live, metadata, needs, openapi, repository, rollout,
    scheduler, settings, shared_memory, timeline, ui_page, what_if,
};

/// [`router`] with the checks of `Host` and `Origin` that [`serve`](super::serve) makes for the port of
/// `listener`: no page of another site can load or unload models. A server that embeds Downbeat
/// adds routes of its own to the result, or merges the result into its router.
pub fn checked_router<S: Service>(listener: &TcpListener, state: HttpState<S>) -> Router {
    let names = Arc::new(HostNames::of(listener, &state.options().allow_host));
    router(state).layer(from_fn(move |request: Request, next: Next| {
        let checked = names.check(&request);
        async move {
            match checked {
                Ok(()) => Ok(next.run(request).await),
                Err(refused) => Err(refused),
            }
        }
    }))
}

/// The protocol as an axum router, which checks neither `Host` nor `Origin`. Every path may end in
/// a slash.
pub fn router<S: Service>(state: HttpState<S>) -> Router {
    routes(state, Router::new())
}

/// [`router`] with the page `/docs` about its paths, and the page `/ui` about the server. A server that
/// embeds Downbeat may have its own pages at these paths.
pub(super) fn router_with_page<S: Service>(state: HttpState<S>) -> Router {
    routes(state, docs_page::routes().merge(ui_page::routes()))
}

fn routes<S: Service>(state: HttpState<S>, others: Router<HttpState<S>>) -> Router {
    let routes = others
        .route("/v2", get(metadata::server::<S>))
        .route("/v2/openapi.yaml", get(openapi::text))
        .merge(health_routes())
        .route("/v2/models/stats", get(metadata::statistics::<S>))
        .merge(model_routes("/v2/models/{model}"))
        .merge(model_routes("/v2/models/{model}/versions/{version}"))
        .route(
            "/v2/models/{model}/trace/setting",
            get(settings::model_trace::<S>).post(settings::change_model_trace::<S>),
        )
        .route("/v2/models/{model}/rollout", get(rollout::report::<S>).post(rollout::change::<S>))
        .route("/v2/trace/setting", get(settings::trace::<S>).post(settings::change_trace::<S>))
        .route("/v2/devices", get(scheduler::devices::<S>))
        .merge(figure_routes())
        .route("/v2/what-if", get(what_if::answer::<S>))
        .route("/v2/logging", get(settings::logging).post(settings::change_logging))
        .route("/v2/repository/index", post(repository::index::<S>))
        .route("/v2/repository/models/{model}/load", post(repository::load::<S>))
        .route("/v2/repository/models/{model}/unload", post(repository::unload::<S>))
        .route(
            "/v2/repository/models/{model}/share",
            put(repository::set_share::<S>).delete(repository::free_share::<S>),
        )
        .nest("/v2/systemsharedmemory", system_memory_routes())
        .nest("/v2/cudasharedmemory", cuda_memory_routes())
        .fallback(no_such_path)
        .method_not_allowed_fallback(wrong_method);
    with_slashes(admitted(routes, state))
}

/// Routes that check who sends a request, if the options have rules for that.
pub fn admitted<S: Service>(routes: Router<HttpState<S>>, state: HttpState<S>) -> Router {
    let routes = match &state.options().access {
        Some(access) => routes.layer(from_fn_with_state(Arc::clone(access), needs::admit)),
        None => routes,
    };
    routes.with_state(state)
}

/// Routes for probes: liveness and readiness, the processes of the cluster, and the advised number
/// of devices.
pub fn health_routes<S: Service>() -> Router<HttpState<S>> {
    Router::new()
        .route("/v2/health/live", get(health::live::<S>))
        .route("/v2/health/ready", get(health::ready::<S>))
        .route("/v2/cluster", get(cluster::status::<S>))
        .route("/v2/cluster/plan", post(cluster::plan::<S>))
        .route("/v2/autoscale", get(autoscale::advice::<S>))
}

/// [`health_routes`] with the page `/ui` and its figures, for a process without models.
pub fn health_routes_with_page<S: Service>() -> Router<HttpState<S>> {
    health_routes().merge(figure_routes()).merge(ui_page::routes())
}

/// Routes for the figures of a process, and of its whole cluster.
fn figure_routes<S: Service>() -> Router<HttpState<S>> {
    Router::new()
        .route("/v2/timeline", get(timeline::past::<S>))
        .route("/v2/live", get(live::now::<S>))
        .route("/v2/cluster/stats", get(cluster::statistics::<S>))
        .route("/v2/scheduler", get(scheduler::status::<S>))
}

/// A model's routes under its path, and under the path of one of its versions.
fn model_routes<S: Service>(base: &str) -> Router<HttpState<S>> {
    Router::new()
        .route(base, get(metadata::model::<S>))
        .route(&format!("{base}/ready"), get(health::model_ready::<S>))
        .route(&format!("{base}/config"), get(metadata::config::<S>))
        .route(&format!("{base}/policy"), get(metadata::policy::<S>))
        .route(&format!("{base}/missed"), get(metadata::missed::<S>))
        .route(&format!("{base}/stats"), get(metadata::statistics::<S>))
        .route(&format!("{base}/infer"), post(infer::handler::<S>))
        .route(&format!("{base}/generate"), post(generate::one::<S>))
        .route(&format!("{base}/generate_stream"), post(generate::stream::<S>))
}

fn system_memory_routes<S: Service>() -> Router<HttpState<S>> {
    Router::new()
        .route("/status", get(shared_memory::status::<S>))
        .route("/unregister", post(shared_memory::unregister::<S>))
        .route("/region/{region}/status", get(shared_memory::status::<S>))
        .route("/region/{region}/register", post(shared_memory::register::<S>))
        .route("/region/{region}/unregister", post(shared_memory::unregister::<S>))
}

fn cuda_memory_routes<S: Service>() -> Router<HttpState<S>> {
    Router::new()
        .route("/status", get(shared_memory::cuda_status::<S>))
        .route("/unregister", post(shared_memory::cuda_unregister::<S>))
        .route("/region/{region}/status", get(shared_memory::cuda_status::<S>))
        .route("/region/{region}/register", post(shared_memory::cuda_register::<S>))
        .route("/region/{region}/unregister", post(shared_memory::cuda_unregister::<S>))
}

async fn no_such_path(method: Method, uri: Uri) -> HttpError {
    HttpError::new(
        StatusCode::NOT_FOUND,
        format!("{method} {}: no such path; GET /v2/openapi.yaml lists the paths, and /docs shows them", uri.path()),
    )
}

async fn wrong_method(method: Method, uri: Uri) -> HttpError {
    HttpError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        format!(
            "{method} {}: the path does not take this method; the header Allow lists the methods that it takes",
            uri.path()
        ),
    )
}
