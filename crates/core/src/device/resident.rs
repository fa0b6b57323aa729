//! A policy at work for a model, on its lanes.

use super::launch::Launch;
use super::segment_profile::SegmentProfile;
use crate::ids::{LaneId, ModelId, PartitionId};
use crate::time::Duration;

/// A model's policy on a device: the model may have had others before, which end what they have taken in.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ResidentKey {
    pub model: ModelId,
    pub generation: u32,
}

/// A policy at work for a model.
#[derive(Debug)]
pub struct Resident {
    pub key: ResidentKey,
    pub profile: SegmentProfile,
    pub partition: PartitionId,
    pub lanes: Vec<LaneId>,
    pub standby: Option<Standby>,
    /// The most items of its batches, where that was said.
    pub limit: Option<u32>,
    /// It takes nothing in any more.
    pub leaving: bool,
}

impl Resident {
    pub fn model(&self) -> ModelId {
        self.key.model
    }

    /// What a launch takes alone.
    pub fn time(&self, launch: &Launch) -> Duration {
        let from = |segment| self.profile.remaining(segment, launch.computed_rows, launch.length);
        from(launch.segments.first).saturating_sub(from(launch.segments.end))
    }
}

/// Lanes that a policy has asked for beside its own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Standby {
    pub partition: PartitionId,
    pub lanes: Vec<LaneId>,
    /// They have been made.
    pub ready: bool,
    /// Its policy has asked for them; `false`: whoever divides the device has.
    pub by_policy: bool,
}
