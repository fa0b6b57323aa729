//! Counts of a cluster's requests and busy device time, for the autoscale advisor.

use crate::message::Refusal;
use downbeat_core::cluster::{DropReason, Reject};
use downbeat_core::time::Duration;

/// Counts of a cluster's requests and busy device time since a scheduler began to lead.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct LoadCount {
    /// Requests whose batch was done by their deadline.
    pub good: u64,
    /// Requests that were refused for want of time, or done too late.
    pub bad: u64,
    /// Time in which devices ran batches, all devices together.
    pub busy: Duration,
}

impl LoadCount {
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
            Refusal::Lost => false,
        };
        self.bad += u64::from(for_want_of_time);
    }
}
