//! Completes a definition from its model file, and checks it against the file.

use downbeat_core::tensor::{Signature, TensorSpec};
use downbeat_protocol::inference::model_config::SchedulingChoice;
use downbeat_protocol::inference::model_optimization_policy::PinnedMemoryBuffer;
use downbeat_protocol::inference::model_version_policy::{Latest, PolicyChoice};
use downbeat_protocol::inference::{
    ModelConfig, ModelDynamicBatching, ModelInput, ModelInstanceGroup, ModelParameter, ModelTensorReshape,
    ModelVersionPolicy, model_instance_group,
};

use crate::binding::{TensorBinding, show};
use crate::config::check::Report;
use crate::config::finding::{ConfigError, did_you_mean, sorted};
use crate::config::parameters::newest_versions;
use crate::definition::{ModelDefinition, ModelFormat, config_datatype, datatype};
use crate::row_verdict::RowVerdict;

/// The parameter of a completed configuration that shows the verdict on the model's rows.
const ROWS_PARAMETER: &str = "downbeat_rows";

impl ModelDefinition {
    /// Fills in the missing parts of the configuration and checks the rest, from the inputs and
    /// outputs of the loaded model. Each call starts from the configuration as written, so it may
    /// be called for each version (on a clone).
    ///
    /// A model without `max_batch_size` is batched if the first dimension of every input and output
    /// varies. It then also has dynamic batching, as in Triton. A model whose rows depend on each
    /// other ([`ModelDefinition::rows`]) is not batched: its requests keep their shapes, and each
    /// of them runs alone.
    ///
    /// # Errors
    /// If the configuration has names, datatypes or sizes that the model does not have.
    pub fn complete(&mut self, signature: &Signature) -> Result<(), ConfigError> {
        let source = self.source.clone();
        let mut config = source.config.clone();
        let mut report = Report::new(&source);

        let max_batch_size = self.complete_batching(&mut config, signature, &mut report);
        let batched = max_batch_size > 0;
        let inputs = self.bind(Side::Input, &mut config, &signature.inputs, batched, &mut report);
        let outputs = self.bind(Side::Output, &mut config, &signature.outputs, batched, &mut report);
        self.complete_warmups(max_batch_size, &inputs, &mut report);
        if !report.errors.is_empty() {
            return Err(ConfigError { findings: sorted(report.errors) });
        }
        for warning in report.warnings {
            if !self.warnings.contains(&warning) {
                self.warnings.push(warning);
            }
        }

        self.complete_header(&mut config);
        self.complete_places(&mut config);
        complete_pinned_memory(&mut config);
        self.batching = ModelDefinition::batching(&config, max_batch_size);
        self.config = config;
        self.inputs = inputs;
        self.outputs = outputs;
        Ok(())
    }

    /// The batch size that the configuration asks for, or that suits the model: 0 if requests are
    /// not batched. The verdict on the model's rows is not part of this size.
    fn wanted_batch_size(&self, config: &ModelConfig, signature: &Signature, report: &mut Report<'_>) -> u32 {
        if self.writes_batch_size() {
            u32::try_from(config.max_batch_size).unwrap_or(0)
        } else if takes_batches(config, signature, report) {
            preferred(config).max().unwrap_or(0).max(self.completion.default_max_batch_size)
        } else {
            0
        }
    }

    /// Completes the batch size and the scheduling choice. Returns the batch size.
    fn complete_batching(&self, config: &mut ModelConfig, signature: &Signature, report: &mut Report<'_>) -> u32 {
        let is_written = self.writes_batch_size();
        let wanted = self.wanted_batch_size(config, signature, report);
        // A user who writes a batch size is obeyed, unless the same user forbids batches elsewhere.
        let is_kept_apart = |rows: &RowVerdict| if is_written { rows.is_forbidden() } else { !rows.may_share() };
        let is_kept_apart = wanted > 0 && self.rows.as_ref().is_some_and(is_kept_apart);
        let max_batch_size = if is_kept_apart { 0 } else { wanted };
        if is_kept_apart {
            add_first_dimension(config, signature);
        }
        config.max_batch_size = i32::try_from(max_batch_size).unwrap_or(i32::MAX);
        if let Some(rows) = self.rows.as_ref().filter(|_| wanted > 1) {
            config.parameters.insert(ROWS_PARAMETER.to_owned(), ModelParameter { string_value: rows.to_string() });
        }
        if !self.source.says_max_batch_size() && !is_kept_apart {
            match &config.scheduling_choice {
                None if max_batch_size > 1 => {
                    config.scheduling_choice = Some(SchedulingChoice::DynamicBatching(ModelDynamicBatching::default()));
                }
                Some(SchedulingChoice::DynamicBatching(_)) if max_batch_size == 0 => report.warn(
                    "dynamic_batching",
                    "not every first dimension of the model varies, so requests are not batched; only the queue \
                     policies of this field apply",
                ),
                _ => {}
            }
        }
        max_batch_size
    }

    /// Completes the model's name, its format, its file name and its version policy.
    fn complete_header(&self, config: &mut ModelConfig) {
        config.name.clone_from(&self.name);
        config.backend = self.format.backend().to_owned();
        config.platform = self.format.platform().to_owned();
        if config.default_model_filename.is_empty()
            && let Some(file) = self.versions.first().and_then(|(_, file)| file.file_name())
        {
            config.default_model_filename = file.to_string_lossy().into_owned();
        }
        complete_version_policy(config);
    }

    /// Checks the warm-up requests against the inputs.
    fn complete_warmups(&mut self, max_batch_size: u32, inputs: &[TensorBinding], report: &mut Report<'_>) {
        for (i, warmup) in self.warmups.iter_mut().enumerate() {
            let ranks = warmup.inputs.iter().filter_map(|(name, input)| {
                let binding = inputs.iter().find(|binding| binding.client.name == *name)?;
                Some((input.dims.len(), binding.client.dims.len()))
            });
            // These dims were written for a batched model. The request still has a first dimension.
            let leaves_first_out = ranks.into_iter().all(|(written, model)| written + 1 == model);
            warmup.batched = max_batch_size > 0 || (self.rows.is_some() && leaves_first_out);
            if !warmup.batched && warmup.batch_size > 1 || max_batch_size > 0 && warmup.batch_size > max_batch_size {
                report.error(
                    &format!("model_warmup[{i}].batch_size"),
                    format!("is {}, larger than max_batch_size {max_batch_size}", warmup.batch_size),
                );
            }
            let required = || inputs.iter().filter(|b| !b.optional).map(|b| b.client.name.as_str());
            let names = || inputs.iter().map(|b| b.client.name.as_str());
            for name in warmup.inputs.keys() {
                if !names().any(|n| n == name) {
                    report.error(
                        &format!("model_warmup[{i}].inputs[\"{name}\"]"),
                        format!("the model has no input '{name}'{}", did_you_mean(name, names())),
                    );
                }
            }
            for name in required() {
                if !warmup.inputs.contains_key(name) {
                    report.error(&format!("model_warmup[{i}].inputs"), format!("lacks the input '{name}'"));
                }
            }
        }
    }

    /// Completes the places of the instances.
    fn complete_places(&self, config: &mut ModelConfig) {
        let on_gpus = !self.completion.gpus.is_empty() && self.format == ModelFormat::Onnx;
        let gpus = self.gpus.as_ref().unwrap_or(&self.completion.gpus);
        let gpus: Vec<i32> = gpus.iter().filter_map(|gpu| i32::try_from(*gpu).ok()).collect();
        let is_chosen = self.completion.places.contains_key(&self.name);
        let kind = if on_gpus { model_instance_group::Kind::Gpu } else { model_instance_group::Kind::Cpu };
        if config.instance_group.is_empty() {
            config.instance_group.push(ModelInstanceGroup {
                name: self.name.clone(),
                kind: kind.into(),
                ..ModelInstanceGroup::default()
            });
        }
        for (i, group) in config.instance_group.iter_mut().enumerate() {
            if group.name.is_empty() {
                group.name = format!("{}_{i}", self.name);
            }
            let on_cpu_instead = group.kind() == model_instance_group::Kind::Gpu
                && self.format == ModelFormat::Onnx
                && self.completion.cpu_for_gpus
                && !on_gpus;
            if is_chosen || on_cpu_instead || group.kind() == model_instance_group::Kind::Auto {
                group.set_kind(kind);
            }
            if is_chosen || on_cpu_instead {
                group.gpus.clear();
            }
            if group.kind() == model_instance_group::Kind::Gpu && group.gpus.is_empty() && on_gpus {
                group.gpus.clone_from(&gpus);
            }
            group.count = group.count.max(1);
        }
    }

    /// Matches the configuration's tensors of one side with the model's, and completes them.
    fn bind(
        &self,
        side: Side,
        config: &mut ModelConfig,
        specs: &[TensorSpec],
        batched: bool,
        report: &mut Report<'_>,
    ) -> Vec<TensorBinding> {
        let word = side.word();
        let written = side.tensors(config);
        let mut listed: Vec<(Tensor, Option<usize>)> =
            written.into_iter().enumerate().map(|(i, tensor)| (tensor, Some(i))).collect();
        // A model cannot run without one of its inputs. An output that is not listed is not served.
        if self.completion.enabled && (side == Side::Input || listed.is_empty()) {
            for spec in specs {
                if !listed.iter().any(|(tensor, _)| tensor.name == spec.name) {
                    listed.push((Tensor { name: spec.name.clone(), ..Tensor::default() }, None));
                }
            }
        } else if side == Side::Input {
            for spec in specs.iter().filter(|s| !listed.iter().any(|(tensor, _)| tensor.name == s.name)) {
                report.error(word, format!("the model's input '{}' is not listed", spec.name));
            }
        }
        let mut bindings = Vec::with_capacity(listed.len());
        for (tensor, place) in &mut listed {
            let path = place.map_or_else(|| word.to_owned(), |i| format!("{word}[{i}]"));
            let Some((model_index, spec)) = specs.iter().enumerate().find(|(_, s)| s.name == tensor.name) else {
                let names = specs.iter().map(|s| s.name.as_str());
                let hint = did_you_mean(&tensor.name, names.clone());
                let names: Vec<&str> = names.collect();
                report.error(
                    &format!("{path}.name"),
                    format!("the model has no {word} '{}'{hint} (its {word}s: {})", tensor.name, names.join(", ")),
                );
                continue;
            };
            if let Some(binding) = self.bind_one(tensor, spec, (model_index, &path), batched, report) {
                bindings.push(binding);
            }
        }
        side.set_tensors(config, listed.into_iter().map(|(tensor, _)| tensor).collect());
        bindings
    }

    /// Completes a tensor's datatype, or checks it against the model's.
    fn complete_datatype(&self, tensor: &mut Tensor, spec: &TensorSpec, path: &str, report: &mut Report<'_>) {
        match datatype(tensor.data_type) {
            Some(datatype) if datatype == spec.datatype => {}
            Some(datatype) => report.error(
                &format!("{path}.data_type"),
                format!(
                    "is {}, but '{}' is {} in the model",
                    config_datatype(datatype).as_str_name(),
                    tensor.name,
                    config_datatype(spec.datatype).as_str_name()
                ),
            ),
            None if self.completion.enabled => tensor.data_type = config_datatype(spec.datatype).into(),
            None => report.error(&format!("{path}.data_type"), "is missing"),
        }
    }

    /// Matches one of the configuration's tensors with the model's, and completes it. `None`: their
    /// sizes differ.
    fn bind_one(
        &self,
        tensor: &mut Tensor,
        spec: &TensorSpec,
        (model_index, path): (usize, &str),
        batched: bool,
        report: &mut Report<'_>,
    ) -> Option<TensorBinding> {
        self.complete_datatype(tensor, spec, path, report);
        let model_dims = match dims_of_item(spec, batched) {
            Ok(dims) => dims,
            Err(reason) => {
                report.error("max_batch_size", format!("asks for batches, but {reason}"));
                return None;
            }
        };
        if tensor.dims.is_empty() {
            if !self.completion.enabled {
                report.error(&format!("{path}.dims"), "is missing");
                return None;
            }
            if model_dims.is_empty() {
                // A configuration cannot have empty dims: Triton writes one element, reshaped into
                // none.
                tensor.dims = vec![1];
                tensor.reshape = Some(Vec::new());
            } else {
                tensor.dims = model_dims.to_vec();
            }
        }
        let expected = tensor.reshape.as_ref().unwrap_or(&tensor.dims);
        let fits = expected.len() == model_dims.len()
            && expected.iter().zip(model_dims).all(|(said, model)| *model == -1 || said == model);
        if !fits {
            report_misfit(tensor, spec, path, batched, report);
            return None;
        }
        let with_batch = |dims: &[i64]| batched.then_some(-1).into_iter().chain(dims.iter().copied()).collect();
        // The configuration may fix a size that varies in the model.
        let model_dims: Vec<i64> = with_batch(expected);
        Some(TensorBinding {
            client: TensorSpec { name: tensor.name.clone(), datatype: spec.datatype, dims: with_batch(&tensor.dims) },
            model_index,
            model_dims,
            optional: tensor.optional,
            labels: self.labels.get(&tensor.name).filter(|_| path.starts_with("output")).cloned().unwrap_or_default(),
            batched,
        })
    }
}

/// The sizes of one item of a batch, or of the whole tensor without batches. The error says why the
/// tensor cannot be batched.
fn dims_of_item(spec: &TensorSpec, batched: bool) -> Result<&[i64], String> {
    match (batched, spec.dims.split_first()) {
        (false, _) => Ok(&spec.dims),
        (true, Some((-1, rest))) => Ok(rest),
        (true, Some((size, _))) => Err(format!(
            "the first dimension of '{}' is fixed at {size} in the model: set max_batch_size: 0, or export the model with a \
             batch dimension that varies",
            spec.name
        )),
        (true, None) => Err(format!("'{}' is a single element in the model: set max_batch_size: 0", spec.name)),
    }
}

/// Allows pinned memory for inputs and outputs where the configuration does not say otherwise.
fn complete_pinned_memory(config: &mut ModelConfig) {
    let optimization = config.optimization.get_or_insert_default();
    for pinned in [&mut optimization.input_pinned_memory, &mut optimization.output_pinned_memory] {
        pinned.get_or_insert(PinnedMemoryBuffer { enable: true });
    }
}

/// Reports how the sizes of a tensor differ from the model's.
fn report_misfit(tensor: &Tensor, spec: &TensorSpec, path: &str, batched: bool, report: &mut Report<'_>) {
    let expected = tensor.reshape.as_ref().unwrap_or(&tensor.dims);
    let (field, meaning) =
        if tensor.reshape.is_some() { ("reshape", "the reshape gives") } else { ("dims", "the configuration says") };
    let mut message =
        format!("{meaning} {}, but '{}' is {} in the model", show(expected), tensor.name, show(&spec.dims));
    if batched {
        message += " with the batch dimension";
        if expected.len() == spec.dims.len() {
            message += ": leave the batch dimension out of dims";
        }
    } else if expected.len() + 1 == spec.dims.len() && spec.dims.first() == Some(&-1) {
        message += ": with max_batch_size 0, dims hold the first dimension too";
    }
    report.error(&format!("{path}.{field}"), message);
}

/// The batch sizes that the configuration prefers.
fn preferred(config: &ModelConfig) -> impl Iterator<Item = u32> {
    let sizes = match &config.scheduling_choice {
        Some(SchedulingChoice::DynamicBatching(batching)) => batching.preferred_batch_size.as_slice(),
        _ => &[],
    };
    sizes.iter().filter_map(|size| u32::try_from(*size).ok())
}

/// Whether the first dimension of every tensor varies and the configuration's dims leave it out.
fn takes_batches(config: &ModelConfig, signature: &Signature, report: &mut Report<'_>) -> bool {
    let varies = |spec: &TensorSpec| spec.dims.first() == Some(&-1);
    if signature.inputs.is_empty() || !signature.inputs.iter().all(varies) {
        return false;
    }
    if let Some(output) = signature.outputs.iter().find(|o| !varies(o)) {
        report.warn(
            "",
            format!(
                "requests are not batched: the first dimension of every input varies, but that of the output '{}' ({}) does not",
                output.name,
                show(&output.dims)
            ),
        );
        return false;
    }
    let includes_batch = |tensor: &Tensor, specs: &[TensorSpec]| {
        let dims = tensor.reshape.as_ref().unwrap_or(&tensor.dims);
        !dims.is_empty() && specs.iter().any(|s| s.name == tensor.name && s.dims.len() == dims.len())
    };
    !Side::Input.tensors(config).iter().any(|t| includes_batch(t, &signature.inputs))
        && !Side::Output.tensors(config).iter().any(|t| includes_batch(t, &signature.outputs))
}

/// Adds a first dimension of any size to dims that leave the batch dimension out.
fn add_first_dimension(config: &mut ModelConfig, signature: &Signature) {
    for (side, specs) in [(Side::Input, &signature.inputs), (Side::Output, &signature.outputs)] {
        let mut tensors = side.tensors(config);
        for tensor in &mut tensors {
            let rank = specs.iter().find(|spec| spec.name == tensor.name).map(|spec| spec.dims.len());
            let model_dims = tensor.reshape.as_ref().unwrap_or(&tensor.dims);
            if !tensor.dims.is_empty() && rank == Some(model_dims.len() + 1) {
                tensor.dims.insert(0, -1);
                tensor.reshape.iter_mut().for_each(|shape| shape.insert(0, -1));
            }
        }
        side.set_tensors(config, tensors);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Input,
    Output,
}

/// The common fields of a configuration's inputs and outputs.
#[derive(Default)]
struct Tensor {
    name: String,
    data_type: i32,
    dims: Vec<i64>,
    reshape: Option<Vec<i64>>,
    optional: bool,
}

impl Side {
    fn word(self) -> &'static str {
        match self {
            Side::Input => "input",
            Side::Output => "output",
        }
    }

    fn tensors(self, config: &ModelConfig) -> Vec<Tensor> {
        let tensor = |name: &String, data_type, dims: &Vec<i64>, reshape: &Option<ModelTensorReshape>| Tensor {
            name: name.clone(),
            data_type,
            dims: dims.clone(),
            reshape: reshape.as_ref().map(|r| r.shape.clone()),
            optional: false,
        };
        match self {
            Side::Input => {
                let input = |i: &ModelInput| Tensor {
                    optional: i.optional,
                    ..tensor(&i.name, i.data_type, &i.dims, &i.reshape)
                };
                config.input.iter().map(input).collect()
            }
            Side::Output => config.output.iter().map(|o| tensor(&o.name, o.data_type, &o.dims, &o.reshape)).collect(),
        }
    }

    /// Writes completed tensors back. The listed tensors stand first, in their order.
    fn set_tensors(self, config: &mut ModelConfig, tensors: Vec<Tensor>) {
        macro_rules! set {
            ($list:expr) => {
                $list.resize_with(tensors.len(), Default::default);
                for (listed, tensor) in $list.iter_mut().zip(tensors) {
                    listed.name = tensor.name;
                    listed.data_type = tensor.data_type;
                    listed.dims = tensor.dims;
                    listed.reshape = tensor.reshape.map(|shape| ModelTensorReshape { shape });
                }
            };
        }
        match self {
            Side::Input => {
                set!(config.input);
            }
            Side::Output => {
                set!(config.output);
            }
        }
    }
}

/// Without a version policy the newest version is served, and in a rollout the one before it, too.
pub(crate) fn complete_version_policy(config: &mut ModelConfig) {
    if config.version_policy.as_ref().is_none_or(|policy| policy.policy_choice.is_none()) {
        let newest = PolicyChoice::Latest(Latest { num_versions: newest_versions(config) });
        config.version_policy = Some(ModelVersionPolicy { policy_choice: Some(newest) });
    }
}
