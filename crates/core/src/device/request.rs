//! A request as a device policy sees it, and the reasons why it may get no answer.

use serde::{Deserialize, Serialize};

use crate::ids::{LaneId, ModelId, RequestId};
use crate::time::{Duration, Time};

/// A request as a device policy sees it: without tensors, only the facts for decisions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceRequest {
    /// The driver's id of the request.
    pub id: RequestId,
    /// The request's model.
    pub model: ModelId,
    /// The deadline of the answer; [`Time::MAX`]: there is none.
    pub deadline: Time,
    /// The request's items: the size of its batch dimension, at least 1.
    pub size: u32,
    /// The size of the dimension that varies between requests and may be padded, such as tokens; 0
    /// if none varies.
    pub length: u32,
}

/// The reason why a request or a granted batch is refused when it comes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
pub enum DeviceReject {
    /// The queue is full.
    #[error("the queue is full: its bound is {bound} items")]
    QueueFull {
        /// The bound.
        bound: u32,
    },
    /// The request has more items than any launch takes.
    #[error("a request of {size} items is larger than the largest batch of {largest}")]
    TooLarge {
        /// The request's items.
        size: u32,
        /// The most items that are allowed.
        largest: u32,
    },
    /// The request has no item.
    #[error("a request has at least one item")]
    Empty,
    /// The request would be late even if it started now and ran alone.
    #[error("the deadline cannot be met: alone it needs {needed} and has {allowed}")]
    DeadlineImpossible {
        /// The latency of the request alone.
        needed: Duration,
        /// The time until its deadline.
        allowed: Duration,
    },
    /// An earlier request with this id is not answered yet.
    #[error("request {0} exists already and is not answered")]
    NameTaken(RequestId),
    /// The model is not on the device, or leaves it.
    #[error("the device does not have model {0}")]
    NoModel(ModelId),
    /// A request for a policy that runs granted batches, or a batch for a policy that makes its
    /// own.
    #[error("model {0} cannot take this: its policy takes either single requests or batches")]
    WrongWay(ModelId),
    /// A batch for a lane that runs one and has another waiting, or for a lane that is not shared.
    #[error("lane {0} takes no batch: the lane has two batches, or is not shared")]
    LaneTaken(LaneId),
}

/// The reason why an accepted request is given up.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum DeviceDrop {
    /// The request can no longer be answered by its deadline.
    Hopeless,
    /// The request's model has left the device.
    Removed,
}
