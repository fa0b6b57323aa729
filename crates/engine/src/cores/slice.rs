//! A thread that gets a core soon after it is woken.

/// The requested time slice, nanoseconds: the shortest that Linux gives.
const SLICE_NS: u64 = 100_000;

/// Gives the calling thread, and the threads that it starts, short time slices from now on. Once
/// woken, such a thread takes the core from a thread with longer slices, and itself loses the core
/// sooner. Its share of the cores stays the same.
///
/// With equal slices a woken thread waits until the kernel next checks the slice of the running
/// thread, up to 4 ms at 250 Hz. Before Linux 6.12, or if the kernel refuses, nothing changes.
pub fn ask_for_short_slices() {
    if let Some(attributes) = attributes().filter(|attributes| attributes.sched_policy == libc::SCHED_OTHER as u32) {
        set(&libc::sched_attr { sched_runtime: SLICE_NS, ..attributes });
    }
}

/// How the kernel schedules the calling thread.
fn attributes() -> Option<libc::sched_attr> {
    // SAFETY: all fields are numbers, which may be 0.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes at most `size()` bytes.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size(), 0) };
    (result == 0).then_some(attributes)
}

fn set(attributes: &libc::sched_attr) {
    let attributes = libc::sched_attr { size: size(), ..*attributes };
    // SAFETY: the call reads `size()` bytes. If the kernel refuses, nothing changes.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

fn size() -> u32 {
    size_of::<libc::sched_attr>() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_short_slices_and_those_that_it_starts_and_no_other_one() {
        let slice = || attributes().unwrap().sched_runtime;
        let before = slice();
        let (own, started) = std::thread::spawn(move || {
            ask_for_short_slices();
            (slice(), std::thread::spawn(slice).join().unwrap())
        })
        .join()
        .unwrap();
        // An older kernel reports no slices.
        let expected = if before == 0 { 0 } else { SLICE_NS };
        assert_eq!((own, started, slice()), (expected, expected, before));
    }
}
