//! The states of a stage's executor (DVABatch §6.2, figure 11).

use crate::ids::{BatchId, LaunchId, RequestId};

use super::super::input_ring::RingRun;
use super::buffers::FamilyId;

/// The state of a stage's executor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExecutorState {
    /// The executor has a legitimate pair of buffers, and takes the next batch.
    Active,
    /// The executor has a batch, and waits until the batch's own pair is legitimate.
    Checking,
    /// The executor runs the batch.
    Working,
    /// The executor has no legitimate pair.
    Inactive,
}

/// An event that changes the state of an executor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExecutorEvent {
    /// The executor takes a batch from its queue.
    Pulls,
    /// The pair of the executor's batch is legitimate.
    IsLegitimate,
    /// The run is over, and the executor has another legitimate pair. The last stage's executor
    /// always gets this event.
    EndsWithPair,
    /// The run is over, and the executor has no legitimate pair.
    EndsWithoutPair,
    /// A pair became legitimate.
    GetsPair,
}

/// Figure 11: all transitions.
pub const TRANSITIONS: [(ExecutorState, ExecutorEvent, ExecutorState); 5] = [
    (ExecutorState::Active, ExecutorEvent::Pulls, ExecutorState::Checking),
    (ExecutorState::Checking, ExecutorEvent::IsLegitimate, ExecutorState::Working),
    (ExecutorState::Working, ExecutorEvent::EndsWithPair, ExecutorState::Active),
    (ExecutorState::Working, ExecutorEvent::EndsWithoutPair, ExecutorState::Inactive),
    (ExecutorState::Inactive, ExecutorEvent::GetsPair, ExecutorState::Active),
];

/// A batch, or a part that catches up, on its way through the stages: an entry of the paper's batch
/// queues.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Item {
    /// The batch.
    pub batch: BatchId,
    /// The members, in the order of their rows.
    pub members: Vec<RequestId>,
    /// The items of the members.
    pub rows: u32,
    /// The item's pair of buffers; `None` until the first stage has one.
    pub pair: Option<u16>,
    /// Whether the members are on their way to join the batch.
    pub joins: bool,
    /// The ring slots that the first stage reads, in the order of the members.
    pub slots: Vec<RingRun>,
    /// The families of split batches that the item belongs to, the outermost first.
    pub families: Vec<FamilyId>,
}

/// The executor of a stage, which has a lane of its own.
#[derive(Debug)]
pub struct Executor {
    state: ExecutorState,
    /// The item that the executor has taken.
    pub item: Option<Item>,
    /// The launch that runs.
    pub launch: Option<LaunchId>,
    /// The pairs that the executor is done with and has not handed back yet.
    pub owed: Vec<u16>,
}

impl Executor {
    /// An idle executor with a legitimate pair.
    pub fn new() -> Self {
        Executor { state: ExecutorState::Active, item: None, launch: None, owed: Vec::new() }
    }

    /// The executor's state.
    pub fn state(&self) -> ExecutorState {
        self.state
    }

    /// Changes the state. Asserts that the table has such a transition.
    pub fn on(&mut self, event: ExecutorEvent) {
        let transition = TRANSITIONS.iter().find(|(from, on, _)| *from == self.state && *on == event);
        assert!(transition.is_some(), "an executor that is {:?} cannot see {event:?}", self.state);
        if let Some((_, _, to)) = transition {
            self.state = *to;
        }
    }
}
