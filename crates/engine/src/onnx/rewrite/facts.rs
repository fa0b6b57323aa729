//! The facts about a graph's values that hold before it runs.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;

use crate::onnx::proto::{GraphProto, GraphValues, TypeProto};
use crate::onnx::sizes::{Input, Sizes};

/// Stands for a size that varies: only the rank matters to these facts.
const ANY_SIZE: usize = 2;

/// The known facts about a value.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Facts {
    /// `TensorProto.DataType`.
    pub element: Option<i32>,
    /// The number of its axes.
    pub rank: Option<usize>,
    /// The sizes of a weight.
    pub dims: Option<Vec<i64>>,
    /// The elements, if they are few and the same in every run.
    pub data: Option<Vec<f64>>,
}

/// The known facts about each value of a graph, by name.
#[derive(Debug, Default)]
pub(crate) struct FactsOf(BTreeMap<String, Facts>);

impl FactsOf {
    /// Collects the file's facts about its values and weights, and derives the facts of computed
    /// values.
    ///
    /// # Errors
    /// In words, if a tensor or type of the file cannot be read.
    pub fn graph(graph: &GraphProto, values: Option<&GraphValues>) -> Result<FactsOf, String> {
        let mut facts = BTreeMap::new();
        let sizes = Sizes::new(graph)?;
        let mut shapes = Vec::new();
        for name in sizes.input_names() {
            let info = graph.input.iter().find(|input| input.name == name);
            let dims = info.map(|info| dims_of(info.r#type.as_ref())).transpose()?.flatten();
            shapes.push(dims.map(|(_, dims)| dims));
        }
        let constants = graph.node.iter().filter(|node| node.op_type == "Constant").flat_map(|node| &node.output);
        let constants: BTreeSet<&str> = constants.map(String::as_str).collect();
        let inputs = shapes.iter().map(|dims| dims.as_deref().map(|dims| Input { dims, data: &[] }));
        sizes.each(inputs, |name, extent, is_weight| {
            let known = Facts {
                element: extent.dims.is_some().then_some(extent.element),
                rank: extent.dims.as_ref().map(|dims| dims.len()),
                dims: extent
                    .dims
                    .as_ref()
                    .filter(|_| is_weight)
                    .map(|dims| dims.iter().map(|size| *size as i64).collect()),
                // Computed numbers may follow from `ANY_SIZE`, so only constant ones are known.
                data: extent.data.clone().filter(|_| is_weight || constants.contains(name)),
            };
            facts.insert(name.to_owned(), known);
        });
        let declared =
            values.into_iter().flat_map(|graph| graph.input.iter().chain(&graph.output).chain(&graph.value_info));
        for info in declared.chain(&graph.input).chain(&graph.output) {
            if let Some((element, dims)) = dims_of(info.r#type.as_ref())? {
                let known = facts.entry(info.name.clone()).or_default();
                (known.element, known.rank) = (Some(element), Some(dims.len()));
            }
        }
        Ok(FactsOf(facts))
    }

    /// The known facts about a value; none if the graph does not have it.
    pub fn of(&self, name: &str) -> Facts {
        self.0.get(name).cloned().unwrap_or_default()
    }
}

/// The datatype and sizes in a type, with [`ANY_SIZE`] for sizes that vary.
fn dims_of(bytes: Option<&bytes::Bytes>) -> Result<Option<(i32, Vec<usize>)>, String> {
    let Some(bytes) = bytes else { return Ok(None) };
    let decoded = TypeProto::decode(bytes.clone()).map_err(|e| format!("the type of a value cannot be read: {e}"))?;
    let Some(tensor) = decoded.tensor_type else { return Ok(None) };
    let size = |size: Option<i64>| size.and_then(|size| usize::try_from(size).ok()).unwrap_or(ANY_SIZE);
    Ok(tensor.shape.map(|shape| (tensor.elem_type, shape.dim.iter().map(|dim| size(dim.dim_value)).collect())))
}
