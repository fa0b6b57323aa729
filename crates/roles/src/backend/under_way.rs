//! The batches that a backend has, slot by slot.

use std::collections::{BTreeMap, VecDeque};

use super::gathering::{Batch, Member};
use crate::message::{BatchKey, NodeId, Running};
use downbeat_core::time::Time;

/// The batches that a backend has. A slot begins them in the order of their plans.
#[derive(Clone, Debug)]
pub(super) struct UnderWay<P> {
    batches: BTreeMap<BatchKey, Batch<P>>,
    /// By slot: first the batches that run or wait in the slot's queue, then the incomplete
    /// batches.
    slots: Vec<VecDeque<BatchKey>>,
}

impl<P> UnderWay<P> {
    /// No batches and no slots.
    pub fn new() -> Self {
        UnderWay { batches: BTreeMap::new(), slots: Vec::new() }
    }

    /// The number of batches.
    pub fn len(&self) -> usize {
        self.batches.len()
    }

    /// The number of slots.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Sets the number of slots, which never shrinks.
    pub fn set_slots(&mut self, slots: usize) {
        if self.slots.len() < slots {
            self.slots.resize_with(slots, VecDeque::new);
        }
    }

    /// The batch of this name, mutable.
    pub fn get_mut(&mut self, key: BatchKey) -> Option<&mut Batch<P>> {
        self.batches.get_mut(&key)
    }

    /// Whether the backend has this batch.
    pub fn contains(&self, key: BatchKey) -> bool {
        self.batches.contains_key(&key)
    }

    /// Whether the backend has a batch of this model.
    pub fn has(&self, model: &str) -> bool {
        self.batches.values().any(|batch| batch.queue.model == model)
    }

    /// Adds a batch after all others of its slot. The slot must exist.
    pub fn insert(&mut self, key: BatchKey, batch: Batch<P>) {
        if let Some(slot) = self.slots.get_mut(batch.slot as usize) {
            slot.push_back(key);
            self.batches.insert(key, batch);
        }
    }

    /// Gives up the members of a lost frontend.
    pub fn handle_lost(&mut self, frontend: NodeId) {
        for batch in self.batches.values_mut() {
            batch.handle_lost(frontend);
        }
    }

    /// Begins the next batch of a slot, if its turn has come. Either all its inputs have come, or
    /// its time to wait is over and the slot has nothing else to run. Returns the batch and the
    /// members that run.
    pub fn start(&mut self, now: Time, slot: usize) -> Option<(BatchKey, Vec<Member<P>>)> {
        let slot = self.slots.get(slot)?;
        let waits = |key: &BatchKey| self.batches.get(key).is_some_and(|batch| !batch.is_running());
        let (place, key) = slot.iter().enumerate().find(|(_, key)| waits(key))?;
        let batch = self.batches.get_mut(key)?;
        let is_first = place == 0;
        let is_its_turn = batch.is_complete() || (is_first && batch.gather_until <= now);
        is_its_turn.then(|| (*key, batch.run(is_first.then_some(now))))
    }

    /// Removes a batch that is done.
    pub fn remove(&mut self, now: Time, key: BatchKey) -> Option<Batch<P>> {
        let batch = self.batches.remove(&key)?;
        if let Some(slot) = self.slots.get_mut(batch.slot as usize) {
            slot.retain(|other| *other != key);
            let next = slot.front().and_then(|next| self.batches.get_mut(next));
            if let Some(next) = next.filter(|next| next.is_running()) {
                next.began.get_or_insert(now);
            }
        }
        Some(batch)
    }

    /// When the first batch of any slot may run without its missing inputs.
    pub fn next_due(&self) -> Option<Time> {
        let first = |slot: &VecDeque<BatchKey>| self.batches.get(slot.front()?);
        let waiting = self.slots.iter().filter_map(first).filter(|batch| !batch.is_running());
        waiting.map(|batch| batch.gather_until).min()
    }

    /// All batches, slot by slot, with the time until each is done if all take their planned
    /// latency.
    pub fn running(&self, now: Time) -> Vec<Running> {
        let mut running = Vec::new();
        for (slot, batches) in (0..).zip(&self.slots) {
            let mut free_at = now;
            for key in batches {
                let Some(batch) = self.batches.get(key) else { continue };
                let begins = batch.began.unwrap_or(free_at);
                free_at = (begins + batch.expected).max(now);
                running.push(Running { batch: *key, slot, ends_in: free_at.since(now) });
            }
        }
        running
    }
}
