//! The baseline of appendix A.2: random partitions, the best that keeps every limit.

use downbeat_plan::{BadProblem, Evaluation, Problem};
use rand::RngExt;
use rand_pcg::Pcg64;
use rand_pcg::rand_core::SeedableRng;

/// Tries random partitions until `expired` returns true, or `trials` times. Returns the best that
/// keeps every limit, or `None`, and the number of partitions tried.
///
/// # Errors
/// If [`Problem::check`] refuses the problem.
pub fn random_partition(
    problem: &Problem,
    seed: u64,
    trials: u64,
    expired: &dyn Fn() -> bool,
) -> Result<(Option<Evaluation>, u64), BadProblem> {
    problem.check()?;
    let mut rng = Pcg64::seed_from_u64(seed);
    let mut best: Option<Evaluation> = None;
    let mut tried = 0;
    while tried < trials && !expired() {
        tried += 1;
        let assignment = problem.models.iter().map(|_| rng.random_range(0..problem.sub_clusters)).collect();
        let Some(found) = Evaluation::of(problem, assignment) else { break };
        if found.is_feasible() && best.as_ref().is_none_or(|best| found.objective < best.objective) {
            best = Some(found);
        }
    }
    Ok((best, tried))
}
