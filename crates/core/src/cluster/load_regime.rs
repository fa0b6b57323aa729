//! The load regime: how adaptive models behave under the present load.

use super::behaviour::Behaviour;
use super::demand::{Demand, ENOUGH};

/// Above this share of the devices, a deferred candidate may find no free device in its schedulable
/// window. Devices that were left idle are then missed.
const CROWDED: f64 = 0.85;
/// The busier tenths of a second are this many standard deviations above the mean.
const PEAK: f64 = 1.5;
/// Half the distance between the limit to enter a state and the limit to leave it.
const BAND: f64 = 0.01;
/// Below this share small batches lose nothing, even at a high overhead.
const QUIET: f64 = 0.4;
/// From this value on, waiting pays if requests come independently of each other. The value is the
/// overhead of a batch, as a share of the time between two batches of the model.
const PATIENT: f64 = 0.39;
/// `PATIENT` rises by this much for each factor of e by which the variance of the arrivals exceeds
/// a Poisson variance.
const PATIENT_BURSTS: f64 = 0.06;
/// Above this share the devices cannot do the work in batches of any size.
const FLOODED: f64 = 1.1;
/// In an impatient pool, drops aim at no more than this share of the staggered batch, percent.
pub(super) const IMPATIENT_SIZE: u8 = 75;

/// How the models under [`super::DispatchPolicy::Adaptive`] and [`super::DropPolicy::Adaptive`]
/// behave at the load of the moment: all of them alike.
///
/// Computed whenever a demand changes, ten times a second for each model, from the arrivals of the
/// last second.
///
/// **Patient or not?** A batch costs `beta` of device time beside its items. Sending a small batch
/// now instead of a full one later wastes up to `beta`. Holding a free device until the schedulable
/// window opens wastes up to the time between two batches of this model when all devices are busy.
/// That time is `l(b) / n`, if the model's share of the work keeps `n` devices busy. With `l(b)`
/// near the SLO, waiting thus pays if `n * beta / SLO` is large. Examples: many devices for one
/// model, a strong batching effect, a tight SLO. Measured on Symphony's table 1 and figure 11, the
/// limit is about 0.4 for Poisson arrivals. The limit is higher for burstier arrivals (0.53 for a
/// variance ten times as great): a burst misses the devices that were left idle before. Patience
/// depends on the shares of the work, not on the load. On a single device waiting gains nothing: a
/// batch grows while the device works. All models are patient, or none is. If only some waited, the
/// others would take the devices before the windows open. So the mean over all models decides,
/// weighted by their work.
///
/// **When may a candidate start?** In a patient pool it starts in its schedulable window (Symphony
/// §3.1). In an impatient pool it starts at once if the pool is crowded. A pool is crowded if
/// deferral would keep most devices busy in the busier tenths of a second: an idle device now is
/// missed later. If the pool is not crowded, a device is free whenever a window opens. With
/// `consolidate`, candidates then wait too, so that the number of busy devices is proportional to
/// the load. Without `consolidate` candidates start at once, for a short latency. They then also
/// start at once in a patient pool that is not *busy*. A busy pool uses more than 40% of its
/// devices.
///
/// **Which batch size do drops aim at?** The staggered batch leaves no room for uneven arrivals. A
/// queue that falls behind by a little is cut back at once, at the cost of requests that could have
/// been served. But below the size that keeps up with the arrivals a queue falls behind for good.
/// Between the two is the smallest batch with 94% of the staggered batch's throughput. For a model
/// without batching effect this batch is a single request, so no request is dropped for a larger
/// batch. In an impatient pool, where batch sizes differ more, the target is also at most 75% of
/// the staggered batch. In a flooded pool requests are lost in any case. There the target is the
/// staggered batch itself, as the largest batches serve the most.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LoadRegime {
    patient: bool,
    crowded: bool,
    busy: bool,
    flooded: bool,
}

impl LoadRegime {
    /// The regime that follows this one; `all` is the demand of all models. A change takes a little
    /// more than staying does.
    pub fn next(self, all: Demand, devices: u32) -> LoadRegime {
        let devices = f64::from(devices.max(1));
        let patience = devices * all.overhead / (all.least * all.least).max(f64::MIN_POSITIVE);
        let dispersion = (all.variance / all.even_variance.max(f64::MIN_POSITIVE)).max(1.0);
        let limit = PATIENT + PATIENT_BURSTS * dispersion.ln();
        let mean = all.deferred / devices;
        let peak = mean + PEAK * all.variance.sqrt() / devices;
        let above = |is: bool, value: f64, limit: f64| value > if is { limit - BAND } else { limit + BAND };
        LoadRegime {
            patient: devices > 1.0 && above(self.patient, patience, limit),
            crowded: above(self.crowded, peak, CROWDED),
            busy: above(self.busy, mean, QUIET),
            flooded: above(self.flooded, all.least / devices, FLOODED),
        }
    }

    /// The behaviour of an adaptive model in this regime.
    pub fn behaviour(&self, consolidate: bool) -> Behaviour {
        let (throughput, size) = match (self.flooded, self.patient) {
            (true, _) => (100, 100),
            (false, true) => (ENOUGH, 100),
            (false, false) => (ENOUGH, IMPATIENT_SIZE),
        };
        let wait = if self.waits(consolidate) { 100 } else { 0 };
        Behaviour { wait, throughput, size, ..Behaviour::default() }
    }

    /// Whether a candidate waits for its schedulable window.
    fn waits(&self, consolidate: bool) -> bool {
        match (consolidate, self.patient) {
            (true, patient) => patient || !self.crowded,
            (false, patient) => patient && self.busy,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::demand::Arrivals;
    use crate::profile::LatencyProfile;
    use crate::time::Duration;

    const SECOND: Duration = Duration::from_millis(1_000);

    fn profile(alpha_ms: f64, beta_ms: f64) -> LatencyProfile {
        LatencyProfile::linear(Duration::from_millis_f64(alpha_ms), Duration::from_millis_f64(beta_ms), 64).unwrap()
    }

    fn regime(profile: &LatencyProfile, slo_ms: u64, rate: f64, devices: u32, models: u32) -> LoadRegime {
        let slo = Duration::from_millis(slo_ms);
        let demand =
            Demand::of(profile, 64, slo, Arrivals { rate, variance: 0.0, even_variance: 10.0 * rate }, devices);
        let all = (0..models).fold(Demand::default(), |all, _| all.plus(demand));
        LoadRegime::default().next(all, devices)
    }

    /// ResNet50 of Symphony's table 2, alone on 8 devices: 8 * 5.072 / 25 is more than a half at
    /// every load.
    #[test]
    fn a_model_with_many_devices_is_patient() {
        for rate in [10.0, 1000.0, 5400.0, 20_000.0] {
            let regime = regime(&profile(1.053, 5.072), 25, rate, 8, 1);
            assert!(regime.patient && regime.waits(true), "at {rate}/s");
        }
    }

    /// As many models as devices: each batch has to wait for a device anyway, and grows meanwhile.
    #[test]
    fn a_model_with_one_device_of_many_is_not() {
        let (quiet, busy) =
            (regime(&profile(1.053, 5.072), 25, 20.0, 8, 8), regime(&profile(1.053, 5.072), 25, 600.0, 8, 8));
        assert!(!quiet.patient && !quiet.busy && quiet.waits(true) && !quiet.waits(false));
        assert!(!busy.patient && busy.crowded && !busy.waits(true));
    }

    #[test]
    fn extremes_have_a_regime() {
        let flat = LatencyProfile::from_table(vec![SECOND]).unwrap();
        for (rate, devices) in [(0.0, 0), (0.0, 4), (1e12, 0), (1e12, 1_000_000)] {
            for slo_ms in [0, 1, 5_000, 1 << 50] {
                let target = regime(&flat, slo_ms, rate, devices, 1).behaviour(false).target(&flat, 64);
                assert!((1..=64).contains(&target), "{target} at {rate}/s, {devices} devices, {slo_ms} ms");
            }
        }
    }
}
