//! Ensembles: models that have no file, but steps. Each step runs another model.

pub mod wiring;

use std::collections::{BTreeMap, BTreeSet};

use downbeat_core::pipeline::graph::{Graph, GraphError, StepTensors};
use downbeat_protocol::inference::model_config::SchedulingChoice;
use downbeat_protocol::inference::{ModelConfig, ModelEnsembling, model_ensembling};

use crate::config::check::Report;
use crate::config::config_source::ConfigSource;
use crate::config::finding::did_you_mean;

/// Most steps of an ensemble. Each request looks at each step.
const MOST_STEPS: usize = 256;

/// The steps of an ensemble, and the tensors between them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ensemble {
    /// The steps, in the configuration's order.
    pub steps: Vec<EnsembleStep>,
    /// The names of the tensors. Steps and the graph know a tensor by its place in this list.
    pub tensors: Vec<String>,
    /// For each input of the ensemble, in the configuration's order, its tensor.
    pub inputs: Vec<usize>,
    /// For each output of the ensemble, in the configuration's order, its tensor.
    pub outputs: Vec<usize>,
    /// Which step needs which tensors.
    pub graph: Graph,
    /// The most requests of this ensemble in each step at a time; 0: any number.
    pub max_inflight_requests: u32,
}

/// A step of an ensemble: a request to a model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EnsembleStep {
    /// The name of the step's model.
    pub model: String,
    /// The version of the model; `None`: the newest.
    pub version: Option<u64>,
    /// Inputs of the model, each with the tensor for the input.
    pub inputs: Vec<(String, usize)>,
    /// Outputs of the model, each with the tensor that it becomes.
    pub outputs: Vec<(String, usize)>,
}

impl Ensemble {
    /// Reads the steps of a configuration, and reports the errors that show without the other models.
    /// `None`: there are errors, or the model is no ensemble.
    pub(crate) fn read(config: &ModelConfig, report: &mut Report<'_>) -> Option<Self> {
        let Some(SchedulingChoice::EnsembleScheduling(scheduling)) = &config.scheduling_choice else { return None };
        let before = report.errors.len();
        check_fields(config, scheduling, report);
        let mut names = Names::default();
        let inputs: Vec<usize> = config.input.iter().map(|input| names.number(&input.name)).collect();
        let steps: Vec<EnsembleStep> = scheduling
            .step
            .iter()
            .enumerate()
            .take(MOST_STEPS)
            .map(|(at, step)| read_step(at, step, &mut names, report))
            .collect();
        let outputs: Vec<usize> = config.output.iter().map(|output| names.number(&output.name)).collect();
        if report.errors.len() > before {
            return None;
        }
        let each = |step: &EnsembleStep| StepTensors {
            needs: step.inputs.iter().map(|(_, tensor)| *tensor).collect(),
            makes: step.outputs.iter().map(|(_, tensor)| *tensor).collect(),
        };
        let graph = match Graph::new(names.all.len(), &inputs, steps.iter().map(each).collect()) {
            Ok(graph) => graph,
            Err(error) => {
                let (field, message) = explain(&error, &steps, &names.all, config);
                report.error(&field, message);
                return None;
            }
        };
        let max_inflight_requests = scheduling.max_inflight_requests;
        let ensemble = Ensemble { steps, tensors: names.all, inputs, outputs, graph, max_inflight_requests };
        ensemble.check_ends(config, report);
        (report.errors.len() == before).then_some(ensemble)
    }

    /// The steps of a complete configuration; `None`: the model is no ensemble.
    ///
    /// # Errors
    /// In words, if the steps form no graph.
    pub fn of(config: &ModelConfig) -> Result<Option<Self>, String> {
        if !matches!(config.scheduling_choice, Some(SchedulingChoice::EnsembleScheduling(_))) {
            return Ok(None);
        }
        let source = ConfigSource::absent(config.name.clone());
        let mut report = Report::new(&source);
        let ensemble = Ensemble::read(config, &mut report);
        let reasons: Vec<String> = report.errors.iter().map(|error| error.to_string()).collect();
        ensemble.map(Some).ok_or_else(|| reasons.join("; "))
    }

    /// The names of the steps' models, each once, sorted.
    pub fn models(&self) -> BTreeSet<&str> {
        self.steps.iter().map(|step| step.model.as_str()).collect()
    }

    /// Checks that the outputs are made, and that nothing is useless.
    fn check_ends(&self, config: &ModelConfig, report: &mut Report<'_>) {
        for (i, tensor) in self.outputs.iter().enumerate() {
            let name = &self.tensors[*tensor];
            if self.graph.maker(*tensor).is_some() {
                continue;
            }
            let made =
                self.steps.iter().flat_map(|step| &step.outputs).map(|(_, tensor)| self.tensors[*tensor].as_str());
            let message = match self.inputs.contains(tensor) {
                true => format!("'{name}' is an input too; an output must be made by a step"),
                false => format!("no step makes the tensor '{name}'{}", did_you_mean(name, made)),
            };
            report.error(&format!("output[{i}].name"), message);
        }
        let needed: BTreeSet<usize> =
            self.steps.iter().flat_map(|step| &step.inputs).map(|(_, tensor)| *tensor).collect();
        for (i, tensor) in self.inputs.iter().enumerate().filter(|(_, tensor)| !needed.contains(tensor)) {
            let names =
                self.steps.iter().flat_map(|step| &step.inputs).map(|(_, tensor)| self.tensors[*tensor].as_str());
            let name = &self.tensors[*tensor];
            report.error(
                &format!("input[{i}].name"),
                format!("no step needs the input '{name}'{}", did_you_mean(name, names)),
            );
        }
        for (at, step) in self.steps.iter().enumerate() {
            for (output, tensor) in &step.outputs {
                if !needed.contains(tensor) && !self.outputs.contains(tensor) {
                    let name = &self.tensors[*tensor];
                    let outputs = config.output.iter().map(|output| output.name.as_str());
                    report.warn(
                        &format!("ensemble_scheduling.step[{at}].output_map[\"{output}\"]"),
                        format!(
                            "nothing needs the tensor '{name}' of step {at} ('{}'){}",
                            step.model,
                            did_you_mean(name, outputs)
                        ),
                    );
                }
            }
        }
    }
}

/// The numbers of tensors, in the order in which their names were seen.
#[derive(Default)]
struct Names {
    all: Vec<String>,
    numbers: BTreeMap<String, usize>,
}

impl Names {
    fn number(&mut self, name: &str) -> usize {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        self.all.push(name.to_owned());
        self.numbers.insert(name.to_owned(), self.all.len() - 1);
        self.all.len() - 1
    }
}

/// Checks the fields of an ensemble's configuration outside of its steps.
fn check_fields(config: &ModelConfig, scheduling: &ModelEnsembling, report: &mut Report<'_>) {
    if config.platform != "ensemble" {
        let message = format!(
            "is '{}'; a model with ensemble_scheduling needs platform: \"ensemble\", and no backend",
            config.platform
        );
        report.error("platform", message);
    }
    for (given, field) in [
        (!config.instance_group.is_empty(), "instance_group"),
        (config.optimization.is_some(), "optimization"),
        (!config.model_warmup.is_empty(), "model_warmup"),
    ] {
        if given {
            report.error(field, "an ensemble runs nothing by itself; write this field for the models of its steps");
        }
    }
    if scheduling.step.is_empty() {
        report.error("ensemble_scheduling", "has no step");
    }
    if scheduling.step.len() > MOST_STEPS {
        let steps = scheduling.step.len();
        report.error("ensemble_scheduling", format!("has {steps} steps; at most {MOST_STEPS} are allowed"));
    }
    for (list, is_empty) in [("input", config.input.is_empty()), ("output", config.output.is_empty())] {
        if is_empty {
            report.error(list, format!("an ensemble has no file that tells its tensors; list each {list}"));
        }
    }
    let inputs = config.input.iter().map(|t| (t.data_type, t.dims.is_empty())).enumerate();
    let outputs = config.output.iter().map(|t| (t.data_type, t.dims.is_empty())).enumerate();
    for (list, (i, (data_type, has_no_dims))) in inputs.map(|t| ("input", t)).chain(outputs.map(|t| ("output", t))) {
        if data_type == 0 {
            report.error(&format!("{list}[{i}].data_type"), "is missing");
        }
        if has_no_dims {
            report.error(&format!("{list}[{i}].dims"), "is missing");
        }
    }
}

fn read_step(at: usize, step: &model_ensembling::Step, names: &mut Names, report: &mut Report<'_>) -> EnsembleStep {
    let path = format!("ensemble_scheduling.step[{at}]");
    let is_version = step.model_version >= -1;
    for (is_wrong, field, message) in [
        (step.model_name.is_empty(), "model_name", "is missing".to_owned()),
        (step.input_map.is_empty(), "input_map", "is missing: a step needs inputs".to_owned()),
        (step.output_map.is_empty(), "output_map", "is missing: a step needs outputs".to_owned()),
        (!is_version, "model_version", format!("is {}; versions start at 1, and -1 is the newest", step.model_version)),
    ] {
        if is_wrong {
            report.error(&format!("{path}.{field}"), format!("step {at} ('{}'): {message}", step.model_name));
        }
    }
    for (map, list) in [("input_map", &step.input_map), ("output_map", &step.output_map)] {
        for (name, _) in list.iter().filter(|(_, tensor)| tensor.is_empty()) {
            report.error(&format!("{path}.{map}[\"{name}\"]"), format!("step {at}: the name of the tensor is empty"));
        }
    }
    let mut numbered = |map: &std::collections::BTreeMap<String, String>| {
        map.iter().map(|(name, tensor)| (name.clone(), names.number(tensor))).collect()
    };
    EnsembleStep {
        model: step.model_name.clone(),
        // The text format does not tell 0 from a version that is not written.
        version: u64::try_from(step.model_version).ok().filter(|version| *version > 0),
        inputs: numbered(&step.input_map),
        outputs: numbered(&step.output_map),
    }
}

/// The field and the message of an error in the graph.
fn explain(error: &GraphError, steps: &[EnsembleStep], tensors: &[String], config: &ModelConfig) -> (String, String) {
    let named = |step: usize| format!("step {step} ('{}')", steps[step].model);
    let place = |step: usize, map: &str, list: &[(String, usize)], tensor: usize| {
        let name = list.iter().find(|(_, other)| *other == tensor).map_or("", |(name, _)| name);
        format!("ensemble_scheduling.step[{step}].{map}[\"{name}\"]")
    };
    match error {
        GraphError::Empty => ("ensemble_scheduling".to_owned(), "has no step".to_owned()),
        GraphError::NothingMakes { step, tensor } => {
            let name = &tensors[*tensor];
            // The step's own outputs are no hint.
            let others = steps.iter().enumerate().filter(|(other, _)| other != step);
            let made = others.flat_map(|(_, step)| &step.outputs).map(|(_, tensor)| tensors[*tensor].as_str());
            let given = config.input.iter().map(|input| input.name.as_str());
            let hint = did_you_mean(name, made.chain(given));
            let message = format!(
                "{} needs the tensor '{name}', which is no input of the ensemble and which no step makes{hint}",
                named(*step)
            );
            (place(*step, "input_map", &steps[*step].inputs, *tensor), message)
        }
        GraphError::MadeTwice { step, tensor, other } => {
            let name = &tensors[*tensor];
            let first = match other {
                None => "which is an input of the ensemble".to_owned(),
                Some(other) if other == step => "and another output of the same step makes it too".to_owned(),
                Some(other) => format!("which {} makes too", named(*other)),
            };
            let message =
                format!("{} makes the tensor '{name}', {first}; give each output a name of its own", named(*step));
            (place(*step, "output_map", &steps[*step].outputs, *tensor), message)
        }
        GraphError::Circle(circle) => {
            let first = circle.first().copied().unwrap_or(0);
            let last = circle.last().copied().unwrap_or(first);
            let tensor = steps[first]
                .inputs
                .iter()
                .find(|(_, tensor)| steps[last].outputs.iter().any(|(_, made)| made == tensor));
            let (input, tensor) = tensor.map_or(("", ""), |(name, tensor)| (name, &tensors[*tensor]));
            let all: Vec<String> = circle.iter().chain([&first]).map(|step| named(*step)).collect();
            let message = format!(
                "the steps form a circle: {}; {} needs the tensor '{tensor}', which is made only after that step",
                all.join(" -> "),
                named(first)
            );
            (format!("ensemble_scheduling.step[{first}].input_map[\"{input}\"]"), message)
        }
    }
}
