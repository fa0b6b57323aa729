//! A GPU as the engine uses it: what all models on it share.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use ort::sys;

use super::super::value::MemoryInfo;
use crate::cuda::{CudaError, Device, ForgetsLastError, Partition, PartitionError, PinnedPool, Splitter, Stream};
use crate::division::DivisionError;
use crate::traits::{Share, StreamPriority};

/// What all models on a GPU share.
pub(super) struct Gpu {
    pub device: Arc<Device>,
    /// Host memory for copies.
    pub pinned: Arc<PinnedPool>,
    /// Whether the driver is the stand-in of the tests and the library's kernels for the host run there, as it has none for the device.
    pub has_host_kernels: bool,
    partitions: Mutex<Partitions>,
    turn: Mutex<()>,
}

/// The partitions of a GPU, made once, as each takes memory of the device: all out of one splitter, so that shares that are to be apart are.
#[derive(Default)]
struct Partitions {
    splitter: Option<Splitter>,
    /// By their first group and the end of their groups.
    made: BTreeMap<(usize, usize), Arc<Partition>>,
    /// What the GPU was divided into.
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

    /// The turn of making or dropping a session, or recording a graph: the library waits for the whole device while it does the former, which neither may be done nor goes well
    /// where a stream is recorded.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether somebody has that turn: where a model is loaded, for seconds.
    pub(super) fn turn_is_taken(&self) -> bool {
        matches!(self.turn.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Makes this the GPU of the calling thread, for the library too: what it left undone on another one is not to be found here.
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

    /// Divides it into partitions of so many units each, as `units` says who is told the smallest step; what is left over is in none. Gives what they have.
    pub(super) fn divide(
        &self,
        units: impl FnOnce(&Splitter) -> Result<Vec<u32>, DivisionError>,
    ) -> Result<Vec<u32>, DivisionError> {
        let refused = |error: PartitionError| DivisionError(error.to_string());
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

    /// The partition that a share is; `None`: the whole device.
    fn partition(&self, share: Share) -> Result<Option<Arc<Partition>>, PartitionError> {
        let mut partitions = self.partitions();
        let units = match share {
            Share::Units(units) | Share::AllBut(units) => units,
            Share::Part(part) => {
                let parts = &partitions.parts;
                let missing = || PartitionError::no_part(&self.device, parts.len(), part);
                return parts.get(part as usize).cloned().map(Some).ok_or_else(missing);
            }
            // Cores are the CPU's.
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

    /// The C API's description of its memory, or of plain memory where the driver is a stand-in.
    pub(super) fn memory_info(&self) -> Result<MemoryInfo, String> {
        if self.has_host_kernels {
            return MemoryInfo::cpu();
        }
        let device = c_int::try_from(self.device.ordinal()).unwrap_or(c_int::MAX);
        MemoryInfo::new(c"Cuda", device, sys::OrtAllocatorType::OrtDeviceAllocator)
    }

    /// The library's words about a failure, or those about the device where it is lost, or without memory; and whether it is that.
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
