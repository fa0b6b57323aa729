//! The last error of the CUDA runtime, which each thread keeps until a call asks for it.

use std::ffi::c_int;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LAZY};

/// Its drop forgets the error that the calling thread keeps. Drop it after a library has given
/// resources back to a device. The library does not check for success, and on a lost device the
/// error remains. The thread's next launch would then find it, even on another device.
pub(crate) struct ForgetsLastError;

type GetLastError = unsafe extern "C" fn() -> c_int;

impl Drop for ForgetsLastError {
    fn drop(&mut self) {
        static FUNCTION: OnceLock<Option<(GetLastError, Library)>> = OnceLock::new();
        let find = || {
            // SAFETY: the provider is linked to the library, so that it is loaded already.
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
