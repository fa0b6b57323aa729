//! Measures the time of a model's segments, by batch size and by share of a device's compute units
//! (GSLICE figures 2 and 3).

use downbeat_core::{Duration, median, quantiles};
use downbeat_engine::{Place, RunError, Share};
use serde::{Deserialize, Serialize};

use crate::measure::sampler::{Subject, TimedRun, Watch};
use crate::measure::sized_cases::{CaseSize, SizedCases};

/// The fewest runs that are timed for one batch size on one share, however little time there is,
/// and the most.
const RUNS: [usize; 2] = [3, 100];

/// The time of batches of one size on one share of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareMeasurement {
    /// Compute units; `None`: all, of a device that does not report how many it has.
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
    /// The median by the host's clock, from joining the requests to separating the outputs,
    /// nanoseconds.
    pub host_ns: u64,
    /// Whether the device's clock measured; then the host's part is left out.
    pub by_device: bool,
}

impl Subject<'_> {
    /// Times batches of each of `sizes` on each share of the first device, spending about `budget`
    /// in all. A case that takes far longer than the others allow is timed again. A share has the
    /// number of units that is reported. `watch` hears of each measurement.
    ///
    /// # Errors
    /// If the device cannot give a share, or the engine cannot run such a batch.
    pub fn measure_shares(
        &self,
        shares: &[(Option<u32>, Share)],
        sizes: &[u32],
        budget: Duration,
        watch: &mut dyn Watch<ShareMeasurement>,
    ) -> Result<Vec<ShareMeasurement>, RunError> {
        let (item, sizes) = (self.item()?, self.timed(sizes));
        let cases: Vec<_> = shares.iter().flat_map(|share| sizes.iter().map(move |batch| (*share, *batch))).collect();
        // The lane of the share that ran last.
        let mut lane = None;
        let run = |((_, share), batch): ShareCase| {
            let lane = match &mut lane {
                Some((of, lane)) if *of == share => lane,
                other => {
                    drop(other.take());
                    &mut other.insert((share, self.lane_at(Place { device: 0, share })?)).1
                }
            };
            self.run_cut(&mut **lane, &item, batch as usize)
        };
        let size = |((units, _), rows): &ShareCase| CaseSize { rows: *rows, units: units.unwrap_or(1) };
        let cases = SizedCases { clock: self.clock, budget, runs: RUNS, cases: &cases, size };
        cases.measure(watch, run, TimedRun::total, |((units, _), batch), runs| summary(units, batch, runs))
    }
}

/// A share with its compute units, and a batch size.
type ShareCase = ((Option<u32>, Share), u32);

/// The medians of some runs.
fn summary(units: Option<u32>, batch: u32, runs: &[TimedRun]) -> ShareMeasurement {
    let totals = runs.iter().map(|run| run.total().as_nanos());
    let [median_ns, p95_ns] = quantiles(totals, [0.5, 0.95]).unwrap_or_default();
    let median_of = |what: &dyn Fn(&TimedRun) -> Option<Duration>| {
        median(runs.iter().filter_map(what)).map_or(0, Duration::as_nanos)
    };
    let segments = runs.first().map_or(0, |run| run.segments.len());
    ShareMeasurement {
        units,
        batch,
        runs: runs.len() as u32,
        median_ns,
        p95_ns,
        segments_ns: (0..segments).map(|segment| median_of(&|run| run.segments.get(segment).copied())).collect(),
        host_ns: median_of(&|run| Some(run.host)),
        by_device: runs.iter().all(|run| run.by_device),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(values: &[u64]) -> Vec<Duration> {
        values.iter().map(|n| Duration::from_millis(*n)).collect()
    }

    #[test]
    fn a_summary_has_the_medians_of_each_segment_and_of_their_sums() {
        let run = |segments: &[u64], host: u64| TimedRun {
            host: Duration::from_millis(host),
            joining: Duration::ZERO,
            segments: ms(segments),
            segments_on_host: ms(segments),
            by_device: true,
        };
        let runs = [run(&[1, 9], 12), run(&[2, 2], 5), run(&[3, 3], 7)];
        let summary = summary(Some(16), 4, &runs);
        assert_eq!(summary.segments_ns, [2_000_000, 3_000_000]);
        assert_eq!((summary.median_ns, summary.p95_ns, summary.host_ns), (6_000_000, 10_000_000, 7_000_000));
        assert!(summary.by_device && summary.runs == 3);
    }
}
