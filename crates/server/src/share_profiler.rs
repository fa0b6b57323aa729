//! Measures what the segments of a model take, by batch size and by share of a device's compute units (GSLICE figures 2 and 3).

use downbeat_core::Duration;
use downbeat_engine::{Lane, Place, RunError, Share};
use serde::Serialize;

use crate::batch_codec::Admitted;
use crate::profiler::Subject;

/// Most runs that are timed for one batch size on one share, and the fewest, however little time there is.
const MOST_RUNS: usize = 100;
const FEWEST_RUNS: usize = 3;
/// Runs before them: the first allocates and plans, the second may be recorded to be repeated.
const WARM_UP: usize = 2;

/// One run of all segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimedRun {
    /// What each segment took: by the device's clock where it has one, by the host's otherwise.
    pub segments: Vec<Duration>,
    /// From joining the requests to separating the outputs, by the host's clock.
    pub host: Duration,
    /// Whether the segments are by the device's clock.
    pub by_device: bool,
}

impl TimedRun {
    /// What all segments took one after another, what the host did between them left out where the device has a clock.
    pub fn total(&self) -> Duration {
        if !self.by_device && self.segments.len() == 1 {
            return self.host;
        }
        self.segments.iter().fold(Duration::ZERO, |sum, segment| sum + *segment)
    }
}

/// What batches of one size took on one share of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ShareMeasurement {
    /// Compute units; `None`: all, of a device that does not say how many it has.
    pub units: Option<u32>,
    /// Items in the batch.
    pub batch: u32,
    /// Timed runs.
    pub runs: u32,
    /// The median of all segments together, nanoseconds.
    pub median_ns: u64,
    /// 95 of 100 runs took at most this, nanoseconds.
    pub p95_ns: u64,
    /// The median of each segment, nanoseconds.
    pub segments_ns: Vec<u64>,
    /// The median by the host's clock, from joining the requests to separating the outputs, nanoseconds.
    pub host_ns: u64,
    /// Whether the device's clock measured, for which the host's part is left out.
    pub by_device: bool,
}

/// The value at a quantile of some that are sorted; 0 of none.
pub(crate) fn quantile(sorted: &[Duration], quantile: f64) -> u64 {
    let at = (sorted.len().saturating_sub(1) as f64 * quantile).round() as usize;
    sorted.get(at).map_or(0, |value| value.as_nanos())
}

fn median(values: impl Iterator<Item = Duration>) -> u64 {
    let mut sorted: Vec<Duration> = values.collect();
    sorted.sort_unstable();
    quantile(&sorted, 0.5)
}

impl Subject<'_> {
    /// Runs a batch of copies of `item`, of one row each, segment by segment. `rows` has a 1 for each copy.
    pub(crate) fn run_timed(&self, lane: &mut dyn Lane, item: &Admitted, rows: &[u32]) -> Result<TimedRun, RunError> {
        let begin = self.clock.now();
        let state = self.plan.assemble(std::iter::repeat_n(item, rows.len()));
        let mut state = state.map_err(|reason| RunError::new("batch plan", reason))?;
        let (mut segments, mut by_device) = (Vec::with_capacity(self.model.segments()), true);
        for segment in 0..self.model.segments() {
            let start = self.clock.now();
            lane.run(segment..segment + 1, &mut state)?;
            let device = lane.last_run().and_then(|span| span.took());
            by_device &= device.is_some();
            segments.push(device.unwrap_or_else(|| self.clock.now().since(start)));
        }
        self.plan.separate(state, rows).map_err(|reason| RunError::new("batch plan", reason))?;
        Ok(TimedRun { segments, host: self.clock.now().since(begin), by_device })
    }

    /// Times batches of each of `sizes` on each share of the first device, spending about `budget` in all. A share has the number of units that is reported.
    /// `progress` hears of each measurement.
    ///
    /// # Errors
    /// If the device cannot give a share, or the engine cannot run such a batch.
    pub fn measure_shares(
        &self,
        shares: &[(Option<u32>, Share)],
        sizes: &[u32],
        budget: Duration,
        mut progress: impl FnMut(&ShareMeasurement),
    ) -> Result<Vec<ShareMeasurement>, RunError> {
        let (item, sizes) = (self.item()?, self.timed(sizes));
        let cells = shares.len() * sizes.len();
        let mut found = Vec::with_capacity(cells);
        let end = self.clock.now() + budget;
        for (units, share) in shares {
            let no_lane = |error: downbeat_engine::LoadError| RunError::new("profiler", error.to_string());
            let mut lane = self.model.lane_at(Place { device: 0, share: *share }).map_err(no_lane)?;
            for batch in &sizes {
                let rows = vec![1; *batch as usize];
                let left = end.since(self.clock.now()).as_nanos();
                let until = self.clock.now() + Duration::from_nanos(left / (cells - found.len()) as u64);
                for _ in 0..WARM_UP {
                    self.run_timed(&mut *lane, &item, &rows)?;
                }
                let mut runs = Vec::new();
                while runs.len() < FEWEST_RUNS || runs.len() < MOST_RUNS && self.clock.now() < until {
                    runs.push(self.run_timed(&mut *lane, &item, &rows)?);
                }
                let measurement = summary(*units, *batch, &runs);
                progress(&measurement);
                found.push(measurement);
            }
        }
        Ok(found)
    }
}

/// The medians of some runs.
fn summary(units: Option<u32>, batch: u32, runs: &[TimedRun]) -> ShareMeasurement {
    let mut totals: Vec<Duration> = runs.iter().map(TimedRun::total).collect();
    totals.sort_unstable();
    let segments = runs.first().map_or(0, |run| run.segments.len());
    let of = |segment: usize| median(runs.iter().filter_map(|run| run.segments.get(segment).copied()));
    ShareMeasurement {
        units,
        batch,
        runs: runs.len() as u32,
        median_ns: quantile(&totals, 0.5),
        p95_ns: quantile(&totals, 0.95),
        segments_ns: (0..segments).map(of).collect(),
        host_ns: median(runs.iter().map(|run| run.host)),
        by_device: runs.iter().all(|run| run.by_device),
    }
}

/// How much longer than the shortest latency of all shares is "hardly longer" ([`knee`]).
pub const KNEE_TOLERANCE: f64 = 0.05;

/// The knee: the smallest share of the device from which on more units shorten the latency by less than 5% in all. `points` are units and latencies in
/// any order; `None` of fewer than two.
///
/// GSLICE §2.1.3 calls the knee the share beyond which there is "only a marginal improvement" and reads it off a plot; the 5% are our choice.
pub fn knee(points: &[(u32, u64)]) -> Option<u32> {
    let mut points = points.to_vec();
    points.sort_unstable();
    let mut best = u64::MAX;
    let mut knee = None;
    // From the largest share down, as long as what is given up is small; a smaller share behind a worse one is luck.
    for (units, latency) in points.iter().rev() {
        best = best.min(*latency);
        if *latency as f64 > best as f64 * (1.0 + KNEE_TOLERANCE) {
            break;
        }
        knee = Some(*units);
    }
    knee.filter(|_| points.len() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(values: &[u64]) -> Vec<Duration> {
        values.iter().map(|n| Duration::from_millis(*n)).collect()
    }

    #[test]
    fn the_knee_is_the_smallest_share_that_is_hardly_slower_than_the_rest() {
        // GSLICE figure 3: a batch of 1 gains next to nothing beyond 30%, a larger one goes on.
        let small: Vec<(u32, u64)> = (1..=10).map(|n| (n * 10, 1000 / u64::from(n.min(3)))).collect();
        assert_eq!(knee(&small), Some(30));
        let large: Vec<(u32, u64)> = (1..=10).map(|n| (n * 10, 10_000 / u64::from(n))).collect();
        assert_eq!(knee(&large), Some(100));
        assert_eq!(knee(&[(8, 104), (132, 100)]), Some(8));
        assert_eq!(knee(&[(132, 100), (8, 106)]), Some(132), "in any order");
        assert_eq!(knee(&[(132, 100)]), None);
        assert_eq!(knee(&[]), None);
    }

    #[test]
    fn small_steps_that_add_up_are_no_flat_end() {
        // Each step is within 5% of the next, all together are not.
        let slope = [(8, 116), (16, 112), (24, 108), (32, 104), (40, 100)];
        assert_eq!(knee(&slope), Some(32));
    }

    #[test]
    fn a_summary_has_the_medians_of_each_segment_and_of_their_sums() {
        let run = |segments: &[u64], host: u64| TimedRun {
            segments: ms(segments),
            host: Duration::from_millis(host),
            by_device: true,
        };
        let runs = [run(&[1, 9], 12), run(&[2, 2], 5), run(&[3, 3], 7)];
        let summary = summary(Some(16), 4, &runs);
        assert_eq!(summary.segments_ns, [2_000_000, 3_000_000]);
        assert_eq!((summary.median_ns, summary.p95_ns, summary.host_ns), (6_000_000, 10_000_000, 7_000_000));
        assert!(summary.by_device && summary.runs == 3);
    }
}
