//! A connection: its counts, and the requests for its end.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use http_body::{Body, Frame, SizeHint};

use super::port_state::PortState;
use super::protocol::Protocol;
use super::traffic::Traffic;

/// A port's request to a connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub(super) enum Request {
    Stay = 0,
    /// Give back the memory that only a request needs, and go on.
    Rest = 1,
    /// End without losing a request.
    Finish = 2,
    /// End.
    Stop = 3,
}

/// The work of a connection so far. Its task counts, its port looks.
pub struct Watched {
    pub(super) protocol: Protocol,
    pub(super) port: Arc<PortState>,
    traffic: Arc<Traffic>,
    /// Requests under way, from the head to the last byte of the answer that was made.
    requests: AtomicU32,
    /// Requests that began.
    served: AtomicU64,
    /// Bodies of requests whose rest the server waits for.
    awaited: AtomicU32,
    /// Bytes read.
    pub(super) received: AtomicU64,
    /// Bytes that were read when the last request ended.
    settled: AtomicU64,
    /// Bytes written.
    pub(super) sent: AtomicU64,
    /// The peer takes no more of the answer.
    pub(super) write_blocked: AtomicBool,
    /// The end of the connection waits for its peer's last bytes.
    pub(super) closing: AtomicBool,
    /// The connection is a socket and nothing else until the peer sends something.
    pub(super) rests: AtomicBool,
    asked: AtomicU8,
    pub(super) waker: AtomicWaker,
}

/// The counts at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Seen {
    pub protocol: Protocol,
    pub requests: u32,
    pub served: u64,
    pub awaited: u32,
    pub received: u64,
    pub settled: u64,
    pub sent: u64,
    pub write_blocked: bool,
    pub closing: bool,
    pub rests: bool,
    pub asked: Request,
}

impl Seen {
    /// Whether the rest of a head is awaited. A gRPC connection has frames of its own between
    /// calls.
    pub fn is_in_head(&self) -> bool {
        self.protocol == Protocol::Http && self.requests == 0 && self.received > self.settled
    }

    /// Whether nothing but the rest of a request is awaited.
    pub fn is_in_request(&self) -> bool {
        self.is_in_head() || (self.awaited > 0 && self.awaited >= self.requests)
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.requests == 0 && !self.write_blocked && !self.is_in_head()
    }

    /// Whether the connection can rest. HTTP/2 cannot: both sides remember headers and windows of
    /// the other.
    pub fn may_rest(&self) -> bool {
        self.protocol == Protocol::Http && self.is_idle() && !self.closing
    }
}

impl Watched {
    pub(super) fn new(protocol: Protocol, port: Arc<PortState>, traffic: Arc<Traffic>) -> Self {
        Watched {
            protocol,
            port,
            traffic,
            requests: AtomicU32::new(0),
            served: AtomicU64::new(0),
            awaited: AtomicU32::new(0),
            received: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            write_blocked: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            rests: AtomicBool::new(false),
            asked: AtomicU8::new(Request::Stay as u8),
            waker: AtomicWaker::new(),
        }
    }

    /// Notes that a request has begun; dropping the returned guard ends it.
    pub fn request(self: &Arc<Self>) -> InRequest {
        self.requests.fetch_add(1, Relaxed);
        self.served.fetch_add(1, Relaxed);
        InRequest(Arc::clone(self))
    }

    /// The rest of a body is awaited from now on, or no longer.
    pub(super) fn awaits_body(&self, now: bool) {
        match now {
            true => self.awaited.fetch_add(1, Relaxed),
            false => self.awaited.fetch_sub(1, Relaxed),
        };
    }

    /// The bytes read until now are no part of a request.
    pub(super) fn settle_received(&self) {
        self.settled.store(self.received.load(Relaxed), Relaxed);
    }

    /// Bytes that were read and written.
    pub(super) fn bytes(&self) -> u64 {
        self.received.load(Relaxed) + self.sent.load(Relaxed)
    }

    pub(super) fn seen(&self) -> Seen {
        Seen {
            protocol: self.protocol,
            requests: self.requests.load(Relaxed),
            served: self.served.load(Relaxed),
            awaited: self.awaited.load(Relaxed),
            // Loaded before the count that it is compared with: between the two loads, both only
            // grow.
            received: self.received.load(Relaxed),
            settled: self.settled.load(Relaxed),
            sent: self.sent.load(Relaxed),
            write_blocked: self.write_blocked.load(Relaxed),
            closing: self.closing.load(Relaxed),
            rests: self.rests.load(Relaxed),
            asked: self.asked(),
        }
    }

    pub(super) fn ask(&self, request: Request) {
        self.asked.fetch_max(request as u8, Relaxed);
        self.waker.wake();
    }

    pub(super) fn asked(&self) -> Request {
        match self.asked.load(Relaxed) {
            0 => Request::Stay,
            1 => Request::Rest,
            2 => Request::Finish,
            _ => Request::Stop,
        }
    }

    /// Takes a request back that is carried out, or cannot be carried out now. A stronger request
    /// stands.
    pub(super) fn settle(&self, request: Request) {
        let _ = self.asked.compare_exchange(request as u8, Request::Stay as u8, Relaxed, Relaxed);
    }
}

/// A request of a connection.
pub struct InRequest(Arc<Watched>);

impl InRequest {
    /// The counts of answers of the connection's protocol.
    pub(crate) fn traffic(&self) -> &Traffic {
        &self.0.traffic
    }

    /// Whether clients should go elsewhere.
    pub fn is_leaving(&self) -> bool {
        self.0.port.is_leaving()
    }
}

impl Drop for InRequest {
    fn drop(&mut self) {
        self.0.settle_received();
        self.0.requests.fetch_sub(1, Relaxed);
    }
}

/// The body of an answer, until whose end a request is under way.
pub struct Answering<B> {
    body: B,
    _request: InRequest,
}

impl<B> Answering<B> {
    /// The body of an answer, which keeps its request open until the body ends.
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
