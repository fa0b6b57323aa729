//! The book of the requests of pipelines.

use std::collections::BTreeMap;

use super::record::{PipelineInput, PipelineSpec, StepSpec};
use crate::journal::machine::{Machine, MachineKind, NoDecision, Records};
use crate::time::Time;

/// Knows which requests of pipelines are open, and in which steps.
///
/// The book decides nothing. It refuses an input that does not follow from the inputs before, so that
/// a reader of the log can rely on their order.
///
/// **Bound.** An entry for each pipeline, and one for each request in flight.
#[derive(Debug, Default)]
pub struct PipelineBook {
    /// By pipeline: the number of steps.
    pipelines: BTreeMap<u32, u32>,
    open: BTreeMap<u64, OpenRequest>,
}

#[derive(Debug)]
struct OpenRequest {
    pipeline: u32,
    /// The steps that were reached and are not done.
    steps: Vec<u32>,
}

/// The reason why an input does not follow from the inputs before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadPipelineInput {
    /// No pipeline has this number.
    #[error("no pipeline has the number {0}")]
    NoPipeline(u32),
    /// A pipeline has this number already.
    #[error("another pipeline has the number {0}")]
    SamePipeline(u32),
    /// No open request has this number.
    #[error("no open request of a pipeline has the number {0}")]
    NoRequest(u64),
    /// An open request has this number already.
    #[error("another open request has the number {0}")]
    SameRequest(u64),
    /// A step does not exist, was reached twice, or ended without being reached.
    #[error("the request {request} is not at step {step}")]
    NotAtStep {
        /// The request.
        request: u64,
        /// The step.
        step: u32,
    },
}

impl PipelineBook {
    /// No pipeline and no request.
    pub fn new() -> Self {
        PipelineBook::default()
    }

    /// Requests that have not ended.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    fn handle(&mut self, input: PipelineInput) -> Result<(), BadPipelineInput> {
        match input {
            PipelineInput::Pipeline(number, spec) => self.handle_pipeline(number, &spec),
            PipelineInput::Callee(number, step) => self.handle_callee(number, &step),
            PipelineInput::Request { request, pipeline, .. } => self.handle_request(request, pipeline),
            PipelineInput::Reached { request, step, .. } => self.handle_reached(request, step),
            PipelineInput::Done { request, step, .. } => self.handle_done(request, step),
            PipelineInput::End { request, .. } => {
                self.open.remove(&request).map(drop).ok_or(BadPipelineInput::NoRequest(request))
            }
        }
    }

    fn handle_pipeline(&mut self, number: u32, spec: &PipelineSpec) -> Result<(), BadPipelineInput> {
        if self.pipelines.contains_key(&number) {
            return Err(BadPipelineInput::SamePipeline(number));
        }
        self.pipelines.insert(number, spec.steps.len() as u32);
        Ok(())
    }

    fn handle_callee(&mut self, number: u32, _step: &StepSpec) -> Result<(), BadPipelineInput> {
        let steps = self.pipelines.get_mut(&number).ok_or(BadPipelineInput::NoPipeline(number))?;
        *steps = steps.saturating_add(1);
        Ok(())
    }

    fn handle_request(&mut self, request: u64, pipeline: u32) -> Result<(), BadPipelineInput> {
        if !self.pipelines.contains_key(&pipeline) {
            return Err(BadPipelineInput::NoPipeline(pipeline));
        }
        if self.open.contains_key(&request) {
            return Err(BadPipelineInput::SameRequest(request));
        }
        self.open.insert(request, OpenRequest { pipeline, steps: Vec::new() });
        Ok(())
    }

    fn handle_reached(&mut self, request: u64, step: u32) -> Result<(), BadPipelineInput> {
        let open = self.open.get_mut(&request).ok_or(BadPipelineInput::NoRequest(request))?;
        let steps = self.pipelines.get(&open.pipeline).copied().unwrap_or(0);
        if step >= steps || open.steps.contains(&step) {
            return Err(BadPipelineInput::NotAtStep { request, step });
        }
        open.steps.push(step);
        Ok(())
    }

    fn handle_done(&mut self, request: u64, step: u32) -> Result<(), BadPipelineInput> {
        let open = self.open.get_mut(&request).ok_or(BadPipelineInput::NoRequest(request))?;
        let place = open.steps.iter().position(|reached| *reached == step);
        let place = place.ok_or(BadPipelineInput::NotAtStep { request, step })?;
        open.steps.swap_remove(place);
        Ok(())
    }
}

/// The records of a [`PipelineBook`]. They have no short forms.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PipelineRecords;

impl Records for PipelineRecords {
    type Input = PipelineInput;
    type Reply = Result<(), BadPipelineInput>;
    type Refusal = String;
    type Decision = NoDecision;

    fn are_of(machine: MachineKind) -> bool {
        machine == MachineKind::Pipelines
    }

    fn is_setup(input: &PipelineInput) -> bool {
        matches!(input, PipelineInput::Pipeline(..) | PipelineInput::Callee(..))
    }

    fn refusal(reply: &Self::Reply) -> Option<String> {
        reply.as_ref().err().map(ToString::to_string)
    }
}

impl Machine for PipelineBook {
    type Records = PipelineRecords;

    fn kind(&self) -> MachineKind {
        MachineKind::Pipelines
    }

    fn apply(&mut self, _now: Time, input: PipelineInput) -> Result<(), BadPipelineInput> {
        self.handle(input)
    }

    fn poll(&mut self) -> Option<NoDecision> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::End;
    use super::*;

    fn step(model: &str, after: &[u32]) -> StepSpec {
        StepSpec { model: model.to_owned(), after: after.to_vec() }
    }

    #[test]
    fn an_input_must_follow_from_those_before() {
        let mut book = PipelineBook::new();
        let mut apply = |input| book.apply(Time::ZERO, input);
        let spec = |steps: &[StepSpec]| PipelineSpec {
            name: "p".to_owned(),
            version: "1".to_owned(),
            is_code: false,
            steps: steps.to_vec(),
        };
        let request = |request, pipeline| PipelineInput::Request {
            request,
            pipeline,
            deadline: Time::MAX,
            size: 1,
            within: None,
        };
        let reached = |request, step| PipelineInput::Reached { request, step, deadline: Time::MAX };
        let done = |request, step| PipelineInput::Done { request, step, asked: None, began: None, end: End::Answered };
        let end = |request| PipelineInput::End { request, end: End::Answered, step: None };
        assert_eq!(apply(request(5, 0)), Err(BadPipelineInput::NoPipeline(0)));
        assert_eq!(apply(PipelineInput::Pipeline(0, Box::new(spec(&[step("a", &[])])))), Ok(()));
        assert_eq!(apply(PipelineInput::Pipeline(0, Box::new(spec(&[])))), Err(BadPipelineInput::SamePipeline(0)));
        assert_eq!(apply(request(5, 0)), Ok(()));
        assert_eq!(apply(request(5, 0)), Err(BadPipelineInput::SameRequest(5)));
        assert_eq!(apply(reached(6, 0)), Err(BadPipelineInput::NoRequest(6)));
        assert_eq!(apply(reached(5, 1)), Err(BadPipelineInput::NotAtStep { request: 5, step: 1 }));
        assert_eq!(apply(PipelineInput::Callee(0, step("b", &[]))), Ok(()));
        assert_eq!(apply(reached(5, 1)), Ok(()), "the callee is the next step");
        assert_eq!(apply(reached(5, 1)), Err(BadPipelineInput::NotAtStep { request: 5, step: 1 }));
        assert_eq!(apply(done(5, 0)), Err(BadPipelineInput::NotAtStep { request: 5, step: 0 }));
        assert_eq!(
            (apply(done(5, 1)), apply(end(5)), apply(end(5))),
            (Ok(()), Ok(()), Err(BadPipelineInput::NoRequest(5)))
        );
        assert_eq!(book.open(), 0, "a request that has ended takes no memory");
    }
}
