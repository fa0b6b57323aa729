//! Where a thread is left its next piece of work.

use parking_lot::{Condvar, Mutex};

/// Where a thread that does one thing at a time is left the next.
pub struct Handoff<T> {
    next: Mutex<Next<T>>,
    arrived: Condvar,
}

struct Next<T> {
    work: Option<T>,
    stopped: bool,
    waiting: bool,
}

impl<T> Default for Handoff<T> {
    fn default() -> Self {
        Handoff { next: Mutex::new(Next { work: None, stopped: false, waiting: false }), arrived: Condvar::new() }
    }
}

impl<T> Handoff<T> {
    /// Leaves work. Asserts that none is there: whoever decides gives work to those that are free only.
    pub fn put(&self, work: T) {
        let mut next = self.next.lock();
        assert!(next.work.is_none(), "a device or lane runs one batch at a time, and was given a second");
        next.work = Some(work);
        if next.waiting {
            self.arrived.notify_one();
        }
    }

    /// Ends the thread after its present work.
    pub fn stop(&self) {
        self.next.lock().stopped = true;
        self.arrived.notify_all();
    }

    /// Waits for work; `None` when stopped.
    pub fn take(&self) -> Option<T> {
        let mut next = self.next.lock();
        loop {
            if let Some(work) = next.work.take() {
                return Some(work);
            }
            if next.stopped {
                return None;
            }
            next.waiting = true;
            self.arrived.wait(&mut next);
            next.waiting = false;
        }
    }
}
