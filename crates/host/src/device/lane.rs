//! Runs a lane's launches. A thread takes any lane that has launches, of whichever model, and runs
//! them one after another. It gives the next launch to the device while the one before is under
//! way.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};

use downbeat_core::device::{Launch, PartitionId, SegmentRange};
use downbeat_core::{Duration, RequestId, Time};
use downbeat_engine::{Lane, Pinned, State, ask_for_short_slices, at_normal_priority};
use downbeat_service::clock::Clock;
use downbeat_service::metrics::statistics::Phases;
use parking_lot::Mutex;

use super::crew::{Crew, Seat};
use super::lane_host::{LaneHost, OwnLaunch, Taken, Wanted};
use super::launch::{Body, Head, Outcome, Source, Work};
use super::placement::Placement;
use super::tensors::Member;
use crate::request::batch_codec::Outputs;
use crate::run::engine_run::{self, RunFailure, Running, Watch};
use crate::run::watchdog::{Owner, Post};

/// A thread that runs launches. The crew gets another thread if a run on this one does not end.
struct Worker {
    host: Arc<dyn LaneHost>,
    device: usize,
    clock: Clock,
    /// The crew of the thread; `None`: the thread is a guest.
    crew: Option<Arc<Crew>>,
    flights: Mutex<Flights>,
}

/// A thread that has other things to do and runs a launch of a device now and then.
pub struct Guest {
    worker: Arc<Worker>,
    post: Arc<Post>,
}

/// The launches that are under way on a thread. Taking a launch out is a duty to finish it.
#[derive(Default)]
struct Flights {
    /// The launches and their begins, in their order.
    launches: VecDeque<(Head, Time)>,
    /// The lane that they are on.
    seat: Option<Arc<Seat>>,
    /// Why the watchdog left the thread behind, if it did. Another thread then has its launches and
    /// its lane.
    left_behind: Option<String>,
}

/// A launch that a thread has begun.
struct Begun<'a> {
    run: Run<'a>,
    body: Body,
    /// When the launch was begun; `assembled`: when its tensors were ready.
    begin: Time,
    assembled: Time,
    stage: Stage<'a>,
}

/// The facts of a launch that a thread needs to run it.
struct Run<'a> {
    model: Arc<Placement>,
    watch: Watch<'a>,
    clock: Clock,
    seat: Arc<Seat>,
    /// The number of the model's lane.
    lane: usize,
    partition: PartitionId,
    is_granted: bool,
    segments: SegmentRange,
    rows: u32,
    computed_rows: u32,
    length: u32,
}

/// How far it is.
enum Stage<'a> {
    /// The engine runs the launch.
    Runs(Running<'a>),
    /// The members must run one after another.
    Alone,
    Failed(RunFailure),
    Over(Outcome),
}

/// A thread was left behind: others see to all that it had.
struct LeftBehind;

/// Starts a thread for the lanes of a partition, at the priority of the server.
///
/// # Errors
/// If the operating system has no thread left.
pub fn start(host: Arc<dyn LaneHost>, crew: Arc<Crew>) -> std::io::Result<std::thread::JoinHandle<()>> {
    let name = format!("lane-{}", host.device());
    let worker = Worker::new(host, Some(crew.clone()));
    at_normal_priority(move || std::thread::Builder::new().name(name).spawn(move || worker.work(&crew)))
}

impl Guest {
    /// The calling thread, on a device.
    pub fn at(host: Arc<dyn LaneHost>) -> Arc<Self> {
        let worker = Worker::new(host, None);
        let owner: Weak<Worker> = Arc::downgrade(&worker);
        let post = worker.host.watchdog().post(owner);
        Arc::new(Guest { worker, post })
    }

    /// Whether it is on this device.
    pub fn is_at(&self, host: &Arc<dyn LaneHost>) -> bool {
        Arc::ptr_eq(&self.worker.host, host)
    }

    /// Whether this guest alone still knows the device.
    pub fn is_alone(&self) -> bool {
        Arc::strong_count(&self.worker.host) == 1
    }

    /// Runs a launch of a lane that the caller holds, then its batch's next segments, and finishes
    /// them. Returns false if the watchdog finished a launch that took too long: then this guest
    /// must run no more.
    pub fn run(&self, seat: &Arc<Seat>) -> bool {
        let mut follows = Some(seat.clone());
        while let Some(seat) = follows.take() {
            let Some(work) = seat.next_or_release() else { return true };
            let Ok(begun) = self.worker.begin(&self.post, &seat, work) else { return false };
            let (begin, end, outcome) = self.worker.end(begun, Time::ZERO);
            let mut own = OwnLaunch::wants(Wanted::BriefRest);
            if self.worker.finish(begin, end, outcome, &mut own).is_err() {
                return false;
            }
            seat.release();
            follows = own.take().map(|Taken { seat, .. }| seat);
        }
        true
    }
}

impl Worker {
    fn new(host: Arc<dyn LaneHost>, crew: Option<Arc<Crew>>) -> Arc<Self> {
        let (device, clock) = (host.device(), host.clock());
        Arc::new(Worker { host, device, clock, crew, flights: Mutex::default() })
    }

    /// The life of a thread.
    fn work(self: Arc<Self>, crew: &Arc<Crew>) {
        ask_for_short_slices();
        Pinned::stay();
        // Pins the thread now, not in the first launch. If pinning fails, the engine reports it.
        drop(crew.cores.as_ref().map(Pinned::to));
        let owner: Weak<Worker> = Arc::downgrade(&self);
        let post = self.host.watchdog().post(owner);
        let mut follows = None;
        while let Some(seat) = follows.take().or_else(|| crew.take()) {
            match self.serve(&post, &seat) {
                Ok(next) => follows = next,
                Err(LeftBehind) => return,
            }
        }
    }

    /// Runs the launches of a lane until it has none, or until a launch of another lane follows
    /// from the last one. Returns that lane, held for this thread.
    fn serve(&self, post: &Post, seat: &Arc<Seat>) -> Result<Option<Arc<Seat>>, LeftBehind> {
        let mut next: Option<Begun<'_>> = None;
        // When the lane was last done with a launch: the next one has not run before.
        let mut done = Time::ZERO;
        loop {
            let begun = match next.take() {
                Some(begun) => begun,
                None => match seat.next_or_release() {
                    Some(work) => self.begin(post, seat, work)?,
                    None => return Ok(None),
                },
            };
            // A launch that comes while the device works is enqueued at once.
            if let Some(spare) = begun.spare()
                && let Some(work) = seat.next_within(spare)
            {
                next = Some(self.begin(post, seat, work)?);
            }
            let (begin, end, outcome) = self.end(begun, done);
            done = end;
            let wanted = if next.is_some() { Wanted::None } else { Wanted::Of(seat.crew.clone()) };
            let mut own = OwnLaunch::wants(wanted);
            self.finish(begin, done, outcome, &mut own)?;
            if let Some(Taken { seat: follows, .. }) = own.take() {
                seat.release();
                return Ok(Some(follows));
            }
        }
    }

    /// The first of its launches has ended, and is seen to unless the thread was left behind.
    fn finish(&self, begin: Time, end: Time, outcome: Outcome, own: &mut OwnLaunch) -> Result<(), LeftBehind> {
        let mut flights = self.flights.lock();
        if flights.left_behind.is_some() {
            return Err(LeftBehind);
        }
        let head = flights.launches.pop_front();
        // The lane may go before the thread has another.
        let seat = if flights.launches.is_empty() { flights.seat.take() } else { None };
        drop((flights, seat));
        if let Some((head, _)) = head {
            self.host.finish(head, begin, end, outcome, own);
        }
        Ok(())
    }

    /// Begins a launch of a lane, unless the thread was left behind: then it is seen to.
    fn begin<'a>(&'a self, post: &'a Post, seat: &Arc<Seat>, work: Work) -> Result<Begun<'a>, LeftBehind> {
        let Work { mut head, mut body } = work;
        let (launch, model) = (&head.launch, head.model.clone());
        let expected = match &mut head.grant {
            Some(grant) => {
                let refiner = grant.queue.refiner(self.device, head.partition).lock();
                let profile = refiner.profile();
                grant.is_guess = profile.known().is_some_and(|known| launch.rows > known);
                profile.latency(launch.rows)
            }
            None => model.profile.latency(launch.computed_rows),
        };
        let watch = Watch { post, health: model.health.clone(), device: self.device, limit: post.limit(expected) };
        let Launch { segments, rows, computed_rows, length, .. } = *launch;
        let (is_granted, lane, partition) = (head.grant.is_some(), head.lane, head.partition);
        let seat = seat.clone();
        let run = Run {
            model,
            watch,
            clock: self.clock,
            seat,
            lane,
            partition,
            is_granted,
            segments,
            rows,
            computed_rows,
            length,
        };
        let begin = self.host.begin(&head);
        let mut flights = self.flights.lock();
        if let Some(reason) = flights.left_behind.clone() {
            drop(flights);
            let outcome = Outcome::failed(body.requests(), &RunFailure::Ended(reason));
            let outcome = Outcome { members: body.members, ..outcome };
            self.host.finish(head, begin, self.clock.now(), outcome, &mut OwnLaunch::default());
            return Err(LeftBehind);
        }
        flights.launches.push_back((head, begin));
        flights.seat = Some(run.seat.clone());
        drop(flights);
        let mut assembled = begin;
        let stage = run.caught(|| begin_run(&run, &mut body, &mut assembled));
        let stage = stage.unwrap_or_else(|failure| Stage::Over(Outcome::failed(body.requests(), &failure)));
        Ok(Begun { run, body, begin, assembled, stage })
    }

    /// Waits for the end of a launch. The lane ended the launch before this one at `done`. Returns
    /// when the lane began this launch, when the launch ended, and its outcome.
    fn end(&self, begun: Begun<'_>, done: Time) -> (Time, Time, Outcome) {
        let Begun { run, body, begin, assembled, stage } = begun;
        // The launch before it ended at `done`: work on this one until then does not count as its
        // run.
        let begin = begin.max(done);
        let assembled = assembled.max(begin);
        let now = |outcome| (self.clock.now(), outcome);
        let ended = run.caught(|| match stage {
            Stage::Over(outcome) => now(outcome),
            Stage::Runs(running) => end_run(&run, &body, running, (begin, assembled)),
            Stage::Alone => now(each_alone(&run, &body)),
            Stage::Failed(failure) => now(answer_alone(&run, &body, failure)),
        });
        let (end, outcome) = ended.unwrap_or_else(|failure| {
            run.watch.post.end();
            now(Outcome::failed(body.requests(), &failure))
        });
        (begin, end, Outcome { members: body.members, ..outcome })
    }
}

impl Run<'_> {
    /// Does something on the engine's lane, once no other thread uses it.
    fn on_lane<T>(&self, run: impl FnOnce(&mut dyn Lane) -> Result<T, RunFailure>) -> Result<T, RunFailure> {
        // A run that was left behind still has the lane.
        if let Some(reason) = self.watch.health.refuses() {
            return Err(RunFailure::Refused(reason));
        }
        let engine = self.seat.engine().or_else(|| self.model.engines.lane(self.partition, self.lane));
        match engine {
            Some(mut lane) => run(&mut **lane),
            None => Err(RunFailure::Engine(format!("the model has no lane on device {}", self.watch.device))),
        }
    }

    /// The result of `run`, or a failure if it panicked.
    fn caught<T>(&self, run: impl FnOnce() -> T) -> Result<T, RunFailure> {
        std::panic::catch_unwind(AssertUnwindSafe(run)).map_err(|_| {
            tracing::error!(device = self.watch.device, self.lane, "a launch ended in a panic: this is a defect");
            RunFailure::Engine("the launch ended in a panic".to_owned())
        })
    }

    /// Dummies behind the members' rows.
    fn fill(&self) -> u32 {
        self.computed_rows.saturating_sub(self.rows)
    }
}

impl Begun<'_> {
    /// How long the thread may do other things before it waits for the end of the launch. `None`:
    /// the device is not at work on it, or no launch can come before its end. The scheduler grants
    /// a slot its next batch only after the one before, so that more requests join it.
    fn spare(&self) -> Option<Duration> {
        match &self.stage {
            Stage::Runs(running) if !self.run.is_granted => running.spare(),
            Stage::Runs(_) | Stage::Alone | Stage::Failed(_) | Stage::Over(_) => None,
        }
    }
}

impl Owner for Worker {
    fn is_awaited(&self) -> bool {
        let flights = self.flights.lock();
        let mut members = flights.launches.iter().flat_map(|(head, _)| &head.launch.members);
        flights.launches.is_empty() || self.host.is_awaited(&mut members)
    }

    /// Answers the launches on this thread, and gives its crew another thread.
    fn leave_behind(&self, reason: &str) {
        let (launches, seat) = {
            let mut flights = self.flights.lock();
            if flights.launches.is_empty() {
                return;
            }
            flights.left_behind = Some(reason.to_owned());
            (std::mem::take(&mut flights.launches), flights.seat.take())
        };
        let (host, failure) = (&self.host, RunFailure::Ended(reason.to_owned()));
        let started = self.crew.as_ref().map_or(Ok(()), |crew| start(host.clone(), crew.clone()).map(drop));
        if let Err(error) = started {
            host.watchdog().give_up(format!("there is no thread left for a lane of device {}: {error}", self.device));
        }
        seat.iter().for_each(Seat::release);
        for (head, begin) in launches {
            let outcome = Outcome::failed(head.launch.members.iter().copied(), &failure);
            host.finish(head, begin, self.clock.now(), outcome, &mut OwnLaunch::default());
        }
    }
}

/// Has the engine begin a launch, as far as possible before the launch before it is answered.
fn begin_run<'a>(run: &Run<'a>, body: &mut Body, assembled: &mut Time) -> Stage<'a> {
    // All its members have gone.
    if body.members.is_empty() {
        return Stage::Over(Outcome::default());
    }
    let tensors = &run.model.tensors;
    if tensors.codec.takes_requests {
        return Stage::Over(answer_requests(run, body));
    }
    let differs = |member: &Member| member.length != run.length;
    let must_part = (tensors.is_padding_off() && body.members.iter().any(differs))
        || (tensors.is_sharing_off() && (body.members.len() > 1 || run.fill() > 0));
    if must_part && run.segments.first == 0 {
        return Stage::Alone;
    }
    let (first, end) = (usize::from(run.segments.first), usize::from(run.segments.end));
    let begun = run.on_lane(|engine| {
        let state = assemble(run, engine, body);
        *assembled = run.clock.now();
        engine_run::begin(run.watch.clone(), engine, first..end, state?)
    });
    match begun {
        Ok(running) => Stage::Runs(running),
        Err(failure) => Stage::Failed(failure),
    }
}

/// Waits for the end of a launch that began at `begin` and whose tensors were assembled at
/// `assembled`. Returns when the launch ended, and its outcome.
fn end_run(run: &Run<'_>, body: &Body, running: Running<'_>, (begin, assembled): (Time, Time)) -> (Time, Outcome) {
    let clock = run.clock;
    let end = usize::from(run.segments.end);
    let ran = running.end();
    let computed = clock.now();
    let outcome = ran.and_then(|mut state| {
        if end == run.model.segments() {
            return Ok(Outcome { answers: answers(run, body, state)?, ..Outcome::default() });
        }
        let exits = exits(run, body, end - 1, &mut state)?;
        Ok(Outcome { exits, state: Some(state), ..Outcome::default() })
    });
    match outcome {
        Ok(outcome) => {
            let separated = clock.now();
            let phases = Phases {
                compute_input: assembled.since(begin),
                compute_infer: computed.since(assembled),
                compute_output: separated.since(computed),
            };
            (separated, Outcome { phases, ..outcome })
        }
        Err(failure) => {
            let outcome = answer_alone(run, body, failure);
            (clock.now(), outcome)
        }
    }
}

/// Has the model answer the members as requests.
fn answer_requests(run: &Run<'_>, body: &Body) -> Outcome {
    let (codec, clock) = (&run.model.tensors.codec, run.clock);
    let begin = clock.now();
    let inputs: Option<Vec<_>> = body.members.iter().map(|member| member.input.as_ref()).collect();
    let Some(inputs) = inputs else {
        let lost = RunFailure::Engine("a request has no inputs: this is a defect".to_owned());
        return Outcome::failed(body.requests(), &lost);
    };
    let requests = inputs.into_iter().map(|input| codec.asked(input, begin)).collect();
    let assembled = clock.now();
    let answers = run.on_lane(|engine| engine_run::answer(&run.watch, engine, requests));
    let computed = clock.now();
    let answers = match answers {
        Ok(answers) => answers,
        Err(failure) => {
            let Placement { name, version, .. } = &*run.model;
            tracing::error!(model = %name, %version, batch = run.rows, reason = %failure, "batch failed");
            return Outcome::failed(body.requests(), &failure);
        }
    };
    let mut outcome = Outcome::default();
    for (member, answer) in body.members.iter().zip(answers) {
        let answer = answer.map_err(RunFailure::of_request).and_then(|outputs| Ok(codec.answered(outputs)?));
        match answer {
            Ok(outputs) => outcome.answers.push((member.request, outputs)),
            Err(failure) => outcome.failed.push((member.request, failure)),
        }
    }
    outcome.phases = Phases {
        compute_input: assembled.since(begin),
        compute_infer: computed.since(assembled),
        compute_output: clock.now().since(computed),
    };
    outcome
}

/// The tensors that a launch runs on.
fn assemble(run: &Run<'_>, engine: &mut dyn Lane, body: &mut Body) -> Result<State, String> {
    let tensors = &run.model.tensors;
    match std::mem::replace(&mut body.source, Source::Inputs) {
        Source::States(states) => engine.join(states).map_err(|error| error.to_string()),
        Source::Broken(reason) => Err(reason),
        Source::Ring(slots) if let Some(state) = tensors.read(slots) => Ok(state),
        Source::Ring(_) | Source::Inputs => tensors.join_inputs(engine, &body.members, run.length, run.fill()),
    }
}

/// The members that leave after a segment, with their outputs.
fn exits(run: &Run<'_>, body: &Body, segment: usize, state: &mut State) -> Result<Vec<(RequestId, Outputs)>, String> {
    let tensors = &run.model.tensors;
    let rows: Vec<u32> = body.members.iter().map(|member| member.rows).collect();
    let mut left: Vec<(RequestId, Outputs)> = Vec::new();
    for exit in run.model.exits.iter().filter(|exit| exit.segment == segment) {
        exit.fetch(state)?;
        let leaves = exit.decide(state, &rows);
        if !leaves.contains(&true) {
            continue;
        }
        let outputs = tensors.codec.separate(exit.outputs(state), &rows)?;
        for ((member, outputs), leaves) in body.members.iter().zip(outputs).zip(leaves) {
            if leaves && left.iter().all(|(request, _)| *request != member.request) {
                left.push((member.request, tensors.cut(outputs, member.length, run.length)?));
            }
        }
    }
    Ok(left)
}

/// Each member's rows of the outputs, without padding.
fn answers(run: &Run<'_>, body: &Body, state: State) -> Result<Vec<(RequestId, Outputs)>, String> {
    let (tensors, fill) = (&run.model.tensors, run.fill());
    let rows: Vec<u32> = body.members.iter().map(|member| member.rows).chain((fill > 0).then_some(fill)).collect();
    let outputs = tensors.codec.separate(state, &rows)?;
    let (each, others) = (body.members.iter().zip(outputs), rows.len() > 1);
    each.map(|(member, outputs)| {
        let outputs = tensors.cut(outputs, member.length, run.length)?;
        tensors.watch(member, run.length, others, &outputs);
        Ok((member.request, outputs))
    })
    .collect()
}

/// Handles a launch that failed. A request whose tensors the model cannot take must not cost other
/// requests their answers: each member runs once more, alone, through all segments. If the launch
/// took too long the members fail at once, as each of them might take as long.
fn answer_alone(run: &Run<'_>, body: &Body, failure: RunFailure) -> Outcome {
    let Placement { name, version, .. } = &*run.model;
    tracing::error!(model = %name, %version, batch = run.rows, reason = %failure, "batch failed");
    // A failure of later segments may be that of a neighbour who has left since.
    let is_alone = body.members.len() == 1 && run.segments.first == 0 && run.fill() == 0;
    if is_alone || !matches!(failure, RunFailure::Engine(_)) {
        return Outcome::failed(body.requests(), &failure);
    }
    each_alone(run, body)
}

/// Runs each member by itself, through all segments, until one takes too long.
fn each_alone(run: &Run<'_>, body: &Body) -> Outcome {
    let (tensors, segments) = (&run.model.tensors, run.model.segments());
    let mut outcome = Outcome { alone: true, ..Outcome::default() };
    let mut failure: Option<RunFailure> = None;
    for member in &body.members {
        if let Some(failure) = &failure {
            outcome.failed.push((member.request, failure.clone()));
            continue;
        }
        let length = tensors.length_alone(member);
        let result = run.on_lane(|engine| {
            let state = tensors.join_inputs(engine, std::slice::from_ref(member), length, 0)?;
            let outputs = engine_run::run_alone(&run.watch, engine, segments, &tensors.codec, state, member.rows)?;
            Ok(tensors.cut(outputs, member.length, length)?)
        });
        match result {
            Ok(outputs) => outcome.answers.push((member.request, outputs)),
            Err(reason) => {
                failure = (!matches!(reason, RunFailure::Engine(_))).then(|| reason.clone());
                outcome.failed.push((member.request, reason));
            }
        }
    }
    outcome
}

#[cfg(test)]
mod tests;
