//! Collects each request body in one piece of memory. The size of one body is limited, and so are
//! the bytes of all requests together.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use bytes::Bytes;
use downbeat_service::budget::Reservation;
use downbeat_service::client::Client;
use downbeat_service::error::ServiceError;
use downbeat_service::service::Service;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;

use super::answer::{HttpError, too_large};
use super::encoding;
use super::state::HttpState;
use crate::access::Caller;
use crate::compression::Coding;
use crate::connections::{BodyError, WatchedBody};

/// A refused body larger than this times the bound is not read to its end to answer on a connection
/// that lives on.
const DRAIN_FACTOR: u64 = 4;

/// Bytes of a body after which other connections of the event loop have their turn.
const YIELD_AFTER: usize = 1 << 20;

/// The most bytes reserved for a body before its first byte has come.
const FIRST_RESERVE: usize = 1 << 20;

/// A body that comes in over a connection. If it is dropped before its end (the request is
/// refused), the rest is read beside the answer and thrown away. A client that writes its whole
/// request before it reads then finds the answer and can keep the connection. If the body is very
/// large, or the client waits for `100 Continue`, the connection ends instead.
pub(super) struct ReceivedBody {
    incoming: Option<WatchedBody>,
    /// Most bytes that are thrown away.
    most: u64,
    /// The client waits for `100 Continue`, which polling the first frame sends.
    waits: bool,
}

impl ReceivedBody {
    /// The body of a request with these headers, of at most `limit` bytes.
    pub fn new(incoming: WatchedBody, headers: &HeaderMap, limit: usize) -> Self {
        ReceivedBody {
            incoming: Some(incoming),
            most: (limit as u64).saturating_mul(DRAIN_FACTOR),
            waits: headers.contains_key(header::EXPECT),
        }
    }
}

impl Body for ReceivedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        this.waits = false;
        let Some(incoming) = &mut this.incoming else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(incoming).poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) {
            this.incoming = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.as_ref().map_or(SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Drop for ReceivedBody {
    fn drop(&mut self) {
        let Some(body) = self.incoming.take() else { return };
        if body.is_end_stream() || self.waits || body.size_hint().lower() > self.most {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(throw_away(body, self.most));
        }
    }
}

async fn throw_away(mut body: WatchedBody, most: u64) {
    let mut taken = 0u64;
    while let Some(Ok(frame)) = body.frame().await {
        taken = taken.saturating_add(frame.data_ref().map_or(0, |data| data.len() as u64));
        if taken > most {
            return;
        }
    }
}

/// A whole body with its coding undone, and the bytes it holds of the budget.
pub(super) struct WholeBody {
    pub bytes: Bytes,
    pub held: Reservation,
}

impl<S: Service> FromRequest<HttpState<S>> for WholeBody {
    type Rejection = HttpError;

    async fn from_request(request: Request, state: &HttpState<S>) -> Result<Self, HttpError> {
        let (parts, body) = request.into_parts();
        let coding = encoding::of_request(&parts.headers)?;
        let client = parts.extensions.get().copied().unwrap_or_default();
        let caller = parts.extensions.get().cloned().unwrap_or_default();
        WholeBody::of(state, (client, &caller), &parts.headers, coding, body).await
    }
}

impl WholeBody {
    /// Collects the body of a request and undoes its `coding`. A body that the headers show to be
    /// too large is refused before its first byte is read.
    pub async fn of<S: Service, B>(
        state: &HttpState<S>,
        (client, caller): (Client, &Caller),
        headers: &HeaderMap,
        coding: Option<Coding>,
        body: B,
    ) -> Result<Self, HttpError>
    where
        B: Body<Data = Bytes> + Unpin,
        B::Error: std::error::Error + 'static,
    {
        let options = state.options();
        let mut held = caller.budget(&options.budget).reservation();
        let bytes = collect(body, headers, options.max_body_bytes, &mut held).await?;
        let Some(coding) = coding else { return Ok(WholeBody { bytes, held }) };
        let (bytes, held) = encoding::decode(coding, client, bytes, held, options.max_body_bytes).await?;
        Ok(WholeBody { bytes, held })
    }
}

/// Collects a body of at most `limit` bytes. A body that came in one piece is not copied.
async fn collect<B>(mut body: B, headers: &HeaderMap, limit: usize, held: &mut Reservation) -> Result<Bytes, HttpError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::error::Error + 'static,
{
    let declared = body.size_hint().exact();
    if let Some(size) = declared
        && size > limit as u64
    {
        return Err(unread(too_large(&format!("{size} bytes"), limit), headers, &body, limit));
    }
    let Some(first) = next(&mut body).await? else {
        return Ok(Bytes::new());
    };
    take(held, first.len(), 0, limit)?;
    if body.is_end_stream() {
        return Ok(first);
    }
    let expected = declared.and_then(|size| usize::try_from(size).ok()).unwrap_or(0);
    let mut whole = Vec::new();
    reserve(&mut whole, expected.min(FIRST_RESERVE).max(first.len()))?;
    whole.extend_from_slice(&first);
    drop(first);
    while let Some(data) = next(&mut body).await? {
        take(held, data.len(), whole.len(), limit)?;
        if data.len() > whole.capacity() - whole.len() {
            // A client that has sent this much is trusted with its announced size; pages are the
            // system's until they are written.
            let needed = (whole.len() + data.len()).max(expected).max((2 * whole.capacity()).min(limit));
            let more = needed - whole.len();
            reserve(&mut whole, more)?;
        }
        let before = whole.len();
        whole.extend_from_slice(&data);
        if whole.len() / YIELD_AFTER > before / YIELD_AFTER {
            tokio::task::yield_now().await;
        }
    }
    Ok(Bytes::from(whole))
}

/// The answer to a request whose body is not read. It ends the connection if the client waits or
/// the body is huge.
pub(super) fn unread(error: HttpError, headers: &HeaderMap, body: &impl Body, limit: usize) -> HttpError {
    let waits = headers.contains_key(header::EXPECT) && !body.is_end_stream();
    let huge = body.size_hint().lower() > (limit as u64).saturating_mul(DRAIN_FACTOR);
    if waits || huge { error.closing() } else { error }
}

fn reserve(whole: &mut Vec<u8>, more: usize) -> Result<(), HttpError> {
    whole.try_reserve_exact(more).map_err(|_| {
        ServiceError::Unavailable(format!("there is no memory for a request body of {} bytes", whole.len() + more))
            .into()
    })
}

/// Takes `more` bytes of a body of which `taken` bytes have come.
fn take(held: &mut Reservation, more: usize, taken: usize, limit: usize) -> Result<(), HttpError> {
    if more > limit.saturating_sub(taken) {
        return Err(too_large(&format!("more than {limit} bytes"), limit));
    }
    Ok(held.grow(more as u64)?)
}

async fn next<B>(body: &mut B) -> Result<Option<Bytes>, HttpError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::error::Error + 'static,
{
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| unfinished(&error))?;
        // Trailers are ignored: this protocol needs none.
        if let Ok(data) = frame.into_data()
            && !data.is_empty()
        {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// The answer to a body that does not come to its end.
fn unfinished(error: &(dyn std::error::Error + 'static)) -> HttpError {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    if let Some(slow @ BodyError::Slow { .. }) = causes.find_map(|cause| cause.downcast_ref()) {
        return HttpError::new(StatusCode::REQUEST_TIMEOUT, slow.to_string()).closing();
    }
    HttpError::new(StatusCode::BAD_REQUEST, format!("the body ended before its announced length: {error}")).closing()
}
