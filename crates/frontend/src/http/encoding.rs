//! Content codings as HTTP names them: of requests and answers.

use axum::http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, VARY};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use bytes::Bytes;
use downbeat_service::budget::Reservation;
use downbeat_service::client::Client;
use downbeat_service::work::offload;

use super::answer::{Answer, HttpError, too_large};
use crate::compression::{Coding, InflateError};

/// Answers below this size are sent as they are: compressing costs more than the bytes it saves.
const SMALLEST_COMPRESSED: usize = 1024;

/// The coding of the request's body, by its `Content-Encoding`.
pub(super) fn of_request(headers: &HeaderMap) -> Result<Option<Coding>, HttpError> {
    let Some(value) = headers.get(CONTENT_ENCODING) else {
        return Ok(None);
    };
    match value.to_str().map(|name| name.trim().to_ascii_lowercase()).as_deref() {
        Ok("identity" | "") => Ok(None),
        Ok("gzip" | "x-gzip") => Ok(Some(Coding::Gzip)),
        Ok("deflate") => Ok(Some(Coding::Deflate)),
        _ => Err(HttpError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            format!("Content-Encoding is {value:?}; expected one of gzip, deflate and identity"),
        )),
    }
}

/// Undoes the coding of a request. At most `limit` bytes come out.
pub(super) async fn decode(
    coding: Coding,
    client: Client,
    body: Bytes,
    held: Reservation,
    limit: usize,
) -> Result<(Bytes, Reservation), HttpError> {
    coding.inflate(client, body, limit, held).await.map_err(|error| match error {
        InflateError::Malformed(error) => HttpError::new(
            StatusCode::BAD_REQUEST,
            format!("the body is not compressed as Content-Encoding declares ({}): {error}", coding.name()),
        ),
        InflateError::TooLarge => too_large(&format!("more than {limit} bytes once decompressed"), limit),
        InflateError::Refused(error) => error.into(),
    })
}

/// The coding that an answer to a request with these headers may have.
pub(super) fn of_answer(request_headers: &HeaderMap) -> Option<Coding> {
    request_headers.get(ACCEPT_ENCODING).and_then(accepted)
}

/// Compresses the answer if it is worth it.
pub(super) async fn encode(coding: Coding, client: Client, mut answer: Answer) -> Answer {
    if answer.body().len() < SMALLEST_COMPRESSED {
        return answer;
    }
    let body = answer.body().clone();
    let length = body.len();
    let compressed =
        offload::run_if(length >= offload::PARSE_FROM, client, length, move || coding.deflate(&body)).await;
    // Writing to memory cannot fail. If the worker is gone, the answer stays uncompressed.
    if let Ok(Ok(compressed)) = compressed {
        *answer.body_mut() = compressed;
        answer.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static(coding.name()));
        answer.headers_mut().insert(VARY, HeaderValue::from_static("accept-encoding"));
    }
    answer
}

/// The coding of `Accept-Encoding` with the highest weight that this server has, gzip if equal.
fn accepted(value: &HeaderValue) -> Option<Coding> {
    let mut best: Option<(Coding, f32)> = None;
    for item in value.to_str().ok()?.split(',') {
        let mut parts = item.split(';').map(str::trim);
        let coding = match parts.next().map(str::to_ascii_lowercase).as_deref() {
            Some("gzip" | "x-gzip" | "*") => Coding::Gzip,
            Some("deflate") => Coding::Deflate,
            _ => continue,
        };
        let weight =
            parts.find_map(|p| p.strip_prefix("q=")).map_or(1.0, |weight| weight.trim().parse().unwrap_or(0.0));
        let better = best.is_none_or(|(other, other_weight)| {
            weight > other_weight || (weight == other_weight && other == Coding::Deflate)
        });
        if weight > 0.0 && better {
            best = Some((coding, weight));
        }
    }
    best.map(|(coding, _)| coding)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coding_is_chosen_by_weight() {
        let choose = |text: &str| accepted(&HeaderValue::from_str(text).unwrap());
        assert_eq!(choose("gzip"), Some(Coding::Gzip));
        assert_eq!(choose("deflate, gzip"), Some(Coding::Gzip));
        assert_eq!(choose("gzip;q=0.5, deflate;q=0.8"), Some(Coding::Deflate));
        assert_eq!(choose("gzip;q=0, br"), None);
        assert_eq!(choose("identity"), None);
        assert_eq!(choose("*"), Some(Coding::Gzip));
    }
}
