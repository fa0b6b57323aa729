//! A tensor in the clients' view and in the model's view.

use std::sync::Arc;

use downbeat_core::tensor::{DataType, TensorSpec};
use serde::{Deserialize, Serialize};

/// An input or output in the clients' view and in the engine's view. The two differ in shape if the
/// configuration has a `reshape`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TensorBinding {
    /// Name and datatype; sizes as clients see them, the batch dimension included (-1).
    pub client: TensorSpec,
    /// The tensor's index in the engine's signature (`inputs` or `outputs`).
    pub model_index: usize,
    /// Sizes as the engine sees them, the batch dimension included (-1).
    pub model_dims: Vec<i64>,
    /// Class names (`label_filename`) in class order; empty if there are none.
    pub labels: Arc<[String]>,
    /// Whether the first dimension is the batch.
    pub batched: bool,
    /// Whether the configuration lets requests leave the input out. A request can do so only if the
    /// model has a default value for the input.
    pub optional: bool,
}

impl TensorBinding {
    /// The datatype.
    pub fn datatype(&self) -> DataType {
        self.client.datatype
    }

    /// Whether the two shapes differ.
    pub fn is_reshaped(&self) -> bool {
        self.client.dims != self.model_dims
    }

    /// The shape for the engine of a client's input with this shape.
    ///
    /// # Errors
    /// The expected shape, if the given one does not fit.
    pub fn model_shape(&self, shape: &[i64]) -> Result<Vec<usize>, String> {
        convert(&self.client.dims, &self.model_dims, shape).ok_or_else(|| {
            format!("'{}' expects shape {}, got {}", self.client.name, show(&self.client.dims), show(shape))
        })
    }

    /// The shape for a client of the engine's output with this shape.
    ///
    /// # Errors
    /// The expected shape, if the engine's shape differs from the model's declaration.
    pub fn client_shape(&self, shape: &[usize]) -> Result<Vec<usize>, String> {
        let shape: Vec<i64> = shape.iter().map(|d| i64::try_from(*d).unwrap_or(i64::MAX)).collect();
        convert(&self.model_dims, &self.client.dims, &shape).ok_or_else(|| {
            format!(
                "output '{}' should have shape {}, but the model gave {}",
                self.client.name,
                show(&self.model_dims),
                show(&shape)
            )
        })
    }
}

/// Checks `shape` against `from` and writes its variable sizes into `to`, in order.
fn convert(from: &[i64], to: &[i64], shape: &[i64]) -> Option<Vec<usize>> {
    if shape.len() != from.len() {
        return None;
    }
    let mut variable = Vec::new();
    for (expected, got) in from.iter().zip(shape) {
        let size = usize::try_from(*got).ok()?;
        match *expected {
            -1 => variable.push(size),
            expected if expected == *got => {}
            _ => return None,
        }
    }
    let mut variable = variable.into_iter();
    to.iter().map(|d| if *d == -1 { variable.next() } else { usize::try_from(*d).ok() }).collect()
}

/// `[-1,3,224]`.
pub(crate) fn show(dims: &[i64]) -> String {
    let dims: Vec<String> = dims.iter().map(i64::to_string).collect();
    format!("[{}]", dims.join(","))
}
