//! The graph of a pipeline's steps, and the walk of one request through the graph.
//!
//! Example: a step `resize` makes the tensor `picture`. The steps `find` and `read` need that tensor,
//! so both may start once `resize` has finished. If `find` fails, `read` is cancelled, and no other
//! step of the request starts.
//!
//! ```
//! use downbeat_core::pipeline::graph::{Graph, StepTensors, Walk};
//!
//! // The tensors: 0 is given, `resize` makes 1, `find` makes 2, `read` makes 3.
//! let step = |needs: usize, makes: usize| StepTensors { needs: vec![needs], makes: vec![makes] };
//! let graph = Graph::new(4, &[0], vec![step(0, 1), step(1, 2), step(1, 3)])?;
//! let mut walk = Walk::new(&graph, None);
//! assert_eq!((walk.poll_start(), walk.poll_start()), (Some(0), None));
//! walk.handle_finished(0);
//! assert_eq!((walk.poll_start(), walk.poll_start()), (Some(1), Some(2)));
//! walk.handle_failed(1);
//! assert_eq!((walk.poll_start(), walk.is_over()), (None, true));
//! # Ok::<(), downbeat_core::pipeline::graph::GraphError>(())
//! ```

use std::collections::{BTreeSet, VecDeque};

use super::shape::{Shape, ShapeError};

/// The tensors that a step needs, and the tensors that the step makes, by number.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StepTensors {
    /// The step starts once all of these tensors are made or given.
    pub needs: Vec<usize>,
    /// These tensors are there once the step has finished.
    pub makes: Vec<usize>,
}

/// The steps of a pipeline. Every tensor is either given with the request or made by one step, and
/// no step waits for itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Graph {
    /// Which step waits for which others.
    shape: Shape,
    /// For each tensor, the step that makes it; `None`: the request brings it.
    makers: Vec<Option<usize>>,
}

/// Why steps form no pipeline.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GraphError {
    /// A step needs a tensor that the request does not bring and no step makes.
    #[error("step {step} needs tensor {tensor}, which nothing makes")]
    NothingMakes {
        /// The step.
        step: usize,
        /// The tensor.
        tensor: usize,
    },
    /// A tensor is made twice, or made although the request brings it.
    #[error("step {step} makes tensor {tensor}, which is there already")]
    MadeTwice {
        /// The later of the steps that make the tensor.
        step: usize,
        /// The tensor.
        tensor: usize,
        /// The earlier step; `None`: the request brings the tensor.
        other: Option<usize>,
    },
    /// Each of these steps needs a tensor of the one before it, and the first needs one of the last.
    #[error("steps {0:?} wait for each other")]
    Circle(Vec<usize>),
    /// There is no step.
    #[error("a pipeline needs at least one step")]
    Empty,
}

impl Graph {
    /// Makes the graph of `steps` over tensors with numbers below `tensors`. A request brings the
    /// tensors `given`.
    ///
    /// # Errors
    /// If a tensor is missing or made twice, or steps wait for each other.
    ///
    /// # Panics
    /// If a number of a tensor is not below `tensors`.
    pub fn new(tensors: usize, given: &[usize], steps: Vec<StepTensors>) -> Result<Self, GraphError> {
        let given: BTreeSet<usize> = given.iter().copied().collect();
        let mut makers = vec![None; tensors];
        for (step, StepTensors { makes, .. }) in steps.iter().enumerate() {
            for tensor in makes.iter().copied() {
                if given.contains(&tensor) || makers[tensor].is_some() {
                    return Err(GraphError::MadeTwice { step, tensor, other: makers[tensor] });
                }
                makers[tensor] = Some(step);
            }
        }
        let mut after = vec![Vec::new(); steps.len()];
        for (step, StepTensors { needs, .. }) in steps.iter().enumerate() {
            for tensor in needs.iter().copied().filter(|tensor| !given.contains(tensor)) {
                after[step].push(makers[tensor].ok_or(GraphError::NothingMakes { step, tensor })?);
            }
        }
        match Shape::new(after.clone()) {
            Ok(shape) => Ok(Graph { shape, makers }),
            Err(ShapeError::Empty) => Err(GraphError::Empty),
            Err(ShapeError::Circle { .. } | ShapeError::Unknown { .. }) => Err(GraphError::Circle(circle(&after))),
        }
    }

    /// Which step waits for which others.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The number of steps.
    fn len(&self) -> usize {
        self.shape.len()
    }

    /// The steps that must finish before this step may start, ascending.
    pub fn after(&self, step: usize) -> &[usize] {
        &self.shape.steps()[step].after
    }

    /// The step that makes a tensor; `None`: the request brings the tensor.
    pub fn maker(&self, tensor: usize) -> Option<usize> {
        self.makers[tensor]
    }

    /// Whether each step is needed for one of the tensors `wanted`.
    fn needed_for(&self, wanted: &[usize]) -> Vec<bool> {
        let mut needed = vec![false; self.len()];
        let mut open: Vec<usize> = wanted.iter().filter_map(|tensor| self.maker(*tensor)).collect();
        while let Some(step) = open.pop() {
            if !std::mem::replace(&mut needed[step], true) {
                open.extend(self.after(step));
            }
        }
        needed
    }
}

/// A circle among the steps, each after those that `after` names. The first step is the smallest.
fn circle(after: &[Vec<usize>]) -> Vec<usize> {
    // The steps of circles, and the steps behind circles, never start.
    let mut stuck: BTreeSet<usize> = (0..after.len()).collect();
    loop {
        let free: Vec<usize> =
            stuck.iter().copied().filter(|step| !after[*step].iter().any(|other| stuck.contains(other))).collect();
        if free.is_empty() {
            break;
        }
        stuck.retain(|step| !free.contains(step));
    }
    // Each stuck step waits for another, so the way back comes to a step that was seen before.
    let mut path: Vec<usize> = stuck.first().copied().into_iter().collect();
    while let Some(last) = path.last() {
        let Some(earlier) = after[*last].iter().copied().find(|step| stuck.contains(step)) else { break };
        if let Some(start) = path.iter().position(|step| *step == earlier) {
            path.drain(..start);
            break;
        }
        path.push(earlier);
    }
    path.reverse();
    let least = path.iter().enumerate().min_by_key(|(_, step)| **step).map_or(0, |(at, _)| at);
    path.rotate_left(least);
    path
}

/// The state of a step of one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepState {
    /// The request wants no output that needs this step.
    Skipped,
    /// The step waits for tensors.
    Waiting,
    /// The tensors of the step are there, but the caller has not started the step yet.
    Ready,
    /// The step has started.
    Running,
    /// The tensors that the step makes are there.
    Finished,
    /// The step has failed, or was dropped.
    Failed,
    /// Another step has failed or the client has left, so this step runs no more.
    Cancelled,
}

/// The walk of one request through a graph.
///
/// Events: [`Walk::handle_finished`], [`Walk::handle_failed`], [`Walk::handle_cancel`]. After each
/// event, call [`Walk::poll_start`] until it returns `None`. An event about a step that does not run
/// changes nothing.
#[derive(Clone, Debug)]
pub struct Walk<'g> {
    graph: &'g Graph,
    states: Vec<StepState>,
    /// For each step, the number of steps that it still waits for.
    missing: Vec<usize>,
    ready: VecDeque<usize>,
    /// The steps that have not ended.
    open: usize,
}

impl<'g> Walk<'g> {
    /// The walk of a request that wants these tensors; `None`: all tensors, so every step runs.
    pub fn new(graph: &'g Graph, wanted: Option<&[usize]>) -> Self {
        let needed = wanted.map_or_else(|| vec![true; graph.len()], |wanted| graph.needed_for(wanted));
        let missing: Vec<usize> = graph.shape.steps().iter().map(|step| step.after.len()).collect();
        let state = |(needed, missing): (&bool, &usize)| match (needed, missing) {
            (false, _) => StepState::Skipped,
            (true, 0) => StepState::Ready,
            (true, _) => StepState::Waiting,
        };
        let states: Vec<StepState> = needed.iter().zip(&missing).map(state).collect();
        let ready = (0..graph.len()).filter(|step| states[*step] == StepState::Ready).collect();
        let open = needed.iter().filter(|needed| **needed).count();
        Walk { graph, states, missing, ready, open }
    }

    /// The next step to start; the step counts as started.
    pub fn poll_start(&mut self) -> Option<usize> {
        let step = self.ready.pop_front()?;
        self.states[step] = StepState::Running;
        Some(step)
    }

    /// The number of steps that may start now.
    pub fn ready(&self) -> usize {
        self.ready.len()
    }

    /// A step has made its tensors.
    pub fn handle_finished(&mut self, step: usize) {
        if !self.end(step, StepState::Finished) {
            return;
        }
        for next in self.graph.shape.next(step) {
            self.missing[*next] -= 1;
            if self.missing[*next] == 0 && self.states[*next] == StepState::Waiting {
                self.states[*next] = StepState::Ready;
                self.ready.push_back(*next);
            }
        }
    }

    /// A step has failed, or was dropped: the others are cancelled.
    pub fn handle_failed(&mut self, step: usize) {
        if self.end(step, StepState::Failed) {
            self.handle_cancel();
        }
    }

    /// No step starts any more, and running steps are cancelled.
    pub fn handle_cancel(&mut self) {
        self.ready.clear();
        for state in &mut self.states {
            if matches!(*state, StepState::Waiting | StepState::Ready | StepState::Running) {
                *state = StepState::Cancelled;
            }
        }
        self.open = 0;
    }

    /// Ends a step that runs. Returns whether it ran.
    fn end(&mut self, step: usize, state: StepState) -> bool {
        let runs = self.states.get(step) == Some(&StepState::Running);
        if runs {
            self.states[step] = state;
            self.open -= 1;
        }
        runs
    }

    /// The state of a step.
    pub fn state(&self, step: usize) -> StepState {
        self.states[step]
    }

    /// Whether each step has ended or was cancelled.
    pub fn is_over(&self) -> bool {
        self.open == 0
    }

    /// The steps that have not ended, ascending.
    pub fn remaining(&self) -> impl Iterator<Item = usize> + '_ {
        let is_open = |state: &StepState| matches!(state, StepState::Waiting | StepState::Ready | StepState::Running);
        self.states.iter().enumerate().filter(move |(_, state)| is_open(state)).map(|(step, _)| step)
    }
}
