//! A partition without a solver: the largest model first, then moves and swaps by simulated
//! annealing.
//!
//! The search has a good partition from the first moment, and a better one with time. The MILP
//! solver starts from it, and it remains when the solver's time is up. The search proves nothing:
//! only the solver can say that there is no partition, or no better one.

use std::collections::BTreeMap;

use rand::RngExt;
use rand_pcg::Pcg64;
use rand_pcg::rand_core::SeedableRng;

use crate::evaluation::share;
use crate::problem::Problem;

/// The quantity that a search makes small. Limits outside the goal are kept where that is possible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Goal {
    /// The appendix's objective.
    Balance,
    /// The least cost of moves that rate and memory allow, whatever the balance and the bound on
    /// moves.
    LeastDisruption,
    /// The smallest excess of rates and memory over their limits, as shares of the average.
    LeastOverrun,
}

/// The cost of a broken limit, however little it is broken: more than any balance gains.
const BROKEN: f64 = 10.0;
/// The additional cost for each share of the limit.
const BROKEN_BY: f64 = 100.0;
/// Shares of a limit that are rounding.
const ROUNDING: f64 = 1e-12;
/// Steps between two looks at the clock.
const STEPS_BETWEEN_LOOKS: u64 = 1024;

/// The state of a search. Rates and memory are shares of the average sub-cluster's, so that both
/// are around 1.
struct State<'a> {
    problem: &'a Problem,
    goal: Goal,
    /// The rate of each model.
    rate: Vec<f64>,
    /// The requests of each model.
    requests: Vec<f64>,
    memory: Vec<f64>,
    assignment: Vec<usize>,
    clusters: Vec<Cluster>,
    max_requests: f64,
    max_memory: f64,
    /// The divisor that turns costs of moves into shares.
    cost_scale: f64,
    disruption: f64,
}

/// The sums over the models of a sub-cluster.
#[derive(Clone, Copy, Default)]
struct Sums {
    rate: f64,
    requests: f64,
    memory: f64,
    /// Bytes of the models' runs.
    runs: u64,
}

#[derive(Clone, Default)]
struct Cluster {
    sums: Sums,
    /// For each size of dynamic memory (bytes), the number of models that have it.
    dynamic: BTreeMap<u64, u32>,
    cost: f64,
}

/// A change: a model moves to a sub-cluster, and in a swap a model of that sub-cluster moves back.
#[derive(Clone, Copy)]
struct Change {
    model: usize,
    to: usize,
    back: Option<usize>,
}

/// The first and the last temperature of an annealing.
struct Temperatures {
    hottest: f64,
    coldest: f64,
}

impl<'a> State<'a> {
    fn new(problem: &'a Problem, goal: Goal) -> Self {
        let average_rate = positive(problem.average_rate());
        let average_requests = positive(problem.average_requests());
        let average_memory = positive(problem.average_memory());
        let of = |f: &dyn Fn(&crate::problem::Model) -> f64| problem.models.iter().map(f).collect::<Vec<f64>>();
        State {
            problem,
            goal,
            rate: of(&|m| m.rate / average_rate),
            requests: of(&|m| m.requests / average_requests),
            memory: of(&|m| m.static_memory as f64 / average_memory),
            assignment: vec![usize::MAX; problem.models.len()],
            clusters: vec![Cluster::default(); problem.sub_clusters],
            max_requests: problem.max_rate.map_or(f64::INFINITY, |max| max / average_requests),
            max_memory: problem.max_memory.map_or(f64::INFINITY, |max| max as f64 / average_memory),
            cost_scale: positive(problem.models.iter().map(|m| 2.0 * m.load_cost).sum()),
            disruption: 0.0,
        }
    }

    /// The state before the annealing. It follows `start`, or the running assignment if moves are
    /// bounded. Each other model is where it fills a sub-cluster least.
    fn start(problem: &'a Problem, goal: Goal, start: Option<&[usize]>) -> Self {
        let mut state = State::new(problem, goal);
        let bounded = problem.max_disruption.is_some() || goal == Goal::LeastDisruption;
        for (i, model) in problem.models.iter().enumerate() {
            let place = start.map(|s| s[i]).or(model.running.filter(|j| bounded && *j < problem.sub_clusters));
            if let Some(cluster) = place {
                state.place(i, cluster);
            }
        }
        state.fill();
        state
    }

    /// The temperatures of the annealing: from the effect of moving one model to the size of
    /// rounding errors.
    fn temperatures(&self) -> Temperatures {
        let models = self.problem.models.len() as f64;
        let (hottest, coldest) = match self.goal {
            Goal::Balance => {
                let weight = self.problem.memory_weight.min(1.0);
                let squares = self.rate.iter().zip(&self.memory).map(|(r, s)| r * r + weight * weight * s * s);
                ((squares.sum::<f64>() / models).max(1e-9), 1e-13)
            }
            Goal::LeastDisruption => (0.5 / models, 1e-4 / models),
            Goal::LeastOverrun => (1e-2, 1e-9),
        };
        Temperatures { hottest, coldest }
    }

    /// The cost of a sub-cluster with these sums, and with this largest run, in bytes.
    fn cost(&self, sums: Sums, largest: u64) -> f64 {
        let Sums { rate, requests, memory, runs } = sums;
        let needed = match self.max_memory < f64::INFINITY {
            true => memory + self.problem.runs_at_once(largest, runs) as f64 / positive(self.problem.average_memory()),
            false => 0.0,
        };
        let requests_over = over(requests, self.max_requests);
        let memory_over = over(needed, self.max_memory);
        match self.goal {
            Goal::Balance => {
                let weight = self.problem.memory_weight;
                let memory_off = weight * (memory - 1.0);
                (rate - 1.0) * (rate - 1.0) + memory_off * memory_off + broken(requests_over) + broken(memory_over)
            }
            Goal::LeastDisruption => broken(requests_over) + broken(memory_over),
            Goal::LeastOverrun => (requests - self.max_requests).max(0.0) + (needed - self.max_memory).max(0.0),
        }
    }

    fn disruption_cost(&self, disruption: f64) -> f64 {
        match self.goal {
            Goal::LeastDisruption => disruption / self.cost_scale,
            Goal::Balance | Goal::LeastOverrun => {
                broken(over(disruption, self.problem.max_disruption.unwrap_or(f64::INFINITY)) / self.cost_scale)
            }
        }
    }

    /// The cost and the sums of a sub-cluster after `out` has left and `into` has entered.
    fn cost_after(&self, cluster: usize, out: Option<usize>, into: Option<usize>) -> (f64, Sums) {
        let now = &self.clusters[cluster];
        let mut sums = now.sums;
        let mut largest = 0;
        if self.max_memory < f64::INFINITY {
            let gone = out.map(|i| self.problem.models[i].dynamic_memory);
            let rest = now.dynamic.iter().rev().find(|(d, count)| gone != Some(**d) || **count > 1).map(|(d, _)| *d);
            largest = rest.unwrap_or(0).max(into.map_or(0, |i| self.problem.models[i].dynamic_memory));
        }
        if let Some(i) = out {
            sums.rate -= self.rate[i];
            sums.requests -= self.requests[i];
            sums.memory -= self.memory[i];
            sums.runs -= self.problem.models[i].dynamic_memory;
        }
        if let Some(i) = into {
            sums.rate += self.rate[i];
            sums.requests += self.requests[i];
            sums.memory += self.memory[i];
            sums.runs += self.problem.models[i].dynamic_memory;
        }
        (self.cost(sums, largest), sums)
    }

    /// Puts a model that has no sub-cluster yet on one.
    fn place(&mut self, model: usize, cluster: usize) {
        let (cost, sums) = self.cost_after(cluster, None, Some(model));
        self.enter(model, cluster);
        let c = &mut self.clusters[cluster];
        (c.cost, c.sums) = (cost, sums);
    }

    fn enter(&mut self, model: usize, cluster: usize) {
        self.assignment[model] = cluster;
        self.disruption += self.problem.models[model].move_cost(cluster);
        *self.clusters[cluster].dynamic.entry(self.problem.models[model].dynamic_memory).or_default() += 1;
    }

    fn leave(&mut self, model: usize) {
        let cluster = self.assignment[model];
        self.disruption -= self.problem.models[model].move_cost(cluster);
        let dynamic = self.problem.models[model].dynamic_memory;
        let counts = &mut self.clusters[cluster].dynamic;
        if let Some(count) = counts.get_mut(&dynamic) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&dynamic);
            }
        }
    }

    /// Returns by how much a change raises the cost, and the two sub-clusters' sums after the
    /// change.
    fn consider(&self, change: Change) -> (f64, [(f64, Sums); 2]) {
        let from = self.assignment[change.model];
        let after = [
            self.cost_after(from, Some(change.model), change.back),
            self.cost_after(change.to, change.back, Some(change.model)),
        ];
        let models = &self.problem.models;
        let mut moved = models[change.model].move_cost(change.to) - models[change.model].move_cost(from);
        if let Some(back) = change.back {
            moved += models[back].move_cost(from) - models[back].move_cost(change.to);
        }
        let disruption = if moved == 0.0 {
            0.0
        } else {
            self.disruption_cost(self.disruption + moved) - self.disruption_cost(self.disruption)
        };
        let before = self.clusters[from].cost + self.clusters[change.to].cost;
        (after[0].0 + after[1].0 - before + disruption, after)
    }

    fn apply(&mut self, change: Change, after: [(f64, Sums); 2]) {
        let from = self.assignment[change.model];
        self.leave(change.model);
        if let Some(back) = change.back {
            self.leave(back);
            self.enter(back, from);
        }
        self.enter(change.model, change.to);
        for (cluster, (cost, sums)) in [from, change.to].into_iter().zip(after) {
            let c = &mut self.clusters[cluster];
            (c.cost, c.sums) = (cost, sums);
        }
    }

    fn total(&self) -> f64 {
        self.clusters.iter().map(|c| c.cost).sum::<f64>() + self.disruption_cost(self.disruption)
    }

    /// The goal's own measure for a state that breaks no limit; otherwise the annealing's smooth
    /// cost.
    fn merit(&self) -> f64 {
        let total = self.total();
        if self.goal != Goal::Balance || total >= BROKEN {
            return total;
        }
        let off = |f: &dyn Fn(&Cluster) -> f64| self.clusters.iter().map(|c| (f(c) - 1.0).abs()).fold(0.0, f64::max);
        off(&|c| c.sums.rate) + self.problem.memory_weight * off(&|c| c.sums.memory)
    }

    /// Places the remaining models, the largest first, each on the sub-cluster that it fills least.
    fn fill(&mut self) {
        let mut order: Vec<usize> = (0..self.rate.len()).filter(|i| self.assignment[*i] == usize::MAX).collect();
        let size = |i: usize| self.rate[i].max(self.memory[i]);
        order.sort_by(|a, b| size(*b).total_cmp(&size(*a)).then(a.cmp(b)));
        for model in order {
            let weight = self.problem.memory_weight.min(1.0);
            let fill = |j: usize| {
                let (cost, sums) = self.cost_after(j, None, Some(model));
                (broken_part(cost), sums.rate.max(weight * sums.memory))
            };
            let best = (0..self.clusters.len()).min_by(|a, b| {
                let (x, y) = (fill(*a), fill(*b));
                x.0.total_cmp(&y.0).then(x.1.total_cmp(&y.1))
            });
            if let Some(best) = best {
                self.place(model, best);
            }
        }
    }
}

/// The cost of a sub-cluster if it breaks a limit; otherwise 0.
fn broken_part(cost: f64) -> f64 {
    if cost >= BROKEN { cost } else { 0.0 }
}

fn positive(value: f64) -> f64 {
    if value > 0.0 { value } else { 1.0 }
}

fn over(value: f64, limit: f64) -> f64 {
    let by = share(value - limit, limit.min(f64::MAX));
    match () {
        () if value <= limit || by <= ROUNDING && limit > 0.0 => 0.0,
        () if limit > 0.0 => by,
        // Nothing is allowed, and everything is too much.
        () => value,
    }
}

fn broken(by: f64) -> f64 {
    if by > 0.0 { BROKEN + BROKEN_BY * by } else { 0.0 }
}

/// Returns a good partition after at most `steps` of annealing. It starts from `start`, or from the
/// running assignment where moves are bounded, or from the largest models first. `spent` returns
/// the share of the time that is over; at 1 the search ends. The same arguments give the same
/// partition.
pub(crate) fn search(
    problem: &Problem,
    goal: Goal,
    start: Option<&[usize]>,
    seed: u64,
    steps: u64,
    spent: &dyn Fn() -> f64,
) -> Vec<usize> {
    let mut state = State::start(problem, goal, start);
    let (models, clusters) = (problem.models.len(), problem.sub_clusters);
    let mut best = (state.merit(), state.assignment.clone());
    if clusters < 2 || models == 0 {
        return best.1;
    }
    let mut rng = Pcg64::seed_from_u64(seed);
    let Temperatures { hottest, coldest } = state.temperatures();
    let cooling = (coldest / hottest).ln();
    let mut temperature = hottest;
    let mut lowest = state.total();
    for step in 0..steps {
        if step % STEPS_BETWEEN_LOOKS == 0 {
            let time = spent();
            if time >= 1.0 {
                break;
            }
            // The temperature follows the time or the steps, whichever is nearer its end. A search
            // that is stopped while it is hot is worth little.
            temperature = hottest * (cooling * time.max(step as f64 / steps as f64)).exp();
        }
        let model = rng.random_range(0..models);
        let from = state.assignment[model];
        let change = if rng.random_range(0..2) == 0 {
            Change { model, to: rng.random_range(0..clusters), back: None }
        } else {
            let other = rng.random_range(0..models);
            Change { model, to: state.assignment[other], back: Some(other) }
        };
        if change.to == from {
            continue;
        }
        let (rise, after) = state.consider(change);
        if rise > 0.0 && rng.random::<f64>() >= (-rise / temperature).exp() {
            continue;
        }
        state.apply(change, after);
        if rise < 0.0 {
            let total = state.total();
            if total <= 4.0 * lowest {
                lowest = lowest.min(total);
                let merit = state.merit();
                if merit < best.0 {
                    best = (merit, state.assignment.clone());
                }
            }
        }
    }
    best.1
}
