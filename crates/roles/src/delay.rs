//! Estimates of message delays (Symphony §4.3, appendix D): high percentiles of the delays measured
//! lately, and the least of the fresh ones.

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

/// The weight of a value that was just measured.
const WEIGHT: u32 = 256;
/// This many of the largest values never decide. One stall of a network delays several messages at
/// once. The 99.9th percentile of a few hundred values would be the maximum.
const OUTLIERS: u64 = 8;
/// With fewer values, one in so many is an outlier.
const OUTLIERS_ONE_IN: u64 = 8;
/// A value is fresh for one to two times as long as this.
const FRESH: Duration = Duration::from_millis(150);

/// A high percentile of measured values, whose weight halves again and again. Recording a value
/// takes one step on average.
///
/// The percentile is as high as the number of values supports: the `OUTLIERS` largest do not
/// count. Example: of 300 values, the 99.9th percentile would be the largest one; the reported
/// percentile is the 97th. With 10 000 values, it is the 99.9th.
#[derive(Clone, Debug)]
pub struct DelayEstimate {
    /// One value in `one_in` may be above the reported percentile.
    one_in: u64,
    half_life: Duration,
    /// When all weights are next halved.
    halves_at: Time,
    weights: Box<[u32; BUCKETS]>,
    total: u64,
    /// The bucket of the percentile.
    at: usize,
    /// The weight of the values above it.
    above: u64,
    fresh: Least<Duration>,
}

impl DelayEstimate {
    /// One value in `one_in` and some outliers may be above the reported percentile. A value's
    /// weight halves each `half_life`.
    pub fn new(one_in: u64, half_life: Duration, now: Time) -> Self {
        DelayEstimate {
            one_in: one_in.max(1),
            half_life: half_life.max(Duration::from_nanos(1)),
            halves_at: now + half_life,
            weights: Box::new([0; BUCKETS]),
            total: 0,
            at: 0,
            above: 0,
            fresh: Least::new(FRESH, now),
        }
    }

    /// Records a measured value.
    pub fn record(&mut self, now: Time, value: Duration) {
        self.decay(now);
        self.fresh.record(now, value);
        let bucket = bucket_of(value);
        self.weights[bucket] = self.weights[bucket].saturating_add(WEIGHT);
        self.total += u64::from(WEIGHT);
        if bucket > self.at {
            self.above += u64::from(WEIGHT);
        }
        self.settle();
    }

    /// The weight that may be above the percentile.
    fn allowed(&self) -> u64 {
        let outliers = (OUTLIERS * u64::from(WEIGHT)).min(self.total / OUTLIERS_ONE_IN);
        (self.total / self.one_in).max(outliers)
    }

    fn settle(&mut self) {
        let allowed = self.allowed();
        while self.above > allowed && self.at + 1 < BUCKETS {
            self.at += 1;
            self.above = self.above.saturating_sub(self.weights[self.at].into());
        }
        while self.at > 0 && self.above + u64::from(self.weights[self.at]) <= allowed {
            self.above += u64::from(self.weights[self.at]);
            self.at -= 1;
        }
    }

    fn decay(&mut self, now: Time) {
        if now < self.halves_at {
            return;
        }
        let halvings = 1 + now.since(self.halves_at).as_nanos() / self.half_life.as_nanos();
        for weight in self.weights.iter_mut() {
            *weight = weight.checked_shr(u32::try_from(halvings).unwrap_or(u32::MAX)).unwrap_or(0);
        }
        self.halves_at += self.half_life.saturating_mul(halvings);
        self.total = self.weights.iter().map(|weight| u64::from(*weight)).sum();
        (self.at, self.above) = (BUCKETS - 1, 0);
        self.settle();
    }

    /// The percentile; `None` before the first value. The last values stay the estimate until a new
    /// one comes.
    pub fn high(&self) -> Option<Duration> {
        (self.total > 0).then(|| end_of(self.at))
    }

    /// The least of the fresh values; `None` if there are none. The true delay of the moment may be
    /// as little as that.
    pub fn fresh(&self, now: Time) -> Option<Duration> {
        self.fresh.fresh(now)
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

    /// The least value; `None` before the first one. The last value stays until a new one comes.
    pub fn get(&self) -> Option<T> {
        match (self.current, self.previous) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// The least value; `None` if all values are older than two spans.
    pub fn fresh(&self, now: Time) -> Option<T> {
        match now {
            now if now < self.until => self.get(),
            now if now < self.until + self.span => self.current,
            _ => None,
        }
    }
}

/// Fetch time by size: a line above the high percentiles of all fetched sizes (`d_data` of
/// Symphony's appendix D).
#[derive(Clone, Debug)]
pub struct FetchEstimate {
    one_in: u64,
    half_life: Duration,
    /// By the logarithm of the bytes; `None` for sizes that were never fetched.
    by_size: Vec<Option<DelayEstimate>>,
}

/// Sizes from `2^SIZES` bytes on share one class.
const SIZES: usize = 40;

/// The class of a size: the logarithm of the bytes.
pub(super) fn class_of(bytes: u64) -> u8 {
    bytes.max(1).ilog2().min(SIZES as u32 - 1) as u8
}

impl FetchEstimate {
    /// See [`DelayEstimate::new`].
    pub fn new(one_in: u64, half_life: Duration) -> Self {
        FetchEstimate { one_in, half_life, by_size: vec![None; SIZES] }
    }

    /// Records the time that a fetch of `bytes` took.
    pub fn record(&mut self, now: Time, bytes: u64, took: Duration) {
        let class = usize::from(class_of(bytes));
        let (one_in, half_life) = (self.one_in, self.half_life);
        if let Some(entry) = self.by_size.get_mut(class) {
            entry.get_or_insert_with(|| DelayEstimate::new(one_in, half_life, now)).record(now, took);
        }
    }

    /// The high percentile of fetches of about so many bytes, or of fewer if these take longer.
    /// `None` if there were none.
    pub fn high_up_to(&self, bytes: u64) -> Option<Duration> {
        let most = usize::from(class_of(bytes));
        self.by_size.iter().take(most + 1).flatten().filter_map(DelayEstimate::high).max()
    }

    /// The least fresh time of each class of sizes. Classes without a fresh fetch are left out.
    pub fn fresh(&self, now: Time) -> Vec<(u8, Duration)> {
        let fresh = |(class, estimate): (u8, &Option<DelayEstimate>)| Some((class, estimate.as_ref()?.fresh(now)?));
        (0..).zip(&self.by_size).filter_map(fresh).collect()
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

    /// A stall delays some messages at once, which are more than a thousandth of all messages.
    #[test]
    fn a_few_outliers_do_not_decide() {
        let mut estimate = DelayEstimate::new(1_000, SPAN, Time::ZERO);
        for n in 0..300 {
            estimate.record(at(1), if n % 40 == 0 { us(400_000) } else { us(50) });
        }
        assert!(is_about(estimate.high().unwrap(), us(50)));
        estimate.record(at(1), us(400_000));
        assert!(is_about(estimate.high().unwrap(), us(400_000)), "these are too many for outliers");
    }

    #[test]
    fn with_many_values_the_percentile_is_as_high_as_asked() {
        let mut estimate = DelayEstimate::new(1_000, SPAN, Time::ZERO);
        for n in 1..=20_000 {
            estimate.record(at(1), us(n));
        }
        let high = estimate.high().unwrap();
        assert!(is_about(high, us(19_980)), "{high}");
    }

    #[test]
    fn values_lose_their_weight() {
        let mut estimate = DelayEstimate::new(100, SPAN, Time::ZERO);
        (0..100).for_each(|_| estimate.record(at(0), us(5_000)));
        let mut falls_at = None;
        for ms in 1..=1_000 {
            estimate.record(at(ms), us(50));
            falls_at = falls_at.or((estimate.high().unwrap() < us(100)).then_some(ms));
        }
        // 100 old values against one new one each millisecond: four halvings leave 8 outliers or less.
        assert_eq!(falls_at, Some(400));
    }

    #[test]
    fn the_least_fresh_value_is_known_while_it_is_fresh() {
        let mut estimate = DelayEstimate::new(100, SPAN, Time::ZERO);
        estimate.record(at(0), us(5_000));
        estimate.record(at(100), us(300_000));
        assert_eq!(estimate.fresh(at(149)), Some(us(5_000)));
        assert_eq!(estimate.fresh(at(299)), Some(us(5_000)));
        assert_eq!(estimate.fresh(at(300)), None);
        estimate.record(at(400), us(70));
        assert_eq!(estimate.fresh(at(401)), Some(us(70)));
        assert_eq!(estimate.fresh(at(10_000)), None);
        assert!(estimate.high().is_some());
    }

    #[test]
    fn fresh_fetches_are_known_by_size() {
        let mut fetches = FetchEstimate::new(100, SPAN);
        fetches.record(at(0), 1024, us(100));
        fetches.record(at(200), 1 << 20, us(900));
        assert_eq!(fetches.fresh(at(140)), [(10, us(100)), (20, us(900))]);
        assert_eq!(fetches.fresh(at(340)), [(20, us(900))]);
        assert_eq!(fetches.fresh(at(900)), []);
    }

    #[test]
    fn it_forgets_old_values() {
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
            let count = sorted.len() as u64;
            let above = (count / one_in.max(1)).max((count / OUTLIERS_ONE_IN).min(OUTLIERS));
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
