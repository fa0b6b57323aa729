//! What a device policy tells its driver to do.

use serde::{Deserialize, Serialize};

use super::input_ring::SlotRun;
use super::note::Note;
use super::request::DeviceDrop;
use crate::ids::{BatchId, LaneId, LaunchId, ModelId, RequestId};

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
    Ring(SlotRun),
    /// On the device, not in one piece: in slots that are no neighbours, or what an earlier launch left of the members.
    Device,
}

/// Run a range of segments for some requests.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Launch {
    /// Its name, which [`super::DevicePolicy::handle_completion`] takes.
    pub id: LaunchId,
    /// The batch that it is part of.
    pub batch: BatchId,
    /// The model.
    pub model: ModelId,
    /// Where it runs, after what was launched there before.
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

/// What a device policy decided.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum DeviceOutput {
    /// Bring the request's input into these slots of the ring, then call [`super::DevicePolicy::handle_input`]. Inputs are brought
    /// one after another, in the order of these outputs.
    Admit {
        /// The request.
        request: RequestId,
        /// Its slots, one an item.
        slots: SlotRun,
    },
    /// Run this.
    Launch(Launch),
    /// The request's outputs are among those of this completed launch: answer it.
    Reply {
        /// The request.
        request: RequestId,
        /// The launch.
        launch: LaunchId,
    },
    /// The request will not be answered.
    Drop {
        /// The request.
        request: RequestId,
        /// Why.
        reason: DeviceDrop,
    },
    /// What else was decided, for logs and metrics: nothing to carry out.
    Note(Note),
}
