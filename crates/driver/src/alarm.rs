//! One alarm clock for all mailboxes.

use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_core::{Duration, Time};
use parking_lot::{Condvar, Mutex};

use crate::sync::Line;

/// When each mailbox wants to be woken, for the one thread that does it.
///
/// Setting an alarm takes no lock unless it becomes the earliest of all.
pub struct Alarm {
    /// By mailbox.
    due_ns: Box<[Line<AtomicU64>]>,
    /// The thread wakes up by then on its own.
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

    /// Sets a mailbox's alarm, in place of its former one; [`Time::MAX`]: none. Called by whoever is in the mailbox.
    pub fn set(&self, mailbox: usize, due: Time) {
        let due = due.as_nanos();
        let Line(own) = &self.due_ns[mailbox];
        if own.load(Ordering::Relaxed) == due {
            return;
        }
        // In one order with what the thread does: either it sees this, or this sees that it did not.
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

    /// Waits until an alarm goes off, which clears it: its mailbox; `None` when stopped.
    pub fn wait(&self, now: impl Fn() -> Time) -> Option<usize> {
        let mut stopped = self.stopped.lock();
        while !*stopped {
            match self.look(&now) {
                Look::GoesOff(mailbox) => return Some(mailbox),
                Look::After(time) => {
                    self.changed.wait_for(&mut stopped, time.into());
                }
                Look::Never => self.changed.wait(&mut stopped),
            }
        }
        None
    }

    /// Clears an alarm that is due, and gives its mailbox; `None`: there is none. For one thread that has the time in hand, in place of [`Alarm::wait`].
    pub fn due(&self, now: Time) -> Option<usize> {
        if self.armed_ns.0.load(Ordering::Relaxed) > now.as_nanos() {
            return None;
        }
        let _waiting = self.stopped.lock();
        match self.look(&|| now) {
            Look::GoesOff(mailbox) => Some(mailbox),
            Look::After(_) | Look::Never => None,
        }
    }

    /// Clears the alarm that goes off now, if there is one, and arms the thread for the next otherwise.
    fn look(&self, now: &impl Fn() -> Time) -> Look {
        loop {
            // Armed anew before the alarms are looked at, so that none that is set meanwhile is passed over.
            self.armed_ns.0.store(u64::MAX, Ordering::SeqCst);
            let first =
                self.due_ns.iter().map(|Line(due)| due.load(Ordering::SeqCst)).enumerate().min_by_key(|(_, due)| *due);
            let Some((mailbox, due)) = first.filter(|(_, due)| *due != u64::MAX) else { return Look::Never };
            let time = now();
            if due > time.as_nanos() {
                self.armed_ns.0.store(due, Ordering::SeqCst);
                return Look::After(Time::from_nanos(due).since(time));
            }
            // Unless it was set anew this moment.
            if self.due_ns[mailbox].0.compare_exchange(due, u64::MAX, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                // The others are looked at when this one has been seen to.
                self.armed_ns.0.store(due, Ordering::SeqCst);
                return Look::GoesOff(mailbox);
            }
        }
    }
}

/// What becomes of the alarms.
enum Look {
    /// This mailbox's goes off.
    GoesOff(usize),
    /// The first goes off after this time.
    After(Duration),
    /// None is set.
    Never,
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

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
        alarm.set(1, at(40));
        assert_eq!((alarm.due(at(39)), alarm.due(at(40)), alarm.due(at(40))), (None, Some(1), None));
        alarm.stop();
        assert_eq!(alarm.wait(|| at(30)), None);
    }

    /// A thread that waits for nothing, or for something later, hears of what is set earlier.
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
        // An hour off, and then at once.
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
