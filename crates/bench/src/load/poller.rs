//! Waits for sockets, with a timeout in nanoseconds.

use downbeat_core::Duration;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::fd::{AsFd, OwnedFd};
use rustix::time::Timespec;

/// A readiness report.
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    /// The token of the socket's registration.
    pub token: u64,
    /// Whether the server has ended the connection, or it is broken. Earlier bytes can still be
    /// read.
    pub hung_up: bool,
}

/// An epoll instance. Sockets are registered once for both directions, edge-triggered. A report
/// only says that something changed: the socket must then be used until it would block or is no
/// longer needed.
pub struct Poller {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
}

impl Poller {
    /// Makes an epoll instance.
    ///
    /// # Errors
    /// The system's error.
    pub fn new() -> std::io::Result<Self> {
        Ok(Poller { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, events: Vec::with_capacity(1024) })
    }

    /// Watches a socket until it is closed.
    ///
    /// # Errors
    /// The system's error.
    pub fn add(&self, socket: impl AsFd, token: u64) -> std::io::Result<()> {
        use epoll::EventFlags as Flags;
        let flags = Flags::IN | Flags::OUT | Flags::RDHUP | Flags::ET;
        Ok(epoll::add(&self.epoll, socket, epoll::EventData::new_u64(token), flags)?)
    }

    /// Waits for events, at most `timeout`, and appends them to `ready`.
    ///
    /// # Errors
    /// The system's error. An interruption by a signal is not an error.
    pub fn wait(&mut self, timeout: Duration, ready: &mut Vec<Ready>) -> std::io::Result<()> {
        let ns = timeout.as_nanos();
        let timeout = Timespec {
            tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (ns % 1_000_000_000) as _,
        };
        self.events.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        for event in &self.events {
            // Copied, because the event is packed.
            let (flags, data) = (event.flags, event.data);
            let hung_up = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR | epoll::EventFlags::RDHUP);
            ready.push(Ready { token: data.u64(), hung_up });
        }
        Ok(())
    }
}
