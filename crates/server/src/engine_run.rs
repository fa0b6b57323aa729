//! Runs of an engine that may fail without harm to anything else.

use std::ops::Range;
use std::panic::AssertUnwindSafe;

use downbeat_engine::{Lane, State};

use crate::plan::{BatchPlan, Outputs};

/// Runs segments on a batch. An engine that panics has failed.
///
/// # Errors
/// In words, what the engine says.
pub fn run(engine: &mut dyn Lane, segments: Range<usize>, mut state: State) -> Result<State, String> {
    // A lane that panicked may be in any state, but it is not ours to judge: the engine's next run will tell.
    std::panic::catch_unwind(AssertUnwindSafe(|| {
        engine.run(segments, &mut state).map_err(|error| error.to_string())?;
        Ok(state)
    }))
    .unwrap_or_else(|_| Err("the engine panicked on this batch".to_owned()))
}

/// Runs the whole model, of `segments` segments, on one request of `rows` items; gives its outputs.
///
/// # Errors
/// In words, what the engine or the plan says.
pub fn run_alone(
    engine: &mut dyn Lane,
    segments: usize,
    plan: &BatchPlan,
    state: State,
    rows: u32,
) -> Result<Outputs, String> {
    let state = run(engine, 0..segments, state)?;
    plan.separate(state, &[rows])?.pop().ok_or_else(|| "there is no output".to_owned())
}
