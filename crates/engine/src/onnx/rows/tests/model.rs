//! Models in a line of text, for tests: `x[N,4]; w=f[4,2]; y=MatMul(x,w); -> y[N,2]`.
//!
//! Statements end with `;`. `x[N,?,3]` is an input of floats, `x:i[N]` one of integers; a dimension
//! is a name, a number, or `?` if it has no name. `w=f[4,2]` is a weight, `k=i(1,2)` a vector of
//! integers, `k=i(3)!` a scalar. `a,b=Split(x) axis=0` is an operator. Its attributes are an
//! integer, integers (with a comma), text in quotes, or a graph in braces. `ml.` and `ms.` before
//! an operator stand for its domain. `-> y[N,2]` names the outputs.

use bytes::Bytes;
use prost::Message;

use crate::onnx::proto::{
    AttributeGraphs, AttributeProto, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetProto, TensorProto,
    TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};

/// The bytes of a model.
pub fn model(text: &str, opset: i64) -> Bytes {
    let set = |domain: &str, version| OperatorSetProto { domain: domain.into(), version }.encode_to_vec().into();
    let opset_import = vec![set("", opset), set("ai.onnx.ml", 3), set("com.microsoft", 1)];
    let model = ModelProto { ir_version: 8, graph: Some(graph(text)), opset_import, functions: Vec::new() };
    model.encode_to_vec().into()
}

/// Parts of a text between separators that are not inside of brackets.
fn parts(text: &str, separator: char) -> Vec<String> {
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for c in text.chars() {
        match c {
            '[' | '(' | '{' => depth += 1,
            ']' | ')' | '}' => depth -= 1,
            c if c == separator && depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().unwrap().push(c);
    }
    parts.iter().map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

pub fn graph(text: &str) -> GraphProto {
    let mut graph = GraphProto { name: "g".into(), ..GraphProto::default() };
    for statement in parts(text, ';') {
        if let Some(outputs) = statement.strip_prefix("->") {
            graph.output = parts(outputs, ',').iter().map(|text| info(text)).collect();
        } else if let Some((left, right)) = statement.split_once('=').filter(|(left, _)| !left.contains('[')) {
            match right.trim() {
                weight if weight.starts_with("f[") || weight.starts_with("i(") => {
                    graph.initializer.push(tensor(left.trim(), weight).encode_to_vec().into());
                }
                call => graph.node.push(node(left, call)),
            }
        } else {
            graph.input.push(info(&statement));
        }
    }
    graph
}

fn info(text: &str) -> ValueInfoProto {
    let (name, dims) = text.split_once('[').map_or((text, None), |(name, dims)| (name, Some(dims)));
    let (name, elem_type) = name.strip_suffix(":i").map_or((name, 1), |name| (name, 7));
    let dim = |dim: &str| match dim.parse() {
        Ok(size) => DimensionProto { dim_value: Some(size), dim_param: None },
        Err(_) => DimensionProto { dim_value: None, dim_param: (dim != "?").then(|| dim.to_owned()) },
    };
    let dims = dims.map(|dims| dims.trim_end_matches(']').split(',').filter(|dim| !dim.is_empty()).map(dim).collect());
    let shape = dims.map(|dim| TensorShapeProto { dim });
    let kind = TypeProto { tensor_type: Some(TensorTypeProto { elem_type, shape }) };
    ValueInfoProto { name: name.into(), r#type: Some(kind.encode_to_vec().into()) }
}

fn tensor(name: &str, text: &str) -> TensorProto {
    let numbers = |text: &str| text.split(',').filter_map(|n| n.trim().parse().ok()).collect::<Vec<i64>>();
    let inside = text[2..].trim_end_matches([']', ')', '!']);
    if text.starts_with('f') {
        let dims = numbers(inside);
        let raw = vec![0u8; 4 * dims.iter().product::<i64>() as usize];
        return TensorProto { name: name.into(), data_type: 1, dims, raw_data: raw.into(), ..TensorProto::default() };
    }
    let int64_data = numbers(inside);
    let dims = if text.ends_with('!') { Vec::new() } else { vec![int64_data.len() as i64] };
    TensorProto { name: name.into(), data_type: 7, dims, int64_data, ..TensorProto::default() }
}

fn node(outputs: &str, call: &str) -> NodeProto {
    let names = |text: &str| text.split(',').map(|name| name.trim().to_owned()).collect::<Vec<_>>();
    let (operator, rest) = call.split_once('(').unwrap();
    let (inputs, attributes) = rest.split_once(')').unwrap();
    let (domain, op_type) = match operator.split_once('.') {
        Some(("ml", operator)) => ("ai.onnx.ml", operator),
        Some(("ms", operator)) => ("com.microsoft", operator),
        Some((domain, operator)) => (domain, operator),
        None => ("", operator),
    };
    let input = if inputs.is_empty() { Vec::new() } else { names(inputs) };
    let attribute = parts(attributes, ' ').iter().map(|text| attribute(text)).collect();
    let (op_type, domain) = (op_type.into(), domain.into());
    NodeProto { input, output: names(outputs), op_type, domain, attribute, ..NodeProto::default() }
}

fn attribute(text: &str) -> Bytes {
    let (name, value) = text.split_once('=').unwrap();
    let mut attribute = AttributeProto { name: name.into(), ..AttributeProto::default() };
    if let Some(inner) = value.strip_prefix('{') {
        let inner = graph(inner.trim_end_matches('}'));
        let graphs = AttributeGraphs { graph: Some(inner.encode_to_vec().into()), graphs: Vec::new() };
        return [attribute.encode_to_vec(), graphs.encode_to_vec()].concat().into();
    }
    if let Some(text) = value.strip_prefix('"') {
        attribute.s = Some(text.trim_end_matches('"').to_owned().into());
    } else if value.contains(',') {
        attribute.ints = value.split(',').filter_map(|n| n.parse().ok()).collect();
    } else {
        attribute.i = value.parse().ok();
    }
    attribute.encode_to_vec().into()
}
