//! The last error of the CUDA runtime, which each thread keeps until somebody asks for it.

use std::ffi::c_int;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LAZY};

/// Forgets, when dropped, the error that the calling thread keeps. To be dropped after what a library gives back to a device: it does not ask whether that went
/// well, and where the device is lost the thread's next launch would find the error, also one on another device.
pub(crate) struct ForgetsLastError;

type GetLastError = unsafe extern "C" fn() -> c_int;

impl Drop for ForgetsLastError {
    fn drop(&mut self) {
        static FUNCTION: OnceLock<Option<(GetLastError, Library)>> = OnceLock::new();
        let find = || {
            // SAFETY: the provider is linked to it, so that it is loaded already.
            let library = unsafe { Library::open(Some("libcudart.so.13"), RTLD_LAZY) }.ok()?;
            // SAFETY: the function has this type; the library stays loaded.
            let function = *unsafe { library.get::<GetLastError>(b"cudaGetLastError\0") }.ok()?;
            Some((function, library))
        };
        if let Some((get_last_error, _)) = FUNCTION.get_or_init(find) {
            // SAFETY: it has no conditions.
            unsafe { get_last_error() };
        }
    }
}
