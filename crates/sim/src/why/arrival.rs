//! A request as it came: what all stories begin with.

use std::fmt;

use serde::Serialize;

use super::words::{many, told};

/// A request as it came. As text it is a sentence.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Arrival {
    /// The number of the request in the log.
    pub request: String,
    /// The id that the client gave.
    pub id: Option<String>,
    /// The trace.
    pub trace: Option<String>,
    /// The model; if each shape has a queue, with the shape.
    pub model: String,
    /// The items.
    pub items: u32,
    /// When the request came, in nanoseconds since the Unix epoch; `None`: the log has no wall clock.
    pub came_unix_ns: Option<u64>,
    /// When the request came, in milliseconds since the log's zero.
    pub came_ms: f64,
    /// The time that the request had; `None`: it had no deadline.
    pub budget_ms: Option<f64>,
}

impl Arrival {
    /// When the request came, for people: by the wall clock if the log has it.
    pub fn came(&self) -> String {
        match self.came_unix_ns {
            Some(unix) => {
                let at = std::time::UNIX_EPOCH + std::time::Duration::from_nanos(unix);
                humantime::format_rfc3339_micros(at).to_string()
            }
            None => format!("{:.3} ms of the log", self.came_ms),
        }
    }
}

impl fmt::Display for Arrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Arrival { request, id, trace, model, items, budget_ms, .. } = self;
        write!(f, "Request {request}")?;
        match (id, trace) {
            (Some(id), Some(trace)) => write!(f, " (id {id:?}, trace {trace})")?,
            (Some(id), None) => write!(f, " (id {id:?})")?,
            (None, Some(trace)) => write!(f, " (trace {trace})")?,
            (None, None) => {}
        }
        write!(f, " for {model} came at {}", self.came())?;
        if *items > 0 {
            write!(f, " with {}", many(*items as usize, "item"))?;
        }
        match budget_ms {
            Some(budget) => write!(f, " and had {}.", told(*budget)),
            None => f.write_str(" and had no deadline."),
        }
    }
}
