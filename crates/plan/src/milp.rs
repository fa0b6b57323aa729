//! Appendix A's mixed-integer program, solved by HiGHS.
//!
//! Binary `x_ij` says that model `i` is on sub-cluster `j`. Rates and memory are shares of the
//! average sub-cluster's, so that coefficients are around 1; the constraints' numbers below are the
//! appendix's.
//!
//! Sub-clusters are interchangeable: every partition occurs `l!` times, with the sub-clusters in
//! another order. Example: the largest model is on the first sub-cluster, and the second largest on
//! the first or the second. In general the `k` largest models stay on the first `k` sub-clusters,
//! which leaves one order for most partitions. This rule applies only if no running assignment
//! gives the sub-clusters an order.

use std::num::NonZeroU32;

use downbeat_core::Duration;
use highs::{Col, HighsModelStatus, HighsSolutionStatus, RowProblem, Sense};

use crate::local_search::Goal;
use crate::problem::Problem;

/// The result of a run of the solver.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Outcome {
    /// The optimum: there is no better partition.
    Best(Vec<usize>),
    /// The best that was found in time; no partition has an objective below `bound`.
    Found {
        /// The sub-cluster of each model.
        assignment: Vec<usize>,
        /// In the goal's units. For [`Goal::Balance`] these are the objective's.
        bound: f64,
    },
    /// The solver proved that there is no partition.
    Infeasible,
    /// The solver found no partition in time.
    Nothing,
}

/// Solves `problem` for `goal` within `limit`, on one thread, from `start` if that keeps the goal's
/// limits.
pub(crate) fn solve(problem: &Problem, goal: Goal, start: Option<&[usize]>, seed: u64, limit: Duration) -> Outcome {
    if limit == Duration::ZERO {
        return Outcome::Nothing;
    }
    let named = problem.costs_by_number() && (problem.max_disruption.is_some() || goal == Goal::LeastDisruption);
    let order = by_size(problem);
    let (rows, x) = program(problem, goal, (!named).then_some(order.as_slice()));
    let columns = rows.num_cols();
    let Ok(mut model) = rows.try_optimise(Sense::Minimise) else { return Outcome::Nothing };
    model.make_quiet();
    model.set_threads(NonZeroU32::MIN);
    let set = [
        model.try_set_option("time_limit", limit.as_secs_f64()),
        model.try_set_option("random_seed", i32::try_from(seed % (1 << 31)).unwrap_or(0)),
        // Values are shares of an average: a smaller difference is rounding.
        model.try_set_option("mip_rel_gap", 1e-6),
        model.try_set_option("mip_feasibility_tolerance", 1e-9),
        model.try_set_option("primal_feasibility_tolerance", 1e-9),
    ];
    assert!(set.iter().all(Result::is_ok), "HiGHS has these options and takes these values: {set:?}");
    if let Some(start) = start {
        let start = if named { start.to_vec() } else { first_names(start, &order, problem.sub_clusters) };
        // The start sets only the binaries, and the solver completes the rest. If the solver
        // refuses the start, it searches without one.
        let mut values = vec![0.0; columns];
        for (of_model, sub_cluster) in x.iter().zip(start) {
            values[of_model[sub_cluster].index()] = 1.0;
        }
        let _ = model.try_set_solution(Some(&values), None, None, None);
    }
    let Ok(solved) = model.try_solve() else { return Outcome::Nothing };
    let status = solved.status();
    if status == HighsModelStatus::Infeasible {
        return Outcome::Infeasible;
    }
    if solved.primal_solution_status() != HighsSolutionStatus::Feasible {
        return Outcome::Nothing;
    }
    let values = solved.get_solution();
    let assignment = x
        .iter()
        .map(|of_model| {
            let value = |j: &usize| values.columns()[of_model[*j].index()];
            (0..of_model.len()).max_by(|a, b| value(a).total_cmp(&value(b))).unwrap_or(0)
        })
        .collect();
    match status {
        HighsModelStatus::Optimal => Outcome::Best(assignment),
        _ => Outcome::Found { assignment, bound: solved.double_info_value(c"mip_dual_bound").unwrap_or(0.0) },
    }
}

/// Builds the program, and `x[i][j]`.
fn program(problem: &Problem, goal: Goal, order: Option<&[usize]>) -> (RowProblem, Vec<Vec<Col>>) {
    let mut program = Program::new(problem, goal, order);
    program.keep_rate_and_memory();
    if goal == Goal::Balance {
        program.balance();
    }
    if goal != Goal::LeastDisruption {
        program.bound_moves();
    }
    (program.rows, program.x)
}

/// A program that is being built. Rates and memory are shares of the average sub-cluster's.
struct Program<'a> {
    problem: &'a Problem,
    goal: Goal,
    rate: Vec<f64>,
    memory: Vec<f64>,
    rows: RowProblem,
    /// `x[i][j]`: whether model `i` is on sub-cluster `j`.
    x: Vec<Vec<Col>>,
}

impl<'a> Program<'a> {
    /// (8) and (9): each model is on one sub-cluster. The `k`-th model of `order` is on one of the
    /// first `k + 1`.
    fn new(problem: &'a Problem, goal: Goal, order: Option<&[usize]>) -> Self {
        let (average_rate, average_memory) = (or_one(problem.average_rate()), or_one(problem.average_memory()));
        let mut rank = vec![problem.sub_clusters; problem.models.len()];
        for (k, model) in order.unwrap_or_default().iter().enumerate() {
            rank[*model] = k;
        }
        let mut rows = RowProblem::default();
        // (9)
        let x: Vec<Vec<Col>> = problem
            .models
            .iter()
            .zip(&rank)
            .map(|(model, rank)| {
                (0..problem.sub_clusters)
                    .map(|j| {
                        let cost = if goal == Goal::LeastDisruption { model.move_cost(j) } else { 0.0 };
                        rows.add_integer_column(cost, 0.0..=if j > *rank { 0.0 } else { 1.0 })
                    })
                    .collect()
            })
            .collect();
        // (8)
        for of_model in &x {
            rows.add_row(1.0..=1.0, of_model.iter().map(|x| (*x, 1.0)));
        }
        let rate = problem.models.iter().map(|m| m.rate / average_rate).collect();
        let memory = problem.models.iter().map(|m| m.static_memory as f64 / average_memory).collect();
        Program { problem, goal, rate, memory, rows, x }
    }

    /// The sum of `of` over the models of sub-cluster `j`, as a row.
    fn on(&self, j: usize, of: &[f64]) -> Vec<(Col, f64)> {
        self.x.iter().zip(of).filter(|(_, value)| **value > 0.0).map(|(x, value)| (x[j], *value)).collect()
    }

    /// (4) and (5): the limits of rate and memory. For [`Goal::LeastOverrun`] their
    /// excess is the objective.
    fn keep_rate_and_memory(&mut self) {
        let problem = self.problem;
        let average_memory = or_one(problem.average_memory());
        let dynamic: Vec<f64> = problem.models.iter().map(|m| m.dynamic_memory as f64 / average_memory).collect();
        let average_requests = or_one(problem.average_requests());
        let requests: Vec<f64> = problem.models.iter().map(|m| m.requests / average_requests).collect();
        let max_rate = problem.max_rate.map(|max| max / average_requests);
        let (all, runs) = (dynamic.iter().sum::<f64>(), problem.runs.map(|most| most as f64 / average_memory));
        let max_memory = problem.max_memory.map(|max| max as f64 / average_memory);
        let overrun = (self.goal == Goal::LeastOverrun)
            .then(|| [self.rows.add_column(1.0, 0.0..), self.rows.add_column(1.0, 0.0..)]);
        for j in 0..problem.sub_clusters {
            // (4)
            if let Some(max) = max_rate {
                let mut row = self.on(j, &requests);
                row.extend(overrun.map(|[rate, _]| (rate, -1.0)));
                self.rows.add_row(..=max, row);
            }
            // (5), with the largest dynamic memory as a column
            if let Some(max) = max_memory {
                let largest = self.rows.add_column(0.0, 0.0..);
                for (x, dynamic) in self.x.iter().zip(&dynamic).filter(|(_, dynamic)| **dynamic > 0.0) {
                    self.rows.add_row(0.0.., [(largest, 1.0), (x[j], -dynamic)]);
                }
                // The lesser of all runs together and the most that may run at once: `capped` chooses.
                if let Some(most) = runs.filter(|_| all > 0.0) {
                    let capped = self.rows.add_integer_column(0.0, 0.0..=1.0);
                    self.rows.add_row(0.0.., [(largest, 1.0), (capped, -most)]);
                    let sum = self.on(j, &dynamic).into_iter().map(|(x, dynamic)| (x, -dynamic));
                    self.rows.add_row(0.0.., [(largest, 1.0), (capped, all)].into_iter().chain(sum));
                }
                let mut row = self.on(j, &self.memory);
                row.push((largest, 1.0));
                row.extend(overrun.map(|[_, memory]| (memory, -1.0)));
                self.rows.add_row(..=max, row);
            }
        }
    }

    /// (3), (6), (7): the objective is the largest distance of a sub-cluster from its share. If all
    /// values are 0, the share of each sub-cluster is 0 and not 1.
    fn balance(&mut self) {
        for (of, weight) in [(&self.rate, 1.0), (&self.memory, self.problem.memory_weight)] {
            if weight == 0.0 || of.iter().all(|value| *value == 0.0) {
                continue;
            }
            let delta = self.rows.add_column(weight, 0.0..);
            for j in 0..self.problem.sub_clusters {
                let sum = self.on(j, of);
                self.rows.add_row(..=1.0, sum.iter().copied().chain([(delta, -1.0)]));
                self.rows.add_row(1.0.., sum.iter().copied().chain([(delta, 1.0)]));
            }
        }
    }

    /// (10): the bound on the cost of moves, if the problem has a bound.
    fn bound_moves(&mut self) {
        let Some(max) = self.problem.max_disruption else { return };
        let costs = self.problem.models.iter().zip(&self.x).flat_map(|(model, of_model)| {
            of_model.iter().enumerate().map(|(j, x)| (*x, model.move_cost(j))).filter(|(_, cost)| *cost > 0.0)
        });
        self.rows.add_row(..=max, costs.collect::<Vec<_>>());
    }
}

/// `value`, or 1 if there is none: a divisor.
fn or_one(value: f64) -> f64 {
    if value > 0.0 { value } else { 1.0 }
}

/// The models' numbers, the largest model first.
fn by_size(problem: &Problem) -> Vec<usize> {
    let (rate, memory) = (or_one(problem.average_rate()), or_one(problem.average_memory()));
    let size = |i: usize| {
        let model = &problem.models[i];
        (model.rate / rate).max(model.static_memory as f64 / memory)
    };
    let mut order: Vec<usize> = (0..problem.models.len()).collect();
    order.sort_by(|a, b| size(*b).total_cmp(&size(*a)).then(a.cmp(b)));
    order
}

/// The same partition with its sub-clusters numbered in the order in which `order` first reaches
/// them.
fn first_names(assignment: &[usize], order: &[usize], sub_clusters: usize) -> Vec<usize> {
    let mut names = vec![None; sub_clusters];
    let mut next = 0;
    for model in order {
        let name = &mut names[assignment[*model]];
        if name.is_none() {
            *name = Some(next);
            next += 1;
        }
    }
    assignment.iter().map(|j| names[*j].unwrap_or(*j)).collect()
}
