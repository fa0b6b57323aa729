//! The report on a machine's GPUs and their needs, with drivers and libraries made by the test. A
//! process loads a driver only once, so each look has a process of its own.

use std::path::{Path, PathBuf};
use std::process::Command;

use downbeat_engine_ort::preflight::preflight;
use downbeat_engine_ort::{CudaOptions, Missing, Preference, Search, choose, cuda};

use crate::model::folder;

/// Not a test by itself: [`look`] starts it. Prints the findings for the places in its environment.
#[test]
#[ignore = "started by the tests beside it"]
fn child() {
    let Ok(cache) = std::env::var("DOWNBEAT_TEST_CACHE") else { return };
    let devices = std::env::var("DOWNBEAT_TEST_GPUS").unwrap_or_default();
    let devices = devices.split(',').filter_map(|gpu| gpu.parse().ok()).collect();
    let asked = std::env::var("DOWNBEAT_TEST_ASKED").ok().map(|p| ("DOWNBEAT_TEST_ASKED".to_owned(), PathBuf::from(p)));
    let search = Search { cache: Some(cache.into()), asked, ..Search::default() };
    let options = CudaOptions { devices, ..CudaOptions::default() };
    match preflight(&search, &options) {
        Ok(ready) => {
            let gpus: Vec<_> = ready.gpus.iter().map(ToString::to_string).collect();
            println!("ready: CUDA {}, {gpus:?}, {}", ready.driver, ready.library.display());
            ready.libraries.iter().for_each(|library| println!("loaded {}", library.path.display()));
        }
        Err(e) => println!("not ready: {e}"),
    }
    for (preference, missing) in
        [(Preference::Auto, Missing::Exit), (Preference::Cuda, Missing::Exit), (Preference::Cuda, Missing::Cpu)]
    {
        match choose(preference, &search, &CudaOptions { missing, ..options.clone() }) {
            Ok(choice) => {
                let name = choice.engine.info().name;
                println!("{preference:?} {missing}: {name}; hint {:?}; warning {:?}", choice.hint, choice.warning);
            }
            Err(e) => println!("{preference:?} {missing}: error: {e}"),
        }
    }
}

/// The report of [`child`], with the driver in a folder.
fn look(driver: &Path, variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().expect("a test is a program"));
    command.args(["--exact", "preflight::child", "--ignored", "--nocapture"]).env("LD_LIBRARY_PATH", driver);
    command.env_remove("CUDA_VISIBLE_DEVICES").envs(variables.iter().copied());
    let output = command.output().expect("starts");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{said}");
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

/// Builds a library from this source.
fn library(source: &str, path: &Path) {
    let text = path.with_extension("rs");
    std::fs::write(&text, source).expect("writes");
    let mut command = Command::new("rustc");
    command.args(["--edition=2024", "--crate-type=cdylib", "--crate-name=made", "-o"]).arg(path).arg(&text);
    let output = command.output().expect("rustc built this test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A driver that answers with numbers from its environment, in a folder of its own. By default it
/// is a new one with one GPU. (The stand-in of the driver is passed over by the preflight: it needs
/// no library.)
fn driver(folder: &Path) -> PathBuf {
    let driver = folder.join("driver");
    std::fs::create_dir_all(&driver).expect("creates");
    let source = r#"
        fn number(name: &str, usual: i32) -> i32 { std::env::var(name).map_or(usual, |v| v.parse().unwrap()) }
        #[unsafe(no_mangle)] pub extern "C" fn cuInit(_: u32) -> i32 { number("TEST_INIT", 0) }
        #[unsafe(no_mangle)] pub extern "C" fn cuDriverGetVersion(v: *mut i32) -> i32 { unsafe { *v = number("TEST_VERSION", 13000) }; 0 }
        #[unsafe(no_mangle)] pub extern "C" fn cuDeviceGetCount(c: *mut i32) -> i32 { unsafe { *c = number("TEST_GPUS", 1) }; 0 }
        #[unsafe(no_mangle)] pub extern "C" fn cuDeviceGet(d: *mut i32, ordinal: i32) -> i32 { unsafe { *d = ordinal + 100 }; 0 }
        #[unsafe(no_mangle)] pub extern "C" fn cuDeviceGetName(n: *mut u8, _: i32, d: i32) -> i32 {
            if d < 100 { return 101 }
            unsafe { n.copy_from(c"Test GPU".as_ptr().cast(), 9) }; 0
        }
        #[unsafe(no_mangle)] pub extern "C" fn cuDeviceGetUuid_v2(u: *mut [u8; 16], d: i32) -> i32 { unsafe { *u = [d as u8; 16] }; 0 }
        #[unsafe(no_mangle)] pub extern "C" fn cuDeviceTotalMem_v2(m: *mut usize, _: i32) -> i32 { unsafe { *m = 141 << 30 }; 0 }
        #[unsafe(no_mangle)] pub extern "C" fn cuDeviceGetAttribute(v: *mut i32, which: i32, d: i32) -> i32 {
            unsafe { *v = match which { 16 => 132, 75 if d == 100 => number("TEST_MAJOR", 9), 75 => 9, 76 => 0, _ => return 1 } }; 0
        }
        #[unsafe(no_mangle)] pub extern "C" fn cuGetErrorString(_: i32, s: *mut *const u8) -> i32 { unsafe { *s = c"told so".as_ptr().cast() }; 0 }
    "#;
    // Functions that the engine only looks for. It calls them when it starts, and no engine starts
    // on this driver.
    let lacking = cuda::DRIVER_FUNCTIONS.iter().filter(|name| !source.contains(&format!(" {name}(")));
    let lacking = lacking.map(|name| format!("#[unsafe(no_mangle)] pub extern \"C\" fn {name}() -> i32 {{ 801 }}\n"));
    library(&(source.to_owned() + &lacking.collect::<String>()), &driver.join("libcuda.so.1"));
    // A driver that by its name is for CUDA 13, and is not.
    std::fs::create_dir_all(folder.join("lacking")).expect("creates");
    library(source, &folder.join("lacking/libcuda.so.1"));
    driver
}

/// A cache as `downbeat engine install --cuda` leaves one. Its libraries load and do nothing.
fn cache(folder: &Path) -> PathBuf {
    let cache = folder.join("cache");
    let nothing = folder.join("nothing.so");
    library("", &nothing);
    let nvidia = "libcudart.so.13 libnvrtc.so.13 libcublasLt.so.13 libcublas.so.13 libcurand.so.10 libcufft.so.12 \
        libcudnn.so.9 libcudnn_graph.so.9 libcudnn_ops.so.9 libcudnn_cnn.so.9 libcudnn_adv.so.9 libcudnn_heuristic.so.9 \
        libcudnn_engines_precompiled.so.9 libcudnn_engines_runtime_compiled.so.9";
    let onnxruntime = "libonnxruntime.so.1.31.1 libonnxruntime_providers_cuda.so libonnxruntime_providers_shared.so";
    for (folder, names) in [("cuda/nvidia", nvidia), ("cuda/1.31.1", onnxruntime)] {
        std::fs::create_dir_all(cache.join(folder)).expect("creates");
        for name in names.split_whitespace() {
            std::fs::copy(&nothing, cache.join(folder).join(name)).expect("copies");
        }
    }
    cache
}

#[test]
fn all_that_is_needed_is_found_and_loaded() {
    let folder = folder();
    let (cache, driver) = (cache(folder.path()), driver(folder.path()));
    let variables = [("DOWNBEAT_TEST_CACHE", cache.to_str().expect("is text")), ("TEST_GPUS", "3")];
    let said = look(&driver, &variables);
    assert!(
        said.contains("ready: CUDA 13.0, [\"GPU 0: Test GPU, 141 GiB, 132 SMs, compute capability 9.0\"")
            && said.contains("\"GPU 2: "),
        "all GPUs"
    );
    assert!(said.contains(&format!("{}", cache.join("cuda/1.31.1/libonnxruntime.so.1.31.1").display())));
    let order: Vec<&str> = said.lines().filter(|line| line.starts_with("loaded ")).collect();
    assert_eq!(order.len(), 14);
    let place = |name: &str| order.iter().position(|line| line.ends_with(name)).expect("is loaded");
    assert!(place("libcudart.so.13") < place("libcurand.so.10"), "after what it needs");
    assert!(place("libcublasLt.so.13") < place("libcublas.so.13"));

    let said = look(&driver, &[&variables[..], &[("DOWNBEAT_TEST_GPUS", "2,0")]].concat());
    assert!(said.contains("ready: CUDA 13.0, [\"GPU 2: ") && !said.contains("\"GPU 1: "), "those asked for");
    let said = look(&driver, &[&variables[..], &[("DOWNBEAT_TEST_GPUS", "3")]].concat());
    assert!(said.contains("not ready: GPU 3 was asked for, and there are 3, from GPU 0 to GPU 2."));
}

/// The bytes of a container of code for these architectures, in the form of CUDA's compiler.
fn container(architectures: &[u32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for architecture in architectures {
        // Machine code, header and payload of 64 bytes each.
        bytes.extend([2, 0, 1, 1, 64, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend([0; 12]);
        bytes.extend(architecture.to_le_bytes());
        bytes.extend([0; 32 + 64]);
    }
    let mut header = vec![0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0];
    header.extend((bytes.len() as u64).to_le_bytes());
    [header, bytes].concat()
}

#[test]
fn gpus_that_the_library_has_no_code_for() {
    let folder = folder();
    let (cache, driver) = (cache(folder.path()), driver(folder.path()));
    // The published library has code for these architectures.
    let code = [container(&[75, 80, 86, 89, 90, 120]), container(&[80, 90])].concat();
    let source = format!(
        "#[used] #[unsafe(link_section = \".nv_fatbin\")] static CODE: [u8; {}] = {code:?};
         #[unsafe(no_mangle)] pub extern \"C\" fn code() -> *const u8 {{ CODE.as_ptr() }}",
        code.len()
    );
    let provider = cache.join("cuda/1.31.1/libonnxruntime_providers_cuda.so");
    library(&source, &provider);
    let cache = cache.to_str().expect("is text");
    let look = |gpus: &str, major: &str, asked: &str| {
        let of_test = [("TEST_GPUS", gpus), ("TEST_MAJOR", major), ("DOWNBEAT_TEST_GPUS", asked)];
        look(&driver, &[&of_test[..], &[("DOWNBEAT_TEST_CACHE", cache)]].concat())
    };
    assert!(look("1", "9", "").contains("ready: CUDA 13.0, [\"GPU 0: "));
    let said = look("1", "10", "");
    assert!(
        said.contains(
            "not ready: GPU 0 (Test GPU, compute capability 10.0): this onnxruntime has code for 7.5, 8.0, 8.6, 8.9, 9.0 and 12.0 only"
        ) && said.contains("Use other GPUs (--gpus, or gpus in [cuda]), or set ORT_DYLIB_PATH")
    );
    assert!(
        said.contains("Cuda exit: error: the engine cuda cannot be used: GPU 0 (Test GPU, compute capability 10.0)")
    );
    assert!(look("3", "10", "").contains("ready: CUDA 13.0, [\"GPU 1: "), "the others are used");
    assert!(
        look("3", "10", "1,0").contains("not ready: GPU 0 (Test GPU, compute capability 10.0)"),
        "it was asked for"
    );
    assert!(look("1", "12", "").contains("ready: CUDA 13.0, [\"GPU 0: "));
}

#[test]
fn libraries_that_are_missing() {
    let folder = folder();
    let (cache, driver) = (cache(folder.path()), driver(folder.path()));
    let look = || look(&driver, &[("DOWNBEAT_TEST_CACHE", cache.to_str().expect("is text"))]);
    let nvidia = cache.join("cuda/nvidia");

    let fft = nvidia.join("libcufft.so.12");
    let bytes = std::fs::read(&fft).expect("is there");
    std::fs::write(&fft, &bytes[..bytes.len() / 2]).expect("writes");
    assert!(look().contains(&format!("not ready: cuFFT does not load: {}: it is cut short", fft.display())));
    std::fs::write(&fft, bytes).expect("writes");

    std::fs::remove_file(nvidia.join("libcudnn_ops.so.9")).expect("is there");
    let said = look();
    let line = format!("not ready: cuDNN 9 in {} is not whole: there is no libcudnn_ops.so.9. Run", nvidia.display());
    assert!(said.contains(&line));
    // The machine has a GPU, so that a user who asked for no engine also hears what the engine
    // lacks.
    assert!(said.contains("Auto exit: rten; hint Some(\"models run on the CPU, with the engine rten, and not on"));
    assert!(said.contains("Cuda exit: error: the engine cuda cannot be used: cuDNN 9 in"));
    assert!(
        said.contains("Cuda cpu: rten;")
            && said.contains("warning Some(\"models run on the CPU, with the engine rten: cuda")
    );

    std::fs::remove_dir_all(&nvidia).expect("is there");
    let looked = "(looked beside onnxruntime, in the cache of `downbeat engine install`)";
    let said = look();
    assert!(said.contains(&format!("not ready: the CUDA runtime is missing: no libcudart.so.13 found {looked}")));
    assert!(said.contains("downbeat engine install --cuda"));

    let provider = cache.join("cuda/1.31.1/libonnxruntime_providers_cuda.so");
    let bytes = std::fs::read(&provider).expect("reads");
    std::fs::write(&provider, &bytes[..bytes.len() / 2]).expect("writes");
    let line = format!("libonnxruntime_providers_cuda.so does not load: {}: it is cut short", provider.display());
    assert!(look().contains(&line));

    std::fs::remove_file(provider).expect("is there");
    let said = look();
    assert!(said.contains("not ready: no onnxruntime with the CUDA provider found (looked in the cache"));
    assert!(said.contains("downbeat engine install --cuda"));
}

#[test]
fn a_library_for_the_cpu_that_was_asked_for() {
    let folder = folder();
    let (cache, driver) = (cache(folder.path()), driver(folder.path()));
    let path = folder.path().join("libonnxruntime.so");
    let (cache, asked) = (cache.to_str().expect("is text"), path.to_str().expect("is text"));
    let look = || look(&driver, &[("DOWNBEAT_TEST_CACHE", cache), ("DOWNBEAT_TEST_ASKED", asked)]);
    assert!(look().contains(&format!("not ready: no onnxruntime library at {asked} (named by DOWNBEAT_TEST_ASKED)")));
    std::fs::write(&path, "").expect("writes");
    let said = look();
    assert!(said.contains(&format!(
        "not ready: the onnxruntime library at {asked} (named by DOWNBEAT_TEST_ASKED) is not for GPUs"
    )));
}

#[test]
fn no_driver() {
    let folder = folder();
    let cache = cache(folder.path());
    let cache = cache.to_str().expect("is text");
    let driver = folder.path().join("driver");
    std::fs::create_dir_all(&driver).expect("creates");
    // A file that is no library counts as no driver. The loader finds it first, also on a machine
    // with a driver.
    std::fs::write(driver.join("libcuda.so.1"), "no library").expect("writes");
    let said = look(&driver, &[("DOWNBEAT_TEST_CACHE", cache), ("CUDA_VISIBLE_DEVICES", "")]);
    let nothing = said.contains("not ready: no NVIDIA driver: libcuda.so.1 does not load (");
    assert!(nothing || said.contains("not ready: the NVIDIA driver sees no GPU"), "a real driver was found elsewhere");
    assert!(said.contains("Auto exit: rten; hint Some(\"rten is the slower engine"), "GPUs are no matter here");
    assert!(said.contains("Cuda exit: error: the engine cuda cannot be used: "));
    assert!(said.contains("Cuda cpu: rten;") && said.contains("rten: cuda cannot be used: "));
}

#[test]
fn drivers_that_do_not_work() {
    let folder = folder();
    let driver = driver(folder.path());
    let cache = folder.path().to_str().expect("is text");
    let run = |init: &str, version: &str| {
        look(
            &driver,
            &[("DOWNBEAT_TEST_CACHE", cache), ("TEST_INIT", init), ("TEST_VERSION", version), ("TEST_GPUS", "0")],
        )
    };
    let said = run("0", "12080");
    assert!(said.contains(
        "not ready: the NVIDIA driver supports CUDA 12.8; CUDA 13.0 is needed. Install the NVIDIA driver 580"
    ));
    assert!(run("0", "13000").contains("not ready: the NVIDIA driver sees no GPU. See what nvidia-smi lists"));
    assert!(run("100", "13000").contains("not ready: the NVIDIA driver sees no GPU. See"));
    assert!(run("34", "0").contains("not ready: the libcuda.so.1 that was loaded is a stub"));
    let said = run("802", "13000");
    assert!(said.contains("not ready: the NVIDIA driver does not start: error 802 (told so). Start the machine's"));

    std::fs::copy(driver.join("libcuda.so.1"), driver.join("libcuda.so")).expect("copies");
    assert!(run("0", "13000").contains("not ready: libcuda.so and libcuda.so.1 are different libraries here"));
    std::fs::remove_file(driver.join("libcuda.so")).expect("is there");
    let said = look(&folder.path().join("lacking"), &[("DOWNBEAT_TEST_CACHE", cache)]);
    assert!(said.contains(
        "not ready: the libcuda.so.1 that was loaded is no NVIDIA driver, or too old a one: it has no function cu"
    ));
    library("", &driver.join("libcuda.so.1"));
    assert!(run("0", "13000").contains("is no NVIDIA driver, or too old a one: it has no function cuInit"));
}
