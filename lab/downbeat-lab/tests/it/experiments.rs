//! The experiments of the repository run, and an experiment file is checked.

use std::path::{Path, PathBuf};

use downbeat_lab::experiment::{BadExperiment, Experiment, Measure, Overrides, Plot, Value};

const TINY: Overrides =
    Overrides { seeds: None, span_s: None, requests_per_model: None, all: false, policies: None, tiny: true };

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../experiments")
}

/// Runs a fraction of a second of every file of `experiments/`, under the checker, so that none
/// breaks unnoticed.
#[test]
fn every_experiment_of_the_repository_runs() {
    let entries = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|end| end == "toml")).collect();
    files.sort();
    assert!(files.len() >= 15, "{files:?}");
    for file in files {
        let experiment = Experiment::read(&file, &TINY).unwrap_or_else(|error| panic!("{error}"));
        let results = experiment.run(2, |_, _| true).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        assert!(!experiment.plots.is_empty() && !experiment.source.is_empty(), "{}", file.display());
        assert!(results.cases.iter().any(|case| case.value.is_some()), "{}: nothing was measured", file.display());
        let page = experiment.page(&results);
        assert!(page.contains("<svg") && !page.contains("NaN"), "{}: {page}", file.display());
        assert!(results.to_string().contains(&results.cases[0].policy), "{}", file.display());
    }
}

fn parse(text: &str) -> Result<Experiment, BadExperiment> {
    Experiment::parse(text, &folder(), Path::new("x.toml"), &Overrides::default())
}

const SMALL: &str = r#"
title = "small"
measure = "goodput"
policies = ["deferred", "eager+head"]
relative_to = "eager+head"
seeds = [3, 4, 5]
warm_up_s = 0.1
span_s = 0.5
x = "rate"

[defaults]
devices = 2
models = [{ name = "m", alpha_ms = 1, beta_ms = 4, slo_ms = 20 }]

[[workload]]
name = "a"

[[workload]]
name = "b"
copies = 3
devices = 4

[sweep]
rate = [100, 200.5]

[[paper]]
workload = "b"
policy = "eager+head"
at = { rate = 100 }
value = 99
"#;

#[test]
fn workloads_by_sweep_by_policies_with_settings_laid_over_each_other() {
    let experiment = parse(SMALL).unwrap();
    assert_eq!((experiment.measure, experiment.cases.len()), (Measure::Goodput, 2 * 2 * 2));
    let shapes: Vec<_> = experiment
        .cases
        .iter()
        .map(|case| (case.workload.as_str(), case.scenario.devices, case.scenario.models.len(), case.scenario.rate))
        .collect();
    assert_eq!(shapes[0], ("a", 2, 1, 100.0));
    assert_eq!(shapes[2], ("a", 2, 1, 200.5));
    assert_eq!(shapes[4], ("b", 4, 3, 100.0));
    let papers: Vec<_> = experiment.cases.iter().map(|case| case.paper).collect();
    assert_eq!(papers, [None, None, None, None, None, Some(99.0), None, None]);
    assert_eq!(experiment.cases[2].point, [("rate".to_owned(), Value::Number(200.5))]);
}

#[test]
fn a_run_has_the_median_of_the_seeds_and_says_what_others_reach_of_one() {
    let results = parse(SMALL).unwrap().run(2, |_, _| true).unwrap();
    for case in &results.cases {
        let value = case.value.unwrap();
        let mut goodputs: Vec<f64> = case.samples.iter().map(|sample| sample.goodput).collect();
        goodputs.sort_by(f64::total_cmp);
        assert_eq!([value.min, value.median, value.max], goodputs[..], "seeds 3, 4, 5");
    }
    assert_eq!(results.cases[1].relative, Some(1.0));
    let json: serde_json::Value = serde_json::to_value(&results).unwrap();
    assert_eq!(json["cases"][0]["samples"][2]["seed"], 5);
    assert!(json["cases"][4]["samples"][0]["bad_share_by_model"]["m#3"].is_number(), "{json}");
}

#[test]
fn threads_change_nothing() {
    let experiment = parse(SMALL).unwrap();
    let text = |threads| experiment.run(threads, |_, _| true).unwrap().to_string();
    assert_eq!(text(1), text(5));
}

#[test]
fn overrides_take_the_place_of_the_file() {
    let overrides = Overrides {
        seeds: Some(vec![9]),
        span_s: Some(2.0),
        policies: Some(vec!["shepherd".to_owned()]),
        ..Overrides::default()
    };
    let experiment = Experiment::parse(SMALL, &folder(), Path::new("x.toml"), &overrides).unwrap();
    assert_eq!((experiment.seeds.as_slice(), experiment.cases.len()), ([9].as_slice(), 4));
    assert_eq!(experiment.cases[0].scenario.span.as_millis_f64(), 2_000.0);
    assert!(experiment.plots.is_empty() || experiment.plots.contains(&Plot::Value));
}

#[test]
fn a_sample_is_always_the_same_and_all_of_it_can_be_asked_for() {
    let sampled = SMALL.replace("x = \"rate\"", "x = \"rate\"\nsample = 2");
    let experiment = parse(&sampled).unwrap();
    assert_eq!((experiment.cases.len(), experiment.left_out), (4, 4));
    assert_eq!(experiment.cases, parse(&sampled).unwrap().cases);
    let all = Overrides { all: true, ..Overrides::default() };
    let experiment = Experiment::parse(&sampled, &folder(), Path::new("x.toml"), &all).unwrap();
    assert_eq!((experiment.cases.len(), experiment.left_out), (8, 0));
}

#[test]
fn what_is_wrong_in_a_file_is_said() {
    let cases = [
        (
            "policies = [\"deferred\"",
            "policies = [\"lazy\"",
            "x.toml: unknown policy 'lazy'; expected one of: deferred",
        ),
        ("devices = 2", "devics = 2", "unknown field `devics`"),
        ("devices = 2", "devices = \"two\"", "invalid type: string \"two\", expected u32"),
        ("x = \"rate\"", "x = \"slo_ms\"", "x is 'slo_ms', which is not in the sweep"),
        ("[100, 200.5]", "[100, -5]", "workload 'a' rate = -5: the rate is -5; the value must be above 0 and finite"),
        ("[100, 200.5]", "100", "sweep.rate has to be a list of values"),
        (
            "copies = 3",
            "arrivals = \"poison\"",
            "'poison' is not an arrival process; expected poisson, constant, or gamma:K",
        ),
        ("copies = 3", "popularity = \"zipf\"", "'zipf' is not a popularity; expected equal, maf, or zipf:S"),
        ("copies = 3", "shape = \"round\"", "'round' is no shape of a load; expected steady, twitter"),
        ("copies = 3", "pick = \"n\"", "there is no model 'n' to be picked"),
        ("copies = 3", "slo_ms = 4", "the SLO of m is 4 ms, but l(1) = alpha + beta is 5 ms"),
        ("copies = 3", "profiles = \"none.csv\"", "cannot read"),
        ("copies = 3", "stretches = [[5, -1]]", "stretch 1 has the factor -1; factors are finite and at least 0"),
        ("copies = 3", "devices_per_model = 1", "devices and devices_per_model exclude each other"),
        ("span_s = 0.5", "span_s = 0", "span_s is 0; it has to be from 0.001 to 604800"),
        ("seeds = [3, 4, 5]", "seeds = []", "need at least one entry each"),
        ("seeds = [3, 4, 5]", "seeds = [3, 4, 3]", "the seed 3 is given twice"),
        ("seeds = [3, 4, 5]", "requests_per_model = nan", "requests_per_model is NaN; the value must be from 0 to"),
        ("copies = 3", "pick = [\"m\", \"m\"]", "workload 'b' rate = 100: two models have the name m"),
    ];
    for (from, to, expected) in cases {
        let text = SMALL.replace(from, to);
        assert_ne!(text, SMALL, "{from}");
        let error = parse(&text).unwrap_err().to_string();
        assert!(error.contains(expected), "{to}: {error}");
    }
    assert!(parse("title = 3").unwrap_err().to_string().contains("x.toml: TOML parse error at line 1, column 9"));
    let missing = Experiment::read(Path::new("/nonexistent/e.toml"), &Overrides::default()).unwrap_err();
    assert_eq!(missing.to_string(), "cannot read /nonexistent/e.toml");
}
