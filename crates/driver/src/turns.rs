//! The turns of mailboxes: a thread that has put a message into a mailbox handles it.

use std::sync::atomic::Ordering;

use downbeat_core::cluster::{Demand, Grant};
use downbeat_core::journal::cluster::Input;
use downbeat_core::{DeviceId, Time};

use crate::cluster::{Cluster, TURN};
use crate::handler::{Handler, LOG_BUFFER, Moment};
use crate::matchmaker_state::{MatchmakerState, ToMatchmaker};
use crate::round::Round;
use crate::shard_state::{ShardState, ToShard};
use crate::sync::MutexGuard;

/// The shard that a thread is in during a turn of the matchmaker: its index, and its state.
type Here<'a, H> = Option<(usize, &'a mut ShardState<H>)>;

impl<H: Handler> Cluster<H> {
    /// Looks after mailboxes until they are empty or other threads work there.
    pub(crate) fn work(&self, mut round: Round<'_, H>) {
        loop {
            // The matchmaker goes first, because waiting devices cost most. But a shard follows
            // each of its turns, and the shards take turns.
            if round.matchmaker && !(std::mem::take(&mut round.matched) && round.shards > 0) {
                self.meet_matchmaker(None, &mut round);
            } else if let Some(index) = round.next_shard() {
                let Some(mut state) = self.shards[index].try_enter() else { continue };
                self.shard_turn(index, &mut state, TURN, &mut round);
                self.leave_shard(index, state, &mut round);
            } else {
                return;
            }
        }
    }

    /// Runs the matchmaker for the messages that a shard's turn left there, and leaves the shard.
    pub(crate) fn leave_shard(&self, index: usize, mut state: MutexGuard<'_, ShardState<H>>, round: &mut Round<'_, H>) {
        if round.matchmaker
            && let Some(now) = self.meet_matchmaker(Some((index, &mut state)), round)
        {
            // Send the outputs of the matchmaker's grants.
            self.flush(index, self.moment_at(now), &mut state, round);
            self.end_turn(index, &mut state);
        }
        drop(state);
        if !self.shards[index].is_done() {
            round.shards |= 1 << index;
        }
    }

    /// Runs a turn of the matchmaker, unless another thread does. Returns the time of the turn. A
    /// thread that is still in a shard takes that shard's grants along: they and their answers need
    /// no message. The thread only tries to enter the matchmaker, so no thread waits for the shard
    /// meanwhile.
    fn meet_matchmaker(&self, here: Here<'_, H>, round: &mut Round<'_, H>) -> Option<Time> {
        (round.matchmaker, round.matched) = (false, true);
        let mut state = self.matchmaker.try_enter()?;
        let (_, now) = self.matchmaker_turn(&mut state, None, TURN, here, round);
        drop(state);
        round.matchmaker |= !self.matchmaker.is_done();
        Some(now)
    }

    /// The present time, and when the first device is expected to be free.
    pub fn moment(&self) -> Moment {
        self.moment_at(self.handler.now())
    }

    pub(crate) fn moment_at(&self, now: Time) -> Moment {
        Moment { now, expected_free: Time::from_nanos(self.expected_free_ns.0.load(Ordering::Relaxed)) }
    }

    /// Handles up to `most` messages of a shard, and sets its alarm. Returns the number of
    /// messages.
    pub(crate) fn shard_turn(
        &self,
        index: usize,
        state: &mut ShardState<H>,
        most: usize,
        round: &mut Round<'_, H>,
    ) -> usize {
        let mut messages = 0;
        while messages < most
            && let Some(message) = self.shards[index].pop()
        {
            self.handle_in_shard(index, state, self.moment(), message, round);
            messages += 1;
        }
        self.end_turn(index, state);
        messages
    }

    pub(crate) fn end_turn(&self, index: usize, state: &mut ShardState<H>) {
        self.alarm.set(index, state.shard.machine().poll_timeout().map_or(Time::MAX, |(at, _)| at));
        self.hand_over(&mut state.shard, LOG_BUFFER);
    }

    pub(crate) fn handle_in_shard(
        &self,
        index: usize,
        state: &mut ShardState<H>,
        moment: Moment,
        message: ToShard<H::Event>,
        round: &mut Round<'_, H>,
    ) {
        let now = moment.now;
        self.hear_demands(index, state, now);
        let shard = &mut state.shard;
        match message {
            ToShard::Event(event) => self.handler.handle(moment, shard, &mut state.requests, event),
            ToShard::Grant(grant) => shard.handle_grant(now, grant),
            ToShard::AddModel { model, options, latest } => {
                let index = model.0 as usize;
                if state.latest.len() <= index {
                    state.latest.resize_with(index + 1, || None);
                }
                state.latest[index] = Some(latest);
                shard.apply(now, Input::AddModel(model, options));
            }
            ToShard::RemoveModel(model) => {
                if shard.machine().queue(model).is_some() {
                    shard.apply(now, Input::RemoveModel(model));
                    // The shard declines the model's grants from now on. If its candidate stayed,
                    // the matchmaker would grant it again and again.
                    if let Some(latest) = state.latest[model.0 as usize].take() {
                        latest.clear();
                    }
                    self.forget_model(index);
                    self.matchmaker.put(ToMatchmaker::RemoveModel(model));
                    round.matchmaker = true;
                }
            }
            ToShard::Command(input) => {
                shard.apply(now, *input);
            }
            ToShard::Alarm => {
                shard.apply(now, Input::Timeout);
            }
        }
        self.flush(index, moment, state, round);
    }

    fn hear_demands(&self, index: usize, state: &mut ShardState<H>, now: Time) {
        let changes = self.demand_changes.0.load(Ordering::Acquire);
        if changes != state.demand_changes {
            state.demand_changes = changes;
            state.shard.apply(now, Input::SetOtherDemand(self.demand_beside(index)));
        }
    }

    /// The demand of all other shards' models on the devices.
    fn demand_beside(&self, index: usize) -> Demand {
        let others = self.demands.iter().enumerate().filter(|(shard, _)| *shard != index);
        others.fold(Demand::default(), |sum, (_, demand)| sum.plus(demand.get()))
    }

    /// Sends the results of an event: candidates, then answers, then decisions, for the reasons
    /// that [`downbeat_core::cluster::Shard`] gives.
    fn flush(&self, index: usize, moment: Moment, state: &mut ShardState<H>, round: &mut Round<'_, H>) {
        tell(state, |message| {
            self.matchmaker.put(message);
            round.matchmaker = true;
        });
        let ShardState { shard, requests, demand, .. } = state;
        while let Some(output) = shard.poll_output() {
            self.handler.carry_out(moment, shard, requests, output, round.context);
        }
        if self.shards.len() > 1 && shard.machine().demand() != *demand {
            *demand = shard.machine().demand();
            self.demands[index].put(*demand);
            self.demand_changes.0.fetch_add(1, Ordering::Release);
        }
    }

    /// Handles up to `most` messages of the matchmaker, beginning with `first`. Then grants batches
    /// and sets the matchmaker's alarm. Returns the number of messages and the time of the turn.
    pub(crate) fn matchmaker_turn(
        &self,
        state: &mut MatchmakerState,
        mut first: Option<ToMatchmaker>,
        most: usize,
        mut here: Here<'_, H>,
        round: &mut Round<'_, H>,
    ) -> (usize, Time) {
        let mut messages = 0;
        let mut now = None;
        while messages < most
            && let Some(message) = first.take().or_else(|| self.matchmaker.pop())
        {
            state.handle(message, || *now.insert(self.handler.now()));
            messages += 1;
        }
        // Reading the clock costs as much as updating a queue.
        let now = now.unwrap_or_else(|| self.handler.now());
        self.hear_loads(state, now);
        loop {
            state.matchmaker.handle_timeout(now);
            while let Some(grant) = state.matchmaker.poll_grant() {
                let shard = state.models[grant.model.0 as usize].0 as usize;
                if here.as_ref().is_some_and(|(index, _)| *index == shard) {
                    state.along.push(grant);
                } else {
                    self.shards[shard].put(ToShard::Grant(grant));
                    round.shards |= 1 << shard;
                }
            }
            // All grants are polled before one is answered, because a replay of the log does the
            // same.
            let Some((index, own)) = here.as_mut().filter(|_| !state.along.is_empty()) else { break };
            let mut along = std::mem::take(&mut state.along);
            for grant in along.drain(..) {
                self.take_along(*index, own, state, now, grant);
            }
            state.along = along;
        }
        let matchmaker = &mut state.matchmaker;
        let expected_free = matchmaker.expected_free().as_nanos();
        if self.expected_free_ns.0.load(Ordering::Relaxed) != expected_free {
            self.expected_free_ns.0.store(expected_free, Ordering::Relaxed);
        }
        let due = matchmaker.machine().poll_timeout().map_or(Time::MAX, |(at, _)| at);
        self.alarm.set(self.shards.len(), due);
        self.hand_over(matchmaker, LOG_BUFFER);
        (messages, now)
    }

    /// Handles a grant for the shard that the thread is in. [`Cluster::flush`] carries the
    /// decisions out later, so that they keep no thread from the matchmaker.
    fn take_along(&self, index: usize, own: &mut ShardState<H>, state: &mut MatchmakerState, now: Time, grant: Grant) {
        self.hear_demands(index, own, now);
        own.shard.handle_grant(now, grant);
        tell(own, |message| state.handle(message, || now));
    }

    fn hear_loads(&self, state: &mut MatchmakerState, now: Time) {
        let changes = self.load_changes.0.load(Ordering::Acquire);
        if changes == std::mem::replace(&mut state.load_changes, changes) {
            return;
        }
        let matchmaker = &mut state.matchmaker;
        for (device, load) in (0..).map(DeviceId).zip(self.loads.0.read().iter()) {
            let until = Time::from_nanos(load.load(Ordering::Relaxed));
            if matchmaker.machine().load(device) != until {
                matchmaker.apply(now, Input::SetLoad(device, until));
            }
        }
    }
}

/// Passes a shard's messages to the matchmaker, in the order in which it must get them.
fn tell<H: Handler>(state: &mut ShardState<H>, mut tell: impl FnMut(ToMatchmaker)) {
    let ShardState { shard, latest, .. } = state;
    while let Some((model, kind, candidate)) = shard.poll_candidate() {
        if let Some(latest) = &latest[model.0 as usize]
            && latest.put(kind, candidate)
        {
            tell(ToMatchmaker::Changed(model));
        }
    }
    while let Some(answer) = shard.poll_answer() {
        tell(ToMatchmaker::Answer(answer));
    }
}
