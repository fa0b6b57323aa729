//! The headers by which requests ask for a model's new version.

use axum::http::HeaderMap;
use downbeat_protocol::{InferRequest, Parameter};
use downbeat_service::report::rollout::ASKS_FOR_NEW;
use downbeat_service::service::Service;

/// Writes into a request's parameters that it asks for the new version, if it names no version and
/// has the header of its model's rollout.
pub fn mark<S: Service>(service: &S, headers: &HeaderMap, request: &mut InferRequest) {
    if request.model_version.is_empty()
        && let Some(header) = service.rollout_header(&request.model_name)
        && headers.contains_key(header)
    {
        request.parameters.insert(ASKS_FOR_NEW.to_owned(), Parameter::Bool(true));
    }
}
