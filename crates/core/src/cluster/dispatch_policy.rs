//! When a candidate may start: the dispatch policies.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::batch_policy::DropPolicy;
use super::reason::StartBound;
use crate::names::UnknownName;
use crate::profile::LatencyProfile;
use crate::time::{Duration, Time};

/// When a candidate of size `b`, earliest deadline `d` and first arrival `a` may start: `exec`.
///
/// `now` stands for the earliest start. With a network, that is
/// [`super::NetworkBudget::delay`]`(b)` after `now`: the batch must travel first.
///
/// | policy | `exec` | used by |
/// |---|---|---|
/// | `Deferred` | `max(now, d - l(b+1))` | Symphony (§3.1: *frontrun*) |
/// | `Latest` | `max(now, d - l(b))` | Symphony §3.1, the alternative it argues against |
/// | `Eager` | `now` | Nexus, Clockwork, Shepherd (Symphony §2.2); Triton without a queue delay |
/// | `Timeout` | `max(now, a + delay)` | TensorFlow Serving (Symphony §2.2, §3.4); Triton with a queue delay and preferred sizes |
/// | `Adaptive` | as `Eager`, as `Deferred`, or between the two: [`super::Behaviour::wait`] | Downbeat |
/// | `Route` | `now`, as no batch forms here: a device policy makes the batches | Downbeat |
///
/// A candidate cannot grow if it has `max_batch`, or if the next request would not fit its
/// deadline. Such a candidate may start at once under every policy: it could only wait for requests
/// that cannot join. No policy waits until a member is lost: past `latest` under a drop policy, or
/// past a `queue_expiry` that rejects. Without a deadline there is no time to count back from, so
/// `Deferred`, `Latest` and `Adaptive` act as `Eager`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum DispatchPolicy {
    /// The candidate starts when one more request could no longer join in time.
    #[default]
    Deferred,
    /// The candidate starts at the last moment.
    Latest,
    /// The candidate starts as soon as a device is free.
    Eager,
    /// The candidate starts when the first arrival has waited for some time.
    Timeout {
        /// How long the first arrival of a batch waits for others.
        delay: Duration,
        /// Sizes that go at once, without the delay: the largest size that the queue can fill.
        /// Triton's `preferred_batch_size`. After the delay, a batch of any size goes.
        preferred: Vec<u32>,
    },
    /// Deferred where a larger batch is worth the wait, at once where the device is needed. The
    /// model's share of the devices, its batching effect and SLO, and the load of all models
    /// decide.
    Adaptive {
        /// Whether a batch also waits if it saves nothing but device time, so that the number of
        /// busy devices follows the load. If not, the batch starts at once while the load is low,
        /// for the shortest latency.
        consolidate: bool,
    },
    /// The scheduler makes no batches. A request goes to the device that will probably finish all
    /// its work, for any model, first. A device policy makes the batches there
    /// ([`crate::device::PolicyName`]).
    Route,
}

impl DispatchPolicy {
    /// Every policy. Repository, server, simulator and command line know policies by this table.
    pub const ALL: &[DispatchPolicy] = &[
        DispatchPolicy::Deferred,
        DispatchPolicy::Eager,
        DispatchPolicy::Latest,
        DispatchPolicy::Timeout { delay: Duration::ZERO, preferred: Vec::new() },
        DispatchPolicy::Adaptive { consolidate: false },
        DispatchPolicy::Adaptive { consolidate: true },
        DispatchPolicy::Route,
    ];

    /// The name in flags and files.
    pub const fn name(&self) -> &'static str {
        match self {
            DispatchPolicy::Deferred => "deferred",
            DispatchPolicy::Eager => "eager",
            DispatchPolicy::Latest => "latest",
            DispatchPolicy::Timeout { .. } => "timeout",
            DispatchPolicy::Adaptive { consolidate: false } => "adaptive",
            DispatchPolicy::Adaptive { consolidate: true } => "consolidating",
            DispatchPolicy::Route => "route",
        }
    }

    /// The names of all policies.
    pub fn names() -> impl Iterator<Item = &'static str> {
        DispatchPolicy::ALL.iter().map(DispatchPolicy::name)
    }

    /// The drop policy that suits the policy on one device. Window drop gives up heads that stand in
    /// the way of a large batch.
    pub const fn suitable_drop(&self) -> DropPolicy {
        match self {
            DispatchPolicy::Adaptive { .. } => DropPolicy::Adaptive,
            _ => DropPolicy::WindowDrop,
        }
    }

    /// The policy with this delay and these preferred sizes, if it is [`DispatchPolicy::Timeout`].
    pub fn with_delay(self, delay: Duration, preferred: &[u32]) -> Self {
        match self {
            DispatchPolicy::Timeout { .. } => DispatchPolicy::Timeout { delay, preferred: preferred.to_vec() },
            other => other,
        }
    }
}

impl fmt::Display for DispatchPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Parses a name. A timeout has no delay yet ([`DispatchPolicy::with_delay`]).
impl FromStr for DispatchPolicy {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let known = DispatchPolicy::ALL.iter().find(|known| known.name() == name).cloned();
        known.ok_or_else(|| UnknownName::new("dispatch policy", name, DispatchPolicy::names()))
    }
}

/// The inputs of a dispatch policy's decision.
pub(crate) struct Forming<'a> {
    /// Size of the candidate.
    pub size: u32,
    /// Earliest deadline of the candidate.
    pub deadline: Time,
    /// Arrival of the queue's first request; only [`DispatchPolicy::Timeout`] looks at it.
    pub first_arrival: Time,
    /// Whether the candidate cannot grow.
    pub full: bool,
    /// How far a candidate waits under [`DispatchPolicy::Adaptive`] ([`super::Behaviour::wait`]).
    /// Other policies ignore this number.
    pub wait: u8,
    /// Arrival of the candidate's first request. Only [`DispatchPolicy::Adaptive`] uses this time.
    pub since: Time,
    pub profile: &'a LatencyProfile,
    /// How long before its start the batch is sent.
    pub delay: Duration,
}

impl DispatchPolicy {
    /// The instant from which the candidate may start, which may be in the past, and the rule that
    /// set it.
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
            DispatchPolicy::Eager | DispatchPolicy::Route => (Time::ZERO, StartBound::Eager),
            // The first arrival waits in the queue, not on the way.
            DispatchPolicy::Timeout { delay, .. } => (first_arrival + *delay + way, StartBound::Timeout),
        }
    }
}
