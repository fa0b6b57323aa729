//! Requests of different lengths in one batch: inputs are padded with zeros, outputs cut back.

use downbeat_core::tensor::DataType;
use downbeat_engine::{Buffer, State, Tensor};
use smallvec::SmallVec;

use crate::request::batch_codec::{Admitted, BatchCodec, OutputPart, Outputs};

/// The longest request that a model takes without a setting.
pub const LARGEST_LENGTH: u32 = 4096;

/// How requests of a model are padded. Each of its inputs has at most one dimension that varies
/// beside the batch, and these dimensions are equal in a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Padding {
    /// By input: the axis that varies, of an item.
    inputs: Vec<Option<usize>>,
    /// By output: the axes of an item that are as long as the inputs.
    outputs: Vec<Vec<usize>>,
    /// The longest request that the model takes, if the user set it.
    pub max_length: Option<u32>,
}

impl Padding {
    /// How requests of this model are padded.
    ///
    /// # Errors
    /// A text with a remedy, if they cannot be padded.
    pub fn new(codec: &BatchCodec, max_length: Option<u32>) -> Result<Self, String> {
        let varying = |dims: &[i64]| -> Vec<usize> {
            dims.iter().skip(1).enumerate().filter(|(_, d)| **d < 0).map(|(axis, _)| axis).collect()
        };
        let mut inputs = Vec::new();
        for binding in &codec.inputs {
            let spec = &binding.client;
            let axes = varying(&spec.dims);
            if axes.len() > 1 {
                return Err(format!(
                    "input '{}' has {} dimensions that vary beside the batch ({:?}), and only one can be padded; leave `pad` out and use \
                     the policy exclusive",
                    spec.name,
                    axes.len(),
                    spec.dims
                ));
            }
            if !axes.is_empty() && spec.datatype == DataType::Bytes {
                return Err(format!(
                    "input '{}' holds BYTES, which have no zero to be padded with; leave `pad` out and use the policy exclusive",
                    spec.name
                ));
            }
            inputs.push(axes.first().copied());
        }
        if inputs.iter().all(Option::is_none) {
            return Err("no dimension of its inputs varies beside the batch: there is nothing to pad; leave `pad` out"
                .to_owned());
        }
        let mut outputs = Vec::new();
        for binding in &codec.outputs {
            let axes = varying(&binding.client.dims);
            if !axes.is_empty() && binding.datatype() == DataType::Bytes {
                return Err(format!(
                    "output '{}' holds BYTES and varies, which cannot be cut back; leave `pad` out and use the policy exclusive",
                    binding.client.name
                ));
            }
            outputs.push(axes);
        }
        Ok(Padding { inputs, outputs, max_length })
    }

    /// The length of a request.
    ///
    /// # Errors
    /// If its inputs differ in length, or are empty or too long.
    pub fn length(&self, codec: &BatchCodec, request: &Admitted) -> Result<u32, String> {
        let mut found: Option<(i64, &str)> = None;
        let items = codec.item_shapes(request);
        for ((axis, shape), binding) in self.inputs.iter().zip(items).zip(&codec.inputs) {
            let Some(length) = axis.and_then(|axis| shape.get(axis)).copied() else { continue };
            let name = &binding.client.name;
            match found {
                Some((other, other_name)) if other != length => {
                    return Err(format!(
                        "input '{name}' is {length} long and input '{other_name}' {other}; this model's requests are padded to share batches, \
                         and all inputs of a request must have one length"
                    ));
                }
                _ => found = Some((length, name)),
            }
        }
        let (length, name) = found.unwrap_or_default();
        // One long request makes its whole batch as long.
        let most = self.max_length.unwrap_or(LARGEST_LENGTH);
        match u32::try_from(length) {
            Ok(0) | Err(_) => Err(format!("input '{name}' has a length of {length}; expected 1 or more")),
            Ok(length) if length > most => {
                Err(format!("input '{name}' is {length} long; this model takes at most {most} (max_length)"))
            }
            Ok(length) => Ok(length),
        }
    }

    /// The length that a request of `length` is padded to if it meets no longer one. It is more
    /// than `length` where the model is faster that way, and only if the model's longest length is
    /// known.
    pub fn filled_length(&self, codec: &BatchCodec, length: u32) -> u32 {
        self.max_length.map_or(length, |most| codec.filled_length(length).min(most).max(length))
    }

    /// Joins requests into the tensors of a batch, padded to `length`; `fill` rows of zeros behind
    /// them.
    ///
    /// # Errors
    /// A text, if there is no memory for the tensors.
    pub fn assemble<'a>(
        &self,
        codec: &BatchCodec,
        members: impl Iterator<Item = &'a Admitted> + Clone,
        length: u32,
        fill: u32,
    ) -> Result<State, String> {
        let rows: usize = members.clone().map(|member| member.rows as usize).sum::<usize>() + fill as usize;
        let mut tensors = Vec::with_capacity(self.inputs.len());
        for (index, (binding, axis)) in codec.inputs.iter().zip(&self.inputs).enumerate() {
            let item = padded_item(&binding.client.dims, *axis, length);
            let size = binding.datatype().size().unwrap_or(1);
            let bytes = item.iter().try_fold(size, |n, d| n.checked_mul(*d));
            let bytes = bytes.and_then(|item_bytes| Some((item_bytes, item_bytes.checked_mul(rows)?)));
            let (item_bytes, all_bytes) = bytes.ok_or_else(|| {
                format!("input '{}': {rows} items of {item:?} are more than memory", binding.client.name)
            })?;
            let (all_bytes, buffer) = match binding.datatype().size() {
                Some(_) => (all_bytes, codec.input_buffer(all_bytes)),
                // The number of strings does not vary: they stay, and empty ones fill the rest.
                None => {
                    let len: usize = members.clone().map(|member| member.input(index).len()).sum();
                    let empty = (fill as usize).saturating_mul(item_bytes).saturating_mul(size_of::<u32>());
                    (len.saturating_add(empty), Buffer::try_with_capacity(len.saturating_add(empty)))
                }
            };
            let mut data = buffer.map_err(|error| format!("input '{}': {error}", binding.client.name))?;
            for member in members.clone() {
                let bytes = member.input(index);
                let (chunk, padded) = chunks(&item, *axis, size, bytes.len(), member.rows);
                if chunk == padded {
                    data.extend_from_slice(bytes);
                    continue;
                }
                for chunk in bytes.chunks(chunk.max(1)) {
                    data.extend_from_slice(chunk);
                    data.resize(data.len() + padded - chunk.len(), 0);
                }
            }
            data.resize(all_bytes, 0);
            tensors.push(Tensor { datatype: binding.datatype(), shape: codec.engine_shape(index, rows, &item), data });
        }
        Ok(State { tensors })
    }

    /// Writes input `index` of a request to `slots`, which have room for `length` in each row.
    pub fn write(&self, codec: &BatchCodec, index: usize, request: &Admitted, length: u32, slots: &mut [u8]) {
        let (Some(binding), Some(axis)) = (codec.inputs.get(index), self.inputs.get(index)) else { return };
        let item = padded_item(&binding.client.dims, *axis, length);
        let bytes = request.input(index);
        let (chunk, padded) = chunks(&item, *axis, binding.datatype().size().unwrap_or(1), bytes.len(), request.rows);
        for (from, to) in bytes.chunks(chunk.max(1)).zip(slots.chunks_mut(padded.max(1))) {
            let (data, zeros) = to.split_at_mut(from.len().min(to.len()));
            data.copy_from_slice(&from[..data.len()]);
            zeros.fill(0);
        }
    }

    /// The shape of an item of input `index` of `length`, for its slot of a ring.
    pub fn item(&self, codec: &BatchCodec, index: usize, length: u32) -> Vec<usize> {
        let axis = self.inputs.get(index).copied().flatten();
        codec.inputs.get(index).map(|binding| padded_item(&binding.client.dims, axis, length)).unwrap_or_default()
    }

    /// The batch without the zeros of its padded items: all items are `length` long. `None` if
    /// there is no memory for it.
    pub fn bare(&self, codec: &BatchCodec, state: &State, length: u32) -> Option<State> {
        let mut tensors = Vec::with_capacity(state.tensors.len());
        for (index, (tensor, binding)) in state.tensors.iter().zip(&codec.inputs).enumerate() {
            let rows = *tensor.shape.first()?;
            let unit = binding.datatype().size()?;
            let item = self.item(codec, index, length);
            let padded = match self.inputs.get(index)? {
                None => item.clone(),
                Some(axis) => {
                    let others = item.iter().enumerate().filter(|(at, _)| at != axis).map(|(_, size)| *size);
                    let row = others.product::<usize>().checked_mul(rows)?.checked_mul(unit)?;
                    let mut padded = item.clone();
                    *padded.get_mut(*axis)? = tensor.data.len().checked_div(row)?;
                    padded
                }
            };
            let all =
                |item: &[usize]| -> SmallVec<[usize; 6]> { [rows].into_iter().chain(item.iter().copied()).collect() };
            let mut data = Vec::new();
            data.try_reserve_exact(item.iter().product::<usize>().checked_mul(rows)?.checked_mul(unit)?).ok()?;
            crop(&mut data, tensor.data.as_slice(), &all(&padded), &all(&item), unit);
            let shape = codec.engine_shape(index, rows, &item);
            tensors.push(Tensor { datatype: tensor.datatype, shape, data: Buffer::from_bytes(data.into()) });
        }
        Some(State { tensors })
    }

    /// Cuts the outputs of a request of `length` that ran padded to `padded`.
    ///
    /// # Errors
    /// A text, if an output that varies is not as long as the inputs.
    pub fn cut(&self, codec: &BatchCodec, outputs: Outputs, length: u32, padded: u32) -> Result<Outputs, String> {
        let cut = |((part, axes), binding): ((OutputPart, &Vec<usize>), &downbeat_repository::TensorBinding)| {
            let mut want = part.shape.clone();
            for axis in axes {
                // An item's dimensions come after the batch dimension.
                let dim = want.get_mut(axis + 1).filter(|dim| **dim == i64::from(padded));
                let Some(dim) = dim else {
                    return Err(format!(
                        "output '{}' has shape {:?} for inputs of length {padded}: what varies in it is not the inputs' length, so that it cannot \
                         be cut back; leave `pad` out and use the policy exclusive",
                        binding.client.name, part.shape
                    ));
                };
                *dim = i64::from(length);
            }
            if want == part.shape {
                return Ok(part);
            }
            let sizes =
                |shape: &[i64]| -> SmallVec<[usize; 6]> { shape.iter().map(|d| (*d).max(0) as usize).collect() };
            let (from, to) = (sizes(&part.shape), sizes(&want));
            let unit = binding.datatype().size().unwrap_or(1);
            let bytes = to.iter().product::<usize>() * unit;
            // The cut of the first dimension of one row is a prefix, which stays in its place.
            let is_prefix = from.first() == Some(&1) && from.get(2..) == to.get(2..);
            let data = if is_prefix {
                part.data.slice(..bytes)
            } else {
                let mut data = Vec::new();
                data.try_reserve_exact(bytes)
                    .map_err(|error| format!("output '{}' of {bytes} bytes: {error}", binding.client.name))?;
                crop(&mut data, &part.data, &from, &to, unit);
                data.into()
            };
            Ok(OutputPart { shape: want, data })
        };
        outputs.into_iter().zip(&self.outputs).zip(&codec.outputs).map(cut).collect()
    }
}

/// The sizes of an item whose varying axis is `length` long.
fn padded_item(dims: &[i64], axis: Option<usize>, length: u32) -> Vec<usize> {
    let sizes = dims.iter().skip(1).map(|dim| (*dim).max(0) as usize);
    sizes.enumerate().map(|(at, size)| if Some(at) == axis { length as usize } else { size }).collect()
}

/// Sizes in bytes of a contiguous chunk when `rows` rows of `len` bytes in all are padded to
/// `item`: without and with its zeros.
fn chunks(item: &[usize], axis: Option<usize>, size: usize, len: usize, rows: u32) -> (usize, usize) {
    let Some(axis) = axis else { return (len, len) };
    let outer = item[..axis].iter().product::<usize>() * rows as usize;
    (len / outer.max(1), item[axis..].iter().product::<usize>() * size)
}

/// Copies the corner of `to`'s sizes of a tensor of `from`'s sizes.
fn crop(out: &mut Vec<u8>, data: &[u8], from: &[usize], to: &[usize], unit: usize) {
    match (from.split_first(), to.split_first()) {
        (Some((_, from_rest)), Some((count, to_rest))) if from != to => {
            let stride = from_rest.iter().product::<usize>() * unit;
            for part in data.chunks(stride.max(1)).take(*count) {
                crop(out, part, from_rest, to_rest, unit);
            }
        }
        _ => out.extend_from_slice(&data[..(from.iter().product::<usize>() * unit).min(data.len())]),
    }
}
