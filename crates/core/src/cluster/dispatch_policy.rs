//! When a candidate may start: the dispatch policies.

use serde::{Deserialize, Serialize};

use super::reason::StartBound;
use crate::profile::LatencyProfile;
use crate::time::{Duration, Time};

/// When a candidate of size `b`, earliest deadline `d` and first arrival `a` may start: `exec`.
///
/// `now` stands for the earliest start: with a network the batch has its way before it, [`super::NetworkBudget::delay`]`(b)`.
///
/// | policy | `exec` | used by |
/// |---|---|---|
/// | `Deferred` | `max(now, d - l(b+1))` | Symphony (§3.1: *frontrun*) |
/// | `Latest` | `max(now, d - l(b))` | Symphony §3.1, the alternative it argues against |
/// | `Eager` | `now` | Nexus, Clockwork, Shepherd (Symphony §2.2); Triton without a queue delay |
/// | `Timeout` | `max(now, a + delay)` | TensorFlow Serving (Symphony §2.2, §3.4); Triton with a queue delay and preferred sizes |
/// | `Adaptive` | as `Eager`, as `Deferred`, or between the two: [`super::Behaviour::wait`] | Downbeat |
///
/// A candidate that cannot grow (it has `max_batch`, or the next request would not fit its deadline) may start at once
/// under every policy: waiting could only be for requests that cannot join. None waits until a
/// member is lost by it: past `latest` under a drop policy, or past a `queue_expiry` that rejects. Without a deadline `Deferred`, `Latest` and
/// `Adaptive` have nothing to count back from and act as `Eager`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum DispatchPolicy {
    /// Not before one more request could no longer join in time.
    #[default]
    Deferred,
    /// Not before the last moment.
    Latest,
    /// As soon as a device is free.
    Eager,
    /// Not before the first arrival has waited for some time.
    Timeout {
        /// How long the first arrival of a batch waits for others.
        delay: Duration,
        /// Sizes that go at once, without the delay: the largest that the queue can fill. Triton's
        /// `preferred_batch_size`. Past the delay whatever is there goes.
        preferred: Vec<u32>,
    },
    /// Deferred where a larger batch is worth the wait, at once where the device is needed: by the model's share of the devices, its
    /// batching effect and SLO, and the load of all models.
    Adaptive {
        /// Whether a batch waits also where nothing but device time is saved by it, so that the number of busy devices follows the
        /// load. If not, it starts at once while the load is low: shortest latency.
        consolidate: bool,
    },
}

/// What a dispatch policy looks at.
pub(crate) struct Forming<'a> {
    /// Size of the candidate.
    pub size: u32,
    /// Earliest deadline in it.
    pub deadline: Time,
    /// Arrival of its first request; only [`DispatchPolicy::Timeout`] looks.
    pub first_arrival: Time,
    /// Whether it cannot grow.
    pub full: bool,
    /// How far a candidate waits under [`DispatchPolicy::Adaptive`] ([`super::Behaviour::wait`]); none other looks.
    pub wait: u8,
    /// Arrival of the first request in it; only [`DispatchPolicy::Adaptive`] looks.
    pub since: Time,
    pub profile: &'a LatencyProfile,
    /// How long before its start it is sent.
    pub delay: Duration,
}

impl DispatchPolicy {
    /// From when on the candidate may start, which may have passed, and what that is counted from.
    pub(crate) fn opens(&self, forming: &Forming<'_>) -> (Time, StartBound) {
        let Forming { size, deadline, first_arrival, full, wait, since, profile, delay: way } = *forming;
        if full {
            return (Time::ZERO, StartBound::Full);
        }
        match self {
            DispatchPolicy::Adaptive { .. } if wait == 0 => (Time::ZERO, StartBound::Eager),
            DispatchPolicy::Deferred | DispatchPolicy::Latest | DispatchPolicy::Adaptive { .. }
                if deadline == Time::MAX =>
            {
                (Time::ZERO, StartBound::Eager)
            }
            DispatchPolicy::Adaptive { .. } if wait < 100 => {
                let frontrun = deadline - profile.latency(size.saturating_add(1));
                let way = frontrun.since(since).as_nanos() / 100 * u64::from(wait);
                (since + Duration::from_nanos(way), StartBound::Frontrun)
            }
            DispatchPolicy::Deferred | DispatchPolicy::Adaptive { .. } => {
                (deadline - profile.latency(size.saturating_add(1)), StartBound::Frontrun)
            }
            DispatchPolicy::Latest => (deadline - profile.latency(size), StartBound::Latest),
            DispatchPolicy::Eager => (Time::ZERO, StartBound::Eager),
            // The first arrival waits in the queue, not on the way.
            DispatchPolicy::Timeout { delay, .. } => (first_arrival + *delay + way, StartBound::Timeout),
        }
    }
}
