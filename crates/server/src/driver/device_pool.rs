//! The devices that the scheduler's decisions go to.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use downbeat_core::{BatchId, DeviceId, Duration};
use parking_lot::{Mutex, RwLock};

use super::rehearser::Rehearser;
use crate::clock::Clock;
use crate::host::DeviceHost;

/// The devices that the scheduler's decisions go to, and what of them it grants.
pub struct DevicePool {
    pub clock: Clock,
    /// In their order.
    pub hosts: Vec<Arc<DeviceHost>>,
    /// By what the scheduler calls them: a device, and which of its slots.
    pub slots: RwLock<Vec<(Arc<DeviceHost>, usize)>>,
    /// What is told of queues, and where it listens of requests and batches.
    pub rehearser: Arc<Rehearser>,
    /// The devices that the scheduler has.
    in_service: Mutex<BTreeSet<usize>>,
    /// Who grants slots instead, where the scheduler is another process.
    pub granted_from_afar: OnceLock<HearsOfSlots>,
}

/// Hears of slots that are done with what they were granted.
pub type HearsOfSlots = Box<dyn Fn(SlotDone) + Send + Sync>;

/// A slot is done with what it was granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotDone {
    /// What that was.
    pub batch: BatchId,
    /// Items that ran and how long that took from the grant to the end; `None`: it did not run as it should.
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

    /// What the scheduler calls `slot`. Panics if there is none.
    pub fn slot(&self, slot: DeviceId) -> (Arc<DeviceHost>, usize) {
        let Some(slot) = self.slots.read().get(slot.0 as usize).cloned() else {
            panic!("the scheduler dispatched to a device that it was never given");
        };
        slot
    }

    /// Whether the scheduler has a device.
    pub fn is_in_service(&self, device: usize) -> bool {
        self.in_service.lock().contains(&device)
    }

    /// Takes a device out of service, unless it is the last; says whether it did.
    pub fn retire(&self, device: usize) -> bool {
        let mut in_service = self.in_service.lock();
        in_service.len() > 1 && in_service.remove(&device)
    }
}
