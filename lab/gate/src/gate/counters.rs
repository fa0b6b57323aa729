//! Counters of allocations, clock reads, futex calls and context switches.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_bench::allocator::Mimalloc;

/// The number of counters.
pub const KINDS: usize = 5;

static COUNTERS: [AtomicU64; KINDS] = [const { AtomicU64::new(0) }; KINDS];

thread_local! {
    /// The thread stands for a client, so the counters leave it out.
    static IS_CLIENT: Cell<bool> = const { Cell::new(false) };
}

/// A counter.
#[derive(Clone, Copy, Debug)]
pub enum Counter {
    /// Calls that allocate, or make an allocation larger or smaller.
    Allocations,
    /// Bytes that these calls ask for.
    Bytes,
    /// Looks at a clock.
    ClockReads,
    /// System calls that wait for another thread, or wake one.
    Futexes,
    /// The number of times that a thread of the process gave its core up, to wait.
    Switches,
}

/// Makes the calling thread a client: the counters leave out all its work from now on.
pub fn be_client() {
    IS_CLIENT.set(true);
}

/// Returns true if the calling thread stands for a client.
pub fn is_client() -> bool {
    IS_CLIENT.get()
}

/// Adds to a counter. Threads run in turn here, so a load and a store suffice.
pub fn count(counter: Counter, by: u64) {
    if !is_client() {
        let counter = &COUNTERS[counter as usize];
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }
}

/// The counts so far, by [`Counter`].
pub fn counted() -> [u64; KINDS] {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel writes one rusage there, and all zeros are a valid rusage.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    COUNTERS[Counter::Switches as usize].store(usage.ru_nvcsw as u64, Ordering::Relaxed);
    COUNTERS.each_ref().map(|counter| counter.load(Ordering::Relaxed))
}

/// The allocator of the `downbeat` program, counted.
pub struct CountedAllocator(pub Mimalloc);

fn allocated(bytes: usize) {
    count(Counter::Allocations, 1);
    count(Counter::Bytes, bytes as u64);
}

// SAFETY: every call is passed on to the inner allocator as it came, and counting allocates
// nothing.
unsafe impl GlobalAlloc for CountedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        allocated(layout.size());
        // SAFETY: the caller's promises are those that the inner allocator asks for.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        allocated(layout.size());
        // SAFETY: as above.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { self.0.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        allocated(size);
        // SAFETY: as above.
        unsafe { self.0.realloc(pointer, layout, size) }
    }
}
