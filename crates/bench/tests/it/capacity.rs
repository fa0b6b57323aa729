//! The search finds the capacity of servers whose capacity is known. Virtual time: no server, no
//! clock.

use downbeat_bench::load::arrivals::Schedule;
use downbeat_bench::load::capacity::{Bisection, search_with};
use downbeat_bench::load::plan::{Search, Targets};
use downbeat_bench::load::run::Outcome;
use downbeat_bench::results::outcome::{Failed, Failure};
use downbeat_bench::results::record::{Record, Window};
use downbeat_core::{Duration, Time};
use downbeat_sim::Arrivals;
use proptest::prelude::*;

const LENGTH: Duration = Duration::from_millis(20_000);

/// A server that works on one request at a time, `service` long, and lets at most `room` wait.
fn one_server(rate: f64, gaps: Arrivals, service: Duration, room: usize, slo: Option<Duration>) -> Outcome {
    let window = Window { start: Time::ZERO, end: Time::ZERO + LENGTH, slo, interval: Duration::from_millis(1_000) };
    let mut record = Record::new(1);
    let mut ends: std::collections::VecDeque<Time> = std::collections::VecDeque::new();
    for at in Schedule::steady(gaps, rate).arrivals(11).take_while(|at| *at < window.end) {
        record.scheduled(&window, 0, at);
        while ends.front().is_some_and(|end| *end <= at) {
            ends.pop_front();
        }
        if ends.len() > room {
            record.failed(&window, 0, at, Failed::new(Failure::Http(503), "full"));
            continue;
        }
        let end = ends.back().copied().unwrap_or(at).max(at) + service;
        ends.push_back(end);
        record.answered(&window, 0, at, end);
    }
    Outcome { record, window, measured: LENGTH, statistics: vec![None], interrupted: false }
}

fn search(start: f64, p99_ms: Option<u64>) -> Search {
    let targets = Targets { p99: p99_ms.map(Duration::from_millis), bad: 0.01 };
    Search { start, most: 1e6, precision: 0.01, gaps: Arrivals::Poisson, targets }
}

#[test]
fn drops_bound_the_capacity() {
    // 5 ms each: 200/s if it never idles. With evenly spaced arrivals at most 1% may be dropped:
    // 202/s.
    let service = Duration::from_millis(5);
    for start in [1.0, 190.0, 5000.0] {
        let (outcome, found) = search_with(&search(start, None), LENGTH, None, |rate, _| {
            Ok(one_server(rate, Arrivals::Constant, service, 10, None))
        })
        .expect("no trial fails");
        let rate = found.rate.expect("a rate passed");
        assert!((200.0..=204.0).contains(&rate), "from {start}: {rate}");
        assert!(found.failed_rate.is_some_and(|failed| failed > rate && failed <= rate * 1.011));
        assert!(outcome.record.total().bad() as f64 <= 0.01 * outcome.record.total().scheduled as f64);
    }
}

#[test]
fn the_latency_target_bounds_the_capacity() {
    // M/D/1 with 5 ms service: the 99th percentile of the whole time in the system is 50 ms at a
    // load near 0.79 (heavy-traffic tail exp(-2 (1 - rho) t / (rho s)), t = 45 ms: 1 - rho = 0.256
    // rho).
    let (_, found) = search_with(&search(10.0, Some(50)), LENGTH, None, |rate, _| {
        Ok(one_server(rate, Arrivals::Poisson, Duration::from_millis(5), 100_000, None))
    })
    .expect("no trial fails");
    let rate = found.rate.expect("a rate passed");
    assert!((145.0..=180.0).contains(&rate), "{rate}");
    assert!(found.target.contains("50 ms"), "{}", found.target);
}

#[test]
fn late_answers_bound_the_capacity_like_drops() {
    let slo = Some(Duration::from_millis(50));
    let find = |slo| {
        search_with(&search(10.0, None), LENGTH, slo, |rate, _| {
            Ok(one_server(rate, Arrivals::Poisson, Duration::from_millis(5), 100_000, slo))
        })
        .expect("no trial fails")
        .1
        .rate
    };
    let late = find(slo).expect("a rate passed");
    assert!((145.0..=180.0).contains(&late), "{late}");
}

#[test]
fn bursts_cost_capacity() {
    let find = |gaps| {
        search_with(&search(10.0, Some(50)), LENGTH, None, |rate, _| {
            Ok(one_server(rate, gaps, Duration::from_millis(5), 100_000, None))
        })
        .expect("no trial fails")
        .1
        .rate
        .expect("a rate passed")
    };
    assert!(find(Arrivals::Gamma(0.1)) < 0.6 * find(Arrivals::Poisson));
}

#[test]
fn a_server_that_never_passes_has_no_capacity_and_a_run_to_show() {
    let (outcome, found) = search_with(&search(1000.0, None), LENGTH, None, |rate, _| {
        // The server never answers a request.
        let mut outcome = one_server(rate, Arrivals::Constant, Duration::from_millis(60_000_000), 0, None);
        outcome.record.models[0].ok = 0;
        let failed = Failed::new(Failure::Timeout, "");
        let window = outcome.window;
        outcome.record.failed(&window, 0, Time::ZERO, failed);
        Ok(outcome)
    })
    .expect("no trial fails");
    assert_eq!(found.rate, None);
    assert!(found.trials.len() < 30 && found.trials.iter().all(|t| !t.passed && !t.reason.is_empty()));
    assert!(outcome.record.total().failed() > 0);
}

/// A user who interrupts the search gets the rates found so far.
#[test]
fn an_interrupted_search_has_the_best_rate_so_far() {
    let mut trials = 0;
    let (outcome, found) = search_with(&search(100.0, None), LENGTH, None, |rate, _| {
        trials += 1;
        let outcome = one_server(rate, Arrivals::Constant, Duration::from_nanos(1), 10, None);
        Ok(Outcome { interrupted: trials == 3, ..outcome })
    })
    .expect("no trial fails");
    assert_eq!((found.rate, found.failed_rate, found.interrupted), (Some(200.0), None, true));
    assert_eq!(found.trials.len(), 2, "the one that was interrupted says nothing");
    assert!(!outcome.interrupted, "the run at the best rate is shown");
}

#[test]
fn an_unbounded_server_ends_at_the_highest_rate() {
    let mut bounded = search(100.0, None);
    bounded.most = 1000.0;
    let (_, found) = search_with(&bounded, LENGTH, None, |rate, _| {
        Ok(one_server(rate, Arrivals::Constant, Duration::from_nanos(1), 10, None))
    })
    .expect("no trial fails");
    assert_eq!((found.rate, found.failed_rate), (Some(1000.0), None));
    assert_eq!(found.trials.len(), 5, "100, 200, 400, 800, 1000");
}

proptest! {
    #[test]
    fn bisection_ends_next_to_the_threshold(
        start in 0.1_f64..1e5,
        threshold in 0.02_f64..9e5,
        precision in 0.001_f64..0.2,
    ) {
        let mut bisection = Bisection::new(start, 1e6, precision);
        let mut trials = 0;
        while let Some(rate) = bisection.next_rate() {
            bisection.handle_result(rate <= threshold);
            trials += 1;
            prop_assert!(trials < 60);
        }
        let (Some(passed), Some(failed)) = (bisection.highest(), bisection.lowest_failed()) else {
            return Err(TestCaseError::fail("no bounds"));
        };
        prop_assert!(passed <= threshold && threshold < failed && failed / passed <= 1.0 + precision);
    }
}
