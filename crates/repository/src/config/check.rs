//! Checks a configuration without the model file: finds errors and ignored settings.

use std::collections::{BTreeMap, BTreeSet};

use downbeat_core::Duration;
use downbeat_core::pages::Pointer;
use downbeat_core::rollout::RolloutTerms;
use downbeat_protocol::inference::model_config::SchedulingChoice;
use downbeat_protocol::inference::model_version_policy::PolicyChoice;
use downbeat_protocol::inference::{
    ModelConfig, ModelDynamicBatching, ModelInput, ModelInstanceGroup, ModelTensorReshape, model_input,
    model_instance_group,
};

use crate::binding::show;
use crate::config::batching::{Batching, MAX_LEVELS, MOST_POLICIES};
use crate::config::config_source::ConfigSource;
use crate::config::finding::{Finding, did_you_mean};
use crate::config::policy::{DispatchPolicy, DropPolicy, PolicyName};
use crate::definition::{CompletionOptions, ModelFormat, datatype};
use crate::ensemble::Ensemble;

/// The remedy for a place that the server does not have.
const ELSEWHERE: &str = "or name the model's devices in [placement] of downbeat.toml";

/// Largest plausible batch size: beyond it, measuring a model alone would take all memory.
const MAX_BATCH_SIZE: i32 = 1 << 16;

/// The content of a configuration, in the types of a definition.
#[derive(Debug)]
pub(crate) struct Checked {
    /// `None`: the files in the folder decide.
    pub(crate) format: Option<ModelFormat>,
    pub(crate) ensemble: Option<Ensemble>,
    pub(crate) instances: u32,
    pub(crate) slo: Option<Duration>,
    pub(crate) dispatch: Option<DispatchPolicy>,
    pub(crate) device: Option<PolicyName>,
    pub(crate) drop: Option<DropPolicy>,
    pub(crate) rollout: Option<RolloutTerms>,
    /// See [`ModelDefinition::tensorrt`](crate::ModelDefinition::tensorrt).
    pub(crate) tensorrt: Option<BTreeMap<String, String>>,
}

/// The findings so far.
pub(crate) struct Report<'a> {
    source: &'a ConfigSource,
    pub(crate) errors: Vec<Finding>,
    pub(crate) warnings: Vec<Finding>,
}

impl<'a> Report<'a> {
    pub(crate) fn new(source: &'a ConfigSource) -> Self {
        Report { source, errors: Vec::new(), warnings: Vec::new() }
    }

    pub(crate) fn error(&mut self, field: &str, message: impl Into<String>) {
        self.errors.push(self.source.finding(field, message.into()));
    }

    pub(crate) fn warn(&mut self, field: &str, message: impl Into<String>) {
        self.warnings.push(self.source.finding(field, message.into()));
    }

    /// An error about a setting of Triton that this server does not have, and the page about the setting.
    pub(crate) fn refuse(&mut self, field: &str, message: &str, page: Pointer) {
        self.error(field, format!("{message} ({page})"));
    }

    /// A warning about a setting of Triton that this server ignores, and the page about the setting.
    pub(crate) fn pass_over(&mut self, field: &str, message: &str, page: Pointer) {
        self.warn(field, format!("{message} ({page})"));
    }

    /// Checks everything that does not need the model file, nor the server's devices.
    pub(crate) fn check(&mut self, model: &str) -> Checked {
        let config = &self.source.config;
        if !config.name.is_empty() && config.name != model {
            self.error(
                "name",
                format!(
                    "is '{}', but the folder is named '{model}'; rename one of them or leave the name out",
                    config.name
                ),
            );
        }
        match config.max_batch_size {
            0..=MAX_BATCH_SIZE => {}
            size @ ..0 => self.error("max_batch_size", format!("is {size}; must be 0 (no batch dimension) or larger")),
            size => self.error("max_batch_size", format!("is {size}; must be at most {MAX_BATCH_SIZE}")),
        }
        let format = self.format(config);
        self.tensors(config);
        self.version_policy(config);
        self.scheduling(config);
        let ensemble = Ensemble::read(config, self);
        let instances = self.instances(config);
        self.free_parameters(config);
        let slo = self.slo(config);
        let dispatch = self.named(config, "scheduler");
        let device = self.named(config, "device_policy");
        let drop = self.named(config, "drop");
        let rollout = self.rollout(config);
        let tensorrt = self.accelerators(config);
        self.unsupported(config);
        Checked { format, ensemble, instances, slo, dispatch, device, drop, rollout, tensorrt }
    }

    fn format(&mut self, config: &ModelConfig) -> Option<ModelFormat> {
        const FORMATS: [ModelFormat; 3] = ModelFormat::WITH_FILES;
        let backend = FORMATS.into_iter().find(|f| f.backend() == config.backend);
        let platform = FORMATS.into_iter().find(|f| f.platform() == config.platform);
        let has_steps = matches!(config.scheduling_choice, Some(SchedulingChoice::EnsembleScheduling(_)));
        let is_ensemble = config.platform == ModelFormat::Ensemble.platform();
        if is_ensemble && !has_steps {
            self.error("platform", "is 'ensemble', but there is no ensemble_scheduling; list the steps in that field");
        }
        for (field, written, is_known, names) in [
            ("backend", &config.backend, backend.is_some(), FORMATS.map(ModelFormat::backend)),
            ("platform", &config.platform, platform.is_some() || is_ensemble, FORMATS.map(ModelFormat::platform)),
        ] {
            if written.is_empty() || is_known {
                continue;
            }
            let hint = match did_you_mean(written, names) {
                hint if hint.is_empty() => {
                    format!("; Downbeat runs ONNX models ({field}: \"{}\"; {})", names[0], Pointer::OTHER_MODELS)
                }
                hint => hint,
            };
            self.error(field, format!("'{written}' is not supported{hint}"));
        }
        if is_ensemble && !config.backend.is_empty() {
            self.error("backend", "an ensemble has no backend; leave this field out");
        }
        if let (Some(backend), Some(platform)) = (backend, platform)
            && backend != platform
        {
            self.error("platform", format!("'{}' contradicts backend '{}'", config.platform, config.backend));
        }
        let ensemble = (is_ensemble || has_steps).then_some(ModelFormat::Ensemble);
        ensemble.or(backend).or(platform)
    }

    fn tensors(&mut self, config: &ModelConfig) {
        let mut names = BTreeSet::new();
        for (i, t) in config.input.iter().enumerate() {
            let path = format!("input[{i}]");
            self.tensor(&path, &t.name, t.data_type, &t.dims, t.reshape.as_ref());
            self.of_tensorrt(&path, t.is_shape_tensor, t.is_non_linear_format_io);
            if !t.name.is_empty() && !names.insert(&t.name) {
                self.error(&format!("{path}.name"), format!("input '{}' is listed twice", t.name));
            }
            self.input(&path, t);
        }
        names.clear();
        for (i, t) in config.output.iter().enumerate() {
            let path = format!("output[{i}]");
            self.tensor(&path, &t.name, t.data_type, &t.dims, t.reshape.as_ref());
            self.of_tensorrt(&path, t.is_shape_tensor, t.is_non_linear_format_io);
            if !t.name.is_empty() && !names.insert(&t.name) {
                self.error(&format!("{path}.name"), format!("output '{}' is listed twice", t.name));
            }
        }
    }

    fn of_tensorrt(&mut self, path: &str, is_shape_tensor: bool, is_non_linear: bool) {
        if is_shape_tensor {
            let message = "shape tensors exist in TensorRT models only";
            self.refuse(&format!("{path}.is_shape_tensor"), message, Pointer::OTHER_MODELS);
        }
        if is_non_linear {
            let message = "non-linear formats exist in TensorRT models only";
            self.refuse(&format!("{path}.is_non_linear_format_io"), message, Pointer::OTHER_MODELS);
        }
    }

    fn tensor(&mut self, path: &str, name: &str, data_type: i32, dims: &[i64], reshape: Option<&ModelTensorReshape>) {
        if name.is_empty() {
            self.error(path, "has no name");
        }
        // Zero means that the datatype is not written: the model file has it.
        if data_type != 0 && datatype(data_type).is_none() {
            self.error(&format!("{path}.data_type"), format!("{data_type} is not the number of a datatype"));
        }
        if let Some(dim) = dims.iter().find(|d| **d == 0 || **d < -1) {
            self.error(
                &format!("{path}.dims"),
                format!("has the size {dim}; sizes are 1 or larger, or -1 for a size that varies"),
            );
            return;
        }
        let Some(reshape) = reshape else { return };
        let path = format!("{path}.reshape");
        let shape = &reshape.shape;
        if dims.is_empty() {
            self.error(&path, "needs dims beside it");
        } else if let Some(dim) = shape.iter().find(|d| **d == 0 || **d < -1) {
            self.error(&path, format!("has the size {dim}; sizes are 1 or larger, or -1 for a size that varies"));
        } else {
            let variable = |dims: &[i64]| dims.iter().filter(|d| **d == -1).count();
            // The product of hostile sizes may not fit.
            let elements = |dims: &[i64]| dims.iter().filter(|d| **d > 0).try_fold(1_i64, |n, d| n.checked_mul(*d));
            if variable(dims) != variable(shape) || elements(dims) != elements(shape) || elements(dims).is_none() {
                self.error(&path, format!("{} does not hold as many elements as dims {}", show(shape), show(dims)));
            }
        }
    }

    fn input(&mut self, path: &str, input: &ModelInput) {
        if !matches!(input.format(), model_input::Format::None) && !input.dims.is_empty() && input.dims.len() != 3 {
            self.error(
                &format!("{path}.format"),
                format!("{} needs 3 dims, got {}", input.format().as_str_name(), input.dims.len()),
            );
        }
        if input.allow_ragged_batch {
            let message = "is not supported: requests of different shapes are not batched with each other";
            self.pass_over(&format!("{path}.allow_ragged_batch"), message, Pointer::IGNORED_FIELDS);
        }
    }

    fn version_policy(&mut self, config: &ModelConfig) {
        match config.version_policy.as_ref().and_then(|p| p.policy_choice.as_ref()) {
            Some(PolicyChoice::Latest(latest)) if latest.num_versions == 0 => {
                self.error("version_policy.latest.num_versions", "must be 1 or larger");
            }
            Some(PolicyChoice::Specific(specific)) => {
                if specific.versions.is_empty() {
                    self.error("version_policy.specific", "names no version");
                }
                if let Some(version) = specific.versions.iter().find(|v| **v < 1) {
                    self.error(
                        "version_policy.specific.versions",
                        format!("{version} is not a version; versions start at 1"),
                    );
                }
            }
            _ => {}
        }
    }

    fn scheduling(&mut self, config: &ModelConfig) {
        match &config.scheduling_choice {
            Some(SchedulingChoice::DynamicBatching(batching)) => self.dynamic_batching(config, batching),
            Some(SchedulingChoice::SequenceBatching(_)) => self.refuse(
                "sequence_batching",
                "is not supported: requests of a sequence would lose their state; remove this field only if the model \
                 keeps no state",
                Pointer::SEQUENCES,
            ),
            Some(SchedulingChoice::EnsembleScheduling(_)) | None => {}
        }
    }

    fn dynamic_batching(&mut self, config: &ModelConfig, batching: &ModelDynamicBatching) {
        let says_max = self.source.says_max_batch_size();
        if says_max && config.max_batch_size == 0 {
            self.warn(
                "dynamic_batching",
                "max_batch_size is 0, so requests are not batched; only the queue policies of this field apply",
            );
        }
        for (i, size) in batching.preferred_batch_size.iter().enumerate() {
            let path = format!("dynamic_batching.preferred_batch_size[{i}]");
            if *size < 1 {
                self.error(&path, format!("is {size}; must be 1 or larger"));
            } else if says_max && config.max_batch_size > 0 && *size > config.max_batch_size {
                self.error(&path, format!("is {size}, larger than max_batch_size {}", config.max_batch_size));
            }
        }
        if Duration::from_micros(batching.max_queue_delay_microseconds) > Batching::LONGEST_QUEUE_DELAY {
            self.warn(
                "dynamic_batching.max_queue_delay_microseconds",
                "is longer than an hour, so a batch waits until the batch is full; a request that stays alone leaves \
                 the queue after max_queue_wait_s (--max-queue-wait)",
            );
        }
        let levels = batching.priority_levels;
        if levels > 0 && !(1..=levels).contains(&batching.default_priority_level) {
            self.error(
                "dynamic_batching.default_priority_level",
                format!("is {}; must be between 1 and priority_levels {levels}", batching.default_priority_level),
            );
        }
        if levels == 0 && batching.default_priority_level != 0 {
            self.warn("dynamic_batching.default_priority_level", "has no effect without priority_levels");
        }
        if levels > 1 && batching.preserve_ordering {
            self.error("dynamic_batching.preserve_ordering", "allows only one priority level");
        }
        if levels > MAX_LEVELS && batching.priority_queue_policy.len() > MOST_POLICIES {
            let message = format!(
                "at most {MOST_POLICIES} priorities may have a policy if there are more than {MAX_LEVELS} levels"
            );
            self.error("dynamic_batching.priority_queue_policy", message);
        }
        for priority in batching.priority_queue_policy.keys() {
            if !(1..=levels).contains(priority) {
                let path = format!("dynamic_batching.priority_queue_policy[\"{priority}\"]");
                self.error(&path, format!("is for priority {priority}; priorities are 1 to priority_levels {levels}"));
            }
        }
    }

    /// Checks the places of the instances of a model of this format. The server runs models on
    /// `options.gpus`, or on the CPU if there are none. Returns the GPUs that the instances are
    /// restricted to.
    pub(crate) fn places(&mut self, format: ModelFormat, options: &CompletionOptions) -> Option<Vec<u32>> {
        let groups = &self.source.config.instance_group;
        let mut kept = Some(Vec::new());
        for (i, group) in groups.iter().enumerate() {
            let place = self.place(&format!("instance_group[{i}]"), group, format, options);
            kept = kept.zip(place).map(|(kept, place)| [kept, place].concat());
        }
        let mut kept = kept.filter(|_| !groups.is_empty())?;
        kept.sort_unstable();
        kept.dedup();
        Some(kept)
    }

    /// The GPUs that a group is restricted to; `None` if it is not. As in Triton, `KIND_AUTO` means
    /// the listed GPUs if the machine has all of them, and otherwise the CPU. A GPU that the server
    /// does not have is an error.
    fn place(
        &mut self,
        path: &str,
        group: &ModelInstanceGroup,
        format: ModelFormat,
        options: &CompletionOptions,
    ) -> Option<Vec<u32>> {
        use model_instance_group::Kind;
        let (kind, listed, gpus) = (group.kind(), &group.gpus, &options.gpus);
        let of_gpus = matches!(kind, Kind::Gpu | Kind::Auto);
        let name = kind.as_str_name();
        if !of_gpus && !listed.is_empty() {
            self.error(&format!("{path}.gpus"), format!("{name} has no GPUs; leave them out, or write KIND_GPU"));
            return None;
        }
        // The model's own code chooses its devices.
        if format == ModelFormat::Python {
            return None;
        }
        if format == ModelFormat::Emulated {
            if kind == Kind::Gpu || !listed.is_empty() {
                let message =
                    "an emulated model runs on no GPU; [placement] in downbeat.toml names the devices of the model";
                self.warn(&format!("{path}.kind"), message);
            }
            return None;
        }
        if gpus.is_empty() {
            if kind == Kind::Gpu {
                self.gpu_without_gpus(path, options.cpu_for_gpus);
            }
            return None;
        }
        let used = gpus.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        if kind == Kind::Cpu {
            let message = format!(
                "is KIND_CPU, but this server runs models on its GPUs {used}; serve the model on the CPU (--engine \
                 onnxruntime), write KIND_AUTO, {ELSEWHERE} ({})",
                Pointer::PLACEMENT
            );
            self.error(&format!("{path}.kind"), message);
            return None;
        }
        let asked: Option<Vec<u32>> = listed.iter().map(|gpu| u32::try_from(*gpu).ok()).collect();
        let unknown = listed.iter().find(|gpu| !u32::try_from(**gpu).is_ok_and(|gpu| gpus.contains(&gpu)));
        if let Some(unknown) = unknown {
            let auto = if kind == Kind::Auto { "; without this GPU KIND_AUTO would mean the CPU" } else { "" };
            self.error(
                &format!("{path}.gpus"),
                format!("names GPU {unknown}; this server uses {used}{auto} ({})", Pointer::PLACEMENT),
            );
        }
        if group.count > 1 {
            let message = "one batch of a model runs at a time on each GPU; the device policy elastic runs several";
            self.warn(&format!("{path}.count"), message);
        }
        asked.filter(|asked| !asked.is_empty())
    }

    /// Reports `KIND_GPU` on a server that has no GPUs.
    fn gpu_without_gpus(&mut self, path: &str, cpu_is_allowed: bool) {
        let place = format!("{path}.kind");
        if cpu_is_allowed {
            let message =
                "is KIND_GPU, but this server has no GPU; the model runs on the CPU, as --cuda-missing cpu allows";
            return self.warn(&place, message);
        }
        let message = format!(
            "is KIND_GPU, but this server runs models on the CPU; start the server on GPUs (--engine cuda), allow the \
             CPU (--cuda-missing cpu), write KIND_AUTO, {ELSEWHERE} ({})",
            Pointer::PLACEMENT
        );
        self.error(&place, message);
    }

    fn instances(&mut self, config: &ModelConfig) -> u32 {
        let mut instances: u32 = 0;
        for (i, group) in config.instance_group.iter().enumerate() {
            let path = format!("instance_group[{i}]");
            match u32::try_from(group.count) {
                Ok(count) => {
                    let is_python = config.backend == ModelFormat::Python.backend();
                    instances = instances.saturating_add(if is_python { places(count, group) } else { count });
                }
                Err(_) => self.error(&format!("{path}.count"), format!("is {}; must be 1 or larger", group.count)),
            }
            for (given, field) in [
                (group.rate_limiter.is_some(), "rate_limiter"),
                (!group.secondary_devices.is_empty(), "secondary_devices"),
                (!group.profile.is_empty(), "profile"),
                (group.passive, "passive"),
                (!group.host_policy.is_empty(), "host_policy"),
            ] {
                if given {
                    let message = "is not supported, and ignored";
                    self.pass_over(&format!("{path}.{field}"), message, Pointer::IGNORED_FIELDS);
                }
            }
        }
        instances
    }

    /// Checks fields that Triton knows and Downbeat does not. An error if answers would be wrong
    /// without the field, otherwise a warning.
    fn unsupported(&mut self, config: &ModelConfig) {
        let decoupled = config.model_transaction_policy.is_some_and(|p| p.decoupled)
            && config.backend != ModelFormat::Python.backend();
        let agents = config.model_repository_agents.as_ref().is_some_and(|a| !a.agents.is_empty());
        let one_answer = "is not supported for this backend: models of backend \"python\" alone may be decoupled";
        let no_inputs = "is not supported: the model would miss these inputs";
        let split = "is not supported: outputs would be split wrongly";
        let unchecked = "is not supported: the model would be served without the agents' checks or changes";
        for (given, field, message, page) in [
            (decoupled, "model_transaction_policy.decoupled", one_answer, Pointer::DECOUPLED),
            (!config.batch_input.is_empty(), "batch_input", no_inputs, Pointer::BATCH_TENSORS),
            (!config.batch_output.is_empty(), "batch_output", split, Pointer::BATCH_TENSORS),
            (agents, "model_repository_agents", unchecked, Pointer::REPOSITORY_AGENTS),
        ] {
            if given {
                self.refuse(field, message, page);
            }
        }
        let operations = config.model_operations.as_ref().is_some_and(|o| !o.op_library_filename.is_empty());
        for (given, field, message) in [
            (operations, "model_operations", "is not supported: custom operators do not load"),
            (config.response_cache.is_some_and(|c| c.enable), "response_cache", "is not supported: every request runs"),
            (
                !config.cc_model_filenames.is_empty(),
                "cc_model_filenames",
                "is ignored: this field chooses the model file by the kind of GPU",
            ),
            (!config.metric_tags.is_empty(), "metric_tags", "is not supported, and ignored"),
            (!config.runtime.is_empty(), "runtime", "is not supported, and ignored"),
            (
                config.model_metrics.is_some(),
                "model_metrics",
                "is not supported, and ignored: histograms have the same buckets for every model",
            ),
        ] {
            if given {
                self.pass_over(field, message, Pointer::IGNORED_FIELDS);
            }
        }
    }
}

/// The instances of a group of a Python model: `count` of them on each GPU that the code gets.
fn places(count: u32, group: &ModelInstanceGroup) -> u32 {
    count.max(1).saturating_mul(u32::try_from(group.gpus.len()).unwrap_or(u32::MAX).max(1))
}
