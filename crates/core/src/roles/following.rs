//! Whom a frontend or a backend follows.

use super::epoch::Epoch;
use super::message::NodeId;

/// What to do about a scheduler that says that it leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Claimed {
    /// It is followed from now on.
    Followed,
    /// It is followed already.
    Known,
    /// It is not: it is to hear that this epoch has been, so that it takes a greater one.
    Outdone(Epoch),
}

/// Whom a frontend or a backend follows: whoever has the highest epoch that it has heard of, while it is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Following {
    epoch: Epoch,
    /// Whose the epoch is.
    whose: Option<NodeId>,
    is_there: bool,
}

impl Following {
    /// Nobody yet.
    pub fn new() -> Self {
        Following { epoch: Epoch::NONE, whose: None, is_there: false }
    }

    /// The highest that it has followed.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Who leads, if that one is there.
    pub fn leader(&self) -> Option<NodeId> {
        self.whose.filter(|_| self.is_there)
    }

    /// A scheduler says that it leads.
    pub fn handle_leads(&mut self, from: NodeId, epoch: Epoch) -> Claimed {
        if epoch > self.epoch {
            *self = Following { epoch, whose: Some(from), is_there: true };
            return Claimed::Followed;
        }
        if epoch < self.epoch {
            return Claimed::Outdone(self.epoch);
        }
        match (self.whose == Some(from), self.is_there) {
            (true, true) => Claimed::Known,
            (true, false) => {
                self.is_there = true;
                Claimed::Followed
            }
            // A scheduler that was started anew has taken a number that was taken: names of batches would be used twice.
            (false, _) => Claimed::Outdone(Epoch { number: epoch.number.saturating_add(1), rank: u32::MAX }),
        }
    }

    /// A peer is lost; whether it was the leader.
    pub fn handle_lost(&mut self, peer: NodeId) -> bool {
        let was_leader = self.leader() == Some(peer);
        self.is_there &= !was_leader;
        was_leader
    }
}
