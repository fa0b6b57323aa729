//! The memory of an input ring: slots of one size. Any run of neighbouring slots is one piece of
//! memory.
//!
//! The pages are mapped twice, one mapping behind the other (E²bird §5). A run that goes on at slot
//! 0 after the last slot is therefore contiguous:
//!
//! ```text
//! memory     | 0 | 1 | 2 | 3 |
//! addresses  | 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3 |      the run 3, 0, 1 is contiguous
//!                          ^-----------^
//! ```
//!
//! For an engine on a GPU the slots have copies there, and launches read the copies
//! ([`RingMemory::with_copies`]).

use std::any::Any;
use std::ffi::c_void;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use downbeat_core::device::RingRun;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::tensor::buffer::{Buffer, DeviceBytes, DeviceError};

/// Largest ring, bytes: its pages stay in memory once they were used.
pub const LARGEST_RING: usize = 1 << 30;

/// Most slots of a ring: each has a counter, however small it is.
pub const MOST_SLOTS: u64 = 1 << 20;

/// The slot is free.
const FREE: u32 = 0;
/// The slot is being written. Numbers between [`FREE`] and this one count the slot's readers.
const WRITTEN: u32 = u32::MAX;

/// The reason why there is no ring memory, in words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RingMemoryError(String);

impl From<DeviceError> for RingMemoryError {
    fn from(error: DeviceError) -> Self {
        RingMemoryError(error.to_string())
    }
}

/// Copies of a ring's slots in the memory of a device, which launches read.
pub trait RingCopies: Send + Sync {
    /// Enqueues the copies of a run of slots, and does not wait for them. `host` has the bytes of
    /// the slots up to the last, and of the slots from the first on.
    ///
    /// # Errors
    /// If the device is lost.
    ///
    /// # Safety
    /// The slots must be those of the ring that these copies were made for. No thread may write a
    /// slot before every launch that reads it is over, or new copies of the slot are enqueued.
    unsafe fn upload(&self, run: RingRun, host: [&[u8]; 2]) -> Result<(), DeviceError>;

    /// A run of slots as one piece; `None` if the run is longer than the device allows. The bytes
    /// keep `owner`, which protects the slots from being written.
    fn read(&self, run: RingRun, owner: Arc<dyn Any + Send + Sync>) -> Option<Box<dyn DeviceBytes>>;
}

/// The smallest number of slots, at least `least`, with which rings of all these slot sizes fill
/// whole pages.
///
/// # Errors
/// If one of the rings would be larger than [`LARGEST_RING`], or the number of slots or a slot size
/// is zero.
pub fn slots(least: u32, slot_bytes: &[usize]) -> Result<u32, RingMemoryError> {
    if least == 0 || slot_bytes.contains(&0) {
        return Err(RingMemoryError("an input ring needs at least one slot of at least one byte".into()));
    }
    let page = rustix::param::page_size();
    // Each unit is a part of a page, and so a power of two. The largest unit serves all slot sizes.
    let unit = slot_bytes.iter().map(|bytes| page >> bytes.trailing_zeros().min(page.trailing_zeros())).max();
    let slots = u64::from(least).next_multiple_of(unit.unwrap_or(1) as u64);
    for slot_bytes in slot_bytes {
        if (*slot_bytes as u64).checked_mul(slots).is_none_or(|bytes| bytes > LARGEST_RING as u64) {
            return Err(RingMemoryError(format!(
                "an input ring of {slots} slots of {slot_bytes} bytes is larger than {} MiB. Its slots fill whole pages together: ask for fewer, \
                 or use a policy without a ring (windowed)",
                LARGEST_RING >> 20
            )));
        }
    }
    match u32::try_from(slots) {
        Ok(few) if slots <= MOST_SLOTS => Ok(few),
        _ => Err(RingMemoryError(format!("an input ring of {slots} slots has more than {MOST_SLOTS}; ask for fewer"))),
    }
}

/// The memory of the input ring of one tensor.
///
/// A slot has one writer, any number of readers, or neither. A claim that conflicts with another
/// one is refused. So users that disagree about the owner of a slot lose speed, but no data.
pub struct RingMemory {
    /// Start of the first of the two mappings.
    start: NonNull<u8>,
    slot_bytes: usize,
    /// [`FREE`], [`WRITTEN`] or the number of readers, for each slot.
    users: Box<[AtomicU32]>,
    /// Copies of the slots on a device.
    copies: Option<Box<dyn RingCopies>>,
}

// SAFETY: bytes may be used from any thread; claims in `users` decide which thread uses which slot.
unsafe impl Send for RingMemory {}
// SAFETY: all access to the bytes is through claims of `users`, which are atomic.
unsafe impl Sync for RingMemory {}

impl RingMemory {
    /// Zeroed memory for `slots` slots of `slot_bytes` bytes, where [`slots`] gave the number of
    /// slots.
    ///
    /// # Errors
    /// If the slots do not fill whole pages, or the operating system has no memory or no address
    /// space left.
    pub fn new(slots: u32, slot_bytes: usize) -> Result<Arc<Self>, RingMemoryError> {
        RingMemory::map(slots, slot_bytes).map(Arc::new)
    }

    /// The same, with slots that are copied to a device when they are written. `make` makes the
    /// copies of the slots, which begin at the given address. The slots stay mapped there until the
    /// copies are dropped.
    ///
    /// # Errors
    /// As [`RingMemory::new`], or as `make`.
    pub fn with_copies(
        slots: u32,
        slot_bytes: usize,
        make: impl FnOnce(NonNull<u8>) -> Result<Box<dyn RingCopies>, DeviceError>,
    ) -> Result<Arc<Self>, RingMemoryError> {
        let mut ring = RingMemory::map(slots, slot_bytes)?;
        ring.copies = Some(make(ring.start)?);
        Ok(Arc::new(ring))
    }

    fn map(slots: u32, slot_bytes: usize) -> Result<Self, RingMemoryError> {
        let bytes = slots as usize * slot_bytes;
        let refused = |why: &str| RingMemoryError(format!("no memory for an input ring of {bytes} bytes: {why}"));
        if self::slots(slots, &[slot_bytes])? != slots {
            return Err(refused("the slots do not fill whole pages"));
        }
        let system = |error: rustix::io::Errno| refused(&io::Error::from(error).to_string());
        let file = rustix::fs::memfd_create("downbeat-ring", rustix::fs::MemfdFlags::CLOEXEC).map_err(system)?;
        rustix::fs::ftruncate(&file, bytes as u64).map_err(system)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh reservation at an address of the system's choice overlaps nothing.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), 2 * bytes, ProtFlags::empty(), MapFlags::PRIVATE) };
        let start = start.map_err(system)?;
        // From here on `Drop` gives back the reservation on every way out.
        let users = (0..slots).map(|_| AtomicU32::new(FREE)).collect();
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            return Err(system(rustix::io::Errno::NOMEM));
        };
        let ring = RingMemory { start, slot_bytes, users, copies: None };
        for half in 0..2 {
            // SAFETY: both halves lie in the reservation, which is this ring's alone and which they
            // replace; `bytes` are whole pages. The file belongs to this ring alone and is never
            // made shorter.
            let mapped = unsafe {
                mmap(
                    start.as_ptr().add(half * bytes).cast::<c_void>(),
                    bytes,
                    access,
                    MapFlags::SHARED | MapFlags::FIXED,
                    &file,
                    0,
                )
            };
            mapped.map_err(system)?;
        }
        Ok(ring)
    }

    /// The number of slots.
    pub fn slots(&self) -> u32 {
        self.users.len() as u32
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Whether slots are copied to a device as they are written.
    pub fn is_on_device(&self) -> bool {
        self.copies.is_some()
    }

    fn bytes(&self) -> usize {
        self.users.len() * self.slot_bytes
    }

    /// The slots of a run; `None` if it is no run of this ring.
    fn users(&self, run: RingRun) -> Option<impl Iterator<Item = &AtomicU32> + Clone> {
        let fits = run.first < self.slots() && (1..=self.slots()).contains(&run.count);
        let slots = self.users.iter().cycle().skip(run.first as usize).take(run.count as usize);
        fits.then_some(slots)
    }

    /// Changes the users of all slots of a run, or of no slot.
    fn claim(&self, run: RingRun, claim: impl Fn(u32) -> Option<u32>, undo: impl Fn(&AtomicU32)) -> bool {
        let Some(users) = self.users(run) else { return false };
        for (done, slot) in users.clone().enumerate() {
            // Acquire: the earlier users' accesses to the slot happened before those of this user.
            if slot.fetch_update(Ordering::Acquire, Ordering::Relaxed, &claim).is_err() {
                users.take(done).for_each(undo);
                return false;
            }
        }
        true
    }

    /// Claims the slots of a run for writing; `None`: they are no run of this ring, or one is in
    /// use.
    pub fn write(self: &Arc<Self>, run: RingRun) -> Option<RingWriter> {
        let free = |users| (users == FREE).then_some(WRITTEN);
        self.claim(run, free, |slot| slot.store(FREE, Ordering::Release))
            .then(|| RingWriter { ring: self.clone(), run })
    }

    /// The slots of a run as one piece of memory, without a copy. `None`: they are no run of this
    /// ring, or one is being written. A run longer than a device's copy of the ring allows also
    /// gives `None`. The slots can be written again once the buffer and all slices of it are
    /// dropped.
    pub fn read(self: &Arc<Self>, run: RingRun) -> Option<Buffer> {
        let more = |users: u32| (users < WRITTEN - 1).then(|| users + 1);
        let read = self.claim(run, more, |slot| {
            slot.fetch_sub(1, Ordering::Release);
        });
        let reader = read.then(|| RingReader { ring: self.clone(), run })?;
        match &self.copies {
            Some(copies) => copies.read(run, Arc::new(reader)).map(Buffer::from_device_bytes),
            None => Some(Buffer::from_bytes(Bytes::from_owner(reader))),
        }
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        // The copies go before the memory that they are copied from.
        self.copies = None;
        // SAFETY: both halves are this ring's alone, and writers and readers keep it alive. A
        // failure would leave them mapped.
        let _ = unsafe { munmap(self.start.as_ptr().cast::<c_void>(), 2 * self.bytes()) };
    }
}

impl std::fmt::Debug for RingMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RingMemory({} slots of {} bytes)", self.slots(), self.slot_bytes)
    }
}

/// The bytes of a run, as start and length. The end is less than two rings from the start of the
/// ring: a run begins in the first ring and is at most one ring long.
fn place(ring: &RingMemory, run: RingRun) -> (*mut u8, usize) {
    // SAFETY: `first` is below the number of slots: checked when the run was claimed.
    let start = unsafe { ring.start.as_ptr().add(run.first as usize * ring.slot_bytes) };
    (start, run.count as usize * ring.slot_bytes)
}

/// Slots that one owner has for writing. If it is dropped before [`RingWriter::finish`], the slots
/// hold nothing to read.
#[derive(Debug)]
pub struct RingWriter {
    ring: Arc<RingMemory>,
    run: RingRun,
}

impl RingWriter {
    /// Ends the writing of the slots, so that they may be read. On a device this call begins the
    /// copy and does not wait. The device's slots may be read once the copy is over.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn finish(self) -> Result<(), DeviceError> {
        let Some(copies) = &self.ring.copies else { return Ok(()) };
        // The second mapping is not pinned: the bytes there are copied from the first mapping.
        let start = self.run.first as usize * self.ring.slot_bytes;
        let all = self.len();
        let end = (start + all).min(self.ring.bytes());
        let wrapped = start + all - end;
        let first = self.ring.start.as_ptr();
        // SAFETY: inside the first mapping; the slots are this writer's, and initialised: the
        // system gives zeros.
        let host = unsafe {
            [std::slice::from_raw_parts(first.add(start), end - start), std::slice::from_raw_parts(first, wrapped)]
        };
        // SAFETY: the copies are of this ring. The next writer of a slot comes after the launches
        // that read it, or after none. In that case no launch reads the bytes of this copy.
        unsafe { copies.upload(self.run, host) }
    }
}

impl Deref for RingWriter {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let (start, len) = place(&self.ring, self.run);
        // SAFETY: the memory is mapped as long as the ring lives, and initialised: the system gives
        // zeros. This writer has claimed the slots, so that no other code reads or writes them
        // through either mapping. A run is at most as long as the ring, so that it does not overlap
        // itself.
        unsafe { std::slice::from_raw_parts(start, len) }
    }
}

impl DerefMut for RingWriter {
    fn deref_mut(&mut self) -> &mut [u8] {
        let (start, len) = place(&self.ring, self.run);
        // SAFETY: as for `deref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }
}

impl Drop for RingWriter {
    fn drop(&mut self) {
        // Release: the next user that claims the slots sees the written bytes.
        self.ring.users(self.run).into_iter().flatten().for_each(|slot| slot.store(FREE, Ordering::Release));
    }
}

/// Slots that have readers and no writer.
#[derive(Debug)]
struct RingReader {
    ring: Arc<RingMemory>,
    run: RingRun,
}

impl AsRef<[u8]> for RingReader {
    fn as_ref(&self) -> &[u8] {
        let (start, len) = place(&self.ring, self.run);
        // SAFETY: as for `RingWriter::deref`. Other readers may read at the same time. No writer
        // can claim a ring slot that has readers.
        unsafe { std::slice::from_raw_parts(start, len) }
    }
}

impl Drop for RingReader {
    fn drop(&mut self) {
        self.ring.users(self.run).into_iter().flatten().for_each(|slot| {
            slot.fetch_sub(1, Ordering::Release);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u32, count: u32) -> RingRun {
        RingRun { first, count }
    }

    fn ring(least: u32, slot_bytes: usize) -> Arc<RingMemory> {
        RingMemory::new(slots(least, &[slot_bytes]).unwrap(), slot_bytes).unwrap()
    }

    #[test]
    fn slots_fill_whole_pages_for_all_tensors_at_once() {
        let page = rustix::param::page_size();
        assert_eq!(slots(1, &[page]).unwrap(), 1);
        assert_eq!(slots(3, &[page / 2]).unwrap(), 4);
        for (least, sizes) in [(5, vec![12, 256]), (1, vec![7]), (100, vec![3136, 8]), (64, vec![602_112])] {
            let slots = slots(least, &sizes).unwrap();
            assert!(
                slots >= least && sizes.iter().all(|bytes| (slots as usize * bytes).is_multiple_of(page)),
                "{sizes:?}"
            );
        }
        assert!(slots(0, &[8]).is_err_and(|error| error.to_string().contains("at least one slot")));
        assert!(slots(8, &[0]).is_err_and(|error| error.to_string().contains("at least one byte")));
        let error = slots(8, &[299 * 299 * 3 * 4]).unwrap_err().to_string();
        assert!(error.contains("1024 slots of 1072812 bytes is larger than 1024 MiB"), "{error}");
        assert!(slots(u32::MAX, &[usize::MAX]).is_err());
        assert!(RingMemory::new(3, 7).is_err(), "not whole pages");
    }

    #[test]
    fn a_run_across_the_wrap_is_one_piece() {
        let ring = ring(4, 1024);
        let slots = ring.slots();
        for slot in 0..slots {
            ring.write(run(slot, 1)).unwrap().fill(slot as u8);
        }
        let bytes = ring.read(run(slots - 1, 3)).unwrap();
        assert_eq!(bytes.len(), 3 * 1024);
        let firsts: Vec<u8> = bytes.as_slice().chunks(1024).map(|slot| slot[0]).collect();
        assert_eq!(firsts, [slots as u8 - 1, 0, 1]);
        assert!(bytes.as_slice().chunks(1024).all(|slot| slot.iter().all(|byte| *byte == slot[0])));
        drop(bytes);
        // Written through the second mapping, read through the first.
        ring.write(run(slots - 1, 2)).unwrap()[1024..].fill(77);
        assert_eq!(ring.read(run(0, 1)).unwrap().as_slice(), [77; 1024]);
        let all = ring.read(run(2, slots)).unwrap();
        assert_eq!(all.len(), slots as usize * 1024, "the whole ring, from any slot");
    }

    #[test]
    fn a_slot_has_one_writer_or_readers_and_never_both() {
        let ring = ring(4, 4096);
        let writer = ring.write(run(3, 2)).unwrap();
        assert!(ring.write(run(0, 1)).is_none() && ring.read(run(2, 2)).is_none(), "slots 3 and 0 are written");
        let first = ring.read(run(1, 2)).unwrap();
        drop(writer);
        let second = ring.read(run(2, 3)).unwrap();
        assert!(ring.write(run(2, 1)).is_none(), "read twice");
        drop(first);
        assert!(ring.write(run(2, 1)).is_none(), "read once");
        assert!(ring.write(run(1, 2)).is_none(), "one of them is read");
        assert!(ring.write(run(1, 1)).is_some(), "what could not be claimed in whole was not claimed in part");
        let slice = second.into_bytes().slice(1..2);
        assert!(ring.write(run(2, 1)).is_none(), "a part of the buffer is alive");
        drop(slice);
        assert!(ring.write(run(0, 4)).is_some());
        for wrong in [run(4, 1), run(0, 0), run(0, 5), run(u32::MAX, u32::MAX)] {
            assert!(ring.write(wrong).is_none() && ring.read(wrong).is_none(), "{wrong:?}");
        }
    }

    #[test]
    fn the_memory_outlives_the_ring_while_it_is_read() {
        let ring = ring(1, 4096);
        ring.write(run(0, 1)).unwrap().fill(9);
        let bytes = ring.read(run(0, 1)).unwrap();
        drop(ring);
        assert_eq!(bytes.as_slice(), [9; 4096]);
    }

    #[test]
    fn writers_on_many_threads_keep_to_their_slots() {
        let ring = ring(64, 64);
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                let ring = &ring;
                scope.spawn(move || {
                    for round in 0..500u32 {
                        let slot = (round * 4 + thread) % ring.slots();
                        // The slower thread finds the slot in use. A reader never sees half of one
                        // value and half of another.
                        if let Some(mut writer) = ring.write(run(slot, 1)) {
                            writer.fill(round as u8);
                        }
                        if let Some(read) = ring.read(run((slot + 1) % ring.slots(), 1)) {
                            assert!(read.as_slice().iter().all(|byte| *byte == read.as_slice()[0]));
                        }
                    }
                });
            }
        });
    }
}
