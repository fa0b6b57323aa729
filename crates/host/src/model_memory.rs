//! The CPU memory of models. It is computed before a model is loaded or serves, kept within a
//! limit, and reported.
//!
//! Models load side by side on the CPU, so the growth of the process belongs to no single model. So
//! nothing is measured, unlike on GPUs (`device_budget.rs`).

use std::collections::BTreeMap;
use std::sync::Arc;

use downbeat_service::memory;
use downbeat_service::metrics::Metrics;
use downbeat_service::options::ServerOptions;
use parking_lot::Mutex;

/// A use of a version's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryPart {
    /// The weights, as the engine holds them.
    Weights,
    /// The input rings of its device policy, on all devices.
    Rings,
    /// The largest run of the version, by estimate.
    Run,
}

/// The memory that the versions on the CPU hold together.
pub struct ModelMemory {
    /// Bytes; `None`: no limit.
    limit: Option<u64>,
    /// The most bytes that all runs take together: runs wait for each other. `None`: no limit.
    runs: Option<u64>,
    held: Mutex<Holdings>,
}

#[derive(Default)]
struct Holdings {
    next: u64,
    versions: BTreeMap<u64, Version>,
}

struct Version {
    model: String,
    /// By [`MemoryPart`].
    bytes: [u64; 3],
}

/// The memory that a version holds, until it is dropped.
pub struct HeldMemory {
    memory: Arc<ModelMemory>,
    id: u64,
}

impl ModelMemory {
    /// Makes the account with the limits of `options`, beside `in_flight` bytes of requests.
    pub fn new(options: &ServerOptions, in_flight: u64) -> Arc<Self> {
        let limit = match options.model_memory_bytes {
            None => memory::allowed().map(|allowed| allowed.saturating_sub(in_flight).max(allowed / 2)),
            Some(bytes) => Some(bytes as u64).filter(|bytes| *bytes > 0),
        };
        ModelMemory::limited(limit, memory::run_budget(options))
    }

    /// Bytes that all models may hold; `None`: there is no limit.
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// The most bytes that runs take together; `None`: there is no limit.
    pub fn runs(&self) -> Option<u64> {
        self.runs
    }

    fn limited(limit: Option<u64>, runs: Option<u64>) -> Arc<Self> {
        Arc::new(ModelMemory { limit, runs, held: Mutex::default() })
    }

    /// Begins to hold memory for a version of a model, of which nothing is known yet.
    pub fn begin(self: &Arc<Self>, model: &str) -> HeldMemory {
        let mut held = self.held.lock();
        let id = held.next;
        held.next += 1;
        held.versions.insert(id, Version { model: model.to_owned(), bytes: [0; 3] });
        HeldMemory { memory: self.clone(), id }
    }

    /// The bytes of these versions together, by [`MemoryPart`].
    fn parts<'a>(&self, versions: impl Iterator<Item = &'a Version>) -> [u64; 3] {
        let add = |[weights, rings, runs]: [u64; 3], version: &Version| {
            let [more_weights, more_rings, run] = version.bytes;
            [weights.saturating_add(more_weights), rings.saturating_add(more_rings), runs.saturating_add(run)]
        };
        let [weights, rings, runs] = versions.fold([0; 3], add);
        [weights, rings, runs.min(self.runs.unwrap_or(u64::MAX))]
    }

    fn together<'a>(&self, versions: impl Iterator<Item = &'a Version>) -> u64 {
        self.parts(versions).into_iter().fold(0, u64::saturating_add)
    }

    /// Reports in metrics the bytes that all versions hold, and the limit.
    pub fn update_metrics(&self, metrics: &Metrics) {
        let [weights, rings, runs] = self.parts(self.held.lock().versions.values());
        metrics.set_models_memory(weights.saturating_add(rings).saturating_add(runs), self.limit);
        // All devices of a CPU share its memory.
        metrics.set_device_memory("cpu", [("weights", weights), ("rings", rings), ("runs", runs)]);
    }
}

impl HeldMemory {
    /// Holds this many more bytes for a part.
    ///
    /// # Errors
    /// If there is no room for it, with the numbers; then nothing more is held.
    pub fn hold(&self, part: MemoryPart, bytes: u64) -> anyhow::Result<()> {
        let mut held = self.memory.held.lock();
        let others =
            |held: &Holdings| self.memory.together(held.versions.iter().filter(|of| *of.0 != self.id).map(|of| of.1));
        let others = others(&held);
        let Some(version) = held.versions.get_mut(&self.id) else { return Ok(()) };
        let before = version.bytes;
        let of = &mut version.bytes[part as usize];
        *of = of.saturating_add(bytes);
        let ([weights, rings, run], model) = (version.bytes, version.model.clone());
        let together = self.memory.together(held.versions.values());
        let Some(limit) = self.memory.limit.filter(|limit| together > *limit) else { return Ok(()) };
        if let Some(version) = held.versions.get_mut(&self.id) {
            version.bytes = before;
        }
        let own = held.versions.iter().filter(|(id, version)| **id != self.id && version.model == model);
        let own = self.memory.together(own.map(|(_, version)| version));
        let own = match own {
            0 => String::new(),
            own => format!(", of which {own} are held by versions of this model until they are replaced"),
        };
        anyhow::bail!(
            "it takes {} bytes of the CPU's memory (weights {weights}, input rings {rings}, its largest run {run}), and others hold {others} of the {limit} that models may \
             (model_memory_bytes){own}. Unload others, serve it with a smaller max_batch_size, or raise it",
            together - others
        );
    }

    /// The bytes that it holds, by [`MemoryPart`].
    pub fn bytes(&self) -> [u64; 3] {
        self.memory.held.lock().versions.get(&self.id).map_or([0; 3], |version| version.bytes)
    }

    /// Holds nothing any more: the version begins anew, on another engine.
    pub fn begin_anew(&self) {
        if let Some(version) = self.memory.held.lock().versions.get_mut(&self.id) {
            version.bytes = [0; 3];
        }
    }

    /// Reports its memory, in the log and in metrics.
    pub fn say(&self, metrics: &Metrics, name: &str, version: &str) {
        let bytes = self.bytes();
        let held = self.memory.held.lock();
        metrics.set_model_memory(name, version, bytes);
        let [weights, rings, run] = bytes;
        let (models, limit) = (self.memory.together(held.versions.values()), self.memory.limit);
        let of = limit.map(|limit| format!(" of the {limit} that they may")).unwrap_or_default();
        tracing::info!(
            model = name,
            version,
            "bytes of the CPU's memory: weights {weights}, input rings {rings}, its largest run {run}; all models hold {models}{of}"
        );
    }
}

impl Drop for HeldMemory {
    fn drop(&mut self) {
        self.memory.held.lock().versions.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_counts_until_it_is_dropped() {
        let memory = ModelMemory::limited(Some(100), None);
        let (one, other) = (memory.begin("one"), memory.begin("other"));
        one.hold(MemoryPart::Weights, 50).unwrap();
        one.hold(MemoryPart::Run, 10).unwrap();
        let error = other.hold(MemoryPart::Weights, 41).unwrap_err().to_string();
        let said = "it takes 41 bytes of the CPU's memory (weights 41, input rings 0, its largest run 0), and others hold 60 of the 100 that models may (model_memory_bytes).";
        assert!(error.starts_with(said), "{error}");
        other.hold(MemoryPart::Rings, 40).unwrap();
        assert!(other.hold(MemoryPart::Weights, 1).unwrap_err().to_string().contains("takes 41 bytes"));
        drop(one);
        other.hold(MemoryPart::Weights, 60).unwrap();
        ModelMemory::limited(None, None).begin("any").hold(MemoryPart::Weights, u64::MAX).unwrap();
    }

    #[test]
    fn runs_take_together_what_runs_may_take() {
        let memory = ModelMemory::limited(Some(100), Some(30));
        let versions = ["a", "b", "c"].map(|name| memory.begin(name));
        versions.iter().for_each(|version| version.hold(MemoryPart::Run, 20).unwrap());
        versions[0].hold(MemoryPart::Weights, 70).unwrap();
        assert!(versions[1].hold(MemoryPart::Weights, 1).is_err());
    }

    #[test]
    fn a_version_that_is_to_be_replaced_counts_and_is_named() {
        let memory = ModelMemory::limited(Some(100), None);
        let (before, now) = (memory.begin("model"), memory.begin("model"));
        before.hold(MemoryPart::Weights, 60).unwrap();
        let error = now.hold(MemoryPart::Weights, 60).unwrap_err().to_string();
        assert!(error.contains("60 are held by versions of this model until they are replaced"), "{error}");
        drop(before);
        now.hold(MemoryPart::Weights, 60).unwrap();
    }
}
