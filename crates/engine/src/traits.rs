//! What an engine must be able to do.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use downbeat_core::tensor::Signature;
use downbeat_core::{Duration, LatencyProfile};

use crate::activations::Activations;
use crate::ring_memory::{RingMemory, RingMemoryError};
use crate::run_memory::{MemoryBudget, RunMemory};
use crate::segment::{Cut, SegmentInfo};
use crate::state::{State, StateError};
use crate::tensor::{Buffer, OutOfMemory};

/// An engine: knows a model format and a kind of device.
pub trait Engine: Send + Sync {
    /// Name, version and device, for the start-up line and the metadata.
    fn info(&self) -> EngineInfo;

    /// Reads, checks and optimises the model at `options.path`. Slow: call it away from any request path.
    ///
    /// # Errors
    /// If the file is missing, corrupt, too large, has an operator that the engine lacks, or points outside its folder; if it
    /// cannot be cut as `options.cut` says.
    fn load(&self, options: &LoadOptions) -> Result<Arc<dyn Model>, LoadError>;
}

/// Who an engine is.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// `cuda`, `tensorrt`, `onnxruntime`, `rten` or `emulated`.
    pub name: &'static str,
    /// Version of the library in use.
    pub version: String,
    /// What it runs on (`cpu`, or the name of a GPU).
    pub device: String,
    /// Where the library was found, if it is not built in.
    pub library: Option<PathBuf>,
}

/// What to load and how.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The model file.
    pub path: PathBuf,
    /// Threads inside one run; 0: one a core.
    pub threads: usize,
    /// Where to cut it into segments.
    pub cut: Cut,
    /// What its runs may take, on the CPU; `None`: nobody limits them.
    pub memory: Option<Arc<MemoryBudget>>,
}

impl LoadOptions {
    /// The whole model at `path`, with `threads` threads inside one run (0: one a core).
    pub fn new(path: impl Into<PathBuf>, threads: usize) -> Self {
        LoadOptions { path: path.into(), threads, cut: Cut::Whole, memory: None }
    }

    /// The same, cut into segments.
    #[must_use]
    pub fn with_cut(self, cut: Cut) -> Self {
        LoadOptions { cut, ..self }
    }

    /// The same, with a limit on what its runs take.
    #[must_use]
    pub fn with_memory(self, memory: Arc<MemoryBudget>) -> Self {
        LoadOptions { memory: Some(memory), ..self }
    }
}

/// A loaded model: its weights, once, however many lanes run it.
pub trait Model: Send + Sync {
    /// Inputs and outputs.
    fn signature(&self) -> &Signature;

    /// Into how many segments the model is cut; 1: whole.
    fn segments(&self) -> usize {
        1
    }

    /// What is known of each segment; empty if the model is whole.
    fn segment_info(&self) -> &[SegmentInfo] {
        &[]
    }

    /// What its activations take, where its graph was measured to cut it.
    fn activations(&self) -> Option<&Activations> {
        None
    }

    /// How long its batches take, and the largest it can run, where that is known without measuring (`emulated`).
    fn profile(&self) -> Option<&LatencyProfile> {
        None
    }

    /// A lane on this model: activations and scratch memory of its own, the weights shared with the other lanes of the device.
    ///
    /// # Errors
    /// If the device is out of memory, or there is no such place on it.
    fn lane_at(&self, place: Place) -> Result<Box<dyn Lane>, LoadError>;

    /// A lane on the whole first device.
    ///
    /// # Errors
    /// As [`Model::lane_at`].
    fn lane(&self) -> Result<Box<dyn Lane>, LoadError> {
        self.lane_at(Place::default())
    }

    /// Memory for the input ring of a tensor, where lanes of a device take it without a copy: `slots` slots of `slot_bytes` bytes, of which up to `longest`
    /// are read at once.
    ///
    /// # Errors
    /// If there is no memory for it.
    fn ring_memory(
        &self,
        _device: usize,
        slots: u32,
        slot_bytes: usize,
        _longest: u32,
    ) -> Result<Arc<RingMemory>, RingMemoryError> {
        RingMemory::new(slots, slot_bytes)
    }

    /// An empty buffer with room for `bytes` bytes of an input, in memory that its lanes take inputs from without a copy on the host.
    ///
    /// # Errors
    /// If there is no memory for it.
    fn input_buffer(&self, bytes: usize) -> Result<Buffer, OutOfMemory> {
        Buffer::try_with_capacity(bytes)
    }

    /// What its runs take, where that is estimated.
    fn run_memory(&self) -> Option<&RunMemory> {
        None
    }

    /// Why nothing of it runs any more on a device, if that is so; cheap to ask.
    fn lost(&self, _device: usize) -> Option<String> {
        None
    }

    /// Says whether the first axis of all inputs and outputs is the batch, so that rows may be added to one and left out again. Not so before.
    fn set_batched(&self, _is_batched: bool) {}

    /// The sizes of batches that a lane has to have run once before they are fast, of those up to `most`; only the first run is slow where there are none.
    fn sizes_to_warm(&self, _most: usize) -> Vec<usize> {
        Vec::new()
    }
}

/// Where on the machine a lane runs. Engines on the CPU take no notice of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Which of the devices that the engine uses, from 0.
    pub device: usize,
    /// On how much of it.
    pub share: Share,
}

/// How much of a device a lane has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Share {
    /// All compute units.
    #[default]
    Whole,
    /// So many compute units, rounded up to what the device can give. Lanes with the same number share the same ones.
    Units(u32),
    /// The compute units that are left by those with so many.
    AllBut(u32),
}

/// An in-order stream of launches of one model. Used by one thread at a time.
pub trait Lane: Send {
    /// Runs the segments `range` on the batch in `state`: the inputs in signature order before the first segment,
    /// the live tensors between two, the outputs in signature order after the last.
    /// After an error the lane is usable and `state` is empty.
    ///
    /// # Errors
    /// If the engine fails: shapes the model cannot take, out of memory.
    fn run(&mut self, range: Range<usize>, state: &mut State) -> Result<(), RunError>;

    /// Joins batches at the same place of the model, in order, along axis 0, where the next [`Lane::run`] takes them.
    ///
    /// # Errors
    /// As [`State::join`].
    fn join(&mut self, states: Vec<State>) -> Result<State, StateError> {
        State::join(states)
    }

    /// When the last run began and ended on the device, by the device's own clock, from a fixed time that all lanes of a device share; where it has one.
    fn last_run(&self) -> Option<(Duration, Duration)> {
        None
    }
}

/// Why a model was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read.
    #[error("{path}: {reason}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The file is read, but it is not a model that this engine can run.
    #[error("{path}: {engine} cannot run this model: {reason}", path = path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// The engine.
        engine: &'static str,
        /// What is wrong and what to do.
        reason: String,
    },
}

impl LoadError {
    /// What is wrong and what to do, without the file and who says so.
    pub fn into_reason(self) -> String {
        match self {
            LoadError::File { reason, .. } | LoadError::Model { reason, .. } => reason,
        }
    }
}

/// Why a run failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{engine}: {reason}")]
pub struct RunError {
    /// The engine.
    pub engine: &'static str,
    /// The engine's own words.
    pub reason: String,
    /// Whether it is the device that cannot, whatever the batch: it is lost, or out of memory.
    pub of_device: bool,
}

impl RunError {
    /// A failure of this batch.
    pub fn new(engine: &'static str, reason: impl Into<String>) -> RunError {
        RunError { engine, reason: reason.into(), of_device: false }
    }
}
