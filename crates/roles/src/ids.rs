//! The names of processes, requests and batches in a cluster.

use downbeat_core::ids::BatchId;
use serde::{Deserialize, Serialize};

use crate::epoch::Epoch;

/// The identity of a process. A process draws it at random when it starts, so a restarted process
/// is a different node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub u64);

/// The cluster-wide name of a request: its frontend, and that frontend's number for the request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct RequestKey {
    /// The frontend that has the client.
    pub frontend: NodeId,
    /// From 0, in the order of arrival at that frontend, never used again.
    pub number: u64,
}

/// The cluster-wide name of a batch: the epoch that planned the batch, and its id in that epoch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct BatchKey {
    /// The epoch that the batch was planned in.
    pub epoch: Epoch,
    /// Unique within the epoch.
    pub batch: BatchId,
}
