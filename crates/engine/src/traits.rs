//! What an engine must be able to do.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use downbeat_core::tensor::Signature;
use downbeat_core::{Duration, LatencyProfile};

use crate::activations::Activations;
use crate::cores::{self, CoreSet, Pinned, Topology};
use crate::cuda::Span;
use crate::division::{Division, DivisionError};
use crate::graph_report::GraphReport;
use crate::isolation::Executor;
use crate::operator_profile::OperatorProfile;
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

    /// Why nothing runs on any of its devices any more, if that is so; cheap to ask.
    fn lost(&self) -> Option<String> {
        None
    }

    /// Divides each of its devices into partitions that have nothing in common, before the first model is loaded: the CPU into sets of cores such as `0-3`, a GPU into numbers of
    /// compute units such as `40`, or shares of them such as `25%`.
    ///
    /// # Errors
    /// If one of them cannot be, or has something in common with another.
    fn divide(&self, parts: &[String]) -> Result<Division, DivisionError> {
        cores::divide(parts, &Topology::here())
    }

    /// The partitions of its devices between which models move: those that are named, of which some may have cores in common; where none is, all that are worth having.
    ///
    /// # Errors
    /// If one of them cannot be, or none is named where the engine makes none by itself.
    fn divide_freely(&self, parts: &[String]) -> Result<Division, DivisionError> {
        cores::divide_freely(parts, &Topology::here())
    }

    /// How many times it holds weights at most, on the CPU, once it has loaded a model.
    fn weight_copies(&self) -> u64 {
        1
    }

    /// The memory of a device, where it has memory of its own and works.
    fn device_memory(&self, _device: usize) -> Option<DeviceMemory> {
        None
    }
}

/// The memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The number by which its driver knows the device.
    pub ordinal: u32,
    /// All of it, bytes.
    pub total: u64,
    /// What nobody has taken, in this process or another, bytes.
    pub free: u64,
}

/// What a model has been given of a device's own memory since it was loaded, also what it has given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceShare {
    /// Bytes of its weights.
    pub weights: u64,
    /// Sessions of the engine that were made there.
    pub sessions: u64,
    /// Bytes that these took when they were made: handles of libraries, weights that are not shared.
    pub session_bytes: u64,
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
    /// Threads inside one run; 0: one for each CPU that it may run on.
    pub threads: usize,
    /// What its lanes have of a device where their place does not say. On the CPU its own threads are bound to these cores.
    pub share: Share,
    /// Where to cut it into segments.
    pub cut: Cut,
    /// What its runs may take, on the CPU; `None`: nobody limits them.
    pub memory: Option<Arc<MemoryBudget>>,
    /// Options of onnxruntime's TensorRT provider that the model's configuration gives, by their names there.
    pub tensorrt: BTreeMap<String, String>,
    /// Folder for what is made once and kept between starts, such as what TensorRT compiles; `None`: it is made at each.
    pub cache: Option<PathBuf>,
    /// What its operators took when it was last cut, so that it is not measured again; one of another file or engine is passed over.
    pub operators: Option<Arc<OperatorProfile>>,
    /// What its lanes' work has on a device that it shares.
    pub priority: StreamPriority,
}

/// Which kernels a GPU prefers where several wait for its compute units; what runs goes on, and copies take no notice. The CPU knows none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamPriority {
    /// The driver's own; on most devices there is none below.
    #[default]
    Default,
    /// The highest of the device.
    Max,
    /// The lowest of the device.
    Min,
}

impl LoadOptions {
    /// The whole model at `path`, with `threads` threads inside one run (0: one a core).
    pub fn new(path: impl Into<PathBuf>, threads: usize) -> Self {
        LoadOptions {
            path: path.into(),
            threads,
            share: Share::Whole,
            cut: Cut::Whole,
            memory: None,
            tensorrt: BTreeMap::new(),
            cache: None,
            operators: None,
            priority: StreamPriority::Default,
        }
    }

    /// The same, cut into segments.
    #[must_use]
    pub fn with_cut(self, cut: Cut) -> Self {
        LoadOptions { cut, ..self }
    }
}

/// A loaded model: its weights, once, however many lanes run it.
pub trait Model: Send + Sync {
    /// Inputs and outputs.
    fn signature(&self) -> &Signature;

    /// Into how many segments the model is cut; 1: whole.
    fn segments(&self) -> usize {
        self.segment_info().len().max(1)
    }

    /// What is known of each segment; empty if the model is whole.
    fn segment_info(&self) -> &[SegmentInfo] {
        &[]
    }

    /// What its activations take, where its graph was measured to cut it.
    fn activations(&self) -> Option<&Activations> {
        None
    }

    /// What its operators take, where they were measured to cut it: for [`LoadOptions::operators`].
    fn operators(&self) -> Option<&Arc<OperatorProfile>> {
        None
    }

    /// How long its batches take on a share of a device, and the largest it can run, where that is known without measuring (`emulated`).
    fn profile(&self, _share: Share) -> Option<LatencyProfile> {
        None
    }

    /// Compute units of a device beyond which a launch is hardly faster (GSLICE §2.1.3), where that is known without measuring (`emulated`).
    fn knee(&self) -> Option<u32> {
        None
    }

    /// A lane on this model: activations and scratch memory of its own, the weights shared with the other lanes of the device.
    ///
    /// # Errors
    /// If the device is out of memory, or there is no such place on it.
    fn lane_at(&self, place: Place) -> Result<Box<dyn Lane>, LoadError>;

    /// A lane on the first device, on what the model was loaded for.
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

    /// Whether any thread may run a batch and be done in about the time that it took before: what a run takes follows from the shapes of its inputs, it waits for no
    /// device, and its lanes are not bound to cores of their own.
    fn is_bounded(&self) -> bool {
        false
    }

    /// Which of its file's operators run as others, in a line for people, because the engine computes them wrong; `None`: it runs as it stands in the file.
    fn rewritten(&self) -> Option<&str> {
        None
    }

    /// Why nothing of it runs any more on a device, if that is so; cheap to ask.
    fn lost(&self, _device: usize) -> Option<String> {
        None
    }

    /// The process that it runs in, where it has one of its own.
    fn executor(&self) -> Option<&Executor> {
        None
    }

    /// To what length inputs that are padded anyway are better filled up, so that batches have few different ones; itself where any is as good.
    fn filled_length(&self, length: usize) -> usize {
        length
    }

    /// Which segments run as CUDA graphs on the lanes that there are, and why others do not; empty where the engine has no graphs. Cheap to ask.
    fn graphs(&self) -> Vec<GraphReport> {
        Vec::new()
    }

    /// What it has been given of a device's own memory, where it has some.
    fn device_share(&self, _device: usize) -> Option<DeviceShare> {
        None
    }

    /// Says whether the first axis of all inputs and outputs is the batch, so that rows may be added to one and left out again. Not so before.
    fn set_batched(&self, _is_batched: bool) {}

    /// Says which shapes its inputs will have, before the first lane: engines that compile for shapes do so then.
    fn set_shapes(&self, _inputs: Vec<ShapeRange>) {}

    /// The sizes of batches that a lane has to have run once before they are fast, of those up to `most`; only the first run is slow where there are none.
    fn sizes_to_warm(&self, _most: usize) -> Vec<usize> {
        Vec::new()
    }

    /// Says that of [`Model::sizes_to_warm`] there is memory for these only. From then on batches of other sizes are filled up to the next of them where a lane is set
    /// up for each size, and run as they are elsewhere.
    fn set_sizes(&self, _sizes: &[usize]) {}
}

/// The shapes that an input of a model has in service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeRange {
    /// Name of the input.
    pub name: String,
    /// The smallest size of each axis.
    pub least: Vec<usize>,
    /// The largest; `None`: nobody knows.
    pub most: Vec<Option<usize>>,
}

impl ShapeRange {
    /// Whether it is one shape only.
    pub fn is_fixed(&self) -> bool {
        self.least.iter().zip(&self.most).all(|(least, most)| *most == Some(*least))
    }
}

/// Where on the machine a lane runs. Engines on the CPU take no notice of the device.
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
    /// What the model was loaded for ([`LoadOptions::share`]), which is all of the device unless somebody said otherwise.
    #[default]
    Whole,
    /// So many compute units, rounded up to what the device can give. Lanes with the same number share the same ones.
    Units(u32),
    /// The compute units that are left by those with so many.
    AllBut(u32),
    /// A partition of those that the devices were divided into ([`Engine::divide`]), from 0.
    Part(u32),
    /// Cores of the CPU: what runs there runs on no others.
    Cores(CoreSet),
}

impl Share {
    /// This, or where it does not say what the model was loaded for.
    pub(crate) fn or(self, loaded: Share) -> Share {
        if self == Share::Whole { loaded } else { self }
    }

    /// The cores that it is; `None`: it is no set of cores.
    pub fn cores(&self) -> Option<&CoreSet> {
        match self {
            Share::Cores(cores) => Some(cores),
            Share::Whole | Share::Units(_) | Share::AllBut(_) | Share::Part(_) => None,
        }
    }

    /// Binds the calling thread to its cores, if it is cores.
    ///
    /// # Errors
    /// As [`Pinned::to`].
    pub fn pin(&self) -> Result<Option<Pinned>, String> {
        self.cores().map(Pinned::to).transpose()
    }
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

    /// Begins to run the segments `range` on the batch in `state`, as [`Lane::run`] does, and does not wait for their end where the device has a queue of its own: it may then
    /// be given the next launch before this one is over, and lies idle at no time between the two. Launches of a lane are over in the order in which they were enqueued; two may
    /// be under way, and a third one waits here for the first. An engine without such a queue runs the launch here.
    ///
    /// After an error the lane is usable, and what was enqueued before is not touched by it, unless the device is lost.
    ///
    /// # Errors
    /// As [`Lane::run`]; those that are found only while it runs come from [`Pending::wait`].
    fn enqueue(&mut self, range: Range<usize>, mut state: State) -> Result<Box<dyn Pending>, RunError> {
        self.run(range, &mut state)?;
        Ok(Box::new(state))
    }

    /// Joins batches at the same place of the model, in order, along axis 0, where the next [`Lane::run`] takes them.
    ///
    /// # Errors
    /// As [`State::join`].
    fn join(&mut self, states: Vec<State>) -> Result<State, StateError> {
        State::join(states)
    }

    /// When the launch that was enqueued last runs on the device, by the device's own clock, where it has one. Its times are there once it is over.
    fn last_run(&self) -> Option<Span> {
        None
    }
}

/// A launch that was enqueued on a lane. It goes on whether or not anybody waits for it: if it is dropped before it is over, that waits.
pub trait Pending: Send {
    /// Whether it is over, so that [`Pending::wait`] returns at once.
    fn is_over(&self) -> bool;

    /// How long the caller may do other things, or sleep, and still be there when it ends, by what launches like it have taken. Zero if nobody knows.
    fn spare(&self) -> Duration;

    /// Waits for its end; gives what [`Lane::run`] leaves in its state.
    ///
    /// # Errors
    /// If the engine fails.
    fn wait(self: Box<Self>) -> Result<State, RunError>;
}

/// What was run at once.
impl Pending for State {
    fn is_over(&self) -> bool {
        true
    }

    fn spare(&self) -> Duration {
        Duration::ZERO
    }

    fn wait(self: Box<Self>) -> Result<State, RunError> {
        Ok(*self)
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
    /// The process that loaded it has ended.
    #[error("{path}: {engine} cannot run this model: {reason}", path = path.display())]
    Died {
        /// The file.
        path: PathBuf,
        /// The engine.
        engine: &'static str,
        /// How the process has ended.
        reason: String,
        /// The number of the signal that ended it.
        signal: Option<i32>,
    },
}

impl LoadError {
    /// What is wrong and what to do, without the file and who says so.
    pub fn into_reason(self) -> String {
        match self {
            LoadError::File { reason, .. } | LoadError::Model { reason, .. } | LoadError::Died { reason, .. } => reason,
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
    /// Whether the process that it ran in has ended, or is not there again yet.
    pub of_executor: bool,
}

impl RunError {
    /// A failure of this batch.
    pub fn new(engine: &'static str, reason: impl Into<String>) -> RunError {
        RunError { engine, reason: reason.into(), of_device: false, of_executor: false }
    }
}
