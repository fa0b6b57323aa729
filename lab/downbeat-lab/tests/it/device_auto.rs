//! `auto` with its guard in the world: a policy that loses goes back, and a change loses no request.

use downbeat_core::Duration;
use downbeat_core::device::PolicyName;
use downbeat_lab::device::{
    AutoOutcome, AutoRun, DeviceLimits, EmulatedModel, MeasuredForAuto, MeasuredModel, Played, RandomDeviceWorkload,
    RandomModel, SegmentLaw,
};
use downbeat_sim::Arrivals;

/// A model that keeps a third of its device busy. Its batches of at most 8 take 2 ms an item and 4
/// ms more. It gets this many requests a second, due within 60 ms.
fn workload(rate: f64) -> RandomDeviceWorkload {
    let limits = DeviceLimits { copy_bytes_per_second: f64::INFINITY, ..DeviceLimits::plain(30) };
    let law = SegmentLaw { fixed_us: 1_000.0, work_us: 5_000.0, units_per_item: 10.0, most_units: 10.0 };
    let model = MeasuredModel {
        name: "third".to_owned(),
        segments: vec![law; 4],
        item_bytes: (0, 0),
        launch_overhead: Duration::from_micros(20),
        limits,
        issue_share: 0.0,
    };
    let emulated = EmulatedModel::measured(model);
    RandomDeviceWorkload {
        number: 1,
        limits,
        devices: 1,
        models: vec![RandomModel { emulated, max_batch: 8, slo: Duration::from_millis(60), rate }],
        arrivals: Arrivals::Poisson,
        load: 1.0,
        noise: 0.02,
    }
}

/// Two such models on one device. A launch of either keeps the whole device busy. Each model runs
/// its chosen candidate, under the guard.
fn side_by_side(choose: [fn(&MeasuredForAuto) -> usize; 2]) -> AutoOutcome {
    let mut workload = workload(70.0);
    workload.limits.units = 10;
    workload.models.push(workload.models[0].clone());
    let measured = |(model, choose): (&RandomModel, fn(&MeasuredForAuto) -> usize)| {
        let mut measured = MeasuredForAuto::new(model).unwrap();
        measured.start = choose(&measured);
        measured
    };
    let measured: Vec<_> = workload.models.iter().zip(choose).map(measured).collect();
    let span = Duration::from_millis(24_000);
    AutoRun { workload: &workload, span, settled: Duration::ZERO, seed: 3 }.run(&measured, Played::Auto).unwrap()
}

/// Returns the candidate of `windowed` that waits the least.
fn at_once(measured: &MeasuredForAuto) -> usize {
    measured.candidates.iter().position(|one| one.candidate.policy == PolicyName::WINDOWED).unwrap()
}

/// Returns the candidate of `windowed` that waits the longest, for as long as its largest batch
/// takes.
fn late(measured: &MeasuredForAuto) -> usize {
    measured.candidates.iter().rposition(|one| one.candidate.policy == PolicyName::WINDOWED).unwrap()
}

/// Without a window a model fares as under `exclusive`, on the share that the other model leaves.
/// Alone on the device it would do better, which is no reason to go back.
#[test]
fn the_guard_does_not_blame_a_policy_for_what_other_models_do() {
    let outcome = side_by_side([at_once, at_once]);
    assert_eq!((outcome.lost_policies, outcome.lost), (0, 0), "{outcome:?}");
}

#[test]
fn a_policy_that_is_bad_on_a_shared_device_goes_back_and_the_other_stays() {
    let outcome = side_by_side([late, at_once]);
    let last: Vec<_> = outcome.last.iter().map(|candidate| candidate.policy).collect();
    assert_eq!((outcome.lost_policies, outcome.lost), (1, 0), "{outcome:?}");
    assert_eq!(last, [PolicyName::EXCLUSIVE, PolicyName::WINDOWED]);
}
