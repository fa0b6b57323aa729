//! An inference request and its answer, whatever wire they came over.

use std::collections::BTreeMap;

use bytes::Bytes;
use downbeat_core::tensor::DataType;

/// A value in a `parameters` object.
#[derive(Clone, PartialEq, Debug)]
#[allow(missing_docs, reason = "the variants are the protocol's types")]
pub enum Parameter {
    Bool(bool),
    Int64(i64),
    Uint64(u64),
    Double(f64),
    String(String),
}

/// A `parameters` object.
pub type Parameters = BTreeMap<String, Parameter>;

/// A request for an inference.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct InferRequest {
    /// Model name.
    pub model_name: String,
    /// Version as the client wrote it; empty: the server's choice.
    pub model_version: String,
    /// Given back in the answer.
    pub id: String,
    /// `timeout` (microseconds), `priority` and whatever else the client sent.
    pub parameters: Parameters,
    /// Input tensors, in the client's order.
    pub inputs: Vec<InferInput>,
    /// Outputs the client asked for; empty: all.
    pub outputs: Vec<RequestedOutput>,
}

/// An input tensor.
#[derive(Clone, PartialEq, Debug)]
pub struct InferInput {
    /// Name.
    pub name: String,
    /// Element type.
    pub datatype: DataType,
    /// Sizes, the batch dimension included. Negative sizes are kept for the check that names them.
    pub shape: Vec<i64>,
    /// `shared_memory_region` and others.
    pub parameters: Parameters,
    /// The elements in the protocol's binary form: little-endian, row-major, each `BYTES` element preceded by its
    /// length as a little-endian `u32`. Empty while the data is in shared memory.
    pub data: Bytes,
}

/// An output the client asked for.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RequestedOutput {
    /// Name.
    pub name: String,
    /// `classification`, `binary_data`, `shared_memory_region` and others.
    pub parameters: Parameters,
}

/// The answer to an [`InferRequest`].
#[derive(Clone, PartialEq, Debug, Default)]
pub struct InferResponse {
    /// Model name.
    pub model_name: String,
    /// The version that answered.
    pub model_version: String,
    /// The request's id.
    pub id: String,
    /// Parameters of the answer.
    pub parameters: Parameters,
    /// Output tensors.
    pub outputs: Vec<InferOutput>,
}

/// An output tensor.
#[derive(Clone, PartialEq, Debug)]
pub struct InferOutput {
    /// Name.
    pub name: String,
    /// Element type.
    pub datatype: DataType,
    /// Sizes, the batch dimension included.
    pub shape: Vec<i64>,
    /// Parameters of the output.
    pub parameters: Parameters,
    /// As [`InferInput::data`].
    pub data: Bytes,
}
