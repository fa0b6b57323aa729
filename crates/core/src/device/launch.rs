//! A launch: segments of a model that run for some requests on a lane.

use serde::{Deserialize, Serialize};

use super::input_ring::RingRun;
use crate::ids::{BatchId, LaneId, LaunchId, ModelId, PartitionId, RequestId};
use crate::time::Time;

/// A contiguous range of a model's segments, never empty.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct SegmentRange {
    /// The first.
    pub first: u16,
    /// One past the last.
    pub end: u16,
}

impl SegmentRange {
    /// The segments `first..end`.
    pub fn new(first: u16, end: u16) -> Self {
        assert!(first < end, "a launch runs at least one segment");
        SegmentRange { first, end }
    }
}

/// What a lane is for, so that a driver can give it a stream, a thread and memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LaneSpec {
    /// Where it is.
    pub partition: PartitionId,
    /// The most items of a launch on it.
    pub max_rows: u32,
    /// The segments that it runs.
    pub segments: SegmentRange,
}

/// Where the inputs of a launch are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum InputSource {
    /// With the host: they go to the device in the launch, before it computes; if it runs the last segment too, the outputs come back in it, after.
    Host,
    /// In neighbouring slots of the input ring, in the order of the members: no copy.
    Ring(RingRun),
    /// On the device, not in one piece: in slots that are no neighbours, or what an earlier launch left of the members.
    Device,
}

/// Run a range of segments for some requests.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Launch {
    /// Its name, which [`super::DeviceScheduler::handle_completion`] takes.
    pub id: LaunchId,
    /// The batch that it is part of, by the device's name: unique among all of the device, whoever made them.
    pub batch: BatchId,
    /// What whoever granted the batch calls it ([`GrantedBatch::id`]); `None`: it was made on the device.
    pub granted: Option<BatchId>,
    /// The model.
    pub model: ModelId,
    /// Where it runs, after what was launched there before: at most one that runs.
    pub lane: LaneId,
    /// What it runs.
    pub segments: SegmentRange,
    /// Who is in it, in the order of their rows.
    pub members: Vec<RequestId>,
    /// Items of all members.
    pub rows: u32,
    /// Items that it computes: `rows`, or more where it is filled up with dummies.
    pub computed_rows: u32,
    /// What the members' varying dimension is padded to; 0 where there is none.
    pub length: u32,
    /// Where the members' inputs are.
    pub inputs: InputSource,
}

/// When a launch had the device, by the driver's clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Span {
    /// When it began.
    pub start: Time,
    /// When it ended.
    pub end: Time,
}

/// A batch that somebody else made, to run as it is: the cluster's scheduler (Symphony §3.2).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GrantedBatch {
    /// Its name with whoever made it. On the device it gets another, as batches that are made there do.
    pub id: BatchId,
    /// The model.
    pub model: ModelId,
    /// The lane that it was granted, one of [`super::DeviceScheduler::shared_lanes`].
    pub lane: LaneId,
    /// Who is in it, in the order of their rows.
    pub members: Vec<RequestId>,
    /// Items of all members.
    pub rows: u32,
}
