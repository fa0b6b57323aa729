//! Counts allocations, if the program has installed the counting allocator.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

static ARMED: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU64 = AtomicU64::new(0);

/// An allocator that passes every call on to another one. While [`Counter`] is at work, it counts
/// the calls that allocate.
///
/// At all other times a call costs one more load, of a flag that no thread writes.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator<A>(A);

impl<A> CountingAllocator<A> {
    /// Counts the calls to `inner`.
    pub const fn new(inner: A) -> Self {
        CountingAllocator(inner)
    }
}

fn count() {
    if ARMED.load(Ordering::Relaxed) {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed on to the inner allocator as it came, and counting allocates
// nothing.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are those that the inner allocator asks for.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { self.0.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { self.0.realloc(pointer, layout, size) }
    }
}

/// Counts the whole process's allocations between its start and its end. One at a time.
#[derive(Debug)]
pub struct Counter {
    before: u64,
}

impl Counter {
    /// Starts to count; `None` if the program has not installed [`CountingAllocator`], so that
    /// nothing counts.
    pub fn start() -> Option<Self> {
        ARMED.store(true, Ordering::Relaxed);
        let before = COUNT.load(Ordering::Relaxed);
        drop(std::hint::black_box(Box::new(0u64)));
        let installed = COUNT.load(Ordering::Relaxed) > before;
        ARMED.store(installed, Ordering::Relaxed);
        installed.then(|| Counter { before: COUNT.load(Ordering::Relaxed) })
    }

    /// Stops counting, and returns the number of allocations.
    pub fn stop(self) -> u64 {
        ARMED.store(false, Ordering::Relaxed);
        COUNT.load(Ordering::Relaxed) - self.before
    }
}
