//! Runs of many kinds under the checker, and the promises of a run.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, PriorityLevel, TimeoutAction};
use downbeat_core::{Duration, LatencyProfile};
use downbeat_sim::{Arrivals, Load, Pace, Simulation};
use proptest::prelude::*;

fn load(
    (alpha_us, beta_us): (u64, u64),
    slo_us: u64,
    drop: DropPolicy,
    dispatch: DispatchPolicy,
    rate: f64,
    arrivals: Arrivals,
) -> Load {
    let (alpha, beta) = (Duration::from_micros(alpha_us), Duration::from_micros(beta_us));
    let options = ModelOptions {
        profiles: LatencyProfile::linear(alpha, beta, 32).unwrap().into(),
        max_batch: 32,
        drop,
        dispatch,
        max_in_flight: u32::MAX,
        shares_limit: None,
        max_wait: Duration::MAX,
        levels: vec![PriorityLevel { max_queue: 500, timeout_action: TimeoutAction::Reject }],
    };
    Load { options, slo: Duration::from_micros(slo_us), arrivals, rate, pace: Pace::steady() }
}

fn simulation(loads: Vec<Load>, devices: u32, seed: u64) -> Simulation {
    let (warm_up, span) = (Duration::from_millis(100), Duration::from_millis(400));
    Simulation { loads, devices, warm_up, span, seed, ..Simulation::default() }
}

#[test]
fn the_same_seed_makes_the_same_run_and_another_seed_another() {
    let with = |seed| {
        let load =
            load((1_053, 5_072), 25_000, DropPolicy::WindowDrop, DispatchPolicy::Deferred, 5_000.0, Arrivals::Poisson);
        let mut simulation = simulation(vec![load], 8, seed);
        simulation.noise = 0.05;
        simulation.run().unwrap()
    };
    assert_eq!(with(1), with(1));
    assert_ne!(with(1), with(2));
}

#[test]
fn without_noise_nothing_is_late_and_with_noise_it_is_counted() {
    let load = load((1_000, 5_000), 20_000, DropPolicy::HeadDrop, DispatchPolicy::Deferred, 600.0, Arrivals::Poisson);
    let mut simulation = simulation(vec![load], 4, 11);
    let exact = simulation.run().unwrap();
    assert_eq!(exact.models[0].missed, 0);
    simulation.noise = 0.1;
    let noisy = &simulation.run().unwrap().models[0];
    let dropped: u64 = noisy.dropped.values().sum();
    assert!(noisy.missed > 0, "seed 11: {noisy:?}");
    assert_eq!(noisy.offered, noisy.good + noisy.missed + noisy.rejected + dropped);
}

#[test]
fn a_thousand_models_on_a_thousand_devices() {
    let dispatches = [
        DispatchPolicy::Deferred,
        DispatchPolicy::Eager,
        DispatchPolicy::Latest,
        DispatchPolicy::Timeout { delay: Duration::from_millis(5), preferred: vec![4, 8] },
    ];
    let loads = (0..1_000)
        .map(|n: u64| {
            let dispatch = dispatches[n as usize % 4].clone();
            load((200 + n, 5_000), 40_000, DropPolicy::WindowDrop, dispatch, 100.0, Arrivals::Gamma(0.5))
        })
        .collect();
    let report = simulation(loads, 1_000, 5).run().unwrap();
    let offered: u64 = report.models.iter().map(|model| model.offered).sum();
    assert!(report.good() as f64 > 0.99 * offered as f64, "seed 5: {} of {offered} in time", report.good());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// For any cluster and any load the checker has no objection, and the report accounts for every
    /// request that counts.
    #[test]
    fn every_run_is_by_the_rules(
        models in prop::collection::vec(
            (1..3_000u64, 1..9_000u64, 0..60_000u64, 0..3usize, 0..4usize, 1..3_000u32, 0..3usize), 1..5),
        devices in 0..5u32,
        noise in prop_oneof![Just(0.0), 0.0..0.5f64],
        seed: u64,
    ) {
        let drops = [DropPolicy::HeadDrop, DropPolicy::WindowDrop, DropPolicy::None];
        let dispatches = [
            DispatchPolicy::Deferred,
            DispatchPolicy::Eager,
            DispatchPolicy::Latest,
            DispatchPolicy::Timeout { delay: Duration::from_millis(3), preferred: vec![2, 8] },
        ];
        let arrivals = [Arrivals::Poisson, Arrivals::Constant, Arrivals::Gamma(0.1)];
        // Without devices a model that never drops would keep its requests for ever.
        let loads: Vec<Load> = models.into_iter().map(|(alpha, beta, slo, drop, dispatch, rate, arrival)| {
            let drop = drops[if devices == 0 { drop % 2 } else { drop }];
            load((alpha, beta), slo, drop, dispatches[dispatch].clone(), f64::from(rate), arrivals[arrival])
        }).collect();
        let mut simulation = simulation(loads, devices, seed);
        simulation.noise = noise;
        for model in simulation.run().unwrap().models {
            let dropped: u64 = model.dropped.values().sum();
            prop_assert_eq!(model.offered, model.good + model.missed + model.rejected + dropped);
        }
    }
}
