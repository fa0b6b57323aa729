//! Requests, and the priority levels in which they wait.

use serde::{Deserialize, Serialize};

use crate::ids::{ModelId, RequestId};
use crate::time::Time;

/// A request as the scheduler knows it: no payload, only the fields that decisions need.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the driver. The scheduler only returns the id with its decision.
    pub id: RequestId,
    /// The model whose queue the request joins.
    pub model: ModelId,
    /// When the request's batch must have finished; `Time::MAX`: no deadline.
    pub deadline: Time,
    /// When the request must have left the queue; `Time::MAX`: never.
    pub queue_expiry: Time,
    /// The request's priority level, 0 the highest.
    pub level: u32,
    /// Items of the request: its extent in the batch dimension.
    pub size: u32,
}

/// The queue of one priority level.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PriorityLevel {
    /// The exact bound on the waiting items (requests weighted by size). A request that does not
    /// fit whole is rejected. 0: every request is rejected. `u32::MAX`: no bound.
    pub max_queue: u32,
    /// The action when a request's `queue_expiry` passes.
    pub timeout_action: TimeoutAction,
}

/// The action on a request whose time in the queue is up (Triton's `timeout_action`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum TimeoutAction {
    /// The request is dropped.
    #[default]
    Reject,
    /// The request moves behind all others of its level and stays at the end.
    Delay,
}
