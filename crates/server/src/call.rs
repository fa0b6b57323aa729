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
    pub admitted: Admitted,
    pub loaded: Arc<LoadedVersion>,
    pub arrival: Time,
    /// When it has to be finished; [`Time::MAX`] if it may take any time.
    pub deadline: Time,
    /// Whether the deadline is the model's SLO, not a limit that the client set.
    pub deadline_is_slo: bool,
    /// Whether it was let through without a deadline, to see what the model takes.
    pub is_probe: bool,
    /// Where the answer goes. Closed: the client is gone.
    pub reply: Reply,
}

impl Call {
    /// Whether a request whose deadline is impossible by the model's profile is let through without one.
    pub(crate) fn may_probe(&mut self, now: Time) -> bool {
        self.is_probe = self.deadline_is_slo && self.loaded.may_probe(now);
        self.is_probe
    }

    /// Answers a request that was not admitted. `profile` is that of its batches.
    pub(crate) fn reject(self, reject: &Reject, profile: &LatencyProfile, now: Time) {
        let model = &self.loaded.name;
        let (reason, error) = match reject {
            Reject::QueueFull { bound } => {
                let batches = u64::from(bound.div_ceil(profile.max_batch()));
                let retry_after = profile.latency(profile.max_batch()).saturating_mul(batches);
                (Unanswered::QueueFull, queue_full(model, *bound, retry_after))
            }
            Reject::WaitTooLong { wait, bound } => {
                let message = format!(
                    "the queue of model '{model}' is too long: this request would wait for {wait} or longer, and may wait for {bound} (max_queue_wait_s); try \
                     again later"
                );
                let retry_after = wait.saturating_sub(*bound);
                (Unanswered::QueueFull, ServiceError::QueueFull { message, retry_after })
            }
            Reject::DeadlineImpossible { needed, allowed } => {
                let limit = if self.deadline_is_slo { "the model's slo_ms" } else { "the request's timeout" };
                let message = format!(
                    "model '{model}' needs {needed} for this request even on an idle device, but its deadline allows {allowed}; allow more time ({limit})"
                );
                (Unanswered::Impossible, ServiceError::DeadlineExceeded(message))
            }
            Reject::UnknownModel => {
                (Unanswered::Unloaded, ServiceError::Unavailable(format!("model '{model}' is being unloaded")))
            }
            other => (Unanswered::Engine, ServiceError::InvalidArgument(format!("model '{model}': {other}"))),
        };
        self.fail(reason, error, now);
    }

    /// Answers a request of more items than may wait at all.
    pub(crate) fn never_fits(self, rows: u32, bound: u32, now: Time) {
        let model = &self.loaded.name;
        let message = format!(
            "Exceeds maximum queue size: a request of {rows} items can never wait for model '{model}', whose queue holds at most {bound}"
        );
        self.fail(Unanswered::QueueFull, ServiceError::InvalidArgument(message), now);
    }

    /// Answers a request whose deadline is over before any device is expected to be done with it.
    pub(crate) fn reject_busy(self, needed: Duration, allowed: Duration, now: Time) {
        let error = busy_until(&self.loaded.name, needed, allowed);
        self.fail(Unanswered::Impossible, error, now);
    }

    /// Answers a request that the scheduler dropped from its queue.
    pub(crate) fn drop_for(self, reason: DropReason, now: Time) {
        let (model, waited) = (&self.loaded.name, now.since(self.arrival));
        let late = |why: &str| {
            ServiceError::DeadlineExceeded(format!("dropped after {waited} in the queue of model '{model}': {why}"))
        };
        let (reason, error) = match reason {
            DropReason::QueueTimeout => {
                let message = format!(
                    "Request timeout expired: it waited {waited} in the queue of model '{model}', longer than its queue policy allows"
                );
                (Unanswered::QueueTimeout, ServiceError::DeadlineExceeded(message))
            }
            DropReason::WaitTooLong => {
                let message = format!(
                    "the request waited {waited} in the queue of model '{model}', as long as one without a deadline may (max_queue_wait_s); try again later"
                );
                // Nobody knows better: so long was the queue.
                (Unanswered::QueueTimeout, ServiceError::QueueFull { message, retry_after: waited })
            }
            DropReason::ModelRemoved => {
                (Unanswered::Unloaded, ServiceError::Unavailable(format!("model '{model}' was unloaded")))
            }
            DropReason::Sacrificed => {
                let why = "under this load it would have missed its deadline or cost those behind it theirs";
                (Unanswered::Sacrificed, late(why))
            }
            DropReason::Hopeless => (Unanswered::Hopeless, late("it could no longer finish by its deadline")),
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

/// There is no room in a model's queue.
pub(crate) fn queue_full(model: &str, bound: u32, retry_after: Duration) -> ServiceError {
    let message =
        format!("Exceeds maximum queue size: the queue of model '{model}' holds at most {bound}; try again later");
    ServiceError::QueueFull { message, retry_after }
}

/// What a request needs is busy for longer than it has.
pub(crate) fn busy_until(model: &str, needed: Duration, allowed: Duration) -> ServiceError {
    ServiceError::DeadlineExceeded(format!(
        "model '{model}' could not finish this request in less than {needed}, as all devices are busy, and its deadline allows {allowed}"
    ))
}
