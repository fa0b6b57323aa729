//! `downbeat slice`, on the embedded engine.

use crate::command_line::{run, stderr, stdout};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models");

fn slice(arguments: &[&str]) -> std::process::Output {
    let mut all = vec!["slice", "--repository", EXAMPLES, "--engine", "rten", "--threads", "1"];
    all.extend(arguments);
    run(&all)
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
    let rows = table.lines().take_while(|line| !line.starts_with("memory for the activations"));
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
    let refuses = |arguments: &[&str], code: i32, expected: &str| {
        let output = slice(arguments);
        let said = stderr(&output);
        assert!(said.contains(expected), "{arguments:?}: {said}");
        assert_eq!(output.status.code(), Some(code), "{said}");
    };
    refuses(&["encoder"], 2, "--stages <N>");
    refuses(&["encoder", "--stages", "2", "--at", "hidden"], 2, "cannot be used with");
    refuses(&["encoder", "--stages", "1000"], 1, "Ask for at most");
    refuses(&["encoder", "--at", "hiden"], 1, "The nearest is 'hidden'");
    refuses(&["nothing", "--stages", "2"], 1, "no model 'nothing' in");
}
