//! Versions in a model's folder, and the messages about folders and files that nearly are versions.

use std::fs;

use downbeat_repository::{ModelRepositories, ModelRepository};

use crate::layout::{message, model};

#[test]
fn versions_are_numbers_and_the_policy_selects_among_them() {
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<String> = ["1", "2", "10", "007", "1.5", "x", "99999999999999999999999"]
        .iter()
        .map(|v| format!("{v}/model.onnx"))
        .collect();
    model(folder.path(), "m", &files.iter().map(String::as_str).collect::<Vec<_>>());
    let repository = ModelRepository::open(folder.path()).unwrap();
    let versions = |config: &str| -> Vec<u64> {
        let definition = repository.definition("m", Some(config)).unwrap();
        definition.versions.iter().map(|(v, _)| *v).collect()
    };
    assert_eq!(versions(""), [10]);
    assert_eq!(versions("version_policy { latest { num_versions: 2 } }"), [2, 10]);
    assert_eq!(versions("version_policy { all { } }"), [1, 2, 10]);
    assert_eq!(versions("version_policy { specific { versions: [ 2, 1 ] } }"), [1, 2]);
    let warnings = repository.definition("m", None).unwrap().warnings;
    let warnings: Vec<&str> = warnings.iter().map(|warning| warning.message.as_str()).collect();
    assert_eq!(
        warnings,
        [
            "007 is not a version: the number begins with 0; rename the folder to 7",
            "1.5 is not a version: the name must be a whole number; rename the folder to 11",
            "99999999999999999999999 is not a version: the largest is 18446744073709551615; rename the folder to 11",
        ],
        "a folder of another name may be a backup"
    );
    let error = repository.definition("m", Some("version_policy { specific { versions: 7 } }")).unwrap_err();
    assert!(error.to_string().contains("selects none of the versions 1, 2, 10"), "{error}");
}

/// The message when a model with one file is loaded. The scan counts the folder as a model, so that
/// a server is not ready without the model.
fn said(file: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path(), "m", &[file]);
    let repository = ModelRepository::open(folder.path()).unwrap();
    let scan = repository.scan().unwrap();
    assert_eq!((&scan.names[..], &scan.warnings[..]), (&["m".to_owned()][..], &[][..]), "{file}");
    message(&repository, "m")
}

#[test]
fn a_folder_that_is_nearly_a_version_is_named_with_a_better_name() {
    for (folder, why, meant) in [
        ("01", "the number begins with 0", 1),
        ("0012", "the number begins with 0", 12),
        ("0", "versions start at 1", 1),
        ("000", "versions start at 1", 1),
        ("v1", "the name must be a whole number", 1),
        ("V02", "the name must be a whole number", 2),
        ("version_3", "the name must be a whole number", 3),
        ("1.0", "the name must be a whole number", 1),
        ("v0", "the name must be a whole number", 1),
        ("latest", "the name must be a whole number", 1),
        ("99999999999999999999", "the largest is 18446744073709551615", 1),
    ] {
        let remedy = format!("no version folder; {folder} is not a version: {why}; rename the folder to {meant}");
        assert_eq!(said(&format!("{folder}/model.onnx")), format!("REPO/m: {remedy}"));
    }
}

#[test]
fn a_folder_without_a_model_file_is_no_model() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path(), "file", &["1"]);
    model(folder.path(), "logs", &["2026-01/log.txt"]);
    let repository = ModelRepository::open(folder.path()).unwrap();
    let scan = repository.scan().unwrap();
    assert_eq!((scan.names.len(), scan.warnings.len()), (0, 2), "{scan:?}");
    let scanned = &scan.warnings[0].message;
    assert_eq!(*scanned, "has no version folder; 1 is a file; a version is a folder with a model file in it");
    let loaded = message(&repository, "file");
    assert!(loaded.ends_with("1 is a file; a version is a folder with a model file in it"), "{loaded}");
}

#[test]
fn a_configuration_does_not_hide_that_there_is_no_version() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path(), "m", &["config.pbtxt", "01/net.onnx", "warmup/x"]);
    let repository = ModelRepository::open(folder.path()).unwrap();
    assert_eq!(repository.scan().unwrap().names, ["m"]);
    let words =
        "REPO/m/config.pbtxt: no version folder; 01 is not a version: the number begins with 0; rename the folder to 1";
    assert_eq!(message(&repository, "m"), words);
    // A file without a version is version 1, and the other folder gets a warning.
    fs::write(folder.path().join("m/net.onnx"), "").unwrap();
    let definition = repository.definition("m", None).unwrap();
    assert!(definition.versions[0].1.ends_with("m/net.onnx"), "{:?}", definition.versions);
    assert!(definition.warnings[0].message.starts_with("01 is not a version"), "{:?}", definition.warnings);
}

#[test]
fn a_model_file_of_another_name_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let repository = || ModelRepository::open(folder.path()).unwrap();
    let said = |name: &str, files: &[&str]| {
        model(folder.path(), name, files);
        message(&repository(), name)
    };
    // The only ONNX file of a version is the model. With two of them nobody knows.
    model(folder.path(), "upper", &["1/Model.ONNX", "1/labels.txt"]);
    assert!(repository().definition("upper", None).unwrap().versions[0].1.ends_with("1/Model.ONNX"));
    assert_eq!(
        said("two", &["1/a.onnx", "1/b.onnx"]),
        "REPO/two: REPO/two/1/model.onnx does not exist (found: a.onnx, b.onnx)"
    );
    assert_eq!(
        said("folder", &["1/model.onnx/net.onnx", "1/model.onnx/net.onnx_data"]),
        "REPO/folder: REPO/folder/1/model.onnx is a folder without a file model.onnx in it (found: net.onnx, net.onnx_data); \
         rename net.onnx to model.onnx"
    );
    fs::create_dir_all(folder.path().join("empty/1")).unwrap();
    assert_eq!(
        message(&repository(), "empty"),
        "REPO/empty: REPO/empty/1/model.onnx does not exist (the folder is empty)"
    );
}

#[test]
fn a_near_model_is_explained_by_the_repository_that_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    model(&one, "other", &["1/model.onnx"]);
    model(&two, "m", &["01/model.onnx"]);
    let error =
        ModelRepositories::open(&[one.into(), two.into()]).unwrap().definition("m", None).unwrap_err().to_string();
    assert!(error.contains("01 is not a version"), "{error}");
}
