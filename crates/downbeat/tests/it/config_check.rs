//! `downbeat config check`.

use std::fs;

use crate::command_line::{run, stderr, stdout};

#[test]
fn the_examples_are_in_order() {
    let output = run(&["config", "check", concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models"), "--strict"]);
    let said = stdout(&output);
    for model in ["digits", "encoder", "mlp"] {
        assert!(said.contains(&format!("{model} 1: rows of a batch: independent: the model's graph keeps")), "{said}");
    }
    assert!(said.ends_with("\n3 models, 0 in error, 0 warnings\n"), "{said}");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn everything_that_is_wrong_is_said_and_the_status_tells() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models/mlp/1/model.onnx");
    for (name, config) in [
        ("typo", "max_batchsize: 8"),
        ("gpu", "instance_group { kind: KIND_GPU }"),
        ("passed_over", "metric_tags { key: \"a\" value: \"b\" }"),
        ("mismatch", "input { name: \"nope\" }"),
    ] {
        fs::create_dir_all(root.join(name).join("1")).unwrap();
        fs::copy(example, root.join(name).join("1/model.onnx")).unwrap();
        fs::write(root.join(name).join("config.pbtxt"), config).unwrap();
    }
    fs::create_dir_all(root.join("emulated/1")).unwrap();
    fs::write(root.join("emulated/1/model.emulated.toml"), "latency_ms = [1.0]\nlatncy = 2\n").unwrap();
    let output = run(&["config", "check", root.to_str().unwrap()]);
    let said = stdout(&output).replace(root.to_str().unwrap(), "REPO");
    assert!(said.contains("error: REPO/gpu/config.pbtxt:1:18: instance_group[0].kind: is KIND_GPU"), "{said}");
    assert!(said.contains("warning: REPO/passed_over/config.pbtxt:1:1: metric_tags"), "{said}");
    assert!(
        said.contains("error: REPO/mismatch/config.pbtxt:1:9: input[0].name: the model has no input 'nope'"),
        "{said}"
    );
    assert!(said.contains("error: REPO/typo/config.pbtxt:1:1: max_batchsize: ModelConfig has no field"), "{said}");
    assert!(said.ends_with("5 models, 4 in error, 1 warning\n"), "{said}");
    assert_eq!(output.status.code(), Some(1));

    fs::remove_dir_all(root.join("typo")).unwrap();
    fs::remove_dir_all(root.join("mismatch")).unwrap();
    fs::remove_dir_all(root.join("emulated")).unwrap();
    let output = run(&["config", "check", root.to_str().unwrap(), "--engine", "rten", "--cuda-missing", "cpu"]);
    let said = stdout(&output).replace(root.to_str().unwrap(), "REPO");
    assert!(said.contains("warning: REPO/gpu/config.pbtxt:1:18: instance_group[0].kind: is KIND_GPU"), "{said}");
    assert!(said.ends_with("2 models, 0 in error, 2 warnings\n"), "{said}");
    fs::remove_dir_all(root.join("gpu")).unwrap();
    assert_eq!(run(&["config", "check", root.to_str().unwrap()]).status.code(), Some(0));
    assert_eq!(run(&["config", "check", root.to_str().unwrap(), "--strict"]).status.code(), Some(1));
}

#[test]
fn where_models_are_is_said_and_checked() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("models");
    for name in ["a", "b"] {
        fs::create_dir_all(root.join(name).join("1")).unwrap();
        fs::write(root.join(name).join("1/model.emulated.toml"), "alpha_ms = 0.0\nbeta_ms = 1.0\nmax_batch = 4\n[[inputs]]\nname = \"x\"\ndatatype = \"FP32\"\ndims = [-1, 1]\n[[outputs]]\nname = \"y\"\ndatatype = \"FP32\"\ndims = [-1, 1]\n").unwrap();
    }
    let check = |files: &[&str]| {
        let arguments = [&["config", "check", root.to_str().unwrap(), "--engine", "emulated"], files].concat();
        let output = run(&arguments);
        (stdout(&output), stderr(&output))
    };
    let config = folder.path().join("downbeat.toml");
    fs::write(&config, "devices = 2\n[placement]\na = [1]\nb = [0, 1]\n").unwrap();
    let config = ["--config", config.to_str().unwrap()];
    let (said, _) = check(&config);
    assert!(said.contains("a: on device 1\n") && said.contains("b: on device 0, 1\n"), "{said}");
    let plan = folder.path().join("plan.json");
    let plan_of = |models: &str| {
        let text = format!("{{\"sub_clusters\": [{{\"index\": 0, \"models\": [{models}], \"devices_needed\": 0.2}}]}}");
        fs::write(&plan, text).unwrap();
        check(&[&config[..], &["--plan", plan.to_str().unwrap()]].concat())
    };
    let (said, _) = plan_of("\"a\"");
    assert!(said.contains("a: on device 0, 1\n") && said.contains("b: on device 0, 1\n"), "{said}");
    let (_, error) = plan_of("\"a\", \"other\"");
    assert!(error.contains("--plan: the repository ") && error.contains("has no model 'other'"), "{error}");
    fs::write(&plan, "{}").unwrap();
    let (_, error) = check(&["--plan", plan.to_str().unwrap()]);
    assert!(error.contains("is not a plan that `downbeat plan --json` printed"), "{error}");
}

/// The name of a folder neither forges a line nor commands the terminal.
#[test]
fn names_of_models_stay_on_their_line() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("a\nerror: forged\x1b[31m\r/1")).unwrap();
    let said = stdout(&run(&["config", "check", folder.path().to_str().unwrap(), "--engine", "emulated"]));
    assert!(said.contains("a\\nerror: forged\\u{1b}[31m\\r"), "{said}");
    assert!(!said.lines().any(|line| line.starts_with("error: forged")) && !said.contains('\x1b'), "{said}");
}

#[test]
fn a_missing_repository_is_named() {
    let output = run(&["config", "check", "/nonexistent"]);
    assert_eq!(stderr(&output), "downbeat: model repository /nonexistent: no such file or folder\n");
    assert_eq!(output.status.code(), Some(1));
}

/// `config check` reports a model that the engine cannot run, so that the server is not the first
/// to tell.
#[test]
fn a_model_that_the_engine_cannot_run_is_in_error() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("odd/1");
    fs::create_dir_all(&model).unwrap();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models/mlp/1/model.onnx");
    let mut bytes = fs::read(example).unwrap();
    let at = bytes.windows(4).position(|name| name == b"Gemm" || name == b"Relu").unwrap();
    bytes[at..at + 4].copy_from_slice(b"Geww");
    fs::write(model.join("model.onnx"), bytes).unwrap();
    let output = run(&["config", "check", folder.path().to_str().unwrap(), "--engine", "rten"]);
    let said = stdout(&output);
    assert!(said.contains("model 'odd': version 1: ") && said.contains("Geww"), "{said}");
    assert!(said.ends_with("1 model, 1 in error, 0 warnings\n"), "{said}");
    assert_eq!(output.status.code(), Some(1));
    let output = run(&["config", "check", folder.path().to_str().unwrap(), "--engine", "rtne"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

/// `config check` also reports partitions that the machine does not have, for the options that the
/// server would have.
#[test]
fn partitions_that_the_server_could_not_have_are_in_error() {
    let folder = tempfile::tempdir().unwrap();
    let repository = folder.path().to_str().unwrap();
    let check = |options: &str, more: &[&str]| {
        fs::write(folder.path().join("downbeat.toml"), options).unwrap();
        run(&[&["config", "check", repository, "--engine", "rten"], more].concat())
    };
    let output = check("[device]\npartitions = ['0-', '1']", &[]);
    let said = stderr(&output);
    assert!(said.contains("[device] partitions: partition 0, \"0-\": '0-' is neither a number nor a range"), "{said}");
    assert_eq!(output.status.code(), Some(1));
    let output = check("[device]\npartitions = ['1023']", &[]);
    assert!(stderr(&output).contains("partition 0, \"1023\": CPU 1023 is not there; there are "), "{output:?}");
    let output = check("[models.m]\npartition = 0", &[]);
    assert!(stderr(&output).contains("[models.m] partition is 0, and the devices are not divided"), "{output:?}");
    let elsewhere = folder.path().join("other.toml");
    fs::write(&elsewhere, "").unwrap();
    let output = check("[models.m]\npartition = 0", &["--config", elsewhere.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

/// In the order of `every_option_that_names_an_unknown_model_says_so`.
#[test]
fn an_option_for_a_model_that_is_not_there_is_in_error() {
    let folder = tempfile::tempdir().unwrap();
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models");
    let file = folder.path().join("downbeat.toml");
    let check = |text: &str, flags: &[&str]| {
        fs::write(&file, text).unwrap();
        let check = ["config", "check", examples, "--engine", "rten", "--config", file.to_str().unwrap()];
        let output = run(&[&check[..], flags].concat());
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        stdout(&output)
    };
    for (text, flags) in [
        ("", &["--slo-ms", "digitz=5"][..]),
        ("", &["--load-model", "digitz", "--model-control-mode", "explicit"]),
        ("[models.digitz]\nthreads = 2", &[]),
        ("[placement]\ndigitz = [0]", &[]),
        ("[[device.groups]]\nmodels = ['digitz']\npolicy = 'windowed'", &[]),
    ] {
        let said = check(text, flags);
        assert!(said.contains("error: ") && said.contains("no model 'digitz'; did you mean 'digits'?"), "{said}");
        assert!(said.ends_with("3 models, 1 in error, 0 warnings\n"), "{said}");
    }
}

#[test]
fn a_model_whose_only_version_is_misnamed_is_in_error() {
    let folder = tempfile::tempdir().unwrap();
    let version = folder.path().join("mlp/01");
    fs::create_dir_all(&version).unwrap();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models/mlp/1/model.onnx");
    fs::copy(example, version.join("model.onnx")).unwrap();
    let output = run(&["config", "check", folder.path().to_str().unwrap(), "--engine", "rten"]);
    let said = stdout(&output);
    assert!(said.contains("01 is not a version: the number begins with 0; rename the folder to 1"), "{said}");
    assert_eq!(output.status.code(), Some(1));
}
