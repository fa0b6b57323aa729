//! Triton's settings of the log and of traces, which HTTP and gRPC read and change alike.

pub mod log;
pub mod trace;

use downbeat_service::error::ServiceError;
use serde_json::{Map, Value};

/// Settings by their names. In a change, settings that are not named stay, and `null` asks for the
/// default.
pub type Settings = Map<String, Value>;

/// Refuses names of `wanted` that are not among the `known` ones.
///
/// # Errors
/// `InvalidArgument`, with the names.
fn check_names(kind: &str, wanted: &Settings, known: &Settings) -> Result<(), ServiceError> {
    let Some(name) = wanted.keys().find(|name| !known.contains_key(*name)) else { return Ok(()) };
    let (name, known): (String, Vec<&str>) = (shortened(name), known.keys().map(String::as_str).collect());
    Err(ServiceError::InvalidArgument(format!("unknown {kind} setting '{name}'; expected one of {}", known.join(", "))))
}

fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

fn wrong(name: &str, value: &Value, expected: &str) -> ServiceError {
    ServiceError::InvalidArgument(format!("setting '{name}' is {}; expected {expected}", shortened(&value.to_string())))
}
