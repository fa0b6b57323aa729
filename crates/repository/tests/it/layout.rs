//! Which folders and files count as a model, and which are refused.

use std::fs;
use std::path::Path;

use downbeat_repository::{ModelFormat, ModelRepositories, ModelRepository, RepositoryError};

/// Writes empty files into the folder of a model.
pub(crate) fn model(root: &Path, name: &str, files: &[&str]) {
    for file in files {
        let path = root.join(name).join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, b"").unwrap();
    }
}

/// The reason why a model has no definition; `REPO` is the path of the repository.
pub(crate) fn message(repository: &ModelRepository, name: &str) -> String {
    let root = repository.path().display().to_string();
    repository.definition(name, None).unwrap_err().to_string().replace(&root, "REPO")
}

#[test]
fn a_repository_has_to_be_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("missing");
    let error = ModelRepository::open(&path).unwrap_err();
    assert_eq!(error.to_string(), format!("model repository {}: no such file or folder", path.display()));
    fs::write(&path, b"").unwrap();
    let error = ModelRepository::open(&path).unwrap_err().to_string();
    assert!(
        error.ends_with("is a file that does not end in .onnx; give a model file or a folder of models"),
        "{error}"
    );
}

#[test]
fn only_folders_that_look_like_models_are_models() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    model(root, "b", &["1/model.onnx"]);
    model(root, "a", &["config.pbtxt"]);
    model(root, "flat", &["model.onnx"]);
    model(root, "notes", &["readme.txt"]);
    model(root, ".git", &["1/model.onnx"]);
    fs::write(root.join("README.md"), b"").unwrap();
    fs::write(root.join("loose.onnx"), b"").unwrap();
    let scan = ModelRepository::open(root).unwrap().scan().unwrap();
    assert_eq!(scan.names, ["a", "b", "flat", "loose"]);
    let warnings: Vec<String> =
        scan.warnings.iter().map(|w| w.to_string().replace(&root.display().to_string(), "REPO")).collect();
    assert_eq!(warnings, ["REPO/notes: has neither a version folder such as notes/1 nor config.pbtxt; ignored"]);
}

#[test]
fn names_do_not_lead_out_of_the_repository() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("models");
    model(&root, "inside", &["1/model.onnx"]);
    model(folder.path(), "outside", &["1/model.onnx"]);
    let repository = ModelRepository::open(&root).unwrap();
    for name in ["", ".", "..", "../outside", "inside/../../outside", "/etc", "a\\b", "a\0b", "a\nb", "..inside"] {
        let result = repository.definition(name, None);
        assert!(matches!(result, Err(RepositoryError::Name { .. })), "{name:?}: {result:?}");
    }
    let long = "x".repeat(100_000);
    assert!(repository.definition(&long, None).unwrap_err().to_string().len() < 200);
    assert!(matches!(repository.definition("insde", None), Err(RepositoryError::NotFound { .. })));
    assert_eq!(message(&repository, "insde"), "no model 'insde' in REPO; did you mean 'inside'?");
}

/// Triton's `--model-config-name`.
#[test]
fn a_named_configuration_is_read_where_a_model_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let config = |model_name: &str, file: &str, size: i32| {
        model(folder.path(), model_name, &["1/model.onnx", file]);
        fs::write(folder.path().join(model_name).join(file), format!("max_batch_size: {size}")).unwrap();
    };
    config("both", "config.pbtxt", 1);
    config("both", "configs/h100.pbtxt", 2);
    config("other", "config.pbtxt", 3);
    config("other", "configs/v100.pbtxt", 4);
    config("wrong", "configs/h100.pbtxt", -1);
    let repository = ModelRepository::open(folder.path()).unwrap();
    let size =
        |repository: &ModelRepository, name: &str| repository.definition(name, None).unwrap().config.max_batch_size;
    assert_eq!(size(&repository, "both"), 1);
    let named = repository.with_config_name(Some("h100".to_owned()));
    assert_eq!((size(&named, "both"), size(&named, "other")), (2, 3));
    assert_eq!(named.definition("both", Some("max_batch_size: 9")).unwrap().config.max_batch_size, 9);
    let error = message(&named, "wrong");
    assert!(error.contains("REPO/wrong/configs/h100.pbtxt:1:1: max_batch_size: is -1"), "{error}");
    assert_eq!(size(&named.at(folder.path()).unwrap(), "both"), 2, "the files of a load request are read alike");
    let whole = named.with_auto_complete(false).scan().unwrap();
    assert!(whole.names.contains(&"wrong".to_owned()), "{whole:?}");
}

#[test]
fn a_missing_model_file_is_named_with_what_is_there() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path(), "m", &["1/model.onx"]);
    model(folder.path(), "empty", &["config.pbtxt"]);
    let repository = ModelRepository::open(folder.path()).unwrap();
    assert_eq!(message(&repository, "m"), "REPO/m: REPO/m/1/model.onnx does not exist (found: model.onx)");
    assert_eq!(
        message(&repository, "empty"),
        "REPO/empty/config.pbtxt: no version folder; expected REPO/empty/1/model.onnx"
    );
}

#[test]
fn a_graph_with_a_folder_of_weights_and_an_emulated_model_are_found() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path(), "large", &["1/model.onnx/model.onnx", "1/model.onnx/weights.bin"]);
    model(folder.path(), "fast", &["1/model.emulated.toml"]);
    model(folder.path(), "mixed", &["1/model.emulated.toml", "2/model.onnx"]);
    let repository = ModelRepository::open(folder.path()).unwrap();
    let large = repository.definition("large", None).unwrap();
    assert!(large.versions[0].1.ends_with("large/1/model.onnx/model.onnx"));
    assert_eq!(repository.definition("fast", None).unwrap().format, ModelFormat::Emulated);
    assert_eq!(repository.definition("mixed", None).unwrap().format, ModelFormat::Onnx);
    let error = repository.definition("mixed", Some("version_policy { all { } }")).unwrap_err().to_string();
    assert!(error.contains("different kinds of model files"), "{error}");
}

#[test]
fn a_fingerprint_changes_with_the_files() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path(), "m", &["1/model.onnx"]);
    let repository = ModelRepository::open(folder.path()).unwrap();
    let before = repository.fingerprint("m");
    assert_eq!(before, repository.fingerprint("m"));
    fs::write(folder.path().join("m/1/model.onnx"), b"larger").unwrap();
    let after = repository.fingerprint("m");
    assert_ne!(before, after);
    model(folder.path(), "m", &["2/model.onnx"]);
    assert_ne!(after, repository.fingerprint("m"));
    assert_eq!(repository.fingerprint("none"), repository.fingerprint("../m"));
}

#[test]
fn several_repositories_are_one_and_a_model_in_two_is_in_none() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    model(&one, "a", &["1/model.onnx"]);
    model(&one, "both", &["1/model.onnx"]);
    model(&two, "b", &["1/model.onnx"]);
    model(&two, "both", &["1/model.onnx"]);
    let repositories =
        ModelRepositories::open(&[one.clone().into(), two.clone().into(), one.join("../one").into()]).unwrap();
    assert_eq!(
        repositories.paths().collect::<Vec<_>>(),
        [one.clone(), two.clone()],
        "one that is named twice counts once"
    );
    assert_eq!(repositories.names().unwrap(), ["a", "b", "both"]);
    assert!(repositories.definition("b", None).unwrap().dir.ends_with("two/b"));
    assert!(repositories.definition("a", None).unwrap().dir.ends_with("one/a"));
    assert_eq!(
        repositories.definition("both", None).unwrap_err().to_string(),
        format!(
            "model appears in two or more repositories: 'both' is in {} and in {}; remove or rename one of them",
            one.display(),
            two.display()
        )
    );
    assert!(matches!(repositories.definition("c", None), Err(RepositoryError::NotFound { .. })));
    assert_ne!(repositories.fingerprint("b"), repositories.fingerprint("c"));
}
