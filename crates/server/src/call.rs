//! A request that waits for its answer, and the errors that it may be answered with.

use std::sync::Arc;

use downbeat_core::cluster::{DropReason, Reject};
use downbeat_core::{Duration, LatencyProfile, Time};

use crate::batch_codec::Admitted;
use crate::error::ServiceError;
use crate::loaded_version::LoadedVersion;
use crate::reply::Reply;
use crate::unanswered::Unanswered;

/// A request that waits for its answer.
pub struct Call {
    /// Its tensors.
    pub admitted: Admitted,
    /// The model version that answers it.
    pub loaded: Arc<LoadedVersion>,
    /// When it came.
    pub arrival: Time,
    /// When it has to be finished; [`Time::MAX`] if it may take any time.
    pub deadline: Time,
    /// Whether the deadline is the model's SLO, not a limit that the client set.
    pub deadline_is_slo: bool,
    /// Where the answer goes. Closed: the client is gone.
    pub reply: Reply,
}

/// How often a request is let through to a model whose profile says that it cannot meet its own SLO, to learn
/// whether that is (still) true. Without it a profile that was measured in a bad moment would never be corrected.
const PROBE_EVERY: Duration = Duration::from_millis(1_000);

impl Call {
    /// Whether a request whose deadline is impossible by the model's profile is let through without one.
    pub(crate) fn may_probe(&self, now: Time) -> bool {
        self.deadline_is_slo && self.loaded.may_probe(now, PROBE_EVERY)
    }

    /// Answers a request that was not admitted. `profile` is that of its batches.
    pub(crate) fn reject(self, reject: &Reject, profile: &LatencyProfile, now: Time) {
        let model = &self.loaded.name;
        let (reason, error) = match reject {
            Reject::QueueFull { bound } => {
                let batches = u64::from(bound.div_ceil(profile.max_batch()));
                (
                    Unanswered::QueueFull,
                    ServiceError::QueueFull {
                        message: format!(
                            "Exceeds maximum queue size: the queue of model '{model}' holds at most {bound}; try again later"
                        ),
                        retry_after: profile.latency(profile.max_batch()).saturating_mul(batches),
                    },
                )
            }
            Reject::WaitTooLong { wait, bound } => (
                Unanswered::QueueFull,
                ServiceError::QueueFull {
                    message: format!(
                        "the queue of model '{model}' is too long: this request would wait for {wait} or longer, and may wait \
                         for {bound} (max_queue_wait_s); try again later"
                    ),
                    retry_after: wait.saturating_sub(*bound),
                },
            ),
            Reject::DeadlineImpossible { needed, allowed } => (
                Unanswered::Impossible,
                ServiceError::DeadlineExceeded(format!(
                    "model '{model}' needs {needed} for this request even on an idle device, but its deadline allows \
                     {allowed}; allow more time ({})",
                    if self.deadline_is_slo { "the model's slo_ms" } else { "the request's timeout" }
                )),
            ),
            Reject::UnknownModel => {
                (Unanswered::Unloaded, ServiceError::Unavailable(format!("model '{model}' is being unloaded")))
            }
            other => (Unanswered::Engine, ServiceError::InvalidArgument(format!("model '{model}': {other}"))),
        };
        self.fail(reason, error, now);
    }

    /// Answers a request of more items than may wait at all.
    pub(crate) fn never_fits(self, rows: u32, bound: u32, now: Time) {
        let message = format!(
            "Exceeds maximum queue size: a request of {rows} items can never wait for model '{}', whose queue holds at most {bound}",
            self.loaded.name
        );
        self.fail(Unanswered::QueueFull, ServiceError::InvalidArgument(message), now);
    }

    /// Answers a request whose deadline is over before any device is expected to be done with it.
    pub(crate) fn reject_busy(self, needed: Duration, allowed: Duration, now: Time) {
        let message = format!(
            "model '{}' could not finish this request in less than {needed}, as all devices are busy, and its deadline \
             allows {allowed}",
            self.loaded.name
        );
        self.fail(Unanswered::Impossible, ServiceError::DeadlineExceeded(message), now);
    }

    /// Answers a request that the scheduler dropped from its queue.
    pub(crate) fn drop_for(self, reason: DropReason, now: Time) {
        let model = &self.loaded.name;
        let waited = now.since(self.arrival);
        let (reason, error) = match reason {
            DropReason::QueueTimeout => (
                Unanswered::QueueTimeout,
                ServiceError::DeadlineExceeded(format!(
                    "Request timeout expired: it waited {waited} in the queue of model '{model}', longer than its queue policy allows"
                )),
            ),
            DropReason::WaitTooLong => (
                Unanswered::QueueTimeout,
                ServiceError::QueueFull {
                    message: format!(
                        "the request waited {waited} in the queue of model '{model}', as long as one without a deadline may \
                         (max_queue_wait_s); try again later"
                    ),
                    // Nobody knows better: so long was the queue.
                    retry_after: waited,
                },
            ),
            DropReason::ModelRemoved => {
                (Unanswered::Unloaded, ServiceError::Unavailable(format!("model '{model}' was unloaded")))
            }
            DropReason::Sacrificed => (
                Unanswered::Sacrificed,
                ServiceError::DeadlineExceeded(format!(
                    "dropped after {waited} in the queue of model '{model}': under this load it would have missed its \
                     deadline or cost those behind it theirs"
                )),
            ),
            DropReason::Hopeless => (
                Unanswered::Hopeless,
                ServiceError::DeadlineExceeded(format!(
                    "dropped after {waited} in the queue of model '{model}': it could no longer finish by its deadline"
                )),
            ),
        };
        self.fail(reason, error, now);
    }

    /// Answers with an error, and counts it.
    pub(crate) fn fail(self, reason: Unanswered, error: ServiceError, now: Time) {
        self.loaded.record_not_answered(reason, now.since(self.arrival));
        // A receiver that is gone was counted all the same: the request was not answered.
        self.reply.send(Err(error));
    }
}
