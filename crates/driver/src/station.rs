//! A state with its mailbox.

use crate::sync::{Mutex, MutexGuard, Ordering, SegQueue, fence};

/// A state that one thread at a time works on, with the mailbox that it works off.
///
/// Anybody puts messages in, and then tries to become the one who works them off. If somebody is at it already, that one will
/// find the message, and nobody waits: the mutex is only ever tried by those who have a message. (Rare commands that need an
/// answer at once do wait for it, [`Station::enter`].) A thread that stays in is the state's own thread.
///
/// **Bound.** The mailbox has none of its own: each message stands for a request that waits, whose number its queue bounds, for a batch
/// that runs, for a grant or an announcement, of which a model has one, or for a command.
pub struct Station<S, M> {
    mailbox: SegQueue<M>,
    state: Mutex<S>,
}

impl<S, M> Station<S, M> {
    pub fn new(state: S) -> Self {
        Station { mailbox: SegQueue::new(), state: Mutex::new(state) }
    }

    /// Leaves a message. Somebody has to look after it: [`Station::try_enter`].
    pub fn put(&self, message: M) {
        self.mailbox.push(message);
    }

    /// The oldest message.
    pub fn pop(&self) -> Option<M> {
        self.mailbox.pop()
    }

    /// The state, unless somebody is at it, who will look into the mailbox once more before long. Whoever gets it calls
    /// [`Station::is_done`] after leaving.
    pub fn try_enter(&self) -> Option<MutexGuard<'_, S>> {
        // The fences order "message put in, lock tried" here against "lock released, mailbox seen empty" there: one of
        // the two threads sees the other.
        fence(Ordering::SeqCst);
        self.state.try_lock()
    }

    /// The state, after waiting for whoever is at it.
    pub fn enter(&self) -> MutexGuard<'_, S> {
        self.state.lock()
    }

    /// After leaving: whether nothing came in the meantime. If something did, it has to be tried again.
    pub fn is_done(&self) -> bool {
        fence(Ordering::SeqCst);
        self.mailbox.is_empty()
    }
}

#[cfg(all(test, loom))]
mod modelled {
    use loom::sync::Arc;

    use super::*;

    fn post(station: &Station<Vec<u32>, u32>, message: u32) {
        station.put(message);
        while let Some(mut state) = station.try_enter() {
            while let Some(message) = station.pop() {
                state.push(message);
            }
            drop(state);
            if station.is_done() {
                return;
            }
        }
    }

    /// In every order: whatever was put in is worked off when all who put something in have gone, without anybody waiting.
    #[test]
    fn no_message_is_left_behind() {
        loom::model(|| {
            let station = Arc::new(Station::new(Vec::new()));
            let other = {
                let station = station.clone();
                loom::thread::spawn(move || post(&station, 1))
            };
            post(&station, 2);
            other.join().unwrap();
            let mut seen = station.enter().clone();
            seen.sort_unstable();
            assert_eq!(seen, [1, 2]);
        });
    }
}
