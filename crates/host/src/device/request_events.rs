//! The events of a model's requests on its devices, to which a listener may listen.

use std::sync::Arc;

use downbeat_core::device::{GuardEnd, PartitionId};
use downbeat_core::{RequestId, Time};

/// Hears of the requests that a model's device policy decides about.
pub trait RequestEvents: Send + Sync {
    /// A request of `rows` items is taken in.
    fn begin(&self, now: Time, request: RequestId, rows: u32, deadline: Time);

    /// A request has ended, now.
    fn end(&self, request: RequestId, end: GuardEnd);

    /// The model runs in another partition of a device from now on.
    fn moved(&self, now: Time, device: usize, to: PartitionId);
}

/// A request of whose end a listener hears: when this object is dropped.
pub struct Watched {
    listener: Arc<dyn RequestEvents>,
    request: RequestId,
    end: GuardEnd,
}

impl Watched {
    /// A request that is taken in.
    pub fn begin(listener: &Arc<dyn RequestEvents>, now: Time, request: RequestId, rows: u32, deadline: Time) -> Self {
        listener.begin(now, request, rows, deadline);
        Watched { listener: listener.clone(), request, end: GuardEnd::Gone }
    }

    /// Ends the request now, with this outcome.
    pub fn end(mut self, end: GuardEnd) {
        self.end = end;
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.listener.end(self.request, self.end);
    }
}
