//! Answers: JSON bodies, and errors as `{"error": "..."}`.

use axum::body::Body;
use axum::http::header::{ACCEPT_ENCODING, CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, Response, StatusCode};
use axum::response::IntoResponse;
use bytes::Bytes;
use downbeat_protocol::CodecError;
use downbeat_protocol::http::ErrorBody;
use downbeat_service::error::ServiceError;
use downbeat_service::traces::open::OpenTrace;
use serde::Serialize;

use crate::access::Denied;

pub(super) const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// An answer whose body is whole.
pub(super) type Answer = Response<Bytes>;

/// A failed request: its status, its error message, and whether its connection ends.
#[derive(Debug)]
pub(super) struct HttpError {
    status: StatusCode,
    message: String,
    retry_after: Option<u64>,
    close: bool,
}

impl HttpError {
    pub fn new(status: StatusCode, message: String) -> HttpError {
        HttpError { status, message, retry_after: None, close: false }
    }

    /// Ends the connection with this answer.
    pub fn closing(mut self) -> HttpError {
        self.close = true;
        self
    }

    /// Notes the error in the trace of its request, if the request is traced.
    #[cold]
    pub fn tell(&self, trace: Option<&OpenTrace>) {
        if let Some(trace) = trace {
            trace.outcome(self.status.as_u16(), Some(&self.message));
        }
    }

    pub fn answer(self) -> Answer {
        let mut answer = json(self.status, &ErrorBody { error: self.message });
        let headers = answer.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNSUPPORTED_MEDIA_TYPE {
            headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip, deflate, identity"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.close {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        answer
    }
}

impl From<ServiceError> for HttpError {
    fn from(error: ServiceError) -> Self {
        HttpError {
            status: error.http_status(),
            retry_after: error.retry_after_seconds(),
            message: match &error {
                ServiceError::Decoupled(model) => format!(
                    "HTTP end point doesn't support models with decoupled transaction policy; send requests for model \
                     '{model}' to its generate_stream, or over gRPC by ModelStreamInfer"
                ),
                error => error.to_string(),
            },
            close: false,
        }
    }
}

impl From<Denied> for HttpError {
    fn from(denied: Denied) -> Self {
        let (status, retry_after) = (denied.http_status(), denied.retry_after_seconds());
        HttpError { status, message: denied.to_string(), retry_after, close: false }
    }
}

impl From<CodecError> for HttpError {
    fn from(error: CodecError) -> Self {
        HttpError::new(StatusCode::BAD_REQUEST, error.to_string())
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> axum::response::Response {
        self.answer().map(Body::from)
    }
}

/// An answer with a JSON body.
pub(super) fn json<T: Serialize>(status: StatusCode, body: &T) -> Answer {
    match serde_json::to_string(body) {
        Ok(text) => json_text(status, text),
        Err(error) => {
            tracing::error!(%error, "an answer could not be written as JSON");
            json_text(StatusCode::INTERNAL_SERVER_ERROR, r#"{"error":"the answer could not be written"}"#.to_owned())
        }
    }
}

/// An answer with JSON that is already written.
pub(super) fn json_text(status: StatusCode, text: String) -> Answer {
    let mut answer = Response::new(Bytes::from(text));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, JSON);
    answer
}

/// The result of a handler.
pub(super) type HandlerResult = Result<axum::response::Response, HttpError>;

/// A handler's 200 with a JSON body.
pub(super) fn ok<T: Serialize>(body: &T) -> HandlerResult {
    Ok(json(StatusCode::OK, body).map(Body::from))
}

/// Reads the JSON of a request that is not an inference; an empty body is the default.
pub(super) fn read_json<T: serde::de::DeserializeOwned + Default>(body: &[u8]) -> Result<T, HttpError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(T::default());
    }
    parse_json(body)
}

/// Reads the JSON of a request that is not an inference.
pub(super) fn parse_json<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, HttpError> {
    // serde would also take a list of the fields' values.
    if body.trim_ascii_start().first() == Some(&b'[') {
        return Err(HttpError::new(
            StatusCode::BAD_REQUEST,
            "the body is not the expected JSON: the body is a list, expected an object".to_owned(),
        ));
    }
    serde_json::from_slice(body)
        .map_err(|e| HttpError::new(StatusCode::BAD_REQUEST, format!("the body is not the expected JSON: {e}")))
}

/// The answer to a body that is too large, as sent or once decompressed. The words are partly
/// Triton's, which clients look for.
pub(super) fn too_large(size: &str, limit: usize) -> HttpError {
    HttpError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        format!(
            "the request body has {size}, which exceeds the maximum allowed value; expected at most {limit} bytes (the \
             server's body limit, --max-body-bytes)"
        ),
    )
}
