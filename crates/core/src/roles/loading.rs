//! How a backend comes to have the models that it is told to have.

use std::collections::{BTreeMap, BTreeSet};

use super::assignment::Assignment;
use super::message::{Loadable, Offer};

/// What a backend is to do with a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Doing {
    /// Load it.
    Load,
    /// Unload it, once its last batch is done.
    Unload,
}

/// What a backend that is told which models to have does about it.
///
/// What is there is what was offered last. Between the end of a load and the first offer with the model, or of an unload and the first one without it, nothing is begun anew.
#[derive(Debug, Default)]
pub(super) struct Loading {
    assigned: Option<Assignment>,
    /// Under way, or done and not seen yet.
    doing: BTreeMap<String, Doing>,
    failed: BTreeMap<String, String>,
    waits: bool,
}

fn names(offer: &Offer) -> BTreeSet<&str> {
    offer.models.iter().map(|model| &*model.model).collect()
}

impl Loading {
    /// It is told what to have. What failed is tried again with the next plan.
    pub fn handle_assigned(&mut self, assigned: Assignment) {
        let before = self.assigned.replace(assigned).map(|before| before.plan);
        if before != self.assigned.as_ref().map(|assigned| assigned.plan) {
            self.failed.clear();
        }
    }

    /// What is there has changed.
    pub fn handle_offer(&mut self, offer: &Offer) {
        let there = names(offer);
        self.doing.retain(|model, doing| there.contains(&**model) != (*doing == Doing::Load));
    }

    /// What was begun has come to its end.
    pub fn handle_done(&mut self, model: &str, result: Result<(), String>) {
        if let (Some(Doing::Load), Err(reason)) = (self.doing.get(model), result) {
            self.doing.remove(model);
            self.failed.insert(model.to_owned(), reason);
        }
    }

    /// Whether something waits for the last batch of its model.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// What is to be begun. `runs`: whether there are batches of a model, which is not unloaded before they are done; no more come, as whoever says that it is to go plans none.
    pub fn begin(&mut self, offer: &Offer, runs: impl Fn(&str) -> bool) -> Vec<(String, Doing)> {
        self.waits = false;
        let Some(assigned) = &self.assigned else { return Vec::new() };
        let there = names(offer);
        let mut begun = Vec::new();
        for Loadable { model, .. } in &offer.repository {
            let is_loaded = there.contains(&**model) || self.doing.get(model) == Some(&Doing::Load);
            let doing = match (assigned.has(model), is_loaded) {
                (true, false) if !self.doing.contains_key(model) && !self.failed.contains_key(model) => Doing::Load,
                (false, true) if !self.doing.contains_key(model) && !runs(model) => Doing::Unload,
                (false, true) if !self.doing.contains_key(model) => {
                    self.waits = true;
                    continue;
                }
                _ => continue,
            };
            self.doing.insert(model.clone(), doing);
            begun.push((model.clone(), doing));
        }
        begun
    }

    /// What schedulers are told of what is there: without what is on its way out.
    pub fn said(&self, offer: &Offer) -> Offer {
        let Some(assigned) = &self.assigned else { return offer.clone() };
        let mut said = offer.clone();
        let is_leaving = |model: &str| !assigned.has(model) || self.doing.get(model) == Some(&Doing::Unload);
        said.models.retain(|model| offer.loadable(&model.model).is_none() || !is_leaving(&model.model));
        for loadable in &mut said.repository {
            loadable.failed = self.failed.get(&loadable.model).cloned();
        }
        said.assigned = Some(assigned.clone());
        said
    }
}
