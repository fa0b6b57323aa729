//! Requests over HTTP/1.1: a pool of kept-alive connections with one request at a time on each.

use std::io::ErrorKind;
use std::net::SocketAddr;

use bytes::Bytes;

use super::socket::Socket;
use super::{Done, Start, Ticket, Transport, check_connected, connect};
use crate::client::response::{Finished, Keep, ResponseReader};
use crate::client::tls::Tls;
use crate::clock::Clock;
use crate::load::control::Target;
use crate::load::mix::Choice;
use crate::load::poller::{Poller, Ready};
use crate::results::outcome::{Failed, Failure};

/// Bytes read at once.
const READ: usize = 64 * 1024;

struct Connection {
    socket: Socket,
    connecting: bool,
    /// The server's end of the connection was reported.
    hung_up: bool,
    /// The request on its way, if any.
    ticket: Option<Ticket>,
    /// The bytes of the request that are not written yet.
    unsent: Bytes,
    reader: ResponseReader,
}

/// A place in the pool. Its generation is part of the token, so that events of a closed connection
/// match nothing.
#[derive(Default)]
struct Entry {
    connection: Option<Connection>,
    generation: u32,
}

/// The pool of connections. Bound: `most` connections. Further requests wait in the caller's queue.
pub struct Http {
    address: SocketAddr,
    tls: Option<Tls>,
    clock: Clock,
    /// Whole requests, by model and variant.
    requests: Vec<Vec<Bytes>>,
    most: usize,
    entries: Vec<Entry>,
    /// Entries without a connection.
    empty: Vec<u32>,
    /// Idle connections. The last used is used first, so that a pool grown in a burst does not stay
    /// busy without need.
    idle: Vec<u32>,
    open: usize,
    /// The entry that carries each ticket, by the ticket's entry.
    carriers: Vec<u32>,
    buffer: Vec<u8>,
}

impl Http {
    /// Makes a pool of connections to `target`. `requests` holds, by model and variant, all bytes from
    /// the request line to the end of the body.
    pub fn new(target: &Target, requests: Vec<Vec<Bytes>>, most: usize, clock: Clock) -> Self {
        Http {
            address: target.address,
            tls: target.tls.clone(),
            clock,
            requests,
            most: most.max(1),
            entries: Vec::new(),
            empty: Vec::new(),
            idle: Vec::new(),
            open: 0,
            carriers: Vec::new(),
            buffer: vec![0; READ],
        }
    }

    fn token(&self, index: u32) -> u64 {
        let generation = self.entries.get(index as usize).map_or(0, |s| s.generation);
        u64::from(generation) << 32 | u64::from(index)
    }

    fn connection(&mut self, index: u32) -> Option<&mut Connection> {
        self.entries.get_mut(index as usize)?.connection.as_mut()
    }

    /// Opens a connection in a free entry.
    fn open(&mut self, poller: &Poller) -> Result<u32, Failed> {
        let index = match self.empty.pop() {
            Some(index) => index,
            None => {
                self.entries.push(Entry::default());
                (self.entries.len() - 1) as u32
            }
        };
        let connected = connect(self.address, poller, self.token(index));
        match connected.and_then(|fd| Socket::new(fd, self.tls.as_ref())) {
            Ok(socket) => {
                if let Some(s) = self.entries.get_mut(index as usize) {
                    s.connection = Some(Connection {
                        socket,
                        connecting: true,
                        hung_up: false,
                        ticket: None,
                        unsent: Bytes::new(),
                        reader: ResponseReader::new(Keep::MESSAGES),
                    });
                }
                self.open += 1;
                Ok(index)
            }
            Err(failed) => {
                self.empty.push(index);
                Err(failed)
            }
        }
    }

    /// Closes a connection and forgets its request.
    fn close(&mut self, index: u32) -> Option<Ticket> {
        let s = self.entries.get_mut(index as usize)?;
        let connection = s.connection.take()?;
        s.generation = s.generation.wrapping_add(1);
        self.open -= 1;
        self.empty.push(index);
        if connection.ticket.is_none() {
            self.idle.retain(|i| *i != index);
        }
        connection.ticket
    }

    fn fail(&mut self, index: u32, failed: Failed, done: &mut Vec<Done>) {
        if let Some(ticket) = self.close(index) {
            done.push(Done { ticket, at: self.clock.now(), result: Err(failed) });
        }
    }

    fn write(&mut self, index: u32, done: &mut Vec<Done>) {
        let Some(connection) = self.connection(index) else { return };
        while !connection.unsent.is_empty() {
            match connection.socket.send(&connection.unsent) {
                Ok(n) => drop(connection.unsent.split_to(n.min(connection.unsent.len()))),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(_) if connection.reader.has_begun() => return,
                // The server answers and closes before it has read everything. The answer may still
                // be readable.
                Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                    connection.unsent = Bytes::new();
                    self.read(index, done);
                    let still = self.connection(index).is_some_and(|c| c.ticket.is_some());
                    if still {
                        self.fail(index, Failed::of(Failure::Closed, e), done);
                    }
                    return;
                }
                Err(e) => return self.fail(index, Failed::of(Failure::Closed, e), done),
            }
        }
    }

    fn read(&mut self, index: u32, done: &mut Vec<Done>) {
        let mut buffer = std::mem::take(&mut self.buffer);
        self.read_into(index, &mut buffer, done);
        self.buffer = buffer;
    }

    fn read_into(&mut self, index: u32, buffer: &mut [u8], done: &mut Vec<Done>) {
        loop {
            let Some(connection) = self.connection(index) else { return };
            let read = match connection.socket.read(buffer) {
                Ok(n) => n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) => return self.fail(index, Failed::of(Failure::Closed, e), done),
            };
            if connection.ticket.is_none() {
                // The connection is idle: the server has closed it, or sent bytes without a
                // request.
                self.close(index);
                return;
            }
            if read == 0 {
                match connection.reader.closed() {
                    Some(finished) => self.finish(index, finished, done),
                    None => self.fail(index, Failed::new(Failure::Closed, "before the end of the answer"), done),
                }
                return;
            }
            match connection.reader.push(buffer.get(..read).unwrap_or_default()) {
                Ok(None) => {
                    // A short read means that no more bytes are there, and the next byte will be
                    // reported. But the end of the connection may have been reported together with
                    // these bytes, and is not reported again.
                    if read < buffer.len() && !connection.hung_up {
                        return;
                    }
                }
                Ok(Some(finished)) => return self.finish(index, finished, done),
                Err(invalid) => return self.fail(index, Failed::new(Failure::Garbage, invalid.0), done),
            }
        }
    }

    fn finish(&mut self, index: u32, finished: Finished, done: &mut Vec<Done>) {
        let at = self.clock.now();
        let Some(connection) = self.connection(index) else { return };
        let result = if finished.status == 200 {
            Ok(())
        } else {
            Err(Failed::new(Failure::Http(finished.status), String::from_utf8_lossy(connection.reader.body())))
        };
        // An answer before the whole request was sent ends the connection: the rest of the request
        // cannot be taken back.
        let ticket = if finished.reusable && connection.unsent.is_empty() {
            connection.reader.reset();
            let ticket = connection.ticket.take();
            self.idle.push(index);
            ticket
        } else {
            self.close(index)
        };
        if let Some(ticket) = ticket {
            done.push(Done { ticket, at, result });
        }
    }
}

impl Transport for Http {
    fn start(&mut self, poller: &Poller, ticket: Ticket, choice: Choice, done: &mut Vec<Done>) -> Start {
        let (index, fresh) = match self.idle.pop() {
            Some(index) => (index, false),
            None if self.open >= self.most => return Start::Busy,
            None => match self.open(poller) {
                Ok(index) => (index, true),
                Err(failed) => {
                    done.push(Done { ticket, at: self.clock.now(), result: Err(failed) });
                    return Start::Taken;
                }
            },
        };
        let request = self.requests.get(choice.model).and_then(|m| m.get(choice.variant)).cloned().unwrap_or_default();
        let place = ticket.index as usize;
        if self.carriers.len() <= place {
            self.carriers.resize(place + 1, u32::MAX);
        }
        self.carriers[place] = index;
        if let Some(connection) = self.connection(index) {
            connection.ticket = Some(ticket);
            connection.unsent = request;
        }
        if !fresh {
            self.write(index, done);
        }
        Start::Taken
    }

    fn handle_ready(&mut self, _poller: &Poller, ready: Ready, done: &mut Vec<Done>) {
        let index = (ready.token & u64::from(u32::MAX)) as u32;
        if self.token(index) != ready.token {
            return;
        }
        let Some(connection) = self.connection(index) else { return };
        connection.hung_up |= ready.hung_up;
        if connection.connecting {
            if let Err(failed) = check_connected(connection.socket.fd()) {
                return self.fail(index, failed, done);
            }
            connection.connecting = false;
        }
        if !connection.unsent.is_empty() {
            self.write(index, done);
        }
        // Idle connections are read too. The server may have closed, or sent bytes that are not the
        // next answer.
        self.read(index, done);
    }

    fn cancel(&mut self, ticket: Ticket) {
        let Some(index) = self.carriers.get(ticket.index as usize).copied() else { return };
        if self.connection(index).is_some_and(|c| c.ticket == Some(ticket)) {
            self.close(index);
        }
    }

    fn flush(&mut self, _poller: &Poller, _done: &mut Vec<Done>) -> bool {
        false
    }

    fn connections(&self) -> usize {
        self.open
    }
}
