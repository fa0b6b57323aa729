//! An operator of a graph, and the operators that take its place.

use bytes::Bytes;
use prost::Message;

use super::{Facts, FactsOf};
use crate::onnx::proto::{AttributeProto, GraphProto, NodeProto, TensorProto};
use crate::onnx::sizes::{FLOAT, INT64, UINT8};

/// Makes names for values that no other value has.
#[derive(Debug, Default)]
pub(super) struct Names {
    prefix: String,
    next: u64,
}

impl Names {
    /// Avoids the names of a graph.
    pub fn avoid(&mut self, graph: &GraphProto) {
        self.prefix = "rewritten".to_owned();
        let names = || graph.node.iter().flat_map(|node| node.input.iter().chain(&node.output));
        while names().any(|name| name.starts_with(&self.prefix)) {
            self.prefix.push('_');
        }
    }

    fn fresh(&mut self) -> String {
        self.next += 1;
        format!("{}{}", self.prefix, self.next)
    }
}

/// An operator, the facts about its inputs, and the operators that a rule puts in its place.
pub(crate) struct Site<'a> {
    pub node: &'a NodeProto,
    /// Version of the standard's operators.
    pub opset: i64,
    facts: &'a FactsOf,
    attributes: Vec<AttributeProto>,
    names: &'a mut Names,
    made: Vec<NodeProto>,
    weights: Vec<Bytes>,
}

impl<'a> Site<'a> {
    pub(super) fn new(
        node: &'a NodeProto,
        facts: &'a FactsOf,
        opset: i64,
        names: &'a mut Names,
    ) -> Result<Site<'a>, String> {
        let attributes = node.attribute.iter().map(|bytes| AttributeProto::decode(bytes.clone()));
        let attributes = attributes.collect::<Result<Vec<_>, _>>();
        let attributes = attributes.map_err(|e| format!("an attribute of '{}' cannot be read: {e}", node.name))?;
        Ok(Site { node, opset, facts, attributes, names, made: Vec::new(), weights: Vec::new() })
    }

    /// The operators and weights that take the operator's place.
    pub(super) fn made(self) -> (Vec<NodeProto>, Vec<Bytes>) {
        (self.made, self.weights)
    }

    /// The name of an input; empty where the graph leaves the input out.
    pub fn input(&self, index: usize) -> String {
        self.node.input.get(index).cloned().unwrap_or_default()
    }

    /// The name of an output; empty where the graph leaves the output out.
    pub fn output(&self, index: usize) -> String {
        self.node.output.get(index).cloned().unwrap_or_default()
    }

    /// The known facts about an input.
    pub fn facts(&self, index: usize) -> Facts {
        self.facts.of(&self.input(index))
    }

    /// An attribute, if the operator has it.
    pub fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.attributes.iter().find(|attribute| attribute.name == name)
    }

    /// An attribute of one integer, or the default if it is left out.
    pub fn int(&self, name: &str, default: i64) -> i64 {
        self.attribute(name).and_then(AttributeProto::integer).unwrap_or(default)
    }

    /// An attribute of integers, if the operator has it.
    pub fn ints(&self, name: &str) -> Option<Vec<i64>> {
        self.attribute(name).map(|attribute| attribute.ints.clone())
    }

    /// Whether an attribute is this text.
    pub fn is(&self, name: &str, text: &str) -> bool {
        self.attribute(name).and_then(|attribute| attribute.s.as_deref()) == Some(text.as_bytes())
    }

    /// Adds an operator, and returns the name of its output.
    pub fn add(&mut self, op_type: &str, inputs: &[&str], attributes: Vec<AttributeProto>) -> String {
        let output = self.names.fresh();
        self.add_as(op_type, inputs, attributes, &output);
        output
    }

    /// Adds an operator with the output `output`.
    pub fn add_as(&mut self, op_type: &str, inputs: &[&str], attributes: Vec<AttributeProto>, output: &str) {
        let attribute = attributes.into_iter().map(|attribute| Bytes::from(attribute.encode_to_vec())).collect();
        self.put(op_type, inputs, attribute, vec![output.to_owned()]);
    }

    /// Adds the operator again, with other inputs and outputs. It loses the attributes in `without`
    /// and gets those of `more`.
    pub fn add_itself(&mut self, inputs: &[&str], without: &[&str], more: Vec<AttributeProto>, outputs: Vec<String>) {
        let kept = self.node.attribute.iter().zip(&self.attributes);
        let kept = kept.filter(|(_, attribute)| !without.contains(&attribute.name.as_str()));
        let mut attribute: Vec<Bytes> = kept.map(|(bytes, _)| bytes.clone()).collect();
        attribute.extend(more.into_iter().map(|attribute| Bytes::from(attribute.encode_to_vec())));
        self.put(&self.node.op_type.clone(), inputs, attribute, outputs);
    }

    fn put(&mut self, op_type: &str, inputs: &[&str], attribute: Vec<Bytes>, output: Vec<String>) {
        // Errors of the engine name the operator of the file.
        let name = match (self.node.name.as_str(), self.made.len()) {
            ("", _) | (_, 0) => self.node.name.clone(),
            (name, more) => format!("{name}/{more}"),
        };
        self.made.push(NodeProto {
            op_type: op_type.to_owned(),
            input: inputs.iter().map(|input| (*input).to_owned()).collect(),
            output,
            name,
            attribute,
            ..NodeProto::default()
        });
    }

    /// A name for a further output.
    pub fn fresh(&mut self) -> String {
        self.names.fresh()
    }

    /// A weight of integers along one axis.
    pub fn weight(&mut self, numbers: &[i64]) -> String {
        self.tensor(INT64, vec![numbers.len() as i64], numbers.iter().flat_map(|n| n.to_le_bytes()).collect())
    }

    /// A weight of one integer, without axes.
    pub fn integer(&mut self, number: i64) -> String {
        self.tensor(INT64, Vec::new(), number.to_le_bytes().to_vec())
    }

    /// A weight of one 32-bit float, without axes.
    pub fn float(&mut self, number: f32) -> String {
        self.tensor(FLOAT, Vec::new(), number.to_le_bytes().to_vec())
    }

    /// A weight of 32-bit floats of these sizes.
    pub fn floats(&mut self, dims: &[usize], floats: &[f32]) -> String {
        let dims = dims.iter().map(|size| *size as i64).collect();
        self.tensor(FLOAT, dims, floats.iter().flat_map(|float| float.to_le_bytes()).collect())
    }

    /// A weight of bytes, all of them 1.
    pub fn ones(&mut self, dims: &[i64]) -> String {
        let count = dims.iter().map(|size| usize::try_from(*size).unwrap_or(0)).product();
        self.tensor(UINT8, dims.to_vec(), vec![1; count])
    }

    fn tensor(&mut self, data_type: i32, dims: Vec<i64>, raw_data: Vec<u8>) -> String {
        let name = self.names.fresh();
        let tensor =
            TensorProto { dims, data_type, name: name.clone(), raw_data: raw_data.into(), ..Default::default() };
        self.weights.push(tensor.encode_to_vec().into());
        name
    }
}
