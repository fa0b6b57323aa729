//! The process as foreign libraries see it: what they are told when it begins, and how it ends while they are at work.

use std::ffi::c_int;
use std::io::Write;

/// What libraries read in the environment, once.
const VARIABLES: &[(&str, &str)] = &[
    // onnxruntime's, before it collects anything: its API for that (`DisableTelemetryEvents`) comes too late, as making an environment begins it.
    ("ORT_DISABLE_TELEMETRY", "1"),
    // The NVIDIA driver's, in `cuInit`: how many queues it has to a GPU; 8 unless said otherwise. Streams that share one may wait for each other, also those of
    // partitions without a unit in common (cuda.h, Green Contexts). 32 is the most that it takes.
    ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    // UCX's, when it is loaded: it would take over the signals of a crash.
    #[cfg(feature = "ucx")]
    ("UCX_HANDLE_ERRORS", "none"),
    // Bytes of each thread's stack. The standard library reads the variable when the first thread starts. A thread that loads or
    // runs a model in rten recurses once for each operator of a chain. The pools of rten have no option for their stacks. Only
    // pages that a thread touches take memory.
    (STACK, "16777216"),
];

/// The variable of the standard library for the stack of each thread.
const STACK: &str = "RUST_MIN_STACK";
/// The standard library's size without [`STACK`], bytes.
const STACK_OF_STD: u64 = 2 << 20;

/// The variable for the stacks of a trial process, and its value. The stacks are smaller there: a file that fits there fits here, too.
pub(crate) fn stack_of_trials() -> (&'static str, String) {
    let own = std::env::var(STACK).ok().and_then(|bytes| bytes.parse().ok()).unwrap_or(STACK_OF_STD);
    (STACK, (own - own / 4).to_string())
}

unsafe extern "C" {
    fn _exit(status: c_int) -> !;
}

/// Sets the variables that the environment does not have. The variables keep libraries from sending data.
/// They give the NVIDIA driver many queues, and threads large stacks. `main` calls this first: with a second thread it does nothing.
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

/// Ends the process at once: no destructor of a library runs, as those pull away what threads that are still in the library stand on. What is to be kept
/// has to be written before.
pub fn end(status: u8) -> ! {
    // An output that is gone needs nothing written.
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
    // SAFETY: it ends the process, and has no other condition.
    unsafe { _exit(c_int::from(status)) }
}
