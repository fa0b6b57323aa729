//! A model in ONNX Runtime.
//!
//! Batches go in and out without a copy: inputs are used where they lie, and an output stays the library's memory until
//! the last reply made of it is sent. `ort`'s own `Session::run` asks for exclusive access and builds maps of names; here
//! the C function is called itself, which any number of threads may do on one CPU session, so that lanes share the weights.

use std::ffi::{CString, c_char, c_void};
use std::ops::Range;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use bytes::Bytes;
use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use ort::session::{Session, SharedSessionInner};
use ort::sys;
use ort::value::Outlet;
use ort::{AsPointer, api};
use smallvec::SmallVec;

use super::NAME;
use crate::buffer::Buffer;
use crate::tensor::{Tensor, elements};
use crate::traits::{Lane, LoadError, Model, RunError, State};
use crate::{batch, onnx, strings};

/// A session and the names that its runs pass.
pub(super) struct SessionModel {
    shared: Arc<Shared>,
}

struct Shared {
    session: Arc<SharedSessionInner>,
    signature: Signature,
    memory: CpuMemory,
    names: Names,
}

/// The names of inputs and outputs as C wants them. The pointers are into the strings.
struct Names {
    inputs: Vec<*const c_char>,
    outputs: Vec<*const c_char>,
    _strings: Vec<CString>,
}

// SAFETY: the pointers are to strings on the heap that live as long and are never written.
unsafe impl Send for Names {}
// SAFETY: as above.
unsafe impl Sync for Names {}

impl SessionModel {
    pub(super) fn new(session: Session, signature: Signature, path: &Path) -> Result<Self, LoadError> {
        let error = |reason: String| LoadError::Model { path: path.to_owned(), engine: NAME, reason };
        let same = |specs: &[TensorSpec], outlets: &[Outlet]| {
            specs.len() == outlets.len() && specs.iter().zip(outlets).all(|(s, o)| s.name == o.name())
        };
        if !same(&signature.inputs, session.inputs()) || !same(&signature.outputs, session.outputs()) {
            return Err(error("its inputs and outputs differ from those that the library reads; the file changed meanwhile. Load it again".into()));
        }
        let mut strings = Vec::new();
        let mut pointers = |specs: &[TensorSpec]| -> Result<Vec<*const c_char>, LoadError> {
            specs
                .iter()
                .map(|spec| {
                    let name =
                        CString::new(spec.name.as_str()).map_err(|e| error(format!("name '{}': {e}", spec.name)))?;
                    let pointer = name.as_ptr();
                    strings.push(name);
                    Ok(pointer)
                })
                .collect()
        };
        let (inputs, outputs) = (pointers(&signature.inputs)?, pointers(&signature.outputs)?);
        let names = Names { inputs, outputs, _strings: strings };
        let memory = CpuMemory::new().map_err(error)?;
        Ok(SessionModel { shared: Arc::new(Shared { session: session.inner(), signature, memory, names }) })
    }
}

/// Datatype and sizes of output `index` as the library inferred them.
pub(super) fn output(session: &Session, index: usize) -> Option<(DataType, Vec<i64>)> {
    let ort::value::ValueType::Tensor { ty, shape, .. } = session.outputs().get(index)?.dtype() else { return None };
    let datatype = onnx::datatype(i64::from(sys::ONNXTensorElementDataType::from(*ty) as i32))?;
    Some((datatype, shape.to_vec()))
}

impl Model for SessionModel {
    fn signature(&self) -> &Signature {
        &self.shared.signature
    }

    fn lane(&self) -> Result<Box<dyn Lane>, LoadError> {
        let (inputs, outputs) = (self.shared.names.inputs.len(), self.shared.names.outputs.len());
        Ok(Box::new(SessionLane {
            shared: self.shared.clone(),
            inputs: Vec::with_capacity(inputs),
            outputs: Vec::with_capacity(outputs),
            dims: Vec::new(),
        }))
    }
}

/// Runs batches on a session that other lanes may share; activations are the library's own for each run.
struct SessionLane {
    shared: Arc<Shared>,
    /// Room for the values of a run; empty between runs.
    inputs: Vec<Value>,
    outputs: Vec<*mut sys::OrtValue>,
    dims: Vec<i64>,
}

// SAFETY: `inputs` and `outputs` are empty between runs, and values may be moved between threads anyway.
unsafe impl Send for SessionLane {}

impl Lane for SessionLane {
    fn run(&mut self, range: Range<usize>, state: &mut State) -> Result<(), RunError> {
        if range.is_empty() {
            return Ok(());
        }
        // The inputs have to live until the run is over: the library reads them where they lie.
        let mut tensors = std::mem::take(&mut state.tensors);
        let result = self.run_batch(&mut tensors).and_then(|()| self.take_outputs(&tensors));
        self.inputs.clear();
        match result {
            Ok(outputs) => {
                state.tensors = outputs;
                Ok(())
            }
            Err(reason) => Err(RunError { engine: NAME, reason }),
        }
    }
}

impl SessionLane {
    fn run_batch(&mut self, tensors: &mut [Tensor]) -> Result<(), String> {
        let Shared { session, signature, memory, names } = &*self.shared;
        batch::check(signature, tensors)?;
        for tensor in tensors {
            let value = if tensor.datatype == DataType::Bytes {
                Value::of_strings(tensor, &mut self.dims)
            } else {
                batch::normalise_booleans(tensor);
                Value::of_memory(memory, tensor, &mut self.dims)
            };
            self.inputs.push(value?);
        }
        self.outputs.clear();
        self.outputs.resize(names.outputs.len(), ptr::null_mut());
        // SAFETY: `Value` is a transparent pointer; names and values are as many as said; the memory of the inputs is
        // borrowed until after the call; a CPU session may be run by several threads at once (the C API's contract of
        // `Run`; what `ort` guards against by `&mut` are providers for other devices).
        let status = unsafe {
            (api().Run)(
                session.ptr().cast_mut(),
                ptr::null(),
                names.inputs.as_ptr(),
                self.inputs.as_ptr().cast(),
                self.inputs.len(),
                names.outputs.as_ptr(),
                names.outputs.len(),
                self.outputs.as_mut_ptr(),
            )
        };
        check(status)
    }

    /// Turns the values of the run into tensors, which own them. `inputs` are the run's.
    fn take_outputs(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
        // All of them first, so that none is lost when one of them is an error.
        let values: SmallVec<[Option<Value>; 4]> = self.outputs.drain(..).map(Value::from_raw).collect();
        let mut tensors = Vec::with_capacity(values.len());
        for (spec, value) in self.shared.signature.outputs.iter().zip(values) {
            let value = value.ok_or_else(|| format!("the model gave no value for output '{}'", spec.name))?;
            let tensor = value
                .into_tensor(&self.shared.session, inputs)
                .map_err(|reason| format!("output '{}': {reason}", spec.name))?;
            if tensor.datatype != spec.datatype {
                return Err(format!(
                    "output '{}': expected datatype {}, got {}",
                    spec.name, spec.datatype, tensor.datatype
                ));
            }
            tensors.push(tensor);
        }
        Ok(tensors)
    }
}

/// The C API's description of plain memory.
struct CpuMemory(NonNull<sys::OrtMemoryInfo>);

// SAFETY: it is only read after it is made.
unsafe impl Send for CpuMemory {}
// SAFETY: as above.
unsafe impl Sync for CpuMemory {}

impl CpuMemory {
    fn new() -> Result<Self, String> {
        let mut info = ptr::null_mut();
        // SAFETY: `info` is written if the call succeeds.
        check(unsafe {
            (api().CreateCpuMemoryInfo)(
                sys::OrtAllocatorType::OrtDeviceAllocator,
                sys::OrtMemType::OrtMemTypeDefault,
                &mut info,
            )
        })?;
        NonNull::new(info).map(CpuMemory).ok_or_else(|| "no memory description".into())
    }
}

impl Drop for CpuMemory {
    fn drop(&mut self) {
        // SAFETY: made by `CreateCpuMemoryInfo`, released once.
        unsafe { (api().ReleaseMemoryInfo)(self.0.as_ptr()) };
    }
}

/// A value of the library's, owned.
#[repr(transparent)]
struct Value(NonNull<sys::OrtValue>);

// SAFETY: a value may be used and released by any thread; it keeps its allocator alive.
unsafe impl Send for Value {}

impl Drop for Value {
    fn drop(&mut self) {
        // SAFETY: owned, released once.
        unsafe { (api().ReleaseValue)(self.0.as_ptr()) };
    }
}

impl Value {
    fn from_raw(value: *mut sys::OrtValue) -> Option<Value> {
        NonNull::new(value).map(Value)
    }

    /// A value that uses the memory of `tensor`, which has to outlive it and was checked to be as long as its shape says.
    fn of_memory(memory: &CpuMemory, tensor: &mut Tensor, dims: &mut Vec<i64>) -> Result<Value, String> {
        // Elements at their own alignment is what the library requires; buffers of ours have 64.
        tensor.data.make_aligned(tensor.datatype.size().unwrap_or(1));
        let data = tensor.data.as_slice();
        dims.clear();
        dims.extend(tensor.shape.iter().map(|d| *d as i64));
        let mut value = ptr::null_mut();
        // SAFETY: the library only reads inputs, so that the pointer may come from a shared slice; sizes are as said;
        // `value` is written if the call succeeds.
        check(unsafe {
            (api().CreateTensorWithDataAsOrtValue)(
                memory.0.as_ptr(),
                data.as_ptr().cast_mut().cast::<c_void>(),
                data.len(),
                dims.as_ptr(),
                dims.len(),
                element_type(tensor.datatype),
                &mut value,
            )
        })?;
        Value::from_raw(value).ok_or_else(|| "no value made".into())
    }

    /// A value with copies of the strings of `tensor`, which was checked to have as many as its shape says.
    fn of_strings(tensor: &Tensor, dims: &mut Vec<i64>) -> Result<Value, String> {
        dims.clear();
        dims.extend(tensor.shape.iter().map(|d| *d as i64));
        let mut allocator = ptr::null_mut();
        let mut value = ptr::null_mut();
        // SAFETY: the default allocator is the library's and lives as long; `value` is written if the call succeeds.
        unsafe {
            check((api().GetAllocatorWithDefaultOptions)(&mut allocator))?;
            check((api().CreateTensorAsOrtValue)(
                allocator,
                dims.as_ptr(),
                dims.len(),
                element_type(DataType::Bytes),
                &mut value,
            ))?;
        }
        let value = Value::from_raw(value).ok_or("no value made")?;
        for (index, string) in strings::split(tensor.data.as_slice()).enumerate() {
            let string = string.map_err(|e| e.to_string())?;
            let mut room = ptr::null_mut();
            // SAFETY: `index` is below the element count; the library makes room for `string.len()` bytes.
            unsafe {
                check((api().GetResizedStringTensorElementBuffer)(value.0.as_ptr(), index, string.len(), &mut room))?;
                if !string.is_empty() && !room.is_null() {
                    ptr::copy_nonoverlapping(string.as_ptr(), room.cast::<u8>(), string.len());
                }
            }
        }
        Ok(value)
    }

    /// The value as a tensor, whose bytes stay in the library's memory (strings are copied).
    ///
    /// `session` made the value in a run of `inputs`.
    fn into_tensor(self, session: &Arc<SharedSessionInner>, inputs: &[Tensor]) -> Result<Tensor, String> {
        let mut kind = sys::ONNXType::ONNX_TYPE_UNKNOWN;
        let mut element = sys::ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
        let (mut dims, mut rank) = (ptr::null::<i64>(), 0usize);
        // SAFETY: all are written if the calls succeed; the second needs a tensor, and the sizes that it points to live as
        // long as the value.
        let shape = unsafe {
            check((api().GetValueType)(self.0.as_ptr(), &mut kind))?;
            if kind != sys::ONNXType::ONNX_TYPE_TENSOR {
                return Err("expected a tensor, got another kind of value".into());
            }
            check((api().GetTensorElementTypeAndShapeDataReference)(
                self.0.as_ptr(),
                &mut element,
                &mut dims,
                &mut rank,
            ))?;
            if rank == 0 { &[] } else { std::slice::from_raw_parts(dims, rank) }
        };
        let shape: Vec<usize> = shape.iter().map(|d| usize::try_from(*d).unwrap_or(0)).collect();
        let datatype = onnx::datatype(i64::from(element as i32))
            .ok_or_else(|| format!("element type {element:?} is not one of the protocol's"))?;
        let count = elements(&shape).ok_or("more elements than memory")?;
        let Some(size) = datatype.size() else {
            return Ok(Tensor { datatype, data: self.strings(count)?, shape });
        };
        let mut data = ptr::null_mut();
        // SAFETY: a tensor of fixed-size elements; `data` is written if the call succeeds.
        check(unsafe { (api().GetTensorMutableData)(self.0.as_ptr(), &mut data) })?;
        let Some(start) = NonNull::new(data.cast::<u8>()).filter(|_| count > 0) else {
            return Ok(Tensor { datatype, shape, data: Buffer::new() });
        };
        let len = count.checked_mul(size).ok_or("more bytes than memory")?;
        let bytes = OutputBytes { _value: self, _session: session.clone(), start, len };
        // A model may hand an input through as an output: then the value is the input's own memory, which ends before.
        let lent = inputs.iter().any(|i| i.data.as_slice().as_ptr_range().contains(&start.as_ptr().cast_const()));
        let data = if lent { Buffer::from(bytes.as_ref()) } else { Buffer::from_bytes(Bytes::from_owner(bytes)) };
        Ok(Tensor { datatype, shape, data })
    }

    /// Copies the strings of a string tensor of `count` elements.
    fn strings(&self, count: usize) -> Result<Buffer, String> {
        if count == 0 {
            return Ok(Buffer::new());
        }
        let mut len = 0;
        let mut offsets = vec![0usize; count];
        let value = self.0.as_ptr();
        // SAFETY: a string tensor; `len` is written if the call succeeds.
        check(unsafe { (api().GetStringTensorDataLength)(value, &mut len) })?;
        let mut content = vec![0u8; len];
        // SAFETY: `content` and `offsets` have as much room as said.
        check(unsafe {
            (api().GetStringTensorContent)(value, content.as_mut_ptr().cast(), len, offsets.as_mut_ptr(), count)
        })?;
        let mut buffer = Buffer::with_capacity(len + 4 * count);
        let ends = offsets.iter().skip(1).copied().chain([len]);
        for (start, end) in offsets.iter().copied().zip(ends) {
            let string = content.get(start..end).ok_or("string offsets out of range")?;
            strings::push(&mut buffer, string).map_err(|_| "a string longer than 4 GiB")?;
        }
        Ok(buffer)
    }
}

/// The bytes of a tensor that the library made; they live as long as its value, or as the session if they are a weight.
struct OutputBytes {
    _value: Value,
    _session: Arc<SharedSessionInner>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the bytes are written before this is made and never after.
unsafe impl Send for OutputBytes {}

impl AsRef<[u8]> for OutputBytes {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the value owns `len` bytes at `start` and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

/// The number that the C API has for a datatype.
fn element_type(datatype: DataType) -> sys::ONNXTensorElementDataType {
    use sys::ONNXTensorElementDataType as E;
    match datatype {
        DataType::Bool => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
        DataType::Uint8 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
        DataType::Uint16 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16,
        DataType::Uint32 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32,
        DataType::Uint64 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64,
        DataType::Int8 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
        DataType::Int16 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,
        DataType::Int32 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
        DataType::Int64 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
        DataType::Fp16 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        DataType::Fp32 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        DataType::Fp64 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE,
        DataType::Bf16 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
        DataType::Bytes => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING,
    }
}

/// The library's error in its own words.
fn check(status: sys::OrtStatusPtr) -> Result<(), String> {
    // SAFETY: `status` comes from a function of the library and is used nowhere else.
    unsafe { ort::Error::result_from_status(status) }.map_err(|e| e.message().trim().to_owned())
}
