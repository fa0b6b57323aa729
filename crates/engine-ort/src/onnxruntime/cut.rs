//! Cutting: the library saves the model that it optimised, and each segment of that model becomes a
//! session.
//!
//! Weights stay in the one file that the optimised model was saved with. The library maps the file
//! into memory: each segment maps the weights that it uses, without a copy. The folder can be
//! removed once all segments are loaded.
//!
//! A convolution may add a tensor from outside of its segment (a residual). A session may not write
//! that tensor, and would copy it first. So the result is bound to the memory of that input, and
//! the library's kernel then leaves out the copy. This is done only if the input has no other user.
//! The copy is most of the cost of a cut.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_engine::LoadOptions;
use downbeat_engine::cut::SegmentInfo;
use downbeat_engine::cut::activations::Activations;
use downbeat_engine::cut::boundary::{self, Boundaries, Boundary};
use downbeat_engine::cut::operator_profile::OperatorProfile;
use downbeat_engine::cut::probe;
use downbeat_engine::onnx;
use downbeat_engine::onnx::graph::OperatorGraph;
use downbeat_engine::onnx::proto::{GraphProto, ModelProto, ValueInfoProto, value_info};
use ort::session::Session;
use ort::session::builder::SessionBuilder;
use prost::Message;

use super::measure::measure;
use super::runtime::{Runtime, commit, commit_file};
use super::session::{SessionModel, SessionPart, Source, Wiring};

pub(super) const MODEL: &str = "optimised.onnx";
pub(super) const WEIGHTS: &str = "optimised.weights";

/// Loads the whole model and saves it as the library optimised it for this machine.
pub(super) fn optimise(builder: SessionBuilder, path: &Path, folder: &Path) -> ort::Result<Session> {
    let builder = builder
        .with_optimized_model_path(folder.join(MODEL))?
        .with_config_entry("session.optimized_model_external_initializers_file_name", WEIGHTS)?
        .with_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")?;
    commit_file(builder, path)
}

/// Makes builders of sessions for parts of the saved model.
pub(super) type PartBuilder<'a> = &'a dyn Fn() -> ort::Result<SessionBuilder>;

/// A model that is cut.
pub(super) struct CutModel {
    /// The segments in their order, at least one.
    pub segments: Vec<Segment>,
    /// The description of each segment.
    pub infos: Vec<SegmentInfo>,
    pub activations: Activations,
    /// The measurements behind the cut; `None`: the model is whole.
    pub operators: Option<Arc<OperatorProfile>>,
}

/// Loads the segments of the model that [`optimise`] saved, on the CPU.
pub(super) fn load(
    runtime: &Runtime,
    options: &LoadOptions,
    signature: Signature,
    folder: &Path,
) -> Result<SessionModel, String> {
    let builder = || runtime.part_builder(options.threads, &options.share, &signature.inputs, folder);
    let measure = |model: &ModelProto, graph: &OperatorGraph| measure(&builder, model, graph, &signature, folder, None);
    let CutModel { segments, infos, activations, operators } = cut(&measure, options, &signature, folder, true)?;
    let part = |(index, segment): (usize, Segment)| {
        let session = builder().and_then(|b| commit(b, |b| b.commit_from_memory(&segment.model)));
        let session = session.map_err(|e| e.message().to_owned());
        session
            .and_then(|session| SessionPart::new(&session, &segment.inputs, &segment.outputs, segment.wiring))
            .map_err(|e| format!("segment {index} cannot be made: {e}"))
    };
    let parts = segments.into_iter().enumerate().map(part).collect::<Result<_, _>>()?;
    let mut model = SessionModel::new(parts, signature)?;
    (model.segments, model.activations, model.operators) = (infos, Some(activations), operators);
    Ok(model)
}

/// Measures the times and values of a model's operators.
pub(super) type Measure<'a> = &'a dyn Fn(&ModelProto, &OperatorGraph) -> Result<OperatorProfile, String>;

/// Cuts the model that [`optimise`] saved. The measurements come from `options`, or else from
/// `measure`.
///
/// `in_place`: whether kernels may write a sum to the memory of an input.
///
/// # Errors
/// In words: the reason why the model cannot be cut, and how far it can.
pub(super) fn cut(
    measure: Measure<'_>,
    options: &LoadOptions,
    signature: &Signature,
    folder: &Path,
    in_place: bool,
) -> Result<CutModel, String> {
    probe::has_batch(signature)?;
    let mut model: ModelProto = read(&folder.join(MODEL))?;
    let graph = OperatorGraph::exits_first(model.graph.as_mut().ok_or("the optimised model has no graph")?)?;
    let graph_proto = model.graph.as_ref().ok_or("the optimised model has no graph")?;
    if !graph_proto.sparse_initializer.is_empty() || !model.functions.is_empty() {
        return Err("it cannot be cut: it has sparse weights or functions of its own".into());
    }
    let measured = match &options.operators {
        Some(known) if known.is_of(&graph) => known.clone(),
        _ => Arc::new(measure(&model, &graph)?),
    };
    let boundaries = Boundaries::new(&graph, &measured.values, &measured.times);
    let find = |name: &str| find(&graph, name, &options.path);
    let chosen = boundaries.choose(&options.cut, graph.operators.len(), measured.total(), find)?;
    let cutter = Cutter { model: &model, proto: graph_proto, graph: &graph, measured: &measured, in_place };
    let segments = cutter.segments(signature, &chosen)?;
    let time =
        |from: usize, to: usize| Some(measured.times.get(from..to)?.iter().fold(Duration::ZERO, |sum, t| sum + *t));
    let infos = boundary::describe(&graph, &chosen, &signature.outputs, &measured.values, time);
    let activations = Activations { engine: measured.arena, ..boundary::activations(&graph, &measured.values) };
    Ok(CutModel { segments, infos, activations, operators: Some(measured) })
}

/// Reads a model, or only the fields of it that another message type has.
pub(super) fn read<M: Message + Default>(path: &Path) -> Result<M, String> {
    let bytes = downbeat_engine::model_bytes(path).map_err(|e| format!("{} cannot be read: {e}", path.display()))?;
    M::decode(bytes).map_err(|e| format!("{} cannot be read: {e}", path.display()))
}

/// As [`boundary::find`], but it also accepts names in the model's own file. The library names
/// operators by their value if it changes their layout. It names merged operators after the first.
fn find(graph: &OperatorGraph, name: &str, path: &Path) -> Result<usize, String> {
    let found = boundary::find(graph, name, same);
    if found.is_ok() {
        return found;
    }
    let Some(original) = read::<ModelProto>(path).ok().and_then(|m| m.graph) else { return found };
    let value = original.node.iter().find(|n| n.name == name).and_then(|n| n.output.first());
    behind(graph, &original, value.map_or(name, String::as_str), 0).map_or(found, Ok)
}

fn same(operator: &str, name: &str) -> bool {
    operator == name || operator.strip_suffix("_nchwc") == Some(name)
}

/// The boundary behind a value of the model's own file. It is the boundary of the value's operator.
/// If that operator was merged into one before it, it is the boundary of the last such operator.
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
    measured: &'a OperatorProfile,
    in_place: bool,
}

/// A segment as a model of its own, and the wiring of its runs.
pub(super) struct Segment {
    /// The model, encoded.
    pub model: Vec<u8>,
    /// The names of the inputs of its runs.
    pub inputs: Vec<String>,
    /// The names of the outputs of its runs.
    pub outputs: Vec<String>,
    pub wiring: Wiring,
}

impl Cutter<'_> {
    /// The segments between these boundaries.
    fn segments(&self, signature: &Signature, chosen: &[Boundary]) -> Result<Vec<Segment>, String> {
        let mut states = vec![signature.inputs.clone()];
        states.extend(chosen.iter().map(|b| b.live.clone()));
        states.push(signature.outputs.clone());
        let mut segments = Vec::with_capacity(chosen.len() + 1);
        let mut start = 0;
        for (state, end) in states.windows(2).zip(self.ends(chosen)) {
            let [before, behind] = state else { continue };
            let segment = self.segment(start..end, before, behind);
            segments.push(segment.map_err(|e| format!("segment {} cannot be made: {e}", segments.len()))?);
            start = end;
        }
        Ok(segments)
    }

    /// The end of each segment, as a number of operators.
    fn ends(&self, chosen: &[Boundary]) -> Vec<usize> {
        chosen.iter().map(|b| b.at).chain([self.graph.operators.len()]).collect()
    }

    fn segment(&self, range: Range<usize>, before: &[TensorSpec], behind: &[TensorSpec]) -> Result<Segment, String> {
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
                // Made by this segment, or a weight that is an output of the model.
                _ => {
                    outputs.push(spec.name.clone());
                    Source::Made(outputs.len() - 1)
                }
            };
            wiring.gives.push((spec.clone(), source));
        }
        if self.in_place {
            self.in_place(range.clone(), before, behind, &mut outputs, &mut wiring);
        }
        let model = self.model(range, before, &inputs, behind, &outputs)?.encode_to_vec();
        Ok(Segment { model, inputs, outputs, wiring })
    }

    /// Finds convolutions that add an input of the segment as its last user, and makes their
    /// results outputs.
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
