//! Autoscaling as a closed loop: Kubernetes' autoscaler on the advice of Symphony's §3.5.

use downbeat_lab::autoscaling::{Change, LoopOptions, Scaled, published};
use downbeat_lab::policy::POLICIES;

/// The second in which the load changes.
const AT: usize = Change::AT_S;

fn play(change: Change, policy: &str, seed: u64) -> Scaled {
    let policy = POLICIES.parse(policy).unwrap();
    change.scenario(&policy, LoopOptions::default(), seed).run().unwrap()
}

#[test]
fn a_load_that_doubles_is_served_again_after_a_minute() {
    for (policy, seed) in [("adaptive", 41), ("adaptive", 42), ("deferred", 41)] {
        let run = play(Change::Doubles, policy, seed);
        let attainment = run.attainment(AT + 60, usize::MAX);
        assert!(attainment >= 0.99, "{policy}, seed {seed}: {attainment}; {:?}", run.changes(1));
        assert!(run.attainment(AT, AT + 30) < 0.9, "the loop takes its time");
        assert!((13..=17).contains(&run.devices(AT + 590)), "12 would be busy all the time: {:?}", run.changes(1));
    }
}

#[test]
fn a_load_that_halves_gives_devices_back_within_five_minutes() {
    for (policy, seed) in [("adaptive", 43), ("eager", 43), ("deferred", 43)] {
        let run = play(Change::Halves, policy, seed);
        let (before, after) = (run.devices(AT - 1), run.devices(AT + 300));
        assert!(before >= 7 && after <= 5, "{policy}, seed {seed}: {before}, then {after}; {:?}", run.changes(1));
        let attainment = run.attainment(AT, usize::MAX);
        assert!(attainment >= 0.99, "{policy}, seed {seed}: {attainment}");
    }
}

#[test]
fn a_noisy_load_does_not_oscillate_for_an_hour() {
    let run = play(Change::Noise, "adaptive", 44);
    assert_eq!(run.turns(Change::SETTLES_S), 0, "seed 44: {:?}", run.changes(1));
    assert!(run.attainment(Change::SETTLES_S, usize::MAX) >= 0.99, "seed 44");
}

/// Kubernetes ignores a difference of a tenth: the rule of deploy/helm asks for more.
#[test]
fn more_devices_are_always_more_than_a_tenth_more() {
    let more = [(1, 2), (10, 11), (20, 21), (20, 30), (20, 18)].map(|(devices, wanted)| published(devices, wanted));
    assert_eq!(more, [2.0, 12.0, 23.0, 30.0, 18.0]);
}
