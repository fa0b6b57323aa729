//! The bounds against the paper's figures, against all schedules of tiny traces, and against
//! measured policies.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_lab::bounds::{ModelTrace, Trace, clairvoyant};
use downbeat_sim::{Arrivals, Load, Pace, Search, Simulation, fluid, staggered};
use proptest::prelude::*;

fn profile(alpha_ms: f64, beta_ms: f64) -> LatencyProfile {
    LatencyProfile::linear_ms(alpha_ms, beta_ms, 512).unwrap()
}

fn load((alpha_ms, beta_ms, slo_ms): (f64, f64, f64), rate: f64) -> Load {
    let options = ModelOptions::new(profile(alpha_ms, beta_ms), DispatchPolicy::Deferred, DropPolicy::WindowDrop);
    let slo = Duration::from_millis_f64(slo_ms);
    Load { options, slo, arrivals: Arrivals::Poisson, rate, pace: Pace::steady() }
}

const RESNET50: (f64, f64, f64) = (1.053, 5.072, 25.0);
const INCEPTION_RESNET_V2: (f64, f64, f64) = (5.090, 18.368, 70.0);

/// Symphony table 2, *staggered*.
#[test]
fn staggered_patterns_of_table_2() {
    for ((alpha, beta, slo), batch, rate) in [(RESNET50, 16, 5_839.0), (INCEPTION_RESNET_V2, 8, 1_083.0)] {
        let best = staggered(&profile(alpha, beta), 512, Duration::from_millis_f64(slo), 8).unwrap();
        assert_eq!((best.batch, best.rate.round()), (batch, rate));
    }
    assert_eq!(staggered(&profile(1.0, 5.0), 512, Duration::from_millis(11), 1), None, "2 * l(1) = 12");
    assert_eq!(staggered(&profile(1.0, 5.0), 512, Duration::from_millis(11), 0), None);
}

fn mix(csv: &str) -> Vec<Load> {
    csv.lines()
        .skip(1)
        .map(|line| {
            let numbers: Vec<f64> = line.split(',').skip(1).map(|number| number.parse().unwrap()).collect();
            load((numbers[0], numbers[1], numbers[2]), 1.0)
        })
        .collect()
}

#[test]
fn fluid_bounds_of_single_models_and_of_both_mixes() {
    let of = |loads: &[Load], devices| fluid(loads, devices).unwrap().round();
    assert_eq!(of(&[load(RESNET50, 1.0)], 8), 5_839.0);
    assert_eq!(of(&[load(INCEPTION_RESNET_V2, 7.0)], 8), 1_083.0);
    let a100 = mix(include_str!("../../../experiments/profiles/profiles_a100.csv"));
    let ti1080 = mix(include_str!("../../../experiments/profiles/profiles_1080ti.csv"));
    assert_eq!((a100.len(), of(&a100, 64)), (37, 18_734.0));
    assert_eq!((ti1080.len(), of(&ti1080, 64)), (35, 7_776.0));
}

/// l(b) = b + 5, SLO 12. At 800/s, 4 requests come within 3.75 and take 9: 12.75 is too long, so at
/// most 3 fit (2.5 + 8). At 1,000/s, 4 come within 3. One device serves 3 / 8 ms = 375/s, at which
/// 3 take 5.33 + 8: too long. Two take 2.67 + 7, which fits. So one device serves 2 / 7 ms = 286/s,
/// at which 2 take 3.5 + 7.
#[test]
fn the_fluid_bound_by_hand() {
    let rate = fluid(&[load((1.0, 5.0, 12.0), 1.0)], 1).unwrap();
    assert!((rate - 2.0 / 0.007).abs() < 1e-6, "{rate}");
    // Three devices: 4 / 9 ms each are 1,333/s; 5 would gather in 3 and take 10.
    let rate = fluid(&[load((1.0, 5.0, 12.0), 5.0)], 3).unwrap();
    assert!((rate - 12.0 / 0.009).abs() < 1e-6, "{rate}");
    assert_eq!(fluid(&[load((1.0, 5.0, 5.9), 1.0)], 1), None, "l(1) = 6");
}

/// Returns the fewest requests that any schedule loses, by trying all sequences of batches. A batch
/// goes to the device that is free first, as soon as the device is free and all members have
/// arrived. In the order of their starts, no schedule does better.
fn fewest_lost(trace: &Trace) -> u32 {
    let requests: Vec<(usize, Time)> = trace
        .models
        .iter()
        .enumerate()
        .flat_map(|(model, part)| part.arrivals.iter().map(move |at| (model, *at)))
        .collect();
    fn best(trace: &Trace, requests: &[(usize, Time)], left: u32, free: &mut [Time]) -> u32 {
        let mut fewest = left.count_ones();
        // All subsets of the remaining requests.
        let mut members = left;
        while members > 0 {
            let of: Vec<(usize, Time)> =
                (0..requests.len()).filter(|at| members >> at & 1 == 1).map(|at| requests[at]).collect();
            let model = of[0].0;
            if of.iter().all(|(other, _)| *other == model) && of.len() as u32 <= trace.models[model].max_batch {
                let device = (0..free.len()).min_by_key(|device| free[*device]).unwrap();
                let start = of.iter().map(|(_, at)| *at).max().unwrap().max(free[device]);
                let end = start + trace.models[model].profile.latency(of.len() as u32);
                if of.iter().all(|(_, at)| end <= *at + trace.models[model].slo) {
                    let before = std::mem::replace(&mut free[device], end);
                    fewest = fewest.min(best(trace, requests, left & !members, free));
                    free[device] = before;
                }
            }
            members = (members - 1) & left;
        }
        fewest
    }
    let mut free = vec![Time::ZERO; trace.devices as usize];
    best(trace, &requests, (1 << requests.len()) - 1, &mut free)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// On tiny traces, the bound never exceeds the loss of the best of all schedules.
    #[test]
    fn no_schedule_of_a_tiny_trace_loses_less(
        models in prop::collection::vec(
            (1..6u32, 0..10u32, 1..30u32, 1..5u32, prop::collection::vec(0..40u32, 0..4)), 1..3),
        devices in 1..3u32,
    ) {
        let models = models.into_iter().map(|(alpha, beta, slo, max_batch, mut arrivals)| {
            arrivals.sort_unstable();
            let ms = |ms: u32| Duration::from_millis(u64::from(ms));
            ModelTrace {
                profile: profile(f64::from(alpha), f64::from(beta)),
                max_batch,
                slo: ms(slo),
                arrivals: arrivals.into_iter().map(|at| Time::ZERO + ms(at)).collect(),
            }
        }).collect();
        let trace = Trace { models, devices };
        let (bound, fewest) = (trace.least_bad(), fewest_lost(&trace));
        prop_assert!(bound <= f64::from(fewest) + 1e-6, "{} of {}: {:?}", bound, fewest, trace);
        if let Some(foreseen) = trace.foreseen_bad(20) {
            prop_assert!(foreseen >= fewest, "{} are lost of {}: {:?}", foreseen, fewest, trace);
        }
        prop_assert!(fewest > 0 || !trace.impossible(0.0), "{:?}", trace);
    }
}

/// Ten requests at once, due in 10; with l(b) = b + 5 one device can serve five. The bound finds
/// this.
#[test]
fn the_bound_bites_where_arrivals_crowd() {
    let arrivals = vec![Time::ZERO; 10];
    let part = ModelTrace { profile: profile(1.0, 5.0), max_batch: 32, slo: Duration::from_millis(10), arrivals };
    let trace = Trace { models: vec![part], devices: 1 };
    let bound = trace.least_bad();
    assert!((4.9..=5.0).contains(&bound), "{bound}");
    assert!(trace.impossible(0.4) && !trace.impossible(0.6));
}

/// l(b) = b + 5, SLO 12, one device: r0 comes at 0, then three at 1. With r0 first (until 6), l(3)
/// = 8 would end at 14, after 13. All four together end at 1 + 9 = 10.
#[test]
fn foresight_waits_for_what_will_come() {
    let arrivals = [0, 1, 1, 1].map(|ms| Time::ZERO + Duration::from_millis(ms)).to_vec();
    let part = ModelTrace { profile: profile(1.0, 5.0), max_batch: 32, slo: Duration::from_millis(12), arrivals };
    let trace = Trace { models: vec![part], devices: 1 };
    assert_eq!((trace.foreseen_bad(10), fewest_lost(&trace)), (Some(0), 0));
}

/// Two models share a device that can run one batch by their deadlines: nearly all requests of one
/// model are lost.
#[test]
fn models_pay_for_the_same_device() {
    let part = |n| ModelTrace {
        profile: profile(1.0, 5.0),
        max_batch: 32,
        slo: Duration::from_millis(10),
        arrivals: vec![Time::ZERO; n],
    };
    let trace = Trace { models: vec![part(5), part(5)], devices: 1 };
    // In fractions, half a batch of each.
    assert!((4.9..=5.0).contains(&trace.least_bad()), "{}", trace.least_bad());
    assert!(trace.impossible(0.45));
}

/// On the same arrivals: a load that a policy served is possible, and no policy serves an
/// impossible load.
#[test]
fn no_policy_does_what_is_impossible() {
    let simulation = Simulation {
        loads: vec![load(RESNET50, 5_839.0)],
        devices: 8,
        warm_up: Duration::from_millis(200),
        span: Duration::from_millis(300),
        seed: 3,
        ..Simulation::default()
    };
    let search = Search { precision: 0.03, ..Search::default() };
    let found = search.capacity(&simulation).unwrap().unwrap().rate;
    let bound = clairvoyant(&simulation, &search).unwrap().unwrap();
    assert!(found < bound && bound < 1.1 * 5_839.0, "seed 3: {found} r/s are held, {bound} r/s are impossible");
    let overloaded = Simulation { loads: vec![load(RESNET50, 7_000.0)], ..simulation };
    let lost = Trace::of(&overloaded).unwrap().least_bad();
    let report = overloaded.run().unwrap();
    let bad = report.models[0].offered - report.models[0].good;
    assert!(lost <= bad as f64, "seed 3: {lost} of {bad}");
    let foreseen = Trace::of(&overloaded).unwrap().foreseen_bad(20).unwrap();
    assert!(lost <= f64::from(foreseen), "seed 3: {lost}, {foreseen}");
    assert!(lost > 0.1 * report.models[0].offered as f64, "seed 3: at 7,000 r/s 1 of 6 cannot be served: {lost}");
}
