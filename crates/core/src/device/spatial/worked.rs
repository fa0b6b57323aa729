//! A reading of a model's work.

use super::self_tuning::MeasuredWindow;
use crate::time::{Duration, Time};

/// The work of a model on a device from the beginning up to some time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Worked {
    /// The time of the reading.
    pub at: Time,
    /// The items that came, rejected ones included.
    pub arrivals: u64,
    /// The finished batches.
    pub batches: u64,
    /// The items of the finished batches.
    pub items: u64,
    /// The time in which any launch ran.
    pub busy: Duration,
    /// The sum of the launches' times.
    pub took: Duration,
}

impl Worked {
    /// The work since an earlier reading.
    pub fn since(&self, before: &Worked) -> MeasuredWindow {
        let batches = self.batches.saturating_sub(before.batches);
        let took = self.took.saturating_sub(before.took).as_nanos();
        MeasuredWindow {
            span: self.at.since(before.at),
            // Work that has ended took some time, however short.
            busy: self.busy.saturating_sub(before.busy).max(Duration::from_nanos(1)),
            items: self.items.saturating_sub(before.items),
            arrivals: Some(self.arrivals.saturating_sub(before.arrivals)),
            latency: Duration::from_nanos(took / batches.max(1)),
        }
    }
}
