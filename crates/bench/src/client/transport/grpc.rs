//! Requests over gRPC, as streams of few HTTP/2 connections. Only the status of an answer is read,
//! and whether its message is whole.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker, ready};

use bytes::Bytes;
use downbeat_core::{Duration, Time};
use futures_util::future::LocalBoxFuture;
use futures_util::stream::{FuturesUnordered, Stream};
use h2::client::{Connection, ResponseFuture, SendRequest};
use h2::{Reason, SendStream};
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue, TE, USER_AGENT};
use http::{HeaderMap, Method, Request, StatusCode, Uri};
use percent_encoding::percent_decode;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::SendFlags;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Done, Start, Ticket, Transport, check_connected, connect};
use crate::client::tls::Tls;
use crate::clock::Clock;
use crate::load::control::Target;
use crate::load::mix::Choice;
use crate::load::plan::Plan;
use crate::load::poller::{Poller, Ready};
use crate::results::outcome::{Failed, Failure};

/// Flow-control windows of streams and connections: large enough never to hold back a server.
const WINDOW: u32 = 8 << 20;
/// The pause after a failed connection. Requests fail at once until the next attempt.
const RETRY: Duration = Duration::from_millis(100);
/// Most rounds of polling a connection before others get their turn.
const ROUNDS: usize = 64;
/// The protocol's method.
const PATH: &str = "/inference.GRPCInferenceService/ModelInfer";

/// A socket that the owner of the poller drives. It never registers wakers, because every
/// connection is polled after each readiness report. It asks the system for bytes only after a
/// report, because HTTP/2 tries to read whenever it is polled.
struct Socket {
    fd: OwnedFd,
    woken: Arc<Woken>,
}

fn ready_unless_again<T>(result: Result<T, Errno>) -> Poll<std::io::Result<T>> {
    match result {
        Err(Errno::AGAIN) => Poll::Pending,
        other => Poll::Ready(other.map_err(Into::into)),
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        if !self.woken.readable.load(Ordering::Relaxed) {
            return Poll::Pending;
        }
        let read = rustix::io::retry_on_intr(|| rustix::io::read(&self.fd, buffer.initialize_unfilled()));
        if read == Err(Errno::AGAIN) {
            self.woken.readable.store(false, Ordering::Relaxed);
        }
        let read = ready!(ready_unless_again(read))?;
        buffer.advance(read);
        // A short read means that no more bytes are there, unless the end of the connection was
        // reported with it.
        if buffer.remaining() > 0 && !self.woken.hung_up.load(Ordering::Relaxed) {
            self.woken.readable.store(false, Ordering::Relaxed);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        ready_unless_again(rustix::io::retry_on_intr(|| rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL)))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        parts: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        ready_unless_again(rustix::io::retry_on_intr(|| {
            rustix::net::sendmsg(&self.fd, parts, &mut Default::default(), SendFlags::NOSIGNAL)
        }))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Write);
        Poll::Ready(Ok(()))
    }
}

/// The reasons to poll a connection. Only one thread uses it, but a waker must be `Sync`.
#[derive(Default)]
struct Woken {
    /// The connection or a call on it wants to be polled.
    wanted: AtomicBool,
    /// The socket may have bytes.
    readable: AtomicBool,
    /// The server's end of the connection was reported.
    hung_up: AtomicBool,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.wanted.store(true, Ordering::Relaxed);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wanted.store(true, Ordering::Relaxed);
    }
}

/// Checks the length of a message against its prefix.
#[derive(Default)]
struct Message {
    prefix: [u8; 5],
    received: u64,
}

impl Message {
    fn push(&mut self, bytes: &[u8]) {
        let have = usize::try_from(self.received).unwrap_or(usize::MAX);
        for (place, byte) in self.prefix.iter_mut().skip(have).zip(bytes) {
            *place = *byte;
        }
        self.received += bytes.len() as u64;
    }

    /// Whether exactly one message came.
    fn is_whole(&self) -> bool {
        let [_, a, b, c, d] = self.prefix;
        self.received == 5 + u64::from(u32::from_be_bytes([a, b, c, d]))
    }
}

fn of_h2(error: h2::Error) -> Failed {
    // An error of the library itself means invalid HTTP/2. Other errors are ends of the stream or
    // the connection.
    let failure = if error.is_library() && !error.is_reset() { Failure::Garbage } else { Failure::Closed };
    Failed::new(failure, error.to_string())
}

/// The status in headers or trailers; `None` if there is none.
fn grpc_status(headers: &HeaderMap) -> Option<Result<(), Failed>> {
    let status = headers.get("grpc-status")?;
    if status == "0" {
        return Some(Ok(()));
    }
    let message = headers.get("grpc-message").map(|m| percent_decode(m.as_bytes()).decode_utf8_lossy());
    Some(Err(match status.to_str().ok().and_then(|s| s.parse().ok()) {
        Some(code) => Failed::new(Failure::Grpc(code), message.unwrap_or_default()),
        None => Failed::new(Failure::Garbage, "a grpc-status that is not a number"),
    }))
}

/// Begins HTTP/2 on a connection.
async fn handshake(socket: Socket, tls: Option<Tls>) -> Result<Shaken, String> {
    let stream: Box<dyn Io> = match tls {
        None => Box::new(socket),
        Some(tls) => Box::new(tls.connect(socket).await.map_err(|error| error.to_string())?),
    };
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(WINDOW).initial_connection_window_size(WINDOW).enable_push(false);
    builder.initial_max_send_streams(0);
    builder.handshake(stream).await.map_err(|error| error.to_string())
}

/// The result of a call. It is good only with a whole message before the status.
async fn ended(response: ResponseFuture) -> Result<(), Failed> {
    let garbage = |what: &str| Err(Failed::new(Failure::Garbage, what));
    let (head, mut body) = response.await.map_err(of_h2)?.into_parts();
    if let Some(status) = grpc_status(&head.headers) {
        return status.and(garbage("status OK without a message"));
    }
    if head.status != StatusCode::OK {
        return Err(Failed::new(Failure::Http(head.status.as_u16()), ""));
    }
    let mut message = Message::default();
    while let Some(data) = body.data().await {
        let data = data.map_err(of_h2)?;
        message.push(&data);
        // This fails only for more bytes than were received.
        let _ = body.flow_control().release_capacity(data.len());
    }
    match body.trailers().await.map_err(of_h2)?.as_ref().and_then(grpc_status) {
        None => garbage("no grpc-status at the end"),
        Some(Ok(())) if !message.is_whole() => garbage("status OK without a whole message"),
        Some(status) => status,
    }
}

type Call = LocalBoxFuture<'static, (Ticket, Result<(), Failed>)>;
/// The bytes of a connection, with TLS or without.
trait Io: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Io for T {}

type Shaken = (SendRequest<Bytes>, Connection<Box<dyn Io>, Bytes>);
type Handshake = LocalBoxFuture<'static, Result<Shaken, String>>;

enum State {
    /// There is no connection, and no new one before this time.
    Closed(Time),
    Connecting(OwnedFd),
    Handshake(Handshake),
    Open {
        send: SendRequest<Bytes>,
        connection: Box<Connection<Box<dyn Io>, Bytes>>,
        calls: FuturesUnordered<Call>,
    },
}

/// A connection, or the place for a connection.
struct Link {
    state: State,
    woken: Arc<Woken>,
    waker: Waker,
    generation: u32,
    /// The reason of the last close.
    error: Failed,
}

/// A request on its way, with the parts that cancelling needs.
struct OnWay {
    ticket: Ticket,
    link: usize,
    stream: SendStream<Bytes>,
}

/// The connections of one thread. Bound: as many streams as the server admits. Further requests
/// wait in the caller's queue.
pub struct Grpc {
    address: SocketAddr,
    tls: Option<Tls>,
    clock: Clock,
    /// Messages with their prefix, by model and variant.
    messages: Vec<Vec<Bytes>>,
    uri: Uri,
    headers: HeaderMap,
    links: Vec<Link>,
    /// The link that is tried first for the next request.
    next: usize,
    /// The requests on their way, by the ticket's entry.
    on_way: Vec<Option<OnWay>>,
}

impl Grpc {
    /// Connections to `target` for the requests of `plan`; opened when first needed.
    pub fn new(target: &Target, plan: &Plan, clock: Clock) -> Self {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(TE, HeaderValue::from_static("trailers"));
        headers.insert(USER_AGENT, HeaderValue::from_static("downbeat-bench"));
        for (name, value) in &plan.headers {
            // The values were checked when the command line was resolved.
            if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value.parse()) {
                headers.append(name, value);
            }
        }
        let scheme = if target.tls.is_some() { "https" } else { "http" };
        let uri = Uri::builder().scheme(scheme).authority(target.host.as_str()).path_and_query(PATH).build();
        let links = (0..plan.grpc_connections.max(1))
            .map(|_| {
                let woken = Arc::new(Woken::default());
                Link {
                    state: State::Closed(Time::ZERO),
                    waker: Waker::from(Arc::clone(&woken)),
                    woken,
                    generation: 0,
                    error: Failed::new(Failure::Connect, ""),
                }
            })
            .collect();
        Grpc {
            address: target.address,
            tls: target.tls.clone(),
            clock,
            messages: plan.requests(),
            // The host was resolved as a socket address, so it is an authority. If not, the path
            // alone suffices.
            uri: uri.unwrap_or_else(|_| Uri::from_static(PATH)),
            headers,
            links,
            next: 0,
            on_way: Vec::new(),
        }
    }

    /// Begins to connect every link that has no connection and may have one.
    fn open(&mut self, poller: &Poller) {
        let now = self.clock.now();
        for (index, link) in self.links.iter_mut().enumerate() {
            if !matches!(link.state, State::Closed(retry) if retry <= now) {
                continue;
            }
            link.generation = link.generation.wrapping_add(1);
            link.woken.readable.store(false, Ordering::Relaxed);
            link.woken.hung_up.store(false, Ordering::Relaxed);
            let token = u64::from(link.generation) << 32 | index as u64;
            link.state = match connect(self.address, poller, token) {
                Ok(socket) => State::Connecting(socket),
                Err(failed) => {
                    link.error = failed;
                    State::Closed(now + RETRY)
                }
            };
        }
    }

    fn done(&mut self, ticket: Ticket, result: Result<(), Failed>, done: &mut Vec<Done>) {
        if let Some(place) = self.on_way.get_mut(ticket.index as usize)
            && place.as_ref().is_some_and(|o| o.ticket == ticket)
        {
            *place = None;
            done.push(Done { ticket, at: self.clock.now(), result });
        }
    }

    /// Ends a link and every call on it.
    fn close(&mut self, index: usize, failed: Failed, done: &mut Vec<Done>) {
        let retry = self.clock.now() + RETRY;
        if let Some(link) = self.links.get_mut(index) {
            link.state = State::Closed(retry);
            link.generation = link.generation.wrapping_add(1);
            link.error = failed.clone();
        }
        let lost: Vec<Ticket> = self.on_way.iter().flatten().filter(|o| o.link == index).map(|o| o.ticket).collect();
        for ticket in lost {
            self.done(ticket, Err(failed.clone()), done);
        }
    }

    /// Polls a link until it wants no more polling. Returns whether it still does.
    fn drive(&mut self, index: usize, done: &mut Vec<Done>) -> bool {
        for _ in 0..ROUNDS {
            let Some(link) = self.links.get_mut(index) else { return false };
            if !link.woken.wanted.swap(false, Ordering::Relaxed) {
                return false;
            }
            let mut context = Context::from_waker(&link.waker);
            let mut ended = None;
            let mut answers: Vec<(Ticket, Result<(), Failed>)> = Vec::new();
            match &mut link.state {
                State::Closed(_) | State::Connecting(_) => return false,
                State::Handshake(handshake) => match handshake.as_mut().poll(&mut context) {
                    Poll::Pending => {}
                    Poll::Ready(Ok((send, connection))) => {
                        let connection = Box::new(connection);
                        link.state = State::Open { send, connection, calls: FuturesUnordered::new() };
                        link.woken.wanted.store(true, Ordering::Relaxed);
                    }
                    Poll::Ready(Err(e)) => ended = Some(Failed::new(Failure::Connect, e)),
                },
                State::Open { connection, calls, .. } => {
                    match Pin::new(connection.as_mut()).poll(&mut context) {
                        Poll::Pending => {}
                        Poll::Ready(Ok(())) => ended = Some(Failed::new(Failure::Closed, "the server closed")),
                        Poll::Ready(Err(e)) => ended = Some(of_h2(e)),
                    }
                    while let Poll::Ready(Some(answer)) = Pin::new(&mut *calls).poll_next(&mut context) {
                        answers.push(answer);
                    }
                }
            }
            for (ticket, result) in answers {
                self.done(ticket, result, done);
            }
            if let Some(failed) = ended {
                self.close(index, failed, done);
                return false;
            }
        }
        true
    }
}

impl Transport for Grpc {
    fn start(&mut self, poller: &Poller, ticket: Ticket, choice: Choice, done: &mut Vec<Done>) -> Start {
        self.open(poller);
        let count = self.links.len();
        let mut hope = false;
        for turn in 0..count {
            let index = (self.next + turn) % count;
            let Some(link) = self.links.get_mut(index) else { continue };
            let State::Open { send, calls, .. } = &mut link.state else {
                hope |= !matches!(link.state, State::Closed(_));
                continue;
            };
            hope = true;
            // The server may refuse any stream until it has said how many it admits.
            if send.current_max_send_streams() == 0 {
                continue;
            }
            let mut context = Context::from_waker(&link.waker);
            match send.poll_ready(&mut context) {
                Poll::Ready(Ok(())) => {}
                // The streams are used up, or the connection has ended, which the next round finds
                // out.
                Poll::Pending | Poll::Ready(Err(_)) => continue,
            }
            let mut request = Request::new(());
            *request.method_mut() = Method::POST;
            *request.uri_mut() = self.uri.clone();
            *request.headers_mut() = self.headers.clone();
            let message = self.messages.get(choice.model).and_then(|m| m.get(choice.variant)).cloned();
            let sent = send.send_request(request, false).and_then(|(response, mut stream)| {
                stream.send_data(message.unwrap_or_default(), true)?;
                Ok((response, stream))
            });
            link.woken.wanted.store(true, Ordering::Relaxed);
            self.next = index + 1;
            match sent {
                Ok((response, stream)) => {
                    calls.push(Box::pin(async move { (ticket, ended(response).await) }));
                    let place = ticket.index as usize;
                    if self.on_way.len() <= place {
                        self.on_way.resize_with(place + 1, || None);
                    }
                    self.on_way[place] = Some(OnWay { ticket, link: index, stream });
                }
                Err(e) => done.push(Done { ticket, at: self.clock.now(), result: Err(of_h2(e)) }),
            }
            return Start::Taken;
        }
        if hope {
            return Start::Busy;
        }
        let failed = self.links.first().map_or(Failed::new(Failure::Connect, ""), |l| l.error.clone());
        done.push(Done { ticket, at: self.clock.now(), result: Err(Failed { failure: Failure::Connect, ..failed }) });
        Start::Taken
    }

    fn handle_ready(&mut self, _poller: &Poller, ready: Ready, done: &mut Vec<Done>) {
        let index = (ready.token & u64::from(u32::MAX)) as usize;
        let Some(link) = self.links.get_mut(index) else { return };
        if u64::from(link.generation) != ready.token >> 32 {
            return;
        }
        if let State::Connecting(socket) = &link.state {
            if let Err(failed) = check_connected(socket) {
                return self.close(index, failed, done);
            }
            let State::Connecting(socket) = std::mem::replace(&mut link.state, State::Closed(Time::ZERO)) else {
                return;
            };
            let socket = Socket { fd: socket, woken: Arc::clone(&link.woken) };
            link.state = State::Handshake(Box::pin(handshake(socket, self.tls.clone())));
        }
        link.woken.readable.store(true, Ordering::Relaxed);
        link.woken.hung_up.fetch_or(ready.hung_up, Ordering::Relaxed);
        link.woken.wanted.store(true, Ordering::Relaxed);
    }

    fn cancel(&mut self, ticket: Ticket) {
        if let Some(place) = self.on_way.get_mut(ticket.index as usize)
            && place.as_ref().is_some_and(|o| o.ticket == ticket)
            && let Some(mut on_way) = place.take()
        {
            // The call on the link then ends with an error that matches no request.
            on_way.stream.send_reset(Reason::CANCEL);
        }
    }

    fn flush(&mut self, _poller: &Poller, done: &mut Vec<Done>) -> bool {
        let mut again = false;
        for index in 0..self.links.len() {
            again |= self.drive(index, done);
        }
        again
    }

    fn connections(&self) -> usize {
        self.links.iter().filter(|l| !matches!(l.state, State::Closed(_))).count()
    }
}
