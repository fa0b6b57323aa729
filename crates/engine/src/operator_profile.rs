//! What each operator of a model takes and gives, as it was measured to cut the model.

use std::collections::BTreeMap;

use downbeat_core::Duration;
use serde::{Deserialize, Serialize};

use crate::boundary::MeasuredValue;
use crate::onnx::graph::OperatorGraph;

/// What each operator of a model takes and gives, as the engine runs it. With it the same file is cut again, at the same places or at others, without running it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperatorProfile {
    /// A checksum of the operators: another version of an engine may merge others.
    graph: u32,
    /// By the name of the value.
    pub(crate) values: BTreeMap<String, MeasuredValue>,
    /// Of each operator, at batch 1: the median.
    pub(crate) times: Vec<Duration>,
    /// What the arena held in the end, bytes; only newer libraries say.
    pub(crate) arena: Option<u64>,
}

impl OperatorProfile {
    pub(crate) fn new(
        graph: &OperatorGraph,
        values: BTreeMap<String, MeasuredValue>,
        times: Vec<Duration>,
        arena: Option<u64>,
    ) -> Self {
        OperatorProfile { graph: checksum(graph), values, times, arena }
    }

    /// Whether it is of this graph.
    pub(crate) fn is_of(&self, graph: &OperatorGraph) -> bool {
        self.graph == checksum(graph) && self.times.len() == graph.operators.len()
    }

    /// How many operators there are.
    pub fn operators(&self) -> usize {
        self.times.len()
    }

    /// What all of them take at batch 1.
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
