//! `downbeat engine install`, with wheels and Pythons made by the test.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use downbeat_engine_ort::Search;
use downbeat_engine_ort::install::{GpuInstall, Install, NvidiaLibraries, installed, installed_gpu};
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

/// A program that stands in for `python3`.
fn python(folder: &Path, script: &str) -> PathBuf {
    let path = folder.join("python3");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("writes");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("is ours");
    path
}

fn install(folder: &Path, python: PathBuf) -> Install {
    Install { version: "1.31.1".into(), cache: folder.join("cache"), python, wheel: None, unverified: false, gpu: None }
}

/// The names in the cache, so that leftover files show.
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
        let done = install.run(&mut |_| {}).expect("installs, also over itself");
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
    // Answers as pip does, and keeps the requirements.
    let script = format!(
        r#"echo "$@" >> {log}; [ "$4" = --version ] && exit 0; pwd >> {log}; cat "$8" >> {log}
        while [ "$1" != -d ]; do shift; done; cp {made} "$2""#,
        log = folder.path().join("log").display(),
        made = made.display()
    );
    let install = install(folder.path(), python(folder.path(), &script));
    let done = install.run(&mut |_| {}).expect("installs");
    assert_eq!(std::fs::read(&done.library).expect("is there"), b"the library");
    assert_eq!(names(&install.cache), ["1.31.1"]);
    let log = std::fs::read_to_string(folder.path().join("log")).expect("was called");
    assert!(log.contains(" download --require-hashes --no-deps -r /"), "{log}");
    assert!(log.contains("\nonnxruntime==1.31.1 --hash=sha256:"), "{log}");
    assert!(log.contains("-I -c ") && log.contains("\n/\n"), "nothing of the working folder is run: {log}");
}

#[test]
fn what_nobody_knows_the_hash_of_is_fetched_only_unseen() {
    let folder = folder();
    let made = folder.path().join("onnxruntime-1.32.0-cp311-linux.whl");
    wheel(&made, CompressionMethod::Deflated, LIBRARY);
    let script = format!(
        r#"[ "$4" = --version ] && exit 0; [ "$5" = onnxruntime==1.32.0 ] || exit 1
        while [ "$1" != -d ]; do shift; done; cp {made} "$2""#,
        made = made.display()
    );
    let install = install(folder.path(), python(folder.path(), &script));
    let mut install = Install { version: "1.32.0".into(), ..install };
    let error = install.run(&mut |_| {}).expect_err("nobody knows it").to_string();
    assert!(error.contains("no hash of onnxruntime 1.32.0") && error.contains("(it knows 1.31.1)"), "{error}");
    assert!(error.contains("--unverified"), "{error}");
    install.unverified = true;
    install.run(&mut |_| {}).expect("installs");
}

#[test]
fn what_can_be_missing() {
    let folder = folder();
    let run = |script: Option<&str>| {
        let python = script.map_or_else(|| PathBuf::from("/nonexistent/python3"), |s| python(folder.path(), s));
        let error = install(folder.path(), python).run(&mut |_| {}).expect_err("cannot");
        assert!(names(&folder.path().join("cache")).is_empty(), "nothing is left behind");
        error.to_string()
    };
    let ok = r#"[ "$4" = --version ] && exit 0;"#;
    let error = run(None);
    assert!(error.starts_with("cannot run ") && error.contains("--wheel FILE"), "{error}");
    let error = run(Some("echo 'No module named pip' >&2; exit 1"));
    assert!(error.contains("has no pip") && error.contains("ensurepip"), "{error}");
    let error = run(Some(&format!("{ok} echo 'ERROR: No matching distribution found for onnxruntime' >&2; exit 1")));
    assert!(error.contains("pip has no wheel of onnxruntime") && error.contains("this platform"), "{error}");
    let offline = "echo 'WARNING: Retrying after connection broken by NewConnectionError'; \
                   echo 'ERROR: No matching distribution found for onnxruntime'";
    let error = run(Some(&format!("{ok} ({offline}) >&2; exit 1")));
    assert!(error.contains("pip could not fetch") && error.contains("network"), "{error}");
    let other = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. \n  a from b (from -r c):\n    Expected sha256 11\n         Got        22";
    let error = run(Some(&format!("{ok} echo '{other}' >&2; exit 1")));
    assert!(error.contains("the hash of pip's download") && error.contains(": a from b Got        22"), "{error}");
    let error = run(Some(&format!("{ok} exit 0")));
    assert!(error.contains("pip could not fetch"), "{error}");
}

#[test]
fn wheels_that_are_none() {
    let folder = folder();
    let path = folder.path().join("a.whl");
    let run = || {
        let install = Install { wheel: Some(path.clone()), ..install(folder.path(), "python3".into()) };
        let error = install.run(&mut |_| {}).expect_err("cannot");
        assert_eq!(installed(&install.cache), None);
        let error = error.to_string();
        assert!(error.contains("Expected a wheel"), "{error}");
        error
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

const GPU_METADATA: &str = "onnxruntime_gpu-1.31.1.dist-info/METADATA";
const REQUIREMENTS: &str = "Name: onnxruntime-gpu
Requires-Dist: numpy>=1.21.6
Requires-Dist: nvidia-cuda-runtime~=13.0; extra == \"cuda\"
Requires-Dist: nvidia-cudnn-cu13~=9.0; extra == \"cudnn\"
";
const GPU_FILES: [&str; 4] = [
    "libonnxruntime.so.1.31.1",
    "libonnxruntime_providers_cuda.so",
    "libonnxruntime_providers_shared.so",
    "libonnxruntime_providers_tensorrt.so",
];
/// The files of NVIDIA's packages that the installer looks for.
const NVIDIA_FILES: [&str; 14] = [
    "cu13/lib/libcudart.so.13",
    "cu13/lib/libnvrtc.so.13",
    "cu13/lib/libcublasLt.so.13",
    "cu13/lib/libcublas.so.13",
    "cu13/lib/libcurand.so.10",
    "cu13/lib/libcufft.so.12",
    "cudnn/lib/libcudnn.so.9",
    "cudnn/lib/libcudnn_adv.so.9",
    "cudnn/lib/libcudnn_cnn.so.9",
    "cudnn/lib/libcudnn_engines_precompiled.so.9",
    "cudnn/lib/libcudnn_engines_runtime_compiled.so.9",
    "cudnn/lib/libcudnn_graph.so.9",
    "cudnn/lib/libcudnn_heuristic.so.9",
    "cudnn/lib/libcudnn_ops.so.9",
];

/// The part of a library that the installer reads: a header that promises nothing.
const ELF: [u8; 64] = {
    let mut header = [0; 64];
    (header[0], header[1], header[2], header[3]) = (0x7f, b'E', b'L', b'F');
    header
};

fn gpu_wheel(path: &Path, content: &[u8], requirements: &str) {
    let names = GPU_FILES.map(|name| format!("onnxruntime/capi/{name}"));
    let mut entries: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), content)).collect();
    entries.push(("onnxruntime/capi/onnxruntime_pybind11_state.so", b"only Python needs it"));
    entries.push((GPU_METADATA, requirements.as_bytes()));
    wheel(path, CompressionMethod::Deflated, &entries);
}

fn nvidia_wheel(path: &Path, files: &[&str]) {
    let names: Vec<String> = files.iter().map(|name| format!("nvidia/{name}")).collect();
    let mut entries: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &ELF[..])).collect();
    entries.push(("nvidia/cu13/lib/libcudart_static.a", b"not to be loaded"));
    wheel(path, CompressionMethod::Deflated, &entries);
}

fn gpu_install(folder: &Path, python: PathBuf, libraries: NvidiaLibraries) -> Install {
    Install { gpu: Some(GpuInstall { libraries, search: Search::default() }), ..install(folder, python) }
}

/// A Python whose pip gives files of the folder `index`: for a requirement, the files whose names
/// begin with the requirement's name. It keeps the requirements in `log`.
fn index(folder: &Path) -> PathBuf {
    std::fs::create_dir_all(folder.join("index")).expect("creates");
    let script = format!(
        r#"[ "$4" = --version ] && exit 0; cat "$8" >> {folder}/log
        if grep -q ^onnxruntime "$8"; then wanted=onnxruntime_gpu; else wanted=nvidia; fi
        while [ "$1" != -d ]; do shift; done; cp {folder}/index/$wanted* "$2""#,
        folder = folder.display()
    );
    python(folder, &script)
}

#[test]
fn for_gpus_with_nvidias_libraries_where_they_are_missing() {
    let folder = folder();
    let python = index(folder.path());
    gpu_wheel(&folder.path().join("index/onnxruntime_gpu.whl"), b"first", REQUIREMENTS);
    nvidia_wheel(&folder.path().join("index/nvidia_cu13.whl"), &NVIDIA_FILES[..6]);
    nvidia_wheel(&folder.path().join("index/nvidia_cudnn.whl"), &NVIDIA_FILES[6..]);
    let install = gpu_install(folder.path(), python, NvidiaLibraries::Missing);
    let log = || std::fs::read_to_string(folder.path().join("log")).expect("was called");
    let mut said = Vec::new();

    let done = install.run(&mut |what| said.push(what.to_owned())).expect("installs");
    let gpu = install.cache.join("cuda");
    assert_eq!(done.library, gpu.join("1.31.1/libonnxruntime.so.1.31.1"));
    assert_eq!(done.nvidia, Some(gpu.join("nvidia")));
    assert_eq!(names(&install.cache), ["cuda"]);
    assert_eq!(names(&gpu), ["1.31.1", "nvidia"], "nothing else is left");
    assert_eq!(names(&gpu.join("1.31.1")), GPU_FILES);
    let mut libraries = NVIDIA_FILES.map(|file| file.rsplit('/').next().expect("has a name"));
    libraries.sort_unstable();
    assert_eq!(names(&gpu.join("nvidia")), libraries);
    assert!(log().contains("onnxruntime-gpu==1.31.1 --hash=sha256:"), "{}", log());
    for package in ["nvidia-cuda-runtime==13.", "nvidia-cudnn-cu13==9.", "nvidia-nvjitlink==13."] {
        assert!(log().contains(package), "{package} with what it needs: {}", log());
    }
    assert!(said.iter().any(|s| s.contains("libcudart.so.13") && s.contains("is missing")), "{said:?}");
    assert_eq!((installed(&install.cache), installed_gpu(&install.cache)), (None, Some(done.library)));

    // Again: complete folders are not fetched anew, and the library is replaced.
    std::fs::remove_file(folder.path().join("log")).expect("is there");
    gpu_wheel(&folder.path().join("index/onnxruntime_gpu.whl"), b"second", REQUIREMENTS);
    let done = install.run(&mut |_| {}).expect("installs over itself");
    assert_eq!(done.nvidia, None);
    assert_eq!(std::fs::read(&done.library).expect("is there"), b"second");
    assert!(!log().contains("nvidia-"), "{}", log());
    assert_eq!(names(&gpu), ["1.31.1", "nvidia"]);

    // An incomplete folder is fetched again.
    std::fs::remove_file(gpu.join("nvidia/libcudnn_ops.so.9")).expect("is there");
    assert_eq!(install.run(&mut |_| {}).expect("installs").nvidia, Some(gpu.join("nvidia")));
    std::fs::write(gpu.join("nvidia/libcufft.so.12"), &ELF[..63]).expect("writes");
    let done = install.run(&mut |_| {}).expect("installs");
    assert_eq!(done.nvidia, Some(gpu.join("nvidia")));
    assert_eq!(names(&gpu.join("nvidia")), libraries);

    // A library for the CPU stands beside it. An engine on the CPU takes that one first.
    let path = folder.path().join("onnxruntime.whl");
    wheel(&path, CompressionMethod::Deflated, LIBRARY);
    let cpu = Install { wheel: Some(path), gpu: None, ..install.clone() }.run(&mut |_| {}).expect("installs");
    assert_eq!(installed(&install.cache), Some(cpu.library));
    assert_eq!(installed_gpu(&install.cache), Some(done.library));
}

#[test]
fn for_gpus_without_nvidias_libraries() {
    let folder = folder();
    let path = folder.path().join("a.whl");
    gpu_wheel(&path, b"the library", "Name: onnxruntime-gpu\n");
    let nobody = PathBuf::from("/nonexistent/python3");
    let install = Install { wheel: Some(path), ..gpu_install(folder.path(), nobody, NvidiaLibraries::Never) };
    assert_eq!(install.run(&mut |_| {}).expect("installs").nvidia, None);
    assert_eq!(names(&install.cache.join("cuda")), ["1.31.1"]);
}

#[test]
fn wheels_that_are_not_for_these_gpus() {
    let folder = folder();
    let path = folder.path().join("a.whl");
    let python = index(folder.path());
    let run = |gpu: bool| {
        let install = gpu_install(folder.path(), python.clone(), NvidiaLibraries::Missing);
        let gpu = install.gpu.clone().filter(|_| gpu);
        let error = Install { wheel: Some(path.clone()), gpu, ..install.clone() }.run(&mut |_| {}).expect_err("cannot");
        assert_eq!((installed(&install.cache), installed_gpu(&install.cache)), (None, None));
        error.to_string()
    };
    wheel(&path, CompressionMethod::Stored, LIBRARY);
    let said = run(true);
    assert!(said.contains("for the CPU") && said.contains("package onnxruntime-gpu"), "{said}");
    gpu_wheel(&path, b"the library", REQUIREMENTS);
    assert!(run(false).contains("install it with --cuda"));
    gpu_wheel(&path, b"the library", &REQUIREMENTS.replace("-cu13", "-cu12"));
    assert!(run(true).contains("another CUDA than 13: it needs nvidia-cudnn-cu12~=9.0"));
    gpu_wheel(&path, b"the library", "Name: onnxruntime-gpu\n");
    assert!(run(true).contains("does not say which of NVIDIA's libraries"));
    // The fetched files must be complete.
    gpu_wheel(&path, b"the library", REQUIREMENTS);
    nvidia_wheel(&folder.path().join("index/nvidia_cu13.whl"), &NVIDIA_FILES[..6]);
    let said = run(true);
    assert!(said.contains("were fetched, and cuDNN 9 is missing: no libcudnn.so.9 found"), "{said}");
    assert_eq!(names(&folder.path().join("cache/cuda")), [""; 0]);
}
