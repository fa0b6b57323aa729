//! NVIDIA GPUs: which are used, and how.

mod libcuda;
pub(crate) mod libraries;
mod options;
mod preflight;
mod unavailable;

pub use libcuda::{DriverInfo, DriverVersion, GpuInfo, OLDEST_DRIVER};
pub use libraries::FoundLibrary;
pub use options::{CudaOptions, Missing, Provider, UnknownMissing, UnknownProvider};
pub(crate) use preflight::gpus;
pub use preflight::{Ready, Survey, preflight, survey};
pub use unavailable::CudaUnavailable;
