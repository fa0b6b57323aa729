//! Runs of an engine that may fail, or not end, without harm to anything else.

use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_engine::{Lane, State};

use crate::model_health::ModelHealth;
use crate::plan::{BatchPlan, Outputs};
use crate::watchdog::Post;

/// Why a run gave nothing.
#[derive(Clone, Debug)]
pub enum RunFailure {
    /// What the engine or the plan says.
    Engine(String),
    /// It took too long and was ended, or was left behind: why.
    Ended(String),
    /// The model is out of service: why.
    Refused(String),
}

impl From<String> for RunFailure {
    fn from(reason: String) -> Self {
        RunFailure::Engine(reason)
    }
}

impl std::fmt::Display for RunFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (RunFailure::Engine(reason) | RunFailure::Ended(reason) | RunFailure::Refused(reason)) = self;
        f.write_str(reason)
    }
}

/// Who watches a thread's runs, and what for.
pub struct Watch<'a> {
    /// The thread's.
    pub post: &'a Post,
    /// Of the model version that runs.
    pub health: &'a Arc<ModelHealth>,
    /// Number of the device, for messages.
    pub device: usize,
    /// The most that a run may take.
    pub limit: Duration,
}

/// Runs segments on a batch. An engine that panics has failed.
///
/// # Errors
/// If the run fails, is ended, or the model is out of service.
pub fn run(
    watch: &Watch<'_>,
    engine: &mut dyn Lane,
    segments: Range<usize>,
    mut state: State,
) -> Result<State, RunFailure> {
    let Watch { post, health, device, limit } = watch;
    if let Some(reason) = health.refuses() {
        return Err(RunFailure::Refused(reason));
    }
    let count = health.begin_run();
    post.begin(health, *device, *limit);
    // A lane that panicked may be in any state, but it is not ours to judge: the engine's next run will tell.
    let ran = std::panic::catch_unwind(AssertUnwindSafe(|| {
        engine.run(segments, &mut state).map_err(|error| error.to_string())?;
        Ok(state)
    }));
    let ended = post.end();
    drop(count);
    match (ran.unwrap_or_else(|_| Err("the engine panicked on this batch".to_owned())), ended) {
        (Ok(state), _) => {
            health.succeeded();
            Ok(state)
        }
        (Err(_), Some(reason)) => Err(RunFailure::Ended(reason)),
        (Err(reason), None) => Err(RunFailure::Engine(reason)),
    }
}

/// Runs the whole model, of `segments` segments, on one request of `rows` items; gives its outputs.
///
/// # Errors
/// As [`run`], and what the plan says.
pub fn run_alone(
    watch: &Watch<'_>,
    engine: &mut dyn Lane,
    segments: usize,
    plan: &BatchPlan,
    state: State,
    rows: u32,
) -> Result<Outputs, RunFailure> {
    let state = run(watch, engine, 0..segments, state)?;
    Ok(plan.separate(state, &[rows])?.pop().ok_or_else(|| "there is no output".to_owned())?)
}
