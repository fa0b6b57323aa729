//! The system (POSIX) shared memory regions that clients have registered.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::RwLock;
use rustix::fd::OwnedFd;
use rustix::io::Errno;

use crate::error::ServiceError;

/// Most regions at once: each holds a file descriptor, and a client must not take all of them from the listeners.
pub const MAX_REGIONS: usize = 1024;

/// Longest name of a shared memory object (`NAME_MAX` of Linux), bytes.
const MAX_KEY_BYTES: usize = 255;

/// The registered regions, by the name that the client chose.
///
/// Memory is copied with `pread` and `pwrite` instead of being mapped. A mapping would have to be checked against the
/// object's size before each access (a system call as well), and a client that shrinks the object between the check
/// and the copy would still end the server with `SIGBUS`; a read that finds less than was promised is an error.
///
/// A region that is unregistered while a request uses it lives until that request is done with it.
#[derive(Debug, Default)]
pub struct SharedMemory {
    regions: RwLock<BTreeMap<String, Arc<Region>>>,
}

#[derive(Debug)]
struct Region {
    status: RegionStatus,
    object: OwnedFd,
}

/// What is known of a registered region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegionStatus {
    /// The name requests use.
    pub name: String,
    /// The name of the shared memory object.
    pub key: String,
    /// Where in the object the region begins, bytes.
    pub offset: u64,
    /// Size of the region, bytes.
    pub byte_size: u64,
}

impl SharedMemory {
    /// No regions.
    pub fn new() -> Self {
        SharedMemory::default()
    }

    /// Registers `byte_size` bytes from `offset` of the shared memory object `key` as `name`.
    ///
    /// # Errors
    /// `InvalidArgument` if the key is not a name of a shared memory object or the object is smaller than that;
    /// `NotFound` if there is no such object; `AlreadyExists` if the name is taken; `TooLarge` beyond [`MAX_REGIONS`].
    pub fn register(&self, name: &str, key: &str, offset: u64, byte_size: u64) -> Result<(), ServiceError> {
        if name.is_empty() {
            return Err(ServiceError::InvalidArgument("the name of a shared memory region must not be empty".into()));
        }
        if byte_size == 0 {
            return Err(ServiceError::InvalidArgument(format!(
                "shared memory region '{name}': byte_size is 0, expected at least 1"
            )));
        }
        let end = offset.checked_add(byte_size).ok_or_else(|| {
            ServiceError::InvalidArgument(format!(
                "shared memory region '{name}': offset {offset} + byte_size {byte_size} overflows"
            ))
        })?;
        let path = object_name(name, key)?;
        let taken = || {
            ServiceError::AlreadyExists(format!(
                "shared memory region '{name}' is already registered; unregister it first"
            ))
        };
        if self.regions.read().contains_key(name) {
            return Err(taken());
        }
        // As the C library's `shm_open`: a link does not lead out of the folder of shared memory objects.
        let no_link = rustix::shm::OFlags::from_bits_retain(rustix::fs::OFlags::NOFOLLOW.bits());
        let object = rustix::shm::open(path, rustix::shm::OFlags::RDWR | no_link, rustix::fs::Mode::empty())
            .map_err(|errno| open_error(name, key, errno))?;
        let region =
            Region { status: RegionStatus { name: name.to_owned(), key: key.to_owned(), offset, byte_size }, object };
        let size = region.object_size()?;
        if size < end {
            return Err(ServiceError::InvalidArgument(format!(
                "shared memory region '{name}': object '{key}' has {size} bytes, expected at least {end} \
                 (offset {offset} + byte_size {byte_size})"
            )));
        }
        let mut regions = self.regions.write();
        if regions.contains_key(name) {
            return Err(taken());
        }
        if regions.len() >= MAX_REGIONS {
            return Err(ServiceError::TooLarge(format!(
                "shared memory region '{name}': {MAX_REGIONS} regions are registered already, which is the most"
            )));
        }
        regions.insert(name.to_owned(), Arc::new(region));
        Ok(())
    }

    /// Forgets a region. No error if there is none of that name, as in Triton.
    pub fn unregister(&self, name: &str) {
        self.regions.write().remove(name);
    }

    /// Forgets every region.
    pub fn unregister_all(&self) {
        self.regions.write().clear();
    }

    /// The region of that name, or all, ordered by name.
    ///
    /// # Errors
    /// `NotFound` if there is none of that name.
    pub fn status(&self, name: Option<&str>) -> Result<Vec<RegionStatus>, ServiceError> {
        match name {
            Some(name) => Ok(vec![self.region(name)?.status.clone()]),
            None => Ok(self.regions.read().values().map(|region| region.status.clone()).collect()),
        }
    }

    /// Copies `byte_size` bytes from `offset` within a region: the client may change them at any time.
    ///
    /// # Errors
    /// `NotFound` if there is no such region; `InvalidArgument` if the range is not inside it, or its object has
    /// shrunk; `TooLarge` if there is no memory for the copy.
    pub fn read(&self, region: &str, offset: u64, byte_size: u64) -> Result<Bytes, ServiceError> {
        let region = self.region(region)?;
        let mut position = region.locate(offset, byte_size)?;
        let no_memory = || {
            ServiceError::TooLarge(format!(
                "shared memory region '{}': no memory to copy {byte_size} bytes",
                region.status.name
            ))
        };
        let length = usize::try_from(byte_size).map_err(|_| no_memory())?;
        // A sparse object can claim more than the machine has: ask its real size before believing the claim.
        region.check_object(position, byte_size)?;
        let mut copy = Vec::new();
        copy.try_reserve_exact(length).map_err(|_| no_memory())?;
        while copy.len() < length {
            // May read a little more than was asked for: the capacity can be larger.
            let read = rustix::io::pread(&region.object, rustix::buffer::spare_capacity(&mut copy), position);
            match read {
                Ok(0) => return Err(region.shrunk(position)),
                Ok(count) => position += count as u64,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(region.failed("read", errno)),
            }
        }
        copy.truncate(length);
        Ok(copy.into())
    }

    /// Copies `data` to `offset` within a region.
    ///
    /// # Errors
    /// `NotFound` if there is no such region; `InvalidArgument` if the range is not inside it, or its object has
    /// shrunk.
    pub fn write(&self, region: &str, offset: u64, data: &[u8]) -> Result<(), ServiceError> {
        let region = self.region(region)?;
        let mut position = region.locate(offset, data.len() as u64)?;
        // Writing beyond the end would make the object larger again.
        region.check_object(position, data.len() as u64)?;
        let mut rest = data;
        while !rest.is_empty() {
            match rustix::io::pwrite(&region.object, rest, position) {
                Ok(0) => return Err(region.shrunk(position)),
                Ok(count) => {
                    position += count as u64;
                    rest = rest.get(count..).unwrap_or_default();
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(region.failed("written", errno)),
            }
        }
        Ok(())
    }

    fn region(&self, name: &str) -> Result<Arc<Region>, ServiceError> {
        self.regions
            .read()
            .get(name)
            .cloned()
            .ok_or_else(|| ServiceError::NotFound(format!("shared memory region '{name}' is not registered")))
    }
}

impl Region {
    /// Where in the object the range begins, after a check that it is inside the region.
    fn locate(&self, offset: u64, byte_size: u64) -> Result<u64, ServiceError> {
        let RegionStatus { name, offset: start, byte_size: size, .. } = &self.status;
        match offset.checked_add(byte_size) {
            // `start + size` does not overflow: `register` has seen to it.
            Some(end) if end <= *size => Ok(start + offset),
            _ => Err(ServiceError::InvalidArgument(format!(
                "shared memory region '{name}': offset {offset} + byte size {byte_size} is beyond its {size} bytes"
            ))),
        }
    }

    fn object_size(&self) -> Result<u64, ServiceError> {
        let stat = rustix::fs::fstat(&self.object).map_err(|errno| self.failed("examined", errno))?;
        if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(ServiceError::InvalidArgument(format!(
                "shared memory region '{}': '{}' is not a shared memory object",
                self.status.name, self.status.key
            )));
        }
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }

    fn check_object(&self, position: u64, byte_size: u64) -> Result<(), ServiceError> {
        let size = self.object_size()?;
        if position.saturating_add(byte_size) > size { Err(self.shrunk(size)) } else { Ok(()) }
    }

    fn shrunk(&self, size: u64) -> ServiceError {
        let RegionStatus { name, key, offset, byte_size } = &self.status;
        ServiceError::InvalidArgument(format!(
            "shared memory region '{name}': object '{key}' now has {size} bytes, expected {} as when it was registered",
            offset + byte_size
        ))
    }

    fn failed(&self, what: &str, errno: Errno) -> ServiceError {
        let RegionStatus { name, key, .. } = &self.status;
        ServiceError::Internal(format!("shared memory region '{name}': object '{key}' cannot be {what}: {errno}"))
    }
}

/// Checks that a key names a shared memory object and nothing else: one leading slash (which may be left out, as
/// `shm_open` allows) and no other.
fn object_name(region: &str, key: &str) -> Result<CString, ServiceError> {
    let wrong = || {
        let shown: String = key.chars().take(64).collect();
        ServiceError::InvalidArgument(format!(
            "shared memory region '{region}': key '{shown}' is no name of a shared memory object; \
             expected a slash and then 1 to {MAX_KEY_BYTES} bytes without a slash"
        ))
    };
    let name = key.strip_prefix('/').unwrap_or(key);
    if name.is_empty() || name == "." || name == ".." || name.contains('/') || name.len() > MAX_KEY_BYTES {
        return Err(wrong());
    }
    // Fails on a NUL within.
    CString::new(name).map_err(|_| wrong())
}

fn open_error(region: &str, key: &str, errno: Errno) -> ServiceError {
    let message = format!("shared memory region '{region}': object '{key}' cannot be opened: {errno}");
    match errno {
        Errno::NOENT => ServiceError::NotFound(message),
        Errno::MFILE | Errno::NFILE => ServiceError::Unavailable(message),
        _ => ServiceError::InvalidArgument(message),
    }
}
