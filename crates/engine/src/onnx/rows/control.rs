//! Operators with graphs inside, and functions of the model: the pass follows their graphs like the
//! model's.

use std::collections::BTreeMap;

use prost::Message;

use super::flow::{BATCHES, Flow, Place, RUNS};
use super::operator::Op;
use super::walk::{Prepared, Scope, Value, Walker};
use crate::onnx::proto::{
    AttributeGraphs, AttributeProto, FunctionProto, GraphProto, NodeProto, OperatorSetProto, ValueInfoProto,
};
use crate::onnx::sizes::{Dims, Extent, axis};

/// The most rounds in which the body of a loop is followed until its carried values no longer
/// change.
const ROUNDS: usize = 4;

/// The outputs of an operator with graphs inside, or of a function; `None` for other operators.
pub(super) fn values(
    walker: &Walker<'_>,
    scope: &Scope<'_>,
    index: usize,
    op: &Op<'_>,
    depth: u32,
) -> Option<Vec<Value>> {
    let inner = Inner { walker, scope, index, op, depth };
    let found = match (op.node.domain.as_str(), op.node.op_type.as_str()) {
        ("" | "ai.onnx", "If") => inner.choice(),
        ("" | "ai.onnx", "Loop") => inner.repetition(),
        ("" | "ai.onnx", "Scan") => inner.scan(),
        _ => return walker.call(op, inner.inputs(0), depth),
    };
    let failed = |flow: Flow| op.node.output.iter().map(|_| Value::without_sizes(flow.clone())).collect();
    Some(found.unwrap_or_else(failed))
}

struct Inner<'a> {
    walker: &'a Walker<'a>,
    scope: &'a Scope<'a>,
    /// The operator's place in its graph.
    index: usize,
    op: &'a Op<'a>,
    depth: u32,
}

impl Inner<'_> {
    fn body(&self, name: &str) -> Result<&Prepared, Flow> {
        let body = self.scope.prepared.body(self.index, name);
        body.ok_or_else(|| self.op.unknown(format!("it has no graph '{name}'")))
    }

    /// The values of the operator's inputs from number `from` on.
    fn inputs(&self, from: usize) -> Vec<Value> {
        let value = |name: &String| {
            let unknown = || Value::without_sizes(self.op.unknown(format!("nothing gives its input '{name}'")));
            // An input that is left out.
            let absent = || Value::without_sizes(Flow::Free);
            if name.is_empty() { absent() } else { self.scope.value(name).unwrap_or_else(unknown) }
        };
        self.op.node.input.iter().skip(from).map(value).collect()
    }

    /// An error if the requests decide an input that chooses a graph or counts turns.
    fn decided_by(&self, input: usize, does: &str) -> Result<(), Flow> {
        match self.op.flow(input) {
            Flow::Free | Flow::Row => Ok(()),
            Flow::Sized { .. } => Err(self.op.unknown(format!("it {does} by the number of requests that are joined"))),
            Flow::Rows(_) => Err(self.op.mixed(format!("it {does} by a value of all requests together"))),
            flow => Err(flow.clone()),
        }
    }

    /// `If`: the values of the branch if sizes alone choose it; else the facts that hold in both
    /// branches.
    fn choice(&self) -> Result<Vec<Value>, Flow> {
        self.decided_by(0, "chooses a branch")?;
        let follow = |name: &str| {
            let body = self.body(name)?;
            Ok(self.walker.graph(body, Vec::new(), Some(self.scope), self.depth + 1))
        };
        let each = self.op.known.iter().map(|known| known.get(0)?.data.as_ref()?.first().copied());
        let mut each = each.collect::<Vec<_>>();
        each.dedup();
        if let [Some(taken)] = each.as_slice() {
            return follow(if *taken != 0.0 { "then_branch" } else { "else_branch" });
        }
        let by_row = *self.op.flow(0) == Flow::Row;
        let (one, other) = (follow("then_branch")?, follow("else_branch")?);
        let common = |(one, other)| match self.common(one, other) {
            Value { flow: Flow::Free, runs } if by_row => Value { flow: Flow::Row, runs },
            value => value,
        };
        Ok(one.into_iter().zip(other).map(common).collect())
    }

    /// The facts that hold of both values.
    fn common(&self, one: Value, other: Value) -> Value {
        let flow = match (&one.flow, &other.flow) {
            (a, b) if a == b => a.clone(),
            (Flow::Row, Flow::Free) | (Flow::Free, Flow::Row) => Flow::Row,
            (Flow::Mixed(cause), Flow::Mixed(_)) => Flow::Mixed(cause.clone()),
            (Flow::Unknown(cause), _) | (_, Flow::Unknown(cause)) => Flow::Unknown(cause.clone()),
            (Flow::Mixed(cause), _) | (_, Flow::Mixed(cause)) => Flow::Unknown(cause.clone()),
            _ => self.op.unknown("its graphs give values that depend on the rows in different ways"),
        };
        let both = one.runs.into_iter().zip(other.runs).map(|(one, other)| {
            let (one, other) = (one?, other?);
            let data = one.data.filter(|data| other.data.as_ref() == Some(data));
            (one.dims == other.dims).then_some(Extent { element: one.element, dims: one.dims, data })
        });
        Value { flow, runs: both.collect() }
    }

    /// `Loop`: the rows must not decide the number of turns.
    fn repetition(&self) -> Result<Vec<Value>, Flow> {
        for input in [0, 1] {
            self.decided_by(input, "repeats its graph")?;
        }
        let body = self.body("body")?;
        let count = Value { flow: Flow::Free, runs: vec![Some(Extent::new(crate::onnx::sizes::INT64, [])); RUNS] };
        let goes_on = Value { flow: Flow::Free, runs: vec![Some(Extent::new(crate::onnx::sizes::BOOL, [])); RUNS] };
        let follow = |carried: &[Value]| {
            let inputs = [count.clone(), goes_on.clone()].into_iter().chain(carried.iter().cloned());
            let mut outputs = self.walker.graph(body, inputs.collect(), Some(self.scope), self.depth + 1).into_iter();
            let condition = outputs.next().map_or(Flow::Free, |value| value.flow);
            (condition, outputs.collect::<Vec<_>>())
        };
        let (condition, outputs, carried) = self.settle(self.inputs(2), follow)?;
        match condition {
            Flow::Free => {}
            Flow::Rows(_) => return Err(self.op.mixed("it repeats its graph by a value of all requests together")),
            Flow::Sized { .. } | Flow::Row => return Err(self.op.unknown("it repeats its graph by the requests")),
            flow => return Err(flow),
        }
        let stacked = outputs.into_iter().skip(carried.len()).map(|value| match value.flow {
            Flow::Rows(place) => Value::without_sizes(Flow::Rows(place.on(place.axis + 1))),
            flow => Value::without_sizes(flow),
        });
        Ok(carried.iter().cloned().chain(stacked).collect())
    }

    /// Follows a body until its carried values no longer change from one turn to the next. Returns
    /// the first result of `follow`, all outputs, and the carried values.
    fn settle<T>(
        &self,
        mut carried: Vec<Value>,
        follow: impl Fn(&[Value]) -> (T, Vec<Value>),
    ) -> Result<(T, Vec<Value>, Vec<Value>), Flow> {
        for _ in 0..ROUNDS {
            let (first, outputs) = follow(&carried);
            let mut is_settled = true;
            for (value, next) in carried.iter_mut().zip(&outputs) {
                let flow = match &next.flow {
                    flow if *flow == value.flow => flow.clone(),
                    Flow::Mixed(_) | Flow::Unknown(_) => next.flow.clone(),
                    _ if matches!(value.flow, Flow::Mixed(_) | Flow::Unknown(_)) => value.flow.clone(),
                    Flow::Row if value.flow == Flow::Free => Flow::Row,
                    Flow::Free if value.flow == Flow::Row => Flow::Row,
                    _ => self.op.unknown("what it carries depends on the rows in another way after a turn"),
                };
                let joined = Value { flow, ..self.common(value.clone(), next.clone()) };
                let same = |(a, b): (&Option<Extent>, &Option<Extent>)| match (a, b) {
                    (Some(a), Some(b)) => a.dims == b.dims && a.data == b.data,
                    (a, b) => a.is_none() && b.is_none(),
                };
                is_settled &= joined.flow == value.flow && joined.runs.iter().zip(&value.runs).all(same);
                *value = joined;
            }
            if is_settled {
                return Ok((first, outputs, carried));
            }
        }
        Err(self.op.unknown("what it carries changes with every turn"))
    }

    /// `Scan`: along an axis without rows, or over the rows, one after the other.
    fn scan(&self) -> Result<Vec<Value>, Flow> {
        if self.op.opset < 9 {
            return Err(self.op.unknown("there is no rule for it before version 9"));
        }
        let body = self.body("body")?;
        let scanned = usize::try_from(self.op.int("num_scan_inputs", 0)).unwrap_or(0);
        let mut states = self.inputs(0);
        let elements = states.split_off(states.len().saturating_sub(scanned));
        let parts =
            elements.into_iter().enumerate().map(|(at, value)| self.part(value, self.listed("scan_input_axes", at)));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let over = parts.iter().find_map(|part| part.over);
        if parts.iter().any(|part| part.over != over) {
            return Err(self.op.unknown("it scans rows beside what has no rows"));
        }
        let lengths = parts.first().map(|part| part.lengths.clone()).unwrap_or_default();
        let elements: Vec<Value> = parts.into_iter().map(|part| part.element).collect();
        let follow = |carried: &[Value]| {
            let inputs = carried.iter().chain(&elements).cloned().collect();
            ((), self.walker.graph(body, inputs, Some(self.scope), self.depth + 1))
        };
        let ((), outputs, carried) = self.settle(states, follow)?;
        if over.is_some() && carried.iter().any(|value| value.flow == Flow::Row) {
            return Err(self.op.mixed("it carries values from one row to the next"));
        }
        // A state that changes may count the rows, even if it holds none of their values.
        let is_kept = |at: usize| {
            let (input, output) = (body.graph.input.get(at), body.graph.output.get(at));
            input.zip(output).is_some_and(|(input, output)| renamed(body, &output.name) == input.name)
        };
        if over.is_some() && !(0..carried.len()).all(is_kept) {
            return Err(self.op.unknown("it carries a value from one row to the next, which may count them"));
        }
        let is_turned = |name: &str| {
            let attribute = self.op.step.attributes.iter().find(|a| a.name == name);
            attribute.is_some_and(|a| a.ints.iter().any(|n| *n != 0))
        };
        if over.is_some() && (is_turned("scan_input_directions") || is_turned("scan_output_directions")) {
            return Err(self.op.unknown("it scans the rows from the last to the first"));
        }
        let stacked = outputs.into_iter().skip(carried.len()).enumerate();
        let stacked =
            stacked.map(|(at, value)| self.stacked(value, self.listed("scan_output_axes", at), over, &lengths));
        Ok(carried.iter().cloned().chain(stacked).collect())
    }

    /// An element of a list of axes; 0 if it is left out.
    fn listed(&self, attribute: &str, at: usize) -> i64 {
        let attribute = self.op.step.attributes.iter().find(|a| a.name == attribute);
        attribute.and_then(|a| a.ints.get(at)).copied().unwrap_or(0)
    }

    /// The body's part of a value that is scanned.
    fn part(&self, value: Value, along: i64) -> Result<Part, Flow> {
        let sizes = value.sizes().ok_or_else(|| self.op.without_sizes())?;
        let along = axis(along as f64, sizes.first().map_or(0, |dims| dims.len()));
        let along = along.ok_or_else(|| self.op.unknown("it scans along an axis that is not there"))?;
        let lengths: Vec<u64> = sizes.iter().map(|dims| dims.get(along).copied().unwrap_or(0)).collect();
        let (flow, over) = match value.flow {
            Flow::Rows(place) if place.axis == along => (Flow::Row, Some(place.on(0))),
            Flow::Rows(place) => (Flow::Rows(place.on(place.axis - usize::from(place.axis > along))), None),
            flow => (flow, None),
        };
        let runs = value.runs.into_iter().map(|extent| {
            let mut extent = extent?;
            let dims = extent.dims.as_mut()?;
            if along < dims.len() {
                dims.remove(along);
            }
            Some(Extent { data: None, ..extent })
        });
        Ok(Part { element: Value { flow, runs: runs.collect() }, lengths, over })
    }

    /// All elements of an output, stacked. `over`: the rows were scanned.
    fn stacked(&self, value: Value, along: i64, over: Option<Place>, lengths: &[u64]) -> Value {
        let rank = value.runs.iter().flatten().find_map(|extent| Some(extent.dims.as_ref()?.len()));
        let along = match (usize::try_from(along), rank) {
            (Ok(along), _) => along,
            (_, Some(rank)) => axis(along as f64, rank + 1).unwrap_or(0),
            (Err(_), None) => return Value::without_sizes(self.op.without_sizes()),
        };
        let flow = match (value.flow, over) {
            (Flow::Row | Flow::Free, Some(rows)) => Flow::Rows(rows.on(along)),
            (Flow::Rows(_), Some(_)) => self.op.mixed("it gives all rows for each row"),
            (Flow::Rows(place), None) => Flow::Rows(place.on(place.axis + usize::from(along <= place.axis))),
            (flow, _) => flow,
        };
        let runs = value.runs.into_iter().zip(lengths).map(|(extent, length)| {
            let extent = extent?;
            let mut dims: Dims = extent.dims?;
            if along > dims.len() {
                return None;
            }
            dims.insert(along, *length);
            Some(Extent::new(extent.element, dims))
        });
        let mut runs: Vec<_> = runs.collect();
        runs.resize(BATCHES.len(), None);
        Value { flow, runs }
    }
}

/// The body's part of a value that is scanned.
struct Part {
    element: Value,
    /// The number of elements, by run.
    lengths: Vec<u64>,
    /// The rows on axis 0, if each element belongs to one row.
    over: Option<Place>,
}

/// A function's graph with the attributes and inputs of a call.
///
/// # Errors
/// In words, if the graph cannot be decoded, or has other versions of operators than the model.
/// Also if it has graphs inside: their attributes are not replaced.
pub(super) fn inlined(
    function: &FunctionProto,
    call: &NodeProto,
    opsets: &BTreeMap<String, i64>,
) -> Result<GraphProto, String> {
    let is_other = |set: &OperatorSetProto| {
        let domain = if set.domain == "ai.onnx" { "" } else { set.domain.as_str() };
        opsets.get(domain).is_some_and(|version| *version != set.version)
    };
    if function.opset_import.iter().any(is_other) {
        return Err(format!("the function '{}' means other versions of operators than the model", function.name));
    }
    let bad = |e: prost::DecodeError| format!("function '{}': {e}", function.name);
    let name_of = |bytes: &bytes::Bytes| AttributeProto::decode(bytes.clone()).map(|attribute| attribute.name);
    let absent: Vec<&String> = (function.input.iter().enumerate())
        .filter(|(at, _)| call.input.get(*at).is_none_or(String::is_empty))
        .map(|(_, name)| name)
        .collect();
    let mut nodes = Vec::with_capacity(function.node.len());
    for node in &function.node {
        let mut attributes = Vec::with_capacity(node.attribute.len());
        for bytes in &node.attribute {
            let attribute = AttributeProto::decode(bytes.clone()).map_err(bad)?;
            if AttributeGraphs::decode(bytes.clone()).map_err(bad)? != AttributeGraphs::default() {
                return Err(format!("the function '{}' has graphs inside of its operators", function.name));
            }
            if attribute.ref_attr_name.is_empty() {
                attributes.push(bytes.clone());
                continue;
            }
            for given in call.attribute.iter().chain(&function.attribute_proto) {
                if name_of(given).map_err(bad)? == attribute.ref_attr_name {
                    // The last name in a message counts.
                    let renamed = AttributeProto { name: attribute.name.clone(), ..AttributeProto::default() };
                    attributes.push([given.to_vec(), renamed.encode_to_vec()].concat().into());
                    break;
                }
            }
        }
        let input = node.input.iter().map(|name| if absent.contains(&name) { String::new() } else { name.clone() });
        nodes.push(NodeProto { attribute: attributes, input: input.collect(), ..node.clone() });
    }
    let infos = |names: &[String]| {
        names.iter().map(|name| ValueInfoProto { name: name.clone(), r#type: None }).collect::<Vec<_>>()
    };
    let (input, output) = (infos(&function.input), infos(&function.output));
    Ok(GraphProto { node: nodes, input, output, ..GraphProto::default() })
}

/// Follows `Identity` operators of a body back to the value that they rename.
fn renamed<'a>(body: &'a Prepared, name: &'a str) -> &'a str {
    let mut name = name;
    for node in body.graph.node.iter().rev() {
        if let (true, [input], [output]) = (node.op_type == "Identity", &node.input[..], &node.output[..])
            && output == name
        {
            name = input;
        }
    }
    name
}
