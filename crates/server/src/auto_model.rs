//! A model version that `auto` was asked for, as the rehearsal of device policies knows it.

use std::sync::Arc;

use downbeat_core::cluster::PastArrival;
use downbeat_core::device::PartitionId;
use downbeat_core::{Duration, ModelId, Time};

use crate::driver::DeviceEvents;
use crate::policy_choice::Chosen;

/// Devices that models share: rehearsed together.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct DeviceSet {
    /// Ascending, at least one.
    pub devices: Arc<[usize]>,
    /// Which partition of theirs.
    pub partition: PartitionId,
}

/// A model version that `auto` was asked for, by the policy that it is loaded by: what was measured of it, and where the rehearsal hears of its requests.
pub struct AutoModel {
    /// What the rehearsal calls the version, however often it is loaded.
    pub number: ModelId,
    /// Tells this load of it from others.
    pub generation: u32,
    pub name: String,
    pub version: String,
    /// Its policy, and what is known of it.
    pub chosen: Chosen,
    pub on: DeviceSet,
    /// Policies with settings that it can be replayed by.
    choice: usize,
    events: Arc<DeviceEvents>,
}

impl AutoModel {
    /// A version that is loaded by what was chosen, onto these devices.
    pub fn new(name: String, version: String, chosen: Chosen, on: DeviceSet, events: Arc<DeviceEvents>) -> Self {
        let (number, generation) = events.name(&name, &version);
        let choice = chosen.rehearsed.as_ref().map_or(0, |rehearsed| rehearsed.candidates().len());
        AutoModel { number, generation, name, version, chosen, on, choice, events }
    }

    /// Policies with settings that it can be replayed by; 0: it is not rehearsed.
    pub fn choice(&self) -> usize {
        self.choice
    }

    /// A request came.
    pub fn came(&self, at: Time, deadline: Time, size: u32, level: u32) {
        let budget = if deadline == Time::MAX { Duration::MAX } else { deadline.since(at) };
        self.events.came(PastArrival { at, budget, model: self.number, size, level });
    }

    /// A request ended: `took` so long to its answer (`None`: it got none), by its deadline or not.
    pub fn ended(&self, took: Option<Duration>, good: bool) {
        self.events.ended(self.number, self.generation, took, good);
    }

    /// A launch that had its partition for itself took `share` of what its profile says.
    pub fn ran(&self, share: f64) {
        self.events.ran(self.number, share);
    }
}
