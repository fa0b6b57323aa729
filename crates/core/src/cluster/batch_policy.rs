//! The drop policies, and the batch size that they aim at.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::network::NetworkBudget;
use crate::names::UnknownName;
use crate::profile::LatencyProfile;
use crate::time::Duration;

/// Which requests of the queue are given up for their deadlines.
///
/// | policy | gives up | a batch is shrunk for its head's deadline | used by |
/// |---|---|---|---|
/// | `HeadDrop` | the hopeless: `now + l(size) > deadline` | yes | Clipper, Shepherd (Symphony §3.2, *GetBatch*) |
/// | `WindowDrop` | also heads that would force a batch below the target | yes, down to the target | Nexus's early drop (Symphony §3.2); the Symphony prototype |
/// | `Adaptive` | as `WindowDrop`, with a target that leaves room for uneven arrivals and is not above what batching gains | yes, down to the target | Downbeat |
/// | `None` | nothing | no | Triton, TensorFlow Serving |
///
/// With `None` a late request is still served, in a batch as large as the queue allows. Under
/// overload small batches would only make more requests late.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum DropPolicy {
    /// Drops requests whose deadlines can no longer be met.
    HeadDrop,
    /// Also drops heads that stand in the way of a batch of the target size.
    #[default]
    WindowDrop,
    /// Also drops heads that stand in the way of a batch of a target size that suits the load of
    /// the moment.
    Adaptive,
    /// Drops no request.
    None,
}

impl DropPolicy {
    /// Every policy.
    pub const ALL: [DropPolicy; 4] =
        [DropPolicy::WindowDrop, DropPolicy::HeadDrop, DropPolicy::Adaptive, DropPolicy::None];

    /// The name in flags and files.
    pub const fn name(self) -> &'static str {
        match self {
            DropPolicy::WindowDrop => "window",
            DropPolicy::HeadDrop => "head",
            DropPolicy::Adaptive => "adaptive",
            DropPolicy::None => "none",
        }
    }

    /// The names of all policies.
    pub fn names() -> impl Iterator<Item = &'static str> {
        DropPolicy::ALL.into_iter().map(DropPolicy::name)
    }
}

impl fmt::Display for DropPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DropPolicy {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let known = DropPolicy::ALL.into_iter().find(|known| known.name() == name);
        known.ok_or_else(|| UnknownName::new("drop policy", name, DropPolicy::names()))
    }
}

/// The batch size of the staggered pattern (Symphony §3.3): the largest `b` with
/// `(1 + 1/n) * l(b) <= budget`, at least 1. `n = rate * l(b) / b` is the number of devices that
/// the arrivals keep busy, at most `devices`.
///
/// `l(b) / n` is the longest wait for the next device of the pattern. With fewer requests than
/// devices, the wait is the time `b / rate` in which the batch gathers. Without a `rate` (items per
/// second), half the budget is for waiting. `O(log max_batch)`.
pub fn staggered_batch(
    profile: &LatencyProfile,
    max_batch: u32,
    budget: Duration,
    rate: Option<f64>,
    devices: u32,
) -> u32 {
    remote_staggered_batch(profile, max_batch, budget, rate, devices, &NetworkBudget::default())
}

/// [`staggered_batch`] with a network: a batch takes [`NetworkBudget::delay`] to its device, at the
/// cost of its requests' budget.
pub(super) fn remote_staggered_batch(
    profile: &LatencyProfile,
    max_batch: u32,
    budget: Duration,
    rate: Option<f64>,
    devices: u32,
    network: &NetworkBudget,
) -> u32 {
    let fits = |b: u32| {
        let latency = profile.latency(b);
        let wait = match rate {
            None => latency,
            Some(rate) => {
                let share = Duration::from_nanos(latency.as_nanos() / u64::from(devices.max(1)));
                share.max(Duration::from_secs_f64(f64::from(b) / rate))
            }
        };
        latency + wait + network.delay(b) <= budget
    };
    // Both terms grow with b, so that `fits` is true up to some size and false above it.
    let (mut good, mut most) = (1, max_batch.max(1));
    while good < most {
        let middle = good + (most - good).div_ceil(2);
        if fits(middle) { good = middle } else { most = middle - 1 }
    }
    good
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(alpha_ms: f64, beta_ms: f64) -> LatencyProfile {
        LatencyProfile::linear(Duration::from_millis_f64(alpha_ms), Duration::from_millis_f64(beta_ms), 64).unwrap()
    }

    /// Symphony table 2: staggered batch sizes 16 and 8 on 8 devices; without coordination (half
    /// the budget) 7 and 3.
    #[test]
    fn table_2_batch_sizes() {
        let cases = [(1.053, 5.072, 25, 16, 7), (5.090, 18.368, 70, 8, 3)];
        for (alpha, beta, slo, staggered, uncoordinated) in cases {
            let (profile, slo) = (profile(alpha, beta), Duration::from_millis(slo));
            assert_eq!(staggered_batch(&profile, 64, slo, Some(1e9), 8), staggered);
            assert_eq!(staggered_batch(&profile, 64, slo, None, 8), uncoordinated);
        }
    }

    /// Symphony §3.3: l(b) = b + 5, SLO 12, 3 devices, a request every 0.75: (1 + 1/3) * l(4) = 12.
    #[test]
    fn section_3_3_batches_of_four() {
        let slo = Duration::from_millis(12);
        assert_eq!(staggered_batch(&profile(1.0, 5.0), 64, slo, Some(1000.0 / 0.75), 3), 4);
    }

    #[test]
    fn few_requests_make_small_batches_and_nothing_makes_none() {
        let (profile, slo) = (profile(1.0, 5.0), Duration::from_millis(25));
        // 200/s: gathering b takes 5b ms, running b + 5: 6b + 5 <= 25.
        assert_eq!(staggered_batch(&profile, 64, slo, Some(200.0), 8), 3);
        assert_eq!(staggered_batch(&profile, 64, slo, Some(0.0), 8), 1);
        assert_eq!(staggered_batch(&profile, 64, Duration::ZERO, Some(1e6), 0), 1);
        assert_eq!(staggered_batch(&profile, 64, Duration::MAX, Some(1e6), 8), 64);
        assert_eq!(staggered_batch(&profile, u32::MAX, Duration::MAX, None, 8), u32::MAX);
    }
}
