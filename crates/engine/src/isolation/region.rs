//! Memory that two processes see: tensors of a lane on their way between them.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Bytes of a region that is new.
const LEAST: usize = 1 << 16;

/// Memory of two processes: one writes, the other reads once it is told to. It grows and never shrinks, which is sealed, so that no process can
/// pull away what the other reads.
pub(super) struct Region {
    file: OwnedFd,
    mapping: Arc<Mapping>,
}

/// A region as it is seen at some address. It stays as long as somebody reads there, also once the region has grown and is seen elsewhere.
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the bytes may be read and written from any thread; who does when is settled by the messages of the two processes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &OwnedFd, len: usize) -> io::Result<Arc<Mapping>> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the system's choice overlaps nothing.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Arc::new(Mapping { start, len }))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it is mapped so, and nobody reads there any more. The system cannot refuse that.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Some of the bytes of a mapping.
struct Part {
    mapping: Arc<Mapping>,
    begin: usize,
    len: usize,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `Region::part` checked that they are within the mapping; the other process does not write there before it is told that this one has read.
        unsafe { std::slice::from_raw_parts(self.mapping.start.as_ptr().add(self.begin), self.len) }
    }
}

impl Region {
    /// A new region.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn create() -> io::Result<Region> {
        let file = rustix::fs::memfd_create("downbeat-lane", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK)?;
        rustix::fs::ftruncate(&file, LEAST as u64)?;
        Ok(Region { mapping: Mapping::new(&file, LEAST)?, file })
    }

    /// The region that another process has made.
    ///
    /// # Errors
    /// If it is none.
    pub fn open(file: OwnedFd) -> io::Result<Region> {
        if !rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let len = usize::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
        Ok(Region { mapping: Mapping::new(&file, len)?, file })
    }

    /// For the other process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// How many bytes there are, as far as this process has seen.
    pub fn len(&self) -> usize {
        self.mapping.len
    }

    /// Makes it at least so long.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn grow_to(&mut self, len: usize) -> io::Result<()> {
        if len > self.mapping.len {
            let len = len.checked_next_power_of_two().ok_or(io::ErrorKind::OutOfMemory)?;
            rustix::fs::ftruncate(&self.file, len as u64)?;
            self.mapping = Mapping::new(&self.file, len)?;
        }
        Ok(())
    }

    /// Sees it as long as the other process says that it has made it.
    ///
    /// # Errors
    /// If it is not so long.
    pub fn follow(&mut self, len: usize) -> io::Result<()> {
        if len > self.mapping.len {
            if u64::try_from(rustix::fs::fstat(&self.file)?.st_size).is_ok_and(|size| size < len as u64) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            self.mapping = Mapping::new(&self.file, len)?;
        }
        Ok(())
    }

    /// Writes bytes there, from `begin` on.
    ///
    /// # Panics
    /// If they are not within it.
    pub fn write(&mut self, begin: usize, bytes: &[u8]) {
        assert!(begin.checked_add(bytes.len()).is_some_and(|end| end <= self.mapping.len), "within the region");
        // SAFETY: they are within the mapping, and `bytes` are elsewhere, as nobody has a reference to what is written to.
        unsafe { self.mapping.start.as_ptr().add(begin).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// Some of its bytes, as they lie; `None` if they are not within it. The other process must not write there as long as somebody has them.
    pub fn part(&self, begin: usize, len: usize) -> Option<Bytes> {
        (begin.checked_add(len)? <= self.mapping.len)
            .then(|| Bytes::from_owner(Part { mapping: self.mapping.clone(), begin, len }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_writes_the_other_reads_also_where_it_has_grown_and_nothing_beyond() {
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
}
