//! A GPU of the engine: the parts that all its models share.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use downbeat_engine::division::DivisionError;
use downbeat_engine::{Share, StreamPriority};
use ort::sys;

use super::super::value::MemoryInfo;
use crate::cuda::{CudaError, Device, ForgetsLastError, Partition, PartitionError, PinnedPool, Splitter, Stream};

/// The parts of a GPU that all its models share.
pub(super) struct Gpu {
    pub device: Arc<Device>,
    /// Host memory for copies.
    pub pinned: Arc<PinnedPool>,
    /// Whether the driver is the stand-in of the tests, on which the library's host kernels run, as
    /// it has none for the device.
    pub has_host_kernels: bool,
    partitions: Mutex<Partitions>,
    turn: Mutex<()>,
}

/// The partitions of a GPU. Each is made once, as it takes memory of the device. All come from one
/// splitter, so that separate shares have no common unit.
#[derive(Default)]
struct Partitions {
    splitter: Option<Splitter>,
    /// By the first group and the end of the groups.
    made: BTreeMap<(usize, usize), Arc<Partition>>,
    /// The partitions that the GPU was divided into.
    parts: Vec<Arc<Partition>>,
}

impl Partitions {
    fn splitter(&mut self, device: &Arc<Device>) -> Result<&Splitter, PartitionError> {
        Ok(match &mut self.splitter {
            Some(splitter) => splitter,
            none => none.insert(Splitter::new(device)?),
        })
    }
}

impl Gpu {
    pub(super) fn open(ordinal: u32, has_host_kernels: bool) -> Result<Gpu, CudaError> {
        let device = Device::open(ordinal)?;
        Ok(Gpu {
            pinned: PinnedPool::new(&device),
            has_host_kernels,
            partitions: Mutex::default(),
            turn: Mutex::default(),
            device,
        })
    }

    /// The turn for making or dropping a session, or recording a graph. The library waits for the
    /// whole device when it makes or drops a session. Such a wait would break a recording.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the turn is taken: a load takes it for seconds.
    pub(super) fn turn_is_taken(&self) -> bool {
        matches!(self.turn.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Makes this the GPU of the calling thread, for the library too. An error that the library
    /// left on another GPU must not appear on this one.
    pub(super) fn enter(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        if !self.has_host_kernels {
            drop(ForgetsLastError);
        }
        Ok(())
    }

    /// A stream for a lane on this share.
    pub(super) fn stream(&self, share: Share, priority: StreamPriority) -> Result<Arc<Stream>, PartitionError> {
        let partition = self.partition(share)?;
        Ok(Stream::with_priority(&self.device, partition.as_ref(), priority)?)
    }

    /// Divides the GPU into partitions. The closure `units` gets the splitter, and returns the
    /// units of each. Units that are left over are in no partition. Returns the actual units of
    /// each.
    pub(super) fn divide(
        &self,
        units: impl FnOnce(&Splitter) -> Result<Vec<u32>, DivisionError>,
    ) -> Result<Vec<u32>, DivisionError> {
        let refused = |error: PartitionError| DivisionError::new(error.to_string());
        let mut partitions = self.partitions();
        let splitter = partitions.splitter(&self.device).map_err(refused)?;
        let units = units(splitter)?;
        let mut parts = splitter.split(&units).map_err(refused)?;
        parts.truncate(units.len());
        partitions.parts = parts;
        Ok(partitions.parts.iter().map(|part| part.compute_units()).collect())
    }

    fn partitions(&self) -> MutexGuard<'_, Partitions> {
        self.partitions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The partition of a share; `None`: the whole device.
    fn partition(&self, share: Share) -> Result<Option<Arc<Partition>>, PartitionError> {
        let mut partitions = self.partitions();
        let units = match share {
            Share::Units(units) | Share::AllBut(units) => units,
            Share::Part(part) => {
                let parts = &partitions.parts;
                let missing = || PartitionError::no_part(&self.device, parts.len(), part);
                return parts.get(part as usize).cloned().map(Some).ok_or_else(missing);
            }
            // Cores belong to the CPU.
            Share::Whole | Share::Cores(_) => return Ok(None),
        };
        let splitter = partitions.splitter(&self.device)?;
        let (first, all) = (splitter.groups_of(units)?, splitter.groups());
        let groups = if let Share::AllBut(_) = share { first..all } else { 0..first };
        if groups.is_empty() {
            return Err(splitter.too_large(&[units, 1]));
        }
        let key = (groups.start, groups.end);
        if let Some(partition) = partitions.made.get(&key) {
            return Ok(Some(partition.clone()));
        }
        let partition = partitions.splitter(&self.device)?.partition(groups)?;
        partitions.made.insert(key, partition.clone());
        Ok(Some(partition))
    }

    /// The C API's description of the GPU's memory, or of plain memory if the driver is the
    /// stand-in.
    pub(super) fn memory_info(&self) -> Result<MemoryInfo, String> {
        if self.has_host_kernels {
            return MemoryInfo::cpu();
        }
        let device = c_int::try_from(self.device.ordinal()).unwrap_or(c_int::MAX);
        MemoryInfo::new(c"Cuda", device, sys::OrtAllocatorType::OrtDeviceAllocator)
    }

    /// The library's words about a failure. If the device is lost or out of memory, its own words
    /// replace them, and the flag is true.
    pub(super) fn explain(&self, words: String) -> (String, bool) {
        if let Err(lost @ CudaError::Lost { .. }) = self.device.probe() {
            return (lost.to_string(), true);
        }
        let is_memory = [
            "Failed to allocate memory",
            "out of memory",
            "CUDA failure 2:",
            "Available memory of",
            "CUBLAS failure 3",
            "ALLOCATION_FAILED",
            "ALLOC_FAILED",
        ];
        if is_memory.iter().any(|text| words.contains(text)) {
            let free =
                self.device.free_memory().map_or_else(|_| String::new(), |free| format!(", {} MiB free", free >> 20));
            let words = format!(
                "GPU {} is out of memory ({} MiB{free}). Serve fewer or smaller models on it, smaller batches, or set a larger cuda.memory_limit_mb if there \
                 is one. onnxruntime said: {words}",
                self.device.ordinal(),
                self.device.memory() >> 20
            );
            return (words, true);
        }
        (words, false)
    }
}
