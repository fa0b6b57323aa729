//! The worlds of the repository run under the checkers, and the contents of a world file are
//! checked.

use std::path::{Path, PathBuf};

use downbeat_lab::world::{BadWorld, ModelOutcome, ModelRow, WorldFile, WorldRun};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../experiments/worlds")
}

/// Runs the world of that name, with some seeds.
fn runs(name: &str) -> Vec<WorldRun> {
    let world = WorldFile::read(&folder().join(format!("{name}.toml"))).unwrap_or_else(|error| panic!("{error}"));
    world.run(&[1, 2, 3]).unwrap().runs
}

fn model<'a>(run: &'a WorldRun, name: &str) -> &'a ModelRow {
    run.models.iter().find(|model| model.name == name).unwrap()
}

/// Runs every file of `experiments/worlds/` under the checkers, so that none breaks unnoticed. Each
/// request is in one of the counts.
#[test]
fn every_world_of_the_repository_runs() {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 3, "{files:?}");
    for file in files {
        let world = WorldFile::read(&file).unwrap_or_else(|error| panic!("{error}"));
        let results = world.run(&[]).unwrap();
        assert_eq!(results, world.run(&[world.scenario.seed]).unwrap(), "{}: one seed, one run", file.display());
        for row in &results.runs[0].models {
            let ModelOutcome { offered, good, late, dropped, rejected, cancelled, failed, .. } = row.outcome;
            let ended = good + late + dropped + rejected + cancelled + failed;
            assert!(offered > 100 && ended == offered && good > 0, "{}: {row:?}", file.display());
        }
        let text = results.to_string();
        let names = world.devices.iter().chain(world.models.iter().map(|(name, _)| name));
        assert!(names.clone().all(|name| text.contains(&format!("| {name} "))), "{text}");
    }
}

#[test]
fn three_models_on_two_devices_keep_both_equally_busy() {
    for run in runs("three_models_two_devices") {
        let [first, second] = [0, 1].map(|device| run.devices[device].busy_s);
        assert!((first - second).abs() < 0.1 * first.max(second), "{first:.3} and {second:.3} s");
        assert!(run.models.iter().all(|model| model.outcome.good == model.outcome.offered), "{run:?}");
    }
}

#[test]
fn a_device_lost_under_load_fails_what_is_on_it_and_the_rest_is_served() {
    for run in runs("device_lost") {
        let failed: u64 = run.models.iter().map(|model| model.outcome.failed).sum();
        assert!((1..100).contains(&failed), "{run:?}");
        assert!(run.models.iter().all(|model| 2 * model.outcome.good > model.outcome.offered), "{run:?}");
        assert!(run.devices[0].busy_s < run.devices[1].busy_s, "{run:?}");
    }
}

#[test]
fn a_model_in_a_partition_of_its_own_is_not_disturbed() {
    let text = std::fs::read_to_string(folder().join("partitions.toml")).unwrap();
    let alone = text.replace("count = 4\n", "count = 1\nrequests = 1\n").replace("rate = 100\n", "rate = 0.001\n");
    assert_ne!(text, alone);
    for seed in 1..4 {
        let row = |text: &str| parse(text).unwrap().run(&[seed]).unwrap().runs.remove(0);
        let (busy, idle) = (row(&text), row(&alone));
        assert!(model(&busy, "job").outcome.good > 100 && model(&idle, "job").outcome.offered == 1);
        // The arrivals are equal in both runs. The clients that leave may differ, because all other
        // draws share one stream.
        let median = |run: &WorldRun| model(run, "interactive").p50_ms.unwrap();
        assert!((median(&busy) - median(&idle)).abs() < 1.0, "{} and {} ms", median(&busy), median(&idle));
    }
}

fn parse(text: &str) -> Result<WorldFile, BadWorld> {
    WorldFile::parse(text, Path::new("x.toml"))
}

const SMALL: &str = r#"title = "small"
span_ms = 100
[[device]]
name = "d"
[[model]]
name = "m"
alpha_ms = 1
beta_ms = 4
policy = "windowed"
[[client]]
model = "m"
rate = 100
"#;

/// An error names the place, and the expected form.
#[test]
fn what_is_no_world_is_told_where() {
    assert!(parse(SMALL).is_ok());
    for (from, to, expected) in [
        ("span_ms = 100", "span_ms = -1", "x.toml:2:11: -1 ms: it must be from 0 to 86400000 (a day)"),
        ("span_ms = 100", "span = 100", "x.toml:2:1: unknown field `span`"),
        ("title = \"small\"", "title = ", "x.toml:1:"),
        ("rate = 100", "rate = 0", "x.toml:12:8: a rate of 0; it must be above 0"),
        ("rate = 100", "arrivals = \"poisson\"", "x.toml:11:9: arrivals without a rate"),
        ("rate = 100", "rate = 100\narrivals = \"often\"", "x.toml:13:12: 'often' is not an arrival process"),
        ("model = \"m\"", "model = \"n\"", "x.toml:11:9: there is no model 'n'; there are: m"),
        ("alpha_ms = 1\n", "", "x.toml:6:8: 'm' needs alpha_ms and beta_ms, or calibrated in place of both"),
        ("alpha_ms = 1", "alpha_ms = 1\ncalibrated = \"m\"", "'m' needs alpha_ms and beta_ms"),
        ("alpha_ms = 1\nbeta_ms = 4", "calibrated = \"m\"", "x.toml:7:14: there is no calibration"),
        ("\"windowed\"", "\"window\"", "x.toml:9:10: unknown device policy 'window'"),
        ("\"windowed\"", "\"windowed\"\nsettings = { window_ms = -2 }", "x.toml:10:26: window_ms: -2 ms"),
        ("\"windowed\"", "\"windowed\"\nsettings = { stages = 2 }", "x.toml:10:14: unknown setting 'stages'"),
        ("\"windowed\"", "\"windowed\"\ndispatch = \"eager\"", "x.toml:10:12: dispatch is for the policy exclusive"),
        ("\"windowed\"", "\"windowed\"\npartition = 1", "x.toml:10:13: the device 'd' has no partition 1"),
        ("\"windowed\"", "\"windowed\"\ndevices = [\"e\"]", "x.toml:10:12: there is no device 'e'; there are: d"),
        ("\"windowed\"", "\"exclusive\"\ndispatch = \"nexus\"", "x.toml:10:12: unknown policy 'nexus'"),
        ("\"windowed\"", "\"exclusive\"\ndispatch = \"timeout:20%\"", "slo_ms, which is missing"),
        (
            "\"windowed\"",
            "\"exclusive\"\ndevices = [\"d\"]",
            "x.toml:10:12: a model of the policy exclusive runs on all",
        ),
        ("name = \"d\"", "name = \"d\"\nslots = []", "x.toml:4:8: slots has 0 partitions"),
        ("name = \"d\"", "name = \"d\"\nslots = [65]", "x.toml:5:9: 65 is not a number from 0 to 64"),
        ("name = \"d\"", "name = \"d\"\n[[device]]\nname = \"d\"", "x.toml:6:8: there is another device 'd'"),
        ("rate = 100", "priority_levels = 2", "x.toml:12:19: the model has 1 priority levels"),
        ("rate = 100", "[[fault]]\nat_ms = 1", "x.toml:12:1: a fault is exactly one of"),
        ("rate = 100", "[[fault]]\nat_ms = 1\nlost = \"d\"\nback = \"d\"", "here are 2"),
        ("rate = 100", "[[fault]]\nat_ms = 1\nlate = \"d\"", "late needs by_ms"),
        ("rate = 100", "[[fault]]\nat_ms = 1\nlost = \"e\"", "x.toml:14:8: there is no device 'e'"),
    ] {
        let text = SMALL.replacen(from, to, 1);
        assert_ne!(text, SMALL);
        let error = parse(&text).expect_err(&text).to_string();
        assert!(error.contains(expected) && error.starts_with("x.toml:"), "{to}: {error}\nexpected {expected}");
    }
}
