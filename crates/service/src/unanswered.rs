//! The reasons why requests got no result, with their names in metrics.

use crate::error::ServiceError;

/// Why a request of a model got no result.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Unanswered {
    /// Rejected: the queue is at its bound, in items or in time.
    QueueFull,
    /// Rejected: even alone on an idle device it would end after its deadline.
    Impossible,
    /// Dropped from the queue: it cannot end by its deadline any more. In a cluster also: the
    /// deadline passed without a run, as no scheduler led or the backend was lost.
    Hopeless,
    /// Dropped from the queue's head for a larger batch behind it (window drop).
    Sacrificed,
    /// Dropped: longer in the queue than the queue policy allows, or than a request without a
    /// deadline may wait.
    QueueTimeout,
    /// The client's own `timeout` ended while it ran.
    Timeout,
    /// The client went away.
    Cancelled,
    /// The request's model was unloaded.
    Unloaded,
    /// The engine failed.
    Engine,
    /// The run took too long and was ended, or the version is out of service: a run could not be
    /// ended, its process has ended, or its device is lost.
    RunEnded,
    /// The backend that ran the request is lost, and the request may not run again, or was tried
    /// too often.
    Lost,
}

impl Unanswered {
    /// For each variant, in order: the `reason` of `downbeat_requests_not_answered_total`, Triton's
    /// of `nv_inference_request_failure`, and whether the request was not served in time, which a
    /// bad rate counts. Clients or models cause the other reasons, which more devices would not
    /// mend.
    const TABLE: [(Unanswered, &str, &str, bool); 11] = [
        (Unanswered::QueueFull, "queue_full", "REJECTED", true),
        (Unanswered::Impossible, "deadline_impossible", "REJECTED", true),
        (Unanswered::Hopeless, "deadline_hopeless", "REJECTED", true),
        (Unanswered::Sacrificed, "window_drop", "REJECTED", true),
        (Unanswered::QueueTimeout, "queue_timeout", "REJECTED", true),
        (Unanswered::Timeout, "timeout", "OTHER", true),
        (Unanswered::Cancelled, "cancelled", "CANCELED", false),
        (Unanswered::Unloaded, "unloaded", "OTHER", false),
        (Unanswered::Engine, "engine_error", "BACKEND", false),
        (Unanswered::RunEnded, "run_ended", "BACKEND", false),
        (Unanswered::Lost, "lost", "BACKEND", false),
    ];

    /// The number of reasons.
    pub const COUNT: usize = Unanswered::TABLE.len();

    /// The reason of a run without a result, by the error that the client gets. A server and a
    /// frontend of a cluster, which knows nothing but the error, count alike.
    pub fn of(failure: &ServiceError) -> Self {
        match failure {
            ServiceError::DeadlineExceeded(_) | ServiceError::Unavailable(_) => Unanswered::RunEnded,
            _ => Unanswered::Engine,
        }
    }

    /// The label of `downbeat_requests_not_answered_total`.
    pub fn label(self) -> &'static str {
        Unanswered::TABLE[self as usize].1
    }

    /// The labels of `downbeat_requests_not_answered_total`, in the order of the enum.
    pub fn labels() -> [&'static str; Unanswered::COUNT] {
        Unanswered::TABLE.map(|(_, label, ..)| label)
    }

    /// Triton's labels of `nv_inference_request_failure`, in the order of the enum.
    pub fn triton_labels() -> [&'static str; Unanswered::COUNT] {
        Unanswered::TABLE.map(|(_, _, label, _)| label)
    }

    /// Whether requests under this label count for a bad rate.
    pub fn is_bad(label: &str) -> bool {
        Unanswered::TABLE.iter().any(|(reason, known, ..)| *known == label && reason.is_for_want_of_time())
    }

    /// Whether the request would have been run if it had had the devices earlier, or for itself.
    pub fn is_for_want_of_devices(self) -> bool {
        matches!(
            self,
            Unanswered::QueueFull
                | Unanswered::Impossible
                | Unanswered::Hopeless
                | Unanswered::Sacrificed
                | Unanswered::QueueTimeout
        )
    }

    /// Whether the request was not served in time, which more devices or another policy might mend.
    fn is_for_want_of_time(self) -> bool {
        Unanswered::TABLE[self as usize].3
    }
}

// The table is indexed by the variant's number.
const _: () = {
    let mut place = 0;
    while place < Unanswered::COUNT {
        assert!(Unanswered::TABLE[place].0 as usize == place);
        place += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frontend_counts_a_backends_failure_as_one_server_does() {
        let error = || "no result".to_owned();
        let kinds = [
            (ServiceError::Unavailable(error()), Unanswered::RunEnded),
            (ServiceError::DeadlineExceeded(error()), Unanswered::RunEnded),
            (ServiceError::Internal(error()), Unanswered::Engine),
            (ServiceError::InvalidArgument(error()), Unanswered::Engine),
        ];
        for (here, reason) in kinds {
            let told = ServiceError::of_code(here.code(), here.to_string());
            assert_eq!((Unanswered::of(&here), Unanswered::of(&told)), (reason, reason), "{here:?}");
        }
    }
}
