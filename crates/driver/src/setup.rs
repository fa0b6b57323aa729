//! The initial state of a cluster.

use std::sync::Arc;

use downbeat_core::cluster::NetworkBudget;
use downbeat_core::{DeviceKind, Duration};

use crate::handler::LogSink;

/// The initial state of a cluster.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The kind of each initial device. All devices are free.
    pub devices: Vec<DeviceKind>,
    /// The most devices of each kind that the shards plan with. For devices that share hardware.
    /// `None`: all devices.
    pub planned: Option<u32>,
    /// The number of device kinds that can ever exist.
    pub kinds: u32,
    /// How late a wake-up may come. A batch that is deferred on purpose starts at least this long
    /// before its latest start ([`downbeat_core::cluster::Scheduler::set_wake_margin`]).
    pub wake_margin: Duration,
    /// The delays of messages between the scheduler, the devices and the clients.
    pub network: NetworkBudget,
    /// The sink of the decision logs of the shards and the matchmaker. `None`: no logs, at no cost.
    pub log: Option<Arc<dyn LogSink>>,
}

impl Setup {
    /// A setup with `devices` devices of one kind, without network delays, and with timers that are
    /// never late.
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

/// The number of devices that the shards plan with: at most `planned` of the `there` devices.
pub(crate) fn planned_as(planned: Option<u32>, there: u32) -> u32 {
    planned.map_or(there, |planned| planned.min(there))
}
