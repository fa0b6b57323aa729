//! A launch for a lane: what it runs on, and what came of it.

use std::sync::Arc;

use downbeat_core::device::{Launch, PartitionId, RingRun};
use downbeat_core::{BatchId, DeviceId, RequestId, Time};
use downbeat_engine::State;

use super::hosted_model::HostedModel;
use super::tensors::Member;
use crate::batch_codec::Outputs;
use crate::engine_run::RunFailure;
use crate::queue::Queue;
use crate::statistics::Phases;

pub struct Work {
    pub head: Head,
    pub body: Body,
}

/// What is known of a launch until it has ended, whoever ends it.
pub struct Head {
    pub launch: Launch,
    /// Which of the model's lanes runs it, or of its partition's slots.
    pub lane: usize,
    pub partition: PartitionId,
    pub model: Arc<HostedModel>,
    /// `None`: the device's policy made the batch.
    pub grant: Option<Grant>,
}

/// A batch that the scheduler made.
#[derive(Clone)]
pub struct Grant {
    /// The scheduler's name for what it was granted.
    pub slot: DeviceId,
    /// And for the batch.
    pub batch: BatchId,
    pub queue: Arc<Queue>,
    pub dispatched: Time,
    /// How many were dispatched with it.
    pub requests: u32,
    /// The latency of the batch was a guess when the batch began.
    pub is_guess: bool,
}

/// What a launch runs on.
pub struct Body {
    /// Whose rows are in it, in their order.
    pub members: Vec<Member>,
    pub source: Source,
}

/// What the rows of a launch are made of.
pub enum Source {
    /// The members' inputs, which are joined.
    Inputs,
    /// A run of slots that is just the members.
    Ring(RingRun),
    /// What earlier segments left, one after another.
    States(Vec<State>),
    /// What earlier segments left cannot be parted, and why.
    Broken(String),
}

/// What came of a launch.
#[derive(Default)]
pub struct Outcome {
    /// Who was in it.
    pub members: Vec<Member>,
    /// The members that are answered.
    pub answers: Vec<(RequestId, Outputs)>,
    /// The members that are answered with an error.
    pub failed: Vec<(RequestId, RunFailure)>,
    /// Whether the launch failed as a whole, and its members ran alone.
    pub alone: bool,
    /// The members that are answered before the last segment.
    pub exits: Vec<(RequestId, Outputs)>,
    /// What the segments left for the next ones.
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
    /// Whether it is over so soon that the thread of a frontend may run it.
    pub fn is_brief(&self) -> bool {
        self.head.launch.computed_rows <= self.head.model.brief_rows
    }

    /// Whether it goes on with a batch that has run in part.
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
