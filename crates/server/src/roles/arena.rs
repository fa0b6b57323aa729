//! Large tensors in memory that other processes read, instead of on a connection: those of the same machine, and by UCX those of others.
//!
//! A process has one region. It is divided into pages; at its start is a number for each: that of the tensor that begins there, never used again, or 0. A frame says page and number, and whoever reads
//! copies first and looks at the number after that: a tensor that was taken away meanwhile is no tensor, and the frame as good as lost on its way, which links cope with.

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::time::Duration;

use bytes::Bytes;
use downbeat_core::roles::NodeId;
use downbeat_engine::region::{OwnRegion, PeerRegion};
use parking_lot::Mutex;
use rustix::fd::BorrowedFd;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::net::{UnixListener, UnixStream};

/// Bytes of a tensor up to which it stays in its frame: on less than a page it would take a page, and is copied and written with the frame's head anyway.
pub const IN_FRAME: usize = 4 << 10;
/// Bytes that places of tensors are counted in.
const PAGE: usize = 4 << 10;
/// Most bytes of a region.
pub const MOST: usize = 256 << 20;
/// Free pieces that are looked at for a tensor; if none is large enough it goes by the connection.
const LOOKS_AT: usize = 64;
/// How long the way to a peer's region may take.
const FETCHES_WITHIN: Duration = Duration::from_millis(500);

/// Where a tensor is: its first page, and its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Counted from the region's start.
    pub page: u32,
    /// Never 0.
    pub number: u64,
}

/// This process's region, and who has what of it.
pub struct Arena {
    region: OwnRegion,
    /// Free pages: the first of each piece, and how many.
    free: Mutex<BTreeMap<usize, usize>>,
    next: AtomicU64,
    readers: AtomicUsize,
}

/// Pages of a tensor, until nobody has it any more.
struct Kept {
    arena: Arc<Arena>,
    page: usize,
    pages: usize,
    bytes: Bytes,
}

impl AsRef<[u8]> for Kept {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(number) = self.arena.region.number(self.page) {
            number.store(0, Ordering::Relaxed);
        }
        self.arena.give_back(self.page, self.pages);
    }
}

impl Arena {
    /// A region of at most `most` bytes, of which memory is taken for what is used.
    ///
    /// # Errors
    /// If the system has no such memory.
    pub fn new(most: u64) -> io::Result<Arena> {
        let pages = (usize::try_from(most).unwrap_or(MOST).min(MOST) / PAGE).max(2);
        let region = OwnRegion::create("downbeat-tensors", pages * PAGE)?;
        let first = (pages * size_of::<u64>()).div_ceil(PAGE);
        let free = Mutex::new(BTreeMap::from([(first, pages - first)]));
        let (next, readers) = (AtomicU64::new(1), AtomicUsize::new(0));
        Ok(Arena { region, free, next, readers })
    }

    /// Where a tensor begins in a region.
    pub fn begin(place: Place) -> Option<usize> {
        usize::try_from(place.page).ok()?.checked_mul(PAGE)
    }

    /// Has bytes where others read them, if they are many, somebody reads, and there is room: else they stay where they are.
    pub fn keep(self: &Arc<Self>, bytes: Bytes) -> Bytes {
        if bytes.len() <= IN_FRAME || self.readers.load(Ordering::Relaxed) == 0 {
            return bytes;
        }
        let pages = bytes.len().div_ceil(PAGE);
        let Some(page) = self.take(pages) else { return bytes };
        if let Some(number) = self.region.number(page) {
            number.store(self.next.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        }
        // Whoever sees any of these bytes sees that the numbers of those before them are gone.
        fence(Ordering::Release);
        // SAFETY: the pages were free, so that nobody has bytes there, and are not those of the numbers.
        let bytes = unsafe { self.region.put(page * PAGE, &bytes) };
        Bytes::from_owner(Kept { arena: self.clone(), page, pages, bytes })
    }

    /// Where others find these bytes, if they are kept.
    pub fn place_of(&self, bytes: &Bytes) -> Option<Place> {
        let begin = self.region.begin_of(bytes).filter(|begin| begin % PAGE == 0)?;
        let number = self.region.number(begin / PAGE)?.load(Ordering::Relaxed);
        (number > 0).then_some(Place { page: u32::try_from(begin / PAGE).ok()?, number })
    }

    /// One more reads it, or one less.
    pub fn is_read(&self, more: bool) {
        match more {
            true => self.readers.fetch_add(1, Ordering::Relaxed),
            false => self.readers.fetch_sub(1, Ordering::Relaxed),
        };
    }

    fn take(&self, pages: usize) -> Option<usize> {
        let mut free = self.free.lock();
        let found = free.iter().take(LOOKS_AT).find(|(_, has)| **has >= pages).map(|(first, has)| (*first, *has));
        let (first, has) = found?;
        free.remove(&first);
        if has > pages {
            free.insert(first + pages, has - pages);
        }
        Some(first)
    }

    fn give_back(&self, mut first: usize, mut pages: usize) {
        let mut free = self.free.lock();
        if let Some(after) = free.remove(&(first + pages)) {
            pages += after;
        }
        if let Some((before, has)) = free.range(..first).next_back().map(|(before, has)| (*before, *has))
            && before + has == first
        {
            (first, pages) = (before, pages + has);
        }
        free.insert(first, pages);
    }

    /// Gives the region to whoever asks on this machine as the same user.
    pub async fn hand_out(self: Arc<Self>, node: NodeId) {
        let listener = match UnixListener::bind(socket(node)) {
            Ok(listener) => listener,
            Err(error) => {
                tracing::info!(%error, "no shared memory: what this process sends goes over TCP");
                return;
            }
        };
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(FETCHES_WITHIN).await;
                continue;
            };
            if !is_mine(&stream) {
                continue;
            }
            // Whoever has gone needs it no more.
            let _ = give(&stream, self.region.file());
        }
    }
}

/// For reads by UCX.
#[cfg(feature = "ucx")]
impl Arena {
    /// This process's region.
    pub fn region(&self) -> &OwnRegion {
        &self.region
    }

    /// The place of a tensor's number in a region.
    pub fn begin_of_number(place: Place) -> Option<usize> {
        usize::try_from(place.page).ok()?.checked_mul(size_of::<u64>())
    }
}

/// Sends a file.
fn give(stream: &UnixStream, file: BorrowedFd<'_>) -> io::Result<()> {
    let file = [file];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    assert!(beside.push(SendAncillaryMessage::ScmRights(&file)), "there is room for one");
    rustix::net::sendmsg(stream, &[IoSlice::new(&[0])], &mut beside, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The name, of this network namespace and without a file, that a process's region is asked for at.
fn socket(node: NodeId) -> String {
    format!("\0downbeat-{:016x}", node.0)
}

/// Whether the other end is of this user: nobody else sees tensors.
fn is_mine(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|other| other.uid() == rustix::process::geteuid().as_raw())
}

/// The region of a peer.
pub struct PeerArena(PeerRegion);

impl PeerArena {
    /// That of a process, if it is on this machine.
    ///
    /// # Errors
    /// If what it hands out is no region.
    pub async fn of(node: NodeId) -> io::Result<Option<PeerArena>> {
        let fetch = async {
            // It is elsewhere, or has none.
            let Ok(stream) = UnixStream::connect(socket(node)).await else { return Ok(None) };
            if !is_mine(&stream) {
                return Ok(None);
            }
            let receive = || {
                let (mut byte, mut files) = ([0], Vec::new());
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut beside = RecvAncillaryBuffer::new(&mut space);
                let slice = &mut [IoSliceMut::new(&mut byte)];
                rustix::net::recvmsg(&stream, slice, &mut beside, RecvFlags::CMSG_CLOEXEC)?;
                for message in beside.drain() {
                    if let RecvAncillaryMessage::ScmRights(more) = message {
                        files.extend(more);
                    }
                }
                Ok(files.pop())
            };
            let file = stream.async_io(tokio::io::Interest::READABLE, receive).await.ok().flatten();
            file.map(|file| PeerRegion::open(file, MOST).map(PeerArena)).transpose()
        };
        tokio::time::timeout(FETCHES_WITHIN, fetch).await.unwrap_or(Ok(None))
    }

    /// A copy of a tensor: `None` if it is outside of the region, `Some(None)` if it is not there any more.
    pub fn read(&self, place: Place, len: usize) -> Option<Option<Bytes>> {
        let number = self.0.number(usize::try_from(place.page).ok()?)?;
        let copy = self.0.copy(Arena::begin(place)?, len)?;
        // With the fence of `keep`: if any of these bytes is of a later tensor, the number is not this one's any more.
        fence(Ordering::Acquire);
        Some((number.load(Ordering::Relaxed) == place.number).then_some(copy))
    }
}

#[cfg(test)]
pub mod tests;
