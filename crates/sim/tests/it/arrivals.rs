//! The arrival processes have the properties that they promise.

use downbeat_core::Time;
use downbeat_sim::Arrivals;

const SEED: u64 = 7;

/// Mean gap in seconds and coefficient of variation.
fn measure(arrivals: Arrivals, rate: f64) -> (f64, f64) {
    let mut stream = arrivals.stream(rate, SEED, 0).unwrap();
    let mut last = Time::ZERO;
    let gaps: Vec<f64> = (0..200_000)
        .map(|_| {
            let now = stream.next_arrival();
            let gap = now.since(last).as_secs_f64();
            last = now;
            gap
        })
        .collect();
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
    (mean, variance.sqrt() / mean)
}

#[test]
fn rates_and_burstiness() {
    let cases = [
        (Arrivals::Constant, 0.0),
        (Arrivals::Poisson, 1.0),
        (Arrivals::Gamma(1.0), 1.0),
        (Arrivals::Gamma(0.05), 1.0 / 0.05f64.sqrt()),
        (Arrivals::Gamma(4.0), 0.5),
    ];
    for (arrivals, cv) in cases {
        let (mean, measured) = measure(arrivals, 400.0);
        assert!((mean * 400.0 - 1.0).abs() < 0.03, "seed {SEED}: {arrivals:?}: mean gap {mean} s at 400/s");
        assert!(
            (measured - cv).abs() < 0.03 * cv.max(0.1),
            "seed {SEED}: {arrivals:?}: variation {measured}, not {cv}"
        );
    }
}

#[test]
fn seeds_and_streams_are_independent_and_repeatable() {
    let first = |seed, stream| {
        let mut stream = Arrivals::Poisson.stream(1.0, seed, stream).unwrap();
        [stream.next_arrival(), stream.next_arrival()]
    };
    assert_eq!(first(1, 2), first(1, 2));
    assert_ne!(first(1, 2), first(1, 3));
    assert_ne!(first(1, 2), first(2, 2));
    assert_ne!(first(1, 2), first(2, 1));
}

#[test]
fn rates_and_shapes_must_be_positive_and_finite() {
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(Arrivals::Poisson.stream(bad, 0, 0).is_err(), "rate {bad}");
        let error = Arrivals::Gamma(bad).stream(1.0, 0, 0).unwrap_err().to_string();
        assert!(error.contains("positive, finite rate and shape"), "{error}");
    }
}
