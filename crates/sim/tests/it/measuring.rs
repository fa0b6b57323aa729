//! A run's measurements besides good and bad: delays, windows of time, recordings. And the search
//! for a capacity.

use downbeat_core::{Duration, Time};
use downbeat_sim::{
    Arrivals, DELAY_BINS, ModelProfile, Network, Policy, Popularity, Scenario, Search, Shape, Simulation, parallel,
    quantile,
};

/// Symphony §3.3: 3 devices, l(b) = b + 5, SLO 12, a request every 0.75 ms.
fn section_3_3(policy: &str) -> Simulation {
    let scenario = Scenario {
        models: vec!["m,1,5,12".parse::<ModelProfile>().unwrap()],
        rate: 1e3 / 0.75,
        arrivals: Arrivals::Constant,
        popularity: Popularity::Equal,
        shape: Shape::Steady,
        devices: 3,
        max_batch: 0,
        noise: 0.0,
        network: Network::default(),
        warm_up: Duration::ZERO,
        span: Duration::from_micros(45_500),
    };
    scenario.simulation(&policy.parse::<Policy>().unwrap(), 1).unwrap()
}

#[test]
fn a_recording_is_the_staggered_pattern() {
    let simulation = Simulation { record: true, ..section_3_3("deferred+head") };
    let recording = simulation.run().unwrap().recording;
    assert_eq!(recording.requests.len(), 60);
    let batches: Vec<_> =
        recording.batches.iter().take(6).map(|b| (b.device.0, b.size, b.end.since(b.start))).collect();
    let nine = Duration::from_millis(9);
    assert_eq!(batches, [0, 1, 2, 0, 1, 2].map(|device| (device, 4, nine)), "figure 4");
    assert!(recording.requests.iter().all(|request| request.good));
    assert_eq!(recording.requests[5].batch, Some(1));
}

#[test]
fn a_switch_of_the_policy_counts_from_its_time_on() {
    let at = Time::ZERO + Duration::from_millis(20);
    let eager = downbeat_core::cluster::DispatchPolicy::Eager;
    let simulation = Simulation { record: true, switch: Some((at, vec![eager])), ..section_3_3("deferred+head") };
    let batches = simulation.run().unwrap().recording.batches;
    assert!(batches.iter().filter(|batch| batch.start < at).all(|batch| batch.size == 4), "{batches:?}");
    assert!(batches.iter().any(|batch| batch.start >= at && batch.size < 4), "{batches:?}");
}

#[test]
fn queueing_delays_are_counted_in_parts_of_the_slo() {
    let report = section_3_3("deferred+head").run().unwrap();
    let delays = report.delays();
    assert_eq!(delays.iter().sum::<u64>(), 60);
    // The last of four requests does not wait, the first waits for 2.25 of 12.
    assert_eq!(quantile(&delays, 0.25), Some(0));
    assert_eq!(quantile(&delays, 0.9), Some((2.25 / 12.0 * DELAY_BINS as f64) as usize));
}

#[test]
fn windows_add_up_to_the_run() {
    let simulation = Simulation { window: Duration::from_millis(10), ..section_3_3("eager+head") };
    let report = simulation.run().unwrap();
    let sum = |of: fn(&downbeat_sim::Window) -> u32| report.windows.iter().map(of).sum::<u32>();
    assert_eq!(u64::from(sum(|window| window.offered[0])), report.offered());
    assert_eq!(u64::from(sum(|window| window.good[0])), report.good());
    assert!(report.windows.iter().flat_map(|window| &window.busy).all(|busy| (0.0..=1.0 + 1e-6).contains(busy)));
    let busy: f32 = report.windows.iter().map(|window| window.busy[0]).sum::<f32>() * 0.010;
    let end = f64::from(busy) / report.busy[0];
    assert!((0.040..0.060).contains(&end), "the run lasts about 50 ms: {end}");
}

#[test]
fn a_search_finds_the_same_from_any_start_and_knows_when_nothing_is_held() {
    // A run tips over at some point by chance. So it may hold a rate, and lose a lower rate.
    let mut simulation = section_3_3("deferred+window");
    (simulation.span, simulation.loads[0].arrivals) = (Duration::from_millis(30_000), Arrivals::Poisson);
    let precision = 0.01;
    let rate = |low: f64, high: f64| {
        Search { low, high, precision, ..Search::default() }.capacity(&simulation).unwrap().unwrap().rate
    };
    let expected = rate(0.5, 1.0);
    for (low, high) in [(0.1, 0.2), (2.0, 3.0), (1e-3, 50.0)] {
        let found = rate(low, high);
        assert!((found / expected - 1.0).abs() < 3.0 * precision, "from {low} to {high}: {found}, not {expected}");
    }
    simulation.devices = 0;
    let none = Search::default().capacity(&simulation).unwrap().unwrap_err();
    assert!(none.not_held.is_some_and(|rate| rate < 0.01 * expected) && none.too_few_below.is_none(), "{none:?}");
}

/// A run with nearly no requests loses none.
#[test]
fn a_capacity_is_not_of_runs_with_next_to_no_requests() {
    let mut simulation = section_3_3("deferred+window");
    simulation.span = Duration::from_millis(200);
    // Every answer is late.
    simulation.network.budget.reply = Duration::from_millis(1_000);
    for (tolerated, needed) in [(0.01, 100), (0.1, 10)] {
        let none = Search { tolerated, ..Search::default() }.capacity(&simulation).unwrap().unwrap_err();
        assert!(none.not_held.is_some() && none.too_few_below == Some(needed), "{none:?}");
    }
    let long = Search { requests_per_model: 200.0, ..Search::default() };
    let none = long.capacity(&simulation).unwrap().unwrap_err();
    assert!(none.not_held.is_some() && none.too_few_below.is_none(), "runs are as long as it takes: {none:?}");
}

#[test]
fn the_fewest_devices_are_found_or_said_to_be_too_many() {
    let simulation = section_3_3("deferred+head");
    let (devices, report) = Search::default().fewest_devices(&simulation, 100).unwrap().unwrap();
    assert!(devices <= 3 && report.holds(0.01), "figure 4 needs three");
    let fewer = Simulation { devices: devices - 1, ..simulation.clone() };
    assert!(!fewer.run().unwrap().holds(0.01), "{devices} are the fewest");
    assert!(Search::default().fewest_devices(&simulation, devices - 1).unwrap().is_none());
}

#[test]
fn giving_up_early_never_changes_the_verdict() {
    for rate in [800.0, 1_200.0, 1_300.0, 1_400.0, 2_000.0] {
        let mut simulation = section_3_3("eager+head");
        simulation.loads[0].arrivals = Arrivals::Poisson;
        simulation.loads[0].rate = rate;
        simulation.span = Duration::from_millis(2_000);
        let whole = simulation.run().unwrap();
        simulation.give_up_above = Some(0.01);
        assert_eq!(simulation.run().unwrap().holds(0.01), whole.holds(0.01), "{rate}/s: {}", whole.bad_share());
    }
}

#[test]
fn parallel_results_are_in_order_and_all_are_counted() {
    let jobs: Vec<u64> = (0..50).collect();
    let seen = std::sync::Mutex::new(Vec::new());
    let squares = parallel::map(&jobs, 4, |job| job * job, |done| seen.lock().unwrap().push(done));
    assert_eq!(squares, jobs.iter().map(|job| job * job).collect::<Vec<_>>());
    let mut seen = seen.into_inner().unwrap();
    seen.sort_unstable();
    assert_eq!(seen, (1..=50).collect::<Vec<_>>());
    assert!(parallel::map(&[] as &[u64], 4, |job| *job, |_| ()).is_empty());
}

/// With a network, a batch is decided before its device is free. A batch is not late if its plan
/// included the time of messages.
#[test]
fn a_network_costs_its_delay_and_less_than_its_budget_does_no_harm() {
    let run = |delay: &str, control: u64| {
        let mut simulation = section_3_3("deferred+window");
        (simulation.span, simulation.loads[0].arrivals) = (Duration::from_millis(5_000), Arrivals::Poisson);
        simulation.loads[0].rate = 900.0;
        simulation.network.budget.control = Duration::from_micros(control);
        simulation.network.budget.data = Duration::from_micros(20);
        simulation.network.budget.reply = Duration::from_micros(100);
        simulation.network.delay = delay.parse().unwrap();
        simulation.run().unwrap()
    };
    let missed = |report: &downbeat_sim::Report| report.models[0].missed;
    let (near, far, varying) = (run("budget", 50), run("budget", 2_000), run("lognormal:12", 2_000));
    assert_eq!((missed(&near), missed(&far)), (0, 0));
    assert!(near.good() > far.good(), "seed 1: {} and {}", near.good(), far.good());
    // The network is slower than planned for one message in ten thousand.
    assert!(missed(&varying) < 20, "seed 1: {}", missed(&varying));
    assert!("lognormal:0.5".parse::<downbeat_sim::Delay>().is_err());
}
