//! The contents of a shard's mailbox: its messages, and the state that handles them.

use std::sync::Arc;

use downbeat_core::cluster::{Answer, Candidate, Demand, Grant, ModelOptions, Shard};
use downbeat_core::journal::Journal;
use downbeat_core::journal::cluster::Input;
use downbeat_core::{DeviceKind, ModelId, Time};

use crate::handler::Handler;
use crate::held_back::HeldBack;
use crate::latest_candidates::LatestCandidates;
use crate::matchmaker_state::{MatchmakerState, ToMatchmaker};

/// Aligned as [`crate::sync::Line`]: the state shares no cache line with its mutex. Every thread
/// that posts reads the mutex.
#[repr(align(128))]
pub struct ShardState<H: Handler> {
    pub shard: Journal<Shard>,
    pub requests: H::RequestTable,
    /// By model of any shard: the place of its candidates, for models of this shard.
    pub latest: Vec<Option<Arc<LatestCandidates>>>,
    /// The demand that the other shards last read.
    pub demand: Demand,
    /// The changes of demands that this shard has read.
    pub demand_changes: u64,
    /// Candidates that may not be sent yet. `None`: the matchmaker must know them all.
    pub held_back: Option<HeldBack>,
    /// The candidates that were gathered. Empty between two turns.
    pub news: Vec<News>,
    /// Scratch: models with a candidate that the matchmaker must be told of.
    pub changed: Vec<ModelId>,
}

/// A model, and its newest candidate for a kind of devices.
type News = (ModelId, DeviceKind, Option<Candidate>);

pub enum ToShard<E> {
    Event(E),
    Grant(Grant),
    AddModel {
        model: ModelId,
        options: Box<ModelOptions>,
        latest: Arc<LatestCandidates>,
    },
    RemoveModel(ModelId),
    /// A command to the shard alone.
    Command(Box<Input>),
    /// From now on the matchmaker must know every candidate.
    HoldNothingBack,
    Alarm,
}

impl<H: Handler> ShardState<H> {
    /// When the shard has something to do although no message comes.
    pub fn next_due(&self) -> Option<Time> {
        let due = self.shard.machine().poll_timeout().map(|(at, _)| at);
        let send = self.held_back.as_ref().and_then(HeldBack::next);
        due.into_iter().chain(send).min()
    }

    /// Collects the candidates that the matchmaker must know. Returns whether there is anything to tell
    /// it.
    pub fn gather(&mut self, now: Time) -> bool {
        let ShardState { shard, held_back, news, .. } = self;
        while let Some((model, kind, newest)) = shard.poll_candidate() {
            let told = match held_back {
                Some(held) => held.pass(now, model, newest),
                None => Some(newest),
            };
            news.extend(told.map(|told| (model, kind, told)));
        }
        if let Some(held) = held_back {
            while let Some(model) = held.pop_due(now) {
                let queue = shard.machine().queue(model);
                let newest = queue.and_then(|queue| queue.candidate(DeviceKind(0)));
                news.extend(held.pass(now, model, newest).map(|told| (model, DeviceKind(0), told)));
            }
        }
        !news.is_empty() || shard.machine().has_answers()
    }

    /// Hands the matchmaker, in which the thread is, all candidates and then all answers.
    pub fn hand_news(&mut self, now: Time, matchmaker: &mut MatchmakerState) {
        self.gather(now);
        self.pass_candidates(|place, (model, kind, told), newest| {
            place.follow(newest);
            matchmaker.matchmaker.inform_candidate(model, kind, told);
        });
        while let Some(answer) = self.shard.poll_answer() {
            matchmaker.take_answer(answer);
        }
    }

    /// Sends the matchmaker all candidates and then all answers by messages.
    pub fn send_news(&mut self, now: Time, mut send: impl FnMut(ToMatchmaker)) {
        self.gather(now);
        let mut changed = std::mem::take(&mut self.changed);
        self.pass_candidates(|place, (model, ..), newest| {
            if place.put(newest) {
                changed.push(model);
            }
        });
        // The matchmaker looks for the candidates of a model when it gets the model's answer.
        let answered = |model: ModelId| {
            let mut answers = self.shard.machine().answers();
            answers.any(|(Answer::Started { grant, .. } | Answer::Declined { grant })| grant.model == model)
        };
        changed.drain(..).filter(|model| !answered(*model)).for_each(|model| send(ToMatchmaker::Changed(model)));
        self.changed = changed;
        while let Some(answer) = self.shard.poll_answer() {
            send(ToMatchmaker::Answer(answer));
        }
    }

    /// Passes on the gathered news. Each call of `pass` gets a model's place for candidates, its news, and
    /// its newest candidates by kind.
    fn pass_candidates(
        &mut self,
        mut pass: impl FnMut(&LatestCandidates, News, &dyn Fn(DeviceKind) -> Option<Candidate>),
    ) {
        let ShardState { shard, latest, news, .. } = self;
        for (model, kind, told) in news.drain(..) {
            let Some(place) = &latest[model.0 as usize] else { continue };
            let queue = shard.machine().queue(model);
            let newest = |of: DeviceKind| if of == kind { told } else { queue.and_then(|queue| queue.candidate(of)) };
            pass(place, (model, kind, told), &newest);
        }
    }
}
