//! The tenants of a server: their device time, and the answers to requests beyond it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use downbeat_core::tenants::{Ledger, Standing, TenantId, TenantPart};
use downbeat_core::{Duration, Time};
use parking_lot::Mutex;

use crate::error::ServiceError;
use crate::metrics::TenantMetrics;
use crate::report::live::LiveTenant;
use crate::unanswered::Unanswered;

/// The parameter of a request that names its tenant. The frontend writes it from the request's key.
pub const TENANT: &str = "downbeat_tenant";
/// The tenant of all keys without one. It has the part of the devices' time that is left.
pub const OTHERS: &str = "others";
/// A tenant may save up its part of this time.
const DEPTH: Duration = Duration::from_millis(50);
/// The hint to a request of a tenant without a share: there is no time at which it will be within.
const NO_SHARE: Duration = Duration::from_millis(1_000);

/// A tenant's name and part.
#[derive(Clone, PartialEq, Debug)]
pub struct NamedPart {
    /// The name.
    pub name: String,
    /// The part of the devices' time.
    pub part: TenantPart,
}

/// The tenants of a server.
pub struct Tenants {
    devices: u32,
    metrics: TenantMetrics,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// As they were set.
    parts: Vec<NamedPart>,
    /// The names, by id.
    names: Arc<[String]>,
    /// `None`: the server has no tenants.
    ledger: Option<Ledger>,
    /// How often the tenants were set: an id counts only for its own generation.
    generation: u64,
}

impl Tenants {
    /// No tenants, who share `devices` devices.
    pub fn new(devices: u32, metrics: TenantMetrics) -> Self {
        Tenants { devices, metrics, state: Mutex::default() }
    }

    /// The number of devices that the tenants share.
    pub fn devices(&self) -> u32 {
        self.devices
    }

    /// Whether there are tenants.
    pub fn are_there(&self) -> bool {
        self.state.lock().ledger.is_some()
    }

    /// The parts and counts of the tenants, and then of the others; empty: there are none.
    pub fn report(&self) -> Vec<LiveTenant> {
        let state = self.state.lock();
        if state.ledger.is_none() {
            return Vec::new();
        }
        let others = others(&state.parts);
        state.parts.iter().chain([&others]).map(|part| self.metrics.report(&part.name, &part.part)).collect()
    }

    /// Replaces the tenants, and fills their buckets. Returns whether that was a change: a file of keys
    /// that changes otherwise leaves the buckets alone.
    pub fn set(&self, parts: &[NamedPart]) -> bool {
        let mut state = self.state.lock();
        if state.parts == parts {
            return false;
        }
        state.generation += 1;
        state.parts = parts.to_vec();
        if parts.is_empty() {
            (state.ledger, state.names) = (None, Arc::default());
            return true;
        }
        let others = others(parts);
        let all: Vec<&NamedPart> = parts.iter().chain([&others]).collect();
        let parts: Vec<TenantPart> = all.iter().map(|part| part.part).collect();
        state.names = all.iter().map(|part| part.name.clone()).collect();
        state.ledger = Some(Ledger::new(&parts, self.devices, DEPTH));
        true
    }

    /// Takes a request that comes at `now` and is estimated to take `cost` of device time. `None` if
    /// the server has no tenants. An unknown name counts as [`OTHERS`].
    ///
    /// # Errors
    /// [`ServiceError::TooMany`] if the tenant has used up its quota.
    pub fn arrive(self: &Arc<Self>, now: Time, name: &str, cost: Duration) -> Result<Option<Charge>, ServiceError> {
        let mut state = self.state.lock();
        let State { names, ledger: Some(ledger), generation, .. } = &mut *state else { return Ok(None) };
        let index = names.iter().position(|known| known == name).unwrap_or(names.len().saturating_sub(1));
        let Some(name) = names.get(index) else { return Ok(None) };
        let tenant = TenantId(index as u32);
        let standing = match ledger.arrive(now, tenant, cost) {
            None => return Ok(None),
            Some(Ok(standing)) => standing,
            Some(Err(over)) => {
                self.metrics.refused(name);
                let message = format!(
                    "tenant '{name}' has used up its quota of device time (quota in the file of keys); send fewer \
                     requests, or try again later"
                );
                return Err(ServiceError::TooMany { message, retry_after: over.retry_after });
            }
        };
        self.metrics.arrived(name, standing == Standing::Within);
        let (tenants, names, generation) = (self.clone(), names.clone(), *generation);
        Ok(Some(Charge { tenants, names, tenant, generation, standing, cost, is_back: AtomicBool::new(false) }))
    }
}

/// Refuses parts for a service that keeps none.
///
/// # Errors
/// `Unimplemented`, which names a tenant with a share or a quota.
pub fn keeps_no_parts(parts: &[NamedPart]) -> Result<(), ServiceError> {
    match parts.iter().find(|part| part.part.share > 0.0 || part.part.quota.is_some()) {
        None => Ok(()),
        Some(part) => Err(ServiceError::Unimplemented(format!(
            "tenant '{}' has a share or a quota, which only downbeat serve keeps; a cluster keeps requests_per_second \
             alone, which each frontend counts by itself",
            part.name
        ))),
    }
}

/// The part of all keys without a tenant: what the tenants leave.
fn others(parts: &[NamedPart]) -> NamedPart {
    let left = 1.0 - parts.iter().map(|part| part.part.share).sum::<f64>();
    NamedPart { name: OTHERS.to_owned(), part: TenantPart { share: left.max(0.0), quota: None } }
}

/// The device time that a request was charged. Dropping it means that the request has run.
pub struct Charge {
    tenants: Arc<Tenants>,
    names: Arc<[String]>,
    tenant: TenantId,
    generation: u64,
    standing: Standing,
    cost: Duration,
    /// The time was given back.
    is_back: AtomicBool,
}

impl Charge {
    /// Whether the request is within its tenant's share.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    fn name(&self) -> &str {
        self.names.get(self.tenant.0 as usize).map_or(OTHERS, String::as_str)
    }

    /// Gives the time back: the request did not run.
    pub fn give_back(&self) {
        if self.is_back.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut state = self.tenants.state.lock();
        if state.generation == self.generation
            && let Some(ledger) = &mut state.ledger
        {
            ledger.settle(self.tenant, self.standing, self.cost, Duration::ZERO);
        }
    }

    /// Gives the time back, and makes the error of a request that did not run. A request beyond its
    /// tenant's share that found no time gets the share as the reason. Its error says when the tenant
    /// is within the share again.
    pub fn refuse(&self, now: Time, model: &str, reason: Unanswered, error: ServiceError) -> ServiceError {
        self.give_back();
        if self.standing == Standing::Within || !reason.is_for_want_of_devices() {
            return error;
        }
        let name = self.name();
        self.tenants.metrics.refused(name);
        let mut state = self.tenants.state.lock();
        let until = state.ledger.as_mut().and_then(|ledger| ledger.next_within(now, self.tenant));
        let message = format!(
            "tenant '{name}' is beyond its share of the devices' time, and others need model '{model}' or its devices \
             now; send fewer requests, or try again later"
        );
        ServiceError::TooMany { message, retry_after: until.unwrap_or(NO_SHARE) }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if !*self.is_back.get_mut() {
            self.tenants.metrics.ran(self.name(), self.cost);
        }
    }
}
