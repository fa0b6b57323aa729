//! What every device policy is, and what it is lent to decide with.

use std::fmt::Debug;

use serde::{Deserialize, Serialize};

use super::lanes::Device;
use super::launch::{DeviceOutput, GrantedBatch, LaneSpec, Launch, Span};
use super::note::Note;
use super::request::{DeviceDrop, DeviceReject, DeviceRequest};
use super::request_pool::PoolStats;
use super::scheduler::Resident;
use crate::ids::{BatchId, LaneId, LaunchId, ModelId, PartitionId, RequestId};
use crate::time::{Duration, Time};

/// Decides what of a model runs on its lanes of a device, and when. A [`DeviceScheduler`](super::DeviceScheduler) drives it, and says what is what in its own contract.
///
/// A request that was accepted gets exactly one of a [`DeviceOutput::Reply`], a [`DeviceOutput::Drop`], or a `true` from
/// [`handle_cancel`](Self::handle_cancel). Same calls, same decisions. A policy may be made of others: it hands them the turn.
pub trait DevicePolicy: Debug + Send {
    /// The lanes that it wants in a partition. It gets as many, in this order, as [`Turn::lanes`]. One that wants none launches on shared ones.
    fn lanes(&self, _partition: PartitionId) -> Vec<LaneSpec> {
        Vec::new()
    }

    /// A request came.
    ///
    /// # Errors
    /// If it cannot be accepted; nothing is changed then.
    fn handle_request(&mut self, turn: &mut Turn<'_>, _: &DeviceRequest) -> Result<(), DeviceReject> {
        Err(DeviceReject::WrongWay(turn.model()))
    }

    /// A batch came that somebody else made.
    ///
    /// # Errors
    /// If it cannot be run; nothing is changed then.
    fn handle_batch(&mut self, turn: &mut Turn<'_>, _: GrantedBatch) -> Result<(), DeviceReject> {
        Err(DeviceReject::WrongWay(turn.model()))
    }

    /// The input of a request that was to be admitted is on the device. Unknown requests are ignored: it may have been cancelled meanwhile.
    fn handle_input(&mut self, _: &mut Turn<'_>, _: RequestId) {}

    /// A launch of its own is done. `exits`: members whose answer is final already, before the last segment (DVABatch §9.2). A launch that failed
    /// is completed too: the driver answers its members itself, and then says so by [`handle_cancel`](Self::handle_cancel).
    fn handle_completion(&mut self, turn: &mut Turn<'_>, launch: LaunchId, span: Span, exits: &[RequestId]);

    /// The client of a request has gone. Says whether it was there: if so it gets neither a reply nor a drop.
    fn handle_cancel(&mut self, turn: &mut Turn<'_>, request: RequestId) -> bool;

    /// The time that [`poll_timeout`](Self::poll_timeout) asked for has come. At another time it does no harm.
    fn handle_timeout(&mut self, _: &mut Turn<'_>) {}

    /// The lanes that [`Turn::prepare`] asked for are there, and [`Turn::switch`] may be called; or they could not be made, which changes nothing.
    fn handle_prepared(&mut self, _: &mut Turn<'_>, _made: bool) {}

    /// Gives up everything that waits for its first launch; what has been launched goes on to its end.
    fn drop_waiting(&mut self, _: &mut Turn<'_>, _: DeviceDrop) {}

    /// When to call [`handle_timeout`](Self::handle_timeout), and why.
    fn poll_timeout(&self) -> Option<(Time, DeviceTimeout)> {
        None
    }

    /// What all that it has taken in and not launched would take of the device, alone and in the largest batches: for forecasts.
    fn backlog(&self) -> Duration {
        Duration::ZERO
    }

    /// What waits where.
    fn stats(&self) -> PoolStats;
}

/// Why a device wants to be called at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum DeviceTimeout {
    /// The oldest request has waited for the batch window.
    Window,
    /// A request can no longer be answered in time from then on.
    Hopeless,
    /// A policy looks at itself every so often.
    Period,
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

    /// The model's lanes, in the order of [`DevicePolicy::lanes`].
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

    /// Asks for lanes in another partition, beside those there are. [`DevicePolicy::handle_prepared`] says what came of it. `false`, and nothing
    /// changes, if the partition is none, others are being prepared already, or the model leaves.
    pub fn prepare(&mut self, partition: PartitionId, lanes: &[LaneSpec]) -> bool {
        self.device.prepare(self.resident, partition, lanes)
    }

    /// Takes the lanes that were prepared in place of those there are, for every launch from now on. `false` if there are none ready.
    pub fn switch(&mut self) -> bool {
        self.device.switch(self.resident)
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
