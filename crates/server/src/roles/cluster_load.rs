//! What requests and devices of a cluster come to, as its leading scheduler counts them, for the autoscale advice.

use std::sync::Arc;

use downbeat_core::cluster::AutoscaleSample;
use downbeat_core::roles::Epoch;
use parking_lot::Mutex;

use crate::autoscale::AutoscaleWatch;
use crate::clock::Clock;
use crate::metrics::Metrics;

/// Has an advisor look at the counters of the scheduler that leads, if that is this process.
pub struct ClusterLoad {
    clock: Clock,
    watch: Arc<AutoscaleWatch>,
    metrics: Arc<Metrics>,
    /// Whose counters were looked at last.
    epoch: Mutex<Option<Epoch>>,
}

impl ClusterLoad {
    /// Nobody leads yet.
    pub fn new(clock: Clock, watch: Arc<AutoscaleWatch>, metrics: Arc<Metrics>) -> Self {
        watch.forget(&metrics);
        ClusterLoad { clock, watch, metrics, epoch: Mutex::new(None) }
    }

    /// The counters now, and in which epoch they began; to be told about once a second.
    pub fn look(&self, epoch: Option<Epoch>, sample: Option<AutoscaleSample>) {
        if std::mem::replace(&mut *self.epoch.lock(), epoch) != epoch {
            self.watch.forget(&self.metrics);
        }
        if let Some(sample) = sample {
            self.watch.look(self.clock.now(), sample, &self.metrics);
        }
    }
}
