//! A cluster as it is at the start.

use std::sync::Arc;

use downbeat_core::cluster::NetworkBudget;
use downbeat_core::{DeviceKind, Duration};

use crate::handler::LogSink;

/// A cluster as it is at the start.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The kind of each device, all of them free.
    pub devices: Vec<DeviceKind>,
    /// As how many devices of each kind the shards plan, whatever comes and goes: for devices that share what they run on. `None`: as many as
    /// there are.
    pub planned: Option<u32>,
    /// How many kinds of devices there will ever be.
    pub kinds: u32,
    /// How late a wake-up may come: a batch that is deferred on purpose starts at least so much before its last moment
    /// ([`downbeat_core::cluster::Scheduler::set_wake_margin`]).
    pub wake_margin: Duration,
    /// What messages take between the scheduler, the devices and the clients.
    pub network: NetworkBudget,
    /// Where the shards and the matchmaker are written down, each in a log of its own; `None`: nowhere, and it costs nothing.
    pub log: Option<Arc<dyn LogSink>>,
}

impl Setup {
    /// So many devices of one kind, next to the scheduler, with timers that are never late.
    pub fn new(devices: u32) -> Self {
        Setup {
            devices: vec![DeviceKind(0); devices as usize],
            planned: None,
            kinds: 1,
            wake_margin: Duration::ZERO,
            network: NetworkBudget::default(),
            log: None,
        }
    }
}

/// As how many devices the shards plan where there are so many: none is none.
pub(crate) fn planned_as(planned: Option<u32>, there: u32) -> u32 {
    planned.map_or(there, |planned| planned.min(there))
}
