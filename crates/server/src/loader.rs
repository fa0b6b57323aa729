//! Loads model versions: by which policy, and by `exclusive` where that cannot be or has lost.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use anyhow::Context;
use downbeat_core::device::{ChosenPolicy, WrittenSettings};
use downbeat_repository::ModelDefinition;
use downbeat_repository::policy::PolicyName;
use parking_lot::Mutex;

use crate::engines::executors;
use crate::host::PolicyError;
use crate::load_context::{LoadContext, VersionFile};
use crate::loaded_version::LoadedVersion;
use crate::loading::{LoadOutcome, Loading};
use crate::policy_choice::Why;
use crate::policy_report::{AskedFor, PolicyReport};

/// Loads model versions. Slow: never on a thread that serves requests.
pub struct Loader {
    context: LoadContext,
    /// The versions in service with how many of their batches may run at once.
    wishes: Mutex<Vec<(Weak<LoadedVersion>, u32)>>,
    /// The versions whose policies have lost against `exclusive`.
    losses: Mutex<BTreeMap<(String, u64), PolicyReport>>,
}

impl Loader {
    /// A loader with what its loads share.
    pub fn new(context: LoadContext) -> Self {
        Loader { context, wishes: Mutex::default(), losses: Mutex::default() }
    }

    /// Loads, warms up and measures one version, and gives it a queue. Completes its model's definition.
    ///
    /// # Errors
    /// What is wrong with the file or its configuration, and what to do about it.
    pub fn load(&self, definition: &mut ModelDefinition, file: &VersionFile<'_>) -> anyhow::Result<Arc<LoadedVersion>> {
        let options = &self.context.options;
        let name = definition.name.clone();
        let exclusive = PolicyName::EXCLUSIVE.read(&WrittenSettings::new())?;
        let is_named = options.names_device_policy(&name, definition.device);
        let asked_for = if is_named { AskedFor::Model } else { AskedFor::All };
        let asked = options.device_policy(&name, definition.device);
        let (policy, report, why) = if asked == PolicyName::AUTO {
            let report = PolicyReport::asked(exclusive.name.name(), asked_for);
            let report = PolicyReport { asked: asked.to_string(), ..report };
            (exclusive.clone(), report.clone(), self.why_by_auto(&name, file, report))
        } else {
            let chosen = options.chosen_policy(&name, definition.device);
            let chosen = chosen.map_err(|error| PolicyError { policy: asked, reason: error.to_string() })?;
            let report = PolicyReport::asked(chosen.name.name(), asked_for);
            (chosen, report.clone(), Why::Asked(report))
        };
        let (report, refused) = match self.load_by(&policy, why, definition, file) {
            Ok(LoadOutcome::Better(chosen)) => {
                let report = chosen.report.clone();
                let policy = options.settings_of(&name, report.policy.parse()?)?;
                match self.load_by(&policy, Why::Chosen(chosen), definition, file) {
                    Ok(outcome) => return self.ready(outcome, definition),
                    // Nobody asked for this policy: what it cannot have, or has no room for, `exclusive` may.
                    Err(error) => (report, error),
                }
            }
            Err(error) if error.is::<PolicyError>() && asked != PolicyName::AUTO && !is_named => (report, error),
            outcome => return self.ready(outcome?, definition),
        };
        let report = PolicyReport { policy: exclusive.name.to_string(), reason: refused.to_string(), ..report };
        match self.load_by(&exclusive, Why::Asked(report), definition, file) {
            // Nor can it be served without: then why it is not served as it was asked for.
            Err(error) if error.is::<PolicyError>() => Err(refused),
            outcome => {
                let loaded = self.ready(outcome?, definition)?;
                tracing::warn!(model = %name, version = file.version, reason = %refused, "served by the policy exclusive instead");
                Ok(loaded)
            }
        }
    }

    fn load_by(
        &self,
        policy: &ChosenPolicy,
        why: Why,
        definition: &ModelDefinition,
        file: &VersionFile<'_>,
    ) -> anyhow::Result<LoadOutcome> {
        Loading::begin(&self.context, policy, &why, definition.clone(), file)?.run(why)
    }

    /// Why a model is loaded by `exclusive` first that is to have whichever policy suits it.
    fn why_by_auto(&self, model: &str, file: &VersionFile<'_>, report: PolicyReport) -> Why {
        if let Some(lost) = self.losses.lock().get(&(model.to_owned(), file.version)) {
            return Why::Asked(lost.clone());
        }
        if file.may_come_again {
            return Why::Look(report);
        }
        let reason = "its files came with a load request, so that it could not be loaded again if a policy lost";
        Why::Asked(PolicyReport { reason: reason.to_owned(), ..report })
    }

    /// A version that is loaded, with its definition.
    fn ready(&self, outcome: LoadOutcome, definition: &mut ModelDefinition) -> anyhow::Result<Arc<LoadedVersion>> {
        let LoadOutcome::Ready(loaded, completed) = outcome else {
            anyhow::bail!("a policy that was asked for is not looked at: this is a defect");
        };
        *definition = *completed;
        if !loaded.hosts.is_routed && self.context.executors_grow() {
            self.grow(&loaded, self.context.at_once(definition))?;
        }
        Ok(loaded)
    }

    /// Adds the executors that a version wants, as nobody chose their number ([`executors`]).
    fn grow(&self, loaded: &Arc<LoadedVersion>, at_once: u32) -> anyhow::Result<()> {
        let mut wishes = self.wishes.lock();
        let same = |other: &LoadedVersion| (&other.name, &other.version) == (&loaded.name, &loaded.version);
        // One that is replaced gives its place up.
        wishes.retain(|(other, _)| other.upgrade().is_some_and(|other| !same(&other)));
        wishes.push((Arc::downgrade(loaded), at_once));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let executors = executors(wishes.iter().map(|(_, at_once)| *at_once), cores);
        self.context.driver.grow_to(executors).context("no thread for another executor")
    }

    /// Remembers that a version's policy has lost, so that it is loaded by `exclusive` until somebody asks for it; whether that is new.
    pub fn remember_loss(&self, loaded: &LoadedVersion) -> bool {
        let LoadedVersion { name, version, .. } = loaded;
        let Ok(number) = version.parse() else { return false };
        let mut losses = self.losses.lock();
        if losses.contains_key(&(name.clone(), number)) {
            return false;
        }
        let report = loaded.policy();
        let last = report.guard.as_ref().and_then(|guard| guard.last).map(|last| last.to_string());
        let reason = format!(
            "{} lost against exclusive twice in a row; the last time {}",
            report.policy,
            last.unwrap_or_default()
        );
        tracing::warn!(model = %name, %version, %reason, "goes back to the policy exclusive");
        let report = PolicyReport { policy: PolicyName::EXCLUSIVE.to_string(), reason, ..report };
        losses.insert((name.clone(), number), report);
        true
    }

    /// Forgets which policies of a model have lost: they are looked at afresh.
    pub fn forget_losses(&self, model: &str) {
        self.losses.lock().retain(|(name, _), _| name != model);
    }

    /// The models that were measured on a machine with other things to do, by name.
    pub fn unsettled(&self) -> Vec<String> {
        self.context.unsettled.lock().iter().cloned().collect()
    }
}
