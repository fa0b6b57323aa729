//! NVIDIA GPUs: which are used, and how.

mod options;

pub use options::{CudaOptions, Missing, Provider, UnknownMissing, UnknownProvider};
