//! The socket of a connection, which counts the bytes that it moves.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::watched::Watched;

/// A socket that counts. Under TLS it counts what the network moves.
pub(super) struct CountedSocket {
    stream: TcpStream,
    watched: Arc<Watched>,
}

impl CountedSocket {
    /// A socket whose bytes count as those of a connection.
    pub fn new(stream: TcpStream, watched: Arc<Watched>) -> Self {
        CountedSocket { stream, watched }
    }

    /// The socket itself.
    pub fn get_ref(&self) -> &TcpStream {
        &self.stream
    }

    /// The connection's counts.
    pub fn watched(&self) -> &Watched {
        &self.watched
    }

    /// Ready once there is something to read, be it the end.
    pub fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_read_ready(cx)
    }

    fn wrote(&self, polled: &Poll<io::Result<usize>>) {
        match polled {
            Poll::Ready(Ok(count)) => {
                // Only one thread writes: no need for an atomic addition.
                self.watched.sent.store(self.watched.sent.load(Relaxed) + *count as u64, Relaxed);
                self.watched.write_blocked.store(false, Relaxed);
            }
            Poll::Ready(Err(_)) => {}
            Poll::Pending => self.watched.write_blocked.store(true, Relaxed),
        }
    }
}

impl AsyncRead for CountedSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        let count = buf.filled().len() - before;
        if count > 0 {
            this.watched.received.store(this.watched.received.load(Relaxed) + count as u64, Relaxed);
            this.watched.port.stir();
        }
        polled
    }
}

impl AsyncWrite for CountedSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write(cx, buf);
        this.wrote(&polled);
        polled
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
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
