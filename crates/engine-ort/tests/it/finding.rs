//! How the onnxruntime library is found, or not. A process can load a library only once, so each
//! look has a process of its own.

use std::path::{Path, PathBuf};
use std::process::Command;

use downbeat_engine_ort::{CudaOptions, Onnxruntime, Preference, Search, available, choose};

use crate::model::folder;

/// Not a test by itself: [`look`] starts it. Prints the library found and the engine chosen for the
/// places in its environment.
#[test]
#[ignore = "started by the tests beside it"]
fn child() {
    let Ok(cache) = std::env::var("DOWNBEAT_TEST_CACHE") else { return };
    let asked = std::env::var("DOWNBEAT_TEST_ASKED").ok().map(|p| ("DOWNBEAT_TEST_ASKED".to_owned(), PathBuf::from(p)));
    let system = std::env::var("DOWNBEAT_TEST_SYSTEM").is_ok();
    let executable = std::env::var_os("DOWNBEAT_TEST_EXECUTABLE").map(PathBuf::from);
    let search = Search { asked, executable, cache: Some(cache.into()), system, ..Search::default() };
    match Onnxruntime::find(&search) {
        Ok(Some(engine)) => println!("found {}", engine.library().display()),
        Ok(None) => println!("found nothing"),
        Err(e) => println!("find error: {e}"),
    }
    for preference in [Preference::Auto, Preference::Onnxruntime] {
        match choose(preference, &search, &CudaOptions::default()) {
            Ok(choice) => println!("{preference:?}: {} {:?}", choice.engine.info().name, choice.hint),
            Err(e) => println!("{preference:?}: error: {e}"),
        }
    }
    let names: Vec<_> = available(&search).iter().map(|i| i.name).collect();
    println!("available: {names:?}");
}

/// The report of [`child`].
fn look(variables: &[(&str, &Path)]) -> String {
    let mut command = Command::new(std::env::current_exe().expect("a test is a program"));
    command.args(["--exact", "finding::child", "--ignored", "--nocapture"]).env_remove("LD_LIBRARY_PATH");
    // A machine with GPUs prints more.
    command.env("CUDA_VISIBLE_DEVICES", "");
    command.envs(variables.iter().copied());
    let output = command.output().expect("starts");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{said}");
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

/// A library that claims to be onnxruntime of `version`, and has no interface.
fn imposter(folder: &Path, name: &str, version: &str) -> PathBuf {
    let source = folder.join("imposter.rs");
    let text = format!(
        r#"
        #[repr(C)] pub struct Base {{ get: extern "C" fn(u32) -> *const u8, version: extern "C" fn() -> *const u8 }}
        extern "C" fn get(_: u32) -> *const u8 {{ std::ptr::null() }}
        extern "C" fn version() -> *const u8 {{ "{version}\0".as_ptr() }}
        static BASE: Base = Base {{ get, version }};
        #[unsafe(no_mangle)] pub extern "C" fn OrtGetApiBase() -> *const Base {{ &BASE }}
        "#
    );
    std::fs::write(&source, text).expect("writes");
    let path = folder.join(name);
    let mut command = Command::new("rustc");
    command.args(["--edition=2024", "--crate-type=cdylib", "-o"]).arg(&path).arg(&source);
    let output = command.output().expect("rustc built this test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    path
}

#[test]
fn nothing_anywhere() {
    let folder = folder();
    let said = look(&[("DOWNBEAT_TEST_CACHE", folder.path())]);
    assert!(said.contains("found nothing"));
    assert!(said.contains("Auto: rten") && said.contains("downbeat engine install"));
    assert!(said.contains("Onnxruntime: error: no onnxruntime library found"));
    assert!(said.contains(r#"available: ["rten", "emulated"]"#));
}

#[test]
fn asked_for_and_missing() {
    let folder = folder();
    let missing = folder.path().join("libonnxruntime.so");
    let said = look(&[("DOWNBEAT_TEST_CACHE", folder.path()), ("DOWNBEAT_TEST_ASKED", &missing)]);
    assert!(said.contains("find error: no onnxruntime library at") && said.contains("named by DOWNBEAT_TEST_ASKED"));
    assert!(said.contains("Auto: error"), "what was asked for is not passed over");
}

#[test]
fn asked_for_and_no_library() {
    let folder = folder();
    let text = folder.path().join("libonnxruntime.so");
    std::fs::write(&text, "no library").expect("writes");
    let said = look(&[("DOWNBEAT_TEST_CACHE", folder.path()), ("DOWNBEAT_TEST_ASKED", &text)]);
    assert!(said.contains("cannot be used as onnxruntime: it is no library"));
}

/// A download or a full disk leaves such files. The loader maps them, and a process that reads
/// beyond their end is killed (SIGBUS).
#[test]
fn cut_short() {
    let folder = folder();
    let whole = std::fs::read(imposter(folder.path(), "whole.so", "1.31.1")).expect("reads");
    let cut = folder.path().join("libonnxruntime.so.1.31.1");
    for length in [40, 64, 1_000, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&cut, &whole[..length]).expect("writes");
        let said = look(&[("DOWNBEAT_TEST_CACHE", folder.path()), ("DOWNBEAT_TEST_ASKED", &cut)]);
        assert!(said.contains("cannot be used as onnxruntime: it is cut short"), "{length}");
        assert!(said.contains("`downbeat engine install` fetches one"), "{length}");
    }
}

#[test]
fn too_old() {
    let folder = folder();
    let cache = folder.path().join("cache/1.10.0");
    std::fs::create_dir_all(&cache).expect("creates");
    let old = imposter(folder.path(), "libonnxruntime.so.1.10.0", "1.10.0");
    let said = look(&[("DOWNBEAT_TEST_CACHE", folder.path()), ("DOWNBEAT_TEST_ASKED", &old)]);
    assert!(said.contains("is version 1.10.0; 1.24 or newer is needed"));
    std::fs::rename(&old, cache.join("libonnxruntime.so.1.10.0")).expect("moves");
    let said = look(&[("DOWNBEAT_TEST_CACHE", &folder.path().join("cache"))]);
    assert!(said.contains("Auto: rten") && said.contains("1.24 or newer"), "passed over, with the reason");
    assert!(said.contains("Onnxruntime: error"));
}

#[test]
fn on_the_loaders_path_and_in_the_cache() {
    let Some(engine) = crate::engines::onnxruntime() else { return };
    let real = engine.library().canonicalize().expect("is there");
    let folder = folder();
    let cache = folder.path().join("cache");
    // The newest version wins, compared as numbers.
    for version in ["1.9.9", "1.31.1"] {
        std::fs::create_dir_all(cache.join(version)).expect("creates");
    }
    std::fs::write(cache.join("1.9.9/libonnxruntime.so.1.9.9"), "no library").expect("writes");
    std::os::unix::fs::symlink(&real, cache.join("1.31.1/libonnxruntime.so.1.31.1")).expect("links");
    let said = look(&[("DOWNBEAT_TEST_CACHE", &cache)]);
    assert!(said.contains(&format!("found {}", cache.join("1.31.1/libonnxruntime.so.1.31.1").display())));
    assert!(said.contains("Auto: onnxruntime None"));
    assert!(said.contains(r#"available: ["onnxruntime", "rten", "emulated"]"#));

    let system = folder.path().join("system");
    std::fs::create_dir_all(&system).expect("creates");
    std::os::unix::fs::symlink(&real, system.join("libonnxruntime.so")).expect("links");
    let empty = folder.path().join("empty");
    let variables = [
        ("DOWNBEAT_TEST_CACHE", empty.as_path()),
        ("DOWNBEAT_TEST_SYSTEM", Path::new("1")),
        ("LD_LIBRARY_PATH", system.as_path()),
    ];
    assert!(look(&variables).contains("found /"));
}

/// A Python environment with a program, and with an onnxruntime library of `version`.
fn environment(folder: &Path, version: &str) -> (PathBuf, PathBuf) {
    let capi = folder.join("lib/python3.12/site-packages/onnxruntime/capi");
    std::fs::create_dir_all(&capi).expect("creates");
    (folder.join("bin/downbeat"), capi.join(format!("libonnxruntime.so.{version}")))
}

#[test]
fn in_the_environment_of_the_program() {
    let Some(engine) = crate::engines::onnxruntime() else { return };
    let real = engine.library().canonicalize().expect("is there");
    let folder = folder();
    let (program, library) = environment(&folder.path().join("env"), "1.31.1");
    std::os::unix::fs::symlink(&real, &library).expect("links");
    // An older program may have left another library in the cache.
    let cache = folder.path().join("cache");
    std::fs::create_dir_all(cache.join("1.40.0")).expect("creates");
    std::os::unix::fs::symlink(&real, cache.join("1.40.0/libonnxruntime.so.1.40.0")).expect("links");
    let said = look(&[("DOWNBEAT_TEST_CACHE", &cache), ("DOWNBEAT_TEST_EXECUTABLE", &program)]);
    assert!(said.contains(&format!("found {}", library.display())));
    assert!(said.contains("Auto: onnxruntime None"));
}

#[test]
fn a_bad_library_in_the_environment_is_passed_over() {
    let folder = folder();
    let (program, old) = environment(&folder.path().join("env"), "1.10.0");
    let empty = folder.path().join("cache");
    std::fs::rename(imposter(folder.path(), "old.so", "1.10.0"), &old).expect("moves");
    let variables = [("DOWNBEAT_TEST_CACHE", empty.as_path()), ("DOWNBEAT_TEST_EXECUTABLE", program.as_path())];
    let said = look(&variables);
    assert!(said.contains("Auto: rten") && said.contains("is version 1.10.0; 1.24 or newer is needed"));
    assert!(said.contains("in the Python environment that this program is installed in"));
    assert!(said.contains("`pip install --upgrade 'onnxruntime>=1.24'` there mends it"));
    assert!(said.contains("Onnxruntime: error"));
    std::fs::write(&old, "no library").expect("writes");
    let said = look(&variables);
    assert!(said.contains("Auto: rten") && said.contains("cannot be used as onnxruntime: it is no library"));

    let Some(engine) = crate::engines::onnxruntime() else { return };
    let real = engine.library().canonicalize().expect("is there");
    std::fs::create_dir_all(empty.join("1.31.1")).expect("creates");
    std::os::unix::fs::symlink(&real, empty.join("1.31.1/libonnxruntime.so.1.31.1")).expect("links");
    assert!(look(&variables).contains("Auto: onnxruntime None"), "the next place has a library");
}

#[test]
fn names_of_engines() {
    for name in Preference::NAMES {
        assert!(name.parse::<Preference>().is_ok());
    }
    let message = "tvm".parse::<Preference>().expect_err("unknown").to_string();
    assert!(
        message.contains("tvm") && message.contains("auto, cuda, tensorrt, onnxruntime, rten, emulated"),
        "{message}"
    );
}

/// The version shown is the manifest's version.
#[test]
fn version_of_rten() {
    use downbeat_engine::{Engine, Rten};
    let manifest = include_str!("../../../../Cargo.toml");
    let line = format!("rten = {{ version = \"{}\"", Rten::new().info().version);
    assert!(manifest.lines().any(|l| l.starts_with(&line)), "no line {line}");
}
