//! RTen, the embedded engine: pure Rust, nothing to install.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use rten::{ModelOptions, NodeId, RunOptions, ThreadPool, Value, ValueOrView, ValueView};

use crate::buffer::Buffer;
use crate::onnx::Checked;
use crate::tensor::Tensor;
use crate::traits::{Engine, EngineInfo, Lane, LoadError, LoadOptions, Model, RunError, State};
use crate::{batch, onnx};

pub(crate) const NAME: &str = "rten";
/// Version of the crate in use; its manifest and this line change together.
const VERSION: &str = "0.27";
/// Newest version of the ONNX format and of its standard operators that RTen was tried with. It does not check by itself.
const NEWEST: (i64, i64) = (13, 27);
const REMEDY: &str = "`downbeat engine install` fetches onnxruntime, which may run it";

/// RTen on the CPU.
#[derive(Default)]
pub struct Rten {
    /// One pool for each number of threads asked for.
    pools: Mutex<Vec<(usize, Arc<ThreadPool>)>>,
}

impl Rten {
    /// The engine; threads start when a model is loaded.
    pub fn new() -> Self {
        Rten::default()
    }

    /// The engine, with its threads for runs on one and on `threads` threads (0: one a core) started now: they have the
    /// priority of the thread that starts them, which for a load is a low one.
    pub fn with_threads(threads: usize) -> Self {
        let rten = Rten::default();
        rten.pool(1);
        rten.pool(threads);
        rten
    }

    fn pool(&self, threads: usize) -> Arc<ThreadPool> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = if threads == 0 { cores } else { threads.min(cores) };
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pool)) = pools.iter().find(|(n, _)| *n == threads) {
            return pool.clone();
        }
        let pool = Arc::new(ThreadPool::with_num_threads(threads));
        pools.push((threads, pool.clone()));
        pool
    }
}

impl Engine for Rten {
    fn info(&self) -> EngineInfo {
        EngineInfo { name: NAME, version: VERSION.into(), device: "cpu".into(), library: None }
    }

    fn load(&self, options: &LoadOptions) -> Result<Arc<dyn Model>, LoadError> {
        let path = &options.path;
        let file = onnx::check(path)?;
        let error = |reason: String| LoadError::Model { path: path.clone(), engine: NAME, reason };
        for (what, version, newest) in
            [("the ONNX format", file.ir_version(), NEWEST.0), ("the ONNX operators", file.opset(), NEWEST.1)]
        {
            if version > newest {
                return Err(error(format!(
                    "it is made for version {version} of {what}, the newest known here is {newest}. Export it for an older version"
                )));
            }
        }
        let model = load_model(path, &file).map_err(|reason| error(format!("{reason}. {REMEDY}")))?;
        let signature = file.signature(|output| infer(&model, output))?;
        for (what, specs) in [("input", &signature.inputs), ("output", &signature.outputs)] {
            if let Some(spec) = specs.iter().find(|s| !supported(s.datatype)) {
                return Err(error(format!(
                    "{what} '{}' is of datatype {}, of which it has FP32, INT64, INT32, INT8, UINT8 and BOOL only. {REMEDY}",
                    spec.name, spec.datatype
                )));
            }
        }
        let node = |spec: &TensorSpec| model.node_id(&spec.name).map_err(|e| error(format!("{e}. {REMEDY}")));
        let inputs = signature.inputs.iter().map(node).collect::<Result<Vec<_>, _>>()?;
        let outputs = signature.outputs.iter().map(node).collect::<Result<Vec<_>, _>>()?;
        let run = RunOptions::default().with_thread_pool(Some(self.pool(options.threads)));
        Ok(Arc::new(RtenModel { shared: Arc::new(Shared { model, signature, inputs, outputs, run }) }))
    }
}

/// Reads and optimises the model. RTen has `expect`s on what a file may hold, so that a panic is an error like others.
fn load_model(path: &Path, file: &Checked<'_>) -> Result<rten::Model, String> {
    if let Some(location) = file.external_locations().find(|l| !opens(l)) {
        return Err(format!(
            "it opens external data only beside the model and with an extension like .data or .onnx_data, not '{location}'. Save \
             the model with such a location"
        ));
    }
    let load = || {
        let mut options = ModelOptions::with_all_ops();
        options.prepack_weights(true);
        // By its path if its name says what it is: only then are external data found.
        if path.extension().is_some_and(|e| e == "onnx") {
            return options.load_file(path).map_err(|e| e.to_string());
        }
        let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
        options.load(bytes).map_err(|e| e.to_string())
    };
    catch_unwind(load).unwrap_or_else(|panic| Err(format!("its loader failed: {}", panic_message(&*panic))))
}

/// Whether RTen opens external data at this location; a rule of its own, beyond that of ONNX.
fn opens(location: &str) -> bool {
    let extension = Path::new(location).extension().and_then(|e| e.to_str());
    Path::new(location).components().count() == 1
        && extension.is_some_and(|e| e.starts_with("data") || e.starts_with("onnx_data"))
}

/// Datatype and sizes of output `index` as RTen inferred them.
fn infer(model: &rten::Model, index: usize) -> Option<(DataType, Vec<i64>)> {
    let node = model.node_info(*model.output_ids().get(index)?)?;
    let datatype = match node.dtype()? {
        rten::ValueType::Tensor(rten::DataType::Float) => DataType::Fp32,
        rten::ValueType::Tensor(rten::DataType::Int32) => DataType::Int32,
        rten::ValueType::Tensor(rten::DataType::Int8) => DataType::Int8,
        rten::ValueType::Tensor(rten::DataType::UInt8) => DataType::Uint8,
        _ => return None,
    };
    let size = |d: &rten::Dimension| match d {
        rten::Dimension::Fixed(n) => i64::try_from(*n).unwrap_or(-1),
        rten::Dimension::Symbolic(_) => -1,
    };
    Some((datatype, node.shape()?.iter().map(size).collect()))
}

const fn supported(datatype: DataType) -> bool {
    use DataType::{Bool, Fp32, Int8, Int32, Int64, Uint8};
    matches!(datatype, Fp32 | Int64 | Int32 | Int8 | Uint8 | Bool)
}

struct RtenModel {
    shared: Arc<Shared>,
}

struct Shared {
    model: rten::Model,
    signature: Signature,
    inputs: Vec<NodeId>,
    outputs: Vec<NodeId>,
    run: RunOptions,
}

impl Model for RtenModel {
    fn signature(&self) -> &Signature {
        &self.shared.signature
    }

    fn lane(&self) -> Result<Box<dyn Lane>, LoadError> {
        Ok(Box::new(RtenLane { shared: self.shared.clone() }))
    }
}

/// Runs batches; RTen allocates activations for each run.
struct RtenLane {
    shared: Arc<Shared>,
}

impl Lane for RtenLane {
    fn run(&mut self, range: Range<usize>, state: &mut State) -> Result<(), RunError> {
        if range.is_empty() {
            return Ok(());
        }
        let tensors = std::mem::take(&mut state.tensors);
        match run(&self.shared, tensors) {
            Ok(outputs) => {
                state.tensors = outputs;
                Ok(())
            }
            Err(reason) => Err(RunError { engine: NAME, reason }),
        }
    }
}

fn run(shared: &Shared, mut tensors: Vec<Tensor>) -> Result<Vec<Tensor>, String> {
    batch::check(&shared.signature, &tensors)?;
    for tensor in &mut tensors {
        tensor.data.make_aligned(tensor.datatype.size().unwrap_or(1));
    }
    let inputs = shared.inputs.iter().zip(&shared.signature.inputs).zip(&tensors);
    let inputs = inputs
        .map(|((id, spec), tensor)| Ok((*id, value_of(tensor).map_err(|e| format!("input '{}': {e}", spec.name))?)))
        .collect::<Result<Vec<_>, String>>()?;
    // The model is not changed by a run, so that a panic in an operator leaves nothing half done.
    let run = AssertUnwindSafe(|| shared.model.run(inputs, &shared.outputs, Some(shared.run.clone())));
    let values = match catch_unwind(run) {
        Ok(values) => values.map_err(|e| e.to_string())?,
        Err(panic) => return Err(format!("an operator failed: {}", panic_message(&*panic))),
    };
    let outputs = shared.signature.outputs.iter().zip(values);
    outputs.map(|(spec, value)| tensor_of(value, spec).map_err(|e| format!("output '{}': {e}", spec.name))).collect()
}

/// A tensor, checked against the signature, as RTen takes it: in place, or converted where RTen has no such type.
fn value_of(tensor: &Tensor) -> Result<ValueOrView<'_>, String> {
    let bytes = tensor.data.as_slice();
    let shape = tensor.shape.as_slice();
    match tensor.datatype {
        DataType::Fp32 => view::<f32>(shape, bytes),
        DataType::Int32 => view::<i32>(shape, bytes),
        DataType::Int8 => view::<i8>(shape, bytes),
        DataType::Uint8 => view::<u8>(shape, bytes),
        DataType::Bool => owned(shape, bytes.iter().map(|b| i32::from(*b != 0)).collect()),
        DataType::Int64 => {
            let (chunks, _) = bytes.as_chunks::<8>();
            let narrow = |c: &[u8; 8]| {
                let wide = i64::from_le_bytes(*c);
                i32::try_from(wide).map_err(|_| format!("{wide} is out of range: rten computes INT64 with 32 bits"))
            };
            owned(shape, chunks.iter().map(narrow).collect::<Result<_, _>>()?)
        }
        other => Err(format!("rten has no datatype {other}")),
    }
}

/// The bytes in place.
fn view<'a, T: Plain>(shape: &[usize], bytes: &'a [u8]) -> Result<ValueOrView<'a>, String>
where
    ValueView<'a>: From<rten_tensor::TensorView<'a, T>>,
{
    // SAFETY: every bit pattern is a `T`.
    let (before, elements, after) = unsafe { bytes.align_to::<T>() };
    if !before.is_empty() || !after.is_empty() {
        return Err("its bytes are not whole elements".into());
    }
    ValueView::from_shape(shape, elements).map(ValueOrView::View).map_err(|e| e.to_string())
}

fn owned(shape: &[usize], elements: Vec<i32>) -> Result<ValueOrView<'static>, String> {
    Value::from_shape(shape, elements).map(ValueOrView::Value).map_err(|e| e.to_string())
}

/// An output as the signature declares it.
fn tensor_of(value: Value, spec: &TensorSpec) -> Result<Tensor, String> {
    match (value, spec.datatype) {
        (Value::FloatTensor(t), DataType::Fp32) => Ok(plain(t, DataType::Fp32)),
        (Value::Int32Tensor(t), DataType::Int32) => Ok(plain(t, DataType::Int32)),
        (Value::Int8Tensor(t), DataType::Int8) => Ok(plain(t, DataType::Int8)),
        (Value::UInt8Tensor(t), DataType::Uint8) => Ok(plain(t, DataType::Uint8)),
        (Value::Int32Tensor(t), DataType::Int64) => {
            let (shape, elements) = parts(t);
            let mut data = Buffer::with_capacity(elements.len() * 8);
            elements.iter().for_each(|n| data.extend_from_slice(&i64::from(*n).to_le_bytes()));
            Ok(Tensor { datatype: DataType::Int64, shape, data })
        }
        (Value::Int32Tensor(t), DataType::Bool) => {
            let (shape, elements) = parts(t);
            let mut data = Buffer::zeroed(elements.len());
            data.as_mut_slice().iter_mut().zip(&elements).for_each(|(b, n)| *b = u8::from(*n != 0));
            Ok(Tensor { datatype: DataType::Bool, shape, data })
        }
        (value, expected) => Err(format!("expected {expected}, got {}", value.dtype())),
    }
}

fn parts<T: Clone>(tensor: rten_tensor::Tensor<T>) -> (Vec<usize>, Vec<T>) {
    use rten_tensor::Layout;
    (tensor.shape().to_vec(), tensor.into_data())
}

/// The elements as bytes, without a copy.
fn plain<T: Plain + Clone>(tensor: rten_tensor::Tensor<T>, datatype: DataType) -> Tensor {
    let (shape, elements) = parts(tensor);
    debug_assert_eq!(crate::tensor::elements(&shape), Some(elements.len()));
    Tensor { datatype, shape, data: Buffer::from_bytes(Bytes::from_owner(PlainBytes(elements))) }
}

/// Elements without padding or invalid bit patterns, little-endian where RTen runs.
///
/// # Safety
/// Every bit pattern of the type's size is a value of it, and it has no padding.
unsafe trait Plain: Copy + Send + Sync + 'static {}
// SAFETY: plain numbers.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for u8 {}

struct PlainBytes<T>(Vec<T>);

impl<T: Plain> AsRef<[u8]> for PlainBytes<T> {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `T` has no padding, so all of its bytes are written.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), size_of_val(self.0.as_slice())) }
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().map(|s| (*s).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "it gave no reason".into())
}
