//! The primitives of shared memory. In the crate `downbeat-loom` they are loom's, which tries every
//! order of accesses.

/// A cache line, with the next one, which processors fetch along. Its contents never move between
/// cores because of neighbouring data.
#[derive(Default)]
#[repr(align(128))]
pub struct Line<T>(pub T);

#[cfg(not(all(loom, test)))]
mod real {
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

    pub use crossbeam_queue::SegQueue;
    pub use parking_lot::{Mutex, MutexGuard};
}

#[cfg(all(loom, test))]
mod modelled {
    use std::collections::VecDeque;

    pub use loom::sync::MutexGuard;
    pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

    /// loom's mutex with the interface of parking_lot's.
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Mutex(loom::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }

        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    /// A queue with the interface of crossbeam's, which loom cannot look into.
    pub struct SegQueue<T>(loom::sync::Mutex<VecDeque<T>>);

    impl<T> SegQueue<T> {
        pub fn new() -> Self {
            SegQueue(loom::sync::Mutex::new(VecDeque::new()))
        }

        pub fn push(&self, value: T) {
            self.0.lock().unwrap().push_back(value);
        }

        pub fn pop(&self) -> Option<T> {
            self.0.lock().unwrap().pop_front()
        }

        pub fn is_empty(&self) -> bool {
            self.0.lock().unwrap().is_empty()
        }
    }
}

#[cfg(all(loom, test))]
pub use modelled::*;
#[cfg(not(all(loom, test)))]
pub use real::*;
