//! The OpenAPI text of this frontend.

use axum::body::Body;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;

/// The text, also for tests and tools.
pub const OPENAPI: &str = include_str!("../../openapi.yaml");

pub(super) async fn text() -> Response {
    let mut response = Response::new(Body::from(OPENAPI));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/yaml"));
    response
}
