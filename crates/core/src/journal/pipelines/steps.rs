//! The steps of pipelines, by the requests to their models.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::book::PipelineRecords;
use super::record::{PipelineInput, PipelineSpec};
use crate::ids::RequestId;
use crate::journal::machine::Record;
use crate::journal::reader::{LogError, read};

/// The step of a pipeline that a request to a model is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct StepOf {
    /// The pipeline's name.
    pub pipeline: String,
    /// The number of the pipeline's request.
    pub request: u64,
    /// The number of the step.
    pub step: u32,
    /// The step's model.
    pub model: String,
}

/// `step 1 ('detect') of photos #7`.
impl fmt::Display for StepOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StepOf { pipeline, request, step, model } = self;
        write!(f, "step {step} ('{model}') of {pipeline} #{request}")
    }
}

/// By request of the other logs: the step that it is. `log` has the requests of pipelines.
///
/// # Errors
/// If `log` is no such log, or a damaged one.
pub fn steps_by_request(log: &[u8]) -> Result<BTreeMap<RequestId, StepOf>, LogError> {
    let (_, entries) = read::<PipelineRecords>(log)?;
    let (mut specs, mut open) = (BTreeMap::<u32, PipelineSpec>::new(), BTreeMap::<u64, u32>::new());
    let mut steps = BTreeMap::new();
    for entry in entries {
        let Record::Input(_, input) = entry?.record else { continue };
        match input {
            PipelineInput::Pipeline(number, spec) => drop(specs.insert(number, *spec)),
            PipelineInput::Callee(number, step) => {
                if let Some(spec) = specs.get_mut(&number) {
                    spec.steps.push(step);
                }
            }
            PipelineInput::Request { request, pipeline, .. } => drop(open.insert(request, pipeline)),
            PipelineInput::Done { request, step, asked: Some(asked), .. } => {
                let spec = open.get(&request).and_then(|pipeline| specs.get(pipeline));
                let of = spec.and_then(|spec| Some((spec.name.clone(), spec.steps.get(step as usize)?.model.clone())));
                if let Some((pipeline, model)) = of {
                    steps.insert(asked, StepOf { pipeline, request, step, model });
                }
            }
            PipelineInput::End { request, .. } => drop(open.remove(&request)),
            PipelineInput::Done { .. } | PipelineInput::Reached { .. } => {}
        }
    }
    Ok(steps)
}
