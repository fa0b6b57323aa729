//! A launch for a lane: its inputs, and its outcome.

use std::sync::Arc;

use downbeat_core::cluster::DispatchReason;
use downbeat_core::device::{Launch, PartitionId, RingRun};
use downbeat_core::{BatchId, DeviceId, RequestId, Time};
use downbeat_engine::State;
use downbeat_service::metrics::statistics::Phases;

use super::placement::Placement;
use super::tensors::Member;
use crate::request::batch_codec::Outputs;
use crate::request::queue::Queue;
use crate::run::engine_run::RunFailure;

pub struct Work {
    pub head: Head,
    pub body: Body,
}

/// The part of a launch that stays known until its end, on any thread.
pub struct Head {
    pub launch: Launch,
    /// Which of the model's lanes runs it, or of its partition's slots.
    pub lane: usize,
    pub partition: PartitionId,
    pub model: Arc<Placement>,
    /// `None`: the device's policy made the batch.
    pub grant: Option<Grant>,
}

/// A batch that the scheduler made.
#[derive(Clone)]
pub struct Grant {
    /// The scheduler's number of the slot.
    pub slot: DeviceId,
    /// The scheduler's number of the batch.
    pub batch: BatchId,
    /// The queue of the batch.
    pub queue: Arc<Queue>,
    /// When the scheduler dispatched the batch.
    pub dispatched: Time,
    /// Why the batch left then; `None`: the scheduler of another process decided.
    pub reason: Option<DispatchReason>,
    /// How many requests were dispatched with the batch.
    pub requests: u32,
    /// The latency of the batch was a guess when the batch began.
    pub is_guess: bool,
}

/// The members of a launch and the source of its inputs.
pub struct Body {
    /// The requests whose rows are in the launch, in their order.
    pub members: Vec<Member>,
    pub source: Source,
}

/// The source of the rows of a launch.
pub enum Source {
    /// The members' inputs, which are joined.
    Inputs,
    /// A run of slots that is just the members.
    Ring(RingRun),
    /// The states that earlier segments left, one after another.
    States(Vec<State>),
    /// The state that earlier segments left cannot be split, for this reason.
    Broken(String),
}

/// The outcome of a launch.
#[derive(Default)]
pub struct Outcome {
    /// The requests that were in the launch.
    pub members: Vec<Member>,
    /// The members that are answered.
    pub answers: Vec<(RequestId, Outputs)>,
    /// The members that are answered with an error.
    pub failed: Vec<(RequestId, RunFailure)>,
    /// Whether the launch failed as a whole, and its members ran alone.
    pub alone: bool,
    /// The members that are answered before the last segment.
    pub exits: Vec<(RequestId, Outputs)>,
    /// The state that the segments left for the next ones.
    pub state: Option<State>,
    pub phases: Phases,
}

impl Body {
    /// Whose rows are in it, by their names.
    pub fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.members.iter().map(|member| member.request)
    }
}

impl Work {
    /// Whether it is brief enough for the thread of a frontend.
    pub fn is_brief(&self) -> bool {
        self.head.launch.computed_rows <= self.head.model.brief_rows
    }

    /// Whether it continues a batch that has run in part.
    pub fn goes_on(&self) -> bool {
        self.head.launch.segments.first > 0
    }
}

impl Outcome {
    pub fn failed(members: impl Iterator<Item = RequestId>, failure: &RunFailure) -> Self {
        let failed = members.map(|request| (request, failure.clone())).collect();
        Outcome { failed, alone: true, ..Outcome::default() }
    }
}
