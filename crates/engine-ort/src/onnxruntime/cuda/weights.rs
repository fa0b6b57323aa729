//! The weights of a model on a GPU: one copy for all lanes, segments and sizes of batches.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use downbeat_core::tensor::DataType;
use downbeat_engine::onnx;
use downbeat_engine::onnx::proto::{ModelProto, WeightProto};
use ort::sys;
use prost::Message;

use super::super::cut;
use super::super::value::{Value, element_of};
use super::gpu::Gpu;
use crate::cuda::{DeviceAllocation, Stream, WEIGHT_ALIGNMENT};

/// The size of one copy to the device, bytes.
const CHUNK: usize = 1 << 24;

/// The place of a weight in the file, and its type.
struct WeightPlace {
    name: String,
    element: sys::ONNXTensorElementDataType,
    shape: Vec<usize>,
    file_offset: u64,
    len: usize,
}

/// Weights in the memory of a GPU, as values that sessions share.
#[derive(Default)]
pub(super) struct Weights {
    /// By name. The values do not own their memory.
    values: BTreeMap<String, Value>,
    bytes: usize,
    _memory: Option<DeviceAllocation>,
}

impl Weights {
    /// Copies the weights that the model in `folder` keeps in its file of weights. Small weights
    /// stay in the model, and each session has its own copy. The same holds for 32 and 64-bit
    /// integers, which are mostly shapes that are needed on the host.
    pub(super) fn load(gpu: &Arc<Gpu>, model: &ModelProto, folder: &Path) -> Result<Weights, String> {
        let places = places(model)?;
        let aligned = |len: usize| len.next_multiple_of(WEIGHT_ALIGNMENT);
        let bytes: usize = places.iter().map(|place| aligned(place.len)).sum();
        // On the stand-in the host kernels take the weights from the file, as on the CPU.
        if bytes == 0 || gpu.has_host_kernels {
            return Ok(Weights::default());
        }
        let memory = DeviceAllocation::new(&gpu.device, bytes, &format!("weights of {} MiB", bytes >> 20));
        let memory = memory.map_err(|e| too_large(gpu, bytes, &e.to_string()))?;
        let stream = Stream::new(&gpu.device)?;
        let info = gpu.memory_info()?;
        let path = folder.join(cut::WEIGHTS);
        let mut file = File::open(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let mut values = BTreeMap::new();
        let mut offset = 0;
        for place in places {
            copy(gpu, &stream, &memory, offset, &mut file, &place)?;
            let address = memory.address() + offset as u64;
            let value = Value::of_device(&info, address, place.len, &place.shape, place.element)?;
            offset += aligned(place.len);
            values.insert(place.name, value);
        }
        Ok(Weights { values, bytes, _memory: Some(memory) })
    }

    /// The weights by name.
    pub(super) fn values(&self) -> &BTreeMap<String, Value> {
        &self.values
    }

    /// The bytes that the weights take on the device.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Copies a weight in pieces, through pinned memory.
fn copy(
    gpu: &Gpu,
    stream: &Arc<Stream>,
    memory: &DeviceAllocation,
    offset: usize,
    file: &mut File,
    place: &WeightPlace,
) -> Result<(), String> {
    use downbeat_engine::tensor::Lent;
    file.seek(SeekFrom::Start(place.file_offset)).map_err(|e| format!("the weights cannot be read: {e}"))?;
    let mut done = 0;
    while done < place.len {
        let len = CHUNK.min(place.len - done);
        let mut piece = gpu.pinned.take(len)?;
        file.read_exact(piece.bytes_mut()).map_err(|e| format!("the weights cannot be read: {e}"))?;
        // SAFETY: the piece is kept until the copy is over, or has failed.
        let copied = unsafe { memory.upload(stream, offset + done, piece.bytes()) }.and_then(|()| stream.finish());
        copied?;
        done += len;
    }
    Ok(())
}

/// The weights that sessions share.
fn places(model: &ModelProto) -> Result<Vec<WeightPlace>, String> {
    let mut places = Vec::new();
    for bytes in model.graph.iter().flat_map(|graph| &graph.initializer) {
        let weight = WeightProto::decode(bytes.clone()).map_err(|e| format!("a weight cannot be read: {e}"))?;
        let entry = |key: &str| weight.external_data.iter().find(|e| e.key == key).map(|e| e.value.as_str());
        if entry("location") != Some(cut::WEIGHTS) {
            continue;
        }
        let Some((element, size)) = element_of(weight.data_type).zip(onnx::element_size(weight.data_type)) else {
            continue;
        };
        // Shapes and indices, which operators need on the host.
        if matches!(onnx::datatype(weight.data_type.into()), Some(DataType::Int32 | DataType::Int64 | DataType::Bool)) {
            continue;
        }
        let shape: Option<Vec<usize>> = weight.dims.iter().map(|d| usize::try_from(*d).ok()).collect();
        let number = |key: &str| entry(key).map_or(Some(0), |text| text.parse::<u64>().ok());
        let place = shape.and_then(|shape| {
            let len = downbeat_engine::tensor::elements(&shape)?.checked_mul(size)?;
            let file_offset = number("offset")?;
            Some(WeightPlace { name: weight.name.clone(), element, shape, file_offset, len })
        });
        places.push(place.ok_or_else(|| format!("weight '{}' has a size or place that cannot be", weight.name))?);
    }
    Ok(places)
}

fn too_large(gpu: &Gpu, bytes: usize, said: &str) -> String {
    let free = gpu.device.free_memory().unwrap_or(0);
    format!(
        "its weights take {} MiB, and GPU {} has {} of {} MiB free. Serve fewer or smaller models on it, or use a larger GPU ({said})",
        bytes >> 20,
        gpu.device.ordinal(),
        free >> 20,
        gpu.device.memory() >> 20
    )
}
