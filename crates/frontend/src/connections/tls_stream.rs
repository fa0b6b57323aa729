//! TLS over the socket of a connection.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::{Accept, TlsStream as Established};

use super::counted_socket::CountedSocket;

/// The first byte of a client that speaks TLS: a record of the handshake (RFC 8446 §5.1).
const HANDSHAKE: u8 = 22;
/// Most bytes of a request without TLS that are read before its answer. A socket that is closed with
/// unread bytes resets the connection, and the client may lose the answer.
const MAX_DISCARDED: usize = 64 << 10;
/// The answer to a client that does not speak TLS. gRPC clients take it for a failed connection.
const SPEAK_TLS: &str = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n\
    content-length: 80\r\n\r\n{\"error\":\"this port speaks TLS; begin the address with https:// or turn TLS on\"}";

/// TLS over a socket. The handshake is part of the first read: a client that is slow in it is slow
/// in the head of its first request.
pub(super) struct TlsStream {
    state: State,
}

enum State {
    /// Nothing has been read yet.
    New(CountedSocket, Arc<ServerConfig>),
    Handshake(Accept<CountedSocket>),
    Established(Established<CountedSocket>),
    /// The handshake has failed.
    Failed,
}

impl TlsStream {
    pub fn new(socket: CountedSocket, config: Arc<ServerConfig>) -> Self {
        TlsStream { state: State::New(socket, config) }
    }

    /// Ready once there may be something to read, be it the end.
    pub fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &self.state {
            State::New(socket, _) => socket.poll_read_ready(cx),
            State::Established(stream) => match stream.get_ref() {
                // A record may hold more than was read of it.
                (_, session) if !session.wants_read() => Poll::Ready(Ok(())),
                (socket, _) => socket.poll_read_ready(cx),
            },
            State::Handshake(_) | State::Failed => Poll::Ready(Ok(())),
        }
    }

    /// Goes on with the handshake. Ready once it is over.
    fn poll_established(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<&mut Established<CountedSocket>>> {
        if let State::New(socket, _) = &self.state {
            ready!(poll_speaks_tls(socket, cx))?;
        }
        self.state = match std::mem::replace(&mut self.state, State::Failed) {
            State::New(socket, config) => State::Handshake(TlsAcceptor::from(config).accept(socket)),
            other => other,
        };
        if let State::Handshake(accept) = &mut self.state {
            match Pin::new(accept).poll(cx) {
                Poll::Ready(Ok(stream)) => {
                    stream.get_ref().0.watched().settle_received();
                    self.state = State::Established(stream);
                }
                Poll::Ready(Err(error)) => {
                    self.state = State::Failed;
                    return Poll::Ready(Err(error));
                }
                Poll::Pending => return Poll::Pending,
            }
        }
        match &mut self.state {
            State::Established(stream) => Poll::Ready(Ok(stream)),
            _ => Poll::Ready(Err(io::Error::new(io::ErrorKind::NotConnected, "the TLS handshake has failed"))),
        }
    }
}

/// Ready once the first byte is there. An error if the client does not speak TLS, after an answer that
/// says so.
fn poll_speaks_tls(socket: &CountedSocket, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
    let mut first = [0];
    let mut seen = ReadBuf::new(&mut first);
    ready!(socket.get_ref().poll_peek(cx, &mut seen))?;
    match seen.filled() {
        [] => Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
        [HANDSHAKE] => Poll::Ready(Ok(())),
        _ => {
            let (stream, mut scratch, mut left) = (socket.get_ref(), [0; 4 << 10], MAX_DISCARDED);
            while left > 0
                && let Ok(count @ 1..) = stream.try_read(&mut scratch)
            {
                left = left.saturating_sub(count);
            }
            // A client that takes no byte has gone.
            let _ = stream.try_write(SPEAK_TLS.as_bytes());
            Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, "the client does not speak TLS")))
        }
    }
}

impl AsyncRead for TlsStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let stream = ready!(self.get_mut().poll_established(cx))?;
        match Pin::new(stream).poll_read(cx, buf) {
            // Many clients end the connection without TLS's goodbye. HTTP has its own lengths, so that
            // nothing cut off is taken for whole.
            Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Poll::Ready(Ok(())),
            polled => polled,
        }
    }
}

impl AsyncWrite for TlsStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(ready!(self.get_mut().poll_established(cx))?).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().state {
            State::Established(stream) => Pin::new(stream).poll_flush(cx),
            State::New(..) | State::Handshake(_) | State::Failed => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().state {
            State::Established(stream) => Pin::new(stream).poll_shutdown(cx),
            State::New(socket, _) => Pin::new(socket).poll_shutdown(cx),
            State::Handshake(accept) => match accept.get_mut() {
                Some(socket) => Pin::new(socket).poll_shutdown(cx),
                None => Poll::Ready(Ok(())),
            },
            State::Failed => Poll::Ready(Ok(())),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(ready!(self.get_mut().poll_established(cx))?).poll_write_vectored(cx, bufs)
    }

    /// TLS puts several buffers into one record.
    fn is_write_vectored(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_without_tls_has_the_length_that_it_says() {
        let (head, body) = SPEAK_TLS.split_once("\r\n\r\n").unwrap();
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{}", body.len());
    }
}
