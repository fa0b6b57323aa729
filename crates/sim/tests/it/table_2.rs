//! Symphony table 2: one model on 8 devices, Poisson arrivals, at most 1% dropped or late.
//!
//! Virtual time: the figures follow from the seed alone, on any machine.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_core::{Duration, LatencyProfile};
use downbeat_sim::{Arrivals, Capacity, Load, Pace, Simulation, capacity};

const SEED: u64 = 2308;

struct Model {
    alpha_ms: f64,
    beta_ms: f64,
    slo_ms: f64,
    /// Goodput of the staggered pattern, requests per second (table 2).
    bound: f64,
}

const RESNET50: Model = Model { alpha_ms: 1.053, beta_ms: 5.072, slo_ms: 25.0, bound: 5839.0 };
const INCEPTION_RESNET_V2: Model = Model { alpha_ms: 5.090, beta_ms: 18.368, slo_ms: 70.0, bound: 1083.0 };

fn measure(model: &Model, drop: DropPolicy, dispatch: DispatchPolicy) -> Capacity {
    let (alpha, beta) = (Duration::from_millis_f64(model.alpha_ms), Duration::from_millis_f64(model.beta_ms));
    let options = ModelOptions::new(LatencyProfile::linear(alpha, beta, 32).unwrap(), dispatch, drop);
    let load = Load {
        options,
        slo: Duration::from_millis_f64(model.slo_ms),
        arrivals: Arrivals::Poisson,
        rate: model.bound,
        pace: Pace::steady(),
    };
    let simulation = Simulation {
        loads: vec![load],
        devices: 8,
        warm_up: Duration::from_millis(1_500),
        // Head drop tips over at some point of a run and does not recover: a short run would miss
        // this.
        span: Duration::from_secs_f64(120_000.0 / model.bound),
        seed: SEED,
        ..Simulation::default()
    };
    let found = capacity(&simulation, 0.7, 0.98, 0.01).unwrap().expect("0.7 of the bound is held");
    let report = &found.report.models[0];
    println!(
        "seed {SEED}: {drop:?}: {:.0} r/s, {:.1}% of the bound, mean batch {:.1}",
        found.rate,
        100.0 * found.rate / model.bound,
        report.mean_batch()
    );
    found
}

#[track_caller]
fn assert_near(found: &Capacity, expected: f64) {
    assert!((found.rate / expected - 1.0).abs() < 0.04, "seed {SEED}: {:.0} r/s, expected {expected} r/s", found.rate);
}

#[test]
fn resnet50_deferred_with_window_drop_holds_5336() {
    let found = measure(&RESNET50, DropPolicy::WindowDrop, DispatchPolicy::Deferred);
    assert_near(&found, 5336.0);
    let mean = found.report.models[0].mean_batch();
    assert!((14.0..=17.0).contains(&mean), "figure 1: batches of 14 and more, staggered 16; mean {mean:.1}");
}

#[test]
fn resnet50_deferred_with_head_drop_holds_4908() {
    assert_near(&measure(&RESNET50, DropPolicy::HeadDrop, DispatchPolicy::Deferred), 4908.0);
}

#[test]
fn resnet50_eager_with_head_drop_holds_4932() {
    let found = measure(&RESNET50, DropPolicy::HeadDrop, DispatchPolicy::Eager);
    assert_near(&found, 4932.0);
    let mean = found.report.models[0].mean_batch();
    assert!(mean < 10.0, "eager batches are smaller at the same load; mean {mean:.1}");
}

#[test]
fn inception_resnet_v2_deferred_holds_946_or_840_by_drop_policy() {
    assert_near(&measure(&INCEPTION_RESNET_V2, DropPolicy::WindowDrop, DispatchPolicy::Deferred), 946.0);
    assert_near(&measure(&INCEPTION_RESNET_V2, DropPolicy::HeadDrop, DispatchPolicy::Deferred), 840.0);
}
