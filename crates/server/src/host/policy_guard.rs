//! Watches the requests of a model whose policy was chosen for it: whether it is better than `exclusive` would be.

use std::sync::Arc;

use downbeat_core::device::{AutoGuard, GuardEnd, GuardOptions, GuardReport, GuardState, PartitionId};
use downbeat_core::{Duration, ModelId, RequestId, Time};
use parking_lot::Mutex;

use super::device_host::DeviceHost;
use super::occupancy::Occupancy;
use crate::clock::Clock;

/// The guard of a model version, on all its devices.
pub struct PolicyGuard {
    clock: Clock,
    guard: Mutex<AutoGuard>,
    devices: Devices,
}

/// Where a model is.
struct Devices {
    occupancies: Box<[Arc<Occupancy>]>,
    partition: PartitionId,
    model: ModelId,
}

impl Devices {
    /// How long they have been busy for other models by now, on average.
    fn others(&self, now: Time) -> Duration {
        let busy = self.occupancies.iter().map(|device| device.others(now, self.partition, self.model));
        let sum = busy.fold(Duration::ZERO, |sum, busy| sum + busy);
        Duration::from_nanos(sum.as_nanos() / (self.occupancies.len() as u64).max(1))
    }
}

impl PolicyGuard {
    /// Of a model in a partition of these devices.
    pub fn new(
        options: GuardOptions,
        clock: Clock,
        model: ModelId,
        partition: PartitionId,
        hosts: &[Arc<DeviceHost>],
    ) -> Self {
        let occupancies = hosts.iter().map(|host| host.occupancy.clone()).collect();
        let devices = Devices { occupancies, partition, model };
        PolicyGuard { clock, guard: Mutex::new(AutoGuard::new(options)), devices }
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
        self.guard.lock().handle_request(now, request, rows, deadline, || self.devices.others(now));
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
        let PolicyGuard { clock, guard, devices } = &*self.guard;
        let mut guard = guard.lock();
        // Read under the lock: for the guard time never goes back.
        let now = clock.now();
        guard.handle_end(now, self.request, self.end, || devices.others(now));
    }
}
