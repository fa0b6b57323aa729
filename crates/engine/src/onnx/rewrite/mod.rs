//! Rewrites a model for an engine that computes some operators wrong or lacks them: to operators that the engine
//! computes right.
//!
//! ```text
//! y = Sign(x)    becomes    y = Where(x == x - x, x, Sign(x))
//! ```
//!
//! An engine brings a table of rules ([`RuleOf`]), one for each operator that it sometimes computes
//! wrong. A rule gets an operator with the facts about its inputs, and answers with a [`Verdict`].
//! Outputs of a rewritten operator keep their names, so that a model is cut at the same values as
//! its file.

mod facts;
mod site;

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::Message;

use super::proto::{AttributeProto, GraphAttribute, GraphProto, ModelProto, ModelValues, NodeProto, OperatorSetProto};
use super::standard_domain;
pub(crate) use facts::{Facts, FactsOf};
use site::Names;
pub(crate) use site::Site;

/// Deepest nesting of graphs in attributes that is followed; the file was checked for the same
/// bound.
const DEPTH_LIMIT: u32 = 16;

/// The operators of classical machine learning. None has the name of a standard operator.
const ML: &str = "ai.onnx.ml";

/// The outcome of a rule for an operator.
#[derive(Debug, PartialEq)]
pub(crate) enum Verdict {
    /// The engine computes it right.
    Right,
    /// The operators that the rule added take its place.
    Rewritten,
    /// The engine computes it wrong, and no other operators give the right numbers. The text
    /// describes the fault.
    Wrong(String),
}

/// A rule: it judges one operator.
pub(crate) type Rule = fn(&mut Site<'_>) -> Verdict;

/// A function that returns the rule for a standard operator, if there is one.
pub(crate) type RuleOf = fn(&str) -> Option<Rule>;

/// The number of rewritten operators, by kind.
pub(crate) type Rewritten = BTreeMap<String, usize>;

/// Rewrites `model` by the rules of an engine. `values` is the same file's description of its
/// values.
///
/// # Errors
/// In words: the first operator that stays wrong, or the part of the file that cannot be read.
pub(crate) fn rewrite(model: &mut ModelProto, values: &ModelValues, rule_of: RuleOf) -> Result<Rewritten, String> {
    let sets = model.opset_import.iter().map(|bytes| OperatorSetProto::decode(bytes.clone()));
    let sets = sets.collect::<Result<Vec<_>, _>>().map_err(|e| format!("its operator sets cannot be read: {e}"))?;
    let opset = sets.iter().find(|set| standard_domain(&set.domain)).map_or(0, |set| set.version);
    let mut rewriter = Rewriter { rule_of, opset, names: Names::default(), done: Rewritten::new() };
    if let Some(graph) = &mut model.graph {
        rewriter.names.avoid(graph);
        let facts = FactsOf::graph(graph, values.graph.as_ref())?;
        rewriter.graph(graph, &facts, 0)?;
    }
    Ok(rewriter.done)
}

/// A line for people with the operators that an engine runs as others; `None`: there are none.
pub(crate) fn summary(engine: &str, rewritten: &Rewritten) -> Option<String> {
    let kinds: Vec<String> = rewritten.iter().map(|(operator, count)| format!("{count} {operator}")).collect();
    let named = kinds.join(", ");
    (!kinds.is_empty())
        .then(|| format!("some operators are replaced, as {engine} lacks them or computes them wrong: {named}"))
}

struct Rewriter {
    rule_of: RuleOf,
    opset: i64,
    names: Names,
    done: Rewritten,
}

impl Rewriter {
    fn graph(&mut self, graph: &mut GraphProto, facts: &FactsOf, depth: u32) -> Result<(), String> {
        if depth > DEPTH_LIMIT {
            return Err(format!("graphs are nested more than {DEPTH_LIMIT} deep"));
        }
        let mut nodes = Vec::with_capacity(graph.node.len());
        for mut node in std::mem::take(&mut graph.node) {
            self.graphs_of(&mut node, depth)?;
            let is_known = standard_domain(&node.domain) || node.domain == ML;
            let rule = if is_known { (self.rule_of)(&node.op_type) } else { None };
            let Some(rule) = rule else {
                nodes.push(node);
                continue;
            };
            let mut site = Site::new(&node, facts, self.opset, &mut self.names)?;
            match rule(&mut site) {
                Verdict::Right => nodes.push(node),
                Verdict::Rewritten => {
                    let (made, weights) = site.made();
                    *self.done.entry(node.op_type.clone()).or_default() += 1;
                    nodes.extend(made);
                    graph.initializer.extend(weights);
                }
                Verdict::Wrong(what) => {
                    let named = if node.name.is_empty() { String::new() } else { format!(" ('{}')", node.name) };
                    let operator = format!("{}{named}", node.op_type);
                    return Err(match &*node.domain {
                        ML => format!("it lacks {operator}: {what}"),
                        _ => format!("it computes {operator} wrong: {what}"),
                    });
                }
            }
        }
        graph.node = nodes;
        Ok(())
    }

    /// Rewrites the graphs inside an operator (`If`, `Loop`, `Scan`). In these graphs the values
    /// from outside have no facts.
    fn graphs_of(&mut self, node: &mut NodeProto, depth: u32) -> Result<(), String> {
        let bad = |e: prost::DecodeError| format!("a graph of operator '{}' cannot be read: {e}", node.name);
        for attribute in &mut node.attribute {
            let mut inside = GraphAttribute::decode(attribute.clone()).map_err(bad)?;
            if inside.graph.is_none() && inside.graphs.is_empty() {
                continue;
            }
            for bytes in inside.graph.iter_mut().chain(&mut inside.graphs) {
                let mut graph = GraphProto::decode(bytes.clone()).map_err(bad)?;
                let before = self.done.clone();
                let facts = FactsOf::graph(&graph, None)?;
                self.graph(&mut graph, &facts, depth + 1)?;
                // An unchanged graph stays as it was read.
                if self.done != before {
                    *bytes = Bytes::from(graph.encode_to_vec());
                }
            }
            *attribute = Bytes::from(inside.encode_to_vec());
        }
        Ok(())
    }
}

/// The attribute of an operator.
pub(crate) fn attribute(node: &NodeProto, name: &str) -> Result<Option<AttributeProto>, String> {
    for bytes in &node.attribute {
        let attribute = AttributeProto::decode(bytes.clone())
            .map_err(|e| format!("an attribute of operator '{}' cannot be read: {e}", node.name))?;
        if attribute.name == name {
            return Ok(Some(attribute));
        }
    }
    Ok(None)
}
