//! A policy at work for a model, on its lanes.

use super::launch::{Launch, Permit, Span};
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
    /// How many times as long as alone its launches took, on average over the latest.
    pub slowdown: f64,
    /// Whether the policy has stopped accepting requests.
    pub leaving: bool,
}

/// The weight of a launch in [`Resident::slowdown`].
const LAUNCH_WEIGHT: f64 = 0.125;
/// A model whose launches take more than this many times as long as alone finds no room on its
/// device.
const SLOW: f64 = 1.1;

impl Resident {
    pub fn model(&self) -> ModelId {
        self.key.model
    }

    /// Counts a launch that had its lane for `span`, and that takes `alone` on an idle device.
    pub fn count_launch(&mut self, span: Span, alone: Duration) {
        if alone > Duration::ZERO {
            let took = span.end.since(span.start).as_secs_f64() / alone.as_secs_f64();
            self.slowdown += LAUNCH_WEIGHT * (took.max(1.0) - self.slowdown);
        }
    }

    /// Whether its launches take much longer than alone.
    pub fn is_slow(&self) -> bool {
        self.slowdown > SLOW
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
