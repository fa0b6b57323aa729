//! How much of a device each model has had.

use std::collections::BTreeMap;

use crate::ids::ModelId;
use crate::time::{Duration, Time};

/// How much of a device, or of a partition of it, each model has had.
///
/// Launches that run at a time share it evenly, as if it were a processor. What all have had together is the time in which something ran, however much launches slow
/// each other down.
#[derive(Debug, Default)]
pub struct DeviceUse {
    models: BTreeMap<ModelId, ModelUse>,
    /// Launches that run.
    running: u32,
    counted: Time,
    /// What a launch has had that ran whenever something did.
    each: Duration,
    /// The time in which something ran.
    all: Duration,
}

#[derive(Debug, Default)]
struct ModelUse {
    running: u32,
    /// What `each` was when `had` was counted.
    each: Duration,
    had: Duration,
    /// It goes once nothing of it runs.
    gone: bool,
}

impl ModelUse {
    fn count(&mut self, each: Duration) {
        let since = each.saturating_sub(std::mem::replace(&mut self.each, each));
        self.had += since.saturating_mul(u64::from(self.running));
    }
}

impl DeviceUse {
    /// A launch of a model begins to run.
    pub fn begin(&mut self, now: Time, model: ModelId) {
        self.count(now);
        let its = self.models.entry(model).or_default();
        its.count(self.each);
        its.running += 1;
        self.running += 1;
    }

    /// A launch of a model has ended. One that never began is ignored.
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

    /// A model is not asked about any more.
    pub fn forget(&mut self, model: ModelId) {
        if let Some(its) = self.models.get_mut(&model) {
            its.gone = true;
            if its.running == 0 {
                self.models.remove(&model);
            }
        }
    }

    /// What all models but this one have had by now.
    pub fn others(&mut self, now: Time, model: ModelId) -> Duration {
        self.count(now);
        let each = self.each;
        let had = self.models.get_mut(&model).map_or(Duration::ZERO, |its| {
            its.count(each);
            its.had
        });
        self.all.saturating_sub(had)
    }

    /// Time has passed. Threads that say so one after the other may have looked at the clock in the other order.
    fn count(&mut self, now: Time) {
        let passed = now.since(self.counted);
        self.counted = self.counted.max(now);
        if self.running > 0 {
            self.all += passed;
            self.each += Duration::from_nanos(passed.as_nanos() / u64::from(self.running));
        }
    }
}
