//! The scheduler's benchmark measures the documented quantities, and reports the ones that it
//! cannot measure.

use clap::Parser;
use downbeat_scheduler_bench::{Measurement, SchedulerArgs, measure};

#[derive(Parser, Debug)]
struct Command {
    #[command(flatten)]
    args: SchedulerArgs,
}

fn run(seconds: &str, words: &[&str]) -> anyhow::Result<Measurement> {
    let words = ["scheduler", "--seconds", seconds].into_iter().chain(words.iter().copied());
    measure(&Command::try_parse_from(words)?.args)
}

/// Runs at a pace of 2,000/s in real time, longer if the machine is so busy that no batch leaves in
/// time. Returns the number of due requests too.
fn run_paced(words: &[&str]) -> (u64, Measurement) {
    let words: Vec<&str> = words.iter().copied().chain(["--rate", "2000"]).collect();
    let tries = [("0.2", 400), ("2", 4_000), ("20", 40_000)];
    let mut tried = tries.iter().map(|(seconds, due)| run(seconds, &words).map(|run| (*due, run)));
    tried.find_map(Result::ok).expect("batches leave within 20 s")
}

/// The devices can serve the default load, in batches of a fair size.
#[test]
fn below_capacity_nearly_all_is_served_in_large_batches() {
    for policy in ["deferred", "latest"] {
        let run = run("0.01", &["--models", "4", "--devices", "64", "--policy", policy]).unwrap();
        assert!(run.requests > 10_000 && run.batches > 100, "{run}");
        assert!(run.mean_batch > 10.0, "{run}");
        assert!(run.bad_share < 0.01, "{run}");
        assert!(run.events_per_request > 1.0, "completions are events too: {run}");
        assert!(run.latency_us.is_none(), "virtual time has no latency: {run}");
    }
}

#[test]
fn more_than_the_devices_can_serve_is_seen_as_bad() {
    let run = run("0.2", &["--models", "4", "--devices", "16", "--load", "1.5"]).unwrap();
    assert!(run.bad_share > 0.2, "a third cannot be served: {run}");
}

#[test]
fn a_paced_run_measures_latencies() {
    let (due, run) = run_paced(&["--models", "4", "--devices", "16"]);
    let latency = run.latency_us.unwrap();
    assert!(latency.p50 > 0.0 && latency.p50 <= latency.p99 && latency.p99 <= latency.max, "{latency:?}");
    // Without a pace there are orders of magnitude more requests; the run may be longer on a busy
    // machine.
    assert!((due / 4..25 * due).contains(&run.requests), "{due} are due: {run}");
}

/// With a separate matchmaker, also on more threads than there are cores: no request is lost, and a
/// paced load is served.
#[test]
fn threads_share_the_load() {
    for threads in ["1", "3"] {
        let (due, run) = run_paced(&["--models", "6", "--devices", "600", "--threads", threads, "--matchmaker-thread"]);
        assert!((due / 4..25 * due).contains(&run.requests), "{due} are due: {run}");
        assert!(run.batches > 0 && run.latency_us.is_some(), "{run}");
    }
    let run = run("0.1", &["--models", "4", "--devices", "64", "--threads", "2"]).unwrap();
    assert!(run.requests > 1_000 && run.bad_share < 0.05, "virtual time waits for every thread: {run}");
    assert!(run.latency_us.is_none(), "virtual time has no latency: {run}");
}

#[test]
fn what_cannot_be_measured_is_refused_by_flag() {
    let cases: [(&[&str], &str); 7] = [
        (&["--threads", "2", "--models", "1"], "--threads"),
        (&["--devices", "1", "--rate", "1000000"], "--rate"),
        (&["--rate", "0"], "--rate"),
        (&["--load", "nan"], "--load"),
        (&["--seconds", "0"], "--seconds"),
        (&["--models", "0"], "--models"),
        (&["--sweep", "--models", "3"], "--models"),
    ];
    for (words, expected) in cases {
        let words = words.to_vec();
        let parsed = Command::try_parse_from(std::iter::once(&"scheduler").chain(&words));
        let error = match parsed {
            Ok(command) => format!("{:#}", measure(&command.args).expect_err(&words.join(" "))),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(expected), "{words:?}: {error}");
    }
}

/// As in a server: no request is lost with any number of threads, in one shard or several, and the
/// load is served in batches.
#[test]
fn whoever_posts_works() {
    for (threads, shards) in [("1", "2"), ("3", "1")] {
        let words = ["--posting-threads", threads, "--shards", shards, "--models", "6", "--devices", "4096"];
        let words: Vec<&str> = words.into_iter().chain(["--policy", "eager", "--drop", "head"]).collect();
        let run =
            ["0.1", "2", "20"].iter().find_map(|seconds| run(seconds, &words).ok()).expect("batches leave within 20 s");
        assert!(run.requests > 0 && run.batches > 0 && run.threads.to_string() == threads, "{run}");
    }
    let error = run("0.1", &["--posting-threads", "2", "--shards", "7", "--models", "6"]).unwrap_err();
    assert!(error.to_string().contains("--shards: at most one a model"), "{error}");
}
