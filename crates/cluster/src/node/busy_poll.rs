//! Busy polling: a node's thread looks for events before it sleeps. Waking a sleeping core takes
//! longer than most of the node's work.

use std::cell::Cell;

use downbeat_core::{Duration, Time};
use downbeat_service::clock::Clock;

/// A look that took longer means that another thread got the core. The two would have to share the
/// core, so this thread sleeps. When woken it preempts the other.
const SOMEBODY_ELSE: Duration = Duration::from_micros(100);

/// How long a node looks for events, and since when.
#[derive(Debug)]
pub struct BusyPoll {
    lasts: Duration,
    clock: Clock,
    /// When the last event came.
    came: Cell<Time>,
    /// Whether an event has come since the last look.
    is_here: Cell<bool>,
}

impl BusyPoll {
    /// Busy polling for `lasts` after each event; zero: none.
    pub fn new(lasts: Duration, clock: Clock) -> Self {
        BusyPoll { lasts, clock, came: Cell::new(Time::ZERO), is_here: Cell::new(false) }
    }

    /// Notes that an event has come, so that more may follow.
    pub fn has_come(&self, now: Time) {
        self.came.set(now);
        self.is_here.set(true);
    }

    /// Looks until an event comes, here or by `has_event`. Also stops after long enough, when
    /// something is `due`, or when another thread wants the core.
    pub async fn look(&self, due: Time, has_event: impl Fn() -> bool) {
        self.is_here.set(false);
        let until = (self.came.get() + self.lasts).min(due);
        let mut now = if self.lasts > Duration::ZERO { self.clock.now() } else { until };
        while now < until {
            // The runtime polls its sockets before this task goes on.
            tokio::task::yield_now().await;
            if self.is_here.get() || has_event() {
                return;
            }
            std::thread::yield_now();
            let before = std::mem::replace(&mut now, self.clock.now());
            if now.since(before) > SOMEBODY_ELSE {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn is_pending(look: std::pin::Pin<&mut impl Future<Output = ()>>) -> bool {
        look.poll(&mut Context::from_waker(Waker::noop())) == Poll::Pending
    }

    #[test]
    fn a_look_ends_with_what_comes() {
        let clock = Clock::start();
        let poll = BusyPoll::new(Duration::from_millis(3_600_000), clock);
        poll.has_come(clock.now());
        let mut look = pin!(poll.look(Time::MAX, || false));
        assert!(is_pending(look.as_mut()), "what came before it was looked at");
        poll.has_come(clock.now());
        assert!(!is_pending(look));
        let mut look = pin!(poll.look(Time::MAX, || true));
        assert!(is_pending(look.as_mut()), "sockets are asked as well");
        assert!(!is_pending(look));
    }

    #[test]
    fn polling_ends_after_its_time_or_with_work_to_do() {
        let clock = Clock::start();
        let hour = Duration::from_millis(3_600_000);
        for (lasts, came, due) in [
            (Duration::ZERO, clock.now(), Time::MAX),
            (Duration::from_nanos(1), Time::ZERO, Time::MAX),
            (hour, clock.now(), clock.now()),
        ] {
            let poll = BusyPoll::new(lasts, clock);
            poll.has_come(came);
            assert!(!is_pending(pin!(poll.look(due, || true))), "{lasts} {came} {due}");
        }
    }
}
