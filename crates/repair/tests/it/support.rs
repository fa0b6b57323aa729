//! Model files for tests, and runs of these models.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use downbeat_core::tensor::DataType;
use downbeat_engine::onnx::proto::{
    AttributeProto, GraphAttribute, GraphProto, ModelProto, NodeProto, OperatorSetProto, StringEntry, TensorProto,
    TypeProto, ValueInfoProto, shaped_type,
};
use downbeat_engine::{Buffer, Engine, LoadOptions, Rten, State, Tensor};
use downbeat_repair::RepairedFile;
use prost::Message;
use tempfile::TempDir;

pub const ML: &str = "ai.onnx.ml";

/// A model of one graph.
pub fn model(ir_version: i64, opsets: &[(&str, i64)], graph: GraphProto) -> ModelProto {
    let set = |(domain, version): &(&str, i64)| {
        Bytes::from(OperatorSetProto { domain: (*domain).into(), version: *version }.encode_to_vec())
    };
    ModelProto { ir_version, graph: Some(graph), opset_import: opsets.iter().map(set).collect(), functions: Vec::new() }
}

pub fn graph(node: Vec<NodeProto>, input: Vec<ValueInfoProto>, output: Vec<ValueInfoProto>) -> GraphProto {
    GraphProto { node, name: "g".into(), input, output, ..GraphProto::default() }
}

pub fn node(op_type: &str, input: &[&str], output: &[&str], attributes: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        input: input.iter().map(|it| (*it).into()).collect(),
        output: output.iter().map(|it| (*it).into()).collect(),
        name: format!("the {op_type}"),
        op_type: op_type.into(),
        attribute: attributes.iter().map(|attribute| attribute.encode_to_vec().into()).collect(),
        ..NodeProto::default()
    }
}

pub fn of_ml(mut node: NodeProto) -> NodeProto {
    node.domain = ML.into();
    node
}

/// A tensor's type.
pub fn value(name: &str, element: i32, dims: &[i64]) -> ValueInfoProto {
    ValueInfoProto { name: name.into(), r#type: Some(shaped_type(element, dims).encode_to_vec().into()) }
}

/// A list of maps from integers to numbers, as in `onnx.proto3`.
pub fn list(name: &str, element: i32) -> ValueInfoProto {
    let field =
        |number: u8, content: Vec<u8>| [vec![number << 3 | 2, u8::try_from(content.len()).unwrap()], content].concat();
    let tensor = TypeProto {
        tensor_type: Some(downbeat_engine::onnx::proto::TensorTypeProto { elem_type: element, shape: None }),
    };
    let map = [vec![8, 7], field(2, tensor.encode_to_vec())].concat();
    ValueInfoProto { name: name.into(), r#type: Some(field(4, field(1, field(5, map))).into()) }
}

pub fn strings(name: &str, strings: &[&str]) -> AttributeProto {
    let strings = strings.iter().map(|text| Bytes::copy_from_slice(text.as_bytes())).collect();
    AttributeProto { name: name.into(), strings, r#type: 8, ..AttributeProto::default() }
}

/// A weight of 32-bit floats.
pub fn weight(name: &str, dims: &[i64], floats: &[f32]) -> Bytes {
    let raw_data: Vec<u8> = floats.iter().flat_map(|float| float.to_le_bytes()).collect();
    let tensor = TensorProto {
        dims: dims.to_vec(),
        data_type: 1,
        name: name.into(),
        raw_data: raw_data.into(),
        ..TensorProto::default()
    };
    tensor.encode_to_vec().into()
}

/// A weight of 32-bit floats in another file.
pub fn external_weight(name: &str, dims: &[i64], location: &str, offset: usize, length: usize) -> Bytes {
    let entry = |key: &str, value: String| StringEntry { key: key.into(), value };
    let external_data = vec![
        entry("location", location.into()),
        entry("offset", offset.to_string()),
        entry("length", length.to_string()),
    ];
    let tensor =
        TensorProto { dims: dims.to_vec(), data_type: 1, name: name.into(), external_data, ..TensorProto::default() };
    let mut bytes = tensor.encode_to_vec();
    // `data_location`: EXTERNAL.
    bytes.extend([14 << 3, 1]);
    bytes.into()
}

/// An operator with a graph in an attribute.
pub fn graph_attribute(name: &str, graph: &GraphProto) -> Bytes {
    let graph = Some(graph.encode_to_vec().into());
    GraphAttribute { name: name.into(), graph, graphs: Vec::new(), r#type: 5 }.encode_to_vec().into()
}

/// A folder with a model file.
pub struct File {
    pub folder: TempDir,
}

impl File {
    pub fn of(model: &ModelProto) -> File {
        File::with(&model.encode_to_vec())
    }

    pub fn with(bytes: &[u8]) -> File {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("m.onnx"), bytes).unwrap();
        File { folder }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("m.onnx")
    }

    /// The repaired file.
    pub fn repaired(&self) -> RepairedFile {
        RepairedFile::of(&self.path()).unwrap().expect("it needs a repair")
    }

    /// The reason why the file cannot be repaired.
    pub fn refused(&self) -> String {
        RepairedFile::of(&self.path()).expect_err("it is refused").reason
    }
}

/// Loads a file with the built-in engine, and runs it on one input.
pub fn run(path: &Path, shape: &[usize], input: &[f32]) -> Result<Vec<Tensor>, String> {
    let model = Rten::new().load(&LoadOptions::new(path, 1)).map_err(|e| e.to_string())?;
    let mut data = Buffer::new();
    input.iter().for_each(|float| data.extend_from_slice(&float.to_le_bytes()));
    let input = Tensor { datatype: DataType::Fp32, shape: shape.to_vec(), data };
    let mut state = State { tensors: vec![input] };
    model.lane().unwrap().run(0..1, &mut state).map_err(|e| e.to_string())?;
    Ok(state.tensors)
}

/// The shape and the elements of a tensor of 32-bit floats.
pub fn floats(tensor: &Tensor) -> (Vec<usize>, Vec<f32>) {
    assert_eq!(tensor.datatype, DataType::Fp32);
    let chunks = tensor.data.as_slice().as_chunks::<4>().0;
    (tensor.shape.clone(), chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}
