//! Reads the requests of pipelines from their file of a decision log.

use std::collections::{BTreeMap, HashMap};

use downbeat_core::journal::pipelines::{End, PipelineInput, PipelineRecords, PipelineSpec};
use downbeat_core::journal::{LogError, Record, read};
use downbeat_core::{RequestId, Time};

/// The pipelines of a log, and their requests.
#[derive(Clone, Debug, Default)]
pub struct PipelineLog {
    /// The pipelines. Pipelines with the same steps are one.
    pub pipelines: Vec<LoggedPipeline>,
    /// The requests, in the order of their arrivals.
    pub requests: Vec<LoggedRequest>,
    /// By the number in the log: the index of a pipeline.
    numbers: BTreeMap<u32, usize>,
    /// By the number in the log: the index of an open request.
    open: HashMap<u64, usize>,
}

/// A pipeline of a log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoggedPipeline {
    /// Its name, made unique: a second configuration of an ensemble is `photos (2)`.
    pub label: String,
    /// Its steps.
    pub spec: PipelineSpec,
}

/// A request of a pipeline.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoggedRequest {
    /// Its number in the log.
    pub number: u64,
    /// The index of its pipeline.
    pub pipeline: usize,
    /// When it came.
    pub at: Time,
    /// When it must be done.
    pub deadline: Time,
    /// Its items.
    pub size: u32,
    /// The request and the step that it is.
    pub within: Option<(u64, u32)>,
    /// The steps that it reached, in the order of their begins.
    pub steps: Vec<LoggedStep>,
    /// When and how it ended, and the step that ended it. `None`: the log ends before.
    pub end: Option<(Time, End, Option<u32>)>,
}

/// A step that a request reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoggedStep {
    /// The number of the step.
    pub step: u32,
    /// When its inputs were there.
    pub reached: Time,
    /// The local deadline.
    pub deadline: Time,
    /// When its batch began to run.
    pub began: Option<Time>,
    /// The request to its model.
    pub asked: Option<RequestId>,
    /// When and how it ended.
    pub end: Option<(Time, End)>,
}

impl PipelineLog {
    /// Reads `pipelines.log`.
    ///
    /// # Errors
    /// If the bytes are no such log, or a damaged one.
    pub fn read(bytes: &[u8]) -> Result<PipelineLog, LogError> {
        let (_, entries) = read::<PipelineRecords>(bytes)?;
        let mut log = PipelineLog::default();
        for entry in entries {
            // The book wrote a refusal after an input that changes nothing here either.
            if let Record::Input(now, input) = entry?.record {
                log.input(now, input);
            }
        }
        Ok(log)
    }

    fn input(&mut self, now: Time, input: PipelineInput) {
        match input {
            PipelineInput::Pipeline(number, spec) => {
                let index = self.index_of(*spec);
                self.numbers.insert(number, index);
            }
            PipelineInput::Callee(number, step) => {
                let pipeline = self.numbers.get(&number).and_then(|index| self.pipelines.get_mut(*index));
                if let Some(pipeline) = pipeline {
                    pipeline.spec.steps.push(step);
                }
            }
            PipelineInput::Request { request, pipeline, deadline, size, within } => {
                let Some(pipeline) = self.numbers.get(&pipeline).copied() else { return };
                self.open.insert(request, self.requests.len());
                let (number, at, steps, end) = (request, now, Vec::new(), None);
                self.requests.push(LoggedRequest { number, pipeline, at, deadline, size, within, steps, end });
            }
            PipelineInput::Reached { request, step, deadline } => {
                let steps = self.open(request).map(|(request, steps)| (&mut request.steps, steps));
                if let Some((reached, _)) = steps.filter(|(_, steps)| (step as usize) < *steps) {
                    let (began, asked, end) = (None, None, None);
                    reached.push(LoggedStep { step, reached: now, deadline, began, asked, end });
                }
            }
            PipelineInput::Done { request, step, asked, began, end } => {
                let steps = self.open(request).map(|(request, _)| &mut request.steps);
                let of_step = |steps: &'_ mut Vec<LoggedStep>| steps.iter().position(|its| its.step == step);
                if let Some(steps) = steps
                    && let Some(place) = of_step(steps)
                {
                    steps[place] = LoggedStep { began, asked, end: Some((now, end)), ..steps[place] };
                }
            }
            PipelineInput::End { request, end, step } => {
                if let Some((request, _)) = self.open(request) {
                    request.end = Some((now, end, step));
                }
                self.open.remove(&request);
            }
        }
    }

    /// An open request, and the number of its pipeline's steps.
    fn open(&mut self, request: u64) -> Option<(&mut LoggedRequest, usize)> {
        let request = self.requests.get_mut(*self.open.get(&request)?)?;
        let steps = self.pipelines.get(request.pipeline)?.spec.steps.len();
        Some((request, steps))
    }

    /// The index of a pipeline with these steps, which may be new.
    fn index_of(&mut self, spec: PipelineSpec) -> usize {
        if let Some(index) = self.pipelines.iter().position(|known| known.spec == spec && !spec.is_code) {
            return index;
        }
        let before =
            self.pipelines.iter().filter(|known| known.spec.name == spec.name && known.spec.is_code == spec.is_code);
        let name = if spec.is_code { format!("calls of {}", spec.name) } else { spec.name.clone() };
        let label = match before.count() {
            0 => name,
            count => format!("{name} ({})", count + 1),
        };
        self.pipelines.push(LoggedPipeline { label, spec });
        self.pipelines.len() - 1
    }
}
