//! Tenants: guaranteed shares of the devices' time.
//!
//! Three tenants share four devices, and `search` has a share of a half. Thus `search` is promised
//! two seconds of device time in each second. Its requests are *within* its share as long as they
//! take no more. A request that comes on top is *beyond*: it runs in time that no request within a
//! share needs. That time is *lent*, and costs its tenant nothing.
//!
//! A [`Ledger`] keeps a bucket of device time for each tenant, and tells at a request's arrival
//! whether the request is within. The driver puts a request within its share into the queue of its
//! model. A request beyond goes into a second queue of the model, the lent queue
//! ([`crate::cluster::Scheduler::set_lent`]).
//!
//! Why not one queue with two priority levels? Both kinds of requests would then share batches.
//! Each request beyond makes its batch longer. It moves the batch's window, and raises the rate that
//! the model plans with. A burst would thus cost the requests within. A queue of requests within a
//! share decides as if there were no others. The price: requests within and beyond share no batch.

use crate::profile::LatencyProfile;
use crate::time::{Duration, Time};

/// A tenant of a [`Ledger`], from zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TenantId(pub u32);

/// The part of a tenant in the time of all devices.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct TenantPart {
    /// The guaranteed part, from 0 to 1.
    pub share: f64,
    /// The largest part, idle devices or not; `None`: no bound.
    pub quota: Option<f64>,
}

/// Whether a request is within its tenant's share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// The request is within the share.
    Within,
    /// The request is beyond the share: it gets time that no request within a share needs.
    Beyond,
}

/// The device time of each tenant.
///
/// A pure state machine. Time never goes back: an earlier time than that of the call before is taken
/// as that time.
///
/// **Promise.** In any time `t`, requests within a share of `s` are estimated to take at most
/// `s * devices * (t + depth)`, and the estimate of one more request. Estimates are corrected by
/// [`Ledger::settle`]. So a bucket can go below zero by the estimate of one request, and by the
/// amounts by which batches took longer than estimated.
#[derive(Clone, Debug)]
pub struct Ledger {
    accounts: Vec<Account>,
    devices: u32,
    depth: Duration,
}

#[derive(Clone, Debug)]
struct Account {
    share: Bucket,
    quota: Option<Bucket>,
}

/// Millionths: the unit of parts. Balances are nanoseconds of device time times this, so that no
/// refill is rounded.
const MILLION: i128 = 1_000_000;

#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// The part of all devices' time, millionths.
    part: u32,
    balance: i128,
    /// The time of the balance.
    at: Time,
}

impl Bucket {
    /// A full bucket. A part that is no number from 0 to 1 is taken as the nearest such number.
    fn new(part: f64, devices: u32, depth: Duration) -> Self {
        let part = (part.clamp(0.0, 1.0) * 1e6).round() as u32;
        let mut bucket = Bucket { part, balance: 0, at: Time::ZERO };
        bucket.balance = bucket.gain(depth, devices);
        bucket
    }

    /// The promised time of `passed`.
    fn gain(&self, passed: Duration, devices: u32) -> i128 {
        i128::from(passed.as_nanos()) * i128::from(self.part) * i128::from(devices)
    }

    fn refill(&mut self, now: Time, devices: u32, depth: Duration) {
        let passed = now.since(self.at);
        self.at = self.at.max(now);
        self.add(self.gain(passed, devices), devices, depth);
    }

    fn add(&mut self, amount: i128, devices: u32, depth: Duration) {
        self.balance = (self.balance + amount).min(self.gain(depth, devices));
    }

    /// How long until the balance is above zero; `None`: never.
    fn until_positive(&self, devices: u32) -> Option<Duration> {
        let a_nanosecond = i128::from(self.part) * i128::from(devices);
        if self.balance > 0 {
            return Some(Duration::ZERO);
        }
        let nanos = (-self.balance).checked_div(a_nanosecond)? + 1;
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

/// The tenant has used up its quota.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the tenant has used up its quota of device time")]
pub struct OverQuota {
    /// When the tenant may send a request again.
    pub retry_after: Duration,
}

impl Ledger {
    /// A ledger of these tenants, in the order of their ids, for `devices` devices. A tenant may save
    /// up the time that it is promised in `depth`.
    pub fn new(tenants: &[TenantPart], devices: u32, depth: Duration) -> Self {
        let account = |tenant: &TenantPart| Account {
            share: Bucket::new(tenant.share, devices, depth),
            quota: tenant.quota.map(|part| Bucket::new(part, devices, depth)),
        };
        Ledger { accounts: tenants.iter().map(account).collect(), devices, depth }
    }

    /// Tells whether a request that comes now is within its tenant's share, and takes its estimated
    /// time if so. `None` for an unknown tenant.
    ///
    /// # Errors
    /// If the tenant is over its quota.
    pub fn arrive(&mut self, now: Time, tenant: TenantId, estimate: Duration) -> Option<Result<Standing, OverQuota>> {
        let Ledger { accounts, devices, depth } = self;
        let account = accounts.get_mut(tenant.0 as usize)?;
        let cost = i128::from(estimate.as_nanos()) * MILLION;
        if let Some(quota) = &mut account.quota {
            quota.refill(now, *devices, *depth);
            if quota.balance <= 0 {
                let retry_after = quota.until_positive(*devices).unwrap_or(Duration::MAX);
                return Some(Err(OverQuota { retry_after }));
            }
            quota.balance -= cost;
        }
        account.share.refill(now, *devices, *depth);
        if account.share.balance <= 0 {
            return Some(Ok(Standing::Beyond));
        }
        account.share.balance -= cost;
        Some(Ok(Standing::Within))
    }

    /// Replaces the estimate of a request by the time that it took. `actual` is zero for a request
    /// that did not run.
    pub fn settle(&mut self, tenant: TenantId, standing: Standing, estimate: Duration, actual: Duration) {
        let Ledger { accounts, devices, depth } = self;
        let Some(account) = accounts.get_mut(tenant.0 as usize) else { return };
        let back = (i128::from(estimate.as_nanos()) - i128::from(actual.as_nanos())) * MILLION;
        if let Some(quota) = &mut account.quota {
            quota.add(back, *devices, *depth);
        }
        if standing == Standing::Within {
            account.share.add(back, *devices, *depth);
        }
    }

    /// How long until the tenant's next request would be within its share; `None`: never, or the
    /// tenant is unknown.
    pub fn next_within(&mut self, now: Time, tenant: TenantId) -> Option<Duration> {
        let account = self.accounts.get_mut(tenant.0 as usize)?;
        account.share.refill(now, self.devices, self.depth);
        account.share.until_positive(self.devices)
    }

    /// The saved-up device time of a tenant in nanoseconds, as of the last call; below zero if it
    /// used more than it had. Zero for an unknown tenant.
    pub fn balance(&self, tenant: TenantId) -> i64 {
        let account = self.accounts.get(tenant.0 as usize);
        account.map_or(0, |account| i64::try_from(account.share.balance.div_euclid(MILLION)).unwrap_or(i64::MIN))
    }
}

/// The largest batch of a lent queue. The batch takes half of `shortest_slo` at most, times the number
/// of devices. If the devices begin such batches in turn, one device is free again within half of
/// that SLO.
pub fn largest_lent_batch(profile: &LatencyProfile, max_batch: u32, shortest_slo: Duration, devices: u32) -> u32 {
    let longest = Duration::from_nanos(shortest_slo.as_nanos() / 2).saturating_mul(u64::from(devices));
    profile.largest_up_to(max_batch, longest).max(1)
}
