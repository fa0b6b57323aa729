//! An entry of a log.

use std::fmt;

use serde::Serialize;

use super::machine::{Fact, Record, Records};
use crate::time::Time;

/// An entry of a log.
#[derive(Clone, PartialEq, Debug)]
pub struct Entry<R: Records> {
    /// Its number, from 1.
    pub number: u64,
    /// Its content.
    pub record: Record<R>,
}

impl<R: Records> Entry<R> {
    /// The entry as text: its number and time, and an input, or an arrow and a decision. Most
    /// entries are one line; a trial has one more for each candidate. `now` is the time of the last
    /// input, this one included.
    pub fn text(&self, now: Time) -> String {
        let Entry { number, record } = self;
        let (millis, arrow) = match record {
            Record::Input(at, _) => (format!("{:.6}", at.since(Time::ZERO).as_millis_f64()), ""),
            Record::Refused(_) | Record::Decision(_) => (String::new(), "-> "),
        };
        format!("{number:>8} {millis:>16}  {arrow}{}", record.told(now))
    }

    /// The entry as a line of JSON, with the time of the last input in nanoseconds. `more` has further
    /// keys, each after a comma.
    pub fn json(&self, now: Time, more: &str) -> String {
        let (key, value) = match &self.record {
            Record::Input(_, input) => ("told", json(input)),
            Record::Refused(refusal) => ("refused", json(refusal)),
            Record::Decision(decision) => ("decision", json(decision)),
        };
        format!(r#"{{"at":{},"{key}":{value}{more}}}"#, now.as_nanos())
    }
}

/// A value as JSON. A record has no value without a form in JSON; if one had, the line would say
/// the error.
pub(super) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|error| format!("{:?}", error.to_string()))
}

impl<R: Records> Record<R> {
    /// The record in words. `now` is the time of the last input, this one included.
    pub(super) fn told(&self, now: Time) -> impl fmt::Display {
        fmt::from_fn(move |f| match self {
            Record::Input(_, input) => input.tell(now, f),
            Record::Refused(refusal) => write!(f, "refused: {refusal}"),
            Record::Decision(decision) => decision.tell(now, f),
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
