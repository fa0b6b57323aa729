//! The judge of every run, outside of the scheduler.

use downbeat_core::cluster::DropPolicy;
use downbeat_core::{BatchId, DeviceId, Duration, ModelId, RequestId, Time};

use crate::simulation::cluster::Decision;

/// Judges the scheduler's decisions from outside, from its inputs and outputs alone. It asserts
/// that
///
/// - each accepted request is answered exactly once,
/// - no device runs two batches,
/// - a batch keeps within the largest size,
/// - under a drop policy, no batch is planned to miss a member's deadline,
/// - preempted requests wait again,
/// - and, at the end, nothing is lost.
///
/// Requests that have not ended are kept in a ring. So a run of any length needs memory only for
/// the requests in the system.
#[derive(Debug)]
pub struct Checker {
    seed: u64,
    models: Vec<Model>,
    /// The requests `oldest..next`, by id modulo the ring's length, which is a power of two.
    ring: Vec<Known>,
    /// The first request that may not have ended.
    oldest: u64,
    next: u64,
    /// For each device: the batch that runs, and the batch that was sent meanwhile.
    running: Vec<[Option<BatchId>; 2]>,
    /// Whether a device may get a batch while it runs another one: true with a network.
    ahead: bool,
    /// Requests that are accepted and have not ended.
    open: u64,
}

#[derive(Debug)]
struct Model {
    max_batch: u32,
    drop: DropPolicy,
}

/// The facts about a request.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// The arrival.
    pub arrival: Time,
    /// The deadline.
    pub deadline: Time,
    model: ModelId,
    size: u32,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Rejected,
    Waiting,
    Dispatched,
    Dropped,
    Finished,
}

impl State {
    fn ended(self) -> bool {
        matches!(self, State::Rejected | State::Dropped | State::Finished)
    }
}

/// Length of the ring at the start.
const RING: usize = 1024;

impl Checker {
    /// A checker of a run with this seed, which every failure prints.
    pub fn new(seed: u64) -> Self {
        let nobody = Known {
            arrival: Time::ZERO,
            deadline: Time::ZERO,
            model: ModelId(u32::MAX),
            size: 0,
            state: State::Finished,
        };
        Checker {
            seed,
            models: Vec::new(),
            ring: vec![nobody; RING],
            oldest: 0,
            next: 0,
            running: Vec::new(),
            ahead: false,
            open: 0,
        }
    }

    /// Adds a model. Models and devices are added in order of their ids.
    pub fn model(&mut self, max_batch: u32, drop: DropPolicy) {
        self.models.push(Model { max_batch, drop });
    }

    /// Adds a device.
    pub fn device(&mut self) {
        self.running.push([None; 2]);
    }

    /// Tells the checker of a network: a batch may be on its way while its device runs another.
    pub fn network(&mut self) {
        self.ahead = true;
    }

    /// A request is handed to the scheduler.
    pub fn request(&mut self, now: Time, id: RequestId, model: ModelId, deadline: Time, size: u32) {
        assert!(id.0 == self.next, "seed {}: the simulation counts its requests", self.seed);
        if self.next - self.oldest == self.ring.len() as u64 {
            self.make_room();
        }
        let at = self.place(id.0);
        self.ring[at] = Known { arrival: now, deadline, model, size, state: State::Waiting };
        self.next += 1;
        self.open += 1;
    }

    /// The scheduler did not accept the request.
    pub fn rejection(&mut self, now: Time, id: RequestId) {
        let model = self.known(now, id).model;
        self.step(now, id, model, State::Waiting, State::Rejected);
    }

    /// Checks a decision. After a preemption, [`Checker::waits_again`] must follow for each member.
    pub fn decision(&mut self, now: Time, decision: &Decision) {
        let seed = self.seed;
        match decision {
            Decision::Drop { request, model, .. } => {
                self.step(now, *request, *model, State::Waiting, State::Dropped);
            }
            Decision::Dispatch { batch, device, model, members, size, start, expected } => {
                let [running, next] = &mut self.running[device.0 as usize];
                let place = if self.ahead && running.is_some() { next } else { running };
                assert!(place.is_none(), "seed {seed}, {now}: {device} gets {batch} while it runs {place:?}");
                *place = Some(*batch);
                assert!(*start >= now, "seed {seed}, {now}: {batch} is planned to start in the past, {start}");
                let Model { max_batch, drop } = self.models[model.0 as usize];
                let end = if drop == DropPolicy::None { Time::ZERO } else { *start + *expected };
                let mut items = 0;
                for member in members {
                    let known = self.step(now, *member, *model, State::Waiting, State::Dispatched);
                    items += known.size;
                    assert!(
                        end <= known.deadline,
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
            Decision::Preempt { batch, device } => {
                let [running, next] = std::mem::take(&mut self.running[device.0 as usize]);
                self.running[device.0 as usize] = [next, None];
                assert!(running == Some(*batch), "seed {seed}, {now}: {device} preempts {batch} but runs {running:?}");
            }
        }
    }

    /// A batch is done. [`Checker::finished`] must follow for each member.
    pub fn completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        let [running, next] = std::mem::take(&mut self.running[device.0 as usize]);
        self.running[device.0 as usize] = [next, None];
        assert!(running == Some(batch), "seed {}, {now}: {device} completes {batch} but runs {running:?}", self.seed);
    }

    /// A member of a finished batch is answered.
    pub fn finished(&mut self, now: Time, request: RequestId, model: ModelId) -> Known {
        self.step(now, request, model, State::Dispatched, State::Finished)
    }

    /// A member of a preempted batch is in the queue again.
    pub fn waits_again(&mut self, now: Time, request: RequestId, model: ModelId) {
        self.step(now, request, model, State::Dispatched, State::Waiting);
    }

    /// The run is over: asserts that all requests are answered.
    pub fn end(&self, now: Time) {
        let waiting = (self.oldest..self.next).filter(|id| self.ring[self.place(*id)].state == State::Waiting).count();
        assert!(waiting == 0, "seed {}, {now}: {waiting} requests were never answered", self.seed);
        assert!(self.running.iter().flatten().all(Option::is_none), "seed {}, {now}: a device still runs", self.seed);
        assert!(self.open == 0, "seed {}, {now}: {} requests were never finished", self.seed, self.open);
    }

    /// The facts about a request that has not ended, or ended not long ago.
    pub(crate) fn known(&self, now: Time, request: RequestId) -> &Known {
        assert!(
            (self.oldest..self.next).contains(&request.0),
            "seed {}, {now}: {request} has ended or was never there",
            self.seed
        );
        &self.ring[self.place(request.0)]
    }

    fn place(&self, id: u64) -> usize {
        id as usize & (self.ring.len() - 1)
    }

    fn step(&mut self, now: Time, request: RequestId, model: ModelId, from: State, to: State) -> Known {
        let known = *self.known(now, request);
        let seed = self.seed;
        assert!(known.model == model, "seed {seed}, {now}: {request} of {} is answered as {model}'s", known.model);
        assert!(known.state == from, "seed {seed}, {now}: {request} is {to:?} after {:?}", known.state);
        let at = self.place(request.0);
        self.ring[at].state = to;
        self.open -= u64::from(to.ended());
        known
    }

    /// Forgets the oldest requests that have ended. If more than half of the ring is still in use,
    /// doubles the ring.
    fn make_room(&mut self) {
        let length = self.ring.len() as u64;
        while self.oldest < self.next && self.ring[self.place(self.oldest)].state.ended() {
            self.oldest += 1;
        }
        if self.next - self.oldest <= length / 2 {
            return;
        }
        let mut larger = vec![self.ring[0]; self.ring.len() * 2];
        for id in self.oldest..self.next {
            larger[id as usize & (self.ring.len() * 2 - 1)] = self.ring[self.place(id)];
        }
        self.ring = larger;
    }
}
