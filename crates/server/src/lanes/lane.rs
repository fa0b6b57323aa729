//! A lane: a thread that runs one launch after another.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};

use downbeat_core::device::{Launch, SlotRun};
use downbeat_core::{RequestId, Time};
use downbeat_engine::{Lane, State};
use parking_lot::Mutex;

use super::runtime::Runtime;
use crate::engine_run::{self, RunFailure, Watch};
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
    /// What runs, for as long as it runs: whoever takes it sees to its end.
    flight: Mutex<Option<(Work, Time)>>,
}

/// Starts a lane's thread. Without `engine`, it makes itself a lane of the model before its first launch.
///
/// # Errors
/// If the operating system has no thread left.
pub fn start(runtime: Arc<Runtime>, lane: usize, engine: Option<Box<dyn Lane>>) -> std::io::Result<()> {
    let name = format!("lane-{}-{lane}", runtime.device());
    let worker = Arc::new(Worker { runtime, lane, flight: Mutex::default() });
    std::thread::Builder::new().name(name).spawn(move || worker.work(engine))?;
    Ok(())
}

impl Worker {
    /// The life of the thread.
    fn work(self: Arc<Self>, mut engine: Option<Box<dyn Lane>>) {
        let owner: Weak<Worker> = Arc::downgrade(&self);
        let runtime = &self.runtime;
        let post = runtime.watchdog().post(owner);
        while let Some(mut work) = runtime.slot(self.lane).take() {
            let begin = runtime.begin();
            let kept = Work { launch: work.launch.clone(), members: work.members.clone(), source: Source::Inputs };
            *self.flight.lock() = Some((kept, begin));
            let limit = post.limit(runtime.profile().latency(work.launch.computed_rows));
            let watch = Watch { post: &post, health: runtime.health(), device: runtime.device(), limit };
            let ran = AssertUnwindSafe(|| match on_lane(&watch, runtime, &mut engine) {
                Ok(engine) => run(runtime, &watch, engine, &mut work, begin),
                Err(failure) => failed(&work, &failure),
            });
            let outcome = std::panic::catch_unwind(ran).unwrap_or_else(|_| {
                tracing::error!(device = runtime.device(), self.lane, "a launch ended in a panic: this is a defect");
                post.end();
                failed(&work, &RunFailure::Engine("the launch ended in a panic".to_owned()))
            });
            // Left behind: the launch is seen to, and another has the lane.
            if self.flight.lock().take().is_none() {
                return;
            }
            runtime.finish(work, begin, outcome);
        }
    }
}

impl Owner for Worker {
    fn is_awaited(&self) -> bool {
        let flight = self.flight.lock();
        flight.as_ref().is_none_or(|(work, _)| work.members.iter().any(|m| self.runtime.is_awaited(m.request)))
    }

    /// Answers what runs on this thread, and gives the lane another one.
    fn leave_behind(&self, reason: &str) {
        let Some((work, begin)) = self.flight.lock().take() else { return };
        let outcome = failed(&work, &RunFailure::Ended(reason.to_owned()));
        match start(self.runtime.clone(), self.lane, None) {
            Ok(()) => self.runtime.finish(work, begin, outcome),
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

/// Runs a launch.
fn run(runtime: &Runtime, watch: &Watch<'_>, engine: &mut dyn Lane, work: &mut Work, begin: Time) -> Outcome {
    // Whoever was in it has gone.
    if work.members.is_empty() {
        return Outcome::default();
    }
    let clock = runtime.clock();
    let differs = |member: &Member| member.length != work.launch.length;
    if runtime.tensors().is_padding_off() && work.launch.segments.first == 0 && work.members.iter().any(differs) {
        return each_alone(runtime, watch, engine, work);
    }
    let (first, end) = (usize::from(work.launch.segments.first), usize::from(work.launch.segments.end));
    let state = assemble(runtime, engine, work);
    let assembled = clock.now();
    let ran = state.map_err(RunFailure::from);
    let ran = ran.and_then(|state| engine_run::run(watch, engine, first..end, state));
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
        Err(failure) => {
            tracing::error!(model = runtime.model(), batch = work.launch.rows, reason = %failure, "batch failed");
            answer_alone(runtime, watch, engine, work, failure)
        }
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
