//! Watches the requests of a model whose policy was chosen for it: whether it is better than
//! `exclusive` would be.

use std::sync::Arc;

use downbeat_core::device::{AutoGuard, GuardEnd, GuardOptions, GuardReport, GuardState, PartitionId};
use downbeat_core::{Duration, ModelId, RequestId, Time};
use downbeat_host::device::{DeviceHost, Occupancy, RequestEvents};
use downbeat_service::clock::Clock;
use parking_lot::Mutex;

/// The guard of a model version, on all its devices.
pub struct PolicyGuard {
    clock: Clock,
    guard: Mutex<AutoGuard>,
    devices: Devices,
}

/// The devices of a model.
struct Devices {
    spots: Box<[Spot]>,
    model: ModelId,
}

/// The model's place on a device.
struct Spot {
    device: usize,
    occupancy: Arc<Occupancy>,
    at: Mutex<Stay>,
}

/// Since when it has been in a partition.
#[derive(Clone, Copy)]
struct Stay {
    partition: PartitionId,
    /// How long others had had the partition when it came.
    begin: Duration,
    /// How long others have had its earlier partitions, while it was on them.
    before: Duration,
}

impl Spot {
    /// How long other models have had the model's partitions, while it was on them.
    fn others(&self, now: Time, model: ModelId, stay: &Stay) -> Duration {
        stay.before + self.occupancy.others(now, stay.partition, model).saturating_sub(stay.begin)
    }
}

impl Devices {
    /// How long the devices have been busy for other models by now, on average.
    fn others(&self, now: Time) -> Duration {
        let busy = self.spots.iter().map(|spot| spot.others(now, self.model, &spot.at.lock()));
        let sum = busy.fold(Duration::ZERO, |sum, busy| sum + busy);
        Duration::from_nanos(sum.as_nanos() / (self.spots.len() as u64).max(1))
    }

    fn moved(&self, now: Time, device: usize, to: PartitionId) {
        for spot in self.spots.iter().filter(|spot| spot.device == device) {
            let mut stay = spot.at.lock();
            let (before, begin) = (spot.others(now, self.model, &stay), spot.occupancy.others(now, to, self.model));
            *stay = Stay { partition: to, begin, before };
        }
    }
}

impl PolicyGuard {
    /// Makes the guard of a model in a partition of these devices.
    pub fn new(
        options: GuardOptions,
        clock: Clock,
        model: ModelId,
        partition: PartitionId,
        hosts: &[Arc<DeviceHost>],
    ) -> Self {
        let at = || Mutex::new(Stay { partition, begin: Duration::ZERO, before: Duration::ZERO });
        let spot = |host: &Arc<DeviceHost>| Spot { device: host.device, occupancy: host.occupancy.clone(), at: at() };
        let devices = Devices { spots: hosts.iter().map(spot).collect(), model };
        PolicyGuard { clock, guard: Mutex::new(AutoGuard::new(options)), devices }
    }

    pub fn report(&self) -> GuardReport {
        self.guard.lock().report().clone()
    }

    /// Whether the model must go back to `exclusive`.
    pub fn has_lost(&self) -> bool {
        self.guard.lock().report().state == GuardState::Back
    }
}

impl RequestEvents for PolicyGuard {
    fn begin(&self, now: Time, request: RequestId, rows: u32, deadline: Time) {
        self.guard.lock().handle_request(now, request, rows, deadline, || self.devices.others(now));
    }

    fn end(&self, request: RequestId, end: GuardEnd) {
        let mut guard = self.guard.lock();
        // Read under the lock: for the guard time never goes back.
        let now = self.clock.now();
        guard.handle_end(now, request, end, || self.devices.others(now));
    }

    fn moved(&self, now: Time, device: usize, to: PartitionId) {
        self.devices.moved(now, device, to);
    }
}

#[cfg(test)]
mod tests {
    use downbeat_engine::{Part, Share};
    use downbeat_service::metrics::Metrics;

    use super::*;

    #[test]
    fn what_others_have_of_a_device_is_what_they_have_where_the_model_is() {
        let part = || Part { share: Share::Whole, threads: 1, units: 1, size: String::new() };
        let occupancy = Arc::new(Occupancy::new(Metrics::new().unwrap().device(3), &[part(), part()]));
        let [here, there] = [PartitionId(0), PartitionId(1)];
        let (model, other) = (ModelId(0), ModelId(1));
        let at = |ms: u64| Time::ZERO + Duration::from_millis(ms);
        let stay = Stay { partition: here, begin: Duration::ZERO, before: Duration::ZERO };
        let spot = Spot { device: 3, occupancy: occupancy.clone(), at: Mutex::new(stay) };
        let devices = Devices { spots: [spot].into(), model };
        let runs = |partition, from, until| {
            occupancy.begin(at(from), partition, other);
            occupancy.end(at(until), partition, other);
        };
        runs(there, 0, 500);
        runs(here, 500, 600);
        assert_eq!(devices.others(at(600)), Duration::from_millis(100));
        devices.moved(at(600), 3, there);
        assert_eq!(devices.others(at(600)), Duration::from_millis(100), "it was not there then");
        runs(here, 600, 900);
        runs(there, 900, 950);
        assert_eq!(devices.others(at(950)), Duration::from_millis(150));
        devices.moved(at(950), 2, here);
        runs(there, 950, 960);
        assert_eq!(devices.others(at(960)), Duration::from_millis(160), "another device");
    }
}
