//! The traits of an engine, of its models and of their lanes.

mod asked;
pub mod division;
mod error;
mod executor;
pub mod graph_report;
mod options;
mod share;
mod span;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use downbeat_core::tensor::Signature;
use downbeat_core::{Duration, LatencyProfile};

use crate::cores::{self, Topology};
use crate::cut::SegmentInfo;
use crate::cut::activations::Activations;
use crate::cut::operator_profile::OperatorProfile;
use crate::memory::ring_memory::{RingMemory, RingMemoryError};
use crate::memory::run_memory::RunMemory;
use crate::tensor::state::{State, StateError};
use crate::tensor::{Buffer, OutOfMemory};
pub use asked::{Answered, Answers, AnswersTo, AskedRequest, ClientLeft, RequestAbout, TakesAnswers};
pub use division::{Division, DivisionError, Part};
pub use error::{ErrorCode, LoadError, RunError};
pub use executor::{Executor, OnReady};
pub use graph_report::{GraphNodes, GraphOutcome, GraphReport};
pub use options::{LoadOptions, PythonOptions, StreamPriority};
pub use share::{Place, Share};
pub use span::{Span, Timed};

/// An engine, which runs models of one file format on one kind of device.
pub trait Engine: Send + Sync {
    /// Name, version and device, for the start-up line and the metadata.
    fn info(&self) -> EngineInfo;

    /// Reads, checks and optimises the model at `options.path`. Slow: call it away from any request
    /// path.
    ///
    /// # Errors
    /// If the file is missing, corrupt or too large, has an operator that the engine lacks, or
    /// points outside its folder. Also if the engine cannot cut the model as `options.cut` says.
    fn load(&self, options: &LoadOptions) -> Result<Arc<dyn Model>, LoadError>;

    /// The reason why nothing runs on any device of the engine any more; `None`: the devices work.
    /// Cheap to ask.
    fn lost(&self) -> Option<String> {
        None
    }

    /// Divides each device into partitions that share no compute unit, before the first model is
    /// loaded. A partition of the CPU is a set of cores such as `0-3`. A partition of a GPU is a
    /// number of compute units such as `40`, or a share of the units such as `25%`.
    ///
    /// # Errors
    /// If a partition is impossible or overlaps another.
    fn divide(&self, parts: &[String]) -> Result<Division, DivisionError> {
        cores::divide(parts, &Topology::here())
    }

    /// Makes the partitions between which models move. Named partitions may overlap. If `parts` is
    /// empty, the engine makes every partition that is worth having.
    ///
    /// # Errors
    /// If a partition is impossible, or `parts` is empty and the engine makes no partitions by
    /// itself.
    fn divide_freely(&self, parts: &[String]) -> Result<Division, DivisionError> {
        cores::divide_freely(parts, &Topology::here())
    }

    /// The largest number of copies of the weights that the engine keeps in the CPU's memory for a
    /// loaded model.
    fn weight_copies(&self) -> u64 {
        1
    }

    /// The memory of a device; `None`: the device has no memory of its own, or does not work.
    fn device_memory(&self, _device: usize) -> Option<DeviceMemory> {
        None
    }
}

/// The memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The driver's number of the device.
    pub ordinal: u32,
    /// The whole memory, bytes.
    pub total: u64,
    /// Memory that no process has taken, bytes.
    pub free: u64,
}

/// The memory of a device that a model has been given since it was loaded. Memory that the model
/// gave back counts, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceShare {
    /// Bytes of its weights.
    pub weights: u64,
    /// Sessions of the engine that were made on the device.
    pub sessions: u64,
    /// Bytes that the sessions took when they were made: handles of libraries, weights that are not
    /// shared.
    pub session_bytes: u64,
}

/// Name, version and device of an engine.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// `cuda`, `tensorrt`, `onnxruntime`, `rten` or `emulated`.
    pub name: &'static str,
    /// Version of the library in use.
    pub version: String,
    /// The device that the engine runs on: `cpu`, or the name of a GPU.
    pub device: String,
    /// The path of the library, if it is not built in.
    pub library: Option<PathBuf>,
}

/// A loaded model. Its weights are in memory once, for any number of lanes.
pub trait Model: Send + Sync {
    /// Inputs and outputs.
    fn signature(&self) -> &Signature;

    /// The number of segments of the model; 1: whole.
    fn segments(&self) -> usize {
        self.segment_info().len().max(1)
    }

    /// The operators, tensors and times of each segment; empty if the model is whole.
    fn segment_info(&self) -> &[SegmentInfo] {
        &[]
    }

    /// The memory of the model's activations, if its graph was measured for a cut.
    fn activations(&self) -> Option<&Activations> {
        None
    }

    /// The measured profile of the operators, if the model was cut: for [`LoadOptions::operators`].
    fn operators(&self) -> Option<&Arc<OperatorProfile>> {
        None
    }

    /// The latency profile and the largest batch on a share of a device, if they are known without
    /// a measurement (`emulated`).
    fn profile(&self, _share: Share) -> Option<LatencyProfile> {
        None
    }

    /// The number of compute units beyond which a launch is hardly faster (GSLICE §2.1.3), if it is
    /// known without a measurement (`emulated`).
    fn knee(&self) -> Option<u32> {
        None
    }

    /// Makes a lane on this model. The lane has activations and scratch memory of its own, and
    /// shares the weights with the other lanes of the device.
    ///
    /// # Errors
    /// If the device is out of memory or has no such place.
    fn lane_at(&self, place: Place) -> Result<Box<dyn Lane>, LoadError>;

    /// A lane on the first device, with the share that the model was loaded for.
    ///
    /// # Errors
    /// As [`Model::lane_at`].
    fn lane(&self) -> Result<Box<dyn Lane>, LoadError> {
        self.lane_at(Place::default())
    }

    /// Memory for the input ring of a tensor, if lanes of a device read such memory without a copy.
    /// The ring has `slots` slots of `slot_bytes` bytes. A batch reads up to `longest` slots at
    /// once.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    fn ring_memory(
        &self,
        _device: usize,
        slots: u32,
        slot_bytes: usize,
        _longest: u32,
    ) -> Result<Arc<RingMemory>, RingMemoryError> {
        RingMemory::new(slots, slot_bytes)
    }

    /// An empty buffer with room for `bytes` bytes of an input. Lanes read its memory without a
    /// copy on the host.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    fn input_buffer(&self, bytes: usize) -> Result<Buffer, OutOfMemory> {
        Buffer::try_with_capacity(bytes)
    }

    /// The estimator of the memory that the model's runs take, if runs are limited.
    fn run_memory(&self) -> Option<&RunMemory> {
        None
    }

    /// Whether any thread may run a batch in about the time of the batch before. The shapes of its
    /// inputs must decide that time. The run must not wait for a device, and the lanes must not be
    /// bound to cores.
    fn is_bounded(&self) -> bool {
        false
    }

    /// A line for people about the operators that run as other operators, because the engine
    /// computes them wrong; `None`: the model runs as it stands in the file.
    fn rewritten(&self) -> Option<&str> {
        None
    }

    /// The reason why nothing of the model runs on a device any more; `None`: it runs. Cheap to
    /// ask.
    fn lost(&self, _device: usize) -> Option<String> {
        None
    }

    /// The model's executor process, if it has one.
    fn executor(&self) -> Option<&dyn Executor> {
        None
    }

    /// Asks the model's own code whether it is ready. Returns false, and tells `on_ready` nothing, if
    /// the code has no such check.
    fn ask_ready(&self, _on_ready: OnReady) -> bool {
        false
    }

    /// Whether the model's lanes take requests ([`Lane::answer`]), and not the rows of a batch.
    fn takes_requests(&self) -> bool {
        false
    }

    /// The model's configuration as JSON of the protocol, if the model itself completes its
    /// configuration.
    fn configuration(&self) -> Option<&str> {
        None
    }

    /// The length to which padded inputs should be filled up, so that batches have few different
    /// lengths. `length` itself where every length is equally fast.
    fn filled_length(&self, length: usize) -> usize {
        length
    }

    /// The segments that run as CUDA graphs on the present lanes, and the reasons why other
    /// segments are not graphs. Empty if the engine has no graphs. Cheap to ask.
    fn graphs(&self) -> Vec<GraphReport> {
        Vec::new()
    }

    /// The memory of a device that the model has been given, if the device has memory of its own.
    fn device_share(&self, _device: usize) -> Option<DeviceShare> {
        None
    }

    /// Tells the engine whether axis 0 of every input and output is the batch. If it is, the engine
    /// may add rows to a batch and leave them out again. Before this call the engine must not.
    fn set_batched(&self, _is_batched: bool) {}

    /// Tells the engine the shapes that the inputs will have, before the first lane. Engines that
    /// compile for shapes do so then.
    fn set_shapes(&self, _inputs: Vec<ShapeRange>) {}

    /// The batch sizes up to `most` that each lane must run once before they are fast. Empty if
    /// only the first run of a lane is slow.
    fn sizes_to_warm(&self, _most: usize) -> Vec<usize> {
        Vec::new()
    }

    /// Tells the engine that the memory suffices only for these of [`Model::sizes_to_warm`]. A lane
    /// that is prepared for each size then fills up a batch of another size to the next larger one
    /// of these sizes. Other lanes run such batches unchanged.
    fn set_sizes(&self, _sizes: &[usize]) {}
}

/// The shapes that an input of a model has in service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeRange {
    /// Name of the input.
    pub name: String,
    /// The smallest size of each axis.
    pub least: Vec<usize>,
    /// The largest size of each axis; `None`: unknown.
    pub most: Vec<Option<usize>>,
}

impl ShapeRange {
    /// Whether the range is a single shape.
    pub fn is_fixed(&self) -> bool {
        self.least.iter().zip(&self.most).all(|(least, most)| *most == Some(*least))
    }
}

/// An in-order stream of launches of one model. Used by one thread at a time.
pub trait Lane: Send {
    /// Runs the segments `range` on the batch in `state`. Before the first segment `state` holds
    /// the inputs in signature order, between two segments the live tensors, after the last the
    /// outputs in signature order. After an error the lane is usable and `state` is empty.
    ///
    /// # Errors
    /// If the engine fails, for example because of a wrong shape or a lack of memory.
    fn run(&mut self, range: Range<usize>, state: &mut State) -> Result<(), RunError>;

    /// Answers the requests of a batch, each with its own outputs. Only lanes of models that take
    /// requests ([`Model::takes_requests`]) do so.
    ///
    /// # Errors
    /// If the batch fails as a whole. An error of one request is its answer.
    fn answer(&mut self, _requests: Vec<AskedRequest>) -> Result<Answers, RunError> {
        Err(RunError::new("engine", "the model takes rows of batches, and no requests: this is a defect"))
    }

    /// Begins to run the segments `range` on the batch in `state`, as [`Lane::run`] does. If the
    /// device has a queue of its own, the call does not wait for the end of the launch. The caller
    /// may then enqueue the next launch before this one is over, and the device is never idle
    /// between the two.
    ///
    /// Launches of a lane end in the order in which they were enqueued. Two launches may be under
    /// way; the call for a third waits for the first. An engine without a queue runs the launch
    /// during the call.
    ///
    /// After an error the lane is usable. Earlier launches are unaffected, unless the device is
    /// lost.
    ///
    /// # Errors
    /// As [`Lane::run`]. [`Pending::wait`] returns the errors that appear only while the launch
    /// runs.
    fn enqueue(&mut self, range: Range<usize>, mut state: State) -> Result<Box<dyn Pending>, RunError> {
        self.run(range, &mut state)?;
        Ok(Box::new(state))
    }

    /// Joins batches at the same place of the model, in order, along axis 0. The result is ready
    /// for the next [`Lane::run`].
    ///
    /// # Errors
    /// As [`State::join`].
    fn join(&mut self, states: Vec<State>) -> Result<State, StateError> {
        State::join(states)
    }

    /// The span of the lane's last launch, by the device's own clock, if the device has a clock.
    /// The times are known once the launch is over.
    fn last_run(&self) -> Option<Span> {
        None
    }
}

/// A launch that was enqueued on a lane. The launch goes on even if no thread waits. Dropping it
/// early waits for its end.
pub trait Pending: Send {
    /// Whether the launch is over, so that [`Pending::wait`] returns at once.
    fn is_over(&self) -> bool;

    /// The time that the caller may sleep or work before the launch ends, judged by earlier
    /// launches like it. Zero if unknown.
    fn spare(&self) -> Duration;

    /// Waits for the end of the launch, and returns the state that [`Lane::run`] leaves.
    ///
    /// # Errors
    /// If the engine fails.
    fn wait(self: Box<Self>) -> Result<State, RunError>;
}

/// A launch that ran during the call of [`Lane::enqueue`].
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
