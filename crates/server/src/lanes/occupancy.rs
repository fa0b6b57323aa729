//! How long a device has been busy, whatever number of lanes of whatever models ran on it.

use downbeat_core::Time;
use parking_lot::Mutex;

use crate::metrics::DeviceMetrics;

/// Counts the time in which at least one lane of a device is busy.
pub struct Occupancy {
    metrics: DeviceMetrics,
    /// Lanes that run, and since when one does.
    running: Mutex<(u32, Time)>,
}

impl Occupancy {
    /// An idle device.
    pub fn new(metrics: DeviceMetrics) -> Self {
        Occupancy { metrics, running: Mutex::new((0, Time::ZERO)) }
    }

    /// A lane begins a launch.
    pub fn begin(&self, now: Time) {
        let mut running = self.running.lock();
        running.0 += 1;
        if running.0 == 1 {
            running.1 = now;
            self.metrics.begin();
        }
    }

    /// A lane has ended a launch.
    pub fn end(&self, now: Time) {
        let mut running = self.running.lock();
        running.0 = running.0.saturating_sub(1);
        if running.0 == 0 {
            self.metrics.end(now.since(running.1));
        }
    }
}
