//! Symbolic links: the repository follows links inside its folder, and other links only by an
//! option.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use downbeat_repository::{ModelRepositories, ModelRepository};

use crate::layout::{message, model};

#[test]
fn symbolic_links_do_not_lead_out_of_the_repository() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("models");
    model(&root, "inside", &["1/model.onnx"]);
    model(folder.path(), "outside", &["1/model.onnx", "labels.txt", "config.pbtxt"]);
    symlink(folder.path().join("outside"), root.join("folder_link")).unwrap();
    symlink(root.join("inside"), root.join("alias")).unwrap();
    symlink("nowhere", root.join("broken")).unwrap();
    fs::create_dir_all(root.join("file_link/1")).unwrap();
    symlink(folder.path().join("outside/1/model.onnx"), root.join("file_link/1/model.onnx")).unwrap();
    model(&root, "config_link", &["1/model.onnx"]);
    symlink(folder.path().join("outside/config.pbtxt"), root.join("config_link/config.pbtxt")).unwrap();
    model(&root, "label_link", &["1/model.onnx"]);
    symlink(folder.path().join("outside/labels.txt"), root.join("label_link/labels.txt")).unwrap();
    fs::write(root.join("label_link/config.pbtxt"), r#"output { name: "y" label_filename: "labels.txt" }"#).unwrap();

    let repository = ModelRepository::open(&root).unwrap();
    let scan = repository.scan().unwrap();
    assert_eq!(scan.names, ["alias", "config_link", "file_link", "inside", "label_link"]);
    assert_eq!(scan.warnings.len(), 2, "{:?}", scan.warnings);
    for name in ["folder_link", "file_link", "config_link", "label_link"] {
        let message = message(&repository, name);
        assert!(message.contains("a symbolic link to") && message.contains("outside the repository"), "{message}");
        assert!(message.contains("--follow-symlinks (follow_symlinks = true in downbeat.toml)"), "{message}");
    }
    assert!(repository.definition("alias", None).is_ok());
    let following = repository.with_follow_symlinks(true);
    let scan = following.scan().unwrap();
    assert_eq!(scan.names, ["alias", "config_link", "file_link", "folder_link", "inside", "label_link"]);
    for name in scan.names {
        following.definition(&name, None).unwrap();
    }
}

/// A model as `huggingface_hub` keeps it: `snapshots/REVISION/FILE` are links to `blobs/DIGEST`.
fn cached(folder: &Path) -> std::path::PathBuf {
    let cache = folder.join("hub/models--org--net");
    let snapshot = cache.join("snapshots/5c38ec7/onnx");
    fs::create_dir_all(cache.join("blobs")).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    for (file, blob, content) in
        [("model.onnx", "4d7a", ""), ("model.onnx_data", "93ab", "weights"), ("tokenizer.json", "77", "{}")]
    {
        fs::write(cache.join("blobs").join(blob), content).unwrap();
        symlink(Path::new("../../../blobs").join(blob), snapshot.join(file)).unwrap();
    }
    snapshot
}

#[test]
fn a_cache_of_downloads_is_a_version_by_one_link() {
    let folder = tempfile::tempdir().unwrap();
    let snapshot = cached(folder.path());
    let root = folder.path().join("models");
    fs::create_dir_all(root.join("m")).unwrap();
    symlink(&snapshot, root.join("m/1")).unwrap();
    let repositories = |follow: bool| {
        ModelRepositories::open(&[root.clone().into()])
            .unwrap()
            .map(|repository| repository.with_follow_symlinks(follow))
    };
    let refused = repositories(false).definition("m", None).unwrap_err().to_string();
    assert!(refused.contains("blobs/4d7a, outside the repository; --follow-symlinks"), "{refused}");
    let definition = repositories(true).definition("m", None).unwrap();
    // The path before links are followed: its folder has the weights, and the folder of the blob
    // has other names.
    assert_eq!(definition.versions, [(1, root.canonicalize().unwrap().join("m/1/model.onnx"))]);
    assert!(definition.versions[0].1.with_file_name("model.onnx_data").exists());
    // The same rules hold for a load request's files.
    assert!(repositories(true).at(&root).unwrap().definition("m", None).is_ok());
}

#[test]
fn a_file_that_options_name_stays_inside_as_others_do() {
    let folder = tempfile::tempdir().unwrap();
    let snapshot = cached(folder.path());
    let root = folder.path().join("models");
    model(&root, "m", &["1/model.onnx", "own.json"]);
    model(&root, "shared", &["1/model.onnx", "tokenizer.json"]);
    symlink(snapshot.join("tokenizer.json"), root.join("m/tokenizer.json")).unwrap();
    let repository = ModelRepository::open(&root).unwrap();
    let find = |repository: &ModelRepository, file: &str| {
        repository.definition("m", None).unwrap().file_beside(Path::new(file))
    };
    let real = root.canonicalize().unwrap();
    assert_eq!(find(&repository, "own.json"), Ok(real.join("m/own.json")));
    assert_eq!(find(&repository, "../shared/tokenizer.json"), Ok(real.join("m/../shared/tokenizer.json")));
    let refused = find(&repository, "tokenizer.json").unwrap_err();
    assert!(
        refused.contains("m/tokenizer.json: the path is a symbolic link to") && refused.contains("--follow-symlinks")
    );
    let missing = find(&repository, "none.json").unwrap_err();
    assert!(missing.ends_with("m/none.json: no such file or folder"), "{missing}");
    let following = repository.with_follow_symlinks(true);
    assert_eq!(find(&following, "tokenizer.json"), Ok(real.join("m/tokenizer.json")));
    // The option is about links. A path that climbs out of the repository is refused all the same.
    for file in ["../../hub/x", "/etc/hostname", "a/../../../hub"] {
        let refused = find(&following, file).unwrap_err();
        assert_eq!(refused, format!("'{file}' does not name a file inside the model repository"));
    }
}

#[test]
fn links_that_lead_nowhere_are_errors_with_their_target() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for name in ["config", "file", "label", "version", "circle"] {
        model(root, name, &["2/model.onnx"]);
    }
    symlink("gone.pbtxt", root.join("config/config.pbtxt")).unwrap();
    fs::remove_file(root.join("file/2/model.onnx")).unwrap();
    symlink("../gone.onnx", root.join("file/2/model.onnx")).unwrap();
    fs::write(root.join("label/config.pbtxt"), r#"output { name: "y" label_filename: "labels.txt" }"#).unwrap();
    symlink("gone.txt", root.join("label/labels.txt")).unwrap();
    fs::remove_dir_all(root.join("version/2")).unwrap();
    symlink("../gone", root.join("version/2")).unwrap();
    fs::remove_file(root.join("circle/2/model.onnx")).unwrap();
    symlink("model.onnx", root.join("circle/2/model.onnx")).unwrap();
    symlink("gone", root.join("folder")).unwrap();
    symlink("loop", root.join("loop")).unwrap();
    for follow in [false, true] {
        let repository = ModelRepository::open(root).unwrap().with_follow_symlinks(follow);
        let nowhere =
            |target: &str| format!("the path is a symbolic link to {target}, which leads to no file that exists");
        for (name, words) in [
            ("config", format!("REPO/config/config.pbtxt: {}", nowhere("gone.pbtxt"))),
            ("file", format!("REPO/file: REPO/file/2/model.onnx: {}", nowhere("../gone.onnx"))),
            ("label", format!("REPO/label/labels.txt: {}", nowhere("gone.txt"))),
            ("version", format!("2 cannot be read: {}", nowhere("../gone"))),
            ("circle", "model.onnx: the path is a symbolic link to model.onnx, which leads back to itself".to_owned()),
            ("folder", format!("'folder' is not the name of a model: {}", nowhere("gone"))),
            (
                "loop",
                "'loop' is not the name of a model: the path is a symbolic link to loop, which leads back to itself"
                    .to_owned(),
            ),
        ] {
            let message = message(&repository, name);
            assert!(message.contains(&words), "{name}: {message}");
        }
    }
}
