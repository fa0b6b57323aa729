//! Layouts that are plainer than Triton's: a file, a folder with one model, a folder of files.

use std::fs;
use std::path::{Path, PathBuf};

use downbeat_repository::{
    ModelRepositories, ModelRepository, ModelSource, Origin, RepositoryError, Supply, SupplyError,
};

use crate::layout::model;

/// The names of the models at a path, each with its file relative to `root`.
fn served(root: &Path, path: &Path, name: Option<&str>) -> Vec<(String, String)> {
    let repository = ModelRepository::open(path).unwrap().with_name(name.map(str::to_owned));
    let root = root.canonicalize().unwrap();
    let file = |name: String| {
        let definition = repository.definition(&name, None).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(repository.fingerprint(&name).bytes() > 0 || definition.versions.is_empty(), "{name}");
        let file = definition.versions[0].1.strip_prefix(&root).unwrap().display().to_string();
        (name, format!("{}:{file}", definition.versions[0].0))
    };
    repository.scan().unwrap().names.into_iter().map(file).collect()
}

/// Writes files of one byte.
fn write(root: &Path, files: &[&str]) {
    for file in files {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, if file.ends_with(".pbtxt") { "" } else { "x" }).unwrap();
    }
}

fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
    all.iter().map(|(name, file)| ((*name).to_owned(), (*file).to_owned())).collect()
}

#[test]
fn each_layout_is_served_under_a_name_that_follows_from_it() {
    for (files, given, models) in [
        (&["a/cat.onnx", "a/dog.onnx"][..], "a/cat.onnx", &[("cat", "1:a/cat.onnx")][..]),
        (&["a/model.onnx"], "a/model.onnx", &[("model", "1:a/model.onnx")]),
        (&["a/model.onnx"], "a", &[("a", "1:a/model.onnx")]),
        (&["a/model.onnx", "a/config.pbtxt", "a/labels.txt"], "a", &[("a", "1:a/model.onnx")]),
        (&["a/net.onnx", "a/config.pbtxt"], "a", &[("a", "1:a/net.onnx")]),
        (&["a/cat.onnx"], "a", &[("cat", "1:a/cat.onnx")]),
        (&["a/cat.onnx", "a/cat.onnx.data", "a/dog.onnx"], "a", &[("cat", "1:a/cat.onnx"), ("dog", "1:a/dog.onnx")]),
        (&["a/1/model.onnx"], "a", &[("a", "1:a/1/model.onnx")]),
        (&["a/3/net.onnx"], "a", &[("a", "3:a/3/net.onnx")]),
        (&["a/1/model.onnx", "a/2/model.onnx"], "a", &[("a", "2:a/2/model.onnx")]),
        (&["a/b/1/model.onnx"], "a", &[("b", "1:a/b/1/model.onnx")]),
        (&["a/b/model.onnx", "a/c/d.onnx"], "a", &[("b", "1:a/b/model.onnx"), ("c", "1:a/c/d.onnx")]),
        (&["a/b/2/model.onnx", "a/c.onnx"], "a", &[("b", "2:a/b/2/model.onnx"), ("c", "1:a/c.onnx")]),
        // A repository stays one when a file comes to lie in it.
        (&["a/b/1/model.onnx", "a/model.onnx"], "a", &[("b", "1:a/b/1/model.onnx"), ("model", "1:a/model.onnx")]),
        (&["a/7/1/model.onnx"], "a", &[("7", "1:a/7/1/model.onnx")]),
        // A clone of a repository of the hub.
        (&["a/config.json", "a/onnx/model.onnx", "a/onnx/model_int8.onnx"], "a", &[("a", "1:a/onnx/model.onnx")]),
        (&["a/my net (1).onnx"], "a", &[("my_net__1_", "1:a/my net (1).onnx")]),
        (&["a b/model.onnx"], "a b", &[("a_b", "1:a b/model.onnx")]),
        (&["a/.hidden.onnx", "a/b.onnx"], "a", &[("b", "1:a/b.onnx")]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), files);
        let found = served(folder.path(), &folder.path().join(given), None);
        assert_eq!(found, pairs(models), "{given} of {files:?}");
    }
}

/// The layouts that KServe's storage initializer leaves in `/mnt/models`.
#[test]
fn the_only_model_of_a_place_takes_a_given_name() {
    for file in ["model.onnx", "1/model.onnx", "cat/1/model.onnx", "cat.onnx", "cat/model.onnx", "config.pbtxt"] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &["mnt/README.md", &format!("mnt/{file}"), "mnt/1/model.onnx"][..2]);
        if file == "config.pbtxt" {
            write(folder.path(), &["mnt/1/model.onnx"]);
            fs::write(folder.path().join("mnt/config.pbtxt"), "name: \"other\"").unwrap();
        }
        let found = served(folder.path(), &folder.path().join("mnt"), Some("my-service"));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].0, "my-service", "{file}");
    }
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &["cat.onnx", "dog.onnx"]);
    let repository = ModelRepository::open(folder.path()).unwrap().with_name(Some("one".to_owned()));
    let error = repository.scan().unwrap_err().to_string();
    assert!(error.contains("has 2 models: cat, dog; leave 'one=' out"), "{error}");
}

#[test]
fn a_configuration_names_the_only_model_of_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &["m/model.onnx", "repo/m/1/model.onnx"]);
    fs::write(folder.path().join("m/config.pbtxt"), "name: \"cats\" max_batch_size: 4").unwrap();
    fs::write(folder.path().join("repo/m/config.pbtxt"), "name: \"cats\"").unwrap();
    let repository = ModelRepository::open(folder.path().join("m")).unwrap();
    assert_eq!(repository.scan().unwrap().names, ["cats"]);
    assert_eq!(repository.definition("cats", None).unwrap().config.max_batch_size, 4);
    let error = repository.definition("m", None).unwrap_err().to_string();
    assert!(error.contains("no model 'm'"), "{error}");
    // In a repository the folder has the name.
    let repository = ModelRepository::open(folder.path().join("repo")).unwrap();
    assert!(repository.definition("m", None).unwrap_err().to_string().contains("the folder is named 'm'"));
}

#[test]
fn a_file_is_served_with_the_configuration_that_is_its_own() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &["one/net.onnx", "two/net.onnx", "two/model.onnx"]);
    for name in ["one", "two"] {
        fs::write(folder.path().join(name).join("config.pbtxt"), "max_batch_size: 4").unwrap();
    }
    let size = |file: &str, name: &str| {
        let repository = ModelRepository::open(folder.path().join(file)).unwrap();
        repository.definition(name, None).unwrap().config.max_batch_size
    };
    assert_eq!(size("one/net.onnx", "net"), 4);
    assert_eq!(size("two/model.onnx", "model"), 4);
    assert_eq!(size("two/net.onnx", "net"), 0, "the configuration is that of model.onnx");
}

#[test]
fn files_that_are_left_out_are_named() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &["m/model.onnx", "m/model_int8.onnx", "r/two/a.onnx", "r/two/b.onnx", "r/x/1/model.onnx"]);
    let one = ModelRepository::open(folder.path().join("m")).unwrap().definition("m", None).unwrap();
    let warning = one.warnings[0].to_string();
    assert!(warning.ends_with("model.onnx is served; other ONNX files there are not: model_int8.onnx"), "{warning}");
    let repository = ModelRepository::open(folder.path().join("r")).unwrap();
    assert_eq!(repository.scan().unwrap().names, ["two", "x"]);
    let error = repository.definition("two", None).unwrap_err().to_string();
    assert!(error.contains("has 2 ONNX files and none is model.onnx: a.onnx, b.onnx"), "{error}");
    assert!(error.contains("downbeat serve ") && error.contains("r/two"), "{error}");
    // One name, two files.
    write(folder.path(), &["s/a b.onnx", "s/a_b.onnx"]);
    let scan = ModelRepository::open(folder.path().join("s")).unwrap().scan().unwrap();
    assert_eq!(scan.names, ["a_b"]);
    let warnings: Vec<&str> = scan.warnings.iter().map(|w| w.message.as_str()).collect();
    assert!(
        warnings[0].starts_with("is served as 'a_b'") && warnings[1].contains("another model has the name"),
        "{warnings:?}"
    );
}

#[test]
fn a_file_of_another_format_is_told_its_way_to_onnx() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &["net/model.pt", "net/readme.md", "skl/model.joblib"]);
    let error = ModelRepository::open(folder.path().join("net/model.pt")).unwrap_err().to_string();
    assert!(
        error.contains("is a PyTorch model, and Downbeat runs ONNX models; in Python: torch.onnx.export("),
        "{error}"
    );
    let scan = ModelRepository::open(folder.path().join("skl")).unwrap().scan().unwrap();
    assert!(scan.names.is_empty() && scan.warnings[0].message.contains("skl2onnx.to_onnx"), "{scan:?}");
}

#[test]
fn files_of_other_formats_beside_models_are_named() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &["a.onnx", "b.pt", "c.tflite", "make.py", "old.zip", "notes.txt"]);
    let scan = ModelRepository::open(folder.path()).unwrap().scan().unwrap();
    assert_eq!(scan.names, ["a"]);
    let named: Vec<&str> = scan.warnings.iter().filter_map(|warning| warning.file.rsplit('/').next()).collect();
    assert_eq!(named, ["b.pt", "c.tflite"], "{scan:?}");
    assert!(scan.warnings[1].message.contains("tf2onnx") && scan.warnings[1].message.ends_with("; ignored"));
}

#[test]
fn a_file_that_is_given_and_gets_another_name_is_told() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &["my net.onnx"]);
    let path = folder.path().join("my net.onnx");
    let warning = &ModelRepository::open(&path).unwrap().scan().unwrap().warnings[0].message;
    assert!(warning.contains(&format!("'NAME={}' gives another name", path.display())), "{warning}");
    let named = ModelRepository::open(&path).unwrap().with_name(Some("net".to_owned()));
    assert!(named.scan().unwrap().warnings.is_empty());
}

#[cfg(unix)]
#[test]
fn a_given_file_may_be_a_link_and_a_found_one_may_not_lead_out() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &["blobs/4d7a", "models/b.onnx"]);
    symlink("../blobs/4d7a", folder.path().join("models/a.onnx")).unwrap();
    let given = ModelRepository::open(folder.path().join("models/a.onnx")).unwrap();
    assert!(
        given.definition("a", None).unwrap().versions[0].1.ends_with("models/a.onnx"),
        "weights lie beside the link"
    );
    let found = ModelRepository::open(folder.path().join("models")).unwrap();
    let error = found.definition("a", None).unwrap_err().to_string();
    assert!(error.contains("outside the repository; --follow-symlinks"), "{error}");
    found.with_follow_symlinks(true).definition("a", None).unwrap();
}

#[test]
fn a_changed_file_changes_the_fingerprint_of_its_own_model_alone() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &["a.onnx", "a.onnx.data", "b.onnx"]);
    let repository = ModelRepository::open(folder.path()).unwrap();
    let before = (repository.fingerprint("a"), repository.fingerprint("b"));
    fs::write(folder.path().join("a.onnx.data"), "more").unwrap();
    assert_ne!(repository.fingerprint("a"), before.0);
    assert_eq!(repository.fingerprint("b"), before.1);
}

#[test]
fn a_source_is_written_with_or_without_a_name() {
    for (text, name, place) in [
        ("cat=/mnt/models", Some("cat"), "/mnt/models"),
        ("/a=b/c", None, "/a=b/c"),
        ("./a=b", None, "./a=b"),
        ("https://h/a.onnx?x=1", None, "https://h/a.onnx?x=1"),
        ("cat=https://h/a.onnx?x=1", Some("cat"), "https://h/a.onnx?x=1"),
        ("=x", None, "=x"),
        ("cat=", None, "cat="),
    ] {
        assert_eq!(ModelSource::split_name(text), (name, place));
    }
}

/// Brings another folder each time.
#[derive(Debug)]
struct Turns(std::sync::Mutex<Vec<Result<PathBuf, SupplyError>>>);

impl Supply for Turns {
    fn bring(&self) -> Result<PathBuf, SupplyError> {
        self.0.lock().unwrap().remove(0)
    }

    fn address(&self) -> &str {
        "test://models"
    }
}

#[test]
fn models_of_a_supply_move_to_a_new_folder_and_stay_after_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path(), "1/m", &["1/model.onnx"]);
    model(folder.path(), "2/m", &["1/model.onnx"]);
    model(folder.path(), "2/new", &["1/model.onnx"]);
    let failure = || Err(SupplyError { message: "no answer".to_owned() });
    let turns = vec![Ok(folder.path().join("1")), failure(), Ok(folder.path().join("2"))];
    let supply = std::sync::Arc::new(Turns(turns.into()));
    let source = ModelSource { name: None, origin: Origin::Supply(supply) };
    let repositories = ModelRepositories::open(&[source]).unwrap();
    assert!(repositories.has_supplies());
    let before = repositories.fingerprint("m");
    let errors = repositories.refresh(None);
    assert_eq!(errors[0].to_string(), "test://models: no answer");
    assert_eq!(repositories.names().unwrap(), ["m"]);
    assert!(repositories.refresh(Some("m")).is_empty());
    assert_eq!(repositories.names().unwrap(), ["m", "new"]);
    assert!(repositories.definition("m", None).unwrap().dir.ends_with("2/m"));
    // The paths differ; times and sizes decide.
    assert_eq!(repositories.fingerprint("m").bytes(), before.bytes());
    let nowhere = ModelSource { name: None, origin: Origin::Address("hf://org/net".to_owned()) };
    assert!(matches!(ModelRepositories::open(&[nowhere]), Err(RepositoryError::NotBrought(..))));
}
