//! Runs batches on an engine. A run that fails or hangs harms no other work.

use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_engine::{Answers, AskedRequest, ErrorCode, Lane, Pending, RunError, State};

use crate::request::batch_codec::{BatchCodec, Outputs};
use crate::run::model_health::{ModelHealth, RunCount};
use crate::run::watchdog::Post;

/// Why a run gave nothing.
#[derive(Clone, Debug)]
pub enum RunFailure {
    /// The error of the engine, or of the codec.
    Engine(String),
    /// The run took too long and was ended, or was left behind, for this reason.
    Ended(String),
    /// The model is out of service, as a run of it does not end or its process has ended, for this
    /// reason.
    Refused(String),
    /// The model's own code refused the request, with this kind of error.
    Named(ErrorCode, String),
}

impl RunFailure {
    /// The failure of one request of a batch.
    pub fn of_request(error: RunError) -> Self {
        match error.code {
            Some(code) => RunFailure::Named(code, error.reason),
            None => RunFailure::Engine(error.to_string()),
        }
    }
}

impl From<String> for RunFailure {
    fn from(reason: String) -> Self {
        RunFailure::Engine(reason)
    }
}

impl std::fmt::Display for RunFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (RunFailure::Engine(reason)
        | RunFailure::Ended(reason)
        | RunFailure::Refused(reason)
        | RunFailure::Named(_, reason)) = self;
        f.write_str(reason)
    }
}

/// The watch over a run: the thread's post, the model's health, and the limit.
#[derive(Clone)]
pub struct Watch<'a> {
    pub post: &'a Post,
    pub health: Arc<ModelHealth>,
    /// Number of the device, for messages.
    pub device: usize,
    /// The most that a run may take.
    pub limit: Duration,
}

impl Watch<'_> {
    /// A run is watched from now on, unless one of the thread is already.
    fn begin(&self) -> bool {
        self.post.begin(&self.health, self.device, self.limit)
    }
}

pub struct Running<'a> {
    watch: Watch<'a>,
    pending: Box<dyn Pending>,
    _count: RunCount,
}

impl Running<'_> {
    /// How long the thread may do other things before it waits for the end; `None`: it is over.
    pub fn spare(&self) -> Option<Duration> {
        (!self.pending.is_over()).then(|| self.pending.spare())
    }

    /// Waits for the end of the run.
    ///
    /// # Errors
    /// If the run fails or is ended.
    pub fn end(self) -> Result<State, RunFailure> {
        let Running { watch, pending, _count } = self;
        // The run has a limit of its own, which begins when the run before it is over.
        watch.begin();
        end(&watch, caught(|| pending.wait()))
    }
}

/// Begins to run segments on a batch, while another run of the thread may be going on. An engine
/// that panics has failed.
///
/// # Errors
/// If the run fails, is ended, or the model is out of service.
pub fn begin<'a>(
    watch: Watch<'a>,
    engine: &mut dyn Lane,
    segments: Range<usize>,
    state: State,
) -> Result<Running<'a>, RunFailure> {
    if let Some(reason) = watch.health.refuses() {
        return Err(RunFailure::Refused(reason));
    }
    let count = watch.health.begin_run();
    let is_first = watch.begin();
    match caught(|| engine.enqueue(segments, state)) {
        Ok(pending) => Ok(Running { watch, pending, _count: count }),
        Err(failure) if is_first => end(&watch, Err(failure)),
        Err(failure) => Err(failure),
    }
}

/// Has a lane answer requests, as one run.
///
/// # Errors
/// The errors of [`begin`].
pub fn answer(watch: &Watch<'_>, engine: &mut dyn Lane, requests: Vec<AskedRequest>) -> Result<Answers, RunFailure> {
    if let Some(reason) = watch.health.refuses() {
        return Err(RunFailure::Refused(reason));
    }
    let _count = watch.health.begin_run();
    watch.begin();
    end(watch, caught(|| engine.answer(requests)))
}

/// Runs the engine, and turns its error or panic into a failure.
fn caught<T>(run: impl FnOnce() -> Result<T, RunError>) -> Result<T, RunFailure> {
    // A lane that panicked may be in any state, but it is not ours to judge: the engine's next run
    // will tell.
    match std::panic::catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(ran)) => Ok(ran),
        Ok(Err(error)) if error.of_executor => Err(RunFailure::Refused(error.reason)),
        Ok(Err(RunError { code: Some(code), reason, .. })) => Err(RunFailure::Named(code, reason)),
        Ok(Err(error)) => Err(RunFailure::Engine(error.to_string())),
        Err(_) => Err(RunFailure::Engine("the engine panicked on this batch".to_owned())),
    }
}

/// The run that is watched is over.
fn end<T>(watch: &Watch<'_>, ran: Result<T, RunFailure>) -> Result<T, RunFailure> {
    match (ran, watch.post.end()) {
        (Ok(ran), _) => {
            watch.health.succeeded();
            Ok(ran)
        }
        (Err(_), Some(reason)) => Err(RunFailure::Ended(reason)),
        (Err(failure), None) => Err(failure),
    }
}

/// Runs the whole model, of `segments` segments, on a request of `rows` items. Returns its outputs.
///
/// # Errors
/// The errors of [`begin`], and of the codec.
pub fn run_alone(
    watch: &Watch<'_>,
    engine: &mut dyn Lane,
    segments: usize,
    codec: &BatchCodec,
    state: State,
    rows: u32,
) -> Result<Outputs, RunFailure> {
    let state = begin(watch.clone(), engine, 0..segments, state)?.end()?;
    Ok(codec.separate(state, &[rows])?.pop().ok_or_else(|| "there is no output".to_owned())?)
}
