//! `downbeat engine install`, with wheels and Pythons made here.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use downbeat_engine::install::{Install, InstallError, installed};
use zip::CompressionMethod;
use zip::write::SimpleFileOptions;

use crate::model::folder;

fn wheel(path: &Path, method: CompressionMethod, entries: &[(&str, &[u8])]) {
    let mut zip = zip::ZipWriter::new(std::fs::File::create(path).expect("creates"));
    for (name, bytes) in entries {
        zip.start_file(*name, SimpleFileOptions::default().compression_method(method)).expect("starts");
        zip.write_all(bytes).expect("writes");
    }
    zip.finish().expect("finishes");
}

const LIBRARY: &[(&str, &[u8])] = &[
    ("onnxruntime/__init__.py", b"import this"),
    ("onnxruntime/capi/libonnxruntime_providers_shared.so", b"another"),
    ("onnxruntime/capi/libonnxruntime.so.1.31.1", b"the library"),
];

/// A program that is called as `python3` would be.
fn python(folder: &Path, script: &str) -> PathBuf {
    let path = folder.join("python3");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("writes");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("is ours");
    path
}

fn install(folder: &Path, python: PathBuf) -> Install {
    Install { version: "1.31.1".into(), cache: folder.join("cache"), python, wheel: None }
}

/// The names in the cache, so that what is left behind shows.
fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return vec![] };
    let mut names: Vec<_> = entries.map(|e| e.expect("reads").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn from_a_wheel_at_hand() {
    let folder = folder();
    let path = folder.path().join("onnxruntime.whl");
    wheel(&path, CompressionMethod::Deflated, LIBRARY);
    let install = Install { wheel: Some(path), ..install(folder.path(), "/nonexistent/python3".into()) };
    for _ in 0..2 {
        let done = install.run().expect("installs, also over itself");
        assert_eq!(done.version, "1.31.1");
        assert_eq!(std::fs::read(&done.library).expect("is there"), b"the library");
        assert_eq!(installed(&install.cache), Some(done.library));
        assert_eq!(names(&install.cache), ["1.31.1"]);
        assert_eq!(names(&install.cache.join("1.31.1")), ["libonnxruntime.so.1.31.1"]);
    }
}

#[test]
fn by_pip() {
    let folder = folder();
    let made = folder.path().join("onnxruntime-1.31.1-cp311-linux.whl");
    wheel(&made, CompressionMethod::Deflated, LIBRARY);
    // Answers as pip does, and keeps what it was asked.
    let script = format!(
        r#"echo "$@" >> {log}; [ "$3" = --version ] && exit 0; while [ "$1" != -d ]; do shift; done; cp {made} "$2""#,
        log = folder.path().join("log").display(),
        made = made.display()
    );
    let install = install(folder.path(), python(folder.path(), &script));
    let done = install.run().expect("installs");
    assert_eq!(std::fs::read(&done.library).expect("is there"), b"the library");
    assert_eq!(names(&install.cache), ["1.31.1"]);
    let log = std::fs::read_to_string(folder.path().join("log")).expect("was called");
    assert!(log.contains("-m pip download onnxruntime==1.31.1 --no-deps --only-binary=:all:"), "{log}");
}

#[test]
fn what_can_be_missing() {
    let folder = folder();
    let run = |script: Option<&str>| {
        let python = script.map_or_else(|| PathBuf::from("/nonexistent/python3"), |s| python(folder.path(), s));
        let error = install(folder.path(), python).run().expect_err("cannot");
        assert!(names(&folder.path().join("cache")).is_empty(), "nothing is left behind");
        error
    };
    let ok = r#"[ "$3" = --version ] && exit 0;"#;
    let error = run(None);
    assert!(matches!(error, InstallError::NoPython { .. }) && error.to_string().contains("--wheel FILE"), "{error}");
    let error = run(Some("echo 'No module named pip' >&2; exit 1"));
    assert!(matches!(error, InstallError::NoPip { .. }) && error.to_string().contains("ensurepip"), "{error}");
    let error = run(Some(&format!("{ok} echo 'ERROR: No matching distribution found for onnxruntime' >&2; exit 1")));
    assert!(matches!(error, InstallError::NoWheel { .. }) && error.to_string().contains("this platform"), "{error}");
    let offline = "echo 'WARNING: Retrying after connection broken by NewConnectionError'; \
                   echo 'ERROR: No matching distribution found for onnxruntime'";
    let error = run(Some(&format!("{ok} ({offline}) >&2; exit 1")));
    assert!(matches!(error, InstallError::Fetch { .. }) && error.to_string().contains("network"), "{error}");
    let error = run(Some(&format!("{ok} exit 0")));
    assert!(matches!(error, InstallError::Fetch { .. }), "{error}");
}

#[test]
fn wheels_that_are_none() {
    let folder = folder();
    let path = folder.path().join("a.whl");
    let run = || {
        let install = Install { wheel: Some(path.clone()), ..install(folder.path(), "python3".into()) };
        let error = install.run().expect_err("cannot");
        assert_eq!(installed(&install.cache), None);
        assert!(matches!(error, InstallError::Wheel { .. }), "{error}");
        error.to_string()
    };
    assert!(run().contains("No such file"));
    std::fs::write(&path, "no archive").expect("writes");
    assert!(run().contains("not a wheel"));
    wheel(
        &path,
        CompressionMethod::Stored,
        &[("other/file", b"x"), ("onnxruntime/capi/../../libonnxruntime.so", b"x")],
    );
    assert!(run().contains("holds no onnxruntime library"));
    wheel(&path, CompressionMethod::Stored, LIBRARY);
    let mut bytes = std::fs::read(&path).expect("reads");
    let at = bytes.windows(11).position(|w| w == b"the library").expect("it is stored");
    bytes[at] ^= 0x55;
    std::fs::write(&path, bytes).expect("writes");
    assert!(run().contains("cannot unpack"), "the checksum is compared");
}
