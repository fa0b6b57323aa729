//! Memory of a device.

use std::any::Any;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;

use super::ring::SlotReady;
use super::{CudaError, Device, Stream};

/// Tensors start at multiples of this: kernels load as much at once, 128 bits.
const TENSOR_ALIGNMENT: u64 = 16;

/// Where weights start, as the driver's own allocations do.
pub(crate) const WEIGHT_ALIGNMENT: usize = 256;

/// Memory of a device, owned.
pub(crate) struct DeviceAllocation {
    device: Arc<Device>,
    address: CUdeviceptr,
    len: usize,
    /// In whose order it was taken and is given back; `None`: at once.
    stream: Option<Arc<Stream>>,
}

impl DeviceAllocation {
    /// Uninitialised memory, for good: making it may hold up the device.
    pub(crate) fn new(device: &Arc<Device>, len: usize, what: &str) -> Result<DeviceAllocation, CudaError> {
        device.bind()?;
        // SAFETY: nothing is read from it before it is written: by whoever takes an address of it.
        let address = device.check(what, unsafe { result::malloc_sync(len.max(1)) })?;
        Ok(DeviceAllocation { device: device.clone(), address, len, stream: None })
    }

    /// Uninitialised memory for a launch, out of the driver's pool, in the order of a stream: other streams may use it from an event on that is
    /// recorded after this.
    pub(crate) fn in_stream(stream: &Arc<Stream>, len: usize, what: &str) -> Result<DeviceAllocation, CudaError> {
        let device = stream.device();
        device.bind()?;
        // SAFETY: as above; the stream is alive.
        let address = device.check(what, unsafe { result::malloc_async(stream.raw(), len.max(1)) })?;
        Ok(DeviceAllocation { device: device.clone(), address, len, stream: Some(stream.clone()) })
    }

    /// Where it is.
    pub(crate) fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Its bytes.
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
        // SAFETY: inside the memory, as just checked; the source stays, as the caller says.
        let copied = unsafe { result::memcpy_htod_async(self.address + offset as u64, source, stream.raw()) };
        self.device.check("copying to it", copied)
    }

    /// Enqueues a copy of other memory of the device to `offset`, which begins once that is written.
    ///
    /// # Safety
    /// The memory of `source` must not be given back before the copy is over.
    pub(crate) unsafe fn copy(&self, stream: &Stream, offset: usize, source: &DeviceSlice) -> Result<(), CudaError> {
        assert!(offset + source.len <= self.len, "a copy stays inside the memory");
        source.wait_in(stream)?;
        // SAFETY: inside both, of which the source stays, as the caller says.
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
        // SAFETY: inside the memory, which is given back after what is enqueued.
        let set = unsafe { result::memset_d8_async(self.address + offset as u64, 0, rest, stream.raw()) };
        self.device.check("clearing its memory", set)
    }

    /// All of it, shared.
    pub(crate) fn into_slice(self) -> DeviceSlice {
        let (device, address, len) = (self.device.clone(), self.address, self.len);
        DeviceSlice { device, address, len, ready: None, _owner: Arc::new(self) }
    }
}

impl Drop for DeviceAllocation {
    fn drop(&mut self) {
        match &self.stream {
            Some(stream) => stream.free(self.address),
            // SAFETY: taken by this type, given back once; nothing uses it any more, as launches keep what they use until they are over.
            None => self.device.release(|| unsafe { result::free_sync(self.address) }),
        }
    }
}

/// Bytes in the memory of a device, shared with all that were cut from the same. Nothing writes them, but for what is said by `ready`.
#[derive(Clone)]
pub(crate) struct DeviceSlice {
    device: Arc<Device>,
    address: CUdeviceptr,
    len: usize,
    /// What has to be over before they may be read; `None`: they are written.
    ready: Option<SlotReady>,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl DeviceSlice {
    /// `len` bytes at `address`, which are there as long as `owner`.
    ///
    /// # Safety
    /// They are in the memory of `device`, and nothing writes them while the slice or a part of it is alive, but what `ready` waits for.
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

    /// A part of it.
    pub(crate) fn part(&self, start: usize, end: usize) -> DeviceSlice {
        assert!(start <= end && end <= self.len, "a part is inside the whole");
        DeviceSlice { address: self.address + start as u64, len: end - start, ..self.clone() }
    }

    /// What is enqueued in `stream` from now on may read it.
    pub(crate) fn wait_in(&self, stream: &Stream) -> Result<(), CudaError> {
        match &self.ready {
            Some(ready) => stream.wait_for(ready.event()),
            None => self.device.bind(),
        }
    }

    /// Enqueues a copy to host memory.
    ///
    /// # Safety
    /// `to` must not be used, nor freed, before the copy is over, nor the last of these bytes' slices dropped.
    pub(crate) unsafe fn download(&self, stream: &Stream, to: &mut [u8]) -> Result<(), CudaError> {
        assert_eq!(to.len(), self.len, "a copy is as long as what is copied");
        self.wait_in(stream)?;
        // SAFETY: the bytes are there as long as the owner; the rest the caller says.
        let copied = unsafe { result::memcpy_dtoh_async(to, self.address, stream.raw()) };
        self.device.check("copying from it", copied)
    }

    /// A copy in host memory. Holds up the caller; launches use [`DeviceSlice::download`].
    pub(crate) fn fetch(&self) -> Result<Vec<u8>, CudaError> {
        let mut bytes = vec![0; self.len];
        if let Some(ready) = &self.ready {
            ready.event().wait()?;
        }
        self.device.bind()?;
        // SAFETY: the bytes are there and written, and the call returns when they are copied.
        let copied = unsafe { result::memcpy_dtoh_sync(&mut bytes, self.address) };
        self.device.check("copying from it", copied).map(|()| bytes)
    }
}

impl std::fmt::Debug for DeviceSlice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes on {:?}", self.len, self.device)
    }
}
