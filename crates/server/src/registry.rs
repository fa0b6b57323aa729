//! The life cycle of models: load, reload without a gap, unload, follow the folder.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use downbeat_core::tensor::Signature;
use downbeat_core::{Duration, Time};
use downbeat_engine::GpuInfo;
use downbeat_protocol::inference as pb;
use downbeat_protocol::{InferRequest, InferResponse};
use downbeat_repository::{Fingerprint, ModelDefinition, ModelRepositories, ModelRepository, RepositoryError};
use parking_lot::Mutex;

use crate::autoscale::{AutoscaleStatus, AutoscaleWatch};
use crate::budget::ByteBudget;
use crate::clock::Clock;
use crate::decision_log::DecisionLog;
use crate::driver::Driver;
use crate::engines::Engines;
use crate::error::ServiceError;
use crate::gpu_watch::GpuWatch;
use crate::host::{PolicyGuard, REMEMBERED, Timeline};
use crate::loader::{LoadProgress, Loader};
use crate::memory;
use crate::metrics::Metrics;
use crate::model_memory::ModelMemory;
use crate::options::{MAX_SHARDS, MOST_LOAD_THREADS, ModelControl, RunLimits, ServerOptions};
use crate::partitions::Partitions;
use crate::placement::{self, Placement};
use crate::policy_report::PolicyReport;
use crate::service::{LoadOverrides, ModelIndexEntry, ModelMetadata, Service};
use crate::serving::{Served, Serving, statistics, unknown_model};
use crate::watchdog::{Owner, Watchdog};

/// Why a model is not there yet whose turn to be loaded has not come.
const WAITING: &str = "waiting to be loaded";

/// Where a model version stands, as the repository index says it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Loading,
    Ready,
    Unloading,
    Unavailable,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Phase::Loading => "LOADING",
            Phase::Ready => "READY",
            Phase::Unloading => "UNLOADING",
            Phase::Unavailable => "UNAVAILABLE",
        }
    }
}

/// One model of the repository, in service or not.
#[derive(Default)]
struct Entry {
    /// Held while the model is loaded or unloaded: one after the other, in the order asked for.
    busy: tokio::sync::Mutex<()>,
    /// Where its versions stand; version 0: the model as a whole.
    phases: Mutex<BTreeMap<u64, (Phase, String)>>,
    /// The files it was loaded from, where a load request brought its own.
    overlay: Mutex<Option<Overlay>>,
    /// The configuration that a load request brought for the files in the repository, and what those were then: as in Triton, it holds for later
    /// loads without one, as long as the files stay as they are and the model is not unloaded.
    kept: Mutex<Option<(String, Fingerprint)>>,
}

/// A model that is ready to be taken into service.
struct Loaded {
    served: Served,
    overlay: Option<Overlay>,
    /// The versions that did not load, and why.
    failures: BTreeMap<u64, String>,
}

/// Why a model is not taken into service.
struct LoadFailure {
    error: ServiceError,
    /// The versions that were tried and did not load, and why.
    versions: BTreeMap<u64, String>,
}

/// A load that goes on.
struct Loading {
    model: String,
    /// Where its outcome goes; `None`: it was left behind.
    done: Mutex<Option<tokio::sync::oneshot::Sender<Result<Loaded, LoadFailure>>>>,
}

impl Loading {
    /// Hands the outcome over; gives it back if nobody waits for it.
    fn finish(&self, outcome: Result<Loaded, LoadFailure>) -> Option<Result<Loaded, LoadFailure>> {
        match self.done.lock().take() {
            Some(done) => done.send(outcome).err(),
            None => Some(outcome),
        }
    }

    fn failure(&self, reason: &str) -> LoadFailure {
        ServiceError::Unavailable(format!("model '{}' is not loaded: {reason}", self.model)).into()
    }
}

impl Owner for Loading {
    fn leave_behind(&self, reason: &str) {
        drop(self.finish(Err(self.failure(reason))));
    }
}

impl From<ServiceError> for LoadFailure {
    fn from(error: ServiceError) -> Self {
        LoadFailure { error, versions: BTreeMap::new() }
    }
}

/// A folder of files that came with a load request; removed with the last user.
type Overlay = tempfile::TempDir;

/// The models of a repository and what they are doing: the [`Service`] behind the frontends. A clone is the same registry.
#[derive(Clone)]
pub struct Registry {
    options: Arc<ServerOptions>,
    repository: ModelRepositories,
    serving: Arc<Serving>,
    driver: Arc<Driver>,
    loader: Arc<Loader>,
    metrics: Arc<Metrics>,
    budget: Arc<ByteBudget>,
    model_memory: Arc<ModelMemory>,
    autoscale: Option<Arc<AutoscaleWatch>>,
    watchdog: Arc<Watchdog>,
    gpus: Arc<[GpuInfo]>,
    /// While there are GPUs.
    _gpu_watch: Option<Arc<GpuWatch>>,
    entries: Arc<Mutex<BTreeMap<String, Arc<Entry>>>>,
    /// A permit for each load that may go on beside others.
    loads: Arc<tokio::sync::Semaphore>,
    started: Arc<AtomicBool>,
    /// The models to load at start, by name.
    wanted: Arc<[String]>,
}

impl Registry {
    /// The registry of the repositories that the options name, with its engines and devices; nothing is loaded yet.
    ///
    /// # Errors
    /// If a repository cannot be read, the engine is not there, or the decision log cannot be written.
    pub fn open(options: Arc<ServerOptions>) -> anyhow::Result<Self> {
        let repository = ModelRepositories::open(&options.repositories)?.map(|repository| {
            repository
                .with_auto_complete(options.auto_complete_config)
                .with_default_max_batch_size(options.default_max_batch_size)
        });
        let scan = repository.scan()?;
        for warning in &scan.warnings {
            tracing::warn!("{warning}");
        }
        let wanted = match &options.model_control {
            ModelControl::Explicit { load } if !load.iter().any(|name| name == "*") => load.clone(),
            _ => scan.names.clone(),
        };
        if let ModelControl::None = options.model_control {
            let groups = options.device.named().map(|name| ("[[device.groups]]", name));
            let placed = options.placement.keys().map(|name| ("[placement]", name.as_str()));
            let unknown = groups.chain(placed).find(|(_, name)| !wanted.iter().any(|wanted| wanted == name));
            if let Some((part, unknown)) = unknown {
                let hint = downbeat_repository::did_you_mean(unknown, wanted.iter().map(String::as_str));
                anyhow::bail!("{part}: the repository {} has no model '{unknown}'{hint}", shown(&options.repositories));
            }
        }
        let waiting = wanted
            .iter()
            .map(|name| {
                let entry = Entry::default();
                entry.set(0, Phase::Loading, WAITING.to_owned());
                (name.clone(), Arc::new(entry))
            })
            .collect();
        let engines = Engines::choose(&options)?;
        let partitions = Partitions::divide(&options, &*engines.onnx)?;
        let gpus: Arc<[GpuInfo]> = engines.gpus.clone().into();
        let ordinals: Vec<u32> = gpus.iter().map(|gpu| gpu.ordinal).collect();
        // Nobody says how many executors there are to be, but where models are.
        let asked = match options.devices {
            0 if ordinals.is_empty() => placement::devices_named(&options),
            asked => asked,
        };
        let is_divided = ordinals.is_empty() && partitions.are_there();
        anyhow::ensure!(
            !is_divided || placement::devices_named(&options) == 0,
            "the CPU is divided ([device] partitions), where [models.NAME] partition says which part a model is on; leave [placement] and --plan out"
        );
        let devices = engines.devices(asked, &partitions)?;
        let chosen = if ordinals.is_empty() { asked } else { devices };
        let options = Arc::new(ServerOptions {
            devices: chosen,
            placement: placement::chosen(&options, devices, &scan.names)?,
            ..ServerOptions::clone(&options)
        });
        let places: BTreeMap<String, Vec<u32>> = options
            .placement
            .iter()
            .map(|(name, on)| (name.clone(), on.iter().filter_map(|device| ordinals.get(*device).copied()).collect()))
            .collect();
        let repository =
            repository.map(|repository| repository.with_gpus(ordinals.clone()).with_places(places.clone()));
        // What is wrong with one is said when it is loaded.
        let known: Vec<_> = scan.names.iter().filter_map(|name| repository.definition(name, None).ok()).collect();
        let placement =
            Placement::new(options.placement.clone(), devices, &gpus, &known, partitions.parts().len().max(1))?;
        let metrics = Arc::new(Metrics::new()?);
        let watched = u32::try_from(devices).unwrap_or(u32::MAX);
        let autoscale = options.autoscale.as_ref().map(|o| AutoscaleWatch::new(o, watched)).transpose()?.map(Arc::new);
        let shards = options.scheduler_shards().clamp(1, MAX_SHARDS);
        let log = options.decision_log.as_deref();
        let log = log.map(|folder| DecisionLog::open(folder, shards, &metrics)).transpose()?;
        let clock = Clock::start();
        let watchdog = Watchdog::start(run_limits(&options, &engines), clock, engines.onnx.clone())?;
        let driver = Driver::start(clock, partitions.parts(), placement.kinds(), shards, &metrics, &watchdog, log)?;
        let driver = Arc::new(driver);
        let limit = options.max_in_flight_bytes.map_or_else(memory::default_budget, |bytes| bytes as u64);
        let model_memory = ModelMemory::new(&options, limit);
        let (on, said) = (driver.clone(), metrics.clone());
        let loader = Loader::new(options.clone(), engines, partitions, on, placement, said, model_memory.clone());
        let loader = Arc::new(loader);
        let budget = ByteBudget::new(limit);
        let gpu_watch = || GpuWatch::start(&gpus, metrics.gpus().clone(), options.gpu_metrics_every).map(Arc::new);
        let gpu_watch = (!gpus.is_empty()).then(gpu_watch).transpose()?;
        let serving = Serving::new(options.clone(), driver.clone(), loader.clone(), budget.clone(), watchdog.clone());
        let serving = Arc::new(serving);
        let loads = Arc::new(tokio::sync::Semaphore::new(options.load_threads.clamp(1, MOST_LOAD_THREADS)));
        Ok(Registry {
            options,
            repository,
            driver,
            serving,
            loader,
            metrics,
            budget,
            model_memory,
            autoscale,
            watchdog,
            gpus,
            _gpu_watch: gpu_watch,
            entries: Arc::new(Mutex::new(waiting)),
            loads,
            started: Arc::default(),
            wanted: wanted.into(),
        })
    }

    /// What the repositories say of a model, for the devices of this server.
    ///
    /// # Errors
    /// If there is no such model, or its folder or configuration is wrong.
    pub fn definition(&self, name: &str) -> Result<ModelDefinition, RepositoryError> {
        self.repository.definition(name, None)
    }

    /// The devices that the options keep a model to, whatever its configuration says.
    pub fn chosen_devices(&self, name: &str) -> Option<&[usize]> {
        self.options.placement.get(name).map(Vec::as_slice)
    }

    /// The GPUs that models run on; none: they run on the CPU.
    pub fn gpus(&self) -> &[GpuInfo] {
        &self.gpus
    }

    /// Whether clients may load and unload, as in Triton's model control modes.
    fn check_control(&self, done: &str) -> Result<(), ServiceError> {
        let mode = match self.options.model_control {
            ModelControl::Explicit { .. } => return Ok(()),
            ModelControl::None => "none",
            ModelControl::Poll { .. } => "poll",
        };
        Err(ServiceError::Unavailable(format!(
            "models are not {done} by request with --model-control-mode {mode}; start the server with explicit for that"
        )))
    }

    /// What all requests in flight may hold of the memory.
    pub fn budget(&self) -> &Arc<ByteBudget> {
        &self.budget
    }

    /// Who answers inferences.
    pub fn serving(&self) -> &Arc<Serving> {
        &self.serving
    }

    /// Who watches what threads do in engines.
    pub fn watchdog(&self) -> &Watchdog {
        &self.watchdog
    }

    /// The models to measure again once the machine has nothing else to do: none before the server has started or while it stops.
    pub fn to_measure_again(&self) -> Vec<String> {
        if !self.started.load(Ordering::Acquire) || self.serving.is_draining() {
            return Vec::new();
        }
        let unsettled = self.loader.unsettled();
        // Files that came with a load request are not in the repository.
        let is_overlaid =
            |name: &str| self.entries.lock().get(name).is_some_and(|entry| entry.overlay.lock().is_some());
        unsettled.into_iter().filter(|name| self.serving.get(name).is_some() && !is_overlaid(name)).collect()
    }

    /// The models in service whose requests have no deadline unless they bring one.
    pub fn names_without_slo(&self) -> Vec<String> {
        let served = self.serving.all();
        let without =
            served.iter().map(|served| &served.definition).filter(|d| self.options.slo(&d.name, d.slo).is_none());
        without.map(|definition| definition.name.clone()).collect()
    }

    /// The models to load at start, by name.
    pub fn wanted_at_start(&self) -> &[String] {
        &self.wanted
    }

    /// The models that were to be loaded at start are, or have failed.
    pub fn set_started(&self) {
        self.started.store(true, Ordering::Release);
    }

    /// Loads (or reloads) a model; what is served under the name goes on until the new one is warm, and goes on
    /// for good if the new one fails, which is logged.
    ///
    /// # Errors
    /// What is wrong with it.
    pub async fn load_model(
        &self,
        name: &str,
        overrides: LoadOverrides,
        progress: Arc<dyn LoadProgress>,
    ) -> Result<(), ServiceError> {
        // Whoever asks for it has it looked at afresh.
        self.loader.forget_losses(name);
        self.load_and_log(name, overrides, progress).await
    }

    /// Loads what is served anew beside itself, from the same files and with what is known of it. A failure is logged, and what is served goes on.
    pub async fn load_again(&self, name: &str) {
        // Logged.
        let _ = self.load_and_log(name, LoadOverrides::default(), Arc::new(())).await;
    }

    /// Loads the versions anew by the policy `exclusive` whose own policy was chosen for them and has lost against it; what runs and waits meanwhile is answered by
    /// the policy that it came to.
    pub async fn give_up_losers(&self) {
        for served in self.serving.all() {
            let versions = served.versions.values();
            let lost = versions.filter(|version| version.hosts().guard().is_some_and(PolicyGuard::has_lost));
            if lost.filter(|version| self.loader.remember_loss(version)).count() > 0 {
                self.load_again(&served.definition.name).await;
            }
        }
    }

    async fn load_and_log(
        &self,
        name: &str,
        overrides: LoadOverrides,
        progress: Arc<dyn LoadProgress>,
    ) -> Result<(), ServiceError> {
        let loaded = self.load_or_keep(name, overrides, progress).await;
        loaded.inspect_err(|error| tracing::error!(model = %name, %error, "not loaded"))
    }

    async fn load_or_keep(
        &self,
        name: &str,
        mut overrides: LoadOverrides,
        progress: Arc<dyn LoadProgress>,
    ) -> Result<(), ServiceError> {
        // A folder without a configuration may be none of the models, and yet is one with that of the request.
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
        let entry = self.entries.lock().entry(name.to_owned()).or_default().clone();
        let _busy = entry.busy.lock().await;
        entry.set(0, Phase::Loading, WAITING.to_owned());
        let mut kept = None;
        if overrides.files.is_empty() {
            let files = self.repository.fingerprint(name);
            let before = entry.kept.lock().clone();
            if let (None, Some((config, _))) = (&overrides.config, before.filter(|(_, seen)| *seen == files)) {
                tracing::info!(model = %name, "the configuration of an earlier load request still holds, as the model's files are unchanged");
                overrides.config = Some(config);
            }
            kept = overrides.config.clone().map(|config| (config, files));
        }
        let this = self.clone();
        let owned_name = name.to_owned();
        let begun = entry.clone();
        let load = move || {
            begun.set(0, Phase::Loading, String::new());
            this.load_files(&owned_name, overrides, &*progress)
        };
        let loaded = self.spawn_load(name, load).await;
        let Loaded { served, overlay, failures } = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                if is_there || self.serving.get(name).is_some() {
                    self.after_failure(&entry, name, &error);
                } else {
                    // It was never here but in this request.
                    self.entries.lock().remove(name);
                }
                return Err(error.error);
            }
        };
        for (version, reason) in &failures {
            tracing::error!(model = %name, version, %reason, "version not loaded");
        }
        let served = Arc::new(served);
        let before = self.serving.replace(name, Some(served.clone()));
        entry.settle(&served, &failures);
        *entry.kept.lock() = kept;
        let overlay_before = std::mem::replace(&mut *entry.overlay.lock(), overlay);
        self.retire(name, before, Some(&served)).await;
        drop(overlay_before);
        Ok(())
    }

    /// Loads every selected version: all or nothing if the model is not served yet or none loads, else those that do.
    fn load_files(
        &self,
        name: &str,
        overrides: LoadOverrides,
        progress: &dyn LoadProgress,
    ) -> Result<Loaded, LoadFailure> {
        let invalid = |error: &dyn std::fmt::Display| {
            ServiceError::InvalidArgument(format!("load failed for model '{name}': {error}"))
        };
        for parameter in overrides.parameters.keys() {
            tracing::warn!(model = %name, %parameter, "load parameter is not known and ignored");
        }
        let config = overrides.config;
        let overlay = if overrides.files.is_empty() {
            None
        } else {
            if config.is_none() {
                return Err(ServiceError::InvalidArgument(format!(
                    "failed to load '{name}', failed to poll from model repository: a load request with files needs a 'config' \
                     parameter beside them"
                ))
                .into());
            }
            Some(write_overlay(name, &overrides.files).map_err(|error| invalid(&error))?)
        };
        let mut definition = match &overlay {
            None => self.repository.definition(name, config.as_deref()),
            Some(overlay) => {
                self.repository.at(overlay.path()).map_err(|error| invalid(&error))?.definition(name, config.as_deref())
            }
        }
        .map_err(|error| invalid(&error))?;
        for warning in &definition.warnings {
            tracing::warn!(model = %name, "{warning}");
        }
        let mut versions = BTreeMap::new();
        let mut failures = BTreeMap::new();
        for (version, path) in definition.versions.clone() {
            match self.loader.load(&mut definition, version, &path, overlay.is_none(), progress) {
                Ok(loaded) => {
                    versions.insert(version, loaded);
                }
                Err(error) => {
                    failures.insert(version, format!("{error:#}"));
                }
            }
        }
        let failed = |reason: String, failures: BTreeMap<u64, String>| {
            Err(LoadFailure { error: invalid(&reason), versions: failures })
        };
        if versions.is_empty() {
            let reasons: Vec<String> = failures.iter().map(|(v, reason)| format!("version {v}: {reason}")).collect();
            let reason = if reasons.is_empty() { "no version to load".to_owned() } else { reasons.join("; ") };
            return failed(reason, failures);
        }
        // A newest version that is broken must not take the place of one that works, with an older one as the newest.
        if let Some((newest, reason)) = failures.last_key_value()
            && versions.last_key_value().is_none_or(|(v, _)| v < newest)
            && self.serving.get(name).is_some()
        {
            self.serving.forget_queues(versions.values());
            return failed(format!("version {newest}: {reason}"), failures);
        }
        Ok(Loaded { served: Served::new(definition, versions), overlay, failures })
    }

    /// Loads a model on a thread of its own, once fewer than [`ServerOptions::load_threads`] do so, at a low priority, so that this does not take the processor from those who
    /// are served. If a run of it does not end, what comes of it is given up.
    async fn spawn_load(
        &self,
        name: &str,
        load: impl FnOnce() -> Result<Loaded, LoadFailure> + Send + 'static,
    ) -> Result<Loaded, LoadFailure> {
        let _permit = self.loads.acquire().await;
        if self.serving.is_draining() {
            return Err(ServiceError::Unavailable("the server is shutting down".to_owned()).into());
        }
        let (done, result) = tokio::sync::oneshot::channel();
        let loading = Arc::new(Loading { model: name.to_owned(), done: Mutex::new(Some(done)) });
        let (watchdog, serving) = (self.watchdog.clone(), self.serving.clone());
        std::thread::Builder::new()
            .name("load".to_owned())
            .spawn(move || {
                // Without the right to it, the work is done at normal priority. Threads that are started here would keep it:
                // engines have theirs before.
                let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 10);
                let owner: Weak<Loading> = Arc::downgrade(&loading);
                let post = watchdog.post(owner);
                post.begin_load(&loading.model);
                let mut loaded = std::panic::catch_unwind(AssertUnwindSafe(load))
                    .unwrap_or_else(|_| Err(ServiceError::Internal("loading ended in a panic".to_owned()).into()));
                if let Some(reason) = post.end() {
                    if let Ok(loaded) = &loaded {
                        serving.forget_queues(loaded.served.versions.values());
                    }
                    loaded = Err(loading.failure(&reason));
                }
                // A receiver that is gone was a client that did not wait.
                if let Some(Ok(loaded)) = loading.finish(loaded) {
                    serving.forget_queues(loaded.served.versions.values());
                }
            })
            .map_err(|error| ServiceError::Internal(format!("no thread to work on: {error}")))?;
        result.await.unwrap_or_else(|_| Err(ServiceError::Internal("loading ended in a panic".to_owned()).into()))
    }

    fn after_failure(&self, entry: &Entry, name: &str, failure: &LoadFailure) {
        match self.serving.get(name) {
            // What served before goes on.
            Some(served) => {
                entry.settle(&served, &failure.versions);
                tracing::warn!(model = %name, versions = ?served.versions.keys(), "goes on serving as before");
            }
            None => entry.set(0, Phase::Unavailable, failure.error.to_string()),
        }
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
        // First, so that whoever does not find the model finds the reason.
        if let Some(served) = self.serving.get(name) {
            entry.set_all(served.versions.keys().copied(), Phase::Unloading, "");
        }
        let before = self.serving.replace(name, None);
        let has_ended = self.retire(name, before.clone(), None).await;
        let reason = if has_ended { "unloaded" } else { "unloaded; a run of it still goes on" };
        match &before {
            Some(before) => entry.set_all(before.versions.keys().copied(), Phase::Unavailable, reason),
            None => entry.set(0, Phase::Unavailable, reason.to_owned()),
        }
        *entry.overlay.lock() = None;
        *entry.kept.lock() = None;
        if has_ended {
            return Ok(());
        }
        Err(ServiceError::Unavailable(format!(
            "model '{name}' is out of service, but a run of it still goes on and cannot be ended: it keeps its memory and a core until it ends by itself"
        )))
    }

    /// Waits for the last requests of what is out of service, and lets it go. Says whether nothing of it runs any more.
    async fn retire(&self, name: &str, before: Option<Arc<Served>>, now: Option<&Served>) -> bool {
        let Some(before) = before else { return true };
        let has_ended = self.serving.retire(&before).await;
        for version in before.versions.keys() {
            if now.is_none_or(|now| !now.versions.contains_key(version)) {
                self.metrics.forget(name, &version.to_string());
            }
        }
        has_ended
    }

    /// Looks at the folder and follows what changed since `seen`; gives what it saw.
    pub async fn follow(
        &self,
        seen: BTreeMap<String, Fingerprint>,
        progress: &Arc<dyn LoadProgress>,
    ) -> BTreeMap<String, Fingerprint> {
        let now = match self.fingerprints() {
            Ok(now) => now,
            Err(error) => {
                // What cannot be looked at is not gone.
                tracing::error!(%error, "everything stays as it is");
                return seen;
            }
        };
        for name in seen.keys().filter(|name| !now.contains_key(*name)) {
            tracing::info!(model = %name, "gone from the repository: unloading");
            // Unknown means unloaded already.
            let _ = self.unload_model(name).await;
        }
        let changed = now.iter().filter(|(name, fingerprint)| seen.get(*name) != Some(*fingerprint));
        let loads = changed.map(|(name, _)| {
            tracing::info!(model = %name, "new or changed in the repository: loading");
            self.load_model(name, LoadOverrides::default(), progress.clone())
        });
        // The reason of a failure is logged and stands in the index.
        futures_util::future::join_all(loads).await;
        now
    }

    /// What the models' folders look like now.
    ///
    /// # Errors
    /// `Internal` if the repository cannot be read.
    pub fn fingerprints(&self) -> Result<BTreeMap<String, Fingerprint>, ServiceError> {
        Ok(self.names()?.into_iter().map(|name| (name.clone(), self.repository.fingerprint(&name))).collect())
    }

    /// The models in the repository's folder.
    fn names(&self) -> Result<Vec<String>, ServiceError> {
        self.repository.names().map_err(|error| ServiceError::Internal(error.to_string()))
    }

    /// Looks at what the server has done, for the autoscale advice; to be called every [`crate::autoscale::EVERY`].
    pub fn watch_load(&self) {
        if let Some(watch) = &self.autoscale {
            watch.look(&self.metrics);
        }
    }

    /// [`Driver::flush_log`]; to be called now and then.
    pub fn flush_decision_log(&self) {
        self.driver.flush_log();
    }

    /// [`Driver::close_log`]; at the end.
    pub fn close_decision_log(&self) {
        self.driver.close_log();
    }

    /// All metrics in Prometheus' text format, as of now.
    ///
    /// # Errors
    /// If a metric cannot be written as text: a defect.
    pub fn metrics(&self) -> Result<String, prometheus::Error> {
        for served in self.serving.all() {
            for loaded in served.versions.values() {
                self.metrics.set_pending(&loaded.name, &loaded.version, u64::from(loaded.waiting()));
                loaded.hosts().update_metrics();
            }
        }
        self.metrics.set_budget(&self.budget);
        self.model_memory.update_metrics(&self.metrics);
        self.metrics.render()
    }

    fn served(&self, name: &str) -> Result<Arc<Served>, ServiceError> {
        self.serving.get(name).ok_or_else(|| self.why_not_served(name))
    }

    /// Whether a model that is not in service is unknown, not ready yet, or broken.
    fn why_not_served(&self, name: &str) -> ServiceError {
        let entry = self.entries.lock().get(name).cloned();
        let Some(entry) = entry else {
            // From memory: a request for a model that does not exist is no reason to read a folder.
            let known: Vec<String> = self.entries.lock().keys().cloned().collect();
            return ServiceError::NotFound(unknown_model(name, &known));
        };
        let phases = entry.phases.lock().clone();
        let (phase, reason) = phases
            .into_values()
            .find(|(phase, _)| *phase != Phase::Ready)
            // It became ready this very moment.
            .unwrap_or((Phase::Loading, String::new()));
        ServiceError::Unavailable(format!(
            "Request for unknown model: '{name}' has no available versions: {}{}{reason}",
            phase.name(),
            if reason.is_empty() { "" } else { ": " }
        ))
    }
}

/// Folders, for a message.
pub(crate) fn shown(folders: &[std::path::PathBuf]) -> String {
    folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// How long runs may take. TensorRT compiles a model in the run that is the first of its shapes.
fn run_limits(options: &ServerOptions, engines: &Engines) -> RunLimits {
    let times = if engines.onnx.info().name == "tensorrt" { 20 } else { 1 };
    let RunLimits { factor, least, load } = options.run_limits;
    RunLimits { factor, least: least.saturating_mul(times), load: load.saturating_mul(times) }
}

impl Entry {
    fn set(&self, version: u64, phase: Phase, reason: String) {
        self.phases.lock().insert(version, (phase, reason));
    }

    fn set_all(&self, versions: impl Iterator<Item = u64>, phase: Phase, reason: &str) {
        *self.phases.lock() = versions.map(|version| (version, (phase, reason.to_owned()))).collect();
    }

    /// The phases after a load: what is served is ready, what failed is not.
    fn settle(&self, served: &Served, failures: &BTreeMap<u64, String>) {
        let ready = served.versions.keys().map(|version| (*version, (Phase::Ready, String::new())));
        let failed = failures.iter().map(|(version, reason)| (*version, (Phase::Unavailable, reason.clone())));
        *self.phases.lock() = failed.chain(ready).collect();
    }
}

/// Writes the files of a load request into a fresh folder, as the repository of one model.
fn write_overlay(name: &str, files: &BTreeMap<String, bytes::Bytes>) -> anyhow::Result<Overlay> {
    use std::path::Component;
    let is_inside = |path: &Path| path.components().all(|part| matches!(part, Component::Normal(_)));
    anyhow::ensure!(is_inside(Path::new(name)), "'{name}' is no name for a model");
    let overlay = downbeat_engine::scratch::folder()?;
    let root = overlay.path().to_owned();
    for (path, bytes) in files {
        anyhow::ensure!(
            is_inside(Path::new(path)) && !path.is_empty(),
            "file '{path}' must have a path inside the model's folder, such as '1/model.onnx'"
        );
        let target = root.join(name).join(path);
        if let Some(parent) = target.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(target, bytes)?;
    }
    Ok(overlay)
}

/// Runs a change of state to its end even if the client that asked for it goes away meanwhile.
async fn finish(change: impl Future<Output = Result<(), ServiceError>> + Send + 'static) -> Result<(), ServiceError> {
    tokio::spawn(change)
        .await
        .unwrap_or_else(|error| Err(ServiceError::Internal(format!("the change ended in a panic: {error}"))))
}

impl Service for Registry {
    fn name(&self) -> &str {
        &self.options.server_name
    }

    fn is_live(&self) -> bool {
        self.watchdog.hopeless().is_none()
    }

    fn is_ready(&self) -> bool {
        if self.serving.is_draining() || !self.is_live() {
            return false;
        }
        if !self.options.strict_readiness {
            return true;
        }
        if !self.options.allow_empty && self.serving.is_empty() {
            return false;
        }
        self.started.load(Ordering::Acquire)
            && self.wanted.iter().all(|name| {
                // What a client unloaded is not missing.
                self.serving
                    .get(name)
                    .is_some_and(|served| served.versions.values().all(|version| version.hosts().lost().is_none()))
                    || self
                        .entries
                        .lock()
                        .get(name)
                        .is_some_and(|entry| entry.phases.lock().values().all(|(_, reason)| reason == "unloaded"))
            })
    }

    fn autoscale(&self) -> Option<AutoscaleStatus> {
        self.autoscale.as_ref().map(|watch| watch.status())
    }

    fn is_model_ready(&self, name: &str, version: &str) -> bool {
        let now = self.driver.clock().now();
        !self.serving.is_draining()
            && self
                .serving
                .get(name)
                .is_some_and(|served| served.version(version).is_ok_and(|version| version.not_ready(now).is_none()))
    }

    fn model_metadata(&self, name: &str, version: &str) -> Result<ModelMetadata, ServiceError> {
        let served = self.served(name)?;
        let signature: Signature = served.version(version)?.plan.signature();
        Ok(ModelMetadata {
            name: name.to_owned(),
            versions: served.versions.keys().map(u64::to_string).collect(),
            platform: served.definition.config.platform.clone(),
            signature,
        })
    }

    fn check_model(&self, name: &str, version: &str) -> Result<(), ServiceError> {
        self.serving.check(&*self.served(name)?, version).map(|_| ())
    }

    fn check_inputs(&self, request: &InferRequest) -> Result<(), ServiceError> {
        let served = self.served(&request.model_name)?;
        self.serving.check(&served, &request.model_version)?.plan.check_inputs(request)
    }

    fn model_config(&self, name: &str, version: &str) -> Result<pb::ModelConfig, ServiceError> {
        let served = self.served(name)?;
        served.version(version)?;
        Ok(served.definition.config.clone())
    }

    fn policy(&self, name: &str, version: &str) -> Result<PolicyReport, ServiceError> {
        Ok(self.served(name)?.version(version)?.policy())
    }

    fn statistics(&self, name: &str, version: &str) -> Result<Vec<pb::ModelStatistics>, ServiceError> {
        if name.is_empty() {
            return Ok(self.serving.all().iter().flat_map(|served| statistics(served.versions.values())).collect());
        }
        let served = self.served(name)?;
        if version.is_empty() {
            return Ok(statistics(served.versions.values()));
        }
        Ok(statistics(std::iter::once(served.version(version)?)))
    }

    fn repository_index(&self, ready_only: bool) -> Vec<ModelIndexEntry> {
        let mut index = Vec::new();
        let now = self.driver.clock().now();
        let entries = self.entries.lock().clone();
        let mut names = self.names().unwrap_or_else(|error| {
            tracing::error!(%error, "the index has only what was loaded");
            Vec::new()
        });
        names.extend(entries.keys().cloned());
        names.sort();
        names.dedup();
        for name in names {
            let phases = entries.get(&name).map(|entry| entry.phases.lock().clone()).unwrap_or_default();
            if phases.is_empty() && !ready_only {
                index.push(ModelIndexEntry {
                    name: name.clone(),
                    version: String::new(),
                    state: String::new(),
                    reason: String::new(),
                });
            }
            let served = self.serving.get(&name);
            for (version, (mut phase, mut reason)) in phases {
                let loaded = served.as_ref().and_then(|served| served.versions.get(&version));
                if let (Phase::Ready, Some(why_not)) = (phase, loaded.and_then(|e| e.not_ready(now))) {
                    (phase, reason) = (Phase::Unavailable, why_not);
                }
                if ready_only && phase != Phase::Ready {
                    continue;
                }
                index.push(ModelIndexEntry {
                    name: name.clone(),
                    version: if version == 0 { String::new() } else { version.to_string() },
                    state: phase.name().to_owned(),
                    reason,
                });
            }
        }
        index
    }

    async fn load(&self, name: &str, overrides: LoadOverrides) -> Result<(), ServiceError> {
        self.check_control("loaded")?;
        let (this, name) = (self.clone(), name.to_owned());
        finish(async move { this.load_model(&name, overrides, Arc::new(())).await }).await
    }

    async fn unload(&self, name: &str) -> Result<(), ServiceError> {
        self.check_control("unloaded")?;
        let (this, name) = (self.clone(), name.to_owned());
        finish(async move { this.unload_model(&name).await }).await
    }

    async fn infer(&self, request: InferRequest) -> Result<InferResponse, ServiceError> {
        match self.serving.enter(&request.model_name) {
            Some(served) => self.serving.infer(&served, request).await,
            None => Err(self.why_not_served(&request.model_name)),
        }
    }

    fn timeline(&self, last: std::time::Duration) -> Option<Timeline> {
        let now = self.driver.clock().now();
        let last = Duration::from(last).min(REMEMBERED);
        let from = Time::from_nanos(now.as_nanos().saturating_sub(last.as_nanos()));
        let mut devices = Vec::new();
        for served in self.serving.all() {
            for loaded in served.versions.values() {
                devices.extend(loaded.hosts().past(from));
            }
        }
        Some(Timeline { from_ns: from.as_nanos(), now_ns: now.as_nanos(), devices })
    }

    fn labels(&self, name: &str, _version: &str, output: &str) -> Vec<String> {
        let Some(served) = self.serving.get(name) else { return Vec::new() };
        served
            .definition
            .outputs
            .iter()
            .find(|binding| binding.client.name == output)
            .map(|binding| binding.labels.to_vec())
            .unwrap_or_default()
    }
}
