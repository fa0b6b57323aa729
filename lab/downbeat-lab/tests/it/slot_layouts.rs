//! Slots of devices: their sizes follow from the load of the whole cluster.

use downbeat_core::{Duration, LatencyProfile};
use downbeat_lab::slots::{SlotLayout, SlotModel, SlotProblem};
use proptest::prelude::*;

/// A model whose batches take `fixed + each * b` ms on `knee` steps or more. On fewer steps they
/// take proportionally longer.
fn model(rate: f64, slo_ms: f64, (fixed, each, knee): (f64, f64, u32), steps: u32) -> SlotModel {
    let profile = |on: u32| {
        let slower = f64::from(knee) / f64::from(on.min(knee));
        LatencyProfile::linear_ms(each * slower, fixed * slower, 64).unwrap()
    };
    SlotModel { rate, slo: Duration::from_millis_f64(slo_ms), profiles: (1..=steps).map(profile).collect() }
}

fn problem(models: Vec<SlotModel>, devices: u32, steps: u32) -> SlotProblem {
    SlotProblem { models, devices, steps, most_slots: steps, alike: false }
}

#[test]
fn a_model_with_a_low_knee_gets_slots_of_its_knee() {
    let plan = problem(vec![model(1.0, 20.0, (2.0, 1.0, 2), 4)], 2, 4).choose().unwrap();
    assert_eq!(plan.layout.to_string(), "2 x 2+2");
}

#[test]
fn a_model_that_gains_by_batches_and_units_keeps_whole_devices() {
    // Batches on a half take twice as long, and have half of the time.
    let plan = problem(vec![model(1.0, 30.0, (8.0, 0.2, 4), 4)], 2, 4).choose().unwrap();
    assert_eq!(plan.layout.to_string(), "2 x 4");
}

#[test]
fn a_model_that_needs_a_whole_device_leaves_the_others_to_be_cut() {
    let models = vec![model(1.0, 10.0, (7.0, 0.1, 4), 4), model(20.0, 20.0, (2.0, 1.0, 1), 4)];
    let plan = problem(models, 3, 4).choose().unwrap();
    assert!(plan.layout.0.contains(&vec![4]), "{}", plan.layout);
    assert!(plan.layout.0.contains(&vec![1, 1, 1, 1]), "{}", plan.layout);
    // The first model meets its SLO only on the whole device.
    assert!(plan.dearness[0][0].is_infinite() && plan.dearness[0][3] == 1.0, "{:?}", plan.dearness);
}

#[test]
fn a_server_s_devices_are_cut_alike() {
    let models = vec![model(1.0, 10.0, (7.0, 0.1, 4), 4), model(20.0, 20.0, (2.0, 1.0, 1), 4)];
    let free = problem(models, 3, 4);
    let alike = SlotProblem { alike: true, ..free.clone() };
    let (free, alike) = (free.choose().unwrap(), alike.choose().unwrap());
    assert!(!free.layout.is_alike() && alike.layout.is_alike(), "{} {}", free.layout, alike.layout);
    assert!(alike.factor < free.factor, "one model needs whole devices, so that all are");
}

#[test]
fn no_layout_meets_an_slo_that_a_whole_device_does_not() {
    assert_eq!(problem(vec![model(1.0, 5.0, (7.0, 0.1, 4), 4)], 3, 4).choose(), None);
}

proptest! {
    /// A search over every layout finds no layout that is better by more than a percent, and the
    /// chosen one is never worse than whole devices.
    #[test]
    fn the_search_is_within_a_percent_of_the_best_of_all_layouts(
        of in prop::collection::vec((0.2..3.0f64, 8.0..60.0f64, (0.5..4.0f64, 0.1..2.0f64, 1..6u32)), 1..4),
        devices in 1..4u32,
    ) {
        let models: Vec<SlotModel> =
            of.iter().map(|(rate, slo, shape)| model(*rate, slo.max(2.0 * (shape.0 + shape.1)), *shape, 5)).collect();
        let problem = problem(models, devices, 5);
        let (exact, searched) = (problem.choose().unwrap(), problem.search().unwrap());
        let whole = problem.evaluate(&SlotLayout::whole(&problem)).unwrap();
        prop_assert!(searched.factor >= 0.99 * exact.factor, "{} {} {}", searched.layout, exact.layout, exact.factor);
        prop_assert!(searched.factor >= whole.factor);
    }
}
