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
                let (_, moment) = self.shard_turn(index, &mut state, TURN, &mut round);
                self.leave_shard(index, moment, state, &mut round);
            } else {
                return;
            }
        }
    }

    /// Tells the matchmaker the news of a shard's turn, carries the decisions out, and leaves the
    /// shard. `moment` is that of the last event.
    pub(crate) fn leave_shard(
        &self,
        index: usize,
        mut moment: Moment,
        mut state: MutexGuard<'_, ShardState<H>>,
        round: &mut Round<'_, H>,
    ) {
        if state.gather(moment.now) || round.matchmaker {
            let mut met = self.meet_matchmaker(Some((index, &mut state)), round);
            if met.is_none() {
                self.send_news(&mut state, moment.now, round);
            }
            if round.matchmaker && met.is_none() {
                // The thread in there may have left before it saw the messages.
                met = self.meet_matchmaker(Some((index, &mut state)), round);
            }
            if let Some(now) = met {
                moment = self.moment_at(now);
            }
        }
        self.end_turn(index, moment, &mut state, round);
        drop(state);
        if !self.shards[index].is_done() {
            round.shards |= 1 << index;
        }
    }

    /// Runs a turn of the matchmaker, unless another thread does. Returns the time of the turn. A
    /// thread that is still in a shard hands over the shard's news and takes its grants along: they
    /// and their answers need no message. The thread only tries to enter the matchmaker, so no
    /// thread waits for the shard meanwhile.
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

    /// Handles up to `most` messages of a shard, but none after a granted batch, which must go out.
    /// Returns the number of messages, and the moment of the last.
    pub(crate) fn shard_turn(
        &self,
        index: usize,
        state: &mut ShardState<H>,
        most: usize,
        round: &mut Round<'_, H>,
    ) -> (usize, Moment) {
        let (mut messages, mut moment) = (0, None);
        while messages < most
            && !state.shard.machine().has_answers()
            && let Some(message) = self.shards[index].pop()
        {
            self.handle_in_shard(index, state, *moment.insert(self.moment()), message, round);
            messages += 1;
        }
        (messages, moment.unwrap_or_else(|| self.moment()))
    }

    /// Carries the decisions out, and sets the shard's alarm.
    pub(crate) fn end_turn(&self, index: usize, moment: Moment, state: &mut ShardState<H>, round: &mut Round<'_, H>) {
        self.carry_out(index, moment, state, round);
        self.alarm.set(index, state.next_due().unwrap_or(Time::MAX));
        self.hand_over(&mut state.shard, LOG_BUFFER);
    }

    /// Carries the decisions out. The matchmaker knows the news, for the reasons that
    /// [`downbeat_core::cluster::Shard`] gives.
    pub(crate) fn carry_out(&self, index: usize, moment: Moment, state: &mut ShardState<H>, round: &mut Round<'_, H>) {
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

    /// Sends the matchmaker the news of a shard by messages.
    pub(crate) fn send_news(&self, state: &mut ShardState<H>, now: Time, round: &mut Round<'_, H>) {
        state.send_news(now, |message| {
            self.matchmaker.put(message);
            round.matchmaker = true;
        });
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
                    if let Some(held) = &mut state.held_back {
                        held.forget(model);
                    }
                    self.forget_model(index);
                    self.matchmaker.put(ToMatchmaker::RemoveModel(model));
                    round.matchmaker = true;
                }
            }
            ToShard::Command(input) => {
                shard.apply(now, *input);
            }
            ToShard::HoldNothingBack => self.hold_nothing_back(state, now, round),
            ToShard::Alarm => {
                shard.apply(now, Input::Timeout);
            }
        }
    }

    #[cold]
    fn hold_nothing_back(&self, state: &mut ShardState<H>, now: Time, round: &mut Round<'_, H>) {
        self.send_news(state, now, round);
        // At the end of time every candidate may be sent.
        self.send_news(state, Time::MAX, round);
        state.held_back = None;
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
        if let Some((_, own)) = &mut here {
            if messages < most {
                own.hand_news(now, state);
            } else {
                // A message that still waits may be about one of these models: its addition.
                self.send_news(own, now, round);
                here = None;
            }
        }
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

    /// Handles a grant for the shard that the thread is in. [`Cluster::end_turn`] carries the
    /// decisions out later, so that they keep no thread from the matchmaker.
    fn take_along(&self, index: usize, own: &mut ShardState<H>, state: &mut MatchmakerState, now: Time, grant: Grant) {
        self.hear_demands(index, own, now);
        own.shard.handle_grant(now, grant);
        own.hand_news(now, state);
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
