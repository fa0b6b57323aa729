//! The device time that an item of a model needs.

use super::batch_policy::staggered_batch;
use crate::profile::LatencyProfile;
use crate::time::Duration;

/// The device time that an item of one model needs.
///
/// An item needs a part of a batch of *typical* size. At that size batches keep up with the arrivals
/// when the devices are busy ([`staggered_batch`]). On idle devices batches leave early and small,
/// and such an item takes more time. That time is not needed: tenants are not charged, and no device
/// is kept for its sake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ItemCost(Duration);

impl ItemCost {
    /// The cost of an item with this profile. `budget`: the time from a request's arrival to its
    /// deadline; [`Duration::MAX`]: none.
    pub fn new(profile: &LatencyProfile, max_batch: u32, budget: Duration, devices: u32) -> Self {
        let typical = match budget {
            Duration::MAX => max_batch,
            budget => staggered_batch(profile, max_batch, budget, None, devices),
        };
        let typical = typical.max(1);
        ItemCost(Duration::from_nanos(profile.latency(typical).as_nanos() / u64::from(typical)))
    }

    /// The cost of a request of `size` items.
    pub fn of(self, size: u32) -> Duration {
        self.0.saturating_mul(u64::from(size))
    }

    /// The cost of a request of `size` items whose batch took `took` in place of `expected`.
    pub fn corrected(self, size: u32, took: Duration, expected: Duration) -> Duration {
        let nanos = u128::from(self.of(size).as_nanos()) * u128::from(took.as_nanos());
        let nanos = nanos / u128::from(expected.as_nanos().max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// The part that was needed of the time of a batch with `size` items, from 0 to 1. `expected`: the
    /// time of such a batch by the profile.
    pub fn needed_part(self, size: u32, expected: Duration) -> f64 {
        let part = self.of(size).as_nanos() as f64 / expected.as_nanos().max(1) as f64;
        part.min(1.0)
    }
}
