//! An alarm clock for all mailboxes.

use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_core::Time;
use parking_lot::{Condvar, Mutex};

use crate::sync::Line;

/// The alarm times of all mailboxes, for the one thread that wakes mailboxes up.
///
/// Setting an alarm takes no lock unless it becomes the earliest of all.
pub struct Alarm {
    /// By mailbox: the time of its alarm.
    due_ns: Box<[Line<AtomicU64>]>,
    /// The latest time at which the thread wakes up on its own.
    armed_ns: Line<AtomicU64>,
    stopped: Mutex<bool>,
    changed: Condvar,
}

impl Alarm {
    pub fn new(mailboxes: usize) -> Self {
        Alarm {
            due_ns: (0..mailboxes).map(|_| Line(AtomicU64::new(u64::MAX))).collect(),
            armed_ns: Line(AtomicU64::new(u64::MAX)),
            stopped: Mutex::new(false),
            changed: Condvar::new(),
        }
    }

    /// Sets a mailbox's alarm, in place of its former one; [`Time::MAX`]: none. Only the thread
    /// that is in the mailbox calls this.
    pub fn set(&self, mailbox: usize, due: Time) {
        let due = due.as_nanos();
        let Line(own) = &self.due_ns[mailbox];
        if own.load(Ordering::Relaxed) == due {
            return;
        }
        // `SeqCst` puts this store and the thread's accesses in one order. Either the thread sees
        // this store, or the load below sees that the thread did not.
        own.store(due, Ordering::SeqCst);
        if due < self.armed_ns.0.load(Ordering::SeqCst) {
            let _waiting = self.stopped.lock();
            if due < self.armed_ns.0.load(Ordering::Relaxed) {
                self.armed_ns.0.store(due, Ordering::SeqCst);
                self.changed.notify_one();
            }
        }
    }

    /// Makes [`Alarm::wait`] return `None`.
    pub fn stop(&self) {
        *self.stopped.lock() = true;
        self.changed.notify_all();
    }

    /// The earliest alarm, with its mailbox; `None` without alarms.
    pub fn earliest(&self) -> Option<(Time, usize)> {
        let alarms = (0..).zip(&self.due_ns).map(|(mailbox, Line(due))| (due.load(Ordering::SeqCst), mailbox));
        let (due, mailbox) = alarms.min()?;
        (due != u64::MAX).then(|| (Time::from_nanos(due), mailbox))
    }

    /// Clears an alarm that still has the time `due`. Returns whether it was cleared.
    pub fn clear(&self, mailbox: usize, due: Time) -> bool {
        let Line(own) = &self.due_ns[mailbox];
        own.compare_exchange(due.as_nanos(), u64::MAX, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Waits until an alarm goes off, and clears it. Returns its mailbox, or `None` when stopped.
    pub fn wait(&self, now: impl Fn() -> Time) -> Option<usize> {
        let mut stopped = self.stopped.lock();
        while !*stopped {
            // The thread is armed anew before it looks at the alarms, so it misses no alarm set
            // meanwhile.
            self.armed_ns.0.store(u64::MAX, Ordering::SeqCst);
            let Some((due, mailbox)) = self.earliest() else {
                self.changed.wait(&mut stopped);
                continue;
            };
            let time = now();
            if due <= time {
                if self.clear(mailbox, due) {
                    return Some(mailbox);
                }
                continue;
            }
            self.armed_ns.0.store(due.as_nanos(), Ordering::SeqCst);
            self.changed.wait_for(&mut stopped, due.since(time).into());
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use downbeat_core::Duration;

    use super::*;

    #[test]
    fn the_earliest_goes_off_first_and_once() {
        let alarm = Alarm::new(3);
        let at = |ns| Time::from_nanos(ns);
        alarm.set(0, at(20));
        alarm.set(1, at(10));
        alarm.set(2, at(5));
        alarm.set(2, Time::MAX);
        assert_eq!(alarm.wait(|| at(30)), Some(1));
        assert_eq!(alarm.wait(|| at(30)), Some(0));
        alarm.stop();
        assert_eq!(alarm.wait(|| at(30)), None);
    }

    /// A thread that waits without an alarm, or for a later one, reacts to an earlier one.
    #[test]
    fn a_waiting_thread_follows_what_becomes_the_earliest() {
        let alarm = Arc::new(Alarm::new(2));
        let time = Arc::new(AtomicU64::new(0));
        let (send, rang) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn({
            let (alarm, time) = (alarm.clone(), time.clone());
            move || {
                while let Some(mailbox) = alarm.wait(|| Time::from_nanos(time.load(Ordering::SeqCst))) {
                    send.send(mailbox).unwrap();
                }
            }
        });
        // First an alarm an hour off, then one that is due at once.
        alarm.set(0, Time::ZERO + Duration::from_millis(3_600_000));
        alarm.set(1, Time::ZERO);
        assert_eq!(rang.recv(), Ok(1));
        time.store(Duration::from_millis(3_600_000).as_nanos(), Ordering::SeqCst);
        alarm.set(1, Time::ZERO);
        let mut both = [rang.recv().unwrap(), rang.recv().unwrap()];
        both.sort_unstable();
        assert_eq!(both, [0, 1]);
        alarm.stop();
        waiting.join().unwrap();
    }
}
