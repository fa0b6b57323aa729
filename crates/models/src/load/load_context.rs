//! The context that all loads of a server share: its engines, devices and options, and the turns of
//! loads (`load_turns.rs`).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_engine::MemoryBudget;
use downbeat_host::device::AnswerLooker;
use downbeat_host::device_map::DeviceMap;
use downbeat_host::groups::group_predictor::GroupPredictor;
use downbeat_host::model_memory::ModelMemory;
use downbeat_host::request::batch_codec::BatchCodec;
use downbeat_host::scheduler::Driver;
use downbeat_preprocess::Recipe;
use downbeat_repair::RepairedFile;
use downbeat_repository::{ModelDefinition, RowDependence, RowVerdict};
use downbeat_service::clock::Clock;
use downbeat_service::memory;
use downbeat_service::metrics::Metrics;
use downbeat_service::options::{Isolation, ServerOptions};
use parking_lot::Mutex;

use crate::load::engines::Engines;
use crate::load::load_turns::LoadTurns;
use crate::load::model_source::{has_graph, is_python};
use crate::measure::measuring_time::MeasuringTime;
use crate::measure::profile_store::ProfileStore;
use crate::measure::remeasuring::Unsettled;
use crate::partitions::Partitions;
use crate::preprocess::{Preprocess, Preprocessing};

/// Hears how a load goes on.
pub trait LoadProgress: Send + Sync {
    /// A step began, `fraction` (0 to 1) of the load is done.
    fn step(&self, what: &str, fraction: f64);
}

impl LoadProgress for () {
    fn step(&self, _what: &str, _fraction: f64) {}
}

/// A version to load.
pub struct VersionFile<'a> {
    /// The version's number.
    pub version: u64,
    /// The model file of the version.
    pub path: &'a Path,
    /// Whether it could be loaded once more.
    pub may_come_again: bool,
    /// Whether the version in service answered its trial, so that this one may replace it only if
    /// it answers, too.
    pub must_answer: bool,
    /// Hears how the load goes on.
    pub progress: &'a dyn LoadProgress,
    /// The time for measuring.
    pub time: &'a MeasuringTime<'a>,
    /// The file at `path`, if it was repaired for the load.
    pub repaired: Option<Arc<RepairedFile>>,
}

/// The context that all loads of a server share.
pub struct LoadContext {
    /// The server's options.
    pub options: Arc<ServerOptions>,
    /// The engines that run models.
    pub engines: Engines,
    /// The partitions of devices.
    pub partitions: Partitions,
    /// Which models are on which devices.
    pub device_map: DeviceMap,
    /// The devices, and the scheduler.
    pub driver: Arc<Driver>,
    /// The server's metrics.
    pub metrics: Arc<Metrics>,
    /// The memory that versions on the CPU hold.
    pub model_memory: Arc<ModelMemory>,
    /// The measurements of earlier starts.
    pub store: ProfileStore,
    /// The predictor of operator groups.
    pub predictor: Arc<GroupPredictor>,
    /// The server's clock.
    pub clock: Clock,
    /// The memory that the runs of all models may take; `None`: no limit.
    pub memory: Option<Arc<MemoryBudget>>,
    /// The turn of loading a model onto GPUs.
    pub gpu_turn: Mutex<()>,
    /// The turns of timed measurements.
    pub turns: LoadTurns,
    /// The versions, by model, that must be measured again.
    pub unsettled: Mutex<BTreeMap<(String, u64), Unsettled>>,
    /// Looks at answers in service.
    pub looker: AnswerLooker,
    /// The verdicts on models' rows, by the key that they are stored under.
    pub rows: Mutex<BTreeMap<String, RowVerdict>>,
    /// Resources shared by the steps of models that take pictures or texts.
    preprocessing: Preprocessing,
    /// The time to hand work over to another thread, once it was measured on a quiet machine.
    pub launch: Mutex<Option<Duration>>,
}

impl LoadContext {
    /// Makes the context for loads onto the devices of `driver`.
    pub fn new(
        options: Arc<ServerOptions>,
        engines: Engines,
        partitions: Partitions,
        driver: Arc<Driver>,
        device_map: DeviceMap,
        metrics: Arc<Metrics>,
        model_memory: Arc<ModelMemory>,
    ) -> Self {
        LoadContext {
            store: ProfileStore::new(options.profiling.cache_dir.clone()),
            predictor: driver.predictor().clone(),
            clock: driver.clock(),
            memory: memory::run_budget(&options).map(MemoryBudget::new),
            turns: LoadTurns::new(options.profiling.budget.into()),
            gpu_turn: Mutex::default(),
            unsettled: Mutex::default(),
            looker: AnswerLooker::default(),
            rows: Mutex::default(),
            preprocessing: Preprocessing::new(&options, driver.clock()),
            launch: Mutex::default(),
            options,
            engines,
            partitions,
            device_map,
            driver,
            metrics,
            model_memory,
        }
    }

    /// Whether there come to be as many executors as the models want.
    pub fn executors_grow(&self) -> bool {
        self.options.devices == 0 && self.engines.gpus.is_empty() && !self.partitions.are_there()
    }

    /// Whether a model is on GPUs.
    pub fn is_on_gpus(&self, definition: &ModelDefinition) -> bool {
        has_graph(definition) && !self.engines.gpus.is_empty()
    }

    /// Whether a version runs in a process of its own. The log has the reason if `auto` chose a
    /// process.
    pub fn isolation(&self, definition: &ModelDefinition, file: &VersionFile<'_>) -> Isolation {
        let name = &definition.name;
        // Python models have processes anyhow.
        if is_python(definition) {
            return Isolation::None;
        }
        let chosen = self.options.isolation(name);
        if chosen != Isolation::Auto {
            return chosen;
        }
        // Another program that embeds the server has no executor to start.
        if !has_graph(definition) || self.is_on_gpus(definition) || self.options.executor.is_none() {
            return Isolation::None;
        }
        let reason = if file.may_come_again {
            // The engine reports the defect of such a file.
            downbeat_engine::hazard(file.path).unwrap_or_else(|_| Some("the model's file cannot be read".to_owned()))
        } else {
            Some("the model's files came with a load request".to_owned())
        };
        let Some(reason) = reason else { return Isolation::None };
        tracing::info!(
            model = %name, version = file.version, %reason,
            "the model runs in a process of its own (isolation is auto)"
        );
        Isolation::Process
    }

    /// Whether the number of batches of a model that run at the same time is measured: the options
    /// and the configuration give none.
    pub fn chooses_lanes(&self, definition: &ModelDefinition) -> bool {
        definition.instances == 0
            && self.executors_grow()
            && !definition.batching.preserve_ordering
            && has_graph(definition)
    }

    /// The most batches of a version that run at once.
    pub fn at_once(&self, definition: &ModelDefinition) -> u32 {
        match definition.instances {
            _ if definition.batching.preserve_ordering => 1,
            // Each instance is a process.
            instances if is_python(definition) => instances.max(1),
            // An instance group is for each of its GPUs, and each runs one batch at a time.
            _ if self.is_on_gpus(definition) => u32::MAX,
            // The configuration has no count, and the measurement found one lane best.
            0 | 1 if self.executors_grow() => 1,
            // Only the number of devices limits it.
            0 | 1 => u32::MAX,
            instances => instances,
        }
    }

    /// The most items of a model that wait.
    pub fn queue_bound(&self, definition: &ModelDefinition) -> u32 {
        let own = self.options.models.get(&definition.name).and_then(|model| model.max_queue_size);
        let bound = own.or_else(|| {
            // A bound in config.pbtxt on every level makes a bound in all: their sum.
            let levels = definition.batching.levels.iter().map(|level| level.max_queue_size);
            levels.into_iter().try_fold(0u32, |sum, bound| (bound > 0).then(|| sum.saturating_add(bound)))
        });
        Some(bound.unwrap_or(self.options.max_queue_size)).filter(|bound| *bound > 0).unwrap_or(u32::MAX)
    }

    /// Remembers a verdict on a model's rows, here and for the next start. The next start repeats a
    /// check that failed.
    pub fn keep_rows(&self, key: Option<&str>, verdict: &RowVerdict) {
        let Some(key) = key else { return };
        self.rows.lock().insert(key.to_owned(), verdict.clone());
        if verdict.rows != RowDependence::Unknown {
            self.store.keep(Ok(key.to_owned()), "the verdict whether requests may share batches", verdict);
        }
    }

    /// The steps from pictures or texts to a model's inputs, if the options give it some.
    ///
    /// # Errors
    /// The wrong step, or why the steps' tensors do not fit the model.
    pub fn preprocess(
        &self,
        definition: &ModelDefinition,
        codec: &BatchCodec,
    ) -> anyhow::Result<Option<Arc<Preprocess>>> {
        let its = self.options.models.get(&definition.name).and_then(|model| model.preprocess.as_deref());
        let Some(steps) = its else { return Ok(None) };
        let recipe = Recipe::read(steps.to_vec(), |file| definition.file_beside(file));
        let made = recipe.and_then(|recipe| self.preprocessing.steps(&recipe, codec));
        made.map(Some).map_err(|reason| anyhow::anyhow!("[models.{}] preprocess: {reason}", definition.name))
    }
}
