//! Connections to one server that carry requests. No call on them blocks: a connection goes on when
//! its socket is ready.

pub mod grpc;
pub mod http;
mod socket;

use std::net::SocketAddr;

use downbeat_core::Time;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::load::mix::Choice;
use crate::load::poller::{Poller, Ready};
use crate::results::outcome::{Failed, Failure};

/// The name of a request in flight. An entry is used again with the next generation, so that a late
/// answer finds no request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// Index among the requests in flight.
    pub index: u32,
    /// The number of earlier uses of the entry.
    pub generation: u32,
}

/// The end of a request.
#[derive(Debug)]
pub struct Done {
    /// The request.
    pub ticket: Ticket,
    /// The time when the answer was complete.
    pub at: Time,
    /// The result of the request.
    pub result: Result<(), Failed>,
}

/// Whether the transport accepted a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// The request is on its way. A [`Done`] follows unless the request is cancelled.
    Taken,
    /// Every connection is busy and no more may be opened: try again after the next [`Done`] or
    /// [`Ready`].
    Busy,
}

/// Connections of one thread to the server. Every method returns at once, and appends finished
/// requests to `done`.
pub trait Transport {
    /// Sends a request.
    fn start(&mut self, poller: &Poller, ticket: Ticket, choice: Choice, done: &mut Vec<Done>) -> Start;

    /// Handles a socket that is ready.
    fn handle_ready(&mut self, poller: &Poller, ready: Ready, done: &mut Vec<Done>);

    /// Gives up a request: no one waits for its answer any more.
    fn cancel(&mut self, ticket: Ticket);

    /// Writes the bytes that the other methods left to be written together. Called once after every
    /// round of them. Returns whether it must be called again without waiting.
    fn flush(&mut self, poller: &Poller, done: &mut Vec<Done>) -> bool;

    /// The number of open connections.
    fn connections(&self) -> usize;
}

/// Begins to connect. The socket becomes ready, with this token, once the result is known.
fn connect(address: SocketAddr, poller: &Poller, token: u64) -> Result<OwnedFd, Failed> {
    let begin = || -> std::io::Result<OwnedFd> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(e) => return Err(e.into()),
        }
        poller.add(&socket, token)?;
        Ok(socket)
    };
    begin().map_err(|e| Failed::of(Failure::Connect, e))
}

/// Returns the result of connecting, once the socket is ready.
fn check_connected(socket: &OwnedFd) -> Result<(), Failed> {
    sockopt::socket_error(socket).and_then(|connected| connected).map_err(|e| Failed::of(Failure::Connect, e))
}
