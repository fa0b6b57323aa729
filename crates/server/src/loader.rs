//! Brings a model version from its file into service: engine, lanes, warm-up, latency profile, queue.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use anyhow::Context;
use downbeat_core::cluster::{self, ModelOptions as QueueOptions, PriorityLevel};
use downbeat_core::device::{AutoInputs, ChosenPolicy, GuardOptions, Overlap, SegmentProfile, WrittenSettings};
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_driver::QueueHandle;
use downbeat_engine::{
    Cut, Declared, DefaultValue, Engine, Lane, LoadError, LoadOptions, MemoryBudget, Model, Part, Place, Share,
    StreamPriority, graph_report,
};
use downbeat_protocol::inference::ModelOptimizationPolicy;
use downbeat_protocol::inference::model_optimization_policy::ModelPriority;
use downbeat_repository::policy::{DispatchPolicy, DropPolicy, PolicyName};
use downbeat_repository::{ModelDefinition, ModelFormat, TimeoutAction};
use parking_lot::Mutex;
use tempfile::TempDir;

use crate::auto_profiler::{self, StoredAuto};
use crate::batch_codec::{BatchCodec, ShapeKey};
use crate::clock::Clock;
use crate::device_budget::DeviceBudget;
use crate::driver::Driver;
use crate::engines::{Engines, MOST_EXECUTORS, executors, most_threads};
use crate::host::{self, DeviceHost, LaneSetup, LanesWanted, Padding, PolicyError, PolicyGuard, WarmUpLanes};
use crate::load_turns::{LONGEST_TURN, LoadTurn, LoadTurns};
use crate::loaded_version::{LoadedVersion, Queue};
use crate::machine_load::LoadWatch;
use crate::memory;
use crate::metrics::Metrics;
use crate::model_memory::{MemoryPart, ModelMemory};
use crate::options::ServerOptions;
use crate::partitions::Partitions;
use crate::placement::{Placed, Placement};
use crate::policy_choice::{AutoSubject, Chosen};
use crate::policy_report::{AskedFor, PolicyReport};
use crate::profiler::{self, Measurement, NOISE, ProfileStore, StoredOperators, StoredProfile, Threads};
use crate::refiner::ProfileRefiner;
use crate::segment_profiler::SegmentSubject;
use crate::warm_up::{self, Sample, WarmUp};

/// The length that varying dimensions have while a model is measured. Other lengths start from what this one took,
/// scaled, and learn their own latency in service.
pub const PROFILED_LENGTH: i64 = 32;
/// A model whose largest batch takes less than this on one thread is left on one: waking others costs more.
const WORTH_THREADS: Duration = Duration::from_micros(500);
/// The profile of a model that is not to be measured, until it has been observed.
const UNKNOWN: Duration = Duration::from_millis(1);

/// Who is told how a load goes on.
pub trait LoadProgress: Send + Sync {
    /// A step began, `fraction` (0 to 1) of the load is done.
    fn step(&self, what: &str, fraction: f64);
}

impl LoadProgress for () {
    fn step(&self, _what: &str, _fraction: f64) {}
}

/// A model file and the engine that reads it.
struct Source<'a> {
    engine: &'a dyn Engine,
    path: &'a Path,
    cut: Cut,
    /// What its runs may take.
    memory: Option<&'a Arc<MemoryBudget>>,
    /// What its configuration asks of TensorRT.
    tensorrt: BTreeMap<String, String>,
    /// Where what is made of it is kept.
    cache: Option<&'a Path>,
    /// What its kernels have on a GPU.
    priority: StreamPriority,
    /// The part of a device that it is on; `None`: devices are not divided.
    part: Option<&'a Part>,
    store: &'a ProfileStore,
    /// See [`ProfileStore::file_key`].
    file: OnceCell<std::io::Result<String>>,
    /// What of it is timed has its turn.
    turn: &'a LoadTurn<'a>,
}

impl Source<'_> {
    /// Loads it; where it is to be cut, by what is stored of its operators, which is measured and stored else.
    fn load(&self, threads: usize) -> Result<Arc<dyn Model>, LoadError> {
        let (memory, tensorrt, cache) = (self.memory.cloned(), self.tensorrt.clone(), self.cache.map(Path::to_owned));
        let options = LoadOptions::new(self.path, threads).with_cut(self.cut.clone()).with_priority(self.priority);
        let options = options.with_share(self.part.map_or(Share::Whole, |part| part.share));
        let mut options = LoadOptions { memory, tensorrt, cache, ..options };
        if self.cut == Cut::Whole {
            return self.engine.load(&options);
        }
        let key = self.key(Threads::Chosen(threads)).map(|key| format!("{key}-operators"));
        let stored = key.as_ref().ok().and_then(|key| self.store.get::<StoredOperators>(key));
        options.operators = stored.map(|stored| Arc::new(stored.operators));
        // What is not known of the operators is timed.
        let model = match &options.operators {
            Some(_) => self.engine.load(&options)?,
            None => self.turn.timed(|| self.engine.load(&options)).0?,
        };
        if let Some(operators) = model.operators()
            && !options.operators.is_some_and(|known| Arc::ptr_eq(&known, operators))
        {
            let stored = StoredOperators {
                model: self.path.to_owned(),
                engine: self.engine.info().name.to_owned(),
                threads,
                operators: (**operators).clone(),
            };
            if let Err(error) = key.and_then(|key| self.store.put(&key, &stored).map_err(|error| error.to_string())) {
                tracing::warn!(%error, "what its operators take cannot be stored; it will be measured again at the next start");
            }
        }
        Ok(model)
    }

    /// What the key of all begins with that is measured of it with these threads. Reads the file, once.
    fn key(&self, threads: Threads) -> Result<String, String> {
        let file = self.file.get_or_init(|| ProfileStore::file_key(self.path)).as_ref().map_err(ToString::to_string)?;
        Ok(ProfileStore::key(file, &self.engine.info(), threads, self.part.map(|part| &*part.size)))
    }

    /// What its profiles are stored under, measured with these threads and up to so many items.
    fn batch_key(&self, threads: Threads, max_batch: u32) -> Result<String, String> {
        Ok(format!("{}-b{max_batch}", self.key(threads)?))
    }
}

/// What a model's kernels have on a GPU, by its configuration (`optimization.priority`).
pub fn stream_priority(definition: &ModelDefinition) -> StreamPriority {
    match definition.config.optimization.as_ref().map(ModelOptimizationPolicy::priority) {
        Some(ModelPriority::PriorityMax) => StreamPriority::Max,
        Some(ModelPriority::PriorityMin) => StreamPriority::Min,
        Some(ModelPriority::PriorityDefault) | None => StreamPriority::Default,
    }
}

/// What a model takes.
struct Profiled {
    profile: LatencyProfile,
    /// Of each run.
    threads: usize,
    /// There is no reason to measure it again.
    settled: bool,
}

/// Why a version is loaded by its policy.
enum Reason {
    /// Somebody asked for it.
    Asked(PolicyReport),
    /// `auto` was asked for: it is `exclusive`, unless another suits it better.
    Look(PolicyReport),
    /// It was found to suit it.
    Chosen(Box<Chosen>),
}

/// What came of loading a version.
enum Loaded {
    /// It can serve.
    Ready(Arc<LoadedVersion>),
    /// Another policy suits it better.
    Better(Box<Chosen>),
}

impl Loaded {
    fn ready(self) -> anyhow::Result<Arc<LoadedVersion>> {
        match self {
            Loaded::Ready(loaded) => Ok(loaded),
            Loaded::Better(_) => anyhow::bail!("a policy that was asked for is not looked at: this is a defect"),
        }
    }
}

/// What [`Loader::look`] found.
struct Looked {
    report: PolicyReport,
    /// What another policy than `exclusive` was chosen by.
    better: Option<(AutoInputs, Overlap)>,
}

/// Loads model versions. Slow: never on a thread that serves requests.
pub struct Loader {
    options: Arc<ServerOptions>,
    engines: Engines,
    partitions: Partitions,
    store: ProfileStore,
    driver: Arc<Driver>,
    metrics: Arc<Metrics>,
    clock: Clock,
    /// The versions in service with how many of their batches may run at once.
    wishes: Mutex<Vec<(Weak<LoadedVersion>, u32)>>,
    /// What the runs of all models may take; `None`: nobody limits them.
    memory: Option<Arc<MemoryBudget>>,
    /// What the versions on the CPU hold.
    model_memory: Arc<ModelMemory>,
    /// The turn of loading a model onto GPUs.
    gpu_turn: Mutex<()>,
    turns: LoadTurns,
    placement: Placement,
    /// See [`Loader::unsettled`].
    unsettled: Mutex<BTreeSet<String>>,
    /// What it takes to hand something over to another thread, once that is measured.
    launch: Mutex<Option<Duration>>,
    /// The versions whose policies have lost against `exclusive`.
    losses: Mutex<BTreeMap<(String, u64), PolicyReport>>,
}

impl Loader {
    /// A loader onto the devices of `driver`.
    pub fn new(
        options: Arc<ServerOptions>,
        engines: Engines,
        partitions: Partitions,
        driver: Arc<Driver>,
        placement: Placement,
        metrics: Arc<Metrics>,
        model_memory: Arc<ModelMemory>,
    ) -> Self {
        let store = ProfileStore::new(options.profiling.cache_dir.clone());
        let clock = driver.clock();
        let memory = memory::run_budget(&options).map(MemoryBudget::new);
        let (wishes, unsettled, gpu_turn, launch, losses) = Default::default();
        let turns = LoadTurns::new(LONGEST_TURN);
        Loader {
            options,
            engines,
            partitions,
            store,
            driver,
            metrics,
            clock,
            wishes,
            unsettled,
            launch,
            losses,
            memory,
            model_memory,
            gpu_turn,
            turns,
            placement,
        }
    }

    /// Loads, warms up and measures one version, and gives it a queue.
    ///
    /// # Errors
    /// What is wrong with the file or its configuration, and what to do about it.
    pub fn load(
        &self,
        definition: &mut ModelDefinition,
        version: u64,
        path: &Path,
        may_come_again: bool,
        progress: &dyn LoadProgress,
    ) -> anyhow::Result<Arc<LoadedVersion>> {
        let is_named = self.options.names_device_policy(&definition.name, definition.device);
        let asked_for = if is_named { AskedFor::Model } else { AskedFor::All };
        if self.options.device_policy(&definition.name, definition.device) == PolicyName::AUTO {
            let asked = PolicyReport {
                asked: PolicyName::AUTO.to_string(),
                ..PolicyReport::asked(PolicyName::EXCLUSIVE.name(), asked_for)
            };
            return self.load_auto(asked, definition, version, path, may_come_again, progress);
        }
        let chosen = self.options.chosen_policy(&definition.name, definition.device).map_err(|error| {
            let policy = self.options.device_policy(&definition.name, definition.device);
            PolicyError { policy, reason: error.to_string() }
        })?;
        let asked = PolicyReport::asked(chosen.name.name(), asked_for);
        let as_written = definition.clone();
        let refused = match self.load_by(&chosen, Reason::Asked(asked.clone()), definition, version, path, progress) {
            Err(error) if error.is::<PolicyError>() && !is_named => error,
            loaded => return loaded?.ready(),
        };
        *definition = as_written;
        self.load_instead(asked, refused, definition, version, path, progress)
    }

    /// Loads a version by whichever policy suits it.
    ///
    /// # Errors
    /// As [`Loader::load`].
    fn load_auto(
        &self,
        asked: PolicyReport,
        definition: &mut ModelDefinition,
        version: u64,
        path: &Path,
        may_come_again: bool,
        progress: &dyn LoadProgress,
    ) -> anyhow::Result<Arc<LoadedVersion>> {
        let exclusive = PolicyName::EXCLUSIVE.read(&WrittenSettings::new())?;
        let as_written = definition.clone();
        let lost = self.losses.lock().get(&(definition.name.clone(), version)).cloned();
        let reason = match lost {
            Some(lost) => Reason::Asked(lost),
            None if !may_come_again => {
                let reason =
                    "its files came with a load request, so that it could not be loaded again if a policy lost";
                Reason::Asked(PolicyReport { reason: reason.to_owned(), ..asked })
            }
            None => Reason::Look(asked),
        };
        let chosen = match self.load_by(&exclusive, reason, definition, version, path, progress)? {
            Loaded::Ready(loaded) => return Ok(loaded),
            Loaded::Better(chosen) => chosen,
        };
        *definition = as_written.clone();
        let report = chosen.report.clone();
        let policy = self.options.settings_of(&definition.name, report.policy.parse()?)?;
        let refused = match self.load_by(&policy, Reason::Chosen(chosen), definition, version, path, progress) {
            Err(error) if error.is::<PolicyError>() => error,
            loaded => return loaded?.ready(),
        };
        *definition = as_written;
        self.load_instead(report, refused, definition, version, path, progress)
    }

    /// Loads a version by the policy `exclusive`, as it was refused by the policy that it was to have.
    fn load_instead(
        &self,
        report: PolicyReport,
        refused: anyhow::Error,
        definition: &mut ModelDefinition,
        version: u64,
        path: &Path,
        progress: &dyn LoadProgress,
    ) -> anyhow::Result<Arc<LoadedVersion>> {
        let exclusive = PolicyName::EXCLUSIVE.read(&WrittenSettings::new())?;
        let report = PolicyReport { policy: exclusive.name.to_string(), reason: refused.to_string(), ..report };
        let loaded = self.load_by(&exclusive, Reason::Asked(report), definition, version, path, progress);
        match loaded.and_then(Loaded::ready) {
            // Nor can it be served without: then why it is not served as it was asked for.
            Err(error) if error.is::<PolicyError>() => Err(refused),
            Ok(loaded) => {
                tracing::warn!(model = %definition.name, version, reason = %refused, "served by the policy exclusive instead");
                Ok(loaded)
            }
            failed => failed,
        }
    }

    /// Loads a version for a device policy.
    ///
    /// # Errors
    /// As [`Loader::load`]; a [`PolicyError`] if it is only this policy that cannot have the model.
    fn load_by(
        &self,
        policy: &ChosenPolicy,
        why: Reason,
        definition: &mut ModelDefinition,
        version: u64,
        path: &Path,
        progress: &dyn LoadProgress,
    ) -> anyhow::Result<Loaded> {
        let begin = self.clock.now();
        progress.step("reading", 0.0);
        let limit = self.options.models.get(&definition.name).and_then(|model| model.gpu_memory);
        let engine = if is_emulated(definition) { &self.engines.emulated } else { &self.engines.onnx };
        let refuses = |reason: String| PolicyError { policy: policy.name, reason };
        let on_gpus = !is_emulated(definition) && !self.engines.gpus.is_empty();
        // What each takes of a GPU is seen where one is loaded after another. A load that does not end holds up no other for good.
        let _turn = on_gpus.then(|| self.gpu_turn.try_lock_for(LONGEST_TURN));
        let turn = self.turns.begin();
        let routed = policy.name.makes_batches();
        let partition = self.partitions.of(&definition.name);
        let on = partition.map(|(index, _)| index);
        let placed = self.placement.of(definition, on, !routed, self.driver.devices())?;
        let devices = placed.devices();
        let mut budget = DeviceBudget::before(&**engine, if on_gpus { devices } else { &[] }, limit);
        let part = partition.map(|(_, part)| part);
        let most = part.map_or_else(|| most_threads(&self.options), |part| part.threads);
        let threads = match self.options.chosen_threads(&definition.name) {
            // As it was looked at.
            _ if let Reason::Chosen(chosen) = &why => Threads::Chosen(chosen.threads),
            // What does not run on a GPU is not worth a second thread.
            _ if on_gpus => Threads::Chosen(1),
            Some(threads) => Threads::Chosen(part.map_or(threads, |part| threads.min(part.threads))),
            None => Threads::UpTo((most / policy.settings.at_once().max(1) as usize).max(1)),
        };
        self.options.check_dispatch(&definition.name, policy.name, definition.dispatch).map_err(refuses)?;
        let (cut, is_asked) = policy.settings.cut();
        let opened = if is_emulated(definition) { None } else { open_declared(definition, path)? };
        let (own, defaults, folder) = match opened {
            Some(OpenedFile { path, defaults, folder }) => (Some(path), defaults, Some(folder)),
            None => (None, BTreeMap::new(), None),
        };
        let path = own.as_deref().unwrap_or(path);
        let (memory, cache, file) = (self.memory.as_ref(), self.store.folder(), OnceCell::new());
        let tensorrt = definition.tensorrt.clone().unwrap_or_default();
        let priority = stream_priority(definition);
        let (engine, store, turn) = (&**engine, &self.store, &turn);
        let mut source = Source { engine, path, cut, memory, tensorrt, cache, priority, part, store, file, turn };
        if definition.tensorrt.is_some() && on_gpus && engine.info().name != "tensorrt" {
            tracing::warn!(
                model = %definition.name,
                "its configuration asks for TensorRT (optimization.execution_accelerators), and the engine is {}: --engine tensorrt compiles the models for it",
                engine.info().name
            );
        }
        let held = (!on_gpus).then(|| self.model_memory.begin(&definition.name));
        if !is_emulated(definition) {
            // Refuses what is no model, or points outside its folder, before any engine sees it.
            downbeat_engine::inspect(path)?;
            if let Some(held) = &held {
                held.hold(
                    MemoryPart::Weights,
                    engine.weight_copies().saturating_mul(downbeat_engine::file_bytes(path)?),
                )?;
            }
        }
        let mut model = match source.load(1) {
            Err(error) if source.cut != Cut::Whole => {
                // What cannot be loaded whole either is for the engine to say.
                source.cut = Cut::Whole;
                let whole = source.load(1)?;
                if is_asked {
                    return Err(refuses(error.into_reason()).into());
                }
                tracing::info!(model = %definition.name, %error, "runs as one stage");
                whole
            }
            loaded => loaded?,
        };
        definition.complete(model.signature())?;
        if let Some(most) = model.profile().map(LatencyProfile::max_batch)
            && most < definition.batching.max_batch_size
        {
            tracing::info!(model = %definition.name, max_batch_size = most, "the model runs no larger batches");
            definition.batching.max_batch_size = most;
            definition.config.max_batch_size = i32::try_from(most).unwrap_or(i32::MAX);
        }
        for input in definition.inputs.iter().filter(|i| i.optional && !defaults.contains_key(&i.client.name)) {
            tracing::warn!(
                model = %definition.name, input = %input.client.name,
                "optional in the configuration, but the model file has no value for it: every request must have it"
            );
        }
        let plan_of = |definition: &ModelDefinition, max_batch_size| {
            BatchCodec::new(definition.inputs.clone(), definition.outputs.clone(), max_batch_size)
                .with_defaults(&defaults)
                .map_err(anyhow::Error::msg)
        };
        let mut plan = plan_of(definition, definition.batching.max_batch_size)?;
        let mut padding = None;
        if routed {
            padding = host::padding(&plan, policy).map_err(|error| refuses(error.to_string()))?;
            let largest = policy.settings.largest_request(plan.max_batch()).map_err(refuses)?;
            if largest < plan.max_batch() {
                tracing::info!(model = %definition.name, max_batch_size = largest, "the device policy's lanes take no larger batches");
                definition.batching.max_batch_size = largest;
                definition.config.max_batch_size = i32::try_from(largest).unwrap_or(i32::MAX);
                plan = plan_of(definition, largest)?;
            }
            warn_of_levels(definition, policy.name);
        }
        model.set_shapes(plan.shape_ranges(padding.as_deref().and_then(Padding::max_length)));
        let works = |device: &usize| model.lost(*device).is_none();
        let device = devices.iter().copied().find(works).or(devices.first().copied()).unwrap_or(0);
        if let Some(padding) = &padding {
            host::check_padding(&plan, padding, &*model, device, self.clock)
                .map_err(|error| refuses(error.to_string()))?;
        }
        model.set_batched(plan.is_batched());
        if let Some(held) = &held {
            held.hold(MemoryPart::Run, largest_run(&*model, &plan))?;
        }
        let name = definition.name.clone();
        let mut first = None;
        budget.begin_lanes(&*model);
        // An emulated model answers whatever fits its inputs.
        if model.profile().is_none() {
            let mut lane = model.lane_at(Place { device, share: Share::Whole })?;
            if definition.warmups.is_empty() {
                let fill = warm_up::find_answer(&plan, model.segments(), &mut *lane)?;
                plan = plan.with_fill(fill);
            }
            first = Some(lane);
        }
        let plan = Arc::new(if on_gpus { plan.for_model(model.clone()) } else { plan });
        let (mut wanted, mut run) = (Vec::new(), None);
        if let Some(lane) = first.as_mut().filter(|_| on_gpus) {
            // Before it is measured, so that no more sizes are set up for that than there is memory for.
            let (budget, plan, model) = (&budget, &plan, &*model);
            let mut warm_up = WarmUp { name: &name, model, plan, budget, wanted, run };
            warm_up.whole(&[], device, &mut **lane)?;
            (wanted, run) = (warm_up.wanted, warm_up.run);
        }
        progress.step("measuring", 0.2);
        let Profiled { profile, threads: on_threads, settled } = match &why {
            Reason::Chosen(chosen) => {
                if chosen.threads > 1 {
                    first = None;
                    model = source.load(chosen.threads)?;
                }
                Profiled { profile: chosen.profile.clone(), threads: chosen.threads, settled: chosen.settled }
            }
            Reason::Asked(_) | Reason::Look(_) => {
                self.profile(&mut model, &plan, &source, threads, progress, &mut first)?
            }
        };
        let profiles = self.by_hardware(&*model, &plan, &source, threads, (&placed, device), &profile);
        if settled {
            self.unsettled.lock().remove(&name);
        } else {
            self.unsettled.lock().insert(name.clone());
        }
        let slo = self.options.slo(&name, definition.slo);
        if let Some(slo) = slo
            && profile.latency(1) > slo
        {
            tracing::warn!(
                model = %name, version, slo = %slo, needed = %profile.latency(1),
                "a single request takes longer than the model's SLO: nearly all requests will be rejected"
            );
        }
        let (mut report, mut chosen) = match why {
            Reason::Asked(report) => (report, None),
            Reason::Chosen(chosen) => (chosen.report.clone(), Some(chosen)),
            Reason::Look(asked) => {
                let all_cores = || std::thread::available_parallelism().map_or(1, usize::from);
                let runs_elsewhere = on_gpus || is_emulated(definition);
                let auto = AutoSubject {
                    options: &self.options,
                    definition,
                    plan: &plan,
                    profile: &profile,
                    cores: part.map_or_else(all_cores, |part| part.threads),
                    threads: on_threads,
                    runs_elsewhere,
                    at_once: if runs_elsewhere { 1 } else { self.at_once(definition).min(devices.len() as u32) },
                };
                let subject = self.subject(&*model, &plan);
                let Looked { report, better } = self.look(&auto, asked, &subject, device, &source, threads);
                if let Some((inputs, overlap)) = better {
                    let chosen = Chosen { report, inputs, overlap, profile, threads: on_threads, settled };
                    return Ok(Loaded::Better(Box::new(chosen)));
                }
                (report, None)
            }
        };
        let metrics = self.metrics.model(&name, &version.to_string());
        let queue_bound = self.queue_bound(definition);
        let mut segments = None;
        if routed {
            let subject = SegmentSubject {
                model: &*model,
                plan: &plan,
                padding: padding.as_deref(),
                clock: self.clock,
                budget: self.options.profiling.budget,
            };
            let measured = self.segments(&subject, &source, threads, &profile, first.take());
            if let Some(looked_at) = chosen.take() {
                let is_cut = policy.settings.cut().0 != Cut::Whole;
                let looked_at = if is_cut { looked_at.with_cut(&measured).map_err(refuses)? } else { *looked_at };
                report = looked_at.report.clone();
                chosen = Some(Box::new(looked_at));
            }
            segments = Some(measured);
            budget.begin_lanes(&*model);
        }
        let warm = first.is_some().then_some(device);
        let lanes = match self.at_once(definition) {
            _ if on_gpus => LanesWanted::EachDevice(first.map(|lane| (device, lane))),
            // Nobody said how many devices there are to be: there come to be more.
            at_once if self.executors_grow() => LanesWanted::AnyDevice((at_once as usize).min(MOST_EXECUTORS)),
            at_once => LanesWanted::AnyDevice((at_once as usize).min(devices.len())),
        };
        progress.step("warming up", 0.9);
        let samples: Arc<[Sample]> = self.samples(definition, &plan)?.into();
        let budget = &budget;
        let mut warm_up = WarmUp { name: &name, model: &*model, plan: &plan, budget, wanted, run };
        let dispatch = self.options.dispatch_policy(&name, definition.dispatch);
        let drop = self.options.drop_policy(&name, definition.drop, dispatch) != DropPolicy::None;
        let guard = chosen.map(|chosen| {
            let AutoInputs { profile, max_batch, launch, .. } = chosen.inputs;
            let at_once = self.at_once(definition).min(devices.len() as u32);
            Arc::new(PolicyGuard::new(GuardOptions { profile, max_batch, launch, at_once, drop }, self.clock))
        });
        let is_there = |host: &&Arc<DeviceHost>| devices.contains(&host.device());
        let on: Vec<_> = self.driver.hosts().iter().filter(is_there).cloned().collect();
        let setup = LaneSetup {
            id: self.driver.next_model(),
            name: &name,
            version: &version.to_string(),
            model: &model,
            plan: plan.clone(),
            segments: segments.unwrap_or_else(|| SegmentProfile::even(&profile, model.segments())),
            profile: profile.clone(),
            policy,
            guard,
            queue_delay: definition.batching.max_queue_delay,
            drop,
            queue_bound,
            cores: (!on_gpus && !is_emulated(definition)).then(|| u32::try_from(most).unwrap_or(u32::MAX)),
            metrics: self.metrics.lanes(),
            memory: held.as_ref(),
            hosts: &on,
            partition: placed.partition(),
            warm_up: self.warm_up_later(is_emulated(definition), &name, &model, &plan, &samples, limit),
        };
        let mut count = 1;
        let hosts = if routed {
            // There are more lanes than one now.
            warm_up.run = None;
            host::start(setup, padding, |device, specs, lanes| {
                count = lanes.len();
                warm_up.lanes(&samples, device, specs, lanes)
            })?
        } else {
            host::start_granted(setup, lanes, |device, lane| match warm {
                // The one that was measured has run all sizes before.
                Some(measured) if on_gpus && measured == device => warm_up.with_samples(&samples, lane),
                _ => warm_up.whole(&samples, device, lane),
            })?
        };
        if routed || on_gpus {
            warm_up.say(count);
        }
        say_graphs(&name, version, &*model);
        let loaded = LoadedVersion::new(hosts, report, metrics, queue_bound).keeping(folder).holding(held);
        if routed {
            return Ok(Loaded::Ready(Arc::new(self.ready(loaded, engine.info().name, on_threads, begin))));
        }
        let key =
            if loaded.plan.has_varying_shapes() { loaded.plan.shape_key_of(PROFILED_LENGTH) } else { ShapeKey::new() };
        let queue = self.queue(definition, &placed, profiles, None);
        // Nobody else knows of this loaded yet, so there cannot be another queue.
        let _ = loaded.insert_queue(key, queue);
        let loaded = Arc::new(self.ready(loaded, engine.info().name, on_threads, begin));
        self.grow(&loaded, self.at_once(definition))?;
        Ok(Loaded::Ready(loaded))
    }

    /// Looks whether another policy than `exclusive` suits a model that is loaded as that runs it.
    fn look(
        &self,
        auto: &AutoSubject<'_>,
        asked: PolicyReport,
        subject: &profiler::Subject<'_>,
        device: usize,
        source: &Source<'_>,
        threads: Threads,
    ) -> Looked {
        let key = source.batch_key(threads, auto.plan.max_batch()).map(|key| format!("{key}-together"));
        let stored = key.as_ref().ok().and_then(|key| self.store.get::<StoredAuto>(key));
        let known = stored.as_ref().map(|stored| stored.launch);
        let launch = || known.or_else(|| self.launch_time(source.turn));
        let overlap = |launch| {
            if let Some(stored) = stored {
                return Some(stored.overlap);
            }
            let measure = || auto_profiler::overlap(subject, device, auto.plan.max_batch());
            let (overlap, was_alone) = source.turn.timed(measure);
            let overlap = overlap?;
            if was_alone {
                let stored = StoredAuto { launch, overlap: overlap.clone() };
                if let Err(error) = key.and_then(|key| self.store.put(&key, &stored).map_err(|error| error.to_string()))
                {
                    tracing::warn!(%error, "what two lanes do together cannot be stored; it will be measured again at the next start");
                }
            }
            Some(overlap)
        };
        let (choice, measured, better) = auto.choose(launch, overlap);
        let mut report = PolicyReport { measured, ..asked };
        report.take_choice(&choice);
        tracing::info!(model = %auto.definition.name, policy = %choice.policy, reason = %choice.reason, "the policy that suits it");
        Looked { report, better: better.filter(|_| choice.policy != PolicyName::EXCLUSIVE) }
    }

    /// What it takes to hand something over to another thread, measured once.
    fn launch_time(&self, turn: &LoadTurn<'_>) -> Option<Duration> {
        let known = *self.launch.lock();
        known.or_else(|| {
            let measured = turn.timed(|| host::hand_over_time(self.clock)).0;
            *self.launch.lock() = measured;
            measured
        })
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

    /// Runs lanes for the first time that are made beside those that serve: what they take is held to the same limit.
    fn warm_up_later(
        &self,
        is_emulated: bool,
        name: &str,
        model: &Arc<dyn Model>,
        plan: &Arc<BatchCodec>,
        samples: &Arc<[Sample]>,
        limit: Option<u64>,
    ) -> WarmUpLanes {
        let engine = if is_emulated { self.engines.emulated.clone() } else { self.engines.onnx.clone() };
        let (name, model, plan, samples) = (name.to_owned(), model.clone(), plan.clone(), samples.clone());
        Arc::new(move |device, specs, lanes| {
            let budget = DeviceBudget::before(&*engine, &[device], limit);
            // Which sizes the model runs was settled when it was loaded.
            let (wanted, run) = (Vec::new(), Some(Vec::new()));
            let mut warm_up = WarmUp { name: &name, model: &*model, plan: &plan, budget: &budget, wanted, run };
            warm_up.lanes(&samples, device, specs, lanes)
        })
    }

    /// Whether there come to be as many executors as the models want.
    fn executors_grow(&self) -> bool {
        self.options.devices == 0 && self.engines.gpus.is_empty() && !self.partitions.are_there()
    }

    /// The most batches of a version that run at once.
    fn at_once(&self, definition: &ModelDefinition) -> u32 {
        let executors_grow = self.executors_grow();
        match definition.instances {
            _ if definition.batching.preserve_ordering => 1,
            // An instance group is for each of its GPUs, and each runs one batch at a time.
            _ if !self.engines.gpus.is_empty() && !is_emulated(definition) => u32::MAX,
            // What every configuration says that does not care. Executors that share the cores would only slow each other down.
            0 | 1 if executors_grow => 1,
            // As many as there are devices.
            0 | 1 => u32::MAX,
            instances => instances,
        }
    }

    /// Adds the executors that a version wants, where nobody chose their number ([`executors`]).
    fn grow(&self, loaded: &Arc<LoadedVersion>, at_once: u32) -> anyhow::Result<()> {
        if !self.executors_grow() {
            return Ok(());
        }
        let mut wishes = self.wishes.lock();
        let same = |other: &LoadedVersion| (&other.name, &other.version) == (&loaded.name, &loaded.version);
        // One that is replaced gives its place up.
        wishes.retain(|(other, _)| other.upgrade().is_some_and(|other| !same(&other)));
        wishes.push((Arc::downgrade(loaded), at_once));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let executors = executors(wishes.iter().map(|(_, at_once)| *at_once), cores);
        self.driver.grow_to(executors).context("no thread for another executor")
    }

    /// Says that a version is loaded.
    fn ready(&self, loaded: LoadedVersion, engine: &str, threads: usize, begin: Time) -> LoadedVersion {
        let took = self.clock.now().since(begin);
        let LoadedVersion { name, version, .. } = &loaded;
        self.metrics.set_load_duration(name, version, took);
        loaded.say_memory(&self.metrics);
        tracing::info!(model = %name, %version, engine, threads, load_ms = took.as_millis_f64(), "ready");
        loaded
    }

    /// What a device policy decides by: the times of the model's segments by items and length. `profile` is that of the whole.
    fn segments(
        &self,
        subject: &SegmentSubject<'_>,
        source: &Source<'_>,
        threads: Threads,
        profile: &LatencyProfile,
        lane: Option<Box<dyn Lane>>,
    ) -> SegmentProfile {
        let SegmentSubject { model, plan, padding, .. } = *subject;
        let is_known = model.profile().is_some() || (model.segments() == 1 && padding.is_none());
        if is_known || !self.options.profiling.enabled {
            return SegmentProfile::even(profile, model.segments());
        }
        let key = source.batch_key(threads, plan.max_batch()).ok();
        if let Some(stored) = key.as_ref().and_then(|key| subject.stored(&self.store, key)) {
            return stored;
        }
        let lane = lane.map_or_else(|| model.lane(), Ok).ok();
        let measured =
            lane.and_then(|mut lane| source.turn.timed(|| subject.measured(&mut *lane, &self.store, key.as_deref())).0);
        measured.unwrap_or_else(|| {
            tracing::warn!(path = %source.path.display(), "its segments cannot be measured with requests of our own making; they are taken to be alike");
            SegmentProfile::even(profile, model.segments())
        })
    }

    /// A queue in the scheduler for one shape of a model's requests, of which these are the profiles, by hardware. `other` is one of the version's, if it has one.
    pub fn queue(
        &self,
        definition: &ModelDefinition,
        placed: &Placed,
        profiles: Vec<LatencyProfile>,
        other: Option<QueueHandle>,
    ) -> Arc<Queue> {
        let name = &definition.name;
        let batching = &definition.batching;
        let configured = definition.dispatch.or_else(|| {
            // A queue delay in config.pbtxt is a wish for Triton's own policy.
            (batching.max_queue_delay > Duration::ZERO).then_some(DispatchPolicy::Timeout)
        });
        let chosen = self.options.dispatch_policy(name, configured);
        let dispatch = match chosen {
            DispatchPolicy::Deferred => cluster::DispatchPolicy::Deferred,
            DispatchPolicy::Latest => cluster::DispatchPolicy::Latest,
            DispatchPolicy::Eager => cluster::DispatchPolicy::Eager,
            DispatchPolicy::Adaptive => cluster::DispatchPolicy::Adaptive { consolidate: false },
            DispatchPolicy::Consolidating => cluster::DispatchPolicy::Adaptive { consolidate: true },
            // Refused when the model was loaded: nothing is routed from here.
            DispatchPolicy::Route => cluster::DispatchPolicy::Eager,
            DispatchPolicy::Timeout => cluster::DispatchPolicy::Timeout {
                delay: batching.max_queue_delay,
                preferred: batching.preferred.clone(),
            },
        };
        let gathers = matches!(dispatch, cluster::DispatchPolicy::Timeout { delay, .. } if delay > Duration::ZERO);
        let drop = match self.options.drop_policy(name, definition.drop, chosen) {
            DropPolicy::Window => cluster::DropPolicy::WindowDrop,
            DropPolicy::Adaptive => cluster::DropPolicy::Adaptive,
            DropPolicy::Head => cluster::DropPolicy::HeadDrop,
            DropPolicy::None => cluster::DropPolicy::None,
        };
        let levels = batching
            .levels
            .iter()
            .map(|level| PriorityLevel {
                max_queue: if level.max_queue_size == 0 { u32::MAX } else { level.max_queue_size },
                timeout_action: match level.timeout_action {
                    TimeoutAction::Reject => cluster::TimeoutAction::Reject,
                    TimeoutAction::Delay => cluster::TimeoutAction::Delay,
                },
            })
            .collect();
        let place = self.driver.add_queue(QueueOptions {
            max_batch: batching.max_batch_size.max(1),
            profiles: placed.profiles(|hardware| profiles[hardware].clone()),
            drop,
            dispatch,
            max_in_flight: self.at_once(definition),
            shares_limit: other.map(|other| other.model),
            max_wait: self.options.max_queue_wait(name).map_or(Duration::MAX, |wait| wait + batching.max_queue_delay),
            levels,
        });
        Arc::new(Queue {
            place,
            placed: placed.clone(),
            drops: drop != cluster::DropPolicy::None,
            gathers,
            refiners: profiles.into_iter().map(|profile| Mutex::new(ProfileRefiner::new(profile))).collect(),
            last_used_ns: self.clock.now().as_nanos().into(),
        })
    }

    fn queue_bound(&self, definition: &ModelDefinition) -> u32 {
        let bound = self
            .options
            .models
            .get(&definition.name)
            .and_then(|model| model.max_queue_size)
            .or_else(|| {
                // What config.pbtxt bounds on every level is bounded in all by the sum.
                let levels = definition.batching.levels.iter().map(|level| level.max_queue_size);
                levels.into_iter().try_fold(0u32, |sum, bound| (bound > 0).then(|| sum.saturating_add(bound)))
            })
            .unwrap_or(self.options.max_queue_size);
        if bound == 0 { u32::MAX } else { bound }
    }

    /// The latency profile, stored or measured, and the number of threads it was measured with, on which `model` is
    /// loaded afterwards. `lane` is one of the model's, where there is one already.
    fn profile(
        &self,
        model: &mut Arc<dyn Model>,
        plan: &BatchCodec,
        source: &Source<'_>,
        threads: Threads,
        progress: &dyn LoadProgress,
        lane: &mut Option<Box<dyn Lane>>,
    ) -> anyhow::Result<Profiled> {
        let settled = true;
        if let Some(profile) = model.profile() {
            return Ok(Profiled { profile: profile.clone(), threads: 1, settled });
        }
        let unknown = || LatencyProfile::linear(UNKNOWN, UNKNOWN, plan.max_batch());
        let mut reload = |threads: usize| -> anyhow::Result<()> {
            if threads > 1 {
                *lane = None;
                *model = source.load(threads)?;
            }
            Ok(())
        };
        if !self.options.profiling.enabled {
            reload(threads.most())?;
            return Ok(Profiled { profile: unknown()?, threads: threads.most(), settled });
        }
        let key = source.batch_key(threads, plan.max_batch());
        if let Ok(key) = &key
            && let Some(stored) = self.store.get::<StoredProfile>(key)
            && stored.settled
            && let Ok(profile) = profiler::profile(&stored.measurements)
        {
            reload(stored.threads)?;
            return Ok(Profiled { profile, threads: stored.threads, settled });
        }
        if let Threads::Chosen(threads) = threads {
            reload(threads)?;
        }
        let sizes = profiler::default_sizes(plan.max_batch());
        let budget = self.options.profiling.budget;
        let part = |share: f64| Duration::from_secs_f64(budget.as_secs_f64() * share);
        let mut on_threads = if let Threads::Chosen(threads) = threads { threads } else { 1 };
        let mut measure_all = || -> anyhow::Result<Vec<Measurement>> {
            if let Threads::UpTo(most) = threads
                && most > 1
            {
                let largest = self.subject(&**model, plan).measure(
                    &mut *model.lane()?,
                    &[plan.max_batch()],
                    part(0.05),
                    |_| {},
                )?;
                if largest.iter().any(|m| m.min_ns > WORTH_THREADS.as_nanos()) || largest.is_empty() {
                    progress.step("choosing the threads", 0.25);
                    let wide = source.load(most)?;
                    let subjects = [self.subject(&**model, plan), self.subject(&*wide, plan)];
                    if profiler::compare(subjects, plan.max_batch(), part(0.3))? {
                        *lane = None;
                        *model = wide;
                        on_threads = most;
                    }
                }
            }
            let mut done = 0;
            let lane = match lane {
                Some(lane) => lane,
                None => lane.insert(model.lane()?),
            };
            let measured = self.subject(&**model, plan).measure(&mut **lane, &sizes, part(0.65), |m| {
                done += 1;
                let fraction = 0.35 + 0.65 * f64::from(done) / sizes.len() as f64;
                progress.step(&format!("measured batch {}: {}", m.batch, m.median()), 0.2 + 0.7 * fraction);
            });
            Ok(measured?)
        };
        let (timed, was_alone) = source.turn.timed(|| {
            let (watch, busy_before) = (LoadWatch::start(), self.metrics.totals().busy);
            let begin = self.clock.now();
            let measurements = measure_all()?;
            // Neighbours, or this server's own models: either has had the cores that were counted on.
            let took = self.clock.now().since(begin).as_secs_f64().max(f64::MIN_POSITIVE);
            let served = self.metrics.totals().busy.saturating_sub(busy_before).as_secs_f64() / took;
            let is_quiet = watch.others().is_none_or(|others| others <= NOISE) && served <= NOISE;
            anyhow::Ok((measurements, is_quiet))
        });
        let (measurements, is_quiet) = match timed {
            Ok(measured) => measured,
            // A model may refuse what is made up (an index, a length); that is no reason not to serve it.
            Err(error) => {
                tracing::warn!(path = %source.path.display(), %error, "cannot be measured with requests of our own making; its latency is learned in service");
                return Ok(Profiled { profile: unknown()?, threads: on_threads, settled });
            }
        };
        let profile = profiler::profile(&measurements)?;
        let settled = is_quiet && was_alone;
        if !settled {
            tracing::info!(
                path = %source.path.display(), threads = on_threads,
                "measured on a machine with other things to do; it is measured again when there are none, or at the next start"
            );
        }
        let (model, engine) = (source.path.to_owned(), source.engine.info().name.to_owned());
        let stored = StoredProfile { model, engine, threads: on_threads, settled, measurements };
        if let Err(error) = key.and_then(|key| self.store.put(&key, &stored).map_err(|error| error.to_string())) {
            tracing::warn!(%error, "the latency profile cannot be stored; it will be measured again at the next start");
        }
        Ok(Profiled { profile, threads: on_threads, settled })
    }

    /// What a model takes on each hardware that it is on: `profile` on that of `device`, measured or stored elsewhere. Where it cannot be measured it is taken to be alike, until it has
    /// been observed.
    fn by_hardware(
        &self,
        model: &dyn Model,
        plan: &BatchCodec,
        source: &Source<'_>,
        threads: Threads,
        (placed, device): (&Placed, usize),
        profile: &LatencyProfile,
    ) -> Vec<LatencyProfile> {
        let measured = |hardware: usize| {
            let is_there = |other: &&usize| placed.hardware(**other) == hardware && model.lost(**other).is_none();
            let other = *placed.devices().iter().find(is_there).filter(|_| hardware != placed.hardware(device))?;
            if model.profile().is_some() || !self.options.profiling.enabled {
                return None;
            }
            let gpu = self.engines.gpus.get(other)?;
            let key = source.batch_key(threads, plan.max_batch()).ok();
            let key = key.map(|key| format!("{key}-on-{}-{}", gpu.name.replace(' ', "_"), gpu.multiprocessors));
            if let Some(stored) = key.as_ref().and_then(|key| self.store.get::<StoredProfile>(key))
                && stored.settled
            {
                return profiler::profile(&stored.measurements).ok();
            }
            let mut lane = model.lane_at(Place { device: other, share: Share::Whole }).ok()?;
            let sizes = profiler::default_sizes(plan.max_batch());
            let measure =
                || self.subject(model, plan).measure(&mut *lane, &sizes, self.options.profiling.budget, |_| {});
            let (measurements, settled) = source.turn.timed(measure);
            let measurements = measurements.ok()?;
            let profile = profiler::profile(&measurements).ok()?;
            let (model, engine) = (source.path.to_owned(), source.engine.info().name.to_owned());
            let stored = StoredProfile { model, engine, threads: 1, settled, measurements };
            if let Some(Err(error)) = key.map(|key| self.store.put(&key, &stored)) {
                tracing::warn!(%error, "the latency profile cannot be stored; it will be measured again at the next start");
            }
            Some(profile)
        };
        (0..placed.hardwares()).map(|hardware| measured(hardware).unwrap_or_else(|| profile.clone())).collect()
    }

    /// A model to be timed.
    fn subject<'a>(&self, model: &'a dyn Model, plan: &'a BatchCodec) -> profiler::Subject<'a> {
        profiler::Subject { model, plan, varying: PROFILED_LENGTH, clock: self.clock }
    }

    /// The models that were measured on a machine with other things to do, by name.
    pub fn unsettled(&self) -> Vec<String> {
        self.unsettled.lock().iter().cloned().collect()
    }

    /// The configured warm-up samples, or a request of our own making if there are none.
    fn samples(&self, definition: &ModelDefinition, plan: &BatchCodec) -> anyhow::Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for sample in &definition.warmups {
            let mut request = sample.request(&definition.name).map_err(anyhow::Error::msg)?;
            let admitted =
                plan.admit(&mut request).map_err(|error| anyhow::anyhow!("model_warmup '{}': {error}", sample.name))?;
            samples.push(Sample { name: Some(sample.name.clone()), count: sample.count, request: admitted });
        }
        if samples.is_empty()
            && let Ok(request) = plan.trial(PROFILED_LENGTH)
        {
            samples.push(Sample { name: None, count: 1, request });
        }
        Ok(samples)
    }
}

/// What the largest batch of a model takes while it runs, bytes, by estimate; 0 where that depends on what is asked.
fn largest_run(model: &dyn Model, plan: &BatchCodec) -> u64 {
    let Some(memory) = model.run_memory().filter(|_| !plan.has_varying_shapes()) else { return 0 };
    let Ok(trial) = plan.trial(PROFILED_LENGTH) else { return 0 };
    let shape = |(index, item): (usize, &[i64])| {
        let item: Vec<usize> = item.iter().map(|dim| (*dim).max(0) as usize).collect();
        plan.engine_shape(index, plan.max_batch() as usize, &item)
    };
    let shapes: Vec<Vec<usize>> = plan.item_shapes(&trial).enumerate().map(shape).collect();
    memory.estimate(shapes.iter().map(|shape| &shape[..]))
}

/// Says what of a model that is warmed up runs as CUDA graphs.
fn say_graphs(name: &str, version: u64, model: &dyn Model) {
    if let Some(graphs) = graph_report::summary(model.segments(), &model.graphs()) {
        tracing::info!(model = %name, version, "{graphs}");
    }
}

/// A model file with what its configuration says beyond it, for the engines to read.
struct OpenedFile {
    path: PathBuf,
    defaults: BTreeMap<String, DefaultValue>,
    folder: TempDir,
}

/// The file at `path` with what the configuration says of its inputs; `None` if it says all that itself.
fn open_declared(definition: &ModelDefinition, path: &Path) -> anyhow::Result<Option<OpenedFile>> {
    let mut declared = Declared::default();
    for (name, shape, is_optional) in definition.declared_inputs() {
        declared.shapes.extend(shape.map(|shape| (name.to_owned(), shape)));
        declared.optional.extend(is_optional.then(|| name.to_owned()));
    }
    let Some(opened) = declared.open(path)? else { return Ok(None) };
    let folder = downbeat_engine::scratch::folder()?;
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, &opened.bytes)?;
    Ok(Some(OpenedFile { path, defaults: opened.defaults, folder }))
}

/// Says what of a model's queue policies a device policy passes over.
fn warn_of_levels(definition: &ModelDefinition, policy: PolicyName) {
    let levels = &definition.batching.levels;
    if levels.len() > 1 {
        tracing::warn!(model = %definition.name, %policy, "the device policy knows no priority levels: all requests wait in one queue");
    }
    if levels.iter().any(|level| level.default_timeout > Duration::ZERO) {
        tracing::warn!(model = %definition.name, %policy, "the device policy knows no queue timeouts: requests have deadlines by slo_ms and their own timeout");
    }
}

fn is_emulated(definition: &ModelDefinition) -> bool {
    definition.format == ModelFormat::Emulated
}
