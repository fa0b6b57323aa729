//! A lane: a thread that runs one launch after another.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use downbeat_core::device::{Launch, SlotRun};
use downbeat_core::{RequestId, Time};
use downbeat_engine::{Lane, State};

use super::runtime::Runtime;
use crate::engine_run;
use crate::plan::{Admitted, Outputs};
use crate::statistics::Phases;

/// A launch with what it runs on.
pub struct Work {
    pub launch: Launch,
    /// Whose rows are in it, in their order.
    pub members: Vec<Member>,
    pub source: Source,
}

/// A request in a launch.
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
    pub failed: Vec<(RequestId, String)>,
    /// Whether the launch failed as a whole, and its members ran alone.
    pub alone: bool,
    /// The members that are answered before the last segment.
    pub exits: Vec<(RequestId, Outputs)>,
    /// What the segments left for the next ones.
    pub state: Option<State>,
    pub phases: Phases,
}

/// The life of a lane's thread.
pub fn work(runtime: &Arc<Runtime>, lane: usize, mut engine: Box<dyn Lane>) {
    while let Some(mut work) = runtime.slot(lane).take() {
        let begin = runtime.begin();
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| run(runtime, &mut *engine, &mut work, begin)));
        let outcome = outcome.unwrap_or_else(|_| {
            tracing::error!(device = runtime.device(), lane, "a launch ended in a panic: this is a defect");
            let failed = |member: &Member| (member.request, "the launch ended in a panic".to_owned());
            Outcome { failed: work.members.iter().map(failed).collect(), alone: true, ..Outcome::default() }
        });
        runtime.finish(work, begin, outcome);
    }
}

/// Runs a launch.
fn run(runtime: &Runtime, engine: &mut dyn Lane, work: &mut Work, begin: Time) -> Outcome {
    // Whoever was in it has gone.
    if work.members.is_empty() {
        return Outcome::default();
    }
    let clock = runtime.clock();
    let (first, end) = (usize::from(work.launch.segments.first), usize::from(work.launch.segments.end));
    let state = assemble(runtime, engine, work);
    let assembled = clock.now();
    let ran = state.and_then(|state| engine_run::run(engine, first..end, state));
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
        Err(reason) => {
            tracing::error!(model = runtime.model(), batch = work.launch.rows, %reason, "batch failed");
            answer_alone(runtime, engine, work, reason)
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
        Ok((member.request, runtime.tensors().cut(outputs, member.length, work.launch.length)?))
    })
    .collect()
}

/// After a launch failed for `reason`: a request whose tensors the model cannot take must not cost others their answers, so each
/// runs once more, alone and through all segments.
fn answer_alone(runtime: &Runtime, engine: &mut dyn Lane, work: &Work, reason: String) -> Outcome {
    let mut outcome = Outcome { alone: true, ..Outcome::default() };
    // A failure of later segments may be that of a neighbour who has left since.
    let has_dummies = work.launch.computed_rows > work.launch.rows;
    let is_alone = work.members.len() == 1 && work.launch.segments.first == 0 && !has_dummies;
    for member in &work.members {
        let result = if is_alone {
            Err(reason.clone())
        } else {
            let length = runtime.tensors().padded_length(member.length);
            runtime
                .tensors()
                .join_inputs(engine, std::slice::from_ref(member), length, 0)
                .and_then(|state| {
                    let plan = &runtime.tensors().plan;
                    engine_run::run_alone(engine, runtime.segments(), plan, state, member.rows)
                })
                .and_then(|outputs| runtime.tensors().cut(outputs, member.length, length))
        };
        match result {
            Ok(outputs) => outcome.answers.push((member.request, outputs)),
            Err(reason) => outcome.failed.push((member.request, reason)),
        }
    }
    outcome
}
