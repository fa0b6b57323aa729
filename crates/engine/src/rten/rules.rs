//! The operators that RTen 0.27 computes otherwise than the standard says, and other operators that
//! make RTen compute the right numbers. `docs/upstream.md` has a report of each.

use super::{integer_rules as integer, ml_rules as ml, padding_rules as padding};
use crate::onnx::proto::AttributeProto;
use crate::onnx::rewrite::{Rule, Site, Verdict};
use crate::onnx::sizes::{BOOL, FLOAT, INT32};

/// The rule for an operator.
pub(super) fn rule_of(operator: &str) -> Option<Rule> {
    Some(match operator {
        "ArgMax" | "ArgMin" => first_of_equals,
        "AveragePool" | "MaxPool" => padding::pool,
        "Cast" => cast_to_bool,
        "Conv" => padding::convolution,
        "ConvInteger" => integer::convolution,
        "ConvTranspose" => padding::transposed_convolution,
        "DynamicQuantizeLinear" => dynamic_quantisation,
        "GRU" | "LSTM" | "RNN" => sequence_lengths,
        "LogSoftmax" | "Softmax" => flattened_softmax,
        "MatMul" => product_with_vector,
        "MatMulInteger" => integer::product,
        "NonMaxSuppression" => |_| {
            wrong(
                "it keeps one class a box, suppresses across classes and images, and takes the box around two boxes for their union",
            )
        },
        "QuantizeLinear" => quantisation,
        "ReduceL2" | "ReduceMean" => reduction_of_no_axes,
        "ReduceMax" => largest_boolean,
        "Resize" => cubic_resize,
        "Sign" => sign_of_zero,
        "Softplus" => large_softplus,
        operator => return ml::rule_of(operator),
    })
}

pub(super) fn wrong(what: &str) -> Verdict {
    Verdict::Wrong(what.to_owned())
}

/// Of equal elements RTen takes the last, which `select_last_index` requests. The first is the last
/// of the elements in reverse.
fn first_of_equals(site: &mut Site<'_>) -> Verdict {
    const ATTRIBUTE: &str = "select_last_index";
    let (x, y) = (site.input(0), site.output(0));
    if site.int(ATTRIBUTE, 0) != 0 {
        site.add_itself(&[&x], &[ATTRIBUTE], Vec::new(), vec![y]);
        return Verdict::Rewritten;
    }
    let axis = site.int("axis", 0);
    let reversed = padding::reversed(site, &x, &[axis]);
    let from_end = site.fresh();
    site.add_itself(&[&reversed], &[], Vec::new(), vec![from_end.clone()]);
    let shape = site.add("Shape", &[&x], Vec::new());
    let axis = site.integer(axis);
    let size = site.add("Gather", &[&shape, &axis], Vec::new());
    let one = site.integer(1);
    let last = site.add("Sub", &[&size, &one], Vec::new());
    site.add_as("Sub", &[&last, &from_end], Vec::new(), &y);
    Verdict::Rewritten
}

/// RTen drops the digits behind the point: 0.5 becomes false. Every other number than zero is true.
/// A number less itself is a zero of its own datatype.
fn cast_to_bool(site: &mut Site<'_>) -> Verdict {
    if site.int("to", 0) != i64::from(BOOL) || site.facts(0).element == Some(BOOL) {
        return Verdict::Right;
    }
    let (mut x, y) = (site.input(0), site.output(0));
    // RTen cannot compare bytes.
    if !matches!(site.facts(0).element, None | Some(FLOAT | 6 | 7 | 10 | 11)) {
        x = site.add("Cast", &[&x], vec![AttributeProto::int("to", INT32.into())]);
    }
    let zero = site.add("Sub", &[&x, &x], Vec::new());
    let is_zero = site.add("Equal", &[&x, &zero], Vec::new());
    site.add_as("Not", &[&is_zero], Vec::new(), &y);
    Verdict::Rewritten
}

/// RTen multiplies by the reciprocal of the scale, which may fall on the other side of a half. A
/// quotient that is quantised by 1 is rounded once.
fn quantisation(site: &mut Site<'_>) -> Verdict {
    let (x, scale, zero, y) = (site.input(0), site.input(1), site.input(2), site.output(0));
    let (rank, scale_rank) = (site.facts(0).rank, site.facts(1).rank);
    if site.facts(1).data.is_some_and(|scales| scales.iter().all(|scale| is_power_of_two(*scale))) {
        return Verdict::Right;
    }
    let axis = site.int("axis", 1);
    let (divisor, one) = match (scale_rank, rank) {
        (Some(0), _) => (one_for_each(site, &scale, &x), site.float(1.0)),
        (Some(1), Some(rank)) => {
            let Some(axis) = usize::try_from(if axis < 0 { axis + rank as i64 } else { axis }).ok() else {
                return Verdict::Right;
            };
            let mut shape = vec![1; rank.saturating_sub(axis)];
            if let Some(first) = shape.first_mut() {
                *first = -1;
            }
            let shape = site.weight(&shape);
            let one = site.add("Div", &[&scale, &scale], Vec::new());
            (site.add("Reshape", &[&scale, &shape], Vec::new()), one)
        }
        // By blocks, or of an unknown shape: the error is at most a unit in the last place of some
        // elements.
        _ => return Verdict::Right,
    };
    let quotient = site.add("Div", &[&x, &divisor], Vec::new());
    let inputs = [quotient.as_str(), &one, &zero];
    let inputs = if zero.is_empty() { &inputs[..2] } else { &inputs[..] };
    site.add_itself(inputs, &[], Vec::new(), vec![y]);
    Verdict::Rewritten
}

/// The same scale for each element of `x`. By a single number RTen does not divide: it multiplies
/// by the reciprocal.
fn one_for_each(site: &mut Site<'_>, scale: &str, x: &str) -> String {
    let shape = site.add("Shape", &[x], Vec::new());
    site.add("Expand", &[scale, &shape], Vec::new())
}

/// Whether multiplying by the reciprocal is exact.
fn is_power_of_two(scale: f64) -> bool {
    scale.is_normal() && scale.log2().fract() == 0.0
}

/// The same as [`quantisation`]; the scale and the zero point are right.
fn dynamic_quantisation(site: &mut Site<'_>) -> Verdict {
    let (x, y) = (site.input(0), site.output(0));
    if y.is_empty() {
        return Verdict::Right;
    }
    let mut named = |index| match site.output(index) {
        name if name.is_empty() => site.fresh(),
        name => name,
    };
    let (scale, zero) = (named(1), named(2));
    let unused = site.fresh();
    site.add_itself(&[&x], &[], Vec::new(), vec![unused, scale.clone(), zero.clone()]);
    let divisor = one_for_each(site, &scale, &x);
    let quotient = site.add("Div", &[&x, &divisor], Vec::new());
    let one = site.float(1.0);
    site.add_as("QuantizeLinear", &[&quotient, &one, &zero], Vec::new(), &y);
    Verdict::Rewritten
}

/// RTen takes every sequence to be as long as the longest.
fn sequence_lengths(site: &mut Site<'_>) -> Verdict {
    if site.input(4).is_empty() {
        return Verdict::Right;
    }
    wrong("it takes no notice of sequence_lens, and computes all sequences to the end")
}

/// Before version 13 all axes from `axis` on counted as a single one. RTen computes along one axis
/// in every version.
fn flattened_softmax(site: &mut Site<'_>) -> Verdict {
    let axis = site.int("axis", 1);
    let rank = site.facts(0).rank.map(|rank| rank as i64);
    if site.opset >= 13 || axis == -1 || (site.attribute("axis").is_some() && rank == Some(axis + 1)) {
        return Verdict::Right;
    }
    let (x, y) = (site.input(0), site.output(0));
    let rows = site.add("Flatten", &[&x], vec![AttributeProto::int("axis", axis)]);
    let computed = site.fresh();
    site.add_itself(&[&rows], &["axis"], vec![AttributeProto::int("axis", 1)], vec![computed.clone()]);
    let shape = site.add("Shape", &[&x], Vec::new());
    site.add_as("Reshape", &[&computed, &shape], Vec::new(), &y);
    Verdict::Rewritten
}

/// Whether several matrices are multiplied with a vector: RTen leaves an axis of size 1 behind the
/// product.
pub(super) fn has_vector(site: &Site<'_>) -> bool {
    site.facts(1).rank == Some(1) && site.facts(0).rank.is_none_or(|rank| rank > 2)
}

fn product_with_vector(site: &mut Site<'_>) -> Verdict {
    if !has_vector(site) {
        return Verdict::Right;
    }
    let (a, b) = (site.input(0), site.input(1));
    multiply(site, &[&a, &b], true)
}

/// Adds the product of these inputs. A vector becomes a matrix of one column, and the product loses
/// the column again.
pub(super) fn multiply(site: &mut Site<'_>, inputs: &[&str], is_vector: bool) -> Verdict {
    let y = site.output(0);
    let mut inputs = inputs.to_vec();
    while inputs.last().is_some_and(|name| name.is_empty()) {
        inputs.pop();
    }
    if !is_vector {
        site.add_itself(&inputs, &[], Vec::new(), vec![y]);
        return Verdict::Rewritten;
    }
    let axis = site.weight(&[1]);
    let vector = inputs.get(1).copied().unwrap_or_default();
    let column = site.add("Unsqueeze", &[vector, &axis], Vec::new());
    if let Some(right) = inputs.get_mut(1) {
        *right = &column;
    }
    let product = site.fresh();
    site.add_itself(&inputs, &[], Vec::new(), vec![product.clone()]);
    let axis = site.weight(&[-1]);
    site.add_as("Squeeze", &[&product, &axis], Vec::new(), &y);
    Verdict::Rewritten
}

/// RTen reduces all axes where `noop_with_empty_axes` asks for no reduction.
fn reduction_of_no_axes(site: &mut Site<'_>) -> Verdict {
    let is_empty = site.input(1).is_empty() || site.facts(1).data.is_some_and(|axes| axes.is_empty());
    if site.int("noop_with_empty_axes", 0) == 0 || !is_empty || site.ints("axes").is_some_and(|axes| !axes.is_empty()) {
        return Verdict::Right;
    }
    let (x, y) = (site.input(0), site.output(0));
    let same = if site.node.op_type == "ReduceL2" { "Abs" } else { "Identity" };
    site.add_as(same, &[&x], Vec::new(), &y);
    Verdict::Rewritten
}

/// RTen has integers for booleans. The largest of no integers is the least integer: not 0, and so
/// true.
fn largest_boolean(site: &mut Site<'_>) -> Verdict {
    if site.facts(0).element != Some(BOOL) {
        return Verdict::Right;
    }
    let (y, largest, zero) = (site.output(0), site.fresh(), site.integer(0));
    let inputs = site.node.input.clone();
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    site.add_itself(&inputs, &[], Vec::new(), vec![largest.clone()]);
    site.add_as("Max", &[&largest, &zero], Vec::new(), &y);
    Verdict::Rewritten
}

/// RTen interpolates linearly even if the mode is cubic.
fn cubic_resize(site: &mut Site<'_>) -> Verdict {
    if site.is("mode", "cubic") { wrong("it interpolates linearly where mode is cubic") } else { Verdict::Right }
}

/// RTen gives a zero the sign of its bit: 1 or -1. A number less itself is 0, except infinities and
/// NaN, which equal no number.
fn sign_of_zero(site: &mut Site<'_>) -> Verdict {
    let (x, y) = (site.input(0), site.output(0));
    let zero = site.add("Sub", &[&x, &x], Vec::new());
    let is_zero = site.add("Equal", &[&x, &zero], Vec::new());
    let sign = site.add("Sign", &[&x], Vec::new());
    site.add_as("Where", &[&is_zero, &x, &sign], Vec::new(), &y);
    Verdict::Rewritten
}

/// RTen's exponential overflows above 88. In `softplus(x) = max(x, 0) + softplus(-|x|)` no term
/// overflows.
fn large_softplus(site: &mut Site<'_>) -> Verdict {
    let (x, y) = (site.input(0), site.output(0));
    let size = site.add("Abs", &[&x], Vec::new());
    let below = site.add("Neg", &[&size], Vec::new());
    let rest = site.add("Softplus", &[&below], Vec::new());
    let positive = site.add("Relu", &[&x], Vec::new());
    site.add_as("Add", &[&positive, &rest], Vec::new(), &y);
    Verdict::Rewritten
}
