//! Cutting. RTen can run a graph from any values to any other values. So a segment is a pair of
//! states, and nothing is loaded twice.
//!
//! The boundaries come from the file's own graph, in which RTen has merged operators. Trial runs
//! find the values that RTen no longer has. RTen reports no operator's time, so that a boundary's
//! time is that of a run up to it.

use std::collections::BTreeMap;

use downbeat_core::Duration;
use downbeat_core::tensor::{DataType, TensorSpec};
use prost::Message;
use rten::NodeId;
use rten_tensor::Layout;

use super::value::value_of;
use super::{Live, RtenShared};
use crate::cut::activations::Activations;
use crate::cut::boundary::{self, Boundaries, Boundary, MeasuredValue};
use crate::cut::probe::{self, Probe};
use crate::cut::{Cut, SegmentInfo};
use crate::onnx;
use crate::onnx::graph::OperatorGraph;
use crate::onnx::proto::ModelProto;
use crate::traits::{LoadOptions, Share};

/// Most boundaries that are timed, if there are not many stages. Among neighbours the one with the
/// fewest live bytes is timed.
const TIMED: usize = 32;
/// Runs up to a boundary; the shortest counts.
const RUNS: usize = 2;

/// Cuts a model.
///
/// # Errors
/// In words: the reason why the model cannot be cut, and how far it can.
pub(super) fn cut(
    mut whole: RtenShared,
    options: &LoadOptions,
) -> Result<(RtenShared, Vec<SegmentInfo>, Activations), String> {
    probe::has_batch(&whole.signature)?;
    let bytes = onnx::model_bytes(&options.path).map_err(|e| format!("it cannot be read: {e}"))?;
    let mut model = ModelProto::decode(bytes).map_err(|e| format!("it cannot be read: {e}"))?;
    let graph = OperatorGraph::exits_first(model.graph.as_mut().ok_or("it has no graph")?)?;
    drop(model);
    let run = |probe| Trial { shared: &whole, probe }.values(&graph);
    let (probe, values) = probe::first(&whole.signature, run)?;
    let trial = Trial { shared: &whole, probe };
    let mut boundaries = Boundaries::new(&graph, &values, &[]);
    let mut total = Duration::ZERO;
    let stages = match options.cut {
        Cut::Stages(stages) => Some(stages),
        Cut::UpTo(most) => Some(boundaries.stages(most)),
        Cut::Whole | Cut::At(_) => None,
    };
    if let Some(stages) = stages
        && (2..=boundaries.possible.len() + 1).contains(&stages)
    {
        let group = (boundaries.possible.len() / TIMED.max(3 * (stages - 1))).max(1);
        let least = boundaries.possible.chunks(group).filter_map(|group| group.iter().min_by_key(|b| b.bytes)).cloned();
        boundaries.possible = least.collect();
        total = trial.time(&mut boundaries.possible)?;
    }
    let find = |name: &str| boundary::find(&graph, name, |operator, name| operator == name);
    let mut chosen = loop {
        let chosen = boundaries.choose(&options.cut, graph.operators.len(), total, find)?;
        // RTen may have merged operators across a boundary; then another is chosen.
        let refused = chosen.iter().find_map(|b| Some((b.at, trial.resume(&b.live).err()?)));
        let Some((at, reason)) = refused else { break chosen };
        boundaries.possible.retain(|b| b.at != at);
        boundaries.refused.insert(at, format!("RTen has merged operators there: {reason}"));
    };
    if total == Duration::ZERO {
        total = trial.time(&mut chosen)?;
    }

    let mut times: BTreeMap<usize, Duration> = chosen.iter().map(|b| (b.at, b.time)).collect();
    times.insert(0, Duration::ZERO);
    times.insert(graph.operators.len(), total);
    let time = |from: usize, to: usize| Some(times.get(&to)?.saturating_sub(*times.get(&from)?));
    let segments = boundary::describe(&graph, &chosen, &whole.signature.outputs, &values, time);
    let activations = boundary::activations(&graph, &values);
    let states = chosen.into_iter().map(|b| whole.state(b.live)).collect::<Result<Vec<_>, _>>()?;
    let end = whole.states.len() - 1;
    whole.states.splice(end..end, states);
    Ok((whole, segments, activations))
}

/// Datatype and sizes.
type Shape = (DataType, Vec<usize>);

/// A model in trial runs, which show where it can be cut.
struct Trial<'a> {
    shared: &'a RtenShared,
    probe: Probe,
}

impl Trial<'_> {
    /// The values that RTen still has, with their shapes at three batch sizes.
    fn values(&self, graph: &OperatorGraph) -> Result<BTreeMap<String, MeasuredValue>, String> {
        let RtenShared { signature, .. } = self.shared;
        let mut values = self.probe.input_values(signature);
        // Checks that the model runs at all.
        let outputs = self.shared.states.last().ok_or("it has no outputs")?;
        self.shapes(outputs, 1, self.probe.length)?;
        let names = graph.operators.iter().flat_map(|o| &o.outputs);
        let known: Vec<(&String, NodeId)> = names.filter_map(|n| Some((n, self.shared.model.find_node(n)?))).collect();
        let mut there = Vec::new();
        self.given(&known, &mut there);
        let live = Live { specs: Vec::new(), nodes: there.iter().map(|(_, id)| *id).collect() };
        let shapes = |(batch, length)| self.shapes(&live, batch, length);
        let [one, two, three] = self.probe.sizes();
        let (one, two, three) = (shapes(one)?, shapes(two)?, shapes(three)?);
        for ((((name, _), one), two), three) in there.iter().zip(one).zip(two).zip(three) {
            let (Some((datatype, one)), Some((_, two)), Some((_, three))) = (one, two, three) else { continue };
            // For an output the signature has the exact datatype; RTen has no 64-bit integers.
            let declared = signature.outputs.iter().find(|o| o.name == **name).map(|o| o.datatype);
            let spec = TensorSpec { name: (*name).clone(), datatype: declared.unwrap_or(datatype), dims: Vec::new() };
            values.insert((*name).clone(), MeasuredValue::new(spec, &one, &[(2, &two), (3, &three)]));
        }
        Ok(values)
    }

    /// Finds the values that a run can give: all at once, or, where RTen has merged some away, by
    /// halves.
    fn given<'n>(&self, known: &[(&'n String, NodeId)], there: &mut Vec<(&'n String, NodeId)>) {
        let live = Live { specs: Vec::new(), nodes: known.iter().map(|(_, id)| *id).collect() };
        if known.is_empty() {
        } else if self.run(&live, 1, self.probe.length).is_ok() {
            there.extend(known);
        } else if let (one, other) = known.split_at(known.len() / 2)
            && !one.is_empty()
        {
            self.given(one, there);
            self.given(other, there);
        }
    }

    fn run(&self, live: &Live, batch: usize, length: usize) -> Result<Vec<rten::Value>, String> {
        let tensors = self.probe.inputs(&self.shared.signature, batch, length)?;
        let before = self.shared.states.first().ok_or("it has no inputs")?;
        let inputs = before.nodes.iter().zip(&tensors).map(|(id, t)| Ok((*id, value_of(t)?)));
        self.shared.values(self.shared.pool(Share::Whole), inputs.collect::<Result<_, String>>()?, &live.nodes)
    }

    /// Datatypes and shapes; `None` for a value that is no tensor.
    fn shapes(&self, live: &Live, batch: usize, length: usize) -> Result<Vec<Option<Shape>>, String> {
        let shape = |value: rten::Value| {
            let datatype = match &value {
                rten::Value::FloatTensor(_) => DataType::Fp32,
                rten::Value::Int32Tensor(_) => DataType::Int32,
                rten::Value::Int8Tensor(_) => DataType::Int8,
                rten::Value::UInt8Tensor(_) => DataType::Uint8,
                _ => return None,
            };
            Some((datatype, value.shape().to_vec()))
        };
        Ok(self.run(live, batch, length)?.into_iter().map(shape).collect())
    }

    /// Runs up to a place, and from that place to the end.
    fn resume(&self, live: &[TensorSpec]) -> Result<(), String> {
        let (Some(before), Some(behind)) = (self.shared.states.first(), self.shared.states.last()) else {
            return Ok(());
        };
        let live = self.shared.state(live.to_vec())?;
        let tensors = self.probe.inputs(&self.shared.signature, 1, self.probe.length)?;
        let pool = self.shared.pool(Share::Whole);
        let tensors = self.shared.run(pool, before, &live, tensors)?;
        self.shared.run(pool, &live, behind, tensors).map(|_| ())
    }

    /// Measures the model's time up to each boundary, at batch 1, and in all.
    fn time(&self, boundaries: &mut [Boundary]) -> Result<Duration, String> {
        let length = self.probe.length;
        let mut before = Duration::ZERO;
        for boundary in boundaries {
            let live = self.shared.state(boundary.live.clone())?;
            // More operators take no less time, in spite of a shorter measurement.
            before = before.max(self.shortest(&live, length)?);
            boundary.time = before;
        }
        let outputs = self.shared.states.last().ok_or("it has no outputs")?;
        Ok(before.max(self.shortest(outputs, length)?))
    }

    #[expect(clippy::disallowed_methods, reason = "how long operators take on this machine is what a cut goes by")]
    fn shortest(&self, live: &Live, length: usize) -> Result<Duration, String> {
        let mut shortest = std::time::Duration::MAX;
        for _ in 0..RUNS {
            let start = std::time::Instant::now();
            self.run(live, 1, length)?;
            shortest = shortest.min(start.elapsed());
        }
        Ok(Duration::from_nanos(u64::try_from(shortest.as_nanos()).unwrap_or(u64::MAX)))
    }
}
