//! What a device policy did to its batches: for logs, metrics and timelines.

use serde::{Deserialize, Serialize};

use super::overlap::GroupPart;
use crate::ids::{BatchId, PartitionId};
use crate::time::Duration;

/// What a device policy did to its batches, beside launching them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Note {
    /// A batch was made of waiting requests (DVABatch §5.1: new).
    New {
        /// The batch.
        batch: BatchId,
        /// Its items.
        rows: u32,
        /// What its members are padded to; 0 where nothing varies.
        length: u32,
    },
    /// Requests join a batch that runs (DVABatch §5.1: stretch).
    Stretch {
        /// The batch.
        batch: BatchId,
        /// Items that join.
        joined: u32,
        /// Items it has then.
        rows: u32,
        /// The stage after which they are together, from 0.
        stage: u16,
    },
    /// A batch is parted into several that run one after another (DVABatch §5.1: split).
    Split {
        /// The batch, which keeps the first part.
        batch: BatchId,
        /// The batches of the other parts.
        into: Vec<BatchId>,
        /// The stage after which it is parted, from 0.
        stage: u16,
    },
    /// Members left a batch before its last stage: answered early, or their clients have gone (DVABatch §9.2).
    Exit {
        /// The batch.
        batch: BatchId,
        /// Items that left.
        rows: u32,
        /// The stage after which they left, from 0.
        stage: u16,
    },
    /// Other lanes are in use from now on (E²bird §7.3.3).
    Switch {
        /// The load, items, that the lanes now in use were chosen for.
        load: u32,
    },
    /// A request found no room in the input ring, and waits with the host until there is.
    RingFull {
        /// Requests that wait for room now.
        waiting: u32,
    },
    /// A group of operators is done (Abacus §6.1); the model is that of its most urgent request.
    Group {
        /// Its operators, the most urgent request first.
        parts: Vec<GroupPart>,
        /// What the predictor said that it takes; `None`: it could not say.
        predicted: Option<Duration>,
        /// What that was taken for, by what groups before it took.
        expected: Option<Duration>,
        /// What it took, from the begin of its first launch to the end of its last.
        took: Duration,
    },
    /// Lanes could not be made: everything stays as it was.
    PrepareFailed {
        /// Where they were to be.
        partition: PartitionId,
        /// Why not, in words.
        reason: String,
    },
}
