//! The search for a policy's tuning, and for the highest load that a policy can serve.

use std::fmt;

use downbeat_core::device::{DeviceModel, Joining, LaneId, LaneMix, SegmentRange};
use downbeat_core::{Duration, Time};

use super::contended::{Completed, ContendedDevice};
use super::failure::DeviceFailure;
use super::model::EmulatedModel;
use super::policy::{DevicePolicyName, Diversity, Tuning};
use super::report::DeviceReport;
use super::simulation::DeviceSimulation;
use downbeat_sim::Bounds;

/// A mix of lanes and the times of its batches when all start at once.
#[derive(Clone, PartialEq, Debug)]
pub struct MeasuredMix {
    /// The lanes, one batch each.
    pub mix: LaneMix,
    /// The mean time from the common start to a batch's end.
    pub mean: Duration,
    /// The time until the last batch's end.
    pub last: Duration,
}

/// Measures the batches of a mix when all start at once on a device of their own (E²bird §7.3.1,
/// figure 12).
pub fn measure_mix(model: &EmulatedModel, mix: &LaneMix) -> MeasuredMix {
    let sizes: Vec<u32> = mix.sizes().collect();
    let mut device = ContendedDevice::new(model.limits(), sizes.len());
    for (lane, size) in sizes.iter().enumerate() {
        let work = model.work(SegmentRange::new(0, model.segment_count()), *size, 64, device.units(0));
        device.launch(Time::ZERO, LaneId(lane as u32), u64::from(*size), work);
    }
    let (mut sum, mut last) = (0, Duration::ZERO);
    while let Some(next) = device.next_event() {
        let ended = device.advance(next).into_iter().filter(|done| matches!(done, Completed::Launch { .. })).count();
        if ended > 0 {
            last = next.since(Time::ZERO);
            sum += last.as_nanos() * ended as u64;
        }
    }
    MeasuredMix { mix: mix.clone(), mean: Duration::from_nanos(sum / sizes.len().max(1) as u64), last }
}

/// Measures every mix of lanes for `total` items, the fastest on average first (E²bird §7.3.2).
pub fn measure_mixes(model: &EmulatedModel, total: u32) -> Vec<MeasuredMix> {
    let mut measured: Vec<_> = LaneMix::all(total, total).iter().map(|mix| measure_mix(model, mix)).collect();
    measured.sort_by(|a, b| (a.mean, &a.mix).cmp(&(b.mean, &b.mix)));
    measured
}

/// Mixes whose means are this close are equal: a measurement would not tell them apart.
const EQUAL: f64 = 1.01;

/// Finds the best mix for each of E²bird's loads up to `most` items: 4, 8, 16, 32 and on. Of mixes
/// within 1% of the fastest, it takes the one with the most lanes, since its small batches wait the
/// least.
pub fn best_mixes(model: &EmulatedModel, most: u32) -> Vec<(u32, LaneMix)> {
    let totals = (2..).map(|power| 1 << power).take_while(|total| *total <= most);
    let best = |total: u32| {
        let measured = measure_mixes(model, total);
        let limit = measured.first()?.mean.as_secs_f64() * EQUAL;
        let close = measured.into_iter().take_while(|mix| mix.mean.as_secs_f64() <= limit);
        // The first of the mixes with the most lanes: `max_by_key` would take the last.
        let most = close.reduce(|a, b| if b.mix.sizes().count() > a.mix.sizes().count() { b } else { a })?;
        Some((total, most.mix))
    };
    totals.filter_map(best).collect()
}

/// The highest rate that a policy holds, and the run at that rate.
#[derive(Clone, PartialEq, Debug)]
pub struct Peak {
    /// Requests a second.
    pub rate: f64,
    /// The run.
    pub report: DeviceReport,
}

/// The relative precision of a peak.
const PRECISION: f64 = 0.005;
/// The lowest rate of the search, as a share of the device's limit.
const LEAST: f64 = 1e-3;
/// The tolerated share of late requests: 99% must be in time.
pub const TOLERATED_LATE: f64 = 0.01;

/// Finds the highest rate at which at most 1% of the requests of `simulation` are late, by binary
/// search. `None` if no rate is held.
///
/// # Errors
/// If the arrival process has no positive, finite shape, or there is no such policy.
pub fn peak(
    simulation: &DeviceSimulation,
    policy: &dyn Fn() -> Result<DeviceModel, DeviceFailure>,
) -> Result<Option<Peak>, DeviceFailure> {
    let trial = |rate: f64| -> Result<Option<Peak>, DeviceFailure> {
        let mut simulation = simulation.clone();
        simulation.load.rate = rate;
        simulation.give_up_above = Some(TOLERATED_LATE);
        let report = simulation.run(policy()?)?;
        Ok(report.holds(TOLERATED_LATE).then_some(Peak { rate, report }))
    };
    let model = &simulation.model;
    // More than the device can do with every segment run: a large batch of short requests, at no
    // other cost.
    let limit = 256.0 / model.time(256, if model.has_length() { 16 } else { 0 }).as_secs_f64() * 1.2;
    // If some requests leave early, the device holds more than that, hence the widening.
    Bounds { low: limit / 2.0, high: limit, least: limit * LEAST, widening: 2.0, precision: PRECISION }.highest(trial)
}

/// Windows that are tried, as shares of the largest batch's time.
const WINDOWS: [f64; 8] = [0.0, 0.05, 0.1, 0.2, 0.32, 0.5, 0.75, 1.0];
/// Peaks that are this close are equal, and the latency decides.
const ALIKE: f64 = 0.99;

/// Finds the window with the highest peak (E²bird's OPT_Wait, DVABatch's DelayBatch). Of windows
/// with peaks within 1% of the best, it takes the one with the lowest mean latency at 9/10 of the
/// best peak. Also returns all trials.
///
/// # Errors
/// If the arrival process has no positive, finite shape.
pub fn tune_window(
    simulation: &DeviceSimulation,
    tuning: &Tuning,
) -> Result<(Duration, Vec<Tried<Duration>>), DeviceFailure> {
    let longest = tuning.profile.total(tuning.max_batch, 64).as_secs_f64();
    let windows = WINDOWS.map(|share| Duration::from_secs_f64(longest * share));
    let with = |window| -> Result<_, DeviceFailure> { Ok((simulation.clone(), Tuning { window, ..tuning.clone() })) };
    let (chosen, tried) = tune(&windows, DevicePolicyName::OptWait, with)?;
    Ok((chosen.unwrap_or(tuning.window), tried))
}

/// Numbers of stages that are tried (DVABatch §7.1: eight tries).
pub const TRIED_STAGES: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 20];

/// Pairs of buffers that are tried. More than two were never better (lab/docs/dvabatch.md).
const TRIED_PAIRS: [u16; 2] = [1, 2];

/// The settings of DVABatch that are tuned for each model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Staging {
    /// N_st, the number of stages.
    pub stages: usize,
    /// Pairs of buffers. With one pair, stages run in turn and no request joins.
    pub pairs: u16,
    /// The rule by which requests join.
    pub joining: Joining,
}

impl Staging {
    /// The settings that are worth a trial: rules of joining only where requests can join.
    fn all(by_load: bool) -> Vec<Staging> {
        let joins = |stages: usize, pairs: u16| by_load && pairs > 1 && stages > 1;
        let rules = |(stages, pairs)| {
            let rules: &[Joining] = match joins(stages, pairs) {
                true => &[Joining::IfSooner, Joining::Always],
                false => &[Joining::IfSooner],
            };
            rules.iter().map(move |joining| Staging { stages, pairs, joining: *joining })
        };
        let each = TRIED_STAGES.into_iter().flat_map(|stages| TRIED_PAIRS.map(|pairs| (stages, pairs)));
        each.flat_map(rules).collect()
    }

    /// Returns the model cut into these stages, and its settings. `tuning` gives all
    /// settings that are not tuned.
    ///
    /// # Errors
    /// If the model has fewer operators than stages.
    pub fn of(
        self,
        simulation: &DeviceSimulation,
        tuning: &Tuning,
    ) -> Result<(DeviceSimulation, Tuning), DeviceFailure> {
        let model = simulation.model.cut(self.stages)?;
        let profile = Tuning::new(&model, tuning.max_batch)?.profile;
        let diversity = Diversity { pairs: self.pairs, joining: self.joining, ..tuning.diversity };
        Ok((DeviceSimulation { model, ..simulation.clone() }, Tuning { profile, diversity, ..tuning.clone() }))
    }
}

impl fmt::Display for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let joining = match self.joining {
            _ if self.pairs < 2 || self.stages < 2 => "",
            Joining::IfSooner => ", joins if sooner",
            Joining::Always => ", always joins",
        };
        write!(f, "{} stages, {} pairs{joining}", self.stages, self.pairs)
    }
}

/// Finds the stages, pairs and rule of joining with which DVABatch has the highest peak, as the
/// paper finds N_st (§7.1). Of choices with peaks within 1% of the best, it takes the one with the
/// lowest mean latency at 9/10 of the best peak. Also returns all trials.
///
/// # Errors
/// If the arrival process has no positive, finite shape, or the model has fewer than 20 operators.
pub fn tune_staging(
    simulation: &DeviceSimulation,
    tuning: &Tuning,
) -> Result<(Staging, Vec<Tried<Staging>>), DeviceFailure> {
    let choices = Staging::all(tuning.diversity.by_load);
    let with = |choice: Staging| choice.of(simulation, tuning);
    let (chosen, tried) = tune(&choices, DevicePolicyName::DvaBatch, with)?;
    Ok((chosen.unwrap_or(Staging { stages: 1, pairs: 1, joining: Joining::IfSooner }), tried))
}

/// A choice, its peak, and its mean latency at 9/10 of the best peak of all, in milliseconds; NaN
/// where the peak is too low.
pub type Tried<C> = (C, f64, f64);

/// Finds the choice with the highest peak of `policy`. Of choices with peaks within 1% of the best,
/// it takes the one with the lowest mean latency at 9/10 of the best peak. Returns `None` if no
/// choice holds any rate. Also returns all trials.
fn tune<C: Copy>(
    choices: &[C],
    policy: DevicePolicyName,
    with: impl Fn(C) -> Result<(DeviceSimulation, Tuning), DeviceFailure>,
) -> Result<(Option<C>, Vec<Tried<C>>), DeviceFailure> {
    let mut tried = Vec::new();
    for choice in choices {
        let (simulation, tuning) = with(*choice)?;
        let found = peak(&simulation, &|| tuning.policy(policy))?;
        tried.push((*choice, found.map_or(0.0, |peak| peak.rate), f64::NAN));
    }
    let best = tried.iter().map(|(_, peak, _)| *peak).fold(0.0, f64::max);
    let (mut chosen, mut lowest) = (None, f64::INFINITY);
    for (choice, _, latency) in tried.iter_mut().filter(|(_, peak, _)| best > 0.0 && *peak >= best * ALIKE) {
        let (mut high, tuning) = with(*choice)?;
        high.load.rate = best * 0.9;
        *latency = high.run(tuning.policy(policy)?)?.mean_ms;
        if *latency < lowest {
            (chosen, lowest) = (Some(*choice), *latency);
        }
    }
    Ok((chosen, tried))
}
