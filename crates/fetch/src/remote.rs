//! A server with models, of one of three kinds.

use reqwest::{Response, StatusCode};

use crate::body::Body;
use crate::failure::FetchError;
use crate::hub::Hub;
use crate::listing::{Listing, RemoteFile};
use crate::store::Store;
use crate::web::Web;

/// A server with models.
#[derive(Debug)]
pub(crate) enum Remote {
    Hub(Hub),
    Store(Store),
    Web(Web),
}

impl Remote {
    /// Looks for the present files.
    ///
    /// # Errors
    /// If the server has none, or does not say.
    pub(crate) async fn look(&self) -> Result<Listing, FetchError> {
        match self {
            Remote::Hub(hub) => hub.look().await,
            Remote::Store(store) => store.look().await,
            Remote::Web(web) => web.look().await,
        }
    }

    /// Looks for the external data `path` of a model, which the listing does not have.
    ///
    /// # Errors
    /// If the server does not have the file.
    pub(crate) async fn find(&self, model: &RemoteFile, location: &str) -> Result<RemoteFile, FetchError> {
        match self {
            Remote::Hub(hub) => Err(hub.without(location)),
            Remote::Store(store) => store.find(model, location).await,
            Remote::Web(web) => web.find(model, location).await,
        }
    }

    /// Reads a file from the byte `from` on.
    ///
    /// # Errors
    /// If the server refuses, or the file is another one by now.
    pub(crate) async fn read(&self, file: &RemoteFile, from: u64) -> Result<Body, FetchError> {
        match self {
            Remote::Hub(hub) => hub.read(file, from).await,
            Remote::Store(store) => store.read(file, from).await,
            Remote::Web(web) => web.read(file, from).await,
        }
    }
}

/// The body of an answer to a request for the bytes from `from` on.
///
/// # Errors
/// If the answer is none to this request.
pub(crate) fn body(response: Response, from: u64) -> Result<Body, FetchError> {
    use futures_util::TryStreamExt;
    let of_range = |response: &Response| {
        let range = response.headers().get("content-range")?.to_str().ok()?.strip_prefix("bytes ")?;
        let (span, size) = range.split_once('/')?;
        Some((span.split_once('-')?.0.parse::<u64>().ok()?, size.parse::<u64>().ok()))
    };
    let (from, size) = match response.status() {
        StatusCode::PARTIAL_CONTENT => match of_range(&response) {
            Some((start, size)) if start == from => (start, size),
            _ => return Err(FetchError::Answer("the server answered with other bytes than were asked for".to_owned())),
        },
        _ => (0, response.content_length()),
    };
    let bytes = response.bytes_stream().map_err(|error| words(&error));
    Ok(Body { from, size, bytes: Box::pin(bytes) })
}

/// An error of a request in words, with its causes.
pub(crate) fn words(error: &reqwest::Error) -> String {
    let mut words = if error.is_timeout() { "no answer in time".to_owned() } else { String::new() };
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(error);
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !words.contains(&text) {
            words = if words.is_empty() { text } else { format!("{words}: {text}") };
        }
        cause = inner.source();
    }
    if words.is_empty() { error.to_string() } else { words }
}

/// The words of rustls about an answer that is no TLS.
const NO_TLS: &str = "InvalidContentType";

/// The error of a request that got no answer.
pub(crate) fn no_answer(error: &reqwest::Error) -> FetchError {
    let host = error.url().and_then(|url| url.host_str().map(str::to_owned)).unwrap_or_else(|| "the server".to_owned());
    if error.is_redirect() || error.is_builder() {
        return FetchError::Answer(format!("{host}: {}", words(error)));
    }
    let words = words(error);
    if words.contains(NO_TLS) {
        return FetchError::Answer(format!("{host} answers without TLS; write http:// in place of https://"));
    }
    FetchError::Unreachable(format!("{host} does not answer: {words}"))
}

/// The error of an answer with this status, for `what`; `hint` is the remedy if access is refused.
pub(crate) fn refusal(status: StatusCode, what: &str, hint: &str) -> FetchError {
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            FetchError::Denied(format!("{what}: access is refused ({status}); {hint}"))
        }
        StatusCode::NOT_FOUND | StatusCode::GONE => FetchError::Missing(format!("{what}: does not exist ({status})")),
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
            FetchError::Unreachable(format!("{what}: the server has no time ({status})"))
        }
        status if status.is_server_error() => FetchError::Unreachable(format!("{what}: the server failed ({status})")),
        StatusCode::PRECONDITION_FAILED => FetchError::Changed(what.to_owned()),
        status => FetchError::Answer(format!("{what}: the server answered {status}")),
    }
}
