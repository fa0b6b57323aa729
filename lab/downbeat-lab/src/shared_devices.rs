//! Emulated devices in partitions, each of which is a device to the cluster scheduler.

use std::collections::{BTreeMap, VecDeque};

use downbeat_core::cluster::IndexedHeap;
use downbeat_core::device::{LaneId, SegmentRange};
use downbeat_core::{DeviceId, ModelId, Time};
use downbeat_sim::{Devices, RunningDevices};

use crate::device::{Completed, ContendedDevice, DeviceLimits, EmulatedModel, Work};

/// Emulated devices in partitions. Each partition is a device to the scheduler. Batches on
/// partitions of one device share its bandwidth and its host.
#[derive(Clone, Debug)]
pub struct SharedDevices {
    /// The limits of each device.
    pub limits: DeviceLimits,
    /// The place of each of the scheduler's devices.
    pub places: Vec<SharedPlace>,
    /// The emulated work of each model.
    pub models: Vec<EmulatedModel>,
    /// Tokens of a request of a model that has lengths.
    pub length: u32,
}

/// A partition of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedPlace {
    /// The number of the device.
    pub device: u32,
    /// The number of the partition on its device.
    pub partition: u32,
    /// Its compute units.
    pub units: u32,
    /// The device's lane that runs the batches of this partition, one launch at a time.
    pub lane: u32,
}

/// The devices of one run.
#[derive(Debug)]
struct SharedExecution {
    shared: SharedDevices,
    devices: Vec<ContendedDevice>,
    /// By device: the time of its next event.
    events: IndexedHeap<Time>,
    /// The work of a batch, by model, items and units.
    works: BTreeMap<(u32, u32, u32), Work>,
    /// The scheduler's devices whose batches ended at this time.
    ended: (Time, VecDeque<DeviceId>),
}

impl Devices for SharedDevices {
    fn start(&self) -> Box<dyn RunningDevices> {
        let count = self.places.iter().map(|place| place.device + 1).max().unwrap_or(0);
        let mut devices: Vec<ContendedDevice> = (0..count).map(|_| ContendedDevice::new(self.limits, 1)).collect();
        for SharedPlace { device, partition, units, .. } in &self.places {
            devices[*device as usize].set_units(Time::ZERO, *partition as usize, *units);
        }
        let (events, works, ended) = (IndexedHeap::new(), BTreeMap::new(), (Time::ZERO, VecDeque::new()));
        Box::new(SharedExecution { shared: self.clone(), devices, events, works, ended })
    }
}

impl RunningDevices for SharedExecution {
    fn next_event(&self) -> Time {
        if self.ended.1.is_empty() { self.events.peek().map_or(Time::MAX, |(at, _)| at) } else { self.ended.0 }
    }

    fn start(&mut self, now: Time, place: DeviceId, model: ModelId, size: u32) {
        let SharedPlace { device, partition, units, lane } = self.shared.places[place.0 as usize];
        let emulated = &self.shared.models[model.0 as usize];
        let length = self.shared.length;
        let work = self
            .works
            .entry((model.0, size, units))
            .or_insert_with(|| emulated.work(SegmentRange::new(0, emulated.segment_count()), size, length, units));
        let contended = &mut self.devices[device as usize];
        // The token names the scheduler's device.
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
}

impl SharedExecution {
    fn expect(&mut self, device: u32) {
        match self.devices[device as usize].next_event() {
            Some(at) => self.events.set(device, at),
            None => {
                self.events.remove(device);
            }
        }
    }
}
