//! Partitions: compute units of a device that only some streams use (GSLICE §4; green contexts of the CUDA driver).
//!
//! A partition cannot be resized. So a ladder of them is made beforehand, and a model that is to have more or fewer units is run on other streams: no
//! process is started, no weight is loaded, nothing waits (GSLICE §4.3 needs a shadow process for it, as MPS fixes the share of a process).
//!
//! The units are parted once, into the smallest groups that the device has, and a partition is a run of these: partitions without a group in common have no
//! unit in common. What comes out of a split cannot be split again without a green context, what comes out of two splits cannot be put together (cuda.h, at
//! `cuDevSmResourceSplitByCount` and `cuDevResourceGenerateDesc`), and nothing says that two splits part the device alike.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevResourceType, CUgreenCtxCreate_flags};

use super::{CudaError, Device, DriverVersion};

/// The driver's first version with green contexts.
const GREEN_CONTEXTS: i32 = 12_040;

/// Why there are no partitions, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PartitionError(String);

impl From<CudaError> for PartitionError {
    fn from(error: CudaError) -> Self {
        PartitionError(error.into())
    }
}

impl PartitionError {
    fn unsupported(device: &Device, reason: &str) -> PartitionError {
        let device = device.ordinal();
        PartitionError(format!("GPU {device} cannot be partitioned ({reason}); all lanes share the whole device"))
    }

    /// The device was not divided into as many ([`crate::Engine::divide`]).
    pub(crate) fn no_part(device: &Device, parts: usize, part: u32) -> PartitionError {
        let device = device.ordinal();
        PartitionError(format!("GPU {device} is divided into {parts} partitions; there is none with the number {part}"))
    }
}

/// Some of the compute units of a device.
pub struct Partition {
    device: Arc<Device>,
    compute_units: u32,
    context: Mutex<GreenContext>,
}

/// A green context, which may be used by one thread at a time (cuda.h, at `CUgreenCtx`).
struct GreenContext(sys::CUgreenCtx);

// SAFETY: any thread may use it, one at a time, which is why `Partition` has it behind a mutex.
unsafe impl Send for GreenContext {}

impl Partition {
    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// How many units it has: at least what was asked for.
    pub fn compute_units(&self) -> u32 {
        self.compute_units
    }

    fn context(&self) -> MutexGuard<'_, GreenContext> {
        self.context.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A stream of it with a priority as the driver counts, to be given back by [`Partition::destroy`].
    pub(super) fn stream(&self, priority: i32) -> Result<sys::CUstream, CudaError> {
        self.device.bind()?;
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let context = self.context();
        // SAFETY: the context is alive; `stream` is written if the call succeeds.
        let made = unsafe { sys::cuGreenCtxStreamCreate(&raw mut stream, context.0, flags, priority).result() };
        self.device.check("making a stream of a partition", made)?;
        Ok(stream)
    }

    /// Destroys a stream of it.
    ///
    /// # Safety
    /// It is one of this partition, and not used any more.
    pub(super) unsafe fn destroy(&self, stream: sys::CUstream) {
        let _context = self.context();
        // SAFETY: as the caller says.
        self.device.release(|| unsafe { result::stream::destroy(stream) });
    }
}

impl Drop for Partition {
    fn drop(&mut self) {
        let context = self.context.get_mut().unwrap_or_else(PoisonError::into_inner).0;
        // SAFETY: made by `Splitter`, destroyed once; its streams keep it alive.
        self.device.release(|| unsafe { sys::cuGreenCtxDestroy(context).result() });
    }
}

impl std::fmt::Debug for Partition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Partition({:?}, {} units)", self.device, self.compute_units)
    }
}

/// The compute units of a device in groups, and partitions of runs of these.
pub struct Splitter {
    device: Arc<Device>,
    grain: u32,
    /// The groups, in the order of the driver; behind them what was left over, if it may be used with them.
    resources: Vec<sys::CUdevResource>,
    groups: usize,
}

impl Splitter {
    /// Parts the device into groups.
    ///
    /// # Errors
    /// If the driver or the device has no partitions.
    pub fn new(device: &Arc<Device>) -> Result<Splitter, PartitionError> {
        let mut version = 0;
        // SAFETY: `version` is written if the call succeeds.
        device
            .check("asking for the driver's version", unsafe { sys::cuDriverGetVersion(&raw mut version).result() })?;
        if version < GREEN_CONTEXTS {
            return Err(PartitionError(format!(
                "the NVIDIA driver has no partitions (it is for CUDA {}, they came with {}); all lanes share the whole device",
                DriverVersion(version),
                DriverVersion(GREEN_CONTEXTS)
            )));
        }
        device.bind()?;
        let mut whole = none();
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
        let mut groups = units.smCount / grain;
        let (mut resources, mut rest) = (vec![none(); groups as usize], none());
        // SAFETY: there is room for as many groups as said; all are written if the call succeeds.
        let split = unsafe {
            sys::cuDevSmResourceSplitByCount(
                resources.as_mut_ptr(),
                &raw mut groups,
                &raw const whole,
                &raw mut rest,
                0,
                grain,
            )
            .result()
        };
        supported(device, "parting its compute units", split)?;
        // There may be fewer than the number of units says: a group lies in one of the device's clusters.
        resources.truncate(groups as usize);
        let mut splitter = Splitter { device: device.clone(), grain, groups: resources.len(), resources };
        let Some(last) = splitter.resources.last() else {
            return Err(PartitionError::unsupported(device, "the driver gave no group of compute units"));
        };
        // What was left over may have been left for not being alike.
        if count(&rest) > 0 && alignment(&rest) == alignment(last) && splitter.describe(&mut [*last, rest]).is_ok() {
            splitter.resources.push(rest);
        }
        Ok(splitter)
    }

    /// The smallest step in which units are given out, which is also the smallest partition.
    pub fn grain(&self) -> u32 {
        self.grain
    }

    /// How many groups there are. Each has [`Splitter::grain`] units, the last one also those that make no group.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// How many groups, from the first, have at least so many units together.
    ///
    /// # Errors
    /// If all do not.
    pub fn groups_of(&self, units: u32) -> Result<usize, PartitionError> {
        self.end(0, units).ok_or_else(|| self.too_large(&[units]))
    }

    /// The end of the shortest run of groups from `begin` that has at least so many units, and one group.
    fn end(&self, begin: usize, units: u32) -> Option<usize> {
        (begin + 1..=self.groups).find(|end| self.run(begin..*end).iter().map(count).sum::<u32>() >= units)
    }

    fn run(&self, groups: Range<usize>) -> &[sys::CUdevResource] {
        let end = if groups.end == self.groups { self.resources.len() } else { groups.end };
        self.resources.get(groups.start..end).unwrap_or_default()
    }

    pub(crate) fn too_large(&self, asked: &[u32]) -> PartitionError {
        let (device, units, grain) = (self.device.ordinal(), self.device.compute_units(), self.grain);
        PartitionError(format!(
            "partitions of {asked:?} compute units do not fit GPU {device}, which has {units} in steps of {grain}"
        ))
    }

    /// Partitions with at least so many units each, in order, which have no unit in common; what is left over is the last one, if there is anything.
    ///
    /// # Errors
    /// If there are not as many units, or the driver refuses.
    pub fn split(&self, units: &[u32]) -> Result<Vec<Arc<Partition>>, PartitionError> {
        let (mut runs, mut begin) = (Vec::with_capacity(units.len() + 1), 0);
        for wanted in units {
            let end = self.end(begin, *wanted).ok_or_else(|| self.too_large(units))?;
            runs.push(begin..end);
            begin = end;
        }
        if begin < self.groups {
            runs.push(begin..self.groups);
        }
        runs.into_iter().map(|run| self.partition(run)).collect()
    }

    /// For each number of groups but all, a partition of the first so many and one of the others: for two models that share a device, any share of the one is
    /// a pair of these, and another share is another pair. Those that the driver refuses are errors, and cost no other.
    pub fn ladder(&self) -> Vec<Result<Rung, PartitionError>> {
        let rung =
            |groups| Ok(Rung { partition: self.partition(0..groups)?, rest: self.partition(groups..self.groups)? });
        (1..self.groups).map(rung).collect()
    }

    /// A partition of a run of groups, which is not empty. One of other groups has no unit in common with it.
    ///
    /// # Errors
    /// If there are no such groups, or the driver refuses.
    pub fn partition(&self, groups: Range<usize>) -> Result<Arc<Partition>, PartitionError> {
        let mut resources = self.run(groups).to_vec();
        let compute_units = resources.iter().map(count).sum();
        let description = self.describe(&mut resources)?;
        let mut context = std::ptr::null_mut();
        let flags = CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        // SAFETY: the description is the driver's; `context` is written if the call succeeds.
        let made =
            unsafe { sys::cuGreenCtxCreate(&raw mut context, description, self.device.handle(), flags).result() };
        supported(&self.device, &format!("making a partition of {compute_units} compute units"), made)?;
        Ok(Arc::new(Partition {
            device: self.device.clone(),
            compute_units,
            context: Mutex::new(GreenContext(context)),
        }))
    }

    /// What a green context is made of; the driver keeps it as long as the process lives.
    fn describe(&self, resources: &mut [sys::CUdevResource]) -> Result<sys::CUdevResourceDesc, PartitionError> {
        self.device.bind()?;
        let mut description = std::ptr::null_mut();
        let count = u32::try_from(resources.len()).unwrap_or(u32::MAX);
        // SAFETY: as many resources as said; `description` is written if the call succeeds.
        let made =
            unsafe { sys::cuDevResourceGenerateDesc(&raw mut description, resources.as_mut_ptr(), count).result() };
        supported(&self.device, "putting compute units together", made)?;
        Ok(description)
    }
}

/// A step of [`Splitter::ladder`].
#[derive(Clone, Debug)]
pub struct Rung {
    /// A partition.
    pub partition: Arc<Partition>,
    /// The units that it leaves.
    pub rest: Arc<Partition>,
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

/// In what numbers its units are scheduled together.
fn alignment(resource: &sys::CUdevResource) -> u32 {
    match resource.type_ {
        // SAFETY: it is of this kind.
        CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM => unsafe { resource.__bindgen_anon_1.sm.smCoscheduledAlignment },
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
            Err(PartitionError::unsupported(device, &CudaError::new(device.ordinal(), what, error).to_string()))
        }
        answer => Ok(device.check(what, answer)?),
    }
}
