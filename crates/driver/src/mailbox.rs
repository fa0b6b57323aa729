//! A mailbox: a state that one thread at a time works on, with the messages to it.

use crate::sync::{Mutex, MutexGuard, Ordering, SegQueue, fence};

/// A state for one thread at a time, with the messages that the thread handles.
///
/// Any thread puts messages in, and then tries to become the mailbox's worker. If another thread
/// already works there, that thread finds the message, and no thread waits. Threads with a message
/// only try the mutex. (Rare commands that need an answer at once do wait for it,
/// [`Mailbox::enter`].) A thread that stays in is the state's own thread.
///
/// **Bound.** A mailbox has no bound of its own. A message stands for a waiting request, which its
/// queue bounds, for a running batch, for a command, or for a grant or an announcement. A model has
/// at most one grant and one announcement.
pub struct Mailbox<S, M> {
    messages: SegQueue<M>,
    state: Mutex<S>,
}

impl<S, M> Mailbox<S, M> {
    pub fn new(state: S) -> Self {
        Mailbox { messages: SegQueue::new(), state: Mutex::new(state) }
    }

    /// Leaves a message. The caller must look after it with [`Mailbox::try_enter`].
    pub fn put(&self, message: M) {
        self.messages.push(message);
    }

    /// Takes the oldest message.
    pub fn pop(&self) -> Option<M> {
        self.messages.pop()
    }

    /// The state, unless another thread has it. That thread looks for messages once more before
    /// long. A caller that gets the state calls [`Mailbox::is_done`] after leaving.
    pub fn try_enter(&self) -> Option<MutexGuard<'_, S>> {
        // The fences order "message put in, lock tried" here against "lock released, no message
        // seen" there. One of the two threads sees the other.
        fence(Ordering::SeqCst);
        self.state.try_lock()
    }

    /// The state, after waiting for the thread that has it.
    pub fn enter(&self) -> MutexGuard<'_, S> {
        self.state.lock()
    }

    /// The state, for a message that is not in the queue. `None`: another thread has the state, or
    /// older messages wait. Nearly every message finds the mailbox idle, and then needs neither a
    /// place in the queue nor a fence. A caller that gets the state handles its message first, and
    /// calls [`Mailbox::is_done`] after leaving. A caller that gets `None` puts its message into
    /// the queue as usual.
    pub fn enter_idle(&self) -> Option<MutexGuard<'_, S>> {
        // A thread that finds the lock taken at this moment has put its message into the queue. The caller works that message off, too.
        self.state.try_lock().filter(|_| self.messages.is_empty())
    }

    /// Whether no message came in the meantime, asked after leaving. If one did, the caller must
    /// try to enter again.
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

    /// In every order of accesses, all messages are handled once all posting threads have gone, and
    /// no thread waits.
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
