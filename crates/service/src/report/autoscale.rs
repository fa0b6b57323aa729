//! Watches the load of a server or a cluster, and advises how many devices it should have (Symphony
//! §3.5).

use downbeat_core::Time;
use downbeat_core::cluster::{Advice, Autoscale, AutoscaleOptions, AutoscaleSample, BadAutoscaleOptions};
use parking_lot::Mutex;
use serde::Serialize;

use crate::metrics::Metrics;

/// How often the counters are looked at.
pub const EVERY: std::time::Duration = std::time::Duration::from_secs(1);

/// The answer of `GET /v2/autoscale`.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct AutoscaleStatus {
    /// The present number of devices.
    pub devices: u32,
    /// The advised number of devices in all; `None` while nothing is known.
    pub wanted: Option<u32>,
    /// Devices to add, or to give back if negative; 0: stay.
    pub change: i64,
    /// The name of the reason.
    pub reason: &'static str,
    /// The reason in words.
    pub explanation: String,
    /// Share of the requests in the last `grow_window_s` that were answered in time.
    pub attainment: Option<f64>,
    /// Share of the requests in the last `grow_window_s` that were rejected, dropped or late.
    pub bad_rate: Option<f64>,
    /// Share of the devices' time in the last `shrink_window_s` that no batch needed. A batch that left
    /// early and small on idle devices counts for less than it took.
    pub idle_fraction: Option<f64>,
}

/// The advisor on the counters of a server, or of the cluster that a scheduler leads.
pub struct AutoscaleWatch {
    fresh: Autoscale,
    state: Mutex<State>,
}

struct State {
    advisor: Autoscale,
    sample: AutoscaleSample,
}

impl AutoscaleWatch {
    /// Makes a watch without observations, of this many devices.
    ///
    /// # Errors
    /// If the options contradict themselves.
    pub fn new(options: &AutoscaleOptions, devices: u32) -> Result<Self, BadAutoscaleOptions> {
        let advisor = Autoscale::new(options.clone())?;
        let sample = AutoscaleSample { devices, ..AutoscaleSample::default() };
        Ok(AutoscaleWatch { fresh: advisor.clone(), state: Mutex::new(State { advisor, sample }) })
    }

    /// Hears the present counters, and writes the advice to the metrics.
    pub fn look(&self, now: Time, seen: AutoscaleSample, metrics: &Metrics) {
        let mut state = self.state.lock();
        let before = state.sample;
        // The counters are read one after the other while requests end, so that a difference of two
        // may be behind for a moment.
        let sample = AutoscaleSample {
            good: seen.good.max(before.good),
            bad: seen.bad.max(before.bad),
            busy: seen.busy.max(before.busy),
            devices: seen.devices,
        };
        state.sample = sample;
        match state.advisor.handle_sample(now, sample) {
            Ok(advice) => metrics.set_autoscale(sample.devices, state.advisor.wanted(), &advice),
            Err(error) => tracing::warn!(%error, "autoscale: a sample was not used"),
        }
    }

    /// Whose counters these were counts no more, or begins anew.
    pub fn forget(&self, metrics: &Metrics) {
        let state = State { advisor: self.fresh.clone(), sample: AutoscaleSample::default() };
        metrics.set_autoscale(0, None, &state.advisor.advice());
        *self.state.lock() = state;
    }

    /// The present advice.
    pub fn status(&self) -> AutoscaleStatus {
        let state = self.state.lock();
        let Advice { change, reason, bad_rate, idle_fraction } = state.advisor.advice();
        AutoscaleStatus {
            devices: state.sample.devices,
            wanted: state.advisor.wanted(),
            change,
            reason: reason.name(),
            explanation: reason.to_string(),
            attainment: bad_rate.map(|bad| 1.0 - bad),
            bad_rate,
            idle_fraction,
        }
    }
}
