//! Triton's flag `--trace-config`, whose values are settings such as `rate=100` and
//! `opentelemetry,url=localhost:4318`.

use downbeat_service::options::TraceOptions;

/// The collector of Triton's mode `opentelemetry` without a `url`.
const COLLECTOR: &str = "http://localhost:4318/v1/traces";

/// A setting of `--trace-config`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TraceSetting {
    /// The file of Triton's traces.
    File(String),
    /// The address of the collector.
    Url(String),
    /// Whether spans go to a collector.
    ToCollector(bool),
    /// Whether requests are traced.
    Level(bool),
    /// One request in this many is traced.
    Rate(u32),
    /// This many requests are traced; `None`: no limit.
    Count(Option<u32>),
    /// Each file takes this many traces.
    LogFrequency(u32),
    /// A setting without a counterpart.
    Other(String),
}

impl TraceSetting {
    /// Reads a setting.
    ///
    /// # Errors
    /// A text with the expected settings or values.
    pub fn parse(text: &str) -> Result<TraceSetting, String> {
        let (name, value) = text.split_once('=').ok_or_else(|| expected(text))?;
        let number = || value.parse().map_err(|_| format!("'{value}' in '{text}' is no whole number of at least 0"));
        match name {
            "triton,file" => Ok(TraceSetting::File(value.to_owned())),
            "triton,log-frequency" => number().map(TraceSetting::LogFrequency),
            "opentelemetry,url" => Ok(TraceSetting::Url(value.to_owned())),
            "mode" => match value {
                "triton" => Ok(TraceSetting::ToCollector(false)),
                "opentelemetry" => Ok(TraceSetting::ToCollector(true)),
                _ => Err(format!("'{value}' is no mode of --trace-config; expected triton or opentelemetry")),
            },
            "level" => level(value).map(TraceSetting::Level),
            "rate" => rate(value).map(TraceSetting::Rate),
            "count" => count(value).map(TraceSetting::Count),
            _ if name.starts_with("opentelemetry,") => Ok(TraceSetting::Other(name.to_owned())),
            _ => Err(expected(text)),
        }
    }

    /// The setting as it is written.
    pub fn text(&self) -> String {
        match self {
            TraceSetting::File(file) => format!("triton,file={file}"),
            TraceSetting::Url(url) => format!("opentelemetry,url={url}"),
            TraceSetting::ToCollector(true) => "mode=opentelemetry".to_owned(),
            TraceSetting::ToCollector(false) => "mode=triton".to_owned(),
            TraceSetting::Level(is_on) => format!("level={}", level_text(is_on)),
            TraceSetting::Rate(rate) => format!("rate={rate}"),
            TraceSetting::Count(count) => format!("count={}", count_text(count)),
            TraceSetting::LogFrequency(number) => format!("triton,log-frequency={number}"),
            TraceSetting::Other(name) => name.clone(),
        }
    }

    /// Sets the setting. Returns a notice about a setting without a counterpart.
    pub fn set(self, traces: &mut TraceOptions) -> Option<String> {
        match self {
            TraceSetting::File(file) => traces.file = Some(file.into()),
            TraceSetting::Url(url) => traces.otlp = Some(url),
            TraceSetting::ToCollector(true) => {
                traces.otlp.get_or_insert_with(|| COLLECTOR.to_owned());
            }
            TraceSetting::ToCollector(false) => traces.otlp = None,
            TraceSetting::Level(is_on) => traces.level = Some(is_on),
            // As in Triton, nothing is traced then.
            TraceSetting::Rate(0) => traces.level = Some(false),
            TraceSetting::Rate(rate) => traces.rate = rate,
            TraceSetting::Count(count) => traces.count = count,
            TraceSetting::LogFrequency(number) => traces.log_frequency = number,
            TraceSetting::Other(name) => {
                return Some(format!(
                    "--trace-config {name} has no effect here; the variable OTEL_RESOURCE_ATTRIBUTES names attributes of \
                     the server in its spans"
                ));
            }
        }
        None
    }
}

fn expected(text: &str) -> String {
    format!(
        "'{text}' is no setting of traces; expected level=, rate=, count=, mode=, triton,file=, triton,log-frequency= or \
         opentelemetry,url="
    )
}

/// A level of traces.
///
/// # Errors
/// A text with the levels.
pub fn level(text: &str) -> Result<bool, String> {
    match text {
        "OFF" | "off" | "MIN" => Ok(false),
        "TIMESTAMPS" | "timestamps" | "MAX" => Ok(true),
        _ => Err(format!("'{text}' is no level of traces; expected OFF or TIMESTAMPS (tensors are not traced)")),
    }
}

/// The level as it is written.
pub fn level_text(is_on: &bool) -> String {
    if *is_on { "TIMESTAMPS" } else { "OFF" }.to_owned()
}

fn rate(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("'{text}' is no rate of traces; expected a whole number, and 0 for none"))
}

/// How many requests are traced; `None` (-1): no limit.
///
/// # Errors
/// A text with the expected value.
pub fn count(text: &str) -> Result<Option<u32>, String> {
    if text == "-1" {
        return Ok(None);
    }
    let count = text.parse().ok().filter(|count| i32::try_from(*count).is_ok());
    count.map(Some).ok_or_else(|| format!("'{text}' is no number of traces; expected -1 (no limit) to {}", i32::MAX))
}

/// The count as it is written.
pub fn count_text(count: &Option<u32>) -> String {
    count.map_or("-1".to_owned(), |count| count.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(settings: &[&str]) -> (TraceOptions, Vec<String>) {
        let mut traces = TraceOptions::default();
        let set = |text: &&str| TraceSetting::parse(text).unwrap().set(&mut traces);
        let notices = settings.iter().filter_map(set).collect();
        (traces, notices)
    }

    #[test]
    fn settings_are_those_of_triton() {
        let (traces, notices) =
            options(&["triton,file=t.json", "triton,log-frequency=50", "rate=100", "level=TIMESTAMPS", "count=7"]);
        let expected = TraceOptions {
            file: Some("t.json".into()),
            log_frequency: 50,
            rate: 100,
            level: Some(true),
            count: Some(7),
            ..TraceOptions::default()
        };
        assert_eq!((traces, notices), (expected, Vec::new()));
        assert_eq!(options(&["level=TIMESTAMPS", "rate=0"]).0.level, Some(false), "as in Triton");
        assert_eq!(options(&["mode=opentelemetry"]).0.otlp.as_deref(), Some(COLLECTOR));
        let (traces, notices) =
            options(&["opentelemetry,url=c:1/v1/traces", "mode=opentelemetry", "opentelemetry,bsp_max_queue_size=1"]);
        assert_eq!(traces.otlp.as_deref(), Some("c:1/v1/traces"));
        assert!(notices[0].starts_with("--trace-config opentelemetry,bsp_max_queue_size has no effect"), "{notices:?}");
    }

    #[test]
    fn wrong_settings_are_refused_with_the_right_ones() {
        for (wrong, expected) in [
            ("rate", "expected level="),
            ("rates=1", "expected level="),
            ("rate=-1", "0 for none"),
            ("count=-2", "-1 (no limit)"),
            ("level=TENSORS", "OFF or TIMESTAMPS"),
            ("mode=jaeger", "triton or opentelemetry"),
            ("triton,log-frequency=often", "whole number"),
        ] {
            let error = TraceSetting::parse(wrong).unwrap_err();
            assert!(error.contains(expected), "{wrong}: {error}");
        }
    }
}
