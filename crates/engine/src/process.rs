//! The process as foreign libraries see it: what they are told when it begins, and how it ends while they are at work.

use std::ffi::c_int;
use std::io::Write;

/// What onnxruntime reads before it collects anything: its API for that (`DisableTelemetryEvents`) comes too late, as making an environment begins it.
const DISABLE_TELEMETRY: &str = "ORT_DISABLE_TELEMETRY";

unsafe extern "C" {
    fn _exit(status: c_int) -> !;
}

/// Has foreign libraries collect and send nothing about the process, unless the environment says otherwise. To be called first in `main`: with a second
/// thread it does nothing.
pub fn begin() {
    let is_alone = std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1);
    if is_alone && std::env::var_os(DISABLE_TELEMETRY).is_none() {
        // SAFETY: there is no other thread that could read the environment meanwhile.
        unsafe { std::env::set_var(DISABLE_TELEMETRY, "1") };
    }
}

/// Ends the process at once: no destructor of a library runs, as those pull away what threads that are still in the library stand on. What is to be kept
/// has to be written before.
pub fn end(status: u8) -> ! {
    // An output that is gone needs nothing written.
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
    // SAFETY: it ends the process, and has no other condition.
    unsafe { _exit(c_int::from(status)) }
}
