//! Values of ONNX Runtime: Downbeat's tensors lent to the library, and its values as tensors.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use bytes::Bytes;
use downbeat_core::tensor::DataType;
use downbeat_engine::onnx;
use downbeat_engine::tensor::strings;
use downbeat_engine::tensor::{Buffer, Lent};
use downbeat_engine::tensor::{Tensor, elements};
use ort::session::SharedSessionInner;
use ort::{AsPointer, api, sys};
use smallvec::SmallVec;

/// The C API's description of memory.
pub(super) struct MemoryInfo(NonNull<sys::OrtMemoryInfo>);

// SAFETY: it is only read after its creation.
unsafe impl Send for MemoryInfo {}
// SAFETY: as above.
unsafe impl Sync for MemoryInfo {}

impl MemoryInfo {
    /// Describes memory with the library's name for it, on the device of this number.
    pub(super) fn new(name: &CStr, device: c_int, kind: sys::OrtAllocatorType) -> Result<Self, String> {
        let mut info = ptr::null_mut();
        // SAFETY: the name is a C string; `info` is written if the call succeeds.
        check(unsafe {
            (api().CreateMemoryInfo)(name.as_ptr(), kind, device, sys::OrtMemType::OrtMemTypeDefault, &raw mut info)
        })?;
        NonNull::new(info).map(MemoryInfo).ok_or_else(|| "no memory description".into())
    }

    /// Describes plain memory.
    pub(super) fn cpu() -> Result<Self, String> {
        MemoryInfo::new(c"Cpu", 0, sys::OrtAllocatorType::OrtDeviceAllocator)
    }

    /// The pointer for the C API.
    pub(super) fn as_raw(&self) -> *const sys::OrtMemoryInfo {
        self.0.as_ptr()
    }
}

impl Drop for MemoryInfo {
    fn drop(&mut self) {
        // SAFETY: made by `CreateMemoryInfo`, released once.
        unsafe { (api().ReleaseMemoryInfo)(self.0.as_ptr()) };
    }
}

/// Makes one arena for all sessions that ask for it, instead of one for each.
pub(super) fn share_arena(environment: &ort::environment::Environment) -> Result<(), String> {
    let info = MemoryInfo::new(c"Cpu", 0, sys::OrtAllocatorType::OrtArenaAllocator)?;
    // SAFETY: the environment is valid, and copies the description; no configuration is the
    // default.
    check(unsafe { (api().CreateAndRegisterAllocator)(environment.ptr().cast_mut(), info.as_raw(), ptr::null()) })
}

/// A value of the library's, owned.
#[repr(transparent)]
pub(super) struct Value(NonNull<sys::OrtValue>);

// SAFETY: a value may be used and released by any thread; it keeps its allocator alive.
unsafe impl Send for Value {}
// SAFETY: shared references only read the description, which the library allows from any thread.
unsafe impl Sync for Value {}

impl Drop for Value {
    fn drop(&mut self) {
        // SAFETY: owned, released once.
        unsafe { (api().ReleaseValue)(self.0.as_ptr()) };
    }
}

impl Value {
    pub(super) fn from_raw(value: *mut sys::OrtValue) -> Option<Value> {
        NonNull::new(value).map(Value)
    }

    /// The pointer for the C API. The value still belongs to `self`.
    pub(super) fn as_raw(&self) -> *mut sys::OrtValue {
        self.0.as_ptr()
    }

    /// A value on the memory of `tensor`, which must outlive it. The caller has checked that the
    /// tensor is as long as its shape says.
    pub(super) fn of_memory(memory: &MemoryInfo, tensor: &mut Tensor) -> Result<Value, String> {
        // The library requires elements at their own alignment; our buffers have 64 bytes.
        tensor.data.make_aligned(tensor.datatype.size().unwrap_or(1));
        // If the memory is this tensor's alone, the pointer may be written through, so that a run
        // may leave an output in the memory. Shared memory is only read: a run checks exclusivity
        // before it writes.
        let (start, len) = match tensor.data.exclusive() {
            Some(data) => (data.as_mut_ptr(), data.len()),
            None => (tensor.data.as_slice().as_ptr().cast_mut(), tensor.data.len()),
        };
        Value::of_bytes(memory, start.cast::<c_void>(), len, &tensor.shape, element_type(tensor.datatype))
    }

    /// A value of `len` bytes at an address of a device's memory, as `info` describes it. It does
    /// not own the bytes, which must outlive it.
    pub(super) fn of_device(
        info: &MemoryInfo,
        address: u64,
        len: usize,
        shape: &[usize],
        element: sys::ONNXTensorElementDataType,
    ) -> Result<Value, String> {
        let start = ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0));
        Value::of_bytes(info, start, len, shape, element)
    }

    fn of_bytes(
        info: &MemoryInfo,
        start: *mut c_void,
        len: usize,
        shape: &[usize],
        element: sys::ONNXTensorElementDataType,
    ) -> Result<Value, String> {
        let (dims, mut value) = (dims(shape), ptr::null_mut());
        // SAFETY: the library takes the address as it is, and reads no byte behind it. The sizes
        // are right; `value` is written if the call succeeds.
        check(unsafe {
            (api().CreateTensorWithDataAsOrtValue)(
                info.as_raw(),
                start,
                len,
                dims.as_ptr(),
                dims.len(),
                element,
                &raw mut value,
            )
        })?;
        Value::from_raw(value).ok_or_else(|| "no value made".into())
    }

    /// Datatype and shape of a tensor.
    pub(super) fn describe(&self) -> Result<(DataType, Vec<usize>), String> {
        let mut kind = sys::ONNXType::ONNX_TYPE_UNKNOWN;
        let mut element = sys::ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
        let (mut dims, mut rank) = (ptr::null::<i64>(), 0usize);
        // SAFETY: all are written if the calls succeed. The second call needs a tensor, and its
        // sizes live as long as the value.
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
        Ok((datatype, shape))
    }

    /// The address of the bytes of a tensor with fixed-size elements.
    pub(super) fn address(&self) -> Result<*mut c_void, String> {
        let mut data = ptr::null_mut();
        // SAFETY: a tensor of fixed-size elements; `data` is written if the call succeeds.
        check(unsafe { (api().GetTensorMutableData)(self.0.as_ptr(), &mut data) })?;
        Ok(data)
    }

    /// A value with copies of the strings of `tensor`. The caller has checked that there are as
    /// many as its shape says.
    pub(super) fn of_strings(tensor: &Tensor) -> Result<Value, String> {
        let dims = dims(&tensor.shape);
        let mut allocator = ptr::null_mut();
        let mut value = ptr::null_mut();
        // SAFETY: the default allocator is the library's and lives as long; `value` is written if
        // the call succeeds.
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
            // SAFETY: `index` is below the element count; the library makes room for `string.len()`
            // bytes.
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
    /// `session` made the value in a run of `inputs`. `between` segments the memory has no other
    /// owner, so that it may be written.
    pub(super) fn into_tensor(
        self,
        session: &Arc<SharedSessionInner>,
        inputs: &[Tensor],
        between: bool,
    ) -> Result<Tensor, String> {
        let (datatype, shape) = self.describe()?;
        let count = elements(&shape).ok_or("more elements than memory")?;
        let Some(size) = datatype.size() else {
            return Ok(Tensor { datatype, data: self.strings(count)?, shape });
        };
        let data = self.address()?;
        let Some(start) = NonNull::new(data.cast::<u8>()).filter(|_| count > 0) else {
            return Ok(Tensor { datatype, shape, data: Buffer::new() });
        };
        let len = count.checked_mul(size).ok_or("more bytes than memory")?;
        let bytes = OutputBytes { _value: self, _session: session.clone(), start, len };
        // A model may pass an input through as an output. Then the value is the input's own memory,
        // which ends before.
        let lent = inputs.iter().any(|i| i.data.as_slice().as_ptr_range().contains(&start.as_ptr().cast_const()));
        let data = match (lent, between) {
            (true, _) => Buffer::from(bytes.as_ref()),
            (false, true) => Buffer::from_lent(Box::new(bytes)),
            (false, false) => Buffer::from_bytes(Bytes::from_owner(bytes)),
        };
        Ok(Tensor { datatype, shape, data })
    }

    /// Copies the strings of a string tensor of `count` elements.
    fn strings(&self, count: usize) -> Result<Buffer, String> {
        if count == 0 {
            return Ok(Buffer::new());
        }
        let mut len = 0;
        let mut offsets = zeros::<usize>(count)?;
        let value = self.0.as_ptr();
        // SAFETY: a string tensor; `len` is written if the call succeeds.
        check(unsafe { (api().GetStringTensorDataLength)(value, &mut len) })?;
        let mut content = zeros::<u8>(len)?;
        // SAFETY: `content` and `offsets` have the stated room.
        check(unsafe {
            (api().GetStringTensorContent)(value, content.as_mut_ptr().cast(), len, offsets.as_mut_ptr(), count)
        })?;
        let mut buffer =
            Buffer::try_with_capacity(len.saturating_add(count.saturating_mul(4))).map_err(|e| e.to_string())?;
        let ends = offsets.iter().skip(1).copied().chain([len]);
        for (start, end) in offsets.iter().copied().zip(ends) {
            let string = content.get(start..end).ok_or("string offsets out of range")?;
            strings::push(&mut buffer, string).map_err(|_| "a string longer than 4 GiB")?;
        }
        Ok(buffer)
    }
}

/// Sizes as the C API takes them.
fn dims(shape: &[usize]) -> SmallVec<[i64; 8]> {
    shape.iter().map(|d| *d as i64).collect()
}

/// `count` zeros, or an error if the memory is lacking.
fn zeros<T: Clone + Default>(count: usize) -> Result<Vec<T>, String> {
    let mut zeros = Vec::new();
    zeros.try_reserve_exact(count).map_err(|e| format!("{count} elements: {e}"))?;
    zeros.resize(count, T::default());
    Ok(zeros)
}

/// The bytes of a tensor that the library made. They live as long as its value, or as the session
/// if they are a weight.
struct OutputBytes {
    _value: Value,
    _session: Arc<SharedSessionInner>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the bytes are written before this is made, and after that only through exclusive access.
unsafe impl Send for OutputBytes {}
// SAFETY: shared references only read.
unsafe impl Sync for OutputBytes {}

impl AsRef<[u8]> for OutputBytes {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the value owns `len` bytes at `start` and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Lent for OutputBytes {
    fn bytes(&self) -> &[u8] {
        self.as_ref()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably. A value that an operator made between
        // segments is no weight.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// The C API's number of a datatype.
pub(super) fn element_type(datatype: DataType) -> sys::ONNXTensorElementDataType {
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

/// The same for an ONNX `TensorProto.DataType`, including types that appear only inside of models.
pub(super) fn element_of(element: i32) -> Option<sys::ONNXTensorElementDataType> {
    use sys::ONNXTensorElementDataType as E;
    Some(match element {
        17 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN,
        18 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FNUZ,
        19 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2,
        20 => E::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2FNUZ,
        other => element_type(onnx::datatype(other.into())?),
    })
}

/// Turns a status into a result, with the library's words as the error.
pub(super) fn check(status: sys::OrtStatusPtr) -> Result<(), String> {
    // SAFETY: `status` comes from a function of the library and is used nowhere else.
    unsafe { ort::Error::result_from_status(status) }.map_err(|e| e.message().trim().to_owned())
}
