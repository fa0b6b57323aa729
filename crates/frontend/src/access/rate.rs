//! A limit of requests a second.

use downbeat_core::{Duration, Time};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// A number of requests that may come in a second, on average. As many may come at once, and at least
/// one. The generic cell rate algorithm (ITU-T I.371).
#[derive(Debug)]
pub(super) struct Rate {
    a_second: f64,
    /// Time between two requests at the limit, ns.
    interval: u64,
    /// How far the next request's own time may lie ahead, ns.
    ahead: u64,
    /// The own time of the next request if all came at the limit, ns.
    next: AtomicU64,
}

impl Rate {
    /// A limit; it is taken as one request a day at least.
    pub fn new(a_second: f64) -> Self {
        let interval = (1e9 / a_second.max(1.0 / 86_400.0)).max(1.0) as u64;
        Rate { a_second, interval, ahead: 1_000_000_000u64.saturating_sub(interval), next: AtomicU64::new(0) }
    }

    /// The limit.
    pub fn a_second(&self) -> f64 {
        self.a_second
    }

    /// Takes a request at `now`.
    ///
    /// # Errors
    /// The time until the next request may come.
    pub fn take(&self, now: Time) -> Result<(), Duration> {
        let now = now.as_nanos();
        let take = |next: u64| {
            let own = next.max(now);
            (own - now <= self.ahead).then(|| own.saturating_add(self.interval))
        };
        match self.next.fetch_update(Relaxed, Relaxed, take) {
            Ok(_) => Ok(()),
            Err(next) => Err(Duration::from_nanos(next.saturating_sub(now).saturating_sub(self.ahead))),
        }
    }

    /// Whether no request came for so long that the limit is as new.
    pub fn is_as_new(&self, now: Time) -> bool {
        self.next.load(Relaxed) <= now.as_nanos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    fn taken(rate: &Rate, at_ms: u64) -> bool {
        rate.take(at(at_ms)).is_ok()
    }

    #[test]
    fn a_second_has_its_requests_at_once_or_spread() {
        let rate = Rate::new(10.0);
        let at_once = (0..100).filter(|_| taken(&rate, 0)).count();
        assert_eq!(at_once, 10);
        assert!(!taken(&rate, 99) && taken(&rate, 100) && !taken(&rate, 150) && taken(&rate, 200));
        let spread = (20..120).filter(|tenth| taken(&rate, 100 * tenth)).count();
        assert_eq!(spread, 100);
    }

    #[test]
    fn a_refusal_says_when_to_come_again() {
        let rate = Rate::new(0.5);
        assert!(taken(&rate, 0));
        let wait = rate.take(at(500)).unwrap_err();
        assert_eq!(wait, Duration::from_millis(1_500));
        assert!(taken(&rate, 2_000) && rate.is_as_new(at(9_000)) && !rate.is_as_new(at(3_000)));
    }
}
