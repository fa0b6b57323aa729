//! A model version on one device, with everything that its launches need.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use downbeat_core::device::{LaneSpec, Launch, PartitionId, Span};
use downbeat_core::{LatencyProfile, ModelId};
use downbeat_engine::{Lane, Model};
use downbeat_service::metrics::LaneMetrics;
use parking_lot::{Mutex, MutexGuard};

use super::exits::Exit;
use super::request_events::RequestEvents;
use super::tensors::BatchTensors;
use super::work_meter::WorkMeter;
use crate::groups::group_predictor::GroupMember;
use crate::run::model_health::ModelHealth;

/// A model version on one device.
pub struct Placement {
    /// The model's number on the devices.
    pub id: ModelId,
    /// The model's name.
    pub name: String,
    /// The version's number.
    pub version: String,
    /// The loaded model.
    pub model: Arc<dyn Model>,
    /// The number of the device.
    pub device: usize,
    /// The partition that the model came to. A divided device may move it:
    /// [`DeviceHost::partition`](super::DeviceHost::partition) has the present partition.
    pub partition: PartitionId,
    /// The name of its device policy.
    pub policy_name: &'static str,
    /// How its batches are made of requests.
    pub tensors: BatchTensors,
    /// The latencies of its batches.
    pub profile: LatencyProfile,
    /// Compute units beyond which all its lanes together are hardly faster, if known (GSLICE
    /// §2.1.3).
    pub knee: Option<u32>,
    /// The exits by which requests may leave before the last segment.
    pub exits: Arc<[Exit]>,
    /// The metrics of its lanes.
    pub metrics: LaneMetrics,
    /// Counts the model's work on this device.
    pub work: WorkMeter,
    /// Sets how large its batches may be, if a controller outside its policy decides that.
    pub batch_control: OnceLock<BatchControl>,
    /// Hears of its requests.
    pub listener: Option<Arc<dyn RequestEvents>>,
    /// The model's part in operator groups, if its operators run in groups with other models.
    pub group: Option<GroupMember>,
    /// The health of the version.
    pub health: Arc<ModelHealth>,
    /// The engine's warm lanes for batches of the scheduler. Empty if a policy makes the batches:
    /// each of the policy's lanes has an engine's lane of its own.
    pub engines: Arc<EngineLanes>,
    /// Warms up lanes that are made while others serve.
    pub warm_up: WarmUpLanes,
    /// The most rows of a launch that is brief enough for the thread of a frontend; 0: no launch
    /// is.
    pub brief_rows: u32,
}

/// Runs the engine's lanes of a device for the first time, each with its lane's spec.
pub type WarmUpLanes = Arc<dyn Fn(usize, &[LaneSpec], &mut [Box<dyn Lane>]) -> anyhow::Result<()> + Send + Sync>;

/// Hears of a model's batches, before the next one is made: how many items each had, and when it
/// ran.
pub type BatchControl = Box<dyn Fn(&Placement, u32, Span) + Send + Sync>;

impl Placement {
    /// The number of segments that the model is cut into.
    pub fn segments(&self) -> usize {
        self.model.segments()
    }

    /// Reports a whole batch that has run to the batch control.
    pub(super) fn tell_batch(&self, launch: &Launch, span: Span) {
        if let Some(control) = self.batch_control.get().filter(|_| usize::from(launch.segments.end) == self.segments())
        {
            control(self, launch.rows, span);
        }
    }

    /// Why the model can run on this device no more; `None` if it can.
    pub fn lost(&self) -> Option<String> {
        self.model.lost(self.device)
    }
}

/// An engine's lane, which one launch uses at a time.
pub type EngineLane = Mutex<Box<dyn Lane>>;

/// The engine's lanes of a model by partition. The lanes of a partition are alike, so any of them
/// will do.
#[derive(Default)]
pub struct EngineLanes(BTreeMap<PartitionId, Vec<EngineLane>>);

impl EngineLanes {
    pub fn new(lanes: impl IntoIterator<Item = (PartitionId, Vec<Box<dyn Lane>>)>) -> Self {
        let locked = |lanes: Vec<Box<dyn Lane>>| lanes.into_iter().map(Mutex::new).collect();
        EngineLanes(lanes.into_iter().map(|(partition, lanes)| (partition, locked(lanes))).collect())
    }

    /// The partitions that have lanes.
    pub fn partitions(&self) -> impl Iterator<Item = PartitionId> {
        self.0.keys().copied()
    }

    /// An engine's lane for a lane of a partition, locked once no other thread uses it; `None` if
    /// there is none.
    pub fn lane(&self, partition: PartitionId, lane: usize) -> Option<MutexGuard<'_, Box<dyn Lane>>> {
        let lanes = self.0.get(&partition)?;
        let free = lanes.iter().find_map(Mutex::try_lock);
        free.or_else(|| Some(lanes.get(lane % lanes.len().max(1))?.lock()))
    }
}
