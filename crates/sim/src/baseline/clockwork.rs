//! Clockwork: earliest latest start first, over one candidate for each batch size of each model.

use downbeat_core::cluster::{DropReason, IndexedHeap, ModelOptions, Reject, Request};
use downbeat_core::{BatchId, DeviceId, Duration, ModelId, RequestId, Time};

use super::backlog::{Backlog, Profile, Waiting};
use super::fleet::Fleet;
use crate::cluster::{Cluster, Decision};

/// Clockwork (Gujarati et al., OSDI '20, §5; Symphony §2.2).
///
/// | rule | source |
/// |---|---|
/// | each batch size `b` of each model is a candidate, with a latest start: the deadline of its earliest member less `l(b)` | OSDI '20 §5; Symphony §2.2 |
/// | a device that becomes free takes the candidate whose latest start is the earliest | Symphony §2.2 |
/// | that invalidates the candidates that share its requests; one whose latest start has passed is discarded | OSDI '20 §5; Symphony §2.2 |
/// | what cannot be met is not run: rejected at arrival if no device is expected to be free in time, else given up when its latest start alone has passed | OSDI '20 §5 (admission control) |
/// | eager: a device never waits while there is a candidate | Symphony §2.2 |
/// | any batch size | Symphony §5 (the original has powers of two) |
///
/// Left open, and decided in favour of Clockwork:
/// - *Which requests make a candidate of size `b`*: the first `b` of the queue, and none if there are fewer. As `l` never falls, the
///   earliest latest start of a model that has not passed is that of the largest batch that still meets the head's deadline:
///   so `O(log max_batch)` finds what a table of candidates would. Of two sizes with the same `l`, hence the same latest start, the larger.
/// - *How far ahead a device is given work*: not at all. The original does it some milliseconds ahead, to hide the network; every request that
///   comes in between is lost to the batch.
/// - *What a decision costs*: nothing (Symphony §5.2 says that it is what limits Clockwork).
///
/// With these, Clockwork is the eager policy with head drop and an admission control. The system of Symphony's table 2 hardly batches:
/// its 1,358 r/s are what 8 devices give with batches of one (`8 / l(1)` = 1,306).
#[derive(Debug, Default)]
pub struct Clockwork {
    models: Vec<Model>,
    /// By model: when its head becomes hopeless.
    expiries: IndexedHeap<Time>,
    /// Requests that wait, of all models.
    waiting: usize,
    fleet: Fleet,
}

#[derive(Debug)]
struct Model {
    profile: Profile,
    backlog: Backlog,
}

impl Clockwork {
    /// Without models and devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives up what is hopeless.
    fn expire(&mut self, now: Time) {
        while let Some((at, model)) = self.expiries.peek()
            && at <= now
        {
            self.refresh(now, model);
        }
    }

    fn refresh(&mut self, now: Time, model: u32) {
        let Model { profile, backlog } = &mut self.models[model as usize];
        while let Some(dropped) = backlog.pop_hopeless(now, profile) {
            self.waiting -= 1;
            self.fleet.drop(dropped.id, ModelId(model), DropReason::Hopeless);
        }
        match backlog.hopeless_at(profile) {
            Some(at) => self.expiries.set(model, at),
            None => {
                self.expiries.remove(model);
            }
        }
    }

    fn dispatch(&mut self, now: Time) {
        self.expire(now);
        while self.waiting > 0
            && let Some(device) = self.fleet.first_free()
        {
            let candidates = self.models.iter().zip(0..).filter_map(|(Model { profile, backlog }, index)| {
                let size = backlog.prefix(now, profile);
                let deadline = backlog.head().filter(|_| size > 0)?.deadline;
                Some((deadline - profile.latency.latency(size), index, size))
            });
            let Some((_, index, size)) = candidates.min() else { return };
            self.waiting -= size as usize;
            let Model { profile, backlog } = &mut self.models[index as usize];
            let members = backlog.take(0, size).map(|member| member.id);
            self.fleet.dispatch(now, device, ModelId(index), members, profile.latency.latency(size));
            self.refresh(now, index);
        }
    }
}

impl Cluster for Clockwork {
    fn add_model(&mut self, _now: Time, options: ModelOptions, _slo: Duration, _rate: f64) -> ModelId {
        self.models.push(Model { profile: Profile::new(&options), backlog: Backlog::default() });
        ModelId(self.models.len() as u32 - 1)
    }

    fn add_device(&mut self, now: Time) -> DeviceId {
        let device = self.fleet.add();
        self.dispatch(now);
        device
    }

    fn handle_request(&mut self, now: Time, request: Request) -> Result<(), Reject> {
        self.expire(now);
        let start = self.fleet.next_free(now);
        let index = request.model.0;
        let Model { profile, backlog } = self.models.get_mut(index as usize).ok_or(Reject::UnknownModel)?;
        profile.admit(now, start, &request)?;
        backlog.push(Waiting { deadline: request.deadline, id: request.id });
        self.waiting += 1;
        self.refresh(now, index);
        self.dispatch(now);
        Ok(())
    }

    fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        if self.fleet.completed(device, batch) {
            self.dispatch(now);
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        self.dispatch(now);
    }

    fn poll_decision(&mut self) -> Option<Decision> {
        self.fleet.poll_decision()
    }

    fn poll_timeout(&self) -> Option<Time> {
        self.expiries.peek().map(|(at, _)| at)
    }

    fn recycle(&mut self, members: Vec<RequestId>) {
        self.fleet.recycle(members);
    }
}
