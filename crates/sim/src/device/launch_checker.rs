//! Judges every decision of a device policy from outside.

use std::collections::BTreeMap;

use downbeat_core::device::{DeviceRequest, DeviceScheduler, InputSource, LaneSpec, Launch, LaunchId, SlotRun};
use downbeat_core::{ModelId, RequestId, Time};

/// Judges every decision of a device policy from outside; each failure panics and prints the seed.
///
/// A request that is accepted is answered, dropped or cancelled exactly once. A lane runs one launch at a time, of the segments and at most
/// the items that it is for. The members of a launch are known, are in no other, and run every segment exactly once and in order. A launch
/// from the ring has the neighbouring slots of its members, whose inputs are there; no two requests have a slot in common.
#[derive(Debug)]
pub struct LaunchChecker {
    seed: u64,
    segments: u16,
    lanes: Vec<LaneSpec>,
    running: Vec<Option<Launch>>,
    /// By request id, from zero.
    requests: Vec<Known>,
    /// Slots of the ring; 0: there is none.
    slots: u32,
    /// Who has a slot.
    taken: BTreeMap<u32, RequestId>,
    open: u64,
}

#[derive(Clone, Debug)]
struct Known {
    size: u32,
    length: u32,
    /// Segments that it has run.
    passed: u16,
    exited: bool,
    launch: Option<LaunchId>,
    slots: Option<SlotRun>,
    /// Its input is in its slots.
    input: bool,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Accepted,
    Rejected,
    Answered,
    Dropped,
    Cancelled,
}

impl LaunchChecker {
    /// A checker of a run with this model, of so many segments, alone on the device.
    pub fn new(seed: u64, segments: u16, scheduler: &DeviceScheduler, model: ModelId) -> Self {
        let lanes: Vec<LaneSpec> = scheduler.lanes(model).iter().filter_map(|lane| scheduler.lane(*lane)).collect();
        LaunchChecker {
            seed,
            segments,
            running: vec![None; lanes.len()],
            lanes,
            requests: Vec::new(),
            slots: scheduler.stats(model).slots,
            taken: BTreeMap::new(),
            open: 0,
        }
    }

    fn known(&mut self, now: Time, request: RequestId) -> &mut Known {
        let seed = self.seed;
        let known = self.requests.get_mut(request.0 as usize);
        assert!(known.is_some(), "seed {seed}, {now}: {request} was never there");
        &mut self.requests[request.0 as usize]
    }

    /// A request is handed in; requests count from zero.
    pub fn request(&mut self, now: Time, request: &DeviceRequest, accepted: bool) {
        assert!(request.id.0 == self.requests.len() as u64, "seed {}, {now}: the simulation counts", self.seed);
        self.open += u64::from(accepted);
        self.requests.push(Known {
            size: request.size,
            length: request.length,
            passed: 0,
            exited: false,
            launch: None,
            slots: None,
            input: false,
            state: if accepted { State::Accepted } else { State::Rejected },
        });
    }

    /// The policy gives a request slots of the ring.
    pub fn admit(&mut self, now: Time, request: RequestId, slots: SlotRun) {
        let (seed, ring) = (self.seed, self.slots);
        let known = self.known(now, request);
        assert!(known.state == State::Accepted, "seed {seed}, {now}: {request} is admitted while {:?}", known.state);
        assert!(known.slots.is_none(), "seed {seed}, {now}: {request} is admitted twice");
        assert!(slots.count == known.size, "seed {seed}, {now}: {request} has {} items and {slots:?}", known.size);
        known.slots = Some(slots);
        for slot in slots.first..slots.first + slots.count {
            let before = self.taken.insert(slot % ring.max(1), request);
            assert!(before.is_none(), "seed {seed}, {now}: {request} gets slot {slot}, which {before:?} has");
        }
    }

    /// A request's input is in its slots.
    pub fn input(&mut self, now: Time, request: RequestId) {
        let known = self.known(now, request);
        known.input = true;
        if known.state != State::Accepted && known.launch.is_none() {
            self.free(now, request);
        }
    }

    fn free(&mut self, now: Time, request: RequestId) {
        let ring = self.slots.max(1);
        if let Some(slots) = self.known(now, request).slots {
            for slot in slots.first..slots.first + slots.count {
                if self.taken.get(&(slot % ring)) == Some(&request) {
                    self.taken.remove(&(slot % ring));
                }
            }
        }
    }

    /// The policy launches.
    pub fn launch(&mut self, now: Time, launch: &Launch) {
        let (seed, id, ring) = (self.seed, launch.id, self.slots);
        let lane = self.lanes.get(launch.lane.0 as usize);
        let Some(lane) = lane.copied() else { panic!("seed {seed}, {now}: {id} is on {}, which is none", launch.lane) };
        let before = self.running[launch.lane.0 as usize].replace(launch.clone());
        assert!(before.is_none(), "seed {seed}, {now}: {} gets {id} while it runs {before:?}", launch.lane);
        let (segments, range) = (lane.segments, launch.segments);
        assert!(
            segments.first <= range.first && range.end <= segments.end && range.end <= self.segments,
            "seed {seed}, {now}: {id} runs {range:?} on a lane for {segments:?}"
        );
        assert!(!launch.members.is_empty(), "seed {seed}, {now}: {id} is for nobody");
        let (mut rows, mut next) = (0, None);
        for member in &launch.members {
            let known = self.known(now, *member);
            let alive = matches!(known.state, State::Accepted | State::Cancelled);
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
                    next = Some((slots.first + slots.count) % ring.max(1));
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
        let before = self.running[launch.lane.0 as usize].take();
        let same = before.is_some_and(|before| before.id == launch.id);
        assert!(same, "seed {}, {now}: {} completes {}, which it does not run", self.seed, launch.lane, launch.id);
        for member in &launch.members {
            let known = self.known(now, *member);
            (known.passed, known.launch) = (launch.segments.end, None);
            known.exited |= exits.contains(member);
            self.free(now, *member);
        }
    }

    /// The policy answers a request.
    pub fn reply(&mut self, now: Time, request: RequestId) {
        let (seed, segments) = (self.seed, self.segments);
        let known = self.known(now, request);
        let complete = known.exited || known.passed == segments;
        assert!(complete, "seed {seed}, {now}: {request} is answered after {} of {segments} segments", known.passed);
        assert!(known.launch.is_none(), "seed {seed}, {now}: {request} is answered while it runs");
        self.end_request(now, request, State::Answered);
    }

    /// The policy gives a request up.
    pub fn drop_request(&mut self, now: Time, request: RequestId) {
        let seed = self.seed;
        let known = self.known(now, request);
        assert!(known.launch.is_none(), "seed {seed}, {now}: {request} is dropped while it runs");
        if known.input || known.slots.is_none() {
            self.free(now, request);
        }
        self.end_request(now, request, State::Dropped);
    }

    /// The policy says that a request whose client has gone was there.
    pub fn cancelled(&mut self, now: Time, request: RequestId) {
        let known = self.known(now, request);
        if known.launch.is_none() && known.input {
            self.free(now, request);
        }
        self.end_request(now, request, State::Cancelled);
    }

    fn end_request(&mut self, now: Time, request: RequestId, state: State) {
        let seed = self.seed;
        let known = self.known(now, request);
        assert!(known.state == State::Accepted, "seed {seed}, {now}: {request} is {state:?} after {:?}", known.state);
        known.state = state;
        self.open -= 1;
    }

    /// The run is over: everything has ended.
    pub fn end(&self, now: Time) {
        let seed = self.seed;
        assert!(self.running.iter().all(Option::is_none), "seed {seed}, {now}: a lane still runs");
        assert!(self.open == 0, "seed {seed}, {now}: {} requests were never answered", self.open);
        assert!(self.taken.is_empty(), "seed {seed}, {now}: slots of the ring are still in use: {:?}", self.taken);
    }
}
