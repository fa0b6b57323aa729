//! The life cycle of models: load, reload without a gap, unload, follow the folder.

mod ensembles;
mod live;
mod load_thread;
mod model_entry;
mod moving;
mod needed_time;
mod open;
mod outcome_marks;
mod overlay;
mod service;
mod states;
mod what_if;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use downbeat_core::Duration;
use downbeat_core::cluster::AutoscaleSample;
use downbeat_engine_ort::GpuInfo;
use downbeat_host::gpu_watch::GpuWatch;
use downbeat_host::model_memory::ModelMemory;
use downbeat_host::run::row_judgement::RowJudgement;
use downbeat_host::run::watchdog::Watchdog;
use downbeat_host::scheduler::Driver;
use downbeat_host::shares::DeviceShares;
use downbeat_repository::{
    Fingerprint, ModelDefinition, ModelFormat, ModelRepositories, ModelRepository, RepositoryError,
};
use downbeat_service::budget::ByteBudget;
use downbeat_service::error::ServiceError;
use downbeat_service::metrics::trouble::Sample;
use downbeat_service::metrics::{Metrics, Totals};
use downbeat_service::options::{ModelControl, ServerOptions};
use downbeat_service::report::autoscale::AutoscaleWatch;
use downbeat_service::report::cluster_report::ClusterView;
use downbeat_service::report::live::LiveHistory;
use downbeat_service::service::LoadOverrides;
use ensembles::Ensembles;
use load_thread::{LoadFailure, LoadedModel, Served, load_on_thread};
use model_entry::{ModelEntry, VersionState, WAITING};
use needed_time::NeededTime;
use outcome_marks::OutcomeMarks;
use overlay::{Overlay, write_overlay};
use parking_lot::Mutex;

use crate::load::load_context::{LoadProgress, VersionFile};
use crate::load::loader::Loader;
use crate::load::python_options::ENVIRONMENT;
use crate::loaded_version::LoadedVersion;
use crate::measure::giving_way::Traffic;
use crate::measure::measuring_time::MeasuringTime;
use crate::measure::remeasuring::Unsettled;
use crate::serving::{Model, ServedRollout, Serving, unknown_model};

/// Models with files up to this size, bytes, do not wait for the loads of larger ones.
const SMALL: u64 = 16 << 20;

/// The priority of a thread that measures behind the service, as `nice` counts.
const LOWEST_PRIORITY: i32 = 19;
/// How long an unload waits for the last thread that holds the model.
const DROPPED_WITHIN_MS: u32 = 1_000;

/// The models of a repository and their states: the [`Service`](downbeat_service::service::Service) behind the
/// frontends. A clone is the same registry.
#[derive(Clone)]
pub struct Registry {
    options: Arc<ServerOptions>,
    repository: ModelRepositories,
    serving: Arc<Serving>,
    /// Runs the scheduler and the devices.
    pub driver: Arc<Driver>,
    loader: Arc<Loader>,
    metrics: Arc<Metrics>,
    /// The bytes that all requests in flight may hold.
    pub budget: Arc<ByteBudget>,
    model_memory: Arc<ModelMemory>,
    /// By device; none: models stay where the options put them.
    shares: Arc<[DeviceShares]>,
    /// Notified when lanes for another share are ready or have failed.
    pub shares_woken: Arc<tokio::sync::Notify>,
    autoscale: Option<Arc<AutoscaleWatch>>,
    needed_time: Arc<Mutex<NeededTime>>,
    /// The last hour of each model.
    history: Arc<Mutex<LiveHistory>>,
    /// The outcomes of the requests that what-ifs replay.
    marks: Arc<Mutex<OutcomeMarks>>,
    watchdog: Arc<Watchdog>,
    /// The GPUs; none: models run on the CPU.
    pub gpus: Arc<[GpuInfo]>,
    /// While there are GPUs.
    _gpu_watch: Option<Arc<GpuWatch>>,
    entries: Arc<Mutex<BTreeMap<String, Arc<ModelEntry>>>>,
    /// The ensembles that were loaded. Held while ensembles come into service or leave.
    ensembles: Arc<Mutex<Ensembles>>,
    /// A permit for each load that may go on beside others: of large models, and of small ones.
    loads: Arc<[tokio::sync::Semaphore; 2]>,
    started: Arc<AtomicBool>,
    /// The models to load at start, by name.
    wanted: Arc<[String]>,
    /// Whether a what-if is being answered.
    what_if: Arc<AtomicBool>,
    /// The backend's view of its cluster; none: the server answers its own clients.
    cluster: Arc<std::sync::OnceLock<Arc<dyn ClusterView>>>,
}

/// Makes the time for measuring of a load, from the budget of the options.
type Measuring = fn(Duration) -> MeasuringTime<'static>;

impl Registry {
    /// The model's definition in the repositories, for the devices of this server.
    ///
    /// # Errors
    /// If there is no such model, or its folder or configuration is wrong.
    pub fn definition(&self, name: &str) -> Result<ModelDefinition, RepositoryError> {
        self.repository.definition(name, None)
    }

    /// The devices that the options keep a model to; they override its configuration.
    pub fn chosen_devices(&self, name: &str) -> Option<&[usize]> {
        self.options.placement.get(name).map(Vec::as_slice)
    }

    /// The part that answers inferences.
    pub fn serving(&self) -> &Arc<Serving> {
        &self.serving
    }

    /// From now on the registry answers no requests of its own clients: batches come from the
    /// scheduler of a cluster. Called once.
    pub fn join_cluster(&self, view: Arc<dyn ClusterView>) {
        assert!(self.cluster.set(view).is_ok(), "a backend is in one cluster");
    }

    /// The bytes that all requests in flight may hold together.
    pub fn budget(&self) -> &Arc<ByteBudget> {
        &self.budget
    }

    /// The registry in which other parts register their metrics.
    pub fn metrics_registry(&self) -> &prometheus::Registry {
        self.metrics.registry()
    }

    /// The partitions of each device; none: devices are not divided.
    pub fn parts(&self) -> &[downbeat_engine::Part] {
        &self.loader.partitions().parts
    }

    /// The watchdog of the threads that run engines.
    pub fn watchdog(&self) -> &Watchdog {
        &self.watchdog
    }

    /// The models to measure again behind the service: none before the server has started or while
    /// it stops.
    pub fn to_measure_again(&self) -> Vec<String> {
        self.unsettled(|_| true)
    }

    /// The models among [`Registry::to_measure_again`] that serve by guesses.
    pub fn served_by_guesses(&self) -> Vec<String> {
        self.unsettled(|unsettled| unsettled == Unsettled::InPart)
    }

    fn unsettled(&self, wanted: impl Fn(Unsettled) -> bool) -> Vec<String> {
        if !self.started.load(Ordering::Acquire) || self.serving.is_draining() {
            return Vec::new();
        }
        let is_served = |name: &str, version: u64| {
            let served = self.serving.get(name).filter(|_| !self.is_overlaid(name));
            served.is_some_and(|served| served.versions.contains_key(&version))
        };
        let unsettled = self.loader.unsettled().into_iter();
        let unsettled = unsettled.filter(|((name, version), why)| wanted(*why) && is_served(name, *version));
        let mut names: Vec<String> = unsettled.map(|((name, _), _)| name).collect();
        names.dedup();
        names
    }

    /// The models in service without an SLO: their requests have no deadline unless they bring one.
    pub fn names_without_slo(&self) -> Vec<String> {
        let (served, pipelines) = (self.serving.all(), self.serving.pipelines());
        let definitions = served.iter().map(|served| &served.definition);
        let definitions = definitions.chain(pipelines.iter().map(|pipeline| &*pipeline.definition));
        let without = definitions.filter(|d| self.options.slo(&d.name, d.slo).is_none());
        without.map(|definition| definition.name.clone()).collect()
    }

    /// The verdicts on the rows of a model's versions in service, if they were checked.
    pub fn row_judgements(&self, name: &str) -> Vec<(u64, RowJudgement)> {
        let Some(served) = self.serving.get(name) else { return Vec::new() };
        served.versions.iter().filter_map(|(number, version)| Some((*number, version.rows.clone()?))).collect()
    }

    /// The models to load at start, by name.
    pub fn wanted_at_start(&self) -> &[String] {
        &self.wanted
    }

    /// The models to load at start, the smallest files first: a small model does not wait for a
    /// large one.
    pub fn wanted_by_size(&self) -> Vec<String> {
        let mut names = self.wanted.to_vec();
        names.sort_by_cached_key(|name| self.repository.fingerprint(name).bytes());
        names
    }

    /// Whether the server has no model by mistake: its repositories are empty, and the model
    /// control mode loads their models without being asked by clients.
    pub fn lacks_models(&self) -> bool {
        let by_request = match &self.options.model_control {
            ModelControl::Explicit { load } => !load.iter().any(|name| name == "*"),
            ModelControl::None | ModelControl::Poll { .. } => false,
        };
        !by_request && !self.options.allow_empty && self.wanted.is_empty() && self.serving.is_empty()
    }

    /// Notes that the loads at start have all succeeded or failed.
    pub fn set_started(&self) {
        self.started.store(true, Ordering::Release);
    }

    /// Loads (or reloads) a model. Its present versions serve until the new ones are warm. If the
    /// load fails they go on for good, and the failure is logged.
    ///
    /// # Errors
    /// The defect of the model.
    pub async fn load_model(
        &self,
        name: &str,
        overrides: LoadOverrides,
        progress: Arc<dyn LoadProgress>,
    ) -> Result<(), ServiceError> {
        // A load request has the model examined afresh.
        self.loader.forget_losses(name);
        let loaded = self.load_or_keep(name, overrides, progress, MeasuringTime::before_service, &[]).await;
        loaded.inspect_err(|error| tracing::error!(model = %name, %error, "not loaded"))
    }

    /// Loads a model in service again, from the same files and with the stored knowledge of it. If
    /// that fails the failure is logged, and the present versions go on.
    pub async fn load_again(&self, name: &str) {
        let measuring = MeasuringTime::before_service;
        if let Err(error) = self.load_or_keep(name, LoadOverrides::default(), Arc::new(()), measuring, &[]).await {
            tracing::error!(model = %name, %error, "not loaded");
        }
    }

    /// Loads the versions anew of which an answer was wrong because its request shared a batch:
    /// none is batched from then on. Files that came with a load request stay as they are, and
    /// their requests run alone already.
    pub async fn part_mixed_rows(&self) {
        for served in self.serving.all() {
            let name = &served.definition.name;
            let mixed = served.versions.values().filter(|version| version.has_mixed_rows());
            let new = mixed.filter(|version| self.loader.remember_mixed_rows(version)).count();
            if new > 0 && !self.is_overlaid(name) {
                self.load_again(name).await;
            }
        }
    }

    /// Whether a model's files came with a load request, so that they are not in the repository.
    fn is_overlaid(&self, name: &str) -> bool {
        self.entries.lock().get(name).is_some_and(|entry| entry.overlay.lock().is_some())
    }

    /// Loads and measures a model anew beside the one that serves. Decisions in service about its
    /// policy rest on the old measurements: the server forgets them. If the measurement fails, the log
    /// has the reason, and the present versions go on with their guesses.
    pub async fn measure_again(&self, name: &str) {
        self.loader.forget_losses(name);
        let measuring = MeasuringTime::behind_service;
        let measured = self.load_or_keep(name, LoadOverrides::default(), Arc::new(()), measuring, &[]).await;
        match measured {
            Ok(()) => tracing::info!(model = %name, "the model was measured behind the service"),
            Err(_) if self.serving.is_draining() => {}
            Err(error) => tracing::warn!(
                model = %name, reason = %error,
                "the model could not be measured behind the service; it goes on serving by guesses, which its requests \
                 correct"
            ),
        }
    }

    /// Loads versions again with `exclusive` whose policy `auto` chose and that have lost against
    /// it. Present requests are answered by the policy that they came to.
    pub async fn change_policies(&self) {
        for served in self.serving.all() {
            let has_lost = |version: &&Arc<LoadedVersion>| version.guard.as_ref().is_some_and(|guard| guard.has_lost());
            let lost = served.versions.values().filter(has_lost);
            if lost.filter(|version| self.loader.remember_loss(version)).count() > 0 {
                self.load_again(&served.definition.name).await;
            }
        }
    }

    async fn load_or_keep(
        &self,
        name: &str,
        mut overrides: LoadOverrides,
        progress: Arc<dyn LoadProgress>,
        measuring: Measuring,
        above: &[String],
    ) -> Result<(), ServiceError> {
        let is_there = self.check_is_loadable(name, &overrides)?;
        // No load holds its turn while it waits for the loads of other models.
        self.load_models_of_steps(name, &overrides, &progress, measuring, above).await?;
        let entry = self.entries.lock().entry(name.to_owned()).or_default().clone();
        let _busy = entry.busy.lock().await;
        // A model that is measured behind the service goes on as ready.
        let is_behind = measuring(Duration::ZERO).is_behind();
        if !is_behind {
            entry.set(0, VersionState::Loading, WAITING.to_owned());
        }
        let kept = self.keep_config(name, &entry, &mut overrides);
        let this = self.clone();
        let owned_name = name.to_owned();
        let begun = entry.clone();
        let load = move || {
            if !is_behind {
                begun.set(0, VersionState::Loading, String::new());
            }
            this.load_files(&owned_name, overrides, &*progress, measuring)
        };
        let loaded = self.load_in_turn(name, load).await;
        let LoadedModel { served, overlay, failures } = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                if is_there || self.serving.serves(name) {
                    return Err(self.after_failure(&entry, name, error));
                }
                // Only this request named the model: its entry goes.
                self.entries.lock().remove(name);
                return Err(error.error);
            }
        };
        for (version, reason) in &failures {
            tracing::error!(model = %name, version, %reason, "version not loaded");
        }
        let taken = self.take_in(name, &entry, served, &failures).await;
        let (now, before) = taken.map_err(|error| self.after_failure(&entry, name, error.into()))?;
        *entry.kept.lock() = kept;
        let overlay_before = std::mem::replace(&mut *entry.overlay.lock(), overlay);
        self.retire(name, before, now.as_deref()).await;
        drop(overlay_before);
        Ok(())
    }

    /// Puts a loaded model into service. Returns the model with files that serves now, and the one
    /// that served before.
    ///
    /// # Errors
    /// If an ensemble cannot serve.
    async fn take_in(
        &self,
        name: &str,
        entry: &ModelEntry,
        served: Served,
        failures: &BTreeMap<u64, String>,
    ) -> Result<(Option<Arc<Model>>, Option<Arc<Model>>), ServiceError> {
        Ok(match served {
            Served::Model(served) => {
                // First, so that the name is in service at any time.
                let before = self.serving.replace(name, Some(served.clone()));
                self.let_go_ensemble(name, entry, "replaced by a model with files").await;
                entry.settle(&served, failures);
                self.settle_ensembles(name);
                (Some(served), before)
            }
            Served::Ensemble(definition) => {
                self.take_in_ensemble(*definition)?;
                let before = self.serving.replace(name, None);
                if before.is_some() {
                    // Ensembles with this step had the model.
                    self.settle_ensembles(name);
                }
                (None, before)
            }
        })
    }

    /// Checks whether a load request can be followed. Returns whether the repositories have the
    /// model.
    ///
    /// # Errors
    /// `InvalidArgument` if no model may have this name; `NotFound` if neither a repository nor the
    /// request has the model's files.
    fn check_is_loadable(&self, name: &str, overrides: &LoadOverrides) -> Result<bool, ServiceError> {
        // A folder without a configuration may be none of the models, and yet is one with that of
        // the request.
        let is_there = self.names()?.iter().any(|known| known == name)
            || (overrides.config.is_some() && self.repository.has(name));
        if !is_there {
            ModelRepository::check_name(name).map_err(|error| ServiceError::InvalidArgument(error.to_string()))?;
        }
        if !is_there && overrides.files.is_empty() {
            let unknown = unknown_model(name, &self.names()?);
            return Err(ServiceError::NotFound(format!(
                "failed to load '{}', failed to poll from model repository: {unknown}",
                name.chars().take(128).collect::<String>()
            )));
        }
        Ok(is_there)
    }

    /// Puts the configuration of an earlier load request into this load, if that configuration
    /// still holds. Returns the configuration to keep for later loads, with the fingerprint of the
    /// model's files.
    fn keep_config(
        &self,
        name: &str,
        entry: &ModelEntry,
        overrides: &mut LoadOverrides,
    ) -> Option<(String, Fingerprint)> {
        if !overrides.files.is_empty() {
            return None;
        }
        let files = self.repository.fingerprint(name);
        if overrides.config.is_none()
            && let Some(config) = entry.kept_for(&files)
        {
            tracing::info!(
                model = %name,
                "the configuration of an earlier load request still applies, because the model's files are unchanged"
            );
            overrides.config = Some(config);
        }
        overrides.config.clone().map(|config| (config, files))
    }

    /// Loads a model once fewer than [`ServerOptions::load_threads`] of its kind, large or small,
    /// are being loaded.
    async fn load_in_turn(
        &self,
        name: &str,
        load: impl FnOnce() -> Result<LoadedModel, LoadFailure> + Send + 'static,
    ) -> Result<LoadedModel, LoadFailure> {
        let is_small = self.repository.fingerprint(name).bytes() <= SMALL;
        let _permit = self.loads[usize::from(is_small)].acquire().await;
        if self.serving.is_draining() {
            return Err(ServiceError::Unavailable("the server is shutting down".to_owned()).into());
        }
        load_on_thread(name, (self.watchdog.clone(), self.serving.clone()), load).await
    }

    /// Loads every selected version, and serves the ones that succeed. If the model is not served
    /// yet, or none loads, one failure fails the load.
    fn load_files(
        &self,
        name: &str,
        overrides: LoadOverrides,
        progress: &dyn LoadProgress,
        measuring: Measuring,
    ) -> Result<LoadedModel, LoadFailure> {
        for parameter in overrides.parameters.keys() {
            tracing::warn!(model = %name, %parameter, "the load parameter is unknown, and ignored");
        }
        let overlay = overlay_of(name, &overrides)?;
        let config = overrides.config.as_deref();
        let mut definition = match &overlay {
            None => self.repository.definition(name, config),
            Some(overlay) => {
                let repository = self.repository.at(overlay.path()).map_err(|error| poll_failed(name, &error))?;
                repository.definition(name, config)
            }
        }
        .map_err(|error| poll_failed(name, &error))?;
        self.check_uploaded_code(name, &definition, &overrides)?;
        for warning in &definition.warnings {
            tracing::warn!(model = %name, "{warning}");
        }
        if definition.ensemble.is_some() {
            let served = Served::Ensemble(Box::new(definition));
            return Ok(LoadedModel { served, overlay, failures: BTreeMap::new() });
        }
        let (versions, failures) = self.load_versions(&mut definition, overlay.is_none(), progress, measuring);
        let failed = |reason: String, failures: BTreeMap<u64, String>| {
            Err(LoadFailure { error: load_failed(name, &reason), versions: failures })
        };
        if versions.is_empty() {
            let reasons: Vec<String> = failures.iter().map(|(v, reason)| format!("version {v}: {reason}")).collect();
            let reason = if reasons.is_empty() { "no version to load".to_owned() } else { reasons.join("; ") };
            return failed(reason, failures);
        }
        // If the newest version is broken, the versions in service stay: an older version must not
        // become the newest in service.
        if let Some((newest, reason)) = failures.last_key_value()
            && versions.last_key_value().is_none_or(|(v, _)| v < newest)
            && self.serving.get(name).is_some()
        {
            self.serving.forget_queues(versions.values());
            return failed(format!("version {newest}: {reason}"), failures);
        }
        let mut model = Model::new(definition, versions);
        let files = (overlay.is_none() && model.definition.rollout.is_some()).then(|| {
            let mut hasher = DefaultHasher::new();
            self.repository.fingerprint(name).hash(&mut hasher);
            hasher.finish()
        });
        let loaded: Vec<u64> = model.versions.keys().copied().collect();
        let before = self.serving.get(name).and_then(|before| before.rollout.clone());
        let terms = model.definition.rollout.clone();
        let begun = terms.and_then(|terms| ServedRollout::begin(name, terms, &loaded, files, self.metrics.clone()));
        // The server may load a model again on its own account. The counts and the state stay.
        model.rollout = begun.map(|rollout| rollout.or_same(before));
        Ok(LoadedModel { served: Served::Model(Arc::new(model)), overlay, failures })
    }

    /// Checks that no load request brings code, unless the options allow that. A configuration that
    /// makes code of the repository a model, or that chooses the program that runs the code, is
    /// code too.
    fn check_uploaded_code(
        &self,
        name: &str,
        definition: &ModelDefinition,
        overrides: &LoadOverrides,
    ) -> Result<(), ServiceError> {
        let is_own = overrides.files.is_empty() && overrides.config.is_none();
        if definition.format != ModelFormat::Python || is_own || self.options.allow_uploaded_python {
            return Ok(());
        }
        let of_repository = if overrides.files.is_empty() { self.repository.definition(name, None).ok() } else { None };
        let runs_alike = of_repository.is_some_and(|own| {
            let environment = |definition: &ModelDefinition| definition.parameter(ENVIRONMENT).map(str::to_owned);
            own.format == ModelFormat::Python
                && own.config.default_model_filename == definition.config.default_model_filename
                && environment(&own) == environment(definition)
        });
        if runs_alike {
            return Ok(());
        }
        Err(load_failed(
            name,
            &"the request would run its own Python code on this machine; start the server with --allow-uploaded-python \
              if all clients that can load models may do so",
        ))
    }

    /// Loads every version of a definition. Returns the loaded versions, and why the others did not
    /// load.
    fn load_versions(
        &self,
        definition: &mut ModelDefinition,
        may_come_again: bool,
        progress: &dyn LoadProgress,
        measuring: Measuring,
    ) -> (BTreeMap<u64, Arc<LoadedVersion>>, BTreeMap<u64, String>) {
        let mut versions = BTreeMap::new();
        let mut failures = BTreeMap::new();
        let before = self.serving.get(&definition.name);
        let numbers: Vec<u64> = definition.versions.iter().map(|(number, _)| *number).collect();
        let stays = |number: u64| numbers.contains(&number);
        for (version, path) in definition.versions.clone() {
            let must_answer = before.as_ref().is_some_and(|before| before.answers(version, stays));
            let requests = Requests { serving: &self.serving, driver: &self.driver };
            let time = &measuring(self.options.profiling.budget).giving_way_to(&requests);
            if time.is_behind() {
                // Without the right to it, the load has the priority of other loads.
                let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), LOWEST_PRIORITY);
            }
            let repaired = None;
            let file = VersionFile { version, path: &path, may_come_again, must_answer, progress, time, repaired };
            match self.loader.load(definition, &file) {
                Ok(loaded) => {
                    versions.insert(version, loaded);
                }
                Err(error) => {
                    failures.insert(version, format!("{error:#}"));
                }
            }
        }
        (versions, failures)
    }

    /// Sets the states after a load that failed. Returns the error.
    fn after_failure(&self, entry: &ModelEntry, name: &str, failure: LoadFailure) -> ServiceError {
        match self.serving.get(name) {
            // The versions in service go on.
            Some(served) => {
                entry.settle(&served, &failure.versions);
                tracing::warn!(
                    model = %name, versions = ?served.versions.keys(),
                    "the versions in service stay in service"
                );
            }
            // The ensemble in service goes on.
            None if self.serving.pipeline(name).is_some() => self.settle_entry(name, entry),
            None => entry.set(0, VersionState::Unavailable, failure.error.to_string()),
        }
        self.settle_ensembles(name);
        failure.error
    }

    /// Takes a model out of service.
    ///
    /// # Errors
    /// `NotFound` if the repository has no such model.
    pub async fn unload_model(&self, name: &str) -> Result<(), ServiceError> {
        let known = self.entries.lock().get(name).cloned();
        let Some(entry) = known else {
            let names = self.names()?;
            if names.iter().any(|known| known == name) {
                return Ok(());
            }
            return Err(ServiceError::NotFound(unknown_model(name, &names)));
        };
        let _busy = entry.busy.lock().await;
        if self.let_go_ensemble(name, &entry, "unloaded").await {
            (*entry.overlay.lock(), *entry.kept.lock()) = (None, None);
            return Ok(());
        }
        // The reason is set first: a request that does not find the model then finds the reason.
        if let Some(served) = self.serving.get(name) {
            entry.set_all(served.versions.keys().copied(), VersionState::Unloading, "");
        }
        let before = self.serving.replace(name, None);
        self.settle_ensembles(name);
        let has_ended = self.retire(name, before.clone(), None).await;
        let reason = if has_ended { "unloaded" } else { "unloaded; a run of the model still goes on" };
        match &before {
            Some(before) => entry.set_all(before.versions.keys().copied(), VersionState::Unavailable, reason),
            None => entry.set(0, VersionState::Unavailable, reason.to_owned()),
        }
        // Ensembles give the reason too.
        self.settle_ensembles(name);
        *entry.overlay.lock() = None;
        *entry.kept.lock() = None;
        if has_ended {
            wait_until_dropped(before).await;
            return Ok(());
        }
        Err(ServiceError::Unavailable(format!(
            "model '{name}' is out of service, but a run of the model still goes on and cannot be ended; the run \
             keeps its memory and a core until the run ends by itself"
        )))
    }

    /// Waits for the last requests of a model out of service, and lets it go. Returns whether all
    /// its runs have ended.
    async fn retire(&self, name: &str, before: Option<Arc<Model>>, now: Option<&Model>) -> bool {
        let Some(before) = before else { return true };
        let has_ended = self.serving.retire(&before).await;
        for version in before.versions.keys() {
            if now.is_none_or(|now| !now.versions.contains_key(version)) {
                self.metrics.forget(name, &version.to_string());
            }
        }
        has_ended
    }

    /// Looks at the folder and applies the changes since `seen`. Returns the present fingerprints.
    pub async fn follow(
        &self,
        seen: BTreeMap<String, Fingerprint>,
        progress: &Arc<dyn LoadProgress>,
    ) -> BTreeMap<String, Fingerprint> {
        // Without an answer of their server, models stay as they are.
        self.refresh(None).await;
        let now = match self.fingerprints() {
            Ok(now) => now,
            Err(error) => {
                // An unreadable folder does not mean that its models are gone.
                tracing::error!(%error, "the repository cannot be read; all models stay as they are");
                return seen;
            }
        };
        for name in seen.keys().filter(|name| !now.contains_key(*name)) {
            tracing::info!(model = %name, "the model is gone from the repository: unloading");
            // Unknown means unloaded already.
            let _ = self.unload_model(name).await;
        }
        let changed = now.iter().filter(|(name, fingerprint)| seen.get(*name) != Some(*fingerprint));
        for names in self.in_load_order(changed.map(|(name, _)| name.clone()).collect()) {
            let loads = names.iter().map(|name| {
                tracing::info!(model = %name, "the model is new or changed in the repository: loading");
                self.load_model(name, LoadOverrides::default(), progress.clone())
            });
            // The reason of a failure is logged and stands in the index.
            futures_util::future::join_all(loads).await;
        }
        now
    }

    /// Has the supplies of models on other machines look for changes, for one model or for all. Logs
    /// the errors. Returns the first one.
    pub(super) async fn refresh(&self, name: Option<&str>) -> Option<RepositoryError> {
        if !self.repository.has_supplies() {
            return None;
        }
        let (repository, name) = (self.repository.clone(), name.map(str::to_owned));
        let looked = tokio::task::spawn_blocking(move || repository.refresh(name.as_deref())).await;
        let errors = looked.unwrap_or_default();
        for error in &errors {
            tracing::error!(%error, "models were not brought; the models in service stay");
        }
        errors.into_iter().next()
    }

    /// Fingerprints of the models' folders, as they are now.
    ///
    /// # Errors
    /// `Internal` if the repository cannot be read.
    pub fn fingerprints(&self) -> Result<BTreeMap<String, Fingerprint>, ServiceError> {
        Ok(self.names()?.into_iter().map(|name| (name.clone(), self.repository.fingerprint(&name))).collect())
    }

    /// The models that a cluster's scheduler may have the server load and unload, with the bytes of
    /// their files. These are all of its repositories, if the server was started in the explicit
    /// mode.
    pub fn loadable(&self) -> Vec<(String, u64)> {
        if !matches!(self.options.model_control, ModelControl::Explicit { .. }) {
            return Vec::new();
        }
        let found = self.fingerprints().inspect_err(|error| {
            tracing::error!(%error, "the repository cannot be read; the cluster's scheduler can load no models here")
        });
        // An ensemble has no device, and its models may be on other backends.
        let has_device = |name: &String| self.repository.models_of_steps(name, None).is_empty();
        let found = found.unwrap_or_default().into_iter().filter(|(name, _)| has_device(name));
        found.map(|(name, files)| (name, files.bytes())).collect()
    }

    /// Bytes for models that the smallest of its devices has; `None`: any number.
    pub fn device_memory(&self) -> Option<u64> {
        self.gpus.iter().map(|gpu| gpu.memory).min().or_else(|| self.model_memory.limit())
    }

    /// The most bytes that runs beside each other take of a device; `None`: a GPU, whose models keep
    /// the memory of their runs.
    pub fn run_memory(&self) -> Option<u64> {
        self.gpus.is_empty().then(|| self.model_memory.runs().unwrap_or(u64::MAX))
    }

    /// The models in the repository's folder.
    fn names(&self) -> Result<Vec<String>, ServiceError> {
        self.repository.names().map_err(|error| ServiceError::Internal(error.to_string()))
    }

    /// Divides the time of ensembles' requests among their steps anew. The caller does so once a
    /// second while the server is awake.
    pub fn weigh_steps(&self) {
        self.serving.weigh_steps(&self.metrics);
    }

    /// Takes a sample of the counters for the history and for the autoscale advice. The caller does so
    /// once a second while the server is awake, and before it reads the advice.
    pub fn watch_load(&self) {
        self.note_history();
        if let Some(watch) = &self.autoscale {
            let Totals { good, bad, busy } = self.metrics.totals();
            let busy = self.needed_time.lock().look(busy, &self.samples());
            let devices = u32::try_from(self.driver.hosts().len()).unwrap_or(u32::MAX);
            watch.look(self.driver.clock().now(), AutoscaleSample { good, bad, busy, devices }, &self.metrics);
        }
    }

    /// The outcomes of requests and the speed of each model version in service.
    pub fn samples(&self) -> Vec<Sample> {
        let of_model = |served: &Arc<Model>| {
            let slo = self.options.slo(&served.definition.name, served.definition.slo);
            served.versions.values().map(|version| version.sample(slo)).collect::<Vec<_>>()
        };
        self.serving.all().iter().flat_map(of_model).collect()
    }

    /// Writes the rest of the decision log, and ends it. Called at the end of the server.
    pub fn close_decision_log(&self) {
        self.driver.close_log();
    }

    /// All metrics in Prometheus' text format, as of now.
    ///
    /// # Errors
    /// If a metric cannot be written as text: a defect.
    pub fn metrics(&self) -> Result<String, prometheus::Error> {
        self.watch_load();
        let states = self.version_states();
        self.metrics.set_model_states(states.iter().map(|its| [&*its.name, &*its.version, its.state.name()]));
        let served = self.serving.all();
        let rollouts = served.iter().filter_map(|model| model.rollout.as_ref().map(|rollout| (model, rollout)));
        let states = rollouts.map(|(model, rollout)| [&*model.definition.name, rollout.state().name()]);
        self.metrics.set_rollout_states(states);
        for its in self.outcomes() {
            self.metrics.set_outcomes(&its.name, &its.version, its.slo, &its.counts);
        }
        for served in self.serving.all() {
            for loaded in served.versions.values() {
                self.metrics.set_pending(&loaded.name, &loaded.version, u64::from(loaded.waiting()));
                loaded.hosts.update_metrics();
                if let Some(restarts) = loaded.new_restarts() {
                    self.metrics.add_executor_restarts(&loaded.name, &loaded.version, restarts);
                }
            }
        }
        self.metrics.set_budget(&self.budget);
        self.metrics.set_to_measure(self.to_measure_again().len());
        self.metrics.set_abandoned(downbeat_service::work::work_pool::abandoned());
        self.model_memory.update_metrics(&self.metrics);
        self.watch_memory_of_gpus();
        self.metrics.render()
    }

    /// Reports in metrics the memory that the models in service have been given of each GPU.
    fn watch_memory_of_gpus(&self) {
        let models = self.serving.all();
        for device in 0..self.gpus.len() {
            let versions = models.iter().flat_map(|model| model.versions.values());
            let shares = versions.filter_map(|version| version.model.device_share(device));
            let [weights, sessions] = shares.fold([0u64; 2], |[weights, sessions], share| {
                [weights.saturating_add(share.weights), sessions.saturating_add(share.session_bytes)]
            });
            self.metrics.set_device_memory(&device.to_string(), [("weights", weights), ("sessions", sessions)]);
        }
    }
}

/// The requests of a server's clients.
struct Requests<'a> {
    serving: &'a Serving,
    driver: &'a Driver,
}

impl Traffic for Requests<'_> {
    fn quiet(&self) -> Option<u64> {
        let so_far = self.driver.requests();
        self.serving.is_idle().then_some(so_far)
    }
}

/// The error of a load that failed.
fn load_failed(model: &str, error: &dyn std::fmt::Display) -> ServiceError {
    ServiceError::InvalidArgument(format!("load failed for model '{model}': {error}"))
}

/// The error of a load whose configuration or files are wrong, in Triton's words.
fn poll_failed(model: &str, error: &dyn std::fmt::Display) -> ServiceError {
    ServiceError::InvalidArgument(format!("failed to load '{model}', failed to poll from model repository: {error}"))
}

/// The folder with the files of a load request, if the request brought files.
///
/// # Errors
/// `InvalidArgument` if the request has no configuration beside its files, or a file has no path in
/// the model's folder; `Internal` if the files cannot be written.
fn overlay_of(name: &str, overrides: &LoadOverrides) -> Result<Option<Overlay>, ServiceError> {
    if overrides.files.is_empty() {
        return Ok(None);
    }
    if overrides.config.is_none() {
        return Err(poll_failed(name, &"a load request with files needs a 'config' parameter beside them"));
    }
    let overlay = write_overlay(name, &overrides.files).map_err(|error| match poll_failed(name, &error) {
        ServiceError::InvalidArgument(words) if error.is::<std::io::Error>() => ServiceError::Internal(words),
        refused => refused,
    });
    overlay.map(Some)
}

/// Waits until no thread holds a version of a model any more, as a scrape of metrics does for a
/// moment. A version holds its memory until it is dropped, and the next load may need that memory.
async fn wait_until_dropped(before: Option<Arc<Model>>) {
    let versions: Vec<Weak<LoadedVersion>> =
        before.iter().flat_map(|model| model.versions.values().map(Arc::downgrade)).collect();
    drop(before);
    for _ in 0..DROPPED_WITHIN_MS {
        if versions.iter().all(|version| version.strong_count() == 0) {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    tracing::debug!("an unloaded model is still held by a thread");
}
