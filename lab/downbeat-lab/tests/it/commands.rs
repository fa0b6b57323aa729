//! The commands of `downbeat-lab`, as they are called.

use std::path::Path;
use std::process::{Command, Output};

use downbeat::profile::group_samples::{GroupSamples, MeasuredGroup, SampledOn};
use downbeat::profile::share_report::{MeasuredOn, ShareReport};
use downbeat_core::device::SegmentRange;
use downbeat_core::device::overlap::GroupPart;
use downbeat_core::{ModelId, RequestId};
use downbeat_host::groups::stored_predictor::PredictedModel;
use downbeat_lab::pair_report::PairReport;
use downbeat_models::measure::pair_profiler::{Latencies, PairMeasurement};
use downbeat_models::measure::share_profiler::ShareMeasurement;

pub fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_downbeat-lab"));
    command.args(arguments).output().unwrap()
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn refuses(arguments: &[&str], expected: &str) {
    let output = run(arguments);
    let said = stderr(&output);
    assert!(said.contains(expected) && !said.contains("panicked"), "{arguments:?}: {said}");
    assert!(!output.status.success(), "{arguments:?}");
}

#[test]
fn capacities_of_published_systems_stand_beside_ours() {
    let model = ["capacity", "--model=ResNet50,1.053,5.072,25", "--devices=1", "--span=3", "--warm-up=0.2"];
    let output = run(&[&model[..], &["--precision=5", "--policy=deferred,shepherd,nexus,clockwork"]].concat());
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    for expected in ["| deferred ", "| shepherd ", "| nexus ", "| clockwork "] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn an_experiment_file_as_a_table_and_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../experiments/figure_4.toml");
    let output = run(&["experiment", file, "--html", page.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("(Symphony section 3.3, figure 4)"), "{}", stdout(&output));
    let page = std::fs::read_to_string(page).unwrap();
    assert!(
        page.starts_with("<!doctype html>") && page.contains("class=\"batch") && !page.contains("<script"),
        "{page}"
    );
}

#[test]
fn a_device_policy_with_a_timeline() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("timeline.html");
    let model = ["device", "--model=bertbase", "--requests=60", "--rate=200"];
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
    let device = |more: &[&'static str]| [&["device"], more].concat();
    refuses(&device(&["--model=lenet", "--policy=no-wait", "--rate=1"]), "there are resnet50, resnet101");
    refuses(&device(&["--model=vgg16", "--policy=best", "--rate=1"]), "there are no-wait, opt-wait");
    refuses(&device(&["--model=vgg16", "--policy=no-wait"]), "--rate");
    refuses(&device(&["--model=vgg16", "--policy=no-wait", "--rate=-1"]), "positive");
    refuses(&device(&["--model=vgg16", "--policy=dvabatch", "--rate=1", "--stages=500"]), "can be cut into 1 to");
    refuses(&device(&["--model=vgg16", "--policy=no-wait", "--rate=1", "--platform=tpu"]), "titan-cudnn");
    refuses(&device(&["--model=vgg16", "--policy=no-wait", "--rate=1", "--qos-ms=0"]), "--qos-ms");
    let overhead = ["--model=vgg16", "--policy=no-wait", "--rate=1", "--batch-overhead-ms=-1"];
    refuses(&device(&overhead), "--batch-overhead-ms is -1; it has to be from 0");
    refuses(&["figure", "e2bird-99"], "e2bird-table-1");
}

/// Prints a world of the repository as tables and as JSON, and rejects a file that is no world.
#[test]
fn a_world_from_a_file() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../experiments/worlds/three_models_two_devices.toml");
    let output = run(&["world", file]);
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    for expected in ["| model ", "| windowed-2 | windowed ", "| exclusive (eager) ", "| second ", "seed 1 ends at"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let json = stdout(&run(&["world", file, "--seed", "4,5", "--json"]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["runs"][1]["seed"], 5, "{json}");
    assert!(json["runs"][1]["devices"][0]["busy_s"].as_f64() > Some(1.0), "{json}");
    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("bad.toml");
    std::fs::write(&bad, "title = \"bad\"\nspan_ms = \"long\"\n").unwrap();
    refuses(&["world", bad.to_str().unwrap()], "bad.toml:2:11: ");
    refuses(&["world", file, "--seed=4,4"], "the seed 4 is given twice");
    refuses(&["world", "/nonexistent.toml"], "cannot read /nonexistent.toml");
}

#[test]
fn figures_are_listed_and_made() {
    let listed = stdout(&run(&["figure"]));
    assert!(listed.contains("dvabatch-14") && listed.contains("e2bird-14"), "{listed}");
    let output = run(&["figure", "e2bird-table-1"]);
    assert!(stdout(&output).contains("resnet152"), "{}", stderr(&output));
}

#[test]
fn auto_on_random_workloads() {
    let output = run(&["auto", "--seed=1", "--only=4", "--span=6", "--warm-up=1", "--quiet"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(text.starts_with("workload 4: 1 models on 1 devices of 32 units"), "{text}");
    assert!(text.contains("| exclusive ") && text.contains("| auto "), "{text}");
    let output = run(&["auto", "--span=6", "--warm-up=6"]);
    assert!(!output.status.success() && stderr(&output).contains("--warm-up is 6"), "{}", stderr(&output));
}

#[test]
fn a_policy_on_random_workloads() {
    let quick = [
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
    refuses(&[&quick[..], &["--arrivals-seed=1,1"]].concat(), "the seed 1 is given twice");
    refuses(&["random", "--requests", "-1"], "--requests is -1; it has to be from 0");
}

/// A report as `downbeat profile MODEL --segments 2 --json FILE` writes it, into a file.
fn measured(folder: &Path, model: &str, device: &str) -> String {
    let measurement = |batch: u32| {
        let segments_ns = vec![u64::from(batch) * 100_000 + 50_000, u64::from(batch) * 200_000];
        let ns = segments_ns.iter().sum();
        let (median_ns, p95_ns, host_ns) = (ns, ns, ns);
        ShareMeasurement { units: None, batch, runs: 3, median_ns, p95_ns, segments_ns, host_ns, by_device: false }
    };
    let report = ShareReport {
        model: model.to_owned(),
        version: 1,
        on: on(device),
        item_bytes: [4, 4],
        conditions: "rten 1 on cpu, 1 thread a run".to_owned(),
        device: None,
        segments: vec!["a".to_owned(), "b".to_owned()],
        knees: Vec::new(),
        measurements: [1, 8].map(measurement).to_vec(),
    };
    let file = folder.join(format!("{model}-{device}.json"));
    std::fs::write(&file, serde_json::to_string(&report).unwrap()).unwrap();
    file.to_str().unwrap().to_owned()
}

fn on(device: &str) -> MeasuredOn {
    MeasuredOn { engine: "rten".to_owned(), device: device.to_owned(), threads: 1 }
}

/// A report as `downbeat-lab pairs MODEL OTHER --json FILE` writes it, into a file.
fn pair(folder: &Path, models: [&str; 2]) -> String {
    let of = |ms: u64| Latencies { runs: 3, p5_ns: ms * 1_000_000, median_ns: ms * 1_000_000, p95_ns: ms * 1_000_000 };
    let report = PairReport {
        models: models.map(str::to_owned),
        on: on("cpu"),
        conditions: "rten".to_owned(),
        device: None,
        split: None,
        pairs: vec![PairMeasurement {
            batches: [1, 1],
            alone: [of(2), of(3)],
            alone_in_partition: None,
            together: [of(3), of(4)],
            by_device: false,
        }],
    };
    let file = folder.join("pair.json");
    std::fs::write(&file, serde_json::to_string(&report).unwrap()).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn reports_become_a_calibration_that_is_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("device.toml").to_str().unwrap().to_owned();
    let [digits, mlp] = ["digits", "mlp"].map(|model| measured(folder.path(), model, "cpu"));
    let pair = pair(folder.path(), ["digits", "mlp"]);
    let output = run(&["calibrate", &digits, &mlp, &pair, "--to", &file]);
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(
        text.contains("mlp: 2 segments, off by at most ") && text.contains("pairs: slowdowns are off by "),
        "{text}"
    );
    let simulated = ["device", "--calibration", &file, "--policy", "no-wait", "--rate", "5"];
    let output = run(&[&simulated[..], &["--model", "mlp", "--requests", "50"]].concat());
    assert!(stdout(&output).starts_with("mlp with no-wait at 5.0/s on cpu\n"), "{output:?}");
    refuses(&[&simulated[..], &["--model", "vgg16"]].concat(), "it has no model 'vgg16'; there is: digits, mlp");
}

#[test]
fn reports_that_do_not_belong_together_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("device.toml").to_str().unwrap().to_owned();
    let [digits, other] = ["cpu", "gpu"].map(|device| measured(folder.path(), "digits", device));
    refuses(&["calibrate", &digits, &other, "--to", &file], "digits-gpu.json: it is of cpu with ");
    let pair = pair(folder.path(), ["digits", "mlp"]);
    refuses(&["calibrate", &digits, &pair, "--to", &file], "it has a pair with 'mlp', which no report measures");
    refuses(&["calibrate", "Cargo.toml", "--to", &file], "Cargo.toml: no report of `downbeat profile`");
    refuses(&["calibrate", "/none.json", "--to", &file], "cannot read /none.json");
    assert!(!Path::new(&file).exists(), "nothing is written of reports that are refused");
}

#[test]
fn predictors_are_compared_on_groups_of_real_models() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("samples");
    let model = |name: &str| PredictedModel {
        name: name.to_owned(),
        version: 1,
        file: "f".to_owned(),
        segments: 2,
        cuts: Vec::new(),
        most_rows: 8,
        longest: 0,
    };
    let on = SampledOn::new("cpu".to_owned(), 1, vec![model("a"), model("b")]);
    let mut writer = GroupSamples::open(&path, None, &on).unwrap();
    for index in 0..60u32 {
        let part = |model: u32| GroupPart {
            request: RequestId(u64::from(model)),
            model: ModelId(model),
            operators: SegmentRange::new(0, 2),
            rows: 1 + index % 8,
            length: 0,
        };
        let group: Vec<GroupPart> = if index % 2 == 0 { vec![part(0)] } else { vec![part(0), part(1)] };
        let takes_ns = 1_000_000 * u64::from(1 + index % 8) * group.len() as u64;
        writer.add(&MeasuredGroup { group, takes_ns }).unwrap();
    }
    let text = stdout(&run(&["predictors", path.to_str().unwrap(), "--epochs=60"]));
    for expected in [
        "| a      |",
        "| a + b  |",
        "| all    |",
        "MLP, %",
        "linear, %",
        "SVM, %",
        "The median of equal groups is 0.0% off",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    refuses(&["predictors", "/none"], "/none: there is no such file");
}

#[test]
fn the_scheduler_alone_is_measured() {
    let quick = ["scheduler", "--models", "1", "--devices", "1", "--seconds", "0.01"];
    let output = run(&quick);
    assert!(output.status.success() && stdout(&output).lines().count() > 3, "{output:?}");
    let json = stdout(&run(&[&quick[..], &["--json"]].concat()));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(json["allocations_per_request"].is_number(), "the program counts them: {json}");
    refuses(&["scheduler", "--threads", "2", "--models", "1"], "--threads: at most one a model, of which there are 1");
}
