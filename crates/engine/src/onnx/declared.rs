//! Sizes and values of inputs and outputs that the model file leaves open and a configuration
//! declares.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use bytes::Bytes;
use downbeat_core::tensor::{DataType, Signature};
use prost::Message;

use super::file::{FileGraph, ValueInfo, ValueKind};
use super::proto::{ModelProto, StringEntry, TensorProto, WeightProto, shaped_type};
use super::{Checked, datatype, walk};
use crate::traits::LoadError;

/// The configuration's declarations about a model's inputs and outputs, beyond the file.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Declared {
    /// Sizes by the name of the input or output, all dimensions, -1 if they vary; used if the file
    /// has none.
    pub shapes: BTreeMap<String, Vec<i64>>,
    /// Inputs that a request may leave out: then their initialiser in the file is their value.
    pub optional: BTreeSet<String>,
}

/// A model file with all declarations applied: its inputs have sizes, and optional inputs are
/// ordinary inputs.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The file.
    pub bytes: Vec<u8>,
    /// The values of optional inputs, by name.
    pub defaults: BTreeMap<String, DefaultValue>,
}

/// The value of an input that a request leaves out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DefaultValue {
    /// Sizes.
    pub shape: Vec<usize>,
    /// Elements in the protocol's binary form.
    pub data: Bytes,
}

impl Declared {
    /// The model's signature as from [`super::inspect`], with these declarations.
    ///
    /// # Errors
    /// As [`super::inspect`].
    pub fn inspect(&self, path: &Path) -> Result<Signature, LoadError> {
        walk(path)?.signature_with(self, |_| None)
    }

    /// The file at `path` with these declarations applied; `None` if the file needs none of them.
    ///
    /// # Errors
    /// As [`super::inspect`]. Also if a value is broken, or the file must be changed and its
    /// weights are in other files.
    pub fn open(&self, path: &Path) -> Result<Option<Opened>, LoadError> {
        if self.shapes.is_empty() && self.optional.is_empty() {
            return Ok(None);
        }
        let checked = walk(path)?;
        let Some(graph) = &checked.file.graph else { return Ok(None) };
        let (optional, without_shape) = (self.optional_in(graph), self.without_shape_in(&graph.inputs));
        let is_in_one_file = checked.external_locations().next().is_none();
        // A file in several parts keeps such outputs: an engine also runs a model whose outputs
        // have no shapes.
        let outputs = if is_in_one_file { self.without_shape_in(&graph.outputs) } else { BTreeSet::new() };
        if optional.is_empty() && without_shape.is_empty() && outputs.is_empty() {
            return Ok(None);
        }
        let error = |reason: String| LoadError::File { path: path.to_owned(), reason };
        let named =
            optional.iter().chain(&without_shape).map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ");
        if !is_in_one_file {
            return Err(error(format!(
                "the inputs {named} are optional or have no shape in the file, which is served only of models without external data. Save it \
                 in one file: onnx.save(onnx.load(path), path)"
            )));
        }
        let without_shape = without_shape.union(&outputs).cloned().collect();
        self.rewrite(&checked, &optional, &without_shape).map(Some).map_err(|e| error(format!("inputs {named}: {e}")))
    }

    /// The optional inputs that have a value.
    fn optional_in(&self, graph: &FileGraph) -> BTreeSet<String> {
        let names = graph.inputs.iter().map(|input| &input.name);
        names.filter(|name| self.optional.contains(*name) && graph.initializers.contains(*name)).cloned().collect()
    }

    /// Inputs or outputs whose sizes only the configuration has.
    fn without_shape_in(&self, values: &[ValueInfo]) -> BTreeSet<String> {
        let open = values.iter().filter(|value| matches!(value.kind, ValueKind::Tensor { dims: None, .. }));
        let names = open.map(|value| &value.name);
        names.filter(|name| self.shapes.contains_key(*name)).cloned().collect()
    }

    fn rewrite(
        &self,
        checked: &Checked<'_>,
        optional: &BTreeSet<String>,
        without_shape: &BTreeSet<String>,
    ) -> Result<Opened, String> {
        let bytes = super::model_bytes(checked.path).map_err(|e| e.to_string())?;
        let mut model = ModelProto::decode(bytes).map_err(|e| e.to_string())?;
        let graph = model.graph.as_mut().ok_or("the file has no graph")?;
        let mut defaults = BTreeMap::new();
        let mut initializers = Vec::with_capacity(graph.initializer.len());
        for bytes in std::mem::take(&mut graph.initializer) {
            let name = WeightProto::decode(bytes.clone()).map_err(|e| e.to_string())?.name;
            if optional.contains(&name) {
                let tensor = TensorProto::decode(bytes).map_err(|e| e.to_string())?;
                defaults.insert(name, default_value(&tensor)?);
            } else {
                initializers.push(bytes);
            }
        }
        graph.initializer = initializers;
        let file = checked.file.graph.iter().flat_map(|graph| graph.inputs.iter().chain(&graph.outputs));
        let elements: BTreeMap<&str, i32> = file
            .filter_map(|info| match &info.kind {
                ValueKind::Tensor { element, .. } => Some((info.name.as_str(), i32::try_from(*element).ok()?)),
                ValueKind::Other(_) | ValueKind::Unknown => None,
            })
            .collect();
        for value in graph.input.iter_mut().chain(&mut graph.output).filter(|it| without_shape.contains(&it.name)) {
            let Some(dims) = self.shapes.get(&value.name) else { continue };
            let element = elements.get(value.name.as_str()).copied().unwrap_or_default();
            value.r#type = Some(shaped_type(element, dims).encode_to_vec().into());
        }
        Ok(Opened { bytes: model.encode_to_vec(), defaults })
    }
}

/// The value of an initialiser.
fn default_value(tensor: &TensorProto) -> Result<DefaultValue, String> {
    let TensorProto { dims, data_type, name, external_data, .. } = tensor;
    let datatype =
        datatype(i64::from(*data_type)).ok_or_else(|| format!("'{name}' has the element type {data_type}"))?;
    if let Some(StringEntry { value, .. }) = external_data.first() {
        return Err(format!("the value of '{name}' is in another file ('{value}')"));
    }
    let shape = dims.iter().map(|d| usize::try_from(*d)).collect::<Result<Vec<_>, _>>();
    let shape = shape.map_err(|_| format!("'{name}' has the sizes {dims:?}"))?;
    let elements = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).ok_or("it has too many elements")?;
    let data = elements_of(tensor, datatype);
    let is_whole = match datatype.size() {
        Some(size) => elements.checked_mul(size) == Some(data.len()),
        None => tensor.string_data.len() == elements,
    };
    if !is_whole {
        return Err(format!(
            "'{name}' of the sizes {dims:?} has {} bytes; the file is corrupt. Export it again",
            data.len()
        ));
    }
    Ok(DefaultValue { shape, data })
}

/// The elements of an initialiser, from any of its fields, in the protocol's binary form.
fn elements_of(tensor: &TensorProto, datatype: DataType) -> Bytes {
    if !tensor.raw_data.is_empty() && datatype != DataType::Bytes {
        return tensor.raw_data.clone();
    }
    let narrow = tensor.int32_data.iter();
    let bytes: Vec<u8> = match datatype {
        DataType::Fp32 => tensor.float_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DataType::Fp64 => tensor.double_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DataType::Int64 => tensor.int64_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DataType::Uint64 => tensor.uint64_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DataType::Uint32 => tensor.uint64_data.iter().flat_map(|v| (*v as u32).to_le_bytes()).collect(),
        DataType::Int32 => narrow.flat_map(|v| v.to_le_bytes()).collect(),
        DataType::Int16 | DataType::Uint16 | DataType::Fp16 | DataType::Bf16 => {
            narrow.flat_map(|v| (*v as u16).to_le_bytes()).collect()
        }
        DataType::Int8 | DataType::Uint8 | DataType::Bool => narrow.map(|v| *v as u8).collect(),
        DataType::Bytes => {
            let strings = tensor.string_data.iter();
            strings.flat_map(|s| (s.len() as u32).to_le_bytes().into_iter().chain(s.iter().copied())).collect()
        }
    };
    bytes.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_read_from_whichever_field_it_is_in() {
        let tensor = |data_type, change: fn(&mut TensorProto)| {
            let mut tensor = TensorProto { dims: vec![2], data_type, name: "t".into(), ..TensorProto::default() };
            change(&mut tensor);
            default_value(&tensor).map(|value| value.data.to_vec())
        };
        let floats = Ok([1f32.to_le_bytes(), 2f32.to_le_bytes()].concat());
        assert_eq!(tensor(1, |t| t.float_data = vec![1.0, 2.0]), floats);
        assert_eq!(tensor(1, |t| t.raw_data = [1f32.to_le_bytes(), 2f32.to_le_bytes()].concat().into()), floats);
        assert_eq!(tensor(5, |t| t.int32_data = vec![-1, 2]), Ok(vec![255, 255, 2, 0]));
        assert_eq!(tensor(9, |t| t.int32_data = vec![0, 1]), Ok(vec![0, 1]));
        assert_eq!(tensor(12, |t| t.uint64_data = vec![7, 8]), Ok(vec![7, 0, 0, 0, 8, 0, 0, 0]));
        assert_eq!(tensor(8, |t| t.string_data = vec!["a".into(), "".into()]), Ok(vec![1, 0, 0, 0, b'a', 0, 0, 0, 0]));
        for broken in [
            tensor(1, |t| t.float_data = vec![1.0]),
            tensor(1, |t| t.dims = vec![-1]),
            tensor(1, |t| t.dims = vec![i64::MAX, i64::MAX]),
            tensor(77, |_| {}),
            tensor(1, |t| t.external_data = vec![StringEntry { key: "location".into(), value: "w".into() }]),
        ] {
            assert!(broken.is_err(), "{broken:?}");
        }
    }
}
