//! The gate counts the cost of a request without a clock, and compares it with the numbers in
//! `counts.toml`.
//!
//! ```text
//! downbeat-gate                      # counts every way, and compares with counts.toml
//! downbeat-gate --write              # writes what it counted there
//! downbeat-gate features http-json   # instructions a request, by our functions
//! ```
//!
//! A *way* is a path that requests take, such as an inference over HTTP with JSON, or a batch in an
//! executor process. For each way this program starts itself under valgrind's callgrind. A run has
//! a part of N requests and a part of 2N. The difference divided by N is the cost of a request,
//! without start and end. Time stands still meanwhile (`gate/still.rs`), and seeds are the same
//! each time.
//!
//! The numbers do not depend on the processor. Valgrind shows each program the same processor, on
//! every host with AVX2, and libraries choose their code by that. The numbers depend on the
//! compiler, whose version is in the file. They depend a little on libc's functions that copy
//! memory. Hence the tolerance of 1%.
//!
//! The gate drives callgrind itself. `gungraun` needs a second program installed and keeps its
//! numbers outside the tree. `gungraun` counts one process with all its threads. The gate leaves
//! out the client's thread and counts an executor's process too.
//!
//! | count | by |
//! |---|---|
//! | instructions | callgrind: all threads but the client's |
//! | allocations, and their bytes | this program's allocator, which is `downbeat`'s |
//! | locks; atomics | the instructions that ran, looked up in the program's machine code (`gate/locks.rs`) |
//! | system calls, futex calls | valgrind's trace of them |
//! | context switches, where a way goes from process to process | the operating system, in a run without valgrind on one core |
//! | clock reads | `clock_gettime` in `gate/still.rs`: outside valgrind it is no system call |

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod gate;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn main() -> std::process::ExitCode {
    gate::main()
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn main() -> std::process::ExitCode {
    eprintln!("error: requests are counted on Linux and x86-64, whose system calls and instructions the gate knows");
    std::process::ExitCode::FAILURE
}
