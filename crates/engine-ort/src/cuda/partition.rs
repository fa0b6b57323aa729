//! Partitions: compute units of a device that only some streams use (GSLICE §4; green contexts of
//! the CUDA driver).
//!
//! A partition cannot be resized, so a ladder of partitions is made beforehand. To get more or
//! fewer units, a model moves to other streams. The move starts no process, loads no weights and
//! waits for nothing. (GSLICE §4.3 needs a shadow process, as MPS fixes the share of a process.)
//!
//! The units are divided once, into the smallest groups that the device has, and a partition is a
//! run of these groups. Partitions without a common group have no common unit. The parts of a split
//! cannot be split again without a green context. Parts of two splits cannot be combined (cuda.h,
//! at `cuDevSmResourceSplitByCount` and `cuDevResourceGenerateDesc`), and two splits may divide the
//! device differently.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevResourceType, CUgreenCtxCreate_flags};

use super::{CudaError, Device, DriverVersion};

/// The driver's first version with green contexts.
const GREEN_CONTEXTS: i32 = 12_040;

/// The reason why there are no partitions, in words.
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

    /// The error for a partition number that the device's division ([`downbeat_engine::Engine::divide`]) does
    /// not have.
    pub(crate) fn no_part(device: &Device, parts: usize, part: u32) -> PartitionError {
        let device = device.ordinal();
        PartitionError(format!("GPU {device} is divided into {parts} partitions; there is none with the number {part}"))
    }
}

/// A share of the compute units of a device.
pub struct Partition {
    device: Arc<Device>,
    compute_units: u32,
    context: Mutex<GreenContext>,
}

/// A green context, which only one thread at a time may use (cuda.h, at `CUgreenCtx`).
struct GreenContext(sys::CUgreenCtx);

// SAFETY: any thread may use it, one at a time, which is why `Partition` keeps it in a mutex.
unsafe impl Send for GreenContext {}

impl Partition {
    /// The partition's device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The number of its units: at least the requested number.
    pub fn compute_units(&self) -> u32 {
        self.compute_units
    }

    fn context(&self) -> MutexGuard<'_, GreenContext> {
        self.context.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a stream on the partition, with a priority in the driver's numbers.
    /// [`Partition::destroy`] gives it back.
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

    /// Destroys a stream of the partition.
    ///
    /// # Safety
    /// The stream must belong to this partition, and must not be used afterwards.
    pub(super) unsafe fn destroy(&self, stream: sys::CUstream) {
        let _context = self.context();
        // SAFETY: the caller's promise.
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

/// The compute units of a device in groups, from whose runs partitions are made.
pub struct Splitter {
    device: Arc<Device>,
    grain: u32,
    /// The groups, in the order of the driver. The units that make no group follow if a partition
    /// may use them together.
    resources: Vec<sys::CUdevResource>,
    groups: usize,
}

impl Splitter {
    /// Divides the device into groups.
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
        // SAFETY: it is of the requested kind.
        let units = unsafe { whole.__bindgen_anon_1.sm };
        // Drivers before CUDA 13 leave these at 0; 8 is the grain of Hopper, and a multiple of that
        // of older devices.
        let grain = match units.minSmPartitionSize.max(units.smCoscheduledAlignment) {
            0 => 8,
            grain => grain,
        };
        let mut groups = units.smCount / grain;
        let (mut resources, mut rest) = (vec![none(); groups as usize], none());
        // SAFETY: there is room for `groups` groups; all are written if the call succeeds.
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
        // There may be fewer groups than the number of units suggests: each group lies in one of
        // the device's clusters.
        resources.truncate(groups as usize);
        let mut splitter = Splitter { device: device.clone(), grain, groups: resources.len(), resources };
        let Some(last) = splitter.resources.last() else {
            return Err(PartitionError::unsupported(device, "the driver gave no group of compute units"));
        };
        // The units of the rest may be of a kind that no partition can combine with the groups.
        if count(&rest) > 0 && alignment(&rest) == alignment(last) && splitter.describe(&mut [*last, rest]).is_ok() {
            splitter.resources.push(rest);
        }
        Ok(splitter)
    }

    /// The smallest step in which units can be given out, which is also the smallest partition.
    pub fn grain(&self) -> u32 {
        self.grain
    }

    /// The number of groups. Each has [`Splitter::grain`] units. The last one also has the units
    /// that make no group.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// The smallest number of groups, from the first, that have at least this many units together.
    ///
    /// # Errors
    /// If all groups together have fewer.
    pub fn groups_of(&self, units: u32) -> Result<usize, PartitionError> {
        self.end(0, units).ok_or_else(|| self.too_large(&[units]))
    }

    /// The end of the shortest run of groups from `begin` that has at least one group and this many
    /// units.
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

    /// Partitions with at least this many units each, in order, without a common unit. If units are
    /// left over, they are the last partition.
    ///
    /// # Errors
    /// If there are not enough units, or the driver refuses.
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

    /// For each number of groups but all, a pair: a partition of that many first groups, and one of
    /// the others. Two models that share a device use such a pair, and get other shares from
    /// another pair. If the driver refuses a pair, only that one is an error.
    pub fn ladder(&self) -> Vec<Result<Rung, PartitionError>> {
        let rung =
            |groups| Ok(Rung { partition: self.partition(0..groups)?, rest: self.partition(groups..self.groups)? });
        (1..self.groups).map(rung).collect()
    }

    /// A partition of a run of groups, which must not be empty. Partitions of other groups have no
    /// common unit with this one.
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

    /// A description of a green context; the driver keeps it as long as the process lives.
    fn describe(&self, resources: &mut [sys::CUdevResource]) -> Result<sys::CUdevResourceDesc, PartitionError> {
        self.device.bind()?;
        let mut description = std::ptr::null_mut();
        let count = u32::try_from(resources.len()).unwrap_or(u32::MAX);
        // SAFETY: `count` is the number of resources; `description` is written if the call
        // succeeds.
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
    /// The remaining units.
    pub rest: Arc<Partition>,
}

fn none() -> sys::CUdevResource {
    // SAFETY: plain data, for which zeros are valid: the type is then "invalid".
    unsafe { std::mem::zeroed() }
}

/// The number of units of a resource.
fn count(resource: &sys::CUdevResource) -> u32 {
    match resource.type_ {
        // SAFETY: the resource is of this kind.
        CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM => unsafe { resource.__bindgen_anon_1.sm.smCount },
        CUdevResourceType::CU_DEV_RESOURCE_TYPE_INVALID => 0,
    }
}

/// The number of units that are scheduled together.
fn alignment(resource: &sys::CUdevResource) -> u32 {
    match resource.type_ {
        // SAFETY: the resource is of this kind.
        CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM => unsafe { resource.__bindgen_anon_1.sm.smCoscheduledAlignment },
        CUdevResourceType::CU_DEV_RESOURCE_TYPE_INVALID => 0,
    }
}

/// The driver's answer. The error separates an unsupported call from a failed one.
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
