//! How long a batch takes: the latency profile `l(b)`.

use crate::time::Duration;

/// Execution time of a batch by its size: `l(b)` for `b` in `1..=max_batch`.
///
/// Invariants, checked at construction: at least one entry, every entry positive, never
/// decreasing with the batch size (a larger batch can always be run as a padded smaller one's upper bound).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LatencyProfile {
    /// `table[b - 1]` is `l(b)`.
    table: Vec<Duration>,
}

/// Why numbers are not a latency profile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
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
    /// If the table is empty, has a zero entry, or decreases.
    pub fn from_table(table: Vec<Duration>) -> Result<Self, ProfileError> {
        if table.is_empty() {
            return Err(ProfileError::Empty);
        }
        for (i, d) in table.iter().enumerate() {
            let batch = i as u32 + 1;
            if *d == Duration::ZERO {
                return Err(ProfileError::NotPositive { batch });
            }
            if i > 0 && *d < table[i - 1] {
                return Err(ProfileError::Decreasing { batch });
            }
        }
        Ok(LatencyProfile { table })
    }

    /// The linear profile `l(b) = alpha * b + beta` (Symphony §2), for batches up to `max_batch`.
    ///
    /// # Errors
    /// If `max_batch` is zero or `l(1)` is.
    pub fn linear(alpha: Duration, beta: Duration, max_batch: u32) -> Result<Self, ProfileError> {
        Self::from_table((1..=u64::from(max_batch)).map(|b| alpha.saturating_mul(b) + beta).collect())
    }

    /// The profile through measured points `(batch size, latency)`: linear between two points, the running
    /// maximum where noise made a larger batch faster, and from the origin-side point's latency below the first.
    /// Points need not be sorted. The largest batch measured is the largest of the profile.
    ///
    /// # Errors
    /// If there is no point, or a latency is zero.
    pub fn from_points(points: &[(u32, Duration)]) -> Result<Self, ProfileError> {
        let mut points: Vec<(u32, Duration)> = points.iter().copied().filter(|(b, _)| *b > 0).collect();
        points.sort_unstable();
        points.dedup_by_key(|(b, _)| *b);
        let (Some(&(first, first_latency)), Some(&(last, _))) = (points.first(), points.last()) else {
            return Err(ProfileError::Empty);
        };
        let mut table = vec![first_latency; first as usize];
        table.reserve(last as usize - first as usize);
        for pair in points.windows(2) {
            let ((b0, l0), (b1, l1)) = (pair[0], pair[1]);
            for b in b0 + 1..=b1 {
                let span = f64::from(b1 - b0);
                let part = f64::from(b - b0) / span;
                let ns = l0.as_nanos() as f64 * (1.0 - part) + l1.as_nanos() as f64 * part;
                table.push(Duration::from_nanos(ns as u64));
            }
        }
        let mut most = Duration::ZERO;
        for d in &mut table {
            most = most.max(*d);
            *d = most;
        }
        Self::from_table(table)
    }

    /// `l(batch)`. Zero for an empty batch; beyond the largest profiled size, extended along the slope between
    /// the first and the last entry, so that `l(b + 1)` of the largest batch exists.
    pub fn latency(&self, batch: u32) -> Duration {
        let n = self.table.len();
        match batch as usize {
            0 => Duration::ZERO,
            b if b <= n => self.table[b - 1],
            b => {
                let last = self.table[n - 1].as_nanos();
                let slope = if n > 1 { (last - self.table[0].as_nanos()) / (n as u64 - 1) } else { 0 };
                Duration::from_nanos(last.saturating_add(slope.saturating_mul((b - n) as u64)))
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

    /// The largest batch up to `limit` whose latency, extended as [`LatencyProfile::latency`] does, is at most
    /// `budget`; zero if none. `O(log max_batch)`.
    pub fn largest_up_to(&self, limit: u32, budget: Duration) -> u32 {
        let within = self.largest_within(budget);
        if within < self.max_batch() || limit <= within {
            return within.min(limit);
        }
        let n = self.table.len() as u64;
        let (first, last) = (self.table[0].as_nanos(), self.table[self.table.len() - 1].as_nanos());
        let slope = if n > 1 { (last - first) / (n - 1) } else { 0 };
        match (budget.as_nanos() - last).checked_div(slope) {
            None => limit,
            Some(more) => u32::try_from(n.saturating_add(more)).unwrap_or(u32::MAX).min(limit),
        }
    }
}
