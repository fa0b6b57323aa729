//! The reasons to run a model outside of the server's process: its operators trap, or no shape
//! bounds the memory of a run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use prost::Message;

use super::proto::{GraphProto, ModelProto};
use super::sizes::{Dims, Extent, Input, Sizes};
use crate::traits::LoadError;

/// Sizes to try for varying axes, until every value has a size.
const LENGTHS: [usize; 7] = [32, 1, 16, 64, 128, 224, 256];
/// Operators that end a process, or run for ever, for some requests.
const TRAPS: [&str; 2] = ["STFT", "Loop"];
/// Operators that trap when they divide integers.
const DIVISIONS: [&str; 2] = ["Div", "Mod"];

/// The reason to run the model at `path` in a process of its own; `None`: the server's process is
/// safe.
///
/// # Errors
/// If the file cannot be read or is not an ONNX model.
pub fn hazard(path: &Path) -> Result<Option<String>, LoadError> {
    let checked = super::check(path)?;
    let error = |reason: String| LoadError::File { path: path.to_owned(), reason };
    let model = ModelProto::decode(super::read_whole(path)?).map_err(|e| super::not_a_model(path, e))?;
    if !model.functions.is_empty() {
        return Ok(Some("the model has functions of its own, which the server cannot examine".to_owned()));
    }
    let Some(graph) = model.graph else { return Ok(None) };
    let inputs = checked.signature(|_| Some((downbeat_core::tensor::DataType::Fp32, Vec::new())))?.inputs;
    let declared: Vec<Vec<i64>> = inputs.into_iter().map(|input| input.dims).collect();
    hazard_of(&graph, &declared).map_err(error)
}

fn hazard_of(graph: &GraphProto, declared: &[Vec<i64>]) -> Result<Option<String>, String> {
    if let Some(node) = graph.node.iter().find(|node| TRAPS.contains(&&*node.op_type)) {
        return Ok(Some(format!(
            "the model's operator {} may end the process, or never end, for some requests",
            node.op_type
        )));
    }
    let sizes = Sizes::new(graph)?;
    let mut first = None;
    for length in LENGTHS {
        let made = Made::with(&sizes, declared, length);
        match made.without_size(graph, &sizes) {
            None => return Ok(made.division(graph, &sizes)),
            Some(unknown) => drop(first.get_or_insert(unknown)),
        }
    }
    Ok(first)
}

/// The values of a run whose inputs have known shapes and unknown content.
struct Made(BTreeMap<usize, Extent>);

impl Made {
    fn with(sizes: &Sizes, declared: &[Vec<i64>], length: usize) -> Made {
        let size = |dim: &i64| usize::try_from(*dim).unwrap_or(length);
        let shapes: Vec<Vec<usize>> = declared.iter().map(|dims| dims.iter().map(size).collect()).collect();
        let inputs = shapes.iter().map(|dims| Some(Input { dims, data: &[] }));
        let mut made = BTreeMap::new();
        sizes.walk(inputs, |id, extent| drop(made.insert(id, extent.clone())));
        Made(made)
    }

    fn dims(&self, id: usize) -> Option<&Dims> {
        self.0.get(&id)?.dims.as_ref()
    }

    /// The first value whose size does not follow from the shapes.
    fn without_size(&self, graph: &GraphProto, sizes: &Sizes) -> Option<String> {
        let mut steps = graph.node.iter().zip(&sizes.steps);
        steps.find_map(|(node, step)| {
            let id = step.outputs.iter().flatten().find(|id| self.dims(**id).is_none())?;
            let value = sizes.names.get(*id).map_or("", String::as_str);
            Some(format!(
                "the size of '{value}', which {} makes, does not follow from the shapes of its inputs",
                node.op_type
            ))
        })
    }

    /// The first division of integers by anything but constants that are neither 0 nor -1.
    fn division(&self, graph: &GraphProto, sizes: &Sizes) -> Option<String> {
        let is_safe =
            |extent: &Extent| extent.data.as_deref().is_some_and(|data| data.iter().all(|n| *n != 0.0 && *n != -1.0));
        let mut safe = BTreeSet::new();
        for (id, weight) in sizes.weights.iter().enumerate() {
            safe.extend(weight.as_ref().filter(|weight| is_safe(weight)).map(|_| id));
        }
        for (node, step) in graph.node.iter().zip(&sizes.steps) {
            let Some(Some(output)) = step.outputs.first().copied() else { continue };
            if node.op_type == "Constant" {
                safe.extend(self.0.get(&output).filter(|extent| is_safe(extent)).map(|_| output));
            }
            let is_float = || self.0.get(&output).is_some_and(Extent::is_float);
            let divisor = step.inputs.get(1).copied().flatten();
            if DIVISIONS.contains(&&*node.op_type) && !divisor.is_some_and(|id| safe.contains(&id)) && !is_float() {
                return Some(format!(
                    "the model's operator {} divides integers, and may end the process for some requests",
                    node.op_type
                ));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::proto::{NodeProto, TensorProto, TypeProto, ValueInfoProto, shaped_type};
    use crate::onnx::sizes::{FLOAT, INT64};

    fn node(op_type: &str, input: &[&str], output: &str) -> NodeProto {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        NodeProto { op_type: op_type.into(), input: owned(input), output: owned(&[output]), ..NodeProto::default() }
    }

    fn input(name: &str, element: i32) -> ValueInfoProto {
        let shaped: TypeProto = shaped_type(element, &[-1, 4]);
        ValueInfoProto { name: name.into(), r#type: Some(shaped.encode_to_vec().into()) }
    }

    /// The hazard of operators on the inputs `x` and `y` of this datatype. The integers `two` and
    /// `none` are weights.
    fn said(element: i32, node: Vec<NodeProto>) -> Option<String> {
        let number = |name: &str, n: i64| TensorProto {
            name: name.into(),
            data_type: INT64,
            dims: vec![1],
            int64_data: vec![n],
            ..TensorProto::default()
        };
        let initializer =
            [number("two", 2), number("none", 0)].iter().map(|tensor| tensor.encode_to_vec().into()).collect();
        let input = vec![input("x", element), input("y", element)];
        let graph = GraphProto { node, initializer, input, ..GraphProto::default() };
        hazard_of(&graph, &[vec![-1, 4], vec![-1, 4]]).unwrap()
    }

    #[test]
    fn a_division_of_integers_traps_unless_its_divisor_is_a_safe_constant() {
        for operator in ["Div", "Mod"] {
            assert!(said(INT64, vec![node(operator, &["x", "y"], "z")]).is_some_and(|said| said.contains(operator)));
            assert!(said(INT64, vec![node(operator, &["x", "none"], "z")]).is_some());
            assert_eq!(said(INT64, vec![node(operator, &["x", "two"], "z")]), None);
            assert_eq!(said(FLOAT, vec![node(operator, &["x", "y"], "z")]), None);
        }
        // Divisors from shapes, which may be 0.
        let of_shapes = vec![node("Shape", &["x"], "s"), node("Div", &["two", "s"], "z")];
        assert!(said(FLOAT, of_shapes).is_some());
    }

    #[test]
    fn a_size_that_does_not_follow_from_shapes_is_a_hazard() {
        let made = vec![node("ReduceSum", &["x"], "n"), node("ConstantOfShape", &["n"], "z")];
        let reason = said(INT64, made).unwrap();
        assert!(reason.contains("'z', which ConstantOfShape makes"), "{reason}");
        let like =
            vec![node("Shape", &["x"], "s"), node("ConstantOfShape", &["s"], "z"), node("Add", &["x", "z"], "sum")];
        assert_eq!(said(FLOAT, like), None, "it is as large as x");
        for operator in ["Loop", "STFT", "If", "Scan"] {
            assert!(said(FLOAT, vec![node(operator, &["x"], "z")]).is_some_and(|said| said.contains(operator)));
        }
    }
}
