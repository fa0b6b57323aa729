//! How long a device has been busy, whatever number of launches of whatever models ran on it.

use downbeat_core::Time;
use parking_lot::Mutex;

use crate::metrics::DeviceMetrics;

/// Counts the time in which at least one launch runs on a device.
pub struct Occupancy {
    metrics: DeviceMetrics,
    /// Launches that run, and until when the time in which one did is counted.
    running: Mutex<(u32, Time)>,
}

impl Occupancy {
    /// An idle device.
    pub fn new(metrics: DeviceMetrics) -> Self {
        Occupancy { metrics, running: Mutex::new((0, Time::ZERO)) }
    }

    /// A launch begins.
    pub fn begin(&self, now: Time) {
        self.change(now, |running| running + 1);
    }

    /// A launch has ended.
    pub fn end(&self, now: Time) {
        self.change(now, |running| running.saturating_sub(1));
    }

    fn change(&self, now: Time, change: impl FnOnce(u32) -> u32) {
        let mut running = self.running.lock();
        if running.0 > 0 {
            // Counted as it goes: there may always be another that runs.
            self.metrics.add_busy(now.since(running.1));
        }
        *running = (change(running.0), now.max(running.1));
        self.metrics.set_running(running.0);
    }
}
