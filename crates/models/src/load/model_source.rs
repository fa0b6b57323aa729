//! A model file with the engine that reads it, and the store of its measurements.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use downbeat_core::device::spatial::knee_up_to;
use downbeat_engine::{
    Cut, Declared, DefaultValue, Engine, HeldFile, LoadError, LoadOptions, Model, Part, Share, StreamPriority,
};
use downbeat_protocol::inference::ModelOptimizationPolicy;
use downbeat_protocol::inference::model_optimization_policy::ModelPriority;
use downbeat_repository::{ModelDefinition, ModelFormat};
use tempfile::TempDir;

use crate::load::load_turns::LoadTurn;
use crate::measure::profile_store::{ProfileStore, StoredOperators, StoredShares};
use crate::measure::profiler::Threads;

/// A model file and the engine that reads it.
pub struct ModelSource<'a> {
    /// The engine that loads it.
    pub engine: &'a Arc<dyn Engine>,
    /// The load's turn, for its timed parts.
    pub turn: LoadTurn<'a>,
    /// The store for its measurements.
    pub store: &'a ProfileStore,
    /// How it is loaded.
    pub options: LoadOptions,
    /// The values of inputs that requests may leave out.
    pub defaults: BTreeMap<String, DefaultValue>,
    /// The folder of its file, if the file was made for the engine.
    pub folder: Option<TempDir>,
    /// The part of a device that it is on; `None`: devices are not divided.
    part: Option<&'a Part>,
    /// See [`ProfileStore::file_key`].
    file: OnceCell<std::io::Result<String>>,
    _held: HeldFile,
}

impl<'a> ModelSource<'a> {
    /// Opens the file that `options` name. If the configuration declares more of its tensors than
    /// the file, a rewritten copy of the file is loaded.
    ///
    /// # Errors
    /// If it cannot be read, or does not suit its configuration.
    pub fn open(
        engine: &'a Arc<dyn Engine>,
        turn: LoadTurn<'a>,
        store: &'a ProfileStore,
        part: Option<&'a Part>,
        definition: &ModelDefinition,
        mut options: LoadOptions,
    ) -> anyhow::Result<Self> {
        let (mut defaults, mut folder) = (BTreeMap::new(), None);
        let mut declared = Declared::default();
        for (name, shape, is_optional) in definition.declared_inputs() {
            declared.shapes.extend(shape.map(|shape| (name.to_owned(), shape)));
            declared.optional.extend(is_optional.then(|| name.to_owned()));
        }
        declared.shapes.extend(definition.declared_outputs().map(|(name, shape)| (name.to_owned(), shape)));
        if has_graph(definition)
            && let Some(opened) = declared.open(&options.path)?
        {
            let own = downbeat_engine::scratch::folder()?;
            options.path = own.path().join("model.onnx");
            std::fs::write(&options.path, &opened.bytes)?;
            (defaults, folder) = (opened.defaults, Some(own));
        }
        options.share = part.map_or(Share::Whole, |part| part.share);
        options.cache = store.folder.clone();
        options.tensorrt = definition.tensorrt.clone().unwrap_or_default();
        options.priority = stream_priority(definition);
        let (file, _held) = (OnceCell::new(), HeldFile::new(&options.path));
        Ok(ModelSource { engine, turn, store, options, defaults, folder, part, file, _held })
    }

    /// Loads the model. A model that is cut needs measurements of its operators: they come from the
    /// store, or are made and stored.
    ///
    /// # Errors
    /// The error of the engine.
    pub fn load(&self, threads: usize) -> Result<Arc<dyn Model>, LoadError> {
        let mut options = LoadOptions { threads, ..self.options.clone() };
        if options.cut == Cut::Whole {
            return self.engine.load(&options);
        }
        let key = self.key(Threads::Chosen(threads)).map(|key| format!("{key}-operators"));
        let stored = key.as_ref().ok().and_then(|key| self.store.get::<StoredOperators>(key));
        options.operators = stored.map(|stored| Arc::new(stored.operators));
        // The engine times operators without stored measurements.
        let model = match &options.operators {
            Some(_) => self.engine.load(&options)?,
            None => self.turn.timed(|| self.engine.load(&options)).0?,
        };
        if let Some(operators) = model.operators()
            && !options.operators.is_some_and(|known| Arc::ptr_eq(&known, operators))
        {
            let (model, engine) = self.names();
            let stored = StoredOperators { model, engine, threads, operators: (**operators).clone() };
            self.store.keep(key, "the times of the model's operators", &stored);
        }
        Ok(model)
    }

    /// Compute units beyond which a batch of up to `max_batch` items is hardly faster, if the model
    /// or the store knows it.
    pub fn knee(&self, model: &dyn Model, max_batch: u32) -> Option<u32> {
        let stored = || {
            let key = ProfileStore::shares_key(self.file().ok()?, &self.engine.info());
            knee_up_to(&self.store.get::<StoredShares>(&key)?.knees, max_batch)
        };
        model.knee().or_else(stored)
    }

    /// Its file and its engine's name, for the store.
    pub fn names(&self) -> (std::path::PathBuf, String) {
        (self.options.path.clone(), self.engine.info().name.to_owned())
    }

    /// The key of the file's content. Reads the file, once.
    fn file(&self) -> Result<&str, &std::io::Error> {
        self.file.get_or_init(|| ProfileStore::file_key(&self.options.path)).as_deref()
    }

    /// The common beginning of the keys of its measurements with these threads. Reads the file,
    /// once.
    fn key(&self, threads: Threads) -> Result<String, String> {
        let file = self.file().map_err(ToString::to_string)?;
        Ok(ProfileStore::key(file, &self.engine.info(), threads, self.part.map(|part| &*part.size)))
    }

    /// The key for the verdict on its rows. The file and the engine decide the verdict; the machine
    /// does not.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn rows_key(&self) -> Result<String, String> {
        let file = self.file().map_err(ToString::to_string)?;
        Ok(ProfileStore::rows_key(file, &self.engine.info()))
    }

    /// The key for the news that its file can be run.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn trial_key(&self) -> Result<String, String> {
        let file = self.file().map_err(ToString::to_string)?;
        Ok(ProfileStore::trial_key(file, &self.engine.info()))
    }

    /// The key for its profiles, measured with these threads and up to `max_batch` items.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn batch_key(&self, threads: Threads, max_batch: u32) -> Result<String, String> {
        Ok(format!("{}-b{max_batch}", self.key(threads)?))
    }
}

/// The stream priority of a model's kernels on a GPU, by its configuration
/// (`optimization.priority`).
pub fn stream_priority(definition: &ModelDefinition) -> StreamPriority {
    match definition.config.optimization.as_ref().map(ModelOptimizationPolicy::priority) {
        Some(ModelPriority::PriorityMax) => StreamPriority::Max,
        Some(ModelPriority::PriorityMin) => StreamPriority::Min,
        Some(ModelPriority::PriorityDefault) | None => StreamPriority::Default,
    }
}

/// Whether the model's file is a graph, which engines read, check and try.
pub fn has_graph(definition: &ModelDefinition) -> bool {
    definition.format == ModelFormat::Onnx
}

/// Whether the model is code in Python.
pub fn is_python(definition: &ModelDefinition) -> bool {
    definition.format == ModelFormat::Python
}

/// Whether the model is emulated: it has no engine's file and takes its profile's latency.
pub fn is_emulated(definition: &ModelDefinition) -> bool {
    definition.format == ModelFormat::Emulated
}
