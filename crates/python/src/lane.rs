//! A lane of a Python model: the right to use one of its instances at a time.

use std::ops::Range;
use std::sync::Arc;

use downbeat_core::tensor::Signature;
use downbeat_engine::{Answered, Answers, AskedRequest, Lane, LoadError, RunError, State, Tensor};

use crate::instances::Instances;
use crate::worker::NAME;

/// A lane of a Python model.
pub struct PythonLane {
    instances: Arc<Instances>,
    signature: Arc<Signature>,
}

impl PythonLane {
    /// Makes a lane, with an instance for it.
    ///
    /// # Errors
    /// If the instance cannot load the model.
    pub fn new(instances: Arc<Instances>, signature: Arc<Signature>) -> Result<PythonLane, LoadError> {
        instances.add_lane()?;
        Ok(PythonLane { instances, signature })
    }
}

impl Drop for PythonLane {
    fn drop(&mut self) {
        self.instances.remove_lane();
    }
}

impl Lane for PythonLane {
    /// Runs a made-up batch as requests of one row each, as most clients send them.
    fn run(&mut self, range: Range<usize>, state: &mut State) -> Result<(), RunError> {
        if range.is_empty() {
            return Ok(());
        }
        let batched = self.signature.inputs.iter().all(|input| input.dims.first() == Some(&-1));
        let rows = if batched { state.rows().max(1) } else { 1 };
        let failed = |reason: String| RunError::new(NAME, reason);
        let parts = match rows {
            1 => vec![std::mem::take(state)],
            rows => std::mem::take(state).split(&vec![1; rows]).map_err(|error| failed(error.to_string()))?,
        };
        let asked = |part: State| AskedRequest {
            rows: 1,
            tensors: part.tensors.into_iter().map(Some).collect(),
            budget: None,
            about: None,
        };
        let answers = self.answer(parts.into_iter().map(asked).collect())?;
        let states = answers.into_iter().map(|answer| Ok(State { tensors: self.all(answer?)? }));
        let states = states.collect::<Result<Vec<_>, RunError>>()?;
        *state = State::join(states).map_err(|error| failed(error.to_string()))?;
        Ok(())
    }

    fn answer(&mut self, requests: Vec<AskedRequest>) -> Result<Answers, RunError> {
        let mut instance = self.instances.take()?;
        let answers = instance.answer(&requests);
        self.instances.put(instance);
        answers
    }
}

impl PythonLane {
    /// All outputs of an answer.
    fn all(&self, answer: Answered) -> Result<Vec<Tensor>, RunError> {
        let named = self.signature.outputs.iter().zip(answer);
        let each = named.map(|(output, tensor)| {
            tensor.ok_or_else(|| RunError::new(NAME, format!("execute gives no output '{}'", output.name)))
        });
        each.collect()
    }
}
