//! `downbeat profile`, on the embedded engine and the emulated engine.

use std::fs;
use std::path::Path;

use downbeat_host::groups::stored_predictor::StoredPredictor;
use downbeat_models::measure::profile_store::{ProfileStore, StoredShares};

use crate::command_line::{downbeat, library_path, run, stderr, stdout};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models");

fn profile(arguments: &[&str]) -> std::process::Output {
    let mut all = vec!["profile", "--repository", EXAMPLES, "--engine", "rten", "--budget", "0"];
    all.extend(arguments);
    run(&all)
}

#[test]
fn the_emulated_engine_serves_a_measured_profile() {
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

#[test]
fn the_repository_is_that_of_the_options_file() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("downbeat.toml"), format!("repository = {EXAMPLES:?}\n")).unwrap();
    let profile = ["profile", "digits", "--engine", "rten", "--budget", "0", "--batch", "1"];
    let output = downbeat(&profile).current_dir(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

/// E²bird §7.3.2: the command runs all mixes of lanes for a load, and keeps the best for the
/// server.
#[test]
fn mixes_of_lanes_are_measured_and_the_best_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (mixes, json, page) = (file("mixes.toml"), file("m.json"), file("m.html"));
    let output = profile(&["mlp", "--lane-mix", "2,4", "--mixes", &mixes, "--json", &json, "--html", &page]);
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
    assert!(fs::read_to_string(page).unwrap().contains("the fastest and the slowest mixes"));
}

#[test]
fn segments_are_measured_by_batch() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (json, page) = (file("s.json"), file("s.html"));
    let output = profile(&["digits", "--segments", "2", "--batch", "1,8", "--json", &json, "--html", &page]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let table = stdout(&output);
    assert!(table.contains("median and p95 are by the host's clock") && table.contains("batch 8"), "{table}");
    assert!(!table.contains("knee"), "{table}");
    let measured: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let measurements = measured["measurements"].as_array().unwrap();
    assert_eq!((measurements.len(), measured["segments"].as_array().unwrap().len()), (2, 2));
    for m in measurements {
        let segments: Vec<u64> = m["segments_ns"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        assert!(segments.len() == 2 && segments.iter().all(|ns| *ns > 0), "{m}");
    }
    assert!(fs::read_to_string(page).unwrap().contains("<h2>Segments, median ms on the largest share</h2>"));
}

/// The command on the stand-in of the driver, with an onnxruntime library. Times on the stand-in
/// mean nothing.
fn on_stand_in(arguments: &[&str]) -> std::process::Output {
    let mut all = vec!["profile", "--repository", EXAMPLES, "--engine", "cuda", "--budget", "0"];
    all.extend(arguments);
    let mut command = downbeat(&all);
    command.env("LD_LIBRARY_PATH", library_path(&cuda_stand_in::folder().unwrap()));
    command.env("CUDA_STAND_IN_MULTIPROCESSORS", "20").env("CUDA_STAND_IN_READABLE", "1");
    command.output().unwrap()
}

/// GSLICE figures 2 and 3: their axes.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn shares_of_a_gpu_are_measured_up_to_the_whole() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (json, page) = (file("s.json"), file("s.html"));
    let arguments = ["mlp", "--shares", "--segments", "2", "--batch", "1,4", "--json", &json, "--html", &page];
    let output = on_stand_in(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let table = stdout(&output);
    assert!(table.contains("20 compute units, divisible in steps of ") && table.contains("knee for a batch of 4: "));
    assert!(table.contains("by the device's clock"), "{table}");
    let measured: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let of_device = |what: &str| measured["device"][what].as_u64().unwrap();
    let (grain, largest) = (of_device("grain"), of_device("largest_part"));
    let units: Vec<u64> =
        measured["measurements"].as_array().unwrap().iter().map(|m| m["units"].as_u64().unwrap()).collect();
    let shares = (1..).map(|n| n * grain).take_while(|units| *units <= largest).chain([20]);
    assert_eq!(units, shares.flat_map(|units| [units, units]).collect::<Vec<_>>());
    assert!(fs::read_to_string(page).unwrap().contains("Latency by share of the device"));
}

#[test]
fn shares_of_an_emulated_device_are_hundredths_and_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (model, kept) = (folder.path().join("models/m/1"), folder.path().join("kept"));
    fs::create_dir_all(&model).unwrap();
    let tensor = "name = \"x\"\ndatatype = \"FP32\"\ndims = [-1, 1]\n";
    let profile = "alpha_ms = 0.1\nbeta_ms = 0.1\nmax_batch = 4\nknee = 0.5\n";
    let text = format!("{profile}[[inputs]]\n{tensor}[[outputs]]\n{tensor}");
    fs::write(model.join("model.emulated.toml"), text).unwrap();
    let repository = folder.path().join("models");
    let arguments = ["m", "--budget", "0", "--batch", "1,4", "--repository", repository.to_str().unwrap()];
    let of = |more: &[&str]| {
        let kept = ["--profile-cache", kept.to_str().unwrap(), "--json"];
        let output = run(&[&["profile"][..], &arguments, more, &kept].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let mut units: Vec<u64> =
            report["measurements"].as_array().unwrap().iter().map(|m| m["units"].as_u64().unwrap()).collect();
        units.dedup();
        units
    };
    assert_eq!(of(&["--shares", "3"]), [30, 60, 100]);
    assert_eq!(of(&["--segments", "2"]), [100]);
    let store = ProfileStore::new(Some(kept.clone()));
    let stored: Vec<StoredShares> = store.list().unwrap();
    assert_eq!(stored.len(), 1);
    assert_eq!(stored[0].measurements.len(), 6, "batches of 1 and 4 on three shares: what was cut does not count");
}

/// Abacus §5, on the CPU. `mlp` can be cut at two of its operators.
#[test]
fn sampling_of_groups_goes_on_in_its_file_and_trains_a_predictor() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (samples, predictor, json, page) = (file("samples"), file("predictor"), file("p.json"), file("p.html"));
    let co_run = |other: &str, more: &[&str]| {
        profile(
            &[&["mlp", "--co-run", other, "--at-once", "2", "--samples", &samples, "--batch", "1,4"], more].concat(),
        )
    };
    let output = co_run("digits", &["--predictor", &predictor, "--json", &json, "--html", &page]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let of_both = stdout(&output);
    assert!(of_both.contains("Trained with 48 groups, tested with 12 others"), "{of_both}");
    let report: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let sets: Vec<String> = report["sets"].as_array().unwrap().iter().map(|set| set["models"].to_string()).collect();
    assert_eq!(sets, ["[\"mlp\"]", "[\"digits\"]", "[\"mlp\",\"digits\"]", "[\"all\"]"]);
    assert!(fs::read_to_string(page).unwrap().contains("Predicted against actual"));
    let stored = StoredPredictor::load(Path::new(&predictor)).unwrap();
    assert_eq!((stored.at_once(), stored.samples, stored.tested), (2, 48, 12));
    assert_eq!(stored.models[0].most_rows, 4);
    let all = fs::read_to_string(&samples).unwrap();
    let some: Vec<&str> = all.lines().take(31).collect();
    fs::write(&samples, some.join("\n") + "\n").unwrap();
    assert_eq!(co_run("digits", &[]).status.code(), Some(0));
    let again = fs::read_to_string(&samples).unwrap();
    assert!(again.starts_with(&some.join("\n")) && again.lines().count() == 61, "{again}");
    let other = co_run("encoder", &[]);
    assert!(
        stderr(&other).contains("has samples of the models mlp, digits, but the command asks for mlp, encoder"),
        "{}",
        stderr(&other)
    );
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
    refuses(
        &["digits", "--batch", "100"],
        1,
        "model 'digits' takes batches of up to 64 (max_batch_size), but the command asks for 100",
    );
    refuses(&["digits", "--batch", "4..1"], 2, "'4..1' is empty; write the smaller size first");
    refuses(&["digits", "--lane-mix", "65"], 1, "65 items are too many: at most 64 lanes can be measured at once");
    refuses(&["digits", "--mixes", "m.toml"], 2, "--lane-mix");
    let no_parts = "the engine rten cannot divide its device (cpu); only NVIDIA GPUs (--engine cuda)";
    refuses(&["digits", "--shares"], 1, no_parts);
    refuses(&["digits", "--co-run", "mlp,digits"], 1, "--co-run: model 'digits' is named twice");
    refuses(&["digits", "--co-run", "nobody"], 1, "no model 'nobody' in");
    refuses(&["digits", "--predictor", "p.json"], 2, "--co-run");
    refuses(
        &["digits", "--model-version", "9"],
        1,
        "model 'digits' has no version 9 that is served; its versions in service: 1",
    );
    refuses(
        &["digits", "--json", "/nonexistent/p.json", "--batch", "1"],
        1,
        "cannot write /nonexistent/p.json: No such file",
    );
}

#[test]
fn what_the_server_has_kept_is_listed_and_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().to_str().unwrap();
    let kept = |what| {
        let output = run(&["profile", what, "--profile-cache", cache]);
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output).replace(cache, "CACHE")
    };
    assert_eq!(kept("--list"), "no profiles in CACHE\n");
    let measured = |batch, ns| format!(r#"{{"batch":{batch},"runs":9,"min_ns":{ns},"median_ns":{ns},"p95_ns":{ns}}}"#);
    let profile = |settled, threads| {
        let measurements = [measured(1, 1_500_000), measured(8, 9_000_000)].join(",");
        format!(
            r#"{{"model":"m/1/model.onnx","engine":"rten","threads":{threads},"settled":{settled},"measurements":[{measurements}]}}"#
        )
    };
    std::fs::write(folder.path().join("a.json"), profile(true, 2)).unwrap();
    std::fs::write(folder.path().join("b.json"), profile(false, 1)).unwrap();
    std::fs::write(folder.path().join("c.json"), "broken").unwrap();
    let line = "m/1/model.onnx  rten";
    assert_eq!(
        kept("--list"),
        format!(
            "{line}  2 threads  batch 1: 1.5 ms  batch 8: 9 ms\n\
             {line}  1 thread  batch 1: 1.5 ms  batch 8: 9 ms  measured beside other work; the server will measure again\n"
        )
    );
    assert_eq!(kept("--clear"), "3 files removed from CACHE\n");
    assert_eq!(kept("--list"), "no profiles in CACHE\n");
}
