//! Wakes the driver at the scheduler's next expiry.

use downbeat_core::Time;
use parking_lot::{Condvar, Mutex};

use crate::clock::Clock;

/// A thread's alarm clock. Setting it later than it stands costs nothing: it goes off early once, and is set anew.
pub struct Alarm {
    state: Mutex<AlarmState>,
    changed: Condvar,
}

struct AlarmState {
    due: Time,
    stopped: bool,
}

impl Default for Alarm {
    fn default() -> Self {
        Alarm { state: Mutex::new(AlarmState { due: Time::MAX, stopped: false }), changed: Condvar::new() }
    }
}

impl Alarm {
    /// Goes off no later than `due`.
    pub fn set(&self, due: Time) {
        if due == Time::MAX {
            return;
        }
        let mut state = self.state.lock();
        if due < state.due {
            state.due = due;
            self.changed.notify_one();
        }
    }

    /// Makes [`Alarm::wait`] return false.
    pub fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Waits until the alarm goes off (true) or is stopped (false). Afterwards it is not set.
    pub fn wait(&self, clock: &Clock) -> bool {
        let mut state = self.state.lock();
        loop {
            if state.stopped {
                return false;
            }
            if clock.now() >= state.due {
                state.due = Time::MAX;
                return true;
            }
            match clock.instant(state.due) {
                None => self.changed.wait(&mut state),
                Some(instant) => {
                    self.changed.wait_until(&mut state, instant);
                }
            }
        }
    }
}
