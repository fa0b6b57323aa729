//! The trail of a pipeline's request: its records in the decision log, and the marks of its steps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use downbeat_core::Time;
use downbeat_core::journal::pipelines::{End, PipelineInput, PipelineSpec, StepSpec};
use downbeat_host::pipeline_log::PipelineLog;
use downbeat_host::request::step_mark::{StepMark, Whole};
use downbeat_service::error::ServiceError;
use downbeat_service::unanswered::Unanswered;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{Pipeline, Within};
use crate::serving::Serving;

/// The trail of one request. Dropping the trail ends the records; a trail without a known end is that
/// of a client that has left.
pub struct Trail<'a> {
    serving: &'a Serving,
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
pub struct Callers(Mutex<BTreeMap<String, (u32, Vec<String>)>>);

/// No step has ended the request.
const NONE: u32 = u32::MAX;

impl Serving {
    /// Begins the trail of a request of an ensemble with `size` items and this deadline. The request
    /// may be a step `within` another.
    pub(in crate::serving) fn trail<'a>(
        &'a self,
        pipeline: &'a Pipeline,
        version: &str,
        (size, deadline): (u32, Time),
        within: Option<&Within>,
    ) -> Trail<'a> {
        let number = self.next_trail();
        let whole = match within {
            Some(within) => within.mark.whole.clone(),
            None => Whole { pipeline: pipeline.name.clone(), request: number, path: SmallVec::new() },
        };
        let log = self.driver.pipeline_log();
        if let Some(log) = log {
            let now = self.now();
            let pipeline = *pipeline.logged.get_or_init(|| log.pipeline(now, pipeline.spec(version)));
            let within = within.map(|within| within.of);
            log.note(now, PipelineInput::Request { request: number, pipeline, deadline, size, within });
        }
        Trail { serving: self, log, number, whole, end: End::Cancelled, ended_by: AtomicU32::new(NONE) }
    }

    /// Begins the trail of a call of `caller`'s code to `model`, which must be answered by `deadline`.
    /// Returns the trail and the number of the step.
    pub fn trail_of_call<'a>(
        &'a self,
        callers: &Callers,
        (caller, model): (&str, &str),
        deadline: Time,
    ) -> (Trail<'a>, u32) {
        let number = self.next_trail();
        let (log, now, mut step) = (self.driver.pipeline_log(), self.now(), 0);
        if let Some(log) = log {
            let mut callers = callers.0.lock();
            let (pipeline, called) = callers.entry(caller.to_owned()).or_insert_with(|| {
                let (name, version, steps) = (caller.to_owned(), String::new(), Vec::new());
                (log.pipeline(now, PipelineSpec { name, version, is_code: true, steps }), Vec::new())
            });
            step = called.iter().position(|called| called == model).unwrap_or_else(|| {
                called.push(model.to_owned());
                log.callee(now, *pipeline, StepSpec { model: model.to_owned(), after: Vec::new() });
                called.len() - 1
            }) as u32;
            let (pipeline, size, within) = (*pipeline, 1, None);
            log.note(now, PipelineInput::Request { request: number, pipeline, deadline, size, within });
        }
        let whole = Whole { pipeline: caller.into(), request: number, path: SmallVec::new() };
        (Trail { serving: self, log, number, whole, end: End::Cancelled, ended_by: AtomicU32::new(NONE) }, step)
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
            self.note(self.serving.now(), || PipelineInput::End { request, end, step });
        }
    }
}

impl StepTrail<'_> {
    /// The step has ended.
    pub fn ended<T>(&mut self, result: &Result<T, ServiceError>) {
        self.end = match result {
            Ok(_) => End::Answered,
            Err(ServiceError::DeadlineExceeded(_)) => End::Dropped,
            Err(ServiceError::QueueFull { .. }) => End::Full,
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
            let now = self.trail.serving.now();
            self.trail.note(now, || PipelineInput::Done { request, step, asked, began, end });
        }
    }
}

impl Pipeline {
    /// The ensemble as the decision log describes it.
    fn spec(&self, version: &str) -> PipelineSpec {
        let ensemble = self.ensemble();
        let step = |(at, step): (usize, &downbeat_repository::EnsembleStep)| StepSpec {
            model: step.model.clone(),
            after: ensemble.graph.after(at).iter().map(|first| *first as u32).collect(),
        };
        let steps = ensemble.steps.iter().enumerate().map(step).collect();
        PipelineSpec { name: self.definition.name.clone(), version: version.to_owned(), is_code: false, steps }
    }
}
