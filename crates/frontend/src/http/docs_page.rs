//! The page at `/docs`, which shows the OpenAPI text in a browser and sends requests. The page takes
//! nothing from another server.

use std::io::Read;

use axum::Router;
use axum::body::Body;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, VARY,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use axum::routing::get;
use bytes::Bytes;
use downbeat_service::work::offload;
use flate2::read::GzDecoder;

use super::answer::{HandlerResult, HttpError};
use super::encoding;
use super::sender::Sender;
use crate::compression::Coding;

/// The page.
const PAGE: &str = include_str!("../../docs_page/index.html");
/// RapiDoc, compressed.
const SCRIPT: &[u8] = include_bytes!("../../docs_page/rapidoc-min.js.gz");

/// RapiDoc writes styles into its own elements. All requests go to this server.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; img-src 'self' data: blob:; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
);

/// The routes of the page and its script.
pub(super) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new().route("/docs", get(page)).route("/docs/rapidoc.js", get(script))
}

/// A file of a page, with these headers.
pub(super) fn answer(body: impl Into<Body>, headers: impl IntoIterator<Item = (HeaderName, &'static str)>) -> Response {
    let mut response = Response::new(body.into());
    response.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response.headers_mut().extend(headers.into_iter().map(|(name, value)| (name, HeaderValue::from_static(value))));
    response
}

async fn page() -> Response {
    let mut response = answer(PAGE, [(CONTENT_TYPE, "text/html; charset=utf-8"), (REFERRER_POLICY, "no-referrer")]);
    response.headers_mut().insert(CONTENT_SECURITY_POLICY, POLICY);
    response
}

/// The script as it is stored for clients that take gzip, as all browsers do; unpacked for others.
async fn script(Sender { client, .. }: Sender, headers: HeaderMap) -> HandlerResult {
    let kind =
        [(CONTENT_TYPE, "text/javascript; charset=utf-8"), (CACHE_CONTROL, "max-age=3600"), (VARY, "accept-encoding")];
    if encoding::of_answer(&headers) == Some(Coding::Gzip) {
        let mut response = answer(SCRIPT, kind);
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static(Coding::Gzip.name()));
        return Ok(response);
    }
    let unpack = || {
        let mut script = Vec::new();
        GzDecoder::new(SCRIPT).read_to_end(&mut script).map(|_| Bytes::from(script))
    };
    let unpacked = offload::run(client, SCRIPT.len(), unpack).await?;
    let script = unpacked.map_err(|error| {
        HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("the script of the page cannot be unpacked: {error}"))
    })?;
    Ok(answer(script, kind))
}
