//! A model version whose policy `auto` chooses: the facts that the rehearsal of device policies
//! needs about it.

use std::sync::Arc;

use downbeat_core::cluster::PastArrival;
use downbeat_core::device::PartitionId;
use downbeat_core::{Duration, ModelId, Time};

use crate::driver::DeviceEvents;
use crate::policy_choice::Chosen;
use crate::version_record::RequestEnds;

/// Devices that models share: rehearsed together.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct DeviceSet {
    /// Ascending, at least one device.
    pub devices: Arc<[usize]>,
    /// The partition of these devices.
    pub partition: PartitionId,
}

/// A model version under `auto`, with its present policy: its measurements, and the rehearsal that
/// hears of its requests.
pub struct AutoModel {
    /// The rehearsal's number for the version, the same for every load.
    pub number: ModelId,
    /// The number of this load of the version.
    pub generation: u32,
    pub name: String,
    pub version: String,
    /// The chosen policy of the version, with the knowledge behind it.
    pub chosen: Chosen,
    pub on: DeviceSet,
    /// How many policies with settings it can be replayed by.
    choice: usize,
    events: Arc<DeviceEvents>,
}

impl AutoModel {
    /// A version that is loaded with the chosen policy, onto these devices.
    pub fn new(name: String, version: String, chosen: Chosen, on: DeviceSet, events: Arc<DeviceEvents>) -> Self {
        let (number, generation) = events.name(&name, &version);
        let choice = chosen.rehearsed.as_ref().map_or(0, |rehearsed| rehearsed.candidates().len());
        AutoModel { number, generation, name, version, chosen, on, choice, events }
    }

    /// How many policies with settings it can be replayed by; 0: it is not rehearsed.
    pub fn choice(&self) -> usize {
        self.choice
    }

    /// A request came.
    pub fn came(&self, at: Time, deadline: Time, size: u32, level: u32) {
        let budget = if deadline == Time::MAX { Duration::MAX } else { deadline.since(at) };
        self.events.came(PastArrival { at, budget, model: self.number, size, level });
    }

    /// A launch that had its partition for itself took `share` times its profile's latency.
    pub fn ran(&self, share: f64) {
        self.events.ran(self.number, share);
    }
}

impl RequestEnds for AutoModel {
    fn ended(&self, took: Option<Duration>, good: bool) {
        self.events.ended(self.number, self.generation, took, good);
    }
}
