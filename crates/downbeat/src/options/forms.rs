//! The forms of option values, in a file and on the command line.

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use downbeat_core::Duration;
use downbeat_repository::ModelSource;
use downbeat_service::options::Step;
use downbeat_service::options::cluster_options::{MOST_SUB_CLUSTERS, SubClusters};
use serde_json::Value;

use crate::options::{trace_config, units};

/// The value of an option from one source.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The written value.
    pub written: Written<'a>,
    /// The folder that paths are relative to.
    pub folder: &'a Path,
}

/// A written value.
#[derive(Clone, Copy, Debug)]
pub enum Written<'a> {
    /// The values of a flag, or of the environment.
    Texts(&'a [String]),
    /// The value in a file.
    Value(&'a Value),
}

impl<'a> Given<'a> {
    /// A value from the command line.
    pub fn texts(texts: &'a [String]) -> Self {
        Given { written: Written::Texts(texts), folder: Path::new("") }
    }

    /// The text of a single value. In a file, `takes` must allow the value.
    fn text(&self, takes: fn(&Value) -> bool, expected: &str) -> Result<String, String> {
        match self.written {
            Written::Texts(texts) => Ok(texts.last().cloned().unwrap_or_default()),
            Written::Value(Value::String(text)) if takes(&Value::String(String::new())) => Ok(text.clone()),
            Written::Value(value) if !value.is_string() && takes(value) => Ok(value.to_string()),
            Written::Value(value) => Err(format!("{value}: expected {expected}")),
        }
    }
}

type Read<T> = Box<dyn Fn(&Given<'_>) -> Result<T, String> + Send + Sync>;
type Write<T> = Box<dyn Fn(&T) -> String + Send + Sync>;

/// The written form of a type's values.
pub struct Form<T> {
    /// The placeholder of the value in `--help`.
    pub unit: &'static str,
    /// The allowed values: type, unit and bounds.
    pub values: String,
    /// The names of the values, if the set of values is closed.
    pub choices: Vec<&'static str>,
    /// Whether a list of values is allowed; on the command line the flag is repeated.
    pub is_list: bool,
    /// Reads a value.
    pub read: Read<T>,
    /// Writes a value in the form of a file.
    pub write: Write<T>,
}

impl<T> Form<T> {
    /// Restricts the values to these names.
    pub fn of(self, choices: impl IntoIterator<Item = &'static str>) -> Self {
        Form { choices: choices.into_iter().collect(), ..self }
    }
}

fn scalar<T: 'static>(
    unit: &'static str,
    values: impl Into<String>,
    takes: fn(&Value) -> bool,
    parse: impl Fn(&str) -> Result<T, String> + Send + Sync + 'static,
    write: impl Fn(&T) -> String + Send + Sync + 'static,
) -> Form<T> {
    let values = values.into();
    let expected = values.clone();
    let read = move |given: &Given<'_>| given.text(takes, &expected).and_then(|text| parse(text.trim()));
    Form { unit, values, choices: Vec::new(), is_list: false, read: Box::new(read), write: Box::new(write) }
}

fn quoted<T: Display>(text: &T) -> String {
    format!("\"{text}\"")
}

/// A value that is written by its name.
pub fn name<T: FromStr<Err: Display> + Display + 'static>(unit: &'static str) -> Form<T> {
    scalar(unit, "text", Value::is_string, |text| text.parse().map_err(|error| format!("{error}")), quoted)
}

/// A value that `parse` reads from a text.
pub fn parsed<T: 'static>(
    unit: &'static str,
    parse: fn(&str) -> Result<T, String>,
    write: fn(&T) -> String,
) -> Form<T> {
    scalar(unit, "text", Value::is_string, parse, move |value| quoted(&write(value)))
}

/// An IP address.
pub fn address() -> Form<IpAddr> {
    let parse = |text: &str| match text {
        "localhost" => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        _ => text.parse().map_err(|_| format!("'{text}' is not an IP address")),
    };
    scalar("ADDRESS", "IP address", Value::is_string, parse, quoted)
}

/// A path; in a file, relative to the file's folder.
pub fn path(unit: &'static str) -> Form<PathBuf> {
    let read = |given: &Given<'_>| given.text(Value::is_string, "a path").map(|text| given.folder.join(text));
    let write = |path: &PathBuf| quoted(&path.display());
    Form {
        unit,
        values: "path".to_owned(),
        choices: Vec::new(),
        is_list: false,
        read: Box::new(read),
        write: Box::new(write),
    }
}

/// A source of models; in a file, a path is relative to the file's folder.
pub fn source(unit: &'static str) -> Form<ModelSource> {
    let read = |given: &Given<'_>| {
        let text = given.text(Value::is_string, "a path or an address")?;
        ModelSource::parse(&text, given.folder)
    };
    Form {
        unit,
        values: "path or address".to_owned(),
        choices: Vec::new(),
        is_list: false,
        read: Box::new(read),
        write: Box::new(quoted),
    }
}

/// `true` or `false`.
pub fn switch() -> Form<bool> {
    let parse = |text: &str| match text.to_ascii_lowercase().as_str() {
        "y" | "yes" | "t" | "true" | "on" | "1" => Ok(true),
        "n" | "no" | "f" | "false" | "off" | "0" => Ok(false),
        _ => Err(format!("'{text}' is not true or false")),
    };
    scalar("BOOL", "true or false", Value::is_boolean, parse, bool::to_string).of(["true", "false"])
}

/// A port, or `off`.
pub fn port() -> Form<Option<u16>> {
    let parse = |text: &str| match text {
        "off" | "false" => Ok(None),
        _ => {
            text.parse().map(Some).map_err(|_| format!("'{text}' is not a port: 0 to 65535, or off (false in a file)"))
        }
    };
    let write = |port: &Option<u16>| port.map_or("false".to_owned(), |port| port.to_string());
    scalar("PORT", "0 to 65535, or false", |value| value.is_number() || value.is_boolean(), parse, write)
}

/// A whole number within bounds.
pub fn number<T: TryFrom<u64> + Copy + Display + 'static>(within: RangeInclusive<u64>) -> Form<T> {
    let (least, most) = within.into_inner();
    let values = match (least, most < u32::MAX.into()) {
        (0, false) => "number".to_owned(),
        (least, false) => format!("at least {least}"),
        (least, true) => format!("{least} to {most}"),
    };
    let bounds = values.clone();
    let parse = move |text: &str| match text.parse::<i128>() {
        Err(_) => Err(format!("'{text}' is not a whole number")),
        Ok(number) if number < least.into() => Err(format!("{number}: must be {bounds}")),
        Ok(number) => {
            let within = u64::try_from(number).ok().filter(|number| *number <= most);
            let read = within.and_then(|number| T::try_from(number).ok());
            read.ok_or_else(|| format!("{number}: must be at most {most}"))
        }
    };
    scalar("N", values, Value::is_number, parse, T::to_string)
}

/// A number of sub-clusters, or `auto`.
pub fn sub_clusters() -> Form<SubClusters> {
    let takes = |value: &Value| value.is_number() || value.is_string();
    let write = |clusters: &SubClusters| match clusters {
        SubClusters::Auto => quoted(clusters),
        SubClusters::Number(number) => number.to_string(),
    };
    scalar("N", format!("0 to {MOST_SUB_CLUSTERS}, or auto"), takes, str::parse, write)
}

/// Steps of preprocessing; paths are relative to the model's folder.
pub fn steps() -> Form<Vec<Step>> {
    let read = |given: &Given<'_>| match given.written {
        Written::Value(value) => downbeat_preprocess::read_steps(value),
        Written::Texts(_) => Err("steps are written in a file".to_owned()),
    };
    let write = |steps: &Vec<Step>| serde_json::to_string(steps).unwrap_or_default();
    Form {
        unit: "STEPS",
        values: "list of steps".to_owned(),
        choices: Vec::new(),
        is_list: true,
        read: Box::new(read),
        write: Box::new(write),
    }
}

/// A share, from 0 to below 1. Example: 0.05 is 5%.
pub fn share() -> Form<f64> {
    let parse = |text: &str| match text.parse() {
        Ok(share) if (0.0..1.0).contains(&share) => Ok(share),
        Ok(_) => Err(format!("'{text}' is no share: a share is 0 to below 1, and 0.05 is 5%")),
        Err(_) => Err(format!("'{text}' is not a number")),
    };
    scalar("SHARE", "0 to below 1", Value::is_number, parse, f64::to_string)
}

/// Mebibytes, as bytes.
pub fn mebibytes() -> Form<u64> {
    let Form { unit, values, read, .. } = number::<u64>(1..=u64::MAX >> 20);
    let read = move |given: &Given<'_>| read(given).map(|mebibytes| mebibytes << 20);
    let write = |bytes: &u64| (bytes >> 20).to_string();
    Form { unit, values, choices: Vec::new(), is_list: false, read: Box::new(read), write: Box::new(write) }
}

/// A number of traces; -1: no limit.
pub fn traces() -> Form<Option<u32>> {
    scalar("COUNT", "number; -1: no limit", Value::is_number, trace_config::count, trace_config::count_text)
}

/// Bytes, more than 0.
pub fn bytes<T: TryFrom<usize> + TryInto<u64> + Copy + 'static>() -> Form<T> {
    sizes("more than 0", units::bytes)
}

/// Bytes, 0 included.
pub fn bytes_or_zero() -> Form<usize> {
    sizes("or 0", units::bytes_or_zero)
}

fn sizes<T: TryFrom<usize> + TryInto<u64> + Copy + 'static>(
    bounds: &str,
    parse: fn(&str) -> Result<usize, String>,
) -> Form<T> {
    let parse = move |text: &str| {
        parse(text).and_then(|bytes| T::try_from(bytes).map_err(|_| format!("'{text}' is out of range")))
    };
    let write = |bytes: &T| match (*bytes).try_into().unwrap_or(u64::MAX) {
        bytes if bytes > 0 && bytes % (1 << 20) == 0 => quoted(&format!("{}M", bytes >> 20)),
        bytes => bytes.to_string(),
    };
    let takes = |value: &Value| value.is_number() || value.is_string();
    scalar("BYTES", format!("bytes, or a text such as \"64M\"; {bounds}"), takes, parse, write)
}

/// Milliseconds, more than 0.
pub fn millis() -> Form<Duration> {
    let write = |span: &Duration| (span.as_secs_f64() * 1e3).to_string();
    scalar("MS", "milliseconds, more than 0", Value::is_number, units::positive_millis, write)
}

/// Microseconds, from zero to `most`.
pub fn micros(most: Duration) -> Form<Duration> {
    let most = most.as_nanos() / 1_000;
    let parse = move |text: &str| match text.parse() {
        Ok(micros) if micros <= most => Ok(Duration::from_micros(micros)),
        _ => Err(format!("'{text}' is not a number of microseconds from 0 to {most}")),
    };
    let write = |span: &Duration| (span.as_nanos() / 1_000).to_string();
    scalar("US", format!("microseconds, 0 to {most}"), Value::is_number, parse, write)
}

/// Seconds, from zero to a day.
pub fn seconds() -> Form<Duration> {
    seconds_from(Duration::ZERO)
}

/// Seconds, from `least` to a day.
pub fn seconds_from(least: Duration) -> Form<Duration> {
    let values = match least {
        Duration::ZERO => "seconds, at most a day".to_owned(),
        least => format!("seconds, {} to a day", least.as_secs_f64()),
    };
    let parse = move |text: &str| match units::parse_seconds(text)? {
        span if span < least => Err(format!("{span}: must be at least {least}")),
        span => Ok(span),
    };
    scalar("SECONDS", values, Value::is_number, parse, |span: &Duration| span.as_secs_f64().to_string())
}

/// Hours, from one to ten years.
pub fn hours() -> Form<Duration> {
    /// An hour in milliseconds.
    const HOUR: u64 = 3_600_000;
    let parse = |text: &str| match text.trim().parse::<u64>() {
        Ok(hours @ 1..=87_600) => Ok(Duration::from_millis(hours * HOUR)),
        _ => Err(format!("{text}: must be a number of hours from 1 to 87600")),
    };
    let write = |span: &Duration| (span.as_nanos() / (HOUR * 1_000_000)).to_string();
    scalar("HOURS", "hours, 1 to 87600".to_owned(), Value::is_number, parse, write)
}

/// Seconds, from `least` to a day, or 0.
pub fn seconds_or_zero(least: Duration) -> Form<Duration> {
    let parse = move |text: &str| match units::parse_seconds(text)? {
        span if span > Duration::ZERO && span < least => Err(format!("{span}: must be 0, or at least {least}")),
        span => Ok(span),
    };
    let values = format!("seconds, 0 or {} to a day", least.as_secs_f64());
    scalar("SECONDS", values, Value::is_number, parse, |span: &Duration| span.as_secs_f64().to_string())
}

/// A list of values. A file may also have a single value without brackets.
pub fn list<T: 'static>(of: Form<T>) -> Form<Vec<T>> {
    let Form { unit, values, choices, read, write, .. } = of;
    let read = move |given: &Given<'_>| match given.written {
        Written::Texts(texts) => {
            texts.chunks(1).map(|text| read(&Given { written: Written::Texts(text), ..*given })).collect()
        }
        Written::Value(Value::Array(all)) => {
            all.iter().map(|value| read(&Given { written: Written::Value(value), ..*given })).collect()
        }
        Written::Value(_) => read(given).map(|one| vec![one]),
    };
    let write = move |all: &Vec<T>| format!("[{}]", all.iter().map(&write).collect::<Vec<_>>().join(", "));
    Form {
        unit,
        values: format!("list: {values}"),
        choices,
        is_list: true,
        read: Box::new(read),
        write: Box::new(write),
    }
}
