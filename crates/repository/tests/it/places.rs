//! The places of instances (`instance_group`), on a server with GPUs and on a server without GPUs.

use std::fs;

use downbeat_repository::ModelRepository;

/// The messages about a model with these groups, on a server that runs models on `gpus`.
fn said(groups: &str, gpus: &[u32]) -> Result<Vec<String>, String> {
    said_where(groups, gpus, false)
}

/// The same on a server that lets models for GPUs run on the CPU, if `cpu_for_gpus`.
fn said_where(groups: &str, gpus: &[u32], cpu_for_gpus: bool) -> Result<Vec<String>, String> {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("m/1")).unwrap();
    fs::write(folder.path().join("m/1/model.onnx"), b"").unwrap();
    fs::write(folder.path().join("m/config.pbtxt"), groups).unwrap();
    let repository = ModelRepository::open(folder.path()).unwrap().with_gpus(gpus.to_vec());
    let repository = repository.with_cpu_for_gpus(cpu_for_gpus);
    let definition = repository.definition("m", None).map_err(|e| e.to_string())?;
    Ok(definition.warnings.iter().map(ToString::to_string).collect())
}

#[test]
fn on_the_cpu_instances_on_gpus_are_an_error_unless_they_may_be_elsewhere() {
    let error = said("instance_group { kind: KIND_GPU gpus: [7] }", &[]).unwrap_err();
    assert!(
        error.contains(
            "m/config.pbtxt:1:18: instance_group[0].kind: is KIND_GPU, but this server runs models on the CPU"
        )
    );
    assert!(error.contains("--engine cuda") && error.contains("[placement]"), "{error}");
    assert!(error.contains("--cuda-missing cpu"), "{error}");
    let warnings = said_where("instance_group { kind: KIND_GPU gpus: [7] }", &[], true).unwrap();
    assert!(warnings.len() == 1 && warnings[0].contains("KIND_GPU, but this server has no GPU"), "{warnings:?}");
    said_where("instance_group { kind: KIND_GPU gpus: [7] }", &[0], true).unwrap_err();
    for groups in
        ["instance_group { gpus: [0] }", "instance_group { kind: KIND_CPU }", "instance_group { kind: KIND_MODEL }"]
    {
        assert_eq!(said(groups, &[]), Ok(vec![]), "{groups}");
    }
}

#[test]
fn on_gpus_those_that_are_not_used_are_an_error() {
    for groups in
        ["instance_group { kind: KIND_GPU }", "instance_group { gpus: [2, 0] }", "instance_group { kind: KIND_MODEL }"]
    {
        assert_eq!(said(groups, &[0, 2]), Ok(vec![]), "{groups}");
    }
    let error = said("instance_group { }\ninstance_group { kind: KIND_GPU gpus: [0, 1] }", &[0, 2]).unwrap_err();
    assert!(error.contains("m/config.pbtxt:2:") && error.contains("names GPU 1; this server uses 0, 2"), "{error}");
    let error = said("instance_group { gpus: [-1] }", &[0]).unwrap_err();
    assert!(error.contains("names GPU -1") && error.contains("KIND_AUTO would mean the CPU"), "{error}");
    let error = said("instance_group { kind: KIND_CPU }", &[0]).unwrap_err();
    assert!(error.contains("KIND_CPU, but this server runs models on its GPUs 0"), "{error}");
    let warnings = said("instance_group { count: 2 }", &[0, 2]).unwrap();
    assert!(warnings[0].contains("instance_group[0].count: one batch of a model runs at a time"), "{warnings:?}");
}

#[test]
fn gpus_are_for_instances_on_gpus() {
    for kind in ["KIND_CPU", "KIND_MODEL"] {
        let error = said(&format!("instance_group {{ kind: {kind} gpus: [0] }}"), &[]).unwrap_err();
        assert!(error.contains(&format!("{kind} has no GPUs")), "{error}");
    }
}

/// The number of instances of a Python model.
fn instances(groups: &str) -> u32 {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("m");
    fs::create_dir_all(model.join("1")).unwrap();
    fs::write(model.join("1/model.py"), "").unwrap();
    fs::write(model.join("config.pbtxt"), format!("backend: 'python'\n{groups}")).unwrap();
    ModelRepository::open(folder.path()).unwrap().definition("m", None).unwrap().instances
}

#[test]
fn a_python_model_has_its_instances_on_each_of_its_gpus() {
    assert_eq!(instances("instance_group { kind: KIND_GPU gpus: [0, 2] }"), 2);
    assert_eq!(instances("instance_group { count: 2 kind: KIND_GPU gpus: [0, 1, 2] }\ninstance_group { }"), 7);
    assert_eq!(instances("instance_group { count: 2 kind: KIND_GPU }"), 2, "the server knows of no GPU");
}

/// The GPUs on which a model with these groups may run, on a server that uses 0, 2 and 5.
fn kept(groups: &str, places: &[(&str, &[u32])]) -> Option<Vec<u32>> {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("m/1")).unwrap();
    fs::write(folder.path().join("m/1/model.onnx"), b"").unwrap();
    fs::write(folder.path().join("m/config.pbtxt"), groups).unwrap();
    let places = places.iter().map(|(name, gpus)| ((*name).to_owned(), gpus.to_vec())).collect();
    let repository = ModelRepository::open(folder.path()).unwrap().with_gpus(vec![0, 2, 5]).with_places(places);
    repository.definition("m", None).unwrap().gpus
}

#[test]
fn a_model_is_kept_to_the_gpus_of_all_its_groups() {
    assert_eq!(kept("", &[]), None);
    assert_eq!(
        kept("instance_group { gpus: [5] }\ninstance_group { kind: KIND_GPU gpus: [0, 5] }", &[]),
        Some(vec![0, 5])
    );
    assert_eq!(kept("instance_group { gpus: [5] }\ninstance_group { kind: KIND_GPU }", &[]), None, "one is on all");
}

#[test]
fn what_the_server_was_told_of_a_models_place_counts_alone() {
    assert_eq!(kept("instance_group { kind: KIND_CPU }", &[("m", &[2])]), Some(vec![2]));
    assert_eq!(kept("instance_group { gpus: [9] }", &[("m", &[0])]), Some(vec![0]));
    assert_eq!(kept("instance_group { gpus: [5] }", &[("other", &[2])]), Some(vec![5]));
}
