//! Loads and unloads models of a backend until it has the assigned ones.

use std::collections::{BTreeMap, BTreeSet};

use crate::assignment::Assignment;
use crate::message::{Doing, Loadable, Offer};

/// Decides which models a backend loads and unloads to follow its assignment.
///
/// The last offer lists the present models. A load ends before the first offer with the model. In
/// between, no new load of the model begins; the same holds for unloading.
#[derive(Debug, Default)]
pub(super) struct Loading {
    assigned: Option<Assignment>,
    /// Changes that are under way, or done but not yet in an offer.
    doing: BTreeMap<String, Doing>,
    /// By model: why its load failed.
    failed: BTreeMap<String, String>,
    /// Loads under way that begin again if they fail. Since they began, a model has freed its
    /// memory, or a new plan has come.
    outdated: BTreeSet<String>,
    waits: bool,
}

fn names(offer: &Offer) -> BTreeSet<&str> {
    offer.models.iter().map(|model| &*model.model).collect()
}

impl Loading {
    /// Takes a new assignment. Failed loads are tried again with the next plan.
    pub fn handle_assigned(&mut self, assigned: Assignment) {
        let before = self.assigned.replace(assigned).map(|before| before.plan);
        if before != self.assigned.as_ref().map(|assigned| assigned.plan) {
            self.try_again();
        }
    }

    /// Lets failed loads begin again, and loads under way if they fail. Returns whether any load
    /// had failed.
    fn try_again(&mut self) -> bool {
        let had_failed = !std::mem::take(&mut self.failed).is_empty();
        let loads = self.doing.iter().filter(|(_, doing)| **doing == Doing::Load);
        self.outdated = loads.map(|(model, _)| model.clone()).collect();
        had_failed
    }

    /// Takes the present models from a new offer.
    pub fn handle_offer(&mut self, offer: &Offer) {
        let there = names(offer);
        self.doing.retain(|model, doing| there.contains(&**model) != (*doing == Doing::Load));
    }

    /// Takes the result of a load or an unload. An unloaded model has freed its memory, and loads
    /// that failed for want of memory are tried again. Returns whether loads may begin, or the offer
    /// for schedulers has changed.
    pub fn handle_done(&mut self, model: &str, doing: Doing, result: Result<(), String>) -> bool {
        match (doing, result) {
            (Doing::Unload, Ok(())) => self.try_again(),
            // The model goes from the offer all the same, with the reason in its state.
            (Doing::Unload, Err(_)) => false,
            (Doing::Load, result) => {
                let is_outdated = self.outdated.remove(model);
                let Err(reason) = result else { return false };
                if self.doing.get(model) == Some(&Doing::Load) {
                    self.doing.remove(model);
                    if !is_outdated {
                        self.failed.insert(model.to_owned(), reason);
                    }
                }
                true
            }
        }
    }

    /// Whether an unload waits for the last batch of its model.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// The loads and unloads that must begin now. `runs`: whether there are batches of a model,
    /// which is not unloaded before they are done. No more batches come, because the scheduler that
    /// takes a model away plans none.
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

    /// The offer for schedulers: the present offer without models that will be unloaded.
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
