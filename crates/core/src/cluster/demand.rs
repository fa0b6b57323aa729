//! The demand of the models on the devices.

use serde::{Deserialize, Serialize};

use super::batch_policy::staggered_batch;
use crate::profile::LatencyProfile;
use crate::time::Duration;

/// The demand of one or several models' arrivals on the devices, as a number of devices that would
/// be busy all the time.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Demand {
    /// With batches as large as the SLO allows: the least device time that the work can take.
    /// Models share the devices in proportion to this number.
    pub least: f64,
    /// With batches of the size that they reach if each waits for its schedulable window.
    pub deferred: f64,
    /// Sum over the models of `least^2 * beta / SLO`: see [`super::LoadRegime`].
    pub overhead: f64,
    /// Variance of `deferred` from one tenth of a second to the next. It adds up, as models'
    /// arrivals are taken to be independent.
    pub variance: f64,
    /// The value of `variance` if the requests came independently of each other (Poisson).
    pub even_variance: f64,
}

impl Demand {
    /// The demand of one model. `budget` is the time from arrival to deadline; the rate meter gives
    /// `arrivals`.
    pub(crate) fn of(
        profile: &LatencyProfile,
        max_batch: u32,
        budget: Duration,
        arrivals: Arrivals,
        devices: u32,
    ) -> Self {
        let cost = |batch: u32| profile.latency(batch).as_secs_f64() / f64::from(batch);
        let staggered = staggered_batch(profile, max_batch, budget, Some(arrivals.rate), devices);
        let deferred = cost(cheapest_with(profile, staggered, f64::from(ENOUGH) / 100.0));
        let least = arrivals.rate * cost(largest(profile, max_batch, budget));
        let overhead = overhead(profile, max_batch, budget).as_secs_f64() / budget.as_secs_f64();
        Demand {
            least,
            overhead: least * least * overhead,
            deferred: arrivals.rate * deferred,
            variance: arrivals.variance * deferred * deferred,
            even_variance: arrivals.even_variance * deferred * deferred,
        }
    }

    /// The five numbers, in the order of the fields.
    pub fn to_array(self) -> [f64; 5] {
        [self.least, self.deferred, self.overhead, self.variance, self.even_variance]
    }

    /// The demand with these five numbers.
    pub fn from_array([least, deferred, overhead, variance, even_variance]: [f64; 5]) -> Self {
        Demand { least, deferred, overhead, variance, even_variance }
    }

    fn with(self, other: Demand, add: impl Fn(f64, f64) -> f64) -> Demand {
        let (own, other) = (self.to_array(), other.to_array());
        Demand::from_array(std::array::from_fn(|number| add(own[number], other[number])))
    }

    /// The demand with `other` added.
    pub fn plus(self, other: Demand) -> Demand {
        self.with(other, |own, other| own + other)
    }

    /// The demand without `other`, which it includes.
    pub fn minus(self, other: Demand) -> Demand {
        // Rounding errors of many sums may leave a little less than nothing.
        self.with(other, |own, other| (own - other).max(0.0))
    }
}

/// No request is given up for more than this share of a staggered batch's throughput, percent.
pub(super) const ENOUGH: u8 = 94;

/// The arrivals of one model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Arrivals {
    /// Items a second.
    pub rate: f64,
    /// Variance of the rate from one tenth of a second to the next.
    pub variance: f64,
    /// The value of `variance` if the requests came independently of each other.
    pub even_variance: f64,
}

/// The largest batch that `budget` allows if a device waits for the batch; at least 1.
fn largest(profile: &LatencyProfile, max_batch: u32, budget: Duration) -> u32 {
    profile.largest_up_to(max_batch, budget).max(1)
}

/// The part of `l(b)` that does not grow with `b`: the `beta` of the line through `l(1)` and the
/// largest batch. Zero if the largest batch is 1.
fn overhead(profile: &LatencyProfile, max_batch: u32, budget: Duration) -> Duration {
    let (one, most) = (profile.latency(1), largest(profile, max_batch, budget));
    let grown = profile.latency(most).saturating_sub(one);
    match grown.as_nanos().checked_div(u64::from(most) - 1) {
        Some(alpha) => one.saturating_sub(Duration::from_nanos(alpha)),
        None => Duration::ZERO,
    }
}

/// The smallest batch with this share of the throughput of `staggered`.
pub(super) fn cheapest_with(profile: &LatencyProfile, staggered: u32, share: f64) -> u32 {
    let throughput = |batch: u32| f64::from(batch) / profile.latency(batch).as_secs_f64();
    let least = share * throughput(staggered);
    // Throughput rises with the batch size, except at the steps of a measured profile.
    let (mut low, mut high) = (1, staggered);
    while low < high {
        let middle = low + (high - low) / 2;
        if throughput(middle) >= least { high = middle } else { low = middle + 1 }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demands_add_up_and_down() {
        let (a, b) = (
            Demand { least: 1.0, deferred: 2.0, overhead: 3.0, variance: 4.0, even_variance: 2.0 },
            Demand { least: 0.5, deferred: 0.25, overhead: 2.0, variance: 1.0, even_variance: 0.5 },
        );
        assert_eq!(a.plus(b).minus(a), b);
        assert_eq!(b.minus(a), Demand::default(), "never less than nothing");
    }
}
