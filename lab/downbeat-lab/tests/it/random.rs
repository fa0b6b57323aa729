//! Policies judged on random workloads.

use downbeat_core::Duration;
use downbeat_lab::judgement::{Judge, Judged};
use downbeat_lab::policy::POLICIES;
use downbeat_lab::random_workloads::RandomWorkload;

/// Draws a workload and makes it small enough for a debug build: a fraction of a second.
fn drawn(number: u32) -> RandomWorkload {
    let mut workload = RandomWorkload::draw(1, number);
    workload.scenario.models.truncate(2);
    workload.scenario.devices = 2;
    workload.scenario.rate = workload.scenario.fluid_bound().unwrap();
    (workload.scenario.warm_up, workload.scenario.span) = (Duration::ZERO, Duration::from_millis(100));
    workload
}

fn judge(policy: &str, others: &[&str]) -> Judge {
    let others = others.iter().map(|other| POLICIES.parse(other).unwrap()).collect();
    Judge { policy: POLICIES.parse(policy).unwrap(), others, seeds: vec![1, 2], precision: 0.05, requests: 400.0 }
}

fn judged(judge: &Judge, number: u32) -> Judged {
    let workload = drawn(number);
    judge.judged(&workload, &judge.question(&workload).answer(2, |_, _| true).unwrap()).unwrap()
}

#[test]
fn a_ratio_is_of_the_best_mean_of_the_others() {
    let judge = judge("eager+head", &["eager+head", "clockwork", "timeout:50%"]);
    let judged = judged(&judge, 1);
    assert_eq!(judged.capacities.len(), 3, "itself is no other: {judged:?}");
    let mean = |name: &str| judged.capacities[name].iter().sum::<f64>() / 2.0;
    assert_eq!(judged.capacity, mean("eager+head"));
    assert_eq!(judged.best_capacity, mean("clockwork").max(mean("timeout:50%")));
    assert_eq!(judged.ratio, Some(judged.capacity / judged.best_capacity));
    let single = |seed: usize| {
        let [ours, others @ ..] = ["eager+head", "clockwork", "timeout:50%"].map(|name| judged.capacities[name][seed]);
        Some(ours / others.into_iter().fold(0.0, f64::max))
    };
    assert_eq!(judged.ratios, [single(0), single(1)]);
}

#[test]
fn a_judgement_says_how_ratios_are_spread_and_how_noisy_they_are() {
    let judge = judge("eager+head", &["eager"]);
    let mut one = judged(&judge, 2);
    // Made-up ratios of 0.5, 0.9, 1, 1.1 and none, with arrivals that move each by 0.1 to both
    // sides.
    let workloads = [Some(0.9), Some(0.5), None, Some(1.1), Some(1.0)].map(|ratio| {
        one.ratio = ratio;
        one.ratios = [-0.1, 0.1].map(|by| ratio.map(|ratio: f64| ratio + by)).to_vec();
        one.clone()
    });
    let judgement = judge.judgement(1, workloads.to_vec(), 3);
    let spread = judgement.spread.unwrap();
    assert_eq!((spread.count, spread.least, spread.tenth_percentile, spread.at_one), (4, 0.5, 0.5, 0.5));
    // One ratio's standard deviation is 0.1 * sqrt(2), that of the mean of two is 0.1.
    assert!((spread.noise.unwrap() - 0.1).abs() < 1e-12, "{spread:?}");
    let text = judgement.to_string();
    for expected in
        ["| best other |", "least 0.500", "at 1.00 or above 50%", "move a ratio by 0.100", "On 1 more", "3 workloads"]
    {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert!(judgement.page().contains("<svg"));
}

#[test]
fn what_was_interrupted_is_not_judged_and_what_is_finished_is_kept() {
    let (judge, workload) = (judge("eager+head", &["eager"]), drawn(1));
    let results = judge.question(&workload).answer(1, |done, _| done < 2).unwrap();
    assert_eq!((results.cases.len(), results.unfinished), (1, 1), "two seeds of the first policy");
    assert!(results.to_string().contains("interrupted; policies that were not measured: 1"), "{results}");
    assert_eq!(judge.judged(&workload, &results), None);
}
