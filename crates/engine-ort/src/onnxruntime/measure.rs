//! Measures the times and values of a model's operators, with the library's own profile.

use std::collections::BTreeMap;
use std::path::Path;

use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_core::{Duration, median};
use downbeat_engine::Model;
use downbeat_engine::cut::boundary::MeasuredValue;
use downbeat_engine::cut::operator_profile::OperatorProfile;
use downbeat_engine::cut::probe::{self, Probe};
use downbeat_engine::onnx::graph::OperatorGraph;
use downbeat_engine::onnx::proto::ModelProto;
use downbeat_engine::tensor::state::State;
use ort::session::Session;
use prost::Message;
use serde::Deserialize;

use super::cuda::{Marked, OperatorMarks};
use super::cut::{self, PartBuilder};
use super::runtime::commit;
use super::session::{SessionModel, SessionPart, Wiring};

/// Runs at batch 1. The first [`WARM_UP`] of them are not counted.
const RUNS: usize = 7;
const WARM_UP: usize = 2;

#[derive(Deserialize)]
struct ProfileEvent {
    #[serde(default)]
    name: String,
    /// Microseconds.
    #[serde(default)]
    dur: i64,
    #[serde(default)]
    args: Arguments,
}

#[derive(Deserialize, Default)]
struct Arguments {
    #[serde(default)]
    output_type_shape: Vec<BTreeMap<String, Vec<usize>>>,
    #[serde(default)]
    mem_arena_held: Option<String>,
}

/// Runs the whole model, with operators renamed to their index, at batch sizes 1, 2 and 3 and two
/// lengths, in one session.
///
/// `marks` measures the operators' times on a GPU, where the library's own profile has only the
/// time to enqueue them.
pub(super) fn measure(
    builder: PartBuilder<'_>,
    model: &ModelProto,
    graph: &OperatorGraph,
    signature: &Signature,
    folder: &Path,
    marks: Option<&OperatorMarks>,
) -> Result<OperatorProfile, String> {
    let mut renamed = model.clone();
    for (index, node) in renamed.graph.iter_mut().flat_map(|g| &mut g.node).enumerate() {
        node.name = format!("#{index}");
    }
    let names = |specs: &[TensorSpec]| specs.iter().map(|s| s.name.clone()).collect::<Vec<_>>();
    let (inputs, mut outputs) = (names(&signature.inputs), names(&signature.outputs));
    let marked = match marks {
        None => None,
        Some(marks) => {
            let marked = Marked::new(&mut renamed, graph, &cut::read(&folder.join(cut::MODEL))?)?;
            outputs.iter_mut().for_each(|output| *output = marked.name(output).to_owned());
            Some((marks, marked))
        }
    };
    let mut bytes = renamed.encode_to_vec();
    if let Some((_, marked)) = &marked {
        bytes.extend(marked.values().encode_to_vec());
    }
    let subject = Subject { builder, model: &bytes, inputs, outputs, signature, folder, marked };
    let (probe, Runs { events, at_batch_1, times }) = probe::first(signature, |probe| subject.run(&probe))?;
    let Evaluated { values, times: of_profile, arena } = evaluate(graph, signature, &probe, &events, at_batch_1);
    Ok(OperatorProfile::new(graph, values, times.unwrap_or(of_profile), arena))
}

/// The whole model, which runs in a session that writes the library's profile.
struct Subject<'a> {
    builder: PartBuilder<'a>,
    model: &'a [u8],
    inputs: Vec<String>,
    outputs: Vec<String>,
    signature: &'a Signature,
    folder: &'a Path,
    marked: Option<(&'a OperatorMarks, Marked)>,
}

/// The results of its runs.
struct Runs {
    events: Vec<ProfileEvent>,
    /// The number of the profile's runs at batch 1.
    at_batch_1: usize,
    /// The times of each operator, measured by marks.
    times: Option<Vec<Duration>>,
}

impl Subject<'_> {
    fn run(&self, probe: &Probe) -> Result<Runs, String> {
        let turn = || self.marked.as_ref().map(|(marks, _)| marks.turn());
        let made = {
            let _turn = turn();
            (self.builder)()
                .and_then(|b| Ok(b.with_profiling(self.folder.join("profile"))?))
                // An arena of its own, so that its size is that of this model alone.
                .and_then(|b| Ok(b.with_config_entry("session.use_env_allocators", "0")?))
                .and_then(|b| commit(b, |b| b.commit_from_memory(self.model)))
        };
        let mut session = made.map_err(|e| e.message().to_owned())?;
        let runs = self.run_in(&mut session, probe);
        let _turn = turn();
        drop(session);
        runs
    }

    fn run_in(&self, session: &mut Session, probe: &Probe) -> Result<Runs, String> {
        let part = SessionPart::new(session, &self.inputs, &self.outputs, Wiring::whole(self.signature))?;
        let whole = SessionModel::new(vec![part], self.signature.clone())?;
        let mut lane = whole.lane().map_err(|e| e.to_string())?;
        let mut run = |batch, length| {
            let mut state = State { tensors: probe.inputs(self.signature, batch, length)? };
            lane.run(0..1, &mut state).map_err(|e| e.reason)
        };
        let at_batch_1 = if self.marked.is_some() { 1 } else { RUNS };
        let [one, two, three] = probe.sizes();
        for (batch, length) in std::iter::repeat_n(one, at_batch_1).chain([two, three]) {
            run(batch, length)?;
        }
        // From here on the library writes nothing between operators.
        let file = session.end_profiling().map_err(|e| e.message().to_owned())?;
        let text = std::fs::read(&file).map_err(|e| format!("the profile {file} cannot be read: {e}"))?;
        let events = serde_json::from_slice(&text).map_err(|e| format!("the profile {file} cannot be read: {e}"))?;
        let mut times = None;
        if let Some((marks, marked)) = &self.marked {
            let mut taken = Vec::with_capacity(RUNS);
            for _ in 0..RUNS {
                taken.push(marks.time(marked, || run(one.0, one.1))?);
            }
            times = Some(marked.of_operators(&taken[WARM_UP..]));
        }
        Ok(Runs { events, at_batch_1, times })
    }
}

/// The measurements in a profile.
struct Evaluated {
    /// The values by their names.
    values: BTreeMap<String, MeasuredValue>,
    /// The median time of each operator, at batch 1.
    times: Vec<Duration>,
    arena: Option<u64>,
}

fn evaluate(
    graph: &OperatorGraph,
    signature: &Signature,
    probe: &Probe,
    events: &[ProfileEvent],
    at_batch_1: usize,
) -> Evaluated {
    let mut values = probe.input_values(signature);
    // Each operator's runs, in order.
    let mut runs: Vec<Vec<&ProfileEvent>> = graph.operators.iter().map(|_| Vec::new()).collect();
    for event in events {
        let index = event.name.strip_prefix('#').and_then(|n| n.strip_suffix("_kernel_time"));
        if let Some(runs) = index.and_then(|n| n.parse::<usize>().ok()).and_then(|n| runs.get_mut(n)) {
            runs.push(event);
        }
    }
    let mut times = Vec::with_capacity(runs.len());
    for (operator, runs) in graph.operators.iter().zip(&runs) {
        let taken = runs.iter().take(at_batch_1).skip(WARM_UP).map(|e| e.dur.max(0) as u64);
        times.push(Duration::from_micros(median(taken).unwrap_or(0)));
        let (Some(one), Some(two), Some(three)) = (runs.first(), runs.get(at_batch_1), runs.get(at_batch_1 + 1)) else {
            continue;
        };
        for (index, name) in operator.outputs.iter().enumerate() {
            // The list lacks values that are no tensors, and is then shorter than the outputs.
            let output = |event: &'_ ProfileEvent| {
                let shapes = &event.args.output_type_shape;
                let (kind, shape) = shapes.get(index)?.first_key_value()?;
                (shapes.len() == operator.outputs.len()).then(|| (kind.clone(), shape.clone()))
            };
            let (Some((kind, one)), Some((_, two)), Some((_, three))) = (output(one), output(two), output(three))
            else {
                continue;
            };
            let Some(datatype) = datatype(&kind) else { continue };
            let spec = TensorSpec { name: name.clone(), datatype, dims: Vec::new() };
            values.insert(name.clone(), MeasuredValue::new(spec, &one, &[(2, &two), (3, &three)]));
        }
    }
    let held =
        runs.iter().filter_map(|r| r.get(at_batch_1 - 1)).filter_map(|e| e.args.mem_arena_held.as_ref()?.parse().ok());
    Evaluated { values, times, arena: held.max() }
}

/// The datatype for a name in the library's profile.
fn datatype(kind: &str) -> Option<DataType> {
    Some(match kind {
        "float" => DataType::Fp32,
        "double" => DataType::Fp64,
        "float16" => DataType::Fp16,
        "bfloat16" => DataType::Bf16,
        "string" => DataType::Bytes,
        // The protocol has the same name in capitals.
        other => other.to_ascii_uppercase().parse().ok()?,
    })
}
