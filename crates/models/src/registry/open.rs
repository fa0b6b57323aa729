//! Opens the registry: repositories, engines, devices, the scheduler.

use std::collections::BTreeMap;
use std::sync::Arc;

use downbeat_engine_ort::GpuInfo;
use downbeat_host::decision_log::{DecisionLog, LogBounds};
use downbeat_host::device::DeviceHost;
use downbeat_host::device_map::{self, DeviceMap};
use downbeat_host::gpu_watch::GpuWatch;
use downbeat_host::model_memory::ModelMemory;
use downbeat_host::run::watchdog::Watchdog;
use downbeat_host::scheduler::Driver;
use downbeat_host::shares::{DeviceShares, ShareMetrics};
use downbeat_repository::{ModelDefinition, ModelRepositories};
use downbeat_service::budget::ByteBudget;
use downbeat_service::clock::Clock;
use downbeat_service::memory;
use downbeat_service::metrics::Metrics;
use downbeat_service::options::model_names::{NamedBy, UnknownModel};
use downbeat_service::options::{
    CudaMissing, MAX_SHARDS, MOST_LOAD_THREADS, ModelControl, RunLimits, ServerOptions, SharesBy,
};
use downbeat_service::report::autoscale::AutoscaleWatch;
use downbeat_service::traces::Traces;
use parking_lot::Mutex;

use super::Registry;
use super::model_entry::{ModelEntry, VersionState, WAITING};
use crate::calls::Calls;
use crate::load::engines::Engines;
use crate::load::load_context::LoadContext;
use crate::load::loader::Loader;
use crate::partitions::Partitions;
use crate::serving::Serving;

impl Registry {
    /// The registry of the repositories that the options name, with its engines and devices;
    /// nothing is loaded yet.
    ///
    /// # Errors
    /// If a repository cannot be read, the engine is not there, or the decision log cannot be
    /// written.
    pub fn open(options: Arc<ServerOptions>) -> anyhow::Result<Self> {
        let repository = open_repositories(&options)?;
        let scan = repository.scan()?;
        for warning in &scan.warnings {
            tracing::warn!("{warning}");
        }
        check_names(&options, &scan.names)?;
        let wanted = wanted_at_start(&options, &scan.names);
        let waiting = waiting_entries(&wanted);
        let metrics = Arc::new(Metrics::new()?.detailed_for(options.metrics_detailed_models));
        let code_metrics = metrics.code.clone();
        let on_metering = Arc::new(move |model: &str, changes| code_metrics.change(model, changes));
        let calls = Calls::new();
        let engines = Engines::choose(&options, on_metering, calls.on_call())?;
        let partitions = Partitions::divide(&options, &**engines.of_most())?;
        let gpus: Arc<[GpuInfo]> = engines.gpus.clone().into();
        let (options, devices) = with_devices(&options, &engines, &partitions, &scan.names)?;
        let repository = with_gpus(repository, &gpus, &options);
        let known = definitions(&repository, &scan.names);
        let parts = partitions.parts.len().max(1);
        let device_map = DeviceMap::new(options.placement.clone(), devices, &gpus, &known, parts)?;
        let watched = u32::try_from(devices).unwrap_or(u32::MAX);
        let autoscale = options.autoscale.as_ref().map(|o| AutoscaleWatch::new(o, watched)).transpose()?.map(Arc::new);
        let clock = Clock::start();
        let log = open_decision_log(&options, device_map.kinds.len(), clock, &metrics)?;
        let watchdog = Watchdog::start(run_limits(&options, &engines), clock, engines.of_most().clone())?;
        let (parts, kinds) = (&partitions.parts, &device_map.kinds);
        let driver = Arc::new(Driver::start(clock, parts, kinds, &options, &metrics, &watchdog, log)?);
        let limit = options.max_in_flight_bytes.map_or_else(memory::default_budget, |bytes| bytes as u64);
        let model_memory = ModelMemory::new(&options, limit);
        let (on, said) = (driver.clone(), metrics.clone());
        let shares_woken = Arc::new(tokio::sync::Notify::new());
        let shares = shares(&options, &partitions, &driver, &metrics, &shares_woken)?;
        let context =
            LoadContext::new(options.clone(), engines, partitions, on, device_map, said, model_memory.clone());
        let loader = Arc::new(Loader::new(context));
        let budget = ByteBudget::new(limit);
        let gpu_watch = watch_gpus(&gpus, &metrics, &options)?;
        let traces = Traces::new(clock, &options.traces)?;
        let serving = Arc::new(Serving::new(options.clone(), driver.clone(), budget.clone(), watchdog.clone(), traces));
        calls.serve(&serving);
        let loads = Arc::new(load_permits(&options));
        Ok(Registry {
            options,
            repository,
            driver,
            serving,
            loader,
            metrics,
            budget,
            model_memory,
            shares,
            shares_woken,
            autoscale,
            needed_time: Arc::default(),
            history: Arc::default(),
            marks: Arc::default(),
            watchdog,
            gpus,
            _gpu_watch: gpu_watch,
            ensembles: Arc::default(),
            entries: Arc::new(Mutex::new(waiting)),
            loads,
            started: Arc::default(),
            wanted: wanted.into(),
            what_if: Arc::default(),
            cluster: Arc::default(),
        })
    }
}

/// The repositories that the options name, read as the options say.
///
/// # Errors
/// If a repository cannot be opened.
fn open_repositories(options: &ServerOptions) -> anyhow::Result<ModelRepositories> {
    let repositories = ModelRepositories::open(&options.repositories)?.map(|repository| {
        repository
            .with_follow_symlinks(options.follow_symlinks)
            .with_auto_complete(options.auto_complete_config)
            .with_default_max_batch_size(options.default_max_batch_size)
            .with_config_name(options.model_config_name.clone())
            .with_cpu_for_gpus(options.cuda.missing == CudaMissing::Cpu)
    });
    Ok(repositories)
}

/// An entry for each model to load at start, which waits for its load.
fn waiting_entries(wanted: &[String]) -> BTreeMap<String, Arc<ModelEntry>> {
    let waiting = |name: &String| {
        let entry = ModelEntry::default();
        entry.set(0, VersionState::Loading, WAITING.to_owned());
        (name.clone(), Arc::new(entry))
    };
    wanted.iter().map(waiting).collect()
}

/// The repositories with the server's GPUs, and with the GPUs on which the options place models.
fn with_gpus(repository: ModelRepositories, gpus: &[GpuInfo], options: &ServerOptions) -> ModelRepositories {
    let ordinals: Vec<u32> = gpus.iter().map(|gpu| gpu.ordinal).collect();
    let on = |devices: &Vec<usize>| devices.iter().filter_map(|device| ordinals.get(*device).copied()).collect();
    let places: BTreeMap<String, Vec<u32>> =
        options.placement.iter().map(|(name, devices)| (name.clone(), on(devices))).collect();
    repository.map(|repository| repository.with_gpus(ordinals.clone()).with_places(places.clone()))
}

/// The definitions of these models. A model with a bad definition is left out: its load reports the
/// defect.
fn definitions(repository: &ModelRepositories, names: &[String]) -> Vec<ModelDefinition> {
    names.iter().filter_map(|name| repository.definition(name, None).ok()).collect()
}

/// The decision log for devices of `kinds` kinds, if the options name a folder for it.
///
/// # Errors
/// If the log cannot be written.
fn open_decision_log(
    options: &ServerOptions,
    kinds: usize,
    clock: Clock,
    metrics: &Arc<Metrics>,
) -> anyhow::Result<Option<DecisionLog>> {
    let shards = options.scheduler_shards().clamp(1, MAX_SHARDS);
    let folder = options.decision_log.as_deref();
    let bounds = LogBounds { bytes: options.decision_log_bytes as u64, age: options.decision_log_age };
    folder.map(|folder| DecisionLog::open(folder, (shards, kinds), bounds, clock, metrics)).transpose()
}

/// The watch of the GPUs, if the server has GPUs.
///
/// # Errors
/// If the watch cannot be started.
fn watch_gpus(
    gpus: &Arc<[GpuInfo]>,
    metrics: &Metrics,
    options: &ServerOptions,
) -> anyhow::Result<Option<Arc<GpuWatch>>> {
    let watch = || GpuWatch::start(gpus, metrics.gpus.clone(), options.gpu_metrics_every).map(Arc::new);
    Ok((!gpus.is_empty()).then(watch).transpose()?)
}

/// The permits for loads side by side: of large models, and of small ones.
fn load_permits(options: &ServerOptions) -> [tokio::sync::Semaphore; 2] {
    let side_by_side = options.load_threads.clamp(1, MOST_LOAD_THREADS);
    [side_by_side, side_by_side].map(tokio::sync::Semaphore::new)
}

/// The shares of each device, where models move by themselves.
///
/// # Errors
/// If two metrics had the same name: a defect.
fn shares(
    options: &ServerOptions,
    partitions: &Partitions,
    driver: &Driver,
    metrics: &Metrics,
    woken: &Arc<tokio::sync::Notify>,
) -> Result<Arc<[DeviceShares]>, prometheus::Error> {
    let metrics = ShareMetrics::register(metrics.registry())?;
    let of = |host: &Arc<DeviceHost>| {
        let (host, by_hand) = (host.clone(), partitions.by_hand());
        DeviceShares::new(host, &partitions.parts, &options.device, by_hand, woken.clone(), metrics.clone())
    };
    let hosts = driver.hosts().iter().filter(|_| options.device.shares == SharesBy::Auto);
    Ok(hosts.map(of).collect())
}

/// Checks whether options name models that no repository has.
///
/// # Errors
/// All such models, if they cannot come later.
fn check_names(options: &ServerOptions, names: &[String]) -> anyhow::Result<()> {
    let unknown = options.unknown_models(names);
    let (errors, warnings): (Vec<_>, Vec<_>) =
        unknown.into_iter().partition(|unknown| unknown.is_error(&options.model_control));
    if !errors.is_empty() {
        let messages: Vec<String> = errors.into_iter().map(|unknown| unknown.message).collect();
        anyhow::bail!("{}", messages.join("; "));
    }
    // The load at start reports missing models that it has to load.
    for UnknownModel { message, .. } in warnings.iter().filter(|unknown| unknown.by != NamedBy::Load) {
        tracing::warn!("{message} (no effect until the model is there)");
    }
    Ok(())
}

/// The names of the models to load at start, among the models of the repositories.
fn wanted_at_start(options: &ServerOptions, names: &[String]) -> Vec<String> {
    match &options.model_control {
        ModelControl::Explicit { load } if !load.iter().any(|name| name == "*") => load.clone(),
        _ => names.to_vec(),
    }
}

/// The options with the models' places on these devices, and the number of devices.
fn with_devices(
    options: &ServerOptions,
    engines: &Engines,
    partitions: &Partitions,
    names: &[String],
) -> anyhow::Result<(Arc<ServerOptions>, usize)> {
    // The options may name models' devices without setting the number of executors.
    let named = device_map::devices_named(options);
    let asked = match options.devices {
        // Models that share groups of operators run side by side on one device.
        0 if engines.gpus.is_empty() && options.device.policy.forms_groups() => named.max(1),
        0 if engines.gpus.is_empty() => named,
        devices => devices,
    };
    anyhow::ensure!(
        named == 0 || !engines.gpus.is_empty() || !partitions.are_there(),
        "the CPU is divided ([device] partitions), so [models.NAME] partition names the part that a model runs on; \
         leave [placement] and --plan out"
    );
    let devices = engines.devices(asked, partitions)?;
    let options = ServerOptions {
        devices: if engines.gpus.is_empty() { asked } else { devices },
        placement: device_map::chosen(options, devices, names)?,
        ..options.clone()
    };
    Ok((Arc::new(options), devices))
}

/// How long runs may take. TensorRT compiles a model in the run that is the first of its shapes.
fn run_limits(options: &ServerOptions, engines: &Engines) -> RunLimits {
    let times = if engines.of_most().info().name == "tensorrt" { 20 } else { 1 };
    let RunLimits { factor, least, load, whole_load } = options.run_limits;
    let [least, load, whole_load] = [least, load, whole_load].map(|limit| limit.saturating_mul(times));
    RunLimits { factor, least, load, whole_load }
}
