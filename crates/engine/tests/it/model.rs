//! ONNX models made in tests: the part of onnx.proto3 that they need, and builders.

use std::path::{Path, PathBuf};

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub struct ModelProto {
    #[prost(int64, tag = "1")]
    pub ir_version: i64,
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphProto>,
    #[prost(message, repeated, tag = "8")]
    pub opset_import: Vec<OperatorSetIdProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct OperatorSetIdProto {
    #[prost(string, tag = "1")]
    pub domain: String,
    #[prost(int64, tag = "2")]
    pub version: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeProto>,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(message, repeated, tag = "5")]
    pub initializer: Vec<TensorProto>,
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
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
    #[prost(message, repeated, tag = "5")]
    pub attribute: Vec<AttributeProto>,
    #[prost(string, tag = "7")]
    pub domain: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct AttributeProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(int64, tag = "3")]
    pub i: i64,
    #[prost(bytes = "vec", tag = "4")]
    pub s: Vec<u8>,
    #[prost(message, optional, tag = "5")]
    pub t: Option<TensorProto>,
    #[prost(message, optional, tag = "6")]
    pub g: Option<GraphProto>,
    #[prost(int64, repeated, packed = "false", tag = "8")]
    pub ints: Vec<i64>,
    #[prost(int32, tag = "20")]
    pub r#type: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct TensorProto {
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub dims: Vec<i64>,
    #[prost(int32, tag = "2")]
    pub data_type: i32,
    #[prost(string, tag = "8")]
    pub name: String,
    #[prost(bytes = "vec", tag = "9")]
    pub raw_data: Vec<u8>,
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<StringStringEntryProto>,
    #[prost(int32, tag = "14")]
    pub data_location: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct StringStringEntryProto {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ValueInfoProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<TypeProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TypeProto {
    #[prost(message, optional, tag = "1")]
    pub tensor_type: Option<TensorTypeProto>,
    #[prost(message, optional, tag = "4")]
    pub sequence_type: Option<SequenceTypeProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SequenceTypeProto {
    #[prost(message, optional, boxed, tag = "1")]
    pub elem_type: Option<Box<TypeProto>>,
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

#[derive(Clone, PartialEq, Message)]
pub struct DimensionProto {
    #[prost(int64, optional, tag = "1")]
    pub dim_value: Option<i64>,
    #[prost(string, optional, tag = "2")]
    pub dim_param: Option<String>,
}

/// `TensorProto.DataType.FLOAT`.
pub const FLOAT: i32 = 1;
/// `TensorProto.DataType.UINT8`.
pub const UINT8: i32 = 2;
/// `TensorProto.DataType.INT8`.
pub const INT8: i32 = 3;
/// `TensorProto.DataType.INT32`.
pub const INT32: i32 = 6;
/// `TensorProto.DataType.INT64`.
pub const INT64: i32 = 7;
/// `TensorProto.DataType.BOOL`.
pub const BOOL: i32 = 9;
/// `TensorProto.DataType.FLOAT16`.
pub const FLOAT16: i32 = 10;

/// A declared input or output; sizes below 0 vary.
pub fn value(name: &str, elem_type: i32, dims: &[i64]) -> ValueInfoProto {
    let dim = |d: &i64| match *d {
        -1 => DimensionProto { dim_value: None, dim_param: Some("n".into()) },
        d => DimensionProto { dim_value: Some(d), dim_param: None },
    };
    let shape = TensorShapeProto { dim: dims.iter().map(dim).collect() };
    let tensor_type = Some(TensorTypeProto { elem_type, shape: Some(shape) });
    ValueInfoProto { name: name.into(), r#type: Some(TypeProto { tensor_type, sequence_type: None }) }
}

/// A weight of 32-bit floats.
pub fn floats(name: &str, dims: &[i64], elements: &[f32]) -> TensorProto {
    let raw_data = elements.iter().flat_map(|f| f.to_le_bytes()).collect();
    TensorProto { name: name.into(), data_type: FLOAT, dims: dims.to_vec(), raw_data, ..TensorProto::default() }
}

/// An operator without attributes.
pub fn node(op_type: &str, input: &[&str], output: &[&str]) -> NodeProto {
    let owned = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
    let name = format!("{op_type}_{}", output.join("_"));
    NodeProto { op_type: op_type.into(), input: owned(input), output: owned(output), name, ..NodeProto::default() }
}

/// An attribute of integers.
pub fn ints(name: &str, ints: &[i64]) -> AttributeProto {
    const INTS: i32 = 7;
    AttributeProto { name: name.into(), ints: ints.to_vec(), r#type: INTS, ..AttributeProto::default() }
}

/// An attribute of one integer.
pub fn int(name: &str, i: i64) -> AttributeProto {
    const INT: i32 = 2;
    AttributeProto { name: name.into(), i, r#type: INT, ..AttributeProto::default() }
}

/// An attribute of text.
pub fn text(name: &str, text: &str) -> AttributeProto {
    const STRING: i32 = 3;
    AttributeProto { name: name.into(), s: text.into(), r#type: STRING, ..AttributeProto::default() }
}

/// A weight of signed or unsigned bytes.
pub fn bytes(name: &str, elem_type: i32, dims: &[i64], elements: &[u8]) -> TensorProto {
    TensorProto {
        name: name.into(),
        data_type: elem_type,
        dims: dims.to_vec(),
        raw_data: elements.into(),
        ..TensorProto::default()
    }
}

/// A convolution with a kernel of one pixel.
pub fn convolution(input: &str, weights: &str, output: &str) -> NodeProto {
    let attribute = vec![ints("kernel_shape", &[1, 1]), ints("strides", &[1, 1]), ints("pads", &[0; 4])];
    NodeProto { attribute, ..node("Conv", &[input, weights], &[output]) }
}

/// A conversion of a tensor's elements.
pub fn cast(input: &str, output: &str, to: i32) -> NodeProto {
    NodeProto { attribute: vec![int("to", to.into())], ..node("Cast", &[input], &[output]) }
}

/// A model of one graph.
pub fn model(
    node: Vec<NodeProto>,
    initializer: Vec<TensorProto>,
    input: Vec<ValueInfoProto>,
    output: Vec<ValueInfoProto>,
) -> ModelProto {
    let graph = GraphProto { name: "test".into(), node, initializer, input, output };
    let opset_import = vec![OperatorSetIdProto { domain: String::new(), version: 17 }];
    ModelProto { ir_version: 8, graph: Some(graph), opset_import }
}

/// `y = x` of one datatype and shape.
pub fn identity(elem_type: i32, dims: &[i64]) -> ModelProto {
    let (input, output) = (value("x", elem_type, dims), value("y", elem_type, dims));
    model(vec![node("Identity", &["x"], &["y"])], vec![], vec![input], vec![output])
}

/// `y = x * w` with `x` of `[n, 4]` and `w` of `[4, 2]`; `w` is also listed as an input, as old
/// exporters do.
pub fn product() -> ModelProto {
    let weights = [1.0, -2.0, 0.5, 4.0, -1.5, 3.0, 2.0, 0.25];
    model(
        vec![node("MatMul", &["x", "w"], &["y"])],
        vec![floats("w", &[4, 2], &weights)],
        vec![value("x", FLOAT, &[-1, 4]), value("w", FLOAT, &[4, 2])],
        vec![value("y", FLOAT, &[-1, 2])],
    )
}

/// Writes the model to `folder/name`.
pub fn write(folder: &Path, name: &str, model: &ModelProto) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, model.encode_to_vec()).expect("temporary folder");
    path
}

/// A folder that is removed with the test.
pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("temporary folder")
}
