//! The memory of a run, estimated before the run begins. A few kilobytes of inputs may ask for
//! gigabytes, and an engine that gets no memory may end the process.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prost::Message;
use smallvec::SmallVec;

use crate::onnx;
use crate::onnx::proto::ModelProto;
use crate::onnx::sizes::{Input, Need, Sizes};
use crate::tensor::Tensor;

/// The number of input shapes whose needs are remembered; one more, and all are forgotten.
const REMEMBERED: usize = 1024;
/// Runs that take less, in bytes, are not counted: lanes bound their number.
const SMALL: u64 = 64 << 20;
/// The longest wait of a run for the memory that other runs use.
const PATIENCE: Duration = Duration::from_secs(5);

/// The memory that the runs of all models may take together.
#[derive(Debug)]
pub struct MemoryBudget {
    bytes: u64,
    used: Mutex<u64>,
    freed: Condvar,
}

/// A run would take more than its limit, or more than the other runs leave.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a run of these shapes takes about {0}")]
pub struct TooMuchMemory(String);

impl MemoryBudget {
    /// A budget of this many bytes.
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(MemoryBudget { bytes, used: Mutex::new(0), freed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that a run may take; a drop gives it back.
#[derive(Debug)]
pub struct Reserved {
    budget: Arc<MemoryBudget>,
    bytes: u64,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.bytes > 0 {
            let mut used = self.budget.lock();
            *used = used.saturating_sub(self.bytes);
            self.budget.freed.notify_all();
        }
    }
}

/// The memory that the runs of one model take.
#[derive(Debug)]
pub struct RunMemory {
    sizes: Sizes,
    budget: Arc<MemoryBudget>,
    /// The needs, by the dimensions of all inputs.
    known: Mutex<BTreeMap<SmallVec<[u64; 8]>, Need>>,
}

impl RunMemory {
    /// Reads the model file at `path`; `None` if runs have no limit.
    ///
    /// # Errors
    /// In words, if the file cannot be read, or the values that it computes from its weights alone
    /// take too much memory.
    pub fn of(path: &Path, budget: Option<&Arc<MemoryBudget>>) -> Result<Option<RunMemory>, String> {
        let Some(budget) = budget else { return Ok(None) };
        let bytes = onnx::model_bytes(path).map_err(|e| format!("it cannot be read: {e}"))?;
        let graph = ModelProto::decode(bytes).ok().and_then(|model| model.graph);
        // A file that cannot be decoded here is the engine's to reject.
        let Some(Ok(sizes)) = graph.map(|graph| Sizes::new(&graph)) else { return Ok(None) };
        let memory = RunMemory { sizes, budget: budget.clone(), known: Mutex::default() };
        let constant = memory.sizes.need(std::iter::empty());
        memory.judge(&constant).map_err(|error| error.to_string())?;
        Ok(Some(memory))
    }

    /// Checks that a run with inputs of these shapes and bytes, in the signature's order, may ever
    /// have the memory that it needs. Returns true if the need depends on the shapes alone: then
    /// inputs of these shapes need no other check.
    ///
    /// # Errors
    /// If the run needs more than it may have.
    pub fn check<'a>(
        &self,
        inputs: impl Iterator<Item = (&'a [usize], &'a [u8])> + Clone,
    ) -> Result<bool, TooMuchMemory> {
        self.with_need(inputs, |need, always| self.judge(need).map(|()| always))
    }

    /// The bytes that a run with inputs of these shapes takes, in the signature's order, without
    /// regard to their contents.
    pub fn estimate<'a>(&self, shapes: impl Iterator<Item = &'a [usize]>) -> u64 {
        self.sizes.need(shapes.map(|dims| Some(Input { dims, data: &[] }))).bytes
    }

    /// Waits for the memory of a run.
    ///
    /// # Errors
    /// If the run may not have it, or other runs hold it for too long.
    pub fn reserve(&self, tensors: &[Tensor]) -> Result<Reserved, TooMuchMemory> {
        let inputs = tensors.iter().map(|tensor| (&tensor.shape[..], tensor.data.as_slice()));
        let needed = self.with_need(inputs, |need, _| self.judge(need).map(|()| need.bytes))?;
        let budget = &self.budget;
        if needed < SMALL {
            return Ok(Reserved { budget: budget.clone(), bytes: 0 });
        }
        let is_full = |used: &mut u64| used.saturating_add(needed) > budget.bytes;
        let waited = budget.freed.wait_timeout_while(budget.lock(), PATIENCE, is_full);
        let (mut used, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if is_full(&mut used) {
            return Err(TooMuchMemory(format!(
                "{needed} bytes, and other runs use {used} of the {} that runs may take (run_memory_bytes); try again later",
                budget.bytes
            )));
        }
        *used += needed;
        Ok(Reserved { budget: budget.clone(), bytes: needed })
    }

    fn judge(&self, need: &Need) -> Result<(), TooMuchMemory> {
        if need.bytes <= self.budget.bytes {
            return Ok(());
        }
        let (value, shape, _) = &need.largest;
        Err(TooMuchMemory(format!(
            "{} bytes (the value '{value}' alone is {shape:?}), and runs may take {} (run_memory_bytes); send smaller inputs",
            need.bytes, self.budget.bytes
        )))
    }

    /// The need of a run with these inputs, and whether the need depends on their shapes alone.
    fn with_need<'a, T>(
        &self,
        inputs: impl Iterator<Item = (&'a [usize], &'a [u8])> + Clone,
        then: impl FnOnce(&Need, bool) -> T,
    ) -> T {
        let key: SmallVec<[u64; 8]> = inputs.clone().flat_map(|(dims, _)| dims).map(|d| *d as u64).collect();
        let with_data = || self.sizes.need(inputs.clone().map(|(dims, data)| Some(Input { dims, data })));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(need) = known.get(&key) {
            if !need.by_data {
                return then(need, true);
            }
            drop(known);
            return then(&with_data(), false);
        }
        drop(known);
        let need = self.sizes.need(inputs.clone().map(|(dims, _)| Some(Input { dims, data: &[] })));
        let exact = need.by_data.then(with_data);
        let result = then(exact.as_ref().unwrap_or(&need), exact.is_none());
        known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(key, need);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_run_has_others_have_not() {
        let budget = MemoryBudget::new(100 << 20);
        let reserve = |bytes| {
            *budget.lock() += bytes;
            Reserved { budget: budget.clone(), bytes }
        };
        let (a, b) = (reserve(60 << 20), reserve(40 << 20));
        assert_eq!(*budget.lock(), 100 << 20);
        drop(a);
        assert_eq!(*budget.lock(), 40 << 20);
        drop(b);
        assert_eq!(*budget.lock(), 0);
    }
}
