//! The candidates and the devices of one kind, as the matchmaker knows them.

use std::cmp::Reverse;

use super::indexed_heap::IndexedHeap;
use super::messages::Candidate;
use super::ready_tree::ReadyTree;
use crate::ids::DeviceId;
use crate::time::{Duration, Time};

/// What decides between candidates that may be sent: `latest`, then `since`.
pub(super) type Urgency = (Time, Time);

#[derive(Debug, Default)]
pub(super) struct KindState {
    /// By model.
    pub candidates: Vec<Option<Candidate>>,
    /// By model: when to send the candidates that may not be sent yet.
    pub deferred: IndexedHeap<Time>,
    /// By model: the candidates that may be sent. The first heap has those that wait for a device of this kind only; heap
    /// `1 + f` those that wait, besides, until kind `f`, faster for them, has no free device.
    pub schedulable: Vec<IndexedHeap<Urgency>>,
    /// By model: the delays of the schedulable candidates; kept while batches are sent ahead.
    pub delays: IndexedHeap<Reverse<Duration>>,
    pub devices: Vec<DeviceId>,
    /// By place in `devices`: when the device can begin another batch.
    pub ready: ReadyTree,
    pub present: u32,
    pub free: u32,
}

impl KindState {
    /// Takes the model out of what waits here.
    pub fn forget(&mut self, model: u32) {
        self.deferred.remove(model);
        self.forget_schedulable(model);
    }

    fn forget_schedulable(&mut self, model: u32) {
        for heap in &mut self.schedulable {
            heap.remove(model);
        }
        self.delays.remove(model);
    }

    /// The model's candidate waits for its time.
    pub fn defer(&mut self, model: u32, candidate: &Candidate) {
        self.forget_schedulable(model);
        self.deferred.set(model, candidate.send());
    }

    /// The model's candidate waits for a device.
    pub fn schedule(&mut self, model: u32, class: usize, candidate: &Candidate, sends_ahead: bool) {
        self.schedulable[class].set(model, (candidate.latest, candidate.since));
        if sends_ahead {
            self.delays.set(model, Reverse(candidate.delay));
        }
    }

    pub fn is_schedulable(&self, model: u32) -> bool {
        self.schedulable.iter().any(|heap| heap.get(model).is_some())
    }

    /// The longest way of a candidate that waits for a device.
    pub fn reach(&self) -> Duration {
        self.delays.peek().map_or(Duration::ZERO, |(Reverse(delay), _)| delay)
    }
}
