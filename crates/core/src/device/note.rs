//! The notes of a device policy about its batches, for logs, metrics and timelines.

use serde::{Deserialize, Serialize};

use super::overlap::GroupPart;
use crate::ids::{BatchId, PartitionId};
use crate::time::Duration;

/// A note of a device policy about its batches, beside the launches.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Note {
    /// A batch was made of waiting requests (DVABatch §5.1: new).
    New {
        /// The batch.
        batch: BatchId,
        /// The batch's items.
        rows: u32,
        /// The length to which members are padded; 0 if no dimension varies.
        length: u32,
    },
    /// Requests join a batch that runs (DVABatch §5.1: stretch).
    Stretch {
        /// The batch.
        batch: BatchId,
        /// The items that join.
        joined: u32,
        /// The batch's items after the join.
        rows: u32,
        /// The stage after which the requests are together, counted from 0.
        stage: u16,
    },
    /// A batch is split into several that run one after another (DVABatch §5.1: split).
    Split {
        /// The batch, which keeps the first part.
        batch: BatchId,
        /// The batches of the other parts.
        into: Vec<BatchId>,
        /// The stage after which the batch is split, counted from 0.
        stage: u16,
    },
    /// Members left a batch before its last stage, because they were answered early or their
    /// clients have gone (DVABatch §9.2).
    Exit {
        /// The batch.
        batch: BatchId,
        /// The items that left.
        rows: u32,
        /// The stage after which they left, counted from 0.
        stage: u16,
    },
    /// Other lanes are in use from now on (E²bird §7.3.3).
    Switch {
        /// The load, in items, for which the new lanes were chosen.
        load: u32,
    },
    /// A request found no room in the input ring. It waits on the host until there is room.
    RingFull {
        /// The requests that now wait for room.
        waiting: u32,
    },
    /// A group of operators is done (Abacus §6.1). The note's model is the model of the group's
    /// most urgent request.
    Group {
        /// The group's operators, the most urgent request first.
        parts: Vec<GroupPart>,
        /// The predicted latency; `None`: the predictor could not tell.
        predicted: Option<Duration>,
        /// The predicted latency, corrected by the latencies of earlier groups.
        expected: Option<Duration>,
        /// The actual latency, from the begin of the first launch to the end of the last.
        took: Duration,
    },
    /// Lanes could not be made, and nothing has changed.
    PrepareFailed {
        /// The partition in which the lanes were wanted.
        partition: PartitionId,
        /// The reason, in words.
        reason: String,
    },
}
