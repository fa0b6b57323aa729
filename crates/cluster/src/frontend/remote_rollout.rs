//! Rollouts at a frontend. Each frontend counts its own requests; all follow the newest decision.

use std::sync::Arc;

use downbeat_core::{Duration, Time};
use downbeat_host::request::batch_codec::BatchCodec;
use downbeat_models::serving::rolled::RolledOut;
use downbeat_models::serving::{Inferred, ServedRollout};
use downbeat_protocol::InferRequest;
use downbeat_service::budget::Reservation;
use downbeat_service::error::ServiceError;

use super::remote_models::RemoteModel;
use super::remote_serving::RemoteServing;

/// The requests of a model with a rollout.
#[derive(Clone)]
pub(super) struct RemoteRequests {
    pub serving: Arc<RemoteServing>,
    pub model: Arc<RemoteModel>,
}

impl RolledOut for RemoteRequests {
    fn now(&self) -> Time {
        self.serving.clock().now()
    }

    fn slo(&self) -> Option<Duration> {
        self.model.versions.values().next().and_then(|version| version.definition.slo)
    }

    fn codec(&self, version: &str) -> Result<Arc<BatchCodec>, ServiceError> {
        Ok(self.model.version("", version)?.definition.codec.clone())
    }

    fn run(&self, arrival: Time, request: InferRequest) -> impl Future<Output = Inferred> + Send {
        self.serving.infer_logged(&self.model, arrival, request)
    }

    fn run_copy(&self, arrival: Time, copy: InferRequest) -> impl Future<Output = Inferred> + Send {
        self.serving.infer_copy(&self.model, arrival, copy)
    }

    fn reservation(&self) -> Reservation {
        self.serving.budget.reservation()
    }

    fn rolled_back(&self, rollout: &ServedRollout) {
        self.serving.tell_rollout(rollout);
    }
}
