//! Memory of other processes on GPUs of this one (CUDA's IPC). Clients call it CUDA shared memory.

use std::ffi::c_char;
use std::sync::Arc;

use bytes::Bytes;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdeviceptr, CUipcMem_flags_enum, CUipcMemHandle};
use downbeat_engine::tensor::{Buffer, Lent};

use super::{CudaError, Device, Event, PinnedPool, Stream};

/// The handle that another process has made of its memory (`cuIpcGetMemHandle`).
pub type IpcHandle = [u8; 64];

/// A GPU on which memory of other processes can be opened.
pub struct IpcGpu {
    device: Arc<Device>,
    /// The stream of the copies. Launches and copies do not wait for each other.
    stream: Arc<Stream>,
    pinned: Arc<PinnedPool>,
}

impl IpcGpu {
    /// The GPU with this number, on which an engine has started.
    ///
    /// # Errors
    /// If the GPU is lost or out of memory.
    pub fn new(ordinal: u32) -> Result<Arc<IpcGpu>, CudaError> {
        let device = Device::open(ordinal)?;
        let (stream, pinned) = (Stream::new(&device)?, PinnedPool::new(&device));
        Ok(Arc::new(IpcGpu { device, stream, pinned }))
    }

    /// Opens memory of another process. May wait for the device.
    ///
    /// # Errors
    /// If the handle is of no memory that this GPU can reach, for example of a process that has
    /// ended.
    pub fn open(self: &Arc<Self>, handle: &IpcHandle) -> Result<IpcMemory, CudaError> {
        let IpcGpu { device, .. } = &**self;
        device.bind()?;
        let handle = CUipcMemHandle { reserved: handle.map(|byte| byte as c_char) };
        let flags = CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: the driver checks the handle; the address is written if the call succeeds.
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags).result() };
        device.check("opening memory of another process", opened)?;
        // From here on a drop closes the memory.
        let mut memory = IpcMemory { gpu: self.clone(), address, len: 0 };
        let (mut base, mut len) = (0, 0);
        // SAFETY: both are written if the call succeeds.
        let found = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut len, address).result() };
        device.check("measuring memory of another process", found)?;
        memory.len = (base + len as u64).saturating_sub(address);
        Ok(memory)
    }
}

impl std::fmt::Debug for IpcGpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.device.fmt(f)
    }
}

/// Memory of another process, open in this one. A drop closes it, which may wait for the device.
#[derive(Debug)]
pub struct IpcMemory {
    gpu: Arc<IpcGpu>,
    address: CUdeviceptr,
    len: u64,
}

impl IpcMemory {
    /// Its length in bytes.
    pub fn byte_size(&self) -> u64 {
        self.len
    }

    /// Copies `len` bytes from `offset` on to (pinned) memory of the host. Blocks the caller until
    /// the copy is over.
    ///
    /// # Errors
    /// If the device is lost, or there is no memory for the copy.
    ///
    /// # Panics
    /// If the bytes reach outside the memory.
    pub fn read(&self, offset: u64, len: usize) -> Result<Bytes, CudaError> {
        let IpcGpu { device, stream, pinned } = &*self.gpu;
        let from = self.place(offset, len);
        let mut copy = pinned.take(len)?;
        device.bind()?;
        // SAFETY: inside of the memory, which is open as long as `self`. When this returns, the
        // copy is over or will never run.
        let copied = unsafe { result::memcpy_dtoh_async(copy.bytes_mut(), from, stream.raw()) };
        device.check("copying from memory of another process", copied)?;
        self.wait()?;
        Ok(Buffer::from_lent(Box::new(copy)).into_bytes())
    }

    /// Copies `data` to `offset`. Blocks the caller until the copy is over.
    ///
    /// # Errors
    /// If the device is lost.
    ///
    /// # Panics
    /// If the bytes reach outside the memory.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), CudaError> {
        let IpcGpu { device, stream, .. } = &*self.gpu;
        let to = self.place(offset, data.len());
        device.bind()?;
        // SAFETY: as in `read`.
        let copied = unsafe { result::memcpy_htod_async(to, data, stream.raw()) };
        device.check("copying to memory of another process", copied)?;
        self.wait()
    }

    fn place(&self, offset: u64, len: usize) -> CUdeviceptr {
        let end = offset.checked_add(len as u64);
        assert!(end.is_some_and(|end| end <= self.len), "a copy stays inside the memory");
        self.address + offset
    }

    /// Waits for the copies so far.
    fn wait(&self) -> Result<(), CudaError> {
        let IpcGpu { device, stream, .. } = &*self.gpu;
        let over = Event::new(device).and_then(|event| stream.record(&event).and_then(|()| event.wait()));
        // The memory at both ends of the copies is given back after this.
        over.or_else(|error| stream.finish().map_err(|_| error))
    }
}

impl Drop for IpcMemory {
    fn drop(&mut self) {
        // SAFETY: opened by this type, closed once; no copy is under way.
        self.gpu.device.release(|| unsafe { sys::cuIpcCloseMemHandle(self.address).result() });
    }
}
