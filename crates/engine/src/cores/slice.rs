//! A thread that is given a core soon after it is woken.

/// The time slice that is asked for, nanoseconds: the shortest that Linux gives.
const SLICE_NS: u64 = 100_000;

/// The calling thread, and those that it starts, have short time slices from now on: woken, it takes the core from a thread with longer ones, and is itself taken off sooner. Its part of the cores stays the same.
///
/// Otherwise who is woken waits until the kernel looks next whether the one that runs has had its slice, up to 4 ms at 250 Hz. Before Linux 6.12, and where it is refused, nothing changes.
pub fn ask_for_short_slices() {
    if let Some(attributes) = attributes().filter(|attributes| attributes.sched_policy == libc::SCHED_OTHER as u32) {
        set(&libc::sched_attr { sched_runtime: SLICE_NS, ..attributes });
    }
}

/// How the kernel schedules the calling thread.
fn attributes() -> Option<libc::sched_attr> {
    // SAFETY: numbers, all of which may be 0.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: it writes at most as many bytes as it is told that there are.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size(), 0) };
    (result == 0).then_some(attributes)
}

fn set(attributes: &libc::sched_attr) {
    let attributes = libc::sched_attr { size: size(), ..*attributes };
    // SAFETY: it reads as many bytes as it is told that there are. Refused, it changes nothing.
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
        // An older kernel says nothing of slices.
        let expected = if before == 0 { 0 } else { SLICE_NS };
        assert_eq!((own, started, slice()), (expected, expected, before));
    }
}
