//! What is decided about requests.

use serde::{Deserialize, Serialize};

use super::reason::{DispatchReason, DropDetail};
use crate::ids::{BatchId, DeviceId, ModelId, RequestId};
use crate::time::{Duration, Time};

/// A decision.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Output {
    /// Send this batch now. The device runs it once it is there and what was sent before is done.
    Dispatch {
        /// To be named in [`super::Scheduler::handle_completion`].
        batch: BatchId,
        /// Where.
        device: DeviceId,
        /// Of which model.
        model: ModelId,
        /// The requests, in queue order. To be given back with [`super::Scheduler::recycle`].
        members: Vec<RequestId>,
        /// Items: the sum of the members' sizes.
        size: u32,
        /// When it is planned to start: now, without a network.
        start: Time,
        /// `l(size)` on this device; of a probe as far as it is known.
        expected: Duration,
        /// Why now.
        reason: DispatchReason,
    },
    /// This request will not run.
    Drop {
        /// The request.
        request: RequestId,
        /// Its model.
        model: ModelId,
        /// Why.
        reason: DropReason,
        /// The numbers behind it.
        detail: DropDetail,
    },
}

/// Why a request left the queue without running.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum DropReason {
    /// It could not have met its deadline even alone: `now + l(size) > deadline`.
    Hopeless,
    /// It would have held its batch below the target size ([`super::DropPolicy::WindowDrop`]).
    Sacrificed,
    /// Its `queue_expiry` passed, and its level says [`super::TimeoutAction::Reject`].
    QueueTimeout,
    /// Its model was removed.
    ModelRemoved,
    /// It had no deadline, and waited for as long as it may ([`super::ModelOptions::max_wait`]).
    WaitTooLong,
}

/// Why a request was not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum Reject {
    /// Its level's queue has no room.
    #[error("the queue is full: its bound is {bound} items")]
    QueueFull {
        /// [`super::PriorityLevel::max_queue`].
        bound: u32,
    },
    /// It cannot meet its deadline even on an idle device.
    #[error("the deadline cannot be met: execution takes {needed}, {allowed} are left")]
    DeadlineImpossible {
        /// `l(size)`.
        needed: Duration,
        /// Time to the deadline.
        allowed: Duration,
    },
    /// It is larger than a batch may be.
    #[error("the request is larger than the largest batch ({max_batch})")]
    TooLarge {
        /// [`super::ModelOptions::max_batch`].
        max_batch: u32,
    },
    /// There is no such model, or not any more.
    #[error("there is no such model")]
    UnknownModel,
    /// A request of no items.
    #[error("the request has a batch dimension of 0")]
    ZeroSize,
    /// The model has no such priority level.
    #[error("the model has no such priority level")]
    UnknownLevel,
    /// It has no deadline, and what waits before it takes longer than it may wait.
    #[error("it would wait for {wait} or longer; the bound is {bound}")]
    WaitTooLong {
        /// How long what waits before it takes, at least.
        wait: Duration,
        /// How long it may wait ([`super::ModelOptions::max_wait`]).
        bound: Duration,
    },
}

/// A request that left the queue without running.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dropped {
    /// The request.
    pub request: RequestId,
    /// Why.
    pub reason: DropReason,
    /// What it was judged by.
    pub detail: DropDetail,
}

/// A batch that leaves its queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Departure {
    /// Items.
    pub size: u32,
    /// When it gets to its device.
    pub arrives: Time,
    /// When it is planned to start: once it is there and the device is expected to be done with what it has.
    pub start: Time,
    /// `l(size)` on its device; of a probe as far as it is known.
    pub expected: Duration,
    /// Why now.
    pub reason: DispatchReason,
}
