//! Memory of another process, on another machine too, that is read by UCX where there is a network with RDMA; or, on one machine, by UCX's own shared memory, by which it is tested.
//!
//! UCX has one thread of its own here, which sleeps while nothing is under way. It is what has others read this process's memory, too, where the network does not do that by itself.
//!
//! What UCX says to UCX is not under our control: it trusts whoever it speaks with. A peer's address must come from a peer that is trusted as much.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

use bytes::Bytes;
use rustix::event::EventfdFlags;
use rustix::fd::OwnedFd;
use serde::{Deserialize, Serialize};

mod library;
mod thread;
mod worker;

pub use library::UcxError;
use thread::{Command, UcxThread};

use crate::region::OwnRegion;

/// What a process needs to read a region of another.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Offer {
    /// The major and minor version of the library there.
    version: (u32, u32),
    /// How UCX there is reached.
    address: Vec<u8>,
    /// What UCX here needs to read the region.
    key: Vec<u8>,
    /// Where the region begins there.
    begin: u64,
    /// Its bytes.
    len: u64,
    /// Of all of the above, as the library takes what it is given for whole.
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
    /// If it is not as it was made, or its region cannot be.
    fn check(&self, version: (u32, u32), most: usize) -> Result<usize, UcxError> {
        let refused = |why: String| Err(UcxError::Refused(why));
        if self.checksum != self.sum() {
            return refused("what it says about its memory is garbled".to_owned());
        }
        // Addresses of one version need not be those of another.
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

/// Takes what came of something.
type Done<T> = Box<dyn FnOnce(Result<T, UcxError>) + Send>;

/// UCX in this process, with a region that others may read. It ends when the last that has it is dropped.
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
    /// Loads the library, and has others read this region once they are [met](Ucx::meet).
    ///
    /// # Errors
    /// If there is no library, or it finds no network that it can use (`UCX_TLS` in its environment says which it looks for).
    pub fn start(region: &OwnRegion) -> Result<Ucx, UcxError> {
        let no_thread = |error: std::io::Error| UcxError::NoThread(error.to_string());
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = Arc::new(rustix::event::eventfd(0, flags).map_err(|error| no_thread(error.into()))?);
        let ((commands, come), (started, starts)) = (mpsc::channel(), mpsc::channel());
        let (mapping, woken) = (region.mapping(), wake.clone());
        // All of UCX is made, used and given back on one thread.
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

    /// Makes what one peer needs to read this process's region, and this process to read its: all of it is that peer's alone, so that nothing that becomes of it concerns another.
    pub fn meet(&self, done: impl FnOnce(Result<UcxMeeting, UcxError>) + Send + 'static) {
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        // Dropped, it gives back what there is of it also if it did not come about.
        let way = Way { ucx: self.clone(), number };
        let done: Done<Offer> = Box::new(move |made| done(made.map(|offer| UcxMeeting { way, offer })));
        self.0.tell(Command::Open { number, done });
    }
}

impl Inner {
    fn tell(&self, command: Command) {
        // Whoever waits for it is told that it has ended, as what it waits with is dropped.
        let _ = self.commands.send(command);
        // It cannot be full.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.tell(Command::End);
        // What was waited for is dropped there, and with it may be the last that had this.
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

/// What there is for one peer. What is under way ends with it.
struct Way {
    ucx: Ucx,
    number: u64,
}

impl Drop for Way {
    fn drop(&mut self) {
        self.ucx.0.tell(Command::Close { number: self.number });
    }
}

/// A peer that has not said yet where its region is.
pub struct UcxMeeting {
    way: Way,
    offer: Offer,
}

impl UcxMeeting {
    /// What the peer needs to read this process's region, as long as this, or the [`UcxPeer`] that it becomes, is there.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// The way to the peer's region, of at most `most` bytes. That it is reached only the first read tells.
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
    /// Reads some of the region's bytes; false, and nothing is done: they are not within it. What is there may become something else meanwhile.
    #[must_use]
    pub fn read(&self, begin: usize, len: usize, done: impl FnOnce(Result<Bytes, UcxError>) + Send + 'static) -> bool {
        let is_within = len > 0 && begin.checked_add(len).is_some_and(|end| end <= self.len);
        if is_within {
            let (number, begin, done): (_, _, Done<Bytes>) = (self.way.number, begin as u64, Box::new(done));
            self.way.ucx.0.tell(Command::Read { number, begin, len, done });
        }
        is_within
    }

    /// Bytes of the region.
    pub fn region_bytes(&self) -> usize {
        self.len
    }
}

/// A pointer that the library gave, and takes.
type Handle = NonNull<std::ffi::c_void>;

#[cfg(test)]
mod tests;
