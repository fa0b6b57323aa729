//! Paths that end in slashes: `GET /v2/` is `GET /v2`.

use axum::Router;
use axum::extract::Request;
use axum::http::Uri;
use tower_service::Service as _;

/// Routes that also answer under their paths with slashes at the end. A path that has a route as it
/// is written costs nothing more.
pub fn with_slashes(routes: Router) -> Router {
    let exact = routes.clone();
    routes.fallback(move |mut request: Request| {
        let mut exact = exact.clone();
        if let Some(uri) = without_slashes(request.uri()) {
            *request.uri_mut() = uri;
        }
        async move { exact.call(request).await }
    })
}

/// The URI without the slashes at the end of its path; `None` if there are none, or only slashes.
fn without_slashes(uri: &Uri) -> Option<Uri> {
    let path = uri.path().trim_end_matches('/');
    if path.is_empty() || path.len() == uri.path().len() {
        return None;
    }
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(format!("{path}{query}").parse().ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slashes_go_and_the_query_stays() {
        let without = |uri: &str| without_slashes(&uri.parse().unwrap()).map(|uri| uri.to_string());
        assert_eq!(without("/v2/").as_deref(), Some("/v2"));
        assert_eq!(without("/v2/timeline//?seconds=2").as_deref(), Some("/v2/timeline?seconds=2"));
        assert_eq!(without("http://host:8000/v2/models/a%2F/").as_deref(), Some("http://host:8000/v2/models/a%2F"));
        for exact in ["/v2", "/", "//", "*", "/v2?x=/"] {
            assert_eq!(without(exact), None, "{exact}");
        }
    }
}
