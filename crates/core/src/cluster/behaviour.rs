//! The behaviour of an adaptive model: how long its batches wait, and which batch size its drops
//! aim at.

use serde::{Deserialize, Serialize};

use super::demand::cheapest_with;
use crate::profile::LatencyProfile;

/// The behaviour of a model under [`super::DispatchPolicy::Adaptive`] and
/// [`super::DropPolicy::Adaptive`]: when its candidate may start, and which batch size its drops
/// aim at.
///
/// Until [`super::Scheduler::set_behaviour`] sets a behaviour, the load of the moment decides
/// ([`super::LoadRegime`]). A [`super::Rehearsal`] finds a better behaviour.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Behaviour {
    /// How far a candidate waits on the way from the arrival of its first request to its
    /// schedulable window, percent. [`super::DispatchPolicy::Eager`] is 0, and
    /// [`super::DispatchPolicy::Deferred`] is 100 and more.
    pub wait: u8,
    /// Drops aim at the smallest batch with this share of the staggered batch's throughput,
    /// percent. At 100 and more it is the staggered batch itself, as
    /// [`super::DropPolicy::WindowDrop`]. At 0 it is a batch of one, as
    /// [`super::DropPolicy::HeadDrop`].
    pub throughput: u8,
    /// Drops also aim at no more than this share of the staggered batch's size, percent.
    pub size: u8,
    /// Batches are no larger than the smallest batch with this share of the staggered batch's
    /// throughput, percent, or than the drops' target. At 0 they are as large as deadlines allow.
    /// Where batching gains little, a limit sends the rest of a burst to other devices.
    pub limit: u8,
    /// Executions are planned to take this much longer than in the profile, percent. Execution
    /// times vary: without a margin, the last requests of a batch that just fits would be late
    /// every other time.
    pub margin: u8,
}

impl Behaviour {
    /// The batch size that drops aim at, given the size of the staggered batch.
    pub(super) fn target(self, profile: &LatencyProfile, staggered: u32) -> u32 {
        let enough = match self.throughput {
            0 => 1,
            1..100 => cheapest_with(profile, staggered, f64::from(self.throughput) / 100.0),
            100.. => staggered,
        };
        let most = (f64::from(staggered) * f64::from(self.size.min(100)) / 100.0).round() as u32;
        enough.min(most.max(1))
    }

    /// The largest batch, given the size of the staggered batch. It is at least the size that drops
    /// aim at, and at most `max_batch`.
    pub(super) fn limit(self, profile: &LatencyProfile, staggered: u32, max_batch: u32) -> u32 {
        match self.limit {
            0 => max_batch,
            limit => cheapest_with(profile, staggered, f64::from(limit.min(100)) / 100.0)
                .max(self.target(profile, staggered))
                .min(max_batch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;

    fn profile(alpha_ms: f64, beta_ms: f64) -> LatencyProfile {
        LatencyProfile::linear(Duration::from_millis_f64(alpha_ms), Duration::from_millis_f64(beta_ms), 64).unwrap()
    }

    /// The staggered batch is 16; batches of 12.3 keep up with 5,475 requests a second.
    #[test]
    fn the_target_is_between_one_and_the_staggered_batch() {
        let target = |throughput, size| {
            Behaviour { throughput, size, ..Behaviour::default() }.target(&profile(1.053, 5.072), 16)
        };
        assert_eq!([0, 94, 100, 255].map(|throughput| target(throughput, 100)), [1, 13, 16, 16]);
        assert_eq!((target(94, 75), target(100, 75), target(100, 0)), (12, 12, 1));
    }

    #[test]
    fn a_model_without_batching_effect_sacrifices_nothing() {
        let behaviour = Behaviour { throughput: 94, size: 100, limit: 94, ..Behaviour::default() };
        assert_eq!(behaviour.target(&profile(7.008, 0.159), 6), 1);
        assert_eq!(behaviour.limit(&profile(7.008, 0.159), 6, 64), 1);
    }

    #[test]
    fn a_limit_is_no_smaller_than_what_drops_aim_at() {
        let limit = |throughput, limit| {
            let behaviour = Behaviour { throughput, size: 100, limit, ..Behaviour::default() };
            behaviour.limit(&profile(1.053, 5.072), 16, 64)
        };
        assert_eq!([limit(0, 0), limit(0, 94), limit(0, 100), limit(0, 255)], [64, 13, 16, 16]);
        assert_eq!((limit(100, 94), limit(94, 1)), (16, 13));
    }
}
