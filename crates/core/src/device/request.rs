//! A request as a device policy sees it, and why it may get no answer.

use serde::{Deserialize, Serialize};

use crate::ids::{LaneId, ModelId, RequestId};
use crate::time::{Duration, Time};

/// A request as a device policy sees it: no tensors, only what is decided by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceRequest {
    /// The driver's name for it.
    pub id: RequestId,
    /// The model it is for.
    pub model: ModelId,
    /// When it has to be answered; [`Time::MAX`]: whenever.
    pub deadline: Time,
    /// Its items: the size of its batch dimension, at least 1.
    pub size: u32,
    /// The size of the dimension that varies from request to request and may be padded, such as tokens; 0 where there is none.
    pub length: u32,
}

/// Why a request or a granted batch is refused when it comes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
pub enum DeviceReject {
    /// As many items wait as may.
    #[error("the queue is full: its bound is {bound} items")]
    QueueFull {
        /// The bound.
        bound: u32,
    },
    /// It has more items than any launch takes.
    #[error("a request of {size} items is larger than the largest batch of {largest}")]
    TooLarge {
        /// Its items.
        size: u32,
        /// The most there may be.
        largest: u32,
    },
    /// It has no item.
    #[error("a request has at least one item")]
    Empty,
    /// It would be late even if it started now and ran alone.
    #[error("the deadline cannot be met: alone it needs {needed} and has {allowed}")]
    DeadlineImpossible {
        /// What it needs alone.
        needed: Duration,
        /// What its deadline leaves.
        allowed: Duration,
    },
    /// A request of that name is not answered yet.
    #[error("there is a request {0} already that is not answered")]
    NameTaken(RequestId),
    /// The model is not on the device, or leaves it.
    #[error("the device does not have model {0}")]
    NoModel(ModelId),
    /// Requests for a policy that runs batches of others, or the other way round.
    #[error("model {0} is not batched this way: its policy takes either requests or batches")]
    WrongWay(ModelId),
    /// A batch for a lane that runs one and has another waiting, or that is none of those that are shared.
    #[error("lane {0} takes no batch: it has two, or is not shared")]
    LaneTaken(LaneId),
}

/// Why an accepted request is given up.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum DeviceDrop {
    /// It can no longer be answered by its deadline.
    Hopeless,
    /// Its model has left the device.
    Removed,
}
