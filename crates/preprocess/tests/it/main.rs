//! The tensors made of pictures and texts, and the refused inputs.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod pictures;
mod steps;
mod texts;

use std::path::Path;

use bytes::Bytes;
use downbeat_core::tensor::{DataType, TensorSpec};
use downbeat_preprocess::{Pipeline, PreprocessError, Recipe, read_steps};
use downbeat_protocol::InferTensor;
use serde_json::Value;

/// The example models, whose file says which steps they are made for.
const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/preprocess");
const MOST_PIXELS: u64 = 1_000_000;

fn spec(name: &str, datatype: DataType, dims: &[i64]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), datatype, dims: dims.to_vec() }
}

/// The pipeline of a batched model.
fn pipeline(steps: &Value, inputs: &[TensorSpec]) -> Result<Pipeline, String> {
    let folder = Path::new(EXAMPLES).join("models/sentence");
    Pipeline::new(&Recipe::read(read_steps(steps)?, |file| Ok(folder.join(file)))?, inputs, true, MOST_PIXELS)
}

/// Runs a pipeline as the server does: first it looks at the items, then it runs.
fn run(pipeline: &Pipeline, items: &[&[u8]]) -> Result<Vec<InferTensor>, PreprocessError> {
    let items: Vec<Bytes> = items.iter().map(|item| Bytes::copy_from_slice(item)).collect();
    pipeline.look(&items)?;
    pipeline.run(&items)
}

fn floats(tensor: &InferTensor) -> Vec<f32> {
    tensor.data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn integers(tensor: &InferTensor) -> Vec<i64> {
    tensor.data.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()
}
