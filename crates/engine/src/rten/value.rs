//! Converts Downbeat's tensors to RTen's values, and back.

use bytes::Bytes;
use downbeat_core::tensor::{DataType, TensorSpec};
use rten::{Value, ValueOrView, ValueView};

use crate::tensor::Tensor;
use crate::tensor::buffer::Buffer;

/// A tensor, checked against the signature, as an RTen value: in place, or converted if RTen has no
/// such type.
pub(super) fn value_of(tensor: &Tensor) -> Result<ValueOrView<'_>, String> {
    let bytes = tensor.data.as_slice();
    let shape = tensor.shape.as_slice();
    match tensor.datatype {
        DataType::Fp32 => view::<f32>(shape, bytes),
        DataType::Int32 => view::<i32>(shape, bytes),
        DataType::Int8 => view::<i8>(shape, bytes),
        DataType::Uint8 => view::<u8>(shape, bytes),
        DataType::Bool => owned(shape, bytes.iter().map(|b| Ok(i32::from(*b != 0)))),
        DataType::Int64 => {
            let (chunks, _) = bytes.as_chunks::<8>();
            let narrow = |c: &[u8; 8]| {
                let wide = i64::from_le_bytes(*c);
                i32::try_from(wide).map_err(|_| format!("{wide} is out of range: rten computes INT64 with 32 bits"))
            };
            owned(shape, chunks.iter().map(narrow))
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

fn owned(
    shape: &[usize],
    from: impl ExactSizeIterator<Item = Result<i32, String>>,
) -> Result<ValueOrView<'static>, String> {
    let mut elements = Vec::new();
    elements.try_reserve_exact(from.len()).map_err(|e| e.to_string())?;
    for element in from {
        elements.push(element?);
    }
    Value::from_shape(shape, elements).map(ValueOrView::Value).map_err(|e| e.to_string())
}

/// An output with the datatype that the signature declares.
pub(super) fn tensor_of(value: Value, spec: &TensorSpec) -> Result<Tensor, String> {
    match (value, spec.datatype) {
        (Value::FloatTensor(t), DataType::Fp32) => Ok(plain(t, DataType::Fp32)),
        (Value::Int32Tensor(t), DataType::Int32) => Ok(plain(t, DataType::Int32)),
        (Value::Int8Tensor(t), DataType::Int8) => Ok(plain(t, DataType::Int8)),
        (Value::UInt8Tensor(t), DataType::Uint8) => Ok(plain(t, DataType::Uint8)),
        (Value::Int32Tensor(t), DataType::Int64) => {
            let (shape, elements) = parts(t);
            let mut data = Buffer::try_with_capacity(elements.len() * 8).map_err(|e| e.to_string())?;
            elements.iter().for_each(|n| data.extend_from_slice(&i64::from(*n).to_le_bytes()));
            Ok(Tensor { datatype: DataType::Int64, shape, data })
        }
        (Value::Int32Tensor(t), DataType::Bool) => {
            let (shape, elements) = parts(t);
            let mut data = Buffer::zeroed(elements.len()).map_err(|e| e.to_string())?;
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
/// Every bit pattern of the type's size must be a value of the type, and the type must have no
/// padding.
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
