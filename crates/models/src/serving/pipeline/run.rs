//! The way of one request through the steps of an ensemble.

use std::sync::Arc;

use downbeat_core::journal::pipelines::{PipelineInput, PipelineSpec, StepSpec};
use downbeat_core::pipeline::graph::Walk;
use downbeat_core::probes::Doubt;
use downbeat_core::{Duration, Time};
use downbeat_host::request::step_mark::{StepMark, Whole};
use downbeat_protocol::{InferRequest, InferResponse};
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use downbeat_service::report::missed::{Miss, Missed};
use downbeat_service::traces::context::traceparent;
use futures_util::future::{BoxFuture, FutureExt};
use smallvec::SmallVec;

use super::Pipeline;
use super::flat::Plan;
use super::step_request::adapt_inputs;
use super::step_runs::{Counted, Failure, StepCount, StepEnd, StepRuns, run_steps};
use super::trail::{Callers, Trail};
use crate::serving::{Limits, Looked, Serving, Wishes};

/// The place of a request within a request of an ensemble.
pub struct Within {
    /// The local deadline of the step.
    pub deadline: Time,
    /// The deadline of a second try, if the step misses its local deadline
    /// ([`Shares::last_deadline`](downbeat_core::pipeline::Shares::last_deadline)).
    pub last: Option<Time>,
    /// Whether the deadline follows from the ensemble's SLO.
    pub deadline_is_slo: bool,
    /// Whether no other step of the same request can run now.
    pub is_alone: bool,
    /// The division of the whole's time, if the step is an ensemble.
    pub plan: Option<Box<Plan>>,
    /// The mark of the step, in which the device notes when the step's run began.
    pub mark: Arc<StepMark>,
    /// The number of the pipeline's request, and of the step.
    pub of: (u64, u32),
    /// Whether models' code makes the request: the limits of the called model hold.
    pub is_call: bool,
}

impl Within {
    /// The second try of a step that runs a model with a file, until this deadline.
    fn until(&self, deadline: Time) -> Within {
        let Within { deadline_is_slo, is_alone, ref mark, of, is_call, .. } = *self;
        Within { deadline, last: None, deadline_is_slo, is_alone, plan: None, mark: mark.clone(), of, is_call }
    }
}

impl Looked {
    /// Puts the deadline of a step in the place of the deadline that the model has for its own clients.
    pub(in crate::serving) fn within(self, within: Option<&Within>) -> Self {
        match within {
            Some(Within { deadline, deadline_is_slo, is_call: false, .. }) => self.due(*deadline, *deadline_is_slo),
            _ => self,
        }
    }

    /// Sets another deadline, and whether it follows from an SLO.
    #[must_use]
    pub fn due(mut self, deadline: Time, deadline_is_slo: bool) -> Self {
        (self.limits.deadline, self.limits.deadline_is_slo) = (deadline, deadline_is_slo);
        self
    }
}

/// An ensemble that counts a request while it is in flight.
pub struct InPipeline(pub(in crate::serving) Arc<Pipeline>);

impl std::ops::Deref for InPipeline {
    type Target = Pipeline;

    fn deref(&self) -> &Pipeline {
        &self.0
    }
}

impl Drop for InPipeline {
    fn drop(&mut self) {
        self.0.occupancy.leave();
    }
}

impl Serving {
    /// Runs an inference of an ensemble. Dropping the future cancels the request in all its steps.
    ///
    /// # Errors
    /// Any [`ServiceError`]; that of a step names the step.
    pub async fn infer_pipeline(
        &self,
        pipeline: &Pipeline,
        request: InferRequest,
        within: Option<&Within>,
    ) -> Result<InferResponse, ServiceError> {
        let arrival = self.now();
        let record = pipeline.version(&request.model_version)?;
        let definition = &pipeline.definition;
        let slo = if within.is_some_and(|within| !within.is_call) {
            None
        } else {
            self.options.slo(&definition.name, definition.slo)
        };
        let wishes = Wishes { codec: &pipeline.codec, batching: &definition.batching, slo };
        let Looked { wanted, limits } = wishes.look(&request, arrival)?.within(within);
        let rows = pipeline.codec.check(&request)?;
        let plan = within.and_then(|within| within.plan.as_deref());
        if plan.is_none() {
            // The rehearsal has the steps of an ensemble within another as steps of the outer one.
            let is_bound = limits.deadline != Time::MAX;
            let budget = if is_bound { limits.deadline.since(arrival) } else { Duration::MAX };
            self.driver.pipeline_asked(arrival, budget, pipeline.number, rows);
        }
        let mut trail = self.trail(pipeline, &record.version, (rows, limits.deadline), within);
        let mut counted = Counted::new(|reason| record.record_not_answered(reason, self.now().since(arrival)));
        let part = self
            .traces
            .of(&request)
            .and_then(|trace| trace.part((&definition.name, &record.version), within.is_some(), arrival));
        let time = Budget::new((pipeline, &trail), &limits, arrival, plan);
        let mut steps = ServedSteps { serving: self, time };
        let (id, traceparent) = (request.id.clone(), traceparent(&request).map(str::to_owned));
        let missed = |now, miss, error| {
            let (traceparent, deadline) = (traceparent.as_deref(), limits.deadline);
            let missed = Missed { id: &id, traceparent, number: None, arrived: arrival, deadline };
            record.missed().note((now, Clock::unix_millis()), &missed, miss, error);
        };
        let (parts, held) = ((pipeline.ensemble(), &*pipeline.codec), self.budget.reservation());
        let outcome = run_steps(&mut steps, parts, request, wanted.as_deref(), held).await;
        let now = self.now();
        if outcome.is_ok() {
            steps.time.end(now);
        }
        if let Some(part) = part {
            match &outcome {
                Ok(_) => part.ended(now),
                Err(Failure { reason, .. }) => part.failed(*reason, now),
            }
        }
        match outcome {
            Ok((response, phases)) => {
                counted.ends(None);
                trail.answered(now > limits.deadline);
                record.record(rows, phases, now.since(arrival), now > limits.deadline);
                if now > limits.deadline {
                    missed(now, Miss::Late { waited: phases.0, rows: 0 }, None);
                }
                Ok(InferResponse { model_version: record.version.clone(), ..response })
            }
            Err(Failure { reason, error }) => {
                counted.ends(Some(reason));
                trail.failed(reason);
                missed(now, Miss::Unanswered(reason), Some(&error));
                Err(error)
            }
        }
    }

    /// Runs one step.
    async fn run_step(
        &self,
        (pipeline, trail): (&Pipeline, &Trail<'_>),
        step: usize,
        request: InferRequest,
        within: Within,
    ) -> StepEnd {
        let (begin, record) = (self.now(), &pipeline.steps[step]);
        let mut step_trail = trail.reached(step as u32, &within.mark, within.deadline);
        let count = StepCount::new(&record.metrics);
        let result = self.ask_twice(pipeline, step, request, &within).await;
        step_trail.ended(&result);
        let times = count.ended(&result, (begin, within.mark.began(), self.now()));
        StepEnd { step, result, times }
    }

    /// Asks the model of a step. A step that misses its local deadline tries once more, if the whole can
    /// still be in time.
    async fn ask_twice(
        &self,
        pipeline: &Pipeline,
        step: usize,
        request: InferRequest,
        within: &Within,
    ) -> Result<InferResponse, ServiceError> {
        let again = within.last.map(|last| (request.clone(), within.until(last)));
        match (self.ask(pipeline, step, request, within).await, again) {
            (Err(ServiceError::DeadlineExceeded(_)), Some((request, within))) => {
                self.ask(pipeline, step, request, &within).await
            }
            (result, _) => result,
        }
    }

    /// Asks the model of a step, once there is a place for the request in the step.
    async fn ask(
        &self,
        pipeline: &Pipeline,
        step: usize,
        mut request: InferRequest,
        within: &Within,
    ) -> Result<InferResponse, ServiceError> {
        let place = pipeline.steps[step].places.as_ref().map(|places| places.acquire());
        let _place = match place {
            None => None,
            Some(place) if within.deadline == Time::MAX => Some(place.await),
            Some(place) => {
                let left = within.deadline.since(self.now());
                let place = tokio::time::timeout(left.into(), place).await.map_err(|_| {
                    ServiceError::DeadlineExceeded(format!(
                        "the request waited for {left}, as max_inflight_requests ({}) requests of the ensemble were in \
                         this step",
                        pipeline.ensemble().max_inflight_requests
                    ))
                })?;
                Some(place)
            }
        };
        if let Some(served) = self.enter(&request.model_name) {
            let loaded = served.version(&request.model_version)?;
            if loaded.preprocess_of(&request).is_none() {
                adapt_inputs(&mut request.inputs, &loaded.codec.inputs);
            }
            return Box::pin(self.infer(&served, request, Some(within))).await;
        }
        let Some(inner) = self.enter_pipeline(&request.model_name) else {
            let message = format!("model '{}' is not in service any more", request.model_name);
            return Err(ServiceError::Unavailable(message));
        };
        adapt_inputs(&mut request.inputs, &inner.codec.inputs);
        self.infer_inner(&inner, request, within).await
    }

    /// Runs an inference of an ensemble that is a step of another. The future has to be boxed, as it
    /// contains itself.
    fn infer_inner<'a>(
        &'a self,
        pipeline: &'a Pipeline,
        request: InferRequest,
        within: &'a Within,
    ) -> BoxFuture<'a, Result<InferResponse, ServiceError>> {
        self.infer_pipeline(pipeline, request, Some(within)).boxed()
    }
}

impl Serving {
    /// Begins the trail of a request of an ensemble with `size` items and this deadline. The request
    /// may be a step `within` another.
    fn trail<'a>(
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
        Trail::new(log, self.driver.clock(), number, whole)
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
        (Trail::new(log, self.driver.clock(), number, whole), step)
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

/// The steps of one request. Their models are in service in this process.
struct ServedSteps<'a> {
    serving: &'a Serving,
    time: Budget<'a>,
}

impl<'a> StepRuns<'a> for ServedSteps<'a> {
    fn begin(
        &mut self,
        walk: &Walk<'_>,
        step: usize,
        request: InferRequest,
        is_alone: bool,
    ) -> Result<BoxFuture<'a, StepEnd>, ServiceError> {
        let (serving, pipeline, trail) = (self.serving, self.time.pipeline, self.time.trail);
        let within = self.time.within(walk, step, serving.now(), is_alone);
        let within = within.inspect_err(|_| pipeline.steps[step].metrics.dropped.inc())?;
        Ok(serving.run_step((pipeline, trail), step, request, within).boxed())
    }

    fn left(&self) -> Option<Duration> {
        self.time.left(self.serving.now())
    }

    fn limits(&self) -> &Limits {
        self.time.limits
    }
}

/// The time that a request of an ensemble has.
struct Budget<'a> {
    pipeline: &'a Pipeline,
    plan: Plan,
    trail: &'a Trail<'a>,
    limits: &'a Limits,
    /// When the client's own timeout is over; [`Time::MAX`]: it set none.
    until: Time,
    /// The request runs without a deadline, to find out whether the models are quicker than it seems.
    is_probe: bool,
}

impl<'a> Budget<'a> {
    /// `plan`: the division of the outer ensemble's time, for a step of an outer ensemble.
    fn new(
        (pipeline, trail): (&'a Pipeline, &'a Trail<'a>),
        limits: &'a Limits,
        arrival: Time,
        plan: Option<&Plan>,
    ) -> Self {
        let own = || {
            let (shares, len) = (pipeline.shares.read().clone(), pipeline.flat.len());
            Plan { shares, base: 0, beside: Vec::new(), deadline: limits.deadline, len }
        };
        // The outer ensemble may not know yet that this one has got other steps.
        let plan = plan.filter(|plan| plan.len == pipeline.flat.len()).cloned().unwrap_or_else(own);
        let until = limits.timeout.map_or(Time::MAX, |timeout| arrival + timeout);
        Budget { pipeline, plan, trail, limits, until, is_probe: false }
    }

    /// The local deadline of a step that starts now.
    ///
    /// # Errors
    /// `DeadlineExceeded` if the whole cannot be in time, even if no step had to wait.
    fn within(&mut self, walk: &Walk<'_>, step: usize, now: Time, is_alone: bool) -> Result<Within, ServiceError> {
        let Budget { pipeline, plan, trail, is_probe, .. } = self;
        let (flat, block) = (&pipeline.flat, pipeline.flat.block(step, plan.base));
        let firsts = plan.firsts(flat, &block);
        if !plan.shares.can_make(&firsts, now, plan.deadline) {
            let (needed, left) = (plan.shares.needed(&firsts), plan.deadline.since(now));
            if !pipeline.probes.lock().tries(now, Doubt::Measured, needed) {
                trail.gives_up(step as u32, now);
                return Err(ServiceError::DeadlineExceeded(format!(
                    "dropped before the step: this step and those after it need {needed} even on idle devices, but the \
                     deadline of the whole leaves {left}"
                )));
            }
            (*is_probe, plan.deadline) = (true, Time::MAX);
        }
        let open = walk.unfinished().filter(|other| *other != step);
        let others: Vec<usize> = open.flat_map(|other| plan.firsts(flat, &flat.block(other, plan.base))).collect();
        let is_flattened = pipeline.is_flattened(step);
        let inner = is_flattened.then(|| Box::new(plan.within(&block, others.clone())));
        let deadline = plan.local_deadline(flat, &block, (&firsts, others), now);
        Ok(Within {
            plan: inner,
            deadline,
            // The steps of an ensemble within this one have second tries of their own.
            last: if is_flattened { None } else { plan.shares.last_deadline(block.start, deadline, plan.deadline) },
            deadline_is_slo: self.limits.deadline_is_slo,
            is_alone,
            mark: self.trail.mark(step as u32, now),
            of: (self.trail.number(), step as u32),
            is_call: false,
        })
    }

    /// How long the client still waits; `None`: for ever.
    fn left(&self, now: Time) -> Option<Duration> {
        (self.until != Time::MAX).then(|| self.until.since(now))
    }

    /// The whole is done.
    fn end(&self, now: Time) {
        if self.is_probe && now <= self.limits.deadline {
            self.pipeline.probes.lock().was_wrong();
        }
    }
}
