//! The input ring of a device: the memory that requests are written to on arrival, a ring for each
//! input tensor.

use std::sync::Arc;

use downbeat_core::device::RingRun;
use downbeat_core::tensor::DataType;
use downbeat_engine::ring_memory::{self, RingMemory};
use downbeat_engine::{Model, State, Tensor};

use super::padding::Padding;
use crate::request::batch_codec::{Admitted, BatchCodec};

/// The input rings of a device: the memory that requests are written to on arrival. Each input
/// tensor has a ring, and all rings have the same slots.
#[derive(Debug)]
pub struct InputRings {
    rings: Vec<Tensors>,
    /// The slots of each ring.
    pub slots: u32,
    /// The length that every request is padded to; 0 if the model's shapes are fixed.
    pub length: u32,
}

#[derive(Debug)]
struct Tensors {
    datatype: DataType,
    item: Vec<usize>,
    memory: Arc<RingMemory>,
}

impl InputRings {
    /// Makes rings of at least `least` slots, of one item each, in memory that the lanes of `model`
    /// on a device read. Requests that vary are padded to `padding`'s longest.
    ///
    /// # Errors
    /// A text with a remedy, if the model's inputs can have no ring.
    pub fn new(
        model: &dyn Model,
        device: usize,
        codec: &BatchCodec,
        padding: Option<&Padding>,
        least: u32,
    ) -> Result<Self, String> {
        let length = padding.and_then(|padding| padding.max_length).unwrap_or(0);
        let mut items = Vec::new();
        for (index, binding) in codec.inputs.iter().enumerate() {
            let spec = &binding.client;
            let Some(size) = spec.datatype.size() else {
                return Err(format!(
                    "input '{}' holds BYTES, whose size varies: it has no slots in an input ring; use the policy windowed or exclusive",
                    spec.name
                ));
            };
            if spec.dims.iter().skip(1).any(|dim| *dim < 0) && length == 0 {
                return Err(format!(
                    "input '{}' has shape {:?}: what varies has no slots in an input ring; give `pad = true` and `max_length`, or use the \
                     policy windowed, staged or exclusive",
                    spec.name, spec.dims
                ));
            }
            let item = match padding {
                Some(padding) => padding.item(codec, index, length),
                None => spec.dims.iter().skip(1).map(|dim| (*dim).max(0) as usize).collect(),
            };
            let bytes = item.iter().try_fold(size, |bytes, dim| bytes.checked_mul(*dim));
            let Some(bytes) = bytes.filter(|bytes| *bytes > 0) else {
                return Err(format!(
                    "input '{}' has shape {:?}: an item of it has no slot in an input ring",
                    spec.name, spec.dims
                ));
            };
            items.push((spec.datatype, item, bytes));
        }
        let sizes: Vec<usize> = items.iter().map(|(_, _, bytes)| *bytes).collect();
        let slots = ring_memory::slots(least, &sizes).map_err(|error| error.to_string())?;
        let rings = items.into_iter().map(|(datatype, item, bytes)| {
            let memory = model.ring_memory(device, slots, bytes, codec.max_batch).map_err(|error| error.to_string())?;
            Ok(Tensors { datatype, item, memory })
        });
        Ok(InputRings { rings: rings.collect::<Result<_, String>>()?, slots, length })
    }

    pub fn bytes(&self) -> u64 {
        self.rings.iter().map(|ring| ring.memory.slot_bytes() as u64 * u64::from(self.slots)).sum()
    }

    /// Bytes of a run of slots, if all of them are in the host's memory.
    pub fn host_bytes(&self, run: RingRun) -> Option<usize> {
        let bytes =
            |ring: &Tensors| (!ring.memory.is_on_device()).then(|| ring.memory.slot_bytes() * run.count as usize);
        self.rings.iter().map(bytes).sum()
    }

    /// Writes a request's inputs into its slots: the one copy on their way. Returns `false` if a
    /// slot is still in use: then the request's inputs stay with the host.
    pub fn write(&self, codec: &BatchCodec, padding: Option<&Padding>, request: &Admitted, run: RingRun) -> bool {
        self.rings.iter().enumerate().all(|(index, ring)| {
            let Some(mut slots) = ring.memory.write(run) else { return false };
            match padding {
                Some(padding) => padding.write(codec, index, request, self.length, &mut slots),
                None => {
                    let bytes = request.input(index);
                    if slots.len() != bytes.len() {
                        return false;
                    }
                    slots.copy_from_slice(bytes);
                }
            }
            if ring.datatype == DataType::Bool {
                // Engines read the values as C++ `bool`, where a value above 1 is undefined, and a
                // device never checks them.
                slots.iter_mut().for_each(|value| *value = u8::from(*value != 0));
            }
            slots.finish().is_ok()
        })
    }

    /// The requests in a run of slots as a batch, without a copy; `None` if a slot is being
    /// written.
    pub fn read(&self, codec: &BatchCodec, run: RingRun) -> Option<State> {
        let tensors = self.rings.iter().enumerate().map(|(index, ring)| {
            let data = ring.memory.read(run)?;
            let shape = codec.engine_shape(index, run.count as usize, &ring.item);
            Some(Tensor { datatype: ring.datatype, shape, data })
        });
        Some(State { tensors: tensors.collect::<Option<_>>()? })
    }
}
