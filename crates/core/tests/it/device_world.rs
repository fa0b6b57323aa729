//! A device policy on lanes that take exactly what its profile says, with a checker that judges
//! every output from outside.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use downbeat_core::device::*;
use downbeat_core::{BatchId, Duration, ModelId, RequestId, Time};

/// The state of a request.
struct Known {
    request: DeviceRequest,
    arrival: Time,
    /// Segments that have run.
    done: u16,
    running: bool,
    /// The launch that produced the request's outputs, if they are final.
    last: Option<LaunchId>,
}

/// The model of all requests.
const MODEL: ModelId = ModelId(0);

/// A policy with its device.
pub struct World {
    scheduler: DeviceScheduler,
    profile: SegmentProfile,
    ring_slots: u32,
    /// How long the transfer of an input takes.
    transfer: Duration,
    /// Requests that are answered after a segment, by id.
    exits: BTreeMap<RequestId, u16>,
    requests: BTreeMap<RequestId, Known>,
    /// Ring slots of requests, also of those with a client that has gone.
    slots: BTreeMap<RequestId, RingRun>,
    busy: BTreeMap<LaneId, LaunchId>,
    launches: BTreeMap<(Time, LaunchId), (Time, Launch)>,
    inputs: BTreeSet<(Time, RequestId)>,
    copies_until: Time,
    pub log: String,
    pub latencies: BTreeMap<RequestId, Duration>,
    pub dropped: u32,
    pub cancelled: u32,
    pub notes: Vec<Note>,
    pub most_running: usize,
}

impl World {
    pub fn new(policy: Box<dyn DevicePolicy>, profile: SegmentProfile, ring_slots: u32, transfer: Duration) -> Self {
        let mut scheduler = DeviceScheduler::new();
        let model = DeviceModel { policy, profile: profile.clone(), partition: PartitionId(0) };
        scheduler.handle_model(Time::ZERO, MODEL, Some(model)).unwrap();
        World {
            scheduler,
            profile,
            ring_slots,
            transfer,
            exits: BTreeMap::new(),
            requests: BTreeMap::new(),
            slots: BTreeMap::new(),
            busy: BTreeMap::new(),
            launches: BTreeMap::new(),
            inputs: BTreeSet::new(),
            copies_until: Time::ZERO,
            log: String::new(),
            latencies: BTreeMap::new(),
            dropped: 0,
            cancelled: 0,
            notes: Vec::new(),
            most_running: 0,
        }
    }

    pub fn exit_after(&mut self, request: RequestId, stage: u16) {
        self.exits.insert(request, stage);
    }

    fn say(&mut self, now: Time, text: &str) {
        let _ = writeln!(self.log, "{:8.3}  {text}", now.as_nanos() as f64 / 1e6);
    }

    pub fn request(&mut self, now: Time, request: DeviceRequest) {
        self.request_that_came(now, now, request);
    }

    /// A request that another process has kept since `arrival`.
    pub fn request_that_came(&mut self, arrival: Time, now: Time, request: DeviceRequest) {
        self.run_until(now);
        match self.scheduler.handle_request(now, &request) {
            Ok(()) => {
                let known = Known { request, arrival, done: 0, running: false, last: None };
                assert!(self.requests.insert(request.id, known).is_none());
                self.carry_out(now);
            }
            Err(error) => self.say(now, &format!("{} rejected: {error}", request.id)),
        }
    }

    pub fn cancel(&mut self, now: Time, request: RequestId) {
        self.run_until(now);
        let there = self.scheduler.handle_cancel(now, MODEL, request);
        assert_eq!(there, self.requests.contains_key(&request), "{request} is there or not");
        if there {
            self.say(now, &format!("{request} cancelled"));
            // A launch that runs with this request goes on, and the request gets no reply.
            self.requests.remove(&request);
            self.cancelled += 1;
        }
        self.carry_out(now);
    }

    /// Everything that happens up to `end`, that moment's completions and timers not included.
    pub fn run_until(&mut self, end: Time) {
        while let Some(at) = self.next_time().filter(|at| *at < end) {
            self.step(at);
        }
    }

    /// Until nothing happens any more. Every request has been answered then.
    pub fn finish(&mut self) {
        while let Some(at) = self.next_time() {
            self.step(at);
        }
        let left: Vec<_> = self.requests.keys().collect();
        assert!(left.is_empty(), "never answered: {left:?}\n{}", self.log);
        let stats = self.scheduler.stats(MODEL);
        assert_eq!((stats.waiting, stats.running, stats.occupied), (0, 0, 0), "nothing is left\n{}", self.log);
    }

    fn next_time(&self) -> Option<Time> {
        let completion = self.launches.keys().next().map(|(at, _)| *at);
        let input = self.inputs.first().map(|(at, _)| *at);
        let timer = self.scheduler.poll_timeout().map(|(at, _)| at);
        [completion, input, timer].into_iter().flatten().min()
    }

    fn step(&mut self, at: Time) {
        if let Some((time, id)) = self.launches.keys().next().copied()
            && time <= at
        {
            let (start, launch) = self.launches.remove(&(time, id)).unwrap();
            return self.complete(at, start, launch);
        }
        if let Some((time, request)) = self.inputs.first().copied()
            && time <= at
        {
            self.inputs.remove(&(time, request));
            self.scheduler.handle_input(at, MODEL, request);
            return self.carry_out(at);
        }
        let before = self.scheduler.poll_timeout();
        self.scheduler.handle_timeout(at);
        self.carry_out(at);
        assert!(self.scheduler.poll_timeout() != before, "a timer at {at} changes nothing: {before:?}\n{}", self.log);
    }

    fn complete(&mut self, now: Time, start: Time, launch: Launch) {
        assert_eq!(self.busy.remove(&launch.lane), Some(launch.id));
        let mut exits = Vec::new();
        for member in &launch.members {
            let Some(known) = self.requests.get_mut(member) else { continue };
            known.running = false;
            known.done = launch.segments.end;
            let early = self.exits.get(member).is_some_and(|stage| stage + 1 == launch.segments.end);
            if early {
                exits.push(*member);
            }
            if early || known.done == self.profile.segments() {
                known.last = Some(launch.id);
            }
        }
        let span = Span { start, end: now };
        self.scheduler.handle_completion(now, launch.id, span, &exits);
        // A repeated report does no harm.
        self.scheduler.handle_completion(now, launch.id, span, &exits);
        self.carry_out(now);
    }

    fn carry_out(&mut self, now: Time) {
        while let Some(output) = self.scheduler.poll_output() {
            match output {
                DeviceOutput::Admit { request, slots, .. } => {
                    assert!(slots.first < self.ring_slots && slots.count <= self.ring_slots);
                    assert!(self.slots.insert(request, slots).is_none(), "{request} is admitted once");
                    // The request may have been cancelled during the transfer.
                    let size = self.requests.get(&request).map_or(slots.count, |known| known.request.size);
                    assert_eq!(slots.count, size);
                    self.copies_until = self.copies_until.max(now) + self.transfer;
                    self.inputs.insert((self.copies_until, request));
                }
                DeviceOutput::Launch(launch) => self.launch(now, launch),
                DeviceOutput::Reply { request, launch } => {
                    let known = self.requests.remove(&request);
                    let known = known.unwrap_or_else(|| panic!("{request} is answered once\n{}", self.log));
                    assert_eq!(known.last, Some(launch), "{request} is answered by what completed it");
                    let took = now.since(known.arrival);
                    self.say(now, &format!("reply {request} after {took}"));
                    self.latencies.insert(request, took);
                }
                DeviceOutput::Drop { request, reason } => {
                    let known = self.requests.remove(&request);
                    assert!(known.is_some_and(|known| !known.running && known.done == 0), "{request} can be dropped");
                    self.say(now, &format!("drop {request}: {reason:?}"));
                    self.dropped += 1;
                }
                DeviceOutput::Note { note, .. } => {
                    self.say(now, &describe(&note));
                    self.notes.push(note);
                }
                other => panic!("no policy of one model does this: {other:?}"),
            }
        }
    }

    fn launch(&mut self, now: Time, launch: Launch) {
        assert!(self.scheduler.lanes(MODEL).contains(&launch.lane));
        let lane = self.scheduler.lane(launch.lane).expect("a lane that there is");
        assert!(lane.segments.first <= launch.segments.first && launch.segments.end <= lane.segments.end);
        assert!(launch.rows <= lane.max_rows && launch.computed_rows >= launch.rows && !launch.members.is_empty());
        let other = self.busy.insert(launch.lane, launch.id);
        assert!(other.is_none(), "lane {} runs {other:?} and is given {}\n{}", launch.lane, launch.id, self.log);
        self.most_running = self.most_running.max(self.busy.len());
        let (mut next, mut contiguous) = (None::<RingRun>, true);
        for member in &launch.members {
            let Some(known) = self.requests.get_mut(member) else { continue };
            assert!(!known.running, "{member} is in one launch at a time");
            assert_eq!(known.done, launch.segments.first, "{member} runs its segments in order, each once");
            assert!(known.request.length <= launch.length, "{member} fits what it is padded to");
            known.running = true;
        }
        for member in &launch.members {
            let slots = self.slots.get(member).copied();
            contiguous &= match (next, slots) {
                (None, Some(_)) => true,
                (Some(last), Some(slots)) => (last.first + last.count) % self.ring_slots == slots.first,
                _ => false,
            };
            next = slots;
        }
        if let InputSource::Ring(run) = launch.inputs {
            assert!(contiguous && run.count == launch.rows, "members lie in one run of the ring");
        }
        let took = (launch.segments.first..launch.segments.end)
            .map(|segment| self.profile.time(segment, launch.computed_rows, launch.length))
            .fold(Duration::ZERO, |sum, time| sum + time);
        let members: Vec<String> = launch.members.iter().map(ToString::to_string).collect();
        let source = match launch.inputs {
            InputSource::Ring(run) => format!(" from slot {}", run.first),
            _ => String::new(),
        };
        let segments = if launch.segments.end - launch.segments.first == self.profile.segments() {
            String::new()
        } else {
            format!(" stage {}", launch.segments.first)
        };
        let filled =
            if launch.computed_rows > launch.rows { format!(" as {}", launch.computed_rows) } else { String::new() };
        self.say(
            now,
            &format!(
                "{} {}{segments} on {}: {}{filled}{source}, {took}",
                launch.id,
                launch.batch,
                launch.lane,
                members.join(" ")
            ),
        );
        self.launches.insert((now + took, launch.id), (now, launch));
    }
}

fn describe(note: &Note) -> String {
    let list = |ids: &[BatchId]| ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    match note {
        Note::New { batch, rows, length: 0 } => format!("new {batch}: {rows}"),
        Note::New { batch, rows, length } => format!("new {batch}: {rows} of length {length}"),
        Note::Stretch { batch, joined, rows, stage } => {
            format!("stretch {batch} by {joined} to {rows} after stage {stage}")
        }
        Note::Split { batch, into, stage } => format!("split {batch}, off it {} after stage {stage}", list(into)),
        Note::Exit { batch, rows, stage } => format!("exit of {rows} from {batch} after stage {stage}"),
        Note::Switch { load } => format!("lanes for a load of {load}"),
        Note::RingFull { waiting } => format!("the ring is full, {waiting} wait"),
        Note::PrepareFailed { .. } | Note::Group { .. } => panic!("nothing is prepared or grouped"),
    }
}
