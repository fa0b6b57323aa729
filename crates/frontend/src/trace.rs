//! The traces that a request is a part of: those of this server, and the one of W3C Trace Context that
//! the decision log keeps.

use std::sync::Arc;

use axum::http::{HeaderMap, HeaderValue};
use downbeat_core::Time;
use downbeat_protocol::{InferRequest, Parameter};
use downbeat_service::client::Client;
use downbeat_service::service::Service;
use downbeat_service::traces::Traces;
use downbeat_service::traces::context::TRACEPARENT;
use downbeat_service::traces::open::OpenTrace;
use downbeat_service::traces::record::Wire;

/// No valid value is longer: later versions of the header may have further fields.
const MOST_BYTES: usize = 256;

/// Writes a request's header `traceparent` into its parameters, if the service keeps traces.
pub fn mark<S: Service>(service: &S, headers: &HeaderMap, request: &mut InferRequest) {
    if service.keeps_traces()
        && let Some(value) = traceparent(headers)
    {
        request.parameters.insert(TRACEPARENT.to_owned(), Parameter::String(value.to_owned()));
    }
}

fn traceparent(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(TRACEPARENT).and_then(|value| value.to_str().ok());
    value.filter(|value| value.len() <= MOST_BYTES)
}

/// Begins the trace of a request, if a writer of traces wants the request. `began`: when the request began to arrive;
/// `None`: no request is traced now.
#[inline]
pub fn begin(
    traces: &Arc<Traces>,
    sender: (Wire, Client),
    model: &str,
    began: Option<Time>,
    headers: &HeaderMap,
) -> Option<OpenTrace> {
    traces.begin(sender, model, began?, traceparent(headers))
}

/// Notes that the request was read. `is_on`: whether requests are traced now.
#[inline]
pub fn received(trace: Option<&OpenTrace>, is_on: bool, request: &mut InferRequest) {
    match trace {
        Some(trace) => trace.received(request),
        None if is_on => Traces::unmark(request),
        None => {}
    }
}

/// Ends the trace of a request whose answer has these headers. The client gets the place of the
/// request in its trace.
#[cold]
pub fn end(trace: &OpenTrace, status: u16, headers: &mut HeaderMap) {
    trace.outcome(status, None);
    if let Ok(place) = HeaderValue::from_str(&trace.traceparent()) {
        headers.insert(TRACEPARENT, place);
    }
}
