//! Requests that a thread of connections hands to the scheduler together.
//!
//! Example: 16 requests of one thread are ready at the same time. If the thread handed over the
//! first request at once, a lane's thread would wake and run a batch of one. So the thread reads
//! all 16 requests and hands them over at the end of its turn. Then they share a batch. If that
//! batch is brief, the thread runs it and wakes no other thread.

use std::cell::RefCell;
use std::sync::Arc;

use downbeat_core::{RequestId, Time};
use downbeat_host::device::{QueuedCall, run_own};
use downbeat_host::scheduler::Driver;
use downbeat_service::work::turn_end;

/// Requests that a thread holds back, at most.
const MOST: usize = 64;

thread_local! {
    static HELD_BACK: RefCell<HeldBack> = RefCell::default();
}

/// The requests that a thread holds back.
#[derive(Default)]
struct HeldBack {
    /// The driver of these requests; `None`: the thread holds no request back.
    driver: Option<Arc<Driver>>,
    calls: Vec<(RequestId, QueuedCall)>,
    /// The arrival of the first of these requests.
    since: Time,
    /// The turn of the thread's last request, and the number of requests in that turn.
    turn: u64,
    came: u32,
    /// The number of requests in the turn before that one, turns without a request left out.
    before: u32,
}

impl HeldBack {
    /// Counts a request that comes in a turn. Returns whether it seems to be alone.
    fn count(&mut self, turn: u64) -> bool {
        if turn != self.turn {
            (self.turn, self.before, self.came) = (turn, self.came, 0);
        }
        self.came += 1;
        self.came == 1 && self.before <= 1
    }
}

/// Hands a request over, which came at `arrival`: at once if it is the only one, or else at the end
/// of the thread's turn. `is_alone`: no other request of its model is in flight.
pub(super) fn hand_over(driver: &Arc<Driver>, id: RequestId, queued: QueuedCall, arrival: Time, is_alone: bool) {
    let Some(turn) = turn_end::turn() else {
        return run_own(is_alone, |own| driver.submit(id, queued, own));
    };
    let (now, is_full) = HELD_BACK.with_borrow_mut(|held| {
        let other = held.driver.as_ref().is_some_and(|other| !Arc::ptr_eq(other, driver));
        if (held.count(turn) && is_alone) || other {
            return (Some(queued), false);
        }
        if held.driver.is_none() {
            (held.driver, held.since) = (Some(driver.clone()), arrival);
            turn_end::at_end(flush);
        }
        held.calls.push((id, queued));
        (None, held.calls.len() >= MOST || arrival.since(held.since) > turn_end::most_held())
    });
    if let Some(queued) = now {
        run_own(is_alone, |own| driver.submit(id, queued, own));
    } else if is_full {
        flush();
    }
}

/// Hands over the requests that the thread holds back, and runs the launch that follows if it is
/// brief.
fn flush() {
    let (driver, mut calls) = HELD_BACK.with_borrow_mut(|held| (held.driver.take(), std::mem::take(&mut held.calls)));
    let Some(driver) = driver else { return };
    run_own(true, |own| driver.submit_all(calls.drain(..), own));
    // The allocation is for the next turn.
    HELD_BACK.with_borrow_mut(|held| {
        if held.calls.capacity() == 0 {
            held.calls = calls;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_alone_where_no_other_came_in_its_turn_or_the_one_before() {
        let mut held = HeldBack::default();
        let alone = [1, 2, 3, 3, 3, 7, 8].map(|turn| held.count(turn));
        assert_eq!(alone, [true, true, true, false, false, false, true]);
    }
}
