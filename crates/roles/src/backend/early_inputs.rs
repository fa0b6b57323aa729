//! Inputs that have come before the plan of their batch.

use std::collections::BTreeMap;

use super::gathering::Member;
use crate::epoch::Epoch;
use crate::message::{BatchKey, NodeId};
use downbeat_core::time::Time;

/// A frontend's inputs for a batch that is not planned yet.
#[derive(Clone, Debug)]
pub(super) struct Early<P> {
    pub frontend: NodeId,
    /// When the backend gives the inputs back, if no plan has come.
    until: Time,
    pub granted: Vec<Member<P>>,
    pub gone: Vec<u64>,
}

impl<P> Early<P> {
    /// The room that a frontend's inputs take: one place for each named request, and at least one place.
    fn takes(&self) -> usize {
        (self.granted.len() + self.gone.len()).max(1)
    }
}

/// Inputs that have come before the plan of their batch.
///
/// The leader tells the backend and the frontends of a batch at the same time. If the plan is the
/// slowest of these messages, inputs come first. Example: the frame with the plan is lost, and sent
/// again 3 ms later.
#[derive(Clone, Debug)]
pub(super) struct EarlyInputs<P> {
    by_batch: BTreeMap<BatchKey, Vec<Early<P>>>,
    /// The room that all inputs take.
    taken: usize,
}

impl<P> EarlyInputs<P> {
    /// No inputs.
    pub fn new() -> Self {
        EarlyInputs { by_batch: BTreeMap::new(), taken: 0 }
    }

    /// Keeps inputs until the plan comes, and at most until `until`. Returns the inputs that do not fit:
    /// at most `most` requests have room.
    pub fn add(
        &mut self,
        batch: BatchKey,
        (frontend, granted, gone): (NodeId, Vec<Member<P>>, Vec<u64>),
        until: Time,
        most: usize,
    ) -> Result<(), Vec<Member<P>>> {
        let early = Early { frontend, until, granted, gone };
        if self.taken + early.takes() > most {
            return Err(early.granted);
        }
        self.taken += early.takes();
        self.by_batch.entry(batch).or_default().push(early);
        Ok(())
    }

    /// Removes and returns the inputs of a batch, in the order in which they came.
    pub fn take(&mut self, batch: BatchKey) -> Vec<Early<P>> {
        let taken = self.by_batch.remove(&batch).unwrap_or_default();
        self.taken -= taken.iter().map(Early::takes).sum::<usize>();
        taken
    }

    /// Removes and returns the inputs whose plans have not come in time. Plans of epochs that are over
    /// come no more.
    pub fn give_up(&mut self, now: Time, is_over: impl Fn(Epoch) -> bool) -> Vec<(BatchKey, Early<P>)> {
        let mut given_up = Vec::new();
        for (batch, inputs) in &mut self.by_batch {
            let ends = |early: &mut Early<P>| early.until <= now || is_over(batch.epoch);
            given_up.extend(inputs.extract_if(.., ends).map(|early| (*batch, early)));
        }
        self.by_batch.retain(|_, inputs| !inputs.is_empty());
        self.taken -= given_up.iter().map(|(_, early)| early.takes()).sum::<usize>();
        given_up
    }

    /// Forgets the inputs of a lost frontend, which takes its requests back.
    pub fn handle_lost(&mut self, frontend: NodeId) {
        for inputs in self.by_batch.values_mut() {
            inputs.retain(|early| early.frontend != frontend);
        }
        self.by_batch.retain(|_, inputs| !inputs.is_empty());
        self.taken = self.by_batch.values().flatten().map(Early::takes).sum();
    }

    /// When [`EarlyInputs::give_up`] next has something to return.
    pub fn next_due(&self) -> Option<Time> {
        self.by_batch.values().flatten().map(|early| early.until).min()
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::ids::BatchId;

    use super::*;
    use crate::message::RequestKey;

    const FRONTEND: NodeId = NodeId(1);

    fn batch(epoch: u64, number: u64) -> BatchKey {
        BatchKey { epoch: Epoch { number: epoch, rank: 0 }, batch: BatchId(number) }
    }

    fn inputs(numbers: &[u64]) -> (NodeId, Vec<Member<u64>>, Vec<u64>) {
        let member = |number: &u64| Member {
            request: RequestKey { frontend: FRONTEND, number: *number },
            deadline: Time::MAX,
            payload: *number,
        };
        (FRONTEND, numbers.iter().map(member).collect(), Vec::new())
    }

    fn at(ns: u64) -> Time {
        Time::from_nanos(ns)
    }

    #[test]
    fn early_inputs_are_bounded_however_they_leave() {
        let mut early = EarlyInputs::new();
        assert_eq!(early.add(batch(1, 1), inputs(&[1, 2, 3]), at(9), 4), Ok(()));
        assert_eq!(early.add(batch(1, 2), inputs(&[]), at(9), 4), Ok(()), "nothing but a message takes room too");
        let refused = early.add(batch(1, 2), inputs(&[4]), at(9), 4).unwrap_err();
        assert_eq!(refused.iter().map(|member| member.payload).collect::<Vec<_>>(), [4]);
        assert_eq!(early.take(batch(1, 1)).len(), 1);
        assert_eq!(early.add(batch(1, 2), inputs(&[4, 5, 6]), at(9), 4), Ok(()));
        early.handle_lost(FRONTEND);
        assert_eq!(early.add(batch(1, 3), inputs(&[1, 2, 3, 4]), at(9), 4), Ok(()));
        assert_eq!(early.give_up(at(9), |_| false).len(), 1);
        assert_eq!(early.add(batch(1, 4), inputs(&[1, 2, 3, 4]), at(9), 4), Ok(()));
    }

    #[test]
    fn inputs_are_given_up_in_time_and_with_their_epoch() {
        let mut early = EarlyInputs::new();
        for (key, until) in [(batch(1, 1), 5), (batch(2, 1), 5), (batch(2, 2), 9)] {
            early.add(key, inputs(&[1]), at(until), 10).unwrap();
        }
        let mut given_up = |now, epoch| {
            let given_up = early.give_up(at(now), |of| of.number <= epoch);
            (given_up.into_iter().map(|(key, _)| key).collect::<Vec<_>>(), early.next_due())
        };
        assert_eq!(given_up(4, 0), (vec![], Some(at(5))));
        assert_eq!(given_up(4, 1), (vec![batch(1, 1)], Some(at(5))));
        assert_eq!(given_up(5, 1), (vec![batch(2, 1)], Some(at(9))));
        assert_eq!(given_up(5, 2), (vec![batch(2, 2)], None));
    }
}
