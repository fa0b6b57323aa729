//! Requests of models with a rollout. The old version answers the requests that the new version fails.

use std::sync::Arc;

use downbeat_core::rollout::{Outcome, Route, Side};
use downbeat_core::{Duration, Time};
use downbeat_host::request::batch_codec::BatchCodec;
use downbeat_protocol::{InferRequest, InferResponse};
use downbeat_service::budget::Reservation;
use downbeat_service::error::ServiceError;
use downbeat_service::tenants::TENANT;
use downbeat_service::traces::Traces;
use downbeat_service::work::offload;

use super::comparison::{difference, have_same_form, misfit};
use super::rollout::ServedRollout;
use super::{InFlight, Inferred, Origin, Serving};

/// Runs requests of a model with two versions, here or on backends.
pub trait RolledOut: Clone + Send + Sync + 'static {
    /// The time now.
    fn now(&self) -> Time;

    /// The time that the model's requests may take; `None`: there is no limit.
    fn slo(&self) -> Option<Duration>;

    /// The form of a version's requests and answers.
    ///
    /// # Errors
    /// If the version is gone.
    fn codec(&self, version: &str) -> Result<Arc<BatchCodec>, ServiceError>;

    /// Runs a request, which came at `arrival`, on the version that it names.
    fn run(&self, arrival: Time, request: InferRequest) -> impl Future<Output = Inferred> + Send;

    /// Runs a copy of a request on the version that it names, in time that clients' requests leave.
    fn run_copy(&self, arrival: Time, copy: InferRequest) -> impl Future<Output = Inferred> + Send;

    /// A hold of no bytes on the memory for requests.
    fn reservation(&self) -> Reservation;

    /// The new version was rolled back by itself.
    fn rolled_back(&self, _rollout: &ServedRollout) {}
}

/// The requests of a model that this process serves.
#[derive(Clone)]
pub struct ServedRequests {
    serving: Arc<Serving>,
    served: Arc<InFlight>,
}

impl ServedRequests {
    /// The requests of this model.
    pub fn new(serving: Arc<Serving>, served: InFlight) -> Self {
        ServedRequests { serving, served: Arc::new(served) }
    }
}

impl RolledOut for ServedRequests {
    fn now(&self) -> Time {
        self.serving.now()
    }

    fn slo(&self) -> Option<Duration> {
        let definition = &self.served.definition;
        self.serving.options.slo(&definition.name, definition.slo)
    }

    fn codec(&self, version: &str) -> Result<Arc<BatchCodec>, ServiceError> {
        Ok(self.served.version(version)?.codec.clone())
    }

    fn run(&self, arrival: Time, request: InferRequest) -> impl Future<Output = Inferred> + Send {
        self.serving.infer_since(arrival, &self.served, request, None)
    }

    fn run_copy(&self, arrival: Time, copy: InferRequest) -> impl Future<Output = Inferred> + Send {
        let origin = Origin { arrival, within: None, trail: None, is_copy: true };
        self.serving.infer_to(&self.served, copy, origin, |_, _| ())
    }

    fn reservation(&self) -> Reservation {
        self.serving.budget.reservation()
    }
}

/// Runs an inference of a model with a rollout, whose request names no version.
///
/// # Errors
/// Any [`ServiceError`] of the old version, or of a new version that has taken the old one's place.
pub async fn infer_rolled_out(
    model: impl RolledOut,
    rollout: Arc<ServedRollout>,
    mut request: InferRequest,
) -> Inferred {
    match rollout.route(&mut request) {
        Route::Ended => model.run(model.now(), request).await,
        Route::Old => infer_by_old(&model, &rollout, request).await,
        Route::New => infer_by_new(&model, &rollout, request).await,
        Route::Shadow => {
            let copy = request.clone();
            let answered = infer_by_old(&model, &rollout, request).await;
            if let Ok(answer) = &answered {
                begin_copy(model, &rollout, copy, answer.clone());
            }
            answered
        }
    }
}

fn note(model: &impl RolledOut, rollout: &ServedRollout, side: Side, outcome: Outcome) {
    if rollout.note(model.now(), side, outcome) {
        model.rolled_back(rollout);
    }
}

async fn infer_by_old(model: &impl RolledOut, rollout: &ServedRollout, mut request: InferRequest) -> Inferred {
    let arrival = model.now();
    request.model_version = rollout.version(Side::Old);
    let answered = model.run(arrival, request).await;
    match &answered {
        Ok(_) => note(model, rollout, Side::Old, outcome(model, arrival)),
        Err(error) if is_own_fault(error) => {}
        Err(_) => note(model, rollout, Side::Old, Outcome::Failed),
    }
    answered
}

/// Runs a request on the new version. If that fails, the old version answers the request.
async fn infer_by_new(model: &impl RolledOut, rollout: &ServedRollout, mut request: InferRequest) -> Inferred {
    let arrival = model.now();
    let mut again = request.clone();
    request.model_version = rollout.version(Side::New);
    again.model_version = rollout.version(Side::Old);
    let tried = model.run(arrival, request).await;
    let by_time = outcome(model, arrival);
    let fault = match &tried {
        Ok(answer) => misfit(&model.codec(&again.model_version)?.outputs, &again.outputs, answer),
        // The tenant's limit would refuse the request on the old version, too.
        Err(ServiceError::TooMany { .. }) => return tried,
        Err(error) => Some(error.to_string()),
    };
    let Some(fault) = fault else {
        note(model, rollout, Side::New, by_time);
        return tried;
    };
    if tried.is_err() && by_time == Outcome::Late {
        note(model, rollout, Side::New, Outcome::Failed);
        return tried;
    }
    let id = again.id.clone();
    let answered = model.run(arrival, again).await;
    let outcome = match (&tried, &answered) {
        // Both versions refuse the request, or fail on it alike: the request's own fault.
        (Err(new), Err(old)) if is_own_fault(old) || (is_engine_fault(new) && is_engine_fault(old)) => {
            return answered;
        }
        // The old version's own answer has other sizes than it declares.
        (Ok(new), Ok(old)) if have_same_form(old, new) => by_time,
        _ => Outcome::Failed,
    };
    if outcome == Outcome::Failed {
        tracing::warn!(
            model = %rollout.model(), version = %rollout.version(Side::New), request = %id, %fault,
            "the new version failed on a request, which the old version took"
        );
    }
    note(model, rollout, Side::New, outcome);
    answered
}

/// The outcome of a request that is answered now.
fn outcome(model: &impl RolledOut, arrival: Time) -> Outcome {
    match model.slo().is_some_and(|slo| model.now().since(arrival) > slo) {
        true => Outcome::Late,
        false => Outcome::InTime,
    }
}

/// Runs a copy of a request on the new version, in time that no client's request needs, and compares
/// the answers.
fn begin_copy(model: impl RolledOut, rollout: &Arc<ServedRollout>, mut copy: InferRequest, answer: InferResponse) {
    let tensors = copy.inputs.iter().chain(&answer.outputs);
    let bytes: u64 = tensors.map(|tensor| tensor.data.len() as u64).sum();
    let mut held = model.reservation();
    let place = rollout.place().filter(|_| held.grow(bytes).is_ok());
    let Some(place) = place else { return note(&model, rollout, Side::New, Outcome::Skipped) };
    copy.model_version = rollout.version(Side::New);
    // A copy is no request of its tenant, and no part of its client's trace.
    copy.parameters.remove(TENANT);
    Traces::unmark(&mut copy);
    tokio::spawn(async move {
        let rollout = place.rollout();
        let arrival = model.now();
        let answered = model.run_copy(arrival, copy).await;
        let in_time = outcome(&model, arrival);
        let outcome = match answered {
            Ok(new) => compared(rollout, answer, new).await.unwrap_or(in_time),
            Err(error) if is_for_want_of_time(&error) => Outcome::Skipped,
            Err(error) => {
                let version = rollout.version(Side::New);
                tracing::warn!(model = %rollout.model(), %version, %error, "the new version failed on a copy");
                Outcome::Failed
            }
        };
        note(&model, rollout, Side::New, outcome);
        drop(held);
    });
}

/// The outcome of a copy whose answer differs; `None`: the answers are alike.
async fn compared(rollout: &ServedRollout, old: InferResponse, new: InferResponse) -> Option<Outcome> {
    let bytes: usize = old.outputs.iter().map(|output| output.data.len()).sum();
    let tolerance = rollout.tolerance();
    let id = old.id.clone();
    let work = move || difference(&old, &new, tolerance);
    let compared = offload::run_if(bytes >= offload::PARSE_FROM, offload::sender(), bytes, work).await;
    let Ok(difference) = compared else { return Some(Outcome::Skipped) };
    let difference = difference?;
    let version = rollout.version(Side::New);
    tracing::warn!(model = %rollout.model(), %version, request = %id, %difference, "the answer to a copy differs");
    Some(Outcome::Differed)
}

/// Whether an error is the request's fault, or its tenant's, and no version's.
fn is_own_fault(error: &ServiceError) -> bool {
    use ServiceError as E;
    match error {
        E::InvalidArgument(_)
        | E::NotFound(_)
        | E::AlreadyExists(_)
        | E::TooLarge(_)
        | E::TooMany { .. }
        | E::Unimplemented(_)
        | E::Decoupled(_) => true,
        E::QueueFull { .. } | E::DeadlineExceeded(_) | E::Unavailable(_) | E::Internal(_) => false,
    }
}

/// Whether the engine failed.
fn is_engine_fault(error: &ServiceError) -> bool {
    matches!(error, ServiceError::Internal(_))
}

/// Whether a copy did not run because the devices were busy.
fn is_for_want_of_time(error: &ServiceError) -> bool {
    use ServiceError as E;
    matches!(error, E::QueueFull { .. } | E::DeadlineExceeded(_) | E::TooMany { .. })
}
