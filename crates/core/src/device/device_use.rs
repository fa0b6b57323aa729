//! Counts the time that each model has had on a device.

use std::collections::BTreeMap;

use crate::ids::ModelId;
use crate::time::{Duration, Time};

/// Counts the time that each model has had on a device, or on a partition.
///
/// Launches that run at the same time share the device evenly, like threads on one processor. The
/// sum over all models is the time in which anything ran, however much launches slow each other
/// down.
#[derive(Debug, Default)]
pub struct DeviceUse {
    models: BTreeMap<ModelId, ModelUse>,
    /// The launches that run.
    running: u32,
    counted: Time,
    /// The device time of an imagined launch that runs whenever any launch does.
    each: Duration,
    /// The time in which anything ran.
    all: Duration,
}

#[derive(Debug, Default)]
struct ModelUse {
    running: u32,
    /// The value of `each` when `had` was last counted.
    each: Duration,
    had: Duration,
    /// The entry is removed once the model has no running launch.
    gone: bool,
}

impl ModelUse {
    fn count(&mut self, each: Duration) {
        let since = each.saturating_sub(std::mem::replace(&mut self.each, each));
        self.had += since.saturating_mul(u64::from(self.running));
    }
}

impl DeviceUse {
    /// Handles the begin of a model's launch.
    pub fn begin(&mut self, now: Time, model: ModelId) {
        self.count(now);
        let its = self.models.entry(model).or_default();
        its.count(self.each);
        its.running += 1;
        self.running += 1;
    }

    /// Handles the end of a model's launch. A launch that never began is ignored.
    pub fn end(&mut self, now: Time, model: ModelId) {
        self.count(now);
        let Some(its) = self.models.get_mut(&model).filter(|its| its.running > 0) else { return };
        its.count(self.each);
        its.running -= 1;
        self.running -= 1;
        if its.gone && its.running == 0 {
            self.models.remove(&model);
        }
    }

    /// Forgets a model that no caller will ask about again.
    pub fn forget(&mut self, model: ModelId) {
        if let Some(its) = self.models.get_mut(&model) {
            its.gone = true;
            if its.running == 0 {
                self.models.remove(&model);
            }
        }
    }

    /// The device time that all other models have had by now.
    pub fn others(&mut self, now: Time, model: ModelId) -> Duration {
        self.count(now);
        let each = self.each;
        let had = self.models.get_mut(&model).map_or(Duration::ZERO, |its| {
            its.count(each);
            its.had
        });
        self.all.saturating_sub(had)
    }

    /// Counts the time that has passed. Threads that call this in one order may have read the clock
    /// in another.
    fn count(&mut self, now: Time) {
        let passed = now.since(self.counted);
        self.counted = self.counted.max(now);
        if self.running > 0 {
            self.all += passed;
            self.each += Duration::from_nanos(passed.as_nanos() / u64::from(self.running));
        }
    }
}
