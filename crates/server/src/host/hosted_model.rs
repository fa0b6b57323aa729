//! A model version on one device: all that is needed to run its launches there.

use std::sync::Arc;

use downbeat_core::device::PartitionId;
use downbeat_core::{LatencyProfile, ModelId};
use downbeat_engine::{Lane, Model};
use parking_lot::{Mutex, MutexGuard};

use super::exits::Exit;
use super::handoff::Handoff;
use super::lane::Work;
use super::metrics::LaneMetrics;
use super::tensors::BatchTensors;
use crate::model_health::ModelHealth;

/// A model version on one device.
pub struct HostedModel {
    /// The devices' name for it.
    pub id: ModelId,
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The engine's model.
    pub model: Arc<dyn Model>,
    /// The device.
    pub device: usize,
    /// Which part of it, where it is divided.
    pub partition: PartitionId,
    /// The name of the device policy.
    pub policy_name: &'static str,
    /// How its batches are made of requests.
    pub tensors: BatchTensors,
    /// What its batches take.
    pub profile: LatencyProfile,
    /// Where requests may leave before the last segment.
    pub exits: Arc<[Exit]>,
    /// Where to count.
    pub metrics: LaneMetrics,
    /// What becomes of its runs.
    pub health: Arc<ModelHealth>,
    /// The engine's lanes, warm.
    pub engines: Arc<EngineLanes>,
    /// Where the lanes of its own are left their work; none for a model whose batches the scheduler makes.
    pub lanes: Box<[Arc<Handoff<Work>>]>,
}

impl HostedModel {
    /// Segments of the whole model.
    pub fn segments(&self) -> usize {
        self.model.segments()
    }

    /// Why it runs there no more, if that is so.
    pub fn lost(&self) -> Option<String> {
        self.model.lost(self.device)
    }
}

/// An engine's lane that nobody else uses.
pub type HeldLane<'a> = MutexGuard<'a, Box<dyn Lane>>;

/// The engine's lanes of a model.
pub struct EngineLanes {
    lanes: Vec<Mutex<Box<dyn Lane>>>,
    /// Whether they are alike, so that any will do.
    alike: bool,
}

impl EngineLanes {
    /// One for each of a model's own lanes, or some that are alike.
    pub fn new(lanes: Vec<Box<dyn Lane>>, alike: bool) -> Self {
        EngineLanes { lanes: lanes.into_iter().map(Mutex::new).collect(), alike }
    }

    /// The engine's lane for a lane of the device, once nobody else uses it; `None` if there is none.
    pub fn lane(&self, lane: usize) -> Option<HeldLane<'_>> {
        if !self.alike {
            return Some(self.lanes.get(lane)?.lock());
        }
        let free = self.lanes.iter().find_map(Mutex::try_lock);
        free.or_else(|| Some(self.lanes.get(lane % self.lanes.len().max(1))?.lock()))
    }
}
