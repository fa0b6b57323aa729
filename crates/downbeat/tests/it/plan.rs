//! `downbeat plan`.

use serde_json::Value;

use crate::command_line::{run, stderr, stdout};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/workload.toml");

fn json(arguments: &[&str]) -> Value {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    serde_json::from_str(&stdout(&output)).unwrap()
}

#[test]
fn the_example_gets_a_plan_that_says_what_moves() {
    let output = run(&["plan", EXAMPLE, "--time-limit", "2"]);
    let said = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for expected in ["imbalance, (max - min) / average: requests 0.", "; there are 12 (fluid:", " of at most 6\n"] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    assert!(said.contains("nasnet_large: new -> "), "{said}");
    let plan = json(&["plan", EXAMPLE, "--time-limit", "2", "--json"]);
    let placed: usize =
        plan["sub_clusters"].as_array().unwrap().iter().map(|s| s["models"].as_array().unwrap().len()).sum();
    assert_eq!(placed, 7);
    assert!(plan["disruption"].as_f64().unwrap() <= 6.0);
    assert_eq!(plan["proved"], true, "7 models: every partition is looked at");
    assert_eq!(stderr(&output), "", "no solver is missed");
}

/// A workload of so many models on three sub-clusters.
fn many(models: usize) -> String {
    let model = |i: usize| {
        let (rate, memory) = (1 + i * 37 % 101, 10 + i * 53 % 97);
        format!(
            "[[models]]\nname = 'm{i}'\nrate = {rate}\nmemory_mib = {memory}\nslo_ms = 25\n\
             profile = {{ alpha_ms = 1, beta_ms = 5 }}\n"
        )
    };
    format!("sub_clusters = 3\n{}", (0..models).map(model).collect::<String>())
}

#[test]
fn a_plan_can_be_the_running_assignment_of_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let (workload, plan) = (folder.path().join("workload.toml"), folder.path().join("plan.json"));
    let (workload, plan) = (workload.to_str().unwrap(), plan.to_str().unwrap());
    std::fs::write(workload, many(40)).unwrap();
    let solver = cfg!(feature = "highs");
    let said = stderr(&run(&["plan", workload, "--time-limit", "1"]));
    assert_eq!(said.contains("`cargo build --release --features highs` adds the MILP solver"), !solver, "{said}");
    let first = json(&["plan", workload, "--time-limit", "1", "--json", "--method", "search"]);
    std::fs::write(plan, first.to_string()).unwrap();
    std::fs::write(workload, format!("max_disruption = 0\n{}", many(40))).unwrap();
    let second = json(&["plan", workload, "--time-limit", "1", "--json", "--method", "search", "--running", plan]);
    assert_eq!(first["sub_clusters"], second["sub_clusters"], "no move is allowed");
    assert_eq!((&second["moves"], second["disruption"].as_f64()), (&Value::Array(Vec::new()), Some(0.0)));
}

#[test]
fn what_cannot_be_planned_is_said_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let example = std::fs::read_to_string(EXAMPLE).unwrap();
    let refused = |from: &str, to: &str, more: &[&str]| {
        assert!(example.contains(from), "{from}");
        let path = folder.path().join("w.toml");
        std::fs::write(&path, example.replacen(from, to, 1)).unwrap();
        let output = run(&[&["plan", path.to_str().unwrap(), "--time-limit", "1"], more].concat());
        assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
        stderr(&output)
    };
    assert!(refused("rate = 900", "rte = 900", &[]).contains("w.toml:43:1: unknown field `rte`"), "the place is named");
    let large = refused("memory_mib = 528", "memory_mib = 900", &[]);
    assert!(large.contains("model 'vgg16' fits on no device: the model needs 1.182 GiB"), "{large}");
    assert!(
        refused("max_rate = 4000", "max_rate = 2000", &[]).contains("model 'mobilenet' has 2500 requests/s, 500 more")
    );
    assert!(
        refused("max_disruption = 6", "max_disruption = 0", &[])
            .contains("loading the models that run nowhere yet (1) costs 1, 1 more than")
    );
    assert!(stderr(&run(&["plan"])).contains("<WORKLOAD>"));
    assert!(stderr(&run(&["plan", "/nonexistent.toml"])).contains("cannot read /nonexistent.toml: No such file"));
    if !cfg!(feature = "highs") {
        let output = run(&["plan", EXAMPLE, "--method", "highs"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains("`cargo build --release --features highs` adds the MILP solver HiGHS"));
    }
}
