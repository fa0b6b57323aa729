//! Drives a connection from its first byte to its end.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};

use tokio::io::AsyncWrite;

use super::protocol::Protocol;
use super::stream::WatchedStream;
use super::watched::{Request, Watched};

/// A connection of some protocol, as its library drives it.
pub trait Driven: Future<Output = Result<(), hyper::Error>> + Unpin {
    /// Begins an end that loses no request.
    fn finish(&mut self);

    /// Takes the connection apart between two requests. `Err`: there is more to it than its socket.
    fn rest(self: Box<Self>) -> Result<WatchedStream, Box<Self>>;
}

/// Drives a connection to its end. The port may ask for that end. `begin` makes the state of the
/// protocol once the peer has sent a byte. Until then, and between two requests that lie apart, the
/// connection rests: it is a socket and a task of some hundred bytes.
pub async fn keep<C: Driven>(
    mut stream: WatchedStream,
    watched: Arc<Watched>,
    begin: impl Fn(WatchedStream) -> Box<C>,
) {
    loop {
        watched.rests.store(true, Relaxed);
        if !poll_fn(|cx| poll_rest(&mut stream, &watched, cx)).await {
            return;
        }
        watched.rests.store(false, Relaxed);
        let mut driving = Driving { connection: Some(begin(stream)), finishing: false };
        match poll_fn(|cx| driving.poll(&watched, cx)).await {
            Some(rested) => stream = rested,
            None => return,
        }
    }
}

/// Waits until the peer sends something; `false`: the connection has ended instead.
fn poll_rest(stream: &mut WatchedStream, watched: &Watched, cx: &mut Context<'_>) -> Poll<bool> {
    watched.waker.register(cx.waker());
    if !watched.closing.load(Relaxed) && stream.poll_readable(cx).is_ready() {
        return Poll::Ready(true);
    }
    match watched.asked() {
        Request::Stay => Poll::Pending,
        Request::Rest => {
            watched.settle(Request::Rest);
            Poll::Pending
        }
        Request::Finish => Pin::new(stream).poll_shutdown(cx).map(|_| false),
        Request::Stop => Poll::Ready(false),
    }
}

/// A connection that does not rest.
struct Driving<C> {
    /// `None`: it rests.
    connection: Option<Box<C>>,
    finishing: bool,
}

impl<C: Driven> Driving<C> {
    /// Drives it until it rests (its socket) or has ended (`None`).
    fn poll(&mut self, watched: &Watched, cx: &mut Context<'_>) -> Poll<Option<WatchedStream>> {
        watched.waker.register(cx.waker());
        let Some(connection) = &mut self.connection else { return Poll::Ready(None) };
        let mut polled = Pin::new(&mut **connection).poll(cx);
        match watched.asked() {
            Request::Finish if polled.is_pending() && !self.finishing => {
                // HTTP has no message for this: only an idle connection may end. It was idle when
                // it was asked to end.
                if watched.protocol == Protocol::Http && !watched.seen().is_idle() {
                    watched.settle(Request::Finish);
                    return Poll::Pending;
                }
                self.finishing = true;
                connection.finish();
                polled = Pin::new(&mut **connection).poll(cx);
            }
            Request::Stop if polled.is_pending() => return Poll::Ready(None),
            Request::Rest if polled.is_pending() => {
                watched.settle(Request::Rest);
                return self.rest(watched);
            }
            _ => {}
        }
        polled.map(|ended| {
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended with an error");
            }
            None
        })
    }

    fn rest(&mut self, watched: &Watched) -> Poll<Option<WatchedStream>> {
        if !watched.seen().may_rest() {
            return Poll::Pending;
        }
        match self.connection.take().map(C::rest) {
            Some(Ok(stream)) => Poll::Ready(Some(stream)),
            Some(Err(connection)) => {
                self.connection = Some(connection);
                Poll::Pending
            }
            None => Poll::Ready(None),
        }
    }
}
