//! Work that a thread of connections leaves for the end of a turn of its event loop. A turn ends
//! once all ready tasks have run.

use std::cell::{Cell, RefCell};

use downbeat_core::Duration;

/// How long a thread of connections holds a request back, at most. A batch that the thread runs
/// itself takes at most half as long.
pub const LONGEST: Duration = Duration::from_micros(200);

thread_local! {
    /// How many turns the thread's event loop has had; `None`: the thread has no turns.
    static TURN: Cell<Option<u64>> = const { Cell::new(None) };
    /// How long a request may be held back.
    static MOST_HELD: Cell<Duration> = const { Cell::new(LONGEST) };
    /// Work for the end of this turn.
    static DUE: RefCell<Vec<fn()>> = const { RefCell::new(Vec::new()) };
}

/// Notes that the calling thread has an event loop, which calls [`end`] when a turn ends. A request
/// is held back for at most `longest`: [`LONGEST`], but for tests that must not depend on the
/// machine's speed.
pub fn follow(longest: Duration) {
    TURN.set(Some(0));
    MOST_HELD.set(longest);
}

/// How long a request may be held back for the end of a turn. After that time the thread hands over
/// at its next request, in the middle of the turn.
pub fn most_held() -> Duration {
    MOST_HELD.get()
}

/// The number of the present turn of the thread's event loop; `None`: the thread has no turns.
pub fn turn() -> Option<u64> {
    TURN.get()
}

/// Does `work` at the end of this turn, or now if the thread has no turns.
pub fn at_end(work: fn()) {
    match TURN.get() {
        Some(_) => DUE.with_borrow_mut(|due| due.push(work)),
        None => work(),
    }
}

/// The event loop has come to all that was ready.
pub fn end() {
    let Some(turn) = TURN.get() else { return };
    TURN.set(Some(turn.wrapping_add(1)));
    let mut due = DUE.take();
    if due.is_empty() {
        return;
    }
    for work in due.drain(..) {
        // An uncaught panic would end the thread, and with it all of its connections.
        if std::panic::catch_unwind(work).is_err() {
            tracing::error!("what was left for the end of a turn ended in a panic: this is a defect");
        }
    }
    // The next turn reuses the allocation, unless the work has begun a new list.
    DUE.with_borrow_mut(|next| {
        if next.is_empty() {
            *next = due;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static DONE: Cell<u32> = const { Cell::new(0) };
    }

    fn work() {
        DONE.set(DONE.get() + 1);
    }

    #[test]
    fn work_waits_for_the_end_of_a_turn_and_is_done_once() {
        at_end(work);
        assert_eq!((DONE.get(), turn()), (1, None), "this thread has no event loop");
        follow(LONGEST);
        at_end(work);
        assert_eq!((DONE.get(), turn()), (1, Some(0)));
        end();
        end();
        assert_eq!((DONE.get(), turn()), (2, Some(2)));
    }

    #[test]
    fn a_panic_ends_neither_the_thread_nor_what_is_left_beside_it() {
        follow(LONGEST);
        at_end(|| panic!("on purpose"));
        at_end(work);
        end();
        assert_eq!(DONE.get(), 1);
    }

    #[test]
    fn work_may_leave_work_for_the_next_turn() {
        follow(LONGEST);
        at_end(|| at_end(work));
        end();
        assert_eq!(DONE.get(), 0);
        end();
        assert_eq!(DONE.get(), 1);
    }
}
