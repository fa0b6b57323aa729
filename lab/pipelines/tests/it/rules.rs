//! All rules on random workloads. Each failure names the seed and the workload.

use downbeat_core::pipeline::Outcome;
use downbeat_pipeline_lab::{Batches, NoDeadline, Oracle, PipelineWorkload, Row, Rule, Run, Settings, StepSlos};
use downbeat_sim::pipelines::{LoadSearch, PipelineJudge, at_load, play};

const SEED: u64 = 37;

fn workload(number: u32) -> PipelineWorkload {
    PipelineWorkload::draw(SEED, number, 400)
}

/// The judge panics if a request does not end exactly once.
#[test]
fn each_rule_ends_each_request_once_and_the_same_way_again() {
    for number in 1..=2 {
        let workload = workload(number);
        for batches in [Batches::Deferred, Batches::Eager] {
            for rule in Rule::ALL {
                let run = Run { warm_up: 0, ..Run::new(&workload, batches, 1.5) };
                let verdict = rule.judge(&run).unwrap();
                assert_eq!(verdict.asked, run.arrivals.len() as u64, "seed {SEED}, {workload}, {rule:?}");
                assert_eq!(Some(verdict), rule.judge(&run), "seed {SEED}, {workload}, {rule:?}");
                let lost = verdict.asked - verdict.good;
                let within = |most_lost| rule.judge(&Run { most_lost, ..run.clone() });
                assert_eq!(within(lost), Some(verdict), "seed {SEED}, {workload}, {rule:?}");
                assert!(lost == 0 || within(lost - 1).is_none(), "seed {SEED}, {workload}, {rule:?}");
            }
        }
    }
}

#[test]
fn without_deadlines_nothing_is_given_up_and_under_overload_much_is_late() {
    let workload = workload(1);
    let arrivals = at_load(&workload.arrivals, 3.0);
    let stage = Rule::NoDeadline.stage(&workload, Batches::Eager);
    let ends = play(&stage, &arrivals, &mut NoDeadline).unwrap();
    assert!(ends.iter().all(|end| end.outcome == Outcome::Done), "seed {SEED}, {workload}");
    let verdict = PipelineJudge::new(&arrivals, 0).judge(&ends).unwrap();
    assert!(verdict.late > verdict.asked / 4, "seed {SEED}, {workload}: {verdict:?}");
}

#[test]
fn no_rule_but_tritons_answers_late() {
    for number in 1..=6 {
        let workload = workload(number);
        let run = Run::new(&workload, Batches::Deferred, 2.0);
        for rule in Rule::ALL.into_iter().filter(|rule| *rule != Rule::NoDeadline) {
            let verdict = rule.judge(&run).unwrap();
            assert_eq!(verdict.late, 0, "seed {SEED}, {workload}, {rule:?}");
        }
    }
}

#[test]
fn the_oracle_is_at_least_as_good_as_every_division_that_it_begins_with() {
    for number in 1..=4 {
        let workload = workload(number);
        let run = Run::new(&workload, Batches::Deferred, 1.5);
        let stage = Rule::Equal.stage(&workload, Batches::Deferred);
        let oracle = Oracle { stage: &stage, tries: 4, seed: SEED };
        let equal: Vec<Vec<f64>> = workload.pipelines.iter().map(|p| vec![1.0; p.shape.len()]).collect();
        let best = oracle.search(&run, &[equal], 0).verdict.goodput();
        let reference = Rule::Equal.judge(&run).unwrap().goodput();
        assert!(best >= reference, "seed {SEED}, {workload}: {best} and {reference}");
    }
}

#[test]
fn an_slo_for_each_step_adds_up_to_the_whole_at_most() {
    for number in 1..=20 {
        let workload = workload(number);
        let run = Run::new(&workload, Batches::Eager, 1.0);
        for rule in [Rule::Equal, Rule::ByAlone, Rule::Nexus] {
            let verdict = rule.judge(&run).unwrap();
            assert_eq!(verdict.late, 0, "seed {SEED}, {workload}, {rule:?}");
        }
    }
    let ends = play(
        &Rule::Equal.stage(&workload(1), Batches::Eager),
        &workload(1).arrivals[..1],
        &mut StepSlos(
            workload(1).pipelines.iter().map(|p| vec![downbeat_core::Duration::ZERO; p.shape.len()]).collect(),
        ),
    );
    assert_eq!(ends.unwrap()[0].outcome, Outcome::Lost, "no time for a step, no answer");
}

#[test]
fn workloads_follow_from_their_seed_and_every_kind_occurs() {
    let drawn: Vec<PipelineWorkload> = (1..=60).map(|number| PipelineWorkload::draw(SEED, number, 100)).collect();
    let again = PipelineWorkload::draw(SEED, 5, 100);
    assert_eq!(again.arrivals, drawn[4].arrivals);
    assert_ne!(PipelineWorkload::draw(SEED + 1, 5, 100).arrivals, drawn[4].arrivals);
    type Condition = fn(&PipelineWorkload) -> bool;
    let kinds: [(&str, Condition); 7] = [
        ("poisson", |w| w.to_string().contains("poisson")),
        ("bursty", |w| w.to_string().contains("gamma")),
        ("in steps", |w| w.to_string().contains("steps, loads")),
        ("a fork", |w| w.pipelines.iter().any(|p| p.shape.steps().iter().any(|step| step.after.len() > 1))),
        ("a chain of 5", |w| w.pipelines.iter().any(|p| p.shape.len() == 5)),
        ("a shared model", |w| w.pipelines.iter().map(|p| p.models.len()).sum::<usize>() > w.models.len()),
        ("shared devices", |w| w.models.len() > w.pools.len()),
    ];
    for (name, is_kind) in kinds {
        assert!(drawn.iter().any(is_kind), "seed {SEED}: no workload has {name}");
        assert!(name == "shared devices" || !drawn.iter().all(is_kind), "seed {SEED}: every workload has {name}");
    }
}

#[test]
fn a_row_has_all_rules_and_the_oracle() {
    let search = LoadSearch { least: 0.02, most: 4.0, steps: 3, tolerated: 0.01 };
    let settings = Settings { requests: 400, tries: 2, search, capacity: true };
    let row = Row::of(&workload(2), Batches::Deferred, &settings);
    let numbers = Rule::ALL.len() + 1;
    assert_eq!((row.goodput[0].len(), row.goodput[1].len(), row.capacity.len()), (numbers, numbers, numbers));
    assert!(row.capacity.iter().all(|load| (0.019..4.0).contains(load)), "{row:?}");
}
