//! The trace that a request is a part of (W3C Trace Context).

use axum::http::HeaderMap;
use downbeat_protocol::{InferRequest, Parameter};
use downbeat_service::service::Service;

/// The header, over HTTP and gRPC, and the parameter for the service.
const TRACEPARENT: &str = "traceparent";
/// No valid value is longer: later versions of the header may have further fields.
const MOST_BYTES: usize = 256;

/// Writes a request's header `traceparent` into its parameters, if the service keeps traces.
pub fn mark<S: Service>(service: &S, headers: &HeaderMap, request: &mut InferRequest) {
    if service.keeps_traces()
        && let Some(value) = headers.get(TRACEPARENT).and_then(|value| value.to_str().ok())
        && value.len() <= MOST_BYTES
    {
        request.parameters.insert(TRACEPARENT.to_owned(), Parameter::String(value.to_owned()));
    }
}
