//! Estimates of message delays (Symphony §4.3, appendix D): high percentiles of the delays measured
//! in the last one or two spans of time.

use downbeat_core::time::{Duration, Time};

/// Steps within one doubling of a value. A reported percentile is at most an eighth above the
/// measured value.
const STEPS: usize = 8;
/// Values below `2^LOWEST` ns share one bucket.
const LOWEST: u32 = 10;
/// Values from `2^HIGHEST` ns on (68 s) share one bucket.
const HIGHEST: u32 = 36;
const BUCKETS: usize = (HIGHEST - LOWEST) as usize * STEPS + 2;

fn bucket_of(value: Duration) -> usize {
    let ns = value.as_nanos();
    if ns < 1 << LOWEST {
        return 0;
    }
    let octave = ns.ilog2();
    if octave >= HIGHEST {
        return BUCKETS - 1;
    }
    let step = (ns >> (octave - STEPS.ilog2())) as usize % STEPS;
    1 + (octave - LOWEST) as usize * STEPS + step
}

/// The largest value of a bucket, or about that.
fn end_of(bucket: usize) -> Duration {
    let Some(above) = bucket.checked_sub(1) else { return Duration::from_nanos(1 << LOWEST) };
    let base = 1u64 << (LOWEST as usize + above / STEPS).min(63);
    Duration::from_nanos(base + base / STEPS as u64 * (above % STEPS + 1) as u64)
}

/// A high percentile of the values measured in the last one or two spans. Recording a value takes
/// one step on average.
#[derive(Clone, Debug)]
pub struct DelayEstimate {
    /// One value in `one_in` may be above the reported percentile.
    one_in: u64,
    span: Duration,
    /// When the current span ends.
    until: Time,
    current: Box<[u32; BUCKETS]>,
    previous: Box<[u32; BUCKETS]>,
    /// Values in both spans.
    total: u64,
    /// The bucket of the percentile.
    at: usize,
    /// Values above it.
    above: u64,
}

impl DelayEstimate {
    /// One value in `one_in` may be above the reported percentile. A value counts for one to two
    /// `span`s.
    pub fn new(one_in: u64, span: Duration, now: Time) -> Self {
        let empty = || Box::new([0; BUCKETS]);
        let (current, previous) = (empty(), empty());
        DelayEstimate { one_in: one_in.max(1), span, until: now + span, current, previous, total: 0, at: 0, above: 0 }
    }

    fn count(&self, bucket: usize) -> u64 {
        u64::from(self.current[bucket]) + u64::from(self.previous[bucket])
    }

    /// Records a measured value.
    pub fn record(&mut self, now: Time, value: Duration) {
        self.roll(now);
        let bucket = bucket_of(value);
        self.current[bucket] = self.current[bucket].saturating_add(1);
        self.total += 1;
        if bucket > self.at {
            self.above += 1;
        }
        self.settle();
    }

    fn settle(&mut self) {
        let allowed = self.total / self.one_in;
        while self.above > allowed && self.at + 1 < BUCKETS {
            self.at += 1;
            self.above = self.above.saturating_sub(self.count(self.at));
        }
        while self.at > 0 && self.above + self.count(self.at) <= allowed {
            self.above += self.count(self.at);
            self.at -= 1;
        }
    }

    fn roll(&mut self, now: Time) {
        if now < self.until {
            return;
        }
        std::mem::swap(&mut self.current, &mut self.previous);
        self.current.fill(0);
        if now >= self.until + self.span {
            self.previous.fill(0);
        }
        self.until = now + self.span;
        self.total = self.previous.iter().map(|count| u64::from(*count)).sum();
        (self.at, self.above) = (BUCKETS - 1, 0);
        self.settle();
    }

    /// The percentile; `None` before the first value. The last value stays the estimate until a new
    /// one comes.
    pub fn high(&self) -> Option<Duration> {
        (self.total > 0).then(|| end_of(self.at))
    }
}

/// The least value measured in the last one or two spans.
#[derive(Clone, Copy, Debug)]
pub struct Least<T> {
    span: Duration,
    until: Time,
    current: Option<T>,
    previous: Option<T>,
}

impl<T: Ord + Copy> Least<T> {
    /// A value counts for one to two `span`s.
    pub fn new(span: Duration, now: Time) -> Self {
        Least { span, until: now + span, current: None, previous: None }
    }

    /// Records a measured value.
    pub fn record(&mut self, now: Time, value: T) {
        if now >= self.until {
            self.previous = if now >= self.until + self.span { None } else { self.current };
            (self.current, self.until) = (None, now + self.span);
        }
        self.current = Some(self.current.map_or(value, |least| least.min(value)));
    }

    /// The least value; `None` before the first one.
    pub fn get(&self) -> Option<T> {
        match (self.current, self.previous) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

/// Fetch time by size: a line above the high percentiles of all fetched sizes (`d_data` of
/// Symphony's appendix D).
#[derive(Clone, Debug)]
pub struct FetchEstimate {
    one_in: u64,
    span: Duration,
    /// By the logarithm of the bytes; `None` for sizes that were never fetched.
    by_size: Vec<Option<DelayEstimate>>,
}

/// Sizes from `2^SIZES` bytes on share one class.
const SIZES: usize = 40;

impl FetchEstimate {
    /// See [`DelayEstimate::new`].
    pub fn new(one_in: u64, span: Duration) -> Self {
        FetchEstimate { one_in, span, by_size: vec![None; SIZES] }
    }

    /// Records the time that a fetch of `bytes` took.
    pub fn record(&mut self, now: Time, bytes: u64, took: Duration) {
        let class = (bytes.max(1).ilog2() as usize).min(SIZES - 1);
        let (one_in, span) = (self.one_in, self.span);
        if let Some(entry) = self.by_size.get_mut(class) {
            entry.get_or_insert_with(|| DelayEstimate::new(one_in, span, now)).record(now, took);
        }
    }

    /// The line: a part that does not depend on size, and nanoseconds for each KiB. No size's
    /// percentile is above the line. Of all such lines it is the one with the least total distance
    /// to the percentiles. `None` before the first fetch.
    pub fn line(&self) -> Option<(Duration, u64)> {
        // The smallest size of a class stands for the class, so that the line covers the whole
        // class. (KiB, nanoseconds.)
        let point = |(class, estimate): (usize, &Option<DelayEstimate>)| {
            Some(((1u64 << class) as f64 / 1024.0, estimate.as_ref()?.high()?.as_nanos() as f64))
        };
        let points: Vec<(f64, f64)> = self.by_size.iter().enumerate().filter_map(point).collect();
        let highest =
            points.iter().map(|(_, ns)| *ns).fold(None, |a: Option<f64>, b| Some(a.map_or(b, |a| a.max(b))))?;
        let mut lines = vec![(highest, 0.0)];
        for (number, (small, fast)) in points.iter().enumerate() {
            for (large, slow) in points.iter().skip(number + 1) {
                let slope = (slow - fast) / (large - small);
                lines.push((fast - slope * small, slope));
            }
        }
        let excess = |(base, slope): &(f64, f64)| -> Option<f64> {
            let over = points.iter().map(|(kib, ns)| base + slope * kib - ns);
            let is_above = *slope >= 0.0 && *base >= 0.0 && over.clone().all(|over| over >= -1.0);
            is_above.then(|| over.sum())
        };
        let best = lines.iter().filter_map(|line| Some((excess(line)?, line))).min_by(|a, b| a.0.total_cmp(&b.0))?.1;
        Some((Duration::from_nanos(best.0.ceil() as u64), best.1.ceil() as u64))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPAN: Duration = Duration::from_millis(100);

    fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    /// `said` is at least the true value, and at most an eighth above.
    fn is_about(said: Duration, truth: Duration) -> bool {
        said >= truth && said.as_nanos() <= truth.as_nanos() / 8 * 9 + 1024
    }

    #[test]
    fn section_4_3_a_high_percentile_bounds_the_delay() {
        let mut estimate = DelayEstimate::new(100, SPAN, Time::ZERO);
        assert_eq!(estimate.high(), None);
        for n in 1..=1_000 {
            estimate.record(at(1), us(n));
        }
        let high = estimate.high().unwrap();
        assert!(is_about(high, us(990)), "{high}");
    }

    #[test]
    fn it_forgets_what_was_two_spans_ago() {
        let mut estimate = DelayEstimate::new(100, SPAN, Time::ZERO);
        estimate.record(at(0), us(5_000));
        for ms in 1..=250 {
            estimate.record(at(ms), us(50));
        }
        assert!(is_about(estimate.high().unwrap(), us(50)));
        let mut estimate = DelayEstimate::new(100, SPAN, Time::ZERO);
        estimate.record(at(0), us(5_000));
        estimate.record(at(1_000), us(50));
        assert!(is_about(estimate.high().unwrap(), us(50)), "a long gap leaves nothing");
        assert_eq!(DelayEstimate::new(1, Duration::MAX, Time::MAX).high(), None);
    }

    #[test]
    fn the_least_forgets_too() {
        let mut least = Least::new(SPAN, Time::ZERO);
        assert_eq!(least.get(), None);
        for (ms, value, expected) in [(0, 5, 5), (50, 7, 5), (110, 9, 5), (120, 8, 5), (215, 9, 8), (900, 20, 20)] {
            least.record(at(ms), value);
            assert_eq!(least.get(), Some(expected), "at {ms}");
        }
    }

    #[test]
    fn appendix_d_fetches_are_a_line_above_all_sizes() {
        let mut fetches = FetchEstimate::new(100, SPAN);
        assert_eq!(fetches.line(), None);
        for kib in [1, 4, 64, 1024] {
            fetches.record(at(0), kib * 1024, us(100) + us(10).saturating_mul(kib));
        }
        let (base, per_kib) = fetches.line().unwrap();
        assert!(base >= us(100) && base <= us(140), "{base}");
        assert!((10_000..=11_500).contains(&per_kib), "{per_kib}");
    }

    #[test]
    fn one_slow_small_fetch_is_no_steep_line() {
        let mut fetches = FetchEstimate::new(100, SPAN);
        for (kib, took) in [(1, 100), (2, 300), (1024, 400)] {
            fetches.record(at(0), kib * 1024, us(took));
        }
        let (base, per_kib) = fetches.line().unwrap();
        assert!(base + Duration::from_nanos(per_kib).saturating_mul(1024) <= us(600), "{base} {per_kib}");
    }

    proptest! {
        #[test]
        fn it_is_the_percentile_of_what_it_remembers(values in prop::collection::vec(0u64..=u64::MAX, 1..300), one_in in 0u64..50) {
            let mut estimate = DelayEstimate::new(one_in, SPAN, Time::ZERO);
            for value in &values {
                estimate.record(at(1), Duration::from_nanos(*value));
            }
            let mut sorted: Vec<u64> = values.iter().map(|value| (*value).clamp(1, 1 << HIGHEST)).collect();
            sorted.sort_unstable();
            let above = sorted.len() as u64 / one_in.max(1);
            let truth = if above as usize == sorted.len() { 1 } else { sorted[sorted.len() - 1 - above as usize] };
            let said = estimate.high().unwrap();
            prop_assert!(is_about(said, Duration::from_nanos(truth)), "{} for {}", said, truth);
        }

        #[test]
        fn no_sizes_and_times_are_below_the_line(fetched in prop::collection::vec((0u64..=u64::MAX, 0u64..=u64::MAX), 1..40)) {
            let mut fetches = FetchEstimate::new(1_000, SPAN);
            for (bytes, ns) in &fetched {
                fetches.record(at(1), *bytes, Duration::from_nanos(*ns));
            }
            let (base, per_kib) = fetches.line().unwrap();
            for (bytes, ns) in fetched {
                let (bytes, ns) = (bytes.clamp(1, 1 << 39), ns.min(1 << HIGHEST));
                let said = base.as_nanos() as f64 + per_kib as f64 * bytes as f64 / 1024.0;
                prop_assert!(said + 2.0 >= ns as f64, "{said} for {ns}");
            }
        }
    }
}
