//! The sizes of a graph's values, worked out from the shapes of its inputs before anything is allocated.
//!
//! Every operator has a rule from the shapes of what it reads to the shapes of what it gives, and numbers that shapes are made of are followed too
//! (`Shape`, `Gather`, `Concat`, ...). What no rule knows (`If`, `Loop`, what a detector finds) is unknown, counts nothing, and so does what depends
//! on it: the sum is an estimate.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use prost::Message;
use smallvec::SmallVec;

use super::proto::{AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto};

/// Most elements of a tensor whose numbers are followed.
const FOLLOWED: usize = 1024;
const UINT8: i32 = 2;
const INT32: i32 = 6;
const INT64: i32 = 7;
const BOOL: i32 = 9;
const FLOAT: i32 = 1;

type Dims = SmallVec<[u64; 6]>;

/// What is known of a value.
#[derive(Clone, Debug, Default)]
struct Extent {
    /// `TensorProto.DataType`.
    element: i32,
    dims: Option<Dims>,
    /// Its elements, where they are few and may be sizes.
    data: Option<Vec<f64>>,
}

/// An input of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<'a> {
    pub dims: &'a [usize],
    /// Its elements; none where they are not looked at.
    pub data: &'a [u8],
}

/// What a run takes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Need {
    /// Most bytes of values that are there at the same time.
    pub bytes: u64,
    /// The largest value: its name, shape and bytes.
    pub largest: (String, Vec<u64>, u64),
    /// Whether it depends on what the inputs hold.
    pub by_data: bool,
}

/// The rules of a graph's operators.
#[derive(Debug)]
pub(crate) struct Sizes {
    /// By slot: weights.
    weights: Vec<Option<Extent>>,
    /// Slots and datatypes, in the file's order.
    inputs: Vec<(usize, i32)>,
    steps: Vec<Step>,
    /// By slot.
    names: Vec<String>,
}

struct Step {
    rule: Rule,
    attributes: Vec<AttributeProto>,
    inputs: Vec<Option<usize>>,
    outputs: Vec<Option<usize>>,
    /// What nobody reads after it.
    ends: Vec<usize>,
}

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} -> {:?}", self.inputs, self.outputs)
    }
}

type Rule = fn(&Step, &Known<'_>) -> Option<Vec<Extent>>;

/// What is known before an operator.
struct Known<'a> {
    step: &'a Step,
    values: &'a [Option<Extent>],
    weights: &'a [Option<Extent>],
    by_data: &'a Cell<bool>,
}

impl Sizes {
    /// Reads a graph.
    ///
    /// # Errors
    /// In words, if it cannot be decoded.
    pub fn new(graph: &GraphProto) -> Result<Sizes, String> {
        let bad = |e: prost::DecodeError| format!("the graph cannot be read: {e}");
        let mut slots = Slots::default();
        let mut weights = Vec::new();
        for bytes in &graph.initializer {
            let tensor = TensorProto::decode(bytes.clone()).map_err(bad)?;
            let slot = slots.of(&tensor.name);
            weights.resize(weights.len().max(slot + 1), None);
            if let Some(place) = weights.get_mut(slot) {
                *place = Some(extent_of(&tensor));
            }
        }
        let mut inputs = Vec::new();
        for input in &graph.input {
            let slot = slots.of(&input.name);
            let element = input.r#type.clone().map(TypeProto::decode).transpose().map_err(bad)?;
            let element = element.and_then(|t| t.tensor_type).map_or(FLOAT, |t| t.elem_type);
            if weights.get(slot).is_none_or(Option::is_none) {
                inputs.push((slot, element));
            }
        }
        let mut steps = Vec::new();
        for node in &graph.node {
            let attributes = node.attribute.iter().map(|bytes| AttributeProto::decode(bytes.clone()));
            let attributes = attributes.collect::<Result<Vec<_>, _>>().map_err(bad)?;
            let mut slot = |name: &String| (!name.is_empty()).then(|| slots.of(name));
            let inputs = node.input.iter().map(&mut slot).collect();
            let outputs = node.output.iter().map(&mut slot).collect();
            steps.push(Step { rule: rule(node), attributes, inputs, outputs, ends: Vec::new() });
        }
        let mut alive: BTreeSet<usize> = graph.output.iter().map(|output| slots.of(&output.name)).collect();
        for step in steps.iter_mut().rev() {
            let used = step.inputs.iter().chain(&step.outputs).flatten();
            step.ends = used.copied().filter(|slot| alive.insert(*slot)).collect();
        }
        weights.resize(slots.names.len(), None);
        Ok(Sizes { weights, inputs, steps, names: slots.names })
    }

    /// What a run with these inputs takes, `None` for one of which nothing is known.
    pub fn need<'a>(&self, inputs: impl Iterator<Item = Option<Input<'a>>>) -> Need {
        self.walk(inputs).0
    }

    /// The same, with what is known of the graph's outputs.
    fn walk<'a>(&self, inputs: impl Iterator<Item = Option<Input<'a>>>) -> (Need, Vec<Option<Extent>>) {
        let mut values: Vec<Option<Extent>> = vec![None; self.names.len()];
        let mut need = Need::default();
        let mut alive = 0u64;
        for ((slot, element), input) in self.inputs.iter().zip(inputs) {
            let Some(input) = input else { continue };
            let dims: Dims = input.dims.iter().map(|d| *d as u64).collect();
            let data = numbers(*element, &dims, input.data);
            let extent = Extent { element: *element, dims: Some(dims), data };
            alive = alive.saturating_add(extent.bytes());
            if let Some(place) = values.get_mut(*slot) {
                *place = Some(extent);
            }
        }
        need.bytes = alive;
        let by_data = Cell::new(false);
        for step in &self.steps {
            let known = Known { step, values: &values, weights: &self.weights, by_data: &by_data };
            let made = (step.rule)(step, &known).unwrap_or_default();
            for (slot, extent) in step.outputs.iter().zip(made) {
                let Some(slot) = *slot else { continue };
                let bytes = extent.bytes();
                alive = alive.saturating_add(bytes);
                if bytes > need.largest.2 {
                    let name = self.names.get(slot).cloned().unwrap_or_default();
                    need.largest = (name, extent.dims.clone().unwrap_or_default().to_vec(), bytes);
                }
                if let Some(place) = values.get_mut(slot) {
                    *place = Some(extent);
                }
            }
            need.bytes = need.bytes.max(alive);
            for slot in &step.ends {
                let gone = values.get_mut(*slot).and_then(Option::take);
                alive = alive.saturating_sub(gone.map_or(0, |extent| extent.bytes()));
            }
        }
        need.by_data = by_data.get();
        (need, values)
    }
}

#[derive(Default)]
struct Slots {
    by_name: BTreeMap<String, usize>,
    names: Vec<String>,
}

impl Slots {
    fn of(&mut self, name: &str) -> usize {
        if let Some(slot) = self.by_name.get(name) {
            return *slot;
        }
        let slot = self.names.len();
        self.by_name.insert(name.to_owned(), slot);
        self.names.push(name.to_owned());
        slot
    }
}

impl Extent {
    fn new(element: i32, dims: impl IntoIterator<Item = u64>) -> Extent {
        Extent { element, dims: Some(dims.into_iter().collect()), data: None }
    }

    /// Numbers along one axis.
    fn of_data(element: i32, data: Vec<f64>) -> Extent {
        Extent { element, dims: Some(Dims::from_slice(&[data.len() as u64])), data: Some(data) }
    }

    fn elements(&self) -> u64 {
        self.dims.as_ref().map_or(0, |dims| product(dims))
    }

    fn bytes(&self) -> u64 {
        // As the engine that takes more: RTen has no BOOL, ONNX Runtime computes halves as floats.
        let width = match self.element {
            // Below a byte: as if it were one.
            UINT8 | 3 | 17.. => 1,
            INT64 | 11 | 13 => 8,
            8 => 16,
            _ => 4,
        };
        self.elements().saturating_mul(width)
    }
}

fn product(dims: &[u64]) -> u64 {
    dims.iter().fold(1, |product, dim| product.saturating_mul(*dim))
}

fn extent_of(tensor: &TensorProto) -> Extent {
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
    fn get(&self, index: usize) -> Option<&Extent> {
        let slot = (*self.step.inputs.get(index)?)?;
        self.values.get(slot)?.as_ref().or(self.weights.get(slot)?.as_ref())
    }

    fn dims(&self, index: usize) -> Option<&[u64]> {
        self.get(index)?.dims.as_deref()
    }

    fn element(&self, index: usize) -> i32 {
        self.get(index).map_or(FLOAT, |extent| extent.element)
    }

    fn has(&self, index: usize) -> bool {
        self.step.inputs.get(index).is_some_and(Option::is_some)
    }

    /// Numbers that a shape is made of.
    fn data(&self, index: usize) -> Option<&[f64]> {
        let data = self.get(index).and_then(|extent| extent.data.as_deref());
        if data.is_none() {
            self.by_data.set(true);
        }
        data
    }

    /// As [`Known::data`], or those of an attribute, as older operators have it.
    fn numbers(&self, index: usize, attribute: &str) -> Option<Vec<f64>> {
        if self.has(index) {
            return self.data(index).map(<[f64]>::to_vec);
        }
        let attribute = self.step.attribute(attribute)?;
        let ints = attribute.ints.iter().map(|n| *n as f64);
        Some(ints.chain(attribute.floats.iter().map(|n| f64::from(*n))).collect())
    }
}

impl Step {
    fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.attributes.iter().find(|attribute| attribute.name == name)
    }

    fn int(&self, name: &str, default: i64) -> i64 {
        self.attribute(name).and_then(|attribute| attribute.i).unwrap_or(default)
    }

    /// Element `index` of an attribute, or what is taken where it is left out.
    fn at(&self, name: &str, index: usize, default: u64) -> u64 {
        let ints = self.attribute(name).map(|attribute| attribute.ints.as_slice()).unwrap_or_default();
        ints.get(index).map_or(default, |n| u64::try_from(*n).unwrap_or(0))
    }
}

/// An axis that may count from the end.
fn axis(axis: f64, rank: usize) -> Option<usize> {
    let axis = if axis < 0.0 { axis + rank as f64 } else { axis };
    (axis >= 0.0 && axis <= rank as f64).then_some(axis as usize)
}

fn size(number: f64) -> u64 {
    // Saturates, and makes 0 of what is negative.
    number as u64
}

fn one(extent: Extent) -> Option<Vec<Extent>> {
    Some(vec![extent])
}

fn broadcast(a: &[u64], b: &[u64]) -> Dims {
    let rank = a.len().max(b.len());
    let at = |dims: &[u64], axis: usize| (axis + dims.len()).checked_sub(rank).and_then(|i| dims.get(i)).copied();
    (0..rank)
        .map(|axis| match (at(a, axis).unwrap_or(1), at(b, axis).unwrap_or(1)) {
            (1, other) | (other, 1) => other,
            (a, b) => a.max(b),
        })
        .collect()
}

/// The rule of an operator.
fn rule(node: &NodeProto) -> Rule {
    match node.op_type.as_str() {
        "Add" => |s, k| elementwise(s, k, |a, b| a + b),
        "Sub" => |s, k| elementwise(s, k, |a, b| a - b),
        "Mul" => |s, k| elementwise(s, k, |a, b| a * b),
        "Div" => |s, k| {
            let is_float = matches!(k.element(0), FLOAT | 10 | 11);
            elementwise(s, k, if is_float { |a, b| a / b } else { |a, b| (a / b).trunc() })
        },
        "Mod" => |s, k| elementwise(s, k, |a, b| a - b * (a / b).floor()),
        "Pow" => |s, k| elementwise(s, k, f64::powf),
        "Max" => |s, k| elementwise(s, k, f64::max),
        "Min" => |s, k| elementwise(s, k, f64::min),
        "Equal" => |s, k| compare(s, k, |a, b| a == b),
        "Greater" => |s, k| compare(s, k, |a, b| a > b),
        "GreaterOrEqual" => |s, k| compare(s, k, |a, b| a >= b),
        "Less" => |s, k| compare(s, k, |a, b| a < b),
        "LessOrEqual" => |s, k| compare(s, k, |a, b| a <= b),
        "And" => |s, k| compare(s, k, |a, b| a != 0.0 && b != 0.0),
        "Or" => |s, k| compare(s, k, |a, b| a != 0.0 || b != 0.0),
        "Xor" => |s, k| compare(s, k, |a, b| (a != 0.0) != (b != 0.0)),
        "Mean" | "Sum" | "PRelu" | "BitShift" | "BitwiseAnd" | "BitwiseOr" | "BitwiseXor" => |_, k| {
            let dims = (1..k.step.inputs.len())
                .try_fold(Dims::from_slice(k.dims(0)?), |dims, i| Some(broadcast(&dims, k.dims(i)?)))?;
            one(Extent::new(k.element(0), dims))
        },
        "Where" => |_, k| {
            let dims = broadcast(&broadcast(k.dims(0)?, k.dims(1)?), k.dims(2)?);
            let part = |i: usize, at: usize| {
                let data = k.get(i)?.data.as_deref()?;
                data.get(if data.len() == 1 { 0 } else { at }).copied()
            };
            let count = product(&dims);
            let choose = |at: usize| part(if part(0, at)? == 0.0 { 2 } else { 1 }, at);
            let data = if count <= FOLLOWED as u64 { (0..count as usize).map(choose).collect() } else { None };
            one(Extent { data, ..Extent::new(k.element(1), dims) })
        },
        "Neg" => |_, k| unary(k, |n| -n),
        "Abs" => |_, k| unary(k, f64::abs),
        "Floor" => |_, k| unary(k, f64::floor),
        "Ceil" => |_, k| unary(k, f64::ceil),
        "Round" => |_, k| unary(k, f64::round_ties_even),
        "Sqrt" => |_, k| unary(k, f64::sqrt),
        "Not" => |_, k| unary(k, |n| f64::from(n == 0.0)),
        "Identity" => |_, k| unary(k, |n| n),
        "Cast" => |s, k| {
            let to = s.int("to", FLOAT.into()) as i32;
            let is_float = matches!(to, FLOAT | 10 | 11);
            let mut extent = unary(k, if is_float { |n| n } else { f64::trunc })?;
            extent.iter_mut().for_each(|extent| extent.element = to);
            Some(extent)
        },
        "MatMul" | "FusedMatMul" => |_, k| matmul(k.dims(0)?, k.dims(1)?, k.element(0).max(FLOAT)),
        "MatMulInteger" => |_, k| matmul(k.dims(0)?, k.dims(1)?, INT32),
        "QLinearMatMul" => |_, k| matmul(k.dims(0)?, k.dims(3)?, k.element(0)),
        "Gemm" => |s, k| {
            let (a, b) = (k.dims(0)?, k.dims(1)?);
            let m = a.get(usize::from(s.int("transA", 0) != 0))?;
            let n = b.get(usize::from(s.int("transB", 0) == 0))?;
            one(Extent::new(k.element(0), [*m, *n]))
        },
        "QGemm" => |s, k| {
            let (a, b) = (k.dims(0)?, k.dims(3)?);
            let m = a.get(usize::from(s.int("transA", 0) != 0))?;
            let n = b.get(usize::from(s.int("transB", 0) == 0))?;
            one(Extent::new(if k.has(7) { k.element(0) } else { FLOAT }, [*m, *n]))
        },
        "Conv" => |s, k| convolution(s, k, k.dims(1)?),
        "ConvInteger" => |s, k| {
            let made = convolution(s, k, k.dims(1)?)?;
            Some(made.into_iter().map(|extent| Extent { element: INT32, ..extent }).collect())
        },
        "QLinearConv" => |s, k| convolution(s, k, k.dims(3)?),
        "ConvTranspose" => transposed_convolution,
        "MaxPool" | "AveragePool" | "LpPool" => |s, k| {
            let kernel: Dims =
                s.attribute("kernel_shape")?.ints.iter().map(|n| u64::try_from(*n).unwrap_or(0)).collect();
            let x = k.dims(0)?;
            let all: Dims = [*x.get(1)?, 0].into_iter().chain(kernel).collect();
            convolution(s, k, &all)
        },
        "GlobalAveragePool" | "GlobalMaxPool" | "GlobalLpPool" => |_, k| {
            let x = k.dims(0)?;
            one(Extent::new(k.element(0), x.iter().enumerate().map(|(i, d)| if i < 2 { *d } else { 1 })))
        },
        "Reshape" => reshape,
        "Flatten" => |s, k| {
            let x = k.dims(0)?;
            let (before, behind) = x.split_at_checked(axis(s.int("axis", 1) as f64, x.len())?)?;
            one(Extent::new(k.element(0), [product(before), product(behind)]))
        },
        "Squeeze" => |_, k| {
            let x = k.dims(0)?;
            let axes = if k.has(1) || k.step.attribute("axes").is_some() { Some(k.numbers(1, "axes")?) } else { None };
            let gone = |i: usize, d: u64| match &axes {
                Some(axes) => axes.iter().any(|a| axis(*a, x.len()) == Some(i)),
                None => d == 1,
            };
            let dims = x.iter().enumerate().filter(|(i, d)| !gone(*i, **d)).map(|(_, d)| *d);
            one(Extent { data: k.get(0)?.data.clone(), ..Extent::new(k.element(0), dims) })
        },
        "Unsqueeze" => |_, k| {
            let x = k.dims(0)?;
            let axes = k.numbers(1, "axes")?;
            let rank = x.len() + axes.len();
            let axes: Vec<usize> = axes.iter().filter_map(|a| axis(*a, rank)).collect();
            let mut rest = x.iter();
            let dims: Dims =
                (0..rank).map(|i| if axes.contains(&i) { 1 } else { rest.next().copied().unwrap_or(1) }).collect();
            one(Extent { data: k.get(0)?.data.clone(), ..Extent::new(k.element(0), dims) })
        },
        "Transpose" => |s, k| {
            let x = k.dims(0)?;
            let perm = s.attribute("perm").map(|perm| perm.ints.clone());
            let dims: Dims = match perm {
                None => x.iter().rev().copied().collect(),
                Some(perm) => perm.iter().filter_map(|i| x.get(usize::try_from(*i).ok()?)).copied().collect(),
            };
            one(Extent::new(k.element(0), dims))
        },
        "Concat" => |s, k| {
            let count = k.step.inputs.len();
            let first = k.dims(0)?;
            let along = axis(s.int("axis", 0) as f64, first.len())?;
            let total = (0..count).try_fold(0u64, |sum, i| Some(sum.saturating_add(*k.dims(i)?.get(along)?)))?;
            let data = (0..count).map(|i| k.get(i)?.data.as_deref()).collect::<Option<Vec<_>>>();
            let data = data.filter(|_| first.len() == 1 && total <= FOLLOWED as u64).map(|parts| parts.concat());
            let dims = first.iter().enumerate().map(|(i, d)| if i == along { total } else { *d });
            one(Extent { data, ..Extent::new(k.element(0), dims) })
        },
        "Split" => |s, k| {
            let x = k.dims(0)?;
            let along = axis(s.int("axis", 0) as f64, x.len())?;
            let count = s.outputs.len().max(1) as u64;
            let whole = *x.get(along)?;
            let asked = if k.has(1) || s.attribute("split").is_some() { Some(k.numbers(1, "split")?) } else { None };
            let part = |i: usize| match &asked {
                Some(sizes) => sizes.get(i).map_or(0, |n| size(*n)),
                None => whole.div_ceil(count),
            };
            let dims = |i: usize| x.iter().enumerate().map(move |(a, d)| (a, *d)).map(move |(a, d)| (a, d, i));
            let made = (0..s.outputs.len()).map(|i| {
                Extent::new(k.element(0), dims(i).map(|(a, d, i)| if a == along { part(i).min(d) } else { d }))
            });
            Some(made.collect())
        },
        "Slice" => slice,
        "Gather" => gather,
        "GatherElements" => |_, k| one(Extent::new(k.element(0), k.dims(1)?.iter().copied())),
        "GatherND" => |s, k| {
            let (x, indices) = (k.dims(0)?, k.dims(1)?);
            let (depth, before) = indices.split_last()?;
            let skip = usize::try_from(s.int("batch_dims", 0)).ok()?.saturating_add(usize::try_from(*depth).ok()?);
            let rest = x.get(skip..).unwrap_or_default();
            one(Extent::new(k.element(0), before.iter().chain(rest).copied()))
        },
        "Expand" => |_, k| {
            let asked: Dims = k.data(1)?.iter().map(|n| size(*n)).collect();
            let dims = broadcast(k.dims(0)?, &asked);
            let filled = k.get(0)?.data.as_ref().filter(|data| data.len() == 1 && product(&dims) <= FOLLOWED as u64);
            let data = filled.map(|data| vec![data[0]; product(&dims) as usize]);
            one(Extent { data, ..Extent::new(k.element(0), dims) })
        },
        "Tile" => |_, k| {
            let repeats = k.data(1)?;
            let dims = k.dims(0)?.iter().zip(repeats).map(|(d, n)| d.saturating_mul(size(*n)));
            one(Extent::new(k.element(0), dims))
        },
        "Range" => |_, k| {
            let (start, limit, step) = (*k.data(0)?.first()?, *k.data(1)?.first()?, *k.data(2)?.first()?);
            let count = size(((limit - start) / step).ceil());
            let data = (count <= FOLLOWED as u64).then(|| (0..count).map(|n| start + n as f64 * step).collect());
            one(Extent { data, ..Extent::new(k.element(0), [count]) })
        },
        "ConstantOfShape" => |s, k| {
            let dims: Dims = k.data(0)?.iter().map(|n| size(*n)).collect();
            let value = s.attribute("value").and_then(|a| TensorProto::decode(a.t.clone()?).ok());
            let value = value.map(|tensor| extent_of(&tensor));
            let number = value.as_ref().map_or(Some(0.0), |value| value.data.as_ref()?.first().copied());
            let few = product(&dims) <= FOLLOWED as u64;
            let data = number.filter(|_| few).map(|n| vec![n; product(&dims) as usize]);
            one(Extent { data, ..Extent::new(value.map_or(FLOAT, |value| value.element), dims) })
        },
        "Shape" => |s, k| {
            let x = k.dims(0)?;
            let begin = axis(s.int("start", 0) as f64, x.len()).unwrap_or(0);
            let end = s.attribute("end").and_then(|end| axis(end.i? as f64, x.len())).unwrap_or(x.len());
            one(Extent::of_data(INT64, x.get(begin..end)?.iter().map(|d| *d as f64).collect()))
        },
        "Size" => |_, k| {
            let extent = k.get(0)?;
            extent.dims.as_ref()?;
            one(Extent { data: Some(vec![extent.elements() as f64]), ..Extent::new(INT64, []) })
        },
        "ReduceMax" => |s, k| reduce(s, k, Some(f64::max)),
        "ReduceMin" => |s, k| reduce(s, k, Some(f64::min)),
        "ReduceSum" => |s, k| reduce(s, k, Some(|a, b| a + b)),
        "ReduceProd" => |s, k| reduce(s, k, Some(|a, b| a * b)),
        "ReduceMean" | "ReduceL1" | "ReduceL2" | "ReduceLogSum" | "ReduceLogSumExp" | "ReduceSumSquare" => {
            |s, k| reduce(s, k, None)
        }
        "ArgMax" | "ArgMin" => |s, k| {
            let x = k.dims(0)?;
            let along = axis(s.int("axis", 0) as f64, x.len())?;
            let keep = s.int("keepdims", 1) != 0;
            let dims = x.iter().enumerate().filter(|(i, _)| keep || *i != along);
            one(Extent::new(INT64, dims.map(|(i, d)| if i == along { 1 } else { *d })))
        },
        "TopK" => |s, k| {
            let x = k.dims(0)?;
            let along = axis(s.int("axis", -1) as f64, x.len())?;
            let most = if k.has(1) { size(*k.data(1)?.first()?) } else { u64::try_from(s.int("k", 1)).unwrap_or(0) };
            let dims: Dims = x.iter().enumerate().map(|(i, d)| if i == along { most.min(*d) } else { *d }).collect();
            Some(vec![Extent::new(k.element(0), dims.clone()), Extent::new(INT64, dims)])
        },
        "OneHot" => |s, k| {
            let x = k.dims(0)?;
            let depth = size(*k.data(1)?.first()?);
            let along = axis(s.int("axis", -1) as f64, x.len() + 1)?;
            let mut dims = Dims::from_slice(x);
            dims.insert(along.min(x.len()), depth);
            one(Extent::new(k.element(2), dims))
        },
        "Pad" => |_, k| {
            let x = k.dims(0)?;
            let pads = k.numbers(1, "pads")?;
            let axes = if k.has(3) { k.data(3)?.to_vec() } else { (0..x.len()).map(|i| i as f64).collect() };
            let mut dims = Dims::from_slice(x);
            for (i, along) in axes.iter().enumerate() {
                let more = pads.get(i)? + pads.get(i + axes.len())?;
                let dim = dims.get_mut(axis(*along, x.len())?)?;
                *dim = size(*dim as f64 + more);
            }
            one(Extent::new(k.element(0), dims))
        },
        "Resize" => |_, k| {
            let x = k.dims(0)?;
            // Sizes where there are some; of opset 10 the scales are input 1.
            let scales = if k.step.inputs.len() == 2 { 1 } else { 2 };
            if k.has(3) {
                return one(Extent::new(k.element(0), k.data(3)?.iter().map(|n| size(*n))));
            }
            one(Extent::new(k.element(0), x.iter().zip(k.data(scales)?).map(|(d, n)| size(*d as f64 * n))))
        },
        "Upsample" => |_, k| {
            let scales = k.numbers(1, "scales")?;
            one(Extent::new(k.element(0), k.dims(0)?.iter().zip(&scales).map(|(d, n)| size(*d as f64 * n))))
        },
        "NonZero" => |_, k| {
            let extent = k.get(0)?;
            one(Extent::new(INT64, [extent.dims.as_ref()?.len() as u64, extent.elements()]))
        },
        // The datatype is that of the zero point.
        "QuantizeLinear" => |s, k| {
            let element = match s.int("output_dtype", 0) as i32 {
                0 if k.has(2) => k.element(2),
                0 => UINT8,
                said => said,
            };
            one(Extent::new(element, k.dims(0)?.iter().copied()))
        },
        // That of the scale.
        "DequantizeLinear" => |_, k| one(Extent::new(k.element(1), k.dims(0)?.iter().copied())),
        "DynamicQuantizeLinear" => |_, k| {
            let dims = k.dims(0)?.iter().copied();
            Some(vec![Extent::new(UINT8, dims), Extent::new(FLOAT, []), Extent::new(UINT8, [])])
        },
        "DepthToSpace" | "SpaceToDepth" => |s, k| {
            let &[n, c, h, w] = k.dims(0)? else { return None };
            let block = u64::try_from(s.int("blocksize", 1)).ok()?.max(1);
            // Of both the elements count, and their number stays.
            one(Extent::new(k.element(0), [n, c, h.saturating_mul(block), w / block]))
        },
        "LSTM" | "GRU" | "RNN" => |s, k| {
            let &[sequence, batch, _] = k.dims(0)? else { return None };
            let &[directions, _, hidden] = k.dims(2)? else { return None };
            let _ = s;
            let states = || Extent::new(k.element(0), [directions, batch, hidden]);
            Some(vec![Extent::new(k.element(0), [sequence, directions, batch, hidden]), states(), states()])
        },
        "Einsum" => einsum,
        "Constant" => constant,
        "RandomNormal" | "RandomUniform" => |s, _| {
            let dims = &s.attribute("shape")?.ints;
            one(Extent::new(FLOAT, dims.iter().map(|n| u64::try_from(*n).unwrap_or(0))))
        },
        "Multinomial" => {
            |s, k| one(Extent::new(6, [*k.dims(0)?.first()?, u64::try_from(s.int("sample_size", 1)).ok()?]))
        }
        "GridSample" => |_, k| {
            let (x, grid) = (k.dims(0)?, k.dims(1)?);
            let (_, places) = grid.split_last()?;
            one(Extent::new(k.element(0), x.iter().take(2).chain(places.get(1..)?).copied()))
        },
        "If"
        | "Loop"
        | "Scan"
        | "NonMaxSuppression"
        | "Compress"
        | "Unique"
        | "RoiAlign"
        | "StringSplit"
        | "SequenceAt"
        | "SequenceConstruct"
        | "SequenceEmpty"
        | "SequenceInsert"
        | "SplitToSequence"
        | "ConcatFromSequence"
        | "Optional"
        | "OptionalGetElement"
        | "OptionalHasElement"
        | "DFT"
        | "STFT"
        | "MelWeightMatrix"
        | "HannWindow"
        | "HammingWindow"
        | "BlackmanWindow"
        | "Col2Im"
        | "CenterCropPad"
        | "MaxUnpool"
        | "MaxRoiPool"
        | "Attention"
        | "MultiHeadAttention"
        | "GroupQueryAttention"
        | "ImageDecoder"
        | "TfIdfVectorizer"
        | "SparseToDenseMatMul" => |_, _| None,
        // Activations, norms, scatters: as large as what they read.
        _ => |_, k| one(Extent::new(k.element(0), k.dims(0)?.iter().copied())),
    }
}

fn unary(k: &Known<'_>, f: fn(f64) -> f64) -> Option<Vec<Extent>> {
    let extent = k.get(0)?;
    let data = extent.data.as_ref().map(|data| data.iter().map(|n| f(*n)).collect());
    one(Extent { element: extent.element, dims: extent.dims.clone(), data })
}

fn elementwise(_: &Step, k: &Known<'_>, f: fn(f64, f64) -> f64) -> Option<Vec<Extent>> {
    let mut made = k.get(0)?.clone();
    for index in 1..k.step.inputs.len() {
        let other = k.get(index)?;
        let dims = broadcast(made.dims.as_ref()?, other.dims.as_ref()?);
        let count = product(&dims) as usize;
        let data = match (&made.data, &other.data) {
            (Some(a), Some(b)) if [a.len(), b.len()].iter().all(|n| *n == 1 || *n == count) && count <= FOLLOWED => {
                let at = |data: &[f64], i: usize| data.get(if data.len() == 1 { 0 } else { i }).copied();
                (0..count).map(|i| Some(f(at(a, i)?, at(b, i)?))).collect()
            }
            _ => None,
        };
        made = Extent { element: made.element, dims: Some(dims), data };
    }
    one(made)
}

fn compare(s: &Step, k: &Known<'_>, f: fn(f64, f64) -> bool) -> Option<Vec<Extent>> {
    let mut made = elementwise(s, k, |_, _| 0.0)?;
    let (a, b) = (k.get(0)?, k.get(1)?);
    for extent in &mut made {
        extent.element = BOOL;
        if let (Some(a), Some(b), Some(data)) = (&a.data, &b.data, &mut extent.data) {
            let at = |data: &[f64], i: usize| data.get(if data.len() == 1 { 0 } else { i }).copied();
            for (i, number) in data.iter_mut().enumerate() {
                *number = f64::from(f(at(a, i)?, at(b, i)?));
            }
        }
    }
    Some(made)
}

fn matmul(a: &[u64], b: &[u64], element: i32) -> Option<Vec<Extent>> {
    let (rows, a) = if a.len() > 1 { (Some(a[a.len() - 2]), &a[..a.len() - 2]) } else { (None, &a[..0]) };
    let (columns, b) = if b.len() > 1 { (Some(b[b.len() - 1]), &b[..b.len() - 2]) } else { (None, &b[..0]) };
    let element = if matches!(element, 2 | 3) { 6 } else { element };
    one(Extent::new(element, broadcast(a, b).into_iter().chain(rows).chain(columns)))
}

/// `weight`: channels, anything, and the sizes of the kernel.
fn convolution(s: &Step, k: &Known<'_>, weight: &[u64]) -> Option<Vec<Extent>> {
    let x = k.dims(0)?;
    let (spatial, kernel) = (x.get(2..)?, weight.get(2..)?);
    let auto = s.attribute("auto_pad").and_then(|a| a.s.clone()).unwrap_or_default();
    let ceil = s.int("ceil_mode", 0) != 0;
    let along = |(i, (d, kernel)): (usize, (&u64, &u64))| {
        let stride = s.at("strides", i, 1).max(1);
        if auto.starts_with(b"SAME") {
            return d.div_ceil(stride);
        }
        let pads = s.at("pads", i, 0).saturating_add(s.at("pads", i + spatial.len(), 0));
        let reach = s.at("dilations", i, 1).saturating_mul(kernel.saturating_sub(1)).saturating_add(1);
        let Some(room) = d.saturating_add(pads).checked_sub(reach) else { return 0 };
        (if ceil { room.div_ceil(stride) } else { room / stride }).saturating_add(1)
    };
    let dims = spatial.iter().zip(kernel).enumerate().map(along);
    one(Extent::new(k.element(0), [*x.first()?, *weight.first()?].into_iter().chain(dims)))
}

fn transposed_convolution(s: &Step, k: &Known<'_>) -> Option<Vec<Extent>> {
    let (x, weight) = (k.dims(0)?, k.dims(1)?);
    let (spatial, kernel) = (x.get(2..)?, weight.get(2..)?);
    let along = |(i, (d, kernel)): (usize, (&u64, &u64))| {
        let pads = s.at("pads", i, 0).saturating_add(s.at("pads", i + spatial.len(), 0));
        let reach = s.at("dilations", i, 1).saturating_mul(kernel.saturating_sub(1)).saturating_add(1);
        let far = s.at("strides", i, 1).saturating_mul(d.saturating_sub(1));
        let all = far.saturating_add(reach).saturating_add(s.at("output_padding", i, 0)).saturating_sub(pads);
        s.at("output_shape", i, all)
    };
    let channels = weight.get(1)?.saturating_mul(u64::try_from(s.int("group", 1)).ok()?);
    let dims = spatial.iter().zip(kernel).enumerate().map(along);
    one(Extent::new(k.element(0), [*x.first()?, channels].into_iter().chain(dims)))
}

fn reshape(s: &Step, k: &Known<'_>) -> Option<Vec<Extent>> {
    let extent = k.get(0)?;
    let x = extent.dims.as_ref()?;
    let asked = k.numbers(1, "shape")?;
    let keeps = s.int("allowzero", 0) == 0;
    let mut dims = Dims::new();
    let mut open = None;
    for (i, n) in asked.iter().enumerate() {
        dims.push(match *n {
            n if n < 0.0 => {
                open = Some(i);
                1
            }
            0.0 if keeps => x.get(i).copied().unwrap_or(0),
            n => size(n),
        });
    }
    if let Some(place) = open {
        let rest = extent.elements().checked_div(product(&dims)).unwrap_or(0);
        *dims.get_mut(place)? = rest;
    }
    one(Extent { data: extent.data.clone(), ..Extent::new(extent.element, dims) })
}

fn slice(_: &Step, k: &Known<'_>) -> Option<Vec<Extent>> {
    let extent = k.get(0)?;
    let x = extent.dims.as_ref()?;
    let (starts, ends) = (k.numbers(1, "starts")?, k.numbers(2, "ends")?);
    let all = || (0..starts.len()).map(|i| i as f64).collect::<Vec<_>>();
    let has_axes = k.has(3) || k.step.attribute("axes").is_some();
    let axes = if has_axes { k.numbers(3, "axes")? } else { all() };
    let steps = if k.has(4) { k.data(4)?.to_vec() } else { vec![1.0; starts.len()] };
    let mut dims = x.clone();
    let mut data = extent.data.clone().filter(|_| x.len() == 1);
    for (i, along) in axes.iter().enumerate() {
        let dim = dims.get_mut(axis(*along, x.len())?)?;
        let whole = *dim as f64;
        let step = *steps.get(i)?;
        let place = |n: f64| if n < 0.0 { n + whole } else { n };
        let (low, high) = if step < 0.0 { (-1.0, whole - 1.0) } else { (0.0, whole) };
        let begin = place(*starts.get(i)?).clamp(0.0, (high).max(0.0));
        let end = place(*ends.get(i)?).clamp(low, high.max(low));
        *dim = size(((end - begin) / step).ceil());
        data = data.map(|data| {
            let at = |n: u64| data.get(size(begin + n as f64 * step) as usize).copied().unwrap_or(0.0);
            (0..(*dim).min(FOLLOWED as u64)).map(at).collect()
        });
    }
    one(Extent { element: extent.element, dims: Some(dims), data })
}

fn gather(s: &Step, k: &Known<'_>) -> Option<Vec<Extent>> {
    let (x, indices) = (k.dims(0)?, k.dims(1)?);
    let along = axis(s.int("axis", 0) as f64, x.len())?;
    let dims = x.get(..along)?.iter().chain(indices).chain(x.get(along + 1..)?).copied();
    let data = match (k.get(0)?.data.as_deref(), k.get(1)?.data.as_deref()) {
        (Some(data), Some(indices)) if x.len() == 1 => {
            indices.iter().map(|i| data.get(axis(*i, data.len())?).copied()).collect()
        }
        _ => None,
    };
    one(Extent { data, ..Extent::new(k.element(0), dims) })
}

fn reduce(s: &Step, k: &Known<'_>, f: Option<fn(f64, f64) -> f64>) -> Option<Vec<Extent>> {
    let extent = k.get(0)?;
    let x = extent.dims.as_ref()?;
    let named = k.has(1) || s.attribute("axes").is_some();
    let axes = if named { k.numbers(1, "axes")? } else { Vec::new() };
    if axes.is_empty() && s.int("noop_with_empty_axes", 0) != 0 {
        return one(Extent::new(extent.element, x.iter().copied()));
    }
    let gone = |i: usize| axes.is_empty() || axes.iter().any(|a| axis(*a, x.len()) == Some(i));
    let keep = s.int("keepdims", 1) != 0;
    let kept = x.iter().enumerate().filter(|(i, _)| keep || !gone(*i));
    let dims: Dims = kept.map(|(i, d)| if gone(i) { 1 } else { *d }).collect();
    let all = (0..x.len()).all(gone);
    let data = f.filter(|_| all).and_then(|f| extent.data.as_ref()?.iter().copied().reduce(f)).map(|n| vec![n]);
    one(Extent { data, ..Extent::new(extent.element, dims) })
}

fn einsum(s: &Step, k: &Known<'_>) -> Option<Vec<Extent>> {
    let equation = s.attribute("equation")?.s.clone()?;
    let equation: String = String::from_utf8_lossy(&equation).chars().filter(|c| !c.is_whitespace()).collect();
    let (terms, made) = equation.split_once("->")?;
    if equation.contains('.') {
        return None;
    }
    let mut sizes = BTreeMap::new();
    for (index, term) in terms.split(',').enumerate() {
        for (letter, dim) in term.chars().zip(k.dims(index)?) {
            let size = sizes.entry(letter).or_insert(*dim);
            *size = (*size).max(*dim);
        }
    }
    let dims = made.chars().map(|letter| sizes.get(&letter).copied()).collect::<Option<Dims>>()?;
    one(Extent::new(k.element(0), dims))
}

fn constant(s: &Step, _: &Known<'_>) -> Option<Vec<Extent>> {
    let attribute = s.attributes.first()?;
    let scalar = |element, n: f64| Extent { data: Some(vec![n]), ..Extent::new(element, []) };
    one(match attribute.name.as_str() {
        "value" => extent_of(&TensorProto::decode(attribute.t.clone().unwrap_or_else(Bytes::new)).ok()?),
        "value_int" => scalar(INT64, attribute.i? as f64),
        "value_float" => scalar(FLOAT, attribute.f?.into()),
        "value_ints" => Extent::of_data(INT64, attribute.ints.iter().map(|n| *n as f64).collect()),
        "value_floats" => Extent::of_data(FLOAT, attribute.floats.iter().map(|n| f64::from(*n)).collect()),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::onnx::proto::ModelProto;
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
            let (need, values) = sizes.walk([Some(Input { dims: &[10, 64], data: &[] })].into_iter());
            let slot = sizes.names.iter().position(|name| name == "y").unwrap();
            (need.bytes, values[slot].as_ref().map(Extent::bytes))
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

    /// The shapes of the outputs are those that a run gives, so that nothing on the way to them was unknown.
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
                let (need, values) = sizes.walk(inputs);
                assert!(!need.by_data && need.bytes > 0, "{name}: {need:?}");
                let mut state = State { tensors };
                model.lane().unwrap().run(0..1, &mut state).unwrap();
                for (output, tensor) in graph.output.iter().zip(&state.tensors) {
                    let slot = sizes.names.iter().position(|name| *name == output.name).unwrap();
                    let dims = values[slot].as_ref().and_then(|extent| extent.dims.clone()).unwrap();
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
