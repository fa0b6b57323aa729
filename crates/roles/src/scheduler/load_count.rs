//! Counts of a cluster's requests and busy device time, for the autoscale advisor.

use std::collections::BTreeMap;

use downbeat_core::ModelId;
use downbeat_core::cluster::{DropReason, ItemCost, Reject, Scheduler};
use downbeat_core::time::Duration;

use crate::message::Refusal;

/// Counts of a cluster's requests and busy device time since a scheduler began to lead.
#[derive(Debug, Default)]
pub(super) struct LoadCount {
    /// Requests whose batch was done by their deadline.
    pub good: u64,
    /// Requests that were refused for want of time, or done too late.
    pub bad: u64,
    /// Time that devices needed for batches, all devices together.
    pub busy: Duration,
    /// The costs of models' items as of the last [`LoadCount::forget_costs`].
    costs: BTreeMap<ModelId, ItemCost>,
}

impl LoadCount {
    /// The part that is needed of the time of a batch. `expected`: its time by the profile.
    pub fn needed_part(&mut self, scheduler: &Scheduler, model: ModelId, size: u32, expected: Duration) -> f64 {
        let cost = match self.costs.get(&model) {
            Some(cost) => *cost,
            None => {
                let Some(cost) = scheduler.item_cost(model) else { return 1.0 };
                self.costs.insert(model, cost);
                cost
            }
        };
        cost.needed_part(size, expected)
    }

    /// Looks models' costs up anew from now on: profiles and SLOs change.
    pub fn forget_costs(&mut self) {
        self.costs.clear();
    }

    /// Counts a batch that took `busy` of a device's time, of which this part was needed.
    pub fn batch(&mut self, busy: Duration, needed: f64) {
        self.busy += Duration::from_secs_f64(busy.as_secs_f64() * needed);
    }

    /// Counts a request that ran.
    pub fn ran(&mut self, is_late: bool) {
        match is_late {
            true => self.bad += 1,
            false => self.good += 1,
        }
    }

    /// Counts a refused request, if more devices might have prevented the refusal.
    pub fn refused(&mut self, refusal: Refusal) {
        let for_want_of_time = match refusal {
            Refusal::Rejected(reject) => {
                matches!(
                    reject,
                    // More devices would not help against a slow network.
                    Reject::QueueFull { .. } | Reject::DeadlineImpossible { .. } | Reject::WaitTooLong { .. }
                )
            }
            Refusal::Dropped(reason) => reason != DropReason::ModelRemoved,
            Refusal::Lost | Refusal::Missed(_) => false,
        };
        self.bad += u64::from(for_want_of_time);
    }
}
