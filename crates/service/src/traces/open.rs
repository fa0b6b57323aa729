//! Traces of requests that are under way.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use downbeat_core::cluster::DispatchReason;
use downbeat_core::{Duration, Time};
use downbeat_protocol::{InferRequest, Parameter};
use parking_lot::Mutex;

use super::Traces;
use super::context::SpanPlace;
use super::record::{Batch, Left, Outcome, Part, Run, TraceRecord, Wire};
use super::settings::Verdict;
use super::writer::Writer;
use crate::client::Client;
use crate::metrics::statistics::Phases;
use crate::unanswered::Unanswered;

/// The parameter of a request with the number of its trace. Only frontends write it.
pub(super) const TRACE: &str = "downbeat_trace";
/// Most parts of one trace. The further steps of a request leave no marks.
const MOST_PARTS: usize = 256;
/// Most characters of a client's id, and of an error's message.
const MOST_TEXT: usize = 256;

/// The trace of a request that is under way. Each part of the server on the request's way adds its marks.
pub struct Trace {
    pub(super) traces: Arc<Traces>,
    /// The number among all traces and steps of the server.
    pub(super) number: u64,
    /// The writers that get the record.
    pub(super) writers: u8,
    pub(super) verdict: Option<Verdict>,
    pub(super) place: SpanPlace,
    /// The client's span; 0: none.
    pub(super) parent: u64,
    pub(super) wire: Wire,
    pub(super) client: Client,
    pub(super) began: Time,
    pub(super) marks: Mutex<Marks>,
}

/// The marks of a trace.
#[derive(Default)]
pub(super) struct Marks {
    pub model: String,
    pub id: String,
    pub received: Option<Time>,
    pub answered: Option<Time>,
    pub outcome: Option<Outcome>,
    pub parts: Vec<Part>,
}

/// A frontend's hold on a trace. Dropping it ends the trace: the client has gone, unless there is an
/// outcome.
pub struct OpenTrace(pub(super) Arc<Trace>);

/// The part of a trace that is the request to one model.
pub struct TracePart {
    trace: Arc<Trace>,
    place: usize,
}

impl fmt::Debug for TracePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "part {} of trace {}", self.place, self.trace.number)
    }
}

fn bounded(text: &str) -> String {
    text.chars().take(MOST_TEXT).collect()
}

impl OpenTrace {
    /// Notes that the request was read, and adds the number of the trace to the request's parameters.
    pub fn received(&self, request: &mut InferRequest) {
        let now = self.0.traces.clock.now();
        let mut marks = self.0.marks.lock();
        (marks.received, marks.id) = (Some(now), bounded(&request.id));
        request.parameters.insert(TRACE.to_owned(), Parameter::Uint64(self.0.number));
    }

    /// The service has answered.
    pub fn answered(&self) {
        self.0.marks.lock().answered = Some(self.0.traces.clock.now());
    }

    /// The client gets an answer, or an error with its message, with this status of the protocol. The
    /// first outcome holds.
    pub fn outcome(&self, status: u16, error: Option<&str>) {
        self.0.marks.lock().outcome.get_or_insert_with(|| match error {
            None => Outcome::Answered(status),
            Some(error) => Outcome::Failed(status, bounded(error)),
        });
    }

    /// The span of the request, as the header `traceparent` for the client.
    pub fn traceparent(&self) -> String {
        self.0.place.traceparent(self.0.writers & Writer::Otlp.bit() != 0)
    }
}

impl Drop for OpenTrace {
    fn drop(&mut self) {
        let trace = &self.0;
        trace.traces.close(trace.number);
        let Marks { model, id, received, answered, outcome, parts } = std::mem::take(&mut *trace.marks.lock());
        let (scope, log_frequency) =
            trace.verdict.as_ref().map_or(("".into(), 0), |verdict| (verdict.scope.clone(), verdict.log_frequency));
        let record = TraceRecord {
            zero_unix_ns: trace.traces.clock.zero_unix_ns(),
            number: trace.number,
            scope,
            log_frequency,
            place: trace.place,
            parent: trace.parent,
            wire: trace.wire,
            client: trace.client,
            model,
            id,
            began: trace.began,
            received,
            answered,
            ended: trace.traces.clock.now(),
            outcome: outcome.unwrap_or(Outcome::Cancelled),
            parts,
        };
        trace.traces.write(trace.writers, record);
    }
}

impl Trace {
    /// The request to a model begins at `began`. `is_step`: it is a step of the trace's first part.
    /// `None`: the trace has too many parts.
    pub fn part(
        self: &Arc<Self>,
        (model, version): (&str, &str),
        is_step: bool,
        began: Time,
    ) -> Option<Box<TracePart>> {
        let mut marks = self.marks.lock();
        let place = marks.parts.len();
        if place >= MOST_PARTS {
            return None;
        }
        let parent = (is_step && place > 0).then_some(0);
        marks.parts.push(Part {
            number: if place == 0 { self.number } else { self.traces.next_number() },
            parent,
            model: (model.to_owned(), version.to_owned()),
            began,
            left: None,
            run: None,
            unanswered: None,
            ended: None,
        });
        drop(marks);
        Some(Box::new(TracePart { trace: self.clone(), place }))
    }
}

impl TracePart {
    fn mark(&self, mark: impl FnOnce(&mut Part)) {
        if let Some(part) = self.trace.marks.lock().parts.get_mut(self.place) {
            mark(part);
        }
    }

    /// The span of the whole request.
    pub fn place(&self) -> SpanPlace {
        self.trace.place
    }

    /// The batch of the request leaves its queue.
    #[cold]
    pub fn left(&self, at: Time, reason: DispatchReason, expected: Duration) {
        self.mark(|part| part.left = Some(Left { at, reason, expected }));
    }

    /// The request has run in a batch.
    pub fn ran(&self, run: Run) {
        self.mark(|part| {
            part.ended = Some(run.ended);
            part.run = Some(run);
        });
    }

    /// The request has no result, for this reason.
    #[cold]
    pub fn failed(&self, reason: Unanswered, now: Time) {
        self.mark(|part| (part.unanswered, part.ended) = (Some(reason), Some(now)));
    }

    /// The request is done. An ensemble has no run of its own.
    pub fn ended(&self, now: Time) {
        self.mark(|part| part.ended = Some(now));
    }
}

/// Notes the run of a batch in the traces of its members. Each member has the begin of its own run.
#[cold]
pub fn batch_ran<'a>(
    members: impl Iterator<Item = (&'a TracePart, Time)> + Clone,
    (requests, rows): (usize, u32),
    phases: Phases,
    ended: Time,
) {
    let Some((first, _)) = members.clone().next() else { return };
    let numbers = &first.trace.traces.numbers;
    let batch = Arc::new(Batch {
        place: SpanPlace { trace: numbers.trace(), span: numbers.span() },
        requests,
        rows,
        members: members.clone().map(|(part, _)| part.place()).collect(),
        is_told: AtomicBool::new(false),
    });
    for (part, began) in members {
        part.ran(Run { batch: batch.clone(), began, phases, ended });
    }
}
