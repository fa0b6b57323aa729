//! A model's operators, in an order in which they can run, and the values that are alive between
//! them.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use prost::Message;

use super::proto::{AttributeGraphs, GraphProto, NodeProto, WeightProto};

/// The deepest nesting of graphs in attributes that is followed; the file was checked for the same
/// bound.
const DEPTH_LIMIT: u32 = 16;

/// The operators of a graph. Value names are as in the file.
#[derive(Debug, Default)]
pub struct OperatorGraph {
    /// Inputs, weights excluded.
    pub inputs: Vec<String>,
    /// Outputs.
    pub outputs: Vec<String>,
    /// The operators, in an order in which they can run.
    pub operators: Vec<Operator>,
    /// The weights, by their names.
    pub weights: BTreeMap<String, Weight>,
}

/// An operator.
#[derive(Debug)]
pub struct Operator {
    /// The operator's name, or its kind and index if it has none.
    pub name: String,
    /// The values that it reads, weights included; also those that its inner graphs read.
    pub inputs: Vec<String>,
    /// The values that it writes.
    pub outputs: Vec<String>,
}

/// A weight.
#[derive(Debug)]
pub struct Weight {
    /// The weight's size in bytes.
    pub bytes: u64,
    /// The weight's place among the graph's weights.
    pub index: usize,
}

impl OperatorGraph {
    /// Reads a graph.
    ///
    /// # Errors
    /// In words, if its operators are not in an order in which they can run.
    pub fn new(graph: &GraphProto) -> Result<OperatorGraph, String> {
        let mut weights = BTreeMap::new();
        for (index, bytes) in graph.initializer.iter().enumerate() {
            let weight = WeightProto::decode(bytes.clone()).map_err(|e| format!("weight {index}: {e}"))?;
            let elements = weight.dims.iter().map(|d| u64::try_from(*d).unwrap_or(0)).product::<u64>();
            let size = super::datatype(i64::from(weight.data_type)).and_then(|d| d.size()).unwrap_or(4) as u64;
            weights.insert(weight.name, Weight { bytes: elements.saturating_mul(size), index });
        }
        let names = |infos: &[super::proto::ValueInfoProto]| infos.iter().map(|i| i.name.clone()).collect::<Vec<_>>();
        let mut inputs = names(&graph.input);
        inputs.retain(|name| !weights.contains_key(name));
        let operators = graph.node.iter().enumerate().map(|(index, node)| operator(index, node));
        let operators = operators.collect::<Result<Vec<_>, _>>()?;
        let mut known: BTreeSet<&str> = inputs.iter().chain(weights.keys()).map(String::as_str).collect();
        for operator in &operators {
            if let Some(missing) = operator.inputs.iter().find(|i| !known.contains(i.as_str())) {
                return Err(format!(
                    "operator '{}' reads '{missing}', which no operator before it gives",
                    operator.name
                ));
            }
            known.extend(operator.outputs.iter().map(String::as_str));
        }
        let outputs = names(&graph.output);
        Ok(OperatorGraph { inputs, outputs, operators, weights })
    }

    /// Reads a graph and reorders its operators, in the file too, so that each output is made as
    /// early as possible. First come the operators of the output that needs the fewest, and so on.
    /// Exporters and optimisers may put an early exit of a model anywhere behind the values that it
    /// needs, even at the end.
    ///
    /// # Errors
    /// As [`OperatorGraph::new`].
    pub fn exits_first(proto: &mut GraphProto) -> Result<OperatorGraph, String> {
        let graph = OperatorGraph::new(proto)?;
        let mut sets: Vec<BTreeSet<usize>> = graph.outputs.iter().map(|output| graph.ancestors(output)).collect();
        sets.sort_by_key(BTreeSet::len);
        let mut done = BTreeSet::new();
        let mut order: Vec<usize> = Vec::with_capacity(proto.node.len());
        for set in sets.into_iter().chain([(0..proto.node.len()).collect()]) {
            order.extend(set.into_iter().filter(|index| done.insert(*index)));
        }
        proto.node = order.iter().filter_map(|index| proto.node.get(*index).cloned()).collect();
        OperatorGraph::new(proto)
    }

    /// The operators on which a value depends.
    fn ancestors(&self, value: &str) -> BTreeSet<usize> {
        let mut needed = BTreeSet::from([value]);
        let mut ancestors = BTreeSet::new();
        for (index, operator) in self.operators.iter().enumerate().rev() {
            if operator.outputs.iter().any(|o| needed.contains(o.as_str())) {
                ancestors.insert(index);
                needed.extend(operator.inputs.iter().map(String::as_str));
            }
        }
        ancestors
    }

    /// The last operator that reads each value; for an output of the model an index behind the last
    /// operator.
    pub fn last_uses(&self) -> BTreeMap<&str, usize> {
        let mut last = BTreeMap::new();
        for (index, operator) in self.operators.iter().enumerate() {
            last.extend(operator.inputs.iter().map(|input| (input.as_str(), index)));
        }
        last.extend(self.outputs.iter().map(|output| (output.as_str(), self.operators.len())));
        last
    }

    /// The values that are alive at each boundary, from before the first operator to behind the
    /// last. Such a value exists by then, and is read later or is an output of the model. The
    /// model's inputs come first, then the others in the order of their making.
    pub fn live(&self) -> Vec<Vec<&str>> {
        let last = self.last_uses();
        let made =
            self.operators.iter().enumerate().flat_map(|(i, o)| o.outputs.iter().map(move |v| (i + 1, v.as_str())));
        let values = self.inputs.iter().map(|v| (0, v.as_str())).chain(made);
        let mut live = vec![Vec::new(); self.operators.len() + 1];
        for (made, value) in values {
            let until = last.get(value).map_or(0, |at| at + 1);
            for boundary in live.iter_mut().take(until).skip(made) {
                boundary.push(value);
            }
        }
        live
    }

    /// Whether each path from `value` to the outputs of operator `at` passes through another input
    /// of `at`. Then all other readers of `value` in `range` are done when `at` runs.
    pub fn read_before(&self, value: &str, at: usize, range: std::ops::Range<usize>) -> bool {
        let Some(reader) = self.operators.get(at) else { return false };
        let mut needed: BTreeSet<&str> = reader.inputs.iter().map(String::as_str).collect();
        let mut ancestors = BTreeSet::new();
        for index in range.clone().take_while(|i| *i < at).collect::<Vec<_>>().into_iter().rev() {
            let Some(operator) = self.operators.get(index) else { return false };
            if operator.outputs.iter().any(|o| needed.contains(o.as_str())) {
                ancestors.insert(index);
                needed.extend(operator.inputs.iter().map(String::as_str));
            }
        }
        let reads = |index: usize| self.operators.get(index).is_some_and(|o| o.inputs.iter().any(|i| i == value));
        range.filter(|i| *i != at && reads(*i)).all(|i| ancestors.contains(&i))
    }
}

fn operator(index: usize, node: &NodeProto) -> Result<Operator, String> {
    let name = if node.name.is_empty() { format!("{}_{index}", node.op_type) } else { node.name.clone() };
    let mut inputs: Vec<String> = Vec::new();
    let mut add = |name: &String| {
        if !name.is_empty() && !inputs.contains(name) {
            inputs.push(name.clone());
        }
    };
    node.input.iter().for_each(&mut add);
    for captured in captures(node, 0)? {
        add(&captured);
    }
    let outputs = node.output.iter().filter(|o| !o.is_empty()).cloned().collect();
    Ok(Operator { name, inputs, outputs })
}

/// The values that the graphs inside an operator (`If`, `Loop`, `Scan`) read from outside.
fn captures(node: &NodeProto, depth: u32) -> Result<BTreeSet<String>, String> {
    let mut outside = BTreeSet::new();
    if depth > DEPTH_LIMIT {
        return Err(format!("graphs are nested more than {DEPTH_LIMIT} deep"));
    }
    let bad = |e: prost::DecodeError| format!("operator '{}': {e}", node.name);
    for attribute in &node.attribute {
        let AttributeGraphs { graph, graphs } = AttributeGraphs::decode(attribute.clone()).map_err(bad)?;
        for bytes in graph.into_iter().chain(graphs) {
            let graph = GraphProto::decode(bytes).map_err(bad)?;
            let weight = |bytes: &Bytes| WeightProto::decode(bytes.clone()).map(|w| w.name);
            let mut inside = graph.initializer.iter().map(weight).collect::<Result<BTreeSet<_>, _>>().map_err(bad)?;
            inside.extend(graph.input.iter().map(|i| i.name.clone()));
            for node in &graph.node {
                let read = node.input.iter().cloned().chain(captures(node, depth + 1)?);
                outside.extend(read.filter(|name| !name.is_empty() && !inside.contains(name)));
                inside.extend(node.output.iter().cloned());
            }
            outside.extend(graph.output.iter().map(|o| o.name.clone()).filter(|o| !inside.contains(o)));
        }
    }
    Ok(outside)
}
