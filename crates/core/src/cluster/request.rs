//! What comes in: requests, and the levels that they wait in.

use serde::{Deserialize, Serialize};

use crate::ids::{ModelId, RequestId};
use crate::time::Time;

/// A request as the scheduler knows it: no payload, only what decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the driver, for the driver: it comes back with the decision, and is not looked at.
    pub id: RequestId,
    /// Whose queue it joins.
    pub model: ModelId,
    /// When the batch it is in must have finished; `Time::MAX`: no deadline.
    pub deadline: Time,
    /// When it must have left the queue; `Time::MAX`: never.
    pub queue_expiry: Time,
    /// Its priority level, 0 the highest.
    pub level: u32,
    /// Items: its extent in the batch dimension.
    pub size: u32,
}

/// The queue of one priority level.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PriorityLevel {
    /// Items (requests weighted by size) that may wait, exactly; a request that does not fit whole is rejected. 0: none may
    /// wait, so that every request is rejected. `u32::MAX`: without a bound.
    pub max_queue: u32,
    /// What happens when a request's `queue_expiry` passes.
    pub timeout_action: TimeoutAction,
}

/// What happens to a request whose time in the queue is up (Triton's `timeout_action`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum TimeoutAction {
    /// It is dropped.
    #[default]
    Reject,
    /// It goes behind all others of its level and stays there.
    Delay,
}
