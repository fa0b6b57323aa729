//! The shared memory regions that clients have registered: of the system (POSIX), and of GPUs
//! (CUDA).

mod system_region;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use downbeat_core::pages::Pointer;
use downbeat_engine_ort::cuda::CudaError;
use downbeat_engine_ort::cuda::ipc::{IpcGpu, IpcHandle, IpcMemory};
use downbeat_service::client::Client;
use downbeat_service::error::ServiceError;
use parking_lot::RwLock;
use system_region::SystemRegion;

pub use system_region::RegionStatus;

/// Most regions at once: each holds a file descriptor, and a client must not take all of them from
/// the listeners.
pub const MAX_REGIONS: usize = 1024;

/// The registered regions, by client and by the name that the client chose.
///
/// A region is its client's: others can neither use nor see nor forget it, and may have a region of
/// the same name. A client is known by its address, as it may keep several connections.
///
/// Memory is copied with `pread` and `pwrite` instead of being mapped. A mapping would need a check
/// against the object's size before each access (a system call as well). A client that shrinks the
/// object between the check and the copy would still end the server with `SIGBUS`. A short read is
/// an error instead.
///
/// A region of a GPU's memory is copied from and to the host, which waits for the GPU. Giving up
/// its last reference waits, too. Both happen beside the event loop.
///
/// A region that is unregistered during a request lives until that request is done.
#[derive(Debug, Default)]
pub struct SharedMemory {
    disabled: bool,
    /// By ordinal, the GPUs whose memory clients may register.
    gpus: BTreeMap<u32, Arc<IpcGpu>>,
    regions: RwLock<BTreeMap<Option<IpAddr>, Regions>>,
}

/// Both kinds of regions share their names, as in Triton.
type Regions = BTreeMap<String, Arc<Region>>;

#[derive(Debug)]
enum Region {
    System(SystemRegion),
    Cuda { status: CudaRegionStatus, memory: IpcMemory },
}

/// The status of a registered region of a GPU's memory.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct CudaRegionStatus {
    /// The name requests use.
    pub name: String,
    /// The GPU's ordinal.
    pub device_id: u32,
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

    /// The same table, in which clients may also register memory of these GPUs, by ordinal. An
    /// engine runs on them.
    ///
    /// # Errors
    /// If one is lost or out of memory.
    pub fn with_gpus(mut self, ordinals: impl IntoIterator<Item = u32>) -> Result<Self, CudaError> {
        if !self.disabled {
            self.gpus = ordinals.into_iter().map(|gpu| Ok((gpu, IpcGpu::new(gpu)?))).collect::<Result<_, _>>()?;
        }
        Ok(self)
    }

    /// Whether clients may register regions of GPUs' memory.
    pub fn has_cuda(&self) -> bool {
        !self.gpus.is_empty()
    }

    /// The words are Triton's, as far as its option is this server's.
    fn check_enabled(&self) -> Result<(), ServiceError> {
        if self.disabled {
            return Err(ServiceError::Unimplemented(format!(
                "Client shared memory is disabled. Start the server with '--shared-memory' to enable (Triton: \
                 '--allow-client-shm=true'; {}).",
                Pointer::SHARED_MEMORY
            )));
        }
        Ok(())
    }

    /// Registers `byte_size` bytes from `offset` of the shared memory object `key` as `name`, for
    /// `client`.
    ///
    /// # Errors
    /// `Unimplemented` if shared memory is disabled; `InvalidArgument` if the key is not a name of
    /// a shared memory object or the object is smaller than that; `NotFound` if there is no such
    /// object; `AlreadyExists` if the name is taken; `TooLarge` beyond [`MAX_REGIONS`].
    pub fn register(
        &self,
        client: Client,
        name: &str,
        key: &str,
        offset: u64,
        byte_size: u64,
    ) -> Result<(), ServiceError> {
        self.check_new(client, name, byte_size)?;
        self.insert(client, name, Region::System(SystemRegion::open(name, key, offset, byte_size)?))
    }

    /// Registers `byte_size` bytes of the memory of the GPU `device_id` that a client's process has
    /// given the handle `raw_handle` to, as `name`. Waits for the GPU. The words of errors begin
    /// with Triton's.
    ///
    /// # Errors
    /// `Unimplemented` if shared memory is disabled; `InvalidArgument` if no such GPU is in use,
    /// the handle is none or its memory is smaller than that; `AlreadyExists` if the name is taken;
    /// `TooLarge` beyond [`MAX_REGIONS`]; `Unavailable` if the GPU is lost.
    pub fn register_cuda(
        &self,
        client: Client,
        name: &str,
        raw_handle: &[u8],
        device_id: u64,
        byte_size: u64,
    ) -> Result<(), ServiceError> {
        let invalid = |why: String| {
            ServiceError::InvalidArgument(format!(
                "failed to register shared memory region '{name}': invalid args: {why}"
            ))
        };
        if !self.disabled && self.gpus.is_empty() {
            return Err(ServiceError::InvalidArgument(format!(
                "failed to register CUDA shared memory region: '{name}', GPUs not supported: this server uses no GPU; \
                 expected a region of system shared memory"
            )));
        }
        self.check_new(client, name, byte_size)?;
        let handle: IpcHandle = raw_handle.try_into().map_err(|_| {
            invalid(format!("the handle (cudaIpcMemHandle_t) has {} bytes, expected 64", raw_handle.len()))
        })?;
        let gpu = u32::try_from(device_id).ok().and_then(|ordinal| Some((ordinal, self.gpus.get(&ordinal)?)));
        let (ordinal, gpu) = gpu.ok_or_else(|| {
            let used: Vec<String> = self.gpus.keys().map(u32::to_string).collect();
            invalid(format!("device_id is {device_id}, but this server uses the GPUs {}", used.join(", ")))
        })?;
        let memory = gpu.open(&handle).map_err(|error| match error {
            CudaError::Refused { .. } => invalid(error.to_string()),
            error => cuda_error(error),
        })?;
        if memory.byte_size() < byte_size {
            return Err(invalid(format!("byte_size is {byte_size}, but the memory has {} bytes", memory.byte_size())));
        }
        let status = CudaRegionStatus { name: name.to_owned(), device_id: ordinal, byte_size };
        self.insert(client, name, Region::Cuda { status, memory })
    }

    /// Checks the name and size of a new region.
    fn check_new(&self, client: Client, name: &str, byte_size: u64) -> Result<(), ServiceError> {
        self.check_enabled()?;
        if name.is_empty() {
            return Err(ServiceError::InvalidArgument("the name of a shared memory region must not be empty".into()));
        }
        if byte_size == 0 {
            return Err(ServiceError::InvalidArgument(format!(
                "shared memory region '{name}': byte_size is 0, expected at least 1"
            )));
        }
        self.check_room(&self.regions.read(), client, name)
    }

    fn check_room(
        &self,
        regions: &BTreeMap<Option<IpAddr>, Regions>,
        client: Client,
        name: &str,
    ) -> Result<(), ServiceError> {
        if regions.get(&client.address()).is_some_and(|own| own.contains_key(name)) {
            return Err(ServiceError::AlreadyExists(format!(
                "shared memory region '{name}' is already registered; unregister it first"
            )));
        }
        if regions.values().map(BTreeMap::len).sum::<usize>() >= MAX_REGIONS {
            return Err(ServiceError::TooLarge(format!(
                "shared memory region '{name}': {MAX_REGIONS} regions are registered already, which is the limit; \
                 unregister one first"
            )));
        }
        Ok(())
    }

    fn insert(&self, client: Client, name: &str, region: Region) -> Result<(), ServiceError> {
        let mut regions = self.regions.write();
        self.check_room(&regions, client, name)?;
        regions.entry(client.address()).or_default().insert(name.to_owned(), Arc::new(region));
        Ok(())
    }

    /// Forgets a region of the system of `client`. No error if there is none of that name, as in
    /// Triton.
    ///
    /// # Errors
    /// `Unimplemented` if shared memory is disabled.
    pub fn unregister(&self, client: Client, name: &str) -> Result<(), ServiceError> {
        self.check_enabled()?;
        self.forget(client, |region| !region.is_cuda() && region.name() == name);
        Ok(())
    }

    /// Forgets every region of the system of `client`.
    ///
    /// # Errors
    /// `Unimplemented` if shared memory is disabled.
    pub fn unregister_all(&self, client: Client) -> Result<(), ServiceError> {
        self.check_enabled()?;
        self.forget(client, |region| !region.is_cuda());
        Ok(())
    }

    /// Forgets the region of a GPU's memory of `client` of that name, or all of them. May wait for
    /// the GPU. An unknown name is no error, as on servers without GPUs.
    pub fn unregister_cuda(&self, client: Client, name: Option<&str>) {
        self.forget(client, |region| region.is_cuda() && name.is_none_or(|name| region.name() == name));
    }

    fn forget(&self, client: Client, which: impl Fn(&Region) -> bool) {
        let mut regions = self.regions.write();
        let Some(own) = regions.get_mut(&client.address()) else { return };
        let (gone, kept): (Regions, Regions) = std::mem::take(own).into_iter().partition(|(_, region)| which(region));
        if kept.is_empty() {
            regions.remove(&client.address());
        } else {
            *own = kept;
        }
        // Closing a GPU's memory may take a while.
        drop(regions);
        drop(gone);
    }

    /// The region of system memory of `client` of that name, or all of its regions, ordered by
    /// name. As in Triton, the list is empty if shared memory is disabled.
    ///
    /// # Errors
    /// `NotFound` if there is none of that name.
    pub fn status(&self, client: Client, name: Option<&str>) -> Result<Vec<RegionStatus>, ServiceError> {
        let found = self.list(client, name, |region| match region {
            Region::System(region) => Some(region.status.clone()),
            Region::Cuda { .. } => None,
        });
        match name {
            Some(name) if found.is_empty() => Err(not_registered(name)),
            _ => Ok(found),
        }
    }

    /// As [`SharedMemory::status`], for regions of GPUs' memory. The list is also empty on servers
    /// without GPUs.
    ///
    /// # Errors
    /// `NotFound` if there is none of that name, in Triton's words.
    pub fn cuda_status(&self, client: Client, name: Option<&str>) -> Result<Vec<CudaRegionStatus>, ServiceError> {
        let found = self.list(client, name, |region| match region {
            Region::Cuda { status, .. } => Some(status.clone()),
            Region::System(_) => None,
        });
        match name {
            Some(name) if found.is_empty() => {
                Err(ServiceError::NotFound(format!("Unable to find cuda shared memory region: '{name}'")))
            }
            _ => Ok(found),
        }
    }

    fn list<T>(&self, client: Client, name: Option<&str>, pick: impl Fn(&Region) -> Option<T>) -> Vec<T> {
        let regions = self.regions.read();
        let own = regions.get(&client.address()).into_iter().flat_map(BTreeMap::values);
        let wanted = own.filter(|region| name.is_none_or(|name| region.name() == name));
        wanted.filter_map(|region| pick(region)).collect()
    }

    /// Checks that a range is inside a region of `client`. Returns whether it is a GPU's memory, so
    /// that copies wait.
    ///
    /// # Errors
    /// `NotFound` if there is no such region; `InvalidArgument` if the range is not inside it;
    /// `Unimplemented` if shared memory is disabled.
    pub fn check(&self, client: Client, region: &str, offset: u64, byte_size: u64) -> Result<bool, ServiceError> {
        self.check_enabled()?;
        // `region` would return a reference that outlives the lock. Dropping the last reference to
        // GPU memory waits for the GPU, and this check runs on the event loop.
        let regions = self.regions.read();
        let found =
            regions.get(&client.address()).and_then(|own| own.get(region)).ok_or_else(|| not_registered(region))?;
        found.locate(offset, byte_size)?;
        Ok(found.is_cuda())
    }

    /// Copies `byte_size` bytes from `offset` within a region of `client`: the client may change
    /// them at any time.
    ///
    /// # Errors
    /// `NotFound` if there is no such region; `InvalidArgument` if the range is not inside it, or
    /// its object has shrunk; `TooLarge` if there is no memory for the copy; `Unavailable` if its
    /// GPU is lost.
    pub fn read(&self, client: Client, region: &str, offset: u64, byte_size: u64) -> Result<Bytes, ServiceError> {
        let region = self.region(client, region)?;
        let position = region.locate(offset, byte_size)?;
        let no_memory = || {
            ServiceError::TooLarge(format!(
                "shared memory region '{}': no memory to copy {byte_size} bytes",
                region.name()
            ))
        };
        let length = usize::try_from(byte_size).map_err(|_| no_memory())?;
        match &*region {
            Region::Cuda { .. } if length == 0 => Ok(Bytes::new()),
            Region::Cuda { memory, .. } => memory.read(position, length).map_err(|error| match error {
                CudaError::OutOfMemory { .. } => no_memory(),
                error => cuda_error(error),
            }),
            Region::System(region) => region.read(position, length, no_memory),
        }
    }

    /// Copies `data` to `offset` within a region of `client`.
    ///
    /// # Errors
    /// `NotFound` if there is no such region; `InvalidArgument` if the range is not inside it, or
    /// its object has shrunk; `Unavailable` if its GPU is lost.
    pub fn write(&self, client: Client, region: &str, offset: u64, data: &[u8]) -> Result<(), ServiceError> {
        let region = self.region(client, region)?;
        let position = region.locate(offset, data.len() as u64)?;
        match &*region {
            Region::Cuda { .. } if data.is_empty() => Ok(()),
            Region::Cuda { memory, .. } => memory.write(position, data).map_err(cuda_error),
            Region::System(region) => region.write(position, data),
        }
    }

    fn region(&self, client: Client, name: &str) -> Result<Arc<Region>, ServiceError> {
        self.check_enabled()?;
        let regions = self.regions.read();
        let found = regions.get(&client.address()).and_then(|own| own.get(name)).cloned();
        found.ok_or_else(|| not_registered(name))
    }
}

fn not_registered(name: &str) -> ServiceError {
    ServiceError::NotFound(format!("shared memory region '{name}' is not registered"))
}

/// A failure of a GPU, or a copy that it refuses.
fn cuda_error(error: CudaError) -> ServiceError {
    match error {
        CudaError::Lost { .. } | CudaError::OutOfMemory { .. } => ServiceError::Unavailable(error.to_string()),
        CudaError::Refused { .. } => ServiceError::Internal(error.to_string()),
    }
}

impl Region {
    fn name(&self) -> &str {
        match self {
            Region::System(region) => &region.status.name,
            Region::Cuda { status, .. } => &status.name,
        }
    }

    fn is_cuda(&self) -> bool {
        matches!(self, Region::Cuda { .. })
    }

    /// The begin of a range in the object or the memory, after a check that it is inside the
    /// region.
    fn locate(&self, offset: u64, byte_size: u64) -> Result<u64, ServiceError> {
        let (start, size) = match self {
            Region::System(region) => (region.status.offset, region.status.byte_size),
            Region::Cuda { status, .. } => (0, status.byte_size),
        };
        match offset.checked_add(byte_size) {
            // `start + size` does not overflow: `register` has checked it.
            Some(end) if end <= size => Ok(start + offset),
            _ => Err(ServiceError::InvalidArgument(format!(
                "shared memory region '{}': offset {offset} + byte size {byte_size} is beyond its {size} bytes",
                self.name()
            ))),
        }
    }
}
