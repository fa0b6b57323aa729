//! Device policies under virtual time: a checker judges every decision, and equal seeds give equal
//! runs.

use downbeat_core::Duration;
use downbeat_core::device::{PolicyName, Staging, Tuned};
use downbeat_lab::device::{
    Architecture, DeviceLoad, DevicePolicyName, DeviceSimulation, EmulatedModel, Glue, Platform, Tuning, tune_staging,
};
use proptest::prelude::*;

fn simulation(architecture: Architecture, rate: f64, requests: u64, seed: u64) -> (DeviceSimulation, Tuning) {
    let platform = if architecture.has_length() { Platform::TITAN_TENSORRT } else { Platform::TITAN_CUDNN };
    let model = EmulatedModel::new(architecture, platform);
    let tuning = Tuning::new(&model, 16).unwrap();
    let lengths = architecture.has_length().then_some(Glue::Rte);
    let load = DeviceLoad::steady(rate, requests, lengths);
    (DeviceSimulation::new(model, load, Duration::from_millis(200), seed), tuning)
}

#[test]
fn equal_seeds_give_equal_runs_and_others_do_not() {
    let run = |seed| {
        let (simulation, tuning) = simulation(Architecture::ResNet50, 200.0, 300, seed);
        simulation.run(tuning.policy(DevicePolicyName::NEbird).unwrap()).unwrap()
    };
    assert_eq!(format!("{:?}", run(1)), format!("{:?}", run(1)));
    assert_ne!(run(1).latencies_ms, run(2).latencies_ms);
}

/// E²bird §8.2: at low load no request waits for a batch or behind one.
#[test]
fn e2bird_section_8_2_elastic_halves_the_latency_at_low_load() {
    let (simulation, tuning) = simulation(Architecture::ResNet152, 10.0, 200, 1);
    let mean = |name| simulation.run(tuning.policy(name).unwrap()).unwrap().mean_ms;
    let (windowed, elastic) = (mean(DevicePolicyName::OptWait), mean(DevicePolicyName::NEbird));
    assert!(elastic < windowed * 0.554, "{elastic:.1} of {windowed:.1} ms (published: -44.6% to -70.9%)");
    let static_ = mean(DevicePolicyName::Static);
    assert!(static_ > windowed, "dummies cost time: {static_:.1} ms");
}

/// E²bird §5.2: copies of the next inputs overlap with running launches.
#[test]
fn e2bird_section_5_2_the_device_computes_while_inputs_are_copied() {
    let (mut simulation, tuning) = simulation(Architecture::ResNet50, 2_000.0, 600, 1);
    simulation.warm_up = 0;
    let throughput = |name| simulation.run(tuning.policy(name).unwrap()).unwrap();
    let (windowed, elastic) = (throughput(DevicePolicyName::NoWait), throughput(DevicePolicyName::NEbird));
    assert!(elastic.throughput > windowed.throughput * 1.1, "{} of {}", elastic.throughput, windowed.throughput);
    assert!(elastic.utilisation > windowed.utilisation + 0.1, "{} of {}", elastic.utilisation, windowed.utilisation);
    assert!(elastic.ring_full > 0 && elastic.most_slots == 64, "600 requests find no room in 64 slots at once");
}

#[test]
fn padding_is_what_was_computed_and_not_asked_for() {
    let (simulation, tuning) = simulation(Architecture::BertBase, 500.0, 400, 1);
    let padding = simulation.run(tuning.policy(DevicePolicyName::NoWait).unwrap()).unwrap().padding;
    assert!((0.05..0.9).contains(&padding), "{padding}");
    let (alone, tuning) = self::simulation(Architecture::BertBase, 1.0, 50, 1);
    assert!(alone.run(tuning.policy(DevicePolicyName::NoWait).unwrap()).unwrap().padding < 0.02, "nobody is batched");
}

/// DVABatch §7.1: eight numbers of stages are tried, here with one and with two pairs of buffers.
#[test]
fn dvabatch_section_7_1_stages_and_pairs_are_found_by_trying() {
    let (simulation, tuning) = simulation(Architecture::BertBase, 1.0, 200, 1);
    let Tuned { chosen, tried } = tune_staging(&simulation, &tuning).unwrap();
    let chosen = chosen.unwrap();
    let peak = |staging| tried.iter().find(|tried| tried.choice == staging).unwrap().peak;
    assert_eq!(tried.len(), 16, "no request joins a batch of other lengths, so that rules of joining are alike");
    assert!(tried.iter().all(|other| other.peak <= peak(chosen) / 0.99), "{chosen} of {tried:?}");
    assert!(peak(Staging { stages: 20, ..chosen }) < peak(chosen), "many stages cost a launch each: {tried:?}");
}

/// Every policy in the table is simulated by its name, except a policy that only runs the
/// scheduler's batches.
#[test]
fn every_policy_of_the_table_that_makes_batches_can_be_simulated() {
    for policy in PolicyName::all() {
        let name = policy.name().parse::<DevicePolicyName>();
        assert_eq!(name.is_ok(), policy.makes_batches(), "{policy}");
        for architecture in [Architecture::ResNet50, Architecture::BertBase] {
            let Ok(name) = name else { continue };
            let (mut simulation, tuning) = simulation(architecture, 50.0, 200, 3);
            simulation.warm_up = 0;
            let report = simulation.run(tuning.policy(name).unwrap()).unwrap();
            assert_eq!((report.answered, report.rejected), (200, 0), "{policy}");
        }
    }
}

fn policies() -> impl Strategy<Value = DevicePolicyName> {
    prop::sample::select(DevicePolicyName::all().collect::<Vec<_>>())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// The checker judges every decision of random runs, in which clients go away and rates change
    /// from low to far too high.
    #[test]
    fn random_runs_keep_every_rule(
        name in policies(),
        rate in 5.0..3000.0f64,
        seed in any::<u64>(),
        cancelled in prop::sample::select(vec![0.0, 0.0, 0.3]),
        bert in any::<bool>(),
        stages in 1..6usize,
        exits in prop::sample::select(vec![0.0, 0.5]),
        ahead in 0..3u32,
    ) {
        let architecture = if bert { Architecture::BertBase } else { Architecture::ResNet50 };
        let (mut simulation, mut tuning) = simulation(architecture, rate, 120, seed);
        simulation.model = simulation.model.cut(stages).unwrap();
        tuning.profile = Tuning::new(&simulation.model, 16).unwrap().profile;
        simulation.noise = 0.0;
        simulation.exits = vec![(1, exits)];
        simulation.cancelled = cancelled;
        simulation.warm_up = 0;
        tuning.ahead = ahead;
        tuning.mixes = vec![(4, "4".parse().unwrap()), (8, "4,4".parse().unwrap())];
        let report = simulation.run(tuning.policy(name).unwrap()).unwrap();
        if cancelled == 0.0 {
            prop_assert_eq!(report.answered, 120);
            prop_assert_eq!((report.rejected, report.dropped), (0, 0));
        } else {
            prop_assert!(report.answered <= 120);
        }
        prop_assert!(report.utilisation <= 1.0);
        let alone = if exits > 0.0 { 0.0 } else { simulation.model.time(1, 4).as_millis_f64() };
        prop_assert!(report.latencies_ms.iter().all(|latency| latency.is_nan() || *latency >= alone));
    }
}
