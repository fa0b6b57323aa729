//! The walk of a request through the steps of an ensemble of a cluster. Each step is a request of its
//! model, which runs on any backend.

use downbeat_core::pipeline::graph::Walk;
use downbeat_core::{Duration, Time};
use downbeat_models::serving::{Counted, Failure, Limits, Looked, StepCount, StepEnd, StepRuns, Wishes, run_steps};
use downbeat_protocol::{InferRequest, InferResponse};
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use downbeat_service::report::missed::{Miss, Missed};
use downbeat_service::traces::context::traceparent;
use futures_util::future::{BoxFuture, FutureExt};

use super::remote_ensemble::{Began, Due, RemoteEnsemble};
use super::remote_models::RemoteVersion;
use super::remote_serving::RemoteServing;

/// The deepest nesting of ensembles. Backends load none that is a step of itself, but two backends
/// may differ.
const DEEPEST: u32 = 16;

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
        let (is_slo, depth, began) = (self.limits.deadline_is_slo, self.depth + 1, Began::default());
        let due = Due { deadline: local, is_slo, depth, began: Some(began.clone()) };
        let (serving, places, metrics) = (self.serving, self.ensemble.places.get(step), &self.ensemble.metrics[step]);
        let run = async move {
            let count = StepCount::new(metrics);
            // The semaphore is never closed.
            let _place = match places {
                Some(places) => places.acquire().await.ok(),
                None => None,
            };
            let again = last.map(|last| (request.clone(), Due { deadline: last, ..due.clone() }));
            let result = match (serving.infer_step(request, due).await, again) {
                // The step tries once more, if the whole can still be in time.
                (Err(ServiceError::DeadlineExceeded(_)), Some((request, due))) => {
                    serving.infer_step(request, due).await
                }
                (result, _) => result,
            };
            let times = count.ended(&result, (now, *began.lock(), serving.clock().now()));
            StepEnd { step, result, times }
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
        let depth = due.as_ref().map_or(0, |due| due.depth);
        if depth >= DEEPEST {
            return Err(ServiceError::Internal(format!("ensembles are nested deeper than {DEEPEST}")));
        }
        let looked = wishes.look(&request, arrival)?;
        let Looked { wanted, limits } = match due {
            Some(Due { deadline, is_slo, .. }) => looked.due(deadline, is_slo),
            None => looked,
        };
        let rows = its.codec.check(&request)?;
        let _entered = self.enter_long();
        let record = |reason| version.record_not_answered(reason, self.clock().now().since(arrival));
        let mut counted = Counted::new(record);
        let (id, traceparent) = (request.id.clone(), traceparent(&request).map(str::to_owned));
        let note = |now, miss, error| {
            let (traceparent, deadline) = (traceparent.as_deref(), limits.deadline);
            let missed = Missed { id: &id, traceparent, number: None, arrived: arrival, deadline };
            version.missed().note((now, Clock::unix_millis()), &missed, miss, error);
        };
        let until = limits.timeout.map_or(Time::MAX, |timeout| arrival + timeout);
        let mut steps = RemoteSteps { serving: self, ensemble, limits: &limits, until, depth };
        let (parts, held) = ((&ensemble.ensemble, &*its.codec), self.budget.reservation());
        let outcome = run_steps(&mut steps, parts, request, wanted.as_deref(), held).await;
        let now = self.clock().now();
        match outcome {
            Ok((response, times)) => {
                counted.ends(None);
                let is_late = now > limits.deadline;
                version.record_whole(rows, (now.since(arrival), is_late), times);
                if is_late {
                    note(now, Miss::Late { waited: times.0, rows: 0 }, None);
                }
                Ok(InferResponse { model_version: version.version.clone(), ..response })
            }
            Err(Failure { reason, error }) => {
                counted.ends(Some(reason));
                note(now, Miss::Unanswered(reason), Some(&error));
                Err(error)
            }
        }
    }
}
