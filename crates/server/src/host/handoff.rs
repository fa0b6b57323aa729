//! Where a thread is left its next piece of work.

use downbeat_core::Duration;
use parking_lot::{Condvar, Mutex};

use crate::clock::Clock;

/// How often something is handed over to see what that takes.
const ROUNDS: usize = 400;

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
    /// Leaves work. Asserts that none is there: whoever decides gives work to those only that have taken what they were given before.
    pub fn put(&self, work: T) {
        let mut next = self.next.lock();
        assert!(next.work.is_none(), "a device or lane is given a batch once it has taken the one before");
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

    /// Waits for work for so long at most; `None` also when stopped.
    pub fn take_within(&self, time: Duration) -> Option<T> {
        let mut next = self.next.lock();
        if next.work.is_none() && !next.stopped && time > Duration::ZERO {
            next.waiting = true;
            self.arrived.wait_for(&mut next, time.into());
            next.waiting = false;
        }
        next.work.take()
    }
}

/// What it takes to hand something over to a thread that waits for it, on this machine as it is now; `None` if there is no thread for it.
pub(crate) fn hand_over_time(clock: Clock) -> Option<Duration> {
    let (there, back) = (Handoff::default(), Handoff::default());
    std::thread::scope(|scope| {
        let echo = || {
            while there.take().is_some() {
                back.put(());
            }
        };
        std::thread::Builder::new().name("hand-over".to_owned()).spawn_scoped(scope, echo).ok()?;
        let mut times: Vec<Duration> = (0..ROUNDS)
            .map(|_| {
                let begin = clock.now();
                there.put(());
                back.take();
                clock.now().since(begin)
            })
            .collect();
        there.stop();
        times.sort_unstable();
        // There and back.
        Some(Duration::from_nanos(times[ROUNDS / 2].as_nanos() / 2))
    })
}
