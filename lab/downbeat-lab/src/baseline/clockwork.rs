//! Clockwork: earliest latest start first, over one candidate for each batch size of each model.

use downbeat_core::cluster::{ModelOptions, Reject, Request};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, ModelId, RequestId, Time};

use super::backlogs::{BacklogModel, Backlogs};
use super::fleet::Fleet;
use downbeat_sim::{ClusterScheduler, Decision};

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
/// - *Which requests make a candidate of size `b`*: the first `b` of the queue, and none if there
///   are fewer. `l` never falls. So a model's earliest latest start that has not passed belongs to
///   the largest batch that still meets the head's deadline. `O(log max_batch)` finds the same
///   batch as a table of candidates. Of two sizes with the same `l`, hence the same latest start,
///   the larger counts.
/// - *How far ahead a device is given work*: not at all. The original does so some milliseconds
///   ahead, to hide the network, and its batch misses every request that comes meanwhile.
/// - *What a decision costs*: nothing (Symphony §5.2 calls this cost the limit of Clockwork).
///
/// With these, Clockwork is the eager policy with head drop and an admission control. The system of
/// Symphony's table 2 hardly batches: 8 devices give its 1,358 r/s with batches of one (`8 / l(1)`
/// = 1,306).
#[derive(Debug, Default)]
pub struct Clockwork {
    backlogs: Backlogs,
    fleet: Fleet,
}

impl Clockwork {
    /// Makes a scheduler without models and devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Drops hopeless requests.
    fn expire(&mut self, now: Time) {
        while let Some(model) = self.backlogs.expired(now) {
            self.backlogs.refresh(now, model, &mut self.fleet);
        }
    }

    fn dispatch(&mut self, now: Time) {
        self.expire(now);
        while !self.backlogs.is_empty()
            && let Some(device) = self.fleet.first_free()
        {
            let candidates =
                self.backlogs.models().iter().zip(0..).filter_map(|(BacklogModel { profile, backlog }, index)| {
                    let size = backlog.prefix(now, profile);
                    let deadline = backlog.head().filter(|_| size > 0)?.deadline;
                    let expected = profile.latency.latency(size);
                    Some((deadline - expected, index, size, expected))
                });
            let Some((_, index, size, expected)) = candidates.min() else { return };
            let members = self.backlogs.take(index, 0, size).map(|member| member.id);
            self.fleet.dispatch(now, device, ModelId(index), members, expected);
            self.backlogs.refresh(now, index, &mut self.fleet);
        }
    }
}

impl ClusterScheduler for Clockwork {
    fn add_model(&mut self, _now: Time, options: ModelOptions, _slo: Duration, _rate: f64) -> ModelId {
        self.backlogs.add(&options)
    }

    fn add_device(&mut self, now: Time, _kind: DeviceKind) -> DeviceId {
        let device = self.fleet.add();
        self.dispatch(now);
        device
    }

    fn handle_request(&mut self, now: Time, request: Request) -> Result<(), Reject> {
        self.expire(now);
        let start = self.fleet.next_free(now);
        self.backlogs.admit(now, start, &request)?;
        self.backlogs.refresh(now, request.model.0, &mut self.fleet);
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
        self.backlogs.next_expiry()
    }

    fn recycle(&mut self, members: Vec<RequestId>) {
        self.fleet.recycle(members);
    }
}
