//! The part of `onnx.proto3` that a cut needs. Messages that are only passed on stay as the bytes
//! that were read. On the wire a field of messages and a field of bytes look the same.
//!
//! Written by hand because a generated reader would copy all weights, which may be gigabytes.

#![allow(missing_docs, reason = "the names are those of onnx.proto3, which describes them")]

use bytes::Bytes;
use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub struct ModelProto {
    #[prost(int64, tag = "1")]
    pub ir_version: i64,
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphProto>,
    #[prost(bytes = "bytes", repeated, tag = "8")]
    pub opset_import: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "25")]
    pub functions: Vec<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
pub struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeProto>,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(bytes = "bytes", repeated, tag = "5")]
    pub initializer: Vec<Bytes>,
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
    #[prost(bytes = "bytes", repeated, tag = "15")]
    pub sparse_initializer: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "14")]
    pub quantization_annotation: Vec<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
pub struct NodeProto {
    #[prost(string, repeated, tag = "1")]
    pub input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub output: Vec<String>,
    #[prost(string, tag = "3")]
    pub name: String,
    #[prost(string, tag = "4")]
    pub op_type: String,
    #[prost(bytes = "bytes", repeated, tag = "5")]
    pub attribute: Vec<Bytes>,
    #[prost(string, tag = "7")]
    pub domain: String,
    #[prost(string, tag = "8")]
    pub overload: String,
}

/// Types of attributes with one number, by `AttributeProto.AttributeType`.
const FLOAT: i32 = 1;
const INT: i32 = 2;

/// An attribute, without its graphs.
#[derive(Clone, PartialEq, Message)]
pub struct AttributeProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(float, optional, tag = "2")]
    pub f: Option<f32>,
    #[prost(int64, optional, tag = "3")]
    pub i: Option<i64>,
    #[prost(bytes = "bytes", optional, tag = "4")]
    pub s: Option<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "5")]
    pub t: Option<Bytes>,
    #[prost(float, repeated, packed = "false", tag = "7")]
    pub floats: Vec<f32>,
    #[prost(int64, repeated, packed = "false", tag = "8")]
    pub ints: Vec<i64>,
    #[prost(bytes = "bytes", repeated, tag = "9")]
    pub strings: Vec<Bytes>,
    #[prost(int32, tag = "20")]
    pub r#type: i32,
    /// In a function: the attribute of the call that gives this one its value.
    #[prost(string, tag = "21")]
    pub ref_attr_name: String,
}

/// A function of the model: an operator that consists of others.
#[derive(Clone, PartialEq, Message)]
pub struct FunctionProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, repeated, tag = "4")]
    pub input: Vec<String>,
    #[prost(string, repeated, tag = "5")]
    pub output: Vec<String>,
    #[prost(message, repeated, tag = "7")]
    pub node: Vec<NodeProto>,
    #[prost(message, repeated, tag = "9")]
    pub opset_import: Vec<OperatorSetProto>,
    #[prost(string, tag = "10")]
    pub domain: String,
    /// Attributes with the values that they have if a call leaves them out.
    #[prost(bytes = "bytes", repeated, tag = "11")]
    pub attribute_proto: Vec<Bytes>,
}

impl AttributeProto {
    /// The value of an integer attribute. Writers by proto3 leave a zero out.
    pub fn integer(&self) -> Option<i64> {
        self.i.or((self.r#type == INT).then_some(0))
    }

    /// The value of a float attribute. Writers by proto3 leave a zero out.
    pub fn float(&self) -> Option<f32> {
        self.f.or((self.r#type == FLOAT).then_some(0.0))
    }

    /// An attribute of one integer.
    pub fn int(name: &str, i: i64) -> Self {
        AttributeProto { name: name.to_owned(), i: Some(i), r#type: INT, ..AttributeProto::default() }
    }

    /// An attribute of text.
    pub fn text(name: &str, text: &str) -> Self {
        const STRING: i32 = 3;
        let s = Some(Bytes::copy_from_slice(text.as_bytes()));
        AttributeProto { name: name.to_owned(), s, r#type: STRING, ..AttributeProto::default() }
    }

    /// An attribute of integers.
    pub fn ints(name: &str, ints: Vec<i64>) -> Self {
        const INTS: i32 = 7;
        AttributeProto { name: name.to_owned(), ints, r#type: INTS, ..AttributeProto::default() }
    }
}

/// The part of a model that describes its values.
#[derive(Clone, PartialEq, Message)]
pub struct ModelValues {
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphValues>,
}

#[derive(Clone, PartialEq, Message)]
pub struct GraphValues {
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
    /// The values between inputs and outputs.
    #[prost(message, repeated, tag = "13")]
    pub value_info: Vec<ValueInfoProto>,
}

/// An operator set that a model imports.
#[derive(Clone, PartialEq, Message)]
pub struct OperatorSetProto {
    #[prost(string, tag = "1")]
    pub domain: String,
    #[prost(int64, tag = "2")]
    pub version: i64,
}

/// The graphs of an attribute.
#[derive(Clone, PartialEq, Message)]
pub struct AttributeGraphs {
    #[prost(bytes = "bytes", optional, tag = "6")]
    pub graph: Option<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "11")]
    pub graphs: Vec<Bytes>,
}

/// An attribute of one or several graphs, whole.
#[derive(Clone, PartialEq, Message)]
pub struct GraphAttribute {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(bytes = "bytes", optional, tag = "6")]
    pub graph: Option<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "11")]
    pub graphs: Vec<Bytes>,
    #[prost(int32, tag = "20")]
    pub r#type: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct ValueInfoProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(bytes = "bytes", optional, tag = "2")]
    pub r#type: Option<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TypeProto {
    #[prost(message, optional, tag = "1")]
    pub tensor_type: Option<TensorTypeProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TensorTypeProto {
    #[prost(int32, tag = "1")]
    pub elem_type: i32,
    #[prost(message, optional, tag = "2")]
    pub shape: Option<TensorShapeProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TensorShapeProto {
    #[prost(message, repeated, tag = "1")]
    pub dim: Vec<DimensionProto>,
}

/// A size, or none if it varies; then it may have a name.
#[derive(Clone, PartialEq, Message)]
pub struct DimensionProto {
    #[prost(int64, optional, tag = "1")]
    pub dim_value: Option<i64>,
    #[prost(string, optional, tag = "2")]
    pub dim_param: Option<String>,
}

/// The part of a weight with its size, and with its place in a file of weights.
#[derive(Clone, PartialEq, Message)]
pub struct WeightProto {
    #[prost(int64, repeated, tag = "1")]
    pub dims: Vec<i64>,
    #[prost(int32, tag = "2")]
    pub data_type: i32,
    #[prost(string, tag = "8")]
    pub name: String,
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<StringEntry>,
}

/// A tensor with its elements. The datatype and the exporter decide which field holds them.
#[derive(Clone, PartialEq, Message)]
pub struct TensorProto {
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub dims: Vec<i64>,
    #[prost(int32, tag = "2")]
    pub data_type: i32,
    #[prost(float, repeated, tag = "4")]
    pub float_data: Vec<f32>,
    #[prost(int32, repeated, tag = "5")]
    pub int32_data: Vec<i32>,
    #[prost(bytes = "bytes", repeated, tag = "6")]
    pub string_data: Vec<Bytes>,
    #[prost(int64, repeated, tag = "7")]
    pub int64_data: Vec<i64>,
    #[prost(string, tag = "8")]
    pub name: String,
    #[prost(bytes = "bytes", tag = "9")]
    pub raw_data: Bytes,
    #[prost(double, repeated, tag = "10")]
    pub double_data: Vec<f64>,
    #[prost(uint64, repeated, tag = "11")]
    pub uint64_data: Vec<u64>,
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<StringEntry>,
}

/// A key and a value.
#[derive(Clone, PartialEq, Message)]
pub struct StringEntry {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
}

/// A value of a datatype and of any shape.
pub fn value_info(name: &str, element_type: i32) -> ValueInfoProto {
    let tensor_type = Some(TensorTypeProto { elem_type: element_type, shape: None });
    ValueInfoProto { name: name.into(), r#type: Some(TypeProto { tensor_type }.encode_to_vec().into()) }
}

/// A tensor of a datatype and of these sizes, -1 where they vary.
pub fn shaped_type(element_type: i32, dims: &[i64]) -> TypeProto {
    let dim = dims.iter().map(|d| DimensionProto { dim_value: (*d >= 0).then_some(*d), dim_param: None }).collect();
    TypeProto { tensor_type: Some(TensorTypeProto { elem_type: element_type, shape: Some(TensorShapeProto { dim }) }) }
}
