//! Models of unlike size on one device.

use downbeat_core::Duration;
use downbeat_sim::{Arrivals, ModelProfile, Network, Policy, Popularity, Scenario, Shape, quantile};

/// 200/s of a model of 0.2 ms a batch with an SLO of 250 ms, beside 1,800/s of one of 2 ms and more
/// with an SLO of 50 ms. The large model keeps the device busy. Under plain urgency the small one
/// waited 211 ms (p99). The large one, whose p99 was 5.8 ms, gained nothing.
#[test]
fn a_small_model_does_not_wait_out_its_slo_beside_a_large_one() {
    let model =
        |name: &str, alpha_ms, beta_ms, slo_ms| ModelProfile { name: name.to_owned(), alpha_ms, beta_ms, slo_ms };
    let scenario = Scenario {
        models: vec![model("small", 0.003, 0.2, 250.0), model("large", 0.3, 2.0, 50.0)],
        rate: 2000.0,
        arrivals: Arrivals::Poisson,
        popularity: Popularity::Equal,
        shape: Shape::Steady,
        devices: 1,
        max_batch: 32,
        noise: 0.0,
        network: Network::default(),
        warm_up: Duration::from_millis(500),
        span: Duration::from_millis(5_000),
    };
    let mut simulation = scenario.simulation(&"adaptive".parse::<Policy>().unwrap(), 1).unwrap();
    (simulation.loads[0].rate, simulation.loads[1].rate) = (200.0, 1_800.0);
    let report = simulation.run().unwrap();
    assert_eq!(report.models[0].bad_share(), 0.0);
    assert_eq!(report.models[1].bad_share(), 0.0);
    let wait_ms = |model: usize| {
        let bins = quantile(&report.models[model].delays, 0.99).unwrap() as f64;
        bins / 200.0 * report.models[model].slo.as_millis_f64()
    };
    assert!(wait_ms(0) < 15.0, "p99 of the small one's wait: {} ms", wait_ms(0));
    assert!(wait_ms(1) < 10.0, "p99 of the large one's wait: {} ms", wait_ms(1));
}
