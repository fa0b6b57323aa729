//! What the matchmaker's mailbox is for: its messages, and the state that they are worked off on.

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
    /// By model: its shard, and where its newest candidate is.
    pub models: Vec<(u32, Arc<LatestCandidates>)>,
    /// Where models that were removed have theirs: none.
    pub gone: Arc<LatestCandidates>,
    /// The changes of loads that it has heard of.
    pub load_changes: u64,
    /// Grants that a thread takes along. Empty between two turns.
    pub along: Vec<Grant>,
}

pub enum ToMatchmaker {
    /// A model's newest candidate is another.
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
    /// What is for the matchmaker alone.
    Command(Box<Input>),
    Alarm,
}

impl MatchmakerState {
    /// Works a message off. What has no time of its own is as of the event before.
    pub fn handle(&mut self, message: ToMatchmaker, now: impl FnOnce() -> Time) {
        let matchmaker = &mut self.matchmaker;
        match message {
            ToMatchmaker::Changed(model) => self.models[model.0 as usize].1.take(|kind, newest| {
                // If it is being written, the writer will say so once more.
                if let Ok(candidate) = newest {
                    matchmaker.inform_candidate(model, kind, candidate);
                }
            }),
            ToMatchmaker::Answer(answer) => {
                let (Answer::Started { grant, .. } | Answer::Declined { grant }) = answer;
                // What the shard left before it answered, or something newer. If that is being written, it will be told.
                self.models[grant.model.0 as usize].1.take(|kind, newest| {
                    matchmaker.inform_candidate(grant.model, kind, newest.unwrap_or(None));
                });
                matchmaker.handle_answer(answer);
            }
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
}
