//! The record of one traced request, which each writer of traces puts into its own form.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use downbeat_core::cluster::DispatchReason;
use downbeat_core::{Duration, Time};

use super::context::SpanPlace;
use crate::client::Client;
use crate::metrics::statistics::Phases;
use crate::unanswered::Unanswered;

/// The protocol of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wire {
    /// HTTP.
    Http,
    /// gRPC.
    Grpc,
}

/// A traced request that has ended. All times are of the server's clock.
#[derive(Debug)]
pub struct TraceRecord {
    /// The clock's zero, nanoseconds since the Unix epoch.
    pub zero_unix_ns: u64,
    /// The number of the trace among all traces and steps of the server, from 1.
    pub number: u64,
    /// The model whose settings chose the request; empty: the server's settings did.
    pub scope: Arc<str>,
    /// How many traces a file takes; 0: all.
    pub log_frequency: u32,
    /// The span of the request.
    pub place: SpanPlace,
    /// The client's span; 0: none.
    pub parent: u64,
    /// The protocol.
    pub wire: Wire,
    /// The sender.
    pub client: Client,
    /// The model that the client named.
    pub model: String,
    /// The client's id of the request.
    pub id: String,
    /// When the request began to arrive.
    pub began: Time,
    /// When the request was read; `None`: it was refused before.
    pub received: Option<Time>,
    /// When the service had answered; `None`: the request never reached the service.
    pub answered: Option<Time>,
    /// When the answer was handed to the connection, or the client had gone.
    pub ended: Time,
    /// The outcome.
    pub outcome: Outcome,
    /// The request to the model, then those of an ensemble's steps.
    pub parts: Vec<Part>,
}

/// The outcome of a traced request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The client got an answer, with this status of the protocol.
    Answered(u16),
    /// The client got an error, with this status and message.
    Failed(u16, String),
    /// The client went away.
    Cancelled,
}

/// The request to one model: the whole request, or a step of an ensemble.
#[derive(Debug)]
pub struct Part {
    /// The number among all traces and steps of the server; the first part has its trace's.
    pub number: u64,
    /// The part that this one is a step of, by its place.
    pub parent: Option<usize>,
    /// The model and its version.
    pub model: (String, String),
    /// When the request came to the model.
    pub began: Time,
    /// Why its batch left; `None`: no scheduler decided that.
    pub left: Option<Left>,
    /// Its run; `None`: it did not run.
    pub run: Option<Run>,
    /// Why it did not get a result.
    pub unanswered: Option<Unanswered>,
    /// When the model was done with it.
    pub ended: Option<Time>,
}

/// Why and when a batch left its queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Left {
    /// When the batch left.
    pub at: Time,
    /// The reason.
    pub reason: DispatchReason,
    /// The latency that the scheduler expected.
    pub expected: Duration,
}

/// The run of a request, in its batch.
#[derive(Clone, Debug)]
pub struct Run {
    /// The batch.
    pub batch: Arc<Batch>,
    /// When the run began.
    pub began: Time,
    /// The times of the run's parts.
    pub phases: Phases,
    /// When the outputs were there.
    pub ended: Time,
}

/// A batch with traced requests.
#[derive(Debug)]
pub struct Batch {
    /// The span of the batch.
    pub place: SpanPlace,
    /// Requests in the batch, traced or not.
    pub requests: usize,
    /// Items in the batch.
    pub rows: u32,
    /// The spans of the traced requests.
    pub members: Vec<SpanPlace>,
    /// Whether a writer of spans has written the batch.
    pub is_told: AtomicBool,
}

impl TraceRecord {
    /// An instant, nanoseconds since the Unix epoch.
    pub fn unix_ns(&self, at: Time) -> u64 {
        self.zero_unix_ns.saturating_add(at.as_nanos())
    }

    /// How long the request took, from its first byte to its answer.
    pub fn took(&self) -> Duration {
        self.ended.since(self.began)
    }
}

impl Run {
    /// The instants between the run's parts: the inputs are joined, and the outputs are there to be
    /// separated.
    pub fn between(&self) -> [Time; 2] {
        let joined = self.began + self.phases.compute_input;
        [joined.min(self.ended), (joined + self.phases.compute_infer).min(self.ended)]
    }
}
