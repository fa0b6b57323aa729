//! Partitions against brute force, and limits checked from outside.

use downbeat_plan::{Evaluation, HAS_SOLVER, Method, Problem};
use proptest::prelude::*;

use crate::{many, methods, model, plan, problem};

/// Every possible assignment.
fn all(models: usize, sub_clusters: usize) -> impl Iterator<Item = Vec<usize>> {
    let count = (sub_clusters as u64).pow(models as u32);
    (0..count).map(move |n| {
        let mut rest = n;
        (0..models)
            .map(|_| {
                let j = rest % sub_clusters as u64;
                rest /= sub_clusters as u64;
                j as usize
            })
            .collect()
    })
}

/// The least objective of all partitions that keep the limits.
fn brute_force(problem: &Problem) -> Option<f64> {
    all(problem.models.len(), problem.sub_clusters)
        .map(|a| Evaluation::of(problem, a).unwrap())
        .filter(Evaluation::is_feasible)
        .map(|e| e.objective)
        .reduce(f64::min)
}

/// The limits of appendix A, (4) to (10), computed by the test and not by the code under test.
fn assert_limits(problem: &Problem, found: &Evaluation) {
    assert_eq!(found.assignment.len(), problem.models.len(), "(8): every model is somewhere");
    let mut disruption = 0.0;
    for (model, now) in problem.models.iter().zip(&found.assignment) {
        assert!(*now < problem.sub_clusters);
        for j in 0..problem.sub_clusters.max(model.running.map_or(0, |j| j + 1)) {
            let (x, before) = (f64::from(u8::from(*now == j)), f64::from(u8::from(model.running == Some(j))));
            let is_free = x > before && model.loaded_in.contains(&j);
            disruption += if is_free { 0.0 } else { model.load_cost * (x - before).abs() };
        }
    }
    assert!((disruption - found.disruption).abs() < 1e-9, "{disruption} is said to be {}", found.disruption);
    assert!(problem.max_disruption.is_none_or(|most| disruption <= most + 1e-9), "(10): {disruption}");
    for j in 0..problem.sub_clusters {
        let on = || problem.models.iter().zip(&found.assignment).filter(|(_, now)| **now == j).map(|(m, _)| m);
        let rate: f64 = on().map(|m| m.rate).sum();
        let requests: f64 = on().map(|m| m.requests).sum();
        let largest = on().map(|m| m.dynamic_memory).max().unwrap_or(0);
        let runs: u64 = on().map(|m| m.dynamic_memory).sum();
        let at_once = problem.runs.map_or(largest, |most| runs.min(largest.max(most)));
        let memory: u64 = on().map(|m| m.static_memory).sum::<u64>() + at_once;
        assert!(problem.max_rate.is_none_or(|most| requests <= most * (1.0 + 1e-9)), "(4): {requests} on {j}");
        assert!(problem.max_memory.is_none_or(|most| memory <= most), "(5): {memory} on {j}");
        assert!((rate - problem.average_rate()).abs() <= found.delta_rate + 1e-9, "(6)");
    }
}

#[test]
fn equal_models_are_spread_evenly() {
    let even = problem((0..12).map(|i| model(&format!("m{i}"), 10.0, 100, 5)).collect(), 4);
    for method in methods() {
        let found = plan(&even, method).unwrap();
        assert!(found.evaluation.loads.iter().all(|load| load.models == 3), "{method:?}: {found:?}");
        assert!(found.evaluation.objective < 1e-9);
    }
}

#[test]
fn only_the_largest_dynamic_memory_of_a_sub_cluster_counts() {
    // Two models with 60 of dynamic memory fit on a device of 100 together (20 + 20 + 60). No other
    // placement fits.
    let models = vec![model("a", 1.0, 20, 60), model("b", 1.0, 20, 60), model("c", 1.0, 90, 1), model("d", 1.0, 90, 1)];
    let mut limited = problem(models, 3);
    limited.max_memory = Some(100);
    for method in methods() {
        let found = plan(&limited, method).unwrap().evaluation;
        assert_limits(&limited, &found);
        assert_eq!(found.assignment[0], found.assignment[1], "{method:?}");
    }
}

#[test]
fn runs_beside_each_other_count_up_to_their_limit() {
    // On one device the weights take 40 and the runs 60 each. Runs that wait for each other take no more than 80.
    let models = vec![model("a", 1.0, 20, 60), model("b", 1.0, 20, 60)];
    let mut beside = problem(models, 1);
    for (runs, memory, fits) in
        [(None, 100, true), (Some(80), 119, false), (Some(80), 120, true), (Some(500), 159, false)]
    {
        (beside.runs, beside.max_memory) = (runs, Some(memory));
        for method in methods() {
            assert_eq!(plan(&beside, method).is_ok(), fits, "{method:?}, {runs:?}, {memory}");
        }
    }
}

#[test]
fn appendix_a_a_loaded_model_moves_for_nothing() {
    // Both models are on sub-cluster 0, and one move may cost 1: an unload. The load must cost nothing.
    let mut models = vec![model("a", 10.0, 1, 0), model("b", 10.0, 1, 0)];
    models.iter_mut().for_each(|m| m.running = Some(0));
    models[1].loaded_in = vec![1];
    let mut bounded = problem(models, 2);
    bounded.max_disruption = Some(1.0);
    for method in methods() {
        let found = plan(&bounded, method).unwrap().evaluation;
        assert_limits(&bounded, &found);
        assert_eq!(found.assignment, [0, 1], "{method:?}");
    }
}

/// Appendix A: the weight chooses between an even rate and an even memory.
#[test]
fn the_weight_of_memory_decides_what_is_even() {
    let models =
        vec![model("a", 30.0, 10, 0), model("b", 10.0, 30, 0), model("c", 30.0, 30, 0), model("d", 10.0, 10, 0)];
    let mut weighted = problem(models, 2);
    for method in methods() {
        weighted.memory_weight = 0.0;
        let by_rate = plan(&weighted, method).unwrap().evaluation;
        assert!(by_rate.delta_rate < 1e-9, "{method:?}: {by_rate:?}");
        weighted.memory_weight = 1.0;
        let by_both = plan(&weighted, method).unwrap().evaluation;
        assert!(by_both.objective < 1e-9, "{method:?}: {{a, b}} and {{c, d}} differ in both, {{a, d, ..}} in neither");
    }
}

#[test]
fn a_workload_that_asks_for_nothing_has_a_plan_too() {
    let models = vec![model("a", 0.0, 0, 0), model("b", 0.0, 0, 0)];
    let mut nothing = problem(models, 3);
    (nothing.max_rate, nothing.max_memory) = (Some(0.0), Some(0));
    for method in methods() {
        let found = plan(&nothing, method).unwrap().evaluation;
        assert_eq!((found.objective, found.rate_imbalance(), found.memory_imbalance()), (0.0, 0.0, 0.0));
    }
}

#[test]
fn without_a_bound_sub_clusters_keep_their_numbers_where_they_can() {
    let mut models: Vec<_> = (0..6).map(|i| model(&format!("m{i}"), 10.0, 100, 5)).collect();
    for (i, m) in models.iter_mut().enumerate() {
        m.running = Some(2 - i / 2);
    }
    // The running partition is perfectly even. The search could find another partition of equal
    // models: sub-clusters get the numbers that keep the most models.
    let found = plan(&problem(models, 3), Method::SearchThenSolver).unwrap().evaluation;
    assert!(found.objective < 1e-9);
    assert!(found.disruption <= 8.0, "{found:?}");
}

#[test]
fn the_same_seed_gives_the_same_plan() {
    let many = many(60, 4);
    let found = || plan(&many, Method::Search).unwrap();
    assert_eq!(found(), found());
}

/// Models, sub-clusters, and limits near the models' needs. Models run on some sub-cluster, or
/// nowhere.
fn instances(models: std::ops::Range<usize>, sub_clusters: std::ops::Range<usize>) -> impl Strategy<Value = Problem> {
    let rates = (0..40_u32, prop::option::of(0..40_u32));
    let one = (rates, 0..30_u64, 0..20_u64, (0..4_u32, 0..3_usize), prop::option::of(0..4_usize));
    let limits = (
        prop::option::of(0..40_u64),
        prop::option::of(0.9..1.6_f64),
        prop::option::of(0.9..1.6_f64),
        prop::option::of(0..20_u32),
        prop::sample::select(vec![0.0, 0.5, 1.0, 3.0]),
    );
    (prop::collection::vec(one, models), sub_clusters, limits).prop_map(|(models, sub_clusters, limits)| {
        let models: Vec<_> = models
            .into_iter()
            .enumerate()
            .map(|(i, ((rate, requests), memory, dynamic, (cost, loaded), running))| {
                let mut m = model(&format!("m{i}"), f64::from(rate), memory, dynamic);
                (m.load_cost, m.running) = (f64::from(cost), running);
                // Half of the models have other requests than rates, and some are loaded on a second sub-cluster.
                m.requests = f64::from(requests.unwrap_or(rate));
                m.loaded_in = loaded.checked_sub(1).into_iter().collect();
                m
            })
            .collect();
        let mut made = problem(models, sub_clusters);
        let (runs, rate, memory, disruption, weight) = limits;
        made.max_rate = rate.map(|share| (share * made.average_requests()).ceil());
        made.runs = runs;
        made.max_memory = memory.map(|share| (share * made.average_memory()) as u64 + 10);
        made.max_disruption = disruption.map(f64::from);
        made.memory_weight = weight;
        made
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if HAS_SOLVER { 96 } else { 48 }))]

    /// Tiny instances: each method finds the best objective of all, or reports that no partition
    /// exists where none exists.
    #[test]
    fn tiny_instances_are_solved_as_brute_force_solves_them(tiny in instances(1..7, 1..4)) {
        let best = brute_force(&tiny);
        for method in methods() {
            match (plan(&tiny, method), best) {
                (Ok(found), Some(best)) => {
                    assert_limits(&tiny, &found.evaluation);
                    let objective = found.evaluation.objective;
                    prop_assert!(objective >= best - 1e-6, "{method:?}: {objective} is better than any, {best}");
                    prop_assert!(objective <= best + 1e-6, "{method:?}: {objective} and not {best}");
                    prop_assert!(found.bound.is_none_or(|bound| bound <= best + 1e-6), "{method:?}: {found:?}, best {best}");
                    prop_assert!(found.proved, "{method:?}: {found:?}");
                }
                (Err(error), best) => {
                    let proved = matches!(error, downbeat_plan::PlanError::Infeasible(_));
                    prop_assert!(best.is_none() && proved, "{method:?}: {error}, best {best:?}");
                }
                (found, None) => prop_assert!(false, "{method:?}: {found:?}, and there is none"),
            }
        }
    }

    /// Larger instances: every plan keeps every limit.
    #[test]
    fn plans_keep_every_limit(random in instances(8..40, 2..7)) {
        if let Ok(found) = plan(&random, Method::Search) {
            assert_limits(&random, &found.evaluation);
        }
    }
}
