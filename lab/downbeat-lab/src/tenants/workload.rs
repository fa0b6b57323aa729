//! The requests of tenants.

use downbeat_core::{Duration, Time};
use downbeat_sim::{Arrivals, BadArrivals, Pace};

/// The requests of one tenant for one model.
#[derive(Clone, PartialEq, Debug)]
pub struct TenantLoad {
    /// The tenant, from zero.
    pub tenant: u32,
    /// The model, from zero.
    pub model: u32,
    /// Requests a second, before `pace` changes the rate.
    pub rate: f64,
    /// The change of the rate over time.
    pub pace: Pace,
    /// The arrival process.
    pub arrivals: Arrivals,
}

/// A request of a tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TenantArrival {
    /// When the request comes.
    pub at: Time,
    /// Its tenant.
    pub tenant: u32,
    /// Its model.
    pub model: u32,
}

/// The requests of all loads until `end`, in order of time. Each load has random numbers of its own:
/// one more load at the end of the list changes no request of the others.
///
/// # Errors
/// If a rate or a shape is not positive and finite.
pub fn arrivals_of(loads: &[TenantLoad], end: Duration, seed: u64) -> Result<Vec<TenantArrival>, BadArrivals> {
    let mut all = Vec::new();
    for (stream, load) in (0..).zip(loads) {
        let mut times = load.arrivals.stream(load.rate, seed, stream)?.paced(&load.pace);
        loop {
            let at = times.next_arrival();
            if at > Time::ZERO + end {
                break;
            }
            all.push(TenantArrival { at, tenant: load.tenant, model: load.model });
        }
    }
    all.sort_by_key(|arrival| arrival.at);
    Ok(all)
}
