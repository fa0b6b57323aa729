//! What each operator of a model takes and gives, by the library's own profile.

use std::collections::BTreeMap;
use std::path::Path;

use downbeat_core::Duration;
use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use prost::Message;
use serde::Deserialize;

use super::commit;
use super::cut::PartBuilder;
use super::session::{Part, SessionModel};
use crate::boundary::Value;
use crate::onnx::graph::OperatorGraph;
use crate::onnx::proto::ModelProto;
use crate::probe::{self, Probe};
use crate::state::State;
use crate::traits::Model;

/// Runs at batch 1, of which the first ones are not counted.
const RUNS: usize = 7;
const WARM_UP: usize = 2;

/// What was measured.
pub(super) struct Measured {
    /// By the name of the value.
    pub values: BTreeMap<String, Value>,
    /// Of each operator, at batch 1: the median.
    pub times: Vec<Duration>,
    /// What the arena held in the end, bytes; only newer libraries say.
    pub arena: Option<u64>,
}

#[derive(Deserialize)]
struct Event {
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

/// Runs the whole model, operators renamed to their index, at batch sizes 1, 2 and 3 and two lengths.
pub(super) fn measure(
    builder: PartBuilder<'_>,
    model: &ModelProto,
    graph: &OperatorGraph,
    signature: &Signature,
    folder: &Path,
) -> Result<Measured, String> {
    let mut renamed = model.clone();
    for (index, node) in renamed.graph.iter_mut().flat_map(|g| &mut g.node).enumerate() {
        node.name = format!("#{index}");
    }
    let bytes = renamed.encode_to_vec();
    let run = |probe: Probe| events(builder, &bytes, signature, folder, &probe);
    let (probe, events) = probe::first(signature, run)?;
    Ok(evaluate(graph, signature, &probe, &events))
}

fn events(
    builder: PartBuilder<'_>,
    model: &[u8],
    signature: &Signature,
    folder: &Path,
    probe: &Probe,
) -> Result<Vec<Event>, String> {
    let mut session = builder()
        .and_then(|b| Ok(b.with_profiling(folder.join("profile"))?))
        // An arena of its own, so that it says what this model alone takes.
        .and_then(|b| Ok(b.with_config_entry("session.use_env_allocators", "0")?))
        .and_then(|b| commit(b, |b| b.commit_from_memory(model)))
        .map_err(|e| e.message().to_owned())?;
    let part = Part::whole(&session, signature)?;
    let whole = SessionModel::cut(vec![part], signature.clone(), Vec::new(), None)?;
    let mut lane = whole.lane().map_err(|e| e.to_string())?;
    let [one, two, three] = probe.sizes();
    for (batch, length) in std::iter::repeat_n(one, RUNS).chain([two, three]) {
        let mut state = State { tensors: probe.inputs(signature, batch, length)? };
        lane.run(0..1, &mut state).map_err(|e| e.reason)?;
    }
    let file = session.end_profiling().map_err(|e| e.message().to_owned())?;
    let text = std::fs::read(&file).map_err(|e| format!("the profile {file} cannot be read: {e}"))?;
    serde_json::from_slice(&text).map_err(|e| format!("the profile {file} cannot be read: {e}"))
}

fn evaluate(graph: &OperatorGraph, signature: &Signature, probe: &Probe, events: &[Event]) -> Measured {
    let mut values = probe.input_values(signature);
    // Each operator's runs, in order.
    let mut runs: Vec<Vec<&Event>> = graph.operators.iter().map(|_| Vec::new()).collect();
    for event in events {
        let index = event.name.strip_prefix('#').and_then(|n| n.strip_suffix("_kernel_time"));
        if let Some(runs) = index.and_then(|n| n.parse::<usize>().ok()).and_then(|n| runs.get_mut(n)) {
            runs.push(event);
        }
    }
    let mut times = Vec::with_capacity(runs.len());
    for (operator, runs) in graph.operators.iter().zip(&runs) {
        let mut taken: Vec<u64> = runs.iter().take(RUNS).skip(WARM_UP).map(|e| e.dur.max(0) as u64).collect();
        taken.sort_unstable();
        times.push(Duration::from_micros(taken.get(taken.len() / 2).copied().unwrap_or(0)));
        let (Some(one), Some(two), Some(three)) = (runs.first(), runs.get(RUNS), runs.get(RUNS + 1)) else { continue };
        for (index, name) in operator.outputs.iter().enumerate() {
            // A value that is no tensor is not in the list, which is then shorter than the outputs.
            let output = |event: &'_ Event| {
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
            values.insert(name.clone(), Value::new(spec, &one, &[(2, &two), (3, &three)]));
        }
    }
    let at_batch_1 =
        runs.iter().filter_map(|r| r.get(RUNS - 1)).filter_map(|e| e.args.mem_arena_held.as_ref()?.parse().ok());
    Measured { values, times, arena: at_batch_1.max() }
}

/// The datatype that the library's profile calls so.
fn datatype(kind: &str) -> Option<DataType> {
    Some(match kind {
        "float" => DataType::Fp32,
        "double" => DataType::Fp64,
        "float16" => DataType::Fp16,
        "bfloat16" => DataType::Bf16,
        "int64" => DataType::Int64,
        "int32" => DataType::Int32,
        "int16" => DataType::Int16,
        "int8" => DataType::Int8,
        "uint64" => DataType::Uint64,
        "uint32" => DataType::Uint32,
        "uint16" => DataType::Uint16,
        "uint8" => DataType::Uint8,
        "bool" => DataType::Bool,
        "string" => DataType::Bytes,
        _ => return None,
    })
}
