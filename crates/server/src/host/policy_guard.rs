//! Watches the requests of a model whose policy was chosen for it: whether it is better than `exclusive` would be.

use std::sync::Arc;

use downbeat_core::device::{AutoGuard, GuardEnd, GuardOptions, GuardReport, GuardState};
use downbeat_core::{RequestId, Time};
use parking_lot::Mutex;

use crate::clock::Clock;

/// The guard of a model version, on all its devices.
pub struct PolicyGuard {
    clock: Clock,
    guard: Mutex<AutoGuard>,
}

impl PolicyGuard {
    pub fn new(options: GuardOptions, clock: Clock) -> Self {
        PolicyGuard { clock, guard: Mutex::new(AutoGuard::new(options)) }
    }

    pub fn report(&self) -> GuardReport {
        self.guard.lock().report().clone()
    }

    /// Whether the model is to go back to `exclusive`.
    pub fn has_lost(&self) -> bool {
        self.guard.lock().report().state == GuardState::Back
    }

    /// A request is taken in.
    pub(super) fn begin(self: &Arc<Self>, now: Time, request: RequestId, rows: u32, deadline: Time) -> Watched {
        self.guard.lock().handle_request(now, request, rows, deadline);
        Watched { guard: self.clone(), request, end: GuardEnd::Gone }
    }
}

/// A request that is watched, for as long as this is there.
pub struct Watched {
    guard: Arc<PolicyGuard>,
    request: RequestId,
    end: GuardEnd,
}

impl Watched {
    /// It ends now, and so.
    pub(super) fn end(mut self, end: GuardEnd) {
        self.end = end;
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let mut guard = self.guard.guard.lock();
        // Read under the lock: for the guard time never goes back.
        let now = self.guard.clock.now();
        guard.handle_end(now, self.request, self.end);
    }
}
