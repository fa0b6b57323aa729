//! The walk of one request through the steps of an ensemble, wherever their models run.

use downbeat_core::pipeline::graph::{StepState, Walk};
use downbeat_core::{Duration, Time};
use downbeat_host::request::batch_codec::BatchCodec;
use downbeat_protocol::{InferRequest, InferResponse};
use downbeat_repository::Ensemble;
use downbeat_service::budget::Reservation;
use downbeat_service::error::ServiceError;
use downbeat_service::metrics::StepMetrics;
use downbeat_service::unanswered::Unanswered;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::step_request::Tensors;
use crate::serving::Limits;

/// Runs the steps of one request of an ensemble.
pub trait StepRuns<'a> {
    /// Begins a step with its request. `is_alone`: no other step of the same request can run now.
    ///
    /// # Errors
    /// If the whole cannot be in time.
    fn begin(
        &mut self,
        walk: &Walk<'_>,
        step: usize,
        request: InferRequest,
        is_alone: bool,
    ) -> Result<BoxFuture<'a, StepEnd>, ServiceError>;

    /// How long the client still waits; `None`: for ever.
    fn left(&self) -> Option<Duration>;

    /// The limits of the whole request.
    fn limits(&self) -> &Limits;
}

/// A step that has ended.
pub struct StepEnd {
    /// The step.
    pub step: usize,
    /// The answer of its model.
    pub result: Result<InferResponse, ServiceError>,
    /// How long it waited, and how long it ran.
    pub times: (Duration, Duration),
}

/// Counts how a request of a step ends. A count that is dropped before counts the request as cancelled.
pub struct StepCount<'a>(Option<&'a StepMetrics>);

impl<'a> StepCount<'a> {
    /// A request that has come to the step with these metrics.
    pub fn new(metrics: &'a StepMetrics) -> Self {
        StepCount(Some(metrics))
    }

    /// Counts the end of the step at `now`, which was reached at `reached`. `began`: when its model
    /// began to run; `None`: it did not run. Returns how long the step waited and ran.
    pub fn ended(
        mut self,
        result: &Result<InferResponse, ServiceError>,
        (reached, began, now): (Time, Option<Time>, Time),
    ) -> (Duration, Duration) {
        let began = began.unwrap_or(reached).max(reached).min(now);
        let (waited, ran) = (began.since(reached), now.since(began));
        if let Some(metrics) = self.0.take() {
            match result {
                Ok(_) => {
                    metrics.waiting.observe(waited.as_secs_f64());
                    metrics.running.observe(ran.as_secs_f64());
                }
                Err(ServiceError::DeadlineExceeded(_)) => metrics.dropped.inc(),
                Err(_) => metrics.failed.inc(),
            }
        }
        (waited, ran)
    }
}

impl Drop for StepCount<'_> {
    fn drop(&mut self) {
        if let Some(metrics) = self.0 {
            metrics.cancelled.inc();
        }
    }
}

/// Why a request of an ensemble got no result, and the reason that it counts for.
pub struct Failure {
    /// The reason that it counts for.
    pub reason: Unanswered,
    /// The error for the client.
    pub error: ServiceError,
}

/// Counts a request that ends without a result, also if its client leaves: `count` gets the reason.
pub struct Counted<F: Fn(Unanswered)> {
    reason: Option<Unanswered>,
    count: F,
}

impl<F: Fn(Unanswered)> Counted<F> {
    /// A request whose client may leave.
    pub fn new(count: F) -> Self {
        Counted { reason: Some(Unanswered::Cancelled), count }
    }

    /// The request ends for this reason; `None`: it has a result.
    pub fn ends(&mut self, reason: Option<Unanswered>) {
        self.reason = reason;
    }
}

impl<F: Fn(Unanswered)> Drop for Counted<F> {
    fn drop(&mut self) {
        if let Some(reason) = self.reason {
            (self.count)(reason);
        }
    }
}

impl From<ServiceError> for Failure {
    fn from(error: ServiceError) -> Self {
        let reason = match &error {
            ServiceError::DeadlineExceeded(_) => Unanswered::Hopeless,
            ServiceError::QueueFull { .. } | ServiceError::TooMany { .. } => Unanswered::QueueFull,
            ServiceError::Unavailable(_) => Unanswered::RunEnded,
            _ => Unanswered::Engine,
        };
        Failure { reason, error }
    }
}

/// Runs the steps that the `wanted` outputs need. `held` gets the bytes of the tensors between the
/// steps. Returns the answer, and how long the steps waited and ran, all together.
///
/// # Errors
/// The first error of a step, with the step's name; the other steps are cancelled.
pub async fn run_steps<'a>(
    runs: &mut impl StepRuns<'a>,
    (ensemble, codec): (&Ensemble, &BatchCodec),
    mut whole: InferRequest,
    wanted: Option<&[usize]>,
    held: Reservation,
) -> Result<(InferResponse, (Duration, Duration)), Failure> {
    let all: Vec<usize> = (0..ensemble.outputs.len()).collect();
    let places = wanted.unwrap_or(&all);
    let name = whole.model_name.clone();
    let of_ensemble = |reason| ServiceError::InvalidArgument(format!("ensemble '{name}': {reason}"));
    let wanted: Vec<usize> = places.iter().map(|place| ensemble.outputs[*place]).collect();
    let wants_all = wanted.len() == ensemble.outputs.len();
    let mut walk = Walk::new(&ensemble.graph, (!wants_all).then_some(&wanted[..]));
    let is_run = |step| walk.state(step) != StepState::Skipped;
    let mut tensors = Tensors::new(ensemble, codec, &mut whole, places, is_run, held).map_err(of_ensemble)?;
    let mut running = FuturesUnordered::new();
    let (mut waited, mut ran) = (Duration::ZERO, Duration::ZERO);
    let named = |step: usize, error: ServiceError| error.within(format_args!("{}", step_name(&name, ensemble, step)));
    loop {
        let is_alone = running.is_empty() && walk.ready() <= 1;
        while let Some(step) = walk.poll_start() {
            let request = tensors.request(ensemble, step, &whole);
            running.push(runs.begin(&walk, step, request, is_alone).map_err(|error| named(step, error))?);
        }
        let next = match runs.left() {
            None => running.next().await,
            Some(left) => {
                let next = tokio::time::timeout(left.into(), running.next()).await;
                next.map_err(|_| overrun(runs.limits(), &name, ensemble, &walk))?
            }
        };
        let Some(StepEnd { step, result, times }) = next else { break };
        (waited, ran) = (waited + times.0, ran + times.1);
        // On an error the other steps are dropped with `running`, which cancels them.
        let outputs = result.map_err(|error| named(step, error))?.outputs;
        tensors.keep(ensemble, step, outputs).map_err(|error| named(step, error))?;
        walk.handle_finished(step);
    }
    let outputs = tensors.outputs(ensemble, codec, places);
    let outputs = outputs.map_err(|error| error.within(format_args!("ensemble '{name}'")))?;
    let response = InferResponse { model_name: whole.model_name, id: whole.id, outputs, ..InferResponse::default() };
    Ok((response, (waited, ran)))
}

fn step_name(name: &str, ensemble: &Ensemble, step: usize) -> String {
    format!("step {step} ('{}') of ensemble '{name}'", ensemble.steps[step].model)
}

/// The failure of a request whose client waits no longer.
fn overrun(limits: &Limits, name: &str, ensemble: &Ensemble, walk: &Walk<'_>) -> Failure {
    let running = walk.remaining().filter(|step| walk.state(*step) == StepState::Running);
    let named: Vec<String> = running.map(|step| step_name(name, ensemble, step)).collect();
    let error = limits.overrun(name).within(format_args!("in {}", named.join(", ")));
    Failure { reason: Unanswered::Timeout, error }
}
