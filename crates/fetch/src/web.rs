//! A model file of a web server.

use reqwest::header::{ETAG, HeaderMap, LAST_MODIFIED};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode};
use url::Url;

use crate::body::Body;
use crate::failure::FetchError;
use crate::listing::{Listing, RemoteFile, check_path};
use crate::remote::{body, no_answer, refusal};

/// A model file of a web server.
#[derive(Debug)]
pub(crate) struct Web {
    url: Url,
    client: Client,
}

const HINT: &str = "an address with credentials is https://USER:PASSWORD@HOST/..., or one that is signed";

/// The validator of an answer: a strong ETag, or else the time of the last change.
fn tag(headers: &HeaderMap) -> Option<String> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    text(ETAG).filter(|tag| !tag.starts_with("W/")).or_else(|| text(LAST_MODIFIED)).or_else(|| text(ETAG))
}

impl Web {
    pub(crate) fn new(url: Url, client: Client) -> Self {
        Web { url, client }
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, FetchError> {
        request.send().await.map_err(|error| no_answer(&error))
    }

    /// Looks up the size and the validator of the file.
    pub(crate) async fn look(&self) -> Result<Listing, FetchError> {
        let file = self.describe(self.url.clone(), "model.onnx").await?;
        Ok(Listing { files: vec![file], ..Listing::default() })
    }

    /// Looks up external data beside the model.
    pub(crate) async fn find(&self, _model: &RemoteFile, location: &str) -> Result<RemoteFile, FetchError> {
        check_path(location)?;
        let mut url = self.url.clone();
        // The signature of an address is that of its own file.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop().extend(location.split('/'));
        }
        self.describe(url, location).await
    }

    async fn describe(&self, url: Url, path: &str) -> Result<RemoteFile, FetchError> {
        let mut response = self.send(self.client.request(Method::HEAD, url.clone())).await?;
        // Some servers and signed addresses allow GET alone.
        if matches!(response.status().as_u16(), 400 | 403 | 405 | 501) {
            response = self.send(self.client.get(url.clone()).header("range", "bytes=0-0")).await?;
        }
        if !response.status().is_success() {
            return Err(refusal(response.status(), &shown(&url), HINT));
        }
        let headers = response.headers();
        let size = match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                headers.get("content-range").and_then(|range| range.to_str().ok()?.rsplit_once('/')?.1.parse().ok())
            }
            _ => headers.get("content-length").and_then(|length| length.to_str().ok()?.parse().ok()),
        };
        let tag = tag(headers);
        Ok(RemoteFile { path: path.to_owned(), locator: shown(&url), size, tag, expected: None })
    }

    /// Reads the file from the byte `from` on, if it is still the same file.
    pub(crate) async fn read(&self, file: &RemoteFile, from: u64) -> Result<Body, FetchError> {
        let wrong = |error: url::ParseError| FetchError::Answer(error.to_string());
        let mut url = Url::parse(&file.locator).map_err(wrong)?;
        // The cache keeps no secrets: they are those of the address.
        url.set_query(self.url.query());
        // An address without a host has no user either.
        let _ = url.set_username(self.url.username()).and_then(|()| url.set_password(self.url.password()));
        let mut request = self.client.get(url.clone());
        if let (Some(tag), 1..) = (&file.tag, from) {
            request = request.header("range", format!("bytes={from}-")).header("if-range", tag);
        }
        let response = self.send(request).await?;
        if !response.status().is_success() {
            return Err(refusal(response.status(), &shown(&url), HINT));
        }
        if file.tag.is_some() && tag(response.headers()).is_some_and(|now| Some(now) != file.tag) {
            return Err(FetchError::Changed(shown(&url)));
        }
        body(response, from)
    }
}

/// An address without its user, password and signature.
pub(crate) fn shown(url: &Url) -> String {
    let mut shown = url.clone();
    shown.set_query(None);
    // An address without a host has no password either.
    let _ = shown.set_password(None).and_then(|()| shown.set_username(""));
    shown.to_string()
}
