//! Requests of models with a rollout. The old version answers the requests that the new version fails.

use std::sync::Arc;

use downbeat_core::Time;
use downbeat_core::rollout::{Outcome, Route, Side};
use downbeat_protocol::{InferRequest, InferResponse};
use downbeat_service::error::ServiceError;
use downbeat_service::tenants::TENANT;
use downbeat_service::traces::Traces;
use downbeat_service::work::offload;

use super::comparison::{difference, have_same_form, misfit};
use super::rollout::ServedRollout;
use super::{InFlight, Inferred, Model, Origin, Serving};

impl Serving {
    /// Runs an inference of a model with a rollout, whose request names no version.
    ///
    /// # Errors
    /// Any [`ServiceError`] of the old version, or of a new version that has taken the old one's place.
    pub async fn infer_in_rollout(self: &Arc<Self>, served: InFlight, mut request: InferRequest) -> Inferred {
        let Some(rollout) = served.rollout.clone() else { return self.infer(&served, request, None).await };
        match rollout.route(&mut request) {
            Route::Ended => self.infer(&served, request, None).await,
            Route::Old => self.infer_by_old(&served, &rollout, request).await,
            Route::New => self.infer_by_new(&served, &rollout, request).await,
            Route::Shadow => {
                let copy = request.clone();
                let answered = self.infer_by_old(&served, &rollout, request).await;
                if let Ok(answer) = &answered {
                    self.begin_copy(served, &rollout, copy, answer.clone());
                }
                answered
            }
        }
    }

    async fn infer_by_old(&self, served: &Model, rollout: &ServedRollout, mut request: InferRequest) -> Inferred {
        let arrival = self.now();
        request.model_version = rollout.version(Side::Old);
        let answered = self.infer_since(arrival, served, request, None).await;
        match &answered {
            Ok(_) => rollout.note(self.now(), Side::Old, self.outcome(served, arrival)),
            Err(error) if is_own_fault(error) => {}
            Err(_) => rollout.note(self.now(), Side::Old, Outcome::Failed),
        }
        answered
    }

    /// Runs a request on the new version. If that fails, the old version answers the request.
    async fn infer_by_new(&self, served: &Model, rollout: &ServedRollout, mut request: InferRequest) -> Inferred {
        let arrival = self.now();
        let mut again = request.clone();
        request.model_version = rollout.version(Side::New);
        again.model_version = rollout.version(Side::Old);
        let tried = self.infer_since(arrival, served, request, None).await;
        let outcome = self.outcome(served, arrival);
        let fault = match &tried {
            Ok(answer) => {
                let declared = served.version(&again.model_version)?;
                misfit(&declared.codec.outputs, &again.outputs, answer)
            }
            // The tenant's limit would refuse the request on the old version, too.
            Err(ServiceError::TooMany { .. }) => return tried,
            Err(error) => Some(error.to_string()),
        };
        let Some(fault) = fault else {
            rollout.note(self.now(), Side::New, outcome);
            return tried;
        };
        if tried.is_err() && outcome == Outcome::Late {
            rollout.note(self.now(), Side::New, Outcome::Failed);
            return tried;
        }
        let id = again.id.clone();
        let answered = self.infer_since(arrival, served, again, None).await;
        let outcome = match (&tried, &answered) {
            // Both versions refuse the request, or fail on it alike: the request's own fault.
            (Err(new), Err(old)) if is_own_fault(old) || (is_engine_fault(new) && is_engine_fault(old)) => {
                return answered;
            }
            // The old version's own answer has other sizes than it declares.
            (Ok(new), Ok(old)) if have_same_form(old, new) => outcome,
            _ => Outcome::Failed,
        };
        if outcome == Outcome::Failed {
            tracing::warn!(
                model = %rollout.model(), version = %rollout.version(Side::New), request = %id, %fault,
                "the new version failed on a request, which the old version took"
            );
        }
        rollout.note(self.now(), Side::New, outcome);
        answered
    }

    /// The outcome of a request that is answered now.
    fn outcome(&self, served: &Model, arrival: Time) -> Outcome {
        let slo = self.options.slo(&served.definition.name, served.definition.slo);
        match slo.is_some_and(|slo| self.now().since(arrival) > slo) {
            true => Outcome::Late,
            false => Outcome::InTime,
        }
    }

    /// Runs a copy of a request on the new version, in time that no client's request needs, and compares
    /// the answers.
    fn begin_copy(
        self: &Arc<Self>,
        served: InFlight,
        rollout: &Arc<ServedRollout>,
        mut copy: InferRequest,
        answer: InferResponse,
    ) {
        let tensors = copy.inputs.iter().chain(&answer.outputs);
        let bytes: u64 = tensors.map(|tensor| tensor.data.len() as u64).sum();
        let mut held = self.budget.reservation();
        let place = rollout.place().filter(|_| held.grow(bytes).is_ok());
        let Some(place) = place else { return rollout.note(self.now(), Side::New, Outcome::Skipped) };
        copy.model_version = rollout.version(Side::New);
        // A copy is no request of its tenant, and no part of its client's trace.
        copy.parameters.remove(TENANT);
        Traces::unmark(&mut copy);
        let serving = self.clone();
        tokio::spawn(async move {
            let rollout = place.rollout();
            let arrival = serving.now();
            let origin = Origin { arrival, within: None, trail: None, is_copy: true };
            let answered = serving.infer_to(&served, copy, origin, |_, _| ()).await;
            let in_time = serving.outcome(&served, arrival);
            let outcome = match answered {
                Ok(new) => serving.compared(rollout, answer, new).await.unwrap_or(in_time),
                Err(error) if is_for_want_of_time(&error) => Outcome::Skipped,
                Err(error) => {
                    let version = rollout.version(Side::New);
                    tracing::warn!(model = %rollout.model(), %version, %error, "the new version failed on a copy");
                    Outcome::Failed
                }
            };
            rollout.note(serving.now(), Side::New, outcome);
            drop(held);
        });
    }

    /// The outcome of a copy whose answer differs; `None`: the answers are alike.
    async fn compared(&self, rollout: &ServedRollout, old: InferResponse, new: InferResponse) -> Option<Outcome> {
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
