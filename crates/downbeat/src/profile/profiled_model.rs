//! Loads a model of the repository for measuring.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::bail;
use downbeat_core::tensor::TensorSpec;
use downbeat_engine::{Cut, Engine, LoadOptions, Model};
use downbeat_host::request::batch_codec::BatchCodec;
use downbeat_host::run::row_judgement::by_graph;
use downbeat_models::load::model_source::stream_priority;
use downbeat_models::measure::sampler::Subject;
use downbeat_repair::RepairedFile;
use downbeat_report::note;
use downbeat_repository::{ModelFormat, ModelRepository, RowDependence};
use downbeat_server::{Trial, find_answer};
use downbeat_service::clock::Clock;

use crate::options::units;
use crate::profile::share_report::MeasuredOn;

/// A model to load, and the way to load it.
pub struct ModelWanted<'a> {
    /// The model repository.
    pub repository: ModelRepository,
    /// The model's name.
    pub name: &'a str,
    /// The model's version; `None`: the latest that is served.
    pub version: Option<u64>,
    /// The largest batch to measure: the limit of a model that names none.
    pub largest_batch: u32,
    /// The places to cut the model.
    pub cut: Cut,
    /// Threads inside one run; not 0.
    pub threads: usize,
}

/// A model of the repository, loaded for measuring.
pub struct ProfiledModel {
    /// The model's name.
    pub name: String,
    /// The loaded version.
    pub version: u64,
    /// The version's file.
    pub file: PathBuf,
    /// The format of the file.
    pub format: ModelFormat,
    /// The engine that runs the model.
    pub engine: Arc<dyn Engine>,
    /// The loaded model.
    pub model: Arc<dyn Model>,
    /// The file, if it was repaired: an engine may read it again.
    pub repaired: Option<RepairedFile>,
    /// Makes the model's batches.
    pub codec: BatchCodec,
    /// The largest batch; 0: the model has no batch dimension.
    pub max_batch: u32,
    /// Threads inside one run.
    pub threads: usize,
}

impl ProfiledModel {
    /// Loads a model with the engine that `engine` returns for its format.
    ///
    /// # Errors
    /// If there is no such model or version, or the engine cannot run it.
    pub fn load(
        wanted: ModelWanted<'_>,
        engine: impl FnOnce(ModelFormat) -> anyhow::Result<Arc<dyn Engine>>,
    ) -> anyhow::Result<Self> {
        let ModelWanted { repository, name, version, largest_batch, cut, threads } = wanted;
        let repository = repository.with_default_max_batch_size(largest_batch);
        let mut definition = repository.definition(name, None)?;
        for warning in &definition.warnings {
            note(format_args!("warning: {warning}"));
        }
        let version = version.unwrap_or_else(|| definition.versions.last().map_or(1, |(version, _)| *version));
        let Some(file) = definition.version_file(version).map(Path::to_owned) else {
            let served: Vec<String> = definition.versions.iter().map(|(v, _)| v.to_string()).collect();
            bail!(
                "model '{name}' has no version {version} that is served; its versions in service: {}",
                served.join(", ")
            );
        };
        let engine = engine(definition.format)?;
        let repaired = RepairedFile::of(&file)?;
        repaired.iter().for_each(|repaired| note(repaired.summary()));
        let file = repaired.as_ref().map_or(file, RepairedFile::path);
        let model = engine.load(&LoadOptions {
            cut,
            priority: stream_priority(&definition),
            ..LoadOptions::new(&file, threads)
        })?;
        if definition.format == ModelFormat::Onnx {
            let (verdict, _) = by_graph(&file);
            // If the graph does not decide whether rows are independent, the model is measured in
            // the batches that its user asks for.
            definition.rows = Some(verdict).filter(|verdict| verdict.rows == RowDependence::Mixed);
        }
        definition.complete(model.signature())?;
        let max_batch = definition.batching.max_batch_size;
        let mut codec =
            BatchCodec::new(definition.inputs.clone(), definition.outputs.clone(), max_batch).for_model(model.clone());
        let may_refuse = |input: &TensorSpec| !input.datatype.is_float();
        // Indices, lengths and texts.
        if definition.format != ModelFormat::Emulated && model.signature().inputs.iter().any(may_refuse) {
            // A model that refuses the usual fill of the inputs would refuse it in the measurement
            // too. So a fill that the model accepts is searched first.
            if let Ok(Trial::Answers { fill, .. }) = find_answer(&codec, &*model, &mut *model.lane()?, Clock::start()) {
                codec = codec.with_fill(fill);
            }
        }
        Ok(ProfiledModel {
            name: name.to_owned(),
            version,
            file,
            format: definition.format,
            engine,
            model,
            repaired,
            codec,
            max_batch,
            threads,
        })
    }

    /// The batch sizes that the user asked for, ascending, or the sizes of `default` for the
    /// model's largest batch.
    ///
    /// # Errors
    /// If the model does not take a size.
    pub fn sizes(&self, asked: Option<&[u32]>, default: fn(u32) -> Vec<u32>) -> anyhow::Result<Vec<u32>> {
        let Some(sizes) = asked else { return Ok(default(self.max_batch)) };
        let (largest, max_batch) = (sizes.last().copied().unwrap_or(1), self.max_batch);
        match max_batch {
            _ if largest <= max_batch.max(1) => Ok(sizes.to_vec()),
            0 => bail!("model '{}' has no batch dimension: only --batch 1 can be measured", self.name),
            _ => {
                bail!(
                    "model '{}' takes batches of up to {max_batch} (max_batch_size), but the command asks for \
                     {largest}",
                    self.name
                )
            }
        }
    }

    /// The model for a profiler. Dimensions that vary have the size `varying`.
    pub fn subject(&self, varying: i64, clock: Clock) -> Subject<'_> {
        Subject { model: &*self.model, codec: &self.codec, varying, clock }
    }

    /// The length of dimensions that vary, if the model has any.
    pub fn length(&self, asked: i64) -> Option<i64> {
        self.codec.has_varying_shapes().then_some(asked)
    }

    /// The engine, device, threads and length in words.
    pub fn conditions(&self, length: i64) -> String {
        let info = self.engine.info();
        let threads = units::threads(self.threads);
        let length = self.length(length).map_or_else(String::new, |n| format!(", varying dimensions {n}"));
        format!("{} {} on {}, {threads} a run{length}", info.name, info.version, info.device)
    }

    /// The engine, its device and its threads.
    pub fn on(&self) -> MeasuredOn {
        let info = self.engine.info();
        MeasuredOn { engine: info.name.to_owned(), device: info.device, threads: self.threads }
    }

    /// Bytes of an item's inputs and of its outputs; dimensions that vary have `length`.
    pub fn item_bytes(&self, length: i64) -> [u64; 2] {
        let varying = length.unsigned_abs();
        let elements = |dims: &[i64]| -> u64 {
            dims.iter().skip(1).map(|dim| u64::try_from(*dim).unwrap_or(varying)).fold(1, u64::saturating_mul)
        };
        let bytes = |specs: &[TensorSpec]| -> u64 {
            specs.iter().map(|spec| elements(&spec.dims) * spec.datatype.size().unwrap_or(4) as u64).sum()
        };
        let signature = self.model.signature();
        [bytes(&signature.inputs), bytes(&signature.outputs)]
    }
}
