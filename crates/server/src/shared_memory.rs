//! The system (POSIX) shared memory regions that clients have registered.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::net::{IpAddr, Ipv4Addr};
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

/// Who sends a request, as far as a server can tell: who else is at the same address. All loopback addresses are one.
/// The default: whoever is in this process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Client(Option<IpAddr>);

impl Client {
    /// Whoever is in this process.
    pub const HERE: Client = Client(None);

    /// Whoever is at this address.
    pub fn at(address: IpAddr) -> Self {
        let address = address.to_canonical();
        Client(Some(if address.is_loopback() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { address }))
    }
}

/// The registered regions, by who registered them and the name that they chose.
///
/// A region is its client's: others can neither use nor see nor forget it, and may have a region of the same name.
/// Clients keep several connections, so that a connection does not tell them apart; their address does.
///
/// Memory is copied with `pread` and `pwrite` instead of being mapped. A mapping would have to be checked against the
/// object's size before each access (a system call as well), and a client that shrinks the object between the check
/// and the copy would still end the server with `SIGBUS`; a read that finds less than was promised is an error.
///
/// A region that is unregistered while a request uses it lives until that request is done with it.
#[derive(Debug, Default)]
pub struct SharedMemory {
    disabled: bool,
    regions: RwLock<BTreeMap<Client, Regions>>,
}

type Regions = BTreeMap<String, Arc<Region>>;

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

    /// No regions, now and later: registering and using them is refused.
    pub fn disabled() -> Self {
        SharedMemory { disabled: true, ..SharedMemory::default() }
    }

    /// Whether clients may register regions.
    pub fn is_enabled(&self) -> bool {
        !self.disabled
    }

    /// The words are Triton's, as far as its option is this server's.
    fn check_enabled(&self) -> Result<(), ServiceError> {
        if self.disabled {
            return Err(ServiceError::Unimplemented(
                "Client shared memory is disabled. Start the server with '--shared-memory' to enable (Triton: \
                 '--allow-client-shm=true')."
                    .to_owned(),
            ));
        }
        Ok(())
    }

    /// Registers `byte_size` bytes from `offset` of the shared memory object `key` as `name`, for
    /// `client`.
    ///
    /// # Errors
    /// `Unimplemented` if shared memory is disabled; `InvalidArgument` if the key is not a name of a shared memory object or the object is smaller than that;
    /// `NotFound` if there is no such object; `AlreadyExists` if the name is taken; `TooLarge` beyond [`MAX_REGIONS`].
    pub fn register(
        &self,
        client: Client,
        name: &str,
        key: &str,
        offset: u64,
        byte_size: u64,
    ) -> Result<(), ServiceError> {
        self.check_enabled()?;
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
        if self.regions.read().get(&client).is_some_and(|own| own.contains_key(name)) {
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
        if regions.get(&client).is_some_and(|own| own.contains_key(name)) {
            return Err(taken());
        }
        if regions.values().map(BTreeMap::len).sum::<usize>() >= MAX_REGIONS {
            return Err(ServiceError::TooLarge(format!(
                "shared memory region '{name}': {MAX_REGIONS} regions are registered already, which is the most"
            )));
        }
        regions.entry(client).or_default().insert(name.to_owned(), Arc::new(region));
        Ok(())
    }

    /// Forgets a region of `client`. No error if there is none of that name, as in Triton.
    ///
    /// # Errors
    /// `Unimplemented` if shared memory is disabled.
    pub fn unregister(&self, client: Client, name: &str) -> Result<(), ServiceError> {
        self.check_enabled()?;
        let mut regions = self.regions.write();
        if let Some(own) = regions.get_mut(&client) {
            own.remove(name);
            if own.is_empty() {
                regions.remove(&client);
            }
        }
        Ok(())
    }

    /// Forgets every region of `client`.
    ///
    /// # Errors
    /// `Unimplemented` if shared memory is disabled.
    pub fn unregister_all(&self, client: Client) -> Result<(), ServiceError> {
        self.check_enabled()?;
        self.regions.write().remove(&client);
        Ok(())
    }

    /// The region of `client` of that name, or all of its regions, ordered by name.
    ///
    /// # Errors
    /// `NotFound` if there is none of that name; `Unimplemented` if shared memory is disabled.
    pub fn status(&self, client: Client, name: Option<&str>) -> Result<Vec<RegionStatus>, ServiceError> {
        self.check_enabled()?;
        match name {
            Some(name) => Ok(vec![self.region(client, name)?.status.clone()]),
            None => {
                let regions = self.regions.read();
                let own = regions.get(&client).into_iter().flat_map(BTreeMap::values);
                Ok(own.map(|region| region.status.clone()).collect())
            }
        }
    }

    /// Checks that a range is inside a region of `client`.
    ///
    /// # Errors
    /// `NotFound` if there is no such region; `InvalidArgument` if the range is not inside it; `Unimplemented` if
    /// shared memory is disabled.
    pub fn check(&self, client: Client, region: &str, offset: u64, byte_size: u64) -> Result<(), ServiceError> {
        self.region(client, region)?.locate(offset, byte_size).map(|_| ())
    }

    /// Copies `byte_size` bytes from `offset` within a region of `client`: the client may change them at any time.
    ///
    /// # Errors
    /// `NotFound` if there is no such region; `InvalidArgument` if the range is not inside it, or its object has
    /// shrunk; `TooLarge` if there is no memory for the copy.
    pub fn read(&self, client: Client, region: &str, offset: u64, byte_size: u64) -> Result<Bytes, ServiceError> {
        let region = self.region(client, region)?;
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

    /// Copies `data` to `offset` within a region of `client`.
    ///
    /// # Errors
    /// `NotFound` if there is no such region; `InvalidArgument` if the range is not inside it, or its object has
    /// shrunk.
    pub fn write(&self, client: Client, region: &str, offset: u64, data: &[u8]) -> Result<(), ServiceError> {
        let region = self.region(client, region)?;
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

    fn region(&self, client: Client, name: &str) -> Result<Arc<Region>, ServiceError> {
        self.check_enabled()?;
        let regions = self.regions.read();
        let found = regions.get(&client).and_then(|own| own.get(name)).cloned();
        found.ok_or_else(|| ServiceError::NotFound(format!("shared memory region '{name}' is not registered")))
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
