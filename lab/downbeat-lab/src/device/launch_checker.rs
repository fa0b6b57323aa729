//! A judge of every decision of a device's policies, from outside.

use std::collections::BTreeMap;

use downbeat_core::device::{DeviceRequest, InputSource, LaneId, LaneSpec, Launch, LaunchId, PartitionId, RingRun};
use downbeat_core::{ModelId, RequestId, Time};

/// Judges every decision of a device's policies from outside. Each failure panics and prints the
/// seed.
///
/// A request that is accepted is answered, dropped or cancelled exactly once. A lane runs one
/// launch at a time, within the segments and the items that it was made for. The members of a
/// launch are of its model, are in no other launch, and run every segment exactly once and in
/// order. A launch from the ring has the neighbouring slots of its members, which hold their
/// inputs. No two requests have a slot in common.
#[derive(Debug)]
pub struct LaunchChecker {
    seed: u64,
    /// Whether a lane may get one more launch while it runs another.
    ahead: bool,
    /// Segments of each model, and the ring of its current policy.
    models: BTreeMap<ModelId, (u16, usize)>,
    /// By lane in use: the launch that runs, then the launch that waits behind it.
    running: BTreeMap<LaneId, (LaneSpec, Vec<LaunchId>)>,
    requests: BTreeMap<RequestId, CheckedRequest>,
    /// Slots of each policy's ring; 0 where a policy has no ring.
    rings: Vec<u32>,
    /// The request in each taken slot of a ring.
    taken: BTreeMap<(usize, u32), RequestId>,
    open: u64,
}

#[derive(Clone, Debug)]
struct CheckedRequest {
    model: ModelId,
    /// The ring of the policy that has the request.
    ring: usize,
    size: u32,
    length: u32,
    /// The segments that the request has run.
    passed: u16,
    exited: bool,
    launch: Option<LaunchId>,
    slots: Option<RingRun>,
    /// Whether the slots hold the request's input.
    input: bool,
    state: RequestState,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RequestState {
    Accepted,
    Rejected,
    Answered,
    Dropped,
    Cancelled,
}

impl LaunchChecker {
    /// Makes a checker without models for a run with this seed.
    pub fn new(seed: u64) -> Self {
        LaunchChecker {
            seed,
            ahead: false,
            models: BTreeMap::new(),
            running: BTreeMap::new(),
            requests: BTreeMap::new(),
            rings: Vec::new(),
            taken: BTreeMap::new(),
            open: 0,
        }
    }

    /// Allows a lane to have a launch that waits behind the running one, from now on.
    pub fn ahead(&mut self) {
        self.ahead = true;
    }

    /// Notes that a model of `segments` segments has come to the device, or has a new policy, with
    /// a ring of `slots` slots.
    pub fn model(&mut self, model: ModelId, segments: u16, slots: u32) {
        self.models.insert(model, (segments, self.rings.len()));
        self.rings.push(slots);
    }

    /// Returns the model of a request that is or was in the run.
    pub(crate) fn model_of(&self, request: RequestId) -> Option<ModelId> {
        self.requests.get(&request).map(|known| known.model)
    }

    /// Returns the partition of a lane in use.
    pub(crate) fn partition(&self, lane: LaneId) -> Option<PartitionId> {
        self.running.get(&lane).map(|(spec, _)| spec.partition)
    }

    fn known(&mut self, now: Time, request: RequestId) -> &mut CheckedRequest {
        let seed = self.seed;
        let known = self.requests.get_mut(&request);
        known.unwrap_or_else(|| panic!("seed {seed}, {now}: {request} was never there"))
    }

    /// Notes that a request is handed in.
    pub fn request(&mut self, now: Time, request: &DeviceRequest, accepted: bool) {
        self.open += u64::from(accepted);
        let known = CheckedRequest {
            model: request.model,
            ring: self.models.get(&request.model).map_or(usize::MAX, |(_, ring)| *ring),
            size: request.size,
            length: request.length,
            passed: 0,
            exited: false,
            launch: None,
            slots: None,
            input: false,
            state: if accepted { RequestState::Accepted } else { RequestState::Rejected },
        };
        let before = self.requests.insert(request.id, known);
        assert!(before.is_none(), "seed {}, {now}: {} is handed in twice", self.seed, request.id);
    }

    fn ring(&self, known: &CheckedRequest) -> u32 {
        self.rings.get(known.ring).copied().unwrap_or(0).max(1)
    }

    /// Checks that the policy gives a request free slots of the ring.
    pub fn admit(&mut self, now: Time, request: RequestId, slots: RingRun) {
        let seed = self.seed;
        let known = self.known(now, request);
        assert!(
            known.state == RequestState::Accepted,
            "seed {seed}, {now}: {request} is admitted while {:?}",
            known.state
        );
        assert!(known.slots.is_none(), "seed {seed}, {now}: {request} is admitted twice");
        assert!(slots.count == known.size, "seed {seed}, {now}: {request} has {} items and {slots:?}", known.size);
        known.slots = Some(slots);
        let (of, known) = (known.ring, known.clone());
        let ring = self.ring(&known);
        for slot in slots.first..slots.first + slots.count {
            let before = self.taken.insert((of, slot % ring), request);
            assert!(before.is_none(), "seed {seed}, {now}: {request} gets slot {slot}, which {before:?} has");
        }
    }

    /// Notes that a request's input is in its slots.
    pub fn input(&mut self, now: Time, request: RequestId) {
        let known = self.known(now, request);
        known.input = true;
        if known.state != RequestState::Accepted && known.launch.is_none() {
            self.free(now, request);
        }
    }

    fn free(&mut self, now: Time, request: RequestId) {
        let known = self.known(now, request).clone();
        let ring = self.ring(&known);
        if let Some(slots) = known.slots {
            for slot in slots.first..slots.first + slots.count {
                if self.taken.get(&(known.ring, slot % ring)) == Some(&request) {
                    self.taken.remove(&(known.ring, slot % ring));
                }
            }
        }
    }

    /// Checks a launch of a policy on a lane with the spec `lane`; `None` if there is no such lane.
    pub fn launch(&mut self, now: Time, launch: &Launch, lane: Option<LaneSpec>) {
        let (seed, id) = (self.seed, launch.id);
        let Some(lane) = lane else { panic!("seed {seed}, {now}: {id} is on {}, which is none", launch.lane) };
        let all = self.models.get(&launch.model).map_or(0, |(segments, _)| *segments);
        let (spec, running) = self.running.entry(launch.lane).or_insert((lane, Vec::new()));
        let most = if self.ahead { 2 } else { 1 };
        assert!(running.len() < most, "seed {seed}, {now}: {} gets {id} while it runs {running:?}", launch.lane);
        running.push(id);
        *spec = lane;
        let (segments, range) = (lane.segments, launch.segments);
        assert!(
            segments.first <= range.first && range.end <= segments.end && range.end <= all,
            "seed {seed}, {now}: {id} runs {range:?} of {all} segments on a lane for {segments:?}"
        );
        assert!(!launch.members.is_empty(), "seed {seed}, {now}: {id} is for nobody");
        let (mut rows, mut next) = (0, None);
        for member in &launch.members {
            let ring = self.requests.get(member).map_or(1, |known| self.ring(known));
            let known = self.known(now, *member);
            let of = known.model;
            assert!(of == launch.model, "seed {seed}, {now}: {member} of {of} is in {id} of {}", launch.model);
            let alive = matches!(known.state, RequestState::Accepted | RequestState::Cancelled);
            assert!(alive && !known.exited, "seed {seed}, {now}: {member} is in {id} and {:?}", known.state);
            assert!(known.launch.is_none(), "seed {seed}, {now}: {member} is in {id} and in {:?}", known.launch);
            assert!(known.passed == range.first, "seed {seed}, {now}: {member} has run {} of {range:?}", known.passed);
            assert!(known.length <= launch.length, "seed {seed}, {now}: {member} is longer than {}", launch.length);
            known.launch = Some(id);
            rows += known.size;
            match (launch.inputs, known.slots) {
                (InputSource::Host, slots) => {
                    assert!(range.first == 0 && slots.is_none(), "seed {seed}, {now}: {member} is not with the host");
                }
                (InputSource::Ring(run), slots) => {
                    let slots = slots.filter(|_| known.input);
                    let Some(slots) = slots else { panic!("seed {seed}, {now}: {member} has no input in the ring") };
                    let expected = next.unwrap_or(run.first);
                    assert!(slots.first == expected, "seed {seed}, {now}: {member} is no neighbour in {id}");
                    next = Some((slots.first + slots.count) % ring);
                }
                (InputSource::Device, _) => {
                    let there = range.first > 0 || known.input;
                    assert!(there, "seed {seed}, {now}: the input of {member} is not on the device");
                }
            }
        }
        assert!(rows == launch.rows, "seed {seed}, {now}: {id} has {rows} items and says {}", launch.rows);
        assert!(launch.computed_rows >= rows, "seed {seed}, {now}: {id} computes less than it has");
        let most = lane.max_rows;
        assert!(
            launch.computed_rows <= most,
            "seed {seed}, {now}: {id} of {} items, at most {most}",
            launch.computed_rows
        );
        if let InputSource::Ring(run) = launch.inputs {
            assert!(run.count == rows, "seed {seed}, {now}: {id} has {rows} items and {run:?}");
        }
    }

    /// Checks the end of a launch. `exits` are members whose answer is final though segments are
    /// left.
    pub fn completion(&mut self, now: Time, launch: &Launch, exits: &[RequestId]) {
        let running = self.running.get_mut(&launch.lane).map(|(_, running)| running);
        let same = running.is_some_and(|running| running.first() == Some(&launch.id) && running.remove(0) == launch.id);
        assert!(same, "seed {}, {now}: {} completes {}, which it does not run", self.seed, launch.lane, launch.id);
        for member in &launch.members {
            let known = self.known(now, *member);
            (known.passed, known.launch) = (launch.segments.end, None);
            known.exited |= exits.contains(member);
            self.free(now, *member);
        }
    }

    /// Checks that a lane that goes out of use is idle.
    pub fn free_lane(&mut self, now: Time, lane: LaneId) {
        let running = self.running.remove(&lane).map(|(_, running)| running).unwrap_or_default();
        assert!(running.is_empty(), "seed {}, {now}: {lane} is free and runs {running:?}", self.seed);
    }

    /// Checks that the policy may answer a request.
    pub fn reply(&mut self, now: Time, request: RequestId) {
        let seed = self.seed;
        let segments = self.model_of(request).and_then(|model| Some(self.models.get(&model)?.0)).unwrap_or(0);
        let known = self.known(now, request);
        let complete = known.exited || known.passed == segments;
        assert!(complete, "seed {seed}, {now}: {request} is answered after {} of {segments} segments", known.passed);
        assert!(known.launch.is_none(), "seed {seed}, {now}: {request} is answered while it runs");
        self.end_request(now, request, RequestState::Answered);
    }

    /// Checks that the policy may drop a request.
    pub fn drop_request(&mut self, now: Time, request: RequestId) {
        let seed = self.seed;
        let known = self.known(now, request);
        assert!(known.launch.is_none(), "seed {seed}, {now}: {request} is dropped while it runs");
        if known.input || known.slots.is_none() {
            self.free(now, request);
        }
        self.end_request(now, request, RequestState::Dropped);
    }

    /// Notes that the policy cancels a request whose client has gone.
    pub fn cancelled(&mut self, now: Time, request: RequestId) {
        let known = self.known(now, request);
        if known.launch.is_none() && known.input {
            self.free(now, request);
        }
        self.end_request(now, request, RequestState::Cancelled);
    }

    fn end_request(&mut self, now: Time, request: RequestId, state: RequestState) {
        let seed = self.seed;
        let known = self.known(now, request);
        assert!(
            known.state == RequestState::Accepted,
            "seed {seed}, {now}: {request} is {state:?} after {:?}",
            known.state
        );
        known.state = state;
        self.open -= 1;
    }

    /// Checks at the end of the run that everything has ended.
    pub fn end(&self, now: Time) {
        let seed = self.seed;
        let runs = self.running.values().any(|(_, running)| !running.is_empty());
        assert!(!runs, "seed {seed}, {now}: a lane still runs");
        assert!(self.open == 0, "seed {seed}, {now}: {} requests were never answered", self.open);
        assert!(self.taken.is_empty(), "seed {seed}, {now}: slots of the ring are still in use: {:?}", self.taken);
    }
}
