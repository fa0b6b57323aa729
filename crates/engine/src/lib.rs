//! Inference engines behind one small trait. All foreign or `unsafe` code is in this crate.

pub mod activations;
mod batch;
mod boundary;
mod buffer;
pub mod choice;
mod cores;
pub mod cuda;
mod division;
mod elf;
pub mod emulated;
mod fill;
pub mod graph_report;
pub mod install;
pub mod isolation;
mod normal_priority;
pub mod onnx;
pub mod onnxruntime;
mod operator_profile;
mod probe;
pub mod process;
mod python;
pub mod region;
pub mod ring_memory;
pub mod rten;
pub mod run_memory;
pub mod scratch;
mod segment;
mod state;
mod stop;
pub mod strings;
pub mod tensor;
mod traits;
#[cfg(feature = "ucx")]
pub mod ucx;

pub use activations::Activations;
pub use choice::{Choice, ChooseError, Preference, available, choose, may_load_elsewhere, other_than};
pub use cores::{CoreSet, NotACoreSet, Pinned, Topology, ask_for_short_slices};
pub use cuda::{CudaOptions, CudaUnavailable, GpuInfo, Missing, Provider, Span};
pub use division::{Division, DivisionError, Part};
pub use emulated::Emulated;
pub use fill::Fill;
pub use graph_report::{GraphNodes, GraphOutcome, GraphReport};
pub use isolation::{Executor, ExecutorProgram, Isolated, TrialLimits};
pub use normal_priority::{at_normal_priority, begin_normal_priority};
pub use onnx::{Cause, Declared, DefaultValue, RowReport, Rows, file_bytes, hazard, inspect, row_report};
pub use onnxruntime::{Onnxruntime, OnnxruntimeCuda, Search};
pub use operator_profile::OperatorProfile;
pub use rten::Rten;
pub use run_memory::{MemoryBudget, RunMemory, TooMuchMemory};
pub use segment::{Cut, SegmentInfo};
pub use state::{State, StateError};
pub use stop::{STOPPED, Stop};
pub use tensor::{Buffer, OutOfMemory, Tensor};
pub use traits::{
    DeviceMemory, DeviceShare, Engine, EngineInfo, Lane, LoadError, LoadOptions, Model, Pending, Place, RunError,
    ShapeRange, Share, StreamPriority,
};
