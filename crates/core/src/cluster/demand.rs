//! What the models ask of the devices.

use super::batch_policy::staggered_batch;
use crate::profile::LatencyProfile;
use crate::time::Duration;

/// What one model's arrivals, or several models' together, ask of the devices, as a number of devices that would be busy all the time.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Demand {
    /// With batches as large as the SLO allows: the least that the work can take. Models share the devices in proportion to it.
    pub least: f64,
    /// With batches as large as they become if each waits for its schedulable window.
    pub deferred: f64,
}

impl Demand {
    /// The demand of `rate` requests a second (weighted by size) with `budget` from arrival to deadline.
    pub(crate) fn of(profile: &LatencyProfile, max_batch: u32, budget: Duration, rate: f64, devices: u32) -> Self {
        let cost = |batch: u32| rate * profile.latency(batch).as_secs_f64() / f64::from(batch);
        let staggered = staggered_batch(profile, max_batch, budget, Some(rate), devices);
        Demand { least: cost(largest(profile, max_batch, budget)), deferred: cost(scaled(staggered, PATIENT_SCALE)) }
    }

    /// The demand with `other` added.
    pub fn plus(self, other: Demand) -> Demand {
        Demand { least: self.least + other.least, deferred: self.deferred + other.deferred }
    }

    /// The demand without `other`, which it includes.
    pub fn minus(self, other: Demand) -> Demand {
        // Rounding errors of many sums may leave a little less than nothing.
        Demand { least: (self.least - other.least).max(0.0), deferred: (self.deferred - other.deferred).max(0.0) }
    }
}

/// Above this share of the devices deferral may find no device free in its schedulable windows, and idle devices are missed.
const CROWDED: f64 = 0.7;
/// Below this share nothing is lost by small batches, whatever they cost.
const QUIET: f64 = 0.4;
/// The overhead of a batch, as a share of the time between two batches of the model, from which on waiting pays.
const PATIENT: f64 = 0.5;
/// The target of a patient model's drops as a share of the staggered batch.
const PATIENT_SCALE: f64 = 0.85;
/// The target of an impatient model's drops as a share of the staggered batch.
const IMPATIENT_SCALE: f64 = 0.7;
/// No request is given up for the last share of a staggered batch's throughput.
const ENOUGH: f64 = 0.92;

/// How a model under [`super::DispatchPolicy::Adaptive`] and [`super::DropPolicy::Adaptive`] behaves at the load of the moment.
///
/// Worked out ten times a second from the arrivals of the last second, in three steps.
///
/// **Is the model patient?** A batch costs `beta` of device time beside its items. Sending a small batch now instead of a
/// full one later wastes up to `beta`; holding a free device until the schedulable window opens wastes up to the time between
/// two batches of this model when all devices are busy, `l(b) / n` if `n` is the number of devices that the model's share of
/// the work keeps busy. Waiting pays if `n * beta / SLO` (with `l(b)` near the SLO) is large: many devices
/// for one model, a strong batching effect, a tight SLO. Measured on the sample of Symphony's table 1 the two sides part
/// at about one half. It depends on the shares of the work only, not on the load.
///
/// **When may its candidate start?** A patient model's in its schedulable window (Symphony §3.1). An impatient model's at once if the
/// pool is crowded: if deferral would keep more than 70% of the devices busy, an idle device now is one that is missed later. If
/// it is not crowded, devices are there whenever a window opens: with `consolidate` it waits too, so that
/// the number of busy devices is proportional to the load; without, it starts at once for the sake of latency, and a patient
/// model does so too while the pool is quiet.
///
/// **Which batch size do drops aim at?** The staggered batch leaves no room for arrivals that are not even: a queue that falls behind by a
/// little is cut back at once, by requests that could have been served. But below the size that keeps up with the
/// arrivals a queue falls behind for good. Between the two is 85% of the staggered batch for a patient model and 70% for an
/// impatient one, and never more than what reaches 92% of the staggered batch's throughput: a model without batching effect sacrifices
/// nothing.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Stance {
    pub patient: bool,
    pub crowded: bool,
    pub quiet: bool,
}

impl Stance {
    /// The stance of a model of whose arrivals nothing is known yet: as at low load.
    pub const UNKNOWN: Stance = Stance { patient: false, crowded: false, quiet: true };

    /// The stance of a model with this demand, where `all` is that of all models, this one included.
    pub fn of(
        profile: &LatencyProfile,
        max_batch: u32,
        budget: Duration,
        demand: Demand,
        all: Demand,
        devices: u32,
    ) -> Self {
        let devices = f64::from(devices.max(1));
        let share = devices * demand.least / all.least.max(demand.least).max(f64::MIN_POSITIVE);
        let patience = share * overhead(profile, max_batch, budget).as_secs_f64() / budget.as_secs_f64();
        let use_of_devices = all.deferred / devices;
        Stance { patient: patience >= PATIENT, crowded: use_of_devices > CROWDED, quiet: use_of_devices < QUIET }
    }

    /// The batch size that drops aim at, where the staggered batch is this.
    pub fn target(&self, profile: &LatencyProfile, staggered: u32) -> u32 {
        let scale = if self.patient { PATIENT_SCALE } else { IMPATIENT_SCALE };
        scaled(staggered, scale).min(enough(profile, staggered))
    }

    /// Whether a candidate waits for its schedulable window.
    pub fn waits(&self, consolidate: bool) -> bool {
        match (consolidate, self.patient) {
            (true, patient) => patient || !self.crowded,
            (false, patient) => patient && !self.quiet,
        }
    }
}

/// The largest batch that `budget` allows on a device that waits for it; at least 1.
fn largest(profile: &LatencyProfile, max_batch: u32, budget: Duration) -> u32 {
    profile.largest_up_to(max_batch, budget).max(1)
}

/// The part of `l(b)` that does not grow with `b`: the `beta` of the line through `l(1)` and the largest batch. None if there is
/// no batching at all.
fn overhead(profile: &LatencyProfile, max_batch: u32, budget: Duration) -> Duration {
    let (one, most) = (profile.latency(1), largest(profile, max_batch, budget));
    let grown = profile.latency(most).saturating_sub(one);
    match grown.as_nanos().checked_div(u64::from(most) - 1) {
        Some(alpha) => one.saturating_sub(Duration::from_nanos(alpha)),
        None => Duration::ZERO,
    }
}

/// The smallest batch with enough of the throughput of `staggered`.
fn enough(profile: &LatencyProfile, staggered: u32) -> u32 {
    let throughput = |batch: u32| f64::from(batch) / profile.latency(batch).as_secs_f64();
    let least = ENOUGH * throughput(staggered);
    // Throughput rises with the batch size, but for the steps of a measured profile.
    let (mut low, mut high) = (1, staggered);
    while low < high {
        let middle = low + (high - low) / 2;
        if throughput(middle) >= least { high = middle } else { low = middle + 1 }
    }
    high
}

fn scaled(batch: u32, scale: f64) -> u32 {
    ((f64::from(batch) * scale).round() as u32).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_millis(1_000);

    fn profile(alpha_ms: f64, beta_ms: f64) -> LatencyProfile {
        LatencyProfile::linear(Duration::from_millis_f64(alpha_ms), Duration::from_millis_f64(beta_ms), 64).unwrap()
    }

    fn stance(profile: &LatencyProfile, slo_ms: u64, rate: f64, devices: u32, models: f64) -> Stance {
        let slo = Duration::from_millis(slo_ms);
        let demand = Demand::of(profile, 64, slo, rate, devices);
        let demands = Demand { least: demand.least * models, deferred: demand.deferred * models };
        Stance::of(profile, 64, slo, demand, demands, devices)
    }

    /// ResNet50 of Symphony's table 2, alone on 8 devices: 8 * 5.072 / 25 is more than a half at every load.
    #[test]
    fn a_model_with_many_devices_is_patient() {
        for rate in [10.0, 1000.0, 5400.0, 20_000.0] {
            let stance = stance(&profile(1.053, 5.072), 25, rate, 8, 1.0);
            assert!(stance.patient && stance.waits(true), "at {rate}/s");
        }
    }

    /// As many models as devices: each batch has to wait for a device anyway, and grows while it does.
    #[test]
    fn a_model_with_one_device_of_many_is_not() {
        let (quiet, busy) =
            (stance(&profile(1.053, 5.072), 25, 20.0, 8, 8.0), stance(&profile(1.053, 5.072), 25, 600.0, 8, 8.0));
        assert!(!quiet.patient && quiet.quiet && quiet.waits(true) && !quiet.waits(false));
        assert!(!busy.patient && busy.crowded && !busy.waits(true));
    }

    /// The staggered batch is 16; batches of 11.6 keep up with 5,380 requests a second.
    #[test]
    fn the_target_is_between_what_keeps_up_and_the_staggered_batch() {
        let profile = profile(1.053, 5.072);
        assert_eq!(stance(&profile, 25, 5380.0, 8, 1.0).target(&profile, 16), 12);
    }

    #[test]
    fn a_model_without_batching_effect_sacrifices_nothing() {
        let profile = profile(7.008, 0.159);
        assert_eq!(stance(&profile, 56, 100.0, 8, 8.0).target(&profile, 6), 1);
    }

    #[test]
    fn extremes_have_a_stance() {
        let flat = LatencyProfile::from_table(vec![SECOND]).unwrap();
        for (rate, devices) in [(0.0, 0), (0.0, 4), (1e12, 0), (1e12, 1_000_000)] {
            for slo_ms in [0, 1, 5_000, 1 << 50] {
                let target = stance(&flat, slo_ms, rate, devices, 1.0).target(&flat, 64);
                assert!((1..=64).contains(&target), "{target} at {rate}/s, {devices} devices, {slo_ms} ms");
            }
        }
    }

    #[test]
    fn demands_add_up_and_down() {
        let (a, b) = (Demand { least: 1.0, deferred: 2.0 }, Demand { least: 0.5, deferred: 0.25 });
        assert_eq!(a.plus(b).minus(a), b);
        assert_eq!(b.minus(a), Demand::default(), "never less than nothing");
    }
}
