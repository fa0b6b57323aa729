//! Segments: the places where a model is cut, and the measurements of each part.

use downbeat_core::Duration;
pub use downbeat_core::device::Cut;
use downbeat_core::tensor::TensorSpec;
use serde::{Deserialize, Serialize};

/// A contiguous range of a model's operators (GLOSSARY: segment; a DVABatch *stage* is a fixed
/// one).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SegmentInfo {
    /// The number of its operators.
    pub operators: usize,
    /// Name of its first operator.
    pub first: String,
    /// Name of its last operator.
    pub last: String,
    /// The tensors that are alive at its end, which are the state that [`crate::Lane::run`] leaves.
    /// A size that varies is -1 in `dims`. Axis 0 is the batch.
    pub live: Vec<TensorSpec>,
    /// Bytes of `live` for one item. Sizes that vary have their measured values.
    pub live_bytes_per_item: u64,
    /// Bytes of the weights that its operators use.
    pub weight_bytes: u64,
    /// The segment's time at batch 1 when the model was cut, if it was measured.
    pub time: Option<Duration>,
}
