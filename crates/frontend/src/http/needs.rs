//! The needs of requests over HTTP, by method and route.

use std::sync::Arc;

use axum::extract::{FromRequestParts, MatchedPath, Request, State};
use axum::http::{HeaderMap, Method};
use axum::middleware::Next;
use axum::response::Response;
use downbeat_service::client::Client;
use downbeat_service::options::Api;
use downbeat_service::service::Service;

use super::answer::HttpError;
use super::path::ModelPath;
use super::state::HttpState;
use super::ui_page;
use crate::access::{Access, Caller, Models, Need, Scope};

/// Routes for everybody: probes, and texts that are the same on every server.
const OPEN: [&str; 5] = ["/v2/health/live", "/v2/health/ready", "/v2/openapi.yaml", "/docs", "/docs/rapidoc.js"];
/// Routes without a model whose handlers show the models of the key alone, or none.
const CHECKED: [&str; 3] = ["/v2", "/v2/repository/index", "/v2/models/stats"];

/// The need of a request that the router has sent to `route`; `None`: there is no such route. Every
/// method but a read needs the scope `manage`, unless it is named here.
fn need<'a>(method: &Method, route: Option<&str>, model: Option<&'a str>) -> Need<'a> {
    let route = route.unwrap_or_default();
    let ends = |ends: &[&str]| ends.iter().any(|end| route.ends_with(end));
    let is_inference = model.is_some() && ends(&["/infer", "/generate", "/generate_stream"]);
    let scope = match *method {
        Method::GET | Method::HEAD if OPEN.contains(&route) || ui_page::has(route) => Scope::Open,
        Method::POST if is_inference => Scope::Infer,
        Method::GET | Method::HEAD | Method::OPTIONS => Scope::Read,
        Method::POST if route == "/v2/repository/index" => Scope::Read,
        _ => Scope::Manage,
    };
    let api = match route {
        _ if is_inference => Api::Inference,
        _ if ends(&["/health/live", "/health/ready", "/ready"]) => Api::Health,
        _ if ends(&["/config"]) => Api::ModelConfig,
        _ if ends(&["/trace/setting"]) => Api::Trace,
        "/v2/logging" => Api::Logging,
        "/v2" | "/v2/models/{model}" | "/v2/models/{model}/versions/{version}" => Api::Metadata,
        _ if route.starts_with("/v2/repository/") => Api::ModelRepository,
        _ if route.contains("sharedmemory") => Api::SharedMemory,
        _ => Api::Statistics,
    };
    let models = match model {
        Some(model) => Models::One(model),
        None if route.is_empty() || CHECKED.contains(&route) => Models::Checked,
        None => Models::All,
    };
    Need { scope, api, models }
}

/// The sender of an inference of a model, if it may send the request.
pub(super) fn admit_inference<S: Service>(
    state: &HttpState<S>,
    client: Client,
    model: &str,
    headers: &HeaderMap,
) -> Result<Caller, HttpError> {
    let Some(access) = &state.options().access else { return Ok(Caller::default()) };
    let need = Need { scope: Scope::Infer, api: Api::Inference, models: Models::One(model) };
    Ok(access.admit_http(client, need, headers)?)
}

/// Checks each request that the router has found a route for, or none. Handlers find the [`Caller`]
/// among the extensions.
pub(super) async fn admit(
    State(access): State<Arc<Access>>,
    route: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Result<Response, HttpError> {
    let (mut parts, body) = request.into_parts();
    let client = parts.extensions.get().copied().unwrap_or_default();
    // No route, or a name that is no UTF-8, which the handler refuses.
    let model = ModelPath::from_request_parts(&mut parts, &()).await.map_or(String::new(), |path| path.model);
    let model = (!model.is_empty()).then_some(model.as_str());
    let need = need(&parts.method, route.as_ref().map(MatchedPath::as_str), model);
    let caller = access.admit_http(client, need, &parts.headers)?;
    parts.extensions.insert(caller);
    Ok(next.run(Request::from_parts(parts, body)).await)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(method: Method, route: &str) -> Scope {
        need(&method, Some(route), route.contains("{model}").then_some("m")).scope
    }

    #[test]
    fn what_is_no_read_and_no_inference_is_for_managers() {
        assert_eq!(scope(Method::GET, "/v2/health/live"), Scope::Open);
        assert_eq!(scope(Method::POST, "/v2/health/live"), Scope::Manage);
        assert_eq!((scope(Method::GET, "/ui"), scope(Method::GET, "/ui/app.js")), (Scope::Open, Scope::Open));
        assert_eq!((scope(Method::POST, "/ui"), scope(Method::GET, "/v2/live")), (Scope::Manage, Scope::Read));
        assert_eq!(scope(Method::POST, "/v2/models/{model}/infer"), Scope::Infer);
        assert_eq!(scope(Method::POST, "/v2/models/{model}/versions/{version}/generate_stream"), Scope::Infer);
        assert_eq!(scope(Method::GET, "/v2/models/{model}/config"), Scope::Read);
        assert_eq!(scope(Method::POST, "/v2/repository/index"), Scope::Read);
        assert_eq!(scope(Method::POST, "/v2/logging"), Scope::Manage);
        assert_eq!(scope(Method::POST, "/v2/repository/models/{model}/load"), Scope::Manage);
        assert_eq!(scope(Method::DELETE, "/v2/repository/models/{model}/share"), Scope::Manage);
        assert_eq!(scope(Method::POST, "/v2/systemsharedmemory/region/{region}/register"), Scope::Manage);
        assert_eq!(scope(Method::POST, "/v2/a/route/of/next/year"), Scope::Manage);
        assert_eq!(scope(Method::PUT, "/v2/models/{model}/infer"), Scope::Manage);
        assert_eq!(need(&Method::POST, None, None).scope, Scope::Manage);
        assert_eq!(need(&Method::GET, None, None).scope, Scope::Read);
    }

    #[test]
    fn routes_belong_to_tritons_apis() {
        let api = |route: &str| need(&Method::POST, Some(route), route.contains("{model}").then_some("m")).api;
        assert_eq!(api("/v2/models/{model}/generate"), Api::Inference);
        assert_eq!(api("/v2/models/{model}/versions/{version}/ready"), Api::Health);
        assert_eq!(api("/v2/models/{model}/trace/setting"), Api::Trace);
        assert_eq!(api("/v2/cudasharedmemory/region/{region}/register"), Api::SharedMemory);
        assert_eq!(api("/v2/repository/models/{model}/unload"), Api::ModelRepository);
        assert_eq!(api("/v2/models/{model}/versions/{version}"), Api::Metadata);
        assert_eq!(api("/v2/models/stats"), Api::Statistics);
    }

    #[test]
    fn a_route_about_the_whole_server_is_not_for_a_key_of_some_models() {
        let models = |route: &str, model| need(&Method::GET, Some(route), model).models;
        assert_eq!(models("/metrics", None), Models::All);
        assert_eq!(models("/v2/timeline", None), Models::All);
        assert_eq!(models("/v2/models/stats", None), Models::Checked);
        assert_eq!(models("/v2/models/{model}/stats", Some("m")), Models::One("m"));
    }
}
