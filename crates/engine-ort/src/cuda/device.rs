//! A GPU of this process.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute};
use downbeat_engine::StreamPriority;

use super::CudaError;

/// A GPU, with the process's context on it: the primary one, which onnxruntime uses too.
pub struct Device {
    ordinal: u32,
    handle: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    compute_units: u32,
    memory: u64,
    /// The error that took the device out of service.
    lost: OnceLock<CudaError>,
}

// SAFETY: the context may be used from any thread that makes it current.
unsafe impl Send for Device {}
// SAFETY: as above; the driver synchronises its calls.
unsafe impl Sync for Device {}

/// The devices in use, so that all users of a device see when it is lost.
static DEVICES: Mutex<BTreeMap<u32, Weak<Device>>> = Mutex::new(BTreeMap::new());

/// Takes a device out of service for all its users, because the driver reports a final error. The
/// effect is that of a call that fails for good. `name` and `words` describe the error.
pub fn condemn(ordinal: u32, name: &str, words: &str) {
    let device = DEVICES.lock().unwrap_or_else(PoisonError::into_inner).get(&ordinal).and_then(Weak::upgrade);
    if let Some(device) = device {
        let what = "as the driver reports".to_owned();
        device.remember(CudaError::Lost { device: ordinal, what, name: name.to_owned(), words: words.to_owned() });
    }
}

impl Device {
    /// The device with this number. The driver must be loaded and initialised
    /// ([`crate::preflight`]).
    ///
    /// # Errors
    /// If the device does not exist, or has no memory left for a context.
    pub fn open(ordinal: u32) -> Result<Arc<Device>, CudaError> {
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let error = |e| CudaError::new(ordinal, "making a context", e);
        let index = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let handle = result::device::get(index).map_err(error)?;
        let name = result::device::get_name(handle).map_err(error)?;
        // SAFETY: the handle is of a device.
        let attribute = |which| unsafe { result::device::get_attribute(handle, which) }.map(|n| n.max(0) as u32);
        let units = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).map_err(error)?;
        // SAFETY: as above.
        let memory = unsafe { result::device::total_mem(handle) }.map_err(error)? as u64;
        // SAFETY: as above; released when the device is dropped.
        let context = unsafe { result::primary_ctx::retain(handle) }.map_err(error)?;
        let device = Device { ordinal, handle, context, name, compute_units: units, memory, lost: OnceLock::new() };
        device.bind()?;
        device.keep_freed_memory();
        let device = Arc::new(device);
        devices.insert(ordinal, Arc::downgrade(&device));
        Ok(device)
    }

    /// Makes the driver's pool keep freed memory. By default the pool returns all of it to the
    /// system at each synchronisation. If the driver refuses, allocations are slower.
    fn keep_freed_memory(&self) {
        // SAFETY: the handle is of a device; the attribute is 64 bits wide, and read before the
        // call returns.
        let set = unsafe {
            result::device::get_default_mem_pool(self.handle).and_then(|pool| {
                let mut all = u64::MAX;
                let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
                sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut all).cast()).result()
            })
        };
        if let Err(error) = set {
            tracing::debug!(gpu = self.ordinal, %error, "the driver's memory pool keeps nothing");
        }
    }

    /// The driver's number of the device.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of its compute units (SMs).
    pub fn compute_units(&self) -> u32 {
        self.compute_units
    }

    /// Its whole memory, bytes.
    pub fn memory(&self) -> u64 {
        self.memory
    }

    /// Memory that no process uses, bytes.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn free_memory(&self) -> Result<u64, CudaError> {
        self.bind()?;
        self.check("asking for its free memory", result::mem_get_info()).map(|(free, _)| free as u64)
    }

    /// The error that took the device out of service; `None`: it works.
    pub fn lost(&self) -> Option<&CudaError> {
        self.lost.get()
    }

    /// Makes this the device of the calling thread. It comes before every call of the driver, as a
    /// thread may serve several devices. If nothing changes, it costs a comparison in the driver.
    ///
    /// # Errors
    /// If the device is lost.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        if let Some(lost) = self.lost.get() {
            return Err(lost.clone());
        }
        // SAFETY: the context lives as long as `self`.
        self.check("selecting it", unsafe { result::ctx::set_current(self.context) })
    }

    /// A stream priority in the driver's numbers: a lower number is a higher priority.
    pub(super) fn priority(&self, priority: StreamPriority) -> Result<i32, CudaError> {
        self.bind()?;
        let asked = result::stream::get_priority_range();
        let (least, greatest) = self.check("asking for the priorities of its streams", asked)?;
        Ok(match priority {
            StreamPriority::Default => 0,
            StreamPriority::Max => greatest,
            StreamPriority::Min => least,
        })
    }

    /// Gives a resource back to the driver. A lost device may still take it back; if it does not,
    /// the failure is ignored.
    pub(super) fn release<T>(&self, give_back: impl FnOnce() -> Result<T, DriverError>) {
        // SAFETY: the context lives as long as `self`.
        let _ = unsafe { result::ctx::set_current(self.context) };
        let _ = give_back();
    }

    /// Turns the driver's answer into a result, and remembers if the device is lost.
    pub(crate) fn check<T>(&self, what: &str, answer: Result<T, DriverError>) -> Result<T, CudaError> {
        answer.map_err(|error| self.remember(CudaError::new(self.ordinal, what, error)))
    }

    /// Remembers the error if it is final.
    fn remember(&self, error: CudaError) -> CudaError {
        if matches!(error, CudaError::Lost { .. }) && self.lost.set(error.clone()).is_ok() {
            tracing::error!("{error}");
        }
        error
    }

    /// Checks that the device still works, after a library failed on it with an error of its own.
    pub(crate) fn probe(&self) -> Result<(), CudaError> {
        self.bind()?;
        // After a final error every call returns that error.
        self.check("using it", result::mem_get_info()).map(|_| ())
    }

    pub(super) fn handle(&self) -> sys::CUdevice {
        self.handle
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained in `open`, released once; each object in the context kept the device
        // alive.
        let _ = unsafe { result::primary_ctx::release(self.handle) };
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU {} ({})", self.ordinal, self.name)
    }
}
