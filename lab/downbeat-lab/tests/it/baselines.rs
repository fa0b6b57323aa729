//! The baselines against timelines worked out by hand, and under the checker.

use std::fmt::Write;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, Request};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use downbeat_lab::baseline::{Clockwork, Gather, Nexus, NexusOptions, Shepherd};
use downbeat_lab::policy::Baseline;
use downbeat_sim::{Arrivals, ClusterScheduler, Decision, Load, Pace, Simulation};
use proptest::prelude::*;
use std::sync::Arc;

fn options(alpha: f64, beta: f64) -> ModelOptions {
    ModelOptions::new(LatencyProfile::linear_ms(alpha, beta, 32).unwrap(), DispatchPolicy::Eager, DropPolicy::HeadDrop)
}

/// `l(b) = b + 5` and an SLO, in milliseconds; the rate is for planners.
const B5: (f64, f64) = (1.0, 5.0);

struct Model {
    profile: (f64, f64),
    slo: f64,
    rate: f64,
}

/// Runs `cluster` through arrivals of `(millisecond, model)` in their order. Returns its decisions,
/// one a line: the time (`+`: a nanosecond later), then `r1 r2 on d0`, `drop r1`, `reject r1` or
/// `stop d0`.
fn timeline(mut cluster: impl ClusterScheduler, devices: u32, models: &[Model], arrivals: &[(f64, u32)]) -> String {
    let mut written = String::new();
    for _ in 0..devices {
        cluster.add_device(Time::ZERO, DeviceKind(0));
    }
    let slo = |model: u32| Duration::from_millis_f64(models[model as usize].slo);
    for (Model { profile: (alpha, beta), rate, .. }, index) in models.iter().zip(0..) {
        cluster.add_model(Time::ZERO, options(*alpha, *beta), slo(index), *rate);
    }
    let mut running: Vec<(Time, DeviceId, BatchId)> = Vec::new();
    let mut next = 0;
    loop {
        let arrival = arrivals.get(next).map(|(at, _)| Time::ZERO + Duration::from_millis_f64(*at));
        let end = running.iter().min().map(|(at, ..)| *at);
        let Some(now) = [arrival, end, cluster.poll_timeout()].into_iter().flatten().min() else { return written };
        let ms = now.as_nanos() / 1_000 * 1_000;
        let at = format!("{}{}", ms as f64 / 1e6, if now.as_nanos() > ms { "+" } else { "" });
        if end == Some(now) {
            let first = (0..running.len()).min_by_key(|at| running[*at]).unwrap();
            let (_, device, batch) = running.swap_remove(first);
            cluster.handle_completion(now, device, batch);
        } else if arrival == Some(now) {
            let (id, model) = (RequestId(next as u64), arrivals[next].1);
            let deadline = now + slo(model);
            let request = Request { id, model: ModelId(model), deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
            if cluster.handle_request(now, request).is_err() {
                writeln!(written, "{at}: reject {id}").unwrap();
            }
            next += 1;
        } else {
            cluster.handle_timeout(now);
        }
        while let Some(decision) = cluster.poll_decision() {
            match decision {
                Decision::Dispatch { batch, device, members, expected, .. } => {
                    running.push((now + expected, device, batch));
                    let members: Vec<String> = members.iter().map(ToString::to_string).collect();
                    writeln!(written, "{at}: {} on {device}", members.join(" ")).unwrap();
                }
                Decision::Drop { request, .. } => writeln!(written, "{at}: drop {request}").unwrap(),
                Decision::Preempt { batch, device } => {
                    running.retain(|(_, _, other)| *other != batch);
                    writeln!(written, "{at}: stop {device}").unwrap();
                }
            }
        }
    }
}

#[track_caller]
fn assert_timeline(got: &str, expected: &[&str]) {
    assert_eq!(got.lines().collect::<Vec<_>>(), expected, "\n{got}");
}

mod clockwork {
    use super::*;

    /// r0 runs at once, alone, until 6. Then four requests wait, due at 12.5, 13, 15 and 16. At 6,
    /// the head r1 has 6.5 left: a batch of 1 (l = 6) fits. A batch of 2 (l = 7) does not, because
    /// its latest start, 5.5, has passed.
    #[test]
    fn the_largest_batch_that_meets_the_heads_deadline_goes() {
        let models = [Model { profile: B5, slo: 12.0, rate: 1.0 }];
        let got = timeline(Clockwork::new(), 1, &models, &[(0.0, 0), (0.5, 0), (1.0, 0), (3.0, 0), (4.0, 0)]);
        // At 12, r2 (13) could have started until 7, r3 (15) until 9, r4 (16) until 10.
        let expected = ["0: r0 on d0", "6: r1 on d0", "7+: drop r2", "9+: drop r3", "10+: drop r4"];
        assert_timeline(&got, &expected);
    }

    /// A later head has more time left: at 6, r1 is due at 13. Sizes 1 and 2 may start
    /// until 7 and 6, size 3 until 5. The earliest latest start that has not passed is the one of
    /// size 2, at 6.
    #[test]
    fn a_candidate_may_start_at_its_latest_start() {
        let models = [Model { profile: B5, slo: 12.0, rate: 1.0 }];
        let got = timeline(Clockwork::new(), 1, &models, &[(0.0, 0), (1.0, 0), (2.0, 0), (2.5, 0)]);
        assert_timeline(&got, &["0: r0 on d0", "6: r1 r2 on d0", "8.5+: drop r3"]);
    }

    /// At 6: r1 of m1 (due 30.5, latest start 24.5) came first. But r2 of m0 (due 13) has to start
    /// first, at 7 at the latest.
    #[test]
    fn the_earliest_latest_start_goes_first() {
        let models = [Model { profile: B5, slo: 12.0, rate: 1.0 }, Model { profile: B5, slo: 30.0, rate: 1.0 }];
        let got = timeline(Clockwork::new(), 1, &models, &[(0.0, 0), (0.5, 1), (1.0, 0)]);
        assert_timeline(&got, &["0: r0 on d0", "6: r2 on d0", "12: r1 on d0"]);
    }

    /// At 6: r1 of m0 (due 19) may start until 13. m1 has five requests due at 22 and later. As one
    /// batch (l = 10) they may start until 12, although their deadline is later.
    #[test]
    fn a_larger_batch_has_to_start_earlier() {
        let models = [Model { profile: B5, slo: 18.0, rate: 1.0 }, Model { profile: B5, slo: 20.0, rate: 1.0 }];
        let arrivals = [(0.0, 0), (1.0, 0), (2.0, 1), (2.0, 1), (2.0, 1), (2.0, 1), (2.0, 1)];
        let got = timeline(Clockwork::new(), 1, &models, &arrivals);
        // r1 could start until 13, d0 is free at 16.
        assert_timeline(&got, &["0: r0 on d0", "6: r2 r3 r4 r5 r6 on d0", "13+: drop r1"]);
    }

    /// The device runs r0 until 6. r1, due at 8.5, would end at 12; a free device could have met
    /// its deadline.
    #[test]
    fn what_no_device_can_meet_is_rejected_at_arrival() {
        let models = [Model { profile: B5, slo: 8.0, rate: 1.0 }];
        assert_timeline(
            &timeline(Clockwork::new(), 1, &models, &[(0.0, 0), (0.5, 0)]),
            &["0: r0 on d0", "0.5: reject r1"],
        );
        assert_timeline(
            &timeline(Clockwork::new(), 2, &models, &[(0.0, 0), (0.5, 0)]),
            &["0: r0 on d0", "0.5: r1 on d1"],
        );
    }
}

mod shepherd {
    use super::*;

    /// Three requests are less than 3.03 times one, four are not. The work on r0 is lost; r0 waits
    /// again, and could start until 6.
    #[test]
    fn four_take_the_device_of_one_and_three_do_not() {
        let models = [Model { profile: B5, slo: 12.0, rate: 1.0 }];
        let arrivals = [(0.0, 0), (1.0, 0), (1.0, 0), (1.5, 0), (2.0, 0)];
        for gather in [Gather::Prefix, Gather::Largest] {
            let got = timeline(Shepherd::new(gather), 1, &models, &arrivals[..4]);
            // At 6, r1 and r2 (due 13) have 7: two fit.
            assert_timeline(&got, &["0: r0 on d0", "6: r1 r2 on d0", "7.5+: drop r3"]);
            let got = timeline(Shepherd::new(gather), 1, &models, &arrivals);
            assert_timeline(&got, &["0: r0 on d0", "2: stop d0", "2: r1 r2 r3 r4 on d0", "6+: drop r0"]);
        }
    }

    /// As above with an SLO of 25: r0 runs after the batch that stopped it, at 2 + l(4) = 11.
    #[test]
    fn who_was_stopped_waits_again() {
        let models = [Model { profile: B5, slo: 25.0, rate: 1.0 }];
        let arrivals = [(0.0, 0), (1.0, 0), (1.0, 0), (1.5, 0), (2.0, 0), (3.0, 0)];
        let got = timeline(Shepherd::new(Gather::Prefix), 1, &models, &arrivals);
        assert_timeline(&got, &["0: r0 on d0", "2: stop d0", "2: r1 r2 r3 r4 on d0", "11: r0 r5 on d0"]);
    }

    /// At 6, m0 has two requests and m1 three: the larger batch goes first, although it can wait
    /// longer.
    #[test]
    fn a_free_device_takes_the_largest_candidate() {
        let models = [Model { profile: B5, slo: 30.0, rate: 1.0 }, Model { profile: B5, slo: 40.0, rate: 1.0 }];
        let arrivals = [(0.0, 0), (1.0, 0), (1.0, 0), (2.0, 1), (2.0, 1), (2.0, 1)];
        let got = timeline(Shepherd::new(Gather::Prefix), 1, &models, &arrivals);
        assert_timeline(&got, &["0: r0 on d0", "6: r3 r4 r5 on d0", "14: r1 r2 on d0"]);
    }

    /// d0 runs one request of m0, then d1 one of m1, without a second one of m1. Four of m0 at 3
    /// preempt the smallest batch: of d0 and d1, both of size 1, the first. With size 2 on d0, the
    /// choice would be d1.
    #[test]
    fn the_smallest_batch_is_stopped() {
        let models = [Model { profile: B5, slo: 30.0, rate: 1.0 }, Model { profile: (5.0, 5.0), slo: 40.0, rate: 1.0 }];
        // r0 until 6 on d0, r1 until 11 on d1; then r2 and r3 from 6 until 13 on d0; then four of
        // m0 at 7.
        let arrivals = [(0.0, 0), (1.0, 1), (2.0, 0), (2.0, 0), (7.0, 0), (7.0, 0), (7.0, 0), (7.0, 0)];
        let got = timeline(Shepherd::new(Gather::Prefix), 2, &models, &arrivals);
        let expected =
            ["0: r0 on d0", "1: r1 on d1", "6: r2 r3 on d0", "7: stop d1", "7: r4 r5 r6 r7 on d1", "13: r1 on d0"];
        assert_timeline(&got, &expected);
    }

    /// At 6: r1 (due 12.5) has 6.5 left, enough for a batch of one. r2 to r4 (due 17) have 11,
    /// enough for three (l = 8). The largest batch passes r1 over.
    #[test]
    fn the_largest_of_any_passes_heads_over() {
        let models = [Model { profile: B5, slo: 12.0, rate: 1.0 }];
        let arrivals = [(0.0, 0), (0.5, 0), (5.0, 0), (5.0, 0), (5.0, 0)];
        let got = timeline(Shepherd::new(Gather::Largest), 1, &models, &arrivals);
        assert_timeline(&got, &["0: r0 on d0", "6: r2 r3 r4 on d0", "6.5+: drop r1"]);
        // The prefix is r1 alone; r2 to r4 could start until 11.
        let got = timeline(Shepherd::new(Gather::Prefix), 1, &models, &arrivals);
        assert_timeline(&got, &["0: r0 on d0", "6: r1 on d0", "11+: drop r2", "11+: drop r3", "11+: drop r4"]);
    }
}

mod nexus {
    use super::*;

    fn nexus(frontends: u32) -> Nexus {
        Nexus::new(NexusOptions { frontends, ..NexusOptions::default() })
    }

    /// SLO 16: 2 * l(3) = 16, so both devices are planned for batches of 3, and the frontend
    /// alternates. r0 and r1 go at once. d0 gets r2, r4, r6 and r8, and runs three of these at 6.
    #[test]
    fn one_frontend_alternates_between_saturated_devices() {
        let models = [Model { profile: B5, slo: 16.0, rate: 500.0 }];
        let arrivals: Vec<(f64, u32)> = [0.0, 0.0, 3.0, 3.0, 3.5, 3.5, 4.0, 4.0, 4.5, 4.5].map(|at| (at, 0)).into();
        let got = timeline(nexus(1), 2, &models, &arrivals);
        // At 14, r8 and r9 (due 20.5) have 6.5 left: enough for a batch of one (6).
        let expected =
            ["0: r0 on d0", "0: r1 on d1", "6: r2 r4 r6 on d0", "6: r3 r5 r7 on d1", "14: r8 on d0", "14: r9 on d1"];
        assert_timeline(&got, &expected);
    }

    /// One device, planned for 3 (SLO 16). At 14, r4 (due 21.9) could be met alone, but a batch of
    /// 3 takes until 22. r4 is dropped, so that r5 to r7 (due 23) run together. Without these
    /// requests r4 is served.
    #[test]
    fn early_drop_keeps_the_planned_batch() {
        let models = [Model { profile: B5, slo: 16.0, rate: 100.0 }];
        let arrivals = [(0.0, 0), (1.0, 0), (1.0, 0), (1.0, 0), (5.9, 0), (7.0, 0), (7.0, 0), (7.0, 0)];
        let got = timeline(nexus(1), 1, &models, &arrivals);
        assert_timeline(&got, &["0: r0 on d0", "6: r1 r2 r3 on d0", "14: drop r4", "14: r5 r6 r7 on d0"]);
        let got = timeline(nexus(1), 1, &models, &arrivals[..6]);
        assert_timeline(&got, &["0: r0 on d0", "6: r1 r2 r3 on d0", "14: r4 r5 on d0"]);
    }

    /// Two models on one device take turns: m0's second request waits for m1's first.
    #[test]
    fn models_on_one_device_take_turns() {
        let models = [Model { profile: B5, slo: 40.0, rate: 20.0 }, Model { profile: B5, slo: 40.0, rate: 20.0 }];
        let got = timeline(nexus(1), 1, &models, &[(0.0, 0), (1.0, 0), (2.0, 1), (7.0, 0)]);
        assert_timeline(&got, &["0: r0 on d0", "6: r2 on d0", "12: r1 r3 on d0"]);
    }

    /// The declared rates give m1 a device of its own (d0) and a share of the other, beside m0.
    /// After an epoch of 10 s without requests for m1, the roles are swapped.
    #[test]
    fn a_new_epoch_brings_a_new_plan() {
        let models = [Model { profile: B5, slo: 40.0, rate: 1.0 }, Model { profile: B5, slo: 40.0, rate: 1000.0 }];
        let mut arrivals: Vec<(f64, u32)> = (0..1_000).map(|n| (f64::from(n) * 10.0, 0)).collect();
        arrivals.extend([(10_000.0, 0), (10_000.0, 0)]);
        let got = timeline(nexus(1), 2, &models, &arrivals);
        let on = |device: &str| got.lines().filter(|line| line.ends_with(device)).count();
        assert_eq!((on("d0"), on("d1")), (1, 1_001), "in the first epoch d0 is m1's alone");
        assert!(got.ends_with("10000: r1000 on d0\n10000: r1001 on d1\n"));
    }

    /// With eight frontends, two consecutive requests may meet on one device while another device
    /// is free.
    #[test]
    fn frontends_know_nothing_of_each_other() {
        let models = [Model { profile: B5, slo: 16.0, rate: 1000.0 }];
        let arrivals: Vec<(f64, u32)> = (0..200).map(|n| (f64::from(n / 4) * 6.0, 0)).collect();
        let at_once = |frontends| {
            let got = timeline(nexus(frontends), 4, &models, &arrivals);
            got.lines().filter(|line| line.contains(" on ") && line.matches('r').count() == 1).count()
        };
        assert_eq!(at_once(1), 200, "four requests every 6 ms, four devices, l(1) = 6");
        assert!(at_once(8) < 190);
    }
}

fn systems() -> [Baseline; 5] {
    [
        Baseline::Clockwork,
        Baseline::Nexus(NexusOptions::default()),
        Baseline::Nexus(NexusOptions { frontends: 8, epoch: Duration::from_millis(50) }),
        Baseline::Shepherd(Gather::Prefix),
        Baseline::Shepherd(Gather::Largest),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// For any baseline and load: the checker has no objection, every counted request is accounted
    /// for, and without noise no request is late.
    #[test]
    fn every_run_is_by_the_rules(
        models in prop::collection::vec(
            (0.001..3.0f64, 0.001..9.0f64, 0..60_000u64, 1..32u32, 1.0..3_000.0f64, 0..3usize), 1..5),
        devices in 0..5u32,
        noise in prop_oneof![Just(0.0), 0.0..0.5f64],
        seed: u64,
    ) {
        let processes = [Arrivals::Poisson, Arrivals::Constant, Arrivals::Gamma(0.1)];
        let loads: Vec<Load> = models.into_iter().map(|(alpha, beta, slo, max_batch, rate, arrivals)| {
            let options = ModelOptions { max_batch, ..options(alpha, beta) };
            Load { options, slo: Duration::from_micros(slo), rate, arrivals: processes[arrivals], pace: Pace::steady() }
        }).collect();
        for system in systems() {
            let (warm_up, span) = (Duration::from_millis(50), Duration::from_millis(200));
            let loads = loads.clone();
            let run = Simulation { system: Arc::new(system.clone()), loads, devices, noise, warm_up, span, seed, ..Simulation::default() };
            for model in run.run().unwrap().models {
                let dropped: u64 = model.dropped.values().sum();
                let sum = model.good + model.missed + model.rejected + dropped;
                prop_assert_eq!(model.offered, sum, "seed {}, {:?}", seed, system);
                prop_assert!(noise > 0.0 || model.missed == 0, "seed {}, {:?}", seed, system);
            }
        }
    }
}

#[test]
fn the_same_seed_makes_the_same_run() {
    for system in systems() {
        let run = |seed| {
            let load = Load {
                options: options(1.053, 5.072),
                slo: Duration::from_millis(25),
                arrivals: Arrivals::Poisson,
                rate: 4_000.0,
                pace: Pace::steady(),
            };
            let system = system.clone();
            let span = Duration::from_millis(500);
            let system = Arc::new(system);
            Simulation { system, loads: vec![load], devices: 8, span, seed, ..Simulation::default() }.run().unwrap()
        };
        assert_eq!(run(1), run(1), "seed 1, {system:?}");
        assert_ne!(run(1), run(2), "seeds 1 and 2, {system:?}");
    }
}
