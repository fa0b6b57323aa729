//! The right to cancel a request.

use std::sync::Arc;

use downbeat_core::{RequestId, Time};
use downbeat_driver::QueueHandle;
use downbeat_service::unanswered::Unanswered;

use crate::device::{DeviceHost, Placement};
use crate::request::version_record::Version;
use crate::scheduler::Driver;

/// The part that decides about a request.
pub enum Decider {
    /// The scheduler: the request is in this queue.
    Scheduler(Arc<Driver>, QueueHandle),
    /// The policy of a model on a device.
    Device(Arc<DeviceHost>, Arc<Placement>),
}

/// The right to cancel a request: by dropping the ticket. The drop also counts the request, in any
/// state.
pub struct Ticket {
    decider: Decider,
    loaded: Arc<Version>,
    request: RequestId,
    arrival: Time,
    /// The count that the end belongs to; `None`: the request is answered.
    end: Option<Unanswered>,
}

impl Ticket {
    /// Makes the ticket of a request that was handed over.
    pub fn new(decider: Decider, loaded: Arc<Version>, request: RequestId, arrival: Time) -> Self {
        Ticket { decider, loaded, request, arrival, end: Some(Unanswered::Cancelled) }
    }

    /// The request is answered: there is nothing left to cancel.
    pub fn close(mut self) {
        self.end = None;
    }

    /// The client's own time for the request is over.
    pub fn time_out(mut self) {
        self.end = Some(Unanswered::Timeout);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(reason) = self.end else { return };
        let now = match &self.decider {
            Decider::Scheduler(driver, _) => driver.clock().now(),
            Decider::Device(host, _) => host.clock.now(),
        };
        self.loaded.record_not_answered(reason, now.since(self.arrival));
        match &self.decider {
            Decider::Scheduler(driver, queue) => driver.cancel(*queue, self.request),
            Decider::Device(host, model) => host.cancel(model, self.request),
        }
    }
}
