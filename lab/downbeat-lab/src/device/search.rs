//! The search for a policy's tuning, and for the highest load that a policy can serve.

use downbeat_core::device::{
    DeviceModel, Joining, LaneId, LaneMix, SegmentRange, Staging, TRIED_PAIRS, TRIED_STAGES, Tuned, tune,
};
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

/// No rate above this multiple of the device's limit is tried. Only in a run with too few requests
/// are all answered in time at such a rate.
const MOST: f64 = 64.0;

/// Finds the highest rate at which at most 1% of the requests of `simulation` are late, by binary
/// search. `None` if no rate is held.
///
/// # Errors
/// If the arrival process has no positive, finite shape, or there is no such policy. If requests
/// are so few that all are answered in time at any rate.
pub fn peak(
    simulation: &DeviceSimulation,
    policy: &dyn Fn() -> Result<DeviceModel, DeviceFailure>,
) -> Result<Option<Peak>, DeviceFailure> {
    let model = &simulation.model;
    // More than the device can do with every segment run: a large batch of short requests, at no
    // other cost.
    let limit = 256.0 / model.time(256, if model.has_length() { 16 } else { 0 }).as_secs_f64() * 1.2;
    let trial = |rate: f64| -> Result<Option<Peak>, DeviceFailure> {
        if rate > limit * MOST {
            let requests = simulation.load.requests;
            return Err(DeviceFailure(format!(
                "{requests} requests are too few to find a peak, as all are in time at any rate: give --requests more"
            )));
        }
        let mut simulation = simulation.clone();
        simulation.load.rate = rate;
        simulation.give_up_above = Some(TOLERATED_LATE);
        let report = simulation.run(policy()?)?;
        Ok(report.holds(TOLERATED_LATE).then_some(Peak { rate, report }))
    };
    // If some requests leave early, the device holds more than that, hence the widening.
    Bounds { low: limit / 2.0, high: limit, least: limit * LEAST, widening: 2.0, precision: PRECISION }.highest(trial)
}

/// Windows that are tried, as shares of the largest batch's time.
const WINDOWS: [f64; 8] = [0.0, 0.05, 0.1, 0.2, 0.32, 0.5, 0.75, 1.0];

/// Finds the window with the highest peak (E²bird's OPT_Wait, DVABatch's DelayBatch). Of windows
/// with peaks within 1% of the best, it takes the one with the lowest mean latency at 9/10 of the
/// best peak. Also returns all trials.
///
/// # Errors
/// If the arrival process has no positive, finite shape.
pub fn tune_window(simulation: &DeviceSimulation, tuning: &Tuning) -> Result<Tuned<Duration>, DeviceFailure> {
    let longest = tuning.profile.total(tuning.max_batch, 64).as_secs_f64();
    let windows = WINDOWS.map(|share| Duration::from_secs_f64(longest * share));
    let with = |window| -> Result<_, DeviceFailure> { Ok((simulation.clone(), Tuning { window, ..tuning.clone() })) };
    tune_policy(&windows, DevicePolicyName::OptWait, with)
}

/// Returns the model cut into the stages of `staging`, and its settings. `tuning` gives all
/// settings that are not tuned.
///
/// # Errors
/// If the model has fewer operators than stages.
pub fn with_staging(
    staging: Staging,
    simulation: &DeviceSimulation,
    tuning: &Tuning,
) -> Result<(DeviceSimulation, Tuning), DeviceFailure> {
    let model = simulation.model.cut(usize::from(staging.stages))?;
    let profile = Tuning::new(&model, tuning.max_batch)?.profile;
    let diversity = Diversity { pairs: staging.pairs, joining: staging.joining, ..tuning.diversity };
    Ok((DeviceSimulation { model, ..simulation.clone() }, Tuning { profile, diversity, ..tuning.clone() }))
}

/// Finds the stages, pairs and rule of joining with which DVABatch has the highest peak, as the
/// paper finds N_st (§7.1). Of choices with peaks within 1% of the best, it takes the one with the
/// lowest mean latency at 9/10 of the best peak. Also returns all trials.
///
/// # Errors
/// If the arrival process has no positive, finite shape, or the model has fewer than 20 operators.
pub fn tune_staging(simulation: &DeviceSimulation, tuning: &Tuning) -> Result<Tuned<Staging>, DeviceFailure> {
    let rules = [Joining::IfSooner, Joining::Always];
    let choices = Staging::all(&TRIED_STAGES, &TRIED_PAIRS, &rules, tuning.diversity.by_load);
    tune_policy(&choices, DevicePolicyName::DvaBatch, |choice| with_staging(choice, simulation, tuning))
}

/// Tunes a policy by its peaks in simulated runs ([`tune`]).
fn tune_policy<C: Copy>(
    choices: &[C],
    policy: DevicePolicyName,
    with: impl Fn(C) -> Result<(DeviceSimulation, Tuning), DeviceFailure>,
) -> Result<Tuned<C>, DeviceFailure> {
    let highest = |choice| {
        let (simulation, tuning) = with(choice)?;
        Ok(peak(&simulation, &|| tuning.policy(policy))?.map_or(0.0, |peak| peak.rate))
    };
    let mean_ms = |choice, rate| {
        let (mut high, tuning) = with(choice)?;
        high.load.rate = rate;
        Ok(high.run(tuning.policy(policy)?)?.mean_ms)
    };
    tune(choices, 1.0, highest, mean_ms)
}
