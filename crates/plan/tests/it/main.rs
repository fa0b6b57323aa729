//! Tests of the partitioner from outside, in one binary.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod explanations;
mod partitions;
mod workloads;

use downbeat_core::Duration;
use downbeat_plan::{HAS_SOLVER, Method, Model, Options, Plan, PlanError, Problem};

/// A model of `rate` requests/s and so many bytes, which costs 1 to load.
fn model(name: &str, rate: f64, static_memory: u64, dynamic_memory: u64) -> Model {
    let (name, requests, loaded_in) = (name.to_owned(), rate, Vec::new());
    Model { name, rate, requests, static_memory, dynamic_memory, load_cost: 1.0, loaded_in, running: None }
}

/// Models without limits.
fn problem(models: Vec<Model>, sub_clusters: usize) -> Problem {
    let (max_rate, max_memory, runs, max_disruption) = (None, None, None, None);
    Problem { models, sub_clusters, max_rate, max_memory, runs, memory_weight: 1.0, max_disruption }
}

/// A problem with too many models to try every partition. Few models are equal.
fn many(models: usize, sub_clusters: usize) -> Problem {
    let one = |i: usize| {
        let (rate, memory) = (1 + i * 37 % 101, 10 + i as u64 * 53 % 97);
        model(&format!("m{i}"), rate as f64, memory << 20, (i as u64 * 29 % 7) << 20)
    };
    problem((0..models).map(one).collect(), sub_clusters)
}

/// The methods that this build has for finding partitions.
fn methods() -> Vec<Method> {
    let mut methods = vec![Method::Search, Method::SearchThenSolver];
    methods.extend(HAS_SOLVER.then_some(Method::Solver));
    methods
}

/// Plans with a clock that never advances: the result does not depend on how busy the machine is.
fn plan(problem: &Problem, method: Method) -> Result<Plan, PlanError> {
    let options = Options { time_limit: Duration::from_millis(60_000), seed: 1, method };
    downbeat_plan::plan(problem, &options, &|| Duration::ZERO)
}
