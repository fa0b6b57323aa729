//! The decisions about rollouts that the frontends of a cluster share.
//!
//! Example: an owner sets the share of model `m`'s new version at one frontend. The frontend tells the
//! leading scheduler, and the leader tells the other frontends. A new leader hears all decisions from
//! the frontends.

use std::collections::BTreeMap;

use crate::message::Message;

/// The most models with a decision.
const MOST_ROLLOUTS: usize = 256;

/// A decision about the rollout of a model. Frontends define the bytes; schedulers never look into
/// them.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Decision {
    /// Counts the decisions of a model, from 1. Of two with one number the greater bytes count.
    number: u64,
    bytes: Vec<u8>,
}

/// A received decision, compared with the receiver's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Received {
    /// The received decision is the newest.
    New,
    /// The receiver knows it, or knows too many models.
    Known,
    /// The receiver's decision is newer.
    Old,
}

/// The newest decision of each model.
#[derive(Debug, Default)]
pub(super) struct Rollouts(BTreeMap<String, Decision>);

impl Rollouts {
    /// Makes a decision of this process. Returns its number.
    pub fn decide(&mut self, model: &str, bytes: &[u8]) -> u64 {
        let number = self.0.get(model).map_or(1, |known| known.number.saturating_add(1));
        self.handle(model, number, bytes);
        number
    }

    /// Takes a decision.
    pub fn handle(&mut self, model: &str, number: u64, bytes: &[u8]) -> Received {
        let received = Decision { number, bytes: bytes.to_vec() };
        let known = self.0.get(model);
        match known.map(|known| received.cmp(known)) {
            None if self.0.len() >= MOST_ROLLOUTS => return Received::Known,
            Some(std::cmp::Ordering::Equal) => return Received::Known,
            Some(std::cmp::Ordering::Less) => return Received::Old,
            None | Some(std::cmp::Ordering::Greater) => {}
        }
        self.0.insert(model.to_owned(), received);
        Received::New
    }

    /// The decision about a model.
    pub fn of(&self, model: &str) -> Option<(u64, &[u8])> {
        self.0.get(model).map(|known| (known.number, &*known.bytes))
    }

    /// The message that tells a peer the decision about a model.
    pub fn message<P>(&self, model: &str) -> Option<Message<P>> {
        let (number, decision) = self.of(model)?;
        Some(Message::Rollout { model: model.to_owned(), number, decision: decision.to_vec() })
    }

    /// The messages that tell a peer all decisions.
    pub fn messages<P>(&self) -> impl Iterator<Item = Message<P>> {
        self.0.keys().filter_map(|model| self.message(model))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_decision_counts_in_any_order() {
        let said: [(u64, &[u8]); 4] = [(1, b"a"), (2, b"a"), (2, b"b"), (1, b"z")];
        for first in 0..said.len() {
            let mut rollouts = Rollouts::default();
            for place in 0..said.len() {
                let (number, bytes) = said[(first + place) % said.len()];
                rollouts.handle("m", number, bytes);
            }
            assert_eq!(rollouts.of("m"), Some((2, &b"b"[..])));
        }
    }

    #[test]
    fn an_own_decision_is_newer_than_those_before() {
        let mut rollouts = Rollouts::default();
        assert_eq!(rollouts.handle("m", 7, b"b"), Received::New);
        assert_eq!(rollouts.decide("m", b"a"), 8);
        assert_eq!((rollouts.handle("m", 8, b"a"), rollouts.handle("m", 7, b"b")), (Received::Known, Received::Old));
    }

    #[test]
    fn a_peer_can_tell_of_so_many_models_and_no_more() {
        let mut rollouts = Rollouts::default();
        for number in 0..2 * MOST_ROLLOUTS {
            rollouts.handle(&format!("m{number}"), 1, b"a");
        }
        assert_eq!(rollouts.messages::<()>().count(), MOST_ROLLOUTS);
        assert_eq!(rollouts.handle("m0", 2, b"a"), Received::New, "a known model has newer decisions");
    }
}
