//! A launch: segments of a model that run for some requests on a lane.

use serde::{Deserialize, Serialize};

use super::input_ring::RingRun;
use crate::ids::{BatchId, LaneId, LaunchId, ModelId, PartitionId, RequestId};
use crate::time::Time;

/// A contiguous range of a model's segments, never empty.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct SegmentRange {
    /// The first segment.
    pub first: u16,
    /// One past the last segment.
    pub end: u16,
}

impl SegmentRange {
    /// The segments `first..end`.
    pub fn new(first: u16, end: u16) -> Self {
        assert!(first < end, "a launch runs at least one segment");
        SegmentRange { first, end }
    }
}

/// The purpose of a lane, so that a driver can give it a stream, a thread and memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LaneSpec {
    /// The lane's partition.
    pub partition: PartitionId,
    /// The most items of a launch on the lane.
    pub max_rows: u32,
    /// The segments that the lane runs.
    pub segments: SegmentRange,
}

/// The place of a launch's inputs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum InputSource {
    /// On the host. The launch copies them to the device before it computes. If it also runs the
    /// last segment, it copies the outputs back at the end.
    Host,
    /// In neighbouring slots of the input ring, in the order of the members: no copy is needed.
    Ring(RingRun),
    /// On the device, but not in one piece: in slots that are no neighbours, or where an earlier
    /// launch of the members left them.
    Device,
}

/// An order to run a range of segments for some requests.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Launch {
    /// The launch's id, which [`super::DeviceScheduler::handle_completion`] takes.
    pub id: LaunchId,
    /// The launch's batch. The id is unique among all batches on the device, whether made on it or
    /// granted.
    pub batch: BatchId,
    /// The granter's id of the batch ([`GrantedBatch::id`]); `None`: the batch was made on the
    /// device.
    pub granted: Option<BatchId>,
    /// The model.
    pub model: ModelId,
    /// The lane. The launch runs after earlier launches on it; at most one of them is still
    /// running.
    pub lane: LaneId,
    /// The segments to run.
    pub segments: SegmentRange,
    /// The requests of the launch, in the order of their rows.
    pub members: Vec<RequestId>,
    /// The items of all members.
    pub rows: u32,
    /// The items that the launch computes: `rows`, or more if dummies fill it up.
    pub computed_rows: u32,
    /// The length to which the members' varying dimension is padded; 0 if none varies.
    pub length: u32,
    /// The place of the members' inputs.
    pub inputs: InputSource,
}

/// When a launch had the device, by the driver's clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Span {
    /// The begin.
    pub start: Time,
    /// The end.
    pub end: Time,
}

/// A batch that the cluster's scheduler made, to run as it is (Symphony §3.2).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GrantedBatch {
    /// The batch's id at the scheduler. On the device the batch gets another id, like batches made
    /// on the device.
    pub id: BatchId,
    /// The model.
    pub model: ModelId,
    /// The granted lane, one of [`super::DeviceScheduler::shared_lanes`].
    pub lane: LaneId,
    /// The requests of the batch, in the order of their rows.
    pub members: Vec<RequestId>,
    /// The items of all members.
    pub rows: u32,
}

/// A request that its policy may launch now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Permit {
    /// The request.
    pub request: RequestId,
    /// The segments of the launch.
    pub segments: SegmentRange,
}
