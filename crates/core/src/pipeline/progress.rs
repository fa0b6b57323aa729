//! The progress of one request through the steps of its pipeline.

use std::collections::VecDeque;

use super::shape::Shape;

/// The state of a step of one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepState {
    /// The request wants no output that needs this step.
    Skipped,
    /// The step waits for other steps.
    Waiting,
    /// All steps before it have finished, but the caller has not started the step yet.
    Ready,
    /// The step has started: it is queued, or runs.
    Running,
    /// The step has finished.
    Finished,
}

/// The progress of one request through its steps. The server and the simulator follow their requests
/// by this one rule.
///
/// After each [`Progress::handle_finished`], call [`Progress::poll_start`] until it returns `None`.
/// An event about a step that does not run changes nothing. A request that loses a step is over: its
/// owner drops the progress.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// By step: its state, and the number of steps that it still waits for.
    steps: Vec<(StepState, usize)>,
    ready: VecDeque<usize>,
    /// The steps that have not finished.
    open: usize,
}

impl Progress {
    /// Begins again with a request that needs these steps. A needed step needs all steps before it.
    pub(super) fn begin(&mut self, shape: &Shape, needs: impl Fn(usize) -> bool) {
        let state = |step: usize, missing: usize| match (needs(step), missing) {
            (false, _) => StepState::Skipped,
            (true, 0) => StepState::Ready,
            (true, _) => StepState::Waiting,
        };
        let Progress { steps, ready, open } = self;
        steps.clear();
        steps.extend(shape.steps().iter().enumerate().map(|(step, shape)| {
            let missing = shape.after.len();
            (state(step, missing), missing)
        }));
        ready.clear();
        ready.extend((0..steps.len()).filter(|step| steps[*step].0 == StepState::Ready));
        *open = steps.iter().filter(|(state, _)| *state != StepState::Skipped).count();
    }

    /// The next step to start; the step counts as started.
    pub fn poll_start(&mut self) -> Option<usize> {
        let step = self.ready.pop_front()?;
        self.steps[step].0 = StepState::Running;
        Some(step)
    }

    /// The number of steps that may start now.
    pub fn ready(&self) -> usize {
        self.ready.len()
    }

    /// A step has finished. `shape` is the shape that the request began with.
    pub fn handle_finished(&mut self, shape: &Shape, step: usize) {
        let Some((state, _)) = self.steps.get_mut(step).filter(|(state, _)| *state == StepState::Running) else {
            return;
        };
        *state = StepState::Finished;
        self.open -= 1;
        for next in shape.next(step) {
            let (state, missing) = &mut self.steps[*next];
            *missing -= 1;
            if *missing == 0 && *state == StepState::Waiting {
                *state = StepState::Ready;
                self.ready.push_back(*next);
            }
        }
    }

    /// The state of a step.
    pub fn state(&self, step: usize) -> StepState {
        self.steps[step].0
    }

    /// Whether each step has finished.
    pub fn is_over(&self) -> bool {
        self.open == 0
    }

    /// The steps that have started or may start, and have not finished, ascending: the branches that
    /// count for [`Shares::local_deadline_beside`](super::Shares::local_deadline_beside).
    pub fn unfinished(&self) -> impl Iterator<Item = usize> + '_ {
        let is_open = |state: &StepState| matches!(state, StepState::Ready | StepState::Running);
        self.steps.iter().enumerate().filter(move |(_, (state, _))| is_open(state)).map(|(step, _)| step)
    }

    /// The steps that have not finished, ascending.
    pub fn remaining(&self) -> impl Iterator<Item = usize> + '_ {
        let is_open = |state: &StepState| matches!(state, StepState::Waiting | StepState::Ready | StepState::Running);
        self.steps.iter().enumerate().filter(move |(_, (state, _))| is_open(state)).map(|(step, _)| step)
    }
}
