//! Notes the requests that missed in the lists of their versions.

use downbeat_core::{RequestId, Time};
use downbeat_protocol::InferRequest;
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use downbeat_service::report::missed::{Miss, Missed, MissedRequests};
use downbeat_service::traces::context::traceparent;
use downbeat_service::unanswered::Unanswered;

/// A request that is refused on its way to the queue.
pub struct Refused {
    /// The count that the refusal belongs to; `None`: no count.
    pub reason: Option<Unanswered>,
    /// The error for the client.
    pub error: ServiceError,
}

impl From<ServiceError> for Refused {
    /// Of the errors before a request joins its queue, only a lack of room is a miss. The others tell
    /// that the request is wrong or the model out of service.
    fn from(error: ServiceError) -> Self {
        let is_full = matches!(error, ServiceError::QueueFull { .. } | ServiceError::TooMany { .. });
        Refused { reason: is_full.then_some(Unanswered::QueueFull), error }
    }
}

/// The times of a request, and its number if a decision log has it.
pub struct Terms {
    /// The number in the decision log.
    pub number: Option<RequestId>,
    /// When the request arrived.
    pub arrived: Time,
    /// The request's deadline; [`Time::MAX`]: it has none.
    pub deadline: Time,
}

impl Terms {
    /// Notes in its version's list that the request missed. `error` is the error that its client gets.
    #[cold]
    pub fn note(
        self,
        now: Time,
        list: &MissedRequests,
        request: &InferRequest,
        miss: Miss,
        error: Option<&ServiceError>,
    ) {
        let Terms { number, arrived, deadline } = self;
        let missed = Missed { id: &request.id, traceparent: traceparent(request), number, arrived, deadline };
        list.note((now, Clock::unix_millis()), &missed, miss, error);
    }

    /// Notes that the request was refused on its way to the queue. Returns the error for its client.
    #[cold]
    pub fn refused(
        self,
        now: Time,
        list: &MissedRequests,
        request: &InferRequest,
        Refused { reason, error }: Refused,
    ) -> ServiceError {
        if let Some(reason) = reason {
            self.note(now, list, request, Miss::Unanswered(reason), Some(&error));
        }
        error
    }
}
