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
    let output = quick(&["--policy", "deferred,shepherd", "--drop", "head"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    for expected in
        ["| deferred+head ", "| shepherd ", "capacity r/s", "of staggered", "of fluid", "batch mean (p50, p99)"]
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
fn an_experiment_file_as_a_table_and_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../experiments/figure_4.toml");
    let output = run(&["simulate", file, "--html", page.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("(Symphony section 3.3, figure 4)"), "{}", stdout(&output));
    let page = std::fs::read_to_string(page).unwrap();
    assert!(
        page.starts_with("<!doctype html>") && page.contains("class=\"batch") && !page.contains("<script"),
        "{page}"
    );
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
    refuses(&capacity(&["--arrivals=gamma"]), "'gamma' is no arrival process; expected poisson, constant, or gamma:K");
    refuses(&capacity(&["--popularity=zipf:x"]), "'zipf:x' is no popularity");
    refuses(&capacity(&["--model", "A,2,3,30"]), "there are two models of the name A");
    refuses(&capacity(&["--seed=1,2,1"]), "the seed 1 is there twice");
    refuses(&capacity(&["--threads=0"]), "0 is not in 1..");
    for wrong in ["nan", "-1", "inf"] {
        refuses(&capacity(&["--requests-per-model", wrong]), "requests_per_model is ");
    }
    refuses(&capacity(&["--span", "-1"]), "--span is -1; it has to be from 0.001 to 604800 seconds");
    refuses(&capacity(&["--noise=-1"]), "the noise is -1; it has to be from 0 to 10");
    refuses(&capacity(&["--d-ctrl-us=-1"]), "--d-ctrl-us is -1; it has to be from 0");
    refuses(&capacity(&["--delay=some"]), "'some' is no distribution of delays");
    refuses(&capacity(&["--tolerated-percent=100"]), "--tolerated-percent is 100; it has to be above 0 and below 100");
    refuses(&["simulate", "/nonexistent.toml"], "cannot read /nonexistent.toml");
}

#[test]
fn a_device_policy_with_a_timeline() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("timeline.html");
    let model = ["simulate", "device", "--model=bertbase", "--requests=60", "--rate=200"];
    let html = format!("--html={}", page.display());
    let output = run(&[&model[..], &["--policy=dvabatch", &html]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("54 answered of 54"), "a tenth does not count: {}", stdout(&output));
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("class=\"batch") && page.contains("1 items"), "launches with their items");
    let json = stdout(&run(&[&model[..], &["--policy=delaybatch", "--json"]].concat()));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(json["padding"].as_f64() > Some(0.0), "{json}");
}

#[test]
fn what_a_device_simulation_cannot_do_is_said() {
    let device = |more: &[&'static str]| [&["simulate", "device"], more].concat();
    refuses(&device(&["--model=lenet", "--policy=no-wait", "--rate=1"]), "there are resnet50, resnet101");
    refuses(&device(&["--model=vgg16", "--policy=best", "--rate=1"]), "there are no-wait, opt-wait");
    refuses(&device(&["--model=vgg16", "--policy=no-wait"]), "--rate");
    refuses(&device(&["--model=vgg16", "--policy=no-wait", "--rate=-1"]), "positive");
    refuses(&device(&["--model=vgg16", "--policy=dvabatch", "--rate=1", "--stages=500"]), "can be cut into 1 to");
    refuses(&device(&["--model=vgg16", "--policy=no-wait", "--rate=1", "--platform=tpu"]), "titan-cudnn");
    refuses(&device(&["--model=vgg16", "--policy=no-wait", "--rate=1", "--qos-ms=0"]), "--qos-ms");
    let overhead = ["--model=vgg16", "--policy=no-wait", "--rate=1", "--batch-overhead-ms=-1"];
    refuses(&device(&overhead), "--batch-overhead-ms is -1; it has to be from 0");
    refuses(&["simulate", "figure", "e2bird-99"], "e2bird-table-1");
}

/// A world of the repository as tables and as JSON, and one that is none.
#[test]
fn a_world_from_a_file() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../experiments/worlds/three_models_two_devices.toml");
    let output = run(&["simulate", "world", file]);
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    for expected in ["| model ", "| windowed-2 | windowed ", "| exclusive (eager) ", "| second ", "seed 1 ends at"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let json = stdout(&run(&["simulate", "world", file, "--seed", "4,5", "--json"]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["runs"][1]["seed"], 5, "{json}");
    assert!(json["runs"][1]["devices"][0]["busy_s"].as_f64() > Some(1.0), "{json}");
    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("bad.toml");
    std::fs::write(&bad, "title = \"bad\"\nspan_ms = \"long\"\n").unwrap();
    refuses(&["simulate", "world", bad.to_str().unwrap()], "bad.toml:2:11: ");
    refuses(&["simulate", "world", file, "--seed=4,4"], "the seed 4 is there twice");
    refuses(&["simulate", "world", "/nonexistent.toml"], "cannot read /nonexistent.toml");
}

#[test]
fn figures_are_listed_and_made() {
    let listed = stdout(&run(&["simulate", "figure"]));
    assert!(listed.contains("dvabatch-14") && listed.contains("e2bird-14"), "{listed}");
    let output = run(&["simulate", "figure", "e2bird-table-1"]);
    assert!(stdout(&output).contains("resnet152"), "{}", stderr(&output));
}

/// No load, and too few requests to tell, are answers of their own.
#[test]
fn where_there_is_no_capacity_it_is_said_why() {
    let model = ["simulate", "capacity", "--model=m,1,2,10", "--devices=8", "--d-reply-us=20000", "--warm-up=0"];
    let output = run(&[&model[..], &["--span=0.2"]].concat());
    let text = stdout(&output);
    assert!(output.status.success() && text.contains("deferred: no load is held down to "), "{text}");
    assert!(text.contains(" r/s; at less fewer than 100 requests come in a run, which cannot tell 1%"), "{text}");
    assert!(!text.contains("busy"), "of no run there is nothing to say: {text}");
    let text = stdout(&run(&[&model[..], &["--span=0.2", "--requests-per-model=200"]].concat()));
    assert!(text.contains("deferred: no load is held, not even "), "{text}");
}

#[test]
fn auto_on_random_workloads() {
    let output = run(&["simulate", "auto", "--seed=1", "--only=4", "--span=6", "--warm-up=1", "--quiet"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(text.starts_with("workload 4: 1 models on 1 devices of 32 units"), "{text}");
    assert!(text.contains("| exclusive ") && text.contains("| auto, rehearsed "), "{text}");
    let output = run(&["simulate", "auto", "--span=6", "--warm-up=6"]);
    assert!(!output.status.success() && stderr(&output).contains("--warm-up is 6"), "{}", stderr(&output));
}

#[test]
fn a_policy_on_random_workloads() {
    let quick = [
        "simulate",
        "random",
        "--span=0.05",
        "--warm-up=0",
        "--precision=20",
        "--requests=400",
        "--policy=eager+head",
        "--others=eager",
    ];
    let folder = tempfile::tempdir().unwrap();
    let page = format!("--html={}", folder.path().join("random.html").display());
    let output = run(&[&quick[..], &["--workloads=2", "--seed=4", &page]].concat());
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(text.contains("| workload |") && text.contains("on 2 workloads: least "), "{text}");
    assert!(stderr(&output).contains("workload 2: "), "each is named when it is done: {}", stderr(&output));
    let json = |more: &[&'static str]| -> serde_json::Value {
        let output = run(&[&quick[..], &["--seed=4", "--quiet", "--json"], more].concat());
        assert_eq!(stderr(&output), "");
        serde_json::from_str(&stdout(&output)).unwrap()
    };
    let (both, second) = (json(&["--workloads=2"]), json(&["--only=2"]));
    assert_eq!(both["workloads"][1], second["workloads"][0], "a workload is the same alone");
    let alone = stdout(&run(&[&quick[..], &["--seed=4", "--only=2"]].concat()));
    assert!(alone.contains("| eager+head ") && alone.contains("| eager "), "a line for each policy: {alone}");
    refuses(&[&quick[..], &["--only=0"]].concat(), "0 is not in 1..");
    refuses(&[&quick[..], &["--arrivals-seed=1,1"]].concat(), "the seed 1 is there twice");
    refuses(&["simulate", "random", "--requests", "-1"], "--requests is -1; it has to be from 0");
}
