//! An entry of a log.

use std::fmt;

use serde::Serialize;

use super::machine::{Fact, Record, Records};
use super::names::Names;
use crate::time::Time;

/// An entry of a log.
#[derive(Clone, PartialEq, Debug)]
pub struct Entry<R: Records> {
    /// Its number, from 1.
    pub number: u64,
    /// The log's time zero, in nanoseconds since the Unix epoch; 0: unknown.
    pub zero_unix_ns: u64,
    /// Its content.
    pub record: Record<R>,
}

impl<R: Records> Entry<R> {
    /// The entry as text: its number and time, and an input, or an arrow and a decision. Most
    /// entries are one line; a trial has one more for each candidate. `now` is the time of the last
    /// input, this one included.
    pub fn text(&self, now: Time, names: &Names) -> String {
        let Entry { number, record, .. } = self;
        let (millis, arrow) = match record {
            Record::Input(at, _) => (format!("{:.6}", at.since(Time::ZERO).as_millis_f64()), ""),
            Record::Refused(_) | Record::Decision(_) => (String::new(), "-> "),
        };
        let clock = match (self.unix_ns(now), record) {
            (None, _) => String::new(),
            (Some(unix), Record::Input(..)) => format!("{} ", TimeOfDay(unix)),
            (Some(_), _) => format!("{:>16}", ""),
        };
        format!("{number:>8} {clock}{millis:>16}  {arrow}{}", record.told(now, names))
    }

    /// The entry as a line of JSON, with the time of the last input in nanoseconds. `more` has further
    /// keys, each after a comma.
    pub fn json(&self, now: Time, more: &str) -> String {
        let (key, value) = match &self.record {
            Record::Input(_, input) => ("told", json(input)),
            Record::Refused(refusal) => ("refused", json(refusal)),
            Record::Decision(decision) => ("decision", json(decision)),
        };
        let unix = self.unix_ns(now).map_or(String::new(), |unix| format!(r#","unix_ns":{unix}"#));
        format!(r#"{{"at":{}{unix},"{key}":{value}{more}}}"#, now.as_nanos())
    }

    /// A time of the log in nanoseconds since the Unix epoch; `None`: the log has no wall clock.
    pub fn unix_ns(&self, at: Time) -> Option<u64> {
        (self.zero_unix_ns > 0).then(|| self.zero_unix_ns.saturating_add(at.as_nanos()))
    }
}

/// The time of day of an instant in nanoseconds since the Unix epoch, such as `15:50:03.123456` UTC.
struct TimeOfDay(u64);

impl fmt::Display for TimeOfDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0 / 1_000 % 86_400_000_000;
        let (seconds, micros) = (micros / 1_000_000, micros % 1_000_000);
        let (hours, minutes, seconds) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
        write!(f, "{hours:02}:{minutes:02}:{seconds:02}.{micros:06}")
    }
}

/// A value as JSON. A record has no value without a form in JSON; if one had, the line would say
/// the error.
pub(super) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|error| format!("{:?}", error.to_string()))
}

impl<R: Records> Record<R> {
    /// The record in words. `now` is the time of the last input, this one included.
    pub(super) fn told(&self, now: Time, names: &Names) -> impl fmt::Display {
        fmt::from_fn(move |f| match self {
            Record::Input(_, input) => input.tell(now, names, f),
            Record::Refused(refusal) => write!(f, "refused: {refusal}"),
            Record::Decision(decision) => decision.tell(now, names, f),
        })
    }
}

/// An instant in milliseconds since the log's zero.
pub(super) struct At(pub Time);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Time::MAX => f.write_str("never"),
            at => write!(f, "{} ms", at.since(Time::ZERO).as_millis_f64()),
        }
    }
}
