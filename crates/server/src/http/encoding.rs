//! Content codings: `gzip` and `deflate`, of requests and answers.

use std::io::{Read, Write};

use axum::http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, VARY};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use bytes::Bytes;
use flate2::Compression;
use flate2::read::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};

use super::answer::{Answer, HttpError};
use super::body::too_large;

/// Answers below this size are sent as they are: compressing costs more than the bytes it saves.
const SMALLEST_COMPRESSED: usize = 1024;

/// Bodies from this size on are coded on a thread of their own, so that the connections of this one do not wait.
const BLOCKING_FROM: usize = 256 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Coding {
    Gzip,
    Deflate,
}

/// Undoes the request's `Content-Encoding`. At most `limit` bytes come out.
pub(super) async fn decode(headers: &HeaderMap, body: Bytes, limit: usize) -> Result<Bytes, HttpError> {
    let Some(value) = headers.get(CONTENT_ENCODING) else {
        return Ok(body);
    };
    let coding = match value.to_str().map(|name| name.trim().to_ascii_lowercase()).as_deref() {
        Ok("identity" | "") => return Ok(body),
        Ok("gzip" | "x-gzip") => Coding::Gzip,
        Ok("deflate") => Coding::Deflate,
        _ => {
            return Err(HttpError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                format!("Content-Encoding is {value:?}; expected gzip, deflate or identity, one of them"),
            ));
        }
    };
    let threshold = BLOCKING_FROM;
    if body.len() < threshold && limit < threshold {
        return inflate(coding, &body, limit);
    }
    // A small body can become a large one, so its size does not tell how long this takes.
    blocking(move || inflate(coding, &body, limit)).await?
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, HttpError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("a worker stopped: {e}")))
}

fn inflate(coding: Coding, body: &[u8], limit: usize) -> Result<Bytes, HttpError> {
    match coding {
        Coding::Gzip => read_to_limit(MultiGzDecoder::new(body), "gzip", limit),
        // `deflate` is the zlib format (RFC 9110, section 8.4.1.2); some clients send the bare one.
        Coding::Deflate if is_zlib(body) => read_to_limit(ZlibDecoder::new(body), "deflate", limit),
        Coding::Deflate => read_to_limit(DeflateDecoder::new(body), "deflate", limit),
    }
}

/// Whether a zlib header starts here (RFC 1950, section 2.2).
fn is_zlib(body: &[u8]) -> bool {
    matches!(body, [method, flags, ..] if method & 0x0f == 8 && (u16::from(*method) << 8 | u16::from(*flags)) % 31 == 0)
}

fn read_to_limit(decoder: impl Read, name: &str, limit: usize) -> Result<Bytes, HttpError> {
    let mut out = Vec::new();
    decoder.take(limit as u64 + 1).read_to_end(&mut out).map_err(|e| {
        HttpError::new(StatusCode::BAD_REQUEST, format!("the body is not what Content-Encoding says, {name}: {e}"))
    })?;
    if out.len() > limit {
        return Err(too_large(&format!("more than {limit} bytes once decompressed"), limit));
    }
    Ok(Bytes::from(out))
}

/// Compresses the answer if the request accepts that and it is worth it.
pub(super) async fn encode(request_headers: &HeaderMap, mut answer: Answer) -> Answer {
    let Some(coding) = request_headers.get(ACCEPT_ENCODING).and_then(accepted) else {
        return answer;
    };
    if answer.body().len() < SMALLEST_COMPRESSED {
        return answer;
    }
    let body = answer.body().clone();
    let compressed = if body.len() < BLOCKING_FROM {
        deflate(coding, &body)
    } else {
        blocking(move || deflate(coding, &body)).await.unwrap_or_else(|_| Err(std::io::Error::other("worker")))
    };
    // Memory takes every write; should the worker be gone, the answer goes as it is.
    if let Ok(compressed) = compressed {
        *answer.body_mut() = compressed;
        let name = match coding {
            Coding::Gzip => "gzip",
            Coding::Deflate => "deflate",
        };
        answer.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static(name));
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

fn deflate(coding: Coding, body: &[u8]) -> std::io::Result<Bytes> {
    let out = Vec::with_capacity(body.len() / 2);
    let out = match coding {
        Coding::Gzip => {
            let mut encoder = GzEncoder::new(out, Compression::fast());
            encoder.write_all(body)?;
            encoder.finish()?
        }
        Coding::Deflate => {
            let mut encoder = ZlibEncoder::new(out, Compression::fast());
            encoder.write_all(body)?;
            encoder.finish()?
        }
    };
    Ok(Bytes::from(out))
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

    #[test]
    fn what_is_coded_is_decoded_within_the_limit() {
        let body = vec![7_u8; 10_000];
        for coding in [Coding::Gzip, Coding::Deflate] {
            let coded = deflate(coding, &body).unwrap();
            assert!(coded.len() < 200);
            assert_eq!(inflate(coding, &coded, 10_000).unwrap(), body);
            assert!(inflate(coding, &coded, 9_999).is_err(), "a bound on what comes out");
            assert!(inflate(coding, &coded[..coded.len() / 2], 10_000).is_err(), "cut off");
        }
        let mut bare = flate2::write::DeflateEncoder::new(Vec::new(), Compression::fast());
        bare.write_all(&body).unwrap();
        assert_eq!(inflate(Coding::Deflate, &bare.finish().unwrap(), 10_000).unwrap(), body);
    }
}
