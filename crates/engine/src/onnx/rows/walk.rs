//! Walks a graph operator by operator. It computes the sizes of all values for several batch sizes,
//! and their dependence on the rows.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use prost::Message;

use super::cause::Cause;
use super::flow::{Flow, RUNS};
use super::operator::Op;
use super::{control, rules};
use crate::onnx::proto::{AttributeGraphs, FunctionProto, GraphProto, NodeProto, ValueInfoProto};
use crate::onnx::sizes::{Extent, Known, Sizes};

/// The deepest nesting of graphs and function calls that is followed.
const DEPTH_LIMIT: u32 = 16;
/// The most visits of operators are these, and [`VISITS_OF_EACH`] for each operator of the file:
/// bodies of loops are followed several times.
const FREE_VISITS: u64 = 100_000;
const VISITS_OF_EACH: u64 = 16;
const TOO_MANY: &str = "the model has too many operators inside of loops and functions to be followed";
/// The most elements of a value that are kept. Shapes and axes are shorter.
const KEPT: usize = 64;

/// A value: its dependence on the rows, with its sizes and small elements for each of the batch
/// sizes.
#[derive(Clone, Debug)]
pub(super) struct Value {
    pub flow: Flow,
    pub runs: Vec<Option<Extent>>,
}

impl Value {
    /// A value with unknown sizes.
    pub fn without_sizes(flow: Flow) -> Value {
        Value { flow, runs: vec![None; RUNS] }
    }

    /// The sizes in each run; `None` if one of them is unknown.
    pub fn sizes(&self) -> Option<Vec<&[u64]>> {
        self.runs.iter().map(|extent| extent.as_ref()?.dims.as_deref()).collect()
    }
}

/// A graph with its sizes and the graphs inside, read once and walked several times.
#[derive(Debug)]
pub(super) struct Prepared {
    pub graph: GraphProto,
    sizes: Sizes,
    /// The inner graphs, by the node's place in the graph and the attribute's name.
    bodies: BTreeMap<(usize, String), Prepared>,
    /// The number of operators, including the graphs inside.
    pub operators: u64,
}

impl Prepared {
    /// Reads a graph.
    ///
    /// # Errors
    /// In words, if it cannot be decoded or is nested too deep.
    pub fn new(graph: GraphProto, depth: u32) -> Result<Prepared, String> {
        if depth > DEPTH_LIMIT {
            return Err(format!("graphs are nested more than {DEPTH_LIMIT} deep"));
        }
        let sizes = Sizes::new(&graph)?;
        let (mut bodies, mut operators) = (BTreeMap::new(), graph.node.len() as u64);
        for (index, node) in graph.node.iter().enumerate() {
            for attribute in node.attribute.iter() {
                let bad = |e: prost::DecodeError| format!("operator '{}': {e}", node.name);
                let AttributeGraphs { graph: Some(body), .. } =
                    AttributeGraphs::decode(attribute.clone()).map_err(bad)?
                else {
                    continue;
                };
                let name = sizes.steps.get(index).and_then(|step| {
                    let at = node.attribute.iter().position(|a| std::ptr::eq(a, attribute))?;
                    step.attributes.get(at).map(|attribute| attribute.name.clone())
                });
                let body = Prepared::new(GraphProto::decode(body).map_err(bad)?, depth + 1)?;
                operators += body.operators;
                bodies.insert((index, name.unwrap_or_default()), body);
            }
        }
        Ok(Prepared { graph, sizes, bodies, operators })
    }

    /// The number of names of values.
    pub fn names(&self) -> usize {
        self.sizes.names.len()
    }

    /// Calls `visit` with this graph and the graphs inside.
    fn each(&self, visit: &mut impl FnMut(&Prepared)) {
        visit(self);
        self.bodies.values().for_each(|body| body.each(visit));
    }

    /// The weights and constants that are zero. Another value may be anything.
    fn zeros(&self) -> BTreeSet<&str> {
        let is_zero = |extent: &Extent| extent.data.as_deref().is_some_and(|data| data.iter().all(|n| *n == 0.0));
        let by_data = Cell::new(false);
        let constants = self.sizes.steps.iter().filter(|step| step.inputs.is_empty()).filter_map(|step| {
            let known = Known { step, values: &[], weights: &[], by_data: &by_data };
            let made = (step.rule)(&known)?.into_iter().next()?;
            Some(((*step.outputs.first()?)?, made)).filter(|(_, made)| is_zero(made))
        });
        let weights = self.sizes.weights.iter().enumerate();
        let weights = weights.filter(|(_, weight)| weight.as_ref().is_some_and(is_zero)).map(|(id, _)| id);
        let ids = constants.map(|(id, _)| id).chain(weights);
        ids.filter_map(|id| self.sizes.names.get(id).map(String::as_str)).collect()
    }

    /// The graph's inputs, weights excluded.
    pub fn inputs(&self) -> impl Iterator<Item = &ValueInfoProto> {
        let declared: BTreeMap<&str, &ValueInfoProto> =
            self.graph.input.iter().map(|input| (input.name.as_str(), input)).collect();
        let names = self.sizes.inputs.iter().filter_map(|(id, _)| self.sizes.names.get(*id));
        names.filter_map(move |name| declared.get(name.as_str()).copied())
    }

    pub fn body(&self, node: usize, name: &str) -> Option<&Prepared> {
        self.bodies.get(&(node, name.to_owned()))
    }
}

/// The state of a walk beside the graph.
pub(super) struct Walker<'a> {
    /// The versions of operators, by domain.
    pub opsets: &'a BTreeMap<String, i64>,
    pub functions: &'a BTreeMap<(String, String), FunctionProto>,
    /// The number of operators that may still be visited.
    visits: Cell<u64>,
    /// Whether sizes did not fit each other.
    pub misfit: Cell<bool>,
}

/// The values of a graph while it is walked, by id.
pub(super) struct Scope<'a> {
    pub prepared: &'a Prepared,
    outer: Option<&'a Scope<'a>>,
    ids: BTreeMap<&'a str, usize>,
    flows: Vec<Option<Flow>>,
    /// By run and id.
    runs: Vec<Vec<Option<Extent>>>,
}

impl Scope<'_> {
    /// The value of a name, in this graph or an enclosing one.
    pub fn value(&self, name: &str) -> Option<Value> {
        let here = self.ids.get(name).and_then(|id| {
            if self.prepared.sizes.weights.get(*id)?.is_some() {
                let extent = self.prepared.sizes.weights.get(*id)?;
                return Some(Value { flow: Flow::Free, runs: vec![extent.clone(); RUNS] });
            }
            let flow = self.flows.get(*id)?.clone()?;
            Some(Value { flow, runs: self.runs.iter().map(|run| run.get(*id).cloned().flatten()).collect() })
        });
        here.or_else(|| self.outer?.value(name))
    }

    fn put(&mut self, id: usize, value: Value) {
        for (run, extent) in self.runs.iter_mut().zip(value.runs) {
            if let Some(place) = run.get_mut(id) {
                let keep = |data: Vec<f64>| (data.len() <= KEPT).then_some(data);
                *place = extent.map(|extent| Extent { data: extent.data.and_then(keep), ..extent });
            }
        }
        if let Some(place) = self.flows.get_mut(id) {
            *place = Some(value.flow);
        }
    }
}

impl<'a> Walker<'a> {
    pub fn new(
        operators: u64,
        opsets: &'a BTreeMap<String, i64>,
        functions: &'a BTreeMap<(String, String), FunctionProto>,
    ) -> Walker<'a> {
        let visits = Cell::new(operators.saturating_mul(VISITS_OF_EACH).saturating_add(FREE_VISITS));
        Walker { opsets, functions, visits, misfit: Cell::new(false) }
    }

    /// Follows a graph from its inputs, in the file's order, to its outputs.
    pub fn graph(&self, prepared: &Prepared, inputs: Vec<Value>, outer: Option<&Scope<'_>>, depth: u32) -> Vec<Value> {
        let sizes = &prepared.sizes;
        if depth > 0 && !self.visit(1 + sizes.names.len() / 8) {
            let cause = Rc::new(Cause { operator: "model".into(), node: String::new(), reason: TOO_MANY.into() });
            let unknown = || Value::without_sizes(Flow::Unknown(cause.clone()));
            return prepared.graph.output.iter().map(|_| unknown()).collect();
        }
        let ids = sizes.names.iter().enumerate().map(|(id, name)| (name.as_str(), id)).collect();
        let flows = sizes.weights.iter().map(|weight| weight.as_ref().map(|_| Flow::Free)).collect();
        let runs = vec![vec![None; sizes.names.len()]; RUNS];
        let mut scope = Scope { prepared, outer, ids, flows, runs };
        for ((id, _), value) in sizes.inputs.iter().zip(inputs) {
            scope.put(*id, value);
        }
        for (index, node) in prepared.graph.node.iter().enumerate() {
            self.node(&mut scope, index, node, depth);
        }
        let output = |name: &String| {
            let reason = format!("no operator gives the output '{name}'");
            let cause = Cause { operator: "output".into(), node: name.clone(), reason };
            scope.value(name).unwrap_or_else(|| Value::without_sizes(Flow::Unknown(Rc::new(cause))))
        };
        prepared.graph.output.iter().map(|output_| output(&output_.name)).collect()
    }

    fn node(&self, scope: &mut Scope<'_>, index: usize, node: &NodeProto, depth: u32) {
        let prepared = scope.prepared;
        let Some(step) = prepared.sizes.steps.get(index) else { return };
        // Values of enclosing graphs are fetched at their first use.
        for id in step.inputs.iter().flatten() {
            let is_here = scope.flows.get(*id).is_some_and(Option::is_some);
            let name = prepared.sizes.names.get(*id);
            if let (false, Some(name)) = (is_here, name)
                && let Some(value) = scope.outer.and_then(|outer| outer.value(name))
            {
                scope.put(*id, value);
            }
        }
        let by_data = Cell::new(false);
        let known: Vec<Known<'_>> = (scope.runs.iter())
            .map(|values| Known { step, values, weights: &prepared.sizes.weights, by_data: &by_data })
            .collect();
        let unread = |id: usize| {
            let name = prepared.sizes.names.get(id).cloned().unwrap_or_default();
            let reason = format!("it reads '{name}', which no operator before it gives");
            Flow::Unknown(Rc::new(Cause { operator: node.op_type.clone(), node: node.name.clone(), reason }))
        };
        let flow_of =
            |id: &Option<usize>| id.map(|id| scope.flows.get(id).cloned().flatten().unwrap_or_else(|| unread(id)));
        let flows: Vec<Option<Flow>> = step.inputs.iter().map(flow_of).collect();
        let domain = if node.domain == "ai.onnx" { "" } else { node.domain.as_str() };
        let opset = self.opsets.get(domain).copied().unwrap_or(0);
        let op = |made| Op { node, step, opset, flows: &flows, known: &known, made, misfit: &self.misfit };
        let values = if !self.visit(1 + node.input.len() + node.output.len()) {
            let cause = op(&[]).cause(TOO_MANY);
            node.output.iter().map(|_| Value::without_sizes(Flow::Unknown(cause.clone()))).collect()
        } else if let Some(values) = control::values(self, scope, index, &op(&[]), depth) {
            values
        } else {
            let is_ruled = rules::has(domain, &node.op_type) && node.input.len() <= rules::MOST_INPUTS;
            let made: Vec<Vec<Extent>> =
                (known.iter()).map(|known| if is_ruled { rules::sizes(node, known) } else { Vec::new() }).collect();
            let flows = rules::flows(domain, &op(&made));
            let extents = |output: usize| made.iter().map(|made| made.get(output).cloned()).collect();
            flows.into_iter().enumerate().map(|(o, flow)| Value { flow, runs: extents(o) }).collect::<Vec<_>>()
        };
        for (id, value) in step.outputs.iter().zip(values) {
            if let Some(id) = *id {
                scope.put(id, value);
            }
        }
    }

    /// Counts a visit of an operator, or several where `cost` is above 1. Returns false if too many
    /// were made.
    fn visit(&self, cost: usize) -> bool {
        let left = self.visits.get().checked_sub(cost as u64);
        self.visits.set(left.unwrap_or(0));
        left.is_some()
    }

    /// The outputs of a call of one of the model's functions; `None` if the model has no such
    /// function.
    pub fn call(&self, op: &Op<'_>, inputs: Vec<Value>, depth: u32) -> Option<Vec<Value>> {
        let function = self.functions.get(&(op.node.domain.clone(), op.node.op_type.clone()))?;
        let failed = |reason: String| {
            let flow = op.unknown(reason);
            op.node.output.iter().map(|_| Value::without_sizes(flow.clone())).collect()
        };
        if depth > DEPTH_LIMIT {
            return Some(failed(format!("functions call each other more than {DEPTH_LIMIT} deep")));
        }
        Some(match control::inlined(function, op.node, self.opsets).and_then(|graph| Prepared::new(graph, depth)) {
            Ok(prepared) => self.graph(&prepared, inputs, None, depth + 1),
            Err(reason) => failed(reason),
        })
    }
}

/// The types of operators that draw random numbers, sorted, each once.
pub(super) fn random(prepared: &Prepared, functions: &BTreeMap<(String, String), FunctionProto>) -> Vec<String> {
    let mut found = BTreeSet::new();
    prepared.each(&mut |prepared| {
        let zeros = prepared.zeros();
        let is_set = |name: &str| !name.is_empty() && !zeros.contains(name);
        let drawing = prepared.graph.node.iter().filter(|node| rules::is_random(node, is_set));
        found.extend(drawing.map(|node| node.op_type.clone()));
    });
    let inside = functions.values().flat_map(|function| &function.node);
    found.extend(inside.filter(|node| rules::is_random(node, |_| true)).map(|node| node.op_type.clone()));
    found.into_iter().collect()
}
