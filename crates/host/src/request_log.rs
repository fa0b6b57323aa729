//! The decision log of clients' requests: their names, and the errors that clients got.

use std::collections::BTreeMap;
use std::sync::Arc;

use downbeat_core::journal::Journal;
use downbeat_core::journal::requests::{Failure, RequestBook, RequestInput, Trace, Way, bounded};
use downbeat_core::{RequestId, Time};
use downbeat_driver::{LOG_BUFFER, LogSink, hand_over};
use downbeat_protocol::InferRequest;
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use downbeat_service::traces::context::traceparent;
use parking_lot::Mutex;

/// Writes down the requests of clients. A server without a decision log has none of these.
///
/// **Bound.** Some tens of thousands of bytes wait here, and then the log's own bound holds. A name
/// stays for each model that has had a request.
#[derive(Debug)]
pub struct RequestLog {
    inner: Mutex<Inner>,
    sink: Arc<dyn LogSink>,
    clock: Clock,
}

#[derive(Debug)]
struct Inner {
    journal: Journal<RequestBook>,
    models: BTreeMap<String, u32>,
}

/// The trail of a request in the log. Dropping the trail without an end writes that the client has
/// gone.
#[derive(Debug)]
pub struct RequestTrail<'a> {
    log: &'a RequestLog,
    request: RequestId,
    model: u32,
    arrived: Time,
    state: Mutex<TrailState>,
}

#[derive(Debug)]
struct TrailState {
    items: u32,
    deadline: Time,
    /// Whether nothing more is to be written.
    has_ended: bool,
}

impl RequestLog {
    /// Begins the log.
    pub fn new(sink: Arc<dyn LogSink>, clock: Clock) -> RequestLog {
        let inner = Inner { journal: Journal::on(RequestBook::default()), models: BTreeMap::new() };
        RequestLog { inner: Mutex::new(inner), sink, clock }
    }

    /// Begins the trail of a request that has arrived. Its names are written down, if it has any.
    pub fn begin(&self, request: RequestId, asked: &InferRequest) -> RequestTrail<'_> {
        let arrived = self.clock.now();
        let trace = traceparent(asked).and_then(Trace::of_traceparent);
        let mut inner = self.inner.lock();
        let model = self.model(&mut inner, arrived, &asked.model_name);
        if !asked.id.is_empty() || trace.is_some() {
            let id = bounded(&asked.id, RequestInput::MOST_ID).to_owned();
            self.note(&mut inner, arrived, RequestInput::Came { request, model, id, trace });
        }
        let state = Mutex::new(TrailState { items: 0, deadline: Time::MAX, has_ended: false });
        RequestTrail { log: self, request, model, arrived, state }
    }

    /// The number of a model.
    fn model(&self, inner: &mut Inner, now: Time, name: &str) -> u32 {
        if let Some(number) = inner.models.get(name) {
            return *number;
        }
        let number = inner.models.len() as u32;
        inner.models.insert(name.to_owned(), number);
        self.note(inner, now, RequestInput::Model(number, name.to_owned()));
        number
    }

    fn note(&self, inner: &mut Inner, now: Time, input: RequestInput) {
        // The book refuses an input only if the server has a defect. The refusal is in the log.
        let _ = inner.journal.apply(now, input);
        hand_over(&*self.sink, &mut inner.journal, LOG_BUFFER);
    }

    /// Notes the way of a request through a cluster, which has ended now.
    pub fn went(&self, request: RequestId, model: &str, way: Way) {
        let now = self.clock.now();
        let mut inner = self.inner.lock();
        let model = self.model(&mut inner, now, model);
        self.note(&mut inner, now, RequestInput::Went { request, model, way });
    }

    /// Passes on the unwritten part.
    pub fn flush(&self) {
        hand_over(&*self.sink, &mut self.inner.lock().journal, 1);
    }
}

impl RequestTrail<'_> {
    /// The request's number.
    pub fn request(&self) -> RequestId {
        self.request
    }

    /// The terms of the request, which are known once it was read.
    pub fn has_terms(&self, items: u32, deadline: Time) {
        let mut state = self.state.lock();
        (state.items, state.deadline) = (items, deadline);
    }

    /// The client's own time for the request is over.
    pub fn timed_out(&self) {
        self.end(Failure::TimedOut, "");
    }

    /// The request has this result.
    pub fn ended<T>(&self, result: &Result<T, ServiceError>) {
        match result {
            Ok(_) => self.state.lock().has_ended = true,
            Err(error) => self.end(kind(error), &error.to_string()),
        }
    }

    fn end(&self, failure: Failure, error: &str) {
        let mut state = self.state.lock();
        let TrailState { items, deadline, has_ended } = *state;
        if has_ended {
            return;
        }
        state.has_ended = true;
        let RequestTrail { request, model, arrived, .. } = *self;
        let error = bounded(error, RequestInput::MOST_ERROR).to_owned();
        let input = RequestInput::Failed { request, model, items, arrived, deadline, failure, error };
        self.log.note(&mut self.log.inner.lock(), self.log.clock.now(), input);
    }
}

impl Drop for RequestTrail<'_> {
    fn drop(&mut self) {
        self.end(Failure::Cancelled, "");
    }
}

/// The kind of an error, as the log has it.
fn kind(error: &ServiceError) -> Failure {
    match error {
        ServiceError::QueueFull { .. } | ServiceError::TooMany { .. } => Failure::Full,
        ServiceError::DeadlineExceeded(_) => Failure::Deadline,
        ServiceError::Unavailable(_) => Failure::Unavailable,
        ServiceError::Internal(_) => Failure::Failed,
        ServiceError::InvalidArgument(_)
        | ServiceError::NotFound(_)
        | ServiceError::AlreadyExists(_)
        | ServiceError::TooLarge(_)
        | ServiceError::Unimplemented(_)
        | ServiceError::Decoupled(_) => Failure::Invalid,
    }
}
