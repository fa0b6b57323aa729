//! Symphony's partitioner beside partitions by chance.

use downbeat_core::Duration;
use downbeat_lab::partitions::{generate, random_partition};
use downbeat_plan::{Method, Options, plan};

#[test]
fn a_seed_gives_one_workload_and_one_partition_by_chance() {
    assert_eq!(generate(40, 3, 7), generate(40, 3, 7));
    assert_ne!(generate(40, 3, 7), generate(40, 3, 8));
    let problem = generate(60, 4, 3).problem();
    let by_chance = || random_partition(&problem, 5, 50, &|| false);
    assert_eq!(by_chance(), by_chance());
}

/// Appendix A.2: "significantly better than any randomly generated assignments".
#[test]
fn section_a_2_a_plan_is_more_even_than_chance() {
    let problem = generate(100, 5, 1).problem();
    let (random, tried) = random_partition(&problem, 1, 2_000, &|| false).unwrap();
    let random = random.unwrap();
    assert_eq!(tried, 2_000);
    let options = Options { time_limit: Duration::from_millis(60_000), seed: 1, method: Method::Search };
    let found = plan(&problem, &options, &|| Duration::ZERO).unwrap().evaluation;
    assert!(found.is_feasible(), "{found:?}");
    assert!(found.rate_imbalance() < 0.2 * random.rate_imbalance(), "{found:?}");
    assert!(found.memory_imbalance() < 0.2 * random.memory_imbalance(), "{found:?}");
}
