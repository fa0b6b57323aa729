//! The definition of a model, resolved from its folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_core::rollout::RolloutTerms;
use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_protocol::inference::model_config::SchedulingChoice;
use downbeat_protocol::inference::{self, ModelConfig, ModelTensorReshape};

use crate::binding::TensorBinding;
use crate::boundary::Boundary;
use crate::config::batching::Batching;
use crate::config::check::Report;
use crate::config::config_source::ConfigSource;
use crate::config::finding::{ConfigError, Finding, sorted};
use crate::config::policy::{DispatchPolicy, DropPolicy, PolicyName};
use crate::config::warmup::Warmup;
use crate::ensemble::Ensemble;
use crate::row_verdict::RowVerdict;

/// A model's folder, read and checked. [`ModelDefinition::complete`] adds the facts of the model
/// file.
#[derive(Clone, Debug)]
pub struct ModelDefinition {
    /// The model's name, which is the folder's.
    pub name: String,
    /// The model's folder.
    pub dir: PathBuf,
    /// The configuration: as written, and complete after [`ModelDefinition::complete`].
    pub config: ModelConfig,
    /// The versions that `version_policy` selects, ascending, each with its model file, or the
    /// folder of an ensemble. At least one.
    pub versions: Vec<(u64, PathBuf)>,
    /// The kind of the versions' files.
    pub format: ModelFormat,
    /// Queues and batches. Final after [`ModelDefinition::complete`].
    pub batching: Batching,
    /// Batches that may run at the same time (the sum of `count` over all `instance_group`s). 0:
    /// the configuration has no count.
    pub instances: u32,
    /// The GPUs that the model is restricted to; `None`: all that the server uses. They come from
    /// `instance_group` or from
    /// [`ModelRepository::with_places`](crate::ModelRepository::with_places).
    pub gpus: Option<Vec<u32>>,
    /// The SLO (`parameters["slo_ms"]`), from arrival to answer.
    pub slo: Option<Duration>,
    /// The dispatch policy (`parameters["scheduler"]`).
    pub dispatch: Option<DispatchPolicy>,
    /// The device policy (`parameters["device_policy"]`).
    pub device: Option<PolicyName>,
    /// The drop policy (`parameters["drop"]`).
    pub drop: Option<DropPolicy>,
    /// How a new version comes into service (`parameters["rollout"]`); `None`: at once.
    pub rollout: Option<RolloutTerms>,
    /// Options of onnxruntime's TensorRT provider, by their names there, if the configuration asks
    /// for TensorRT (`optimization.execution_accelerators`).
    pub tensorrt: Option<BTreeMap<String, String>>,
    /// The steps of an ensemble; `None`: the model has files.
    pub ensemble: Option<Arc<Ensemble>>,
    /// Requests to send before the model is ready.
    pub warmups: Vec<Warmup>,
    /// Whether the rows of a batch depend on each other. `None`: not known;
    /// [`ModelDefinition::complete`] then treats the rows as independent.
    pub rows: Option<RowVerdict>,
    /// Requests of the configuration that are not fulfilled.
    pub warnings: Vec<Finding>,
    /// Inputs in the configuration's order. Empty before [`ModelDefinition::complete`].
    pub inputs: Vec<TensorBinding>,
    /// Outputs in the configuration's order. A configuration may leave out outputs of the model,
    /// which clients then do not see. Empty before [`ModelDefinition::complete`].
    pub outputs: Vec<TensorBinding>,
    pub(crate) boundary: Boundary,
    pub(crate) source: ConfigSource,
    pub(crate) labels: BTreeMap<String, Arc<[String]>>,
    pub(crate) completion: CompletionOptions,
}

/// A tensor of a configuration: name, datatype, sizes and the model's own sizes.
type Declared<'a> = (&'a String, i32, &'a Vec<i64>, Option<&'a ModelTensorReshape>);

/// The fault of a tensor of a model whose file does not show its tensors.
const MISSING: &str = "is missing, and only the model's own auto_complete_config may add this field";

/// The kind of a model file, which decides the engines that can load it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModelFormat {
    /// An ONNX graph.
    Onnx,
    /// A latency profile for the emulated engine.
    Emulated,
    /// No file: the model's steps run other models.
    Ensemble,
    /// Code in Python.
    Python,
}

impl ModelFormat {
    /// The formats of models with files. Where files decide, an earlier one goes first.
    pub(crate) const WITH_FILES: [ModelFormat; 3] = [ModelFormat::Onnx, ModelFormat::Emulated, ModelFormat::Python];

    /// The configuration's `backend`.
    pub const fn backend(self) -> &'static str {
        match self {
            ModelFormat::Onnx => "onnxruntime",
            ModelFormat::Emulated => "downbeat_emulated",
            ModelFormat::Ensemble => "",
            ModelFormat::Python => "python",
        }
    }

    /// The configuration's `platform`, which metadata shows.
    pub const fn platform(self) -> &'static str {
        match self {
            ModelFormat::Onnx => "onnxruntime_onnx",
            ModelFormat::Emulated => "downbeat_emulated",
            ModelFormat::Ensemble => "ensemble",
            ModelFormat::Python => "python",
        }
    }

    /// Default names of a model file, the preferred first.
    pub const fn file_names(self) -> &'static [&'static str] {
        match self {
            ModelFormat::Onnx => &["model.onnx"],
            ModelFormat::Emulated => &["model.emulated.toml", "model.emulated.json"],
            ModelFormat::Ensemble => &[],
            ModelFormat::Python => &["model.py"],
        }
    }
}

/// Options for completing a definition from its model file.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct CompletionOptions {
    /// Whether the definition is completed, or only checked.
    pub(crate) enabled: bool,
    /// Largest batch if the configuration has none and the model's dimensions allow any.
    pub(crate) default_max_batch_size: u32,
    /// The GPUs that models run on; empty: the CPU.
    pub(crate) gpus: Vec<u32>,
    /// Whether models with `KIND_GPU` run on the CPU of a server without GPUs, instead of being
    /// refused.
    pub(crate) cpu_for_gpus: bool,
    /// Models whose GPUs are chosen outside of their configuration, with these GPUs. The choice
    /// wins.
    pub(crate) places: BTreeMap<String, Vec<u32>>,
}

/// The core's names of a configuration's datatypes.
const DATATYPES: [(DataType, inference::DataType); 14] = [
    (DataType::Bool, inference::DataType::TypeBool),
    (DataType::Int8, inference::DataType::TypeInt8),
    (DataType::Int16, inference::DataType::TypeInt16),
    (DataType::Int32, inference::DataType::TypeInt32),
    (DataType::Int64, inference::DataType::TypeInt64),
    (DataType::Uint8, inference::DataType::TypeUint8),
    (DataType::Uint16, inference::DataType::TypeUint16),
    (DataType::Uint32, inference::DataType::TypeUint32),
    (DataType::Uint64, inference::DataType::TypeUint64),
    (DataType::Fp16, inference::DataType::TypeFp16),
    (DataType::Fp32, inference::DataType::TypeFp32),
    (DataType::Fp64, inference::DataType::TypeFp64),
    (DataType::Bytes, inference::DataType::TypeString),
    (DataType::Bf16, inference::DataType::TypeBf16),
];

/// The core's name of a configuration's datatype; `None` for `TYPE_INVALID` and numbers without a
/// meaning.
pub(crate) fn datatype(data_type: i32) -> Option<DataType> {
    DATATYPES.iter().find(|(_, written)| i32::from(*written) == data_type).map(|(datatype, _)| *datatype)
}

/// The configuration's name of a datatype.
pub(crate) fn config_datatype(datatype: DataType) -> inference::DataType {
    let found = DATATYPES.iter().find(|(known, _)| *known == datatype);
    found.map_or(inference::DataType::TypeInvalid, |(_, written)| *written)
}

impl ModelDefinition {
    /// Queues and batches of a configuration whose `max_batch_size` is `max_batch_size`.
    pub(crate) fn batching(config: &ModelConfig, max_batch_size: u32) -> Batching {
        match &config.scheduling_choice {
            Some(SchedulingChoice::DynamicBatching(batching)) => Batching::dynamic(max_batch_size, batching),
            _ => Batching::plain(max_batch_size),
        }
    }

    /// The configuration's inputs as written: the name, the sizes in the model's view (`None` if
    /// not written), and whether requests may leave the input out.
    pub fn declared_inputs(&self) -> impl Iterator<Item = (&str, Option<Vec<i64>>, bool)> {
        let batch = (self.source.config.max_batch_size > 0).then_some(-1);
        self.source.config.input.iter().map(move |input| {
            let dims = input.reshape.as_ref().map_or(&input.dims, |reshape| &reshape.shape);
            let shape = batch.into_iter().chain(dims.iter().copied()).collect();
            (input.name.as_str(), (!input.dims.is_empty()).then_some(shape), input.optional)
        })
    }

    /// Gives an output the names of its classes, unless the configuration has some.
    pub fn add_labels(&mut self, output: &str, labels: &[String]) {
        self.labels.entry(output.to_owned()).or_insert_with(|| labels.into());
    }

    /// Whether the configuration as written has a `max_batch_size`. The code of a Python model does
    /// not show one.
    pub fn writes_batch_size(&self) -> bool {
        self.source.says_max_batch_size() || !self.completion.enabled || self.format == ModelFormat::Python
    }

    /// Whether the model may complete its configuration.
    pub fn may_be_completed(&self) -> bool {
        self.completion.enabled
    }

    /// The configuration as written, with the model's name and kind, for a model that reads its own
    /// configuration.
    pub fn written(&self) -> ModelConfig {
        let mut config = self.source.config.clone();
        config.name.clone_from(&self.name);
        self.format.backend().clone_into(&mut config.backend);
        config
    }

    /// The inputs and outputs of the configuration as written, for a model whose file does not show
    /// them.
    ///
    /// # Errors
    /// If a tensor has no datatype or no sizes.
    pub fn declared_signature(&self) -> Result<Signature, ConfigError> {
        let mut report = Report::new(&self.source);
        let config = &self.source.config;
        let inputs = config.input.iter().map(|t| (&t.name, t.data_type, &t.dims, t.reshape.as_ref()));
        let outputs = config.output.iter().map(|t| (&t.name, t.data_type, &t.dims, t.reshape.as_ref()));
        let mut side = |word: &str, tensors: &mut dyn Iterator<Item = Declared<'_>>| {
            let mut specs = Vec::new();
            for (i, (name, data_type, dims, reshape)) in tensors.enumerate() {
                let Some(datatype) = datatype(data_type) else {
                    report.error(&format!("{word}[{i}].data_type"), MISSING);
                    continue;
                };
                if dims.is_empty() {
                    report.error(&format!("{word}[{i}].dims"), MISSING);
                    continue;
                }
                let item = reshape.map_or(dims, |reshape| &reshape.shape);
                let batch = (config.max_batch_size > 0).then_some(-1);
                let dims = batch.into_iter().chain(item.iter().copied()).collect();
                specs.push(TensorSpec { name: name.clone(), datatype, dims });
            }
            specs
        };
        let signature = Signature { inputs: side("input", &mut { inputs }), outputs: side("output", &mut { outputs }) };
        match report.errors.is_empty() {
            true => Ok(signature),
            false => Err(ConfigError { findings: sorted(report.errors) }),
        }
    }

    /// Takes the configuration that the model has completed, as JSON. The written configuration goes.
    ///
    /// # Errors
    /// If it is no configuration, or asks for parts that the server does not have.
    pub fn adopt(&mut self, json: &str) -> Result<(), ConfigError> {
        let source = ConfigSource::from_model(json)?;
        let mut report = Report::new(&source);
        report.check(&self.name);
        if !report.errors.is_empty() {
            return Err(ConfigError { findings: sorted(report.errors) });
        }
        self.source = source;
        Ok(())
    }

    /// The path of a file that options name relative to the model's folder, such as a
    /// `tokenizer.json`.
    ///
    /// # Errors
    /// In words, if the file does not exist, or lies outside the repository and may not be read.
    pub fn file_beside(&self, file: &Path) -> Result<PathBuf, String> {
        self.boundary.resolve(&self.dir, file)
    }

    /// The configuration's outputs as written: the name, and the sizes in the model's view. Outputs
    /// without sizes are left out.
    pub fn declared_outputs(&self) -> impl Iterator<Item = (&str, Vec<i64>)> {
        let batch = (self.source.config.max_batch_size > 0).then_some(-1);
        self.source.config.output.iter().filter(|output| !output.dims.is_empty()).map(move |output| {
            let dims = output.reshape.as_ref().map_or(&output.dims, |reshape| &reshape.shape);
            (output.name.as_str(), batch.into_iter().chain(dims.iter().copied()).collect())
        })
    }

    /// A string parameter of the configuration.
    pub fn parameter(&self, key: &str) -> Option<&str> {
        self.config.parameters.get(key).map(|p| p.string_value.as_str())
    }

    /// The file of a version.
    pub fn version_file(&self, version: u64) -> Option<&Path> {
        self.versions.iter().find(|(v, _)| *v == version).map(|(_, file)| file.as_path())
    }
}
