//! Fetches that were still under way when their batches ended.

use std::collections::BTreeMap;

use crate::message::{BatchKey, NodeId};
use downbeat_core::time::Time;

/// The most such fetches. The times of further ones are not measured.
const MOST: usize = 4096;

/// Fetches that were still under way when their batches ended.
///
/// A backend measures late fetches as it measures other ones. Otherwise the backend would know only
/// fetches that end in time, and would never learn that it waits too briefly.
#[derive(Clone, Debug, Default)]
pub(super) struct LateFetches {
    /// The batch and the frontend; the approximate bytes of one member's inputs, and since when
    /// they were under way.
    under_way: BTreeMap<(BatchKey, NodeId), (u64, Time)>,
}

impl LateFetches {
    /// Adds the fetches of a batch that has ended, with the bytes of one member's inputs.
    pub fn add(&mut self, batch: BatchKey, bytes: u64, fetches: Vec<(NodeId, Time)>) {
        for (frontend, since) in fetches {
            if self.under_way.len() < MOST {
                self.under_way.insert((batch, frontend), (bytes, since));
            }
        }
    }

    /// Removes the fetch that brought `inputs` inputs of a frontend. Returns their approximate bytes, and
    /// since when they were under way.
    pub fn fetched(&mut self, batch: BatchKey, frontend: NodeId, inputs: usize) -> Option<(u64, Time)> {
        let (bytes, since) = self.under_way.remove(&(batch, frontend))?;
        (inputs > 0).then(|| (bytes.saturating_mul(inputs as u64), since))
    }

    /// Forgets the fetches from a lost frontend.
    pub fn handle_lost(&mut self, frontend: NodeId) {
        self.under_way.retain(|(_, of), _| *of != frontend);
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::ids::BatchId;

    use super::*;
    use crate::epoch::Epoch;

    #[test]
    fn fetches_are_forgotten_once_they_end_or_are_in_vain() {
        let mut late = LateFetches::default();
        let batch = |number| BatchKey { epoch: Epoch::NONE, batch: BatchId(number) };
        let since = Time::from_nanos(7);
        late.add(batch(1), 10, vec![(NodeId(1), since), (NodeId(2), since)]);
        assert_eq!(late.fetched(batch(1), NodeId(1), 3), Some((30, since)));
        assert_eq!(late.fetched(batch(1), NodeId(1), 3), None);
        late.handle_lost(NodeId(2));
        assert_eq!(late.fetched(batch(1), NodeId(2), 3), None);
        for number in 0..10_000 {
            late.add(batch(number), 10, vec![(NodeId(1), since)]);
        }
        assert_eq!(late.under_way.len(), MOST);
    }
}
