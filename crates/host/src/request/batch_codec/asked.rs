//! Requests for models that take requests, and not the rows of a batch.

use std::sync::Arc;

use downbeat_core::Time;
use downbeat_engine::{Answered, AskedRequest, Buffer, RequestAbout, Tensor};
use downbeat_protocol::InferRequest;
use smallvec::SmallVec;

use super::{Admitted, BatchCodec, OutputPart, Outputs, strings_length};

impl BatchCodec {
    /// The same codec, for a model that takes requests.
    #[must_use]
    pub fn taking_requests(self, takes_requests: bool) -> Self {
        BatchCodec { takes_requests, ..self }
    }

    /// The parts of a request beside its tensors. The inputs at the positions `left_out` are
    /// missing.
    pub(super) fn about(&self, request: &InferRequest, left_out: Vec<usize>) -> Option<Arc<RequestAbout>> {
        self.takes_requests.then(|| {
            Arc::new(RequestAbout {
                id: request.id.clone(),
                parameters: serde_json::to_string(&request.parameters).unwrap_or_default(),
                outputs: request.outputs.iter().map(|output| output.name.clone()).collect(),
                left_out,
                ..RequestAbout::default()
            })
        })
    }

    /// A request as the lane of its model takes it, at `now`.
    pub fn asked(&self, request: &Admitted, now: Time) -> AskedRequest {
        let about = request.about.clone();
        let is_left_out = |index: &usize| about.as_ref().is_some_and(|about| about.left_out.contains(index));
        let each = self.inputs.iter().zip(self.engine_shapes(request, request.rows as usize)).enumerate();
        let tensors = each.map(|(index, (binding, shape))| {
            let data = request.inputs.get(index).filter(|_| !is_left_out(&index))?;
            Some(Tensor { datatype: binding.datatype(), shape, data: Buffer::from_bytes(data.clone()) })
        });
        let tensors = tensors.collect();
        let deadline = about.as_ref().and_then(|about| about.deadline.get()).filter(|deadline| **deadline < Time::MAX);
        AskedRequest { rows: request.rows, tensors, budget: deadline.map(|deadline| deadline.since(now)), about }
    }

    /// The outputs of one request, in the order of the configuration.
    ///
    /// # Errors
    /// A text, if an output has other bytes than its shape needs.
    pub fn answered(&self, answered: Answered) -> Result<Outputs, String> {
        let mut tensors = answered;
        let mut outputs = Outputs::new();
        for binding in &self.outputs {
            let Some(tensor) = tensors.get_mut(binding.model_index).and_then(Option::take) else {
                outputs.push(OutputPart::absent());
                continue;
            };
            let name = &binding.client.name;
            let elements = tensor.elements();
            let bytes = elements.and_then(|elements| match tensor.datatype.size() {
                Some(size) => elements.checked_mul(size),
                None => strings_length(tensor.data.as_slice(), elements),
            });
            if tensor.datatype != binding.datatype() || bytes != Some(tensor.data.len()) {
                return Err(format!(
                    "output '{name}' of {} and shape {:?} has {} bytes, which do not fit the shape",
                    tensor.datatype,
                    tensor.shape,
                    tensor.data.len()
                ));
            }
            let shape: SmallVec<[i64; 6]> = match binding.client_shape(&tensor.shape) {
                Ok(shape) if binding.is_reshaped() => shape.iter().map(|d| *d as i64).collect(),
                _ => tensor.shape.iter().map(|d| *d as i64).collect(),
            };
            outputs.push(OutputPart { shape: shape.to_vec(), data: tensor.data.into_bytes() });
        }
        Ok(outputs)
    }
}
