//! Memory of a device.

use std::any::Any;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;
use downbeat_engine::tensor::{Buffer, DeviceBytes, DeviceError};

use super::pinned::PinnedBytes;
use super::ring::SlotReady;
use super::{CudaError, Device, Stream};

/// Tensors start at multiples of this many bytes: kernels load as much at once, 128 bits.
const TENSOR_ALIGNMENT: u64 = 16;

/// The alignment of weights, as of the driver's own allocations.
pub(crate) const WEIGHT_ALIGNMENT: usize = 256;

/// Memory of a device, owned.
pub(crate) struct DeviceAllocation {
    device: Arc<Device>,
    address: CUdeviceptr,
    len: usize,
    /// The stream in whose order the memory is taken and given back; `None`: at once.
    stream: Option<Arc<Stream>>,
}

impl DeviceAllocation {
    /// Uninitialised memory for long use: the allocation may block the device.
    pub(crate) fn new(device: &Arc<Device>, len: usize, what: &str) -> Result<DeviceAllocation, CudaError> {
        device.bind()?;
        // SAFETY: the users of its address write the memory before they read it.
        let address = device.check(what, unsafe { result::malloc_sync(len.max(1)) })?;
        Ok(DeviceAllocation { device: device.clone(), address, len, stream: None })
    }

    /// Uninitialised memory for a launch, from the driver's pool, in the order of a stream. Other
    /// streams may use it after an event that is recorded later than this call.
    pub(crate) fn in_stream(stream: &Arc<Stream>, len: usize, what: &str) -> Result<DeviceAllocation, CudaError> {
        let device = stream.device();
        device.bind()?;
        // SAFETY: as above; the stream is alive.
        let address = device.check(what, unsafe { result::malloc_async(stream.raw(), len.max(1)) })?;
        Ok(DeviceAllocation { device: device.clone(), address, len, stream: Some(stream.clone()) })
    }

    /// The address of its first byte.
    pub(crate) fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Enqueues a copy of host memory to `offset`.
    ///
    /// # Safety
    /// `source` must not change, nor be freed, before the copy is over.
    pub(crate) unsafe fn upload(&self, stream: &Stream, offset: usize, source: &[u8]) -> Result<(), CudaError> {
        assert!(offset + source.len() <= self.len, "a copy stays inside the memory");
        self.device.bind()?;
        // SAFETY: inside the memory, as just checked; the caller keeps the source.
        let copied = unsafe { result::memcpy_htod_async(self.address + offset as u64, source, stream.raw()) };
        self.device.check("copying to it", copied)
    }

    /// Enqueues a copy of other memory of the device to `offset`. The copy begins once the source
    /// is written.
    ///
    /// # Safety
    /// The memory of `source` must not be given back before the copy is over.
    pub(crate) unsafe fn copy(&self, stream: &Stream, offset: usize, source: &DeviceSlice) -> Result<(), CudaError> {
        assert!(offset + source.len <= self.len, "a copy stays inside the memory");
        source.wait_in(stream)?;
        // SAFETY: inside both, and the caller keeps the source.
        let copied = unsafe {
            result::memcpy_dtod_async(self.address + offset as u64, source.address, source.len, stream.raw())
        };
        self.device.check("copying in its memory", copied)
    }

    /// Enqueues zeros from `offset` on.
    pub(crate) fn zero(&self, stream: &Stream, offset: usize) -> Result<(), CudaError> {
        assert!(offset <= self.len, "zeros stay inside the memory");
        self.device.bind()?;
        let rest = self.len - offset;
        if rest == 0 {
            return Ok(());
        }
        // SAFETY: inside the memory, which is given back after the enqueued work.
        let set = unsafe { result::memset_d8_async(self.address + offset as u64, 0, rest, stream.raw()) };
        self.device.check("clearing its memory", set)
    }

    /// The whole memory as a slice, to be shared.
    pub(crate) fn into_slice(self) -> DeviceSlice {
        let (device, address, len) = (self.device.clone(), self.address, self.len);
        DeviceSlice { device, address, len, ready: None, _owner: Arc::new(self) }
    }
}

impl Drop for DeviceAllocation {
    fn drop(&mut self) {
        match &self.stream {
            Some(stream) => stream.free(self.address),
            // SAFETY: taken by this type, given back once. No work uses it any more, as launches
            // keep their memory until they are over.
            None => self.device.release(|| unsafe { result::free_sync(self.address) }),
        }
    }
}

/// Bytes in a device's memory, shared with other slices of the same memory. They do not change,
/// except before `ready`.
#[derive(Clone)]
pub(crate) struct DeviceSlice {
    device: Arc<Device>,
    address: CUdeviceptr,
    len: usize,
    /// The copy that must be over before a read; `None`: the bytes are written.
    ready: Option<SlotReady>,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl DeviceSlice {
    /// `len` bytes at `address`, which stay as long as `owner`.
    ///
    /// # Safety
    /// The bytes must be in the memory of `device`. No work may write them while the slice or a
    /// part of it is alive, except the work that `ready` waits for.
    pub(crate) unsafe fn new(
        device: Arc<Device>,
        address: CUdeviceptr,
        len: usize,
        ready: Option<SlotReady>,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> DeviceSlice {
        DeviceSlice { device, address, len, ready, _owner: owner }
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn address(&self) -> CUdeviceptr {
        self.address
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether kernels may load several elements at once from its start.
    pub(crate) fn is_aligned(&self) -> bool {
        self.address.is_multiple_of(TENSOR_ALIGNMENT)
    }

    /// A part of the slice.
    pub(crate) fn part(&self, start: usize, end: usize) -> DeviceSlice {
        assert!(start <= end && end <= self.len, "a part is inside the whole");
        DeviceSlice { address: self.address + start as u64, len: end - start, ..self.clone() }
    }

    /// Lets later work of `stream` read the slice: the stream waits for `ready`.
    pub(crate) fn wait_in(&self, stream: &Stream) -> Result<(), CudaError> {
        match &self.ready {
            Some(ready) => stream.wait_for(ready.event()),
            None => self.device.bind(),
        }
    }

    /// Enqueues a copy to host memory.
    ///
    /// # Safety
    /// Until the copy is over, `to` must not be used or freed, and one slice of these bytes must be
    /// alive.
    pub(crate) unsafe fn download(&self, stream: &Stream, to: &mut [u8]) -> Result<(), CudaError> {
        assert_eq!(to.len(), self.len, "a copy is as long as what is copied");
        self.wait_in(stream)?;
        // SAFETY: the bytes stay as long as the owner; the caller promises the rest.
        let copied = unsafe { result::memcpy_dtoh_async(to, self.address, stream.raw()) };
        self.device.check("copying from it", copied)
    }

    /// A copy in host memory. Blocks the caller; launches use [`DeviceSlice::download`].
    pub(crate) fn fetch(&self) -> Result<Vec<u8>, CudaError> {
        let mut bytes = vec![0; self.len];
        if let Some(ready) = &self.ready {
            ready.event().wait()?;
        }
        self.device.bind()?;
        // SAFETY: the bytes exist and are written, and the call returns when they are copied.
        let copied = unsafe { result::memcpy_dtoh_sync(&mut bytes, self.address) };
        self.device.check("copying from it", copied).map(|()| bytes)
    }
}

impl std::fmt::Debug for DeviceSlice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes on {:?}", self.len, self.device)
    }
}

impl DeviceBytes for DeviceSlice {
    fn byte_size(&self) -> usize {
        self.len
    }

    fn part(&self, start: usize, end: usize) -> Box<dyn DeviceBytes> {
        Box::new(self.part(start, end))
    }

    fn fetch(&self) -> Result<Vec<u8>, DeviceError> {
        Ok(self.fetch()?)
    }
}

/// The buffers of tensors on a GPU.
pub(crate) trait CudaBuffer {
    /// Takes memory of a device.
    fn from_device(slice: DeviceSlice) -> Self;

    /// An empty buffer in pinned memory, with the capacity of the memory.
    fn pinned(memory: PinnedBytes) -> Self;

    /// The bytes' place on a device; `None`: they are on the host.
    fn device(&self) -> Option<&DeviceSlice>;
}

impl CudaBuffer for Buffer {
    fn from_device(slice: DeviceSlice) -> Buffer {
        Buffer::from_device_bytes(Box::new(slice))
    }

    fn pinned(mut memory: PinnedBytes) -> Buffer {
        memory.set_len(0);
        Buffer::from_lent(Box::new(memory))
    }

    fn device(&self) -> Option<&DeviceSlice> {
        (self.device_bytes()? as &dyn Any).downcast_ref()
    }
}
