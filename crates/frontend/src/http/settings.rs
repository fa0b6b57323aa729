//! Trace and log settings: clients can read them; a change that a running server cannot make is an
//! error.

use axum::extract::State;
use axum::http::StatusCode;
use downbeat_core::pages::Pointer;
use downbeat_service::service::Service;
use serde_json::{Map, Value, json};
use tracing::level_filters::LevelFilter;

use super::answer::{HandlerResult, HttpError, ok, read_json};
use super::body::WholeBody;
use super::path::ModelPath;
use super::state::HttpState;

type Settings = Map<String, Value>;

/// Triton's trace settings, of a server that records no traces.
fn trace_settings() -> Settings {
    let settings = json!({
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "triton",
    });
    settings.as_object().cloned().unwrap_or_default()
}

/// Triton's log settings, read from the filter that is in force.
fn log_settings() -> Settings {
    let level = LevelFilter::current();
    let verbose = match level {
        LevelFilter::TRACE => 2,
        LevelFilter::DEBUG => 1,
        _ => 0,
    };
    let settings = json!({
        "log_file": "",
        "log_info": level >= LevelFilter::INFO,
        "log_warning": level >= LevelFilter::WARN,
        "log_error": level >= LevelFilter::ERROR,
        "log_verbose_level": verbose,
        "log_format": "default",
    });
    settings.as_object().cloned().unwrap_or_default()
}

/// Answers a change: success if nothing would change, else 400. `null` stands for the default,
/// which is the present value.
fn change(kind: &str, current: Settings, body: &[u8]) -> HandlerResult {
    let wanted: Settings = read_json(body)?;
    for (name, value) in &wanted {
        match current.get(name) {
            None => {
                let names: Vec<&str> = current.keys().map(String::as_str).collect();
                return Err(HttpError::new(
                    StatusCode::BAD_REQUEST,
                    format!("unknown {kind} setting '{name}'; expected one of {}", names.join(", ")),
                ));
            }
            Some(now) if value == now || value.is_null() => {}
            Some(now) => {
                return Err(HttpError::new(
                    StatusCode::BAD_REQUEST,
                    format!(
                        "{kind} setting '{name}' is {now} and cannot be changed while the server runs ({})",
                        Pointer::TRACES
                    ),
                ));
            }
        }
    }
    ok(&current)
}

pub(super) async fn trace() -> HandlerResult {
    ok(&trace_settings())
}

pub(super) async fn change_trace(body: WholeBody) -> HandlerResult {
    change("trace", trace_settings(), &body.bytes)
}

pub(super) async fn model_trace<S: Service>(State(state): State<HttpState<S>>, path: ModelPath) -> HandlerResult {
    state.service().model_metadata(&path.model, "")?;
    trace().await
}

pub(super) async fn change_model_trace<S: Service>(
    State(state): State<HttpState<S>>,
    path: ModelPath,
    body: WholeBody,
) -> HandlerResult {
    state.service().model_metadata(&path.model, "")?;
    change_trace(body).await
}

pub(super) async fn logging() -> HandlerResult {
    ok(&log_settings())
}

pub(super) async fn change_logging(body: WholeBody) -> HandlerResult {
    change("log", log_settings(), &body.bytes)
}
