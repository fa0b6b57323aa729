//! The events of clients' requests, as data.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::ids::RequestId;
use crate::time::Time;

/// An event of a client's request, as data.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestInput {
    /// A model has its first request in this log. The number names the model from here on.
    Model(u32, String),
    /// A request came to which its client gave an id or a trace.
    Came {
        /// The request, as the logs of shards and devices name it.
        request: RequestId,
        /// The model.
        model: u32,
        /// The id, at most [`RequestInput::MOST_ID`] bytes of it; empty: the client gave none.
        id: String,
        /// The trace that the request is a part of.
        trace: Option<Trace>,
    },
    /// A request got no result.
    Failed {
        /// The request.
        request: RequestId,
        /// The model.
        model: u32,
        /// The request's items.
        items: u32,
        /// When the request arrived.
        arrived: Time,
        /// The deadline; [`Time::MAX`]: there was none.
        deadline: Time,
        /// The kind of the error.
        failure: Failure,
        /// The error that the client got, at most [`RequestInput::MOST_ERROR`] bytes of it.
        error: String,
    },
    /// A frontend of a cluster has ended a request that a scheduler has heard of.
    Went {
        /// The request.
        request: RequestId,
        /// The model.
        model: u32,
        /// The request's way.
        way: Way,
    },
}

/// The way of a request through a cluster, in the times of its frontend.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Way {
    /// The request's items.
    pub items: u32,
    /// When the request arrived.
    pub arrived: Time,
    /// The deadline; [`Time::MAX`]: there was none.
    pub deadline: Time,
    /// How often the request came back from a batch without a run.
    pub returned: u8,
    /// How many backends were lost that had the request.
    pub lost: u8,
    /// The last claim of a backend; `None`: no batch has claimed the request.
    pub claim: Option<WayClaim>,
    /// The run; `None`: no backend has told one.
    pub run: Option<WayRun>,
}

/// A backend's claim on a request, for a batch.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WayClaim {
    /// The backend's name, at most [`RequestInput::MOST_ID`] bytes of it.
    pub backend: String,
    /// The number of the epoch in which the batch was planned.
    pub epoch: u64,
    /// The rank of the scheduler that planned the batch.
    pub rank: u32,
    /// The number of the batch in the epoch.
    pub batch: u64,
    /// When the frontend granted the claim, and sent the inputs.
    pub at: Time,
}

/// The run of a request's batch on a backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WayRun {
    /// The backend's device.
    pub device: u32,
    /// Items of the batch.
    pub items: u32,
    /// When the run began: the joining of the inputs.
    pub began: Time,
    /// When the run ended: the outputs were separated.
    pub ended: Time,
}

impl RequestInput {
    /// The most bytes of a client's id that a log keeps.
    pub const MOST_ID: usize = 64;
    /// The most bytes of an error that a log keeps.
    pub const MOST_ERROR: usize = 240;
}

/// The begin of a text, of at most so many bytes, in whole characters.
pub fn bounded(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

/// The kind of the error that a client got.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// A queue, a quota or the memory for inputs was full.
    Full,
    /// The deadline could not be met.
    Deadline,
    /// The client's own `timeout` ended.
    TimedOut,
    /// The client went away.
    Cancelled,
    /// The model, its device or its process was out of service.
    Unavailable,
    /// The request was not well formed.
    Invalid,
    /// The model failed.
    Failed,
}

/// A trace of W3C Trace Context: `traceparent` has its 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Trace(pub [u8; 16]);

/// A text that is no trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a trace has 32 hexadecimal digits, not all zero")]
pub struct NoTrace;

impl Trace {
    /// The trace in the value of a header `traceparent`, such as
    /// `00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01`; `None`: the value has none.
    pub fn of_traceparent(value: &str) -> Option<Trace> {
        let mut parts = value.trim().split('-');
        let (version, trace) = (parts.next()?, parts.next()?);
        let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        (version.len() == 2 && is_hex(version) && version != "ff").then(|| trace.parse().ok())?
    }
}

impl FromStr for Trace {
    type Err = NoTrace;

    fn from_str(text: &str) -> Result<Trace, NoTrace> {
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|number| is_hex && *number != 0);
        number.map(|number| Trace(number.to_be_bytes())).ok_or(NoTrace)
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// Sixteen bytes; for people the 32 digits.
impl Serialize for Trace {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() { serializer.collect_str(self) } else { self.0.serialize(serializer) }
    }
}

impl<'de> Deserialize<'de> for Trace {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Trace, D::Error> {
        if deserializer.is_human_readable() {
            String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
        } else {
            <[u8; 16]>::deserialize(deserializer).map(Trace)
        }
    }
}
