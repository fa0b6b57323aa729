//! The settings of traces, of the server and of its models.

use downbeat_service::error::ServiceError;
use downbeat_service::traces::Traces;
use downbeat_service::traces::settings::{Change, TraceChange, TraceSettings, is_on_by};
use serde_json::{Value, json};

use super::{Settings, check_names, wrong};

/// The largest value that clients of Triton expect.
const MOST: u64 = i32::MAX as u64;

/// The settings of a model, or of the server.
pub fn get(traces: &Traces, model: Option<&str>) -> Settings {
    shown(traces, traces.settings(model))
}

fn shown(traces: &Traces, settings: TraceSettings) -> Settings {
    let TraceSettings { is_on, rate, count, log_frequency } = settings;
    let options = traces.options();
    let mut value = json!({
        "trace_level": [if is_on { "TIMESTAMPS" } else { "OFF" }],
        "trace_rate": rate.to_string(),
        "trace_count": count.map_or("-1".to_owned(), |count| count.to_string()),
        "log_frequency": log_frequency.to_string(),
        "trace_file": options.file.as_ref().map_or(String::new(), |file| file.display().to_string()),
        "trace_mode": if options.otlp.is_some() { "opentelemetry" } else { "triton" },
    });
    if let Some(address) = &options.otlp {
        value["url"] = without_secret(address).into();
    }
    value.as_object().cloned().unwrap_or_default()
}

/// An address without the user and password that it may have.
fn without_secret(address: &str) -> String {
    match address.split_once("://").map(|(scheme, rest)| (scheme, rest.split_once('@'))) {
        Some((scheme, Some((_, host)))) => format!("{scheme}://{host}"),
        _ => address.to_owned(),
    }
}

/// Changes the settings of a model, or of the server. Returns all of them after the change.
///
/// # Errors
/// `InvalidArgument`, with the expected value; the errors of [`Traces::change`].
pub fn change(traces: &Traces, model: Option<&str>, wanted: &Settings) -> Result<Settings, ServiceError> {
    let now = get(traces, model);
    check_names("trace", wanted, &now)?;
    for (name, flag) in [("trace_file", "--trace-file"), ("trace_mode", "--otlp-endpoint"), ("url", "--otlp-endpoint")]
    {
        if let Some(value) = wanted.get(name).filter(|value| !value.is_null() && Some(*value) != now.get(name)) {
            // The words about the file are Triton's. A client must not choose where the server writes.
            let what = if name == "trace_file" { "trace file location" } else { name };
            let value = super::shortened(&value.to_string());
            return Err(ServiceError::InvalidArgument(format!(
                "{what} can not be updated through network protocol (to {value}); set it at start, by {flag}"
            )));
        }
    }
    let change = TraceChange {
        is_on: level(wanted)?,
        rate: number(wanted, "trace_rate", 1)?,
        count: match wanted.get("trace_count") {
            Some(value) if value == "-1" || *value == json!(-1) => Change::Set(None),
            _ => match number(wanted, "trace_count", 0)? {
                Change::Keep => Change::Keep,
                Change::Clear => Change::Clear,
                Change::Set(count) => Change::Set(Some(count)),
            },
        },
        log_frequency: number(wanted, "log_frequency", 0)?,
    };
    traces.change(model, change).map(|settings| shown(traces, settings))
}

fn level(wanted: &Settings) -> Result<Change<bool>, ServiceError> {
    let expected = "a list with OFF or TIMESTAMPS";
    match wanted.get("trace_level") {
        None => Ok(Change::Keep),
        Some(Value::Null) => Ok(Change::Clear),
        Some(Value::String(level)) => is_on_by(&[level]).map(Change::Set),
        Some(Value::Array(levels)) => {
            let levels: Option<Vec<&str>> = levels.iter().map(Value::as_str).collect();
            is_on_by(&levels.ok_or_else(|| wrong("trace_level", &wanted["trace_level"], expected))?).map(Change::Set)
        }
        Some(value) => Err(wrong("trace_level", value, expected)),
    }
}

/// A number of at least `least`, also as text: Triton's clients send texts.
fn number(wanted: &Settings, name: &str, least: u64) -> Result<Change<u32>, ServiceError> {
    let value = match wanted.get(name) {
        None => return Ok(Change::Keep),
        Some(Value::Null) => return Ok(Change::Clear),
        Some(value) => value,
    };
    let number = match value {
        Value::String(text) => text.trim().parse().ok(),
        value => value.as_u64(),
    };
    let minus_one = if name == "trace_count" { ", or -1 for no limit" } else { "" };
    number
        .filter(|number| (least..=MOST).contains(number))
        .and_then(|number| u32::try_from(number).ok())
        .map(Change::Set)
        .ok_or_else(|| wrong(name, value, &format!("a whole number from {least} to {MOST}{minus_one}")))
}

#[cfg(test)]
mod tests {
    use downbeat_service::clock::Clock;
    use downbeat_service::options::TraceOptions;
    use downbeat_service::traces::writer::Writer;

    use super::*;

    fn change_by(wanted: Value) -> Result<Settings, String> {
        let options = TraceOptions { file: Some("trace.json".into()), ..TraceOptions::default() };
        let traces = Traces::new(Clock::start(), &options).unwrap();
        let _jobs = traces.attach(Writer::File);
        change(&traces, None, wanted.as_object().unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn numbers_may_be_texts_and_null_is_the_start() {
        let now = change_by(json!({"trace_rate": "5", "trace_count": 7, "log_frequency": "2"})).unwrap();
        assert_eq!(
            (&now["trace_rate"], &now["trace_count"], &now["log_frequency"]),
            (&json!("5"), &json!("7"), &json!("2"))
        );
        let now = change_by(json!({"trace_rate": null, "trace_count": "-1", "trace_level": ["OFF"]})).unwrap();
        assert_eq!(
            (&now["trace_rate"], &now["trace_count"], &now["trace_level"]),
            (&json!("1000"), &json!("-1"), &json!(["OFF"]))
        );
    }

    #[test]
    fn wrong_values_are_refused_with_the_expected_ones() {
        for (wanted, expected) in [
            (json!({"trace_rate": "0"}), "from 1 to 2147483647"),
            (json!({"trace_rate": "often"}), "from 1 to"),
            (json!({"trace_count": "-2"}), "or -1 for no limit"),
            (json!({"log_frequency": 1.5}), "from 0 to"),
            (json!({"trace_level": "TENSORS"}), "OFF or TIMESTAMPS"),
            (json!({"trace_level": [1]}), "OFF or TIMESTAMPS"),
            (json!({"trace_file": "/etc/passwd"}), "trace file location can not be updated through network protocol"),
            (json!({"trace_mode": "opentelemetry"}), "--otlp-endpoint"),
            (json!({"trace_colour": "red"}), "expected one of"),
        ] {
            let error = change_by(wanted.clone()).unwrap_err();
            assert!(error.contains(expected), "{wanted}: {error}");
        }
    }

    #[test]
    fn the_address_of_the_collector_is_shown_without_its_password() {
        assert_eq!(without_secret("https://me:secret@host:4318/v1/traces"), "https://host:4318/v1/traces");
        assert_eq!(without_secret("http://host:4318"), "http://host:4318");
    }
}
