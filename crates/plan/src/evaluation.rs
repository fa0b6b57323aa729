//! The objective of a partition and the limits that it breaks, computed from the problem alone.

use std::fmt;

use crate::problem::Problem;
use crate::words::{bytes, number};

/// Share of a limit by which sums of floating-point numbers may be off.
const TOLERANCE: f64 = 1e-9;

/// The sums over the models of one sub-cluster.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Load {
    /// The number of models.
    pub models: usize,
    /// The sum of [`Model::rate`](crate::Model::rate).
    pub rate: f64,
    /// Requests per second of these models.
    pub requests: f64,
    /// Bytes of the models' static memory.
    pub static_memory: u64,
    /// Bytes of the runs that a device has at once: the largest dynamic memory, or more
    /// ([`Problem::runs`]).
    pub dynamic_memory: u64,
}

impl Load {
    /// Bytes that a device of the sub-cluster needs: `sum s + max d`.
    pub fn memory(&self) -> u64 {
        self.static_memory.saturating_add(self.dynamic_memory)
    }
}

/// A limit that is broken, and by how much.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Violation {
    /// More requests per second than [`Problem::max_rate`].
    Rate {
        /// The sub-cluster that is over its limit.
        sub_cluster: usize,
        /// Requests per second too many.
        by: f64,
    },
    /// More bytes than [`Problem::max_memory`].
    Memory {
        /// The sub-cluster that is over its limit.
        sub_cluster: usize,
        /// Bytes too many.
        by: u64,
    },
    /// More moves than [`Problem::max_disruption`].
    Disruption {
        /// Cost too high.
        by: f64,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::Rate { sub_cluster, by } => {
                write!(f, "sub-cluster {sub_cluster} is {} requests/s over its limit", number(*by))
            }
            Violation::Memory { sub_cluster, by } => {
                write!(f, "sub-cluster {sub_cluster} is {} over a device's memory", bytes(*by))
            }
            Violation::Disruption { by } => write!(f, "the moves cost {} more than is allowed", number(*by)),
        }
    }
}

/// A partition, its sums, its objective and the limits that it breaks.
#[derive(Clone, PartialEq, Debug)]
pub struct Evaluation {
    /// The sub-cluster of each model.
    pub assignment: Vec<usize>,
    /// The sums of each sub-cluster.
    pub loads: Vec<Load>,
    /// `deltaR`: the largest distance of a rate from the average, in the unit of the rates.
    pub delta_rate: f64,
    /// `deltaS`: the largest distance of a static memory from the average, bytes.
    pub delta_memory: f64,
    /// `deltaR / Ravg + memory_weight * deltaS / Savg`.
    pub objective: f64,
    /// The cost of leaving the running assignment.
    pub disruption: f64,
    /// The broken limits; empty if the partition can be used.
    pub violations: Vec<Violation>,
}

impl Evaluation {
    /// Evaluates a partition. Returns `None` unless `assignment` has a valid sub-cluster for each
    /// model.
    pub fn of(problem: &Problem, assignment: Vec<usize>) -> Option<Self> {
        if assignment.len() != problem.models.len() || assignment.iter().any(|j| *j >= problem.sub_clusters) {
            return None;
        }
        let mut loads = vec![Load::default(); problem.sub_clusters];
        let mut runs = vec![0_u64; problem.sub_clusters];
        let mut disruption = 0.0;
        for (model, sub_cluster) in problem.models.iter().zip(&assignment) {
            let load = &mut loads[*sub_cluster];
            load.models += 1;
            load.rate += model.rate;
            load.requests += model.requests;
            runs[*sub_cluster] = runs[*sub_cluster].saturating_add(model.dynamic_memory);
            load.static_memory = load.static_memory.saturating_add(model.static_memory);
            load.dynamic_memory = load.dynamic_memory.max(model.dynamic_memory);
            disruption += model.move_cost(*sub_cluster);
        }
        for (load, runs) in loads.iter_mut().zip(runs) {
            load.dynamic_memory = problem.runs_at_once(load.dynamic_memory, runs);
        }
        let (average_rate, average_memory) = (problem.average_rate(), problem.average_memory());
        let delta_rate = loads.iter().map(|load| (load.rate - average_rate).abs()).fold(0.0, f64::max);
        let delta_memory =
            loads.iter().map(|load| (load.static_memory as f64 - average_memory).abs()).fold(0.0, f64::max);
        let mut violations = Vec::new();
        for (sub_cluster, load) in loads.iter().enumerate() {
            if let Some(by) = problem.max_rate.and_then(|max| over(load.requests, max)) {
                violations.push(Violation::Rate { sub_cluster, by });
            }
            if let Some(max) = problem.max_memory
                && load.memory() > max
            {
                violations.push(Violation::Memory { sub_cluster, by: load.memory() - max });
            }
        }
        if let Some(by) = problem.max_disruption.and_then(|max| over(disruption, max)) {
            violations.push(Violation::Disruption { by });
        }
        let objective = share(delta_rate, average_rate) + problem.memory_weight * share(delta_memory, average_memory);
        Some(Evaluation { assignment, loads, delta_rate, delta_memory, objective, disruption, violations })
    }

    /// Whether the partition keeps every limit.
    pub fn is_feasible(&self) -> bool {
        self.violations.is_empty()
    }

    /// `(max - min) / average` of the sub-clusters' request rates (appendix A.2); 0 if there are no
    /// requests.
    pub fn rate_imbalance(&self) -> f64 {
        imbalance(self.loads.iter().map(|load| load.rate))
    }

    /// `(max - min) / average` of the sub-clusters' static memory (appendix A.2); 0 if there is
    /// none.
    pub fn memory_imbalance(&self) -> f64 {
        imbalance(self.loads.iter().map(|load| load.static_memory as f64))
    }
}

/// Returns by how much `value` is over `limit`, if rounding does not explain the difference.
fn over(value: f64, limit: f64) -> Option<f64> {
    (value - limit > TOLERANCE * limit.max(value)).then_some(value - limit)
}

/// `part / whole`; 0 if `whole` is 0.
pub(crate) fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

fn imbalance(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let (mut least, mut most, mut sum, mut count) = (f64::INFINITY, 0.0_f64, 0.0, 0.0);
    for value in values {
        (least, most, sum, count) = (least.min(value), most.max(value), sum + value, count + 1.0);
    }
    share(most - least, sum / count)
}
