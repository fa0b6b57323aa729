//! The sizes of a graph's values, computed from the shapes of its inputs before any allocation.
//!
//! Every operator has a rule from the shapes of its inputs to the shapes of its outputs
//! (`size_rules.rs`). The numbers that shapes are made of are followed too (`Shape`, `Gather`,
//! `Concat`, ...). Some outputs have no rule: `If`, `Loop`, the boxes of a detector. They are
//! unknown and count nothing, and so do values that depend on them: the sum is an estimate.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use prost::Message;
use smallvec::SmallVec;

use super::proto::{AttributeProto, GraphProto, TensorProto, TypeProto};
use super::size_rules::{Rule, rule};

/// The most elements of a tensor whose numbers are followed.
pub(super) const FOLLOWED: usize = 1024;
pub(crate) const UINT8: i32 = 2;
pub(crate) const INT32: i32 = 6;
pub(crate) const INT64: i32 = 7;
pub(crate) const BOOL: i32 = 9;
pub(crate) const FLOAT: i32 = 1;

pub(crate) type Dims = SmallVec<[u64; 6]>;

/// The known facts about a value.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extent {
    /// `TensorProto.DataType`.
    pub element: i32,
    pub dims: Option<Dims>,
    /// The elements, if they are few and may be sizes.
    pub data: Option<Vec<f64>>,
}

/// An input of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<'a> {
    pub dims: &'a [usize],
    /// The elements; empty if they are not needed.
    pub data: &'a [u8],
}

/// The memory that a run needs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Need {
    /// The most bytes of values that exist at the same time.
    pub bytes: u64,
    /// The largest value: its name, shape and bytes.
    pub largest: (String, Vec<u64>, u64),
    /// Whether the need depends on the contents of the inputs.
    pub by_data: bool,
}

/// The rules of a graph's operators.
#[derive(Debug)]
pub(crate) struct Sizes {
    /// Weights, by the id of the value.
    pub(super) weights: Vec<Option<Extent>>,
    /// Values by their ids, with datatypes, in the file's order.
    pub(super) inputs: Vec<(usize, i32)>,
    /// The operators, one for each node, in the file's order.
    pub(super) steps: Vec<Step>,
    /// Names, by the id of the value.
    pub(super) names: Vec<String>,
}

pub(super) struct Step {
    pub rule: Rule,
    pub attributes: Vec<AttributeProto>,
    pub inputs: Vec<Option<usize>>,
    pub outputs: Vec<Option<usize>>,
    /// The values that no later step reads.
    ends: Vec<usize>,
}

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} -> {:?}", self.inputs, self.outputs)
    }
}

/// The known facts before an operator.
pub(super) struct Known<'a> {
    pub step: &'a Step,
    pub values: &'a [Option<Extent>],
    pub weights: &'a [Option<Extent>],
    pub by_data: &'a Cell<bool>,
}

impl Sizes {
    /// Reads a graph.
    ///
    /// # Errors
    /// In words, if it cannot be decoded.
    pub fn new(graph: &GraphProto) -> Result<Sizes, String> {
        let bad = |e: prost::DecodeError| format!("the graph cannot be read: {e}");
        let mut ids = ValueIds::default();
        let mut weights = Vec::new();
        for bytes in &graph.initializer {
            let tensor = TensorProto::decode(bytes.clone()).map_err(bad)?;
            let id = ids.of(&tensor.name);
            weights.resize(weights.len().max(id + 1), None);
            put(&mut weights, id, Extent::of(&tensor));
        }
        let mut inputs = Vec::new();
        for input in &graph.input {
            let id = ids.of(&input.name);
            let element = input.r#type.clone().map(TypeProto::decode).transpose().map_err(bad)?;
            let element = element.and_then(|t| t.tensor_type).map_or(FLOAT, |t| t.elem_type);
            if weights.get(id).is_none_or(Option::is_none) {
                inputs.push((id, element));
            }
        }
        let mut steps = Vec::new();
        for node in &graph.node {
            let attributes = node.attribute.iter().map(|bytes| AttributeProto::decode(bytes.clone()));
            let attributes = attributes.collect::<Result<Vec<_>, _>>().map_err(bad)?;
            let mut id = |name: &String| (!name.is_empty()).then(|| ids.of(name));
            let inputs = node.input.iter().map(&mut id).collect();
            let outputs = node.output.iter().map(&mut id).collect();
            steps.push(Step { rule: rule(&node.op_type), attributes, inputs, outputs, ends: Vec::new() });
        }
        let mut alive: BTreeSet<usize> = graph.output.iter().map(|output| ids.of(&output.name)).collect();
        for step in steps.iter_mut().rev() {
            let used = step.inputs.iter().chain(&step.outputs).flatten();
            step.ends = used.copied().filter(|id| alive.insert(*id)).collect();
        }
        weights.resize(ids.names.len(), None);
        Ok(Sizes { weights, inputs, steps, names: ids.names })
    }

    /// The need of a run with these inputs; `None` for an unknown input.
    pub fn need<'a>(&self, inputs: impl Iterator<Item = Option<Input<'a>>>) -> Need {
        self.walk(inputs, |_, _| ()).0
    }

    /// The names of the inputs, in the file's order.
    pub fn input_names(&self) -> impl Iterator<Item = &str> {
        self.inputs.iter().filter_map(|(id, _)| self.names.get(*id).map(String::as_str))
    }

    /// Calls `each` with every weight, input and computed value of a run with these inputs: its
    /// name, its extent, and whether it is a weight.
    pub fn each<'a>(&self, inputs: impl Iterator<Item = Option<Input<'a>>>, mut each: impl FnMut(&str, &Extent, bool)) {
        for (name, weight) in self.names.iter().zip(&self.weights) {
            if let Some(weight) = weight {
                each(name, weight, true);
            }
        }
        self.walk(inputs, |id, extent| {
            if let Some(name) = self.names.get(id) {
                each(name, extent, false);
            }
        });
    }

    /// The need of a run, with the extents of the graph's outputs. `made` is called with the extent
    /// of each value.
    pub(super) fn walk<'a>(
        &self,
        inputs: impl Iterator<Item = Option<Input<'a>>>,
        mut made: impl FnMut(usize, &Extent),
    ) -> (Need, Vec<Option<Extent>>) {
        let mut values: Vec<Option<Extent>> = vec![None; self.names.len()];
        let mut need = Need::default();
        let mut alive = 0u64;
        for ((id, element), input) in self.inputs.iter().zip(inputs) {
            let Some(input) = input else { continue };
            let dims: Dims = input.dims.iter().map(|d| *d as u64).collect();
            let data = numbers(*element, &dims, input.data);
            let extent = Extent { element: *element, dims: Some(dims), data };
            alive = alive.saturating_add(extent.bytes());
            made(*id, &extent);
            put(&mut values, *id, extent);
        }
        need.bytes = alive;
        let by_data = Cell::new(false);
        for step in &self.steps {
            let known = Known { step, values: &values, weights: &self.weights, by_data: &by_data };
            let given = (step.rule)(&known).unwrap_or_default();
            for (id, extent) in step.outputs.iter().zip(given) {
                let Some(id) = *id else { continue };
                let bytes = extent.bytes();
                alive = alive.saturating_add(bytes);
                if bytes > need.largest.2 {
                    let name = self.names.get(id).cloned().unwrap_or_default();
                    need.largest = (name, extent.dims.clone().unwrap_or_default().to_vec(), bytes);
                }
                made(id, &extent);
                put(&mut values, id, extent);
            }
            need.bytes = need.bytes.max(alive);
            for id in &step.ends {
                let gone = values.get_mut(*id).and_then(Option::take);
                alive = alive.saturating_sub(gone.map_or(0, |extent| extent.bytes()));
            }
        }
        need.by_data = by_data.get();
        (need, values)
    }
}

fn put(values: &mut [Option<Extent>], id: usize, extent: Extent) {
    if let Some(place) = values.get_mut(id) {
        *place = Some(extent);
    }
}

#[derive(Default)]
struct ValueIds {
    by_name: BTreeMap<String, usize>,
    names: Vec<String>,
}

impl ValueIds {
    fn of(&mut self, name: &str) -> usize {
        if let Some(id) = self.by_name.get(name) {
            return *id;
        }
        let id = self.names.len();
        self.by_name.insert(name.to_owned(), id);
        self.names.push(name.to_owned());
        id
    }
}

impl Extent {
    pub fn new(element: i32, dims: impl IntoIterator<Item = u64>) -> Extent {
        Extent { element, dims: Some(dims.into_iter().collect()), data: None }
    }

    /// Numbers along one axis.
    pub fn of_data(element: i32, data: Vec<f64>) -> Extent {
        Extent { element, dims: Some(Dims::from_slice(&[data.len() as u64])), data: Some(data) }
    }

    /// The same number in all elements, if the number is known.
    pub fn filled(element: i32, dims: Dims, number: Option<f64>) -> Extent {
        let count = product(&dims);
        let data = number.filter(|_| count <= FOLLOWED as u64).map(|number| vec![number; count as usize]);
        Extent { element, dims: Some(dims), data }
    }

    /// The extent of a tensor in the file.
    pub fn of(tensor: &TensorProto) -> Extent {
        let dims: Dims = tensor.dims.iter().map(|d| u64::try_from(*d).unwrap_or(0)).collect();
        let data = if !tensor.raw_data.is_empty() {
            numbers(tensor.data_type, &dims, &tensor.raw_data)
        } else if product(&dims) > FOLLOWED as u64 {
            None
        } else {
            let numbers: Vec<f64> = (tensor.float_data.iter().map(|n| f64::from(*n)))
                .chain(tensor.int32_data.iter().map(|n| f64::from(*n)))
                .chain(tensor.int64_data.iter().map(|n| *n as f64))
                .chain(tensor.double_data.iter().copied())
                .collect();
            (numbers.len() as u64 == product(&dims)).then_some(numbers)
        };
        Extent { element: tensor.data_type, dims: Some(dims), data }
    }

    /// Whether its elements are known to be floats.
    pub fn is_float(&self) -> bool {
        matches!(self.element, FLOAT | 10 | 11 | 16)
    }

    pub fn elements(&self) -> u64 {
        self.dims.as_ref().map_or(0, |dims| product(dims))
    }

    fn bytes(&self) -> u64 {
        // The width is that of the engine with the larger one: RTen has no BOOL, ONNX Runtime
        // computes halves as floats.
        let width = match self.element {
            // Less than a byte counts as a byte.
            UINT8 | 3 | 17.. => 1,
            INT64 | 11 | 13 => 8,
            8 => 16,
            _ => 4,
        };
        self.elements().saturating_mul(width)
    }
}

pub(super) fn product(dims: &[u64]) -> u64 {
    dims.iter().fold(1, |product, dim| product.saturating_mul(*dim))
}

/// The elements of a small tensor.
fn numbers(element: i32, dims: &[u64], bytes: &[u8]) -> Option<Vec<f64>> {
    fn read<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.as_chunks::<N>().0.iter().map(|chunk| number(*chunk)).collect()
    }
    let count = product(dims);
    if count > FOLLOWED as u64 || (bytes.is_empty() && count > 0) {
        return None;
    }
    let numbers = match element {
        FLOAT => read(bytes, |b| f32::from_le_bytes(b).into()),
        2 | BOOL => read(bytes, |[b]| b.into()),
        3 => read(bytes, |b| i8::from_le_bytes(b).into()),
        5 => read(bytes, |b| i16::from_le_bytes(b).into()),
        6 => read(bytes, |b| i32::from_le_bytes(b).into()),
        INT64 => read(bytes, |b| i64::from_le_bytes(b) as f64),
        11 => read(bytes, f64::from_le_bytes),
        _ => return None,
    };
    (numbers.len() as u64 == count).then_some(numbers)
}

impl Known<'_> {
    pub fn get(&self, index: usize) -> Option<&Extent> {
        let id = (*self.step.inputs.get(index)?)?;
        self.values.get(id)?.as_ref().or(self.weights.get(id)?.as_ref())
    }

    pub fn dims(&self, index: usize) -> Option<&[u64]> {
        self.get(index)?.dims.as_deref()
    }

    pub fn element(&self, index: usize) -> i32 {
        self.get(index).map_or(FLOAT, |extent| extent.element)
    }

    pub fn has(&self, index: usize) -> bool {
        self.step.inputs.get(index).is_some_and(Option::is_some)
    }

    /// Numbers from which a shape is made.
    pub fn data(&self, index: usize) -> Option<&[f64]> {
        let data = self.get(index).and_then(|extent| extent.data.as_deref());
        if data.is_none() {
            self.by_data.set(true);
        }
        data
    }

    /// As [`Known::data`], or the numbers of an attribute, as in older operators.
    pub fn numbers(&self, index: usize, attribute: &str) -> Option<Vec<f64>> {
        if self.has(index) {
            return self.data(index).map(<[f64]>::to_vec);
        }
        let attribute = self.attribute(attribute)?;
        let ints = attribute.ints.iter().map(|n| *n as f64);
        Some(ints.chain(attribute.floats.iter().map(|n| f64::from(*n))).collect())
    }

    /// The same, or `Some(None)` if both are left out.
    pub fn optional(&self, index: usize, attribute: &str) -> Option<Option<Vec<f64>>> {
        let is_there = self.has(index) || self.attribute(attribute).is_some();
        if is_there { self.numbers(index, attribute).map(Some) } else { Some(None) }
    }

    pub fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.step.attributes.iter().find(|attribute| attribute.name == name)
    }

    pub fn int(&self, name: &str, default: i64) -> i64 {
        self.attribute(name).and_then(AttributeProto::integer).unwrap_or(default)
    }

    /// The axis that an attribute names, for a tensor of `rank` axes.
    pub fn axis(&self, default: i64, rank: usize) -> Option<usize> {
        axis(self.int("axis", default) as f64, rank)
    }

    /// Element `index` of an attribute, or the default if it is left out.
    pub fn at(&self, name: &str, index: usize, default: u64) -> u64 {
        let ints = self.attribute(name).map(|attribute| attribute.ints.as_slice()).unwrap_or_default();
        ints.get(index).map_or(default, |n| u64::try_from(*n).unwrap_or(0))
    }

    /// An output of the datatype of the first input.
    pub fn made(&self, dims: impl IntoIterator<Item = u64>) -> Option<Vec<Extent>> {
        Some(vec![Extent::new(self.element(0), dims)])
    }
}

/// An axis that may count from the end.
pub(super) fn axis(axis: f64, rank: usize) -> Option<usize> {
    let axis = if axis < 0.0 { axis + rank as f64 } else { axis };
    (axis >= 0.0 && axis <= rank as f64).then_some(axis as usize)
}

/// Whether axis `i` of `rank` is among these, which may count from the end.
pub(super) fn names(axes: &[f64], i: usize, rank: usize) -> bool {
    axes.iter().any(|a| axis(*a, rank) == Some(i))
}

/// The same sizes with one replaced.
pub(super) fn replaced(dims: &[u64], along: usize, with: u64) -> Dims {
    dims.iter().enumerate().map(|(i, d)| if i == along { with } else { *d }).collect()
}

/// An element. A single element stands for all.
pub(super) fn element_at(data: &[f64], at: usize) -> Option<f64> {
    data.get(if data.len() == 1 { 0 } else { at }).copied()
}

/// The sizes of the result of two tensors, element by element.
pub(super) fn broadcast(a: &[u64], b: &[u64]) -> Dims {
    let rank = a.len().max(b.len());
    let at = |dims: &[u64], axis: usize| (axis + dims.len()).checked_sub(rank).and_then(|i| dims.get(i)).copied();
    (0..rank)
        .map(|axis| match (at(a, axis).unwrap_or(1), at(b, axis).unwrap_or(1)) {
            (1, other) | (other, 1) => other,
            (a, b) => a.max(b),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use bytes::Bytes;

    use super::*;
    use crate::onnx::proto::ModelProto;
    use crate::onnx::proto::NodeProto;
    use crate::traits::{Engine, LoadOptions};
    use crate::{Buffer, Rten, State, Tensor, tensor};

    /// A quantised product has bytes and 32-bit sums.
    #[test]
    fn quantised_values_take_what_their_datatypes_do() {
        let node = |op_type: &str, input: &[&str], output: &[&str]| NodeProto {
            op_type: op_type.into(),
            input: input.iter().map(|name| (*name).to_owned()).collect(),
            output: output.iter().map(|name| (*name).to_owned()).collect(),
            ..NodeProto::default()
        };
        let weight = |name: &str, data_type: i32, dims: &[i64]| {
            let (name, dims) = (name.to_owned(), dims.to_vec());
            Bytes::from(TensorProto { name, data_type, dims, ..TensorProto::default() }.encode_to_vec())
        };
        let named = |name: &str| crate::onnx::proto::value_info(name, FLOAT);
        let graph = |node: Vec<NodeProto>| GraphProto {
            node,
            initializer: vec![weight("w", 3, &[64, 32]), weight("scale", FLOAT, &[]), weight("zero", 17, &[])],
            input: vec![named("x")],
            output: vec![named("y")],
            ..GraphProto::default()
        };
        let need = |node: Vec<NodeProto>| {
            let sizes = Sizes::new(&graph(node)).unwrap();
            let (need, values) = sizes.walk([Some(Input { dims: &[10, 64], data: &[] })].into_iter(), |_, _| ());
            let id = sizes.names.iter().position(|name| name == "y").unwrap();
            (need.bytes, values[id].as_ref().map(Extent::bytes))
        };
        let product = vec![
            node("DynamicQuantizeLinear", &["x"], &["q", "s", "z"]),
            node("MatMulInteger", &["q", "w", "z"], &["sums"]),
            node("Neg", &["sums"], &["y"]),
        ];
        assert_eq!(need(product), (10 * 64 * 5 + 5, Some(10 * 32 * 4)), "floats with a byte for each and their scale");
        let there_and_back = vec![
            node("QuantizeLinear", &["x", "scale", "zero"], &["q"]),
            node("DequantizeLinear", &["q", "scale", "zero"], &["y"]),
        ];
        assert_eq!(need(there_and_back), (10 * 64 * 5, Some(10 * 64 * 4)), "one byte each in between");
    }

    /// The shapes of the outputs equal those of a run, so that no value on the way was unknown.
    #[test]
    fn the_examples_give_outputs_of_the_sizes_that_are_worked_out() {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
        for name in ["models/mlp", "models/digits", "models/encoder", "exits/models/exits"] {
            let path = examples.join(name).join("1/model.onnx");
            let proto = ModelProto::decode(Bytes::from(std::fs::read(&path).unwrap())).unwrap();
            let graph = proto.graph.unwrap();
            let sizes = Sizes::new(&graph).unwrap();
            let model = Rten::new().load(&LoadOptions::new(&path, 1)).unwrap();
            for (batch, length) in [(1, 7), (3, 40)] {
                let of = |spec: &downbeat_core::tensor::TensorSpec| {
                    let shape = tensor::shape(spec, batch, length);
                    let bytes = shape.iter().product::<usize>() * spec.datatype.size().unwrap();
                    Tensor { datatype: spec.datatype, shape, data: Buffer::zeroed(bytes).unwrap() }
                };
                let tensors: Vec<Tensor> = model.signature().inputs.iter().map(of).collect();
                let inputs = tensors.iter().map(|t| Some(Input { dims: &t.shape, data: &[] }));
                let (need, values) = sizes.walk(inputs, |_, _| ());
                assert!(!need.by_data && need.bytes > 0, "{name}: {need:?}");
                let mut state = State { tensors };
                model.lane().unwrap().run(0..1, &mut state).unwrap();
                for (output, tensor) in graph.output.iter().zip(&state.tensors) {
                    let id = sizes.names.iter().position(|name| *name == output.name).unwrap();
                    let dims = values[id].as_ref().and_then(|extent| extent.dims.clone()).unwrap();
                    assert_eq!(
                        dims.iter().map(|d| *d as usize).collect::<Vec<_>>(),
                        tensor.shape,
                        "{name}: {output:?}"
                    );
                }
            }
        }
    }
}
