//! Request bodies: collected whole, in one piece, within a bound.

use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;

use super::answer::HttpError;

/// A body larger than this times the bound is not read to its end to answer on a connection that lives on.
const DRAIN_FACTOR: u64 = 4;

/// What a body may claim before its first byte is here.
const FIRST_RESERVE: usize = 1 << 20;

/// Collects a body of at most `limit` bytes. A body that came in one piece is not copied.
///
/// A larger body is answered with 413. It is read and thrown away before, so that a client that writes its whole
/// request before it reads finds the answer and can go on with the connection; not if it is very large, or the client
/// waits for `100 Continue`: then the connection ends.
pub(super) async fn collect<B>(mut body: B, headers: &HeaderMap, limit: usize) -> Result<Bytes, HttpError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let limit_u64 = limit as u64;
    let declared = body.size_hint().exact();
    if let Some(size) = declared
        && size > limit_u64
    {
        if headers.contains_key(header::EXPECT) || size > limit_u64.saturating_mul(DRAIN_FACTOR) {
            return Err(too_large(&format!("{size} bytes"), limit).closing());
        }
        return drain(body, format!("{size} bytes"), 0, limit).await;
    }
    let Some(first) = next(&mut body).await? else {
        return Ok(Bytes::new());
    };
    if first.len() > limit {
        let taken = first.len() as u64;
        return drain(body, format!("more than {limit} bytes"), taken, limit).await;
    }
    if body.is_end_stream() {
        return Ok(first);
    }
    let expected = declared.and_then(|size| usize::try_from(size).ok()).unwrap_or(0);
    let mut whole = BytesMut::with_capacity(expected.min(FIRST_RESERVE).max(first.len()));
    whole.extend_from_slice(&first);
    drop(first);
    while let Some(data) = next(&mut body).await? {
        if data.len() > limit - whole.len() {
            let taken = (whole.len() + data.len()) as u64;
            drop(whole);
            return drain(body, format!("more than {limit} bytes"), taken, limit).await;
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole.freeze())
}

async fn next<B>(body: &mut B) -> Result<Option<Bytes>, HttpError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| {
            HttpError::new(StatusCode::BAD_REQUEST, format!("the body ended before its announced length: {e}"))
                .closing()
        })?;
        // Trailers say nothing that this protocol needs.
        if let Ok(data) = frame.into_data()
            && !data.is_empty()
        {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

async fn drain<B>(mut body: B, size: String, mut taken: u64, limit: usize) -> Result<Bytes, HttpError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let most = (limit as u64).saturating_mul(DRAIN_FACTOR);
    while let Some(data) = next(&mut body).await? {
        taken += data.len() as u64;
        if taken > most {
            return Err(too_large(&size, limit).closing());
        }
    }
    Err(too_large(&size, limit))
}

/// The answer to a body that is too large, as sent or once decompressed.
pub(super) fn too_large(size: &str, limit: usize) -> HttpError {
    HttpError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        format!("the request body has {size}; expected at most {limit} bytes (the server's body limit)"),
    )
}
