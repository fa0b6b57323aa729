//! The body of a request, which may not come in too slowly.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use downbeat_service::options::connection_options::ConnectionOptions;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};

use super::watched::Watched;

/// Bytes before each gRPC message: a flag and the length.
const PREFIX: usize = 5;

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// Too slow.
    #[error(
        "the rest of the request was waited for in vain: {taken} bytes of it came in {}, expected at least {least} \
         (--transfer-timeout, --min-rate)", seconds(.within)
    )]
    Slow {
        /// Bytes that came.
        taken: u64,
        /// Bytes that had to.
        least: u64,
        /// The time that the body had.
        within: Duration,
    },
    /// The client has gone, or does not speak the protocol.
    #[error(transparent)]
    Broken(#[from] hyper::Error),
}

fn seconds(duration: &Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}

/// The frames of a body.
pub enum Framing {
    /// A single request: all of it must come.
    Whole,
    /// gRPC messages, between which the client may take its time.
    Messages(Messages),
}

impl Framing {
    /// Messages, none of which has begun.
    pub fn messages() -> Self {
        Framing::Messages(Messages::default())
    }

    fn is_between(&self) -> bool {
        match self {
            Framing::Whole => false,
            Framing::Messages(messages) => messages.is_between(),
        }
    }
}

/// The place of a body in its sequence of gRPC messages.
#[derive(Default)]
pub struct Messages {
    prefix: [u8; PREFIX],
    /// Bytes of the prefix that have come; 0 between messages.
    prefixed: usize,
    /// Bytes of the message that have not come.
    missing: usize,
}

impl Messages {
    fn is_between(&self) -> bool {
        self.prefixed == 0
    }

    fn handle(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let (free, is_prefix) = match self.prefix.get_mut(self.prefixed..) {
                Some(free) if !free.is_empty() => (free.len(), Some(free)),
                _ => (self.missing, None),
            };
            let (taken, rest) = data.split_at(free.min(data.len()));
            data = rest;
            match is_prefix {
                Some(free) => {
                    free.iter_mut().zip(taken).for_each(|(to, from)| *to = *from);
                    self.prefixed += taken.len();
                    let [_flag, length @ ..] = self.prefix;
                    self.missing = u32::from_be_bytes(length) as usize;
                }
                None => self.missing -= taken.len(),
            }
            if self.prefixed == PREFIX && self.missing == 0 {
                self.prefixed = 0;
            }
        }
    }
}

/// A body that ends with an error when the server waits too long for the client. Only waiting
/// counts: bytes that the server leaves unread are not the client's fault.
pub struct WatchedBody {
    body: Incoming,
    framing: Framing,
    watched: Arc<Watched>,
    /// How long may be waited for `least` bytes.
    within: Option<Duration>,
    least: u64,
    /// Bytes that came in this `within`, and how much of it has been waited.
    taken: u64,
    waited: Duration,
    /// Since when the client is waited for, if it is.
    since: Option<Instant>,
    /// Whether `watched` counts this body as awaited.
    is_awaited: bool,
    /// Set once the server has waited for the client, which most bodies never need. Fires when
    /// `waited` may be `within`, or before.
    timer: Option<Pin<Box<Sleep>>>,
}

impl WatchedBody {
    /// The body of a request on the connection of `watched`.
    pub fn new(body: Incoming, framing: Framing, options: &ConnectionOptions, watched: Arc<Watched>) -> Self {
        WatchedBody {
            body,
            framing,
            watched,
            within: options.transfer_timeout,
            least: options.least(),
            taken: 0,
            waited: Duration::ZERO,
            since: None,
            is_awaited: false,
            timer: None,
        }
    }

    fn set_awaited(&mut self, now: bool) {
        if self.is_awaited != now {
            self.is_awaited = now;
            self.watched.awaits_body(now);
        }
    }

    /// The client is waited for.
    fn poll_slow(&mut self, cx: &mut Context<'_>) -> Poll<BodyError> {
        self.set_awaited(true);
        let Some(within) = self.within else { return Poll::Pending };
        if self.framing.is_between() {
            (self.taken, self.waited, self.since, self.timer) = (0, Duration::ZERO, None, None);
            return Poll::Pending;
        }
        let mut since = *self.since.get_or_insert_with(Instant::now);
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(since + within)));
        loop {
            ready!(timer.as_mut().poll(cx));
            let now = Instant::now();
            if self.waited + (now - since) >= within {
                if self.taken < self.least {
                    return Poll::Ready(BodyError::Slow { taken: self.taken, least: self.least, within });
                }
                (self.taken, self.waited) = (0, Duration::ZERO);
                since = now;
                self.since = Some(now);
            }
            timer.as_mut().reset(since + (within - self.waited));
        }
    }
}

impl Drop for WatchedBody {
    fn drop(&mut self) {
        self.set_awaited(false);
    }
}

impl Body for WatchedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) else {
            return this.poll_slow(cx).map(|slow| Some(Err(slow)));
        };
        this.set_awaited(false);
        if let Some(since) = this.since.take() {
            this.waited += since.elapsed();
        }
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            this.taken += data.len() as u64;
            if let Framing::Messages(messages) = &mut this.framing {
                messages.handle(data);
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(BodyError::Broken)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_known_whether_a_message_has_begun_however_the_bytes_come() {
        let bytes = [&[0, 0, 0, 0, 3, 1, 2, 3][..], &[0; 5], &[1, 0, 0, 1, 0], &[7; 256]].concat();
        let ends = [0, 8, 13, 274];
        for piece in [1, 2, 3, 5, 7, 8, 100, 1000] {
            let (mut messages, mut at) = (Messages::default(), 0);
            for data in bytes.chunks(piece) {
                messages.handle(data);
                at += data.len();
                assert_eq!(messages.is_between(), ends.contains(&at), "after {at} bytes, {piece} at a time");
            }
        }
    }
}
