//! Loads model versions: with their policies, or with `exclusive` if that fails.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use anyhow::Context;
use downbeat_core::device::{ChosenPolicy, WrittenSettings};
use downbeat_engine::HeldFile;
use downbeat_host::device::PolicyError;
use downbeat_host::run::row_judgement::RowJudgement;
use downbeat_repository::config::policy::PolicyName;
use downbeat_repository::{ModelDefinition, RowDependence, RowVerdict, VerdictSource};
use downbeat_service::report::policy_report::{AskedFor, PolicyReport};
use parking_lot::Mutex;

use crate::load::engines::executors;
use crate::load::load_context::{LoadContext, VersionFile};
use crate::load::loading::{LoadOutcome, Loading};
use crate::load::model_source::is_python;
use crate::load::policy_choice::{Chosen, Why};
use crate::load::repairing::{of_original, repaired, say_fixed_rows};
use crate::loaded_version::LoadedVersion;
use crate::measure::remeasuring::Unsettled;
use crate::partitions::Partitions;

/// Loads model versions. Slow: never on a thread that serves requests.
pub struct Loader {
    context: LoadContext,
    /// The versions in service with how many of their batches may run at once.
    wishes: Mutex<Vec<(Weak<LoadedVersion>, u32)>>,
    /// The versions whose policy has lost against `exclusive` in service, and that have `exclusive`
    /// until their model is loaded by request.
    lost: Mutex<BTreeMap<(String, u64), Chosen>>,
}

impl Loader {
    /// Makes a loader with the context that its loads share.
    pub fn new(context: LoadContext) -> Self {
        Loader { context, wishes: Mutex::default(), lost: Mutex::default() }
    }

    /// The partitions of devices, and the models on each.
    pub fn partitions(&self) -> &Partitions {
        &self.context.partitions
    }

    /// Loads, warms up and measures one version, and gives it a queue. Completes its model's
    /// definition.
    ///
    /// # Errors
    /// The defect of the file or its configuration, with a remedy.
    pub fn load(&self, definition: &mut ModelDefinition, file: &VersionFile<'_>) -> anyhow::Result<Arc<LoadedVersion>> {
        let repaired = repaired(definition, file)?;
        let path = repaired.as_ref().map(|repaired| repaired.path());
        let path = path.as_deref().unwrap_or(file.path);
        let loaded = self.load_file(definition, &VersionFile { path, repaired: repaired.clone(), ..*file });
        let loaded = loaded.map_err(|error| of_original(error, repaired.as_deref(), file))?;
        say_fixed_rows(definition, file);
        Ok(loaded)
    }

    /// Loads a version whose file needs no repair, or was repaired.
    fn load_file(
        &self,
        definition: &mut ModelDefinition,
        file: &VersionFile<'_>,
    ) -> anyhow::Result<Arc<LoadedVersion>> {
        let options = &self.context.options;
        let name = definition.name.clone();
        let exclusive = PolicyName::EXCLUSIVE.read(&WrittenSettings::new())?;
        let is_named = options.names_device_policy(&name, definition.device);
        let asked_for = if is_named { AskedFor::Model } else { AskedFor::All };
        let asked = match options.device_policy(&name, definition.device) {
            // The model's code gets whole batches of requests.
            other if is_python(definition) => {
                if is_named && other != PolicyName::EXCLUSIVE && other != PolicyName::AUTO {
                    tracing::warn!(model = %name, policy = %other, "a Python model has the policy exclusive");
                }
                return self.load_python(definition, file, &exclusive, asked_for);
            }
            asked => asked,
        };
        let lost = if asked == PolicyName::AUTO { self.lost(&name, file.version) } else { None };
        let (policy, report, why) = if asked == PolicyName::AUTO {
            let report = PolicyReport::asked(exclusive.name.name(), asked_for);
            let report = PolicyReport { asked: asked.to_string(), ..report };
            (exclusive.clone(), report.clone(), why_by_auto(file, report))
        } else {
            let chosen = options.chosen_policy(&name, definition.device);
            let chosen = chosen.map_err(|error| PolicyError::new(asked, error))?;
            let report = PolicyReport::asked(chosen.name.name(), asked_for);
            (chosen, report.clone(), Why::Asked(report))
        };
        let outcome = match lost {
            Some(chosen) => Ok(LoadOutcome::Better(Box::new(chosen))),
            None => self.load_by(&policy, why, definition, file),
        };
        let (why, refused) = match outcome {
            Ok(LoadOutcome::Better(chosen)) => match self.load_chosen(&chosen, definition, file) {
                Ok(outcome) => return self.ready(outcome, definition),
                Err(error) if chosen.policy == PolicyName::EXCLUSIVE => return Err(error),
                // `auto` chose this policy, not the user. If it cannot have the model, or lacks the
                // room, `exclusive` may serve it.
                Err(error) => {
                    let instead = chosen.with_exclusive(chosen.report.clone(), error.to_string());
                    (Why::Chosen(Box::new(instead)), error)
                }
            },
            Err(error) if asked != PolicyName::AUTO && may_be_left(&error, is_named) => {
                let policy = exclusive.name.to_string();
                (Why::Asked(PolicyReport { policy, reason: error.to_string(), ..report }), error)
            }
            outcome => return self.ready(outcome?, definition),
        };
        match self.load_by(&exclusive, why, definition, file) {
            // `exclusive` cannot serve it either: the error names the policy that was asked for.
            Err(error) if error.is::<PolicyError>() => Err(refused),
            outcome => {
                let loaded = self.ready(outcome?, definition)?;
                tracing::warn!(
                    model = %name, version = file.version, reason = %refused,
                    "the policy exclusive serves the model instead"
                );
                Ok(loaded)
            }
        }
    }

    /// Loads a version of a Python model.
    fn load_python(
        &self,
        definition: &mut ModelDefinition,
        file: &VersionFile<'_>,
        exclusive: &ChosenPolicy,
        asked_for: AskedFor,
    ) -> anyhow::Result<Arc<LoadedVersion>> {
        let why = Why::Asked(PolicyReport::asked(exclusive.name.name(), asked_for));
        let outcome = self.load_by(exclusive, why, definition, file)?;
        self.ready(outcome, definition)
    }

    /// Loads a version with the chosen policy.
    fn load_chosen(
        &self,
        chosen: &Chosen,
        definition: &ModelDefinition,
        file: &VersionFile<'_>,
    ) -> anyhow::Result<LoadOutcome> {
        let policy = self.context.options.settings_of(&definition.name, chosen.policy)?;
        self.load_by(&policy, Why::Chosen(Box::new(chosen.clone())), definition, file)
    }

    fn load_by(
        &self,
        policy: &ChosenPolicy,
        why: Why,
        definition: &ModelDefinition,
        file: &VersionFile<'_>,
    ) -> anyhow::Result<LoadOutcome> {
        let _held = HeldFile::new(file.path);
        let begin = |policy, why| Loading::begin(&self.context, policy, &why, definition.clone(), file)?.run(why);
        let found = match begin(policy, why)? {
            LoadOutcome::Stages(found) => found,
            outcome => return Ok(outcome),
        };
        // The cut of the first load was for the search of stages.
        let settings = policy.settings.with_staging(found.staging).unwrap_or_else(|| policy.settings.clone());
        begin(&ChosenPolicy { settings, ..policy.clone() }, Why::Staged(found))
    }

    /// The choice of `exclusive` for a version whose policy has lost.
    fn lost(&self, model: &str, version: u64) -> Option<Chosen> {
        self.lost.lock().get(&(model.to_owned(), version)).cloned()
    }

    /// A version that is loaded, with its definition.
    fn ready(&self, outcome: LoadOutcome, definition: &mut ModelDefinition) -> anyhow::Result<Arc<LoadedVersion>> {
        let LoadOutcome::Ready(loaded, completed) = outcome else {
            anyhow::bail!(
                "the load of a model with a given policy looked for another policy; this is a defect of Downbeat"
            );
        };
        *definition = *completed;
        if !loaded.hosts.is_routed && self.context.executors_grow() {
            self.grow(&loaded, self.context.at_once(definition))?;
        }
        Ok(loaded)
    }

    /// Adds the executors that a version wants, unless the options set their number
    /// ([`executors`]).
    fn grow(&self, loaded: &Arc<LoadedVersion>, at_once: u32) -> anyhow::Result<()> {
        let mut wishes = self.wishes.lock();
        let same = |other: &LoadedVersion| (&other.name, &other.version) == (&loaded.name, &loaded.version);
        // A replaced version gives up its place.
        wishes.retain(|(other, _)| other.upgrade().is_some_and(|other| !same(&other)));
        wishes.push((Arc::downgrade(loaded), at_once));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let executors = executors(wishes.iter().map(|(_, at_once)| *at_once), cores);
        self.context.driver.grow_to(executors).context("cannot start a thread for another executor")
    }

    /// Notes that a version's policy has lost against `exclusive`, which loads it from now on.
    /// Returns whether that is new.
    pub fn remember_loss(&self, loaded: &LoadedVersion) -> bool {
        let (Some(chosen), Ok(version)) = (&loaded.chosen, loaded.version.parse()) else { return false };
        let mut lost = self.lost.lock();
        let Entry::Vacant(place) = lost.entry((loaded.name.clone(), version)) else { return false };
        let report = loaded.policy();
        let last = report.guard.as_ref().and_then(|guard| guard.last).map(|last| last.to_string());
        let last = last.unwrap_or_default();
        let reason = format!("{} lost against exclusive twice in a row; the last time {last}", report.policy);
        tracing::warn!(
            model = %loaded.name, version = %loaded.version, %reason,
            "the model goes back to the policy exclusive"
        );
        place.insert(chosen.with_exclusive(report, reason));
        true
    }

    /// A request has changed the answer of another that shared its batch: from the next load on the
    /// version's requests run alone. Whether that is new.
    pub fn remember_mixed_rows(&self, loaded: &LoadedVersion) -> bool {
        let Some(RowJudgement { verdict, key: Some(key), .. }) = &loaded.rows else { return false };
        // Another model with the same file may have been found before.
        if loaded.is_parted.swap(true, Ordering::Relaxed) {
            return false;
        }
        let reason = format!("an answer in service was wrong because its request shared a batch (before: {verdict})");
        let verdict = RowVerdict { rows: RowDependence::Mixed, source: VerdictSource::Service, reason };
        self.context.keep_rows(Some(key), &verdict);
        true
    }

    /// Forgets that a model's policies have lost: `auto` chooses afresh.
    pub fn forget_losses(&self, model: &str) {
        self.lost.lock().retain(|(name, _), _| name != model);
    }

    /// The versions, by model, that must be measured again.
    pub fn unsettled(&self) -> BTreeMap<(String, u64), Unsettled> {
        self.context.unsettled.lock().clone()
    }
}

/// Whether `exclusive` serves a model that its policy cannot have. That holds if the policy is not
/// named for just this model, or if no trial could tell whether the policy suits the model.
fn may_be_left(error: &anyhow::Error, is_named: bool) -> bool {
    error.downcast_ref::<PolicyError>().is_some_and(|error| error.is_untried || !is_named)
}

/// Why a model under `auto` is loaded with `exclusive` first.
fn why_by_auto(file: &VersionFile<'_>, report: PolicyReport) -> Why {
    if file.may_come_again {
        return Why::Look(report);
    }
    let reason =
        "the model's files came with a load request, so the server could not load the model again if a policy lost";
    Why::Asked(PolicyReport { reason: reason.to_owned(), ..report })
}
