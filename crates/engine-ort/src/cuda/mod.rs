//! NVIDIA GPUs: the driver, and the parts of it that Downbeat uses. This module knows nothing of
//! models.
//!
//! All work is enqueued in streams, and events tell its end; no call waits for a whole device.

mod architectures;
mod device;
mod error;
mod graph;
mod graph_node;
pub mod ipc;
mod last_error;
pub(crate) mod libcuda;
pub(crate) mod libraries;
mod marks;
mod memory;
pub mod nvml;
mod options;
mod partition;
mod pinned;
mod ring;
mod stream;
mod unavailable;

use cudarc::driver::sys::{CUresult, CUstream, culib};

pub use architectures::Architectures;
pub use device::{Device, condemn};
pub use error::CudaError;
pub(crate) use graph::Graph;
pub(crate) use last_error::ForgetsLastError;
pub use libcuda::{DRIVER_FUNCTIONS, DriverInfo, DriverVersion, GpuInfo, OLDEST_DRIVER};
pub use libraries::FoundLibrary;
pub(crate) use marks::{Expected, Marks};
pub(crate) use memory::{CudaBuffer, DeviceAllocation, DeviceSlice, WEIGHT_ALIGNMENT};
pub use options::{CudaOptions, Missing, Provider};
pub use partition::{Partition, PartitionError, Rung, Splitter};
pub(crate) use pinned::{PinnedBytes, PinnedPool};
pub use ring::ring_on_device;
pub use stream::{Event, Stream};
pub use unavailable::CudaUnavailable;

/// Whether the loaded driver is the stand-in of the tests (`lab/cuda-stand-in`). The caller must
/// have a driver.
pub(crate) fn stands_in() -> bool {
    stand_in_view().is_some()
}

/// The host's address of a place in the stand-in's device memory.
pub(crate) fn view(address: u64) -> Result<u64, String> {
    let view = stand_in_view().ok_or("the driver is no stand-in")?;
    // SAFETY: the function takes any address.
    let place = unsafe { view(address) };
    if place.is_null() { Err(format!("{address:#x} is no address on the stand-in")) } else { Ok(place.addr() as u64) }
}

/// Tells the stand-in that the next kernel in a stream reads, or `writes`, these bytes. The
/// stand-in then checks the order of that kernel and other work.
pub(crate) fn touch(stream: &Stream, address: u64, len: usize, writes: bool) -> Result<(), String> {
    type Touch = unsafe extern "C" fn(CUstream, u64, u64, bool) -> CUresult;
    // SAFETY: a driver is loaded, as there is a stream; in the stand-in the symbol has this type,
    // and no other driver has it.
    let touch = unsafe { culib().get::<Touch>(b"stand_in_touch\0") }.map_err(|_| "the driver is no stand-in")?;
    // SAFETY: the stream is alive; any address may be given.
    let answer = unsafe { touch(stream.raw(), address, len as u64, writes) };
    Ok(stream.device().check("touching memory", answer.result())?)
}

/// A function of the stand-in that drivers do not have.
fn stand_in_view() -> Option<unsafe extern "C" fn(u64) -> *mut std::ffi::c_void> {
    // SAFETY: the callers ensure that a driver is loaded; in the stand-in the symbol has this type,
    // and no other driver has it.
    unsafe { culib().get(b"stand_in_view\0").ok().map(|function| *function) }
}
