//! What batches take on the devices of a simulation: what was planned, or what comes of it beside others.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use downbeat_core::cluster::IndexedHeap;
use downbeat_core::device::{LaneId, SegmentRange};
use downbeat_core::{DeviceId, Duration, ModelId, Time};

use crate::device::{Completed, ContendedDevice, DeviceLimits, EmulatedModel, Work};

/// Emulated devices in partitions, each of which is a device to the scheduler: batches on partitions of one device share its bandwidth and its host.
#[derive(Clone, Debug)]
pub struct SharedDevices {
    /// What each offers.
    pub limits: DeviceLimits,
    /// By device of the scheduler: which of these it is a part of, which part, and of how many compute units.
    pub places: Vec<SharedPlace>,
    /// By model.
    pub models: Vec<EmulatedModel>,
    /// Tokens of a request of a model that has lengths.
    pub length: u32,
}

/// A partition.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedPlace {
    /// Of which device.
    pub device: u32,
    /// Which.
    pub partition: u32,
    /// Its compute units.
    pub units: u32,
    /// Which of the device's lanes runs what is here, one launch at a time.
    pub lane: u32,
}

/// What batches take.
#[derive(Debug)]
pub(crate) enum Execution {
    /// By device: when its batch ends.
    Planned(IndexedHeap<Time>),
    /// Whatever it takes beside the others.
    Shared(Box<SharedExecution>),
}

#[derive(Debug)]
pub(crate) struct SharedExecution {
    shared: Arc<SharedDevices>,
    devices: Vec<ContendedDevice>,
    /// By device: when something changes there.
    events: IndexedHeap<Time>,
    /// By model, items and units.
    works: BTreeMap<(u32, u32, u32), Work>,
    /// Devices of the scheduler whose batches ended at that time.
    ended: (Time, VecDeque<DeviceId>),
}

impl Execution {
    pub fn new(shared: Option<Arc<SharedDevices>>) -> Self {
        let Some(shared) = shared else { return Execution::Planned(IndexedHeap::new()) };
        let count = shared.places.iter().map(|place| place.device + 1).max().unwrap_or(0);
        let mut devices: Vec<ContendedDevice> = (0..count).map(|_| ContendedDevice::new(shared.limits, 1)).collect();
        for SharedPlace { device, partition, units, .. } in &shared.places {
            devices[*device as usize].set_units(Time::ZERO, *partition as usize, *units);
        }
        let (events, works, ended) = (IndexedHeap::new(), BTreeMap::new(), (Time::ZERO, VecDeque::new()));
        Execution::Shared(Box::new(SharedExecution { shared, devices, events, works, ended }))
    }

    /// When to ask [`Self::ended`]; `Time::MAX`: nothing runs.
    pub fn next_event(&self) -> Time {
        match self {
            Execution::Planned(ends) => ends.peek().map_or(Time::MAX, |(at, _)| at),
            Execution::Shared(run) if !run.ended.1.is_empty() => run.ended.0,
            Execution::Shared(run) => run.events.peek().map_or(Time::MAX, |(at, _)| at),
        }
    }

    /// A device whose batch has ended, if one has; at the time that [`Self::next_event`] says.
    pub fn ended(&mut self, now: Time) -> Option<DeviceId> {
        match self {
            Execution::Planned(ends) => ends.pop().map(|(_, device)| DeviceId(device)),
            Execution::Shared(run) => run.ended(now),
        }
    }

    /// A batch begins that was planned to take `took`.
    pub fn start(&mut self, start: Time, device: DeviceId, model: ModelId, size: u32, took: Duration) {
        match self {
            Execution::Planned(ends) => ends.set(device.0, start + took),
            Execution::Shared(run) => run.start(start, device, model, size),
        }
    }

    /// A batch is preempted. Asserts that devices are not shared: what is on its way to a GPU cannot be called back.
    pub fn stop(&mut self, device: DeviceId) {
        let Execution::Planned(ends) = self else { panic!("no batch on a shared device is preempted") };
        ends.remove(device.0);
    }
}

impl SharedExecution {
    fn start(&mut self, now: Time, place: DeviceId, model: ModelId, size: u32) {
        let SharedPlace { device, partition, units, lane } = self.shared.places[place.0 as usize];
        let emulated = &self.shared.models[model.0 as usize];
        let length = self.shared.length;
        let work = self
            .works
            .entry((model.0, size, units))
            .or_insert_with(|| emulated.work(SegmentRange::new(0, emulated.segment_count()), size, length, units));
        let contended = &mut self.devices[device as usize];
        // The token says whose it is.
        contended.launch_in(now, partition as usize, LaneId(lane), u64::from(place.0), work.clone());
        self.expect(device);
    }

    fn ended(&mut self, now: Time) -> Option<DeviceId> {
        if self.ended.1.is_empty()
            && let Some((_, device)) = self.events.pop()
        {
            self.ended.0 = now;
            for completed in self.devices[device as usize].advance(now) {
                if let Completed::Launch { token, .. } = completed {
                    self.ended.1.push_back(DeviceId(token as u32));
                }
            }
            self.expect(device);
        }
        self.ended.1.pop_front()
    }

    fn expect(&mut self, device: u32) {
        match self.devices[device as usize].next_event() {
            Some(at) => self.events.set(device, at),
            None => {
                self.events.remove(device);
            }
        }
    }
}
