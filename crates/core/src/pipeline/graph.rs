//! The graph of a pipeline's steps, and the walk of one request through the graph.
//!
//! Example: a step `resize` makes the tensor `picture`. The steps `find` and `read` need that tensor,
//! so both may start once `resize` has finished.
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
//! walk.handle_finished(1);
//! assert_eq!(walk.unfinished().collect::<Vec<_>>(), [2]);
//! # Ok::<(), downbeat_core::pipeline::graph::GraphError>(())
//! ```

use std::collections::BTreeSet;

use super::progress::Progress;
pub use super::progress::StepState;
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
        match Shape::new(after) {
            Ok(shape) => Ok(Graph { shape, makers }),
            Err(ShapeError::Empty) => Err(GraphError::Empty),
            Err(ShapeError::Circle(steps)) => Err(GraphError::Circle(steps)),
            Err(ShapeError::Unknown { .. }) => unreachable!("each step waits for makers of tensors, which are steps"),
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

/// The walk of one request through a graph: its [`Progress`], and the steps that the request needs.
///
/// After each [`Walk::handle_finished`], call [`Walk::poll_start`] until it returns `None`. A request
/// that loses a step is over: its owner drops the walk.
#[derive(Clone, Debug)]
pub struct Walk<'g> {
    graph: &'g Graph,
    progress: Progress,
}

impl<'g> Walk<'g> {
    /// The walk of a request that wants these tensors; `None`: all tensors, so every step runs.
    pub fn new(graph: &'g Graph, wanted: Option<&[usize]>) -> Self {
        let needed = wanted.map(|wanted| graph.needed_for(wanted));
        let mut progress = Progress::default();
        progress.begin(&graph.shape, |step| needed.as_ref().is_none_or(|needed| needed[step]));
        Walk { graph, progress }
    }

    /// The next step to start; the step counts as started.
    pub fn poll_start(&mut self) -> Option<usize> {
        self.progress.poll_start()
    }

    /// The number of steps that may start now.
    pub fn ready(&self) -> usize {
        self.progress.ready()
    }

    /// A step has made its tensors.
    pub fn handle_finished(&mut self, step: usize) {
        self.progress.handle_finished(&self.graph.shape, step);
    }

    /// The state of a step.
    pub fn state(&self, step: usize) -> StepState {
        self.progress.state(step)
    }

    /// Whether each step has ended.
    pub fn is_over(&self) -> bool {
        self.progress.is_over()
    }

    /// The steps that run or may start ([`Progress::unfinished`]).
    pub fn unfinished(&self) -> impl Iterator<Item = usize> + '_ {
        self.progress.unfinished()
    }

    /// The steps that have not ended, ascending.
    pub fn remaining(&self) -> impl Iterator<Item = usize> + '_ {
        self.progress.remaining()
    }
}
