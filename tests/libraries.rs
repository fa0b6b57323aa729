// Which libraries the tests of a crate find on this machine, for its build script: `has_cuda_provider`, `has_etcd`,
// `has_onnxruntime` and `has_ucx` are set where they are there. A test that needs one is marked
// `#[cfg_attr(not(has_etcd), ignore = "needs etcd on the path")]`, so that the test runner counts it as ignored, not passed.
// With DOWNBEAT_REQUIRE_ETCD, DOWNBEAT_REQUIRE_ONNXRUNTIME or DOWNBEAT_REQUIRE_UCX it is run in any case, and fails.

/// Sets the flags of these libraries.
fn find_libraries(names: &[&str]) {
    for name in names {
        let required = format!("DOWNBEAT_REQUIRE_{}", name.to_uppercase());
        println!("cargo:rerun-if-env-changed={required}");
        println!("cargo:rustc-check-cfg=cfg(has_{name})");
        if std::env::var_os(required).is_some() || is_there(name) {
            println!("cargo:rustc-cfg=has_{name}");
        }
    }
}

fn is_there(name: &str) -> bool {
    match name {
        "cuda_provider" => {
            println!("cargo:rerun-if-env-changed=ORT_DYLIB_PATH");
            let library = std::env::var_os("ORT_DYLIB_PATH").map(std::path::PathBuf::from);
            library.is_some_and(|path| path.with_file_name("libonnxruntime_providers_cuda.so").exists())
        }
        "etcd" => {
            println!("cargo:rerun-if-env-changed=PATH");
            std::process::Command::new("etcd").arg("--version").output().is_ok()
        }
        "onnxruntime" => {
            println!("cargo:rerun-if-env-changed=ORT_DYLIB_PATH");
            std::env::var_os("ORT_DYLIB_PATH").is_some()
        }
        // A build without the feature has nothing to test.
        "ucx" if std::env::var_os("CARGO_FEATURE_UCX").is_none() => false,
        "ucx" => {
            println!("cargo:rerun-if-changed=/etc/ld.so.cache");
            let libraries = std::process::Command::new("ldconfig").arg("-p").output();
            libraries.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).contains("libucp.so.0"))
        }
        other => panic!("{other}: nobody knows how to find it"),
    }
}
