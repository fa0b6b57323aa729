//! Tensors as engines take and give them.

use downbeat_core::tensor::DataType;

pub use crate::buffer::{ALIGNMENT, Buffer};

/// A tensor: little-endian, row-major elements. `BYTES` elements are each preceded by their
/// length as a little-endian `u32`, as in the protocol's binary form (see [`crate::strings`]).
#[derive(Debug)]
pub struct Tensor {
    /// Element type.
    pub datatype: DataType,
    /// Sizes, the batch dimension first where the model has one.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Buffer,
}

impl Tensor {
    /// The number of elements that the shape says; `None` if it is more than a machine can address.
    pub fn elements(&self) -> Option<usize> {
        elements(&self.shape)
    }
}

/// The number of elements of a tensor of this shape; `None` if it is more than a machine can address.
pub fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d))
}
