//! Ensembles of a cluster. The frontend that gets a request walks its steps. Each step is a request
//! of its model, which runs on any backend.

use downbeat_core::pipeline::graph::Walk;
use downbeat_core::pipeline::{Shares, StepCost};
use downbeat_core::{Duration, Time};
use downbeat_models::serving::{Failure, Limits, Looked, StepEnd, StepRuns, Wishes, run_steps};
use downbeat_protocol::{InferRequest, InferResponse};
use downbeat_repository::Ensemble;
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use downbeat_service::unanswered::Unanswered;
use futures_util::future::{BoxFuture, FutureExt};
use tokio::sync::Semaphore;

use super::remote_models::RemoteVersion;
use super::remote_serving::RemoteServing;
use crate::backend::definition::Definition;

/// The steps of an ensemble, and how they share the time of a request.
pub struct RemoteEnsemble {
    ensemble: Ensemble,
    /// Weights by the rule for steps whose load is not known.
    shares: Shares,
    /// By step: a permit for each request that may be in it; empty: any number may.
    places: Vec<Semaphore>,
}

impl RemoteEnsemble {
    /// The ensemble that a definition describes; `None`: the model has a file.
    ///
    /// # Errors
    /// In words, if the steps form no graph, or do not have one time each.
    pub fn of(definition: &Definition) -> Result<Option<Self>, String> {
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
        Ok(Some(RemoteEnsemble { ensemble, shares, places }))
    }

    /// The models of the steps, with the version that a step names, or an empty text.
    pub fn models(&self) -> impl Iterator<Item = (&str, String)> {
        let version = |version: Option<u64>| version.map(|version| version.to_string()).unwrap_or_default();
        self.ensemble.steps.iter().map(move |step| (step.model.as_str(), version(step.version)))
    }
}

/// The deepest nesting of ensembles. Backends load none that is a step of itself, but two backends
/// may differ.
const DEEPEST: u32 = 16;

/// When a step of an ensemble must be done.
#[derive(Clone, Copy)]
pub struct Due {
    /// The local deadline.
    pub deadline: Time,
    /// Whether the deadline follows from an SLO.
    pub is_slo: bool,
    /// The ensembles that the step is in.
    pub depth: u32,
}

/// The steps of one request.
struct RemoteSteps<'a> {
    serving: &'a RemoteServing,
    ensemble: &'a RemoteEnsemble,
    limits: &'a Limits,
    /// When the client's own timeout is over; [`Time::MAX`]: it set none.
    until: Time,
    /// The ensembles that this one is in.
    depth: u32,
}

/// Counts a request that ends without a result, also if its client leaves.
struct Counted<'a> {
    version: &'a RemoteVersion,
    clock: Clock,
    arrival: Time,
    reason: Option<Unanswered>,
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if let Some(reason) = self.reason {
            self.version.record_not_answered(reason, self.clock.now().since(self.arrival));
        }
    }
}

impl<'a> StepRuns<'a> for RemoteSteps<'a> {
    fn begin(
        &mut self,
        walk: &Walk<'_>,
        step: usize,
        request: InferRequest,
        _is_alone: bool,
    ) -> Result<BoxFuture<'a, StepEnd>, ServiceError> {
        let (now, deadline, shares) = (self.serving.clock().now(), self.limits.deadline, &self.ensemble.shares);
        let others: Vec<usize> = walk.unfinished().filter(|other| *other != step).collect();
        let local = shares.local_deadline_beside(step, &others, now, deadline);
        let last = shares.last_deadline(step, local, deadline);
        let due = Due { deadline: local, is_slo: self.limits.deadline_is_slo, depth: self.depth + 1 };
        let serving = self.serving;
        let places = self.ensemble.places.get(step);
        let run = async move {
            let begin = serving.clock().now();
            // The semaphore is never closed.
            let _place = match places {
                Some(places) => places.acquire().await.ok(),
                None => None,
            };
            let again = last.map(|last| (request.clone(), Due { deadline: last, ..due }));
            let result = match (serving.infer_step(request, due).await, again) {
                // The step tries once more, if the whole can still be in time.
                (Err(ServiceError::DeadlineExceeded(_)), Some((request, due))) => {
                    serving.infer_step(request, due).await
                }
                (result, _) => result,
            };
            StepEnd { step, result, times: (Duration::ZERO, serving.clock().now().since(begin)) }
        };
        Ok(run.boxed())
    }

    fn left(&self) -> Option<Duration> {
        let left = || self.until.since(self.serving.clock().now());
        (self.until != Time::MAX).then(left)
    }

    fn limits(&self) -> &Limits {
        self.limits
    }
}

impl RemoteServing {
    /// Runs an inference of an ensemble, which may be a step that is due at a time. Dropping the future
    /// cancels the request in all its steps.
    ///
    /// # Errors
    /// Any [`ServiceError`]; that of a step names the step.
    pub(super) async fn infer_ensemble(
        &self,
        (version, ensemble): (&RemoteVersion, &RemoteEnsemble),
        request: InferRequest,
        due: Option<Due>,
    ) -> Result<InferResponse, ServiceError> {
        let (arrival, its) = (self.clock().now(), &version.definition);
        let wishes = Wishes { codec: &its.codec, batching: &its.batching, slo: its.slo };
        let depth = due.map_or(0, |due| due.depth);
        if depth >= DEEPEST {
            return Err(ServiceError::Internal(format!("ensembles are nested deeper than {DEEPEST}")));
        }
        let looked = wishes.look(&request, arrival)?;
        let Looked { wanted, limits } = match due {
            Some(Due { deadline, is_slo, .. }) => looked.due(deadline, is_slo),
            None => looked,
        };
        let rows = its.codec.check(&request)?;
        let _entered = self.enter_ensemble();
        let mut counted = Counted { version, clock: self.clock(), arrival, reason: Some(Unanswered::Cancelled) };
        let until = limits.timeout.map_or(Time::MAX, |timeout| arrival + timeout);
        let mut steps = RemoteSteps { serving: self, ensemble, limits: &limits, until, depth };
        let (parts, held) = ((&ensemble.ensemble, &*its.codec), self.budget.reservation());
        match run_steps(&mut steps, parts, request, wanted.as_deref(), held).await {
            Ok((response, (_, ran))) => {
                counted.reason = None;
                let now = self.clock().now();
                version.record_whole(rows, (now.since(arrival), now > limits.deadline), ran);
                Ok(InferResponse { model_version: version.version.clone(), ..response })
            }
            Err(Failure { reason, error }) => {
                counted.reason = Some(reason);
                Err(error)
            }
        }
    }
}
