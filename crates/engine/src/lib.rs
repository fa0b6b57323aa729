//! Inference engines behind one small trait; everything foreign or `unsafe` is here.

pub mod tensor;
mod traits;

pub use tensor::{Buffer, Tensor};
pub use traits::{Engine, EngineInfo, Lane, LoadError, LoadOptions, Model, RunError, State};
