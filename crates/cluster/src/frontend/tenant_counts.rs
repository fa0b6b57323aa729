//! The tenants of a frontend's keys, and how much of the backends' devices each of them uses.

use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_core::tenants::TenantPart;
use downbeat_service::metrics::TenantMetrics;
use downbeat_service::report::live::LiveTenant;
use downbeat_service::tenants::{NamedPart, OTHERS};
use parking_lot::RwLock;

/// Counts the requests of tenants. A cluster keeps no shares, so every request counts as within.
pub struct TenantCounts {
    metrics: TenantMetrics,
    /// The names as the file of keys has them, and then [`OTHERS`]; empty: there are no tenants.
    names: RwLock<Vec<Arc<str>>>,
}

impl TenantCounts {
    /// No tenants yet.
    pub fn new(metrics: TenantMetrics) -> Self {
        TenantCounts { metrics, names: RwLock::default() }
    }

    /// Replaces the tenants.
    pub fn set(&self, parts: &[NamedPart]) {
        let others = (!parts.is_empty()).then_some(OTHERS);
        *self.names.write() = parts.iter().map(|part| &*part.name).chain(others).map(Arc::from).collect();
    }

    /// Counts a request of this tenant, and returns the tenant that it counts for. An unknown name
    /// counts as [`OTHERS`]. `None`: there are no tenants.
    pub fn arrived(&self, name: &str) -> Option<Arc<str>> {
        let names = self.names.read();
        let tenant = names.iter().find(|known| ***known == *name).or(names.last())?;
        self.metrics.arrived(tenant, true);
        Some(tenant.clone())
    }

    /// A request of this tenant has taken so much device time.
    pub fn ran(&self, tenant: &str, time: Duration) {
        self.metrics.ran(tenant, time);
    }

    /// The counts of all tenants.
    pub fn report(&self) -> Vec<LiveTenant> {
        let no_part = TenantPart { share: 0.0, quota: None };
        self.names.read().iter().map(|name| self.metrics.report(name, &no_part)).collect()
    }
}
