//! Tensors, the inputs and outputs of engines.

pub mod batch;
pub(crate) mod buffer;
pub mod fill;
pub mod state;
pub mod strings;

use downbeat_core::tensor::{DataType, TensorSpec};

pub use buffer::{ALIGNMENT, Buffer, DeviceBytes, DeviceError, Lent, OutOfMemory};

/// A tensor: little-endian, row-major elements. `BYTES` elements are each preceded by their
/// length as a little-endian `u32`, as in the protocol's binary form (see [`strings`]).
#[derive(Debug)]
pub struct Tensor {
    /// Element type.
    pub datatype: DataType,
    /// Sizes of the axes. The batch comes first if the model has a batch.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Buffer,
}

impl Tensor {
    /// The number of elements of the shape; `None` if it is more than a machine can address.
    #[inline]
    pub fn elements(&self) -> Option<usize> {
        elements(&self.shape)
    }
}

/// The shape of a tensor with this specification. A size that varies is `batch` for axis 0 and
/// `length` for any other.
pub fn shape(spec: &TensorSpec, batch: usize, length: usize) -> Vec<usize> {
    let size = |(axis, d): (usize, &i64)| match usize::try_from(*d) {
        Ok(size) => size,
        Err(_) if axis == 0 => batch,
        Err(_) => length,
    };
    spec.dims.iter().enumerate().map(size).collect()
}

/// The number of elements of a tensor of this shape; `None` if it is more than a machine can
/// address.
#[inline]
pub fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d))
}
