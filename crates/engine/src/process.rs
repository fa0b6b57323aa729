//! The process as foreign libraries see it: what they are told when it begins, and how it ends while they are at work.

use std::ffi::{OsStr, c_int};
use std::io::{self, Write};
use std::ops::Range;

use rustix::mm::{Advice, madvise};

/// What foreign libraries read in the environment, once.
const VARIABLES: [(&str, &str); 3] = [
    // onnxruntime's, before it collects anything: its API for that (`DisableTelemetryEvents`) comes too late, as making an environment begins it.
    ("ORT_DISABLE_TELEMETRY", "1"),
    // The NVIDIA driver's, in `cuInit`: how many queues it has to a GPU; 8 unless said otherwise. Streams that share one may wait for each other, also those of
    // partitions without a unit in common (cuda.h, Green Contexts). 32 is the most that it takes.
    ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    // UCX's, when it is loaded: it would take over the signals of a crash.
    ("UCX_HANDLE_ERRORS", "none"),
];

unsafe extern "C" {
    fn _exit(status: c_int) -> !;
}

/// Has foreign libraries collect and send nothing about the process, and the NVIDIA driver have a queue for each of many streams, unless the environment says
/// otherwise. To be called first in `main`: with a second thread it does nothing.
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

/// Takes the program's code out of the process. The kernel brings back what is called from now on, from the file. The start and
/// the loads of models have called much that is not called again.
///
/// # Errors
/// If the kernel does not say where the code is, or refuses.
pub fn release_code() -> io::Result<()> {
    let program = std::fs::read_link("/proc/self/exe")?;
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    for pages in maps.lines().filter_map(|line| code_of(program.as_os_str(), line)) {
        let begin = std::ptr::with_exposed_provenance_mut(pages.start);
        // SAFETY: the pages are of a file and may not be written, so that they are the same when they are read again.
        unsafe { madvise(begin, pages.len(), Advice::LinuxDontNeed)? };
    }
    Ok(())
}

/// The addresses that a line of `/proc/self/maps` is about, if these hold code of the program which has never been written.
fn code_of(program: &OsStr, line: &str) -> Option<Range<usize>> {
    let mut fields = line.splitn(6, ' ');
    let (begin, end) = fields.next()?.split_once('-')?;
    // Behind these: where in the file, on which device, its number.
    let (may, path) = (fields.next()?, fields.nth(3)?);
    let address = |text| usize::from_str_radix(text, 16).ok();
    let is_code = may == "r-xp" && OsStr::new(path.trim_start()) == program;
    is_code.then_some(address(begin)?..address(end)?)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_code_of_the_program_is_released() {
        let of = |line| code_of(OsStr::new("/usr/bin/down beat"), line);
        let code = "55d0-55e0 r-xp 00002000 fe:00 1234                       /usr/bin/down beat";
        assert_eq!(of(code), Some(0x55d0..0x55e0));
        // Constants may have been written when the program was linked at its place.
        assert_eq!(of("55e0-55f0 r--p 00012000 fe:00 1234                       /usr/bin/down beat"), None);
        assert_eq!(of("55d0-55e0 r-xp 00002000 fe:00 1234                       /usr/lib/libc.so"), None);
        assert_eq!(of("55d0-55e0 r-xp 00000000 00:00 0"), None);
        assert_eq!(of(""), None);
    }

    #[test]
    fn code_that_was_released_runs_on() {
        release_code().unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let program = std::fs::read_link("/proc/self/exe").unwrap();
        assert!(maps.lines().any(|line| code_of(program.as_os_str(), line).is_some()), "{maps}");
    }
}
