//! A policy at work for a model, on its lanes.

use super::launch::{Launch, Permit};
use super::overlap::OverlapModel;
use super::segment_profile::SegmentProfile;
use crate::ids::{LaneId, ModelId, PartitionId};
use crate::time::Duration;

/// The id of a model's policy on a device. A model's former policies may still end their accepted
/// requests.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ResidentKey {
    pub model: ModelId,
    pub generation: u32,
}

/// The decisions about a policy's launches that are left to others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Arbitrated {
    /// The device's arbiter decides when the policy launches what ([`Turn::permit`]). These are the
    /// model's facts for the arbiter.
    ///
    /// [`Turn::permit`]: super::Turn::permit
    pub under: Option<OverlapModel>,
    /// The policy keeps to a limit of its batches ([`Turn::limit`]).
    ///
    /// [`Turn::limit`]: super::Turn::limit
    pub limited: bool,
}

/// A policy at work for a model.
#[derive(Debug)]
pub struct Resident {
    pub key: ResidentKey,
    pub profile: SegmentProfile,
    pub partition: PartitionId,
    pub lanes: Vec<LaneId>,
    pub standby: Option<Standby>,
    pub arbitrated: Arbitrated,
    /// The request that the arbiter permits to launch now.
    pub permit: Option<Permit>,
    /// The most items of a batch, if a limit was set.
    pub limit: Option<u32>,
    /// Whether the policy has stopped accepting requests.
    pub leaving: bool,
}

impl Resident {
    pub fn model(&self) -> ModelId {
        self.key.model
    }

    /// The latency of a launch alone.
    pub fn time(&self, launch: &Launch) -> Duration {
        let from = |segment| self.profile.remaining(segment, launch.computed_rows, launch.length);
        from(launch.segments.first).saturating_sub(from(launch.segments.end))
    }
}

/// The lanes that will replace a policy's own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Standby {
    pub partition: PartitionId,
    pub lanes: Vec<LaneId>,
    /// Whether the lanes have been made.
    pub ready: bool,
}
