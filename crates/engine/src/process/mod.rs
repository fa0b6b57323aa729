//! Sets environment variables for foreign libraries when the process starts. Ends the process
//! without the destructors of these libraries, whose threads may still work. The submodules have
//! priorities of threads, private folders, and the user's folder for caches.

pub mod normal_priority;
pub mod scratch;
pub mod user_cache;

use std::ffi::c_int;
use std::io::Write;

/// The variable of the standard library for the stack of each thread.
const STACK: &str = "RUST_MIN_STACK";
/// Bytes of each thread's stack. The standard library reads the variable when the first thread
/// starts. A thread that loads or runs a model in rten recurses once for each operator of a chain.
/// The pools of rten have no option for their stacks. Only pages that a thread touches take memory.
const STACK_OF_THREADS: (&str, &str) = (STACK, "16777216");
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

/// Sets the variables that the environment does not have: those of the libraries, and large stacks
/// for threads. `main` calls this first: with a second thread it does nothing.
pub fn begin(of_libraries: &[(&str, &str)]) {
    if !std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1) {
        return;
    }
    for (name, value) in of_libraries.iter().chain([&STACK_OF_THREADS]) {
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
