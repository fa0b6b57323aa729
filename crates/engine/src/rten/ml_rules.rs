//! Operators of classical machine learning (`ai.onnx.ml`), which RTen lacks, by operators of the
//! standard. Sums have another order than in other engines, as they have between engines anyway.

use super::rules::wrong;
use crate::onnx::proto::AttributeProto;
use crate::onnx::rewrite::{Rule, Site, Verdict};
use crate::onnx::sizes::{FLOAT, INT64};

const STRING: i32 = 8;

/// The rule for an operator.
pub(super) fn rule_of(operator: &str) -> Option<Rule> {
    Some(match operator {
        "ArrayFeatureExtractor" => extraction,
        "LinearClassifier" => classifier,
        "LinearRegressor" => regressor,
        "Normalizer" => normaliser,
        "Scaler" => scaler,
        _ => return None,
    })
}

fn floats(site: &Site<'_>, name: &str) -> Vec<f32> {
    site.attribute(name).map(|attribute| attribute.floats.clone()).unwrap_or_default()
}

fn text(site: &Site<'_>, name: &str, default: &str) -> String {
    let text = site.attribute(name).and_then(|attribute| attribute.s.clone());
    text.map_or_else(|| default.to_owned(), |text| String::from_utf8_lossy(&text).into_owned())
}

/// The input as 32-bit floats.
fn input(site: &mut Site<'_>) -> String {
    let x = site.input(0);
    if site.facts(0).element == Some(FLOAT) {
        return x;
    }
    site.add("Cast", &[&x], vec![AttributeProto::int("to", FLOAT.into())])
}

/// `(x - offset) * scale`.
fn scaler(site: &mut Site<'_>) -> Verdict {
    let (offset, scale, y) = (floats(site, "offset"), floats(site, "scale"), site.output(0));
    if offset.is_empty() || scale.is_empty() {
        return wrong("it has no offset or no scale");
    }
    let x = input(site);
    let (offset, scale) = (site.floats(&[offset.len()], &offset), site.floats(&[scale.len()], &scale));
    let moved = site.add("Sub", &[&x, &offset], Vec::new());
    site.add_as("Mul", &[&moved, &scale], Vec::new(), &y);
    Verdict::Rewritten
}

/// Each row by its norm; a row of zeros stays.
fn normaliser(site: &mut Site<'_>) -> Verdict {
    let (norm, y) = (text(site, "norm", "MAX"), site.output(0));
    let x = input(site);
    let last = site.weight(&[-1]);
    let keep = || vec![AttributeProto::int("keepdims", 1)];
    let size = match &*norm {
        // By this version of the operator its axes are an input.
        "MAX" if site.opset >= 18 => site.add("ReduceMax", &[&x, &last], keep()),
        "MAX" => site.add("ReduceMax", &[&x], [keep(), vec![AttributeProto::ints("axes", vec![-1])]].concat()),
        "L1" => {
            let sizes = site.add("Abs", &[&x], Vec::new());
            sum(site, &sizes, &last)
        }
        "L2" => {
            let squares = site.add("Mul", &[&x, &x], Vec::new());
            let squares = sum(site, &squares, &last);
            site.add("Sqrt", &[&squares], Vec::new())
        }
        other => return wrong(&format!("the norm '{other}' is unknown")),
    };
    let (zero, one) = (site.float(0.0), site.float(1.0));
    let is_zero = site.add("Equal", &[&size, &zero], Vec::new());
    let divisor = site.add("Where", &[&is_zero, &one, &size], Vec::new());
    site.add_as("Div", &[&x, &divisor], Vec::new(), &y);
    Verdict::Rewritten
}

fn sum(site: &mut Site<'_>, x: &str, axes: &str) -> String {
    let mut attributes = vec![AttributeProto::int("keepdims", 1)];
    if site.opset >= 13 {
        return site.add("ReduceSum", &[x, axes], attributes);
    }
    attributes.push(AttributeProto::ints("axes", vec![-1]));
    site.add("ReduceSum", &[x], attributes)
}

/// The products of the rows with each of the `rows` rows of coefficients.
fn products(site: &mut Site<'_>, rows: usize) -> Option<String> {
    let (coefficients, intercepts) = (floats(site, "coefficients"), floats(site, "intercepts"));
    let columns = coefficients.len().checked_div(rows).filter(|columns| columns * rows == coefficients.len())?;
    let intercepts = if intercepts.is_empty() { vec![0.0; rows] } else { intercepts };
    if columns == 0 || intercepts.len() != rows {
        return None;
    }
    let x = input(site);
    let (weights, offsets) = (site.floats(&[rows, columns], &coefficients), site.floats(&[rows], &intercepts));
    Some(site.add("Gemm", &[&x, &weights, &offsets], vec![AttributeProto::int("transB", 1)]))
}

/// The last step of a linear model.
fn transformed(site: &mut Site<'_>, scores: &str, output: &str) -> Verdict {
    match &*text(site, "post_transform", "NONE") {
        "NONE" => site.add_as("Identity", &[scores], Vec::new(), output),
        "LOGISTIC" => site.add_as("Sigmoid", &[scores], Vec::new(), output),
        "SOFTMAX" => site.add_as("Softmax", &[scores], vec![AttributeProto::int("axis", 1)], output),
        other => return wrong(&format!("its post_transform is {other}")),
    }
    Verdict::Rewritten
}

fn regressor(site: &mut Site<'_>) -> Verdict {
    let (targets, y) = (usize::try_from(site.int("targets", 1)).unwrap_or(0), site.output(0));
    match products(site, targets) {
        Some(scores) => transformed(site, &scores, &y),
        None => wrong("the numbers of its coefficients, intercepts and targets do not fit"),
    }
}

fn classifier(site: &mut Site<'_>) -> Verdict {
    let Some(classes) = site.ints("classlabels_ints").filter(|classes| !classes.is_empty()) else {
        return wrong("its labels are texts");
    };
    if floats(site, "intercepts").len() != classes.len() || classes.len() < 2 {
        return wrong("it has one score for two classes");
    }
    let Some(scores) = products(site, classes.len()) else {
        return wrong("the numbers of its coefficients, intercepts and classes do not fit");
    };
    let label = site.output(0);
    if !label.is_empty() {
        // Of equal scores RTen takes the last and the standard the first.
        let backwards: Vec<i64> = (0..classes.len() as i64).rev().collect();
        let backwards = site.weight(&backwards);
        let reversed = site.add("Gather", &[&scores, &backwards], vec![AttributeProto::int("axis", 1)]);
        let axes = vec![AttributeProto::int("axis", 1), AttributeProto::int("keepdims", 0)];
        let best = site.add("ArgMax", &[&reversed], axes);
        let classes: Vec<i64> = classes.into_iter().rev().collect();
        let classes = site.weight(&classes);
        site.add_as("Gather", &[&classes, &best], Vec::new(), &label);
    }
    match site.output(1) {
        output if output.is_empty() => Verdict::Rewritten,
        output => transformed(site, &scores, &output),
    }
}

/// Some columns of a tensor.
fn extraction(site: &mut Site<'_>) -> Verdict {
    let (x, y, facts) = (site.input(0), site.output(0), site.facts(0));
    let rank = match (facts.rank, facts.element) {
        (_, Some(STRING)) => return wrong("its values are texts"),
        (Some(rank @ 1..), _) => rank as i64,
        _ => return wrong("the shape of its values is unknown"),
    };
    let flat = site.weight(&[-1]);
    let indices = site.input(1);
    let indices = site.add("Reshape", &[&indices, &flat], Vec::new());
    let indices = site.add("Cast", &[&indices], vec![AttributeProto::int("to", INT64.into())]);
    let axis = vec![AttributeProto::int("axis", rank - 1)];
    if rank > 1 {
        site.add_as("Gather", &[&x, &indices], axis, &y);
        return Verdict::Rewritten;
    }
    let values = site.add("Gather", &[&x, &indices], axis);
    let row = site.weight(&[1, -1]);
    site.add_as("Reshape", &[&values, &row], Vec::new(), &y);
    Verdict::Rewritten
}
