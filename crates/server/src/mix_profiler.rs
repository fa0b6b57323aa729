//! Measures which mix of lanes answers soonest, for each load: the offline phase of E-Ebird (E²bird §7.3.2).

use std::sync::{Mutex, PoisonError, RwLock};

use downbeat_core::Duration;
use downbeat_core::device::LaneMix;
use downbeat_engine::{Lane, RunError};
use serde::Serialize;

use crate::batch_codec::Admitted;
use crate::profiler::Subject;

/// Rounds in which the slower half of the mixes of a load is left out.
const HALVINGS: u32 = 4;
/// Runs of each mix before any is left out.
const FIRST_RUNS: usize = 3;

/// A mix and how long the items of its lanes took, all lanes at once.
#[derive(Clone, Debug, Serialize)]
pub struct MeasuredMix {
    /// The batch sizes of its lanes.
    pub mix: LaneMix,
    /// Items of all lanes.
    pub total: u32,
    /// Times it was run.
    pub runs: u32,
    /// From the common start to the end of an item's batch, the mean over items, the median over runs; nanoseconds.
    pub mean_ns: u64,
    /// Until the last lane was done, the median over runs; nanoseconds.
    pub longest_ns: u64,
}

/// The runs of one mix.
struct Runs {
    mix: LaneMix,
    mean_ns: Vec<u64>,
    longest_ns: Vec<u64>,
}

fn median(values: &[u64]) -> u64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or(0)
}

/// How many mixes there are for these loads with lanes of up to `largest` items, as [`measure`] counts its progress.
pub fn count(totals: &[u32], largest: u32) -> usize {
    totals.iter().map(|total| LaneMix::all(*total, largest).len()).sum()
}

/// Runs every mix of lanes of up to `largest` items for each load of `totals`, in about `budget` for all: each a few times, then the faster half
/// again, and so on.
/// Gives the mixes of each load, the fastest first. `progress` hears of the first run of each mix.
///
/// # Errors
/// What the engine says, if it has no memory for the lanes or cannot run such a batch.
pub fn measure(
    subject: &Subject<'_>,
    totals: &[u32],
    largest: u32,
    budget: Duration,
    mut progress: impl FnMut(u32, &LaneMix),
) -> Result<Vec<(u32, Vec<MeasuredMix>)>, RunError> {
    let most = totals.iter().max().copied().unwrap_or(0);
    let no_lane = |error: downbeat_engine::LoadError| RunError::new("mix profiler", error.to_string());
    let lanes = (0..most).map(|_| subject.model.lane().map(Mutex::new).map_err(no_lane));
    let lanes: Vec<Mutex<Box<dyn Lane>>> = lanes.collect::<Result<_, _>>()?;
    let item = subject.item()?;
    // What the first run of each size allocates and plans is not measured.
    for (lane, size) in
        lanes.iter().zip((0..).map(|exponent| 1u32 << exponent).take_while(|size| *size <= largest.min(most)))
    {
        subject.run(&mut **lane.lock().unwrap_or_else(PoisonError::into_inner), &item, &vec![1; size as usize])?;
    }
    let begin = subject.clock.now();
    let mut found = Vec::with_capacity(totals.len());
    for (done, total) in totals.iter().enumerate() {
        let share = Duration::from_nanos(budget.as_nanos() / totals.len() as u64 * (done as u64 + 1));
        let mut field: Vec<Runs> = LaneMix::all(*total, largest)
            .into_iter()
            .map(|mix| Runs { mix, mean_ns: Vec::new(), longest_ns: Vec::new() })
            .collect();
        for runs in &mut field {
            progress(*total, &runs.mix);
            for run in 0..FIRST_RUNS {
                // Each once, however little time there is.
                if run == 0 || subject.clock.now().since(begin) < share {
                    run_mix(subject, &item, &lanes, runs)?;
                }
            }
        }
        for round in 0.. {
            let kept =
                if round < HALVINGS { field.len().div_ceil(2).max(3.min(field.len())) } else { field.len().min(3) };
            field.sort_by_key(|runs| median(&runs.mean_ns));
            for runs in field.iter_mut().take(kept) {
                run_mix(subject, &item, &lanes, runs)?;
            }
            if subject.clock.now().since(begin) > share || round > 200 {
                break;
            }
        }
        let mut measured: Vec<MeasuredMix> = field
            .into_iter()
            .map(|runs| MeasuredMix {
                total: *total,
                runs: runs.mean_ns.len() as u32,
                mean_ns: median(&runs.mean_ns),
                longest_ns: median(&runs.longest_ns),
                mix: runs.mix,
            })
            .collect();
        // A mix that was left out early has seen too few runs to be the best by luck.
        let most_runs = measured.iter().map(|m| m.runs).max().unwrap_or(0);
        measured.sort_by_key(|m| (m.runs * 2 < most_runs, m.mean_ns));
        found.push((*total, measured));
    }
    Ok(found)
}

/// Runs all lanes of a mix once, at the same time.
fn run_mix(
    subject: &Subject<'_>,
    item: &Admitted,
    lanes: &[Mutex<Box<dyn Lane>>],
    runs: &mut Runs,
) -> Result<(), RunError> {
    let sizes: Vec<u32> = runs.mix.sizes().collect();
    let gate = RwLock::new(());
    let refused = |error: std::io::Error| RunError::new("mix profiler", format!("no thread for a lane: {error}"));
    let times: Vec<Result<(u32, u64), RunError>> = std::thread::scope(|scope| {
        // All begin when it opens; where a thread cannot be had, those that could go through and end.
        let closed = gate.write().unwrap_or_else(PoisonError::into_inner);
        let threads: Vec<_> = sizes
            .iter()
            .zip(lanes)
            .map(|(size, lane)| {
                let (gate, rows) = (&gate, vec![1; *size as usize]);
                std::thread::Builder::new().spawn_scoped(scope, move || {
                    let mut lane = lane.lock().unwrap_or_else(PoisonError::into_inner);
                    drop(gate.read().unwrap_or_else(PoisonError::into_inner));
                    Ok((*size, subject.run(&mut **lane, item, &rows)?.as_nanos()))
                })
            })
            .collect();
        drop(closed);
        let panicked = || RunError::new("mix profiler", "the engine panicked".to_owned());
        let joined = threads.into_iter().map(|thread| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| Err(panicked())),
            Err(error) => Err(refused(error)),
        });
        joined.collect()
    });
    let times = times.into_iter().collect::<Result<Vec<_>, _>>()?;
    let items: u64 = times.iter().map(|(size, _)| u64::from(*size)).sum();
    let weighted: u64 = times.iter().map(|(size, ns)| u64::from(*size) * ns).sum();
    runs.mean_ns.push(weighted / items.max(1));
    runs.longest_ns.push(times.iter().map(|(_, ns)| *ns).max().unwrap_or(0));
    Ok(())
}
