//! The state machine of one device: its models, each with a policy, on lanes that they share.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::arbiter::{ArbiterOutput, DeviceArbiter};
use super::lanes::Device;
use super::launch::{GrantedBatch, LaneSpec, Permit, Span};
use super::note::Note;
use super::output::DeviceOutput;
use super::overlap::{GroupSettings, GroupStats};
use super::overlap_arbiter::OverlapArbiter;
use super::policy::DevicePolicy;
use super::request::{DeviceDrop, DeviceReject, DeviceRequest};
use super::request_pool::PoolStats;
use super::resident::{Resident, ResidentKey, Standby};
use super::segment_profile::SegmentProfile;
use super::turn::{DeviceTimeout, Turn};
use crate::ids::{LaneId, LaunchId, ModelId, PartitionId, RequestId};
use crate::time::{Duration, Time};

/// The most shared lanes of a device.
const MOST_SHARED_LANES: u64 = 1 << 16;

/// The division of a device into partitions.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Layout {
    /// The number of shared lanes of each partition, for batches that the cluster's scheduler makes
    /// ([`DeviceScheduler::handle_batch`]).
    pub shared_lanes: Vec<u32>,
}

/// The reason why a layout is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadLayout {
    /// There is no partition.
    #[error("a device has at least one partition")]
    Empty,
    /// There are more lanes than a device may have.
    #[error("{0} shared lanes are more than the {MOST_SHARED_LANES} that a device may have")]
    TooMany(u64),
    /// The layout would remove a partition that a model is in.
    #[error(
        "partition {partition} cannot be removed: model {model} is there; move the model, or take it off the device first"
    )]
    InUse {
        /// The partition.
        partition: PartitionId,
        /// The model.
        model: ModelId,
    },
}

/// A model for a device.
#[derive(Debug)]
pub struct DeviceModel {
    /// The model's policy, without requests.
    pub policy: Box<dyn DevicePolicy>,
    /// The latencies of the model's segments, for forecasts.
    pub profile: SegmentProfile,
    /// The partition of the model's lanes.
    pub partition: PartitionId,
}

impl DeviceModel {
    /// A model in the only partition of an undivided device.
    pub fn new(policy: impl DevicePolicy + 'static, profile: SegmentProfile) -> Self {
        DeviceModel { policy: Box::new(policy), profile, partition: PartitionId::default() }
    }
}

/// The reason why a model cannot move to another partition.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadMove {
    /// There is no such model, or it is leaving.
    #[error("the device does not have model {0}")]
    NoModel(ModelId),
    /// There is no such partition.
    #[error("the device has no partition {0}")]
    NoPartition(PartitionId),
    /// The model has no lanes of its own to move.
    #[error("{0} runs on shared lanes, which do not move with the model: give the model a policy that makes batches")]
    SharedLanes(ModelId),
    /// Other lanes are being made for the model.
    #[error("lanes are being made for {0}: wait until they are ready")]
    Busy(ModelId),
}

/// The reason why a model cannot have a policy on a device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadPolicy {
    /// There is no such partition.
    #[error("the device has no partition {0}")]
    NoPartition(PartitionId),
    /// The policy's options are invalid.
    #[error("the device policy '{policy}' cannot have this model: {reason}")]
    Options {
        /// The policy.
        policy: &'static str,
        /// The reason, in words.
        reason: String,
    },
}

/// The state machine of one device: its models, a [`DevicePolicy`] for each, and its lanes.
///
/// Contract. Time never goes back from one call to the next. After each `handle_*` call
/// [`poll_output`](Self::poll_output) until it returns `None`. Carry the outputs out in their
/// order. Then ask [`poll_timeout`](Self::poll_timeout) when to call
/// [`handle_timeout`](Self::handle_timeout). The same calls give the same outputs.
///
/// An accepted request gets exactly one of a [`DeviceOutput::Reply`], a [`DeviceOutput::Drop`], or
/// a `true` from [`handle_cancel`](Self::handle_cancel). The same holds for each member of an
/// accepted batch. Request ids are unique among all unanswered requests on the device, across
/// models. A lane holds one launch that runs and at most one that waits behind it.
///
/// A model that is removed goes once none of its launches runs: waiting requests are dropped,
/// running ones are answered. A changed model gets a new policy with its own lanes for later
/// requests. The former policy finishes the requests that it has accepted.
#[derive(Debug, Default)]
pub struct DeviceScheduler {
    residents: BTreeMap<ResidentKey, (Resident, Box<dyn DevicePolicy>)>,
    device: Device,
    /// Decides for all models under it.
    arbiter: Option<Box<dyn DeviceArbiter>>,
    generations: u32,
    number: u32,
}

impl DeviceScheduler {
    /// A device of one partition without shared lanes, and without models.
    pub fn new() -> Self {
        DeviceScheduler::numbered(0)
    }

    /// A new device with this number. The scheduler's log names the device by the number.
    pub fn numbered(number: u32) -> Self {
        let mut scheduler = DeviceScheduler { number, ..DeviceScheduler::default() };
        scheduler.device.share(&[0]);
        scheduler
    }

    /// The number of the device.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Divides the device. Partitions that stay keep their shared lanes, except surplus ones.
    ///
    /// # Errors
    /// If there would be no partition, or too many lanes, or a model is in a partition that would
    /// go. Then nothing has changed.
    pub fn handle_layout(&mut self, _now: Time, layout: &Layout) -> Result<(), BadLayout> {
        if layout.shared_lanes.is_empty() {
            return Err(BadLayout::Empty);
        }
        // A partition without lanes counts as one lane.
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

    /// Adds or changes a model. `None` removes the model, and is ignored for an unknown one.
    ///
    /// # Errors
    /// If the device has no such partition; then nothing has changed.
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
            let arbitrated = policy.arbitrated();
            if let Some(under) = arbitrated.under {
                self.arbiter().handle_model(now, model, Some((under, profile.clone())));
            }
            let (standby, permit, leaving) = (None, None, false);
            let slowdown = 1.0;
            let resident =
                Resident { key, profile, partition, lanes, standby, arbitrated, permit, limit, slowdown, leaving };
            self.residents.insert(key, (resident, policy));
        }
        Ok(())
    }

    /// Sets how groups of operators are formed from now on, for all models that share them
    /// ([`overlap`](super::overlap)).
    pub fn handle_groups(&mut self, now: Time, settings: GroupSettings) {
        self.arbiter().handle_settings(now, settings);
        self.arbitrate(now);
    }

    /// The arbiter, which comes with the first model under it.
    fn arbiter(&mut self) -> &mut dyn DeviceArbiter {
        &mut **self.arbiter.get_or_insert_with(|| Box::new(OverlapArbiter::default()))
    }

    /// Handles the arrival of a request for a model whose policy makes batches.
    ///
    /// # Errors
    /// If the request cannot be accepted; then nothing has changed.
    pub fn handle_request(&mut self, now: Time, request: &DeviceRequest) -> Result<(), DeviceReject> {
        let Some(key) = self.current(request.model) else { return Err(DeviceReject::NoModel(request.model)) };
        let told = self.tell_one(key, now, |policy, turn| policy.handle_request(turn, request)).unwrap_or(Ok(()));
        if told.is_ok() && self.is_under(key) {
            let taken = self.arbiter().handle_request(now, request);
            if let Err(reject) = taken {
                self.tell_one(key, now, |policy, turn| policy.handle_cancel(turn, request.id));
                return Err(reject);
            }
        }
        self.arbitrate(now);
        told
    }

    /// Handles a batch of the cluster's scheduler, for a model whose policy runs granted batches.
    ///
    /// # Errors
    /// If the batch cannot be accepted; then nothing has changed.
    pub fn handle_batch(&mut self, now: Time, batch: GrantedBatch) -> Result<(), DeviceReject> {
        let Some(key) = self.current(batch.model) else { return Err(DeviceReject::NoModel(batch.model)) };
        self.tell(key, now, |policy, turn| policy.handle_batch(turn, batch)).unwrap_or(Ok(()))
    }

    /// Handles the input of an admitted request, which is now on the device. Unknown requests are
    /// ignored, as a request may have been cancelled meanwhile.
    pub fn handle_input(&mut self, now: Time, model: ModelId, request: RequestId) {
        self.any(model, |scheduler, key| {
            scheduler.tell(key, now, |policy, turn| policy.handle_input(turn, request));
            false
        });
    }

    /// Handles the end of a launch that had the device for `span`. `exits` are members whose answer
    /// is final before the last segment (DVABatch §9.2). Before a failed launch ends, the driver
    /// calls [`handle_cancel`](Self::handle_cancel) for its members and answers them itself.
    /// Unknown launches are ignored.
    pub fn handle_completion(&mut self, now: Time, launch: LaunchId, span: Span, exits: &[RequestId]) {
        let Some((key, alone)) = self.device.end(now, launch, span) else { return };
        if let Some((resident, _)) = self.residents.get_mut(&key) {
            resident.count_launch(span, alone);
        }
        let told = self.take_turn(key, now, |policy, turn| policy.handle_completion(turn, launch, span, exits));
        if self.is_under(key)
            && let Some((model, note)) = self.arbiter().handle_completion(now, span)
        {
            self.device.push(DeviceOutput::Note { model, note });
        }
        if told.is_some_and(|((), is_leaving)| is_leaving) {
            self.let_go(key, now);
        }
        self.arbitrate(now);
    }

    /// Handles a request whose client has gone. Returns true if the device had the request, which
    /// then gets neither a reply nor a drop.
    pub fn handle_cancel(&mut self, now: Time, model: ModelId, request: RequestId) -> bool {
        self.any(model, |scheduler, key| {
            let was_there = scheduler.cancel(key, now, request);
            scheduler.arbitrate(now);
            was_there
        })
    }

    /// Handles the result of [`DeviceOutput::Prepare`]: the lanes are made, or the reason why not.
    /// A failure changes nothing. A result that was not asked for is ignored.
    pub fn handle_prepared(&mut self, now: Time, model: ModelId, made: Result<(), String>) {
        let asked = |resident: &Resident| resident.standby.as_ref().is_some_and(|standby| !standby.ready);
        // Results come in the order in which lanes were ordered.
        let Some(key) = self.of(model).find(|(_, (resident, _))| asked(resident)).map(|(key, _)| *key) else { return };
        let Some((resident, _)) = self.residents.get_mut(&key) else { return };
        if made.is_ok() && !resident.leaving {
            resident.standby.iter_mut().for_each(|standby| standby.ready = true);
        } else if let Some(Standby { partition, lanes, .. }) = resident.standby.take() {
            self.device.release(&lanes, Some(key));
            if let Err(reason) = made {
                self.device.push(DeviceOutput::Note { model, note: Note::PrepareFailed { partition, reason } });
            }
        }
        // A leaving policy may have waited for this result only.
        self.tell(key, now, |_, _| ());
    }

    /// Prepares a model's move to another partition, whatever its policy: orders standby lanes
    /// there ([`DeviceOutput::Prepare`]). Once they are ready,
    /// [`handle_switch`](Self::handle_switch) changes over to them. Standby lanes that are ready in
    /// another partition go. They also go if `partition` is the model's own.
    ///
    /// # Errors
    /// If the model cannot move; then nothing has changed.
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
        if resident.standby.as_ref().is_some_and(|standby| !standby.ready) {
            return Err(BadMove::Busy(model));
        }
        if let Some(Standby { lanes, .. }) = resident.standby.take() {
            self.device.release(&lanes, Some(key));
        }
        if partition != resident.partition {
            self.device.prepare(resident, partition, &specs);
        }
        Ok(())
    }

    /// Switches a model to the lanes that [`handle_move`](Self::handle_move) ordered, from its next
    /// launch on (GSLICE §3.2.4). Waiting requests begin there at once. Returns false if the lanes
    /// are not ready.
    pub fn handle_switch(&mut self, now: Time, model: ModelId) -> bool {
        let Some(key) = self.current(model) else { return false };
        let Some((resident, _)) = self.residents.get_mut(&key) else { return false };
        if !self.device.switch(resident) {
            return false;
        }
        self.tell(key, now, |policy, turn| policy.advance(turn));
        true
    }

    /// Limits a model's batches to `rows` items from now on, also under a later policy. Returns
    /// false if its policy cannot be limited.
    pub fn handle_limit(&mut self, now: Time, model: ModelId, rows: u32) -> bool {
        let Some(key) = self.current(model) else { return false };
        let Some((resident, _)) = self.residents.get_mut(&key) else { return false };
        resident.limit = Some(rows);
        if !resident.arbitrated.limited {
            return false;
        }
        self.tell(key, now, |policy, turn| policy.advance(turn));
        true
    }

    /// Handles the time that [`poll_timeout`](Self::poll_timeout) returned. A call at another time
    /// does no harm.
    pub fn handle_timeout(&mut self, now: Time) {
        let due =
            |(_, policy): &(Resident, Box<dyn DevicePolicy>)| policy.poll_timeout().is_some_and(|(at, _)| at <= now);
        let keys: Vec<ResidentKey> = self.residents.iter().filter(|(_, one)| due(one)).map(|(key, _)| *key).collect();
        for key in keys {
            self.tell(key, now, |policy, turn| policy.handle_timeout(turn));
        }
        if let Some(arbiter) = &mut self.arbiter
            && arbiter.poll_timeout().is_some_and(|(at, _)| at <= now)
        {
            arbiter.handle_timeout(now);
            self.arbitrate(now);
        }
    }

    /// Takes the next decision.
    pub fn poll_output(&mut self) -> Option<DeviceOutput> {
        self.device.pop()
    }

    /// When to call [`handle_timeout`](Self::handle_timeout), and the reason.
    pub fn poll_timeout(&self) -> Option<(Time, DeviceTimeout)> {
        let arbiter = self.arbiter.as_ref().and_then(|arbiter| arbiter.poll_timeout());
        self.residents.values().filter_map(|(_, policy)| policy.poll_timeout()).chain(arbiter).min()
    }

    /// When the device will probably have done all that is launched or waits in the model's
    /// partition, of all models. A request of the model that came now would begin then. `now` for
    /// an unknown model.
    pub fn free_at(&self, now: Time, model: ModelId) -> Time {
        let Some(partition) = self.of(model).next_back().map(|(_, (resident, _))| resident.partition) else {
            return now;
        };
        now + self.device.left(now, partition) + self.backlog(partition)
    }

    /// When a partition will probably have done the launched and waiting requests of models' own
    /// policies. Granted batches do not count. `Time::ZERO`: there are no such requests. The
    /// cluster's scheduler learns from this which other work shares the partition with its lanes.
    pub fn load(&self, now: Time, partition: PartitionId) -> Time {
        let (left, backlog) = (self.device.own_left(now, partition), self.backlog(partition));
        match left {
            None if backlog == Duration::ZERO => Time::ZERO,
            // The result is never `Time::ZERO`, even at the beginning of time, as there is work.
            left => (now + left.unwrap_or(Duration::ZERO) + backlog).max(Time::from_nanos(1)),
        }
    }

    /// The latency of all accepted requests without a launch in a partition.
    fn backlog(&self, partition: PartitionId) -> Duration {
        let there = self.residents.values().filter(|(resident, _)| resident.partition == partition);
        there.fold(Duration::ZERO, |sum, (_, policy)| sum + policy.backlog())
    }

    /// The lanes of a model's policy. Empty for an unknown model, or one that runs on shared lanes.
    pub fn lanes(&self, model: ModelId) -> &[LaneId] {
        self.of(model).next_back().map_or(&[], |(_, (resident, _))| &resident.lanes)
    }

    /// The lanes of a partition for batches that the cluster's scheduler makes.
    pub fn shared_lanes(&self, partition: PartitionId) -> &[LaneId] {
        self.device.shared_lanes(partition)
    }

    /// The purpose of a lane; `None`: there is no such lane.
    pub fn lane(&self, lane: LaneId) -> Option<LaneSpec> {
        self.device.spec(lane)
    }

    /// The waiting and running items of a model, over all its policies.
    pub fn stats(&self, model: ModelId) -> PoolStats {
        self.of(model).fold(PoolStats::default(), |sum, (_, (_, policy))| sum.and(policy.stats()))
    }

    /// The counters of the operator groups.
    pub fn groups(&self) -> GroupStats {
        self.arbiter.as_ref().map_or_else(|| OverlapArbiter::default().stats(), |arbiter| arbiter.stats())
    }

    /// The policies of a model, former ones first.
    fn of(
        &self,
        model: ModelId,
    ) -> impl DoubleEndedIterator<Item = (&ResidentKey, &(Resident, Box<dyn DevicePolicy>))> {
        let key = |generation| ResidentKey { model, generation };
        self.residents.range(key(0)..=key(u32::MAX))
    }

    /// Asks the policies of a model, former ones first, until one returns true. Returns whether one
    /// did.
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

    /// The policy that accepts a model's requests.
    fn current(&self, model: ModelId) -> Option<ResidentKey> {
        let (key, (resident, _)) = self.of(model).next_back()?;
        (!resident.leaving).then_some(*key)
    }

    /// Whether a policy is under the device's arbiter.
    fn is_under(&self, key: ResidentKey) -> bool {
        self.arbiter.is_some()
            && self.residents.get(&key).is_some_and(|(resident, _)| resident.arbitrated.under.is_some())
    }

    /// Gives a policy its turn, and then carries out the decisions of the arbiter that follow.
    fn tell<R>(
        &mut self,
        key: ResidentKey,
        now: Time,
        tell: impl FnOnce(&mut dyn DevicePolicy, &mut Turn<'_>) -> R,
    ) -> Option<R> {
        let told = self.tell_one(key, now, tell);
        self.arbitrate(now);
        told
    }

    /// Takes a request from a policy. Returns whether the policy had it.
    fn cancel(&mut self, key: ResidentKey, now: Time, request: RequestId) -> bool {
        let told = self.take_turn(key, now, |policy, turn| policy.handle_cancel(turn, request));
        let Some((was_there, is_leaving)) = told else { return false };
        if was_there && self.is_under(key) {
            self.arbiter().handle_end(now, request);
        }
        if is_leaving {
            self.let_go(key, now);
        }
        was_there
    }

    /// Carries out the decisions of the arbiter.
    fn arbitrate(&mut self, now: Time) {
        while let Some(output) = self.arbiter.as_mut().and_then(|arbiter| arbiter.poll_output()) {
            match output {
                ArbiterOutput::Permit(permits) => {
                    let earlier = self.device.decisions();
                    permits.into_iter().for_each(|(model, permit)| self.permit(now, model, permit));
                    let launches = self.device.join_launches(earlier);
                    self.arbiter().handle_begin(now, launches);
                }
                ArbiterOutput::Drop { model, request, reason } => {
                    if self.any(model, |scheduler, key| scheduler.cancel(key, now, request)) {
                        self.device.push(DeviceOutput::Drop { request, reason });
                    }
                }
            }
        }
    }

    /// Lets the policy of a model that has a request launch it.
    fn permit(&mut self, now: Time, model: ModelId, permit: Permit) {
        self.any(model, |scheduler, key| {
            scheduler.tell_one(key, now, |policy, turn| {
                turn.resident.permit = Some(permit);
                policy.advance(turn);
                turn.resident.permit = None;
            });
            false
        });
    }

    fn tell_one<R>(
        &mut self,
        key: ResidentKey,
        now: Time,
        tell: impl FnOnce(&mut dyn DevicePolicy, &mut Turn<'_>) -> R,
    ) -> Option<R> {
        let (told, is_leaving) = self.take_turn(key, now, tell)?;
        if is_leaving {
            self.let_go(key, now);
        }
        Some(told)
    }

    /// Gives a policy its turn, and tells the arbiter which requests have ended. Returns whether the
    /// policy leaves, too.
    fn take_turn<R>(
        &mut self,
        key: ResidentKey,
        now: Time,
        tell: impl FnOnce(&mut dyn DevicePolicy, &mut Turn<'_>) -> R,
    ) -> Option<(R, bool)> {
        let (resident, policy) = self.residents.get_mut(&key)?;
        let earlier = self.device.decisions();
        let told = tell(&mut **policy, &mut Turn { now, resident, device: &mut self.device });
        if resident.arbitrated.under.is_some()
            && let Some(arbiter) = &mut self.arbiter
        {
            for output in self.device.since(earlier) {
                if let DeviceOutput::Reply { request, .. } | DeviceOutput::Drop { request, .. } = output {
                    arbiter.handle_end(now, *request);
                }
            }
        }
        Some((told, resident.leaving))
    }

    /// Removes a leaving policy that has nothing left to do.
    fn let_go(&mut self, key: ResidentKey, now: Time) {
        let Some((resident, policy)) = self.residents.get_mut(&key) else { return };
        let stats = policy.stats();
        let is_idle = (stats.waiting, stats.running, stats.occupied) == (0, 0, 0);
        if is_idle && !self.device.has_launches(key) && resident.standby.as_ref().is_none_or(|standby| standby.ready) {
            let standby = resident.standby.take().into_iter().flat_map(|standby| standby.lanes);
            let lanes: Vec<LaneId> = std::mem::take(&mut resident.lanes).into_iter().chain(standby).collect();
            self.device.release(&lanes, Some(key));
            self.residents.remove(&key);
            let is_gone = self.of(key.model).all(|(_, (resident, _))| resident.arbitrated.under.is_none());
            if is_gone && let Some(arbiter) = &mut self.arbiter {
                arbiter.handle_model(now, key.model, None);
            }
        }
    }
}
