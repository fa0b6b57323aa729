//! A run of a device policy under virtual time.

use std::collections::{BTreeMap, BTreeSet};

use downbeat_core::device::{
    DeviceModel, DeviceOutput, DeviceRequest, DeviceScheduler, InputSource, Launch, LaunchId, SegmentRange,
    Span as DeviceSpan,
};
use downbeat_core::{Duration, ModelId, RequestId, Time};
use rand_distr::{Distribution, StandardUniform};
use rand_pcg::Pcg64;

use super::contended::{Completed, ContendedDevice, Direction, Work};
use super::launch_checker::LaunchChecker;
use super::model::EmulatedModel;
use super::report::{DeviceReport, Span};
use super::workload::DeviceLoad;
use crate::arrivals::{BadArrivals, random};

/// The model on the device.
const MODEL: ModelId = ModelId(0);

/// A model on a device, what is asked of it, and how to look.
#[derive(Clone, Debug)]
pub struct DeviceSimulation {
    /// The model.
    pub model: EmulatedModel,
    /// The requests.
    pub load: DeviceLoad,
    /// From a request's arrival to when it has to be answered.
    pub slo: Duration,
    /// Whether the policy knows the deadline.
    pub deadlines: bool,
    /// Requests at the start that do not count.
    pub warm_up: u64,
    /// Chooses all random numbers.
    pub seed: u64,
    /// Ends of segments after which a request's answer may be final (DVABatch §9.2): the segment, and how probable it is.
    pub exits: Vec<(u16, f64)>,
    /// How probable it is that a client goes away, at a random time up to the SLO.
    pub cancelled: f64,
    /// End the run once more than this share of all requests is certain to be late.
    pub give_up_above: Option<f64>,
    /// Record what runs where when.
    pub record: bool,
}

impl DeviceSimulation {
    /// No deadline that the policy knows of, no early exit, nobody goes away, the first tenth of the requests does not count.
    pub fn new(model: EmulatedModel, load: DeviceLoad, slo: Duration, seed: u64) -> Self {
        DeviceSimulation {
            model,
            slo,
            deadlines: false,
            warm_up: load.requests / 10,
            load,
            seed,
            exits: Vec::new(),
            cancelled: 0.0,
            give_up_above: None,
            record: false,
        }
    }

    /// Runs it. Panics, with the seed, if the policy breaks one of the [`LaunchChecker`]'s rules.
    ///
    /// # Errors
    /// If the arrival process has no positive, finite rate and shape.
    pub fn run(&self, policy: DeviceModel) -> Result<DeviceReport, BadArrivals> {
        let mut feed = self.load.feed(self.seed)?;
        let mut world = World::new(self, policy);
        let mut now = Time::ZERO;
        let most_late = self.give_up_above.map(|share| (share * self.load.requests as f64) as u64);
        loop {
            let device = world.device.next_event();
            let arrival = feed.peek();
            let cancel = world.cancels.first().map(|(at, _)| *at);
            let timeout = world.scheduler.poll_timeout().map(|(at, _)| at);
            // At one instant: completions, arrivals, clients that go, timers.
            let Some(next) = [device, arrival, cancel, timeout].into_iter().flatten().min() else { break };
            now = now.max(next);
            if device.is_some_and(|at| at <= now) {
                for completed in world.device.advance(now) {
                    world.complete(now, completed);
                }
            } else if arrival.is_some_and(|at| at <= now) {
                world.device.advance(now);
                if let Some((_, length)) = feed.pop() {
                    world.arrive(now, length);
                }
            } else if cancel.is_some_and(|at| at <= now) {
                world.device.advance(now);
                if let Some((_, request)) = world.cancels.pop_first()
                    && world.scheduler.handle_cancel(now, MODEL, request)
                {
                    world.checker.cancelled(now, request);
                }
            } else {
                world.device.advance(now);
                world.scheduler.handle_timeout(now);
            }
            world.carry_out(now);
            if most_late.is_some_and(|most| world.late(now) > most) {
                world.report.gave_up = true;
                break;
            }
        }
        if !world.report.gave_up {
            world.checker.end(now);
        }
        Ok(world.finish(now))
    }
}

/// A launch under way.
struct Flight {
    launch: Launch,
    step: Step,
    start: Time,
}

/// What a launch is at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The host joins its inputs.
    Gather,
    CopyIn,
    Compute,
    CopyOut,
}

struct World<'a> {
    simulation: &'a DeviceSimulation,
    scheduler: DeviceScheduler,
    device: ContendedDevice,
    checker: LaunchChecker,
    report: DeviceReport,
    flights: BTreeMap<LaunchId, Flight>,
    /// By request id.
    requests: Vec<Request>,
    cancels: BTreeSet<(Time, RequestId)>,
    rng: Pcg64,
    /// The oldest request that may be unanswered.
    oldest: usize,
    late: u64,
    /// Items times length that were computed, and that were asked for.
    computed: u64,
    asked: u64,
    /// Begins of the copies of requests, for the timeline.
    copies: BTreeMap<(Direction, u64), Time>,
}

struct Request {
    arrival: Time,
    size: u32,
    length: u32,
    ended: bool,
    /// A launch of its brings its outputs back itself.
    with_host: bool,
}

/// A copy's name says whose it is: a launch's or a request's.
fn launch_copy(launch: LaunchId) -> u64 {
    launch.0 * 2 + 1
}

fn request_copy(request: RequestId) -> u64 {
    request.0 * 2
}

impl<'a> World<'a> {
    fn new(simulation: &'a DeviceSimulation, policy: DeviceModel) -> Self {
        let model = &simulation.model;
        let mut scheduler = DeviceScheduler::new();
        let added = scheduler.handle_model(Time::ZERO, MODEL, Some(policy));
        assert!(added.is_ok(), "a device has a partition");
        World {
            simulation,
            device: ContendedDevice::new(model.limits(), scheduler.lanes(MODEL).len()),
            checker: LaunchChecker::new(simulation.seed, model.segment_count(), &scheduler, MODEL),
            scheduler,
            report: DeviceReport::default(),
            flights: BTreeMap::new(),
            requests: Vec::new(),
            cancels: BTreeSet::new(),
            rng: random(simulation.seed, 2),
            oldest: 0,
            late: 0,
            computed: 0,
            asked: 0,
            copies: BTreeMap::new(),
        }
    }

    fn arrive(&mut self, now: Time, length: u32) {
        let id = RequestId(self.requests.len() as u64);
        let slo = self.simulation.slo;
        let deadline = if self.simulation.deadlines { now + slo } else { Time::MAX };
        let request = DeviceRequest { id, model: MODEL, deadline, size: 1, length };
        let accepted = self.scheduler.handle_request(now, &request).is_ok();
        self.checker.request(now, &request, accepted);
        self.report.rejected += u64::from(!accepted);
        self.requests.push(Request { arrival: now, size: 1, length, ended: !accepted, with_host: false });
        self.report.latencies_ms.push(f64::NAN);
        self.report.arrivals_s.push(now.since(Time::ZERO).as_secs_f64());
        if self.chance() < self.simulation.cancelled {
            let after = Duration::from_secs_f64(slo.as_secs_f64() * self.chance());
            self.cancels.insert((now + after, id));
        }
    }

    fn chance(&mut self) -> f64 {
        StandardUniform.sample(&mut self.rng)
    }

    /// Requests that are late already, answered or not.
    fn late(&mut self, now: Time) -> u64 {
        while let Some(request) = self.requests.get(self.oldest) {
            if now.since(request.arrival) <= self.simulation.slo {
                break;
            }
            let latency = self.report.latencies_ms[self.oldest];
            let good = latency <= self.simulation.slo.as_millis_f64();
            self.late += u64::from(!good && self.oldest as u64 >= self.simulation.warm_up);
            self.oldest += 1;
        }
        self.late
    }

    fn carry_out(&mut self, now: Time) {
        while let Some(output) = self.scheduler.poll_output() {
            match output {
                DeviceOutput::Admit { request, slots, .. } => {
                    self.checker.admit(now, request, slots);
                    let Request { length, size, .. } = self.requests[request.0 as usize];
                    let (bytes, _) = self.item_bytes(length);
                    self.copy(now, Direction::In, request_copy(request), bytes * u64::from(size));
                }
                DeviceOutput::Launch(launch) => self.launch(now, launch),
                DeviceOutput::Reply { request, .. } => {
                    self.checker.reply(now, request);
                    let Request { length, size, with_host, .. } = self.requests[request.0 as usize];
                    if with_host {
                        self.answer(now, request);
                    } else {
                        let (_, bytes) = self.item_bytes(length);
                        self.copy(now, Direction::Out, request_copy(request), bytes * u64::from(size));
                    }
                }
                DeviceOutput::Drop { request, .. } => {
                    self.checker.drop_request(now, request);
                    self.requests[request.0 as usize].ended = true;
                    self.report.dropped += 1;
                }
                DeviceOutput::Note { note, .. } => self.report.note(&note),
                other => unreachable!("no policy of one model does this: {other:?}"),
            }
        }
    }

    fn item_bytes(&self, length: u32) -> (u64, u64) {
        self.simulation.model.item_bytes(length)
    }

    fn copy(&mut self, now: Time, direction: Direction, token: u64, bytes: u64) {
        if self.simulation.record {
            self.copies.insert((direction, token), now);
        }
        self.device.copy(now, direction, token, bytes);
    }

    fn launch(&mut self, now: Time, launch: Launch) {
        self.checker.launch(now, &launch);
        self.report.launches += 1;
        let model = &self.simulation.model;
        let share = u64::from(launch.segments.end - launch.segments.first);
        self.computed += u64::from(launch.computed_rows) * u64::from(launch.length.max(1)) * share;
        let host = launch.inputs == InputSource::Host;
        for member in &launch.members {
            let member = &mut self.requests[member.0 as usize];
            self.asked += u64::from(member.size) * u64::from(member.length.max(1)) * share;
            member.with_host = host && launch.segments.end == model.segment_count();
        }
        let (lane, id) = (launch.lane, launch.id);
        let (step, work) = if host {
            let bytes = self.item_bytes(launch.length).0 * u64::from(launch.computed_rows);
            (Step::Gather, Work { overhead: model.gather(bytes), kernels: Vec::new() })
        } else {
            (Step::Compute, self.work(launch.segments, &launch))
        };
        self.flights.insert(id, Flight { launch, step, start: now });
        self.device.launch(now, lane, id.0, work);
    }

    fn work(&self, segments: SegmentRange, launch: &Launch) -> Work {
        self.simulation.model.work(segments, launch.computed_rows, launch.length)
    }

    fn complete(&mut self, now: Time, completed: Completed) {
        match completed {
            Completed::Copy { direction, token } => {
                self.span_of_copy(now, direction, token);
                match (token % 2 == 1, direction) {
                    (true, _) => self.proceed(now, LaunchId(token / 2)),
                    (false, Direction::In) => {
                        let request = RequestId(token / 2);
                        self.checker.input(now, request);
                        self.scheduler.handle_input(now, MODEL, request);
                        self.carry_out(now);
                    }
                    (false, Direction::Out) => self.answer(now, RequestId(token / 2)),
                }
            }
            Completed::Launch { token, .. } => self.proceed(now, LaunchId(token)),
        }
    }

    /// The step that a launch is at is done.
    fn proceed(&mut self, now: Time, id: LaunchId) {
        let Some(mut flight) = self.flights.remove(&id) else { return };
        let launch = &flight.launch;
        let (inputs, outputs) = self.item_bytes(launch.length);
        let items = u64::from(launch.computed_rows);
        let last = launch.segments.end == self.simulation.model.segment_count();
        match flight.step {
            Step::Gather => {
                flight.step = Step::CopyIn;
                self.copy(now, Direction::In, launch_copy(id), items * inputs);
            }
            Step::CopyIn => {
                flight.step = Step::Compute;
                let (lane, work) = (launch.lane, self.work(launch.segments, launch));
                self.device.launch(now, lane, id.0, work);
            }
            Step::Compute if last && launch.inputs == InputSource::Host => {
                flight.step = Step::CopyOut;
                self.copy(now, Direction::Out, launch_copy(id), items * outputs);
            }
            Step::Compute | Step::CopyOut => return self.end(now, flight),
        }
        self.flights.insert(id, flight);
    }

    fn end(&mut self, now: Time, flight: Flight) {
        let launch = flight.launch;
        if self.simulation.record {
            let label = match launch.segments {
                SegmentRange { first: 0, end } if end == self.simulation.model.segment_count() => {
                    launch.rows.to_string()
                }
                SegmentRange { first, end } => format!("{} s{first}..{end}", launch.rows),
            };
            let row = launch.lane.0 as usize;
            self.report.spans.push(Span { row, start: flight.start, end: now, rows: launch.rows, label });
        }
        let range = launch.segments;
        let chances = self.simulation.exits.iter().filter(|(segment, _)| *segment + 1 == range.end);
        let stays: f64 = chances.map(|(_, chance)| 1.0 - chance).product();
        let may = range.end < self.simulation.model.segment_count() && stays < 1.0;
        let mut exits = Vec::new();
        if may {
            for member in &launch.members {
                if self.chance() >= stays {
                    exits.push(*member);
                }
            }
        }
        self.checker.completion(now, &launch, &exits);
        let span = DeviceSpan { start: flight.start, end: now };
        self.scheduler.handle_completion(now, launch.id, span, &exits);
        self.carry_out(now);
    }

    fn answer(&mut self, now: Time, request: RequestId) {
        let known = &mut self.requests[request.0 as usize];
        assert!(!known.ended, "seed {}, {now}: {request} is answered twice", self.simulation.seed);
        known.ended = true;
        self.report.latencies_ms[request.0 as usize] = now.since(known.arrival).as_millis_f64();
    }

    fn span_of_copy(&mut self, now: Time, direction: Direction, token: u64) {
        if let Some(start) = self.copies.remove(&(direction, token)) {
            let row = self.scheduler.lanes(MODEL).len() + direction as usize;
            // What waited behind another copy began when that ended.
            let before =
                self.report.spans.iter().rev().find(|span| span.row == row).map_or(Time::ZERO, |span| span.end);
            let start = start.max(before);
            self.report.spans.push(Span { row, start, end: now, rows: 1, label: String::new() });
        }
    }

    fn finish(mut self, now: Time) -> DeviceReport {
        let lanes = self.scheduler.lanes(MODEL).iter().filter_map(|lane| self.scheduler.lane(*lane));
        let lanes = lanes.map(|lane| format!("≤{}", lane.max_rows));
        self.report.rows = lanes.chain(["in".to_owned(), "out".to_owned()]).collect();
        let units = f64::from(self.simulation.model.limits().units);
        let unit_nanos = self.device.used_unit_nanos() as f64;
        self.report.utilisation = unit_nanos / (units * now.as_nanos().max(1) as f64);
        self.report.most_slots = self.scheduler.stats(MODEL).most_occupied;
        self.report.padding = 1.0 - self.asked as f64 / self.computed.max(1) as f64;
        self.report.summarise(self.simulation.warm_up as usize, self.simulation.slo);
        self.report
    }
}
