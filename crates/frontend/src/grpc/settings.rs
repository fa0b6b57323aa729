//! Answers to the trace and log settings calls. Both are set at start; a change by a client is
//! refused.

use std::collections::BTreeMap;

use downbeat_core::pages::Pointer;
use downbeat_protocol::inference as pb;
use pb::log_settings_request::setting_value::ParameterChoice as Asked;
use pb::log_settings_response::setting_value::ParameterChoice as Told;
use tonic::Status;
use tracing::Level;

/// Request traces are not collected: every phase has a histogram instead.
const TRACE: [(&str, &str); 6] = [
    ("trace_level", "OFF"),
    ("trace_rate", "1000"),
    ("trace_count", "-1"),
    ("log_frequency", "0"),
    ("trace_file", ""),
    ("trace_mode", "triton"),
];

/// Answers `TraceSetting`. An empty value would clear a setting, which leaves these as they are.
pub(super) fn trace(request: &pb::TraceSettingRequest) -> Result<pb::TraceSettingResponse, Status> {
    for (name, setting) in &request.settings {
        let Some((_, now)) = TRACE.iter().find(|(known, _)| known == name) else {
            return Err(unknown("trace", name, TRACE.iter().map(|(name, _)| *name)));
        };
        if setting.value.iter().any(|value| value != now) {
            return Err(Status::unimplemented(format!(
                "trace setting '{name}' cannot be changed from '{now}': this server does not collect traces; its \
                 metrics have a histogram of each phase ({})",
                Pointer::TRACES
            )));
        }
    }
    let value = |value: &str| pb::trace_setting_response::SettingValue { value: vec![value.to_owned()] };
    Ok(pb::TraceSettingResponse {
        settings: TRACE.iter().map(|(name, now)| ((*name).to_owned(), value(now))).collect(),
    })
}

/// Answers `LogSettings`.
pub(super) fn log(request: &pb::LogSettingsRequest) -> Result<pb::LogSettingsResponse, Status> {
    let now = BTreeMap::from([
        ("log_error", Told::BoolParam(tracing::enabled!(Level::ERROR))),
        ("log_file", Told::StringParam(String::new())),
        ("log_format", Told::StringParam("default".into())),
        ("log_info", Told::BoolParam(tracing::enabled!(Level::INFO))),
        ("log_verbose_level", Told::Uint32Param(u32::from(tracing::enabled!(Level::DEBUG)))),
        ("log_warning", Told::BoolParam(tracing::enabled!(Level::WARN))),
    ]);
    for (name, setting) in &request.settings {
        let Some(now) = now.get(name.as_str()) else {
            return Err(unknown("log", name, now.keys().copied()));
        };
        let same = match (&setting.parameter_choice, now) {
            (None, _) => true,
            (Some(Asked::BoolParam(asked)), Told::BoolParam(now)) => asked == now,
            (Some(Asked::Uint32Param(asked)), Told::Uint32Param(now)) => asked == now,
            (Some(Asked::StringParam(asked)), Told::StringParam(now)) => asked == now,
            _ => false,
        };
        if !same {
            return Err(Status::unimplemented(format!(
                "log setting '{name}' cannot be changed while the server runs; set it at start ({})",
                Pointer::TRACES
            )));
        }
    }
    let value = |told| pb::log_settings_response::SettingValue { parameter_choice: Some(told) };
    Ok(pb::LogSettingsResponse {
        settings: now.into_iter().map(|(name, told)| (name.to_owned(), value(told))).collect(),
    })
}

fn unknown<'a>(kind: &str, name: &str, known: impl Iterator<Item = &'a str>) -> Status {
    let name: String = name.chars().take(64).collect();
    let known: Vec<&str> = known.collect();
    Status::invalid_argument(format!("unknown {kind} setting '{name}'; expected one of {}", known.join(", ")))
}
