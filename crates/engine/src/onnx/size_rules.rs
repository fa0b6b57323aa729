//! Rules from the shapes of an operator's inputs to the shapes of its outputs: a table by operator.

use bytes::Bytes;
use prost::Message;

use super::further_size_rules::further;
use super::proto::TensorProto;
use super::sizes::{
    BOOL, Dims, Extent, FLOAT, FOLLOWED, INT32, INT64, Known, UINT8, axis, broadcast, element_at, names, product,
    replaced,
};

/// The outputs of an operator; `None`: unknown.
pub(super) type Rule = fn(&Known<'_>) -> Option<Vec<Extent>>;

/// Operators with unknown outputs: these depend on values, or are no tensors.
const UNKNOWN: &str = "If Loop Scan NonMaxSuppression Compress Unique RoiAlign StringSplit SequenceAt SequenceConstruct SequenceEmpty \
    SequenceInsert SplitToSequence ConcatFromSequence Optional OptionalGetElement OptionalHasElement DFT STFT MelWeightMatrix HannWindow \
    HammingWindow BlackmanWindow Col2Im CenterCropPad MaxUnpool MaxRoiPool ImageDecoder \
    SparseToDenseMatMul DynamicQuantizeLSTM";

/// The rule of an operator.
pub(super) fn rule(operator: &str) -> Rule {
    if UNKNOWN.split(' ').any(|unknown| unknown == operator) {
        return |_| None;
    }
    let found = arithmetic(operator).or_else(|| products(operator)).or_else(|| moved(operator));
    let found = found.or_else(|| chosen(operator)).or_else(|| other(operator)).or_else(|| further(operator));
    // Activations, norms, scatters: the output is as large as the input.
    found.unwrap_or(|k| k.made(k.dims(0)?.iter().copied()))
}

/// Operators that work element by element.
fn arithmetic(operator: &str) -> Option<Rule> {
    Some(match operator {
        "Add" => |k| elementwise(k, |a, b| a + b),
        "Sub" => |k| elementwise(k, |a, b| a - b),
        "Mul" => |k| elementwise(k, |a, b| a * b),
        "Div" => |k| elementwise(k, if is_float(k.element(0)) { |a, b| a / b } else { |a, b| (a / b).trunc() }),
        "Mod" => |k| elementwise(k, |a, b| a - b * (a / b).floor()),
        "Pow" => |k| elementwise(k, f64::powf),
        "Max" => |k| elementwise(k, f64::max),
        "Min" => |k| elementwise(k, f64::min),
        "Equal" => |k| compare(k, |a, b| (a == b).into()),
        "Greater" => |k| compare(k, |a, b| (a > b).into()),
        "GreaterOrEqual" => |k| compare(k, |a, b| (a >= b).into()),
        "Less" => |k| compare(k, |a, b| (a < b).into()),
        "LessOrEqual" => |k| compare(k, |a, b| (a <= b).into()),
        "And" => |k| compare(k, |a, b| (a != 0.0 && b != 0.0).into()),
        "Or" => |k| compare(k, |a, b| (a != 0.0 || b != 0.0).into()),
        "Xor" => |k| compare(k, |a, b| ((a != 0.0) != (b != 0.0)).into()),
        "Mean" | "Sum" | "PRelu" | "StringConcat" | "BitShift" | "BitwiseAnd" | "BitwiseOr" | "BitwiseXor" => {
            |k| one(Extent { data: None, ..elementwise(k, |a, _| a)?.pop()? })
        }
        "Where" => |k| {
            let dims = broadcast(&broadcast(k.dims(0)?, k.dims(1)?), k.dims(2)?);
            let part = |i: usize, at: usize| element_at(k.get(i)?.data.as_deref()?, at);
            let count = product(&dims);
            let choose = |at: usize| part(if part(0, at)? == 0.0 { 2 } else { 1 }, at);
            let data = if count <= FOLLOWED as u64 { (0..count as usize).map(choose).collect() } else { None };
            one(Extent { data, ..Extent::new(k.element(1), dims) })
        },
        "Neg" => |k| unary(k, |n| -n),
        "Abs" => |k| unary(k, f64::abs),
        "Floor" => |k| unary(k, f64::floor),
        "Ceil" => |k| unary(k, f64::ceil),
        "Round" => |k| unary(k, f64::round_ties_even),
        "Sqrt" => |k| unary(k, f64::sqrt),
        "Not" => |k| unary(k, |n| f64::from(n == 0.0)),
        "Identity" => |k| unary(k, |n| n),
        "Cast" => |k| {
            let to = k.int("to", FLOAT.into()) as i32;
            let convert = match to {
                BOOL => |n| f64::from(n != 0.0),
                to if is_float(to) => |n| n,
                _ => f64::trunc,
            };
            with_element(to, unary(k, convert))
        },
        _ => return None,
    })
}

/// Products of matrices, convolutions and pools.
fn products(operator: &str) -> Option<Rule> {
    Some(match operator {
        "MatMul" => |k| matmul(k.dims(0)?, k.dims(1)?, k.element(0).max(FLOAT)),
        "MatMulInteger" => |k| matmul(k.dims(0)?, k.dims(1)?, INT32),
        "QLinearMatMul" => |k| matmul(k.dims(0)?, k.dims(3)?, k.element(0)),
        "Gemm" => |k| gemm(k, 1, k.element(0)),
        "QGemm" => |k| gemm(k, 3, if k.has(7) { k.element(0) } else { FLOAT }),
        "Conv" => |k| convolution(k, k.dims(1)?),
        "ConvInteger" => |k| with_element(INT32, convolution(k, k.dims(1)?)),
        "QLinearConv" => |k| convolution(k, k.dims(3)?),
        "ConvTranspose" => transposed_convolution,
        "MaxPool" | "AveragePool" | "LpPool" => |k| {
            let kernel = k.attribute("kernel_shape")?.ints.iter().map(|n| u64::try_from(*n).unwrap_or(0));
            let weight: Dims = [*k.dims(0)?.get(1)?, 0].into_iter().chain(kernel).collect();
            convolution(k, &weight)
        },
        "GlobalAveragePool" | "GlobalMaxPool" | "GlobalLpPool" => {
            |k| k.made(k.dims(0)?.iter().enumerate().map(|(i, d)| if i < 2 { *d } else { 1 }))
        }
        _ => return None,
    })
}

/// Operators that give the same elements in another shape, joined or split.
fn moved(operator: &str) -> Option<Rule> {
    Some(match operator {
        "Reshape" => reshape,
        "Flatten" => |k| {
            let x = k.dims(0)?;
            let (before, behind) = x.split_at_checked(k.axis(1, x.len())?)?;
            k.made([product(before), product(behind)])
        },
        "Squeeze" => |k| {
            let x = k.dims(0)?;
            let axes = k.optional(1, "axes")?;
            let gone = |i: usize, d: u64| match &axes {
                Some(axes) => names(axes, i, x.len()),
                None => d == 1,
            };
            let dims = x.iter().enumerate().filter(|(i, d)| !gone(*i, **d)).map(|(_, d)| *d);
            one(Extent { data: k.get(0)?.data.clone(), ..Extent::new(k.element(0), dims) })
        },
        "Unsqueeze" => |k| {
            let (x, axes) = (k.dims(0)?, k.numbers(1, "axes")?);
            let (rank, mut rest) = (x.len() + axes.len(), x.iter());
            let dims = (0..rank).map(|i| if names(&axes, i, rank) { 1 } else { rest.next().copied().unwrap_or(1) });
            one(Extent { data: k.get(0)?.data.clone(), ..Extent::new(k.element(0), dims) })
        },
        "Transpose" => |k| {
            let x = k.dims(0)?;
            match k.attribute("perm") {
                None => k.made(x.iter().rev().copied()),
                Some(perm) => k.made(perm.ints.iter().filter_map(|i| x.get(usize::try_from(*i).ok()?)).copied()),
            }
        },
        "Concat" => concatenated,
        "Split" => parts,
        "Slice" => slice,
        "Gather" => gather,
        "GatherElements" => |k| k.made(k.dims(1)?.iter().copied()),
        "GatherND" => |k| {
            let (x, indices) = (k.dims(0)?, k.dims(1)?);
            let (depth, before) = indices.split_last()?;
            let skip = usize::try_from(k.int("batch_dims", 0)).ok()?.saturating_add(usize::try_from(*depth).ok()?);
            k.made(before.iter().chain(x.get(skip..).unwrap_or_default()).copied())
        },
        _ => return None,
    })
}

/// Operators that reduce, repeat, pad or scale.
fn chosen(operator: &str) -> Option<Rule> {
    Some(match operator {
        "ReduceMax" => |k| reduce(k, Some(f64::max)),
        "ReduceMin" => |k| reduce(k, Some(f64::min)),
        "ReduceSum" => |k| reduce(k, Some(|a, b| a + b)),
        "ReduceProd" => |k| reduce(k, Some(|a, b| a * b)),
        "ReduceMean" | "ReduceL1" | "ReduceL2" | "ReduceLogSum" | "ReduceLogSumExp" | "ReduceSumSquare" => {
            |k| reduce(k, None)
        }
        "ArgMax" | "ArgMin" => |k| {
            let x = k.dims(0)?;
            let along = k.axis(0, x.len())?;
            let mut dims = replaced(x, along, 1);
            if k.int("keepdims", 1) == 0 && along < dims.len() {
                dims.remove(along);
            }
            one(Extent::new(INT64, dims))
        },
        "TopK" => |k| {
            let x = k.dims(0)?;
            let along = k.axis(-1, x.len())?;
            let most = if k.has(1) { size(*k.data(1)?.first()?) } else { u64::try_from(k.int("k", 1)).unwrap_or(0) };
            let dims = replaced(x, along, most.min(x.get(along).copied().unwrap_or(0)));
            Some(vec![Extent::new(k.element(0), dims.clone()), Extent::new(INT64, dims)])
        },
        "Expand" => |k| {
            let asked: Dims = k.data(1)?.iter().map(|n| size(*n)).collect();
            let number = k.get(0)?.data.as_ref().filter(|data| data.len() == 1).map(|data| data[0]);
            one(Extent::filled(k.element(0), broadcast(k.dims(0)?, &asked), number))
        },
        "Tile" => |k| k.made(k.dims(0)?.iter().zip(k.data(1)?).map(|(d, n)| d.saturating_mul(size(*n)))),
        "Pad" => |k| {
            let (x, pads) = (k.dims(0)?, k.numbers(1, "pads")?);
            let axes = if k.has(3) { k.data(3)?.to_vec() } else { (0..x.len()).map(|i| i as f64).collect() };
            let mut dims = Dims::from_slice(x);
            for (i, along) in axes.iter().enumerate() {
                let more = pads.get(i)? + pads.get(i + axes.len())?;
                let dim = dims.get_mut(axis(*along, x.len())?)?;
                *dim = size(*dim as f64 + more);
            }
            k.made(dims)
        },
        // Sizes, if there are some; in opset 10 the scales are input 1.
        "Resize" => |k| match k.has(3) {
            _ if k.attribute("axes").is_some() || k.attribute("keep_aspect_ratio_policy").is_some() => None,
            true => k.made(k.data(3)?.iter().map(|n| size(*n))),
            false => scaled(k, k.data(if k.step.inputs.len() == 2 { 1 } else { 2 })?),
        },
        "Upsample" => |k| scaled(k, &k.numbers(1, "scales")?),
        _ => return None,
    })
}

/// Operators that need only sizes and numbers, or give another datatype.
fn other(operator: &str) -> Option<Rule> {
    Some(match operator {
        "Constant" => constant,
        "ConstantOfShape" => |k| {
            let dims: Dims = k.data(0)?.iter().map(|n| size(*n)).collect();
            let value = k.attribute("value").and_then(|a| TensorProto::decode(a.t.clone()?).ok());
            let value = value.map(|tensor| Extent::of(&tensor));
            let number = value.as_ref().map_or(Some(0.0), |value| value.data.as_ref()?.first().copied());
            one(Extent::filled(value.map_or(FLOAT, |value| value.element), dims, number))
        },
        "Range" => |k| {
            let (start, limit, step) = (*k.data(0)?.first()?, *k.data(1)?.first()?, *k.data(2)?.first()?);
            let count = size(((limit - start) / step).ceil());
            let data = (count <= FOLLOWED as u64).then(|| (0..count).map(|n| start + n as f64 * step).collect());
            one(Extent { data, ..Extent::new(k.element(0), [count]) })
        },
        "Shape" => |k| {
            let x = k.dims(0)?;
            let begin = axis(k.int("start", 0) as f64, x.len()).unwrap_or(0);
            let end = k.attribute("end").and_then(|end| axis(end.integer()? as f64, x.len())).unwrap_or(x.len());
            one(Extent::of_data(INT64, x.get(begin..end)?.iter().map(|d| *d as f64).collect()))
        },
        "Size" => |k| one(Extent { data: Some(vec![product(k.dims(0)?) as f64]), ..Extent::new(INT64, []) }),
        "OneHot" => |k| {
            let (mut dims, depth) = (Dims::from_slice(k.dims(0)?), size(*k.data(1)?.first()?));
            let along = k.axis(-1, dims.len() + 1)?;
            dims.insert(along.min(dims.len()), depth);
            one(Extent::new(k.element(2), dims))
        },
        // If the numbers are known, the count of the nonzero ones; else the maximum.
        "NonZero" => |k| {
            let found = k.get(0)?.data.as_ref().map(|data| data.iter().filter(|n| **n != 0.0).count() as u64);
            let most = product(k.dims(0)?);
            one(Extent::new(INT64, [k.dims(0)?.len() as u64, found.unwrap_or(most)]))
        },
        // The datatype is that of the zero point.
        "QuantizeLinear" => |k| {
            let element = match k.int("output_dtype", 0) as i32 {
                0 if k.has(2) => k.element(2),
                0 => UINT8,
                said => said,
            };
            one(Extent::new(element, k.dims(0)?.iter().copied()))
        },
        // The datatype is that of the scale.
        "DequantizeLinear" => |k| one(Extent::new(k.element(1), k.dims(0)?.iter().copied())),
        "DynamicQuantizeLinear" => |k| {
            let dims = k.dims(0)?.iter().copied();
            Some(vec![Extent::new(UINT8, dims), Extent::new(FLOAT, []), Extent::new(UINT8, [])])
        },
        _ => return None,
    })
}

pub(super) fn one(extent: Extent) -> Option<Vec<Extent>> {
    Some(vec![extent])
}

pub(super) fn size(number: f64) -> u64 {
    // The cast saturates, and turns negative numbers into 0.
    number as u64
}

fn is_float(element: i32) -> bool {
    matches!(element, FLOAT | 10 | 11)
}

pub(super) fn with_element(element: i32, made: Option<Vec<Extent>>) -> Option<Vec<Extent>> {
    Some(made?.into_iter().map(|extent| Extent { element, ..extent }).collect())
}

/// The inputs, joined along an axis.
fn concatenated(k: &Known<'_>) -> Option<Vec<Extent>> {
    let (count, first) = (k.step.inputs.len(), k.dims(0)?);
    let along = k.axis(0, first.len())?;
    let total = (0..count).try_fold(0u64, |sum, i| Some(sum.saturating_add(*k.dims(i)?.get(along)?)))?;
    let data = (0..count).map(|i| k.get(i)?.data.as_deref()).collect::<Option<Vec<_>>>();
    let data = data.filter(|_| first.len() == 1 && total <= FOLLOWED as u64).map(|parts| parts.concat());
    one(Extent { data, ..Extent::new(k.element(0), replaced(first, along, total)) })
}

/// The parts of an input that is split along an axis.
fn parts(k: &Known<'_>) -> Option<Vec<Extent>> {
    let x = k.dims(0)?;
    let along = k.axis(0, x.len())?;
    let (count, whole) = (k.step.outputs.len(), *x.get(along)?);
    let asked = k.optional(1, "split")?;
    // Parts of equal sizes, but the last may be smaller.
    let equal = whole.div_ceil(count.max(1) as u64);
    let part = |i: usize| match &asked {
        Some(sizes) => sizes.get(i).map_or(0, |n| size(*n)),
        None => equal.min(whole.saturating_sub(equal.saturating_mul(i as u64))),
    };
    let made = |i: usize| Extent::new(k.element(0), replaced(x, along, part(i).min(whole)));
    Some((0..count).map(made).collect())
}

fn scaled(k: &Known<'_>, scales: &[f64]) -> Option<Vec<Extent>> {
    k.made(k.dims(0)?.iter().zip(scales).map(|(d, n)| size(*d as f64 * n)))
}

fn unary(k: &Known<'_>, f: fn(f64) -> f64) -> Option<Vec<Extent>> {
    let extent = k.get(0)?;
    let data = extent.data.as_ref().map(|data| data.iter().map(|n| f(*n)).collect());
    one(Extent { element: extent.element, dims: extent.dims.clone(), data })
}

fn elementwise(k: &Known<'_>, f: fn(f64, f64) -> f64) -> Option<Vec<Extent>> {
    let mut made = k.get(0)?.clone();
    for index in 1..k.step.inputs.len() {
        let other = k.get(index)?;
        let dims = broadcast(made.dims.as_ref()?, other.dims.as_ref()?);
        let count = product(&dims) as usize;
        let data = match (&made.data, &other.data) {
            (Some(a), Some(b)) if [a.len(), b.len()].iter().all(|n| *n == 1 || *n == count) && count <= FOLLOWED => {
                (0..count).map(|i| Some(f(element_at(a, i)?, element_at(b, i)?))).collect()
            }
            _ => None,
        };
        made = Extent { element: made.element, dims: Some(dims), data };
    }
    one(made)
}

fn compare(k: &Known<'_>, f: fn(f64, f64) -> f64) -> Option<Vec<Extent>> {
    with_element(BOOL, elementwise(k, f))
}

pub(super) fn matmul(a: &[u64], b: &[u64], element: i32) -> Option<Vec<Extent>> {
    let (rows, a) = if a.len() > 1 { (Some(a[a.len() - 2]), &a[..a.len() - 2]) } else { (None, &a[..0]) };
    let (columns, b) = if b.len() > 1 { (Some(b[b.len() - 1]), &b[..b.len() - 2]) } else { (None, &b[..0]) };
    let element = if matches!(element, 2 | 3) { 6 } else { element };
    one(Extent::new(element, broadcast(a, b).into_iter().chain(rows).chain(columns)))
}

/// `b`: the input that is the second matrix.
pub(super) fn gemm(k: &Known<'_>, b: usize, element: i32) -> Option<Vec<Extent>> {
    let m = k.dims(0)?.get(usize::from(k.int("transA", 0) != 0))?;
    let n = k.dims(b)?.get(usize::from(k.int("transB", 0) == 0))?;
    one(Extent::new(element, [*m, *n]))
}

/// The reach of the kernel along an axis, and the axis's padding.
fn reach_and_pads(k: &Known<'_>, i: usize, rank: usize, kernel: u64) -> (u64, u64) {
    let reach = k.at("dilations", i, 1).saturating_mul(kernel.saturating_sub(1)).saturating_add(1);
    (reach, k.at("pads", i, 0).saturating_add(k.at("pads", i + rank, 0)))
}

/// `weight`: channels, any size, and the sizes of the kernel.
pub(super) fn convolution(k: &Known<'_>, weight: &[u64]) -> Option<Vec<Extent>> {
    let x = k.dims(0)?;
    let (spatial, kernel) = (x.get(2..)?, weight.get(2..)?);
    let auto = k.attribute("auto_pad").and_then(|a| a.s.clone()).unwrap_or_default();
    let ceil = k.int("ceil_mode", 0) != 0;
    let along = |(i, (d, kernel)): (usize, (&u64, &u64))| {
        let stride = k.at("strides", i, 1).max(1);
        if auto.starts_with(b"SAME") {
            return d.div_ceil(stride);
        }
        let (reach, pads) = reach_and_pads(k, i, spatial.len(), *kernel);
        let Some(room) = d.saturating_add(pads).checked_sub(reach) else { return 0 };
        (if ceil { room.div_ceil(stride) } else { room / stride }).saturating_add(1)
    };
    let dims = spatial.iter().zip(kernel).enumerate().map(along);
    k.made([*x.first()?, *weight.first()?].into_iter().chain(dims))
}

fn transposed_convolution(k: &Known<'_>) -> Option<Vec<Extent>> {
    let (x, weight) = (k.dims(0)?, k.dims(1)?);
    let (spatial, kernel) = (x.get(2..)?, weight.get(2..)?);
    let along = |(i, (d, kernel)): (usize, (&u64, &u64))| {
        let (reach, pads) = reach_and_pads(k, i, spatial.len(), *kernel);
        let far = k.at("strides", i, 1).saturating_mul(d.saturating_sub(1));
        let all = far.saturating_add(reach).saturating_add(k.at("output_padding", i, 0)).saturating_sub(pads);
        k.at("output_shape", i, all)
    };
    let channels = weight.get(1)?.saturating_mul(u64::try_from(k.int("group", 1)).ok()?);
    let dims = spatial.iter().zip(kernel).enumerate().map(along);
    k.made([*x.first()?, channels].into_iter().chain(dims))
}

fn reshape(k: &Known<'_>) -> Option<Vec<Extent>> {
    let extent = k.get(0)?;
    let x = extent.dims.as_ref()?;
    let asked = k.numbers(1, "shape")?;
    let keeps = k.int("allowzero", 0) == 0;
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

fn slice(k: &Known<'_>) -> Option<Vec<Extent>> {
    let extent = k.get(0)?;
    let x = extent.dims.as_ref()?;
    let (starts, ends) = (k.numbers(1, "starts")?, k.numbers(2, "ends")?);
    let axes = k.optional(3, "axes")?.unwrap_or_else(|| (0..starts.len()).map(|i| i as f64).collect());
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

fn gather(k: &Known<'_>) -> Option<Vec<Extent>> {
    let (x, indices) = (k.dims(0)?, k.dims(1)?);
    let along = k.axis(0, x.len())?;
    let dims = x.get(..along)?.iter().chain(indices).chain(x.get(along + 1..)?).copied();
    let data = match (k.get(0)?.data.as_deref(), k.get(1)?.data.as_deref()) {
        (Some(data), Some(indices)) if x.len() == 1 => {
            indices.iter().map(|i| data.get(axis(*i, data.len())?).copied()).collect()
        }
        _ => None,
    };
    one(Extent { data, ..Extent::new(k.element(0), dims) })
}

fn reduce(k: &Known<'_>, f: Option<fn(f64, f64) -> f64>) -> Option<Vec<Extent>> {
    let extent = k.get(0)?;
    let x = extent.dims.as_ref()?;
    let axes = k.optional(1, "axes")?.unwrap_or_default();
    if axes.is_empty() && k.int("noop_with_empty_axes", 0) != 0 {
        return k.made(x.iter().copied());
    }
    let gone = |i: usize| axes.is_empty() || names(&axes, i, x.len());
    let keep = k.int("keepdims", 1) != 0;
    let kept = x.iter().enumerate().filter(|(i, _)| keep || !gone(*i));
    let dims: Dims = kept.map(|(i, d)| if gone(i) { 1 } else { *d }).collect();
    let all = (0..x.len()).all(gone);
    let data = f.filter(|_| all).and_then(|f| extent.data.as_ref()?.iter().copied().reduce(f)).map(|n| vec![n]);
    one(Extent { data, ..Extent::new(extent.element, dims) })
}

fn constant(k: &Known<'_>) -> Option<Vec<Extent>> {
    let attribute = k.step.attributes.first()?;
    let scalar = |element, n: f64| Extent { data: Some(vec![n]), ..Extent::new(element, []) };
    one(match attribute.name.as_str() {
        "value" => Extent::of(&TensorProto::decode(attribute.t.clone().unwrap_or_else(Bytes::new)).ok()?),
        "value_int" => scalar(INT64, attribute.integer()? as f64),
        "value_float" => scalar(FLOAT, attribute.float()?.into()),
        "value_ints" => Extent::of_data(INT64, attribute.ints.iter().map(|n| *n as f64).collect()),
        "value_floats" => Extent::of_data(FLOAT, attribute.floats.iter().map(|n| f64::from(*n)).collect()),
        _ => return None,
    })
}
