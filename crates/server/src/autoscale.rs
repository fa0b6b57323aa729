//! Watches what the server has done, and says how many devices it should have (Symphony §3.5).

use downbeat_core::cluster::{Advice, Autoscale, AutoscaleOptions, AutoscaleSample, BadAutoscaleOptions};
use parking_lot::Mutex;
use serde::Serialize;

use crate::clock::Clock;
use crate::metrics::Metrics;

/// How often the counters are looked at.
pub const EVERY: std::time::Duration = std::time::Duration::from_secs(1);

/// What `GET /v2/autoscale` answers.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct AutoscaleStatus {
    pub devices: u32,
    /// Devices to add, or to give back if negative; 0: stay.
    pub change: i64,
    pub reason: &'static str,
    pub explanation: String,
    /// Share of the requests in the last `grow_window_s` that were rejected, dropped or late.
    pub bad_rate: Option<f64>,
    /// Share of the devices' time in the last `shrink_window_s` in which they were idle.
    pub idle_fraction: Option<f64>,
}

/// The advisor on this server's own counters.
pub struct AutoscaleWatch {
    clock: Clock,
    devices: u32,
    state: Mutex<State>,
}

struct State {
    advisor: Autoscale,
    sample: AutoscaleSample,
}

impl AutoscaleWatch {
    /// Watches a server of so many devices.
    ///
    /// # Errors
    /// If the options contradict themselves.
    pub fn new(options: &AutoscaleOptions, devices: u32) -> Result<Self, BadAutoscaleOptions> {
        let advisor = Autoscale::new(options.clone())?;
        let sample = AutoscaleSample { devices, ..AutoscaleSample::default() };
        Ok(AutoscaleWatch { clock: Clock::start(), devices, state: Mutex::new(State { advisor, sample }) })
    }

    /// Looks at the counters now, and writes the advice to the metrics.
    pub fn look(&self, metrics: &Metrics) {
        let totals = metrics.totals();
        let mut state = self.state.lock();
        let before = state.sample;
        // The counters are read one after the other while requests end, so that a difference of two may be behind for a moment.
        let sample = AutoscaleSample {
            good: totals.good.max(before.good),
            bad: totals.bad.max(before.bad),
            busy: totals.busy.max(before.busy),
            devices: self.devices,
        };
        state.sample = sample;
        match state.advisor.handle_sample(self.clock.now(), sample) {
            Ok(advice) => metrics.set_autoscale(self.devices, &advice),
            Err(error) => tracing::warn!(%error, "autoscale: a sample was not used"),
        }
    }

    pub fn status(&self) -> AutoscaleStatus {
        let Advice { change, reason, bad_rate, idle_fraction } = self.state.lock().advisor.advice();
        AutoscaleStatus {
            devices: self.devices,
            change,
            reason: reason.name(),
            explanation: reason.to_string(),
            bad_rate,
            idle_fraction,
        }
    }
}
