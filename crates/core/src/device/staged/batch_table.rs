//! The batches that run, and the stages they have completed (DVABatch §5.2.1).

use std::collections::BTreeMap;

use super::executor::Item;
use crate::ids::BatchId;
use crate::time::Time;

/// A batch that runs: a row of the paper's batch table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Batch {
    /// The batch's items (`bs`), including items that join.
    pub rows: u32,
    /// When the batch was made (`time`).
    pub created: Time,
    /// The length to which the members are padded.
    pub length: u32,
    /// The items that each stage has completed (`status_map`).
    pub completed: Vec<u32>,
    /// Whether the batch may be split later, so that no request may join it (§5.2.2).
    pub may_split: bool,
    /// The requests that are on their way to join the batch.
    pub stretch: Option<Stretch>,
}

/// Requests that join a batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stretch {
    /// The stage after which batch and joining requests are together.
    pub stage: u16,
    /// The side that got there first, and waits for the other.
    pub waiting: Option<Item>,
}

/// The batches that run, by id. Ids ascend with time.
#[derive(Clone, Debug, Default)]
pub struct BatchTable {
    rows: BTreeMap<BatchId, Batch>,
    newest: Option<BatchId>,
}

impl BatchTable {
    /// Adds a batch of `rows` items that no stage has run: the paper's `new`.
    pub fn insert(&mut self, id: BatchId, now: Time, rows: u32, length: u32, stages: u16, may_split: bool) {
        self.newest = Some(id);
        let completed = vec![0; usize::from(stages)];
        self.rows.insert(id, Batch { rows, created: now, length, completed, may_split, stretch: None });
    }

    /// Adds a part of `batch` with `rows` items, which has completed the stages up to `stage`. The
    /// part is as old as the batch.
    pub fn insert_part(&mut self, id: BatchId, batch: BatchId, rows: u32, stage: u16) {
        if let Some(whole) = self.rows.get(&batch).cloned() {
            let completed =
                (0..whole.completed.len()).map(|s| if s <= usize::from(stage) { rows } else { 0 }).collect();
            self.rows.insert(id, Batch { rows, completed, stretch: None, ..whole });
        }
    }

    /// The batch that was made last, if it still runs. Parts of a split batch do not count.
    pub fn newest(&self) -> Option<(BatchId, &Batch)> {
        let id = self.newest?;
        self.rows.get(&id).map(|batch| (id, batch))
    }

    /// A batch.
    pub fn get(&self, id: BatchId) -> Option<&Batch> {
        self.rows.get(&id)
    }

    /// A batch, for change.
    pub fn get_mut(&mut self, id: BatchId) -> Option<&mut Batch> {
        self.rows.get_mut(&id)
    }

    /// Removes a batch that has left the last stage.
    pub fn remove(&mut self, id: BatchId) {
        self.rows.remove(&id);
    }

    /// Whether no batch runs.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}
