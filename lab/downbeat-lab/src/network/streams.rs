//! The code of decoupled models on a backend, which gives any number of answers to a request.

use std::collections::BTreeMap;

use downbeat_core::Duration;
use downbeat_roles::{MOST_STREAMED, NodeId, RequestKey};

/// An answer's tensors have the request's input in so many lower bits, and the answer's number above.
const INPUT_BITS: u32 = 40;

/// The answers of a decoupled model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Streaming {
    /// The largest number of answers to a request, from 1.
    pub most: u32,
    /// The time from one answer to the next.
    pub every: Duration,
}

/// The tensors of an answer: its number from 0, and its request's input.
pub(super) fn answer(input: u64, number: u64) -> u64 {
    input | number << INPUT_BITS
}

/// A request that gives answers.
#[derive(Clone, Copy, Debug)]
struct OpenStream {
    input: u64,
    given: u64,
    of: u64,
    /// Answers that the client has not taken.
    on_way: u32,
    every: Duration,
    /// The client has gone.
    is_left: bool,
}

/// The result of a turn of the model's code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Turn {
    /// The answer, and whether it is the last one; `None`: the client has no room.
    pub gives: Option<(Option<u64>, bool)>,
    /// When the next turn comes; `None`: never.
    pub next: Option<Duration>,
}

/// The requests of a backend that give answers.
#[derive(Debug, Default)]
pub(super) struct OpenStreams(BTreeMap<RequestKey, OpenStream>);

impl OpenStreams {
    /// A request with this input begins to give so many answers.
    pub fn begin(&mut self, request: RequestKey, input: u64, (of, every): (u64, Duration)) {
        self.0.insert(request, OpenStream { input, given: 0, of, on_way: 0, every, is_left: false });
    }

    /// Lets the code of a request go on. `None`: the request has no code that runs.
    pub fn turn(&mut self, request: RequestKey) -> Option<Turn> {
        let stream = self.0.get_mut(&request)?;
        if stream.is_left {
            self.0.remove(&request);
            return Some(Turn { gives: Some((None, true)), next: None });
        }
        let next = Some(stream.every);
        if stream.on_way as usize >= MOST_STREAMED {
            return Some(Turn { gives: None, next });
        }
        let gives = answer(stream.input, stream.given);
        (stream.given, stream.on_way) = (stream.given + 1, stream.on_way + 1);
        let is_last = stream.given >= stream.of;
        if is_last {
            self.0.remove(&request);
        }
        Some(Turn { gives: Some((Some(gives), is_last)), next: next.filter(|_| !is_last) })
    }

    /// The client of a request has taken so many answers.
    pub fn has_room(&mut self, request: RequestKey, answers: u32) {
        if let Some(stream) = self.0.get_mut(&request) {
            stream.on_way = stream.on_way.saturating_sub(answers);
        }
    }

    /// The clients of these requests have gone.
    pub fn left(&mut self, requests: &[RequestKey]) {
        for request in requests {
            if let Some(stream) = self.0.get_mut(request) {
                stream.is_left = true;
            }
        }
    }

    /// A frontend is lost, and the code of its requests ends.
    pub fn handle_lost(&mut self, frontend: NodeId) {
        self.0.retain(|request, _| request.frontend != frontend);
    }
}
