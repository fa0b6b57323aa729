//! A request in one of the scheduler's queues.

use std::sync::Arc;

use downbeat_core::Time;
use downbeat_core::cluster::Reject;

use crate::request::call::Call;
use crate::request::queue::Queue;

/// A request in one of the scheduler's queues.
pub struct QueuedCall {
    /// The request.
    pub call: Call,
    /// The scheduler's queue for the request's shape.
    pub queue: Arc<Queue>,
    /// Until when the request may wait in the queue; [`Time::MAX`]: for ever.
    pub queue_expiry: Time,
    /// Index of the request's priority level, 0 the most urgent.
    pub level: u32,
    /// Whether the request's items are counted into the queue already
    /// (`LoadedVersion::begin_waiting`).
    pub has_place: bool,
}

impl QueuedCall {
    /// Answers a request that was not admitted.
    pub fn reject(self, reject: &Reject, now: Time) {
        let profile = self.queue.refiner(0, self.queue.placed.home()).lock().profile().clone();
        self.call.reject(reject, &profile, now);
    }
}
