//! Reads the memory of another process through UCX. The process may be on another machine if there
//! is a network with RDMA. On one machine UCX's own shared memory serves; the tests use it.
//!
//! UCX has one thread here, which sleeps while there is no work. If the network cannot read memory
//! by itself, this thread also answers the peers' reads.
//!
//! The messages between two UCX libraries are not under our control, and UCX trusts its peers. A
//! peer's address must come from a peer that is trusted as much.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

use bytes::Bytes;
use downbeat_engine::region::OwnRegion;
use rustix::event::EventfdFlags;
use rustix::fd::OwnedFd;
use serde::{Deserialize, Serialize};

mod library;
mod thread;
mod worker;

pub use library::UcxError;
use thread::{Command, UcxThread};

/// The data with which another process reads this process's region.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Offer {
    /// The major and minor version of the library in the offering process.
    version: (u32, u32),
    /// The address of the offering process's UCX worker.
    address: Vec<u8>,
    /// The key with which the reader's UCX reads the region.
    key: Vec<u8>,
    /// The address of the region in the offering process.
    begin: u64,
    /// The region's length in bytes.
    len: u64,
    /// A checksum of the fields above. The library does not check the data that it is given.
    checksum: u32,
}

impl Offer {
    fn sealed(self) -> Offer {
        Offer { checksum: self.sum(), ..self }
    }

    fn sum(&self) -> u32 {
        let mut sum = crc32fast::Hasher::new();
        let numbers = [self.version.0.into(), self.version.1.into(), self.begin, self.len, self.address.len() as u64];
        numbers.iter().for_each(|number| sum.update(&number.to_le_bytes()));
        sum.update(&self.address);
        sum.update(&self.key);
        sum.finalize()
    }

    /// # Errors
    /// If the offer is damaged, of another version, or its region is too long.
    fn check(&self, version: (u32, u32), most: usize) -> Result<usize, UcxError> {
        let refused = |why: String| Err(UcxError::Refused(why));
        if self.checksum != self.sum() {
            return refused("the peer's description of its memory is garbled".to_owned());
        }
        // Addresses of one version may be invalid in another.
        if self.version != version {
            let (its, own) = (self.version, version);
            return refused(format!(
                "it has UCX {}.{}, and this process {}.{}: they must be the same",
                its.0, its.1, own.0, own.1
            ));
        }
        match usize::try_from(self.len) {
            Ok(len) if (1..=most).contains(&len) && self.begin.checked_add(self.len).is_some() => Ok(len),
            _ => refused(format!("its memory has {} bytes, and 1 to {most} are taken", self.len)),
        }
    }
}

/// Receives the result of a command.
type Done<T> = Box<dyn FnOnce(Result<T, UcxError>) + Send>;

/// UCX in this process, with a region that peers may read. UCX ends when its last handle is
/// dropped.
#[derive(Clone)]
pub struct Ucx(Arc<Inner>);

struct Inner {
    commands: mpsc::Sender<Command>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    next: AtomicU64,
    version: (u32, u32),
}

impl Ucx {
    /// Loads the library, and lets peers read this region once they are [met](Ucx::meet).
    ///
    /// # Errors
    /// If the library is missing, or finds no usable network. `UCX_TLS` in the environment says
    /// which networks it tries.
    pub fn start(region: &OwnRegion) -> Result<Ucx, UcxError> {
        let no_thread = |error: std::io::Error| UcxError::NoThread(error.to_string());
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = Arc::new(rustix::event::eventfd(0, flags).map_err(|error| no_thread(error.into()))?);
        let ((commands, come), (started, starts)) = (mpsc::channel(), mpsc::channel());
        let (mapping, woken) = (region.mapping(), wake.clone());
        // One thread makes, uses and gives back all of UCX.
        let run = move || match UcxThread::start(mapping) {
            Err(error) => drop(started.send(Err(error))),
            Ok(mut thread) => {
                drop(started.send(Ok(thread.version())));
                thread.run(&come, &woken);
            }
        };
        let thread = std::thread::Builder::new().name("ucx".to_owned()).spawn(run).map_err(no_thread)?;
        let version = starts.recv().map_err(|_| UcxError::Ended)??;
        Ok(Ucx(Arc::new(Inner { commands, wake, thread: Some(thread), next: AtomicU64::new(0), version })))
    }

    /// Makes a worker and an offer for one peer, so that it can read this process's region and be
    /// read. They serve that peer alone, so that their failure affects no other.
    pub fn meet(&self, done: impl FnOnce(Result<UcxMeeting, UcxError>) + Send + 'static) {
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        // Dropped, the way gives back all that was made for the peer, even if the meeting failed.
        let way = Way { ucx: self.clone(), number };
        let done: Done<Offer> = Box::new(move |made| done(made.map(|offer| UcxMeeting { way, offer })));
        self.0.tell(Command::Open { number, done });
    }
}

impl Inner {
    fn tell(&self, command: Command) {
        // If UCX has ended, the command is dropped, and with it the channel that its caller waits
        // on.
        let _ = self.commands.send(command);
        // The counter cannot be full.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.tell(Command::End);
        // UCX's thread drops the callbacks that still wait, and one of them may hold the last
        // handle.
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

/// The worker for one peer. Dropping it ends the work under way.
struct Way {
    ucx: Ucx,
    number: u64,
}

impl Drop for Way {
    fn drop(&mut self) {
        self.ucx.0.tell(Command::Close { number: self.number });
    }
}

/// A peer whose region is not yet known.
pub struct UcxMeeting {
    way: Way,
    offer: Offer,
}

impl UcxMeeting {
    /// The offer with which the peer reads this process's region. It is valid until this meeting,
    /// or its [`UcxPeer`], is dropped.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Makes the way to the peer's region, of at most `most` bytes. Only the first read tells
    /// whether the way works.
    pub fn connect(self, offer: Offer, most: usize, done: impl FnOnce(Result<UcxPeer, UcxError>) + Send + 'static) {
        let UcxMeeting { way, .. } = self;
        let len = match offer.check(way.ucx.0.version, most) {
            Ok(len) => len,
            Err(error) => return done(Err(error)),
        };
        let (ucx, number) = (way.ucx.clone(), way.number);
        let done: Done<()> = Box::new(move |made| done(made.map(|()| UcxPeer { way, len })));
        ucx.0.tell(Command::Connect { number, offer, done });
    }
}

/// The way to the region of a peer.
pub struct UcxPeer {
    way: Way,
    len: usize,
}

impl UcxPeer {
    /// Reads part of the region's bytes. Returns false, and does nothing, if they are not within
    /// the region. The peer may change the bytes meanwhile.
    #[must_use]
    pub fn read(&self, begin: usize, len: usize, done: impl FnOnce(Result<Bytes, UcxError>) + Send + 'static) -> bool {
        let is_within = len > 0 && begin.checked_add(len).is_some_and(|end| end <= self.len);
        if is_within {
            let (number, begin, done): (_, _, Done<Bytes>) = (self.way.number, begin as u64, Box::new(done));
            self.way.ucx.0.tell(Command::Read { number, begin, len, done });
        }
        is_within
    }

    /// The region's length in bytes.
    pub fn region_bytes(&self) -> usize {
        self.len
    }
}

/// A pointer that the library returned, and accepts.
type Handle = NonNull<std::ffi::c_void>;

#[cfg(test)]
mod tests;
