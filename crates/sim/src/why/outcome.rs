//! How a request ended.

use std::fmt;
use std::str::FromStr;

use downbeat_core::cluster::{DropReason, Reject};
use downbeat_core::device::DeviceDrop;
use downbeat_core::journal::requests::Failure;
use serde::{Serialize, Serializer};

/// How a request ended, in the words of the `reason` of `downbeat_requests_not_answered_total`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Outcome {
    /// The request was answered by its deadline.
    InTime,
    /// The request was answered after its deadline.
    Late,
    /// A queue, a quota or the memory for inputs was full.
    QueueFull,
    /// The request was refused: it could not end in time.
    DeadlineImpossible,
    /// The request waited until it could no longer end in time.
    DeadlineHopeless,
    /// The request was given up for a larger batch behind it.
    WindowDrop,
    /// The request waited for longer than it may.
    QueueTimeout,
    /// The client's own `timeout` ended.
    Timeout,
    /// The client went away.
    Cancelled,
    /// The model was unloaded.
    Unloaded,
    /// The model failed.
    EngineError,
    /// The run was ended, or the model was out of service.
    RunEnded,
    /// The request was not well formed.
    Invalid,
    /// The log does not tell: the request was in flight when the log ended.
    Open,
}

/// A word that names no outcome.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("'{0}' is no outcome; there are {list}, and 'bad' for all but in_time, cancelled and open", list = Outcome::words())]
pub struct UnknownOutcome(String);

impl Outcome {
    const TABLE: [(Outcome, &'static str); 14] = [
        (Outcome::InTime, "in_time"),
        (Outcome::Late, "late"),
        (Outcome::QueueFull, "queue_full"),
        (Outcome::DeadlineImpossible, "deadline_impossible"),
        (Outcome::DeadlineHopeless, "deadline_hopeless"),
        (Outcome::WindowDrop, "window_drop"),
        (Outcome::QueueTimeout, "queue_timeout"),
        (Outcome::Timeout, "timeout"),
        (Outcome::Cancelled, "cancelled"),
        (Outcome::Unloaded, "unloaded"),
        (Outcome::EngineError, "engine_error"),
        (Outcome::RunEnded, "run_ended"),
        (Outcome::Invalid, "invalid"),
        (Outcome::Open, "open"),
    ];

    /// All words, in order.
    fn words() -> String {
        Outcome::TABLE.map(|(_, word)| word).join(", ")
    }

    /// The outcomes that a word stands for.
    ///
    /// # Errors
    /// If the word stands for none.
    pub fn of_word(word: &str) -> Result<Vec<Outcome>, UnknownOutcome> {
        if word == "bad" {
            return Ok(Outcome::TABLE
                .map(|(outcome, _)| outcome)
                .into_iter()
                .filter(|outcome| outcome.is_bad())
                .collect());
        }
        word.parse().map(|outcome| vec![outcome])
    }

    /// Whether the client wanted an answer in time and got none.
    pub fn is_bad(self) -> bool {
        !matches!(self, Outcome::InTime | Outcome::Cancelled | Outcome::Open)
    }

    /// Whether the scheduler gave the request up before it ran.
    pub fn is_given_up(self) -> bool {
        matches!(
            self,
            Outcome::DeadlineImpossible | Outcome::DeadlineHopeless | Outcome::WindowDrop | Outcome::QueueTimeout
        )
    }

    pub(super) fn of_reject(reject: &Reject) -> Outcome {
        match reject {
            Reject::DeadlineImpossible { .. } | Reject::NetworkTooSlow { .. } => Outcome::DeadlineImpossible,
            Reject::QueueFull { .. } | Reject::WaitTooLong { .. } => Outcome::QueueFull,
            Reject::TooLarge { .. } | Reject::ZeroSize | Reject::UnknownLevel => Outcome::Invalid,
            Reject::UnknownModel => Outcome::Unloaded,
        }
    }

    pub(super) fn of_drop(reason: DropReason) -> Outcome {
        match reason {
            DropReason::Hopeless => Outcome::DeadlineHopeless,
            DropReason::Sacrificed => Outcome::WindowDrop,
            DropReason::QueueTimeout | DropReason::WaitTooLong => Outcome::QueueTimeout,
            DropReason::ModelRemoved => Outcome::Unloaded,
        }
    }

    pub(super) fn of_device_drop(reason: DeviceDrop) -> Outcome {
        match reason {
            DeviceDrop::Hopeless => Outcome::DeadlineHopeless,
            DeviceDrop::Removed => Outcome::Unloaded,
        }
    }

    pub(super) fn of_failure(failure: Failure) -> Outcome {
        match failure {
            Failure::Full => Outcome::QueueFull,
            Failure::Deadline => Outcome::DeadlineImpossible,
            Failure::TimedOut => Outcome::Timeout,
            Failure::Cancelled => Outcome::Cancelled,
            Failure::Unavailable => Outcome::RunEnded,
            Failure::Invalid => Outcome::Invalid,
            Failure::Failed => Outcome::EngineError,
        }
    }
}

impl FromStr for Outcome {
    type Err = UnknownOutcome;

    fn from_str(word: &str) -> Result<Outcome, UnknownOutcome> {
        let found = Outcome::TABLE.iter().find(|(_, known)| *known == word);
        found.map(|(outcome, _)| *outcome).ok_or_else(|| UnknownOutcome(word.to_owned()))
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Outcome::TABLE.iter().find(|(outcome, _)| outcome == self).map_or("open", |(_, word)| word);
        f.pad(word)
    }
}

impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
