//! Memory that two processes share: tensors on their way between them.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use bytes::Bytes;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// The kernel's number for the file system of anonymous memory (`TMPFS_MAGIC`).
const TMPFS: i64 = 0x0102_1994;
/// Bytes of a new region of a lane.
const LEAST: usize = 1 << 16;

/// Memory of two processes: one writes, the other reads after a message tells it to. The region
/// grows and never shrinks. A seal ensures this, so that no process can pull memory away from a
/// reader.
pub(crate) struct Region {
    file: OwnedFd,
    mapping: Arc<Mapping>,
}

/// A region's mapping at some address. The mapping stays as long as it has a reader, even once the
/// region has grown and has a mapping elsewhere.
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: any thread may read and write the bytes; the messages of the two processes say which side
// accesses them when.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &OwnedFd, len: usize, access: ProtFlags) -> io::Result<Arc<Mapping>> {
        // SAFETY: a fresh mapping at an address of the system's choice overlaps nothing.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Arc::new(Mapping { start, len }))
    }

    /// The address of the first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The number of bytes.
    pub fn byte_size(&self) -> usize {
        self.len
    }

    /// Whether the `len` bytes from `begin` on are within the mapping.
    fn has(&self, begin: usize, len: usize) -> bool {
        begin.checked_add(len).is_some_and(|end| end <= self.len)
    }

    /// The number at this place among the numbers at the mapping's start; `None` if the place is
    /// outside the mapping.
    fn number(&self, place: usize) -> Option<&AtomicU64> {
        let begin = place.checked_mul(size_of::<AtomicU64>())?;
        // SAFETY: the number is within the mapping, which begins on a page, and so aligned. Both
        // processes read and write it only as an atomic.
        self.has(begin, size_of::<AtomicU64>()).then(|| unsafe { &*self.start.as_ptr().add(begin).cast::<AtomicU64>() })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping has this start and length, and no reader is left. The system cannot
        // refuse the call.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Part of the bytes of a mapping.
struct Part {
    mapping: Arc<Mapping>,
    begin: usize,
    len: usize,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `Region::part` checked that the bytes are within the mapping. The other process
        // does not write there before a message tells it that this process has read them.
        unsafe { std::slice::from_raw_parts(self.mapping.start.as_ptr().add(self.begin), self.len) }
    }
}

/// A byte of a region that tells the other process that something has happened.
pub(crate) struct Flag {
    mapping: Arc<Mapping>,
    place: usize,
}

impl Flag {
    /// Makes the byte 1.
    pub fn set(&self) {
        // SAFETY: `Region::flag` checked that the byte is within the mapping. Both processes use the
        // byte only as an atomic while the flag lives.
        let byte = unsafe { AtomicU8::from_ptr(self.mapping.start.as_ptr().add(self.place)) };
        byte.store(1, Ordering::Release);
    }
}

/// Access for reading and writing.
const BOTH: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

impl Region {
    /// A new region, for a lane.
    ///
    /// # Errors
    /// If there is no memory left.
    pub fn create() -> io::Result<Region> {
        Region::of_length("downbeat-lane", LEAST)
    }

    fn of_length(name: &str, len: usize) -> io::Result<Region> {
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK)?;
        rustix::fs::ftruncate(&file, len as u64)?;
        Ok(Region { mapping: Mapping::new(&file, len, BOTH)?, file })
    }

    /// Opens the region that another process has made.
    ///
    /// # Errors
    /// If the file is no such region.
    pub fn open(file: OwnedFd) -> io::Result<Region> {
        if !rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let len = usize::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
        Ok(Region { mapping: Mapping::new(&file, len, BOTH)?, file })
    }

    /// The file, to be sent to the other process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The region's length in bytes, as far as this process has seen it.
    pub fn len(&self) -> usize {
        self.mapping.len
    }

    /// Makes the region at least `len` bytes long.
    ///
    /// # Errors
    /// If there is no memory left.
    pub fn grow_to(&mut self, len: usize) -> io::Result<()> {
        if len > self.mapping.len {
            let len = len.checked_next_power_of_two().ok_or(io::ErrorKind::OutOfMemory)?;
            rustix::fs::ftruncate(&self.file, len as u64)?;
            self.mapping = Mapping::new(&self.file, len, BOTH)?;
        }
        Ok(())
    }

    /// Maps the region up to the length that the other process says it has.
    ///
    /// # Errors
    /// If the region is shorter.
    pub fn follow(&mut self, len: usize) -> io::Result<()> {
        if len > self.mapping.len {
            if u64::try_from(rustix::fs::fstat(&self.file)?.st_size).is_ok_and(|size| size < len as u64) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            self.mapping = Mapping::new(&self.file, len, BOTH)?;
        }
        Ok(())
    }

    /// Writes bytes into the region, from `begin` on.
    ///
    /// # Panics
    /// If the bytes reach outside the region.
    pub fn write(&mut self, begin: usize, bytes: &[u8]) {
        assert!(self.mapping.has(begin, bytes.len()), "within the region");
        // SAFETY: they are within the mapping. `bytes` lie elsewhere, as no reference to the
        // written part exists.
        unsafe { self.mapping.start.as_ptr().add(begin).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// The byte at this place as a flag for the other process; `None`: it is outside the region.
    pub fn flag(&self, place: usize) -> Option<Flag> {
        self.mapping.has(place, 1).then(|| Flag { mapping: self.mapping.clone(), place })
    }

    /// Part of the region's bytes, without a copy; `None` if they are not within the region. The
    /// other process must not write there while the part lives.
    pub fn part(&self, begin: usize, len: usize) -> Option<Bytes> {
        self.mapping.has(begin, len).then(|| Bytes::from_owner(Part { mapping: self.mapping.clone(), begin, len }))
    }
}

/// A region of a fixed length that this process alone writes. Other processes read it
/// ([`PeerRegion`]); the system lets them do no more.
pub struct OwnRegion(Region);

impl OwnRegion {
    /// A new region. The system allocates memory only for written bytes.
    ///
    /// # Errors
    /// If the system has no such memory (Linux before 5.1).
    pub fn create(name: &str, len: usize) -> io::Result<OwnRegion> {
        let region = Region::of_length(name, len)?;
        // This process's own mapping remains writable.
        rustix::fs::fcntl_add_seals(&region.file, SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
        Ok(OwnRegion(region))
    }

    /// The whole region, for UCX, through which peers read it.
    pub fn mapping(&self) -> Arc<Mapping> {
        self.0.mapping.clone()
    }

    /// The file, to be sent to readers.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.file()
    }

    /// The number at this place among the numbers at the region's start; `None` if the place is
    /// outside the region.
    pub fn number(&self, place: usize) -> Option<&AtomicU64> {
        self.0.mapping.number(place)
    }

    /// Writes bytes into the region, from `begin` on, and returns them in place.
    ///
    /// # Safety
    /// While the returned bytes live, no earlier call's bytes of the same place may live. No thread
    /// may read or write numbers there.
    ///
    /// # Panics
    /// If the bytes reach outside the region.
    pub unsafe fn put(&self, begin: usize, bytes: &[u8]) -> Bytes {
        assert!(self.0.mapping.has(begin, bytes.len()), "within the region");
        // SAFETY: they are within the mapping. The caller ensures that no reference to the written
        // part exists.
        unsafe { self.0.mapping.start.as_ptr().add(begin).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Bytes::from_owner(Part { mapping: self.0.mapping.clone(), begin, len: bytes.len() })
    }

    /// The place of `bytes` in the region; `None`: they are outside it.
    pub fn begin_of(&self, bytes: &[u8]) -> Option<usize> {
        let begin = (bytes.as_ptr() as usize).checked_sub(self.0.mapping.start.as_ptr() as usize)?;
        (begin < self.0.len()).then_some(begin)
    }
}

/// The [`OwnRegion`] of another process, for reading. Its bytes may change at any time, so that
/// every reader copies them first.
pub struct PeerRegion(Arc<Mapping>);

impl PeerRegion {
    /// Maps a region that another process offers. That process is not trusted.
    ///
    /// # Errors
    /// If its length may change, its memory is of another kind, or it has more than `most` bytes.
    /// Such memory could be pulled away during a read.
    pub fn open(file: OwnedFd, most: usize) -> io::Result<PeerRegion> {
        let refused = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why.to_owned());
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(|_| refused("it is no memory"))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(refused("its length may change"));
        }
        // The system may have no huge pages left at the time of the read.
        #[allow(clippy::unnecessary_cast, reason = "its type differs between architectures")]
        if rustix::fs::fstatfs(&file)?.f_type as i64 != TMPFS {
            return Err(refused("the memory is of another kind"));
        }
        let len = usize::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(usize::MAX);
        if len == 0 || len > most {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("it has {len} bytes, and 1 to {most} are taken"),
            ));
        }
        Ok(PeerRegion(Mapping::new(&file, len, ProtFlags::READ)?))
    }

    /// The number at this place among the numbers at the region's start; `None` if the place is
    /// outside the region.
    pub fn number(&self, place: usize) -> Option<&AtomicU64> {
        self.0.number(place)
    }

    /// A copy of part of the bytes; `None` if they are not within the region.
    pub fn copy(&self, begin: usize, len: usize) -> Option<Bytes> {
        if !self.0.has(begin, len) {
            return None;
        }
        let mut copy: Vec<u8> = Vec::with_capacity(len);
        // SAFETY: the bytes are within the mapping, which its seals keep readable, and the copy has
        // room for all. They are read by address, without a reference. If the other process writes
        // meanwhile, the copy has arbitrary bytes.
        unsafe {
            copy.as_mut_ptr().copy_from_nonoverlapping(self.0.start.as_ptr().add(begin), len);
            copy.set_len(len);
        }
        Some(copy.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_sees_a_grown_region_and_nothing_beyond() {
        let mut one = Region::create().unwrap();
        let mut other = Region::open(one.file().try_clone_to_owned().unwrap()).unwrap();
        one.write(64, b"tensor");
        let first = other.part(64, 6).unwrap();
        assert_eq!(&first[..], b"tensor");
        assert!(other.part(LEAST - 1, 2).is_none() && other.part(usize::MAX, 2).is_none());
        one.grow_to(3 * LEAST).unwrap();
        one.write(3 * LEAST - 4, b"more");
        other.follow(one.len()).unwrap();
        assert_eq!(&other.part(3 * LEAST - 4, 4).unwrap()[..], b"more");
        assert_eq!(&first[..], b"tensor", "what was read before stays where it was");
        assert!(other.follow(64 * LEAST).is_err(), "it is not so long");
        assert!(rustix::fs::ftruncate(one.file(), 0).is_err(), "nobody makes it shorter");
    }

    #[test]
    fn a_region_of_one_writer_is_read_by_others_and_written_by_nobody_else() {
        let own = OwnRegion::create("test", 1 << 16).unwrap();
        let shared = own.file().try_clone_to_owned().unwrap();
        let peer = PeerRegion::open(shared, 1 << 16).unwrap();
        // SAFETY: it is the only call.
        let kept = unsafe { own.put(4096, b"tensor") };
        assert_eq!(
            (&peer.copy(4096, 6).unwrap()[..], own.begin_of(&kept), own.begin_of(b"x")),
            (&b"tensor"[..], Some(4096), None)
        );
        assert!(peer.copy((1 << 16) - 1, 2).is_none() && peer.copy(usize::MAX, 2).is_none());
        own.number(3).unwrap().store(7, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(peer.number(3).unwrap().load(std::sync::atomic::Ordering::Relaxed), 7);
        assert!(peer.number(1 << 13).is_none() && peer.number(usize::MAX).is_none());
        assert!(
            Mapping::new(&own.file().try_clone_to_owned().unwrap(), 4096, BOTH).is_err(),
            "nobody else maps it to write"
        );
        assert!(rustix::io::pwrite(own.file(), b"x", 0).is_err(), "or writes");
        assert!(rustix::fs::ftruncate(own.file(), 1 << 17).is_err() && rustix::fs::ftruncate(own.file(), 0).is_err());
        drop(own);
        assert_eq!(&peer.copy(4096, 6).unwrap()[..], b"tensor", "it stays where its process has gone");
    }

    #[test]
    fn what_is_no_region_that_keeps_its_length_is_refused() {
        let refused = |file: OwnedFd| PeerRegion::open(file, 1 << 16).err().unwrap().to_string();
        let memory = |flags, len| {
            let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | flags).unwrap();
            rustix::fs::ftruncate(&file, len).unwrap();
            file
        };
        assert_eq!(refused(tempfile::tempfile().unwrap().into()), "it is no memory");
        assert_eq!(refused(memory(MemfdFlags::ALLOW_SEALING, 4096)), "its length may change");
        assert_eq!(refused(memory(MemfdFlags::empty(), 4096)), "its length may change");
        let shrinks = memory(MemfdFlags::ALLOW_SEALING, 4096);
        rustix::fs::fcntl_add_seals(&shrinks, SealFlags::GROW).unwrap();
        assert_eq!(refused(shrinks), "its length may change");
        for len in [0, 1 << 17] {
            let sealed = memory(MemfdFlags::ALLOW_SEALING, len);
            rustix::fs::fcntl_add_seals(&sealed, SealFlags::GROW | SealFlags::SHRINK).unwrap();
            assert_eq!(refused(sealed), format!("it has {len} bytes, and 1 to 65536 are taken"));
        }
    }
}
