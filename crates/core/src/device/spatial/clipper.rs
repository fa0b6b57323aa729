//! Clipper's control of the batch size as its released code has it, to compare with.

use std::collections::BTreeMap;

use crate::time::Duration;

/// The part of the SLO that a batch may take.
const BUDGET: f64 = 0.92;
/// So many batches of the largest size before a larger one is tried.
const SAMPLES: f64 = 5.0;
/// Smaller batches grow by one, others by [`GROWTH`].
const BY_ONE: u32 = 10;
/// The code draws it, with a deviation of 0.05; this is the mean.
const GROWTH: f64 = 0.1;
/// Standard deviations above the mean that a size is taken to need.
const DEVIATIONS: f64 = 3.0;

/// What batches of a size took.
#[derive(Clone, Copy, Debug, Default)]
struct Latencies {
    count: f64,
    mean: f64,
    squares: f64,
}

/// The control of the batch size in the code that Clipper's authors released (github.com/ucbrise/clipper, `containers.cpp` since version 0.3), which GSLICE §4.5 compares with; it is not what Clipper's paper has
/// ([`Aimd`](super::Aimd)).
///
/// *Explores* while no batch ever took as long as 92% of the SLO: the largest size runs five times, then one more item, from ten on a tenth more. After that it *estimates*, for good: the size that a line through
/// all sizes and three standard deviations above what they took on average gives for 92% of the SLO. So it never tries a larger batch again, whatever is free.
#[derive(Clone, Debug)]
pub struct Clipper {
    /// Seconds.
    budget: f64,
    most: u32,
    limit: u32,
    largest: u32,
    longest: f64,
    sizes: BTreeMap<u32, Latencies>,
}

impl Clipper {
    /// Batches of one, to begin with; of `most` at most.
    pub fn new(slo: Duration, most: u32) -> Self {
        let (budget, sizes) = (slo.as_secs_f64() * BUDGET, BTreeMap::new());
        Clipper { budget, most: most.max(1), limit: 1, largest: 1, longest: 0.0, sizes }
    }

    /// The most items of a batch.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// A batch took so long.
    pub fn handle_batch(&mut self, rows: u32, latency: Duration) {
        let seconds = latency.as_secs_f64();
        let size = self.sizes.entry(rows.max(1)).or_default();
        size.count += 1.0;
        let off = seconds - size.mean;
        size.mean += off / size.count;
        size.squares += off * (seconds - size.mean);
        self.longest = self.longest.max(seconds);
        let limit = if self.budget > self.longest { self.explore() } else { self.estimate() };
        self.limit = limit.clamp(1, self.most);
        self.largest = self.largest.max(self.limit);
    }

    fn explore(&self) -> u32 {
        let count = self.sizes.get(&self.largest).map_or(SAMPLES, |size| size.count);
        match self.largest {
            largest if count < SAMPLES => largest,
            largest if largest < BY_ONE => largest + 1,
            largest => (f64::from(largest) * (1.0 + GROWTH)) as u32,
        }
    }

    /// What a line of least squares gives for the budget.
    fn estimate(&self) -> u32 {
        let known = self.sizes.values().filter(|size| size.count >= SAMPLES);
        let (squares, count) = known.fold((0.0, 0.0), |(s, n), size| (s + size.squares, n + size.count - 1.0));
        let above = DEVIATIONS * (squares / f64::max(count, 1.0)).sqrt();
        let points: Vec<(f64, f64)> =
            self.sizes.iter().map(|(rows, size)| (size.mean + above, f64::from(*rows))).collect();
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
        let (x, y) = (mean(|point| point.0), mean(|point| point.1));
        let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
        let together: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
        let slope = if spread > 0.0 { together / spread } else { 0.0 };
        (y + slope * (self.budget - x)).floor() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settle(clipper: &mut Clipper, batches: u32, takes: impl Fn(u32) -> f64) -> Vec<u32> {
        let mut limits = Vec::new();
        for _ in 0..batches {
            let rows = clipper.limit();
            clipper.handle_batch(rows, Duration::from_millis_f64(takes(rows)));
            limits.push(rows);
        }
        limits
    }

    #[test]
    fn clippers_code_runs_each_size_five_times_and_stays_below_92_percent_of_the_slo() {
        let mut clipper = Clipper::new(Duration::from_millis(50), 64);
        let takes = |rows: u32| 12.4 + 1.6 * f64::from(rows);
        let limits = settle(&mut clipper, 200, takes);
        let count = |rows| limits.iter().filter(|limit| **limit == rows).count();
        assert_eq!([2, 3, 9, 10, 11, 14].map(count), [5; 6], "{limits:?}");
        assert_eq!(count(22), 1, "a tenth more than 20, and too much");
        let took = takes(clipper.limit());
        assert!((0.85 * 46.0..=46.0).contains(&took), "{} take {took:.1} ms", clipper.limit());
    }

    #[test]
    fn gslice_section_4_6_1_clippers_code_uses_no_more_when_the_device_is_free_again() {
        let mut clipper = Clipper::new(Duration::from_millis(50), 64);
        settle(&mut clipper, 60, |rows| 30.0 + 4.0 * f64::from(rows));
        let before = clipper.limit();
        settle(&mut clipper, 300, |rows| 10.0 + f64::from(rows));
        assert!(clipper.limit() < 2 * before, "{before}, then {}: 36 would be in time", clipper.limit());
    }
}
