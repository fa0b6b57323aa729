//! How a request ended: with a good answer, or with the reason why there was none.

use std::fmt;

/// The reason why a request got no good answer. Every request ends either well or with exactly one
/// of these failures.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Failure {
    /// Answered with this HTTP status, other than 200.
    Http(u16),
    /// Answered with this gRPC status, other than OK.
    Grpc(i32),
    /// No answer within the request timeout, counted from the scheduled time.
    Timeout,
    /// No connection to the server.
    Connect,
    /// The connection ended before the answer did.
    Closed,
    /// The received bytes are no valid answer.
    Garbage,
    /// Not sent, because the queue of requests that wait for a connection was full.
    NotSent,
    /// The request had no answer when the run was stopped early.
    Abandoned,
}

/// The names of gRPC's status codes, by code.
const GRPC: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

impl Failure {
    /// Whether the connection is at fault, so that an immediate retry would be a busy loop.
    pub fn is_connection(self) -> bool {
        matches!(self, Failure::Connect | Failure::Closed | Failure::Garbage)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Http(status) => write!(f, "http {status}"),
            Failure::Grpc(code) => match usize::try_from(*code).ok().and_then(|c| GRPC.get(c)) {
                Some(name) => write!(f, "grpc {name}"),
                None => write!(f, "grpc {code}"),
            },
            Failure::Timeout => f.write_str("timeout"),
            Failure::Connect => f.write_str("no connection"),
            Failure::Closed => f.write_str("connection closed"),
            Failure::Garbage => f.write_str("invalid answer"),
            Failure::NotSent => f.write_str("not sent"),
            Failure::Abandoned => f.write_str("abandoned"),
        }
    }
}

/// A failure, and the message of the server or the system.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failed {
    /// The kind of failure.
    pub failure: Failure,
    /// The message, which may be empty. At most [`Failed::MESSAGE_LIMIT`] bytes are kept.
    pub message: String,
}

impl Failed {
    /// Longest message kept, in bytes.
    pub const MESSAGE_LIMIT: usize = 512;

    /// A failure with a message.
    pub fn new(failure: Failure, message: impl Into<String>) -> Self {
        let mut message = message.into();
        if message.len() > Self::MESSAGE_LIMIT {
            let end = (0..=Self::MESSAGE_LIMIT).rev().find(|i| message.is_char_boundary(*i)).unwrap_or(0);
            message.truncate(end);
        }
        Failed { failure, message }
    }

    /// A failure with the system's message.
    pub fn of(failure: Failure, error: impl Into<std::io::Error>) -> Self {
        Failed::new(failure, error.into().to_string())
    }
}
