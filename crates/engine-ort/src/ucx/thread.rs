//! The thread that UCX has: it carries out commands, and sleeps while there is no work.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use bytes::Bytes;
use downbeat_engine::region::Mapping;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::OwnedFd;

use super::library::{self, Library, MemoryParams, UcxError};
use super::worker::{Rest, Worker};
use super::{Done, Handle, Offer};

/// Longest sleep. Work without a wake-up is found after at most this time.
const SLEEPS: Duration = Duration::from_secs(1);
/// The sleep while the library refuses to sleep, but has had no work for [`IDLE_TURNS`]. It waits
/// for an event without a wake-up, such as a peer that takes no messages.
const NAPS: Duration = Duration::from_millis(1);
const IDLE_TURNS: usize = 256;

/// A command to the thread.
pub(super) enum Command {
    /// Make a worker for one peer.
    Open { number: u64, done: Done<Offer> },
    /// Make the way to the peer's region.
    Connect { number: u64, offer: Offer, done: Done<()> },
    /// Read bytes that are within the peer's region.
    Read { number: u64, begin: u64, len: usize, done: Done<Bytes> },
    /// End the worker of a peer that is not needed any more. Its work under way ends.
    Close { number: u64 },
    /// End the thread: no user of UCX is left.
    End,
}

/// UCX, on its thread.
pub(super) struct UcxThread {
    library: Arc<Library>,
    /// Registered with the library, and read by others through it.
    region: Arc<Mapping>,
    context: Handle,
    memory: Handle,
    /// The key with which peers read the region.
    key: Vec<u8>,
    peers: BTreeMap<u64, Worker>,
}

/// Checks the handle that a function made.
pub(super) fn made(what: &'static str, handle: *mut c_void) -> Result<Handle, UcxError> {
    Handle::new(handle).ok_or(UcxError::Failed { what, words: "it made nothing".to_owned() })
}

impl UcxThread {
    /// Registers the region.
    pub fn start(region: Arc<Mapping>) -> Result<UcxThread, UcxError> {
        let library = Arc::new(Library::load()?);
        let context = made("ucp_init_version", library.context()?)?;
        let mut memory = std::ptr::null_mut();
        let address = region.start().as_ptr().cast();
        let params =
            MemoryParams { field_mask: library::MEMORY_FIELDS, address, length: region.byte_size(), unused: [0; 2] };
        // SAFETY: the region stays mapped as long as this thread, which unmaps the memory from UCX
        // before.
        let mapped = unsafe { (library.ucp_mem_map)(context.as_ptr(), &params, &mut memory) };
        library.answer("ucp_mem_map", mapped)?;
        let memory = made("ucp_mem_map", memory)?;
        let (mut key, mut len) = (std::ptr::null_mut(), 0);
        // SAFETY: the call returns this many bytes, which are given back once they are copied.
        let key = unsafe {
            let packed = (library.ucp_rkey_pack)(context.as_ptr(), memory.as_ptr(), &mut key, &mut len);
            library.answer("ucp_rkey_pack", packed)?;
            let copy = std::slice::from_raw_parts(key.cast::<u8>(), len).to_vec();
            (library.ucp_rkey_buffer_release)(key);
            copy
        };
        let mut thread = UcxThread { library, region, context, memory, key, peers: BTreeMap::new() };
        // An unusable network shows here already, and not only with the first peer.
        thread.open(0)?;
        thread.close(0);
        Ok(thread)
    }

    /// The library's major and minor version.
    pub fn version(&self) -> (u32, u32) {
        self.library.version()
    }

    /// Carries out commands until no user is left.
    pub fn run(&mut self, commands: &Receiver<Command>, wake: &OwnedFd) {
        let mut idle = 0;
        loop {
            // Before the commands, so that the wake-up of a later command remains.
            let _ = rustix::io::read(wake, &mut [0; 8]);
            let mut is_busy = false;
            loop {
                match commands.try_recv() {
                    Ok(Command::End) | Err(TryRecvError::Disconnected) => return,
                    Ok(command) => self.carry_out(command),
                    Err(TryRecvError::Empty) => break,
                }
                is_busy = true;
            }
            for worker in self.peers.values_mut() {
                is_busy |= worker.turn();
            }
            if is_busy {
                idle = 0;
                continue;
            }
            let rests = self.peers.values().map(Worker::rest).max().unwrap_or(Rest::Sleeps);
            let limit = match rests {
                Rest::Wakes if idle < IDLE_TURNS => {
                    idle += 1;
                    continue;
                }
                Rest::Wakes => NAPS,
                Rest::Sleeps => SLEEPS,
            };
            let mut files = vec![PollFd::new(wake, PollFlags::IN)];
            files.extend(self.peers.values().map(|worker| PollFd::new(worker.events(), PollFlags::IN)));
            let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
            // A signal ends the sleep as well.
            let _ = rustix::event::poll(&mut files, Some(&limit));
        }
    }

    fn carry_out(&mut self, command: Command) {
        let ended = || UcxError::Ended;
        match command {
            Command::Open { number, done } => done(self.open(number)),
            Command::Connect { number, offer, done } => {
                let made = self.peers.get_mut(&number).ok_or_else(ended).and_then(|worker| worker.connect(&offer));
                done(made);
            }
            Command::Read { number, begin, len, done } => match self.peers.get_mut(&number) {
                Some(worker) => worker.read(begin, len, done),
                None => done(Err(UcxError::Ended)),
            },
            Command::Close { number } => self.close(number),
            Command::End => {}
        }
    }

    fn open(&mut self, number: u64) -> Result<Offer, UcxError> {
        let worker = Worker::new(self.library.clone(), self.context)?;
        let (version, address, key) = (self.version(), worker.address()?, self.key.clone());
        let (begin, len) = (self.region.start().as_ptr() as u64, self.region.byte_size() as u64);
        self.peers.insert(number, worker);
        Ok(Offer { version, address, key, begin, len, checksum: 0 }.sealed())
    }

    fn close(&mut self, number: u64) {
        if let Some(worker) = self.peers.remove(&number) {
            worker.end();
        }
    }
}

impl Drop for UcxThread {
    fn drop(&mut self) {
        let peers: Vec<u64> = self.peers.keys().copied().collect();
        peers.into_iter().for_each(|number| self.close(number));
        // SAFETY: nothing is under way, and nothing of it is used after this.
        unsafe {
            (self.library.ucp_mem_unmap)(self.context.as_ptr(), self.memory.as_ptr());
            (self.library.ucp_cleanup)(self.context.as_ptr());
        }
    }
}
