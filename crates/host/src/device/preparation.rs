//! Lanes that a model's policy asks for while others serve: made, and run for the first time, on a
//! thread of their own.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};

use downbeat_core::device::{LaneId, LaneSpec, PartitionId};
use downbeat_engine::Place;
use parking_lot::Mutex;

use super::crew::Seat;
use super::device_host::DeviceHost;
use super::device_state::Preparation;
use super::placement::Placement;
use crate::run::watchdog::Owner;

/// Lanes with a thread each.
type Made = Vec<Arc<Seat>>;

/// Lanes that a thread is making.
struct Preparing {
    host: Arc<DeviceHost>,
    model: Arc<Placement>,
    /// The lanes' numbers; `None`: the scheduler already knows the outcome.
    lanes: Mutex<Option<Vec<LaneId>>>,
}

/// Makes lanes on `host` in the background, and tells the host the outcome once. If one lane fails,
/// none is made.
pub fn start(host: Arc<DeviceHost>, Preparation { model, partition, lanes, specs }: Preparation) {
    let preparing = Arc::new(Preparing { host, model, lanes: Mutex::new(Some(lanes)) });
    let its = preparing.clone();
    let name = format!("prepare-{}", preparing.host.device);
    let started = std::thread::Builder::new().name(name).spawn(move || its.work(partition, &specs));
    if let Err(error) = started {
        preparing.tell(Err(format!("there is no thread left to make the lanes on: {error}")));
    }
}

impl Preparing {
    fn work(self: Arc<Self>, partition: PartitionId, specs: &[LaneSpec]) {
        let owner: Weak<Preparing> = Arc::downgrade(&self);
        let post = self.host.watchdog.post(owner);
        post.begin_load(&self.model.name);
        let made = std::panic::catch_unwind(AssertUnwindSafe(|| self.make(partition, specs)));
        let mut made = made.unwrap_or_else(|_| Err("making the lanes ended in a panic: this is a defect".to_owned()));
        if let Some(reason) = post.end() {
            made.iter().flatten().for_each(|seat| seat.stop());
            made = Err(reason);
        }
        self.tell(made);
    }

    /// Makes the lanes, warm and waiting for work. If one fails, all of them are dropped.
    fn make(&self, partition: PartitionId, specs: &[LaneSpec]) -> Result<Made, String> {
        let (host, model) = (&self.host, &self.model);
        let place = Place { device: host.device, share: host.share(partition) };
        let engines = specs.iter().map(|_| model.model.lane_at(place)).collect::<Result<Vec<_>, _>>();
        let mut engines = engines.map_err(|error| error.to_string())?;
        (model.warm_up)(host.device, specs, &mut engines).map_err(|error| format!("{error:#}"))?;
        host.start_lanes(partition, engines).map_err(|error| format!("there is no thread left for a lane: {error}"))
    }

    fn tell(&self, made: Result<Made, String>) {
        match self.lanes.lock().take() {
            Some(lanes) => self.host.prepared(&self.model, &lanes, made),
            // The thread was left behind.
            None => made.iter().flatten().for_each(|seat| seat.stop()),
        }
    }
}

impl Owner for Preparing {
    fn is_awaited(&self) -> bool {
        true
    }

    fn leave_behind(&self, reason: &str) {
        self.tell(Err(reason.to_owned()));
    }
}

#[cfg(test)]
mod tests;
