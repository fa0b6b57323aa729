//! The engines of foreign libraries: ONNX Runtime on the CPU, and on NVIDIA GPUs by its CUDA and
//! TensorRT providers.
//!
//! The crate also finds and installs these libraries, and chooses among all engines. The feature
//! `ucx` adds UCX, which reads the memory of other machines.

pub mod choice;
pub mod cuda;
mod elf;
mod environment;
pub mod install;
pub mod library;
mod loader;
pub mod onnxruntime;
pub mod preflight;
mod python;
mod search;
#[cfg(feature = "ucx")]
pub mod ucx;

pub use choice::{Choice, ChooseError, Preference, available, choose, may_load_elsewhere, of_executor, other_than};
pub use cuda::{CudaOptions, CudaUnavailable, GpuInfo, Missing, Provider};
pub use onnxruntime::{Onnxruntime, OnnxruntimeCuda};
pub use search::Search;

/// Variables that foreign libraries read once from the environment, for [`downbeat_engine::process::begin`].
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
