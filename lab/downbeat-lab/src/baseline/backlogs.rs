//! The backlogs of all models.

use downbeat_core::cluster::{DropReason, IndexedHeap, ModelOptions, Reject, Request};
use downbeat_core::{ModelId, Time};

use super::backlog::{Backlog, Profile, Waiting};
use super::fleet::Fleet;

/// The backlogs of all models, and when the next of their heads becomes hopeless.
#[derive(Debug, Default)]
pub(super) struct Backlogs {
    models: Vec<BacklogModel>,
    /// By model: the time when its head becomes hopeless.
    expiries: IndexedHeap<Time>,
    /// Requests that wait, of all models.
    waiting: usize,
}

/// A model, with its waiting requests.
#[derive(Debug)]
pub(super) struct BacklogModel {
    pub profile: Profile,
    pub backlog: Backlog,
}

impl Backlogs {
    pub fn add(&mut self, options: &ModelOptions) -> ModelId {
        self.models.push(BacklogModel { profile: Profile::new(options), backlog: Backlog::default() });
        ModelId(self.models.len() as u32 - 1)
    }

    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Returns the models, by number.
    pub fn models(&self) -> &[BacklogModel] {
        &self.models
    }

    /// Takes in a request that a batch of one could still meet if it started at `start`. The caller
    /// then calls [`Backlogs::refresh`].
    pub fn admit(&mut self, now: Time, start: Time, request: &Request) -> Result<(), Reject> {
        let BacklogModel { profile, .. } = self.models.get(request.model.0 as usize).ok_or(Reject::UnknownModel)?;
        profile.admit(now, start, request)?;
        self.push(request.model.0, Waiting { deadline: request.deadline, id: request.id });
        Ok(())
    }

    /// Adds a request that was taken in before.
    pub fn push(&mut self, model: u32, request: Waiting) {
        self.models[model as usize].backlog.push(request);
        self.waiting += 1;
    }

    /// Takes `size` requests of a model behind its first `passed`. The caller then calls
    /// [`Backlogs::refresh`].
    pub fn take(&mut self, model: u32, passed: usize, size: u32) -> impl Iterator<Item = Waiting> + '_ {
        self.waiting -= size as usize;
        self.models[model as usize].backlog.take(passed, size)
    }

    /// Drops the hopeless requests of a model, and records when the next one becomes hopeless.
    pub fn refresh(&mut self, now: Time, model: u32, fleet: &mut Fleet) {
        let BacklogModel { profile, backlog } = &mut self.models[model as usize];
        while let Some(dropped) = backlog.pop_hopeless(now, profile) {
            self.waiting -= 1;
            fleet.drop(dropped.id, ModelId(model), DropReason::Hopeless);
        }
        match backlog.hopeless_at(profile) {
            Some(at) => self.expiries.set(model, at),
            None => {
                self.expiries.remove(model);
            }
        }
    }

    /// Returns a model whose head has become hopeless by now.
    pub fn expired(&self, now: Time) -> Option<u32> {
        self.expiries.peek().filter(|(at, _)| *at <= now).map(|(_, model)| model)
    }

    /// Returns the time when [`Backlogs::expired`] will return a model.
    pub fn next_expiry(&self) -> Option<Time> {
        self.expiries.peek().map(|(at, _)| at)
    }
}
