//! The trail of a pipeline's request: its records in the decision log, and the marks of its steps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use downbeat_core::Time;
use downbeat_core::journal::pipelines::{End, PipelineInput};
use downbeat_host::pipeline_log::PipelineLog;
use downbeat_host::request::step_mark::{StepMark, Whole};
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use downbeat_service::unanswered::Unanswered;
use parking_lot::Mutex;

/// The trail of one request. Dropping the trail ends the records; a trail without a known end is that
/// of a client that has left.
pub struct Trail<'a> {
    clock: Clock,
    log: Option<&'a PipelineLog>,
    /// The number of the request.
    number: u64,
    /// The whole that the request is a part of; itself, unless it is a step.
    whole: Whole,
    end: End,
    /// The step that ended the request; `u32::MAX`: none has.
    ended_by: AtomicU32,
}

/// The trail of one step. Dropping the trail writes the end.
pub struct StepTrail<'a> {
    trail: &'a Trail<'a>,
    step: u32,
    mark: Arc<StepMark>,
    /// How the step ended; without a known end, another step or the client has ended it.
    end: End,
}

/// The callers among models' code, in the decision log: by the caller's name, its number and the
/// names of the models that it has called.
#[derive(Default)]
pub struct Callers(pub(super) Mutex<BTreeMap<String, (u32, Vec<String>)>>);

/// No step has ended the request.
const NONE: u32 = u32::MAX;

impl<'a> Trail<'a> {
    /// Begins the trail of a request with this number, which is a part of `whole`.
    pub fn new(log: Option<&'a PipelineLog>, clock: Clock, number: u64, whole: Whole) -> Self {
        Trail { clock, log, number, whole, end: End::Cancelled, ended_by: AtomicU32::new(NONE) }
    }
}

impl Trail<'_> {
    /// The number of the request.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The mark of a step whose inputs are there now.
    pub fn mark(&self, step: u32, now: Time) -> Arc<StepMark> {
        let mut whole = self.whole.clone();
        whole.path.push(step);
        Arc::new(StepMark::new(whole, now))
    }

    /// Writes that a step is reached, which must be done by `deadline`.
    pub fn reached(&self, step: u32, mark: &Arc<StepMark>, deadline: Time) -> StepTrail<'_> {
        self.note(mark.reached, || PipelineInput::Reached { request: self.number, step, deadline });
        StepTrail { trail: self, step, mark: mark.clone(), end: End::Cancelled }
    }

    /// Writes that the request is given up before a step.
    pub fn gives_up(&self, step: u32, now: Time) {
        let (request, deadline) = (self.number, now);
        self.note(now, || PipelineInput::Reached { request, step, deadline });
        let (asked, began, end) = (None, None, End::Hopeless);
        self.note(now, || PipelineInput::Done { request, step, asked, began, end });
        self.ended_by(step);
    }

    /// The whole was answered, late or not.
    pub fn answered(&mut self, late: bool) {
        self.end = if late { End::Late } else { End::Answered };
    }

    /// The whole has failed, for this reason.
    pub fn failed(&mut self, reason: Unanswered) {
        self.end = match reason {
            Unanswered::QueueFull => End::Full,
            Unanswered::Impossible | Unanswered::Hopeless | Unanswered::Sacrificed | Unanswered::QueueTimeout => {
                End::Dropped
            }
            Unanswered::Timeout => End::TimedOut,
            Unanswered::Cancelled => End::Cancelled,
            Unanswered::Unloaded | Unanswered::Engine | Unanswered::RunEnded | Unanswered::Lost => End::Failed,
        };
    }

    fn ended_by(&self, step: u32) {
        let _ = self.ended_by.compare_exchange(NONE, step, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn note(&self, now: Time, input: impl FnOnce() -> PipelineInput) {
        if let Some(log) = self.log {
            log.note(now, input());
        }
    }
}

impl Drop for Trail<'_> {
    fn drop(&mut self) {
        if self.log.is_some() {
            let step = self.ended_by.load(Ordering::Relaxed);
            let is_by_step = step != NONE && !matches!(self.end, End::Answered | End::Late | End::Cancelled);
            let (request, end, step) = (self.number, self.end, is_by_step.then_some(step));
            self.note(self.clock.now(), || PipelineInput::End { request, end, step });
        }
    }
}

impl StepTrail<'_> {
    /// The step has ended.
    pub fn ended<T>(&mut self, result: &Result<T, ServiceError>) {
        self.end = match result {
            Ok(_) => End::Answered,
            Err(ServiceError::DeadlineExceeded(_)) => End::Dropped,
            Err(ServiceError::QueueFull { .. } | ServiceError::TooMany { .. }) => End::Full,
            Err(_) => End::Failed,
        };
        if self.end != End::Answered {
            self.trail.ended_by(self.step);
        }
    }
}

impl Drop for StepTrail<'_> {
    fn drop(&mut self) {
        if self.trail.log.is_some() {
            let (request, step, end) = (self.trail.number, self.step, self.end);
            let (asked, began) = (self.mark.asked(), self.mark.began());
            let now = self.trail.clock.now();
            self.trail.note(now, || PipelineInput::Done { request, step, asked, began, end });
        }
    }
}
