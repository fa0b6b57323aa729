//! Inference engines behind one small trait; everything foreign or `unsafe` is here.

pub mod activations;
mod batch;
mod boundary;
mod buffer;
pub mod choice;
pub mod cuda;
mod elf;
pub mod emulated;
pub mod install;
pub mod onnx;
pub mod onnxruntime;
mod probe;
pub mod process;
mod python;
pub mod ring_memory;
pub mod rten;
pub mod scratch;
mod segment;
mod state;
mod stop;
pub mod strings;
pub mod tensor;
mod traits;

pub use activations::Activations;
pub use choice::{Choice, ChooseError, Preference, available, choose};
pub use cuda::{CudaOptions, CudaUnavailable, GpuInfo, Missing, Provider};
pub use emulated::Emulated;
pub use onnx::inspect;
pub use onnxruntime::{Onnxruntime, OnnxruntimeCuda, Search};
pub use rten::Rten;
pub use segment::{Cut, SegmentInfo};
pub use state::{State, StateError};
pub use stop::{STOPPED, Stop};
pub use tensor::{Buffer, OutOfMemory, Tensor};
pub use traits::{Engine, EngineInfo, Lane, LoadError, LoadOptions, Model, Place, RunError, Share};
