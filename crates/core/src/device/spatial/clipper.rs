//! The batch size control of Clipper's released code, as a baseline.

use std::collections::BTreeMap;

use crate::time::Duration;

/// The part of the SLO that a batch may take.
const BUDGET: f64 = 0.92;
/// The number of batches of the largest size before a larger one is tried.
const SAMPLES: f64 = 5.0;
/// Sizes below this grow by one item, others by [`GROWTH`].
const BY_ONE: u32 = 10;
/// The mean growth. The code draws it with a deviation of 0.05.
const GROWTH: f64 = 0.1;
/// The standard deviations above the mean that a size is taken to need.
const DEVIATIONS: f64 = 3.0;

/// The latencies of batches of one size.
#[derive(Clone, Copy, Debug, Default)]
struct Latencies {
    count: f64,
    mean: f64,
    squares: f64,
}

/// The batch size control in the code of Clipper's authors (github.com/ucbrise/clipper,
/// `containers.cpp` since version 0.3). GSLICE §4.5 compares with this code, which differs from
/// Clipper's paper ([`Aimd`](super::Aimd)).
///
/// The control *explores* while no batch ever took as long as 92% of the SLO. The largest size runs
/// five times, then the size grows by one item, from ten on by a tenth. After that the control
/// *estimates*, for good. A line is fitted through all sizes, at three standard deviations above
/// their mean latencies. The limit is the size on this line for 92% of the SLO. Larger batches are
/// never explored again, however free the device is.
#[derive(Clone, Debug)]
pub struct Clipper {
    /// The latency that a batch may have, in seconds.
    budget: f64,
    most: u32,
    limit: u32,
    largest: u32,
    longest: f64,
    sizes: BTreeMap<u32, Latencies>,
}

impl Clipper {
    /// A control that begins with batches of one. A batch has at most `most` items.
    pub fn new(slo: Duration, most: u32) -> Self {
        let (budget, sizes) = (slo.as_secs_f64() * BUDGET, BTreeMap::new());
        Clipper { budget, most: most.max(1), limit: 1, largest: 1, longest: 0.0, sizes }
    }

    /// The most items of a batch.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Handles the latency of a batch.
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

    /// The size on the line of least squares for the budget.
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
    fn clipper_runs_each_size_five_times_below_92_percent_of_the_slo() {
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
    fn gslice_section_4_6_1_clipper_does_not_use_a_freed_device() {
        let mut clipper = Clipper::new(Duration::from_millis(50), 64);
        settle(&mut clipper, 60, |rows| 30.0 + 4.0 * f64::from(rows));
        let before = clipper.limit();
        settle(&mut clipper, 300, |rows| 10.0 + f64::from(rows));
        assert!(clipper.limit() < 2 * before, "{before}, then {}: 36 would be in time", clipper.limit());
    }
}
