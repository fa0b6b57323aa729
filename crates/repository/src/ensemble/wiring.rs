//! The tensors of an ensemble against those of its steps' models.

use std::collections::BTreeMap;

use downbeat_core::tensor::{DataType, TensorSpec};
use downbeat_protocol::inference::{ModelInput, ModelOutput};

use super::{Ensemble, EnsembleStep};
use crate::binding::{TensorBinding, show};
use crate::completion::complete_version_policy;
use crate::config::check::Report;
use crate::config::finding::{ConfigError, did_you_mean, sorted};
use crate::definition::{ModelDefinition, config_datatype, datatype};

/// The tensors of the model that a step runs.
#[derive(Clone, Debug)]
pub struct StepModel<'a> {
    /// The model's inputs.
    pub inputs: &'a [TensorBinding],
    /// The model's outputs.
    pub outputs: &'a [TensorBinding],
    /// The model's largest batch; 0: its tensors have no batch dimension.
    pub max_batch_size: u32,
}

/// A tensor as one of its users sees the tensor.
struct Seen<'a> {
    /// The user, for messages.
    by: String,
    datatype: DataType,
    /// The sizes, the batch dimension included.
    dims: &'a [i64],
    /// The sizes of an item.
    item: &'a [i64],
}

impl ModelDefinition {
    /// Completes an ensemble's definition. The configuration alone lists its tensors.
    pub(crate) fn complete_ensemble(&mut self) {
        let batched = self.config.max_batch_size > 0;
        let with_batch =
            |dims: &[i64]| batched.then_some(-1).into_iter().chain(dims.iter().copied()).collect::<Vec<_>>();
        let binding = |model_index: usize, name: &str, data_type, dims: &[i64], reshape: Option<&[i64]>| {
            Some(TensorBinding {
                client: TensorSpec { name: name.to_owned(), datatype: datatype(data_type)?, dims: with_batch(dims) },
                model_index,
                model_dims: with_batch(reshape.unwrap_or(dims)),
                labels: Default::default(),
                batched,
                optional: false,
            })
        };
        let input = |(i, t): (usize, &ModelInput)| {
            let reshape = t.reshape.as_ref().map(|reshape| reshape.shape.as_slice());
            let bound = binding(i, &t.name, t.data_type, &t.dims, reshape)?;
            Some(TensorBinding { optional: t.optional, ..bound })
        };
        let output = |(i, t): (usize, &ModelOutput)| {
            let reshape = t.reshape.as_ref().map(|reshape| reshape.shape.as_slice());
            let bound = binding(i, &t.name, t.data_type, &t.dims, reshape)?;
            let labels = self.labels.get(&t.name).cloned().unwrap_or_default();
            Some(TensorBinding { labels, ..bound })
        };
        let inputs = self.config.input.iter().enumerate().filter_map(input).collect();
        let outputs = self.config.output.iter().enumerate().filter_map(output).collect();
        (self.inputs, self.outputs) = (inputs, outputs);
        self.config.name.clone_from(&self.name);
        complete_version_policy(&mut self.config);
    }

    /// Checks that a step can run the model.
    ///
    /// # Errors
    /// If the model gives other than one answer to each request.
    pub fn check_runs_as_step(&self) -> Result<(), String> {
        match self.config.is_decoupled() {
            true => Err("the model is decoupled, and a step gives one answer to each request".to_owned()),
            false => Ok(()),
        }
    }

    /// Checks an ensemble against the models of its steps. `models` has the model of each step, or
    /// the reason why it cannot be had. A definition without steps passes.
    ///
    /// # Errors
    /// Every step and tensor that does not fit, with the reason.
    pub fn check_steps(&self, models: &[Result<StepModel<'_>, String>]) -> Result<(), ConfigError> {
        let Some(ensemble) = &self.ensemble else { return Ok(()) };
        let mut report = Report::new(&self.source);
        let mut seen: BTreeMap<usize, Seen<'_>> = BTreeMap::new();
        for (tensor, binding) in ensemble.inputs.iter().zip(&self.inputs) {
            seen.insert(*tensor, Seen::own(&self.name, binding, "input"));
        }
        for (tensor, binding) in ensemble.outputs.iter().zip(&self.outputs) {
            seen.insert(*tensor, Seen::own(&self.name, binding, "output"));
        }
        for (at, (step, model)) in ensemble.steps.iter().zip(models).enumerate() {
            let place = Place { ensemble, at, step };
            match model {
                Ok(model) => self.check_step(&place, model, &mut seen, &mut report),
                Err(reason) => report.error(&place.field("model_name"), format!("{}: {reason}", place.name())),
            }
        }
        match report.errors.is_empty() {
            true => Ok(()),
            false => Err(ConfigError { findings: sorted(report.errors) }),
        }
    }

    fn check_step<'m>(
        &self,
        place: &Place<'_>,
        model: &StepModel<'m>,
        seen: &mut BTreeMap<usize, Seen<'m>>,
        report: &mut Report<'_>,
    ) where
        Self: 'm,
    {
        let own = u32::try_from(self.config.max_batch_size).unwrap_or(0);
        if (1..own).contains(&model.max_batch_size) {
            let message = format!(
                "is {own}, but {} takes batches of at most {}; lower it, or raise that model's max_batch_size",
                place.name(),
                model.max_batch_size
            );
            report.error("max_batch_size", message);
        }
        place.check_side(("input", &place.step.inputs), model.inputs, seen, report);
        for input in model.inputs.iter().filter(|input| !input.optional) {
            if !place.step.inputs.iter().any(|(name, _)| *name == input.client.name) {
                let message = format!("{} gets no tensor for the model's input '{}'", place.name(), input.client.name);
                report.error(&place.field("input_map"), message);
            }
        }
        for (name, tensor) in &place.step.inputs {
            let is_optional =
                |inputs: &[TensorBinding], name: &str| inputs.iter().any(|i| i.client.name == name && i.optional);
            let given =
                place.ensemble.inputs.iter().position(|given| given == tensor).and_then(|at| self.inputs.get(at));
            if given.is_some_and(|given| given.optional) && !is_optional(model.inputs, name) {
                let message = format!(
                    "{} needs the input '{name}', but requests may leave out the ensemble's input '{}'; make both or \
                     neither optional",
                    place.name(),
                    place.ensemble.tensors[*tensor]
                );
                report.error(&place.field(&format!("input_map[\"{name}\"]")), message);
            }
        }
        place.check_side(("output", &place.step.outputs), model.outputs, seen, report);
    }
}

/// A step and its place, for messages.
struct Place<'a> {
    ensemble: &'a Ensemble,
    at: usize,
    step: &'a EnsembleStep,
}

impl Place<'_> {
    fn name(&self) -> String {
        format!("step {} ('{}')", self.at, self.step.model)
    }

    fn field(&self, field: &str) -> String {
        format!("ensemble_scheduling.step[{}].{field}", self.at)
    }

    /// Checks the step's tensors of one side, `input` or `output`, against those of its model.
    fn check_side<'m>(
        &self,
        (word, mapped): (&str, &[(String, usize)]),
        bindings: &'m [TensorBinding],
        seen: &mut BTreeMap<usize, Seen<'m>>,
        report: &mut Report<'_>,
    ) {
        for (name, tensor) in mapped {
            let field = self.field(&format!("{word}_map[\"{name}\"]"));
            let Some(binding) = bindings.iter().find(|binding| binding.client.name == *name) else {
                let names = bindings.iter().map(|binding| binding.client.name.as_str());
                let hint = did_you_mean(name, names.clone());
                let all: Vec<&str> = names.collect();
                let message = format!(
                    "{}: the model has no {word} '{name}'{hint} (its {word}s: {})",
                    self.name(),
                    all.join(", ")
                );
                report.error(&field, message);
                continue;
            };
            let here = Seen {
                by: format!("{word} '{name}' of {}", self.name()),
                datatype: binding.datatype(),
                dims: &binding.client.dims,
                item: binding.client.dims.get(usize::from(binding.batched)..).unwrap_or_default(),
            };
            match seen.get(tensor).map(|other| other.differs(&here)) {
                None => drop(seen.insert(*tensor, here)),
                Some(None) => {}
                Some(Some(reason)) => {
                    let tensor = &self.ensemble.tensors[*tensor];
                    report.error(&field, format!("{}: the tensor '{tensor}' does not fit: {reason}", self.name()));
                }
            }
        }
    }
}

impl<'a> Seen<'a> {
    /// An input or output of the ensemble itself, as its steps see it: after a `reshape`.
    fn own(ensemble: &str, binding: &'a TensorBinding, word: &str) -> Self {
        Seen {
            by: format!("{word} '{}' of the ensemble '{ensemble}'", binding.client.name),
            datatype: binding.datatype(),
            dims: &binding.model_dims,
            item: binding.model_dims.get(usize::from(binding.batched)..).unwrap_or_default(),
        }
    }

    /// How another user's view of the same tensor differs. As in Triton, either the items are alike,
    /// or the tensors with their batch dimension are; a size that varies is like any size.
    fn differs(&self, other: &Seen<'_>) -> Option<String> {
        let alike =
            |a: &[i64], b: &[i64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a == b || *a == -1 || *b == -1);
        if self.datatype != other.datatype {
            let names = [self, other].map(|seen| config_datatype(seen.datatype).as_str_name());
            return Some(format!("{} is {}, but {} is {}", self.by, names[0], other.by, names[1]));
        }
        if alike(self.item, other.item) || alike(self.dims, other.dims) {
            return None;
        }
        Some(format!("{} has the shape {}, but {} has {}", self.by, show(self.dims), other.by, show(other.dims)))
    }
}
