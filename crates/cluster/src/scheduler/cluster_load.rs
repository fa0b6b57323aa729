//! The load of a cluster's requests and devices, counted by its leading scheduler, for the
//! autoscale advice.

use std::sync::Arc;

use downbeat_core::cluster::AutoscaleSample;
use downbeat_roles::Epoch;
use downbeat_service::clock::Clock;
use downbeat_service::metrics::Metrics;
use downbeat_service::report::autoscale::AutoscaleWatch;
use parking_lot::Mutex;

/// Passes the leading scheduler's counters to an advisor, if this process leads.
pub struct ClusterLoad {
    clock: Clock,
    watch: Arc<AutoscaleWatch>,
    metrics: Arc<Metrics>,
    /// The epoch of the counters that were passed last.
    epoch: Mutex<Option<Epoch>>,
}

impl ClusterLoad {
    /// A cluster load before the first leader.
    pub fn new(clock: Clock, watch: Arc<AutoscaleWatch>, metrics: Arc<Metrics>) -> Self {
        watch.forget(&metrics);
        ClusterLoad { clock, watch, metrics, epoch: Mutex::new(None) }
    }

    /// Takes the present counters, and the epoch in which they began. Call this about once a
    /// second.
    pub fn look(&self, epoch: Option<Epoch>, sample: Option<AutoscaleSample>) {
        if std::mem::replace(&mut *self.epoch.lock(), epoch) != epoch {
            self.watch.forget(&self.metrics);
        }
        if let Some(sample) = sample {
            self.watch.look(self.clock.now(), sample, &self.metrics);
        }
    }
}
