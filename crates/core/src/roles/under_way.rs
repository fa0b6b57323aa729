//! The batches that a backend has, slot by slot.

use std::collections::{BTreeMap, VecDeque};

use super::gathering::{Batch, Member};
use super::message::{BatchKey, NodeId, Running};
use crate::time::Time;

/// The batches that a backend has. A slot begins them in the order in which they were planned.
#[derive(Clone, Debug)]
pub(super) struct UnderWay<P> {
    batches: BTreeMap<BatchKey, Batch<P>>,
    /// First those that run or wait in the slot's queue, then those that are not complete.
    slots: Vec<VecDeque<BatchKey>>,
}

impl<P> UnderWay<P> {
    /// None, and no slots.
    pub fn new() -> Self {
        UnderWay { batches: BTreeMap::new(), slots: Vec::new() }
    }

    /// How many batches there are.
    pub fn len(&self) -> usize {
        self.batches.len()
    }

    /// How many slots there are.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// There are so many slots; never fewer than before.
    pub fn set_slots(&mut self, slots: usize) {
        if self.slots.len() < slots {
            self.slots.resize_with(slots, VecDeque::new);
        }
    }

    /// The batch of that name.
    pub fn get_mut(&mut self, key: BatchKey) -> Option<&mut Batch<P>> {
        self.batches.get_mut(&key)
    }

    /// Whether it has that batch.
    pub fn contains(&self, key: BatchKey) -> bool {
        self.batches.contains_key(&key)
    }

    /// Whether it has a batch of that model.
    pub fn has(&self, model: &str) -> bool {
        self.batches.values().any(|batch| batch.queue.model == model)
    }

    /// All names, in order.
    pub fn keys(&self) -> Vec<BatchKey> {
        self.batches.keys().copied().collect()
    }

    /// A batch comes, after all others of its slot, which there has to be.
    pub fn insert(&mut self, key: BatchKey, batch: Batch<P>) {
        if let Some(slot) = self.slots.get_mut(batch.slot as usize) {
            slot.push_back(key);
            self.batches.insert(key, batch);
        }
    }

    /// A frontend is lost.
    pub fn handle_lost(&mut self, frontend: NodeId) {
        for batch in self.batches.values_mut() {
            batch.handle_lost(frontend);
        }
    }

    /// The batch whose turn it is on a slot, with those of its members whose inputs are there, which run from now on: the next one once all its inputs are there, and also without those that are late if nothing
    /// else is there to run.
    pub fn start(&mut self, now: Time, slot: usize) -> Option<(BatchKey, Vec<Member<P>>)> {
        let slot = self.slots.get(slot)?;
        let waits = |key: &BatchKey| self.batches.get(key).is_some_and(|batch| !batch.is_running());
        let (place, key) = slot.iter().enumerate().find(|(_, key)| waits(key))?;
        let batch = self.batches.get_mut(key)?;
        let is_first = place == 0;
        let is_its_turn = batch.is_complete() || (is_first && batch.gather_until <= now);
        is_its_turn.then(|| (*key, batch.run(is_first.then_some(now))))
    }

    /// A batch is done.
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

    /// When the first of a slot's batches may run without what is late.
    pub fn next_due(&self) -> Option<Time> {
        let first = |slot: &VecDeque<BatchKey>| self.batches.get(slot.front()?);
        let waiting = self.slots.iter().filter_map(first).filter(|batch| !batch.is_running());
        waiting.map(|batch| batch.gather_until).min()
    }

    /// All batches, slot by slot, with when they will be done if each takes what it was planned with.
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
