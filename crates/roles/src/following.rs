//! The scheduler that a frontend or a backend follows.

use crate::epoch::Epoch;
use crate::links::Links;
use crate::message::{Message, NodeId, Role};
use downbeat_core::time::Time;

/// The response to a scheduler that claims to lead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Claimed {
    /// The node follows this scheduler from now on.
    Followed,
    /// The node already follows this scheduler.
    Known,
    /// The node does not follow this scheduler, because it knows of this greater epoch. The node
    /// must tell the scheduler, so that the scheduler takes a greater one.
    Outdone(Epoch),
    /// Another process has led in this very epoch. The scheduler must take the next one, or names
    /// of batches would be used twice.
    Taken,
    /// Takeovers cannot have led from the node's epoch to this one. A node that followed would
    /// refuse all real leaders afterwards.
    Impossible,
}

/// The scheduler that a frontend or a backend follows: the leader of the highest epoch it has heard
/// of, while that leader is connected and leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Following {
    epoch: Epoch,
    /// The leader of the epoch.
    whose: Option<NodeId>,
    /// Whether the leader is connected, and has not said that it stands by.
    is_there: bool,
}

impl Following {
    /// No scheduler yet.
    pub fn new() -> Self {
        Following { epoch: Epoch::NONE, whose: None, is_there: false }
    }

    /// The highest epoch that the node has followed.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The leader, if it is connected.
    pub fn leader(&self) -> Option<NodeId> {
        self.whose.filter(|_| self.is_there)
    }

    /// Handles a scheduler's claim that it leads. Returns true if the node follows this scheduler
    /// from now on, and did not before.
    pub fn handle_leads<P: Clone>(&mut self, now: Time, links: &mut Links<P>, from: NodeId, epoch: Epoch) -> bool {
        let claimed = self.claimed(from, epoch);
        match claimed {
            Claimed::Outdone(epoch) => links.say(now, from, Message::Standing { epoch, leads: false }),
            Claimed::Taken => links.say(now, from, Message::Taken(epoch)),
            Claimed::Impossible => links.give_up(
                from,
                format!(
                    "it leads in epoch {}, and this process knows of {} only. If the scheduler is one of this \
                     cluster, restart this process",
                    epoch.number, self.epoch.number
                ),
            ),
            Claimed::Followed | Claimed::Known => {}
        }
        claimed == Claimed::Followed
    }

    /// Handles a scheduler's word that it does not lead. Returns true if it was the leader.
    pub fn handle_stands_by(&mut self, from: NodeId) -> bool {
        let was_leader = self.leader() == Some(from);
        self.is_there &= !was_leader;
        was_leader
    }

    fn claimed(&mut self, from: NodeId, epoch: Epoch) -> Claimed {
        // A process that has just begun cannot know how far its cluster has come.
        let is_new = self.epoch == Epoch::NONE;
        if !epoch.is_possible() || (epoch.number > self.epoch.plausible(2) && !is_new) {
            return Claimed::Impossible;
        }
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
            // A restarted scheduler has taken a used number.
            (false, _) => Claimed::Taken,
        }
    }

    /// Handles the loss of a peer. Returns true if it was the leader.
    pub fn handle_lost<P: Clone>(&mut self, now: Time, links: &mut Links<P>, peer: NodeId) -> bool {
        let was_leader = self.leader() == Some(peer);
        if was_leader {
            self.is_there = false;
            self.tell_epoch(now, links);
        }
        was_leader
    }

    /// Tells all schedulers the last epoch while its leader is gone. A scheduler that never heard
    /// of this epoch must take a greater one.
    pub fn tell_epoch<P: Clone>(&self, now: Time, links: &mut Links<P>) {
        let epoch = self.epoch;
        if self.leader().is_some() || epoch == Epoch::NONE {
            return;
        }
        let schedulers = links.peers().filter(|peer| matches!(peer.role, Role::Scheduler { .. }));
        for scheduler in schedulers.map(|peer| peer.node).collect::<Vec<_>>() {
            links.say(now, scheduler, Message::Standing { epoch, leads: false });
        }
    }
}
