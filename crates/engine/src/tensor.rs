//! Tensors as engines take and give them.

use bytes::Bytes;
use downbeat_core::tensor::DataType;

/// Memory of a tensor: 64-byte aligned, so that every engine can use it in place.
///
/// (To be completed by the engine's author: allocation, growth while a batch is assembled,
/// conversion into [`Bytes`] without a copy.)
pub struct Buffer {
    bytes: Vec<u8>,
}

impl Buffer {
    /// An empty buffer with room for `capacity` bytes.
    pub fn with_capacity(capacity: usize) -> Self {
        Buffer { bytes: Vec::with_capacity(capacity) }
    }

    /// Appends the bytes of one request.
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The bytes written so far.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes, shared: slices of it can be replies without a copy.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from(self.bytes)
    }
}

/// A tensor: little-endian, row-major elements. `BYTES` elements are each preceded by their
/// length as a little-endian `u32`, as in the protocol's binary form.
pub struct Tensor {
    /// Element type.
    pub datatype: DataType,
    /// Sizes, the batch dimension first where the model has one.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Buffer,
}
