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
/// | `EarlyLeave` | as `Deferred` or `Adaptive`; `now` once the candidate is large enough to keep up with the arrivals | steps of pipelines |
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
    /// Deferred or adaptive, for a step of a pipeline: a candidate that waits takes time from the
    /// steps after it. The candidate therefore starts at once when batches of its size keep up with
    /// half of the arrivals of the last second. Users do not name this policy:
    /// [`DispatchPolicy::of_step`] chooses it.
    EarlyLeave {
        /// When a smaller candidate starts.
        smaller: Deferral,
        /// The part of the devices that the model may count on, percent. Other models of the same
        /// devices have the rest.
        share: u8,
    },
}

/// When a batch of a step starts that does not keep up with the arrivals.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Deferral {
    /// As under [`DispatchPolicy::Deferred`].
    Deferred,
    /// As under [`DispatchPolicy::Adaptive`].
    Adaptive {
        /// As in [`DispatchPolicy::Adaptive`].
        consolidate: bool,
    },
}

/// A batch of a step leaves early if it keeps up with this many times the arrivals. While all devices
/// are busy the next batch grows by itself, so that less than all arrivals is enough.
const PACE: f64 = 0.5;

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
            DispatchPolicy::EarlyLeave { .. } => "early-leave",
        }
    }

    /// The policy for a model that runs a step of a pipeline. Only policies that defer change.
    /// `share` is the part of the devices that the model may count on, percent.
    #[must_use]
    pub fn of_step(self, share: u8) -> Self {
        let smaller = match self {
            DispatchPolicy::Deferred => Deferral::Deferred,
            DispatchPolicy::Adaptive { consolidate } => Deferral::Adaptive { consolidate },
            DispatchPolicy::EarlyLeave { smaller, .. } => smaller,
            other => return other,
        };
        DispatchPolicy::EarlyLeave { smaller, share }
    }

    /// Whether the scheduler chooses how long candidates wait; `Some(true)`: it consolidates, too.
    pub const fn adaptive(&self) -> Option<bool> {
        match self {
            DispatchPolicy::Adaptive { consolidate }
            | DispatchPolicy::EarlyLeave { smaller: Deferral::Adaptive { consolidate }, .. } => Some(*consolidate),
            _ => None,
        }
    }

    /// [`DispatchPolicy::adaptive`], as a yes or no.
    pub const fn is_adaptive(&self) -> bool {
        self.adaptive().is_some()
    }

    /// The size from which a candidate leaves early: the smallest batch with which the model's part
    /// of `devices` keeps up with the arrivals. `u32::MAX`: no candidate does.
    pub(super) fn enough(&self, profile: &LatencyProfile, most: u32, rate: Option<f64>, devices: u32) -> u32 {
        let DispatchPolicy::EarlyLeave { share, .. } = self else { return u32::MAX };
        let Some(rate) = rate else { return u32::MAX };
        let devices = f64::from(devices.max(1)) * f64::from((*share).clamp(1, 100)) / 100.0;
        let keeps_up = |batch: u32| f64::from(batch) * devices >= PACE * rate * profile.latency(batch).as_secs_f64();
        // Throughput rises with the batch size, except at the steps of a measured profile.
        let (mut low, mut high) = (1, most.max(1));
        if !keeps_up(high) {
            return u32::MAX;
        }
        while low < high {
            let middle = low + (high - low) / 2;
            if keeps_up(middle) { high = middle } else { low = middle + 1 }
        }
        high
    }

    /// The names of all policies.
    pub fn names() -> impl Iterator<Item = &'static str> {
        DispatchPolicy::ALL.iter().map(DispatchPolicy::name)
    }

    /// The drop policy that suits the policy on one device. Window drop gives up heads that stand in
    /// the way of a large batch.
    pub const fn suitable_drop(&self) -> DropPolicy {
        if self.is_adaptive() { DropPolicy::Adaptive } else { DropPolicy::WindowDrop }
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
            DispatchPolicy::Adaptive { .. } | DispatchPolicy::EarlyLeave { smaller: Deferral::Adaptive { .. }, .. }
                if wait == 0 =>
            {
                (Time::ZERO, StartBound::Eager)
            }
            DispatchPolicy::Deferred
            | DispatchPolicy::Latest
            | DispatchPolicy::Adaptive { .. }
            | DispatchPolicy::EarlyLeave { .. }
                if deadline == Time::MAX =>
            {
                (Time::ZERO, StartBound::Eager)
            }
            DispatchPolicy::Adaptive { .. } | DispatchPolicy::EarlyLeave { smaller: Deferral::Adaptive { .. }, .. }
                if wait < 100 =>
            {
                let frontrun = deadline - profile.latency(size.saturating_add(1));
                let way = frontrun.since(since).as_nanos() / 100 * u64::from(wait);
                (since + Duration::from_nanos(way), StartBound::Frontrun)
            }
            DispatchPolicy::Deferred | DispatchPolicy::Adaptive { .. } | DispatchPolicy::EarlyLeave { .. } => {
                (deadline - profile.latency(size.saturating_add(1)), StartBound::Frontrun)
            }
            DispatchPolicy::Latest => (deadline - profile.latency(size), StartBound::Latest),
            DispatchPolicy::Eager | DispatchPolicy::Route => (Time::ZERO, StartBound::Eager),
            // The first arrival waits in the queue, not on the way.
            DispatchPolicy::Timeout { delay, .. } => (first_arrival + *delay + way, StartBound::Timeout),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Batches of `b` take `5 + b` ms. One device answers `b` requests in that time.
    #[test]
    fn enough_is_the_smallest_batch_that_keeps_up_with_half_of_the_arrivals() {
        let profile = LatencyProfile::linear_ms(1.0, 5.0, 64).unwrap();
        let enough = |share, rate, devices| DispatchPolicy::Deferred.of_step(share).enough(&profile, 64, rate, devices);
        // Half of 1000/s: b / (5 + b) >= 0.5, so b >= 5.
        assert_eq!(enough(100, Some(1000.0), 1), 5);
        assert_eq!(enough(50, Some(1000.0), 2), 5, "half of two devices is one device");
        assert_eq!(enough(100, Some(10.0), 1), 1);
        assert_eq!(enough(100, Some(2000.0), 1), u32::MAX, "no batch keeps up");
        assert_eq!(enough(100, None, 1), u32::MAX, "the rate is not known yet");
        assert_eq!(enough(0, Some(1.0), 0), 1, "no device and no share are taken as a little");
        assert_eq!(DispatchPolicy::Deferred.enough(&profile, 64, Some(10.0), 1), u32::MAX);
        assert_eq!(DispatchPolicy::Eager.of_step(50), DispatchPolicy::Eager);
    }

    #[test]
    fn a_step_of_an_adaptive_model_stays_adaptive() {
        let adaptive = DispatchPolicy::Adaptive { consolidate: true };
        let step = adaptive.clone().of_step(50);
        assert_eq!((step.adaptive(), step.suitable_drop()), (Some(true), DropPolicy::Adaptive));
        assert_eq!(step.clone().of_step(20), adaptive.of_step(20), "only the share changes");
        assert_eq!(DispatchPolicy::Deferred.of_step(50).adaptive(), None);
        // Arrivals at 0 with a deadline of 100 ms; a batch of two takes 7 ms.
        let profile = LatencyProfile::linear_ms(1.0, 5.0, 64).unwrap();
        let ms = |ms| Time::ZERO + Duration::from_millis(ms);
        let opens = |wait| {
            let (deadline, since, delay) = (ms(100), Time::ZERO, Duration::ZERO);
            let forming =
                Forming { size: 1, deadline, first_arrival: since, full: false, wait, since, profile: &profile, delay };
            step.opens(&forming).0
        };
        assert_eq!([0, 50, 100].map(opens), [Time::ZERO, Time::ZERO + Duration::from_micros(46_500), ms(93)]);
    }
}
