//! The contents of the matchmaker's mailbox: its messages, and the state that handles them.

use std::sync::Arc;

use downbeat_core::cluster::{Answer, Grant, Matchmaker};
use downbeat_core::journal::Journal;
use downbeat_core::journal::cluster::{Input, Reply};
use downbeat_core::{BatchId, DeviceId, ModelId, Time};

use crate::latest_candidates::LatestCandidates;

/// Aligned as [`crate::sync::Line`], so that it shares no cache line with its mutex.
#[repr(align(128))]
pub struct MatchmakerState {
    pub matchmaker: Journal<Matchmaker>,
    /// By model: its shard, and the place of its newest candidates.
    pub models: Vec<(u32, Arc<LatestCandidates>)>,
    /// The place for models that were removed, without candidates.
    pub gone: Arc<LatestCandidates>,
    /// The changes of loads that the matchmaker has read.
    pub load_changes: u64,
    /// Grants that a thread takes along. Empty between two turns.
    pub along: Vec<Grant>,
}

pub enum ToMatchmaker {
    /// A model has a new newest candidate.
    Changed(ModelId),
    Answer(Answer),
    Completed(DeviceId, BatchId),
    AddModel {
        /// [`Input::AddLimit`] or [`Input::AddSharedLimit`].
        limit: Box<Input>,
        shard: u32,
        latest: Arc<LatestCandidates>,
    },
    RemoveModel(ModelId),
    /// A command to the matchmaker alone.
    Command(Box<Input>),
    Alarm,
}

impl MatchmakerState {
    /// Handles a message. A message without a time of its own uses the time of the event before.
    pub fn handle(&mut self, message: ToMatchmaker, now: impl FnOnce() -> Time) {
        let matchmaker = &mut self.matchmaker;
        match message {
            ToMatchmaker::Changed(model) => self.models[model.0 as usize].1.take(|kind, newest| {
                // During a write there is nothing to do: the writer will announce the candidate.
                if let Ok(candidate) = newest {
                    matchmaker.inform_candidate(model, kind, candidate);
                }
            }),
            ToMatchmaker::Answer(answer) => self.take_answer(answer),
            ToMatchmaker::Completed(device, batch) => {
                matchmaker.completed(now(), device, batch);
            }
            ToMatchmaker::AddModel { limit, shard, latest } => {
                let model = matchmaker.apply(matchmaker.machine().time(), *limit);
                let expected = Reply::Model(ModelId(self.models.len() as u32));
                assert!(model == expected, "models are announced in the order of their ids");
                self.models.push((shard, latest));
            }
            ToMatchmaker::RemoveModel(model) => {
                matchmaker.apply(matchmaker.machine().time(), Input::RemoveModel(model));
                self.models[model.0 as usize].1 = self.gone.clone();
            }
            ToMatchmaker::Command(input) => {
                matchmaker.apply(matchmaker.machine().time(), *input);
            }
            ToMatchmaker::Alarm => {}
        }
    }
    /// Takes the answer to a grant, and the candidates that the shard left before, or newer ones. If
    /// a newer one is being written, its writer will announce it.
    pub fn take_answer(&mut self, answer: Answer) {
        let (Answer::Started { grant, .. } | Answer::Declined { grant }) = answer;
        let MatchmakerState { matchmaker, models, .. } = self;
        let latest = &models[grant.model.0 as usize].1;
        // No candidate is here if a thread in both the shard and the matchmaker has handed it over.
        if latest.is_told() {
            latest.take(|kind, newest| matchmaker.inform_candidate(grant.model, kind, newest.unwrap_or(None)));
        }
        matchmaker.handle_answer(answer);
    }
}
