//! A model version on one device: all that is needed to run its launches there.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use downbeat_core::device::{LaneSpec, Launch, PartitionId, Span};
use downbeat_core::{Duration, LatencyProfile, ModelId};
use downbeat_engine::{Lane, Model};
use parking_lot::{Mutex, MutexGuard};

use super::exits::Exit;
use super::metrics::LaneMetrics;
use super::policy_guard::PolicyGuard;
use super::tensors::BatchTensors;
use super::work_meter::WorkMeter;
use crate::auto_model::AutoModel;
use crate::group_predictor::GroupMember;
use crate::model_health::ModelHealth;

/// A model version on one device.
pub struct HostedModel {
    /// The devices' name for it.
    pub id: ModelId,
    pub name: String,
    pub version: String,
    pub model: Arc<dyn Model>,
    pub device: usize,
    /// Which part of it it came to, where it is divided: [`DeviceHost::partition`](super::DeviceHost::partition) says where it is.
    pub partition: PartitionId,
    pub policy_name: &'static str,
    /// How its batches are made of requests.
    pub tensors: BatchTensors,
    /// What its batches take.
    pub profile: LatencyProfile,
    /// Compute units beyond which all its lanes together are hardly faster, where that is known (GSLICE §2.1.3).
    pub knee: Option<u32>,
    /// Where requests may leave before the last segment.
    pub exits: Arc<[Exit]>,
    pub metrics: LaneMetrics,
    /// What it has done here.
    pub work: WorkMeter,
    /// Says how large its batches may be, where somebody outside its policy does.
    pub batch_control: OnceLock<BatchControl>,
    /// Watches its policy, where that was chosen for it.
    pub guard: Option<Arc<PolicyGuard>>,
    /// Hears of its launches, where `auto` was asked for.
    pub auto: Option<Arc<AutoModel>>,
    /// Of a model whose operators run in groups with those of others.
    pub group: Option<GroupMember>,
    pub health: Arc<ModelHealth>,
    /// The engine's lanes for the batches that the scheduler makes, warm; none where a policy makes them, whose lanes each have one of their own.
    pub engines: Arc<EngineLanes>,
    /// Runs lanes for the first time that are made while others serve.
    pub warm_up: WarmUpLanes,
    /// The most rows of a launch that is over so soon that the thread of a frontend may run it; 0: none is.
    pub brief_rows: u32,
}

/// Runs the engine's lanes of a device for the first time, each as what it is for.
pub type WarmUpLanes = Arc<dyn Fn(usize, &[LaneSpec], &mut [Box<dyn Lane>]) -> anyhow::Result<()> + Send + Sync>;

/// Hears of a model's batches, before the next one is made: how many items each had, and when it ran.
pub type BatchControl = Box<dyn Fn(&HostedModel, u32, Span) + Send + Sync>;

impl HostedModel {
    pub fn segments(&self) -> usize {
        self.model.segments()
    }

    /// Tells the rehearsal, where it is rehearsed, what a launch took, if it had its partition for itself and went as it should.
    pub(super) fn tell_run(&self, launch: &Launch, took: Duration, alone: bool) {
        let is_whole = usize::from(launch.segments.end - launch.segments.first) == self.segments();
        if let Some(auto) = self.auto.as_ref().filter(|_| is_whole && alone) {
            auto.ran(took.as_secs_f64() / self.profile.latency(launch.computed_rows).as_secs_f64());
        }
    }

    /// Tells of a whole batch that has run.
    pub(super) fn tell_batch(&self, launch: &Launch, span: Span) {
        if let Some(control) = self.batch_control.get().filter(|_| usize::from(launch.segments.end) == self.segments())
        {
            control(self, launch.rows, span);
        }
    }

    /// Why it runs there no more, if that is so.
    pub fn lost(&self) -> Option<String> {
        self.model.lost(self.device)
    }
}

/// An engine's lane, which one launch uses at a time.
pub type EngineLane = Mutex<Box<dyn Lane>>;

/// The engine's lanes of a model by partition. Those of a partition are alike, so that any will do.
#[derive(Default)]
pub struct EngineLanes(BTreeMap<PartitionId, Vec<EngineLane>>);

impl EngineLanes {
    pub fn new(lanes: impl IntoIterator<Item = (PartitionId, Vec<Box<dyn Lane>>)>) -> Self {
        let locked = |lanes: Vec<Box<dyn Lane>>| lanes.into_iter().map(Mutex::new).collect();
        EngineLanes(lanes.into_iter().map(|(partition, lanes)| (partition, locked(lanes))).collect())
    }

    /// Where there are some.
    pub fn partitions(&self) -> impl Iterator<Item = PartitionId> {
        self.0.keys().copied()
    }

    /// The engine's lane for a lane of a partition, once nobody else uses it; `None` if there is none.
    pub fn lane(&self, partition: PartitionId, lane: usize) -> Option<MutexGuard<'_, Box<dyn Lane>>> {
        let lanes = self.0.get(&partition)?;
        let free = lanes.iter().find_map(Mutex::try_lock);
        free.or_else(|| Some(lanes.get(lane % lanes.len().max(1))?.lock()))
    }
}
