//! Sets environment variables for foreign libraries when the process starts. Ends the process
//! without the destructors of these libraries, whose threads may still work.

use std::ffi::c_int;
use std::io::Write;

/// Variables that libraries read once from the environment.
const VARIABLES: &[(&str, &str)] = &[
    // onnxruntime's, before it collects anything. The API `DisableTelemetryEvents` comes too late:
    // making an environment begins the collection.
    ("ORT_DISABLE_TELEMETRY", "1"),
    // The NVIDIA driver's, in `cuInit`: its number of queues to a GPU; 8 by default, at most 32.
    // Streams that share a queue may wait for each other, even in partitions without a common unit
    // (cuda.h, Green Contexts).
    ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    // UCX's, before it is loaded: UCX would take over the signals of a crash.
    #[cfg(feature = "ucx")]
    ("UCX_HANDLE_ERRORS", "none"),
    // Bytes of each thread's stack. The standard library reads the variable when the first thread
    // starts. A thread that loads or runs a model in rten recurses once for each operator of a
    // chain. The pools of rten have no option for their stacks. Only pages that a thread touches
    // take memory.
    (STACK, "16777216"),
];

/// The variable of the standard library for the stack of each thread.
const STACK: &str = "RUST_MIN_STACK";
/// The standard library's size without [`STACK`], bytes.
const STACK_OF_STD: u64 = 2 << 20;

/// The variable for the stacks of a trial process, and its value. Stacks are smaller there, so that
/// a file that fits there also fits here.
pub(crate) fn stack_of_trials() -> (&'static str, String) {
    let own = std::env::var(STACK).ok().and_then(|bytes| bytes.parse().ok()).unwrap_or(STACK_OF_STD);
    (STACK, (own - own / 4).to_string())
}

unsafe extern "C" {
    fn _exit(status: c_int) -> !;
}

/// Sets the variables that the environment does not have. The variables keep libraries from sending
/// data. They give the NVIDIA driver many queues, and threads large stacks. `main` calls this
/// first: with a second thread it does nothing.
pub fn begin() {
    if !std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1) {
        return;
    }
    for (name, value) in VARIABLES {
        if std::env::var_os(name).is_none() {
            // SAFETY: there is no other thread that could read the environment meanwhile.
            unsafe { std::env::set_var(name, value) };
        }
    }
}

/// Ends the process at once, without the destructors of libraries. Such a destructor would free
/// data that other threads of the library still use. The caller must write everything worth keeping
/// before the call.
pub fn end(status: u8) -> ! {
    // A closed output needs no flush.
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
    // SAFETY: it ends the process, and has no other condition.
    unsafe { _exit(c_int::from(status)) }
}
