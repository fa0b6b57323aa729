//! The bytes of a connection, as its protocol reads and writes them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::counted_socket::CountedSocket;
use super::frames::{FEW_BYTES, Frames};
use super::protocol::Protocol;
use super::tls_stream::TlsStream;
use super::watched::Watched;

/// Most bytes that are read of a request after its answer. A socket that is closed with unread
/// bytes resets the connection, and the client may lose the answer.
const MAX_DISCARDED: usize = 1 << 20;

/// Bytes that a connection reads before it lets other connections have the thread.
const TURN: usize = 64 << 10;

/// The stream of a connection: its socket, or TLS over its socket.
pub struct WatchedStream {
    transport: Transport,
    watched: Arc<Watched>,
    discarded: usize,
    /// Bytes that were read since the connection last waited.
    in_turn: usize,
    /// The account of frames of an HTTP/2 connection.
    frames: Option<Frames>,
    /// Bytes that were read before, and are read first.
    again: Bytes,
}

/// How bytes come and go.
enum Transport {
    Plain(CountedSocket),
    Tls(Box<TlsStream>),
}

/// Polls either transport.
macro_rules! either {
    ($transport:expr, $method:ident, $($argument:expr),*) => {
        match $transport {
            Transport::Plain(socket) => Pin::new(socket).$method($($argument),*),
            Transport::Tls(stream) => Pin::new(&mut **stream).$method($($argument),*),
        }
    };
}

impl WatchedStream {
    /// The stream of a connection that was just accepted. `tls`: the peer must speak TLS.
    pub(super) fn new(stream: TcpStream, watched: Arc<Watched>, tls: Option<Arc<ServerConfig>>) -> Self {
        let frames = (watched.protocol == Protocol::Grpc).then(Frames::new);
        let socket = CountedSocket::new(stream, Arc::clone(&watched));
        let transport = match tls {
            None => Transport::Plain(socket),
            Some(config) => Transport::Tls(Box::new(TlsStream::new(socket, config))),
        };
        WatchedStream { transport, watched, discarded: 0, in_turn: 0, frames, again: Bytes::new() }
    }

    /// Has `bytes`, which were read and not used, read again.
    pub fn read_again(&mut self, bytes: Bytes) {
        self.again = bytes;
    }

    /// Ready once there is something to read, be it the end.
    pub(super) fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.again.is_empty() {
            return Poll::Ready(Ok(()));
        }
        match &self.transport {
            Transport::Plain(socket) => socket.poll_read_ready(cx),
            Transport::Tls(stream) => stream.poll_read_ready(cx),
        }
    }

    /// Reads from the transport, a little at a time from a peer that sends many frames for nothing.
    fn poll_transport(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Some(frames) = &mut self.frames else { return either!(&mut self.transport, poll_read, cx, buf) };
        ready!(frames.poll_may_read(cx));
        let before = buf.filled().len();
        if frames.is_low() {
            let mut scratch = [0; FEW_BYTES];
            let mut few = ReadBuf::new(scratch.get_mut(..buf.remaining().min(FEW_BYTES)).unwrap_or_default());
            ready!(either!(&mut self.transport, poll_read, cx, &mut few))?;
            buf.put_slice(few.filled());
        } else {
            ready!(either!(&mut self.transport, poll_read, cx, buf))?;
        }
        frames.count(buf.filled().get(before..).unwrap_or_default(), self.watched.sent.load(Relaxed));
        Poll::Ready(Ok(()))
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
        let polled = this.poll_transport(cx, buf);
        let count = buf.filled().len() - before;
        this.in_turn = if count > 0 { this.in_turn + count } else { 0 };
        polled
    }
}

impl AsyncWrite for WatchedStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        either!(&mut self.get_mut().transport, poll_write, cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(&mut self.get_mut().transport, poll_flush, cx)
    }

    /// Ends the answers; then, if the peer is still sending, waits until it has seen that.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.watched.closing.load(Relaxed) {
            ready!(either!(&mut this.transport, poll_shutdown, cx))?;
        }
        let mut scratch = [0; 8 << 10];
        loop {
            let mut buf = ReadBuf::new(&mut scratch);
            match either!(&mut this.transport, poll_read, cx, &mut buf) {
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
        either!(&mut self.get_mut().transport, poll_write_vectored, cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.transport {
            Transport::Plain(socket) => socket.is_write_vectored(),
            Transport::Tls(stream) => stream.is_write_vectored(),
        }
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
        std::future::poll_fn(|cx| stream.poll_readable(cx)).await.unwrap();
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
        WatchedStream::new(
            stream,
            Arc::new(Watched::new(protocol, Arc::new(PortState::default()), Arc::default())),
            None,
        )
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
