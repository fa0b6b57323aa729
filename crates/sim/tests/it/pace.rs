//! Rates that change.

use downbeat_core::{Duration, Time};
use downbeat_sim::{Arrivals, BadPace, Pace, Popularity};

fn seconds(s: f64) -> Duration {
    Duration::from_secs_f64(s)
}

/// Arrivals in each second of `pace`.
fn counts(pace: &Pace, arrivals: Arrivals, rate: f64, until: usize) -> Vec<u32> {
    let mut stream = arrivals.stream(rate, 3, 0).unwrap().paced(pace);
    let mut counts = vec![0; until];
    loop {
        let at = stream.next_arrival().since(Time::ZERO).as_secs_f64() as usize;
        match counts.get_mut(at) {
            Some(count) => *count += 1,
            None => return counts,
        }
    }
}

#[test]
fn arrivals_follow_the_factors_and_begin_again_after_the_last() {
    let pace = Pace::new(vec![(seconds(1.0), 1.0), (seconds(1.0), 0.0), (seconds(2.0), 3.0)]).unwrap();
    let even = counts(&pace, Arrivals::Constant, 100.0, 8);
    // An arrival at the end of a stretch may be rounded into the next.
    let near = |expected: [u32; 8]| even.iter().zip(expected).all(|(count, expected)| count.abs_diff(expected) <= 1);
    assert!(near([100, 0, 300, 300, 100, 0, 300, 300]), "{even:?}");
    assert_eq!(pace.mean_until(Time::ZERO + seconds(4.0)), 7.0 / 4.0);
    assert_eq!(pace.mean_until(Time::ZERO + seconds(6.0)), (7.0 + 1.0) / 6.0);
    let random = counts(&pace, Arrivals::Poisson, 1_000.0, 8);
    assert!(random[1] <= 1 && random[5] <= 1, "seed 3: {random:?}");
    assert!(random.iter().zip(&even).all(|(random, even)| random.abs_diff(even * 10) < 260), "seed 3: {random:?}");
}

#[test]
fn a_steady_pace_changes_nothing() {
    let mut plain = Arrivals::Gamma(0.5).stream(50.0, 1, 2).unwrap();
    let mut paced = plain.clone().paced(&Pace::steady());
    assert!((0..100).all(|_| plain.next_arrival() == paced.next_arrival()));
}

#[test]
fn the_rising_load_has_its_rates_and_its_requests() {
    // DVABatch: 66/s to 4,000/s in steps of 2,000 requests.
    let pace = Pace::rising(66.0, 4_000.0, 2_000.0, 16).unwrap();
    let first = counts(&pace, Arrivals::Constant, 1.0, 30);
    assert!(first.iter().all(|count| (65..=67).contains(count)), "{first:?}");
    let total: u32 = counts(&pace, Arrivals::Constant, 1.0, 60).iter().sum();
    assert!(total > 2_000 * 10, "the last steps take a second or less: {total}");
}

#[test]
fn the_twitter_shape_varies_and_lasts_as_measured() {
    let pace = Pace::twitter(5, 0, 20_000);
    let counts = counts(&pace, Arrivals::Constant, 1_000.0, 20_000);
    let rates: Vec<f64> = counts.iter().map(|count| f64::from(*count) / 1_000.0).collect();
    let mean = rates.iter().sum::<f64>() / rates.len() as f64;
    let variance = rates.iter().map(|rate| (rate - mean).powi(2)).sum::<f64>() / rates.len() as f64;
    let correlation = |lag: usize| {
        let pairs = rates.iter().zip(&rates[lag..]);
        let sum: f64 = pairs.map(|(a, b)| (a - mean) * (b - mean)).sum();
        sum / (rates.len() - lag) as f64 / variance
    };
    let cv = variance.sqrt() / mean;
    assert!((cv - 0.77).abs() < 0.12, "seed 5: coefficient of variation {cv:.2}");
    assert!((correlation(1) - 0.91).abs() < 0.05, "seed 5: {:.2} at a second", correlation(1));
    assert!((correlation(10) - 0.82).abs() < 0.06, "seed 5: {:.2} at ten seconds", correlation(10));
}

#[test]
fn what_is_no_pace() {
    assert!(Pace::new(vec![(seconds(1.0), f64::NAN)]).is_err());
    assert_eq!(Pace::new(vec![(seconds(1.0), 1.0), (Duration::ZERO, 1.0)]), Err(BadPace::Length { at: 2 }));
    assert_eq!(Pace::new(vec![(seconds(1.0), 0.0)]), Err(BadPace::Silent));
}

#[test]
fn popularities_add_up_and_azure_s_is_heavy() {
    for popularity in [Popularity::Equal, Popularity::Zipf(0.9), Popularity::Maf] {
        let shares = popularity.shares(24);
        assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{popularity}");
        assert!(shares.iter().all(|share| *share > 0.0), "{popularity}: {shares:?}");
    }
    let zipf = Popularity::Zipf(0.9).shares(2);
    assert!((zipf[0] / zipf[1] - 2f64.powf(0.9)).abs() < 1e-9);
    let mut maf = Popularity::Maf.shares(100);
    maf.sort_by(|a, b| b.total_cmp(a));
    assert!(maf[..20].iter().sum::<f64>() > 0.5, "the busiest fifth of the models: {maf:?}");
}
