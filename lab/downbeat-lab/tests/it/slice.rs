//! `downbeat-lab slice` and `pairs`, on the embedded engine and the driver's stand-in.

use std::process::{Command, Output};

use crate::commands::{run, stderr, stdout};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models");

fn on_rten(command: &str, arguments: &[&str]) -> Output {
    run(&[&[command, "--repository", EXAMPLES, "--engine", "rten", "--threads", "1"], arguments].concat())
}

fn slice(arguments: &[&str]) -> Output {
    on_rten("slice", arguments)
}

fn pairs(arguments: &[&str]) -> Output {
    on_rten("pairs", &[arguments, &["--budget", "0"]].concat())
}

fn refuses(output: &Output, code: i32, expected: &str) {
    let said = stderr(output);
    assert!(said.contains(expected) && !said.contains("panicked"), "{said}");
    assert_eq!(output.status.code(), Some(code), "{said}");
}

#[test]
fn the_cut_is_shown_as_a_table_a_page_and_json() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("s.html");
    let output = slice(&["encoder", "--stages", "3", "--html", page.to_str().unwrap()]);
    let table = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{table}{}", stderr(&output));
    assert!(table.starts_with("encoder: 3 segments, rten "), "{table}");
    let last = table.lines().last().unwrap_or_default();
    assert!(last.starts_with("all segments ") && last.ends_with(" times as long"), "{table}");
    assert!(table.contains("with a static plan"), "{table}");
    let live: Vec<&str> = table.lines().filter(|line| line.trim_start().starts_with("live: ")).collect();
    assert_eq!(live.len(), 3, "{table}");
    let rows = table.lines().take_while(|line| !line.starts_with("memory"));
    assert!(rows.clone().all(|line| line.chars().count() <= 120), "{table}");
    let page = std::fs::read_to_string(page).unwrap();
    assert_eq!(page.matches("<svg").count(), 2, "two plots");

    let output = slice(&["encoder", "--at", "hidden", "--json", "--batch", "2"]);
    let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(report["segments"].as_array().unwrap().len(), 2);
    let live = report["segments"][0]["live"].as_array().unwrap();
    assert!(live.iter().any(|l| l["name"] == "hidden" && l["dims"] == serde_json::json!([-1, -1, 64])), "{live:?}");
}

#[test]
fn what_cannot_be_cut_is_named() {
    refuses(&slice(&["encoder"]), 2, "--stages <N>");
    refuses(&slice(&["encoder", "--stages", "2", "--at", "hidden"]), 2, "cannot be used with");
    refuses(&slice(&["encoder", "--stages", "1000"]), 1, "Ask for at most");
    refuses(&slice(&["encoder", "--at", "hiden"]), 1, "The nearest is 'hidden'");
    refuses(&slice(&["nothing", "--stages", "2"]), 1, "no model 'nothing' in");
}

/// Abacus figure 3, on the CPU.
#[test]
fn two_models_are_measured_alone_and_at_the_same_time() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (json, page) = (file("p.json"), file("p.html"));
    let output = pairs(&["digits", "mlp", "--batch", "1,4", "--other-batch", "2", "--json", &json, "--html", &page]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("digits (A) beside mlp (B), both on the whole device: rten"), "{output:?}");
    let measured: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let pairs = measured["pairs"].as_array().unwrap();
    let batches: Vec<String> = pairs.iter().map(|pair| pair["batches"].to_string()).collect();
    assert_eq!(batches, ["[1,2]", "[4,2]"]);
    assert_eq!((&measured["on"]["engine"], &measured["on"]["device"]), (&"rten".into(), &"cpu".into()));
    for pair in pairs {
        for latencies in [&pair["alone"], &pair["together"]].into_iter().flat_map(|of| of.as_array().unwrap()) {
            assert!(latencies["runs"].as_u64().unwrap() >= 2 && latencies["median_ns"].as_u64().unwrap() > 0, "{pair}");
        }
    }
    assert!(std::fs::read_to_string(page).unwrap().contains("Both models together, compared with one after the other"));
}

/// Times on the stand-in mean nothing.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_pair_can_have_partitions_of_a_gpu() {
    let on_stand_in = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_downbeat-lab"));
        command.args(["pairs", "mlp", "digits", "--repository", EXAMPLES, "--engine", "cuda", "--budget", "0"]);
        let others = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        let libraries = format!("{}:{others}", cuda_stand_in::folder().unwrap().display());
        command.env("LD_LIBRARY_PATH", libraries);
        command.env("CUDA_STAND_IN_MULTIPROCESSORS", "20").env("CUDA_STAND_IN_READABLE", "1");
        command.args(more).output().unwrap()
    };
    let output = on_stand_in(&["--batch", "1", "--other-batch", "1", "--split", "8"]);
    assert!(stdout(&output).contains("on 8 and 12 compute units of their own"), "{output:?}");
    refuses(&on_stand_in(&["--split", "20"]), 1, "--split 20: the GPU has 20 compute units in steps of ");
}

#[test]
fn pairs_that_cannot_be_measured_are_named() {
    let no_parts = "the engine rten cannot divide its device (cpu); only NVIDIA GPUs (--engine cuda)";
    refuses(&pairs(&["digits", "mlp", "--split", "8"]), 1, no_parts);
    refuses(&pairs(&["digits", "nobody"]), 1, "no model 'nobody' in");
    refuses(&pairs(&["digits", "mlp", "--other-batch", "9999"]), 2, "'9999' is not a batch size");
}
