//! Large tensors in shared memory instead of on a connection. Processes of the same machine map the
//! memory; others read it by UCX.
//!
//! A process has one region, which is divided into pages. The region starts with a number for each
//! page. A page's number belongs to the tensor that begins on the page, and is never used again; 0:
//! none. A frame names page and number. The reader first copies the bytes and then looks at the
//! number. If the tensor was taken away meanwhile, the frame counts as lost on its way, and links
//! cope with lost frames.

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::time::Duration;

use bytes::Bytes;
use downbeat_engine::region::{OwnRegion, PeerRegion};
use downbeat_roles::NodeId;
use parking_lot::Mutex;
use rustix::fd::BorrowedFd;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use tokio::net::{UnixListener, UnixStream};

/// The most bytes of a tensor that stays in its frame. In memory such a tensor would take a whole
/// page, and copying it with the frame's head is cheap.
pub const IN_FRAME: usize = 4 << 10;
/// The unit of tensors' places, in bytes.
const PAGE: usize = 4 << 10;
/// The most bytes of a region.
pub const MOST: usize = 256 << 20;
/// The most free pieces that are looked at for a tensor. If none is large enough, the tensor goes
/// by the connection.
const LOOKS_AT: usize = 64;
/// The longest time to get a peer's region.
const FETCHES_WITHIN: Duration = Duration::from_millis(500);

/// The place of a tensor: its first page, and its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The first page, counted from the region's start.
    pub page: u32,
    /// The tensor's number, never 0.
    pub number: u64,
}

/// This process's region, and the use of its pages.
pub struct Arena {
    region: OwnRegion,
    /// Free pages: the first page of each piece, and its length.
    free: Mutex<BTreeMap<usize, usize>>,
    next: AtomicU64,
    readers: AtomicUsize,
}

/// The pages of a tensor, freed with its last user.
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
    /// A region of at most `most` bytes. Memory is taken only for used pages.
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

    /// The first byte of a tensor in a region.
    pub fn begin(place: Place) -> Option<usize> {
        usize::try_from(place.page).ok()?.checked_mul(PAGE)
    }

    /// Copies bytes into the region if they are large, a peer reads the region, and there is room.
    /// Otherwise returns them unchanged.
    pub fn keep(self: &Arc<Self>, bytes: Bytes) -> Bytes {
        if bytes.len() <= IN_FRAME || self.readers.load(Ordering::Relaxed) == 0 {
            return bytes;
        }
        let pages = bytes.len().div_ceil(PAGE);
        let Some(page) = self.take(pages) else { return bytes };
        if let Some(number) = self.region.number(page) {
            number.store(self.next.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        }
        // A reader that sees any of these bytes also sees that earlier tensors' numbers are gone.
        fence(Ordering::Release);
        // SAFETY: the pages were free, so no reference to their bytes exists, and they are not the
        // pages of the numbers.
        let bytes = unsafe { self.region.put(page * PAGE, &bytes) };
        Bytes::from_owner(Kept { arena: self.clone(), page, pages, bytes })
    }

    /// The place of bytes in the region, if they are there.
    pub fn place_of(&self, bytes: &Bytes) -> Option<Place> {
        let begin = self.region.begin_of(bytes).filter(|begin| begin % PAGE == 0)?;
        let number = self.region.number(begin / PAGE)?.load(Ordering::Relaxed);
        (number > 0).then_some(Place { page: u32::try_from(begin / PAGE).ok()?, number })
    }

    /// Counts one more reader of the region, or one less.
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

    /// Gives the region to each process of this machine that asks as the same user.
    pub async fn hand_out(self: Arc<Self>, node: NodeId) {
        let listener = match UnixListener::bind(socket(node)) {
            Ok(listener) => listener,
            Err(error) => {
                tracing::info!(%error, "shared memory cannot be used: this process sends tensors over TCP");
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
            // A process that has gone no longer needs the region.
            let _ = give(&stream, self.region.file());
        }
    }
}

/// Methods for reads by UCX.
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

/// Sends a file descriptor.
fn give(stream: &UnixStream, file: BorrowedFd<'_>) -> io::Result<()> {
    let file = [file];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    assert!(beside.push(SendAncillaryMessage::ScmRights(&file)), "there is room for one");
    rustix::net::sendmsg(stream, &[IoSlice::new(&[0])], &mut beside, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The abstract name, in this network namespace and without a file, of the socket that hands out a
/// process's region.
fn socket(node: NodeId) -> String {
    format!("\0downbeat-{:016x}", node.0)
}

/// Whether the other end belongs to this user. Other users see no tensors.
fn is_mine(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|other| other.uid() == rustix::process::geteuid().as_raw())
}

/// The mapped region of a peer.
pub struct PeerArena(PeerRegion);

impl PeerArena {
    /// The region of a process, if the process is on this machine.
    ///
    /// # Errors
    /// If the process hands out something else than a region.
    pub async fn of(node: NodeId) -> io::Result<Option<PeerArena>> {
        let fetch = async {
            // The process is elsewhere, or has no region.
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

    /// A copy of a tensor. `None`: the place is outside of the region. `Some(None)`: the tensor is
    /// gone.
    pub fn read(&self, place: Place, len: usize) -> Option<Option<Bytes>> {
        let number = self.0.number(usize::try_from(place.page).ok()?)?;
        let copy = self.0.copy(Arena::begin(place)?, len)?;
        // Pairs with the fence of `keep`: if any of these bytes belongs to a later tensor, the
        // number has changed.
        fence(Ordering::Acquire);
        Some((number.load(Ordering::Relaxed) == place.number).then_some(copy))
    }
}

#[cfg(test)]
pub mod tests;
