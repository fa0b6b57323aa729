//! `downbeat profile`, on the embedded engine and the emulated one.

use std::fs;

use crate::command_line::{run, stderr, stdout};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models");

fn profile(arguments: &[&str]) -> std::process::Output {
    let mut all = vec!["profile", "--repository", EXAMPLES, "--engine", "rten", "--budget", "0"];
    all.extend(arguments);
    run(&all)
}

#[test]
fn a_model_is_measured_and_its_profile_can_be_served_by_the_emulated_engine() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir_all(folder.path().join("models/copy/1")).unwrap();
    let emulated = file("models/copy/1/model.emulated.toml");
    let output = profile(&["digits", "--batch", "1..3", "--json", &file("p.json"), "--emulated", &emulated]);
    let table = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{table}{}", stderr(&output));
    assert!(table.starts_with("digits version 1: rten "), "{table}");
    assert!(table.contains('█') && table.contains("l(b) = "), "{table}");

    let json: serde_json::Value = serde_json::from_slice(&fs::read(file("p.json")).unwrap()).unwrap();
    let batches: Vec<u64> =
        json["measurements"].as_array().unwrap().iter().map(|m| m["batch"].as_u64().unwrap()).collect();
    assert_eq!(batches, [1, 2, 3]);
    assert_eq!(json["engine"], "rten");

    let output = run(&["profile", "copy", "--repository", &file("models"), "--batch", "1", "--budget", "0"]);
    assert!(stdout(&output).starts_with("copy version 1: emulated "), "{}{}", stdout(&output), stderr(&output));
    assert_eq!(output.status.code(), Some(0));
}

/// E²bird §7.3.2: all mixes of lanes for a load are run, and the best is kept for the server.
#[test]
fn mixes_of_lanes_are_measured_and_the_best_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (mixes, json, page) = (file("mixes.toml"), file("m.json"), file("m.html"));
    let output = profile(&["mlp", "--worker-mix", "2,4", "--mixes", &mixes, "--json", &json, "--html", &page]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let measured: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let of = |load: usize| measured["loads"][load][1].as_array().unwrap().len();
    assert_eq!((of(0), of(1)), (2, 4), "2 = 1+1; 4 = 2+2 = 2+1+1 = 1+1+1+1");
    let best = fs::read_to_string(mixes).unwrap();
    for line in best.lines().skip(2) {
        let (load, mix) = line.split_once(" = ").unwrap();
        let sizes = mix.trim_matches('"').split(',').map(|size| size.parse::<u32>().unwrap());
        assert_eq!(sizes.sum::<u32>(), load.parse::<u32>().unwrap(), "{best}");
    }
    assert!(fs::read_to_string(page).unwrap().contains("lanes of each size"));
}

#[test]
fn what_cannot_be_measured_is_named() {
    let refuses = |arguments: &[&str], code: i32, expected: &str| {
        let output = profile(arguments);
        let said = stderr(&output);
        assert!(said.contains(expected), "{arguments:?}: {said}");
        assert_eq!(output.status.code(), Some(code), "{said}");
    };
    refuses(&["digitz"], 1, "no model 'digitz' in");
    refuses(&["digits", "--batch", "100"], 1, "'digits' takes batches of up to 64 (max_batch_size), 100 is asked for");
    refuses(&["digits", "--batch", "4..1"], 2, "'4..1' is empty; write the smaller size first");
    refuses(&["digits", "--worker-mix", "65"], 1, "65 items are too many: up to 64 lanes can be measured at once");
    refuses(&["digits", "--mixes", "m.toml"], 2, "--worker-mix");
    refuses(&["digits", "--model-version", "9"], 1, "'digits' has no version 9 that is served (there is: 1)");
    refuses(
        &["digits", "--json", "/nonexistent/p.json", "--batch", "1"],
        1,
        "cannot write /nonexistent/p.json: No such file",
    );
}
