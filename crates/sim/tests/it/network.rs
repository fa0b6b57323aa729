//! Frontends, schedulers and backends on a network that goes wrong, under an outside judge.

use downbeat_sim::network::{NetworkOutcome, NetworkScenario};

/// A run of a seed, which keeps all rules.
fn judged(seed: u64, requests: u64) -> NetworkOutcome {
    let outcome = NetworkScenario::random(seed, requests).run();
    assert_eq!(outcome.broken, None, "seed {seed} of {requests} requests: {outcome:?}");
    assert_eq!(outcome.ended(), outcome.requests, "seed {seed}: {outcome:?}");
    outcome
}

/// The aim of issue 18, in small: no rule is broken whatever goes wrong. `downbeat simulate network --seeds A..B` runs more.
#[test]
fn no_rule_is_broken_under_random_faults() {
    let mut all = NetworkOutcome::default();
    for seed in 0..200 {
        all.add(&judged(seed, 300));
    }
    assert!(all.requests > 20_000 && all.good > all.requests / 4, "{all:?}");
    assert!(all.repeated > 0 && all.lost > 0 && all.too_late > 0 && all.died > 0, "{all:?}");
}
