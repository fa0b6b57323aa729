//! Inference engines behind one small trait; everything foreign or `unsafe` is here.

mod batch;
mod buffer;
pub mod choice;
pub mod emulated;
pub mod install;
pub mod onnx;
pub mod onnxruntime;
pub mod ring_memory;
pub mod rten;
pub mod strings;
pub mod tensor;
mod traits;

pub use choice::{Choice, ChooseError, Preference, available, choose};
pub use emulated::Emulated;
pub use onnx::inspect;
pub use onnxruntime::{Onnxruntime, Search};
pub use rten::Rten;
pub use tensor::{Buffer, Tensor};
pub use traits::{Engine, EngineInfo, Lane, LoadError, LoadOptions, Model, RunError, State};
