//! `downbeat simulate`, as a user calls it.

use crate::command_line::{run, stderr, stdout};

/// Table 2's ResNet50 on one device, three seconds of it: fast in a debug build too.
const QUICK: [&str; 8] = [
    "simulate",
    "capacity",
    "--model",
    "ResNet50,1.053,5.072,25",
    "--devices=1",
    "--span=3",
    "--warm-up=0.2",
    "--precision=5",
];

fn quick(more: &[&str]) -> std::process::Output {
    run(&[&QUICK, more].concat())
}

fn refuses(arguments: &[&str], expected: &str) {
    let output = run(arguments);
    let said = stderr(&output);
    assert!(said.contains(expected) && !said.contains("panicked"), "{arguments:?}: {said}");
    assert!(!output.status.success(), "{arguments:?}");
}

#[test]
fn a_capacity_with_its_share_of_the_bounds() {
    let output = quick(&["--policy", "deferred,eager", "--drop", "head"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    for expected in
        ["| deferred+head ", "| eager+head ", "capacity r/s", "of staggered", "of fluid", "batch mean (p50, p99)"]
    {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert_eq!(stderr(&output), "", "no progress bar without a terminal");
}

#[test]
fn json_has_every_seed_and_model_and_repeats_itself() {
    let arguments = [
        "--seed",
        "1",
        "--seed",
        "2,3",
        "--json",
        "--model",
        "second,1,2,30",
        "--popularity",
        "zipf:0.9",
        "--requests-per-model=300",
    ];
    let output = quick(&arguments);
    let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    let case = &json["cases"][0];
    assert_eq!(case["policy"], "deferred");
    assert_eq!(case["samples"].as_array().unwrap().len(), 3, "{json}");
    let value = &case["value"];
    assert!(value["min"].as_f64() <= value["median"].as_f64() && value["median"].as_f64() <= value["max"].as_f64());
    for model in ["ResNet50", "second"] {
        assert!(case["samples"][2]["bad_share_by_model"][model].as_f64().unwrap() <= 0.01, "{json}");
    }
    assert_eq!(stdout(&quick(&arguments)), stdout(&output), "equal seeds, equal results");
}

#[test]
fn bad_input_is_said_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let csv = folder.path().join("models.csv");
    std::fs::write(&csv, "name,alpha_ms,beta_ms,slo_ms\nA,1,2,20\nB,1,two,20\n").unwrap();
    let csv = csv.to_str().unwrap();
    let with = |more: &[&'static str]| [&["simulate", "capacity", "--profiles", csv, "--devices=2"], more].concat();
    refuses(&with(&[]), "models.csv:3:3: beta_ms is 'two', which is not a number");
    let model = ["--model", "A,1,2,20"];
    let capacity = |more: &[&'static str]| [&["simulate", "capacity", "--devices=2"][..], &model, more].concat();
    refuses(&["simulate", "capacity", "--devices=2"], "no models are given: --profiles FILE.csv, or --model");
    refuses(
        &["simulate", "capacity", "--devices=2", "--model", "A,9,2,5"],
        "the SLO of A is 5 ms, but l(1) = alpha + beta is 11 ms",
    );
    refuses(&["simulate", "capacity", "--model", "A,1,2,20", "--devices=0"], "0 is not in 1..=1000000");
    refuses(&capacity(&["--policy=lazy"]), "unknown policy 'lazy'; expected one of: deferred, eager");
    refuses(&capacity(&["--drop=tail"]), "unknown drop policy 'tail'; expected one of: window, head");
    refuses(
        &capacity(&["--arrivals=gamma"]),
        "'gamma' is not an arrival process; expected poisson, constant, or gamma:K",
    );
    refuses(&capacity(&["--popularity=zipf:x"]), "'zipf:x' is not a popularity");
    refuses(&capacity(&["--model", "A,2,3,30"]), "two models have the name A");
    refuses(&capacity(&["--seed=1,2,1"]), "the seed 1 is given twice");
    refuses(&capacity(&["--threads=0"]), "0 is not in 1..");
    for wrong in ["nan", "-1", "inf"] {
        refuses(&capacity(&["--requests-per-model", wrong]), "requests_per_model is ");
    }
    refuses(&capacity(&["--span", "-1"]), "--span is -1; the value must be from 0.001 to 604800 seconds");
    refuses(&capacity(&["--noise=-1"]), "the noise is -1; the value must be from 0 to 10");
    refuses(&capacity(&["--d-ctrl-us=-1"]), "--d-ctrl-us is -1; the value must be from 0");
    refuses(&capacity(&["--delay=some"]), "'some' is not a distribution of delays");
    refuses(
        &capacity(&["--tolerated-percent=100"]),
        "--tolerated-percent is 100; the value must be above 0 and below 100",
    );
    refuses(&capacity(&["--policy=shepherd"]), "unknown policy 'shepherd'");
}

/// No load, and too few requests to tell, are answers of their own.
#[test]
fn where_there_is_no_capacity_it_is_said_why() {
    let model = ["simulate", "capacity", "--model=m,1,2,10", "--devices=8", "--d-reply-us=20000", "--warm-up=0"];
    let output = run(&[&model[..], &["--span=0.2"]].concat());
    let text = stdout(&output);
    assert!(output.status.success() && text.contains("deferred: the devices hold no load down to "), "{text}");
    assert!(text.contains(" r/s; below that rate a run has fewer than 100 requests, too few to measure 1%"), "{text}");
    assert!(!text.contains("busy"), "of no run there is nothing to say: {text}");
    let text = stdout(&run(&[&model[..], &["--span=0.2", "--requests-per-model=200"]].concat()));
    assert!(text.contains("deferred: the devices hold no load, not even "), "{text}");
}
