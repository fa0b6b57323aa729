//! A backend's offer: its slots, and the models of its registry with their latencies.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Read;
use std::sync::{Arc, Weak};

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions as QueueOptions};
use downbeat_core::device::PartitionId;
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_host::request::batch_codec::PROFILED_LENGTH;
use downbeat_host::request::queue::Queue;
use downbeat_models::loaded_version::LoadedVersion;
use downbeat_models::registry::Registry;
use downbeat_models::serving::{Model as ServedModel, Pipeline};
use downbeat_preprocess::Recipe;
use downbeat_repository::ModelDefinition;
use downbeat_roles::{Loadable, Offer, OfferedModel, Slot};
use downbeat_service::options::ServerOptions;
use downbeat_service::refusal::FullBatch;
use downbeat_service::report::machine_load::processor;
use prost::Message;

use super::definition::{Definition, SentRecipe};
use super::slot_map::{Place, SlotMap};

/// The least change of a latency that is worth a new offer, as a share of the latency.
const WORTH_TELLING: f64 = 0.03;
/// How often the repositories are checked for models.
const LOOKS_AT_FILES_EVERY: Duration = Duration::from_millis(2_000);
/// The parameter of a model whose requests must not run a second time if the first run is
/// uncertain.
const RUN_ONCE: &str = "run_once";

/// Makes a backend's offer, whenever it changes.
pub struct OfferMaker {
    registry: Registry,
    options: Arc<ServerOptions>,
    slots: Arc<SlotMap>,
    /// The processor's name, for machines without GPUs.
    processor: String,
    /// By name and version: the contents of the files.
    files: BTreeMap<(String, u64), Files>,
    last: Option<Offer>,
    /// Models that schedulers may order to load and unload, with the bytes of their files. `looked`:
    /// when the repositories were last checked.
    repository: Vec<(String, u64)>,
    looked: Option<Time>,
    /// By name: what the last load of each model showed.
    loads: BTreeMap<String, ShownByLoad>,
}

/// The memory and the time of a model, as its load showed them.
struct ShownByLoad {
    memory: u64,
    run_memory: u64,
    took: Duration,
}

/// How a version's batches are made and run.
struct Batches {
    settings: QueueOptions,
    /// By slot: `l(b)`.
    profiles: Vec<(u32, LatencyProfile)>,
    full: FullBatch,
}

/// The results of reading a version's files.
#[derive(Clone)]
struct Files {
    of: Weak<LoadedVersion>,
    fingerprint: String,
    recipe: Option<Arc<SentRecipe>>,
}

impl OfferMaker {
    /// An offer maker that has made no offer yet.
    pub fn new(registry: Registry, options: Arc<ServerOptions>, slots: Arc<SlotMap>) -> Self {
        let (files, repository, loads) = Default::default();
        let (processor, last, looked) = (processor(), None, None);
        OfferMaker { registry, options, slots, processor, files, last, repository, looked, loads }
    }

    /// The present offer, if it differs from the last one. Reads the files of new models.
    pub fn next(&mut self) -> Option<Offer> {
        let offer = self.offer();
        if self.last.as_ref().is_some_and(|last| is_like(last, &offer)) {
            return None;
        }
        self.last = Some(offer.clone());
        Some(offer)
    }

    fn offer(&mut self) -> Offer {
        let now = self.registry.driver.clock().now();
        if self.looked.is_none_or(|looked| now.since(looked) >= LOOKS_AT_FILES_EVERY) {
            self.looked = Some(now);
            self.repository = self.registry.loadable();
        }
        let partitions = self.registry.driver.slots();
        let serving = self.registry.serving().all();
        let versions = serving.iter().flat_map(|served| served.versions.values());
        let routed = versions.filter(|loaded| loaded.hosts.is_routed).flat_map(|loaded| loaded.hosts.devices());
        let slots = self.slots.extend(partitions.len(), routed.map(|(host, _)| host.device));
        let hardware = |device: usize, part: Option<&str>| {
            let gpu = self.registry.gpus.get(device).map(|gpu| gpu.name.clone());
            let part = part.map(|part| format!(" {part}")).unwrap_or_default();
            format!("{}{part}", gpu.unwrap_or_else(|| self.processor.clone()))
        };
        let parts = self.registry.parts();
        let slot = |place: &Place| {
            let (device, part, is_seat) = match place {
                Place::Partition(number) => {
                    let (device, partition) = partitions.get(number.0 as usize).copied().unwrap_or_default();
                    (device, parts.get(partition), false)
                }
                Place::Seat(device) => (*device, None, true),
            };
            let hardware = hardware(device, part.map(|part| &*part.size));
            Slot { hardware, device: u32::try_from(device).unwrap_or(u32::MAX), is_seat }
        };
        let mut offer = Offer {
            slots: slots.iter().map(slot).collect(),
            repository: self.loadable(&serving),
            memory: self.registry.device_memory(),
            runs: self.registry.run_memory(),
            ..Offer::default()
        };
        for served in &serving {
            for (number, loaded) in &served.versions {
                offer.models.extend(self.model(&served.definition, *number, loaded, (&slots, &partitions)));
            }
        }
        for pipeline in self.registry.serving().pipelines() {
            offer.models.extend(pipeline.versions.keys().map(|version| self.ensemble(&pipeline, *version)));
        }
        self.files.retain(|_, files| files.of.strong_count() > 0);
        offer
    }

    /// The models of the repository. A model that was loaded once tells what that showed, also after
    /// it is unloaded. Other models take as much for each byte of their files.
    fn loadable(&mut self, serving: &[Arc<ServedModel>]) -> Vec<Loadable> {
        for served in serving {
            let versions = || served.versions.values();
            let memory = |of: fn((u64, u64)) -> u64| versions().map(move |loaded| of(loaded.memory()));
            let shown = ShownByLoad {
                memory: memory(|(held, _)| held).fold(0, u64::saturating_add),
                run_memory: memory(|(_, run)| run).max().unwrap_or(0),
                took: versions().fold(Duration::ZERO, |all, loaded| all + loaded.load_time),
            };
            self.loads.insert(served.definition.name.clone(), shown);
        }
        // An engine without an account of its memory shows nothing.
        let shows = |model: &str| self.loads.get(model).filter(|shown| shown.memory > 0);
        let (mut files, mut memory, mut runs) = (0.0, 0.0, 0.0);
        for (bytes, shown) in self.repository.iter().filter_map(|(model, bytes)| Some((*bytes, shows(model)?))) {
            files += bytes as f64;
            (memory, runs) = (memory + shown.memory as f64, runs + shown.run_memory as f64);
        }
        let scaled = |bytes: u64, to: f64| if files > 0.0 { (bytes as f64 * to / files) as u64 } else { 0 };
        let loadable = |(model, bytes): &(String, u64)| {
            let (shown, known) = (self.loads.get(model), shows(model));
            Loadable {
                model: model.clone(),
                memory: known.map_or_else(|| scaled(*bytes, memory).max(*bytes), |shown| shown.memory),
                run_memory: known.map_or_else(|| scaled(*bytes, runs), |shown| shown.run_memory),
                load_time: shown.map(|shown| shown.took),
                failed: None,
            }
        };
        self.repository.iter().map(loadable).collect()
    }

    /// An ensemble has no slots: frontends run its steps.
    fn ensemble(&self, pipeline: &Pipeline, version: u64) -> OfferedModel {
        let (definition, step_times) = (&pipeline.definition, pipeline.step_times());
        let (name, slo) = (&definition.name, self.options.slo(&definition.name, definition.slo));
        let fingerprint = format!("{:08x}", crc32fast::hash(&definition.config.encode_to_vec()));
        let full = FullBatch { items: 1, takes: step_times.iter().fold(Duration::ZERO, |all, time| all + *time) };
        // Times change with every batch, and are hints.
        let definition = self.same_as_before(name, version, &fingerprint).unwrap_or_else(|| {
            let (config, batching) = (definition.config.clone(), definition.batching.clone());
            let (fingerprint, codec) = (fingerprint.clone(), pipeline.codec.clone());
            Definition { fingerprint, config, codec, batching, slo, full, recipe: None, step_times }.encode()
        });
        OfferedModel {
            model: name.clone(),
            version,
            definition,
            fingerprint,
            max_batch: pipeline.codec.max_batch.max(1),
            drop: DropPolicy::default(),
            dispatch: DispatchPolicy::Route,
            max_wait: Duration::MAX,
            levels: Vec::new(),
            at_once: 1,
            item_bytes: 0,
            may_repeat: true,
            shape: Vec::new(),
            profiles: Vec::new(),
        }
    }

    /// The definition of the last offer, if the model has not changed since.
    fn same_as_before(&self, name: &str, version: u64, fingerprint: &str) -> Option<Vec<u8>> {
        let mut before = self.last.iter().flat_map(|last| &last.models);
        let same = before.find(|before| before.model == name && before.version == version)?;
        (same.fingerprint == fingerprint).then(|| same.definition.clone())
    }

    fn model(
        &mut self,
        definition: &ModelDefinition,
        number: u64,
        loaded: &Arc<LoadedVersion>,
        slots: (&[Place], &[(usize, usize)]),
    ) -> Option<OfferedModel> {
        let name = &definition.name;
        let key = loaded.codec.profiled_key();
        let Batches { settings, profiles, full } = match loaded.hosts.is_routed {
            true => self.of_policy(definition, loaded, slots.0),
            false => self.of_scheduler(loaded.queue(&key)?, slots),
        };
        let slo = self.options.slo(name, definition.slo);
        let items = settings.max_batch.max(1);
        // The cost of a full batch changes with every batch, and is a hint. An unchanged
        // fingerprint therefore keeps its last definition.
        let Files { fingerprint, recipe, .. } = self.files(definition, number, loaded);
        let same = self.same_as_before(name, number, &fingerprint);
        Some(OfferedModel {
            model: name.clone(),
            version: number,
            definition: same.unwrap_or_else(|| {
                let mut config = definition.config.clone();
                // Frontends that do not get the steps must not promise them.
                if let Some(preprocess) = loaded.preprocess.as_ref().filter(|_| recipe.is_some()) {
                    preprocess.describe(&mut config);
                }
                let (codec, batching) = (loaded.codec.clone(), definition.batching.clone());
                let (fingerprint, step_times) = (fingerprint.clone(), Vec::new());
                Definition { fingerprint, config, codec, batching, slo, full, recipe, step_times }.encode()
            }),
            fingerprint,
            max_batch: items,
            drop: settings.drop,
            dispatch: settings.dispatch.clone(),
            max_wait: settings.max_wait,
            levels: settings.levels.clone(),
            at_once: settings.max_in_flight,
            item_bytes: loaded.codec.item_bytes(PROFILED_LENGTH).map_or(u64::MAX, |bytes| bytes as u64),
            may_repeat: definition.parameter(RUN_ONCE).is_none_or(|said| said.trim() != "true"),
            shape: key.to_vec(),
            profiles,
        })
    }

    /// The batches of a version that the cluster's scheduler makes, on partitions.
    fn of_scheduler(&self, queue: Arc<Queue>, (slots, partitions): (&[Place], &[(usize, usize)])) -> Batches {
        let profile = |(slot, place): (usize, &Place)| {
            let Place::Partition(number) = place else { return None };
            let (device, partition) = *partitions.get(number.0 as usize)?;
            let partition = PartitionId(partition as u32);
            let profile = || queue.refiner(device, partition).lock().profile().clone();
            self.registry.driver.runs(*number, &queue).then(|| (slot as u32, profile()))
        };
        let profiles = slots.iter().enumerate().filter_map(profile).collect();
        let settings = queue.settings().clone();
        let items = settings.max_batch.max(1);
        Batches { full: FullBatch { items, takes: queue.least(items) }, settings, profiles }
    }

    /// The batches of a version whose device policy makes the launches: on seats. Each request goes to
    /// the device that will answer first. It waits in the cluster only if all seats are taken.
    fn of_policy(&self, definition: &ModelDefinition, loaded: &LoadedVersion, slots: &[Place]) -> Batches {
        let profile = |(slot, place): (usize, &Place)| {
            let Place::Seat(device) = place else { return None };
            Some((slot as u32, loaded.hosts.on_device(*device)?.profile.clone()))
        };
        let profiles = slots.iter().enumerate().filter_map(profile).collect();
        let first = &loaded.hosts.first().profile;
        let settings = Queue::routed_options(&self.options, definition, first.clone());
        let items = settings.max_batch;
        Batches { full: FullBatch { items, takes: first.latency(items) }, settings, profiles }
    }

    /// The steps to a model's inputs, packed for sending.
    fn recipe(&self, definition: &ModelDefinition) -> Option<Arc<SentRecipe>> {
        let steps = self.options.models.get(&definition.name)?.preprocess.clone()?;
        let packed =
            Recipe::read(steps, |file| definition.file_beside(file)).and_then(|recipe| SentRecipe::pack(&recipe));
        let said = |reason: &String| {
            let model = &definition.name;
            tracing::warn!(%model, %reason, "the cluster's frontends take tensors alone for this model");
        };
        packed.inspect_err(said).ok().map(Arc::new)
    }

    /// The results of reading a version's files, read once. The fingerprint covers the completed
    /// configuration, the steps and the file, wherever these are.
    fn files(&mut self, definition: &ModelDefinition, number: u64, loaded: &Arc<LoadedVersion>) -> Files {
        let key = (definition.name.clone(), number);
        let known = self.files.get(&key);
        if let Some(known) = known.filter(|files| std::ptr::eq(files.of.as_ptr(), Arc::as_ptr(loaded))) {
            return known.clone();
        }
        let recipe = loaded.preprocess.as_ref().and_then(|_| self.recipe(definition));
        let mut sum = crc32fast::Hasher::new();
        sum.update(&definition.config.encode_to_vec());
        recipe.iter().flat_map(|recipe| recipe.parts()).for_each(|part| sum.update(part));
        let mut fingerprint = format!("{:08x}", sum.finalize());
        let file = definition.version_file(number).map(std::fs::File::open);
        if let Some(Ok(mut file)) = file {
            let (mut sum, mut size, mut buffer) = (crc32fast::Hasher::new(), 0, vec![0; 1 << 20]);
            while let Ok(read @ 1..) = file.read(&mut buffer) {
                sum.update(&buffer[..read]);
                size += read;
            }
            // Writing to a string cannot fail.
            let _ = write!(fingerprint, "-{size}-{:08x}", sum.finalize());
        }
        let files = Files { of: Arc::downgrade(loaded), fingerprint, recipe };
        self.files.insert(key, files.clone());
        files
    }
}

/// Whether two offers differ too little to send the new offer.
fn is_like(last: &Offer, now: &Offer) -> bool {
    let without = |model: &OfferedModel| OfferedModel { profiles: Vec::new(), ..model.clone() };
    let close = |(a, b): (&(u32, LatencyProfile), &(u32, LatencyProfile))| {
        let differs = |batch: u32| {
            let (a, b) = (a.1.latency(batch).as_nanos() as f64, b.1.latency(batch).as_nanos() as f64);
            (a - b).abs() > WORTH_TELLING * a
        };
        a.0 == b.0 && a.1.max_batch() == b.1.max_batch() && !(1..=a.1.max_batch()).any(differs)
    };
    let same = |(a, b): (&OfferedModel, &OfferedModel)| {
        without(a) == without(b)
            && a.profiles.len() == b.profiles.len()
            && a.profiles.iter().zip(&b.profiles).all(close)
    };
    (&last.slots, &last.repository, last.memory, last.runs) == (&now.slots, &now.repository, now.memory, now.runs)
        && last.models.len() == now.models.len()
        && last.models.iter().zip(&now.models).all(same)
}
