//! The outside judge of every run.

use downbeat_core::cluster::{DropPolicy, Output};
use downbeat_core::{BatchId, DeviceId, Duration, ModelId, RequestId, Time};

/// Judges the scheduler's decisions from outside, from what it was told and what it said alone.
///
/// Asserts that each accepted request is answered exactly once, that no device runs two batches, that a batch keeps within the
/// largest size, that under a drop policy no request leaves that is planned to miss its deadline, and (at
/// the end) that nothing is lost.
#[derive(Debug)]
pub struct Checker {
    seed: u64,
    models: Vec<Model>,
    /// By request id, which the simulation counts from zero.
    requests: Vec<Known>,
    /// By device.
    running: Vec<Option<BatchId>>,
    waiting: u64,
}

#[derive(Debug)]
struct Model {
    max_batch: u32,
    drop: DropPolicy,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    model: ModelId,
    deadline: Time,
    size: u32,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Rejected,
    Waiting,
    Dispatched,
    Dropped,
}

impl Checker {
    /// A checker of a run with this seed, which every failure prints.
    pub fn new(seed: u64) -> Self {
        Checker { seed, models: Vec::new(), requests: Vec::new(), running: Vec::new(), waiting: 0 }
    }

    /// Models and devices are announced in order of their ids.
    pub fn model(&mut self, max_batch: u32, drop: DropPolicy) {
        self.models.push(Model { max_batch, drop });
    }

    /// A device has joined.
    pub fn device(&mut self) {
        self.running.push(None);
    }

    /// A request was handed in, and accepted or not.
    pub fn request(&mut self, id: RequestId, model: ModelId, deadline: Time, size: u32, accepted: bool) {
        let seed = self.seed;
        assert!(id.0 == self.requests.len() as u64, "seed {seed}: the simulation counts its requests");
        let state = if accepted { State::Waiting } else { State::Rejected };
        self.waiting += u64::from(accepted);
        self.requests.push(Known { model, deadline, size, state });
    }

    /// A decision.
    pub fn output(&mut self, now: Time, output: &Output) {
        let seed = self.seed;
        match output {
            Output::Drop { request, model, .. } => self.answer(now, *request, *model, State::Dropped),
            Output::Dispatch { batch, device, model, members, size, expected } => {
                let running = &mut self.running[device.0 as usize];
                assert!(running.is_none(), "seed {seed}, {now}: {device} gets {batch} while it runs {running:?}");
                *running = Some(*batch);
                let Model { max_batch, drop } = self.models[model.0 as usize];
                let mut items = 0;
                for member in members {
                    self.answer(now, *member, *model, State::Dispatched);
                    let known = self.requests[member.0 as usize];
                    items += known.size;
                    let late = now + *expected > known.deadline;
                    assert!(
                        drop == DropPolicy::None || !late,
                        "seed {seed}, {now}: {member} of {batch} is sent to miss its deadline {}",
                        known.deadline
                    );
                }
                assert!(items == *size, "seed {seed}, {now}: {batch} has {items} items and says {size}");
                assert!(
                    (1..=max_batch).contains(size),
                    "seed {seed}, {now}: {batch} of {size} items, the largest is {max_batch}"
                );
                assert!(*expected > Duration::ZERO, "seed {seed}, {now}: {batch} takes no time");
            }
        }
    }

    /// A batch is done.
    pub fn completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        let running = self.running[device.0 as usize].take();
        assert!(running == Some(batch), "seed {}, {now}: {device} completes {batch} but runs {running:?}", self.seed);
    }

    /// The run is over: everything is answered.
    pub fn end(&self, now: Time) {
        assert!(self.waiting == 0, "seed {}, {now}: {} requests were never answered", self.seed, self.waiting);
        assert!(self.running.iter().all(Option::is_none), "seed {}, {now}: a device still runs", self.seed);
    }

    fn answer(&mut self, now: Time, request: RequestId, model: ModelId, state: State) {
        let seed = self.seed;
        let known = &mut self.requests[request.0 as usize];
        assert!(known.model == model, "seed {seed}, {now}: {request} of {} is answered as {model}'s", known.model);
        assert!(known.state == State::Waiting, "seed {seed}, {now}: {request} is {state:?} after {:?}", known.state);
        known.state = state;
        self.waiting -= 1;
    }
}
