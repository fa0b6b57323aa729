//! What one device runs: its models, each with a policy, on lanes that they share.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::groups::{GroupDecision, GroupSettings, GroupStats};
use super::lanes::Device;
use super::launch::{GrantedBatch, LaneSpec, Span};
use super::note::Note;
use super::output::DeviceOutput;
use super::overlap::OverlapOutput;
use super::policy::DevicePolicy;
use super::request::{DeviceDrop, DeviceReject, DeviceRequest};
use super::request_pool::PoolStats;
use super::resident::{Resident, ResidentKey, Standby};
use super::segment_profile::SegmentProfile;
use super::turn::{DeviceTimeout, Turn};
use crate::ids::{LaneId, LaunchId, ModelId, PartitionId, RequestId};
use crate::time::{Duration, Time};

/// The largest number of shared lanes of a device.
const MOST_SHARED_LANES: u64 = 1 << 16;

/// How a device is divided.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Layout {
    /// By partition: how many lanes it has that are for batches which somebody else makes ([`DeviceScheduler::handle_batch`]).
    pub shared_lanes: Vec<u32>,
}

/// Why a layout cannot be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadLayout {
    /// Nothing could run.
    #[error("a device has at least one partition")]
    Empty,
    /// More lanes than a device may have.
    #[error("{0} shared lanes are more than the {MOST_SHARED_LANES} that a device may have")]
    TooMany(u64),
    /// A model is in a partition that would go.
    #[error("partition {partition} cannot go: model {model} is there; move it, or take it off the device first")]
    InUse {
        /// The partition.
        partition: PartitionId,
        /// The model.
        model: ModelId,
    },
}

/// A model that comes to a device.
#[derive(Debug)]
pub struct DeviceModel {
    /// What decides about it; fresh.
    pub policy: Box<dyn DevicePolicy>,
    /// What its segments take, for forecasts.
    pub profile: SegmentProfile,
    /// Where its lanes are.
    pub partition: PartitionId,
}

impl DeviceModel {
    /// In the whole of a device that is not divided.
    pub fn new(policy: impl DevicePolicy + 'static, profile: SegmentProfile) -> Self {
        DeviceModel { policy: Box::new(policy), profile, partition: PartitionId::default() }
    }
}

/// Why a model cannot move to another partition.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadMove {
    /// There is no such model, or it is leaving.
    #[error("the device does not have model {0}")]
    NoModel(ModelId),
    /// There is no such partition.
    #[error("the device has no partition {0}")]
    NoPartition(PartitionId),
    /// It has no lanes of its own that could move.
    #[error("{0} runs on shared lanes, which do not move with it: give it a policy that makes batches")]
    SharedLanes(ModelId),
    /// Other lanes are being made for it.
    #[error("lanes are being made for {0}: wait until they are")]
    Busy(ModelId),
}

/// Why a model cannot have a policy on a device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadPolicy {
    /// There is no such partition.
    #[error("the device has no partition {0}")]
    NoPartition(PartitionId),
    /// Its options are none.
    #[error("the device policy '{policy}' cannot have this model: {reason}")]
    Options {
        /// The policy.
        policy: &'static str,
        /// What is in the way.
        reason: String,
    },
}

/// What one device runs: the models that are on it, a [`DevicePolicy`] for each, and its lanes.
///
/// Contract. Time never goes back from one call to the next. After each `handle_*` call [`poll_output`](Self::poll_output) until it gives
/// nothing, carry the outputs out in their order, then ask [`poll_timeout`](Self::poll_timeout) when to call
/// [`handle_timeout`](Self::handle_timeout). Same calls, same outputs.
///
/// A request that was accepted gets exactly one of a [`DeviceOutput::Reply`], a [`DeviceOutput::Drop`], or a `true` from
/// [`handle_cancel`](Self::handle_cancel); so does each member of an accepted batch. Ids are the device's: a request's is unique among all that are not
/// answered, whatever their models. A lane holds one launch that runs and at most one that waits behind it.
///
/// A model that goes is let go of as soon as nothing of it runs: what waits is dropped, what runs is answered. One that changes gets a
/// policy for what comes from then on, on lanes of its own; what the former has taken in it brings to its end.
#[derive(Debug, Default)]
pub struct DeviceScheduler {
    residents: BTreeMap<ResidentKey, (Resident, Box<dyn DevicePolicy>)>,
    device: Device,
    generations: u32,
    number: u32,
}

impl DeviceScheduler {
    /// A device of one partition without shared lanes, and without models.
    pub fn new() -> Self {
        DeviceScheduler::numbered(0)
    }

    /// The same for the device with this number: the scheduler's log names the device.
    pub fn numbered(number: u32) -> Self {
        let mut scheduler = DeviceScheduler { number, ..DeviceScheduler::default() };
        scheduler.device.share(&[0]);
        scheduler
    }

    /// The number of the device.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Divides the device. Partitions that stay keep their shared lanes, but for those that are too many.
    ///
    /// # Errors
    /// If there would be no partition, or a model is in one that would go; nothing is changed then.
    pub fn handle_layout(&mut self, _now: Time, layout: &Layout) -> Result<(), BadLayout> {
        if layout.shared_lanes.is_empty() {
            return Err(BadLayout::Empty);
        }
        // A partition without lanes counts, too.
        let lanes = layout.shared_lanes.iter().map(|count| u64::from(*count).max(1)).sum();
        if lanes > MOST_SHARED_LANES {
            return Err(BadLayout::TooMany(lanes));
        }
        for (resident, _) in self.residents.values() {
            let standby = resident.standby.as_ref().map(|standby| standby.partition);
            for partition in standby.into_iter().chain([resident.partition]) {
                if partition.0 as usize >= layout.shared_lanes.len() {
                    return Err(BadLayout::InUse { partition, model: resident.key.model });
                }
            }
        }
        self.device.share(&layout.shared_lanes);
        Ok(())
    }

    /// A model comes, or changes; `None`: it goes. One that is not there may go.
    ///
    /// # Errors
    /// If the model cannot be had like this; nothing is changed then.
    pub fn handle_model(&mut self, now: Time, model: ModelId, comes: Option<DeviceModel>) -> Result<(), BadPolicy> {
        if let Some(DeviceModel { partition, .. }) = &comes
            && !self.device.has_partition(*partition)
        {
            return Err(BadPolicy::NoPartition(*partition));
        }
        let goes = comes.is_none();
        let limit = self.of(model).next_back().and_then(|(_, (former, _))| former.limit);
        self.any(model, |scheduler, key| {
            if let Some((resident, _)) = scheduler.residents.get_mut(&key) {
                resident.leaving = true;
            }
            scheduler.tell(key, now, |policy, turn| {
                if goes {
                    policy.drop_waiting(turn, DeviceDrop::Removed);
                }
            });
            false
        });
        if let Some(DeviceModel { policy, profile, partition }) = comes {
            let key = ResidentKey { model, generation: self.generations };
            self.generations += 1;
            let lanes = self.device.add_lanes(key, &policy.lanes(partition));
            if let Some(shared) = policy.in_groups() {
                self.device.groups.set_model(now, model, Some((shared, profile.clone())));
            }
            let resident = Resident { key, profile, partition, lanes, standby: None, limit, leaving: false };
            self.residents.insert(key, (resident, policy));
            if let Some(rows) = limit {
                self.handle_limit(now, model, rows);
            }
        }
        Ok(())
    }

    /// Groups of operators are made like this from now on, for all models that share them ([`overlap`](super::overlap)).
    pub fn handle_groups(&mut self, now: Time, settings: GroupSettings) {
        self.device.groups.set(now, settings);
        self.carry_out_groups(now);
    }

    /// A request came, for a model whose policy makes batches.
    ///
    /// # Errors
    /// If it cannot be accepted; nothing is changed then.
    pub fn handle_request(&mut self, now: Time, request: &DeviceRequest) -> Result<(), DeviceReject> {
        let Some(key) = self.current(request.model) else { return Err(DeviceReject::NoModel(request.model)) };
        self.tell(key, now, |policy, turn| policy.handle_request(turn, request)).unwrap_or(Ok(()))
    }

    /// A batch came that somebody else made, for a model whose policy runs such.
    ///
    /// # Errors
    /// If it cannot be accepted; nothing is changed then.
    pub fn handle_batch(&mut self, now: Time, batch: GrantedBatch) -> Result<(), DeviceReject> {
        let Some(key) = self.current(batch.model) else { return Err(DeviceReject::NoModel(batch.model)) };
        self.tell(key, now, |policy, turn| policy.handle_batch(turn, batch)).unwrap_or(Ok(()))
    }

    /// The input of a request that was to be admitted is on the device. Unknown ones are ignored: it may have been cancelled meanwhile.
    pub fn handle_input(&mut self, now: Time, model: ModelId, request: RequestId) {
        self.any(model, |scheduler, key| {
            scheduler.tell(key, now, |policy, turn| policy.handle_input(turn, request));
            false
        });
    }

    /// A launch is done, which had the device for `span`. `exits`: members whose answer is final already, before the last segment (DVABatch
    /// §9.2). A launch that failed is completed too: the driver answers its members itself, after it has said so by
    /// [`handle_cancel`](Self::handle_cancel). Unknown launches are ignored.
    pub fn handle_completion(&mut self, now: Time, launch: LaunchId, span: Span, exits: &[RequestId]) {
        let Some(key) = self.device.end(now, launch, span) else { return };
        self.tell(key, now, |policy, turn| policy.handle_completion(turn, launch, span, exits));
    }

    /// The client of a request has gone. Says whether it was there: if so it gets neither a reply nor a drop.
    pub fn handle_cancel(&mut self, now: Time, model: ModelId, request: RequestId) -> bool {
        self.any(model, |scheduler, key| {
            scheduler.tell(key, now, |policy, turn| policy.handle_cancel(turn, request)).unwrap_or(false)
        })
    }

    /// The lanes that [`DeviceOutput::Prepare`] asked for are made, or could not be, and why: then all stays as it is. What was not asked for is ignored.
    pub fn handle_prepared(&mut self, now: Time, model: ModelId, made: Result<(), String>) {
        let asked = |resident: &Resident| resident.standby.as_ref().is_some_and(|standby| !standby.ready);
        // Who asked first is answered first.
        let Some(key) = self.of(model).find(|(_, (resident, _))| asked(resident)).map(|(key, _)| *key) else { return };
        let Some((resident, _)) = self.residents.get_mut(&key) else { return };
        let by_policy = resident.standby.as_ref().is_some_and(|standby| standby.by_policy);
        if made.is_ok() && !resident.leaving {
            resident.standby.iter_mut().for_each(|standby| standby.ready = true);
        } else if let Some(Standby { partition, lanes, .. }) = resident.standby.take() {
            self.device.release(&lanes, Some(key));
            if let Err(reason) = made.clone() {
                self.device.push(DeviceOutput::Note { model, note: Note::PrepareFailed { partition, reason } });
            }
        }
        self.tell(key, now, |policy, turn| {
            if by_policy {
                policy.handle_prepared(turn, made.is_ok());
            }
        });
    }

    /// A model is to move to another partition, whatever its policy: asks for the lanes that it needs there, beside those it has
    /// ([`DeviceOutput::Prepare`]). Once they are ready, [`handle_switch`](Self::handle_switch) changes over to them. Lanes that are ready in another partition go; so if it is to stay where it is.
    ///
    /// # Errors
    /// If it cannot; nothing is changed then.
    pub fn handle_move(&mut self, _now: Time, model: ModelId, partition: PartitionId) -> Result<(), BadMove> {
        let key = self.current(model).ok_or(BadMove::NoModel(model))?;
        let (resident, policy) = self.residents.get_mut(&key).ok_or(BadMove::NoModel(model))?;
        if !self.device.has_partition(partition) {
            return Err(BadMove::NoPartition(partition));
        }
        let specs = policy.lanes(partition);
        if specs.is_empty() {
            return Err(BadMove::SharedLanes(model));
        }
        if resident.standby.as_ref().is_some_and(|standby| !standby.ready || standby.by_policy) {
            return Err(BadMove::Busy(model));
        }
        if let Some(Standby { lanes, .. }) = resident.standby.take() {
            self.device.release(&lanes, Some(key));
        }
        if partition != resident.partition {
            self.device.prepare(resident, partition, &specs, false);
        }
        Ok(())
    }

    /// A model runs on the lanes that [`handle_move`](Self::handle_move) asked for from its next launch on (GSLICE §3.2.4). Says whether they were ready.
    pub fn handle_switch(&mut self, _now: Time, model: ModelId) -> bool {
        let Some((resident, _)) = self.current(model).and_then(|key| self.residents.get_mut(&key)) else {
            return false;
        };
        self.device.switch(resident, false)
    }

    /// Batches of a model have at most so many items from now on, also if another policy takes it over meanwhile. Says whether its policy can be limited.
    pub fn handle_limit(&mut self, now: Time, model: ModelId, rows: u32) -> bool {
        let Some(key) = self.current(model) else { return false };
        if let Some((resident, _)) = self.residents.get_mut(&key) {
            resident.limit = Some(rows);
        }
        self.tell(key, now, |policy, turn| policy.handle_limit(turn, rows)).unwrap_or(false)
    }

    /// The time that [`poll_timeout`](Self::poll_timeout) asked for has come. At another time it does no harm.
    pub fn handle_timeout(&mut self, now: Time) {
        let due =
            |(_, policy): &(Resident, Box<dyn DevicePolicy>)| policy.poll_timeout().is_some_and(|(at, _)| at <= now);
        let keys: Vec<ResidentKey> = self.residents.iter().filter(|(_, one)| due(one)).map(|(key, _)| *key).collect();
        for key in keys {
            self.tell(key, now, |policy, turn| policy.handle_timeout(turn));
        }
        if self.device.groups.poll_timeout().is_some_and(|at| at <= now) {
            self.device.groups.timeout(now);
            self.carry_out_groups(now);
        }
    }

    /// The next decision.
    pub fn poll_output(&mut self) -> Option<DeviceOutput> {
        self.device.pop()
    }

    /// When to call [`handle_timeout`](Self::handle_timeout), and why.
    pub fn poll_timeout(&self) -> Option<(Time, DeviceTimeout)> {
        let next_group = self.device.groups.poll_timeout().map(|at| (at, DeviceTimeout::NextGroup));
        self.residents.values().filter_map(|(_, policy)| policy.poll_timeout()).chain(next_group).min()
    }

    /// When the device will probably have done everything that is launched or waits in the model's partition, of whatever model: a request of the
    /// model that came now would begin then. `now` for a model that is not there.
    pub fn free_at(&self, now: Time, model: ModelId) -> Time {
        let Some(partition) = self.of(model).next_back().map(|(_, (resident, _))| resident.partition) else {
            return now;
        };
        now + self.device.left(now, partition) + self.backlog(partition)
    }

    /// The same of a partition, without the batches that were granted: when it will probably have done what models' own policies have launched there or
    /// let wait. `Time::ZERO`: there is nothing of that kind, so that whoever grants batches knows what other work its lanes share the partition with.
    pub fn load(&self, now: Time, partition: PartitionId) -> Time {
        let (left, backlog) = (self.device.own_left(now, partition), self.backlog(partition));
        match left {
            None if backlog == Duration::ZERO => Time::ZERO,
            // An instant ago at the latest, at the beginning of time: there is something.
            left => (now + left.unwrap_or(Duration::ZERO) + backlog).max(Time::from_nanos(1)),
        }
    }

    /// What all policies in a partition have taken in and not launched.
    fn backlog(&self, partition: PartitionId) -> Duration {
        let there = self.residents.values().filter(|(resident, _)| resident.partition == partition);
        there.fold(Duration::ZERO, |sum, (_, policy)| sum + policy.backlog())
    }

    /// The lanes that a model's policy launches on; none for a model that is not there, or that is launched on shared ones.
    pub fn lanes(&self, model: ModelId) -> &[LaneId] {
        self.of(model).next_back().map_or(&[], |(_, (resident, _))| &resident.lanes)
    }

    /// The lanes of a partition that are for batches which somebody else makes.
    pub fn shared_lanes(&self, partition: PartitionId) -> &[LaneId] {
        self.device.shared_lanes(partition)
    }

    /// What a lane is for; `None`: there is no such lane.
    pub fn lane(&self, lane: LaneId) -> Option<LaneSpec> {
        self.device.spec(lane)
    }

    /// What waits where, of a model and all its policies.
    pub fn stats(&self, model: ModelId) -> PoolStats {
        self.of(model).fold(PoolStats::default(), |sum, (_, (_, policy))| sum.and(policy.stats()))
    }

    /// What the groups of operators came to.
    pub fn groups(&self) -> GroupStats {
        self.device.groups.stats()
    }

    /// The policies of a model, former ones first.
    fn of(
        &self,
        model: ModelId,
    ) -> impl DoubleEndedIterator<Item = (&ResidentKey, &(Resident, Box<dyn DevicePolicy>))> {
        let key = |generation| ResidentKey { model, generation };
        self.residents.range(key(0)..=key(u32::MAX))
    }

    /// Asks the policies of a model, former ones first, until one says `true`; says whether one did.
    fn any(&mut self, model: ModelId, mut ask: impl FnMut(&mut Self, ResidentKey) -> bool) -> bool {
        let mut next = ResidentKey { model, generation: 0 };
        let last = ResidentKey { model, generation: u32::MAX };
        while let Some((key, _)) = self.residents.range(next..=last).next() {
            let key = *key;
            if ask(self, key) {
                return true;
            }
            next = ResidentKey { model, generation: key.generation + 1 };
        }
        false
    }

    /// The policy that takes a model's requests.
    fn current(&self, model: ModelId) -> Option<ResidentKey> {
        let (key, (resident, _)) = self.of(model).next_back()?;
        (!resident.leaving).then_some(*key)
    }

    /// Gives a policy its turn, and the others theirs where groups of operators follow from it.
    fn tell<R>(
        &mut self,
        key: ResidentKey,
        now: Time,
        tell: impl FnOnce(&mut dyn DevicePolicy, &mut Turn<'_>) -> R,
    ) -> Option<R> {
        let told = self.tell_one(key, now, tell);
        self.carry_out_groups(now);
        told
    }

    /// Hands out what was decided about groups.
    fn carry_out_groups(&mut self, now: Time) {
        while let Some(output) = self.device.groups.poll() {
            match output {
                OverlapOutput::Run(group) => {
                    group.parts.iter().for_each(|part| self.hand_out(now, part.request, GroupDecision::Run(*part)));
                    let mut launches = self.device.groups.begin(now, group);
                    if launches.len() > 1 {
                        self.device.push(DeviceOutput::Group(launches));
                    } else if let Some(launch) = launches.pop() {
                        self.device.push(DeviceOutput::Launch(launch));
                    }
                }
                OverlapOutput::Drop { request, reason } => {
                    self.hand_out(now, request, GroupDecision::Drop(request, reason));
                }
                // Its policy did when its own launch was done.
                OverlapOutput::Reply { .. } => {}
            }
        }
    }

    fn hand_out(&mut self, now: Time, request: RequestId, decision: GroupDecision) {
        let Some(key) = self.device.groups.owner(request) else { return };
        self.tell_one(key, now, |policy, turn| policy.handle_group(turn, decision));
    }

    fn tell_one<R>(
        &mut self,
        key: ResidentKey,
        now: Time,
        tell: impl FnOnce(&mut dyn DevicePolicy, &mut Turn<'_>) -> R,
    ) -> Option<R> {
        let (resident, policy) = self.residents.get_mut(&key)?;
        let told = tell(&mut **policy, &mut Turn { now, resident, device: &mut self.device });
        if resident.leaving {
            let stats = policy.stats();
            let is_idle = (stats.waiting, stats.running, stats.occupied) == (0, 0, 0);
            if is_idle
                && !self.device.has_launches(key)
                && resident.standby.as_ref().is_none_or(|standby| standby.ready)
            {
                let standby = resident.standby.take().into_iter().flat_map(|standby| standby.lanes);
                let lanes: Vec<LaneId> = std::mem::take(&mut resident.lanes).into_iter().chain(standby).collect();
                self.device.release(&lanes, Some(key));
                self.residents.remove(&key);
                if self.of(key.model).all(|(_, (_, policy))| policy.in_groups().is_none()) {
                    self.device.groups.set_model(now, key.model, None);
                }
            }
        }
        Some(told)
    }
}
