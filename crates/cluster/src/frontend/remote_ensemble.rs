//! The ensembles of a cluster, as frontends know them.

use std::sync::Arc;

use downbeat_core::pipeline::{Shares, StepCost};
use downbeat_core::{Duration, Time};
use downbeat_repository::Ensemble;
use downbeat_service::metrics::{Metrics, StepMetrics};
use downbeat_service::report::live::LiveStep;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::backend::definition::Definition;

/// The steps of an ensemble, and how they share the time of a request.
pub struct RemoteEnsemble {
    /// The steps.
    pub ensemble: Ensemble,
    /// Weights by the rule for steps whose load is not known.
    pub shares: Shares,
    /// By step: a permit for each request that may be in it; empty: any number may.
    pub places: Vec<Semaphore>,
    /// By step: the counts of its requests at this frontend.
    pub metrics: Vec<StepMetrics>,
}

impl RemoteEnsemble {
    /// The ensemble of this name that a definition describes; `None`: the model has a file.
    ///
    /// # Errors
    /// In words, if the steps form no graph, or do not have one time each.
    pub fn of(name: &str, definition: &Definition, metrics: &Metrics) -> Result<Option<Self>, String> {
        let Some(ensemble) = Ensemble::of(&definition.config)? else { return Ok(None) };
        let times = &definition.step_times;
        if times.len() != ensemble.steps.len() {
            return Err(format!("the ensemble has {} steps, and the times of {}", ensemble.steps.len(), times.len()));
        }
        let cost = |alone: &Duration| StepCost { alone: *alone, devices: 1.0, load: 0.0 };
        let costs: Vec<StepCost> = times.iter().map(cost).collect();
        let shares = Shares::fixed(ensemble.graph.shape(), &costs);
        let most = ensemble.max_inflight_requests as usize;
        let places = if most == 0 { 0 } else { ensemble.steps.len() };
        let places = (0..places).map(|_| Semaphore::new(most.min(Semaphore::MAX_PERMITS))).collect();
        let steps = ensemble.steps.iter().enumerate();
        let metrics = steps.map(|(at, step)| metrics.pipeline_step(name, at, &step.model)).collect();
        Ok(Some(RemoteEnsemble { ensemble, shares, places, metrics }))
    }

    /// The counts of its steps at this frontend, with their shares of a request's time.
    pub fn steps_report(&self) -> Vec<LiveStep> {
        let weights = self.shares.weights();
        let all: f64 = weights.iter().sum();
        let steps = self.ensemble.steps.iter().zip(&self.metrics).zip(weights);
        steps.map(|((step, metrics), weight)| metrics.report(&step.model, weight / all)).collect()
    }

    /// The models of the steps, with the version that a step names, or an empty text.
    pub fn models(&self) -> impl Iterator<Item = (&str, String)> {
        let version = |version: Option<u64>| version.map(|version| version.to_string()).unwrap_or_default();
        self.ensemble.steps.iter().map(move |step| (step.model.as_str(), version(step.version)))
    }
}

/// When a step of an ensemble must be done.
#[derive(Clone)]
pub struct Due {
    /// The local deadline.
    pub deadline: Time,
    /// Whether the deadline follows from an SLO.
    pub is_slo: bool,
    /// The ensembles that the step is in.
    pub depth: u32,
    /// Gets the time when the step's run began; `None`: the request is a copy, and no step.
    pub began: Option<Began>,
}

/// When a request's run began, by the backend's report; `None`: it has not run.
pub type Began = Arc<Mutex<Option<Time>>>;
