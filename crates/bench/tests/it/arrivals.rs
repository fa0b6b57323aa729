//! The random processes have the properties of their names, and are the same for the same seed.

use downbeat_bench::load::arrivals::{Schedule, Step, Until};
use downbeat_bench::load::mix::Mix;
use downbeat_bench::load::plan::steps;
use downbeat_core::{Duration, Time};
use downbeat_sim::Arrivals;
use proptest::prelude::*;

/// Mean and coefficient of variation of the first `n` gaps, in seconds.
fn moments(schedule: &Schedule, seed: u64, n: usize) -> (f64, f64) {
    let times: Vec<f64> = schedule.arrivals(seed).take(n).map(|t| t.since(Time::ZERO).as_secs_f64()).collect();
    let gaps: Vec<f64> = std::iter::once(times[0]).chain(times.windows(2).map(|w| w[1] - w[0])).collect();
    let mean = gaps.iter().sum::<f64>() / n as f64;
    let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / n as f64;
    (mean, variance.sqrt() / mean)
}

#[test]
fn gaps_have_their_mean_and_variation() {
    for (gaps, tolerance) in [
        (Arrivals::Constant, 1e-6),
        (Arrivals::Poisson, 0.02),
        (Arrivals::Gamma(4.0), 0.02),
        (Arrivals::Gamma(0.5), 0.03),
        // Symphony's bursty case: a coefficient of variation of 4.5 needs many gaps to show itself.
        (Arrivals::Gamma(0.05), 0.08),
    ] {
        for seed in [1, 2] {
            let (mean, cv) = moments(&Schedule::steady(gaps, 250.0), seed, 200_000);
            assert!((mean * 250.0 - 1.0).abs() <= tolerance, "{gaps:?}, seed {seed}: mean {mean}");
            let expected = gaps.coefficient_of_variation();
            assert!((cv - expected).abs() <= tolerance * expected.max(0.001) + 1e-4, "{gaps:?}, seed {seed}: CV {cv}");
        }
    }
}

#[test]
fn equal_seeds_give_equal_arrivals_and_others_do_not() {
    let schedule = Schedule::steady(Arrivals::Gamma(0.3), 100.0);
    let first: Vec<Time> = schedule.arrivals(7).take(1000).collect();
    assert_eq!(first, schedule.arrivals(7).take(1000).collect::<Vec<_>>());
    assert_ne!(first, schedule.arrivals(8).take(1000).collect::<Vec<_>>());
}

#[test]
fn steps_of_requests_change_the_rate_after_that_many() {
    let schedule = Schedule { gaps: Arrivals::Constant, steps: steps("10x5,100x20").expect("valid") };
    let times: Vec<u64> = schedule.arrivals(1).map(|t| t.as_nanos() / 1_000_000).collect();
    assert_eq!(times.len(), 25, "the schedule ends with its last step");
    assert_eq!(&times[..6], &[100, 200, 300, 400, 500, 510]);
    assert_eq!(schedule.mean_length(), Some(Duration::from_millis(700)));
}

#[test]
fn steps_of_time_keep_the_part_of_a_gap_that_crosses_them() {
    // At 4/s the fifth gap has spent 0.25 s of the first second exactly; at 1.5 s into 2/s steps
    // half gaps remain.
    let schedule = Schedule { gaps: Arrivals::Constant, steps: steps("2x0.75s,10x1s").expect("valid") };
    let times: Vec<u64> = schedule.arrivals(1).map(|t| t.as_nanos() / 1_000_000).collect();
    // 0.5 s, then half a gap until 0.75 s, the other half at 10/s: 0.8 s.
    assert_eq!(&times[..4], &[500, 800, 900, 1000]);
    assert!(times.last().is_some_and(|t| *t < 1750), "{times:?}");
}

#[test]
fn the_stepping_load_of_dvabatch_can_be_said() {
    let steps = steps("66..4000x2000x16").expect("valid");
    assert_eq!(steps.len(), 16);
    assert_eq!(steps[0], Step { rate: 66.0, until: Until::Requests(2000) });
    assert_eq!(steps[15], Step { rate: 4000.0, until: Until::Requests(2000) });
}

#[test]
fn wrong_steps_and_kinds_are_refused_by_name() {
    for text in ["", "0x5", "-1x5", "10", "5x", "x", "1..2x3", "1..2x3x1", "nanx3", "1x3,2", "1,2x3", "1..2x3x99999999"]
    {
        match steps(text) {
            Err(e) => assert!(e.to_string().contains("--steps"), "{text}: {e}"),
            // A rate alone is the last step.
            Ok(steps) => assert!(steps.last().is_some_and(|s| s.until == Until::End), "{text}: {steps:?}"),
        }
    }
    for text in ["", "gamma", "gamma:", "gamma:0", "gamma:-1", "gamma:0.0001", "gamma:inf", "poisson:2", "uniform"] {
        let error = text.parse::<Arrivals>().expect_err(text);
        assert!(error.to_string().contains("is not an arrival process"), "{text}: {error}");
    }
}

#[test]
fn models_get_their_shares_and_variants_come_evenly() {
    let mut mix = Mix::new(&[(0.7, 4), (0.3, 1), (1.0, 2)], 3);
    let mut counts = [[0_u32; 4]; 3];
    for _ in 0..200_000 {
        let choice = mix.draw();
        counts[choice.model][choice.variant] += 1;
    }
    let of = |model: usize| f64::from(counts[model].iter().sum::<u32>()) / 200_000.0;
    assert!((of(0) - 0.35).abs() < 0.005 && (of(1) - 0.15).abs() < 0.005 && (of(2) - 0.5).abs() < 0.005, "{counts:?}");
    assert!(counts[0].iter().all(|c| (f64::from(*c) / 200_000.0 - 0.0875).abs() < 0.005), "{counts:?}");
    assert_eq!(counts[1][1..], [0, 0, 0]);
}

proptest! {
    #[test]
    fn arrivals_never_go_back(
        seed: u64,
        shape in 0.05_f64..4.0,
        parts in prop::collection::vec((0.5_f64..5000.0, 1_u64..50, any::<bool>()), 1..6),
    ) {
        let steps = parts.iter().map(|(rate, n, timed)| Step {
            rate: *rate,
            until: if *timed { Until::Elapsed(Duration::from_millis(*n)) } else { Until::Requests(*n) },
        });
        let schedule = Schedule { gaps: Arrivals::Gamma(shape), steps: steps.collect() };
        let times: Vec<Time> = schedule.arrivals(seed).collect();
        prop_assert!(times.windows(2).all(|w| w[0] <= w[1]));
        let counted: u64 = parts.iter().filter(|p| !p.2).map(|p| p.1).sum();
        prop_assert!(times.len() as u64 >= counted);
    }
}
