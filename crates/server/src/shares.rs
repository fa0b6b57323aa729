//! Shares of a device for its models (GSLICE), unless the options fix them: [`Spatial`] decides,
//! and its device carries the decisions out.

mod batches;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use downbeat_core::device::PartitionId;
use downbeat_core::device::spatial::{BatchControl, ShareReason, Spatial, SpatialModel, SpatialOptions, SpatialOutput};
use downbeat_core::{Duration, ModelId, Time};
use downbeat_engine::{CoreSet, Part};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use self::batches::{BatchLimit, Unheard};
use crate::device_report::ShareReport;
use crate::host::{DeviceHost, HostedModel, Worked};
use crate::metric_table::metric_table;
use crate::options::{BatchesBy, DeviceOptions};

metric_table! {
    /// Metrics of the models' shares of devices. A clone shares its counters.
    #[derive(Clone)]
    pub struct ShareMetrics {
        units: IntGaugeVec["model", "version", "device"], "downbeat_share_units",
            "Compute units that a model has of a device; 0: it has no share of its own, and runs on all of it";
        batch_limit: IntGaugeVec["model", "version", "device"], "downbeat_share_batch_limit",
            "The most items of a model's batches, where what they took says how large they may be";
        changes: IntCounterVec["model", "version", "device", "reason"], "downbeat_share_changes_total",
            "How often a model changed over to another share, by the reason";
    }
}

/// The shares of one device. The next [`tick`](Self::tick) handles the outcomes of lanes.
pub struct DeviceShares {
    host: Arc<DeviceHost>,
    /// The partitions between which models move.
    parts: Arc<[Part]>,
    grain: u32,
    hold_down: Duration,
    batches: BatchesBy,
    state: Arc<Mutex<State>>,
    /// The outcomes of lanes since the last tick.
    made: Arc<Mutex<Vec<Made>>>,
    unheard: Unheard,
    wake: Arc<Notify>,
    metrics: ShareMetrics,
}

struct State {
    spatial: Spatial,
    /// Decisions taken when a batch was reported, which the next tick carries out.
    postponed: VecDeque<SpatialOutput>,
    models: BTreeMap<ModelId, Shared>,
    /// The partitions that the user chose for models, by model name.
    by_hand: BTreeMap<String, usize>,
}

/// A model that has a share, or waits for one.
struct Shared {
    model: Arc<HostedModel>,
    /// The partition where its lanes are being made, or are ready.
    to: Option<usize>,
    /// The lanes are for the partition that the user chose, and no share changes.
    is_aligned: bool,
    /// The most items of its batches; `None`: its device policy decides.
    batch_limit: Option<BatchLimit>,
    reason: Option<ShareReason>,
    /// Too many models: no share is left for this one.
    has_no_room: bool,
    /// Until then no lanes are made where it would share less with others: they failed before.
    failed_until: Time,
    /// Its work meter when its window began.
    began: Worked,
    /// The callers that wait for its move to the partition that they chose.
    waiting: Vec<oneshot::Sender<Result<(), String>>>,
}

/// Whether a model's lanes are ready.
struct Made(ModelId, Result<(), String>);

impl DeviceShares {
    /// Shares a device among models that move between `parts`, which all exist. `by_hand`: the
    /// partitions that the user chose, by model name.
    pub fn new(
        host: Arc<DeviceHost>,
        parts: Arc<[Part]>,
        options: &DeviceOptions,
        by_hand: BTreeMap<String, usize>,
        wake: Arc<Notify>,
        metrics: ShareMetrics,
    ) -> Self {
        let grain = parts.iter().map(|part| part.units).min().unwrap_or(1).max(1);
        let spatial = SpatialOptions {
            period: options.share_period,
            hold_down: options.share_hold_down,
            ..SpatialOptions::new(all_units(&parts).max(grain), grain)
        };
        let postponed = VecDeque::new();
        let state = State { spatial: Spatial::new(spatial), postponed, models: BTreeMap::new(), by_hand };
        let hold_down = options.share_hold_down;
        let (batches, state) = (options.share_batches, Arc::new(Mutex::new(state)));
        let (made, unheard) = Default::default();
        DeviceShares { host, parts, grain, hold_down, batches, state, made, unheard, wake, metrics }
    }

    /// The number of the device.
    pub fn device(&self) -> usize {
        self.host.device
    }

    /// Handles the outcomes of lanes and the present models, each with its SLO. Once a period it
    /// also reads the models' work and moves models.
    pub fn tick(&self, models: &[(Arc<HostedModel>, Option<Duration>)]) {
        let (state, now) = (&mut *self.state.lock(), self.host.clock.now());
        for Made(id, made) in std::mem::take(&mut *self.made.lock()) {
            self.hear(state, now, id, made);
        }
        state.hear_batches(&self.host, &self.unheard);
        let gone: Vec<ModelId> =
            state.models.keys().copied().filter(|id| models.iter().all(|(model, _)| model.id != *id)).collect();
        for id in gone {
            let gone = state.models.remove(&id);
            state.spatial.handle_model(now, id, None);
            gone.iter().for_each(|gone| self.forget(&gone.model));
        }
        for (model, slo) in models {
            if !state.models.contains_key(&model.id) {
                self.comes(state, now, model, *slo);
            }
        }
        if state.spatial.poll_timeout().is_some_and(|(at, _)| at <= now) {
            for (id, shared) in &mut state.models {
                let worked = shared.model.work.read(now);
                state.spatial.handle_window(*id, &worked.since(&shared.began));
                shared.began = worked;
            }
            state.spatial.handle_timeout(now);
        }
        self.carry_out(state, now);
    }

    /// Puts a model onto a partition, where it stays, or (`None`) leaves it to its device again.
    /// Each receiver hears when the move of a version is over.
    ///
    /// # Errors
    /// If the model cannot be there because others need a share, too. Nothing is changed then.
    pub fn set(&self, name: &str, to: Option<usize>) -> Result<Vec<oneshot::Receiver<Result<(), String>>>, String> {
        let (state, now) = (&mut *self.state.lock(), self.host.clock.now());
        let its: Vec<ModelId> =
            state.models.iter().filter(|(_, shared)| shared.model.name == name).map(|(id, _)| *id).collect();
        if its.is_empty() {
            return Err("it has no share of the device yet, or no lanes of its own that could move; try again later, or give it another device policy than exclusive".to_owned());
        }
        for id in &its {
            let set = state.spatial.handle_share(now, *id, to.map(|to| self.units(to)));
            if let Err(refused) = set {
                for id in its.iter().take_while(|other| *other != id) {
                    // The versions before this one are left to the device again.
                    let _ = state.spatial.handle_share(now, *id, None);
                }
                return Err(refused.to_string());
            }
        }
        match to {
            Some(to) => state.by_hand.insert(name.to_owned(), to),
            None => state.by_hand.remove(name),
        };
        let mut answers = Vec::new();
        for id in its.iter().filter(|_| to.is_some()) {
            if let Some(shared) = state.models.get_mut(id) {
                let (answer, is_there) = oneshot::channel();
                shared.waiting.push(answer);
                answers.push(is_there);
            }
        }
        self.carry_out(state, now);
        Ok(answers)
    }

    /// A model's share of the device; `None`: the model does not take part in sharing.
    pub fn report(&self, model: &HostedModel) -> Option<ShareReport> {
        let state = self.state.lock();
        let (share, shared) = (state.spatial.share(model.id)?, state.models.get(&model.id)?);
        Some(ShareReport {
            units: share.active,
            next_units: share.target,
            preparing: shared.to.map(|to| to as u32),
            knee: self.knee(model),
            batch_limit: shared.batch_limit.as_ref().map(|limit| limit.rows),
            reason: match shared.has_no_room {
                true => Some("there is no share for it: it runs on all of the device".to_owned()),
                false => shared.reason.map(|reason| reason.to_string()),
            },
        })
    }

    /// Whether the user has chosen the model's partition.
    pub fn is_by_hand(&self, name: &str) -> bool {
        self.state.lock().by_hand.contains_key(name)
    }

    /// The units that a partition counts as.
    fn units(&self, partition: usize) -> u32 {
        let units = self.parts.get(partition).map_or(self.grain, |part| part.units);
        (units / self.grain * self.grain).max(self.grain)
    }

    /// The units that a model asks for when it comes; `None`: it is unknown how many it can use.
    fn knee(&self, model: &HostedModel) -> Option<u32> {
        Some(model.knee?.clamp(1, all_units(&self.parts).max(1)))
    }

    fn comes(&self, state: &mut State, now: Time, model: &Arc<HostedModel>, slo: Option<Duration>) {
        // A request waits for the batch before its own, so that each may take half.
        let of_batch = slo.map(|slo| Duration::from_nanos(slo.as_nanos() / 2));
        let (batch, batch_limit) = of_batch.and_then(|slo| self.batch_control(model, slo)).unzip();
        let shared = Shared {
            model: model.clone(),
            to: None,
            is_aligned: false,
            batch_limit,
            reason: None,
            has_no_room: false,
            failed_until: Time::ZERO,
            began: model.work.read(now),
            waiting: Vec::new(),
        };
        state.models.insert(model.id, shared);
        // Without an SLO, the share must only suffice for the arrivals. Without a batch control,
        // the device policy bounds the batches itself.
        let slo = if batch.is_some() { of_batch } else { slo }.unwrap_or(Duration::from_nanos(u64::MAX));
        let comes = SpatialModel { slo, knee: self.knee(model), batch: batch.unwrap_or(BatchControl::Fixed(u32::MAX)) };
        state.spatial.handle_model(now, model.id, Some(comes));
        if let Some(to) = state.by_hand.get(&model.name)
            && let Err(refused) = state.spatial.handle_share(now, model.id, Some(self.units(*to)))
        {
            tracing::warn!(model = %model.name, device = self.host.device, partition = to, %refused, "cannot stay where it was put");
            state.by_hand.remove(&model.name);
        }
    }

    /// Lanes are ready for a model, or could not be made.
    fn hear(&self, state: &mut State, now: Time, id: ModelId, made: Result<(), String>) {
        let Some(shared) = state.models.get_mut(&id) else { return };
        let Some(to) = shared.to else { return };
        let is_aligned = std::mem::take(&mut shared.is_aligned);
        if let Err(reason) = &made {
            (shared.to, shared.failed_until) = (None, now + self.hold_down);
            for waiting in shared.waiting.drain(..) {
                // The caller may have gone.
                let _ = waiting.send(Err(format!("partition {to} cannot be made ready: {reason}")));
            }
            if state.by_hand.get(&shared.model.name) == Some(&to) {
                state.by_hand.remove(&shared.model.name);
                // The model is left to the device again.
                let _ = state.spatial.handle_share(now, id, None);
            }
        } else if is_aligned {
            shared.to = None;
            self.host.change_over(&shared.model);
        }
        if !is_aligned {
            state.spatial.handle_prepared(now, id, made.is_ok());
        }
    }

    /// Carries out the decisions, and moves models to the partitions that the user chose.
    fn carry_out(&self, state: &mut State, now: Time) {
        while let Some(output) = state.postponed.pop_front().or_else(|| state.spatial.poll_output()) {
            match output {
                SpatialOutput::Prepare { model, units, reason } => {
                    let to = self.choose(state, model, units);
                    let Some(shared) = state.models.get_mut(&model) else { continue };
                    (shared.to, shared.reason, shared.is_aligned) = (Some(to), Some(reason), false);
                    let name = &shared.model.name;
                    tracing::info!(model = %name, device = self.host.device, units, partition = to, %reason, "is to have another share");
                    if let Some(made) = self.prepare(shared, to) {
                        self.hear(state, now, model, made);
                    }
                }
                SpatialOutput::Switch { model, units } => self.switch(state, now, model, units),
                SpatialOutput::Discard { model } => {
                    let Some(shared) = state.models.get_mut(&model) else { continue };
                    shared.to = None;
                    // Asking for the present partition discards the lanes that are ready elsewhere.
                    let _ = self.host.prepare_move(&shared.model, self.host.partition(&shared.model), Box::new(drop));
                }
                SpatialOutput::Limit { model, rows } => state.limit(&self.host, model, rows),
                SpatialOutput::NoRoom { model } => {
                    let Some(shared) = state.models.get_mut(&model) else { continue };
                    if !std::mem::replace(&mut shared.has_no_room, true) {
                        tracing::warn!(model = %shared.model.name, device = self.host.device, "there is no share for it, as there are more models than shares: it runs on all of the device");
                    }
                }
            }
        }
        self.align(state, now);
    }

    /// Moves models that are not where the user put them, and models that could share less with
    /// others.
    fn align(&self, state: &mut State, now: Time) {
        let ids: Vec<ModelId> = state.models.keys().copied().collect();
        for id in ids {
            let units = state.spatial.share(id).map_or(0, |share| share.active);
            let Some(shared) = state.models.get(&id).filter(|shared| shared.to.is_none()) else { continue };
            let to = match state.by_hand.get(&shared.model.name) {
                Some(to) => *to,
                None if units > 0 && now >= shared.failed_until => self.choose(state, id, units),
                None => continue,
            };
            let Some(shared) = state.models.get_mut(&id) else { continue };
            if self.host.partition(&shared.model).0 as usize == to {
                // The caller may have gone.
                shared.waiting.drain(..).for_each(|waiting| drop(waiting.send(Ok(()))));
                continue;
            }
            (shared.to, shared.is_aligned) = (Some(to), true);
            if let Some(made) = self.prepare(shared, to) {
                self.made.lock().push(Made(id, made));
                self.wake.notify_one();
            }
        }
    }

    /// Has lanes made in a partition. Returns the outcome, if it is known at once.
    fn prepare(&self, shared: &Shared, to: usize) -> Option<Result<(), String>> {
        let (id, made, wake) = (shared.model.id, self.made.clone(), self.wake.clone());
        let ready = Box::new(move |what| {
            made.lock().push(Made(id, what));
            wake.notify_one();
        });
        match self.host.prepare_move(&shared.model, PartitionId(to as u32), ready) {
            Ok(true) => None,
            Ok(false) => Some(Ok(())),
            Err(refused) => Some(Err(refused.to_string())),
        }
    }

    fn switch(&self, state: &mut State, now: Time, id: ModelId, units: u32) {
        let Some(shared) = state.models.get_mut(&id) else { return };
        let Some(to) = shared.to.take() else { return };
        let (model, reason) = (shared.model.clone(), shared.reason);
        self.host.change_over(&model);
        // Its work on the former share says nothing of this share.
        (shared.began, shared.has_no_room) = (model.work.read(now), false);
        let reason = reason.map_or("none", ShareReason::name);
        let device = self.host.device.to_string();
        self.metrics.units.with_label_values(&[&model.name, &model.version, &device]).set(units.into());
        self.metrics.changes.with_label_values(&[&*model.name, &model.version, &device, reason]).inc();
        tracing::info!(model = %model.name, device, units, partition = to, reason, "has another share");
    }

    fn forget(&self, model: &HostedModel) {
        // An error means that there was none.
        let labels: [&str; 3] = [&model.name, &model.version, &self.host.device.to_string()];
        let _ = self.metrics.units.remove_label_values(&labels);
        let _ = self.metrics.batch_limit.remove_label_values(&labels);
    }

    /// Chooses the partition for a number of units of a model. The user's choice wins. Next come
    /// the partitions nearest to that number. Of these the one wins that shares least with the
    /// places of other models. The model's present place wins a tie.
    fn choose(&self, state: &State, id: ModelId, units: u32) -> usize {
        let me = state.models.get(&id);
        let named = me.and_then(|me| state.by_hand.get(&me.model.name)).copied();
        if let Some(to) = named.filter(|to| self.units(*to) == units) {
            return to;
        }
        let at = |shared: &Shared| shared.to.unwrap_or_else(|| self.host.partition(&shared.model).0 as usize);
        let has_share =
            |id: &ModelId| state.spatial.share(*id).is_some_and(|share| share.active > 0 || share.standby.is_some());
        let others: Vec<usize> = state
            .models
            .iter()
            .filter(|(other, _)| **other != id && has_share(other))
            .map(|(_, other)| at(other))
            .collect();
        let here = me.map(|me| self.host.partition(&me.model).0 as usize);
        let cost = |index: &usize| {
            let common: u32 = others.iter().map(|other| common(&self.parts, *index, *other)).sum();
            (self.units(*index).abs_diff(units), common, here != Some(*index), *index)
        };
        (0..self.parts.len()).min_by_key(cost).unwrap_or(0)
    }
}

/// How much two partitions have in common: cores, or units.
fn common(parts: &[Part], one: usize, other: usize) -> u32 {
    match (cores(parts, one), cores(parts, other)) {
        (Some(one), Some(other)) => one.common(*other).len() as u32,
        _ if one == other => parts.get(one).map_or(0, |part| part.units),
        _ => 0,
    }
}

fn cores(parts: &[Part], index: usize) -> Option<&CoreSet> {
    parts.get(index)?.share.cores()
}

/// The units of all parts together. Units that several parts share count once: a set has a unit for
/// each of its cores, and larger sets come first.
fn all_units(parts: &[Part]) -> u32 {
    let sets: Option<Vec<(CoreSet, u32)>> = parts.iter().map(|part| Some((*part.share.cores()?, part.units))).collect();
    let Some(mut sets) = sets else { return parts.iter().map(|part| part.units).sum() };
    sets.sort_by_key(|(_, units)| std::cmp::Reverse(*units));
    let (mut seen, mut all) = (CoreSet::default(), 0);
    for (set, units) in sets {
        let new = set.without(seen).len();
        all += (units as usize * new / set.len().max(1)) as u32;
        seen = seen.with(set);
    }
    all
}

#[cfg(test)]
mod tests;
