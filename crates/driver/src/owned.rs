//! Parts of the scheduler that one thread has for itself.

use std::ops::{Deref, DerefMut};

use downbeat_core::cluster::{Matchmaker, ModelQueue};
use downbeat_core::{BatchId, DeviceId, ModelId, Time};

use crate::cluster::Cluster;
use crate::handler::Handler;
use crate::matchmaker_state::MatchmakerState;
use crate::round::Round;
use crate::shard_state::{ShardState, ToShard};
use crate::sync::MutexGuard;

impl<H: Handler> Cluster<H> {
    /// Makes the calling thread the shard's own, after waiting for the thread in the shard. No
    /// other thread works in the shard until the caller leaves.
    pub fn own_shard(&self, shard: usize) -> OwnShard<'_, H> {
        OwnShard { cluster: self, index: shard, state: self.shards[shard].enter() }
    }

    /// Makes the calling thread the matchmaker's own, like [`Cluster::own_shard`].
    pub fn own_matchmaker(&self) -> OwnMatchmaker<'_, H> {
        OwnMatchmaker { cluster: self, state: self.matchmaker.enter() }
    }
}

/// A shard that belongs to this thread. The thread must take the shard's turns, because no other
/// thread does.
pub struct OwnShard<'a, H: Handler> {
    cluster: &'a Cluster<H>,
    index: usize,
    state: MutexGuard<'a, ShardState<H>>,
}

impl<'a, H: Handler> OwnShard<'a, H> {
    /// Handles up to `most` messages, such as [`crate::TURN`], and everything that is due. Returns
    /// the number of messages.
    pub fn turn(&mut self, most: usize) -> usize {
        let mut context = Default::default();
        let mut round = Round::new(&mut context);
        let mut messages = 0;
        loop {
            let (handled, moment) = self.cluster.shard_turn(self.index, &mut self.state, most - messages, &mut round);
            let is_due = self.state.next_due().is_some_and(|at| at <= moment.now);
            if is_due {
                self.cluster.handle_in_shard(self.index, &mut self.state, moment, ToShard::Alarm, &mut round);
            }
            let goes_on = self.state.shard.machine().has_answers();
            if handled > 0 || is_due {
                self.cluster.send_news(&mut self.state, moment.now, &mut round);
            }
            self.cluster.end_turn(self.index, moment, &mut self.state, &mut round);
            messages += handled;
            if !goes_on || messages >= most {
                return messages;
            }
        }
    }

    /// Whether the mailbox is empty.
    pub fn is_done(&self) -> bool {
        self.cluster.shards[self.index].is_done()
    }

    /// Handles an event of this thread as of `now`, past the mailbox.
    pub fn handle(&mut self, now: Time, event: H::Event) {
        let moment = self.cluster.moment_at(now);
        let mut context = Default::default();
        let round = &mut Round::new(&mut context);
        self.cluster.handle_in_shard(self.index, &mut self.state, moment, ToShard::Event(event), round);
        self.cluster.send_news(&mut self.state, now, round);
        self.cluster.carry_out(self.index, moment, &mut self.state, round);
    }

    /// The handler of events and decisions.
    pub fn handler(&self) -> &'a H {
        &self.cluster.handler
    }

    /// When the shard has something to do even without a message. [`OwnShard::turn`] does it.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.state.next_due()
    }

    /// Items that wait for a model of the shard.
    pub fn queued(&self, model: ModelId) -> u32 {
        self.state.shard.machine().queue(model).map_or(0, ModelQueue::queued)
    }

    /// Reports a batch as done, see [`Cluster::complete`].
    pub fn complete(&self, device: DeviceId, batch: BatchId) {
        self.cluster.complete(device, batch, &mut H::Context::default());
    }
}

impl<H: Handler> Deref for OwnShard<'_, H> {
    type Target = H::RequestTable;

    fn deref(&self) -> &H::RequestTable {
        &self.state.requests
    }
}

impl<H: Handler> DerefMut for OwnShard<'_, H> {
    fn deref_mut(&mut self) -> &mut H::RequestTable {
        &mut self.state.requests
    }
}

/// The matchmaker, owned by this thread. The thread must take the matchmaker's turns, because no
/// other thread does.
pub struct OwnMatchmaker<'a, H: Handler> {
    cluster: &'a Cluster<H>,
    state: MutexGuard<'a, MatchmakerState>,
}

impl<H: Handler> OwnMatchmaker<'_, H> {
    /// Handles up to `most` messages, such as [`crate::TURN`], and makes all possible grants.
    /// Returns the number of messages. A number below `most`: the mailbox was empty in between.
    pub fn turn(&mut self, most: usize) -> usize {
        let mut context = Default::default();
        self.cluster.matchmaker_turn(&mut self.state, None, most, None, &mut Round::new(&mut context)).0
    }

    /// Whether the mailbox is empty.
    pub fn is_done(&self) -> bool {
        self.cluster.matchmaker.is_done()
    }
}

impl<H: Handler> Deref for OwnMatchmaker<'_, H> {
    type Target = Matchmaker;

    fn deref(&self) -> &Matchmaker {
        self.state.matchmaker.machine()
    }
}
