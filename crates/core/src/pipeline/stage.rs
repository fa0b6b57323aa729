//! The models, devices and pipelines that requests flow through.

use super::shape::Shape;
use crate::cluster::{Behaviour, ModelOptions};
use crate::time::Duration;

/// The models, devices and pipelines that requests flow through.
#[derive(Clone, Debug, Default)]
pub struct Stage {
    /// By pool: number of devices. The models of a pool share its devices.
    pub pools: Vec<u32>,
    /// The models that run steps.
    pub models: Vec<StepModel>,
    /// The pipelines.
    pub pipelines: Vec<Pipeline>,
    /// How late wake-ups may come ([`Scheduler::set_wake_margin`](crate::cluster::Scheduler::set_wake_margin)).
    pub wake_margin: Duration,
}

/// A model that runs steps, of one pipeline or of several.
#[derive(Clone, Debug)]
pub struct StepModel {
    /// How the model is scheduled.
    pub options: ModelOptions,
    /// The behaviour of an adaptive model; `None`: the behaviour follows from the load of the moment.
    pub behaviour: Option<Behaviour>,
    /// The pool whose devices run the model.
    pub pool: usize,
}

/// A pipeline.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pipeline {
    /// Which step waits for which others.
    pub shape: Shape,
    /// By step: the number of its model.
    pub models: Vec<usize>,
}

/// Why a stage cannot be played.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StageError {
    /// A model is in a pool that does not exist.
    #[error("model {model} is in pool {pool}, but there are only {pools} pools, counted from 0")]
    Pool {
        /// The model.
        model: usize,
        /// The pool that does not exist.
        pool: usize,
        /// Number of pools.
        pools: usize,
    },
    /// A step is run by a model that does not exist.
    #[error("step {step} of pipeline {pipeline} is run by a model that does not exist")]
    Model {
        /// The pipeline.
        pipeline: usize,
        /// The step.
        step: usize,
    },
    /// A pipeline does not have one model for each step.
    #[error("pipeline {pipeline} has {steps} steps and {models} models; each step needs one model")]
    Steps {
        /// The pipeline.
        pipeline: usize,
        /// Number of steps of its shape.
        steps: usize,
        /// Number of models.
        models: usize,
    },
    /// A pipeline has more steps than can be numbered.
    #[error("pipeline {pipeline} has more than {MOST_STEPS} steps")]
    TooMany {
        /// The pipeline.
        pipeline: usize,
    },
}

/// The most steps of a pipeline. A step's request is named by the whole's number and the step's.
pub const MOST_STEPS: usize = 1 << STEP_BITS;
pub(super) const STEP_BITS: u32 = 10;

impl Stage {
    /// Checks that all numbers name something.
    ///
    /// # Errors
    /// If a number names no pool or no model, or if steps and models are not equally many.
    pub fn check(&self) -> Result<(), StageError> {
        let pools = self.pools.len();
        for (model, StepModel { pool, .. }) in self.models.iter().enumerate() {
            if *pool >= pools {
                return Err(StageError::Pool { model, pool: *pool, pools });
            }
        }
        for (pipeline, Pipeline { shape, models }) in self.pipelines.iter().enumerate() {
            if models.len() != shape.len() {
                return Err(StageError::Steps { pipeline, steps: shape.len(), models: models.len() });
            }
            if shape.len() > MOST_STEPS {
                return Err(StageError::TooMany { pipeline });
            }
            if let Some(step) = models.iter().position(|model| *model >= self.models.len()) {
                return Err(StageError::Model { pipeline, step });
            }
        }
        Ok(())
    }
}
