//! Measures two models that run at the same time on a device, against each of them alone.

use std::sync::atomic::{AtomicBool, Ordering};

use downbeat_core::{Duration, quantiles};
use downbeat_engine::{Lane, Place, RunError, Share};
use downbeat_host::request::batch_codec::Admitted;
use serde::{Deserialize, Serialize};

use crate::measure::sampler::{self, Subject, TimedRun, Turn, Watch, at_once};

/// The fewest runs of each that are timed for one pair of batch sizes, however little time there
/// is, and the most.
const RUNS: [usize; 2] = [3, 1000];

/// How long runs took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latencies {
    /// Timed runs.
    pub runs: u32,
    /// 5 of 100 runs took at most this, nanoseconds.
    pub p5_ns: u64,
    /// Half of them, nanoseconds.
    pub median_ns: u64,
    /// 95 of 100, nanoseconds.
    pub p95_ns: u64,
}

impl Latencies {
    fn of(times: impl ExactSizeIterator<Item = u64>) -> Self {
        let runs = times.len() as u32;
        let [p5_ns, median_ns, p95_ns] = quantiles(times, [0.05, 0.5, 0.95]).unwrap_or_default();
        Latencies { runs, p5_ns, median_ns, p95_ns }
    }

    fn of_runs(runs: &[TimedRun]) -> Self {
        Latencies::of(runs.iter().map(|run| run.total().as_nanos()))
    }
}

/// Two models, each with a batch size, alone and at the same time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairMeasurement {
    /// Items in the batch of each.
    pub batches: [u32; 2],
    /// Latencies of each alone on the whole device.
    pub alone: [Latencies; 2],
    /// Latencies of each alone in its partition, if they have partitions.
    pub alone_in_partition: Option<[Latencies; 2]>,
    /// Latencies of each while the other runs its batches one after another.
    pub together: [Latencies; 2],
    /// Whether the device's clock measured; the host's otherwise.
    pub by_device: bool,
}

/// One subject of the pair.
struct Side<'a> {
    subject: &'a Subject<'a>,
    lane: Box<dyn Lane>,
    item: Admitted,
}

impl Side<'_> {
    fn run(&mut self, batch: u32) -> Result<TimedRun, RunError> {
        self.subject.run_cut(&mut *self.lane, &self.item, batch as usize)
    }
}

/// Notes that a side is done, also if it fails or panics: the other would wait for ever.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Runs one after the other, each alone.
fn alone(sides: &mut [Side<'_>; 2], batches: [u32; 2], turn: &Turn<'_>) -> Result<Vec<Vec<TimedRun>>, RunError> {
    let sides = sides.iter_mut().zip(batches).zip([0.5, 1.0]);
    sides.map(|((side, batch), share)| turn.part(share).runs(RUNS, || side.run(batch))).collect()
}

/// Runs both at once, each one batch after another, until the time is over and the slower has run a
/// few times.
fn together(sides: &mut [Side<'_>; 2], batches: [u32; 2], turn: &Turn<'_>) -> Result<Vec<Vec<TimedRun>>, RunError> {
    let done = [AtomicBool::new(false), AtomicBool::new(false)];
    let [least, most] = RUNS;
    let go = |side: &mut Side<'_>, batch, mine: &AtomicBool| {
        let is_done = Done(mine);
        let mut runs = Vec::new();
        // The faster one goes on until the other is done, so that every run but the last has
        // company throughout.
        while !done.iter().all(|done| done.load(Ordering::Acquire)) {
            let run = side.run(batch)?;
            runs.truncate(most - 1);
            runs.push(run);
            if !turn.wants(runs.len(), [least, usize::MAX]) {
                mine.store(true, Ordering::Release);
            }
        }
        runs.pop();
        drop(is_done);
        Ok(runs)
    };
    let (go, both) = (&go, sides.iter_mut().zip(batches).zip(&done));
    at_once(both.map(|((side, batch), mine)| move || go(side, batch, mine)))
}

/// Runs two models at the same time on a device, for each pair of batch sizes, in about `budget`
/// for all. `split`: the compute units of the first model, of which the second has the rest;
/// otherwise both have all. `watch` hears of each pair.
///
/// # Errors
/// If the device cannot be split like that, or an engine cannot run such a batch.
pub fn measure(
    subjects: [&Subject<'_>; 2],
    device: usize,
    pairs: &[[u32; 2]],
    split: Option<u32>,
    budget: Duration,
    watch: &mut dyn Watch<PairMeasurement>,
) -> Result<Vec<PairMeasurement>, RunError> {
    let side = |index: usize, share: Share| -> Result<Side<'_>, RunError> {
        let subject = subjects[index];
        Ok(Side { subject, lane: subject.lane_at(Place { device, share })?, item: subject.item()? })
    };
    let mut whole = [side(0, Share::Whole)?, side(1, Share::Whole)?];
    let mut parts = match split {
        Some(units) => Some([side(0, Share::Units(units))?, side(1, Share::AllBut(units))?]),
        None => None,
    };
    sampler::each(subjects[0].clock, budget, pairs.iter().copied(), watch, |batches, turn| {
        // The runs together take as much time as all runs alone.
        let alone_on_whole = alone(&mut whole, batches, &turn.part(if split.is_some() { 0.25 } else { 0.5 }))?;
        let alone_in_partition = match &mut parts {
            Some(parts) => Some(alone(parts, batches, &turn.part(1.0 / 3.0))?),
            None => None,
        };
        let together = together(parts.as_mut().unwrap_or(&mut whole), batches, turn)?;
        let all = alone_on_whole.iter().chain(alone_in_partition.iter().flatten()).chain(&together);
        let by_device = all.flatten().all(|run| run.by_device);
        let both = |runs: &[Vec<TimedRun>]| {
            [0, 1].map(|side| Latencies::of_runs(runs.get(side).map_or(&[][..], Vec::as_slice)))
        };
        Ok(PairMeasurement {
            batches,
            alone: both(&alone_on_whole),
            alone_in_partition: alone_in_partition.as_deref().map(both),
            together: both(&together),
            by_device,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_quantiles_of_the_runs() {
        let times = (1..=101).rev().collect::<Vec<u64>>().into_iter();
        assert_eq!(Latencies::of(times), Latencies { runs: 101, p5_ns: 6, median_ns: 51, p95_ns: 96 });
    }
}
