//! The division of a request's time among its steps.

use super::shares::Shares;
use crate::time::{Duration, Time};

/// The moment at which a request reaches a step.
#[derive(Clone, Copy, Debug)]
pub struct Reached<'a> {
    /// The request's pipeline.
    pub pipeline: usize,
    /// The step whose inputs are there.
    pub step: usize,
    /// Now.
    pub now: Time,
    /// When the request came.
    pub arrival: Time,
    /// When the whole must be done.
    pub deadline: Time,
    /// The request's other steps that have begun or can begin, and are not done.
    pub unfinished: &'a [usize],
}

/// A batch of a step's model that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchDone {
    /// The model.
    pub model: usize,
    /// When the batch began to run.
    pub start: Time,
    /// How long the batch ran.
    pub took: Duration,
    /// The mean time that its members waited in the queue.
    pub waited: Duration,
}

/// A division of the time: by when must a step be done?
pub trait Division {
    /// The step's local deadline; `None`: the request is given up here.
    fn local_deadline(&mut self, reached: &Reached<'_>) -> Option<Time>;

    /// A later deadline for a step that misses `local`, its local deadline; `None`: there is none, and
    /// the request is then lost.
    fn last_deadline(&mut self, _reached: &Reached<'_>, _local: Time) -> Option<Time> {
        None
    }

    /// Learns from a batch that ran. Most divisions learn nothing.
    fn batch_done(&mut self, _batch: BatchDone) {}
}

/// One [`Shares`] for each pipeline. The first step that knows that the whole cannot be in time gives
/// the request up.
impl Division for Vec<Shares> {
    fn local_deadline(&mut self, reached: &Reached<'_>) -> Option<Time> {
        let Reached { pipeline, step, now, deadline, unfinished, .. } = *reached;
        let shares = &self[pipeline];
        shares.can_make(&[step], now, deadline).then(|| shares.local_deadline_beside(step, unfinished, now, deadline))
    }

    fn last_deadline(&mut self, reached: &Reached<'_>, local: Time) -> Option<Time> {
        self[reached.pipeline].last_deadline(reached.step, local, reached.deadline)
    }
}
