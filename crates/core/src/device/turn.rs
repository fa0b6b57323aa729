//! The turn of a device policy: the state that the policy is lent while it decides.

use serde::{Deserialize, Serialize};

use super::lanes::Device;
use super::launch::{Launch, Permit};
use super::note::Note;
use super::output::DeviceOutput;
use super::resident::Resident;
use crate::ids::{BatchId, LaneId, LaunchId, ModelId};
use crate::time::Time;

/// The reason of a device's timeout.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum DeviceTimeout {
    /// The oldest request has waited for the batch window.
    Window,
    /// A request can no longer be answered in time from this instant on.
    Hopeless,
    /// A policy checks itself at regular intervals.
    Period,
    /// A group of operators runs, and the next one must be decided beside it (Abacus §6.3).
    NextGroup,
}

/// The state that a policy is lent while it decides: the time, new ids, and the device that takes
/// its decisions.
pub struct Turn<'a> {
    pub(super) now: Time,
    pub(super) resident: &'a mut Resident,
    pub(super) device: &'a mut Device,
}

impl Turn<'_> {
    /// The current time.
    pub fn now(&self) -> Time {
        self.now
    }

    /// The policy's model.
    pub fn model(&self) -> ModelId {
        self.resident.model()
    }

    /// The model's lanes, in the order of [`super::DevicePolicy::lanes`].
    pub fn lanes(&self) -> &[LaneId] {
        &self.resident.lanes
    }

    /// A new batch id, unique among all batches made on the device.
    pub fn new_batch(&mut self) -> BatchId {
        self.device.new_batch()
    }

    /// A new launch id.
    pub fn new_launch(&mut self) -> LaunchId {
        self.device.new_launch()
    }

    /// The most items of a batch now. Only policies that say so keep to the limit
    /// ([`Arbitrated::limited`](super::Arbitrated::limited)).
    pub fn limit(&self) -> Option<u32> {
        self.resident.limit
    }

    /// The request that the device's arbiter permits to launch now. A policy
    /// under the arbiter ([`Arbitrated::under`](super::Arbitrated::under)) launches nothing else.
    pub fn permit(&self) -> Option<Permit> {
        self.resident.permit
    }

    /// Whether a lane has room for a launch: it runs none, or none waits behind the running one.
    /// `false` for a lane that is neither shared nor the model's.
    pub fn has_room(&self, lane: LaneId) -> bool {
        self.device.has_room(lane, self.resident.key)
    }

    /// Whether launches of other models are under way in the model's partition, and the model's own
    /// launches have lately been slow.
    pub fn is_crowded(&self) -> bool {
        let Resident { key, partition, .. } = &*self.resident;
        self.resident.is_slow() && self.device.has_others(*partition, key.model)
    }

    /// Runs a launch. Asserts that its lane has room.
    pub fn launch(&mut self, launch: Launch) {
        self.device.begin(self.now, self.resident, &launch);
        self.push(DeviceOutput::Launch(launch));
    }

    /// Adds a decision.
    pub fn push(&mut self, output: DeviceOutput) {
        self.device.push(output);
    }

    /// Adds a note.
    pub fn note(&mut self, note: Note) {
        self.push(DeviceOutput::Note { model: self.model(), note });
    }
}
