//! What was measured when a model was cut: the time of each operator, and the sizes of the values
//! between operators.

use std::collections::BTreeMap;

use downbeat_core::Duration;
use serde::{Deserialize, Serialize};

use crate::cut::boundary::MeasuredValue;
use crate::onnx::graph::OperatorGraph;

/// The measured time and values of each operator, as the engine runs it. With the profile the
/// engine cuts the same file again, at any places, without running it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperatorProfile {
    /// A checksum of the operators: another version of an engine may merge others.
    graph: u32,
    /// The values by their names.
    pub values: BTreeMap<String, MeasuredValue>,
    /// The median time of each operator, at batch 1.
    pub times: Vec<Duration>,
    /// Bytes that the arena held in the end; only newer libraries report it.
    pub arena: Option<u64>,
}

impl OperatorProfile {
    /// The profile of a graph with these measurements.
    pub fn new(
        graph: &OperatorGraph,
        values: BTreeMap<String, MeasuredValue>,
        times: Vec<Duration>,
        arena: Option<u64>,
    ) -> Self {
        OperatorProfile { graph: checksum(graph), values, times, arena }
    }

    /// Whether the profile is of this graph.
    pub fn is_of(&self, graph: &OperatorGraph) -> bool {
        self.graph == checksum(graph) && self.times.len() == graph.operators.len()
    }

    /// The number of operators.
    pub fn operators(&self) -> usize {
        self.times.len()
    }

    /// The sum of the operators' times at batch 1.
    pub fn total(&self) -> Duration {
        self.times.iter().fold(Duration::ZERO, |sum, time| sum + *time)
    }
}

fn checksum(graph: &OperatorGraph) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for operator in &graph.operators {
        for text in operator.inputs.iter().chain(&operator.outputs).chain([&operator.name]) {
            hasher.update(text.as_bytes());
            hasher.update(&[0]);
        }
    }
    hasher.finalize()
}
