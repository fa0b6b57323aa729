//! Hostile configurations: an error, never a panic, never without end.

use std::fs;

use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_repository::ModelRepository;
use proptest::prelude::*;

struct Repository {
    _folder: tempfile::TempDir,
    repository: ModelRepository,
}

fn repository() -> Repository {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("m/1")).unwrap();
    fs::write(folder.path().join("m/1/model.onnx"), b"").unwrap();
    let repository = ModelRepository::open(folder.path()).unwrap();
    Repository { _folder: folder, repository }
}

fn signature() -> Signature {
    let spec =
        |name: &str, dims: &[i64]| TensorSpec { name: name.into(), datatype: DataType::Fp32, dims: dims.to_vec() };
    Signature { inputs: vec![spec("x", &[-1, 3])], outputs: vec![spec("y", &[-1, 2]), spec("z", &[])] }
}

/// Reads a configuration both ways, and completes it if possible.
fn read(repository: &Repository, text: &[u8]) {
    let file = repository.repository.path().join("m/config.pbtxt");
    fs::write(&file, text).unwrap();
    let from_file = repository.repository.definition("m", None);
    fs::remove_file(&file).unwrap();
    let from_request = std::str::from_utf8(text).ok().map(|text| repository.repository.definition("m", Some(text)));
    for result in [Some(from_file), from_request].into_iter().flatten() {
        match result {
            Ok(mut definition) => {
                let _ = definition.complete(&signature());
                for warmup in &definition.warmups {
                    // Warm-ups of a gigabyte are allowed, but not a test.
                    let size: f64 =
                        warmup.inputs.values().map(|i| i.dims.iter().map(|d| *d as f64).product::<f64>()).sum();
                    if size * f64::from(warmup.batch_size) < 1e5 {
                        let _ = warmup.request("m");
                    }
                }
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}

#[test]
fn nesting_of_a_hundred_thousand_is_refused() {
    let repository = repository();
    for (open, close) in [("input {", "}"), ("[a/inference.ModelConfig] {", "}"), ("input <", ">"), ("input [", "]")] {
        let depth = 900_000 / (open.len() + close.len());
        read(&repository, format!("{}{}", open.repeat(depth), close.repeat(depth)).as_bytes());
        read(&repository, open.repeat(depth).as_bytes());
    }
    let mut json = String::from("{\"input\":");
    json += &"[".repeat(100_000);
    let error = repository.repository.definition("m", Some(&json)).unwrap_err().to_string();
    assert!(error.starts_with("configuration of the load request:1:"), "{error}");
}

#[test]
fn a_configuration_of_gigabytes_is_not_read() {
    let repository = repository();
    let file = repository.repository.path().join("m/config.pbtxt");
    // A file with a hole: it takes no space, but reading it all would take memory.
    fs::File::create(&file).unwrap().set_len(64 << 30).unwrap();
    let error = repository.repository.definition("m", None).unwrap_err().to_string();
    assert!(
        error.contains("68719476736 bytes; a model configuration of more than 1048576 bytes is not read"),
        "{error}"
    );
    let error = repository.repository.definition("m", Some(&"#".repeat(2 << 20))).unwrap_err().to_string();
    assert!(error.contains("2097152 bytes; at most 1048576"), "{error}");
}

#[cfg(unix)]
#[test]
fn a_configuration_that_is_no_file_is_refused() {
    let repository = repository();
    let file = repository.repository.path().join("m/config.pbtxt");
    fs::create_dir(&file).unwrap();
    let error = repository.repository.definition("m", None).unwrap_err().to_string();
    assert!(error.ends_with("config.pbtxt: is not a file"), "{error}");
    fs::remove_dir(&file).unwrap();
    // Opening a pipe without a writer would block for ever.
    assert!(std::process::Command::new("mkfifo").arg(&file).status().unwrap().success());
    let error = repository.repository.definition("m", None).unwrap_err().to_string();
    assert!(error.ends_with("config.pbtxt: is not a file"), "{error}");
}

#[test]
fn numbers_at_the_ends_of_their_ranges_do_not_overflow() {
    let repository = repository();
    for config in [
        "max_batch_size: 2147483647 dynamic_batching { preferred_batch_size: 2147483647 }",
        "dynamic_batching { preferred_batch_size: 2147483647 }",
        "max_batch_size: -2147483648",
        "dynamic_batching { priority_levels: 18446744073709551615 default_priority_level: 18446744073709551615 }",
        "dynamic_batching { max_queue_delay_microseconds: 18446744073709551615 }",
        "input { name: \"x\" dims: [ 9223372036854775807, 9223372036854775807 ] reshape { shape: [ 9223372036854775807 ] } }",
        "input { name: \"x\" dims: -9223372036854775808 }",
        "instance_group { count: 2147483647 } instance_group { count: 2147483647 } instance_group { count: 2147483647 }",
        "version_policy { latest { num_versions: 4294967295 } }",
        "version_policy { specific { versions: [ -9223372036854775808, 9223372036854775807 ] } }",
        "model_warmup { batch_size: 4294967295 count: 4294967295 inputs { key: \"x\" value { data_type: TYPE_FP64 dims: [ 9223372036854775807, 4 ] random_data: true } } }",
        "parameters { key: \"slo_ms\" value { string_value: \"1e308\" } }",
        "parameters { key: \"slo_ms\" value { string_value: \"nan\" } }",
        "parameters { key: \"slo_ms\" value { string_value: \"-1\" } }",
    ] {
        read(&repository, config.as_bytes());
    }
    let config = "model_warmup { batch_size: 4294967295 inputs { key: \"x\" value { data_type: TYPE_FP64 dims: 9223372036854775807 zero_data: true } } }";
    let definition = repository.repository.definition("m", Some(config)).unwrap();
    let error = definition.warmups[0].request("m").unwrap_err();
    assert_eq!(error, "model_warmup '1', input 'x': is larger than 1073741824 bytes");
}

/// Pieces that configurations are made of, so that random texts get past the first token.
fn fragment() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(vec![
            "name",
            "max_batch_size",
            "input",
            "output",
            "dims",
            "data_type",
            "dynamic_batching",
            "key",
            "value",
            "parameters",
            "reshape",
            "shape",
            "preferred_batch_size",
            "instance_group",
            "kind",
            "count",
            "model_warmup",
            "inputs",
            "version_policy",
            "latest",
            "specific",
            "TYPE_FP32",
            "KIND_CPU",
            "true",
            "inf",
            "string_value",
        ])
        .prop_map(str::to_owned),
        prop::sample::select(vec![
            "{", "}", "[", "]", "<", ">", ":", ",", ";", "-", ".", "/", "#", "\n", "\"", "'", "\\"
        ])
        .prop_map(str::to_owned),
        prop::sample::select(vec![
            "1",
            "-1",
            "0x7f",
            "017",
            "1.5e400",
            "\"x\"",
            "'y'",
            "\"\\x4\"",
            "\"\\777\"",
            "1f",
            "1a"
        ])
        .prop_map(str::to_owned),
        any::<char>().prop_map(String::from),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        read(&repository(), &bytes);
    }

    #[test]
    fn random_fragments_never_panic(fragments in prop::collection::vec(fragment(), 0..40), spaced in any::<bool>()) {
        read(&repository(), fragments.join(if spaced { " " } else { "" }).as_bytes());
    }

    /// Real configurations with a few bytes changed reach further than noise.
    #[test]
    fn damaged_configurations_never_panic(
        which in any::<prop::sample::Index>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/corpus");
        let mut files: Vec<_> = fs::read_dir(corpus).unwrap().map(|e| e.unwrap().path()).collect();
        files.retain(|f| f.extension().is_some_and(|e| e == "pbtxt"));
        files.sort();
        let mut bytes = fs::read(&files[which.index(files.len())]).unwrap();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        read(&repository(), &bytes);
    }
}
