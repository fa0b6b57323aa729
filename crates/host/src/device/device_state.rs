//! The state of a device that its lock guards: its scheduler, and the tables of its models,
//! requests and lanes.

use std::collections::BTreeMap;
use std::sync::Arc;

use downbeat_core::device::{
    DeviceDrop, DeviceOutput, DeviceReject, DeviceScheduler, LaneId, LaneSpec, Launch, Note, PartitionId, RingRun, Span,
};
use downbeat_core::journal::Journal;
use downbeat_core::journal::device::{DeviceInput, DeviceRefusal};
use downbeat_core::{DeviceId, ModelId, RequestId, Time};
use downbeat_service::report::device_report::{GroupedModel, GroupsReport};
use smallvec::SmallVec;

use super::answering::Alone;
use super::crew::Seat;
use super::launch::{Grant, Head, Outcome, Work};
use super::placement::Placement;
use super::request_table::{Entry, RequestTable};
use crate::request::batch_codec::Admitted;

/// The state of a device that its lock guards: its scheduler, and the tables of its models,
/// requests and lanes.
pub struct DeviceState {
    pub journal: Journal<DeviceScheduler>,
    pub models: BTreeMap<ModelId, Hosted>,
    pub table: RequestTable,
    /// By the scheduler's name for the lane.
    pub lanes: Vec<Option<HostLane>>,
    /// The lanes that the cluster's scheduler grants: they run the batches that it makes, of any
    /// model.
    pub slots: Vec<(DeviceId, LaneId)>,
    /// Some models have batches of the cluster's scheduler, and others have lanes of their own. The
    /// scheduler must then know the load of these lanes.
    pub is_mixed: bool,
    /// By model: the callback to call when the lanes for its move are made.
    pub moves: BTreeMap<ModelId, MoveReady>,
    /// When the alarm will next wake by itself.
    pub alarm_at: Time,
    pub stopped: bool,
}

pub struct Hosted {
    pub model: Arc<Placement>,
    pub running: u32,
}

/// A lane that has a thread.
#[derive(Clone)]
pub struct HostLane {
    pub seat: Arc<Seat>,
    /// Which of its model's lanes it is, or of its partition's slots.
    pub index: usize,
    /// The lane's partition.
    pub partition: PartitionId,
    /// The grant of the batch that is about to be launched on this lane.
    pub grant: Option<Grant>,
}

/// Decisions that were taken under the lock and are carried out after it.
#[derive(Default)]
pub struct Actions {
    pub writes: SmallVec<[Write; 1]>,
    /// Lanes that have got another launch.
    pub launches: SmallVec<[Arc<Seat>; 2]>,
    pub prepares: Vec<Preparation>,
    /// Lanes that have gone.
    pub ends: Vec<HostLane>,
    pub replies: Vec<Entry>,
    pub drops: Vec<(Entry, DeviceDrop)>,
    /// When the last decision was taken.
    pub decided: Time,
}

/// Lanes that a policy of a model has asked for.
pub struct Preparation {
    pub model: Arc<Placement>,
    pub partition: PartitionId,
    /// The scheduler's numbers for the lanes; `specs`: the kind of each.
    pub lanes: Vec<LaneId>,
    pub specs: Vec<LaneSpec>,
}

/// Hears that lanes are ready in another partition, or why they could not be made.
pub type MoveReady = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Inputs on their way into the ring.
pub struct Write {
    pub model: Arc<Placement>,
    pub request: RequestId,
    pub slots: RingRun,
    /// `None`: the client has gone.
    pub input: Option<Admitted>,
}

impl Write {
    /// Copies the inputs into the slots. Returns whether the slots hold them now.
    pub fn copy(&self) -> bool {
        self.input.as_ref().is_some_and(|input| self.model.tensors.write(input, self.slots))
    }
}

impl DeviceState {
    /// No models and no lanes.
    pub fn new(journal: Journal<DeviceScheduler>) -> Self {
        DeviceState {
            journal,
            models: BTreeMap::new(),
            table: RequestTable::default(),
            lanes: Vec::new(),
            slots: Vec::new(),
            moves: BTreeMap::new(),
            is_mixed: false,
            alarm_at: Time::MAX,
            stopped: false,
        }
    }

    /// Lanes of a model, in their order.
    pub fn put_lanes(&mut self, lanes: &[LaneId], started: Vec<Arc<Seat>>) {
        assert_eq!(lanes.len(), started.len(), "each lane of a policy has a thread");
        for (index, (lane, seat)) in lanes.iter().zip(started).enumerate() {
            self.put_lane(*lane, seat, index);
        }
    }

    pub fn put_lane(&mut self, lane: LaneId, seat: Arc<Seat>, index: usize) {
        let place = lane.0 as usize;
        if self.lanes.len() <= place {
            self.lanes.resize(place + 1, None);
        }
        let partition = self.scheduler().lane(lane).map_or(PartitionId::default(), |spec| spec.partition);
        self.lanes[place] = Some(HostLane { seat, index, partition, grant: None });
    }

    /// Whether there are models whose batches the scheduler makes, and others.
    pub fn has_both_kinds(&self) -> bool {
        let mut own = self.models.keys().map(|model| !self.scheduler().lanes(*model).is_empty());
        own.next().is_some_and(|first| own.any(|other| other != first))
    }

    /// Tells the scheduler how to make operator groups of the resident models.
    pub fn tell_groups(&mut self, now: Time) {
        let members =
            || self.models.values().filter_map(|resident| Some((&resident.model, resident.model.group.as_ref()?)));
        let Some((_, first)) = members().next() else { return };
        let fitting = members().filter(|(_, group)| group.misfit.is_none());
        let models: Vec<(ModelId, &str)> = fitting.map(|(model, _)| (model.id, &*model.name)).collect();
        let settings = first.predictor.settings(&models);
        self.tell(now, DeviceInput::Groups(settings));
    }

    /// Reports on the operator groups of the resident models; `None`: no model runs in groups.
    pub fn groups(&self) -> Option<GroupsReport> {
        let members =
            self.models.values().filter_map(|resident| Some((&resident.model, resident.model.group.as_ref()?)));
        let mut report: Option<GroupsReport> = None;
        for (model, group) in members {
            let report = report.get_or_insert_with(|| group.predictor.report(self.scheduler().groups()));
            let (model, version) = (model.name.clone(), model.version.clone());
            report.models.push(GroupedModel { model, version, alone: group.misfit.clone() });
        }
        report
    }

    /// Tells the group predictor the time that a group took, if it knows all models of the group.
    fn hear_of_group(&self, model: &Placement, note: &Note) {
        let (Note::Group { parts, predicted: Some(_), took, .. }, Some(group)) = (note, &model.group) else { return };
        group.predictor.serves(parts, *took, |model| {
            let model = &self.models.get(&model)?.model;
            model.group.as_ref().filter(|group| group.misfit.is_none()).map(|_| &*model.name)
        });
    }

    pub fn scheduler(&self) -> &DeviceScheduler {
        self.journal.machine()
    }

    /// The partition where a model's launches go.
    pub fn partition(&self, model: &Placement) -> PartitionId {
        let first = self.scheduler().lanes(model.id).first();
        first.and_then(|lane| self.scheduler().lane(*lane)).map_or(model.partition, |spec| spec.partition)
    }

    /// Tells the scheduler something that it cannot refuse.
    pub fn tell(&mut self, now: Time, input: DeviceInput) {
        let told = self.journal.apply(now, input);
        assert!(told.is_ok(), "only layouts, models, requests and batches are refused");
    }

    /// Gives the scheduler a request or a batch, which it may refuse.
    pub fn take(&mut self, now: Time, input: DeviceInput) -> Result<(), DeviceReject> {
        match self.journal.apply(now, input) {
            Ok(_) => Ok(()),
            Err(DeviceRefusal::Request(reject)) => Err(reject),
            Err(other) => panic!("a request or a batch is not refused as {other}"),
        }
    }

    /// Notes whether the inputs of a request have been copied into its slots. If not, its launch
    /// takes the inputs themselves. Returns the write, whose memory the caller frees.
    pub fn written(&mut self, now: Time, mut write: Write, written: bool) -> Write {
        if let Some(entry) = self.table.get(write.request) {
            entry.slots = written.then_some(write.slots);
            // Later segments may fail when the slots have long been given to others.
            if !written || write.model.segments() > 1 {
                entry.input = write.input.take();
            }
        }
        self.tell(now, DeviceInput::Input(write.model.id, write.request));
        write
    }

    /// Ends a launch. If it failed as a whole, returns the requests to answer at once: the ones
    /// that ran alone, and the ones that failed.
    pub fn end_launch(&mut self, now: Time, launch: &Launch, span: Span, outcome: Outcome) -> Alone {
        let Outcome { members, answers, failed, alone, exits, state, phases } = outcome;
        let (mut answered, mut failures) = (Vec::new(), Vec::new());
        if let Some(resident) = self.models.get_mut(&launch.model) {
            resident.running -= 1;
        }
        for (request, reason) in failed {
            // The cancellation comes before the completion, so that the request goes no further.
            self.tell(now, DeviceInput::Cancel(launch.model, request));
            failures.extend(self.table.remove(request).map(|entry| (entry, reason)));
        }
        for (request, outputs) in answers {
            if alone {
                self.tell(now, DeviceInput::Cancel(launch.model, request));
                answered.extend(self.table.remove(request).map(|entry| (entry, outputs)));
            } else {
                self.table.answer(request, outputs, span.start, phases);
            }
        }
        if let Some(state) = state {
            self.table.keep(members, state, span.start, phases);
        }
        let leave = exits.iter().map(|(request, _)| *request).collect();
        for (request, outputs) in exits {
            self.table.exit(request, outputs);
        }
        self.tell(now, DeviceInput::Completion { launch: launch.id, span, exits: leave });
        (answered, failures)
    }

    /// Puts a launch on its lane, behind the waiting ones.
    fn put_launch(&mut self, launch: Launch) -> Option<Arc<Seat>> {
        let lane = self.lanes.get_mut(launch.lane.0 as usize)?.as_mut()?;
        let (seat, index, partition, grant) = (lane.seat.clone(), lane.index, lane.partition, lane.grant.take());
        let resident = self.models.get_mut(&launch.model)?;
        resident.running += 1;
        let (model, body) = (resident.model.clone(), self.table.take_body(&launch));
        seat.put(Work { head: Head { launch, lane: index, partition, model, grant }, body });
        Some(seat)
    }

    /// Takes the decisions about `device`.
    pub fn take_outputs(&mut self, now: Time, device: usize, actions: &mut Actions) {
        while let Some(output) = self.journal.poll() {
            match output {
                DeviceOutput::Admit { model, request, slots } => {
                    let Some(model) = self.models.get(&model).map(|resident| resident.model.clone()) else { continue };
                    let input = self.table.get(request).and_then(|entry| entry.input.take());
                    let is_quick = model.tensors.writes_quickly(slots);
                    let write = Write { model, request, slots, input };
                    if is_quick {
                        // Copied under the lock: taking the lock again would take longer.
                        let written = write.copy();
                        self.written(now, write, written);
                    } else {
                        actions.writes.push(write);
                    }
                }
                DeviceOutput::Launch(launch) => actions.launches.extend(self.put_launch(launch)),
                DeviceOutput::Group(launches) => {
                    actions.launches.extend(launches.into_iter().filter_map(|launch| self.put_launch(launch)));
                }
                DeviceOutput::Free { lanes, .. } => {
                    let gone = lanes.iter().filter_map(|lane| self.lanes.get_mut(lane.0 as usize)?.take());
                    actions.ends.extend(gone);
                }
                DeviceOutput::Reply { request, .. } => actions.replies.extend(self.table.remove(request)),
                DeviceOutput::Drop { request, reason } => {
                    actions.drops.extend(self.table.remove(request).map(|entry| (entry, reason)));
                }
                DeviceOutput::Note { model, note } => {
                    if let Some(Hosted { model, .. }) = self.models.get(&model) {
                        model.metrics.record_note(&note);
                        self.hear_of_group(model, &note);
                        if let Note::PrepareFailed { partition, reason } = &note {
                            let name = &model.name;
                            tracing::warn!(model = %name, device, %partition, %reason, "lanes cannot be made; the model keeps its present lanes");
                        }
                    }
                }
                DeviceOutput::Prepare { model, lanes, partition } => {
                    let specs = lanes.iter().filter_map(|lane| self.scheduler().lane(*lane)).collect();
                    match self.models.get(&model) {
                        Some(Hosted { model, .. }) => {
                            actions.prepares.push(Preparation { model: model.clone(), partition, lanes, specs });
                        }
                        None => self.tell(now, DeviceInput::Prepared(model, Err("the model goes".to_owned()))),
                    }
                }
                // The model's policy launches on the other lanes from now on; `Free` reports when
                // the earlier lanes are done.
                DeviceOutput::Switch { model, to, .. } => {
                    let partition = to.first().and_then(|lane| self.scheduler().lane(*lane)).map(|lane| lane.partition);
                    if let Some((Hosted { model, .. }, partition)) = self.models.get(&model).zip(partition) {
                        model.metrics.record_switch();
                        model.listener.iter().for_each(|listener| listener.moved(now, device, partition));
                        tracing::info!(model = %model.name, device, %partition, "the model runs on other lanes from now on");
                    }
                }
            }
        }
    }
}
