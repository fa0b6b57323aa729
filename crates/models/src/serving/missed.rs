//! Notes the requests that missed in the lists of their versions.

use downbeat_core::Time;
use downbeat_host::request_log::RequestTrail;
use downbeat_protocol::InferRequest;
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use downbeat_service::report::missed::{Miss, Missed, MissedReport, MissedRequests};
use downbeat_service::traces::context::traceparent;
use downbeat_service::unanswered::Unanswered;

use super::Serving;

/// A request that is refused on its way to the queue.
pub(super) struct Refused {
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

/// The times of a request, and its trail in the decision log if there is a log.
pub(super) struct Terms<'a, 'log> {
    pub trail: Option<&'a RequestTrail<'log>>,
    pub arrived: Time,
    pub deadline: Time,
}

impl Serving {
    /// Notes a request that missed. `error` is the error that its client gets.
    #[cold]
    pub(super) fn note_missed(
        &self,
        list: &MissedRequests,
        request: &InferRequest,
        Terms { trail, arrived, deadline }: Terms<'_, '_>,
        miss: Miss,
        error: Option<&ServiceError>,
    ) {
        let number = trail.map(RequestTrail::request);
        let missed = Missed { id: &request.id, traceparent: traceparent(request), number, arrived, deadline };
        list.note((self.now(), Clock::unix_millis()), &missed, miss, error);
    }

    /// Notes a request that was refused on its way to the queue. Returns the error for its client.
    #[cold]
    pub(super) fn refused(
        &self,
        list: &MissedRequests,
        request: &InferRequest,
        terms: Terms<'_, '_>,
        Refused { reason, error }: Refused,
    ) -> ServiceError {
        if let Some(reason) = reason {
            self.note_missed(list, request, terms, Miss::Unanswered(reason), Some(&error));
        }
        error
    }

    /// The last requests of a version that missed. `name` and `version` are those of the version.
    pub fn missed(&self, (name, version): (&str, &str), list: &MissedRequests) -> MissedReport {
        let has_log = self.driver.request_log().is_some();
        let requests = list.report(has_log);
        MissedReport { model: name.to_owned(), version: version.to_owned(), has_log, requests }
    }
}
