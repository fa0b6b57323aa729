//! Answers to the calls for the settings of traces and of the log.

use downbeat_protocol::inference as pb;
use downbeat_service::traces::Traces;
use pb::log_settings_request::setting_value::ParameterChoice as Asked;
use pb::log_settings_response::setting_value::ParameterChoice as Told;
use serde_json::Value;
use tonic::Status;

use crate::settings::{Settings, log, trace};

/// Answers `TraceSetting`. The same call reads and changes: a call without settings reads. A setting
/// without a value asks for the default.
pub(super) fn trace(traces: &Traces, request: &pb::TraceSettingRequest) -> Result<pb::TraceSettingResponse, Status> {
    let model = (!request.model_name.is_empty()).then_some(request.model_name.as_str());
    let settings = match request.settings.is_empty() {
        true => trace::get(traces, model),
        false => {
            let wanted = request.settings.iter().map(|(name, setting)| (name.clone(), asked(name, &setting.value)));
            trace::change(traces, model, &wanted.collect())?
        }
    };
    let told = |value: Value| pb::trace_setting_response::SettingValue {
        value: match value {
            Value::Array(values) => values.into_iter().map(text).collect(),
            value => vec![text(value)],
        },
    };
    Ok(pb::TraceSettingResponse { settings: settings.into_iter().map(|(name, value)| (name, told(value))).collect() })
}

/// The value of a setting of traces, which is a list in each call.
fn asked(name: &str, values: &[String]) -> Value {
    match values {
        [] => Value::Null,
        [value] if name != "trace_level" => value.as_str().into(),
        values => values.into(),
    }
}

fn text(value: Value) -> String {
    match value {
        Value::String(text) => text,
        value => value.to_string(),
    }
}

/// Answers `LogSettings`.
pub(super) fn log(request: &pb::LogSettingsRequest) -> Result<pb::LogSettingsResponse, Status> {
    let wanted: Settings = request
        .settings
        .iter()
        .map(|(name, setting)| {
            let value = match &setting.parameter_choice {
                None => Value::Null,
                Some(Asked::BoolParam(value)) => (*value).into(),
                Some(Asked::Uint32Param(value)) => (*value).into(),
                Some(Asked::StringParam(value)) => value.as_str().into(),
            };
            (name.clone(), value)
        })
        .collect();
    let settings = if wanted.is_empty() { log::get() } else { log::change(&wanted)? };
    let told = |value: Value| pb::log_settings_response::SettingValue {
        parameter_choice: Some(match value {
            Value::Bool(value) => Told::BoolParam(value),
            Value::Number(value) => {
                Told::Uint32Param(value.as_u64().and_then(|n| n.try_into().ok()).unwrap_or(u32::MAX))
            }
            value => Told::StringParam(text(value)),
        }),
    };
    Ok(pb::LogSettingsResponse { settings: settings.into_iter().map(|(name, value)| (name, told(value))).collect() })
}
