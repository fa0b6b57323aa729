//! The scheduler's decisions about requests.

use serde::{Deserialize, Serialize};

use super::reason::{DispatchReason, DropDetail};
use crate::ids::{BatchId, DeviceId, ModelId, RequestId};
use crate::time::{Duration, Time};

/// A decision about a batch or a request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Output {
    /// Send this batch now. The device runs it once it has arrived and the batches sent before are
    /// done.
    Dispatch {
        /// The id that [`super::Scheduler::handle_completion`] must name.
        batch: BatchId,
        /// The device that runs the batch.
        device: DeviceId,
        /// The batch's model.
        model: ModelId,
        /// The requests, in queue order. The driver should return the vector with
        /// [`super::Scheduler::recycle`].
        members: Vec<RequestId>,
        /// Items: the sum of the members' sizes.
        size: u32,
        /// When the batch is planned to start: now, without a network.
        start: Time,
        /// `l(size)` on this device. With a probe in the batch, only the known part.
        expected: Duration,
        /// Why the batch leaves now.
        reason: DispatchReason,
    },
    /// This request will not run.
    Drop {
        /// The request.
        request: RequestId,
        /// Its model.
        model: ModelId,
        /// Why the request is dropped.
        reason: DropReason,
        /// The numbers behind the reason.
        detail: DropDetail,
    },
}

/// Why a request left the queue without running.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum DropReason {
    /// The request could not have met its deadline even alone: `now + l(size) > deadline`.
    Hopeless,
    /// The request would have held its batch below the target size
    /// ([`super::DropPolicy::WindowDrop`]).
    Sacrificed,
    /// The request's `queue_expiry` passed, and its level says [`super::TimeoutAction::Reject`].
    QueueTimeout,
    /// The request's model was removed.
    ModelRemoved,
    /// The request had no deadline, and waited for as long as allowed
    /// ([`super::ModelOptions::max_wait`]).
    WaitTooLong,
}

/// Why a request was not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum Reject {
    /// The queue of the request's level has no room.
    #[error("the queue is full: its bound is {bound} items")]
    QueueFull {
        /// [`super::PriorityLevel::max_queue`].
        bound: u32,
    },
    /// The request cannot meet its deadline even on an idle device.
    #[error("the deadline cannot be met: execution takes {needed}, {allowed} are left")]
    DeadlineImpossible {
        /// `l(size)`.
        needed: Duration,
        /// Time left until the deadline.
        allowed: Duration,
    },
    /// The request cannot meet its deadline only because messages between the processes of a
    /// cluster take too long. [`super::Scheduler`] itself gives [`Reject::DeadlineImpossible`]; its
    /// caller knows the network.
    #[error("messages take too long for the deadline: {network}, and the execution {needed}; {allowed} are left")]
    NetworkTooSlow {
        /// The least time of messages by fresh measurements.
        network: Duration,
        /// `l(size)`.
        needed: Duration,
        /// Time left until the deadline.
        allowed: Duration,
    },
    /// The request is larger than the largest batch.
    #[error("the request is larger than the largest batch ({max_batch})")]
    TooLarge {
        /// [`super::ModelOptions::max_batch`].
        max_batch: u32,
    },
    /// The model does not exist, or was removed.
    #[error("there is no such model")]
    UnknownModel,
    /// A request of no items.
    #[error("the request has a batch dimension of 0")]
    ZeroSize,
    /// The model has no such priority level.
    #[error("the model has no such priority level")]
    UnknownLevel,
    /// The request has no deadline, and would wait longer than allowed for the requests before it.
    #[error("the request would wait for {wait} or longer; the bound is {bound}")]
    WaitTooLong {
        /// How long the requests before it take, at least.
        wait: Duration,
        /// How long the request may wait ([`super::ModelOptions::max_wait`]).
        bound: Duration,
    },
}

/// A request that left the queue without running.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dropped {
    /// The request.
    pub request: RequestId,
    /// Why the request left.
    pub reason: DropReason,
    /// The numbers behind the reason.
    pub detail: DropDetail,
}

/// A batch that leaves its queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Departure {
    /// Items.
    pub size: u32,
    /// When the batch reaches its device.
    pub arrives: Time,
    /// When the batch is planned to start: once it has arrived and the device is expected to be
    /// done with earlier batches.
    pub start: Time,
    /// `l(size)` on its device. With a probe in the batch, only the known part.
    pub expected: Duration,
    /// Why the batch leaves now.
    pub reason: DispatchReason,
}
