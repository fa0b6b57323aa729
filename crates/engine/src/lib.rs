//! Inference engines behind one small trait.
//!
//! The crate has the traits, tensors, the built-in engine (rten) and the emulated device. Isolation
//! runs any engine in a process of its own. The crate loads no library. `downbeat-engine-ort` has
//! the engines of libraries.

mod cores;
pub mod cut;
pub mod emulated;
pub mod isolation;
mod memory;
pub mod onnx;
pub mod process;
pub mod rten;
pub mod stop;
pub mod tensor;
mod traits;

pub use cores::{CoreSet, NotACoreSet, Pinned, Topology, ask_for_short_slices};
pub use cut::activations::{self, Activations};
pub use cut::operator_profile::OperatorProfile;
pub use cut::{Cut, SegmentInfo};
pub use emulated::Emulated;
pub use isolation::{
    AnswerTable, ExecutorProgram, Instance, InstanceStarter, Isolated, LoadedInstance, Side, TrialLimits,
};
pub use memory::run_memory::{self, MemoryBudget, RunMemory, TooMuchMemory};
pub use memory::{region, ring_memory};
pub use onnx::{Cause, Declared, DefaultValue, HeldFile, RowReport, Rows};
pub use onnx::{file_bytes, hazard, inspect, model_bytes, row_report};
pub use process::normal_priority::{at_normal_priority, begin_normal_priority};
pub use process::scratch;
pub use process::user_cache::user_cache;
pub use rten::Rten;
pub use stop::{STOPPED, Stop};
pub use tensor::fill::Fill;
pub use tensor::state::{State, StateError};
pub use tensor::{Buffer, OutOfMemory, Tensor, strings};
pub use traits::{
    Answered, Answers, AnswersTo, AskedRequest, ClientLeft, DeviceMemory, DeviceShare, Division, DivisionError, Engine,
    EngineInfo, ErrorCode, Executor, GraphNodes, GraphOutcome, GraphReport, Lane, LoadError, LoadOptions, Model,
    OnReady, Part, Pending, Place, PythonOptions, RequestAbout, RunError, ShapeRange, Share, Span, StreamPriority,
    TakesAnswers, Timed, division, graph_report,
};
