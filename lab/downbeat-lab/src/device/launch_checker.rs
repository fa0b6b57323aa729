//! Judges every decision of a device's policies from outside.

use std::collections::BTreeMap;

use downbeat_core::device::{DeviceRequest, InputSource, LaneId, LaneSpec, Launch, LaunchId, PartitionId, RingRun};
use downbeat_core::{ModelId, RequestId, Time};

/// Judges every decision of a device's policies from outside; each failure panics and prints the seed.
///
/// A request that is accepted is answered, dropped or cancelled exactly once. A lane runs one launch at a time, of the segments and at most
/// the items that it is for. The members of a launch are of its model, are in no other, and run every segment exactly once and in order. A launch
/// from the ring has the neighbouring slots of its members, whose inputs are there; no two requests have a slot in common.
#[derive(Debug)]
pub struct LaunchChecker {
    seed: u64,
    /// A lane may be given a launch while it runs another: one.
    ahead: bool,
    /// Segments of each model, and the ring of its policy of now.
    models: BTreeMap<ModelId, (u16, usize)>,
    /// What each lane that is in use runs, and then what waits behind it.
    running: BTreeMap<LaneId, (LaneSpec, Vec<LaunchId>)>,
    requests: BTreeMap<RequestId, CheckedRequest>,
    /// Slots of each policy's ring; 0: it has none.
    rings: Vec<u32>,
    /// Who has a slot of a ring.
    taken: BTreeMap<(usize, u32), RequestId>,
    open: u64,
}

#[derive(Clone, Debug)]
struct CheckedRequest {
    model: ModelId,
    /// That of the policy which has it.
    ring: usize,
    size: u32,
    length: u32,
    /// Segments that it has run.
    passed: u16,
    exited: bool,
    launch: Option<LaunchId>,
    slots: Option<RingRun>,
    /// Its input is in its slots.
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
    /// A checker of a run with this seed, without models.
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

    /// From now on a lane may have a launch that waits behind the one that runs.
    pub fn ahead(&mut self) {
        self.ahead = true;
    }

    /// A model of so many segments has come to the device, or has another policy now, with a ring of so many slots.
    pub fn model(&mut self, model: ModelId, segments: u16, slots: u32) {
        self.models.insert(model, (segments, self.rings.len()));
        self.rings.push(slots);
    }

    /// The model of a request that is or was there.
    pub(crate) fn model_of(&self, request: RequestId) -> Option<ModelId> {
        self.requests.get(&request).map(|known| known.model)
    }

    /// Where a lane in use is.
    pub(crate) fn partition(&self, lane: LaneId) -> Option<PartitionId> {
        self.running.get(&lane).map(|(spec, _)| spec.partition)
    }

    fn known(&mut self, now: Time, request: RequestId) -> &mut CheckedRequest {
        let seed = self.seed;
        let known = self.requests.get_mut(&request);
        known.unwrap_or_else(|| panic!("seed {seed}, {now}: {request} was never there"))
    }

    /// A request is handed in.
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

    /// The policy gives a request slots of the ring.
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

    /// A request's input is in its slots.
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

    /// A policy launches on a lane that is for `lane`; `None`: there is no such lane.
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

    /// A launch is done; `exits`: members whose answer is final though segments are left.
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

    /// A lane is in use no more.
    pub fn free_lane(&mut self, now: Time, lane: LaneId) {
        let running = self.running.remove(&lane).map(|(_, running)| running).unwrap_or_default();
        assert!(running.is_empty(), "seed {}, {now}: {lane} is free and runs {running:?}", self.seed);
    }

    /// The policy answers a request.
    pub fn reply(&mut self, now: Time, request: RequestId) {
        let seed = self.seed;
        let segments = self.model_of(request).and_then(|model| Some(self.models.get(&model)?.0)).unwrap_or(0);
        let known = self.known(now, request);
        let complete = known.exited || known.passed == segments;
        assert!(complete, "seed {seed}, {now}: {request} is answered after {} of {segments} segments", known.passed);
        assert!(known.launch.is_none(), "seed {seed}, {now}: {request} is answered while it runs");
        self.end_request(now, request, RequestState::Answered);
    }

    /// The policy gives a request up.
    pub fn drop_request(&mut self, now: Time, request: RequestId) {
        let seed = self.seed;
        let known = self.known(now, request);
        assert!(known.launch.is_none(), "seed {seed}, {now}: {request} is dropped while it runs");
        if known.input || known.slots.is_none() {
            self.free(now, request);
        }
        self.end_request(now, request, RequestState::Dropped);
    }

    /// The policy says that a request whose client has gone was there.
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

    /// The run is over: everything has ended.
    pub fn end(&self, now: Time) {
        let seed = self.seed;
        let runs = self.running.values().any(|(_, running)| !running.is_empty());
        assert!(!runs, "seed {seed}, {now}: a lane still runs");
        assert!(self.open == 0, "seed {seed}, {now}: {} requests were never answered", self.open);
        assert!(self.taken.is_empty(), "seed {seed}, {now}: slots of the ring are still in use: {:?}", self.taken);
    }
}
