//! The answer to a request that was not run, for every kind of refusal.

use downbeat_core::Duration;
use downbeat_core::cluster::{DropReason, Reject};

use crate::error::ServiceError;
use crate::unanswered::Unanswered;

/// A model's largest batch, which predicts when its queue has room again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FullBatch {
    /// Items in the batch, at least one.
    pub items: u32,
    /// How long it takes.
    pub takes: Duration,
}

/// The answer to a request that a scheduler did not take in.
pub fn rejected(model: &str, reject: &Reject, deadline_is_slo: bool, full: FullBatch) -> (Unanswered, ServiceError) {
    match reject {
        Reject::QueueFull { bound } => {
            let retry_after = full.takes.saturating_mul(u64::from(bound.div_ceil(full.items.max(1))));
            (Unanswered::QueueFull, queue_full(model, *bound, retry_after))
        }
        Reject::WaitTooLong { wait, bound } => {
            let message = format!(
                "the queue of model '{model}' is too long: this request would wait for {wait} or longer, but may wait \
                 for {bound} (max_queue_wait_s); try again later"
            );
            let retry_after = wait.saturating_sub(*bound);
            (Unanswered::QueueFull, ServiceError::QueueFull { message, retry_after })
        }
        Reject::DeadlineImpossible { needed, allowed } => {
            let limit = if deadline_is_slo { "the model's slo_ms" } else { "the request's timeout" };
            let message = format!(
                "model '{model}' needs {needed} for this request even on an idle device, but the request's deadline \
                 allows {allowed}; allow more time ({limit})"
            );
            (Unanswered::Impossible, ServiceError::DeadlineExceeded(message))
        }
        Reject::NetworkTooSlow { network, needed, allowed } => {
            let message = format!(
                "the network between the processes of the cluster is too slow for this request: messages take \
                 {network}, model '{model}' itself only {needed}, and the request's deadline allows {allowed}; look \
                 at `budgets` in GET /v2/cluster of the leading scheduler"
            );
            (Unanswered::Impossible, ServiceError::DeadlineExceeded(message))
        }
        Reject::UnknownModel => {
            (Unanswered::Unloaded, ServiceError::Unavailable(format!("model '{model}' is being unloaded")))
        }
        other => (Unanswered::Engine, ServiceError::InvalidArgument(format!("model '{model}': {other}"))),
    }
}

/// The answer to a request that was given up after it had waited for `waited`.
pub fn dropped(model: &str, reason: DropReason, waited: Duration) -> (Unanswered, ServiceError) {
    let late = |why: &str| {
        ServiceError::DeadlineExceeded(format!("dropped after {waited} in the queue of model '{model}': {why}"))
    };
    match reason {
        DropReason::QueueTimeout => {
            let message = format!(
                "Request timeout expired: the request waited {waited} in the queue of model '{model}', longer than \
                 its queue policy allows"
            );
            (Unanswered::QueueTimeout, ServiceError::DeadlineExceeded(message))
        }
        DropReason::WaitTooLong => {
            let message = format!(
                "the request waited {waited} in the queue of model '{model}', the longest wait of a request without a \
                 deadline (max_queue_wait_s); try again later"
            );
            // The best guess for the next try is the length of this wait.
            (Unanswered::QueueTimeout, ServiceError::QueueFull { message, retry_after: waited })
        }
        DropReason::ModelRemoved => {
            (Unanswered::Unloaded, ServiceError::Unavailable(format!("model '{model}' was unloaded")))
        }
        DropReason::Sacrificed => {
            let why = "under this load the request would have missed its deadline, or made later requests miss theirs";
            (Unanswered::Sacrificed, late(why))
        }
        DropReason::Hopeless => (Unanswered::Hopeless, late("the request could no longer finish by its deadline")),
    }
}

/// The error of a full queue.
pub fn queue_full(model: &str, bound: u32, retry_after: Duration) -> ServiceError {
    let message =
        format!("Exceeds maximum queue size: the queue of model '{model}' holds at most {bound}; try again later");
    ServiceError::QueueFull { message, retry_after }
}

/// The error of a request whose deadline comes before the devices are free.
pub fn busy_until(model: &str, needed: Duration, allowed: Duration) -> ServiceError {
    ServiceError::DeadlineExceeded(format!(
        "model '{model}' could not finish this request in less than {needed}, because all devices are busy, but the \
         request's deadline allows {allowed}"
    ))
}
