//! Tries every partition of a small problem. The best of them is the optimum; if none keeps the
//! limits, the problem has no solution.

use crate::evaluation::Evaluation;
use crate::problem::Problem;

/// Most partitions that are tried: a fraction of a second.
const MOST_PARTITIONS: u64 = 500_000;
/// Partitions between two looks at the clock.
const PARTITIONS_BETWEEN_LOOKS: u64 = 1024;

/// Returns the best partition that keeps every limit, or `Some(None)` if no partition keeps them.
/// Returns `None` if there are too many partitions, or if time is over before the last one.
/// `spent` returns the share of the time that is over.
pub(crate) fn best_of_all(problem: &Problem, spent: &dyn Fn() -> f64) -> Option<Option<Evaluation>> {
    let (models, clusters) = (problem.models.len(), problem.sub_clusters);
    // If it does not matter where models run now, sub-clusters are interchangeable: partitions that
    // differ only in the sub-clusters' numbers are the same.
    let alike = problem.max_disruption.is_none() || !problem.costs_by_number();
    if partitions(models, clusters, alike) > MOST_PARTITIONS {
        return None;
    }
    let mut best: Option<Evaluation> = None;
    let mut assignment = vec![0; models];
    for looked_at in 0.. {
        if looked_at % PARTITIONS_BETWEEN_LOOKS == 0 && spent() >= 1.0 {
            return None;
        }
        let found = Evaluation::of(problem, assignment.clone())?;
        if found.is_feasible() && best.as_ref().is_none_or(|best| found.objective < best.objective) {
            best = Some(found);
        }
        if !advance(&mut assignment, clusters, alike) {
            break;
        }
    }
    Some(best)
}

/// Moves on to the next assignment, as a number counts up; `false` after the last. With `alike`, a
/// model may use sub-cluster `j` only if an earlier model uses `j - 1`.
fn advance(assignment: &mut [usize], clusters: usize, alike: bool) -> bool {
    for at in (0..assignment.len()).rev() {
        let begun = assignment[..at].iter().max().map_or(0, |last| last + 1);
        let most = if alike { begun.min(clusters - 1) } else { clusters - 1 };
        if assignment[at] < most {
            assignment[at] += 1;
            assignment[at + 1..].fill(0);
            return true;
        }
    }
    false
}

/// The number of partitions, or a number above [`MOST_PARTITIONS`] if there are more.
fn partitions(models: usize, clusters: usize, alike: bool) -> u64 {
    if !alike {
        return (0..models).fold(1, |count: u64, _| count.saturating_mul(clusters as u64).min(MOST_PARTITIONS + 1));
    }
    // `begun[k]` counts the partitions that use `k + 1` sub-clusters. A model joins one of these or
    // begins another.
    let mut begun = vec![1_u64];
    for _ in 1..models {
        let mut next = vec![0; (begun.len() + 1).min(clusters)];
        for (at, count) in begun.iter().enumerate() {
            next[at] += count * (at as u64 + 1);
            if at + 1 < next.len() {
                next[at + 1] += count;
            }
        }
        begun = next;
        if begun.iter().sum::<u64>() > MOST_PARTITIONS {
            break;
        }
    }
    begun.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(models: usize, clusters: usize, alike: bool) -> u64 {
        let mut assignment = vec![0; models];
        let mut seen = std::collections::BTreeSet::from([assignment.clone()]);
        while advance(&mut assignment, clusters, alike) {
            assert!(seen.insert(assignment.clone()), "{assignment:?} comes twice");
        }
        seen.len() as u64
    }

    #[test]
    fn as_many_are_looked_at_as_there_are() {
        for (models, clusters) in [(1, 1), (1, 4), (4, 1), (5, 2), (6, 3), (4, 9)] {
            for alike in [false, true] {
                assert_eq!(partitions(models, clusters, alike), count(models, clusters, alike), "{models}, {clusters}");
            }
        }
        assert_eq!(partitions(6, 3, false), 729);
        // Stirling's numbers of the second kind: 1 + 31 + 90.
        assert_eq!(partitions(6, 3, true), 122);
        assert!(partitions(1_000_000, 1_000_000, true) > MOST_PARTITIONS);
        assert!(partitions(1_000_000, 7, false) > MOST_PARTITIONS);
    }
}
