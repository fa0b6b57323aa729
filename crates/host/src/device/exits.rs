//! Answers that are final before the last segment: models with several exits (DVABatch §9.2).

use downbeat_core::device::ExitRule;
use downbeat_core::tensor::DataType;
use downbeat_engine::{Buffer, Model, State, Tensor};

/// A place between two segments at which requests may leave.
#[derive(Debug)]
pub struct Exit {
    /// The exit comes after this segment, counted from 0.
    pub segment: usize,
    /// The place of the tensor that decides, among the tensors that are alive after the segment.
    decides: usize,
    /// A request leaves if in each of its rows' last dimensions some value is at least this.
    confidence: f32,
    /// By output of the model: the place of the tensor that is its value at the exit.
    values: Vec<usize>,
}

impl Exit {
    /// The exit that a rule asks for.
    ///
    /// # Errors
    /// A text with a remedy, if the model has no such exit, or an output has no value at the exit.
    pub fn new(model: &dyn Model, rule: &ExitRule) -> Result<Exit, String> {
        let ExitRule { output, confidence, answers } = rule;
        let outputs = &model.signature().outputs;
        let names = || outputs.iter().map(|spec| format!("'{}'", spec.name)).collect::<Vec<_>>().join(", ");
        let spec = outputs
            .iter()
            .find(|spec| spec.name == *output)
            .ok_or_else(|| format!("exits: the model has no output '{output}'; its outputs are {}", names()))?;
        if spec.datatype != DataType::Fp32 {
            return Err(format!(
                "exits: output '{output}' is of datatype {}; only FP32 can decide an exit",
                spec.datatype
            ));
        }
        let before_last = model.segment_info().iter().take(model.segments().saturating_sub(1));
        let found = before_last
            .enumerate()
            .find_map(|(segment, info)| Some((segment, info, info.live.iter().position(|live| live.name == *output)?)));
        let (segment, info, decides) = found.ok_or_else(|| {
            format!(
                "exits: output '{output}' is computed in the last segment; cut the model after it: cut_at = [\"{output}\"], or into more stages"
            )
        })?;
        if let Some(unknown) = answers.iter().find(|name| !outputs.iter().any(|spec| spec.name == **name)) {
            return Err(format!("exits: answers names '{unknown}'; the model's outputs are {}", names()));
        }
        let value = |wanted: &downbeat_core::tensor::TensorSpec| {
            if let Some(live) = info.live.iter().position(|live| live.name == wanted.name) {
                return Ok(live);
            }
            if !answers.contains(&wanted.name) {
                return Err(format!(
                    "exits: a request that leaves after '{output}' has no output '{}'; name '{output}' for it in `answers`",
                    wanted.name
                ));
            }
            let same = |(a, b): (&i64, &i64)| a == b || *a < 0 || *b < 0;
            if wanted.datatype != spec.datatype
                || wanted.dims.len() != spec.dims.len()
                || !wanted.dims.iter().zip(&spec.dims).all(same)
            {
                return Err(format!(
                    "exits: '{output}' cannot answer for '{}': they are {} {:?} and {} {:?}",
                    wanted.name, spec.datatype, spec.dims, wanted.datatype, wanted.dims
                ));
            }
            Ok(decides)
        };
        let values = outputs.iter().map(value).collect::<Result<_, _>>()?;
        Ok(Exit { segment, decides, confidence: *confidence, values })
    }

    /// Brings the exit's deciding tensor and values to the host, if they are on a device.
    ///
    /// # Errors
    /// A text, if the device is lost.
    pub fn fetch(&self, state: &mut State) -> Result<(), String> {
        for index in self.values.iter().chain([&self.decides]) {
            if let Some(tensor) = state.tensors.get_mut(*index) {
                tensor.data.fetch().map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }

    /// Whether each of the requests of a batch leaves; `rows` are their items.
    pub fn decide(&self, state: &State, rows: &[u32]) -> Vec<bool> {
        let stays = || vec![false; rows.len()];
        let Some(tensor) = state.tensors.get(self.decides) else { return stays() };
        let (values, _) = tensor.data.as_slice().as_chunks::<4>();
        let an_item: usize = tensor.shape.iter().skip(1).product();
        let a_vector = if tensor.shape.len() > 1 { tensor.shape.last().copied().unwrap_or(1) } else { 1 };
        if an_item == 0 || a_vector == 0 {
            return stays();
        }
        let sure = |vector: &[[u8; 4]]| vector.iter().any(|value| f32::from_le_bytes(*value) >= self.confidence);
        let mut begin = 0;
        let each = rows.iter().map(|rows| {
            let end = begin + *rows as usize * an_item;
            let leaves = values.get(begin..end).is_some_and(|mine| mine.chunks(a_vector).all(sure));
            begin = end;
            leaves
        });
        each.collect()
    }

    /// The model's outputs at the exit, for all rows of the batch. They share the memory of the
    /// tensors that are alive.
    pub fn outputs(&self, state: &mut State) -> State {
        let tensors = self.values.iter().filter_map(|place| state.tensors.get_mut(*place).map(share));
        State { tensors: tensors.collect() }
    }
}

/// Another tensor on the same memory.
fn share(tensor: &mut Tensor) -> Tensor {
    let bytes = std::mem::replace(&mut tensor.data, Buffer::from_bytes(bytes::Bytes::new())).into_bytes();
    tensor.data = Buffer::from_bytes(bytes.clone());
    Tensor { datatype: tensor.datatype, shape: tensor.shape.clone(), data: Buffer::from_bytes(bytes) }
}
