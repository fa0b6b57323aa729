//! Each operator's effect on the rows: a table by operator.
//!
//! A rule is called only if an input has rows. An operator may have only weights and sizes as
//! inputs. Then this module decides, in the same way for every operator.

use super::flow::{BATCHES, Flow, Place, RUNS, TYPICAL};
use super::operator::{Op, Ruled};
use super::rules_along::{
    arg, batch_norm, cum_sum, first_only, group_norm, instance_norm, keeps, layer_norm, local_norm, lp_norm, mean_norm,
    mixes_all, one_hot, reduce, reverse, skip_norm, softmax, top_k, trilu,
};
use super::rules_by_row::{
    attention, by_row, chosen_features, distances, drops_elements, embedding, mixed_list, rotary, text_rows,
};
use super::rules_index::{compress, gather, gather_elements, gather_nd, scatter_elements, scatter_nd, unique};
use super::rules_moved::{
    concat, expand, pad, quantised_concat, reshape, resize, slice, space, split, tile, transpose,
};
use super::rules_products::{
    convolution, einsum, gemm, matmul, pool, quantised_gemm, quantised_matmul, recurrent, scaled_matmul,
};
use crate::onnx::proto::NodeProto;
use crate::onnx::sizes::{Extent, Known};

pub(super) type RowRule = fn(&Op<'_>) -> Ruled;

/// The rule of an operator.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    /// Inputs that give sizes, axes or positions.
    structure: &'static [usize],
    kind: Kind,
    rule: RowRule,
}

const COMPUTED: Flow = Flow::Sized { listed: false };

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The operator computes with elements.
    Computes,
    /// The operator moves elements. If they are known, a comparison shows whether the batch decides
    /// them.
    Moves,
    /// The operator repeats elements up to given sizes.
    Repeats,
    /// The operator reads only sizes.
    Measures,
}

const fn computes(rule: RowRule) -> Entry {
    Entry { structure: &[], kind: Kind::Computes, rule }
}

const fn moves(structure: &'static [usize], rule: RowRule) -> Entry {
    Entry { structure, kind: Kind::Moves, rule }
}

/// The most inputs of an operator to which rules apply.
pub(super) const MOST_INPUTS: usize = 512;
/// Operators that work element by element, with all inputs broadcast to one shape.
const ELEMENTWISE: &str = "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor \
    Ceil Celu Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less \
    LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal RegexFullMatch Relu Round Selu Shrink Sigmoid Sign \
    Sin Sinh Softplus Softsign Sqrt StringConcat Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor";
/// Operators on each element of the first input; further inputs are bounds, scales or zero points.
const OF_FIRST: &str = "Clip DequantizeLinear QuantizeLinear ScaledTanh ParametricSoftplus Affine Bernoulli";
const REDUCTIONS: &str = "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare";

fn is_among(list: &str, operator: &str) -> bool {
    list.split_ascii_whitespace().any(|name| name == operator)
}

fn entry(domain: &str, operator: &str) -> Option<Entry> {
    match domain {
        "" => standard(operator),
        "ai.onnx.ml" => classical(operator),
        "com.microsoft" => contributed(operator),
        _ => None,
    }
}

fn standard(operator: &str) -> Option<Entry> {
    if is_among(ELEMENTWISE, operator) {
        return Some(computes(keeps));
    }
    if is_among(OF_FIRST, operator) {
        return Some(computes(first_only));
    }
    if is_among(REDUCTIONS, operator) {
        return Some(Entry { structure: &[1], kind: Kind::Computes, rule: reduce });
    }
    moved(operator).or_else(|| along(operator)).or_else(|| product(operator))
}

/// Operators that move, choose and repeat elements, and operators that measure.
fn moved(operator: &str) -> Option<Entry> {
    Some(match operator {
        "Shape" | "Size" => Entry { structure: &[], kind: Kind::Measures, rule: |op| Ok(op.all(measured(op))) },
        "EyeLike" | "RandomNormalLike" | "RandomUniformLike" => {
            Entry { structure: &[], kind: Kind::Measures, rule: |op| Ok(op.all(as_large(op))) }
        }
        "Constant" | "RandomNormal" | "RandomUniform" => computes(keeps),
        "ConstantOfShape" => Entry { structure: &[0], kind: Kind::Repeats, rule: keeps },
        "Range" => Entry { structure: &[0, 1, 2], kind: Kind::Moves, rule: keeps },
        "Cast" | "Identity" => moves(&[], keeps),
        // Only the datatype of the second input counts.
        "CastLike" => Entry { structure: &[], kind: Kind::Measures, rule: |op| Ok(op.all(op.flow(0).clone())) },
        "Reshape" | "Squeeze" | "Unsqueeze" => moves(&[1], reshape),
        "Flatten" => moves(&[], reshape),
        "Transpose" => moves(&[], transpose),
        "Concat" => moves(&[], concat),
        "Split" => moves(&[1], split),
        "Slice" => moves(&[1, 2, 3, 4], slice),
        "Expand" => Entry { structure: &[1], kind: Kind::Repeats, rule: expand },
        "Tile" => Entry { structure: &[1], kind: Kind::Repeats, rule: tile },
        "Pad" => moves(&[1, 3], pad),
        "Resize" => moves(&[1, 2, 3], resize),
        "Upsample" => moves(&[1], resize),
        "DepthToSpace" | "SpaceToDepth" => moves(&[], space),
        "Gather" => moves(&[], gather),
        "GatherElements" => moves(&[], gather_elements),
        "GatherND" => moves(&[], gather_nd),
        "Scatter" | "ScatterElements" => moves(&[], scatter_elements),
        "ScatterND" => moves(&[], scatter_nd),
        "Compress" => moves(&[], compress),
        "Unique" | "NonZero" => moves(&[], unique),
        "ReverseSequence" => moves(&[], reverse),
        "Trilu" => moves(&[1], trilu),
        _ => return None,
    })
}

/// Operators that work along axes.
fn along(operator: &str) -> Option<Entry> {
    Some(match operator {
        "Softmax" | "LogSoftmax" | "Hardmax" => computes(softmax),
        "ArgMax" | "ArgMin" => computes(arg),
        "CumSum" => Entry { structure: &[1], kind: Kind::Computes, rule: cum_sum },
        "TopK" => Entry { structure: &[1], kind: Kind::Computes, rule: top_k },
        "OneHot" => Entry { structure: &[1], kind: Kind::Computes, rule: one_hot },
        "BatchNormalization" => computes(batch_norm),
        // Also in the standard domain, to which ONNX Runtime adds the simplified one.
        "LayerNormalization" | "RMSNormalization" | "SimplifiedLayerNormalization" => computes(layer_norm),
        "InstanceNormalization" => computes(instance_norm),
        "GroupNormalization" => computes(group_norm),
        "LpNormalization" => computes(lp_norm),
        "MeanVarianceNormalization" => computes(mean_norm),
        "LRN" => computes(local_norm),
        "Dropout" => computes(first_only),
        "DynamicQuantizeLinear" => computes(|op| mixes_all(op, "takes its scale from the values of all requests")),
        "NonMaxSuppression" => computes(mixed_list),
        "StringNormalizer" => computes(drops_elements),
        "TfIdfVectorizer" => computes(text_rows),
        _ => return None,
    })
}

/// Products of matrices, convolutions, pools, and networks with a state.
fn product(operator: &str) -> Option<Entry> {
    Some(match operator {
        "MatMul" | "MatMulInteger" => computes(matmul),
        "QLinearMatMul" => computes(quantised_matmul),
        "Gemm" => computes(gemm),
        "Einsum" => computes(einsum),
        "Conv" | "ConvInteger" | "QLinearConv" | "ConvTranspose" => computes(convolution),
        "MaxPool" | "AveragePool" | "LpPool" | "GlobalAveragePool" | "GlobalMaxPool" | "GlobalLpPool" => computes(pool),
        "LSTM" | "GRU" | "RNN" => computes(recurrent),
        "Attention" => computes(attention),
        "RotaryEmbedding" => computes(rotary),
        "GridSample" => computes(by_row),
        _ => return None,
    })
}

fn classical(operator: &str) -> Option<Entry> {
    Some(match operator {
        "LabelEncoder" | "CategoryMapper" | "Binarizer" => computes(keeps),
        "Scaler"
        | "Imputer"
        | "Normalizer"
        | "TreeEnsemble"
        | "TreeEnsembleClassifier"
        | "TreeEnsembleRegressor"
        | "LinearClassifier"
        | "LinearRegressor"
        | "SVMClassifier"
        | "SVMRegressor"
        | "FeatureVectorizer" => computes(by_row),
        "ArrayFeatureExtractor" => computes(chosen_features),
        "OneHotEncoder" => computes(keeps),
        _ => return None,
    })
}

fn contributed(operator: &str) -> Option<Entry> {
    Some(match operator {
        "Gelu" | "BiasGelu" | "FastGelu" | "QuickGelu" => computes(keeps),
        "QLinearSigmoid" | "QLinearLeakyRelu" | "QuantizeLinear" | "DequantizeLinear" => computes(first_only),
        "QLinearAdd" | "QLinearMul" => computes(|op| super::rules_along::broadcast_rule(op, &[0, 3])),
        "QLinearConcat" => computes(quantised_concat),
        "QLinearGlobalAveragePool" | "QLinearAveragePool" => computes(pool),
        "FusedMatMul" => computes(matmul),
        "MatMulIntegerToFloat" => computes(scaled_matmul),
        "MatMulNBits" => computes(first_only_last),
        "CDist" => computes(distances),
        "QGemm" => computes(quantised_gemm),
        "FusedGemm" => computes(gemm),
        "FusedConv" => computes(convolution),
        "SkipLayerNormalization" | "SkipSimplifiedLayerNormalization" => computes(skip_norm),
        "EmbedLayerNormalization" => computes(embedding),
        "RotaryEmbedding" => computes(rotary),
        "Attention" | "MultiHeadAttention" | "GroupQueryAttention" => computes(attention),
        "DynamicQuantizeMatMul" | "DynamicQuantizeLSTM" | "QAttention" => computes(dynamic),
        _ => return None,
    })
}

/// A product with weights along the last axis.
fn first_only_last(op: &Op<'_>) -> Ruled {
    match (op.place(0), op.rank(0)?) {
        (Some(place), rank) if place.axis + 1 == rank => Err(op.along("adds up products", place)),
        _ => first_only(op),
    }
}

/// `QAttention` has its scale as an input. The others take their scale from the elements of the
/// batch.
fn dynamic(op: &Op<'_>) -> Ruled {
    if op.node.op_type == "QAttention" {
        return attention(op);
    }
    mixes_all(op, "takes its scale from the values of all requests")
}

/// Whether the table has the operator, so that its sizes are right as well.
pub(super) fn has(domain: &str, operator: &str) -> bool {
    entry(domain, operator).is_some()
}

/// The sizes of an operator's outputs; empty where the size rule only estimates them.
pub(super) fn sizes(node: &NodeProto, known: &Known<'_>) -> Vec<Extent> {
    let is_estimate = node.op_type == "NonZero" && known.get(0).is_none_or(|extent| extent.data.is_none());
    if is_estimate { Vec::new() } else { (known.step.rule)(known).unwrap_or_default() }
}

/// Whether an operator draws random numbers. `is_set`: whether a value is known to differ from
/// zero.
pub(super) fn is_random(node: &NodeProto, is_set: impl Fn(&str) -> bool) -> bool {
    let is_standard = matches!(node.domain.as_str(), "" | "ai.onnx");
    match node.op_type.as_str() {
        "RandomNormal" | "RandomNormalLike" | "RandomUniform" | "RandomUniformLike" | "Bernoulli" | "Multinomial" => {
            is_standard
        }
        // Only if an input requests training.
        "Dropout" => is_standard && node.input.get(2).is_some_and(|name| is_set(name)),
        "Sampling" | "BiasDropout" | "BitmaskDropout" | "BitmaskBiasDropout" => node.domain == "com.microsoft",
        _ => false,
    }
}

/// The flow of each output of an operator.
pub(super) fn flows(domain: &str, op: &Op<'_>) -> Vec<Flow> {
    let Some(entry) = entry(domain, &op.node.op_type) else {
        return op.all(unruled(domain, op));
    };
    let flows = judged(entry, op).unwrap_or_else(|flow| op.all(flow));
    let settled = flows.into_iter().enumerate().map(|(output, flow)| op.settled(output, flow));
    let settled: Vec<Flow> = settled.collect();
    for (output, flow) in settled.iter().enumerate() {
        let is_empty = || op.made(output, TYPICAL).is_ok_and(|dims| dims.contains(&0));
        if matches!(flow, Flow::Rows(_)) && is_empty() {
            op.misfit.set(true);
        }
    }
    settled
}

/// The flow of an operator without a rule: its effect on the rows is unknown.
fn unruled(domain: &str, op: &Op<'_>) -> Flow {
    let flows = || op.flows.iter().flatten();
    if let Some(flow) = worst(flows()) {
        return flow.clone();
    }
    if flows().any(|flow| matches!(flow, Flow::Rows(_) | Flow::Sized { .. })) {
        let of = if domain.is_empty() { String::new() } else { format!(" of the domain '{domain}'") };
        return op.unknown(format!("there is no rule for this operator{of}"));
    }
    if flows().any(|flow| *flow == Flow::Row) { Flow::Row } else { Flow::Free }
}

/// The input that decides an output alone: a mixed one, else an unknown one.
fn worst<'a>(flows: impl Iterator<Item = &'a Flow> + Clone) -> Option<&'a Flow> {
    let mixed = flows.clone().find(|flow| matches!(flow, Flow::Mixed(_)));
    mixed.or_else(|| flows.clone().find(|flow| matches!(flow, Flow::Unknown(_))))
}

fn judged(entry: Entry, op: &Op<'_>) -> Ruled {
    if op.count() > MOST_INPUTS {
        return Err(op.unknown(format!("it has more than {MOST_INPUTS} inputs")));
    }
    if entry.kind == Kind::Measures {
        return (entry.rule)(op);
    }
    let mut is_by_size = false;
    for index in entry.structure.iter().filter(|index| op.has(**index)) {
        match op.flow(*index) {
            Flow::Free | Flow::Row => {}
            Flow::Sized { .. } => is_by_size = true,
            _ if op.is_counted(*index) => is_by_size = true,
            Flow::Rows(_) => {
                return Err(
                    op.mixed(format!("its input {index}, which says sizes or positions, comes from the requests"))
                );
            }
            flow => return Err(flow.clone()),
        }
    }
    let content = (0..op.count()).filter(|index| !entry.structure.contains(index)).map(|index| op.flow(index));
    if let Some(flow) = worst(content.clone()) {
        return Err(flow.clone());
    }
    let any = |kind: fn(&Flow) -> bool| content.clone().any(kind);
    let (has_rows, is_sized) = (any(|f| matches!(f, Flow::Rows(_))), any(|f| matches!(f, Flow::Sized { .. })));
    if any(|f| *f == Flow::Row) || entry.structure.iter().any(|index| *op.flow(*index) == Flow::Row) {
        return match (has_rows, is_sized || is_by_size) {
            (true, _) => Err(op.mixed("it computes one row of the batch with all of its rows")),
            (_, true) => Err(op.unknown("it computes one row of the batch with the number of rows")),
            _ => Ok(op.all(Flow::Row)),
        };
    }
    if has_rows {
        return match is_sized {
            true => Err(with_the_number(op)),
            false => (entry.rule)(op),
        };
    }
    Ok((0..op.node.output.len()).map(|output| without_rows(entry, op, output, is_sized, is_by_size)).collect())
}

/// The flow of an operator on rows and on the number of rows.
fn with_the_number(op: &Op<'_>) -> Flow {
    let reason = "it computes with the number of requests that are joined, or with their order";
    match op.node.op_type.as_str() {
        "Add" | "Sub" | "Mul" | "Div" => op.mixed(reason),
        _ => op.unknown(reason),
    }
}

/// An output that depends on no row.
fn without_rows(entry: Entry, op: &Op<'_>, output: usize, is_sized: bool, is_by_size: bool) -> Flow {
    if !is_sized && !is_by_size {
        return Flow::Free;
    }
    match entry.kind {
        Kind::Moves => {
            let listed = !op.flows.contains(&Some(Flow::Sized { listed: false }));
            let is_alike = op.made_alike(output) == Some(true);
            if listed && is_alike { Flow::Free } else { Flow::Sized { listed } }
        }
        Kind::Repeats if !is_sized => repeated(op, output),
        _ => COMPUTED,
    }
}

/// Weights that are repeated once for each row are the same for each row.
fn repeated(op: &Op<'_>, output: usize) -> Flow {
    let Ok(sizes) = (0..RUNS).map(|run| op.made(output, run)).collect::<Result<Vec<_>, _>>() else {
        return op.without_sizes();
    };
    let Some(typical) = sizes.get(TYPICAL) else { return op.without_sizes() };
    if sizes.iter().any(|dims| dims.len() != typical.len()) {
        return COMPUTED;
    }
    let varies = |axis: &usize| sizes.iter().any(|dims| dims.get(*axis) != typical.get(*axis));
    let varying: Vec<usize> = (0..typical.len()).filter(varies).collect();
    let [axis] = varying.as_slice() else {
        return if varying.is_empty() { Flow::Free } else { COMPUTED };
    };
    let rows = BATCHES[TYPICAL];
    let after = typical.get(*axis).map_or(0, |size| size / rows);
    // The number of different elements to repeat. With several, the place of a row would decide.
    let there = match op.node.op_type.as_str() {
        "ConstantOfShape" => 1,
        _ => {
            let Ok(from) = op.dims(0, TYPICAL) else { return op.without_sizes() };
            (axis + from.len()).checked_sub(typical.len()).and_then(|axis| from.get(axis)).copied().unwrap_or(1)
        }
    };
    let is_even = there == 1 || (op.node.op_type == "Tile" && there != 0 && after % there == 0);
    let place = Place { axis: *axis, before: 1, after };
    let fits = sizes.iter().zip(BATCHES).all(|(dims, rows)| dims.get(*axis).copied() == place.size(rows));
    if is_even && fits && after > 0 { Flow::Rows(place) } else { COMPUTED }
}

/// The flow of sizes as a value.
fn measured(op: &Op<'_>) -> Flow {
    match (op.made_alike(0), op.flow(0)) {
        (Some(true), _) => Flow::Free,
        (Some(false), _) => Flow::Sized { listed: true },
        (None, Flow::Rows(_) | Flow::Sized { .. }) => op.without_sizes(),
        (None, flow) => flow.clone(),
    }
}

/// A value that is as large as another, and does not depend on its elements.
fn as_large(op: &Op<'_>) -> Flow {
    match op.flow(0) {
        Flow::Rows(place) if op.node.op_type != "EyeLike" => Flow::Rows(*place),
        Flow::Rows(_) => COMPUTED,
        flow => flow.clone(),
    }
}
