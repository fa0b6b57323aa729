//! The execution times of batches on simulated devices.

use std::fmt;

use downbeat_core::cluster::IndexedHeap;
use downbeat_core::{DeviceId, Duration, ModelId, Time};

/// Devices with execution times other than planned, such as partitions that disturb each other.
pub trait Devices: fmt::Debug + Send + Sync {
    /// The devices at the start of a run. Nothing runs on them.
    fn start(&self) -> Box<dyn RunningDevices>;
}

/// The devices of one run, and their batches.
pub trait RunningDevices {
    /// The time for the next [`RunningDevices::ended`]; `Time::MAX` if no batch runs.
    fn next_event(&self) -> Time;

    /// Takes a device whose batch has ended, if there is one, at the time of
    /// [`RunningDevices::next_event`].
    fn ended(&mut self, now: Time) -> Option<DeviceId>;

    /// Starts a batch of `size` items.
    fn start(&mut self, now: Time, device: DeviceId, model: ModelId, size: u32);
}

/// The source of the batches' ends.
pub(crate) enum Execution {
    /// Batches end as planned. For each device: the end of its batch.
    Planned(IndexedHeap<Time>),
    /// Batches end when the devices say so.
    Given(Box<dyn RunningDevices>),
}

impl Execution {
    pub fn new(devices: Option<&dyn Devices>) -> Self {
        devices.map_or_else(|| Execution::Planned(IndexedHeap::new()), |devices| Execution::Given(devices.start()))
    }

    pub fn next_event(&self) -> Time {
        match self {
            Execution::Planned(ends) => ends.peek().map_or(Time::MAX, |(at, _)| at),
            Execution::Given(devices) => devices.next_event(),
        }
    }

    pub fn ended(&mut self, now: Time) -> Option<DeviceId> {
        match self {
            Execution::Planned(ends) => ends.pop().map(|(_, device)| DeviceId(device)),
            Execution::Given(devices) => devices.ended(now),
        }
    }

    /// Starts a batch that was planned to take `took`.
    pub fn start(&mut self, start: Time, device: DeviceId, model: ModelId, size: u32, took: Duration) {
        match self {
            Execution::Planned(ends) => ends.set(device.0, start + took),
            Execution::Given(devices) => devices.start(start, device, model, size),
        }
    }

    /// Preempts a batch. Panics on given devices: a batch that is on its way to a GPU cannot be
    /// called back.
    pub fn stop(&mut self, device: DeviceId) {
        let Execution::Planned(ends) = self else { panic!("no batch on given devices is preempted") };
        ends.remove(device.0);
    }
}
