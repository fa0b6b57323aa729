//! Partitions: compute units of a device that only some streams use (GSLICE §4; green contexts of the CUDA driver).
//!
//! A partition cannot be resized. So a ladder of them is made beforehand, and a model that is to have more or fewer units is run on other streams: no
//! process is started, no weight is loaded, nothing waits (GSLICE §4.3 needs a shadow process for it, as MPS fixes the share of a process).

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevResourceType, CUgreenCtxCreate_flags};

use super::{CudaError, Device};

/// The driver's first version with green contexts.
const GREEN_CONTEXTS: i32 = 12_040;

/// Why there are no partitions.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartitionError {
    /// The driver is too old.
    #[error(
        "the NVIDIA driver has no partitions (it is for CUDA {}.{}, they came with {}.{}); all lanes share the whole device",
        version / 1000, version % 1000 / 10, GREEN_CONTEXTS / 1000, GREEN_CONTEXTS % 1000 / 10
    )]
    TooOld {
        /// Its version, as CUDA counts: 12040 is 12.4.
        version: i32,
    },
    /// The device has none.
    #[error("GPU {device} cannot be partitioned ({reason}); all lanes share the whole device")]
    Unsupported {
        /// Its ordinal.
        device: u32,
        /// The driver's words.
        reason: String,
    },
    /// More units than there are.
    #[error("partitions of {asked:?} compute units do not fit GPU {device}, which has {units} in steps of {grain}")]
    TooLarge {
        /// Its ordinal.
        device: u32,
        /// What was asked for.
        asked: Vec<u32>,
        /// Its units.
        units: u32,
        /// The smallest step.
        grain: u32,
    },
    /// The driver refuses otherwise.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// Some of the compute units of a device.
pub struct Partition {
    device: Arc<Device>,
    context: sys::CUgreenCtx,
    compute_units: u32,
}

// SAFETY: a green context may be used from any thread; the driver synchronises its calls.
unsafe impl Send for Partition {}
// SAFETY: as above.
unsafe impl Sync for Partition {}

impl Partition {
    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// How many units it has: at least what was asked for.
    pub fn compute_units(&self) -> u32 {
        self.compute_units
    }

    /// A stream of it, to be destroyed by the caller.
    pub(super) fn stream(&self) -> Result<sys::CUstream, CudaError> {
        self.device.bind()?;
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is alive; `stream` is written if the call succeeds.
        let made = unsafe { sys::cuGreenCtxStreamCreate(&raw mut stream, self.context, flags, 0).result() };
        self.device.check("making a stream of a partition", made)?;
        Ok(stream)
    }
}

impl Drop for Partition {
    fn drop(&mut self) {
        // SAFETY: made by `Splitter`, destroyed once; its streams keep it alive.
        self.device.release(|| unsafe { sys::cuGreenCtxDestroy(self.context).result() });
    }
}

impl std::fmt::Debug for Partition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Partition({:?}, {} units)", self.device, self.compute_units)
    }
}

/// Parts the compute units of a device.
#[derive(Clone)]
pub struct Splitter {
    device: Arc<Device>,
    whole: sys::CUdevResource,
    grain: u32,
}

impl Splitter {
    /// Asks the device what it can be parted into.
    ///
    /// # Errors
    /// If the driver or the device has no partitions.
    pub fn new(device: &Arc<Device>) -> Result<Splitter, PartitionError> {
        let mut version = 0;
        // SAFETY: `version` is written if the call succeeds.
        device
            .check("asking for the driver's version", unsafe { sys::cuDriverGetVersion(&raw mut version).result() })?;
        if version < GREEN_CONTEXTS {
            return Err(PartitionError::TooOld { version });
        }
        device.bind()?;
        // SAFETY: plain data, for which zeros are valid: the type is then "invalid".
        let mut whole: sys::CUdevResource = unsafe { std::mem::zeroed() };
        let kind = CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        // SAFETY: `whole` is written if the call succeeds.
        let asked = unsafe { sys::cuDeviceGetDevResource(device.handle(), &raw mut whole, kind).result() };
        supported(device, "asking for its compute units", asked)?;
        // SAFETY: it is of the kind that was asked for.
        let units = unsafe { whole.__bindgen_anon_1.sm };
        // Drivers before CUDA 13 leave these at 0; 8 is the grain of Hopper, and a multiple of that of older devices.
        let grain = match units.minSmPartitionSize.max(units.smCoscheduledAlignment) {
            0 => 8,
            grain => grain,
        };
        Ok(Splitter { device: device.clone(), whole, grain })
    }

    /// The smallest step in which units are given out, which is also the smallest partition.
    pub fn grain(&self) -> u32 {
        self.grain
    }

    /// Disjoint partitions with at least so many units each, rounded up to the grain, in order; what is left over is the last one, if there is anything.
    ///
    /// # Errors
    /// If there are not as many units, or the driver refuses.
    pub fn split(&self, units: &[u32]) -> Result<Vec<Arc<Partition>>, PartitionError> {
        let mut left = self.whole;
        let mut parts = Vec::with_capacity(units.len() + 1);
        for wanted in units {
            let wanted = wanted.max(&1).next_multiple_of(self.grain);
            if wanted > count(&left) {
                return Err(PartitionError::TooLarge {
                    device: self.device.ordinal(),
                    asked: units.to_vec(),
                    units: self.device.compute_units(),
                    grain: self.grain,
                });
            }
            if wanted == count(&left) {
                parts.push(self.partition(left)?);
                left = none();
                continue;
            }
            self.device.bind()?;
            let (mut part, mut groups, mut rest) = (none(), 1, none());
            // SAFETY: there is room for one group, as said; all are written if the call succeeds.
            let split = unsafe {
                sys::cuDevSmResourceSplitByCount(
                    &raw mut part,
                    &raw mut groups,
                    &raw const left,
                    &raw mut rest,
                    0,
                    wanted,
                )
                .result()
            };
            supported(&self.device, "parting its compute units", split)?;
            parts.push(self.partition(part)?);
            left = rest;
        }
        if count(&left) >= self.grain {
            parts.push(self.partition(left)?);
        }
        Ok(parts)
    }

    /// Partitions of every size that the grain allows, each with what it leaves: for two models that share a device, any share of the one is a pair of
    /// these, and another share is another pair.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn ladder(&self) -> Result<Vec<Rung>, PartitionError> {
        let mut rungs = Vec::new();
        let mut units = self.grain;
        while units < self.device.compute_units() {
            let mut parts = self.split(&[units])?.into_iter();
            rungs.extend(parts.next().map(|partition| Rung { partition, rest: parts.next() }));
            units += self.grain;
        }
        Ok(rungs)
    }

    fn partition(&self, mut resource: sys::CUdevResource) -> Result<Arc<Partition>, PartitionError> {
        self.device.bind()?;
        let compute_units = count(&resource);
        let (mut description, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        let flags = CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        // SAFETY: one resource, as said; the description is the driver's; what is asked for is written if a call succeeds.
        let made = unsafe {
            sys::cuDevResourceGenerateDesc(&raw mut description, &raw mut resource, 1).result().and_then(|()| {
                sys::cuGreenCtxCreate(&raw mut context, description, self.device.handle(), flags).result()
            })
        };
        supported(&self.device, "making a partition", made)?;
        Ok(Arc::new(Partition { device: self.device.clone(), context, compute_units }))
    }
}

/// A step of [`Splitter::ladder`].
#[derive(Clone, Debug)]
pub struct Rung {
    /// A partition.
    pub partition: Arc<Partition>,
    /// The units that it leaves, if they are enough for one.
    pub rest: Option<Arc<Partition>>,
}

fn none() -> sys::CUdevResource {
    // SAFETY: plain data, for which zeros are valid: the type is then "invalid".
    unsafe { std::mem::zeroed() }
}

/// How many units a resource has.
fn count(resource: &sys::CUdevResource) -> u32 {
    match resource.type_ {
        // SAFETY: it is of this kind.
        CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM => unsafe { resource.__bindgen_anon_1.sm.smCount },
        CUdevResourceType::CU_DEV_RESOURCE_TYPE_INVALID => 0,
    }
}

/// The driver's answer, where "cannot" is told from "failed".
fn supported<T>(
    device: &Device,
    what: &str,
    answer: Result<T, cudarc::driver::DriverError>,
) -> Result<T, PartitionError> {
    use sys::CUresult as E;
    match answer {
        Err(error)
            if matches!(
                error.0,
                E::CUDA_ERROR_NOT_SUPPORTED
                    | E::CUDA_ERROR_INVALID_RESOURCE_TYPE
                    | E::CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION
            ) =>
        {
            let reason = CudaError::new(device.ordinal(), what, error).to_string();
            Err(PartitionError::Unsupported { device: device.ordinal(), reason })
        }
        answer => Ok(device.check(what, answer)?),
    }
}
