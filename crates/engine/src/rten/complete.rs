//! Attributes that ONNX lets a file leave out and RTen requires. This module adds them before RTen
//! reads the file.

use std::collections::BTreeMap;

use prost::Message;

use crate::onnx::proto::{AttributeProto, GraphProto, ModelProto, NodeProto, WeightProto};
use crate::onnx::rewrite::attribute;
use crate::onnx::standard_domain;

/// Adds missing attributes to a model. Returns true if there were any.
pub(super) fn complete(model: &mut ModelProto) -> Result<bool, String> {
    let Some(graph) = &mut model.graph else { return Ok(false) };
    let shapes = constant_shapes(graph)?;
    let mut changed = false;
    for node in &mut graph.node {
        let Some(attribute) = missing(node, &shapes)? else { continue };
        node.attribute.push(attribute.encode_to_vec().into());
        changed = true;
    }
    Ok(changed)
}

/// The attribute that an operator lacks.
fn missing(node: &NodeProto, shapes: &BTreeMap<String, Vec<i64>>) -> Result<Option<AttributeProto>, String> {
    let weight = match node.op_type.as_str() {
        _ if !standard_domain(&node.domain) => return Ok(None),
        "Conv" | "ConvTranspose" | "ConvInteger" => 1,
        "QLinearConv" => 3,
        "MaxPool" | "AveragePool" if attribute(node, "strides")?.is_none() => {
            let axes = attribute(node, "kernel_shape")?.map_or(0, |kernel| kernel.ints.len());
            return Ok((axes > 0).then(|| AttributeProto::ints("strides", vec![1; axes])));
        }
        _ => return Ok(None),
    };
    if attribute(node, "kernel_shape")?.is_some() {
        return Ok(None);
    }
    // RTen takes the number of axes from the attribute, and the sizes from the weight itself.
    let shape = node.input.get(weight).and_then(|name| shapes.get(name)).and_then(|shape| shape.get(2..));
    Ok(shape.map(|sizes| AttributeProto::ints("kernel_shape", sizes.to_vec())))
}

/// The shapes of weights and constants, and of values that operators make from them without a
/// change of shape.
fn constant_shapes(graph: &GraphProto) -> Result<BTreeMap<String, Vec<i64>>, String> {
    let mut shapes = BTreeMap::new();
    for bytes in &graph.initializer {
        let weight = WeightProto::decode(bytes.clone()).map_err(|e| format!("a weight cannot be read: {e}"))?;
        shapes.insert(weight.name, weight.dims);
    }
    for node in &graph.node {
        let (Some(output), true) = (node.output.first(), standard_domain(&node.domain)) else { continue };
        let shape = match node.op_type.as_str() {
            "Identity" | "Cast" | "QuantizeLinear" | "DequantizeLinear" => {
                node.input.first().and_then(|input| shapes.get(input)).cloned()
            }
            "Constant" => match attribute(node, "value")?.and_then(|value| value.t) {
                Some(tensor) => WeightProto::decode(tensor).ok().map(|tensor| tensor.dims),
                None => None,
            },
            _ => None,
        };
        shapes.extend(shape.map(|shape| (output.clone(), shape)));
    }
    Ok(shapes)
}
