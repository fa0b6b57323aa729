//! Cutting: the model that the library itself optimised is saved, and every segment of it is a session.
//!
//! Weights stay in the one file that the optimised model was saved with, which the library maps into memory: each segment
//! maps those that it uses, none is copied, and the folder can be removed as soon as all are loaded.
//!
//! A segment whose convolution adds a tensor that came into the segment (a residual) would copy that tensor first: what comes
//! from outside, a session may not write. The result is therefore bound to the memory of that input, which the library's
//! kernel sees and leaves the copy out; only where nobody else needs the input any more. This copy is most of what a cut costs.

use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use downbeat_core::Duration;
use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use ort::session::Session;
use ort::session::builder::SessionBuilder;
use prost::Message;

use super::measure::{Measured, measure};
use super::session::{Part, SessionModel, Source, Wiring};
use super::{LoadOptions, Runtime};
use crate::activations::Activations;
use crate::boundary::{self, Boundaries};
use crate::onnx;
use crate::onnx::graph::OperatorGraph;
use crate::onnx::proto::{GraphProto, ModelProto, ValueInfoProto, value_info};
use crate::probe;

const MODEL: &str = "optimised.onnx";
const WEIGHTS: &str = "optimised.weights";

/// Loads the whole model and saves it as the library optimised it for this machine.
pub(super) fn optimise(builder: SessionBuilder, options: &LoadOptions, folder: &Path) -> ort::Result<Session> {
    builder
        .with_optimized_model_path(folder.join(MODEL))?
        .with_config_entry("session.optimized_model_external_initializers_file_name", WEIGHTS)?
        .with_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")?
        .commit_from_file(&options.path)
}

/// Cuts the model that [`optimise`] saved.
///
/// # Errors
/// In words: what cannot be cut, and how far it can.
pub(super) fn load(
    runtime: &Runtime,
    options: &LoadOptions,
    signature: Signature,
    folder: &Path,
) -> Result<SessionModel, String> {
    probe::has_batch(&signature)?;
    let mut model = read(&folder.join(MODEL))?;
    let graph = OperatorGraph::exits_first(model.graph.as_mut().ok_or("the optimised model has no graph")?)?;
    let graph_proto = model.graph.as_ref().ok_or("the optimised model has no graph")?;
    if !graph_proto.sparse_initializer.is_empty() || !model.functions.is_empty() {
        return Err("it cannot be cut: it has sparse weights or functions of its own".into());
    }
    let measured = measure(runtime, options, &model, &graph, &signature, folder)?;
    let total = measured.times.iter().fold(Duration::ZERO, |sum, t| sum + *t);
    let boundaries = Boundaries::new(&graph, &measured.values, &measured.times);
    let find = |name: &str| find(&graph, name, &options.path);
    let chosen = boundaries.choose(&options.cut, graph.operators.len(), total, find)?;

    let mut states = vec![signature.inputs.clone()];
    states.extend(chosen.iter().map(|b| b.live.clone()));
    states.push(signature.outputs.clone());
    let mut ends: Vec<usize> = chosen.iter().map(|b| b.at).collect();
    ends.push(graph.operators.len());
    let cutter = Cutter { model: &model, proto: graph_proto, graph: &graph, measured: &measured };
    let mut parts = Vec::with_capacity(ends.len());
    let mut start = 0;
    for (state, end) in states.windows(2).zip(&ends) {
        let [before, behind] = state else { continue };
        let part = cutter.part(start..*end, before, behind).and_then(|segment| {
            let session = runtime
                .part_builder(options.threads, &signature.inputs, folder)
                .and_then(|mut b| b.commit_from_memory(&segment.model.encode_to_vec()))
                .map_err(|e| e.message().to_owned())?;
            Part::new(&session, &segment.inputs, &segment.outputs, segment.wiring)
        });
        parts.push(part.map_err(|e| format!("segment {} cannot be made: {e}", parts.len()))?);
        start = *end;
    }
    let time =
        |from: usize, to: usize| Some(measured.times.get(from..to)?.iter().fold(Duration::ZERO, |sum, t| sum + *t));
    let segments = boundary::describe(&graph, &chosen, &signature.outputs, &measured.values, time);
    let activations = Activations { engine: measured.arena, ..boundary::activations(&graph, &measured.values) };
    SessionModel::cut(parts, signature, segments, Some(activations))
}

fn read(path: &Path) -> Result<ModelProto, String> {
    let bytes = std::fs::read(path).map_err(|e| format!("{} cannot be read: {e}", path.display()))?;
    ModelProto::decode(Bytes::from(bytes)).map_err(|e| format!("{} cannot be read: {e}", path.display()))
}

/// As [`boundary::find`], also by the names in the model's own file: operators whose layout the library changes it names by
/// their value, and operators that it merges it names as the first.
fn find(graph: &OperatorGraph, name: &str, path: &Path) -> Result<usize, String> {
    let found = boundary::find(graph, name, same);
    if found.is_ok() {
        return found;
    }
    let Some(original) = read(path).ok().and_then(|m| m.graph) else { return found };
    let value = original.node.iter().find(|n| n.name == name).and_then(|n| n.output.first());
    behind(graph, &original, value.map_or(name, String::as_str), 0).map_or(found, Ok)
}

fn same(operator: &str, name: &str) -> bool {
    operator == name || operator.strip_suffix("_nchwc") == Some(name)
}

/// The boundary behind a value of the model's own file: that of its operator, or if that was merged into one before it, of the
/// last of those.
fn behind(graph: &OperatorGraph, original: &GraphProto, value: &str, merged: u32) -> Option<usize> {
    /// Most operators that are merged into one in a row: a convolution, a sum, an activation.
    const MERGED: u32 = 3;
    let maker = original.node.iter().find(|n| n.output.iter().any(|o| o == value))?;
    let exact = |name: &str| !name.is_empty() && graph.operators.iter().any(|o| same(&o.name, name));
    if let Some(output) = maker.output.iter().find(|o| graph.operators.iter().any(|p| p.outputs.contains(o))) {
        return boundary::find(graph, output, same).ok();
    }
    if let Some(name) = [value, &maker.name].into_iter().find(|name| exact(name)) {
        return boundary::find(graph, name, same).ok();
    }
    let before = (merged < MERGED).then_some(&maker.input)?;
    before.iter().filter_map(|input| behind(graph, original, input, merged + 1)).max()
}

struct Cutter<'a> {
    model: &'a ModelProto,
    proto: &'a GraphProto,
    graph: &'a OperatorGraph,
    measured: &'a Measured,
}

/// A model of a segment, and how a run of it is wired.
struct Segment {
    model: ModelProto,
    inputs: Vec<String>,
    outputs: Vec<String>,
    wiring: Wiring,
}

impl Cutter<'_> {
    fn part(&self, range: Range<usize>, before: &[TensorSpec], behind: &[TensorSpec]) -> Result<Segment, String> {
        let operators = self.graph.operators.get(range.clone()).unwrap_or_default();
        let read = |name: &str| operators.iter().any(|o| o.inputs.iter().any(|i| i == name));
        let made = |name: &str| operators.iter().any(|o| o.outputs.iter().any(|v| v == name));
        let mut wiring = Wiring { before: before.to_vec(), ..Wiring::default() };
        let mut inputs = Vec::new();
        for (index, spec) in before.iter().enumerate().filter(|(_, s)| read(&s.name)) {
            wiring.takes.push(index);
            inputs.push(spec.name.clone());
        }
        let mut outputs = Vec::new();
        for spec in behind {
            let kept = before.iter().position(|b| b.name == spec.name);
            let source = match kept {
                Some(index) if !made(&spec.name) => Source::Kept(index),
                // Made here, or a weight that is an output of the model.
                _ => {
                    outputs.push(spec.name.clone());
                    Source::Made(outputs.len() - 1)
                }
            };
            wiring.gives.push((spec.clone(), source));
        }
        self.in_place(range.clone(), before, behind, &mut outputs, &mut wiring);
        let model = self.model(range, before, &inputs, behind, &outputs)?;
        Ok(Segment { model, inputs, outputs, wiring })
    }

    /// Finds convolutions that add an input of the segment which is over with that, and makes what they give outputs.
    fn in_place(
        &self,
        range: Range<usize>,
        before: &[TensorSpec],
        behind: &[TensorSpec],
        outputs: &mut Vec<String>,
        wiring: &mut Wiring,
    ) {
        for index in range.clone() {
            let (Some(node), Some(operator)) = (self.proto.node.get(index), self.graph.operators.get(index)) else {
                continue;
            };
            let convolution =
                matches!(node.op_type.as_str(), "Conv" | "FusedConv") && node.domain.starts_with("com.microsoft");
            let (Some(sum), [output]) = (node.input.get(3), operator.outputs.as_slice()) else { continue };
            let Some(tensor) = before.iter().position(|b| b.name == *sum && b.datatype == DataType::Fp32) else {
                continue;
            };
            let once = node.input.iter().filter(|i| *i == sum).count() == 1;
            let over = !behind.iter().any(|b| b.name == *sum) && self.graph.read_before(sum, index, range.clone());
            if !convolution || !once || !over || wiring.in_place.iter().any(|(_, t)| *t == tensor) {
                continue;
            }
            let place = outputs.iter().position(|o| o == output).unwrap_or_else(|| {
                outputs.push(output.clone());
                outputs.len() - 1
            });
            wiring.in_place.push((place, tensor));
        }
    }

    fn model(
        &self,
        range: Range<usize>,
        before: &[TensorSpec],
        inputs: &[String],
        behind: &[TensorSpec],
        outputs: &[String],
    ) -> Result<ModelProto, String> {
        let node = self.proto.node.get(range.clone()).unwrap_or_default().to_vec();
        let operators = self.graph.operators.get(range).unwrap_or_default();
        let named = operators.iter().flat_map(|o| &o.inputs).chain(outputs);
        let mut weights: Vec<usize> = named.filter_map(|name| self.graph.weights.get(name)).map(|w| w.index).collect();
        weights.sort_unstable();
        weights.dedup();
        let initializer = weights.iter().filter_map(|index| self.proto.initializer.get(*index).cloned()).collect();
        let info = |name: &String, specs: &[TensorSpec]| -> Result<ValueInfoProto, String> {
            let known = specs.iter().find(|s| s.name == *name).map(|s| s.datatype);
            let known = known.or_else(|| self.measured.values.get(name).map(|v| v.spec.datatype));
            let datatype = known.ok_or_else(|| format!("the datatype of '{name}' is not known"))?;
            Ok(value_info(name, onnx::element_type(datatype)))
        };
        let graph = GraphProto {
            node,
            name: "segment".into(),
            initializer,
            input: inputs.iter().map(|name| info(name, before)).collect::<Result<_, _>>()?,
            output: outputs.iter().map(|name| info(name, behind)).collect::<Result<_, _>>()?,
            ..GraphProto::default()
        };
        let ModelProto { ir_version, opset_import, .. } = self.model;
        Ok(ModelProto {
            ir_version: *ir_version,
            graph: Some(graph),
            opset_import: opset_import.clone(),
            functions: Vec::new(),
        })
    }
}
