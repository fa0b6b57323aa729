//! The devices that carry out the scheduler's decisions.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use downbeat_core::{BatchId, DeviceId, Duration};
use parking_lot::{Mutex, RwLock};

use super::rehearser::Rehearser;
use crate::clock::Clock;
use crate::host::DeviceHost;

/// The devices that carry out the scheduler's decisions, with their slots.
pub struct DevicePool {
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
