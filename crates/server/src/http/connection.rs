//! What a connection is doing, so that one on which a request comes in too slowly can be told from an idle one.
//!
//! hyper's own timeout for heads also ends idle connections and sets a timer for every request. Here a timer runs only
//! while a request is half received.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Between requests: the next bytes begin a head.
const IDLE: u8 = 0;
/// A head is here, its body is not.
const BODY: u8 = 1;
/// A request is here and being answered.
const WORKING: u8 = 2;

/// What a connection is doing. Only its own task writes; the atomics make it `Sync`, nothing else.
#[derive(Default)]
pub(super) struct Activity {
    phase: AtomicU8,
    /// Bytes that were read.
    received: AtomicU64,
    /// Bytes that were read when the last request was answered.
    settled: AtomicU64,
    /// Requests whose head was complete.
    heads: AtomicU64,
}

/// A moment in the life of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Progress {
    received: u64,
    heads: u64,
}

impl Activity {
    /// Whether the rest of a head or body is awaited.
    pub fn is_receiving(&self) -> bool {
        match self.phase.load(Relaxed) {
            BODY => true,
            IDLE => self.received.load(Relaxed) > self.settled.load(Relaxed),
            _ => false,
        }
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        Progress { received: self.received.load(Relaxed), heads: self.heads.load(Relaxed) }
    }

    /// Whether what was awaited at `since` is still awaited, though the time for it is over: a head may not take longer
    /// however slowly it trickles in, a body may as long as it moves.
    pub fn is_stalled(&self, since: Progress) -> bool {
        let now = self.progress();
        let moved = match self.phase.load(Relaxed) {
            BODY => now != since,
            _ => now.heads != since.heads,
        };
        self.is_receiving() && !moved
    }

    /// A head is here.
    pub fn head_received(self: &Arc<Self>) -> InRequest {
        self.heads.fetch_add(1, Relaxed);
        self.phase.store(BODY, Relaxed);
        InRequest(Arc::clone(self))
    }
}

/// A request, from its head to its answer.
pub(super) struct InRequest(Arc<Activity>);

impl InRequest {
    /// Where the end of its body is told.
    pub fn receipt(&self) -> Receipt {
        Receipt(Arc::clone(&self.0))
    }
}

/// Where the end of a request's body is told.
pub(super) struct Receipt(Arc<Activity>);

impl Receipt {
    /// The whole request is here.
    pub fn received(&self) {
        self.0.phase.store(WORKING, Relaxed);
    }
}

impl Drop for InRequest {
    fn drop(&mut self) {
        self.0.settled.store(self.0.received.load(Relaxed), Relaxed);
        self.0.phase.store(IDLE, Relaxed);
    }
}

/// A socket that counts what is read.
pub(super) struct CountedStream {
    stream: TcpStream,
    activity: Arc<Activity>,
}

impl CountedStream {
    /// Counts into `activity`.
    pub fn new(stream: TcpStream, activity: Arc<Activity>) -> Self {
        CountedStream { stream, activity }
    }
}

impl AsyncRead for CountedStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        this.activity.received.fetch_add((buf.filled().len() - before) as u64, Relaxed);
        polled
    }
}

impl AsyncWrite for CountedStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
