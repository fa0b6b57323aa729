//! The partitioner: every partition of a small problem; otherwise a quick search, then the solver,
//! within a time limit.

use std::fmt;

use downbeat_core::Duration;

use crate::enumeration::best_of_all;
use crate::evaluation::{Evaluation, Violation};
use crate::infeasible::{first_few, not_together, obvious, too_many_moves};
use crate::local_search::{Goal, search};
use crate::problem::{BadProblem, Problem};

/// Most steps of the first search; steps for each pair of a model and a sub-cluster; steps for any
/// problem.
const MOST_STEPS: u64 = 50_000_000;
const STEPS_A_PAIR: u64 = 1_000;
const LEAST_STEPS: u64 = 20_000;
/// Pairs above which a problem is large.
const LARGE: u64 = 4_000;

/// How long and with which method to look for a partition.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Options {
    /// Most time for finding a partition. If none is found, explaining why may take up to twice as
    /// much again.
    pub time_limit: Duration,
    /// Seeds the search's random numbers. The solver's result within a time limit also depends on
    /// the machine.
    pub seed: u64,
    /// The method.
    pub method: Method,
}

/// The method that looks for a partition. On small problems, every method but `Solver` tries all
/// partitions instead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Method {
    /// The search, and then the solver from the search's partition. The search works alone without
    /// the feature `highs`, or if the problem is large (more than 4,000 pairs of a model and a
    /// sub-cluster) and the search finds a partition.
    SearchThenSolver,
    /// The search alone.
    Search,
    /// The solver alone, without a start. Without the feature `highs` this method finds nothing.
    Solver,
}

/// Whether this build has the solver: the feature `highs`.
pub const HAS_SOLVER: bool = cfg!(feature = "highs");

/// A partition that keeps every limit, the method that found it, and the proofs about it.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// The partition.
    pub evaluation: Evaluation,
    /// The method that found the partition.
    pub found_by: FoundBy,
    /// No partition has an objective below this bound; `None` if no bound is known. It equals the
    /// objective (to within 1e-6) if the partition was proved to be the best.
    pub bound: Option<f64>,
    /// Whether there is a proof that no partition is better.
    pub proved: bool,
}

/// The method that found a partition.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FoundBy {
    /// Trying every partition.
    Enumeration,
    /// The local search.
    Search,
    /// The MILP solver.
    Solver,
}

impl fmt::Display for FoundBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FoundBy::Enumeration => "a look at every partition",
            FoundBy::Search => "local search",
            FoundBy::Solver => "HiGHS",
        })
    }
}

/// Why there is no plan.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum PlanError {
    /// [`Problem::check`] refuses the problem.
    #[error(transparent)]
    Bad(#[from] BadProblem),
    /// No partition keeps every limit.
    #[error("no partition keeps every limit: {}", first_few(.0, "more reasons"))]
    Infeasible(Vec<String>),
    /// No partition was found in time, and none was proved to be impossible.
    #[error("no partition that keeps every limit was found within {limit}, but one may exist; the nearest partition breaks these limits: {}", first_few(.closest, "more"))]
    NotFound {
        /// The time that was allowed.
        limit: Duration,
        /// The limits that the best partition found breaks.
        closest: Vec<Violation>,
    },
}

/// Partitions the models. `elapsed` is the caller's clock: the time since the call.
///
/// # Errors
/// If [`Problem::check`] refuses the problem, or there is no partition, or the search finds none in
/// time.
pub fn plan(problem: &Problem, options: &Options, elapsed: &dyn Fn() -> Duration) -> Result<Plan, PlanError> {
    problem.check()?;
    let reasons = obvious(problem);
    if !reasons.is_empty() {
        return Err(PlanError::Infeasible(reasons));
    }
    let limit = options.time_limit;
    if options.method != Method::Solver
        && let Some(best) = best_of_all(problem, &|| fraction(elapsed(), limit))
    {
        let Some(best) = best else {
            let spent = elapsed();
            return Err(explain(problem, options, true, &|| elapsed().saturating_sub(spent)));
        };
        let (bound, evaluation) = (Some(best.objective), near_running(problem, best));
        return Ok(Plan { evaluation, found_by: FoundBy::Enumeration, bound, proved: true });
    }
    // The solver finds the best plan of a small problem. It cannot improve the plan of a large
    // problem in seconds, and it checks its clock too rarely. So it runs on a large problem only if
    // the search finds nothing.
    let large = pairs(problem) > LARGE;
    let searched = (options.method != Method::Solver).then(|| {
        let alone = options.method == Method::Search || !HAS_SOLVER || large;
        let share = if alone { 1.0 } else { 0.2 };
        let spent = || fraction(elapsed(), limit) / share;
        let assignment = search(problem, Goal::Balance, None, options.seed, steps(problem), &spent);
        evaluated(problem, assignment)
    });
    let start = searched.as_ref().filter(|found| found.is_feasible());
    let solved = if options.method == Method::Search {
        Solved::default()
    } else {
        let left = match start {
            Some(_) if large => Duration::ZERO,
            None if large => limit,
            _ => limit.saturating_sub(elapsed()),
        };
        solve(problem, Goal::Balance, start.map(|s| s.assignment.as_slice()), options.seed, left)
    };
    let by_solver = solved.found.filter(Evaluation::is_feasible);
    let objective = |found: &Option<&Evaluation>| found.map_or(f64::INFINITY, |f| f.objective);
    let (evaluation, found_by) = if objective(&by_solver.as_ref()) < objective(&start) {
        (by_solver, FoundBy::Solver)
    } else {
        (start.cloned(), FoundBy::Search)
    };
    match evaluation {
        Some(evaluation) => {
            let evaluation = near_running(problem, evaluation);
            Ok(Plan { bound: solved.bound, proved: solved.proved, evaluation, found_by })
        }
        None => {
            let spent = elapsed();
            Err(explain(problem, options, solved.infeasible, &|| elapsed().saturating_sub(spent)))
        }
    }
}

fn pairs(problem: &Problem) -> u64 {
    (problem.models.len() * problem.sub_clusters) as u64
}

fn steps(problem: &Problem) -> u64 {
    (LEAST_STEPS + STEPS_A_PAIR * pairs(problem)).min(MOST_STEPS)
}

/// The share of `limit` that is over; 1 if `limit` is zero.
fn fraction(elapsed: Duration, limit: Duration) -> f64 {
    if limit == Duration::ZERO { 1.0 } else { elapsed.as_secs_f64() / limit.as_secs_f64() }
}

/// The solver's result.
#[derive(Default)]
struct Solved {
    found: Option<Evaluation>,
    bound: Option<f64>,
    proved: bool,
    infeasible: bool,
}

#[cfg(feature = "highs")]
fn solve(problem: &Problem, goal: Goal, start: Option<&[usize]>, seed: u64, limit: Duration) -> Solved {
    use crate::milp::{self, Outcome};
    match milp::solve(problem, goal, start, seed, limit) {
        Outcome::Best(assignment) => {
            let found = evaluated(problem, assignment);
            Solved { bound: Some(found.objective), found: Some(found), proved: true, infeasible: false }
        }
        Outcome::Found { assignment, bound } => Solved {
            found: Some(evaluated(problem, assignment)),
            bound: Some(bound).filter(|b| b.is_finite()),
            proved: false,
            infeasible: false,
        },
        Outcome::Infeasible => Solved { infeasible: true, ..Solved::default() },
        Outcome::Nothing => Solved::default(),
    }
}

#[cfg(not(feature = "highs"))]
fn solve(_: &Problem, _: Goal, _: Option<&[usize]>, _: u64, _: Duration) -> Solved {
    Solved::default()
}

/// Evaluates an assignment that this crate made.
fn evaluated(problem: &Problem, assignment: Vec<usize>) -> Evaluation {
    let found = Evaluation::of(problem, assignment);
    assert!(found.is_some(), "a partition has a sub-cluster for each model");
    found.unwrap_or_else(|| unreachable!("asserted"))
}

/// Explains why there is no partition, after the search and the solver found none.
fn explain(problem: &Problem, options: &Options, infeasible: bool, elapsed: &dyn Fn() -> Duration) -> PlanError {
    let look = Look { options, elapsed };
    if let Some(bound) = problem.max_disruption
        && let Some(error) = look.if_moves_are_free(problem, bound, infeasible)
    {
        return error;
    }
    let mut free = problem.clone();
    if infeasible && problem.max_disruption.is_some() {
        // No moves mend the assignment, so the bound on moves is not to blame.
        free.max_disruption = None;
    }
    let Looked { found, solved, .. } = look.at(&free, Goal::LeastOverrun);
    let nearest = solved.found.unwrap_or(found);
    if !infeasible {
        return PlanError::NotFound { limit: options.time_limit, closest: nearest.violations };
    }
    let (mut rate, mut memory) = (0.0_f64, 0_u64);
    for violation in &nearest.violations {
        match violation {
            Violation::Rate { by, .. } => rate = rate.max(*by),
            Violation::Memory { by, .. } => memory = memory.max(*by),
            Violation::Disruption { .. } => {}
        }
    }
    PlanError::Infeasible(vec![not_together(rate, memory, solved.proved)])
}

/// A second look at a problem without a partition, with a goal that explains why there is none.
struct Look<'a> {
    options: &'a Options,
    elapsed: &'a dyn Fn() -> Duration,
}

/// The results of a second look.
struct Looked {
    /// Whether the search's assignment keeps the goal's limits.
    kept: bool,
    /// The search's assignment.
    found: Evaluation,
    /// The solver's result.
    solved: Solved,
}

impl Look<'_> {
    /// Runs the search and then the solver for `goal`.
    fn at(&self, problem: &Problem, goal: Goal) -> Looked {
        let Look { options, elapsed } = self;
        let limit = options.time_limit;
        let spent = || 4.0 * fraction(elapsed(), limit);
        let found = evaluated(problem, search(problem, goal, None, options.seed, steps(problem) / 4, &spent));
        let feasible = || {
            let mut unbounded = problem.clone();
            if goal == Goal::LeastDisruption {
                unbounded.max_disruption = None;
            }
            evaluated(&unbounded, found.assignment.clone()).is_feasible()
        };
        let start = (goal == Goal::LeastOverrun || feasible()).then_some(found.assignment.as_slice());
        let kept = start.is_some();
        let solved = if options.method == Method::Search {
            Solved::default()
        } else {
            solve(problem, goal, start, options.seed, limit.saturating_sub(elapsed()))
        };
        Looked { kept, found, solved }
    }

    /// Looks for a partition that keeps the limits of rate and memory if moves are free. Returns the
    /// error if its moves cost more than `bound`.
    fn if_moves_are_free(&self, problem: &Problem, bound: f64, infeasible: bool) -> Option<PlanError> {
        let Looked { kept, found, solved } = self.at(problem, Goal::LeastDisruption);
        let by_solver = solved.found.as_ref().map(|found| found.disruption);
        let by_search = kept.then_some(found.disruption);
        let least = [by_solver, by_search].into_iter().flatten().reduce(f64::min).filter(|least| *least > bound)?;
        let known = infeasible || solved.proved || solved.bound.is_some_and(|cost| cost > bound);
        if known {
            return Some(PlanError::Infeasible(vec![too_many_moves(least, solved.proved, bound)]));
        }
        let by = found.disruption.min(by_solver.unwrap_or(f64::MAX)) - bound;
        let closest = vec![Violation::Disruption { by }];
        Some(PlanError::NotFound { limit: self.options.time_limit, closest })
    }
}

/// The same partition with its sub-clusters renumbered, so that many models stay where they run.
/// Pairs of an old and a new sub-cluster are matched greedily, the largest saving first. Where
/// moves are bounded, the numbers stay as they are.
fn near_running(problem: &Problem, found: Evaluation) -> Evaluation {
    if problem.max_disruption.is_some() || !problem.has_running() {
        return found;
    }
    let assignment = found.assignment;
    let mut saved = std::collections::BTreeMap::<(usize, usize), f64>::new();
    for (model, new) in problem.models.iter().zip(&assignment) {
        if let Some(old) = model.running.filter(|old| *old < problem.sub_clusters) {
            *saved.entry((old, *new)).or_default() += 2.0 * model.load_cost;
        }
    }
    let mut pairs: Vec<((usize, usize), f64)> = saved.into_iter().collect();
    pairs.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let mut name = vec![None; problem.sub_clusters];
    let mut taken = vec![false; problem.sub_clusters];
    for ((old, new), _) in pairs {
        if name[new].is_none() && !taken[old] {
            name[new] = Some(old);
            taken[old] = true;
        }
    }
    let mut free = (0..problem.sub_clusters).filter(|j| !taken[*j]);
    let names: Vec<usize> = name.into_iter().map(|n| n.or_else(|| free.next()).unwrap_or(0)).collect();
    evaluated(problem, assignment.iter().map(|j| names[*j]).collect())
}
