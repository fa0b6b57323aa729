//! The devices that a routed model version runs on.

use std::sync::Arc;

use downbeat_core::Time;
use serde::{Deserialize, Serialize};

use super::history::PastLaunch;
use super::padding::Padding;
use super::runtime::Runtime;
use crate::call::Call;
use crate::error::ServiceError;
use crate::executable::Executable;
use crate::plan::{Admitted, BatchPlan};
use crate::ticket::{Decider, Ticket};

/// The devices that a routed model version runs on. Dropping it ends their threads.
pub struct LaneGroup {
    /// By device; at least one.
    runtimes: Vec<Arc<Runtime>>,
    padding: Option<Arc<Padding>>,
}

/// What `GET /v2/timeline` answers: what ran lately on the lanes of devices.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct Timeline {
    /// Begin of the time in question, nanoseconds of the server's clock, as all times here.
    pub from_ns: u64,
    /// Its end: now.
    pub now_ns: u64,
    /// By model, version and device.
    pub devices: Vec<PastLaunches>,
}

/// What ran lately on the lanes of a model version on a device.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct PastLaunches {
    /// Model name.
    pub model: String,
    /// Its version.
    pub version: String,
    /// Number of the device.
    pub device: usize,
    /// The device policy.
    pub policy: String,
    /// The largest batch of each lane.
    pub lanes: Vec<u32>,
    /// Whether no launch of the time in question is missing.
    pub complete: bool,
    /// In the order of their ends.
    pub launches: Vec<PastLaunch>,
}

impl LaneGroup {
    /// The devices with these runtimes, at least one.
    pub(super) fn new(runtimes: Vec<Arc<Runtime>>, padding: Option<Arc<Padding>>) -> Self {
        assert!(!runtimes.is_empty(), "a model runs on at least one device");
        LaneGroup { runtimes, padding }
    }

    /// The length of a request, 0 where nothing varies.
    ///
    /// # Errors
    /// `InvalidArgument` if it cannot be padded.
    pub fn length(&self, plan: &BatchPlan, request: &Admitted) -> Result<u32, ServiceError> {
        let Some(padding) = &self.padding else { return Ok(0) };
        padding.length(plan, request).map_err(ServiceError::InvalidArgument)
    }

    /// Hands a request of `length` to the device with the fewest outstanding items of those that work, the first of those. The answer comes through the call's `reply`,
    /// always. Dropping the ticket cancels the request.
    pub fn submit(&self, call: Call, length: u32) -> Ticket {
        let (executable, arrival) = (call.executable.clone(), call.arrival);
        let works = |runtime: &&Arc<Runtime>| executable.model().lost(runtime.device()).is_none();
        let working = self.runtimes.iter().filter(works);
        let runtime = working.min_by_key(|runtime| runtime.outstanding()).unwrap_or(&self.runtimes[0]);
        let request = runtime.submit(call, length);
        Ticket::new(Decider::Device(runtime.clone()), executable, request, arrival)
    }

    /// The devices.
    pub fn devices(&self) -> impl Iterator<Item = usize> {
        self.runtimes.iter().map(|runtime| runtime.device())
    }

    /// Items that wait for a launch, all devices.
    pub fn waiting(&self) -> u32 {
        self.runtimes.iter().map(|runtime| runtime.waiting()).sum()
    }

    /// Brings the gauges up to date.
    pub fn update_metrics(&self) {
        self.runtimes.iter().for_each(|runtime| runtime.update_metrics());
    }

    /// What ran at `from` or later, a device each.
    pub fn past(&self, executable: &Executable, from: Time) -> Vec<PastLaunches> {
        let past = self.runtimes.iter().map(|runtime| {
            let (policy, lanes, launches, complete) = runtime.past(from);
            PastLaunches {
                model: executable.name.clone(),
                version: executable.version.clone(),
                device: runtime.device(),
                policy: policy.to_owned(),
                lanes,
                complete,
                launches,
            }
        });
        past.collect()
    }
}

impl Drop for LaneGroup {
    fn drop(&mut self) {
        // Not waited for: the last who knows the group may be one of the threads.
        self.runtimes.iter().for_each(|runtime| runtime.stop());
    }
}
