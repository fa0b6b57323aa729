//! One connection: what it counts, and how it is asked to end.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};

use futures_util::task::AtomicWaker;
use http_body::{Body, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::Protocol;

/// Bytes of a request that nobody wants any more, read so that its client finds the answer: closing a socket with unread
/// bytes resets the connection, which can take the answer along.
const MAX_DISCARDED: usize = 1 << 20;

/// What a connection is asked to do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub(super) enum Request {
    Stay = 0,
    /// End without losing a request.
    Finish = 1,
    /// End.
    Stop = 2,
}

/// What a connection has done so far. Its task counts, its port looks.
pub(crate) struct Watched {
    protocol: Protocol,
    /// The port has left [`Stage::Serving`](super::Stage::Serving).
    leaving: Arc<AtomicBool>,
    /// Requests under way, from the head to the last byte of the answer that was made.
    requests: AtomicU32,
    /// Requests that began.
    served: AtomicU64,
    /// Bytes read.
    received: AtomicU64,
    /// Bytes that were read when the last request ended.
    settled: AtomicU64,
    /// Bytes written.
    sent: AtomicU64,
    /// The peer takes no more of the answer.
    write_blocked: AtomicBool,
    /// The end of the connection waits for what the peer still sends.
    closing: AtomicBool,
    asked: AtomicU8,
    waker: AtomicWaker,
}

/// The counts at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Seen {
    pub protocol: Protocol,
    pub requests: u32,
    pub served: u64,
    pub received: u64,
    pub settled: u64,
    pub sent: u64,
    pub write_blocked: bool,
    pub closing: bool,
    pub asked: Request,
}

impl Seen {
    /// Whether the rest of a head is awaited. A gRPC connection has frames of its own between calls.
    pub fn is_in_head(&self) -> bool {
        self.protocol == Protocol::Http && self.requests == 0 && self.received > self.settled
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.requests == 0 && !self.write_blocked && !self.is_in_head()
    }
}

impl Watched {
    pub(super) fn new(protocol: Protocol, leaving: Arc<AtomicBool>) -> Self {
        Watched {
            protocol,
            leaving,
            requests: AtomicU32::new(0),
            served: AtomicU64::new(0),
            received: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            write_blocked: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            asked: AtomicU8::new(Request::Stay as u8),
            waker: AtomicWaker::new(),
        }
    }

    /// Whether clients should go elsewhere.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Relaxed)
    }

    /// A request has begun; it ends when what is given is dropped.
    pub fn request(self: &Arc<Self>) -> InRequest {
        self.requests.fetch_add(1, Relaxed);
        self.served.fetch_add(1, Relaxed);
        InRequest(Arc::clone(self))
    }

    pub(super) fn seen(&self) -> Seen {
        Seen {
            protocol: self.protocol,
            requests: self.requests.load(Relaxed),
            served: self.served.load(Relaxed),
            // Before what it is compared with: between the two loads, both only grow.
            received: self.received.load(Relaxed),
            settled: self.settled.load(Relaxed),
            sent: self.sent.load(Relaxed),
            write_blocked: self.write_blocked.load(Relaxed),
            closing: self.closing.load(Relaxed),
            asked: self.asked(),
        }
    }

    pub(super) fn ask(&self, request: Request) {
        self.asked.fetch_max(request as u8, Relaxed);
        self.waker.wake();
    }

    fn asked(&self) -> Request {
        match self.asked.load(Relaxed) {
            0 => Request::Stay,
            1 => Request::Finish,
            _ => Request::Stop,
        }
    }
}

/// A request of a connection.
pub(crate) struct InRequest(Arc<Watched>);

impl Drop for InRequest {
    fn drop(&mut self) {
        self.0.settled.store(self.0.received.load(Relaxed), Relaxed);
        self.0.requests.fetch_sub(1, Relaxed);
    }
}

/// The body of an answer, until whose end a request is under way.
pub(crate) struct Answering<B> {
    body: B,
    _request: InRequest,
}

impl<B> Answering<B> {
    pub fn new(body: B, request: InRequest) -> Self {
        Answering { body, _request: request }
    }
}

impl<B: Body + Unpin> Body for Answering<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Drives `connection` to its end, or until it is asked to end. `finish` begins an end that loses no request.
pub(crate) async fn keep<C, E>(connection: C, watched: &Watched, finish: impl Fn(Pin<&mut C>))
where
    C: Future<Output = Result<(), E>>,
    E: std::fmt::Display,
{
    let mut connection = pin!(connection);
    let mut finishing = false;
    poll_fn(|cx| {
        watched.waker.register(cx.waker());
        let mut polled = connection.as_mut().poll(cx);
        match watched.asked() {
            Request::Finish if polled.is_pending() && !finishing => {
                // Over HTTP the client cannot be told: only an idle connection may end. It was when it was asked to.
                if watched.protocol == Protocol::Http && !watched.seen().is_idle() {
                    let _ =
                        watched.asked.compare_exchange(Request::Finish as u8, Request::Stay as u8, Relaxed, Relaxed);
                    return Poll::Pending;
                }
                finishing = true;
                finish(connection.as_mut());
                polled = connection.as_mut().poll(cx);
            }
            Request::Stop if polled.is_pending() => return Poll::Ready(()),
            _ => {}
        }
        polled.map(|ended| {
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended with an error");
            }
        })
    })
    .await;
}

/// A socket that counts.
pub(crate) struct WatchedStream {
    stream: TcpStream,
    watched: Arc<Watched>,
    discarded: usize,
}

impl WatchedStream {
    pub(super) fn new(stream: TcpStream, watched: Arc<Watched>) -> Self {
        WatchedStream { stream, watched, discarded: 0 }
    }

    fn wrote(&self, polled: &Poll<io::Result<usize>>) {
        match polled {
            Poll::Ready(Ok(count)) => {
                // One writer: no need for an atomic addition.
                self.watched.sent.store(self.watched.sent.load(Relaxed) + *count as u64, Relaxed);
                self.watched.write_blocked.store(false, Relaxed);
            }
            Poll::Ready(Err(_)) => {}
            Poll::Pending => self.watched.write_blocked.store(true, Relaxed),
        }
    }
}

impl AsyncRead for WatchedStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        let count = (buf.filled().len() - before) as u64;
        if count > 0 {
            this.watched.received.store(this.watched.received.load(Relaxed) + count, Relaxed);
        }
        polled
    }
}

impl AsyncWrite for WatchedStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write(cx, buf);
        this.wrote(&polled);
        polled
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    /// Ends the answers; then, if the peer is still sending, waits until it has seen that.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.watched.closing.load(Relaxed) {
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
        }
        let mut scratch = [0; 8 << 10];
        loop {
            let mut buf = ReadBuf::new(&mut scratch);
            match Pin::new(&mut this.stream).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() && this.discarded < MAX_DISCARDED => {
                    this.watched.closing.store(true, Relaxed);
                    this.discarded += buf.filled().len();
                }
                Poll::Pending if this.watched.closing.load(Relaxed) => return Poll::Pending,
                _ => return Poll::Ready(Ok(())),
            }
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write_vectored(cx, bufs);
        this.wrote(&polled);
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
