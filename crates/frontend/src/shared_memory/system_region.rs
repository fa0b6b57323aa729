//! A region of the system's shared memory (POSIX): an object, read and written and not mapped.

use std::ffi::CString;

use bytes::Bytes;
use downbeat_service::error::ServiceError;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::shm::OFlags;

/// Longest name of a shared memory object (`NAME_MAX` of Linux), bytes.
const MAX_KEY_BYTES: usize = 255;

/// The status of a registered region.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct RegionStatus {
    /// The name requests use.
    pub name: String,
    /// The name of the shared memory object.
    pub key: String,
    /// The region's begin in the object, bytes.
    pub offset: u64,
    /// Size of the region, bytes.
    pub byte_size: u64,
}

/// A registered region, with its object open.
#[derive(Debug)]
pub(super) struct SystemRegion {
    /// The region's status.
    pub status: RegionStatus,
    object: OwnedFd,
}

impl SystemRegion {
    /// Opens `byte_size` bytes from `offset` of the shared memory object `key`.
    ///
    /// # Errors
    /// `InvalidArgument` if the key is not a name of a shared memory object or the object is
    /// smaller than that; `NotFound` if there is none.
    pub fn open(name: &str, key: &str, offset: u64, byte_size: u64) -> Result<Self, ServiceError> {
        let end = offset.checked_add(byte_size).ok_or_else(|| {
            ServiceError::InvalidArgument(format!(
                "shared memory region '{name}': offset {offset} + byte_size {byte_size} overflows"
            ))
        })?;
        let path = object_name(name, key)?;
        // Opened as the C library's `shm_open` does: a link does not lead out of the folder of
        // shared memory objects.
        let no_link = OFlags::from_bits_retain(rustix::fs::OFlags::NOFOLLOW.bits());
        let object = rustix::shm::open(path, OFlags::RDWR | no_link, rustix::fs::Mode::empty())
            .map_err(|errno| open_error(name, key, errno))?;
        let status = RegionStatus { name: name.to_owned(), key: key.to_owned(), offset, byte_size };
        let region = SystemRegion { status, object };
        let size = region.object_size()?;
        if size < end {
            return Err(ServiceError::InvalidArgument(format!(
                "shared memory region '{name}': object '{key}' has {size} bytes, expected at least {end} \
                 (offset {offset} + byte_size {byte_size})"
            )));
        }
        Ok(region)
    }

    /// Copies `length` bytes from `position` of the object; `no_memory` makes the error for lack of
    /// memory.
    ///
    /// # Errors
    /// `InvalidArgument` if the object has shrunk; `Internal` if it cannot be read.
    pub fn read(
        &self,
        mut position: u64,
        length: usize,
        no_memory: impl Fn() -> ServiceError,
    ) -> Result<Bytes, ServiceError> {
        // A sparse object can claim more than the machine has: ask its real size before believing
        // the claim.
        self.check_object(position, length as u64)?;
        let mut copy = Vec::new();
        copy.try_reserve_exact(length).map_err(|_| no_memory())?;
        while copy.len() < length {
            // May read a little more than was asked for: the capacity can be larger.
            let read = rustix::io::pread(&self.object, rustix::buffer::spare_capacity(&mut copy), position);
            match read {
                Ok(0) => return Err(self.shrunk(position)),
                Ok(count) => position += count as u64,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.failed("read", errno)),
            }
        }
        copy.truncate(length);
        Ok(copy.into())
    }

    /// Copies `data` to `position` of the object.
    ///
    /// # Errors
    /// `InvalidArgument` if the object has shrunk; `Internal` if it cannot be written.
    pub fn write(&self, mut position: u64, data: &[u8]) -> Result<(), ServiceError> {
        // Writing beyond the end would make the object larger again.
        self.check_object(position, data.len() as u64)?;
        let mut rest = data;
        while !rest.is_empty() {
            match rustix::io::pwrite(&self.object, rest, position) {
                Ok(0) => return Err(self.shrunk(position)),
                Ok(count) => {
                    position += count as u64;
                    rest = rest.get(count..).unwrap_or_default();
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.failed("written", errno)),
            }
        }
        Ok(())
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

/// Checks that a key names a shared memory object: one leading slash (which may be left out, as
/// `shm_open` allows) and no further slash.
fn object_name(region: &str, key: &str) -> Result<CString, ServiceError> {
    let wrong = || {
        let shown: String = key.chars().take(64).collect();
        ServiceError::InvalidArgument(format!(
            "shared memory region '{region}': key '{shown}' is not a name of a shared memory object; expected a slash \
             and then 1 to {MAX_KEY_BYTES} bytes without a slash"
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
