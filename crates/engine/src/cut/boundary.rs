//! The choice of the boundaries between operators at which a model is cut.

use std::collections::BTreeMap;

use downbeat_core::Duration;
use downbeat_core::tensor::TensorSpec;
use serde::{Deserialize, Serialize};

use crate::cut::activations::{Activations, Lifetime};
use crate::cut::{Cut, SegmentInfo};
use crate::onnx::graph::OperatorGraph;

/// A boundary with fewer live bytes is preferred up to this distance from the ideal point, in parts
/// of a stage's time.
const WINDOW: f64 = 0.25;

/// The measurements of a value at batch sizes 1, 2 and 3, and, where sizes vary, at two lengths.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredValue {
    /// The value's datatype and sizes, -1 for sizes that varied.
    pub spec: TensorSpec,
    /// Whether axis 0 was the batch.
    pub batched: bool,
    /// Bytes at batch 1.
    pub bytes: u64,
}

impl MeasuredValue {
    /// Compares the shapes that a value had at batch 1 and, for each of `others`, at another.
    pub fn new(spec: TensorSpec, one: &[usize], others: &[(usize, &[usize])]) -> MeasuredValue {
        let alike = others.iter().all(|(_, shape)| shape.len() == one.len());
        let axis_0 = |batch: usize, shape: &[usize]| shape.first() == Some(&batch);
        let batched = alike && axis_0(1, one) && others.iter().all(|(batch, shape)| axis_0(*batch, shape));
        let size = |(axis, d): (usize, &usize)| {
            let same = others.iter().all(|(_, shape)| shape.get(axis) == Some(d));
            if same && !(batched && axis == 0) { i64::try_from(*d).unwrap_or(-1) } else { -1 }
        };
        let dims = one.iter().enumerate().map(size).collect();
        let elements = one.iter().map(|d| *d as u64).product::<u64>();
        let bytes = elements.saturating_mul(spec.datatype.size().unwrap_or(4) as u64);
        MeasuredValue { spec: TensorSpec { dims, ..spec }, batched, bytes }
    }
}

/// A place between two operators where the state of a batch can be kept, divided and joined.
#[derive(Clone, Debug)]
pub struct Boundary {
    /// The number of operators before it.
    pub at: usize,
    /// The tensors that are alive at the boundary.
    pub live: Vec<TensorSpec>,
    /// Bytes of the live tensors at batch 1.
    pub bytes: u64,
    /// The time of the operators before it.
    pub time: Duration,
}

/// The possible boundaries, and the reasons against the others.
#[derive(Debug, Default)]
pub struct Boundaries {
    /// The boundaries at which the model can be cut, in order.
    pub possible: Vec<Boundary>,
    /// The reasons, by the number of operators before the boundary.
    pub refused: BTreeMap<usize, String>,
}

impl Boundaries {
    /// Examines every boundary inside the graph. `times` has the time of each operator.
    pub fn new(graph: &OperatorGraph, values: &BTreeMap<String, MeasuredValue>, times: &[Duration]) -> Boundaries {
        let mut boundaries = Boundaries::default();
        let mut time = Duration::ZERO;
        for (at, live) in graph.live().iter().enumerate().take(graph.operators.len()).skip(1) {
            time += times.get(at - 1).copied().unwrap_or_default();
            let found = live.iter().map(|name| match values.get(*name) {
                Some(value) if value.batched => Ok(value),
                Some(value) => Err(format!(
                    "'{name}' is alive there, and the batch is not its first axis (it has {:?})",
                    value.spec.dims
                )),
                None => Err(format!("'{name}' is alive there and is not a tensor of a known shape")),
            });
            match found.collect::<Result<Vec<&MeasuredValue>, String>>() {
                Ok(live) => boundaries.possible.push(Boundary {
                    at,
                    live: live.iter().map(|v| v.spec.clone()).collect(),
                    bytes: live.iter().map(|v| v.bytes).sum(),
                    time,
                }),
                Err(reason) => {
                    boundaries.refused.insert(at, reason);
                }
            }
        }
        boundaries
    }

    /// The boundaries to cut at, ascending. `total` is the time of all operators. `find` returns
    /// the number of operators before the boundary behind a name.
    ///
    /// # Errors
    /// In words: more stages than there can be, an unknown name, or a name behind which no cut is
    /// possible.
    pub fn choose(
        &self,
        cut: &Cut,
        operators: usize,
        total: Duration,
        find: impl Fn(&str) -> Result<usize, String>,
    ) -> Result<Vec<Boundary>, String> {
        match cut {
            Cut::Whole => Ok(Vec::new()),
            Cut::Stages(0) => Err("the model cannot be cut into 0 segments; ask for 1 or more".into()),
            Cut::Stages(stages) if *stages > operators => Err(format!(
                "the model cannot be cut into {stages} segments: it has {operators} operators as the engine runs it. Ask for at most {}",
                self.possible.len() + 1
            )),
            Cut::Stages(stages) if stages - 1 > self.possible.len() => Err(self.too_few(*stages)),
            Cut::Stages(stages) => Ok(self.equal_times(*stages, total)),
            Cut::UpTo(_) if self.possible.is_empty() => Err(self.too_few(2)),
            Cut::UpTo(most) => Ok(self.equal_times(self.stages(*most), total)),
            Cut::At(names) => self.named(names, operators, find),
        }
    }

    /// The number of stages of [`Cut::UpTo`].
    pub fn stages(&self, most: usize) -> usize {
        most.clamp(2, self.possible.len().max(1) + 1)
    }

    fn too_few(&self, stages: usize) -> String {
        let why = match self.refused.iter().next_back() {
            Some((at, why)) => format!(" (not behind operator {at}, for example: {why})"),
            None => String::new(),
        };
        format!(
            "the model cannot be cut into {stages} segments: there are {} places where every live tensor has the batch as its first axis{why}. Ask for at most {}",
            self.possible.len(),
            self.possible.len() + 1
        )
    }

    fn equal_times(&self, stages: usize, total: Duration) -> Vec<Boundary> {
        let total = total.as_secs_f64();
        let stage = total / stages as f64;
        let mut chosen: Vec<Boundary> = Vec::with_capacity(stages.saturating_sub(1));
        // The first boundary that may be taken. Each stage leaves enough boundaries to the later
        // stages.
        let mut from = 0;
        for k in 1..stages {
            let until = self.possible.len() - (stages - 1 - k);
            let off = |b: &Boundary| (b.time.as_secs_f64() - stage * k as f64).abs();
            let room = self.possible.iter().enumerate().take(until).skip(from);
            let near = room
                .clone()
                .filter(|(_, b)| off(b) <= stage * WINDOW)
                .min_by(|(_, a), (_, b)| a.bytes.cmp(&b.bytes).then(off(a).total_cmp(&off(b))));
            let nearest = || room.clone().min_by(|(_, a), (_, b)| off(a).total_cmp(&off(b)));
            let Some((index, boundary)) = near.or_else(nearest) else { break };
            chosen.push(boundary.clone());
            from = index + 1;
        }
        chosen
    }

    fn named(
        &self,
        names: &[String],
        operators: usize,
        find: impl Fn(&str) -> Result<usize, String>,
    ) -> Result<Vec<Boundary>, String> {
        let mut chosen: BTreeMap<usize, (&str, &Boundary)> = BTreeMap::new();
        for name in names {
            let at = find(name)?;
            if at == operators {
                return Err(format!("the model cannot be cut behind '{name}': nothing comes after it"));
            }
            let Some(boundary) = self.possible.iter().find(|b| b.at == at) else {
                let why = self.refused.get(&at).map_or("", String::as_str);
                return Err(format!("the model cannot be cut behind '{name}': {why}"));
            };
            if let Some((other, _)) = chosen.insert(at, (name, boundary)) {
                return Err(format!("'{other}' and '{name}' are the same place; name it once"));
            }
        }
        Ok(chosen.into_values().map(|(_, b)| b.clone()).collect())
    }
}

/// The number of operators before the boundary behind a value or an operator.
pub fn find(graph: &OperatorGraph, name: &str, same: impl Fn(&str, &str) -> bool) -> Result<usize, String> {
    let place = graph.operators.iter().position(|o| o.outputs.iter().any(|v| v == name));
    let place = place.or_else(|| graph.operators.iter().position(|o| same(&o.name, name)));
    place.map(|index| index + 1).ok_or_else(|| {
        let names = graph.operators.iter().flat_map(|o| o.outputs.iter().chain([&o.name]));
        let near = names.map(|n| (strsim::damerau_levenshtein(n, name), n)).min();
        let near = near.map_or(String::new(), |(_, n)| format!(". The nearest is '{n}'"));
        format!("the model has no value or operator '{name}' as the engine runs it (operators may have been merged with their neighbours){near}")
    })
}

/// The memory of activations: each with memory of its own, and with a plan.
pub fn activations(graph: &OperatorGraph, values: &BTreeMap<String, MeasuredValue>) -> Activations {
    let last = graph.last_uses();
    let made = graph.operators.iter().enumerate().flat_map(|(from, o)| o.outputs.iter().map(move |v| (from, v)));
    let lifetimes = made.filter_map(|(from, name)| {
        let to = last.get(name.as_str()).copied().unwrap_or(from).max(from);
        Some(Lifetime { bytes: values.get(name)?.bytes, from, to })
    });
    Activations::of(&lifetimes.collect::<Vec<_>>())
}

/// Describes the segments between boundaries, and the segment behind the last of them, which leaves
/// `outputs`.
pub fn describe(
    graph: &OperatorGraph,
    chosen: &[Boundary],
    outputs: &[TensorSpec],
    values: &BTreeMap<String, MeasuredValue>,
    time: impl Fn(usize, usize) -> Option<Duration>,
) -> Vec<SegmentInfo> {
    let output_bytes = graph.outputs.iter().map(|o| values.get(o).map_or(0, |v| v.bytes)).sum();
    let ends = chosen.iter().map(|b| (b.at, b.live.clone(), b.bytes));
    let ends = ends.chain([(graph.operators.len(), outputs.to_vec(), output_bytes)]);
    let mut start = 0;
    ends.map(|(end, live, live_bytes_per_item)| {
        let part = graph.operators.get(start..end).unwrap_or_default();
        let mut used: Vec<&str> = part.iter().flat_map(|o| &o.inputs).map(String::as_str).collect();
        used.sort_unstable();
        used.dedup();
        let weight_bytes = used.iter().filter_map(|name| graph.weights.get(*name)).map(|w| w.bytes).sum();
        let name = |o: Option<&crate::onnx::graph::Operator>| o.map_or_else(String::new, |o| o.name.clone());
        let time = time(start, end);
        start = end;
        let (first, last) = (name(part.first()), name(part.last()));
        SegmentInfo { operators: part.len(), first, last, live, live_bytes_per_item, weight_bytes, time }
    })
    .collect()
}
