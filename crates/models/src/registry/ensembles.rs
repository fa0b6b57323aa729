//! Ensembles of the registry: in service as long as the models of their steps are.
//!
//! A load of an ensemble notes its definition. After each change of a model in service,
//! [`Registry::settle_ensembles`] looks at the noted ensembles that have this model. An ensemble whose
//! models are all there comes into service. An ensemble that lacks a model leaves, with the reason in
//! the index.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use downbeat_repository::{Ensemble, EnsembleStep, ModelDefinition};
use downbeat_service::error::ServiceError;
use downbeat_service::options::ModelControl;
use downbeat_service::service::LoadOverrides;
use futures_util::future::{BoxFuture, FutureExt};

use super::model_entry::{ModelEntry, VersionState};
use super::{LoadProgress, Measuring, Registry, load_failed};
use crate::serving::{FoundModel, Pipeline, StepPart, reached_from};

/// Deepest nesting of ensembles.
const DEEPEST: usize = 16;

/// The ensembles that were loaded, in service or not.
pub type Ensembles = BTreeMap<String, Arc<ModelDefinition>>;

impl Registry {
    /// Sorts models by the depth of nesting, so that an ensemble comes after the models of its steps.
    /// Returns a list for each depth that occurs. The order within a list stays.
    pub fn in_load_order(&self, names: Vec<String>) -> Vec<Vec<String>> {
        let mut known = BTreeMap::new();
        let mut by_depth: BTreeMap<usize, Vec<String>> = BTreeMap::new();
        for name in names {
            let depth = self.depth(&name, 0, &mut known);
            by_depth.entry(depth).or_default().push(name);
        }
        by_depth.into_values().collect()
    }

    /// How deep the ensembles are nested that a model has: 0 for a model with a file.
    fn depth(&self, name: &str, above: usize, known: &mut BTreeMap<String, usize>) -> usize {
        if let Some(depth) = known.get(name) {
            return *depth;
        }
        if above >= DEEPEST {
            return 0;
        }
        let models = self.repository.models_of_steps(name, None);
        let depth = models.iter().map(|model| 1 + self.depth(model, above + 1, known)).max().unwrap_or(0);
        known.insert(name.to_owned(), depth);
        depth
    }

    /// The way from an ensemble of the repositories over its steps back to itself; `None`: there is
    /// none.
    pub fn circle_of_steps(&self, name: &str) -> Option<String> {
        circle(name, |model| self.repository.models_of_steps(model, None))
    }

    /// Loads the models of an ensemble's steps that are not in service, if clients load models by
    /// request. `above` has the ensembles that this load is for. A model that cannot be loaded is
    /// logged; the ensemble names it too.
    ///
    /// # Errors
    /// `InvalidArgument` if the ensemble is one of its own steps, or ensembles are nested too deep.
    pub(super) async fn load_models_of_steps(
        &self,
        name: &str,
        overrides: &LoadOverrides,
        progress: &Arc<dyn LoadProgress>,
        measuring: Measuring,
        above: &[String],
    ) -> Result<(), ServiceError> {
        if !matches!(self.options.model_control, ModelControl::Explicit { .. }) {
            return Ok(());
        }
        let kept = || {
            let entry = self.entries.lock().get(name).cloned()?;
            entry.kept_for(&self.repository.fingerprint(name))
        };
        let config = overrides.config.clone().or_else(kept);
        let models = self.repository.models_of_steps(name, config.as_deref());
        if models.is_empty() {
            return Ok(());
        }
        let models_of = |model: &str| match model == name {
            true => models.clone(),
            false => self.repository.models_of_steps(model, None),
        };
        if let Some(circle) = circle(name, models_of) {
            return Err(load_failed(name, &format!("the ensemble is a step of itself: {circle}")));
        }
        let path: Vec<String> = above.iter().cloned().chain([name.to_owned()]).collect();
        if path.len() > DEEPEST {
            return Err(load_failed(
                name,
                &format!("ensembles are nested deeper than {DEEPEST}: {}", path.join(" -> ")),
            ));
        }
        let load = |model: String| {
            let (progress, path) = (progress.clone(), path.clone());
            async move { self.load_if_absent(&model, progress, measuring, &path).await }
        };
        futures_util::future::join_all(models.into_iter().map(load)).await;
        Ok(())
    }

    /// Loads a model, unless it is in service or comes into service by a load under way.
    fn load_if_absent<'a>(
        &'a self,
        name: &'a str,
        progress: Arc<dyn LoadProgress>,
        measuring: Measuring,
        above: &'a [String],
    ) -> BoxFuture<'a, ()> {
        async move {
            let entry = self.entries.lock().get(name).cloned();
            if let Some(entry) = entry.filter(|_| !self.serving.serves(name)) {
                drop(entry.busy.lock().await);
            }
            let is_there = self.names().is_ok_and(|names| names.iter().any(|known| known == name));
            if self.serving.serves(name) || !is_there {
                return;
            }
            let loaded = self.load_or_keep(name, LoadOverrides::default(), progress, measuring, above).await;
            if let Err(error) = loaded {
                tracing::error!(model = %name, %error, "not loaded");
            }
        }
        .boxed()
    }

    /// Takes a loaded ensemble into service. `definition` replaces the one in service only if it works,
    /// or none works now.
    ///
    /// # Errors
    /// `InvalidArgument`: a step does not fit, or its model is not ready.
    pub(super) fn take_in_ensemble(&self, definition: ModelDefinition) -> Result<(), ServiceError> {
        let name = definition.name.clone();
        let definition = Arc::new(definition);
        let fits = {
            let mut ensembles = self.ensembles.lock();
            let mut tried = ensembles.clone();
            tried.insert(name.clone(), definition.clone());
            let fits = self.parts_of(&definition, &tried).map(drop);
            if fits.is_ok() || !self.serving.serves(&name) {
                *ensembles = tried;
            }
            fits
        };
        if fits.is_ok() {
            self.settle_ensembles(&name);
        }
        fits.map_err(|reason| load_failed(&name, &reason))
    }

    /// Settles the ensembles that have a changed model. An ensemble whose models are all there comes
    /// into service, and an ensemble that lacks a model leaves. Other ensembles cannot have changed. To
    /// look at all of them would take time in the square: some hundred models load beside some hundred
    /// ensembles.
    pub(super) fn settle_ensembles(&self, changed: &str) {
        let ensembles = self.ensembles.lock();
        let has_step = |definition: &ModelDefinition, model: &str| {
            definition.ensemble.as_ref().is_some_and(|ensemble| ensemble.models().contains(model))
        };
        let with_step = |model: &str| {
            let all = ensembles.iter().filter(|(_, definition)| has_step(definition, model));
            all.map(|(name, _)| name.clone()).collect()
        };
        let names = reached_from(changed, with_step);
        let affected: Vec<_> = names.iter().filter_map(|name| ensembles.get(name)).collect();
        // An ensemble may be a step of another. There are no circles, so this ends.
        while affected.iter().filter(|definition| self.settle(definition, &ensembles)).count() > 0 {}
    }

    /// Settles one ensemble. Returns whether that has changed the models in service.
    fn settle(&self, definition: &Arc<ModelDefinition>, ensembles: &Ensembles) -> bool {
        let name = &definition.name;
        let present = self.serving.pipeline(name);
        let parts = self.parts_of(definition, ensembles);
        let is_same = |present: &Arc<Pipeline>| Arc::ptr_eq(&present.definition, definition);
        let entry: Arc<ModelEntry> = self.entries.lock().entry(name.clone()).or_default().clone();
        let versions = || definition.versions.iter().map(|(version, _)| *version);
        let now = self.driver.clock().now();
        match parts {
            Ok(parts) if present.as_ref().is_some_and(|present| is_same(present) && present.runs(&parts)) => false,
            Ok(parts) => {
                if let Some(present) = &present {
                    present.forget_weights(&self.metrics);
                }
                let known = (self.serving.next_pipeline(), present.as_deref());
                let Some(pipeline) = Pipeline::new(definition, parts, known, (&self.metrics, now)) else {
                    return false;
                };
                if present.is_none() {
                    tracing::info!(model = %name, "the ensemble is in service");
                }
                self.serving.replace_pipeline(name, Some(Arc::new(pipeline)));
                entry.set_all(versions(), VersionState::Ready, "");
                true
            }
            Err(reason) => {
                let was_there = self.serving.replace_pipeline(name, None);
                let was_there = was_there.inspect(|before| before.forget_weights(&self.metrics)).is_some();
                if was_there {
                    tracing::warn!(model = %name, %reason, "the ensemble left service");
                }
                entry.set_all(versions(), VersionState::Unavailable, &reason);
                was_there
            }
        }
    }

    /// Sets the states of an ensemble in service, after a load that failed.
    pub(super) fn settle_entry(&self, name: &str, entry: &ModelEntry) {
        if let Some(pipeline) = self.serving.pipeline(name) {
            entry.set_all(pipeline.versions.keys().copied(), VersionState::Ready, "");
        }
    }

    /// The models in service for the steps of an ensemble.
    ///
    /// # Errors
    /// Each step that does not fit or whose model is not in service.
    fn parts_of(&self, definition: &ModelDefinition, ensembles: &Ensembles) -> Result<Vec<StepPart>, String> {
        let Some(ensemble) = &definition.ensemble else { return Ok(Vec::new()) };
        let models_of = |model: &str| {
            let other = ensembles.get(model).and_then(|definition| definition.ensemble.as_deref());
            let ensemble = if model == definition.name { Some(&**ensemble) } else { other };
            let models = ensemble.into_iter().flat_map(Ensemble::models).map(str::to_owned);
            models.collect()
        };
        if let Some(circle) = circle(&definition.name, models_of) {
            return Err(format!("the ensemble is a step of itself: {circle}"));
        }
        let found: Vec<Result<FoundModel, String>> = ensemble.steps.iter().map(|step| self.find(step)).collect();
        let tensors: Vec<_> =
            found.iter().map(|found| found.as_ref().map(FoundModel::tensors).map_err(String::clone)).collect();
        definition.check_steps(&tensors).map_err(|error| error.to_string())?;
        Ok(found.iter().flatten().map(StepPart::of).collect())
    }

    /// The model in service for a step.
    ///
    /// # Errors
    /// Why there is none.
    fn find(&self, step: &EnsembleStep) -> Result<FoundModel, String> {
        let version = step.version.map(|version| version.to_string()).unwrap_or_default();
        if let Some(model) = self.serving.get(&step.model) {
            model.definition.check_runs_as_step()?;
            let loaded = model.version(&version).map_err(|error| error.to_string())?.clone();
            return Ok(FoundModel::Model(model, loaded));
        }
        let Some(pipeline) = self.serving.pipeline(&step.model) else {
            // The repository is read only for a model that was never loaded.
            let is_known = self.entries.lock().contains_key(&step.model);
            let names = if is_known { Vec::new() } else { self.names().unwrap_or_default() };
            return Err(match is_known || names.contains(&step.model) {
                true => self.why_not_served(&step.model).to_string(),
                false => crate::serving::unknown_model(&step.model, &names),
            });
        };
        pipeline.version(&version).map_err(|error| error.to_string())?;
        Ok(FoundModel::Pipeline(pipeline))
    }

    /// Takes an ensemble out of service. Returns false if there is no ensemble of this name.
    pub(super) async fn let_go_ensemble(&self, name: &str, entry: &ModelEntry, reason: &str) -> bool {
        let noted = self.ensembles.lock().remove(name);
        let Some(definition) = noted else { return false };
        let versions = || definition.versions.iter().map(|(version, _)| *version);
        entry.set_all(versions(), VersionState::Unloading, "");
        let before = self.serving.replace_pipeline(name, None);
        self.settle_ensembles(name);
        if let Some(before) = &before {
            before.forget_weights(&self.metrics);
            self.serving.retire_pipeline(before).await;
        }
        entry.set_all(versions(), VersionState::Unavailable, reason);
        true
    }

    /// A model, and the models of its steps and of theirs, if it is a loaded ensemble.
    pub(super) fn with_models_of_steps(&self, name: &str) -> Vec<String> {
        let ensembles = self.ensembles.lock();
        reached_from(name, |model| {
            let ensemble = ensembles.get(model).and_then(|definition| definition.ensemble.as_ref());
            ensemble.into_iter().flat_map(|ensemble| ensemble.models()).map(str::to_owned).collect()
        })
    }
}

/// The way from an ensemble over its steps back to itself; `None`: there is none. `models_of` has
/// the models of an ensemble's steps.
fn circle(name: &str, models_of: impl Fn(&str) -> BTreeSet<String>) -> Option<String> {
    let mut seen = BTreeSet::new();
    let longer = |path: &[String], model: String| path.iter().cloned().chain([model]).collect::<Vec<_>>();
    let mut open: Vec<Vec<String>> =
        models_of(name).into_iter().map(|model| longer(&[name.to_owned()], model)).collect();
    while let Some(path) = open.pop() {
        let last = path.last()?;
        if last == name {
            return Some(path.join(" -> "));
        }
        if seen.insert(last.clone()) {
            open.extend(models_of(last).into_iter().map(|model| longer(&path, model)));
        }
    }
    None
}
