//! The request of a step to its model, and the tensors between the steps.

use downbeat_host::request::batch_codec::BatchCodec;
use downbeat_protocol::{InferRequest, InferTensor, RequestedOutput};
use downbeat_repository::{Ensemble, TensorBinding};
use downbeat_service::budget::Reservation;
use downbeat_service::error::ServiceError;

/// The tensors of one request on its way through the steps. A tensor goes from step to step without
/// a copy, and is forgotten after its last use.
pub struct Tensors {
    /// By tensor; `None`: it is not made yet, was left out, or is used up.
    there: Vec<Option<InferTensor>>,
    /// By tensor, how often it is needed yet.
    uses: Vec<u32>,
    /// The bytes that the steps' outputs hold.
    held: Reservation,
}

impl Tensors {
    /// The tensors that a request brings. It wants the outputs at these places. `runs`: whether a
    /// step runs for them.
    ///
    /// # Errors
    /// A text, if an input does not have the sizes that its `reshape` is for.
    pub fn new(
        ensemble: &Ensemble,
        codec: &BatchCodec,
        request: &mut InferRequest,
        wanted: &[usize],
        runs: impl Fn(usize) -> bool,
        held: Reservation,
    ) -> Result<Self, String> {
        let mut tensors =
            Tensors { there: vec![None; ensemble.tensors.len()], uses: vec![0; ensemble.tensors.len()], held };
        let steps = ensemble.steps.iter().enumerate().filter(|(at, _)| runs(*at));
        let needed = steps.flat_map(|(_, step)| &step.inputs).map(|(_, tensor)| *tensor);
        let wanted = wanted.iter().filter_map(|place| ensemble.outputs.get(*place).copied());
        needed.chain(wanted).for_each(|tensor| tensors.uses[tensor] += 1);
        for mut input in std::mem::take(&mut request.inputs) {
            let bound = codec.inputs.iter().position(|binding| binding.client.name == input.name);
            let Some((place, binding)) = bound.and_then(|at| Some((at, codec.inputs.get(at)?))) else {
                continue;
            };
            if binding.is_reshaped() {
                input.shape = binding.model_shape(&input.shape)?.into_iter().map(|size| size as i64).collect();
            }
            tensors.there[ensemble.inputs[place]] = Some(input);
        }
        Ok(tensors)
    }

    /// Takes a tensor for one of its uses; `None`: the request left it out.
    fn take(&mut self, tensor: usize) -> Option<InferTensor> {
        self.uses[tensor] = self.uses[tensor].saturating_sub(1);
        if self.uses[tensor] > 0 { self.there[tensor].clone() } else { self.there[tensor].take() }
    }

    /// The request of a step.
    pub fn request(&mut self, ensemble: &Ensemble, step: usize, whole: &InferRequest) -> InferRequest {
        let step = &ensemble.steps[step];
        let mut parameters = whole.parameters.clone();
        // The whole has one deadline, of which the step gets its part.
        parameters.remove("timeout");
        let input = |(name, tensor): &(String, usize)| {
            let tensor = self.take(*tensor)?;
            Some(InferTensor { name: name.clone(), parameters: Default::default(), ..tensor })
        };
        InferRequest {
            model_name: step.model.clone(),
            model_version: step.version.map(|version| version.to_string()).unwrap_or_default(),
            id: whole.id.clone(),
            parameters,
            inputs: step.inputs.iter().filter_map(input).collect(),
            outputs: step
                .outputs
                .iter()
                .map(|(name, _)| RequestedOutput { name: name.clone(), parameters: Default::default() })
                .collect(),
        }
    }

    /// Keeps the outputs of a step.
    ///
    /// # Errors
    /// `QueueFull` if all requests together hold too many bytes; `Internal` if an output is missing
    /// that another step needs.
    pub fn keep(&mut self, ensemble: &Ensemble, step: usize, outputs: Vec<InferTensor>) -> Result<(), ServiceError> {
        for (name, tensor) in &ensemble.steps[step].outputs {
            if self.uses[*tensor] == 0 {
                continue;
            }
            let Some(output) = outputs.iter().find(|output| output.name == *name) else {
                // As in Triton, the answer then lacks this output.
                if !ensemble.steps.iter().any(|step| step.inputs.iter().any(|(_, input)| input == tensor)) {
                    continue;
                }
                return Err(ServiceError::Internal(format!("the model gave no output '{name}'")));
            };
            self.held.grow(output.data.len() as u64)?;
            self.there[*tensor] = Some(output.clone());
        }
        Ok(())
    }

    /// The outputs at these places, as clients see them, without those that no step gave.
    ///
    /// # Errors
    /// `Internal` if one has other sizes than the ensemble declares.
    pub fn outputs(
        &mut self,
        ensemble: &Ensemble,
        codec: &BatchCodec,
        wanted: &[usize],
    ) -> Result<Vec<InferTensor>, ServiceError> {
        let mut outputs = Vec::with_capacity(wanted.len());
        for place in wanted {
            let (Some(tensor), Some(binding)) = (ensemble.outputs.get(*place), codec.outputs.get(*place)) else {
                continue;
            };
            let Some(made) = self.take(*tensor) else {
                // The words are Triton's.
                tracing::debug!(output = %binding.client.name, "Composing models did not output tensor {}", binding.client.name);
                continue;
            };
            let mut shape = made.shape;
            adapt(&mut shape, &binding.model_dims, binding.batched);
            if binding.is_reshaped() {
                let sizes: Vec<usize> = shape.iter().map(|size| usize::try_from(*size).unwrap_or(0)).collect();
                let reshaped = binding.client_shape(&sizes).map_err(ServiceError::Internal)?;
                shape = reshaped.into_iter().map(|size| size as i64).collect();
            }
            let name = binding.client.name.clone();
            outputs.push(InferTensor { name, shape, parameters: Default::default(), ..made });
        }
        Ok(outputs)
    }
}

/// Adapts the inputs of a step's request to a model with or without a batch dimension.
pub fn adapt_inputs(inputs: &mut [InferTensor], bindings: &[TensorBinding]) {
    for input in inputs {
        if let Some(binding) = bindings.iter().find(|binding| binding.client.name == input.name) {
            adapt(&mut input.shape, &binding.client.dims, binding.batched);
        }
    }
}

/// Adapts a shape to the sizes `dims`, as Triton does between models with and without a batch
/// dimension. An item becomes a batch of one, and a batch of one becomes its item. Other shapes stay.
fn adapt(shape: &mut Vec<i64>, dims: &[i64], batched: bool) {
    let alike = |shape: &[i64], dims: &[i64]| {
        shape.len() == dims.len() && shape.iter().zip(dims).all(|(size, want)| size == want || *want == -1)
    };
    if alike(shape, dims) {
        return;
    }
    if batched && dims.get(1..).is_some_and(|item| alike(shape, item)) {
        shape.insert(0, 1);
    } else if !batched && shape.first() == Some(&1) && alike(&shape[1..], dims) {
        shape.remove(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_pass_between_models_with_and_without_batches() {
        let adapted = |shape: &[i64], dims: &[i64], batched| {
            let mut shape = shape.to_vec();
            adapt(&mut shape, dims, batched);
            shape
        };
        assert_eq!(adapted(&[4], &[-1, 4], true), [1, 4], "an item becomes a batch of one");
        assert_eq!(adapted(&[3, 4], &[-1, 4], true), [3, 4], "a tensor in the form of a batch is one");
        assert_eq!(adapted(&[1, 4], &[4], false), [4], "a batch of one becomes its item");
        assert_eq!(adapted(&[2, 4], &[4], false), [2, 4], "a larger batch stays, and the model refuses it");
        assert_eq!(adapted(&[1, 4], &[-1, 4], false), [1, 4], "the model takes the batch as it is");
        assert_eq!(adapted(&[], &[-1], true), [1]);
    }
}
