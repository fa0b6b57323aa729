//! Rules for products and convolutions of quantised numbers. RTen 0.27 loses zero points of a
//! matrix that it packs before it multiplies. Examples: a kernel of several images, one matrix of
//! several products, a weight of signed bytes.

use super::padding_rules::{self as padding, AUTO_PAD, PADS};
use super::rules::{has_vector, multiply, wrong};
use crate::onnx::proto::AttributeProto;
use crate::onnx::rewrite::{Facts, Site, Verdict};
use crate::onnx::sizes::{INT32, UINT8};

const INT8: i32 = 3;
/// The distance of signed bytes from unsigned ones.
const SHIFT: i64 = 128;

/// Whether a zero point is 0.
fn is_zero(facts: &Facts) -> bool {
    facts.data.as_ref().is_some_and(|numbers| numbers.iter().all(|number| *number == 0.0))
}

fn cast(site: &mut Site<'_>, x: &str, to: i32) -> String {
    site.add("Cast", &[x], vec![AttributeProto::int("to", to.into())])
}

/// Signed bytes as 32-bit numbers from 0 to 255.
fn shifted(site: &mut Site<'_>, x: &str) -> String {
    let (wide, shift) = (cast(site, x, INT32), site.integer(SHIFT));
    site.add("Add", &[&wide, &shift], Vec::new())
}

/// A product of quantised matrices. Unsigned weights keep their zero points. A matrix in several
/// products is repeated for each.
pub(super) fn product(site: &mut Site<'_>) -> Verdict {
    let (mut a, mut b, zero_a, mut zero_b) = (site.input(0), site.input(1), site.input(2), site.input(3));
    let (left, right) = (site.facts(0), site.facts(1));
    let loses_zero = right.element == Some(INT8) && !zero_b.is_empty() && !is_zero(&site.facts(3));
    // A single row is not packed.
    let is_one_of_several = left.rank.is_some_and(|rank| rank > 1) && right.rank.is_some_and(|rank| rank > 2);
    let is_vector = has_vector(site);
    if !(loses_zero || is_one_of_several || is_vector) {
        return Verdict::Right;
    }
    if is_one_of_several {
        a = as_often(site, &a, &b);
    }
    if loses_zero {
        let (wide, zero) = (shifted(site, &b), shifted(site, &zero_b));
        (b, zero_b) = (cast(site, &wide, UINT8), cast(site, &zero, UINT8));
    }
    multiply(site, &[&a, &b, &zero_a, &zero_b], is_vector)
}

/// `a`, repeated for each matrix in `b`.
fn as_often(site: &mut Site<'_>, a: &str, b: &str) -> String {
    let shape = site.add("Shape", &[b], Vec::new());
    let (from, to, axes) = (site.weight(&[0]), site.weight(&[-2]), site.weight(&[0]));
    let matrices = site.add("Slice", &[&shape, &from, &to, &axes], Vec::new());
    let ones = site.weight(&[1, 1]);
    let shape = site.add("Concat", &[&matrices, &ones], vec![AttributeProto::int("axis", 0)]);
    site.add("Expand", &[a, &shape], Vec::new())
}

/// A convolution of quantised numbers. Let `k` be the kernel as unsigned bytes, and `z` their zero
/// point. Then `conv(x, k - z) = conv(x, k) - z conv(x, 1)`, and neither kernel has a zero point
/// that could be lost.
pub(super) fn convolution(site: &mut Site<'_>) -> Verdict {
    let padded = match padding::padded_with_zero_points(site) {
        Ok(padded) => padded,
        Err(verdict) => return verdict,
    };
    let (kernel, zero_w) = (site.facts(1), site.input(3));
    let is_signed = kernel.element != Some(UINT8);
    let has_zero = is_signed || !(zero_w.is_empty() || is_zero(&site.facts(3)));
    // A depthwise kernel, with one channel for each group, is not packed.
    let group = site.int("group", 1);
    let is_packed = !kernel.dims.as_ref().is_some_and(|dims| dims.first() == Some(&group) && dims.get(1) == Some(&1));
    let x = padded.clone().unwrap_or_else(|| site.input(0));
    let (w, zero_x, y) = (site.input(1), site.input(2), site.output(0));
    if !has_zero || !is_packed {
        if padded.is_none() {
            return Verdict::Right;
        }
        let more: Vec<String> = site.node.input.iter().skip(1).cloned().collect();
        let inputs: Vec<&str> = std::iter::once(x.as_str()).chain(more.iter().map(String::as_str)).collect();
        site.add_itself(&inputs, &[AUTO_PAD, PADS], Vec::new(), vec![y]);
        return Verdict::Rewritten;
    }
    let (Some(dims), 1) = (kernel.dims, group) else {
        return wrong("it loses the zero points of the kernel where a batch has several images");
    };
    let (unsigned, mut zero) = match (is_signed, zero_w.is_empty()) {
        (true, is_empty) => {
            let wide = shifted(site, &w);
            let zero = if is_empty { site.integer(SHIFT) } else { shifted(site, &zero_w) };
            (cast(site, &wide, UINT8), zero)
        }
        (false, _) => (w, cast(site, &zero_w, INT32)),
    };
    if site.facts(3).rank == Some(1) {
        let shape = site.weight(&[&[-1], &vec![1; dims.len().saturating_sub(2)][..]].concat());
        zero = site.add("Reshape", &[&zero, &shape], Vec::new());
    }
    let ones = site.ones(&[&[1], dims.get(1..).unwrap_or_default()].concat());
    let sums = |site: &mut Site<'_>, kernel: &str| {
        let sums = site.fresh();
        let inputs = [x.as_str(), kernel, &zero_x];
        let inputs = if zero_x.is_empty() { &inputs[..2] } else { &inputs[..] };
        site.add_itself(inputs, &[AUTO_PAD, PADS], Vec::new(), vec![sums.clone()]);
        sums
    };
    let (all, inputs) = (sums(site, &unsigned), sums(site, &ones));
    let beyond = site.add("Mul", &[&inputs, &zero], Vec::new());
    site.add_as("Sub", &[&all, &beyond], Vec::new(), &y);
    Verdict::Rewritten
}
