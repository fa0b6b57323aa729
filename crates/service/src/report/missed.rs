//! The answer to `GET /v2/models/MODEL/missed`: the last requests of a model that missed.
//!
//! A request has *missed* if it was late, dropped, refused or failed. A request joins the list where
//! it ends anyway, so a request in time costs nothing here.

use std::collections::VecDeque;

use downbeat_core::journal::requests::{RequestInput, Trace, bounded};
use downbeat_core::{Duration, RequestId, Time};
use parking_lot::Mutex;
use serde::Serialize;

use crate::error::ServiceError;
use crate::unanswered::Unanswered;

/// The requests of a version that are remembered.
pub const KEPT: usize = 50;

/// The answer of `GET /v2/models/MODEL/missed`.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct MissedReport {
    /// The model's name.
    pub model: String,
    /// The version's number.
    pub version: String,
    /// Whether the server writes a decision log. Only then requests have numbers, traces and commands.
    pub has_log: bool,
    /// The requests, the last one first.
    pub requests: Vec<MissedRequest>,
}

/// A request that was late, dropped, refused or failed.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct MissedRequest {
    /// The id that the client gave, at most 64 bytes of it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub id: String,
    /// The trace that the request is a part of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<Trace>,
    /// The request's number in the decision log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<u64>,
    /// When it ended, milliseconds since 1970.
    pub ended_ms: u64,
    /// The time from its arrival to its end, milliseconds.
    pub took_ms: f64,
    /// The time from its end to its deadline, milliseconds. Negative: it was so late. `None`: it had no
    /// deadline.
    pub left_ms: Option<f64>,
    /// `late`, or the reason as `downbeat_requests_not_answered_total` has it.
    pub reason: &'static str,
    /// Why, in a sentence.
    pub why: String,
    /// The command that tells the whole story.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// How a request missed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Miss {
    /// It was answered after its deadline.
    Late {
        /// From its arrival to the begin of its first launch.
        waited: Duration,
        /// Items of its last launch.
        rows: u32,
    },
    /// It got no result.
    Unanswered(Unanswered),
}

/// A request that missed, as its end knows it.
#[derive(Clone, Copy, Debug)]
pub struct Missed<'a> {
    /// The id that the client gave; empty: none.
    pub id: &'a str,
    /// Its `traceparent`, where the server keeps traces.
    pub traceparent: Option<&'a str>,
    /// Its number in the decision log.
    pub number: Option<RequestId>,
    /// When it arrived.
    pub arrived: Time,
    /// Its deadline; [`Time::MAX`]: it had none.
    pub deadline: Time,
}

/// A request in the list.
#[derive(Debug)]
struct Noted {
    id: Box<str>,
    trace: Option<Trace>,
    number: Option<RequestId>,
    arrived: Time,
    deadline: Time,
    ended: Time,
    /// The wall clock then, milliseconds since 1970.
    ended_ms: u64,
    reason: &'static str,
    why: Box<str>,
}

/// The last requests of a version that missed.
///
/// **Bound.** [`KEPT`] requests, with 64 bytes of the id and 240 bytes of the reason at most. That
/// is at most 25 KiB for each version in service.
#[derive(Debug, Default)]
pub struct MissedRequests {
    last: Mutex<VecDeque<Noted>>,
}

impl Miss {
    /// The label of the reason.
    pub fn label(self) -> &'static str {
        match self {
            Miss::Late { .. } => "late",
            Miss::Unanswered(reason) => reason.label(),
        }
    }

    /// Whether the client or the owner took the request back. Such a request has not missed.
    fn is_taken_back(self) -> bool {
        matches!(self, Miss::Unanswered(Unanswered::Cancelled | Unanswered::Unloaded))
    }

    fn why(self, missed: &Missed<'_>, ended: Time, error: Option<&ServiceError>) -> String {
        if let Some(error) = error {
            return bounded(&error.to_string(), RequestInput::MOST_ERROR).to_owned();
        }
        let late = to_microseconds(ended.since(missed.deadline));
        match self {
            Miss::Late { waited, rows } if rows > 0 => {
                let ran = to_microseconds(ended.since(missed.arrived).saturating_sub(waited));
                let waited = to_microseconds(waited);
                let items = if rows == 1 { "one item".to_owned() } else { format!("{rows} items") };
                format!("answered {late} after the deadline: it waited {waited}, and its batch of {items} took {ran}")
            }
            Miss::Late { .. } => format!("answered {late} after the deadline"),
            Miss::Unanswered(_) => "it got no result".to_owned(),
        }
    }
}

impl MissedRequests {
    /// Notes a request that ended `now`, when the wall clock showed `wall_ms` milliseconds since 1970.
    /// `error` is the error that its client gets.
    #[cold]
    pub fn note(&self, (now, wall_ms): (Time, u64), missed: &Missed<'_>, miss: Miss, error: Option<&ServiceError>) {
        if miss.is_taken_back() {
            return;
        }
        let noted = Noted {
            id: bounded(missed.id, RequestInput::MOST_ID).into(),
            trace: missed.traceparent.and_then(Trace::of_traceparent),
            number: missed.number,
            arrived: missed.arrived,
            deadline: missed.deadline,
            ended: now,
            ended_ms: wall_ms,
            reason: miss.label(),
            why: miss.why(missed, now, error).into(),
        };
        let mut last = self.last.lock();
        if last.len() >= KEPT {
            last.pop_front();
        }
        last.push_back(noted);
    }

    /// The list of this version of `model`. `has_log`: whether a decision log has the requests.
    pub fn report(&self, model: &str, version: &str, has_log: bool) -> MissedReport {
        let requests = self.last.lock().iter().rev().map(|noted| noted.report(has_log)).collect();
        MissedReport { model: model.to_owned(), version: version.to_owned(), has_log, requests }
    }
}

impl Noted {
    fn report(&self, has_log: bool) -> MissedRequest {
        let left = match self.deadline {
            Time::MAX => None,
            deadline if deadline >= self.ended => Some(ms(deadline.since(self.ended))),
            deadline => Some(-ms(self.ended.since(deadline))),
        };
        MissedRequest {
            id: self.id.to_string(),
            trace: self.trace,
            number: self.number.map(|number| number.0),
            ended_ms: self.ended_ms,
            took_ms: ms(self.ended.since(self.arrived)),
            left_ms: left,
            reason: self.reason,
            why: self.why.to_string(),
            command: self.number.filter(|_| has_log).map(|number| self.command(number)),
        }
    }

    /// The command for the request. A person pastes the command into a shell, and the id is the
    /// client's own text. So only a plain id gets into the command.
    fn command(&self, number: RequestId) -> String {
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
        let id = &self.id;
        match self.trace {
            _ if id.starts_with(|first: char| first.is_ascii_alphabetic()) && id.chars().all(is_plain) => {
                format!("downbeat log why {id}")
            }
            Some(trace) => format!("downbeat log why {trace}"),
            None => format!("downbeat log why r{}", number.0),
        }
    }
}

/// Drops the nanoseconds, which say nothing to a reader.
fn to_microseconds(duration: Duration) -> Duration {
    Duration::from_micros(duration.as_nanos() / 1_000)
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn time(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    /// The wall clock began 900 s before the server's.
    fn at(ms: u64) -> (Time, u64) {
        (time(ms), 900_000 + ms)
    }

    fn missed(id: &str) -> Missed<'_> {
        Missed { id, traceparent: None, number: Some(RequestId(7)), arrived: time(1_000), deadline: time(1_100) }
    }

    fn late() -> Miss {
        Miss::Late { waited: Duration::from_millis(80), rows: 8 }
    }

    fn hopeless() -> (Miss, ServiceError) {
        let error = ServiceError::DeadlineExceeded("dropped after 60 ms in the queue of model 'm'".to_owned());
        (Miss::Unanswered(Unanswered::Hopeless), error)
    }

    fn report(list: &MissedRequests, has_log: bool) -> Vec<MissedRequest> {
        list.report("m", "1", has_log).requests
    }

    #[test]
    fn the_list_says_when_how_late_and_why() {
        let list = MissedRequests::default();
        list.note(at(1_130), &missed("cam-1"), late(), None);
        let (miss, error) = hopeless();
        list.note(at(1_060), &missed(""), miss, Some(&error));
        let report = report(&list, false);
        let [dropped, late] = &report[..] else { panic!("{report:?}") };
        assert_eq!((late.id.as_str(), late.reason, late.ended_ms), ("cam-1", "late", 901_130));
        assert_eq!((late.took_ms, late.left_ms), (130.0, Some(-30.0)));
        assert_eq!(late.why, "answered 30 ms after the deadline: it waited 80 ms, and its batch of 8 items took 50 ms");
        assert_eq!((dropped.reason, dropped.left_ms), ("deadline_hopeless", Some(40.0)));
        assert_eq!(dropped.why, error.to_string());
        assert_eq!((&late.command, late.number), (&None, Some(7)));
    }

    #[test]
    fn the_list_keeps_the_last_fifty_and_bounds_each_text() {
        let list = MissedRequests::default();
        let long = "ä".repeat(100_000);
        let error = ServiceError::Internal(long.clone());
        for number in 0..2 * KEPT as u64 {
            let missed = Missed { number: Some(RequestId(number)), ..missed(&long) };
            list.note(at(number), &missed, Miss::Unanswered(Unanswered::Engine), Some(&error));
        }
        let report = report(&list, true);
        assert_eq!(
            report.iter().map(|request| request.number).collect::<Vec<_>>(),
            (50..100).rev().map(Some).collect::<Vec<_>>()
        );
        assert!(report.iter().all(|request| request.id.len() <= 64 && request.why.len() <= 240));
    }

    #[test]
    fn a_request_that_was_taken_back_has_not_missed() {
        let list = MissedRequests::default();
        for reason in [Unanswered::Cancelled, Unanswered::Unloaded] {
            list.note(at(1), &missed("a"), Miss::Unanswered(reason), None);
        }
        assert!(report(&list, true).is_empty());
    }

    #[test]
    fn the_command_has_no_text_that_a_shell_would_read() {
        let command = |id: &str, traceparent| {
            let list = MissedRequests::default();
            list.note(at(1_200), &Missed { traceparent, ..missed(id) }, late(), None);
            report(&list, true).pop().unwrap().command.unwrap()
        };
        assert_eq!(command("cam-1.a", None), "downbeat log why cam-1.a");
        assert_eq!(command("", None), "downbeat log why r7");
        for id in ["a; rm -rf ~", "$(reboot)", "-h", "a b", "a'b", "5m", "\n"] {
            assert_eq!(command(id, None), "downbeat log why r7", "{id:?}");
            assert_eq!(command(id, Some(TRACE)), "downbeat log why 4bf92f3577b34da6a3ce929d0e0e4736", "{id:?}");
        }
    }

    #[test]
    fn a_request_without_a_deadline_has_no_time_left() {
        let list = MissedRequests::default();
        let (miss, error) = hopeless();
        list.note(at(1_200), &Missed { deadline: Time::MAX, ..missed("a") }, miss, Some(&error));
        assert_eq!(report(&list, true)[0].left_ms, None);
    }
}
