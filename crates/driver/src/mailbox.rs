//! A state with its messages.

use crate::sync::{Mutex, MutexGuard, Ordering, SegQueue, fence};

/// A state that one thread at a time works on, with the messages that it works off.
///
/// Anybody puts messages in, and then tries to become the one who works them off. If somebody is at it already, that one will
/// find the message, and nobody waits: the mutex is only ever tried by those who have a message. (Rare commands that need an
/// answer at once do wait for it, [`Mailbox::enter`].) A thread that stays in is the state's own thread.
///
/// **Bound.** It has none of its own: each message stands for a request that waits, whose number its queue bounds, for a batch
/// that runs, for a grant or an announcement, of which a model has one, or for a command.
pub struct Mailbox<S, M> {
    messages: SegQueue<M>,
    state: Mutex<S>,
}

impl<S, M> Mailbox<S, M> {
    pub fn new(state: S) -> Self {
        Mailbox { messages: SegQueue::new(), state: Mutex::new(state) }
    }

    /// Leaves a message. Somebody has to look after it: [`Mailbox::try_enter`].
    pub fn put(&self, message: M) {
        self.messages.push(message);
    }

    /// The oldest message.
    pub fn pop(&self) -> Option<M> {
        self.messages.pop()
    }

    /// The state, unless somebody is at it, who will look for messages once more before long. Whoever gets it calls
    /// [`Mailbox::is_done`] after leaving.
    pub fn try_enter(&self) -> Option<MutexGuard<'_, S>> {
        // The fences order "message put in, lock tried" here against "lock released, no message seen" there: one of
        // the two threads sees the other.
        fence(Ordering::SeqCst);
        self.state.try_lock()
    }

    /// The state, after waiting for whoever is at it.
    pub fn enter(&self) -> MutexGuard<'_, S> {
        self.state.lock()
    }

    /// The state, for a message that is not in the queue. `None`: another thread has the state, or older messages wait. Nearly every message finds the mailbox
    /// idle, and then needs neither a place in the queue nor a fence. A caller that gets the state handles its message first, and calls [`Mailbox::is_done`] after
    /// leaving. A caller that gets `None` puts its message into the queue as usual.
    pub fn enter_idle(&self) -> Option<MutexGuard<'_, S>> {
        // A thread that finds the lock taken at this moment has put its message into the queue. The caller works that message off, too.
        self.state.try_lock().filter(|_| self.messages.is_empty())
    }

    /// After leaving: whether nothing came in the meantime. If something did, it has to be tried again.
    pub fn is_done(&self) -> bool {
        fence(Ordering::SeqCst);
        self.messages.is_empty()
    }
}

#[cfg(all(test, loom))]
mod modelled {
    use loom::sync::Arc;

    use super::*;

    fn post(mailbox: &Mailbox<Vec<u32>, u32>, message: u32) {
        if let Some(mut state) = mailbox.enter_idle() {
            state.push(message);
            drop(state);
            if mailbox.is_done() {
                return;
            }
        } else {
            mailbox.put(message);
        }
        while let Some(mut state) = mailbox.try_enter() {
            while let Some(message) = mailbox.pop() {
                state.push(message);
            }
            drop(state);
            if mailbox.is_done() {
                return;
            }
        }
    }

    /// In every order: whatever was put in is worked off when all who put something in have gone, without anybody waiting.
    #[test]
    fn no_message_is_left_behind() {
        loom::model(|| {
            let mailbox = Arc::new(Mailbox::new(Vec::new()));
            let other = {
                let mailbox = mailbox.clone();
                loom::thread::spawn(move || post(&mailbox, 1))
            };
            post(&mailbox, 2);
            other.join().unwrap();
            let mut seen = mailbox.enter().clone();
            seen.sort_unstable();
            assert_eq!(seen, [1, 2]);
        });
    }
}
