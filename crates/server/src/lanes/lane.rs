//! A lane: a thread that runs one launch after another, of which it gives the next one to the device while the one before is under way.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};

use downbeat_core::device::{Launch, SlotRun};
use downbeat_core::{Duration, RequestId, Time};
use downbeat_engine::{Lane, State};
use parking_lot::Mutex;

use super::runtime::Runtime;
use crate::engine_run::{self, RunFailure, Running, Watch};
use crate::plan::{Admitted, Outputs};
use crate::statistics::Phases;
use crate::watchdog::Owner;

/// A launch with what it runs on.
pub struct Work {
    pub launch: Launch,
    /// Whose rows are in it, in their order.
    pub members: Vec<Member>,
    pub source: Source,
}

/// A request in a launch.
#[derive(Clone)]
pub struct Member {
    pub request: RequestId,
    pub rows: u32,
    /// Of its inputs; 0 where nothing varies.
    pub length: u32,
    /// Its inputs, where they are not in slots of the ring.
    pub input: Option<Arc<Admitted>>,
    /// Its slots of the ring, where its inputs are there.
    pub slots: Option<SlotRun>,
}

/// What the rows of a launch are made of.
pub enum Source {
    /// The members' inputs, which are joined.
    Inputs,
    /// A run of slots that is just the members.
    Ring(SlotRun),
    /// What earlier segments left, one after another.
    States(Vec<State>),
    /// What earlier segments left cannot be parted, and why.
    Broken(String),
}

/// What came of a launch.
#[derive(Default)]
pub struct Outcome {
    /// The members that are answered.
    pub answers: Vec<(RequestId, Outputs)>,
    /// The members that are answered with an error.
    pub failed: Vec<(RequestId, RunFailure)>,
    /// Whether the launch failed as a whole, and its members ran alone.
    pub alone: bool,
    /// The members that are answered before the last segment.
    pub exits: Vec<(RequestId, Outputs)>,
    /// What the segments left for the next ones.
    pub state: Option<State>,
    pub phases: Phases,
}

/// A lane's thread. There is another where a run of the one before does not end.
struct Worker {
    runtime: Arc<Runtime>,
    lane: usize,
    flights: Mutex<Flights>,
}

/// The launches that are under way on a thread, for as long as they are: whoever takes them sees to their end.
#[derive(Default)]
struct Flights {
    /// With when they were begun, in their order.
    launches: VecDeque<(Work, Time)>,
    /// Why the thread was left behind, if it was: its launches are seen to, and another has the lane.
    left_behind: Option<String>,
}

/// A launch that a thread has begun.
struct Begun<'a> {
    work: Work,
    watch: Watch<'a>,
    /// When it was begun, and when its tensors were there.
    begin: Time,
    assembled: Time,
    stage: Stage<'a>,
}

/// How far it is.
enum Stage<'a> {
    /// The engine has it.
    Runs(Running<'a>),
    /// Its members are to run one by one.
    Alone,
    Failed(RunFailure),
    Over(Outcome),
}

/// Starts a lane's thread. Without `engine`, it makes itself a lane of the model before its first launch.
///
/// # Errors
/// If the operating system has no thread left.
pub fn start(runtime: Arc<Runtime>, lane: usize, engine: Option<Box<dyn Lane>>) -> std::io::Result<()> {
    let name = format!("lane-{}-{lane}", runtime.device());
    let worker = Arc::new(Worker { runtime, lane, flights: Mutex::default() });
    std::thread::Builder::new().name(name).spawn(move || worker.work(engine))?;
    Ok(())
}

impl Worker {
    /// The life of the thread.
    fn work(self: Arc<Self>, mut engine: Option<Box<dyn Lane>>) {
        let owner: Weak<Worker> = Arc::downgrade(&self);
        let runtime = &*self.runtime;
        let post = runtime.watchdog().post(owner);
        let watch = |work: &Work| {
            let limit = post.limit(runtime.profile().latency(work.launch.computed_rows));
            Watch { post: &post, health: runtime.health(), device: runtime.device(), limit }
        };
        let mut next: Option<Begun<'_>> = None;
        // When the lane was last done with a launch: the next one has not run before.
        let mut done = Time::ZERO;
        loop {
            let begun = match next.take() {
                Some(begun) => begun,
                None => {
                    let Some(work) = runtime.slot(self.lane).take() else { return };
                    let watch = watch(&work);
                    let Some(begun) = self.begin(watch, &mut engine, work) else { return };
                    begun
                }
            };
            // What comes while the device is at work is given to it at once.
            if let Some(spare) = begun.spare()
                && let Some(work) = runtime.slot(self.lane).take_within(spare)
            {
                let watch = watch(&work);
                let Some(begun) = self.begin(watch, &mut engine, work) else { return };
                next = Some(begun);
            }
            let (work, begin, outcome) = self.end(&mut engine, begun, done);
            done = runtime.clock().now();
            let mut flights = self.flights.lock();
            if flights.left_behind.is_some() {
                return;
            }
            flights.launches.pop_front();
            drop(flights);
            runtime.finish(work, begin, done, outcome);
        }
    }

    /// Begins a launch; `None` if the thread was left behind.
    fn begin<'a>(&'a self, watch: Watch<'a>, engine: &mut Option<Box<dyn Lane>>, mut work: Work) -> Option<Begun<'a>> {
        let runtime = &*self.runtime;
        let begin = runtime.begin();
        let mut flights = self.flights.lock();
        if let Some(reason) = flights.left_behind.clone() {
            drop(flights);
            let outcome = failed(&work, &RunFailure::Ended(reason));
            runtime.finish(work, begin, runtime.clock().now(), outcome);
            return None;
        }
        let kept = Work { launch: work.launch.clone(), members: work.members.clone(), source: Source::Inputs };
        flights.launches.push_back((kept, begin));
        drop(flights);
        let mut assembled = begin;
        let stage = self.caught(|| match on_lane(&watch, runtime, engine) {
            Ok(engine) => begin_run(runtime, watch, engine, &mut work, &mut assembled),
            Err(failure) => Stage::Over(failed(&work, &failure)),
        });
        let stage = stage.unwrap_or_else(|failure| Stage::Over(failed(&work, &failure)));
        Some(Begun { work, watch, begin, assembled, stage })
    }

    /// Waits for the end of a launch; gives from when on it had the lane, which was done with the one before at `done`, and what came of it.
    fn end(&self, engine: &mut Option<Box<dyn Lane>>, begun: Begun<'_>, done: Time) -> (Work, Time, Outcome) {
        let runtime = &*self.runtime;
        let Begun { work, watch, begin, assembled, stage } = begun;
        // What was done of it before was done beside the one before.
        let begin = begin.max(done);
        let assembled = assembled.max(begin);
        let outcome = self.caught(|| match (stage, engine.as_deref_mut()) {
            (Stage::Over(outcome), _) => outcome,
            (Stage::Runs(running), Some(engine)) => {
                end_run(runtime, &watch, engine, &work, running, (begin, assembled))
            }
            (Stage::Alone, Some(engine)) => each_alone(runtime, &watch, engine, &work),
            (Stage::Failed(failure), Some(engine)) => answer_alone(runtime, &watch, engine, &work, failure),
            (_, None) => failed(&work, &RunFailure::Engine("there is no lane".to_owned())),
        });
        let outcome = outcome.unwrap_or_else(|failure| {
            watch.post.end();
            failed(&work, &failure)
        });
        (work, begin, outcome)
    }

    /// What `run` gives, or that it panicked.
    fn caught<T>(&self, run: impl FnOnce() -> T) -> Result<T, RunFailure> {
        std::panic::catch_unwind(AssertUnwindSafe(run)).map_err(|_| {
            tracing::error!(device = self.runtime.device(), self.lane, "a launch ended in a panic: this is a defect");
            RunFailure::Engine("the launch ended in a panic".to_owned())
        })
    }
}

impl Begun<'_> {
    /// How long the thread may do other things before it waits for the end; `None`: the device is not at work on it.
    fn spare(&self) -> Option<Duration> {
        match &self.stage {
            Stage::Runs(running) => running.spare(),
            Stage::Alone | Stage::Failed(_) | Stage::Over(_) => None,
        }
    }
}

impl Owner for Worker {
    fn is_awaited(&self) -> bool {
        let flights = self.flights.lock();
        let mut members = flights.launches.iter().flat_map(|(work, _)| &work.members);
        flights.launches.is_empty() || members.any(|m| self.runtime.is_awaited(m.request))
    }

    /// Answers what runs on this thread, and gives the lane another one.
    fn leave_behind(&self, reason: &str) {
        let launches = {
            let mut flights = self.flights.lock();
            if flights.launches.is_empty() {
                return;
            }
            flights.left_behind = Some(reason.to_owned());
            std::mem::take(&mut flights.launches)
        };
        match start(self.runtime.clone(), self.lane, None) {
            Ok(()) => launches.into_iter().for_each(|(work, begin)| {
                let outcome = failed(&work, &RunFailure::Ended(reason.to_owned()));
                self.runtime.finish(work, begin, self.runtime.clock().now(), outcome);
            }),
            Err(error) => {
                let reason = format!("there is no thread left for a lane of device {}: {error}", self.runtime.device());
                self.runtime.watchdog().give_up(reason);
            }
        }
    }
}

/// The engine's lane, which is made where there is none.
fn on_lane<'a>(
    watch: &Watch<'_>,
    runtime: &Runtime,
    engine: &'a mut Option<Box<dyn Lane>>,
) -> Result<&'a mut dyn Lane, RunFailure> {
    if let Some(reason) = watch.health.refuses() {
        return Err(RunFailure::Refused(reason));
    }
    if engine.is_none() {
        *engine = Some(runtime.new_lane()?);
    }
    engine.as_deref_mut().map_or_else(|| Err(RunFailure::Engine("there is no lane".to_owned())), |lane| Ok(lane as _))
}

/// All members fail.
fn failed(work: &Work, failure: &RunFailure) -> Outcome {
    let failed = work.members.iter().map(|member| (member.request, failure.clone())).collect();
    Outcome { failed, alone: true, ..Outcome::default() }
}

/// Has a launch begun by the engine, as far as that may be done before the one before it is answered.
fn begin_run<'a>(
    runtime: &Runtime,
    watch: Watch<'a>,
    engine: &mut dyn Lane,
    work: &mut Work,
    assembled: &mut Time,
) -> Stage<'a> {
    // Whoever was in it has gone.
    if work.members.is_empty() {
        return Stage::Over(Outcome::default());
    }
    let differs = |member: &Member| member.length != work.launch.length;
    if runtime.tensors().is_padding_off() && work.launch.segments.first == 0 && work.members.iter().any(differs) {
        return Stage::Alone;
    }
    let (first, end) = (usize::from(work.launch.segments.first), usize::from(work.launch.segments.end));
    let state = assemble(runtime, engine, work);
    *assembled = runtime.clock().now();
    let begun = state.map_err(RunFailure::from);
    match begun.and_then(|state| engine_run::begin(watch, engine, first..end, state)) {
        Ok(running) => Stage::Runs(running),
        Err(failure) => Stage::Failed(failure),
    }
}

/// Waits for the end of a launch that has had the lane from `begin` on, and whose tensors were there at `assembled`.
fn end_run(
    runtime: &Runtime,
    watch: &Watch<'_>,
    engine: &mut dyn Lane,
    work: &Work,
    running: Running<'_>,
    (begin, assembled): (Time, Time),
) -> Outcome {
    let clock = runtime.clock();
    let end = usize::from(work.launch.segments.end);
    let ran = running.end();
    let computed = clock.now();
    let last = end == runtime.segments();
    let outcome = ran.and_then(|state| {
        if last {
            return Ok(Outcome { answers: answers(runtime, work, state)?, ..Outcome::default() });
        }
        let mut state = state;
        let exits = exits(runtime, work, end - 1, &mut state)?;
        Ok(Outcome { exits, state: Some(state), ..Outcome::default() })
    });
    let phases = |separated: Time| Phases {
        compute_input: assembled.since(begin),
        compute_infer: computed.since(assembled),
        compute_output: separated.since(computed),
    };
    match outcome {
        Ok(outcome) => Outcome { phases: phases(clock.now()), ..outcome },
        Err(failure) => answer_alone(runtime, watch, engine, work, failure),
    }
}

/// The tensors that a launch runs on.
fn assemble(runtime: &Runtime, engine: &mut dyn Lane, work: &mut Work) -> Result<State, String> {
    let fill = work.launch.computed_rows.saturating_sub(work.launch.rows);
    match std::mem::replace(&mut work.source, Source::Inputs) {
        Source::States(states) => engine.join(states).map_err(|error| error.to_string()),
        Source::Broken(reason) => Err(reason),
        Source::Ring(run) => match runtime.tensors().read(run) {
            Some(state) => Ok(state),
            None => runtime.tensors().join_inputs(engine, &work.members, work.launch.length, fill),
        },
        Source::Inputs => runtime.tensors().join_inputs(engine, &work.members, work.launch.length, fill),
    }
}

/// The members that leave after a segment, with their outputs.
fn exits(
    runtime: &Runtime,
    work: &Work,
    segment: usize,
    state: &mut State,
) -> Result<Vec<(RequestId, Outputs)>, String> {
    let rows: Vec<u32> = work.members.iter().map(|member| member.rows).collect();
    let mut left: Vec<(RequestId, Outputs)> = Vec::new();
    for exit in runtime.exits_after(segment) {
        exit.fetch(state)?;
        let leaves = exit.decide(state, &rows);
        if !leaves.contains(&true) {
            continue;
        }
        let outputs = runtime.tensors().plan.separate(exit.outputs(state), &rows)?;
        for ((member, outputs), leaves) in work.members.iter().zip(outputs).zip(leaves) {
            if leaves && left.iter().all(|(request, _)| *request != member.request) {
                left.push((member.request, runtime.tensors().cut(outputs, member.length, work.launch.length)?));
            }
        }
    }
    Ok(left)
}

/// Each member's rows of the outputs, cut back where they were padded.
fn answers(runtime: &Runtime, work: &Work, state: State) -> Result<Vec<(RequestId, Outputs)>, String> {
    let fill = work.launch.computed_rows.saturating_sub(work.launch.rows);
    let rows: Vec<u32> = work.members.iter().map(|member| member.rows).chain((fill > 0).then_some(fill)).collect();
    let outputs = runtime.tensors().plan.separate(state, &rows)?;
    let each = work.members.iter().zip(outputs);
    each.map(|(member, outputs)| {
        let outputs = runtime.tensors().cut(outputs, member.length, work.launch.length)?;
        runtime.tensors().watch(member, work.launch.length, &outputs);
        Ok((member.request, outputs))
    })
    .collect()
}

/// After a launch failed: a request whose tensors the model cannot take must not cost others their answers, so each runs once more, alone and through all
/// segments. Not so where the launch took too long: each might take as long.
fn answer_alone(
    runtime: &Runtime,
    watch: &Watch<'_>,
    engine: &mut dyn Lane,
    work: &Work,
    failure: RunFailure,
) -> Outcome {
    tracing::error!(model = runtime.model(), batch = work.launch.rows, reason = %failure, "batch failed");
    // A failure of later segments may be that of a neighbour who has left since.
    let has_dummies = work.launch.computed_rows > work.launch.rows;
    let is_alone = work.members.len() == 1 && work.launch.segments.first == 0 && !has_dummies;
    if is_alone || !matches!(failure, RunFailure::Engine(_)) {
        return failed(work, &failure);
    }
    each_alone(runtime, watch, engine, work)
}

/// Runs each member by itself, through all segments, until one takes too long.
fn each_alone(runtime: &Runtime, watch: &Watch<'_>, engine: &mut dyn Lane, work: &Work) -> Outcome {
    let mut outcome = Outcome { alone: true, ..Outcome::default() };
    let mut failure: Option<RunFailure> = None;
    for member in &work.members {
        if let Some(failure) = &failure {
            outcome.failed.push((member.request, failure.clone()));
            continue;
        }
        let length = runtime.tensors().length_alone(member);
        let joined = runtime.tensors().join_inputs(engine, std::slice::from_ref(member), length, 0);
        let result = joined.map_err(RunFailure::from).and_then(|state| {
            let plan = &runtime.tensors().plan;
            let outputs = engine_run::run_alone(watch, engine, runtime.segments(), plan, state, member.rows)?;
            Ok(runtime.tensors().cut(outputs, member.length, length)?)
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
