//! Where instances are to be (`instance_group`), on a server with GPUs and on one without.

use std::fs;

use downbeat_repository::ModelRepository;

/// What is said of a model with these groups, on a server that runs models on `gpus`.
fn said(groups: &str, gpus: &[u32]) -> Result<Vec<String>, String> {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("m/1")).unwrap();
    fs::write(folder.path().join("m/1/model.onnx"), b"").unwrap();
    fs::write(folder.path().join("m/config.pbtxt"), groups).unwrap();
    let repository = ModelRepository::open(folder.path()).unwrap().with_gpus(gpus.to_vec());
    let definition = repository.definition("m", None).map_err(|e| e.to_string())?;
    Ok(definition.warnings.iter().map(ToString::to_string).collect())
}

#[test]
fn on_the_cpu_gpus_are_passed_over_with_a_warning() {
    let warnings = said("instance_group { kind: KIND_GPU gpus: [7] }", &[]).unwrap();
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].contains("instance_group[0].kind: KIND_GPU") && warnings[0].contains("--engine cuda"));
    let warnings = said("instance_group { gpus: [0] }", &[]).unwrap();
    assert!(warnings[0].contains("instance_group[0].gpus: "), "{warnings:?}");
    assert_eq!(said("instance_group { kind: KIND_CPU }", &[]), Ok(vec![]));
}

#[test]
fn on_gpus_those_that_are_not_used_are_an_error() {
    for groups in
        ["instance_group { kind: KIND_GPU }", "instance_group { gpus: [2, 0] }", "instance_group { count: 2 }"]
    {
        assert_eq!(said(groups, &[0, 2]), Ok(vec![]), "{groups}");
    }
    let error = said("instance_group { }\ninstance_group { kind: KIND_GPU gpus: [0, 1] }", &[0, 2]).unwrap_err();
    assert!(error.contains("m/config.pbtxt:2:") && error.contains("names GPU 1; this server uses 0, 2"), "{error}");
    assert!(said("instance_group { gpus: [-1] }", &[0]).unwrap_err().contains("names GPU -1"));
    let warnings = said("instance_group { gpus: [0] }", &[0, 2]).unwrap();
    assert!(warnings[0].contains("they run on all that this server uses: 0, 2"), "{warnings:?}");
    let warnings = said("instance_group { kind: KIND_CPU }", &[0]).unwrap();
    assert!(warnings[0].contains("KIND_CPU: this server runs models on its GPUs"), "{warnings:?}");
}
