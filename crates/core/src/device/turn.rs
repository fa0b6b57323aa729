//! What a device policy is lent to decide with.

use serde::{Deserialize, Serialize};

use super::groups::GroupEnd;
use super::lanes::Device;
use super::launch::{LaneSpec, Launch, Span};
use super::note::Note;
use super::output::DeviceOutput;
use super::request::{DeviceReject, DeviceRequest};
use super::resident::Resident;
use crate::ids::{BatchId, LaneId, LaunchId, ModelId, PartitionId, RequestId};
use crate::time::Time;

/// Why a device wants to be called at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum DeviceTimeout {
    /// The oldest request has waited for the batch window.
    Window,
    /// A request can no longer be answered in time from then on.
    Hopeless,
    /// A policy looks at itself every so often.
    Period,
    /// A group of operators runs, and the next is to be decided beside it (Abacus §6.3).
    NextGroup,
}

/// What a policy is lent while it decides: the time, the names of what it makes, and the device that takes its decisions.
pub struct Turn<'a> {
    pub(super) now: Time,
    pub(super) resident: &'a mut Resident,
    pub(super) device: &'a mut Device,
}

impl Turn<'_> {
    /// The time.
    pub fn now(&self) -> Time {
        self.now
    }

    /// The model that is decided about.
    pub fn model(&self) -> ModelId {
        self.resident.model()
    }

    /// The model's lanes, in the order of [`super::DevicePolicy::lanes`].
    pub fn lanes(&self) -> &[LaneId] {
        &self.resident.lanes
    }

    /// A name for another batch: unique among all that are made on the device.
    pub fn new_batch(&mut self) -> BatchId {
        self.device.new_batch()
    }

    /// A name for another launch.
    pub fn new_launch(&mut self) -> LaunchId {
        self.device.new_launch()
    }

    /// Whether a lane has room for a launch: runs none, or has none waiting behind it. `false` for a lane that is neither shared nor the model's.
    pub fn has_room(&self, lane: LaneId) -> bool {
        self.device.has_room(lane, self.resident.key)
    }

    /// Runs a launch. Asserts that its lane has room.
    pub fn launch(&mut self, launch: Launch) {
        self.device.begin(self.now, self.resident, &launch);
        self.push(DeviceOutput::Launch(launch));
    }

    /// Runs launches together. Asserts that their lanes have room, and that there are some.
    pub fn launch_together(&mut self, launches: Vec<Launch>) {
        assert!(!launches.is_empty(), "a group has a launch");
        for launch in &launches {
            self.device.begin(self.now, self.resident, launch);
        }
        self.push(DeviceOutput::Group(launches));
    }

    /// A request is to run in groups with those of other models: [`super::DevicePolicy::handle_group`] says what becomes of it.
    ///
    /// # Errors
    /// If it cannot; nothing is changed then.
    pub fn join_groups(&mut self, request: &DeviceRequest) -> Result<(), DeviceReject> {
        self.device.groups.request(self.now, self.resident.key, request)
    }

    /// Nothing more of a request is to run in groups.
    pub fn leave_groups(&mut self, request: RequestId) {
        self.device.groups.forget(self.now, request);
    }

    /// Runs a launch in the group that begins. Asserts that its lane has room.
    pub fn launch_in_group(&mut self, launch: Launch) {
        self.device.begin(self.now, self.resident, &launch);
        self.device.groups.add(launch);
    }

    /// A launch of the group that runs is done.
    pub fn end_in_group(&mut self, span: Span) {
        if let Some(GroupEnd { model, parts, predicted, expected, took }) = self.device.groups.end_part(self.now, span)
        {
            self.push(DeviceOutput::Note { model, note: Note::Group { parts, predicted, expected, took } });
        }
    }

    /// Asks for lanes in another partition, beside those there are. [`super::DevicePolicy::handle_prepared`] says what came of it. `false`, and nothing
    /// changes, if the partition is none, others are being prepared already, or the model leaves.
    pub fn prepare(&mut self, partition: PartitionId, lanes: &[LaneSpec]) -> bool {
        self.device.prepare(self.resident, partition, lanes, true)
    }

    /// Takes the lanes that were prepared in place of those there are, for every launch from now on. `false` if there are none ready.
    pub fn switch(&mut self) -> bool {
        self.device.switch(self.resident, true)
    }

    /// Decides something.
    pub fn push(&mut self, output: DeviceOutput) {
        self.device.push(output);
    }

    /// Says what was done.
    pub fn note(&mut self, note: Note) {
        self.push(DeviceOutput::Note { model: self.model(), note });
    }
}
