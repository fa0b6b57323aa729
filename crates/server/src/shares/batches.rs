//! Sets a model's largest batch by the latencies of its past batches. The lanes report each batch.
//! A rule such as SLAB then sets the limit.

use std::collections::VecDeque;
use std::sync::Arc;

use downbeat_core::device::Span;
use downbeat_core::device::spatial::{Aimd, BatchControl, Slab, SpatialOutput};
use downbeat_core::{Duration, ModelId};
use parking_lot::Mutex;
use prometheus::IntGauge;

use super::{DeviceShares, State};
use crate::host::{DeviceHost, HostedModel};
use crate::options::BatchesBy;

/// The most batches that wait to be heard of, while shares are looked at; the oldest are forgotten.
const MOST_UNHEARD: usize = 1024;

/// Batches that have run and were not heard of yet.
#[derive(Clone, Default)]
pub(super) struct Unheard(Arc<Mutex<VecDeque<(ModelId, u32, Span)>>>);

/// How large a model's batches may be.
pub(super) struct BatchLimit {
    pub rows: u32,
    gauge: IntGauge,
}

impl Unheard {
    fn push(&self, model: ModelId, rows: u32, span: Span) {
        let mut unheard = self.0.lock();
        if unheard.len() == MOST_UNHEARD {
            unheard.pop_front();
        }
        unheard.push_back((model, rows, span));
    }
}

impl State {
    /// Hears of the batches that have run, and decides at once.
    pub(super) fn hear_batches(&mut self, host: &DeviceHost, unheard: &Unheard) {
        let unheard = std::mem::take(&mut *unheard.0.lock());
        for (model, rows, span) in unheard {
            self.spatial.handle_batch(host.clock.now(), model, rows, span);
        }
    }

    /// Limits a model's batches, if a control outside its policy does.
    pub(super) fn limit(&mut self, host: &DeviceHost, model: ModelId, rows: u32) {
        let Some(shared) = self.models.get_mut(&model) else { return };
        if let Some(limit) = &mut shared.batch_limit
            && std::mem::replace(&mut limit.rows, rows) != rows
        {
            limit.gauge.set(rows.into());
            host.limit(&shared.model, rows);
        }
    }
}

impl DeviceShares {
    /// The control of a model's batch sizes, with the time that each batch may take, and its first
    /// limit; `None`: its device policy decides. The control hears of the model's batches from now
    /// on.
    pub(super) fn batch_control(&self, model: &Arc<HostedModel>, slo: Duration) -> Option<(BatchControl, BatchLimit)> {
        let most = model.tensors.codec.max_batch;
        let control = match self.batches {
            BatchesBy::Policy => return None,
            BatchesBy::Slab => BatchControl::Slab(Slab::new(slo, most)),
            BatchesBy::Aimd => BatchControl::Aimd(Aimd::new(slo, most)),
        };
        let rows = control.limit();
        if !self.host.limit(model, rows) {
            return None;
        }
        let device = self.host.device.to_string();
        let gauge = self.metrics.batch_limit.with_label_values(&[&*model.name, &model.version, &device]);
        gauge.set(rows.into());
        let (host, state) = (Arc::downgrade(&self.host), Arc::downgrade(&self.state));
        let (unheard, wake) = (self.unheard.clone(), self.wake.clone());
        let hears = move |model: &HostedModel, rows, span| {
            unheard.push(model.id, rows, span);
            let (Some(host), Some(state)) = (host.upgrade(), state.upgrade()) else { return };
            // If another thread holds the shares, it or the next batch handles this one: no lane
            // waits for the lock.
            let Some(mut state) = state.try_lock() else { return };
            state.hear_batches(&host, &unheard);
            while let Some(output) = state.spatial.poll_output() {
                match output {
                    // The limit is set at once, as the next batch is made after this.
                    SpatialOutput::Limit { model, rows } => state.limit(&host, model, rows),
                    output => {
                        state.postponed.push_back(output);
                        wake.notify_one();
                    }
                }
            }
        };
        // A model that comes again has its control already.
        let _ = model.batch_control.set(Box::new(hears));
        Some((control, BatchLimit { rows, gauge }))
    }
}
