//! Frontends, schedulers and backends on a faulty network, under an outside judge.

use std::path::{Path, PathBuf};

use downbeat_core::Duration;
use downbeat_lab::network::{NetworkFile, NetworkOutcome, NetworkScenario};

/// Runs a seed, which must keep all rules.
fn judged(seed: u64, requests: u64) -> NetworkOutcome {
    judge(seed, NetworkScenario::random(seed, requests), requests)
}

fn judge(seed: u64, scenario: NetworkScenario, requests: u64) -> NetworkOutcome {
    let outcome = scenario.run();
    assert_eq!(outcome.broken, None, "seed {seed} of {requests} requests: {outcome:?}");
    assert_eq!(outcome.ended(), outcome.requests, "seed {seed}: {outcome:?}");
    outcome
}

/// The aim of issue 18, in small: no rule is broken under any fault. The command
/// `downbeat-lab network --seeds A..B` runs more.
#[test]
fn no_rule_is_broken_under_random_faults() {
    let mut all = NetworkOutcome::default();
    for seed in 0..200 {
        all.add(&judged(seed, 250));
    }
    assert!(all.requests > 20_000 && all.good > all.requests / 4 && all.streamed > 20_000, "{all:?}");
    assert!(all.repeated > 0 && all.lost > 0 && all.too_late > 0 && all.died > 0, "{all:?}");
}

/// The same rules hold for models whose device policies make the batches.
#[test]
fn no_rule_is_broken_where_devices_make_the_batches() {
    let mut all = NetworkOutcome::default();
    for seed in 0..200 {
        all.add(&judge(seed, NetworkScenario::random(seed, 250).seated(), 250));
    }
    assert!(all.requests > 20_000 && all.good > all.requests / 4, "{all:?}");
    assert!(all.repeated > 0 && all.lost > 0 && all.too_late > 0 && all.died > 0, "{all:?}");
}

/// Seeds that once broke a rule, or showed an error of the judge: see `docs/results/cluster.md`.
#[test]
fn no_rule_is_broken_again_that_was_broken_once() {
    for seed in [
        2_000_269, 2_004_234, 2_008_091, 2_008_893, 2_008_923, 2_010_884, 3_002_334, 3_002_825, 3_016_184, 9_022_706,
        9_050_960, 11_064_479, 14_000_822, 14_005_094, 14_007_490, 14_009_076, 14_017_175, 14_038_101,
    ] {
        judged(seed, 2_000);
    }
    // Of one run of 66,000 seeds.
    for seed in [30_548, 31_226, 32_808, 65_094] {
        judged(3_599_474_300_000 + seed, 2_000);
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../experiments/networks")
}

/// Runs the network of that name with some seeds, none of which may break a rule. Prints the gaps
/// between answers.
fn runs(name: &str) -> Vec<NetworkOutcome> {
    let network = NetworkFile::read(&folder().join(format!("{name}.toml"))).unwrap_or_else(|error| panic!("{error}"));
    let results = network.run(&[1, 2]);
    println!("{results}");
    for run in &results.runs {
        assert_eq!(run.broken, None, "{name}");
        assert!(run.ended() == run.requests && run.requests > 2_000, "{name}: {run:?}");
    }
    results.runs
}

/// Returns the longest time without an answer around any fault.
fn gap(run: &NetworkOutcome) -> Duration {
    run.gaps.iter().map(|(_, gap)| *gap).max().unwrap()
}

/// Runs every file of `experiments/networks/`, so that none breaks unnoticed. Equal seeds give
/// equal runs.
#[test]
fn every_network_of_the_repository_runs_and_can_be_run_again() {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 10, "{files:?}");
    for file in files {
        let network = NetworkFile::read(&file).unwrap_or_else(|error| panic!("{error}"));
        let [first, again] = [network.run(&[]), network.run(&[network.scenario.seed])];
        assert_eq!(first, again, "{}", file.display());
        assert_eq!(first.runs[0].broken, None, "{}", file.display());
    }
}

#[test]
fn a_leader_that_is_killed_leaves_no_gap_and_no_request_unanswered() {
    for run in runs("leader_killed") {
        assert_eq!(run.good, run.requests, "{run:?}");
        assert!(gap(&run) < Duration::from_millis(20) && run.leads == 3 && run.repeated == 0, "{run:?}");
    }
}

#[test]
fn a_leader_that_stands_still_is_nobodys_leader_when_it_goes_on() {
    for run in runs("leader_paused") {
        assert_eq!(run.good, run.requests, "{run:?}");
        assert!(gap(&run) < Duration::from_millis(20), "{run:?}");
        assert_eq!(run.leads, 2, "it does not take the lead back: {run:?}");
    }
}

#[test]
fn a_spare_that_is_killed_is_missed_by_nobody() {
    for run in runs("spare_killed") {
        assert_eq!((run.good, run.leads), (run.requests, 1), "{run:?}");
    }
}

/// Only requests of the killed backend run again: at most a batch of 16 for each of its two slots,
/// and one more that was sent ahead. Requests that must not run twice are lost.
#[test]
fn of_a_backend_that_is_killed_only_what_ran_there_is_handed_in_again() {
    let all = runs("backend_killed");
    for run in &all {
        assert!(run.repeated <= 64 && run.lost <= 32 && run.good + run.lost == run.requests, "{run:?}");
    }
    assert!(all.iter().any(|run| run.repeated > 0), "{all:?}");
}

/// Symphony §4.3: the metadata of requests waits while their inputs are made. Inputs that take
/// longer than expected cost no request its answer.
#[test]
fn section_4_3_requests_are_announced_and_run_once_they_are_ready() {
    for run in runs("preparing") {
        assert!(run.good + 60 > run.requests && run.lost == 0, "{run:?}");
    }
}

/// By the rule of the load one request in 25 is not answered in time. Trials of each leader find better
/// behaviours for these two models.
#[test]
fn a_leader_that_rehearses_loses_half_as_many_requests() {
    let rehearsed = runs("rehearsed");
    assert!(rehearsed.iter().all(|run| run.leads == 2 && run.rehearsed >= 2), "{rehearsed:?}");
    let mut network = NetworkFile::read(&folder().join("rehearsed.toml")).unwrap_or_else(|error| panic!("{error}"));
    network.scenario.rehearsed = false;
    let missed = |runs: &[NetworkOutcome]| runs.iter().map(|run| run.requests - run.good).sum::<u64>();
    let (by_trials, by_rule) = (missed(&rehearsed), missed(&network.run(&[1, 2]).runs));
    assert!(by_trials * 2 < by_rule, "{by_trials} of trials, {by_rule} of the rule");
}

/// No backend is present from 0.35 s to 1.1 s. Until 0.55 s frontends accept requests, 2000 a
/// second without a deadline, which are refused then. From then on frontends do not know the
/// models.
#[test]
fn requests_of_a_model_without_a_backend_are_refused_until_one_is_back() {
    for run in runs("backends_gone") {
        assert_eq!(run.good + run.late + run.refused, run.requests, "{run:?}");
        assert!(run.refused >= 350 && (1_100..1_500).contains(&run.unserved), "{run:?}");
    }
}

#[test]
fn of_a_frontend_that_is_killed_only_its_own_requests_are_lost() {
    for run in runs("frontend_killed") {
        assert!(run.died > 0 && run.good + run.late + run.died == run.requests, "{run:?}");
    }
}

/// Both halves are served. The cut costs only the messages on their way across it.
#[test]
fn two_leaders_of_a_split_network_are_not_both_obeyed_by_anybody() {
    for name in ["split", "split_with_store"] {
        for run in runs(name) {
            assert!(run.leads >= 2 && run.good > run.requests - run.requests / 50, "{name}: {run:?}");
            assert!(gap(&run) < Duration::from_millis(20), "{name}: {run:?}");
        }
    }
}

#[test]
fn backends_join_and_are_drained_without_a_loss() {
    for run in runs("join_and_drain") {
        assert_eq!((run.good, run.repeated), (run.requests, 0), "{run:?}");
    }
}

/// The SLO is 250 ms, and 500 requests come each second. Of a pause of 0.4 s, no scheduler could
/// help the requests of its first 0.15 s. Half a second of refusals is the aim of issue 38; these
/// requests would be 250.
#[test]
fn a_pause_of_a_process_is_not_taken_for_the_delay_of_the_network() {
    for name in ["backend_stops", "scheduler_stops", "frontend_stops"] {
        for run in runs(name) {
            assert_eq!(run.needless, 0, "{name}, seed {}: {run:?}", run.seed);
            assert!(run.requests - run.good < 250, "{name}, seed {}: {run:?}", run.seed);
        }
    }
}

/// A stall is the network's own delay. The percentiles remember it for seconds.
#[test]
fn a_stall_of_the_network_is_over_once_fresh_messages_are_quick() {
    for run in runs("wires_stall") {
        assert!(run.needless < 20 && run.requests - run.good < 400, "seed {}: {run:?}", run.seed);
    }
}

#[test]
fn jitter_that_leaves_enough_time_refuses_nothing() {
    for run in runs("jitter") {
        assert_eq!((run.needless, run.refused), (0, 0), "seed {}: {run:?}", run.seed);
        assert!(run.good * 100 >= run.requests * 99, "seed {}: {run:?}", run.seed);
    }
}

/// A claim and its inputs take up to 60 ms, and a batch waits for 10 ms at least. Without a look at
/// late inputs, most requests would go back 16 times without a run, and end as lost.
#[test]
fn inputs_that_take_longer_than_a_batch_waits_are_waited_for() {
    for run in runs("late_inputs") {
        assert_eq!((run.good, run.lost), (run.requests, 0), "seed {}: {run:?}", run.seed);
    }
}

/// One takeover is allowed: a pause may be much longer than the pauses just before.
#[test]
fn on_a_busy_machine_the_leader_stays_the_leader() {
    for run in runs("busy_machine") {
        assert!(run.leads <= 2, "seed {}: {run:?}", run.seed);
        assert!(run.needless * 100 < run.requests, "seed {}: {run:?}", run.seed);
    }
}

/// Symphony §4.4: no request is lost or refused because models move, a backend goes, or the leader
/// is killed meanwhile.
#[test]
fn models_move_between_sub_clusters_without_a_refusal() {
    for run in runs("sub_clusters") {
        assert_eq!((run.good, run.unserved > 0), (run.requests, true), "{run:?}");
        assert!(run.plans >= 5, "{run:?}");
    }
}

/// Symphony appendix A: a device holds three of four models, so there are two sub-clusters. Then the
/// requests become too many for two. No request is lost or refused, since the devices have the time.
#[test]
fn appendix_a_there_are_as_many_sub_clusters_as_needed() {
    for run in runs("sub_clusters_least") {
        assert_eq!((run.good, run.sub_clusters), (run.requests, 3), "{run:?}");
    }
}

#[test]
fn a_file_that_is_no_network_says_where_and_what_was_expected() {
    let head = "title = \"t\"\nspan_ms = 1\n";
    let model = "[[model]]\nalpha_ms = 1\nbeta_ms = 1\nrate = 1\n";
    for (text, line, expected) in [
        (head.to_owned(), 1, "missing field `model`"),
        (format!("{head}{model}[[fault]]\nat_ms = 1\nkill = \"backend-1\"\n"), 9, "there are 1 such"),
        (format!("{head}{model}[[fault]]\nat_ms = 1\nkill = \"server-1\"\n"), 9, "expected frontend-N"),
        (format!("{head}{model}[[fault]]\nat_ms = 1\npause = \"backend-0\"\n"), 7, "needs lasts_ms"),
        (format!("{head}{model}[[fault]]\nat_ms = 1\n"), 7, "exactly one of kill"),
        (format!("{head}absent = [\"frontend-0\"]\n{model}"), 3, "frontend-0 is no backend"),
        (format!("{head}{}", model.replace("rate = 1", "rate = -1")), 6, "must be above 0"),
        (format!("{head}{model}[[fault]]\nat_ms = 1\nbusy = 1\nrate = 2\n"), 7, "there is no model 1"),
        (format!("{head}{model}[[fault]]\nat_ms = 1\nbusy = 0\n"), 7, "busy needs rate"),
        (format!("{head}schedulers = 17\n{model}"), 3, "from 1 to 16"),
    ] {
        let error = NetworkFile::parse(&text, Path::new("n.toml")).unwrap_err().to_string();
        assert!(error.starts_with(&format!("n.toml:{line}:")) && error.contains(expected), "{error}");
    }
}
