//! The shares of a device's models on its partitions.

use std::collections::{BTreeMap, VecDeque};

use super::batch_control::BatchControl;
use super::controller::Spatial;
use super::decision::{BadShare, ShareReason, SpatialOptions, SpatialOutput};
use super::parts::ShareParts;
use super::shared_model::SpatialModel;
use super::worked::Worked;
use crate::device::launch::Span;
use crate::ids::{ModelId, PartitionId};
use crate::time::{Duration, Time};

/// Makes a control of batch sizes, from the time that a batch may take and the largest batch.
pub type MakeBatchControl = fn(Duration, u32) -> BatchControl;

/// A model that comes to a device with shares.
#[derive(Clone, Debug)]
pub struct SharingModel {
    /// The user's name of the model, which its versions share.
    pub name: String,
    /// The model's partition.
    pub partition: PartitionId,
    /// The model's SLO, if it has one.
    pub slo: Option<Duration>,
    /// The compute units beyond which the model hardly gains; `None`: not known.
    pub knee: Option<u32>,
    /// The control of the model's batches ([`Shares::batch_control`]). `None`: the model's device
    /// policy decides.
    pub batch: Option<BatchControl>,
    /// The model's work so far.
    pub worked: Worked,
}

/// A decision about shares.
#[derive(Clone, PartialEq, Debug)]
pub enum ShareOutput {
    /// Make lanes for the model in a partition, and then call [`Shares::handle_prepared`].
    Prepare {
        /// The model.
        model: ModelId,
        /// The partition.
        partition: PartitionId,
        /// The units of the model's new share, with the reason. `None`: the model keeps its share,
        /// and only moves.
        share: Option<(u32, ShareReason)>,
    },
    /// Change over to the lanes that are ready. For a new share, call [`Shares::handle_switched`].
    Switch {
        /// The model.
        model: ModelId,
        /// The partition of the lanes.
        partition: PartitionId,
        /// The units of the model's new share, with the reason, as in [`ShareOutput::Prepare`].
        share: Option<(u32, Option<ShareReason>)>,
    },
    /// The lanes that are ready are no longer needed.
    Discard {
        /// The model.
        model: ModelId,
    },
    /// The device has no share for the model.
    NoRoom {
        /// The model.
        model: ModelId,
    },
    /// The model's move to the partition that the user chose is over.
    Moved {
        /// The model.
        model: ModelId,
        /// The outcome: the reason why the model stays.
        outcome: Result<(), String>,
    },
    /// The partition that the user chose for the model is not possible, and is forgotten.
    Refused {
        /// The model.
        model: ModelId,
        /// The reason.
        refused: BadShare,
    },
}

/// The state of a model, for reports.
#[derive(Clone, PartialEq, Debug)]
pub struct ShareView {
    /// The compute units that the model runs on; 0: it has no share of its own yet.
    pub units: u32,
    /// The compute units that the model will have.
    pub next_units: u32,
    /// The partition where lanes are being made, or are ready.
    pub preparing: Option<PartitionId>,
    /// The units that the model asked for when it came.
    pub knee: Option<u32>,
    /// The most items of a batch; `None`: the model's device policy decides.
    pub batch_limit: Option<u32>,
    /// The reason for the model's share.
    pub reason: Option<ShareReason>,
    /// The device has too many models: the model has no share.
    pub has_no_room: bool,
}

/// Divides a device among the models that move between its partitions. [`Spatial`] decides the units
/// of each model. This machine chooses the partitions, keeps models where the user put them, and
/// measures in windows.
///
/// **Contract.** Time never goes back. After each `handle_*` call
/// [`poll_output`](Self::poll_output) until it returns `None`, and carry the outputs out. After
/// [`handle_batch`](Self::handle_batch) it suffices to take [`poll_limit`](Self::poll_limit) and to
/// poll the rest soon. Each [`ShareOutput::Prepare`] is answered by one
/// [`handle_prepared`](Self::handle_prepared). The same calls give the same decisions.
#[derive(Debug)]
pub struct Shares {
    spatial: Spatial,
    parts: ShareParts,
    hold_down: Duration,
    make_control: Option<MakeBatchControl>,
    models: BTreeMap<ModelId, Shared>,
    /// The partitions that the user chose for models, by model name.
    by_hand: BTreeMap<String, PartitionId>,
    /// Decisions that [`Self::poll_limit`] left for later.
    postponed: VecDeque<SpatialOutput>,
    limits: VecDeque<(ModelId, u32)>,
    outputs: VecDeque<ShareOutput>,
    /// Whether models may stand in other partitions than they should.
    is_aligned: bool,
}

/// A model that has a share, or waits for one.
#[derive(Debug)]
struct Shared {
    name: String,
    partition: PartitionId,
    knee: Option<u32>,
    /// The partition where its lanes are being made, or are ready.
    to: Option<PartitionId>,
    /// The lanes are for another partition without another share.
    only_moves: bool,
    /// The most items of its batches; `None`: its device policy decides.
    limit: Option<u32>,
    reason: Option<ShareReason>,
    has_no_room: bool,
    /// Whether the user waits for the model's move to the chosen partition.
    is_awaited: bool,
    /// Until then no lanes are made where the model would share less with others.
    failed_until: Time,
    /// The model's work when its window began.
    began: Worked,
}

impl Shares {
    /// Divides these partitions. `by_hand`: the partitions that the user chose, by model name.
    pub fn new(
        parts: ShareParts,
        (hold_down, period): (Duration, Duration),
        make_control: Option<MakeBatchControl>,
        by_hand: BTreeMap<String, PartitionId>,
    ) -> Self {
        let grain = parts.grain();
        let options = SpatialOptions { period, hold_down, ..SpatialOptions::new(parts.all_units().max(grain), grain) };
        Shares {
            spatial: Spatial::new(options),
            parts,
            hold_down,
            make_control,
            models: BTreeMap::new(),
            by_hand,
            postponed: VecDeque::new(),
            limits: VecDeque::new(),
            outputs: VecDeque::new(),
            is_aligned: true,
        }
    }

    /// The control of a model's batches; `None`: the device policy decides, as the model has no SLO
    /// or the options say so. A request waits for the batch before its own: each may take half of
    /// the SLO.
    pub fn batch_control(&self, slo: Option<Duration>, max_batch: u32) -> Option<BatchControl> {
        Some(self.make_control?(half(slo?), max_batch))
    }

    /// Whether the user has chosen a model's partition.
    pub fn is_by_hand(&self, name: &str) -> bool {
        self.by_hand.contains_key(name)
    }

    /// A model's state; `None`: the model does not take part.
    pub fn view(&self, id: ModelId) -> Option<ShareView> {
        let (share, shared) = (self.spatial.share(id)?, self.models.get(&id)?);
        Some(ShareView {
            units: share.active,
            next_units: share.target,
            preparing: shared.to,
            knee: shared.knee,
            batch_limit: shared.limit,
            reason: shared.reason,
            has_no_room: shared.has_no_room,
        })
    }

    /// Adds a model, or removes it (`None`).
    pub fn handle_model(&mut self, now: Time, id: ModelId, comes: Option<SharingModel>) {
        self.is_aligned = false;
        let Some(SharingModel { name, partition, slo, knee, batch, worked }) = comes else {
            self.models.remove(&id);
            self.spatial.handle_model(now, id, None);
            return;
        };
        let knee = knee.map(|knee| knee.clamp(1, self.parts.all_units().max(1)));
        let chosen = self.by_hand.get(&name).map(|to| self.parts.units(to.0 as usize));
        let shared = Shared {
            name,
            partition,
            knee,
            to: None,
            only_moves: false,
            limit: batch.as_ref().map(BatchControl::limit),
            reason: None,
            has_no_room: false,
            is_awaited: false,
            failed_until: Time::ZERO,
            began: worked,
        };
        // Without an SLO, the share must only suffice for the arrivals. Without a batch control,
        // the device policy bounds the batches itself.
        let slo = if batch.is_some() { slo.map(half) } else { slo };
        let slo = slo.unwrap_or(Duration::from_nanos(u64::MAX));
        let comes = SpatialModel { slo, knee, batch: batch.unwrap_or(BatchControl::Fixed(u32::MAX)) };
        self.spatial.handle_model(now, id, Some(comes));
        if let Some(units) = chosen
            && let Err(refused) = self.spatial.handle_share(now, id, Some(units))
        {
            self.by_hand.remove(&shared.name);
            self.outputs.push_back(ShareOutput::Refused { model: id, refused });
        }
        self.models.insert(id, shared);
    }

    /// Puts a model onto a partition, where it stays, or (`None`) leaves it to the device again.
    /// Returns the versions of the model, for which [`ShareOutput::Moved`] follows.
    ///
    /// # Errors
    /// If the model cannot be there because others need a share, too. Then nothing has changed.
    pub fn handle_choice(&mut self, now: Time, name: &str, to: Option<PartitionId>) -> Result<Vec<ModelId>, String> {
        let named = self.models.iter().filter(|(_, shared)| shared.name == name);
        let versions: Vec<ModelId> = named.map(|(id, _)| *id).collect();
        if versions.is_empty() {
            return Err("the model has no share of the device yet, or no lanes of its own that could move; try again later, or give the model another device policy than exclusive".to_owned());
        }
        self.is_aligned = false;
        for id in &versions {
            let set = self.spatial.handle_share(now, *id, to.map(|to| self.parts.units(to.0 as usize)));
            if let Err(refused) = set {
                for id in versions.iter().take_while(|other| *other != id) {
                    // The versions before this one are left to the device again.
                    let _ = self.spatial.handle_share(now, *id, None);
                }
                return Err(refused.to_string());
            }
        }
        match to {
            Some(to) => self.by_hand.insert(name.to_owned(), to),
            None => self.by_hand.remove(name),
        };
        if to.is_none() {
            return Ok(Vec::new());
        }
        self.models.values_mut().filter(|shared| shared.name == name).for_each(|shared| shared.is_awaited = true);
        Ok(versions)
    }

    /// Handles a batch that has run, now or earlier.
    pub fn handle_batch(&mut self, now: Time, id: ModelId, rows: u32, ran: Span) {
        self.spatial.handle_batch(now, id, rows, ran);
    }

    /// Handles the result of a preparation.
    pub fn handle_prepared(&mut self, now: Time, id: ModelId, made: Result<(), String>) {
        self.is_aligned = false;
        let Some(shared) = self.models.get_mut(&id) else { return };
        let Some(to) = shared.to else { return };
        let only_moves = std::mem::take(&mut shared.only_moves);
        if let Err(reason) = &made {
            (shared.to, shared.failed_until) = (None, now + self.hold_down);
            if std::mem::take(&mut shared.is_awaited) {
                let outcome = Err(format!("partition {} cannot be made ready: {reason}", to.0));
                self.outputs.push_back(ShareOutput::Moved { model: id, outcome });
            }
            if self.by_hand.get(&shared.name) == Some(&to) {
                self.by_hand.remove(&shared.name);
                // The model is left to the device again.
                let _ = self.spatial.handle_share(now, id, None);
            }
        } else if only_moves {
            (shared.to, shared.partition) = (None, to);
            self.outputs.push_back(ShareOutput::Switch { model: id, partition: to, share: None });
        }
        if !only_moves {
            self.spatial.handle_prepared(now, id, made.is_ok());
        }
    }

    /// Handles the begin of a model's work on a new share: its work on the former share says nothing
    /// of this one.
    pub fn handle_switched(&mut self, id: ModelId, worked: Worked) {
        if let Some(shared) = self.models.get_mut(&id) {
            shared.began = worked;
        }
    }

    /// Whether the windows of work are over ([`handle_windows`](Self::handle_windows)).
    pub fn is_due(&self, now: Time) -> bool {
        self.spatial.poll_timeout().is_some_and(|(at, _)| at <= now)
    }

    /// Handles the end of a window of each model's work. `work` reads a model's work.
    pub fn handle_windows(&mut self, now: Time, mut work: impl FnMut(ModelId) -> Option<Worked>) {
        for (id, shared) in &mut self.models {
            let Some(worked) = work(*id) else { continue };
            self.spatial.handle_window(*id, &worked.since(&shared.began));
            shared.began = worked;
        }
        self.spatial.handle_timeout(now);
        self.is_aligned = false;
    }

    /// Moves models that are not where they should be, once all decisions are taken.
    pub fn handle_look(&mut self) {
        self.is_aligned = false;
    }

    /// Takes the next limit of a model's batches: the model, and the most items of its batches.
    pub fn poll_limit(&mut self) -> Option<(ModelId, u32)> {
        while let Some(output) = self.spatial.poll_output() {
            match output {
                SpatialOutput::Limit { model, rows } => self.limit(model, rows),
                output => self.postponed.push_back(output),
            }
        }
        self.limits.pop_front()
    }

    /// Whether there are decisions that [`poll_limit`](Self::poll_limit) left for
    /// [`poll_output`](Self::poll_output).
    pub fn has_postponed(&self) -> bool {
        !self.postponed.is_empty()
    }

    /// Takes the next decision. Limits are taken by [`poll_limit`](Self::poll_limit), before this.
    pub fn poll_output(&mut self, now: Time) -> Option<ShareOutput> {
        loop {
            if let Some(output) = self.outputs.pop_front() {
                return Some(output);
            }
            if let Some(output) = self.postponed.pop_front().or_else(|| self.spatial.poll_output()) {
                self.decide(output);
            } else if std::mem::replace(&mut self.is_aligned, true) {
                return None;
            } else {
                self.align(now);
            }
        }
    }

    /// Carries a decision about units over to partitions.
    fn decide(&mut self, output: SpatialOutput) {
        match output {
            SpatialOutput::Prepare { model, units, reason } => {
                let to = self.choose(model, units);
                let Some(shared) = self.models.get_mut(&model) else { return };
                (shared.to, shared.reason, shared.only_moves) = (Some(to), Some(reason), false);
                let share = Some((units, reason));
                self.outputs.push_back(ShareOutput::Prepare { model, partition: to, share });
            }
            SpatialOutput::Switch { model, units } => {
                let Some(shared) = self.models.get_mut(&model) else { return };
                let Some(to) = shared.to.take() else { return };
                (shared.partition, shared.has_no_room) = (to, false);
                let share = Some((units, shared.reason));
                self.outputs.push_back(ShareOutput::Switch { model, partition: to, share });
            }
            SpatialOutput::Discard { model } => {
                let Some(shared) = self.models.get_mut(&model) else { return };
                shared.to = None;
                self.outputs.push_back(ShareOutput::Discard { model });
            }
            SpatialOutput::Limit { model, rows } => self.limit(model, rows),
            SpatialOutput::NoRoom { model } => {
                let Some(shared) = self.models.get_mut(&model) else { return };
                if !std::mem::replace(&mut shared.has_no_room, true) {
                    self.outputs.push_back(ShareOutput::NoRoom { model });
                }
            }
        }
    }

    fn limit(&mut self, model: ModelId, rows: u32) {
        if let Some(shared) = self.models.get_mut(&model)
            && let Some(limit) = &mut shared.limit
            && std::mem::replace(limit, rows) != rows
        {
            self.limits.push_back((model, rows));
        }
    }

    /// Moves models that are not where the user put them, and models that could share less with
    /// others.
    fn align(&mut self, now: Time) {
        let ids: Vec<ModelId> = self.models.keys().copied().collect();
        for id in ids {
            let units = self.spatial.share(id).map_or(0, |share| share.active);
            let Some(shared) = self.models.get(&id).filter(|shared| shared.to.is_none()) else { continue };
            let to = match self.by_hand.get(&shared.name) {
                Some(to) => *to,
                None if units > 0 && now >= shared.failed_until => self.choose(id, units),
                None => continue,
            };
            let Some(shared) = self.models.get_mut(&id) else { continue };
            if shared.partition == to {
                if std::mem::take(&mut shared.is_awaited) {
                    self.outputs.push_back(ShareOutput::Moved { model: id, outcome: Ok(()) });
                }
                continue;
            }
            (shared.to, shared.only_moves) = (Some(to), true);
            self.outputs.push_back(ShareOutput::Prepare { model: id, partition: to, share: None });
        }
    }

    /// Chooses the partition for a number of units of a model. The user's choice wins. Next come
    /// the partitions nearest to that number. Of these the one wins that shares least with the
    /// places of other models. The model's present place wins a tie.
    fn choose(&self, id: ModelId, units: u32) -> PartitionId {
        let me = self.models.get(&id);
        let named = me.and_then(|me| self.by_hand.get(&me.name)).copied();
        if let Some(to) = named.filter(|to| self.parts.units(to.0 as usize) == units) {
            return to;
        }
        let has_share =
            |id: &ModelId| self.spatial.share(*id).is_some_and(|share| share.active > 0 || share.standby.is_some());
        let others = self.models.iter().filter(|(other, _)| **other != id && has_share(other));
        let others: Vec<usize> = others.map(|(_, other)| other.to.unwrap_or(other.partition).0 as usize).collect();
        let here = me.map(|me| me.partition.0 as usize);
        let cost = |index: &usize| {
            let common: u32 = others.iter().map(|other| self.parts.common(*index, *other)).sum();
            (self.parts.units(*index).abs_diff(units), common, here != Some(*index), *index)
        };
        PartitionId((0..self.parts.count()).min_by_key(cost).unwrap_or(0) as u32)
    }
}

fn half(time: Duration) -> Duration {
    Duration::from_nanos(time.as_nanos() / 2)
}
