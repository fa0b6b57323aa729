//! Shares of a device for its models (GSLICE), unless the options fix them: [`Shares`] decides, and
//! its device carries the decisions out.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use downbeat_core::device::spatial::{
    Aimd, BatchControl, ShareOutput, SharePart, ShareParts, ShareReason, Shares, SharingModel, Slab,
};
use downbeat_core::device::{PartitionId, Span};
use downbeat_core::{Duration, ModelId, Time};
use downbeat_engine::Part;
use downbeat_service::metric_table;
use downbeat_service::options::{BatchesBy, DeviceOptions};
use downbeat_service::report::device_report::ShareReport;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::device::{DeviceHost, Placement};

/// The most batches that wait for the shares to hear of them. The oldest are forgotten.
const MOST_UNHEARD: usize = 1024;

metric_table! {
    /// Metrics of the models' shares of devices. A clone shares its counters.
    #[derive(Clone)]
    pub struct ShareMetrics {
        units: IntGaugeVec["model", "version", "device"], "downbeat_share_units",
            "Compute units of a model's share of a device; 0: the model has no share, and runs on all of the device";
        batch_limit: IntGaugeVec["model", "version", "device"], "downbeat_share_batch_limit",
            "The most items of a model's batches, where measured times limit the batches";
        changes: IntCounterVec["model", "version", "device", "reason"], "downbeat_share_changes_total",
            "Changes of a model's share, by reason";
    }
}

/// The shares of one device. The next [`tick`](Self::tick) handles the outcomes of lanes.
pub struct DeviceShares {
    host: Arc<DeviceHost>,
    state: Arc<Mutex<State>>,
    /// The outcomes of lanes since the last tick.
    made: Arc<Mutex<Vec<Made>>>,
    unheard: Unheard,
    wake: Arc<Notify>,
    metrics: ShareMetrics,
}

struct State {
    shares: Shares,
    models: BTreeMap<ModelId, Sharing>,
}

/// A model that has a share, or waits for one.
struct Sharing {
    model: Arc<Placement>,
    /// The callers that wait for its move to the partition that they chose.
    waiting: Vec<oneshot::Sender<Result<(), String>>>,
}

/// Whether a model's lanes are ready.
struct Made(ModelId, Result<(), String>);

/// Batches that have run, and of which the shares have not heard yet.
#[derive(Clone, Default)]
struct Unheard(Arc<Mutex<VecDeque<(ModelId, u32, Span)>>>);

impl DeviceShares {
    /// Shares a device among models that move between `parts`, which all exist. `by_hand`: the
    /// partitions that the user chose, by model name.
    pub fn new(
        host: Arc<DeviceHost>,
        parts: &[Part],
        options: &DeviceOptions,
        by_hand: BTreeMap<String, usize>,
        wake: Arc<Notify>,
        metrics: ShareMetrics,
    ) -> Self {
        let part = |part: &Part| {
            let cores = part.share.cores().map(|cores| cores.iter().collect());
            SharePart { units: part.units, cores }
        };
        let parts = ShareParts::new(parts.iter().map(part).collect());
        let control: Option<fn(Duration, u32) -> BatchControl> = match options.share_batches {
            BatchesBy::Policy => None,
            BatchesBy::Slab => Some(|slo, most| BatchControl::Slab(Slab::new(slo, most))),
            BatchesBy::Aimd => Some(|slo, most| BatchControl::Aimd(Aimd::new(slo, most))),
        };
        let by_hand = by_hand.into_iter().map(|(name, to)| (name, partition(to))).collect();
        let shares = Shares::new(parts, (options.share_hold_down, options.share_period), control, by_hand);
        let state = Arc::new(Mutex::new(State { shares, models: BTreeMap::new() }));
        let (made, unheard) = Default::default();
        DeviceShares { host, state, made, unheard, wake, metrics }
    }

    /// The number of the device.
    pub fn device(&self) -> usize {
        self.host.device
    }

    /// Handles the outcomes of lanes and the present models, each with its SLO. Once a period it
    /// also reads the models' work and moves models.
    pub fn tick(&self, models: &[(Arc<Placement>, Option<Duration>)]) {
        let (state, now) = (&mut *self.state.lock(), self.host.clock.now());
        for Made(id, made) in std::mem::take(&mut *self.made.lock()) {
            state.shares.handle_prepared(now, id, made);
        }
        state.hear_batches(now, &self.unheard);
        let gone = state.models.extract_if(.., |id, _| models.iter().all(|(model, _)| model.id != *id));
        for (id, gone) in gone.collect::<Vec<_>>() {
            state.shares.handle_model(now, id, None);
            self.forget(&gone.model);
        }
        for (model, slo) in models {
            if !state.models.contains_key(&model.id) {
                self.comes(state, now, model, *slo);
            }
        }
        if state.shares.is_due(now) {
            let models = &state.models;
            state.shares.handle_windows(now, |id| Some(models.get(&id)?.model.work.read(now)));
        }
        state.shares.handle_look();
        self.carry_out(state, now);
    }

    /// Puts a model onto a partition, where it stays, or (`None`) leaves it to its device again.
    /// Each receiver hears when the move of a version is over.
    ///
    /// # Errors
    /// If the model cannot be there because others need a share, too. Nothing is changed then.
    pub fn set(&self, name: &str, to: Option<usize>) -> Result<Vec<oneshot::Receiver<Result<(), String>>>, String> {
        let (state, now) = (&mut *self.state.lock(), self.host.clock.now());
        let mut answers = Vec::new();
        for id in state.shares.handle_choice(now, name, to.map(partition))? {
            if let Some(sharing) = state.models.get_mut(&id) {
                let (answer, is_there) = oneshot::channel();
                sharing.waiting.push(answer);
                answers.push(is_there);
            }
        }
        self.carry_out(state, now);
        Ok(answers)
    }

    /// A model's share of the device; `None`: the model does not take part in sharing.
    pub fn report(&self, model: &Placement) -> Option<ShareReport> {
        let view = self.state.lock().shares.view(model.id)?;
        Some(ShareReport {
            units: view.units,
            next_units: view.next_units,
            preparing: view.preparing.map(|partition| partition.0),
            knee: view.knee,
            batch_limit: view.batch_limit,
            reason: match view.has_no_room {
                true => Some("there is no share for the model: it runs on all of the device".to_owned()),
                false => view.reason.map(|reason| reason.to_string()),
            },
        })
    }

    /// Whether the user has chosen the model's partition.
    pub fn is_by_hand(&self, name: &str) -> bool {
        self.state.lock().shares.is_by_hand(name)
    }

    fn comes(&self, state: &mut State, now: Time, model: &Arc<Placement>, slo: Option<Duration>) {
        let batch = state.shares.batch_control(slo, model.tensors.codec.max_batch);
        let batch = batch.filter(|control| self.host.limit(model, control.limit()));
        if let Some(control) = &batch {
            self.gauge_limit(model, control.limit());
            self.hear(model);
        }
        let (name, knee, worked) = (model.name.clone(), model.knee, model.work.read(now));
        let partition = self.host.partition(model);
        let comes = SharingModel { name, partition, slo, knee, batch, worked };
        state.models.insert(model.id, Sharing { model: model.clone(), waiting: Vec::new() });
        state.shares.handle_model(now, model.id, Some(comes));
    }

    /// Has the lanes report each batch of a model from now on.
    fn hear(&self, model: &Placement) {
        let (host, state) = (Arc::downgrade(&self.host), Arc::downgrade(&self.state));
        let (unheard, wake, metrics) = (self.unheard.clone(), self.wake.clone(), self.metrics.clone());
        let hears = move |model: &Placement, rows, span| {
            unheard.push(model.id, rows, span);
            let (Some(host), Some(state)) = (host.upgrade(), state.upgrade()) else { return };
            // If another thread holds the shares, it or the next batch handles this one: no lane
            // waits for the lock.
            let Some(mut state) = state.try_lock() else { return };
            state.hear_batches(host.clock.now(), &unheard);
            // A limit is set at once, as the next batch is made after this.
            state.set_limits(&host, &metrics);
            if state.shares.has_postponed() {
                wake.notify_one();
            }
        };
        // A model that comes again has its control already.
        let _ = model.batch_control.set(Box::new(hears));
    }

    /// Carries out the decisions.
    fn carry_out(&self, state: &mut State, now: Time) {
        loop {
            state.set_limits(&self.host, &self.metrics);
            let Some(output) = state.shares.poll_output(now) else { return };
            match output {
                ShareOutput::Prepare { model, partition, share } => {
                    let Some(sharing) = state.models.get(&model) else { continue };
                    if let Some((units, reason)) = share {
                        let name = &sharing.model.name;
                        tracing::info!(model = %name, device = self.host.device, units, partition = partition.0, %reason, "the model will have another share");
                    }
                    match self.prepare(&sharing.model, partition) {
                        None => {}
                        Some(made) if share.is_some() => state.shares.handle_prepared(now, model, made),
                        Some(made) => self.ready(model)(made),
                    }
                }
                ShareOutput::Switch { model, partition, share } => {
                    let Some(Sharing { model, .. }) = state.models.get(&model) else { continue };
                    self.host.change_over(model);
                    if let Some((units, reason)) = share {
                        state.shares.handle_switched(model.id, model.work.read(now));
                        self.tell(model, units, partition, reason);
                    }
                }
                ShareOutput::Discard { model } => {
                    let Some(Sharing { model, .. }) = state.models.get(&model) else { continue };
                    // Asking for the present partition discards the lanes that are ready elsewhere.
                    let _ = self.host.prepare_move(model, self.host.partition(model), Box::new(drop));
                }
                ShareOutput::NoRoom { model } => {
                    let Some(Sharing { model, .. }) = state.models.get(&model) else { continue };
                    tracing::warn!(model = %model.name, device = self.host.device, "there are more models than shares: the model has no share, and runs on all of the device");
                }
                ShareOutput::Moved { model, outcome } => {
                    let waiting = state.models.get_mut(&model).map(|sharing| std::mem::take(&mut sharing.waiting));
                    for waiting in waiting.into_iter().flatten() {
                        // The caller may have gone.
                        let _ = waiting.send(outcome.clone());
                    }
                }
                ShareOutput::Refused { model, refused } => {
                    let Some(Sharing { model, .. }) = state.models.get(&model) else { continue };
                    tracing::warn!(model = %model.name, device = self.host.device, %refused, "the model cannot stay in its partition");
                }
            }
        }
    }

    /// Has lanes made in a partition. Returns the outcome, if it is known at once.
    fn prepare(&self, model: &Placement, to: PartitionId) -> Option<Result<(), String>> {
        match self.host.prepare_move(model, to, Box::new(self.ready(model.id))) {
            Ok(true) => None,
            Ok(false) => Some(Ok(())),
            Err(refused) => Some(Err(refused.to_string())),
        }
    }

    /// Leaves the outcome of a model's lanes to the next tick.
    fn ready(&self, id: ModelId) -> impl FnOnce(Result<(), String>) + Send + 'static {
        let (made, wake) = (self.made.clone(), self.wake.clone());
        move |outcome| {
            made.lock().push(Made(id, outcome));
            wake.notify_one();
        }
    }

    /// Tells metrics and the log of a model's new share.
    fn tell(&self, model: &Placement, units: u32, partition: PartitionId, reason: Option<ShareReason>) {
        let reason = reason.map_or("none", ShareReason::name);
        let device = self.host.device.to_string();
        self.metrics.units.with_label_values(&[&*model.name, &model.version, &device]).set(units.into());
        self.metrics.changes.with_label_values(&[&*model.name, &model.version, &device, reason]).inc();
        tracing::info!(model = %model.name, device, units, partition = partition.0, reason, "the model has another share");
    }

    fn gauge_limit(&self, model: &Placement, rows: u32) {
        self.metrics.gauge_limit(model, self.host.device, rows);
    }

    fn forget(&self, model: &Placement) {
        // An error means that there was none.
        let labels: [&str; 3] = [&model.name, &model.version, &self.host.device.to_string()];
        let _ = self.metrics.units.remove_label_values(&labels);
        let _ = self.metrics.batch_limit.remove_label_values(&labels);
    }
}

impl ShareMetrics {
    fn gauge_limit(&self, model: &Placement, device: usize, rows: u32) {
        self.batch_limit.with_label_values(&[&*model.name, &model.version, &device.to_string()]).set(rows.into());
    }
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
    fn hear_batches(&mut self, now: Time, unheard: &Unheard) {
        let unheard = std::mem::take(&mut *unheard.0.lock());
        for (model, rows, span) in unheard {
            self.shares.handle_batch(now, model, rows, span);
        }
    }

    /// Limits the batches of models.
    fn set_limits(&mut self, host: &DeviceHost, metrics: &ShareMetrics) {
        while let Some((id, rows)) = self.shares.poll_limit() {
            let Some(Sharing { model, .. }) = self.models.get(&id) else { continue };
            metrics.gauge_limit(model, host.device, rows);
            host.limit(model, rows);
        }
    }
}

fn partition(number: usize) -> PartitionId {
    PartitionId(number as u32)
}

#[cfg(test)]
mod tests;
