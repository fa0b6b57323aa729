//! The devices that the scheduler's decisions go to.

use std::collections::BTreeSet;
use std::sync::Arc;

use downbeat_core::DeviceId;
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
}

impl DevicePool {
    pub fn new(clock: Clock, hosts: Vec<Arc<DeviceHost>>, rehearser: Arc<Rehearser>) -> Self {
        let in_service = hosts.iter().map(|host| host.device).collect();
        DevicePool { clock, hosts, slots: RwLock::default(), rehearser, in_service: Mutex::new(in_service) }
    }

    /// What the scheduler calls `slot`. Panics if there is none.
    pub fn slot(&self, slot: DeviceId) -> (Arc<DeviceHost>, usize) {
        let Some(slot) = self.slots.read().get(slot.0 as usize).cloned() else {
            panic!("the scheduler dispatched to a device that it was never given");
        };
        slot
    }

    /// Takes a device out of service, unless it is the last; says whether it did.
    pub fn retire(&self, device: usize) -> bool {
        let mut in_service = self.in_service.lock();
        in_service.len() > 1 && in_service.remove(&device)
    }
}
