//! The explanations where no partition exists.

use downbeat_core::Duration;
use downbeat_plan::{BadProblem, Evaluation, HAS_SOLVER, Method, Options, PlanError, Problem};

use crate::{many, methods, model, plan, problem};

/// The explanation, which is the same for every method.
fn said(problem: &Problem) -> String {
    let mut said: Vec<String> = methods().into_iter().map(|m| plan(problem, m).unwrap_err().to_string()).collect();
    said.dedup();
    assert_eq!(said.len(), 1, "all say the same: {said:?}");
    said.remove(0)
}

#[test]
fn a_model_that_fits_nowhere_is_named_with_what_it_lacks() {
    let mut tight = problem(vec![model("small", 1.0, 10, 10), model("large", 9.0, 700, 400)], 2);
    tight.max_memory = Some(1024);
    assert_eq!(
        said(&tight),
        "no partition keeps every limit: model 'large' fits on no device: the model needs 1.074 KiB (700 B static and 400 B dynamic), \
         76 B more than a device has (1 KiB)"
    );
    tight.max_memory = None;
    tight.max_rate = Some(7.5);
    assert_eq!(
        said(&tight),
        "no partition keeps every limit: model 'large' has 9 requests/s, 1.5 more than a sub-cluster takes (7.5)"
    );
}

#[test]
fn totals_beyond_all_sub_clusters_are_said_with_how_many_would_do() {
    let models = || (0..10).map(|i| model(&format!("m{i}"), 10.0, 100, 20)).collect();
    let mut small = problem(models(), 2);
    small.max_rate = Some(30.0);
    assert_eq!(
        said(&small),
        "no partition keeps every limit: all models have 100 requests/s, 40 more than 2 sub-clusters take at 30 each; \
         at least 4 sub-clusters are needed"
    );
    small.max_rate = None;
    small.max_memory = Some(500);
    // 10 times 100, and 20 free on each of two.
    assert_eq!(
        said(&small),
        "no partition keeps every limit: all models need 1.016 KiB (1000 B static, and at least 40 B dynamic), 40 B more \
         than devices of 500 B hold in 2 sub-clusters"
    );
}

#[test]
fn models_that_run_nowhere_have_to_be_paid_for() {
    let mut new = problem(vec![model("a", 1.0, 1, 1), model("b", 1.0, 1, 1)], 1);
    new.models[0].load_cost = 4.0;
    new.max_disruption = Some(3.0);
    assert_eq!(
        said(&new),
        "no partition keeps every limit: loading the models that run nowhere yet (2) costs 5, 2 more than the largest \
         disruption (3)"
    );
}

/// Three models of 40 and one of 60 on devices of 100. No device takes three models, so one of
/// sub-cluster 0 has to go.
fn crowded() -> Problem {
    let mut crowded = problem(
        vec![40, 40, 40, 60].into_iter().enumerate().map(|(i, s)| model(&format!("m{i}"), 1.0, s, 0)).collect(),
        2,
    );
    crowded.max_memory = Some(100);
    for (m, cost) in crowded.models.iter_mut().zip([3.0, 2.0, 5.0, 7.0]) {
        (m.running, m.load_cost) = (Some(0), cost);
    }
    crowded.models[3].running = Some(1);
    crowded
}

#[test]
fn too_small_a_disruption_bound_is_told_the_least_that_works() {
    let mut tight = crowded();
    tight.max_disruption = Some(1.0);
    // The cheapest of the three goes to the other device, which has room for it: an unload and a
    // load of 2 each.
    let least = 4.0;
    for method in methods() {
        let error = plan(&tight, method).unwrap_err();
        assert!(matches!(&error, PlanError::Infeasible(reasons) if reasons.len() == 1), "{error}");
        // That no partition exists is known at once. How much less disruption is possible the
        // search does not prove.
        let by_search = method == Method::Search || !HAS_SOLVER;
        let said = if by_search {
            "a smaller one may be enough, but this one certainly is: 4"
        } else {
            "the least disruption that would be enough is 4"
        };
        assert!(error.to_string().ends_with(&format!("running assignment; {said}")), "{error}");
    }
    tight.max_disruption = Some(least);
    for method in methods() {
        let found = plan(&tight, method).unwrap().evaluation;
        assert_eq!((found.assignment.clone(), found.disruption), (vec![0, 1, 0, 1], least), "{method:?}");
    }
}

/// The sums fit, and still no partition does: one model more than sub-clusters, each of 60 on
/// devices of 100.
fn odd(sub_clusters: usize) -> Problem {
    let models = (0..=sub_clusters).map(|i| model(&format!("m{i}"), 10.0, 60, 0)).collect();
    Problem { max_memory: Some(100), ..problem(models, sub_clusters) }
}

#[test]
fn limits_that_cannot_be_kept_together_are_told_with_what_is_missing() {
    let mut odd = odd(2);
    for method in methods() {
        let error = plan(&odd, method).unwrap_err();
        assert!(matches!(&error, PlanError::Infeasible(reasons) if reasons.len() == 1), "{method:?}: {error}");
        assert!(error.to_string().contains("with 20 B of memory more for each sub-cluster"), "{error}");
        let exact = method != Method::Search && HAS_SOLVER;
        assert_eq!(error.to_string().contains(", and with no less"), exact, "{error}");
    }
    odd.max_memory = Some(120);
    assert!(plan(&odd, Method::Search).is_ok(), "with so much more there is one");
}

/// Too many partitions to try each.
#[test]
fn what_the_search_does_not_find_is_not_said_to_be_impossible() {
    let error = plan(&odd(12), Method::Search).unwrap_err().to_string();
    assert!(error.contains("but one may exist"), "{error}");
    assert!(error.contains("is 20 B over a device's memory"), "{error}");
}

#[test]
fn without_time_the_answer_is_still_a_plan() {
    let many = many(200, 8);
    let options = Options { time_limit: Duration::ZERO, seed: 1, method: Method::SearchThenSolver };
    let found = downbeat_plan::plan(&many, &options, &|| Duration::ZERO).unwrap().evaluation;
    assert!(found.is_feasible() && found.rate_imbalance() < 0.2, "largest first alone: {found:?}");
}

#[test]
fn numbers_that_are_none_are_named() {
    let good = problem(vec![model("a", 1.0, 1, 1), model("b", 1.0, 1, 1)], 2);
    let broken = |change: &dyn Fn(&mut Problem)| {
        let mut problem = good.clone();
        change(&mut problem);
        plan(&problem, Method::Search).unwrap_err().to_string()
    };
    assert_eq!(broken(&|p| p.models.clear()), "there are no models");
    assert_eq!(broken(&|p| p.sub_clusters = 0), "there are no sub-clusters: at least 1 is needed");
    assert!(
        broken(&|p| p.models[1].rate = f64::NAN)
            .starts_with("the rate of model 'b' is NaN; the value must be a finite")
    );
    assert!(broken(&|p| p.models[0].load_cost = -1.0).starts_with("the load cost of model 'a' is -1;"));
    assert!(broken(&|p| p.max_rate = Some(f64::INFINITY)).contains("the largest rate of a sub-cluster is inf"));
    assert!(broken(&|p| p.memory_weight = -1.0).contains("the weight of memory is -1"));
    assert_eq!(broken(&|p| p.models[1].name = "a".into()), "there are two models named 'a'");
    assert!(broken(&|p| p.sub_clusters = usize::MAX).contains("are too many"));
    assert_eq!(good.check(), Ok::<(), BadProblem>(()));
    assert_eq!(Evaluation::of(&good, vec![0, 2]), None, "there is no sub-cluster 2");
    assert_eq!(Evaluation::of(&good, vec![0]), None, "a model is nowhere");
}
