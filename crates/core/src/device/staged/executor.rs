//! The states of a stage's executor (DVABatch §6.2, figure 11).

use crate::ids::{BatchId, LaunchId, RequestId};

use super::super::input_ring::RingRun;
use super::buffers::FamilyId;

/// What a stage's executor is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExecutorState {
    /// It has a legitimate pair of buffers, and takes the next batch.
    Active,
    /// It has a batch, and waits until that batch's own pair is legitimate.
    Checking,
    /// It runs the batch.
    Working,
    /// It has no legitimate pair.
    Inactive,
}

/// What changes the state of an executor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExecutorEvent {
    /// It takes a batch from its queue.
    Pulls,
    /// The pair of its batch is legitimate.
    IsLegitimate,
    /// Its run is over, and it has another legitimate pair. The last stage's executor always does as if.
    EndsWithPair,
    /// Its run is over, and it has no legitimate pair.
    EndsWithoutPair,
    /// A pair became legitimate.
    GetsPair,
}

/// Figure 11: the only transitions there are.
pub const TRANSITIONS: [(ExecutorState, ExecutorEvent, ExecutorState); 5] = [
    (ExecutorState::Active, ExecutorEvent::Pulls, ExecutorState::Checking),
    (ExecutorState::Checking, ExecutorEvent::IsLegitimate, ExecutorState::Working),
    (ExecutorState::Working, ExecutorEvent::EndsWithPair, ExecutorState::Active),
    (ExecutorState::Working, ExecutorEvent::EndsWithoutPair, ExecutorState::Inactive),
    (ExecutorState::Inactive, ExecutorEvent::GetsPair, ExecutorState::Active),
];

/// A batch, or a part of one that catches up, on its way through the stages: an entry of the paper's batch queues.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Item {
    /// The batch.
    pub batch: BatchId,
    /// Its members, in the order of their rows.
    pub members: Vec<RequestId>,
    /// Their items.
    pub rows: u32,
    /// Its pair of buffers; `None` until the first stage has one for it.
    pub pair: Option<u16>,
    /// The members join the batch: they are not yet with the rest of it.
    pub joins: bool,
    /// Slots of the input ring that the first stage reads, in the order of the members.
    pub slots: Vec<RingRun>,
    /// The split batches that it is a part of, the outermost first.
    pub families: Vec<FamilyId>,
}

/// The executor of a stage, which has a lane of its own.
#[derive(Debug)]
pub struct Executor {
    state: ExecutorState,
    /// What it has pulled.
    pub item: Option<Item>,
    /// What it runs.
    pub launch: Option<LaunchId>,
    /// Pairs that it is done with and has not yet handed back.
    pub owed: Vec<u16>,
}

impl Executor {
    /// With a legitimate pair and nothing to do.
    pub fn new() -> Self {
        Executor { state: ExecutorState::Active, item: None, launch: None, owed: Vec::new() }
    }

    /// What it is doing.
    pub fn state(&self) -> ExecutorState {
        self.state
    }

    /// Changes its state. Asserts that the table has such a transition.
    pub fn on(&mut self, event: ExecutorEvent) {
        let transition = TRANSITIONS.iter().find(|(from, on, _)| *from == self.state && *on == event);
        assert!(transition.is_some(), "an executor that is {:?} cannot see {event:?}", self.state);
        if let Some((_, _, to)) = transition {
            self.state = *to;
        }
    }
}
