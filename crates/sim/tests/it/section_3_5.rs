//! Symphony §3.5: goodput stability and load-proportional device use, together "flat-top
//! behaviour".

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_core::{Duration, LatencyProfile};
use downbeat_sim::{Arrivals, Load, Pace, Report, Simulation};

const SEED: u64 = 35;

/// The rate that table 2's ResNet50 sustains on 8 devices, requests per second.
const PEAK: f64 = 5_300.0;

/// Table 2's ResNet50 on 8 devices at a multiple of its peak.
fn run(share: f64, dispatch: DispatchPolicy, drop: DropPolicy) -> Report {
    let (alpha, beta) = (Duration::from_millis_f64(1.053), Duration::from_millis_f64(5.072));
    let options = ModelOptions::new(LatencyProfile::linear(alpha, beta, 32).unwrap(), dispatch, drop);
    let (slo, arrivals) = (Duration::from_millis(25), Arrivals::Poisson);
    let simulation = Simulation {
        loads: vec![Load { options, slo, arrivals, rate: share * PEAK, pace: Pace::steady() }],
        devices: 8,
        warm_up: Duration::from_millis(1_500),
        span: Duration::from_millis(5_000),
        seed: SEED,
        ..Simulation::default()
    };
    simulation.run().unwrap()
}

#[test]
fn device_use_is_proportional_to_the_load() {
    for share in [0.25, 0.5, 0.75] {
        let report = run(share, DispatchPolicy::Deferred, DropPolicy::WindowDrop);
        let busy = report.mean_busy();
        // Batches are somewhat smaller at low load: fewer requests gather in the same time.
        assert!(
            (share * 0.8..share + 0.12).contains(&busy),
            "seed {SEED}: {busy:.2} busy at {share} of the peak load: {:?}",
            report.busy
        );
        assert!(report.worst_bad_share() < 0.01, "seed {SEED}: {:?}", report.models[0]);
    }
}

#[test]
fn eager_scheduling_keeps_devices_busy_at_half_the_load() {
    let eager = run(0.5, DispatchPolicy::Eager, DropPolicy::HeadDrop).mean_busy();
    let deferred = run(0.5, DispatchPolicy::Deferred, DropPolicy::HeadDrop).mean_busy();
    assert!(eager > 0.9 && deferred < 0.65, "seed {SEED}: {eager:.2} busy eager, {deferred:.2} deferred");
}

#[test]
fn devices_with_large_ids_stay_idle_under_low_load() {
    let report = run(0.25, DispatchPolicy::Deferred, DropPolicy::WindowDrop);
    let busy = &report.busy;
    assert!(busy.windows(2).all(|pair| pair[0] >= pair[1]), "seed {SEED}: the smallest id is the busiest: {busy:?}");
    assert!(busy[6] + busy[7] < 0.01, "seed {SEED}: two devices can be released: {busy:?}");
}

#[test]
fn goodput_does_not_fall_under_overload() {
    for share in [1.25, 1.5, 3.0] {
        let report = run(share, DispatchPolicy::Deferred, DropPolicy::WindowDrop);
        let goodput = report.good() as f64 / 5.0;
        assert!(
            goodput > 0.97 * PEAK,
            "seed {SEED}: {goodput:.0} r/s in time at {share} of the peak load of {PEAK} r/s"
        );
    }
}

/// The reason why window drop is the server's default on one device: head drop ends in ever smaller
/// batches of requests that are nearly late.
#[test]
fn on_one_device_window_drop_keeps_the_goodput_that_head_drop_loses() {
    let goodput = |drop: DropPolicy| {
        let (alpha, beta) = (Duration::from_micros(150), Duration::from_micros(1_600));
        let options = ModelOptions::new(LatencyProfile::linear(alpha, beta, 32).unwrap(), DispatchPolicy::Eager, drop);
        let (slo, arrivals) = (Duration::from_millis(50), Arrivals::Poisson);
        let simulation = Simulation {
            // 1.5 times what batches of 32 could give.
            loads: vec![Load { options, slo, arrivals, rate: 7_500.0, pace: Pace::steady() }],
            devices: 1,
            warm_up: Duration::from_millis(500),
            span: Duration::from_millis(3_000),
            noise: 0.1,
            seed: SEED,
            ..Simulation::default()
        };
        simulation.run().unwrap().good() as f64 / 3.0
    };
    let (window, head) = (goodput(DropPolicy::WindowDrop), goodput(DropPolicy::HeadDrop));
    assert!(window > 4_500.0, "seed {SEED}: {window:.0} r/s in time with window drop");
    assert!(head < 0.25 * window, "seed {SEED}: {head:.0} r/s in time with head drop, {window:.0} with window drop");
}
