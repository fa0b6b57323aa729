//! Inference engines behind one small trait. All foreign or `unsafe` code is in this crate.

pub mod choice;
mod cores;
pub mod cuda;
pub mod cut;
mod elf;
pub mod emulated;
pub mod install;
pub mod isolation;
pub mod library;
mod loader;
mod memory;
pub mod onnx;
pub mod onnxruntime;
pub mod preflight;
pub mod process;
mod python;
pub mod rten;
mod search;
pub mod stop;
pub mod tensor;
mod traits;
#[cfg(feature = "ucx")]
pub mod ucx;

pub use choice::{Choice, ChooseError, Preference, available, choose, may_load_elsewhere, of_executor, other_than};
pub use cores::{CoreSet, NotACoreSet, Pinned, Topology, ask_for_short_slices};
pub use cuda::{CudaOptions, CudaUnavailable, GpuInfo, Missing, Provider};
pub use cut::activations::{self, Activations};
pub use cut::operator_profile::OperatorProfile;
pub use cut::{Cut, SegmentInfo};
pub use emulated::Emulated;
pub use isolation::{ExecutorProgram, Isolated, TrialLimits};
pub use memory::run_memory::{self, MemoryBudget, RunMemory, TooMuchMemory};
pub use memory::{region, ring_memory};
pub use onnx::{Cause, Declared, DefaultValue, RowReport, Rows, file_bytes, hazard, inspect, row_report};
pub use onnxruntime::{Onnxruntime, OnnxruntimeCuda};
pub use process::normal_priority::{at_normal_priority, begin_normal_priority};
pub use process::scratch;
pub use rten::Rten;
pub use search::Search;
pub use stop::{STOPPED, Stop};
pub use tensor::fill::Fill;
pub use tensor::state::{State, StateError};
pub use tensor::{Buffer, OutOfMemory, Tensor, strings};
pub use traits::{
    DeviceMemory, DeviceShare, Division, DivisionError, Engine, EngineInfo, Executor, GraphNodes, GraphOutcome,
    GraphReport, Lane, LoadError, LoadOptions, Model, Part, Pending, Place, RunError, ShapeRange, Share, Span,
    StreamPriority, Timed, division, graph_report,
};

/// Variables that foreign libraries read once from the environment, for [`process::begin`].
pub const VARIABLES: &[(&str, &str)] = &[
    // onnxruntime's, before it collects anything. The API `DisableTelemetryEvents` comes too late:
    // making an environment begins the collection.
    ("ORT_DISABLE_TELEMETRY", "1"),
    // The NVIDIA driver's, in `cuInit`: its number of queues to a GPU; 8 by default, at most 32.
    // Streams that share a queue may wait for each other, even in partitions without a common unit
    // (cuda.h, Green Contexts).
    ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    // UCX's, before it is loaded: UCX would take over the signals of a crash.
    #[cfg(feature = "ucx")]
    ("UCX_HANDLE_ERRORS", "none"),
];
