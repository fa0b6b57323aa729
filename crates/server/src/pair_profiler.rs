//! Measures two models that run at the same time on a device, against each of them alone (Abacus figure 3).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use downbeat_core::Duration;
use downbeat_engine::{Lane, LoadError, Place, RunError, Share};
use serde::Serialize;

use crate::batch_codec::Admitted;
use crate::profiler::Subject;
use crate::share_profiler::quantile;

/// Most runs of each that are timed for one pair of batch sizes.
const MOST_RUNS: usize = 1000;
/// Fewest, however little time there is.
const FEWEST_RUNS: usize = 3;

/// How long runs took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |share| quantile(&times, share);
        Latencies { runs: times.len() as u32, p5_ns: at(0.05), median_ns: at(0.5), p95_ns: at(0.95) }
    }
}

/// Two models, each with a batch size, alone and at the same time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PairMeasurement {
    /// Items in the batch of each.
    pub batches: [u32; 2],
    /// Each alone on the whole device.
    pub alone: [Latencies; 2],
    /// Each alone in its partition, where they have partitions.
    pub alone_in_partition: Option<[Latencies; 2]>,
    /// Each while the other runs its batches one after another.
    pub together: [Latencies; 2],
    /// See [`share_of_sequential`].
    pub share_of_sequential: f64,
    /// Whether the device's clock measured; the host's otherwise.
    pub by_device: bool,
}

/// What running both at the same time takes, as a share of what the same batches take one after the other: 1 is nothing gained, 0.5 is the most
/// there can be. In a time in which each of the two goes on at its latency together, `t / together` batches are done, which take `alone / together * t` alone.
///
/// Abacus §8 does not place models on one GPU whose duration together "always equals that of sequential execution".
pub fn share_of_sequential(alone_ns: [u64; 2], together_ns: [u64; 2]) -> f64 {
    let done: f64 =
        alone_ns.iter().zip(together_ns).map(|(alone, together)| *alone as f64 / together.max(1) as f64).sum();
    1.0 / done
}

/// One of the two.
struct Side<'a> {
    subject: &'a Subject<'a>,
    lane: Box<dyn Lane>,
    item: Admitted,
}

/// The times of some runs, and whether they are by the device's clock.
struct Times {
    times: Vec<Duration>,
    by_device: bool,
}

impl Side<'_> {
    fn run(&mut self, rows: &[u32], times: &mut Times) -> Result<(), RunError> {
        let run = self.subject.run_timed(&mut *self.lane, &self.item, rows)?;
        times.by_device &= run.by_device;
        times.times.push(if run.by_device { run.total() } else { run.host });
        Ok(())
    }

    fn alone(&mut self, batch: u32, budget: Duration) -> Result<Times, RunError> {
        let rows = vec![1; batch as usize];
        let clock = self.subject.clock;
        let mut times = Times { times: Vec::new(), by_device: true };
        // The first run of a size allocates and plans, the second may be recorded to be repeated.
        self.run(&rows, &mut times)?;
        self.run(&rows, &mut times)?;
        times.times.clear();
        let until = clock.now() + budget;
        while times.times.len() < FEWEST_RUNS || times.times.len() < MOST_RUNS && clock.now() < until {
            self.run(&rows, &mut times)?;
        }
        Ok(times)
    }
}

/// Says that a side is done, also where it fails or panics: the other would wait for it for ever.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Both at once, each one batch after another, for `budget` or until the slower has run a few times.
fn together(sides: &mut [Side<'_>; 2], batches: [u32; 2], budget: Duration) -> Result<[Times; 2], RunError> {
    let done = [AtomicBool::new(false), AtomicBool::new(false)];
    let gate = RwLock::new(());
    let go = |side: &mut Side<'_>, batch: u32, mine: &AtomicBool, other: &AtomicBool| {
        let is_done = Done(mine);
        let rows = vec![1; batch as usize];
        let clock = side.subject.clock;
        let mut times = Times { times: Vec::new(), by_device: true };
        drop(gate.read().unwrap_or_else(PoisonError::into_inner));
        let until = clock.now() + budget;
        // Whoever is done goes on until the other is, so that every run but the last has company throughout.
        while !(mine.load(Ordering::Acquire) && other.load(Ordering::Acquire)) {
            side.run(&rows, &mut times)?;
            times.times.truncate(MOST_RUNS);
            if times.times.len() >= FEWEST_RUNS && clock.now() >= until {
                mine.store(true, Ordering::Release);
            }
        }
        times.times.pop();
        drop(is_done);
        Ok(times)
    };
    let failed = |reason: String| RunError::new("pair profiler", reason);
    let [first, second] = sides;
    std::thread::scope(|scope| {
        let closed = gate.write().unwrap_or_else(PoisonError::into_inner);
        let thread = std::thread::Builder::new().spawn_scoped(scope, || go(second, batches[1], &done[1], &done[0]));
        let thread = thread.map_err(|error| failed(format!("no thread for a lane: {error}")))?;
        drop(closed);
        let first = go(first, batches[0], &done[0], &done[1]);
        let second = thread.join().unwrap_or_else(|_| Err(failed("the engine panicked".to_owned())));
        Ok([first?, second?])
    })
}

/// Runs two models at the same time on a device, for each pair of batch sizes, in about `budget` for all. `split`: the first model has so many compute
/// units, the second the others; otherwise both have all. `progress` hears of each pair.
///
/// # Errors
/// If the device cannot be split so, or an engine cannot run such a batch.
pub fn measure(
    subjects: [&Subject<'_>; 2],
    device: usize,
    pairs: &[[u32; 2]],
    split: Option<u32>,
    budget: Duration,
    mut progress: impl FnMut(&PairMeasurement),
) -> Result<Vec<PairMeasurement>, RunError> {
    let side = |index: usize, share: Share| -> Result<Side<'_>, RunError> {
        let no_lane = |error: LoadError| RunError::new("pair profiler", error.to_string());
        let subject = subjects[index];
        let lane = subject.model.lane_at(Place { device, share }).map_err(no_lane)?;
        Ok(Side { subject, lane, item: subject.item()? })
    };
    let mut whole = [side(0, Share::Whole)?, side(1, Share::Whole)?];
    let mut parts = match split {
        Some(units) => Some([side(0, Share::Units(units))?, side(1, Share::AllBut(units))?]),
        None => None,
    };
    let mut found = Vec::with_capacity(pairs.len());
    let clock = subjects[0].clock;
    let end = clock.now() + budget;
    for batches in pairs {
        let left = end.since(clock.now()).as_nanos() / (pairs.len() - found.len()) as u64;
        // As much for both together as for all that run alone.
        let (alone_budget, budget) =
            (Duration::from_nanos(left / if split.is_some() { 8 } else { 4 }), Duration::from_nanos(left / 2));
        let mut by_device = true;
        let mut alone = |sides: &mut [Side<'_>; 2]| -> Result<[Latencies; 2], RunError> {
            let [first, second] = sides;
            let (first, second) = (first.alone(batches[0], alone_budget)?, second.alone(batches[1], alone_budget)?);
            by_device &= first.by_device && second.by_device;
            Ok([Latencies::of(first.times), Latencies::of(second.times)])
        };
        let alone_on_whole = alone(&mut whole)?;
        let alone_in_partition = parts.as_mut().map(&mut alone).transpose()?;
        let [first, second] = together(parts.as_mut().unwrap_or(&mut whole), *batches, budget)?;
        let together = [Latencies::of(first.times), Latencies::of(second.times)];
        let medians = |of: &[Latencies; 2]| of.map(|latencies| latencies.median_ns);
        let measurement = PairMeasurement {
            batches: *batches,
            share_of_sequential: share_of_sequential(medians(&alone_on_whole), medians(&together)),
            alone: alone_on_whole,
            alone_in_partition,
            together,
            by_device: by_device && first.by_device && second.by_device,
        };
        progress(&measurement);
        found.push(measurement);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_gains_nothing_is_1_and_what_disturbs_nobody_is_a_half() {
        assert_eq!(share_of_sequential([10, 30], [10, 30]), 0.5);
        // Each takes as long as both alone, as when they run in turns.
        assert_eq!(share_of_sequential([10, 10], [20, 20]), 1.0);
        // In 80 ns four runs of the first (40 ns alone) and one of the second (40 ns alone): in turns they are done in 80 ns too.
        assert_eq!(share_of_sequential([10, 40], [20, 80]), 1.0);
        assert!(share_of_sequential([10, 10], [25, 25]) > 1.0);
    }

    #[test]
    fn latencies_are_quantiles_of_the_runs() {
        let times = (1..=101).rev().map(Duration::from_nanos).collect();
        assert_eq!(Latencies::of(times), Latencies { runs: 101, p5_ns: 6, median_ns: 51, p95_ns: 96 });
    }
}
