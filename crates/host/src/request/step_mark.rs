//! The place of a request within a request of a pipeline.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_core::{RequestId, Time};
use downbeat_service::report::timeline::PastStep;
use smallvec::SmallVec;

/// No instant and no request has this number.
const NONE: u64 = u64::MAX;

/// The mark of a request to a model that is a step of a pipeline's request. The device notes in it
/// when the step's run began.
#[derive(Debug)]
pub struct StepMark {
    /// The whole request.
    pub whole: Whole,
    /// When the step's inputs were there.
    pub reached: Time,
    began: AtomicU64,
    asked: AtomicU64,
}

/// A request of a pipeline, and the way down to one of its steps.
#[derive(Clone, Debug)]
pub struct Whole {
    /// The pipeline's name.
    pub pipeline: Arc<str>,
    /// The number of the request, among all requests of pipelines.
    pub request: u64,
    /// The number of the step; if that is a pipeline too, the number of its step follows.
    pub path: SmallVec<[u32; 2]>,
}

impl StepMark {
    /// A step whose inputs are there.
    pub fn new(whole: Whole, reached: Time) -> StepMark {
        StepMark { whole, reached, began: AtomicU64::new(NONE), asked: AtomicU64::new(NONE) }
    }

    /// Notes when the run began.
    pub fn set_began(&self, at: Time) {
        self.began.store(at.as_nanos(), Ordering::Relaxed);
    }

    /// Notes the number of the request to the step's model.
    pub fn set_asked(&self, id: RequestId) {
        self.asked.store(id.0, Ordering::Relaxed);
    }

    /// When the run began; `None`: the step has not run.
    pub fn began(&self) -> Option<Time> {
        let began = self.began.load(Ordering::Relaxed);
        (began != NONE).then(|| Time::from_nanos(began))
    }

    /// The request to the step's model; `None`: the step has asked none yet.
    pub fn asked(&self) -> Option<RequestId> {
        let asked = self.asked.load(Ordering::Relaxed);
        (asked != NONE).then_some(RequestId(asked))
    }

    /// The mark as timelines have it.
    pub fn past(&self) -> PastStep {
        let Whole { pipeline, request, path } = &self.whole;
        let step = path.iter().map(u32::to_string).collect::<Vec<_>>().join(".");
        PastStep { pipeline: pipeline.to_string(), request: *request, step, reached_ns: self.reached.as_nanos() }
    }
}
