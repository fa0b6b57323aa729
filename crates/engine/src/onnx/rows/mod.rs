//! Decides from a model's graph whether the rows of its batch depend on each other.
//!
//! Example: `Relu` gives row 3 of its output from row 3 of its input, so the server may join the
//! requests of strangers. `Softmax(axis=0)` normalises across rows, so an answer would depend on
//! the strangers.
//!
//! The pass follows the rows from the first axis of every input to the outputs. It computes the
//! sizes of all values for several batch sizes side by side (`../sizes.rs`). A table has each
//! operator's effect on the rows (`rules.rs`). An operator that mixes rows counts only if an output
//! is made of its values.

mod cause;
mod control;
mod flow;
mod inputs;
mod names;
mod operator;
mod rules;
mod rules_along;
mod rules_by_row;
mod rules_index;
mod rules_moved;
mod rules_products;
mod walk;

use std::collections::BTreeMap;
use std::path::Path;

use bytes::Bytes;
use prost::Message;

use super::proto::{FunctionProto, ModelProto, OperatorSetProto};
use crate::traits::LoadError;
pub use cause::Cause;
use flow::{Flow, Place};
use inputs::{Declaration, Dim};
use walk::{Prepared, Value, Walker};

/// Whether the rows of a model's batch depend on each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Each row of every output depends on the same row of the inputs only. The graph proves it.
    Independent,
    /// An operator mixes rows, or the outputs cannot be cut into rows.
    Mixed(Cause),
    /// The graph does not decide: no rule covers an operator, or its effect depends on values.
    Unknown(Cause),
}

/// The report on the rows of a model's graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowReport {
    /// Whether the rows depend on each other.
    pub rows: Rows,
    /// Types of the operators that draw random numbers, sorted, without repeats. Their answers
    /// differ from run to run.
    pub random: Vec<String>,
}

/// Reads the model at `path` and follows its batch axis from the inputs to the outputs. External
/// weights may be absent.
///
/// # Errors
/// If the file cannot be read or is not an ONNX model.
pub fn row_report(path: &Path) -> Result<RowReport, LoadError> {
    super::walk(path)?;
    report_of(super::read_whole(path)?).map_err(|e| super::not_a_model(path, e))
}

/// The report of a model's bytes.
fn report_of(bytes: Bytes) -> Result<RowReport, String> {
    let bad = |e: prost::DecodeError| e.to_string();
    let model = ModelProto::decode(bytes).map_err(bad)?;
    let mut opsets = BTreeMap::new();
    for bytes in &model.opset_import {
        let OperatorSetProto { domain, version } = OperatorSetProto::decode(bytes.clone()).map_err(bad)?;
        opsets.insert(if domain == "ai.onnx" { String::new() } else { domain }, version);
    }
    let mut functions = BTreeMap::new();
    for bytes in &model.functions {
        let function = FunctionProto::decode(bytes.clone()).map_err(bad)?;
        functions.insert((function.domain.clone(), function.name.clone()), function);
    }
    let graph = model.graph.ok_or("it has no graph")?;
    let prepared = Prepared::new(graph, 0)?;
    let rows = verdict(&prepared, &opsets, &functions);
    Ok(RowReport { rows, random: walk::random(&prepared, &functions) })
}

/// The most operators and names of values in a model that is followed: above all known models, and
/// bounded in memory.
const MOST_OPERATORS: u64 = 200_000;
const MOST_NAMES: usize = 1_000_000;

fn verdict(
    prepared: &Prepared,
    opsets: &BTreeMap<String, i64>,
    functions: &BTreeMap<(String, String), FunctionProto>,
) -> Rows {
    let inputs: Vec<Declaration> = prepared.inputs().map(Declaration::of).collect();
    let outputs: Vec<Declaration> = prepared.graph.output.iter().map(Declaration::of).collect();
    if let Some(rows) = without_batch(&inputs) {
        return rows;
    }
    if prepared.operators > MOST_OPERATORS || prepared.names() > MOST_NAMES {
        let reason = format!("it has more than {MOST_OPERATORS} operators or {MOST_NAMES} values");
        return Rows::Unknown(cause("model", "", reason));
    }
    let mut fitting = Vec::new();
    let mut misfit = None;
    for draw in 0..inputs::draws(&inputs) {
        let walker = Walker::new(prepared.operators, opsets, functions);
        let values = walker.graph(prepared, inputs::values(&inputs, draw), None, 0);
        let rows = of_outputs(prepared, &values);
        if walker.misfit.get() {
            misfit.get_or_insert(rows);
        } else {
            fitting.push(rows);
        }
    }
    let worst = |kind: fn(&Rows) -> bool| fitting.iter().find(|rows| kind(rows));
    let worst = worst(|rows| matches!(rows, Rows::Mixed(_))).or_else(|| worst(|rows| matches!(rows, Rows::Unknown(_))));
    let rows = match (worst, fitting.is_empty(), misfit) {
        (Some(rows), _, _) => rows.clone(),
        (None, false, _) => Rows::Independent,
        // A result for sizes that the model does not take proves nothing.
        (None, true, Some(Rows::Mixed(cause) | Rows::Unknown(cause))) => Rows::Unknown(cause),
        (None, true, _) => {
            Rows::Unknown(cause("model", "", "it takes none of the sizes that were tried for its inputs"))
        }
    };
    names::weighed(rows, &inputs, &outputs)
}

fn cause(operator: &str, node: &str, reason: impl Into<String>) -> Cause {
    Cause { operator: operator.into(), node: node.into(), reason: reason.into() }
}

/// The verdict on a model whose inputs cannot be joined.
fn without_batch(inputs: &[Declaration]) -> Option<Rows> {
    if inputs.is_empty() {
        return Some(Rows::Mixed(cause("model", "", "it has no inputs")));
    }
    inputs.iter().find_map(|input| match input.first() {
        None if input.dims.is_none() => {
            Some(Rows::Unknown(cause("input", &input.name, "the file does not say its sizes")))
        }
        None => Some(Rows::Mixed(cause("input", &input.name, "it is a scalar, along which nothing can be joined"))),
        Some(Dim::Fixed(size)) => {
            Some(Rows::Mixed(cause("input", &input.name, format!("its first dimension is always {size}"))))
        }
        Some(Dim::Open(_)) => None,
    })
}

/// The verdict on the outputs: each must have one row for each row of the inputs, on its first
/// axis.
fn of_outputs(prepared: &Prepared, values: &[Value]) -> Rows {
    let mut unknown = None;
    for (info, value) in prepared.graph.output.iter().zip(values) {
        let maker = prepared.graph.node.iter().rev().find(|node| node.output.contains(&info.name));
        let operator = maker.map_or("output", |node| node.op_type.as_str());
        let mixed = |reason: String| Rows::Mixed(cause(operator, &info.name, reason));
        let name = &info.name;
        match &value.flow {
            Flow::Rows(place) if *place == Place::plain(0) => {}
            Flow::Rows(Place { axis: 0, before, after }) => {
                let count = before.saturating_mul(*after);
                return mixed(format!("it gives {count} rows of the output '{name}' for each row of the inputs"));
            }
            Flow::Rows(place) => {
                return mixed(format!(
                    "it has the rows of the output '{name}' along axis {}, not along axis 0",
                    place.axis
                ));
            }
            Flow::Free => return mixed(format!("the output '{name}' is the same whatever the inputs are")),
            Flow::Sized { .. } => {
                return mixed(format!("the output '{name}' depends on the number of requests that are joined"));
            }
            Flow::Mixed(cause) => return Rows::Mixed((**cause).clone()),
            Flow::Row => unknown = Some(cause(operator, name, "it gives one row only")),
            Flow::Unknown(cause) => {
                unknown.get_or_insert((**cause).clone());
            }
        }
    }
    unknown.map_or(Rows::Independent, Rows::Unknown)
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(super) use tests::sizes_of;
