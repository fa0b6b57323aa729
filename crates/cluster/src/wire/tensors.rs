//! The tensors of a request or an answer, on their way between processes.

use std::sync::Arc;

use bytes::Bytes;
use downbeat_host::request::batch_codec::OutputPart;
use serde::{Deserialize, Serialize};

use super::arena::Arena;

/// The tensors of a request in the order of its model's inputs, or of an answer in the order of its
/// outputs. A clone shares the bytes.
///
/// Encoding leaves the tensors' bytes out; these bytes follow the encoded head.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Tensors(Arc<Vec<SentTensor>>);

/// A tensor.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SentTensor {
    /// The sizes of all dimensions, the batch dimension included.
    shape: Vec<i64>,
    /// Bytes of `data`.
    length: u64,
    /// Elements in the protocol's binary form.
    #[serde(skip)]
    data: Bytes,
}

impl Tensors {
    /// The bytes of each tensor, in order.
    pub fn data(&self) -> impl Iterator<Item = &Bytes> {
        self.0.iter().map(|tensor| &tensor.data)
    }

    /// The total bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.0.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.length))
    }

    /// The length of each tensor that was just decoded, and the place for its bytes.
    pub fn unfilled(&mut self) -> impl Iterator<Item = (u64, &mut Bytes)> {
        let tensors = Arc::get_mut(&mut self.0).map(|tensors| tensors.iter_mut());
        tensors.into_iter().flatten().map(|tensor| (tensor.length, &mut tensor.data))
    }

    /// Tensors with these parts. `arena` keeps the large ones for other processes.
    pub fn kept(parts: impl IntoIterator<Item = OutputPart>, arena: Option<&Arc<Arena>>) -> Tensors {
        let keep = |part: OutputPart| match arena {
            Some(arena) => OutputPart { data: arena.keep(part.data), ..part },
            None => part,
        };
        parts.into_iter().map(keep).collect()
    }
}

impl FromIterator<OutputPart> for Tensors {
    fn from_iter<T: IntoIterator<Item = OutputPart>>(parts: T) -> Self {
        let sent = |OutputPart { shape, data }| SentTensor { shape, length: data.len() as u64, data };
        Tensors(Arc::new(parts.into_iter().map(sent).collect()))
    }
}

impl IntoIterator for Tensors {
    type Item = OutputPart;
    type IntoIter = std::iter::Map<std::vec::IntoIter<SentTensor>, fn(SentTensor) -> OutputPart>;

    fn into_iter(self) -> Self::IntoIter {
        // Copies the tensors, without their bytes, while an unacknowledged frame still has them.
        let tensors = Arc::unwrap_or_clone(self.0);
        tensors.into_iter().map(|SentTensor { shape, data, .. }| OutputPart { shape, data })
    }
}
