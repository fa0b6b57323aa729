//! `downbeat engine install` with the Python of this machine: the programs that it runs, and the
//! files that it takes.

use std::fs;
use std::path::Path;
use std::process::Output;

use crate::command_line::{downbeat, stderr};

/// Runs the command in `folder`, with only `folder/index` to fetch from; `None` without a Python
/// that has pip.
fn install(folder: &Path) -> Option<Output> {
    let pip = std::process::Command::new("python3").args(["-I", "-m", "pip", "--version"]).output();
    if !pip.is_ok_and(|pip| pip.status.success()) {
        println!("there is no python3 with pip");
        return None;
    }
    let mut command = downbeat(&["engine", "install"]);
    command.current_dir(folder).env("XDG_CACHE_HOME", folder.join("cache")).env("PYTHONPATH", folder);
    command.env("PIP_NO_INDEX", "1").env("PIP_FIND_LINKS", folder.join("index")).env("PIP_CONFIG_FILE", "/dev/null");
    Some(command.output().unwrap())
}

#[test]
fn no_module_of_the_working_folder_is_run() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("index")).unwrap();
    let marker = folder.path().join("was-run");
    for module in ["pip", "runpy", "site", "sitecustomize", "usercustomize", "logging"] {
        let text = format!("open({marker:?}, 'a').write({module:?})\n");
        fs::write(folder.path().join(module).with_extension("py"), text).unwrap();
    }
    let Some(output) = install(folder.path()) else { return };
    assert_eq!(output.status.code(), Some(1), "there is nothing to fetch: {output:?}");
    assert!(stderr(&output).contains("pip has no wheel of onnxruntime"), "pip itself was run: {}", stderr(&output));
    assert!(!marker.exists(), "{:?} was run", fs::read_to_string(&marker));
    let list =
        downbeat(&["engine", "list"]).current_dir(folder.path()).env("PYTHONPATH", folder.path()).output().unwrap();
    assert_eq!(list.status.code(), Some(0));
    assert!(!marker.exists(), "{:?} was run", fs::read_to_string(&marker));
}

#[test]
fn a_wheel_with_another_hash_is_not_taken() {
    let folder = tempfile::tempdir().unwrap();
    let index = folder.path().join("index");
    fs::create_dir(&index).unwrap();
    // An archive without files.
    let empty = [b"PK\x05\x06".as_slice(), &[0; 18]].concat();
    fs::write(index.join("onnxruntime-1.31.1-py3-none-any.whl"), empty).unwrap();
    let Some(output) = install(folder.path()) else { return };
    let said = stderr(&output);
    assert!(said.contains("the hash of pip's download of onnxruntime 1.31.1 is wrong"), "{said}");
    assert!(said.contains("onnxruntime-1.31.1-py3-none-any.whl Got "), "{said}");
    assert_eq!(output.status.code(), Some(1));
}
