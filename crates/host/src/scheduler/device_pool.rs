//! The devices that carry out the scheduler's decisions.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use downbeat_core::{BatchId, DeviceId, Duration, Time};
use downbeat_driver::Cluster;
use downbeat_service::clock::Clock;
use parking_lot::{Mutex, RwLock};

use super::rehearser::Rehearser;
use crate::device::{DeviceHost, Grant, OwnLaunch, Ran, SlotEvents};

/// The devices that carry out the scheduler's decisions, with their slots.
pub struct DevicePool {
    /// The clock of all decisions.
    pub clock: Clock,
    /// The device hosts, in order.
    pub hosts: Vec<Arc<DeviceHost>>,
    /// By the scheduler's device id: the device host, and the slot on it.
    pub slots: RwLock<Vec<(Arc<DeviceHost>, usize)>>,
    /// Hears of queues, requests and batches.
    pub rehearser: Arc<Rehearser>,
    /// The devices that the scheduler may use.
    in_service: Mutex<BTreeSet<usize>>,
    /// The callback of a scheduler in another process, which grants the slots instead.
    pub granted_from_afar: OnceLock<HearsOfSlots>,
}

/// The callback for slots that are done with their batches.
pub type HearsOfSlots = Box<dyn Fn(SlotDone) + Send + Sync>;

/// A slot is done with its batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotDone {
    /// The batch.
    pub batch: BatchId,
    /// Items that ran, and the time from the grant to the end; `None`: the run failed.
    pub ran: Option<(u32, Duration)>,
}

impl DevicePool {
    /// The slots of these devices.
    pub fn new(clock: Clock, hosts: Vec<Arc<DeviceHost>>, rehearser: Arc<Rehearser>) -> Self {
        let in_service = hosts.iter().map(|host| host.device).collect();
        DevicePool {
            clock,
            hosts,
            slots: RwLock::default(),
            rehearser,
            in_service: Mutex::new(in_service),
            granted_from_afar: OnceLock::new(),
        }
    }

    /// The slot that a device id of the scheduler stands for. Panics if there is none.
    pub fn slot(&self, slot: DeviceId) -> (Arc<DeviceHost>, usize) {
        let Some(slot) = self.slots.read().get(slot.0 as usize).cloned() else {
            panic!("the scheduler dispatched to a device that it was never given");
        };
        slot
    }

    /// Whether the scheduler may use a device.
    pub fn is_in_service(&self, device: usize) -> bool {
        self.in_service.lock().contains(&device)
    }

    /// Takes a device out of service, unless it is the last one. Returns whether it did.
    pub fn retire(&self, device: usize) -> bool {
        let mut in_service = self.in_service.lock();
        in_service.len() > 1 && in_service.remove(&device)
    }
}

impl SlotEvents for Cluster<DevicePool> {
    fn ran(&self, device: usize, grant: &Grant, Ran { partition, rows, end }: Ran) {
        // The scheduler plans with the time from dispatch to completion, not with the engine's run
        // alone.
        let (queue, rehearser) = (&grant.queue, &self.handler().rehearser);
        let (mut refiner, took) = (queue.refiner(device, partition).lock(), end.since(grant.dispatched));
        if rehearser.listens() {
            rehearser.ran(queue.place, took.as_secs_f64() / refiner.profile().latency(rows).as_secs_f64());
        }
        let is_new = refiner.observe(rows, took, end).is_some();
        drop(refiner);
        if is_new {
            let profiles = queue.placed.profiles(|site| queue.refiners[site].lock().profile().clone());
            rehearser.profiled(queue.place, profiles.clone());
            self.set_profile(queue.place, profiles);
        }
    }

    fn done(&self, grant: &Grant, at: Time, ran: Option<Ran>, own: &mut OwnLaunch) {
        let (pool, queue) = (self.handler(), &grant.queue);
        if pool.rehearser.listens() {
            pool.rehearser.answered(queue.place, at, grant.requests, false);
        }
        match pool.granted_from_afar.get() {
            None => self.complete(grant.slot, grant.batch, own),
            Some(hears) => {
                let ran = ran.map(|ran| (ran.rows, ran.end.since(grant.dispatched)));
                hears(SlotDone { batch: grant.batch, ran });
            }
        }
    }

    /// Takes the slots out of service, unless they are the last: those stay, to answer queued
    /// requests with errors.
    fn lost(&self, device: usize, slots: &[DeviceId]) {
        if self.handler().retire(device) {
            tracing::error!(device, "the device is lost and out of service");
            slots.iter().for_each(|slot| self.remove_device(*slot));
        }
    }

    fn load(&self, slot: DeviceId, until: Time) {
        self.set_load(slot, until);
    }
}
