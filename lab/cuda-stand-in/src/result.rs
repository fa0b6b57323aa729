//! Error codes of the driver: which ones the stand-in knows, and their names.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::sync::Mutex;

pub use cudarc::driver::sys::CUresult;
use cudarc::driver::sys::CUresult::*;

/// The result of an entry point of the driver.
pub type Outcome<T = ()> = Result<T, CUresult>;

const KNOWN: [CUresult; 36] = [
    CUDA_SUCCESS,
    CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_ERROR_NOT_INITIALIZED,
    CUDA_ERROR_DEVICE_UNAVAILABLE,
    CUDA_ERROR_NO_DEVICE,
    CUDA_ERROR_INVALID_DEVICE,
    CUDA_ERROR_INVALID_CONTEXT,
    CUDA_ERROR_ECC_UNCORRECTABLE,
    CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUDA_ERROR_INVALID_HANDLE,
    CUDA_ERROR_ILLEGAL_STATE,
    CUDA_ERROR_NOT_FOUND,
    CUDA_ERROR_NOT_READY,
    CUDA_ERROR_ILLEGAL_ADDRESS,
    CUDA_ERROR_LAUNCH_TIMEOUT,
    CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUDA_ERROR_ASSERT,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
    CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUDA_ERROR_LAUNCH_FAILED,
    CUDA_ERROR_NOT_PERMITTED,
    CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    CUDA_ERROR_STREAM_CAPTURE_MERGE,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
    CUDA_ERROR_CAPTURED_EVENT,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
    CUDA_ERROR_UNKNOWN,
];

/// The code with this number, if the stand-in knows it.
pub fn known(code: u32) -> Option<CUresult> {
    KNOWN.into_iter().find(|known| *known as u32 == code)
}

/// The name of a code as C text that lives as long as the process.
pub fn name(code: u32) -> Option<*const c_char> {
    static NAMES: Mutex<BTreeMap<u32, CString>> = Mutex::new(BTreeMap::new());
    let known = known(code)?;
    let mut names = NAMES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let name = names.entry(code).or_insert_with(|| CString::new(format!("{known:?}")).unwrap_or_default());
    // The text of a CString stays where it is when the map grows, and no entry is ever removed.
    Some(name.as_ptr())
}
