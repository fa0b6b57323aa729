//! The socket of a connection, which counts the bytes that it moves.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::frames::{FEW_BYTES, Frames};
use super::protocol::Protocol;
use super::watched::Watched;

/// Most bytes that are read of a request after its answer. A socket that is closed with unread
/// bytes resets the connection, and the client may lose the answer.
const MAX_DISCARDED: usize = 1 << 20;

/// Bytes that a connection reads before it lets other connections have the thread.
const TURN: usize = 64 << 10;

/// A socket that counts.
pub struct WatchedStream {
    stream: TcpStream,
    watched: Arc<Watched>,
    discarded: usize,
    /// Bytes that were read since the connection last waited.
    in_turn: usize,
    /// The account of frames of an HTTP/2 connection.
    frames: Option<Frames>,
    /// Bytes that were read before, and are read first.
    again: Bytes,
}

impl WatchedStream {
    pub(super) fn new(stream: TcpStream, watched: Arc<Watched>) -> Self {
        let frames = (watched.protocol == Protocol::Grpc).then(Frames::new);
        WatchedStream { stream, watched, discarded: 0, in_turn: 0, frames, again: Bytes::new() }
    }

    /// Has `bytes`, which were read and not used, read again.
    pub fn read_again(&mut self, bytes: Bytes) {
        self.again = bytes;
    }

    /// Ready once there is something to read, be it the end.
    pub(super) fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.again.is_empty() { self.stream.poll_read_ready(cx) } else { Poll::Ready(Ok(())) }
    }

    /// Reads from the socket, a little at a time from a peer that sends many frames for nothing.
    fn poll_socket(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Some(frames) = &mut self.frames else { return Pin::new(&mut self.stream).poll_read(cx, buf) };
        ready!(frames.poll_may_read(cx));
        let before = buf.filled().len();
        if frames.is_low() {
            let mut scratch = [0; FEW_BYTES];
            let mut few = ReadBuf::new(scratch.get_mut(..buf.remaining().min(FEW_BYTES)).unwrap_or_default());
            ready!(Pin::new(&mut self.stream).poll_read(cx, &mut few))?;
            buf.put_slice(few.filled());
        } else {
            ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        }
        frames.count(buf.filled().get(before..).unwrap_or_default(), self.watched.sent.load(Relaxed));
        Poll::Ready(Ok(()))
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

impl AsyncRead for WatchedStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.again.is_empty() {
            let count = this.again.len().min(buf.remaining());
            buf.put_slice(this.again.get(..count).unwrap_or_default());
            this.again.advance(count);
            return Poll::Ready(Ok(()));
        }
        if this.in_turn >= TURN {
            this.in_turn = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buf.filled().len();
        let polled = this.poll_socket(cx, buf);
        let count = buf.filled().len() - before;
        if count > 0 {
            this.in_turn += count;
            this.watched.received.store(this.watched.received.load(Relaxed) + count as u64, Relaxed);
            this.watched.port.stir();
        } else {
            this.in_turn = 0;
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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::task::Waker;

    use super::*;
    use crate::connections::port_state::PortState;
    use crate::connections::protocol::Protocol;

    #[tokio::test]
    async fn a_connection_with_much_to_read_lets_others_have_the_thread() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        // The peer sends as much as the kernel buffers: more than a turn, even with small buffers.
        peer.set_nonblocking(true).unwrap();
        let mut total = 0;
        while let Ok(count) = peer.write(&[7; TURN])
            && total < 8 * TURN
        {
            total += count;
        }
        assert!(total > 2 * TURN, "{total}");
        let stream = TcpStream::from_std(stream).unwrap();
        let mut stream = watched(stream, Protocol::Http);
        let (mut read, mut scratch) = (0, vec![0; 8 << 10]);
        while read < total {
            stream.poll_turn(&mut read, &mut scratch);
            tokio::task::yield_now().await;
        }
    }

    /// The clock stands still, so that no second passes in which more frames are free.
    #[tokio::test(start_paused = true)]
    async fn a_peer_that_sends_pings_for_nothing_is_read_slowly() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let ping = [0, 0, 8, 6, 1, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        peer.write_all(&[&preface[..], &ping.repeat(1_000)].concat()).unwrap();
        let mut stream = watched(TcpStream::from_std(stream).unwrap(), Protocol::Grpc);
        stream.stream.readable().await.unwrap();
        let (mut read, mut scratch) = (0, vec![0; 8 << 10]);
        for _ in 0..100 {
            stream.poll_turn(&mut read, &mut scratch);
        }
        // The first free frames, the free frames of the first second, and the rest of the last
        // read.
        assert!((FEW_BYTES..=3 * FEW_BYTES).contains(&read), "{read}");
        tokio::time::advance(std::time::Duration::from_secs(1)).await;
        let before = read;
        stream.poll_turn(&mut read, &mut scratch);
        assert!(read > before, "it is read again");
    }

    fn watched(stream: TcpStream, protocol: Protocol) -> WatchedStream {
        WatchedStream::new(stream, Arc::new(Watched::new(protocol, Arc::new(PortState::default()))))
    }

    impl WatchedStream {
        /// Reads until the stream has no more for this turn.
        fn poll_turn(&mut self, read: &mut usize, scratch: &mut [u8]) {
            let (begin, mut cx) = (*read, Context::from_waker(Waker::noop()));
            loop {
                let mut buf = ReadBuf::new(scratch);
                match Pin::new(&mut *self).poll_read(&mut cx, &mut buf) {
                    Poll::Ready(ended) => ended.unwrap(),
                    Poll::Pending => return assert!(*read - begin < TURN + scratch.len()),
                }
                if buf.filled().is_empty() {
                    return;
                }
                *read += buf.filled().len();
            }
        }
    }
}
