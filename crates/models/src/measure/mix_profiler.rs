//! Measures which mix of lanes answers soonest, for each load: the offline phase of E-Ebird (E²bird
//! §7.3.2).

use downbeat_core::device::LaneMix;
use downbeat_core::{Duration, median};
use downbeat_engine::{Lane, Place, RunError};
use downbeat_host::request::batch_codec::Admitted;
use serde::Serialize;

use crate::measure::sampler::{self, Subject, Watch, at_once};

/// Rounds that leave out the slower half of the mixes of a load.
const HALVINGS: usize = 4;
/// Mixes that are run in all rounds.
const KEPT: usize = 3;
/// Runs of each mix before any is left out: the fewest, under any time, and the most. A single run
/// may have been stalled.
const FIRST_RUNS: [usize; 2] = [2, 3];
/// The most rounds after the first runs.
const MOST_ROUNDS: usize = 200;

/// A mix and how long the items of its lanes took, all lanes at once.
#[derive(Clone, Debug, Serialize)]
pub struct MeasuredMix {
    /// The batch sizes of its lanes.
    pub mix: LaneMix,
    /// Items of all lanes.
    pub total: u32,
    /// Times it was run.
    pub runs: u32,
    /// From the common start to the end of an item's batch, the mean over items, the median over
    /// runs; nanoseconds.
    pub mean_ns: u64,
    /// The time until the last lane was done, the median over runs; nanoseconds.
    pub longest_ns: u64,
}

/// The runs of one mix.
struct Runs {
    mix: LaneMix,
    mean_ns: Vec<u64>,
    longest_ns: Vec<u64>,
}

impl Runs {
    /// The fastest run, which judges a mix while there are few runs: a stall only adds time, and
    /// would leave out the best mix.
    fn fastest(&self) -> u64 {
        self.mean_ns.iter().copied().min().unwrap_or(u64::MAX)
    }
}

fn median_of(values: &[u64]) -> u64 {
    median(values.iter().copied()).unwrap_or(0)
}

/// Runs every mix of lanes of up to `largest` items for each load of `totals`, in about `budget`
/// for all. Each mix runs a few times, then the faster half again, and so on. Returns the mixes of
/// each load, the fastest first. `watch` hears of each load.
///
/// # Errors
/// The error of the engine, if it has no memory for the lanes or cannot run such a batch.
pub fn measure(
    subject: &Subject<'_>,
    totals: &[u32],
    largest: u32,
    budget: Duration,
    watch: &mut dyn Watch<(u32, Vec<MeasuredMix>)>,
) -> Result<Vec<(u32, Vec<MeasuredMix>)>, RunError> {
    let most = totals.iter().max().copied().unwrap_or(0);
    let mut lanes = (0..most).map(|_| subject.lane_at(Place::default())).collect::<Result<Vec<_>, _>>()?;
    let item = subject.item()?;
    // The first run of each size allocates and plans: it is not measured.
    let sizes = (0..).map(|exponent| 1u32 << exponent).take_while(|size| *size <= largest.min(most));
    for (lane, size) in lanes.iter_mut().zip(sizes) {
        subject.run(&mut **lane, &item, size as usize)?;
    }
    sampler::each(subject.clock, budget, totals.iter().copied(), watch, |total, turn| {
        let runs = |mix| Runs { mix, mean_ns: Vec::new(), longest_ns: Vec::new() };
        let mut field: Vec<Runs> = LaneMix::all(total, largest).into_iter().map(runs).collect();
        for runs in &mut field {
            while turn.wants(runs.mean_ns.len(), FIRST_RUNS) {
                run_mix(subject, &item, &mut lanes, runs)?;
            }
        }
        let mut rounds = 0;
        while turn.wants(rounds, [1, MOST_ROUNDS]) {
            let kept = if rounds < HALVINGS { field.len().div_ceil(2).max(KEPT) } else { KEPT };
            field.sort_by_key(Runs::fastest);
            for runs in field.iter_mut().take(kept) {
                run_mix(subject, &item, &mut lanes, runs)?;
            }
            rounds += 1;
        }
        let measured = field.into_iter().map(|runs| MeasuredMix {
            total,
            runs: runs.mean_ns.len() as u32,
            mean_ns: median_of(&runs.mean_ns),
            longest_ns: median_of(&runs.longest_ns),
            mix: runs.mix,
        });
        let mut measured: Vec<MeasuredMix> = measured.collect();
        // A mix that was left out early has seen too few runs to be the best by luck.
        let most_runs = measured.iter().map(|m| m.runs).max().unwrap_or(0);
        measured.sort_by_key(|m| (m.runs * 2 < most_runs, m.mean_ns));
        Ok((total, measured))
    })
}

/// Runs all lanes of a mix once, at the same time.
fn run_mix(
    subject: &Subject<'_>,
    item: &Admitted,
    lanes: &mut [Box<dyn Lane>],
    runs: &mut Runs,
) -> Result<(), RunError> {
    let sizes = runs.mix.sizes().zip(lanes);
    let times =
        at_once(sizes.map(|(size, lane)| {
            move || Ok((u64::from(size), subject.run(&mut **lane, item, size as usize)?.as_nanos()))
        }))?;
    let items: u64 = times.iter().map(|(size, _)| size).sum();
    let weighted: u64 = times.iter().map(|(size, ns)| size * ns).sum();
    runs.mean_ns.push(weighted / items.max(1));
    runs.longest_ns.push(times.iter().map(|(_, ns)| *ns).max().unwrap_or(0));
    Ok(())
}
