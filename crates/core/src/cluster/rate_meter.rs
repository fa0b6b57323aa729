//! The rate of a model's recent arrivals, and their mean time from arrival to deadline.

use crate::time::{Duration, Time};

/// Span of one bucket of the meter.
const BUCKET: Duration = Duration::from_millis(100);
/// Buckets remembered: the meter looks back one second.
const BUCKETS: usize = 10;

/// The rate of the arrivals of the last second, and their mean time budget. A time budget is the
/// time from arrival to deadline. Arrivals are counted in buckets of 100 ms.
///
/// The meter needs no timer: its buckets roll when an arrival is counted, or on request.
#[derive(Clone, Debug)]
#[repr(C)]
pub struct RateMeter {
    filling: Bucket,
    /// When the bucket that is being filled is complete.
    end: Time,
    /// [`RateMeter::count`] may count before this time: `end`, or [`Time::ZERO`] while no budget is
    /// known.
    counts_until: Time,
    /// The number of the bucket that is being filled: `now / BUCKET`.
    current: u64,
    /// Buckets since the beginning, the current one included; at most `BUCKETS + 1`.
    lived: u64,
    /// Complete buckets, a ring indexed by bucket number.
    complete: [Bucket; BUCKETS],
    /// Sum over `complete`.
    sum: Bucket,
    /// Sum of the squares of the items, over `complete`.
    squares: u128,
}

#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    /// Requests, weighted by size.
    items: u64,
    /// Arrivals with a deadline.
    bounded: u64,
    /// Sum of their budgets, nanoseconds.
    budget: u128,
}

impl Bucket {
    fn add(&mut self, other: Bucket) {
        self.items += other.items;
        self.bounded += other.bounded;
        self.budget += other.budget;
    }

    fn subtract(&mut self, other: Bucket) {
        self.items -= other.items;
        self.bounded -= other.bounded;
        self.budget -= other.budget;
    }
}

/// When a bucket is complete.
fn end_of(bucket: u64) -> Time {
    Time::ZERO + BUCKET.saturating_mul(bucket.saturating_add(1))
}

impl RateMeter {
    /// A meter without arrivals.
    pub fn new(now: Time) -> Self {
        let current = now.as_nanos() / BUCKET.as_nanos();
        RateMeter {
            current,
            end: end_of(current),
            counts_until: Time::ZERO,
            lived: 0,
            filling: Bucket::default(),
            complete: [Bucket::default(); BUCKETS],
            sum: Bucket::default(),
            squares: 0,
        }
    }

    /// Counts an arrival of `items` with `budget` until its deadline (`Duration::MAX`: no
    /// deadline). Returns whether [`RateMeter::rate`] may have changed because a bucket is
    /// complete, or the first budget is known.
    pub fn arrival(&mut self, now: Time, items: u32, budget: Duration) -> bool {
        let rolled = self.roll(now);
        self.filling.items += u64::from(items);
        if budget == Duration::MAX {
            return rolled;
        }
        let is_first = self.sum.bounded + self.filling.bounded == 0;
        self.filling.bounded += 1;
        self.filling.budget += u128::from(budget.as_nanos());
        self.counts_until = self.end;
        rolled || is_first
    }

    /// Whether [`RateMeter::arrival`] of a request with a deadline would return false.
    #[inline(always)]
    pub(super) fn may_count(&self, now: Time) -> bool {
        now < self.counts_until
    }

    /// [`RateMeter::arrival`] of one item with a deadline, while [`RateMeter::may_count`] is true.
    #[inline(always)]
    pub(super) fn count(&mut self, budget: Duration) {
        self.filling.items += 1;
        self.filling.bounded += 1;
        self.filling.budget += u128::from(budget.as_nanos());
    }

    /// Completes the buckets that end by `now`. Returns whether any was completed.
    pub fn roll(&mut self, now: Time) -> bool {
        // Called for every arrival, so that the common case costs no division.
        if now < self.end {
            return false;
        }
        let bucket = now.as_nanos() / BUCKET.as_nanos();
        if bucket == self.current {
            // The last bucket of all time has no end.
            return false;
        }
        let steps = bucket - self.current;
        for step in 0..steps.min(BUCKETS as u64 + 1) {
            let done = std::mem::take(&mut self.filling);
            let place = ((self.current + step) % BUCKETS as u64) as usize;
            let old = std::mem::replace(&mut self.complete[place], done);
            self.sum.add(done);
            self.sum.subtract(old);
            self.squares = self.squares + square(done.items) - square(old.items);
        }
        if steps > BUCKETS as u64 + 1 {
            // A gap longer than the meter's memory: no old bucket counts.
            self.complete = [Bucket::default(); BUCKETS];
            self.sum = Bucket::default();
            self.squares = 0;
        }
        self.current = bucket;
        self.end = end_of(bucket);
        self.counts_until = if self.sum.bounded == 0 { Time::ZERO } else { self.end };
        self.lived = self.lived.saturating_add(steps);
        true
    }

    /// Requests per second, weighted by size; `None` before the first bucket is complete.
    pub fn rate(&self) -> Option<f64> {
        let buckets = self.lived.min(BUCKETS as u64);
        (buckets > 0).then(|| self.sum.items as f64 / (buckets as f64 * BUCKET.as_secs_f64()))
    }

    /// Variance of the rate from one bucket to the next, (requests per second)^2. It tells how
    /// bursty the arrivals are. Zero before the second bucket is complete.
    pub fn variance(&self) -> f64 {
        let buckets = self.lived.min(BUCKETS as u64) as f64;
        if buckets < 2.0 {
            return 0.0;
        }
        let items = self.sum.items as f64;
        let items_variance = (self.squares as f64 - items * items / buckets) / (buckets - 1.0);
        items_variance.max(0.0) / BUCKET.as_secs_f64().powi(2)
    }

    /// The value of [`RateMeter::variance`] if requests of one item came independently of each
    /// other, at the same rate.
    pub fn even_variance(&self) -> f64 {
        self.rate().map_or(0.0, |rate| rate / BUCKET.as_secs_f64())
    }

    /// Mean time from arrival to deadline, over the arrivals with a deadline. The bucket being
    /// filled counts too.
    pub fn budget(&self) -> Option<Duration> {
        let bounded = self.sum.bounded + self.filling.bounded;
        let total = self.sum.budget + self.filling.budget;
        (bounded > 0).then(|| Duration::from_nanos(u64::try_from(total / u128::from(bounded)).unwrap_or(u64::MAX)))
    }
}

fn square(items: u64) -> u128 {
    u128::from(items) * u128::from(items)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn a_steady_rate_is_known_after_the_first_bucket() {
        let mut meter = RateMeter::new(ms(0));
        for t in 0..100 {
            assert_eq!(meter.arrival(ms(t), 2, Duration::from_millis(25)), t == 0);
            assert_eq!(meter.rate(), None);
        }
        assert!(meter.roll(ms(100)));
        assert_eq!(meter.rate(), Some(2000.0));
        assert_eq!(meter.budget(), Some(Duration::from_millis(25)));
    }

    #[test]
    fn the_first_budget_is_said_and_again_after_a_silence() {
        let mut meter = RateMeter::new(ms(0));
        assert!(!meter.arrival(ms(1), 1, Duration::MAX));
        for at in [2, 2000] {
            meter.roll(ms(at));
            assert!(!meter.may_count(ms(at)));
            assert!(meter.arrival(ms(at), 1, Duration::from_millis(25)), "the first with a deadline");
            assert!(meter.may_count(ms(at)));
            assert!(!meter.arrival(ms(at), 1, Duration::from_millis(25)));
        }
        assert!(!meter.may_count(ms(2100)), "a bucket is complete");
    }

    #[test]
    fn it_looks_back_one_second() {
        let mut meter = RateMeter::new(ms(0));
        for t in 0..1000 {
            meter.arrival(ms(t), 1, Duration::MAX);
        }
        meter.roll(ms(1000));
        assert_eq!(meter.rate(), Some(1000.0));
        meter.roll(ms(1500));
        assert_eq!(meter.rate(), Some(500.0));
        meter.roll(ms(2000));
        assert_eq!(meter.rate(), Some(0.0));
        assert_eq!(meter.budget(), None, "requests without a deadline have no budget");
    }

    #[test]
    fn even_arrivals_do_not_vary_and_bursts_do() {
        let mut even = RateMeter::new(ms(0));
        let mut bursts = RateMeter::new(ms(0));
        for t in 0..2000 {
            even.arrival(ms(t), 1, Duration::MAX);
            // All arrivals of 200 ms at once: 200 items in every other bucket.
            if t % 200 == 0 {
                bursts.arrival(ms(t), 200, Duration::MAX);
            }
        }
        assert!(even.roll(ms(2000)) && bursts.roll(ms(2000)));
        assert_eq!(even.variance(), 0.0);
        // Rates of 2000 and 0, five of each: 10 * 1000^2 / 9.
        assert!((bursts.variance() - 1e7 / 9.0).abs() < 1e-3, "{}", bursts.variance());
        bursts.roll(ms(9000));
        assert_eq!(bursts.variance(), 0.0, "silence is even");
    }

    #[test]
    fn a_long_silence_forgets_everything() {
        let mut meter = RateMeter::new(ms(7));
        meter.arrival(ms(50), 9, Duration::from_millis(1));
        assert!(meter.roll(ms(1_000_000)));
        assert_eq!((meter.rate(), meter.budget()), (Some(0.0), None));
        assert!(!meter.roll(ms(3)), "time that goes back changes nothing");
    }
}
