//! How long a batch takes: the latency profile `l(b)`.

use std::sync::Arc;

use serde::{Deserialize, Serialize, Serializer};

use crate::isotonic::isotonic_fit;
use crate::probes::Doubt;
use crate::time::Duration;

/// Execution time of a batch by its size: `l(b)` for `b` in `1..=max_batch`.
///
/// ```
/// use downbeat_core::{Duration, LatencyProfile};
///
/// // One item takes 10 ms, and five items take 18 ms.
/// let points = [(1, Duration::from_millis(10)), (5, Duration::from_millis(18))];
/// let profile = LatencyProfile::from_points(&points)?;
/// assert_eq!(profile.latency(3), Duration::from_millis(14));
/// assert_eq!(profile.largest_within(Duration::from_millis(17)), 4);
/// # Ok::<(), downbeat_core::ProfileError>(())
/// ```
///
/// Invariants, checked at construction: at least one entry, every entry positive, never decreasing
/// with the batch size. (A smaller batch can always run padded to a larger one.)
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "UncheckedProfile")]
pub struct LatencyProfile {
    /// `table[b - 1]` is `l(b)`. Copies share the table: with many models' plans, separate tables
    /// would fill a processor's caches.
    #[serde(serialize_with = "write_table")]
    table: Arc<[Duration]>,
    /// Nanoseconds that each item beyond the table adds: the slope between its first and its last
    /// entry.
    slope: u64,
    /// The largest batch size that was measured: larger ones are guesses. `None`: the numbers are
    /// certain, as an emulated model's are.
    known: Option<u32>,
}

fn write_table<S: Serializer>(table: &[Duration], to: S) -> Result<S::Ok, S::Error> {
    table.serialize(to)
}

/// The fields of a profile as they are read, before they are checked.
#[derive(Deserialize)]
struct UncheckedProfile {
    table: Vec<Duration>,
    slope: u64,
    #[serde(default)]
    known: Option<u32>,
}

impl TryFrom<UncheckedProfile> for LatencyProfile {
    type Error = ProfileError;
    fn try_from(unchecked: UncheckedProfile) -> Result<Self, ProfileError> {
        let UncheckedProfile { table, slope, known } = unchecked;
        Ok(LatencyProfile { slope, known, ..LatencyProfile::from_table(table)? })
    }
}

/// The largest batch size of a profile. Its table takes 8 MiB; without the limit a typing error
/// could use up the memory.
const MAX_BATCH: u32 = 1 << 20;

/// A batch size that was measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProfilePoint {
    /// Items in the batch.
    pub batch: u32,
    /// The median latency of its runs.
    pub latency: Duration,
    /// The number of runs, which is the point's weight beside others. 0 is taken as 1.
    pub runs: u32,
}

impl From<(u32, Duration)> for ProfilePoint {
    /// A point of one run.
    fn from((batch, latency): (u32, Duration)) -> Self {
        ProfilePoint { batch, latency, runs: 1 }
    }
}

/// Why numbers are not a latency profile.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProfileError {
    /// No batch size at all.
    #[error("a latency profile needs at least one batch size")]
    Empty,
    /// A latency of zero, negative or not a number.
    #[error("the latency of batch size {batch} must be positive")]
    NotPositive {
        /// The batch size.
        batch: u32,
    },
    /// A coefficient of a linear profile that is no duration.
    #[error("{name} must be a number of milliseconds, zero or more, not {value}")]
    Negative {
        /// The coefficient: `alpha` or `beta`.
        name: &'static str,
        /// The refused value.
        value: f64,
    },
    /// A batch size above the limit of 2^20.
    #[error("a batch size of {batch} is too large for a latency profile; the largest is {MAX_BATCH}")]
    TooLarge {
        /// The batch size.
        batch: u32,
    },
    /// A larger batch that is faster than a smaller one.
    #[error("the latency of batch size {batch} is lower than that of {}; latencies must not fall with the batch size", batch - 1)]
    Decreasing {
        /// The larger of the two sizes.
        batch: u32,
    },
}

impl LatencyProfile {
    /// The profile whose `l(b)` is `table[b - 1]`.
    ///
    /// # Errors
    /// If the table is empty, has a zero entry, decreases, or is longer than 2^20.
    pub fn from_table(table: Vec<Duration>) -> Result<Self, ProfileError> {
        if table.is_empty() {
            return Err(ProfileError::Empty);
        }
        check_largest(u32::try_from(table.len()).unwrap_or(u32::MAX))?;
        for (i, d) in table.iter().enumerate() {
            let batch = i as u32 + 1;
            if *d == Duration::ZERO {
                return Err(ProfileError::NotPositive { batch });
            }
            if i > 0 && *d < table[i - 1] {
                return Err(ProfileError::Decreasing { batch });
            }
        }
        let n = table.len() as u64;
        let slope = if n > 1 { (table[table.len() - 1].as_nanos() - table[0].as_nanos()) / (n - 1) } else { 0 };
        Ok(LatencyProfile { table: table.into(), slope, known: None })
    }

    /// Marks the profile as learned: batches of up to `known` items were measured, and larger ones
    /// are guesses.
    #[must_use]
    pub fn learned(self, known: u32) -> Self {
        LatencyProfile { known: Some(known), ..self }
    }

    /// The largest batch size that was measured; `None`: all of the profile is certain.
    pub fn known(&self) -> Option<u32> {
        self.known
    }

    /// The least time that a batch is known to take: the latency of the largest measured size up to
    /// `batch`. Zero if there is no such size.
    pub fn known_latency(&self, batch: u32) -> Duration {
        self.latency(self.known.map_or(batch, |known| known.min(batch)))
    }

    /// Why "a batch takes longer than `allowed`" may be wrong; `None`: the profile is certain.
    pub fn doubt(&self, batch: u32, allowed: Duration) -> Option<Doubt> {
        self.known?;
        Some(if self.known_latency(batch) <= allowed { Doubt::Guess } else { Doubt::Measured })
    }

    /// The linear profile `l(b) = alpha * b + beta` (Symphony §2), for batches up to `max_batch`.
    ///
    /// # Errors
    /// If `max_batch` is zero or above 2^20, or `l(1)` is zero.
    pub fn linear(alpha: Duration, beta: Duration, max_batch: u32) -> Result<Self, ProfileError> {
        check_largest(max_batch)?;
        Self::from_table((1..=u64::from(max_batch)).map(|b| alpha.saturating_mul(b) + beta).collect())
    }

    /// The linear profile from numbers as people write them, in milliseconds: `beta_ms` for a batch
    /// and `alpha_ms` for each of its items.
    ///
    /// # Errors
    /// If a number is negative or not finite, or for the reasons of [`LatencyProfile::linear`].
    pub fn linear_ms(alpha_ms: f64, beta_ms: f64, max_batch: u32) -> Result<Self, ProfileError> {
        for (name, value) in [("alpha", alpha_ms), ("beta", beta_ms)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(ProfileError::Negative { name, value });
            }
        }
        Self::linear(Duration::from_millis_f64(alpha_ms), Duration::from_millis_f64(beta_ms), max_batch)
    }

    /// The profile `l(b) + fixed + per_item * b`.
    #[must_use]
    pub fn with_overhead(&self, fixed: Duration, per_item: Duration) -> Self {
        if fixed == Duration::ZERO && per_item == Duration::ZERO {
            return self.clone();
        }
        let slow = |(l, b): (&Duration, u64)| *l + fixed + per_item.saturating_mul(b);
        let slope = self.slope.saturating_add(per_item.as_nanos());
        LatencyProfile { table: self.table.iter().zip(1..).map(slow).collect(), slope, known: self.known }
    }

    /// The profile made slower by this percentage.
    #[must_use]
    pub fn with_margin(&self, percent: u8) -> Self {
        self.stretched(100 + u32::from(percent), 100)
    }

    /// The profile with all latencies multiplied by `times / of`, if that is above 1.
    #[must_use]
    pub fn stretched(&self, times: u32, of: u32) -> Self {
        if times <= of {
            return self.clone();
        }
        let longer = |ns: u64| {
            let more = u128::from(ns) * u128::from(times - of) / u128::from(of.max(1));
            ns.saturating_add(u64::try_from(more).unwrap_or(u64::MAX))
        };
        let table = self.table.iter().map(|l| Duration::from_nanos(longer(l.as_nanos()))).collect();
        LatencyProfile { table, slope: longer(self.slope), known: self.known }
    }

    /// [`LatencyProfile::fit`] of points `(batch size, latency)` of equal weight.
    ///
    /// # Errors
    /// As [`LatencyProfile::fit`].
    pub fn from_points(points: &[(u32, Duration)]) -> Result<Self, ProfileError> {
        Self::fit(points.iter().copied().map(ProfilePoint::from))
    }

    /// The profile of measured points. Where noise made a larger batch faster, both sizes get their
    /// weighted mean ([`isotonic_fit`]). So one stalled run does not decide for all larger sizes. A
    /// size between two points lies on the line through them. A size below the first point takes as
    /// long as that point. Thus a guess for a size without a point changes no measured size. Points
    /// need not be sorted. If a size occurs twice, its faster point counts. The largest measured
    /// batch is the profile's largest.
    ///
    /// # Errors
    /// If there is no point, a latency is zero, or a batch size is above 2^20.
    pub fn fit(points: impl IntoIterator<Item = ProfilePoint>) -> Result<Self, ProfileError> {
        let mut points: Vec<ProfilePoint> = points.into_iter().filter(|point| point.batch > 0).collect();
        points.sort_unstable_by_key(|point| (point.batch, point.latency));
        points.dedup_by_key(|point| point.batch);
        let (Some(first), Some(last)) = (points.first(), points.last()) else { return Err(ProfileError::Empty) };
        check_largest(last.batch)?;
        if let Some(zero) = points.iter().find(|point| point.latency == Duration::ZERO) {
            return Err(ProfileError::NotPositive { batch: zero.batch });
        }
        let fitted = isotonic_fit(points.iter().map(|point| (point.latency.as_nanos(), point.runs)));
        let mut table = Vec::with_capacity(last.batch as usize);
        table.resize(first.batch as usize, Duration::from_nanos(fitted[0]));
        for (sizes, ns) in points.windows(2).zip(fitted.windows(2)) {
            let span = u128::from(sizes[1].batch - sizes[0].batch);
            let rise = u128::from(ns[1] - ns[0]);
            let more = (1..=span).map(|part| (rise * part / span) as u64);
            table.extend(more.map(|more| Duration::from_nanos(ns[0] + more)));
        }
        Self::from_table(table)
    }

    /// `l(batch)`; zero for an empty batch. Beyond the largest profiled size the profile is
    /// extended along the slope between the first and the last entry, so that `l(b + 1)` of the
    /// largest batch exists.
    pub fn latency(&self, batch: u32) -> Duration {
        let n = self.table.len();
        match batch as usize {
            0 => Duration::ZERO,
            b if b <= n => self.table[b - 1],
            b => {
                let last = self.table[n - 1].as_nanos();
                Duration::from_nanos(last.saturating_add(self.slope.saturating_mul((b - n) as u64)))
            }
        }
    }

    /// The largest batch that may be run.
    pub fn max_batch(&self) -> u32 {
        self.table.len() as u32
    }

    /// The largest batch whose latency is at most `budget`; zero if none. `O(log max_batch)`.
    pub fn largest_within(&self, budget: Duration) -> u32 {
        self.table.partition_point(|d| *d <= budget) as u32
    }

    /// The largest batch up to `limit` whose latency, extended as [`LatencyProfile::latency`] does,
    /// is at most `budget`; zero if none. `O(log max_batch)`.
    pub fn largest_up_to(&self, limit: u32, budget: Duration) -> u32 {
        if self.latency(limit) <= budget {
            return limit;
        }
        let within = self.largest_within(budget);
        if within < self.max_batch() || limit <= within {
            return within.min(limit);
        }
        let n = self.table.len() as u64;
        let last = self.table[self.table.len() - 1].as_nanos();
        match (budget.as_nanos() - last).checked_div(self.slope) {
            None => limit,
            Some(more) => u32::try_from(n.saturating_add(more)).unwrap_or(u32::MAX).min(limit),
        }
    }
}

fn check_largest(batch: u32) -> Result<(), ProfileError> {
    if batch > MAX_BATCH { Err(ProfileError::TooLarge { batch }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    fn table(profile: &LatencyProfile) -> Vec<u64> {
        (1..=profile.max_batch()).map(|b| profile.latency(b).as_nanos() / 1000).collect()
    }

    #[test]
    fn one_point_is_flat_up_to_its_size() {
        let profile = LatencyProfile::from_points(&[(3, us(7))]).unwrap();
        assert_eq!(table(&profile), [7, 7, 7]);
        assert_eq!(profile.latency(9), us(7), "no slope is known");
        assert_eq!(profile.largest_up_to(9, us(7)), 9);
    }

    #[test]
    fn between_points_is_linear_and_order_does_not_matter() {
        let profile = LatencyProfile::from_points(&[(8, us(80)), (2, us(20)), (4, us(40))]).unwrap();
        assert_eq!(table(&profile), [20, 20, 30, 40, 50, 60, 70, 80]);
    }

    #[test]
    fn a_faster_larger_batch_and_the_smaller_one_share_their_mean() {
        let profile = LatencyProfile::from_points(&[(1, us(10)), (2, us(30)), (3, us(20)), (4, us(40))]).unwrap();
        assert_eq!(table(&profile), [10, 25, 25, 40]);
    }

    /// A running maximum over the sizes once made one run of 8.4 s at batch 4 count for all larger
    /// batches.
    #[test]
    fn one_stalled_run_does_not_decide_for_larger_batches() {
        let point = |batch: u32, ms: u64, runs| ProfilePoint { batch, latency: Duration::from_millis(ms), runs };
        let points = [point(1, 2, 200), point(2, 3, 200), point(4, 8_400, 1), point(8, 10, 90), point(16, 20, 90)];
        let profile = LatencyProfile::fit(points).unwrap();
        assert_eq!([1, 2].map(|b| profile.latency(b)), [us(2_000), us(3_000)]);
        let most = Duration::from_millis((8_400 + 90 * 10 + 90 * 20) / 181 + 1);
        assert!([4, 8, 16].iter().all(|b| profile.latency(*b) <= most), "{profile:?}");
    }

    #[test]
    fn what_was_learned_has_guesses_beyond_the_largest_size_measured() {
        let certain = LatencyProfile::linear(us(10), us(0), 8).unwrap();
        assert_eq!((certain.doubt(4, us(30)), certain.known_latency(4)), (None, us(40)));
        let learned = certain.learned(2).with_margin(10).with_overhead(us(1), us(0)).stretched(2, 1);
        assert_eq!([1, 2, 8].map(|b| learned.known_latency(b)), [us(24), us(46), us(46)]);
        assert_eq!(learned.doubt(4, us(46)), Some(Doubt::Guess));
        assert_eq!(learned.doubt(4, us(45)), Some(Doubt::Measured), "what is smaller takes longer already");
        assert_eq!(learned.clone().learned(0).doubt(1, us(0)), Some(Doubt::Guess));
        let text = serde_json::to_string(&learned).unwrap();
        assert_eq!(serde_json::from_str::<LatencyProfile>(&text).unwrap(), learned);
    }

    #[test]
    fn a_size_of_zero_is_no_point_and_of_two_equal_sizes_the_faster_counts() {
        let profile = LatencyProfile::from_points(&[(0, us(1)), (1, us(12)), (1, us(10)), (2, us(20))]).unwrap();
        assert_eq!(table(&profile), [10, 20]);
        assert_eq!(LatencyProfile::from_points(&[(0, us(1))]), Err(ProfileError::Empty));
        assert_eq!(LatencyProfile::from_points(&[]), Err(ProfileError::Empty));
    }

    #[test]
    fn what_is_not_a_profile_is_an_error() {
        use ProfileError::*;
        assert_eq!(LatencyProfile::from_points(&[(1, us(0)), (2, us(3))]), Err(NotPositive { batch: 1 }));
        assert_eq!(LatencyProfile::from_points(&[(u32::MAX, us(1))]), Err(TooLarge { batch: u32::MAX }));
        assert_eq!(LatencyProfile::linear(us(1), us(1), u32::MAX), Err(TooLarge { batch: u32::MAX }));
        assert_eq!(LatencyProfile::linear(us(1), us(1), 0), Err(Empty));
        assert_eq!(LatencyProfile::linear(us(0), us(0), 4), Err(NotPositive { batch: 1 }));
        assert_eq!(LatencyProfile::from_table(vec![us(3), us(2)]), Err(Decreasing { batch: 2 }));
    }

    #[test]
    fn a_margin_makes_all_slower_alike() {
        let profile = LatencyProfile::linear(us(10), us(20), 2).unwrap().with_margin(10);
        assert_eq!([1, 2, 4].map(|b| profile.latency(b)), [us(33), us(44), us(66)]);
        assert_eq!(
            LatencyProfile::from_points(&[(1, Duration::MAX)]).unwrap().with_margin(255).latency(1),
            Duration::MAX
        );
    }

    #[test]
    fn latencies_near_the_end_of_time_do_not_overflow() {
        let profile = LatencyProfile::linear(Duration::MAX, Duration::MAX, 3).unwrap();
        assert_eq!(profile.latency(u32::MAX), Duration::MAX);
        assert_eq!(profile.largest_up_to(5, Duration::MAX), 5);
        let steep = LatencyProfile::from_points(&[(1, us(1)), (3, Duration::MAX)]).unwrap();
        assert_eq!(steep.latency(4), Duration::MAX);
    }

    proptest! {
        /// `largest_up_to` is the inverse of `latency`, inside the table and beyond it.
        #[test]
        fn largest_up_to_is_the_largest_that_fits(
            points in prop::collection::vec((1..20u32, 1..1000u64), 1..6),
            limit in 0..60u32,
            budget in 0..4000u64,
        ) {
            let points: Vec<_> = points.into_iter().map(|(b, l)| (b, us(l))).collect();
            let profile = LatencyProfile::from_points(&points).unwrap();
            let expected = (1..=limit).rev().find(|b| profile.latency(*b) <= us(budget)).unwrap_or(0);
            prop_assert_eq!(profile.largest_up_to(limit, us(budget)), expected);
        }

        /// A profile never falls, and passes through the points of a measurement without noise.
        #[test]
        fn profiles_rise_through_their_points(steps in prop::collection::vec((1..9u32, 0..500u64), 1..8)) {
            let (mut batch, mut latency) = (0, 1);
            let points: Vec<_> = steps.into_iter().map(|(b, l)| {
                batch += b;
                latency += l;
                (batch, us(latency))
            }).collect();
            let profile = LatencyProfile::from_points(&points).unwrap();
            prop_assert_eq!(profile.max_batch(), batch);
            for b in 1..batch + 10 {
                prop_assert!(profile.latency(b) <= profile.latency(b + 1));
            }
            for (b, l) in points {
                prop_assert_eq!(profile.latency(b), l);
            }
        }
    }
}
