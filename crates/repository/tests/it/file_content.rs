//! Files whose content does not match their name, and texts that an editor on Windows has saved.

use std::fs;
use std::sync::Arc;

use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_repository::ModelRepository;

use crate::layout::{message, model};

const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 23026053\n";
const CONFIG: &str = r#"output { name: "y" data_type: TYPE_FP32 dims: 2 label_filename: "labels.txt" }"#;

fn repository() -> (tempfile::TempDir, ModelRepository) {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path(), "m", &["1/model.onnx"]);
    fs::write(folder.path().join("m/config.pbtxt"), CONFIG).unwrap();
    fs::write(folder.path().join("m/labels.txt"), "cat\ndog\n").unwrap();
    let repository = ModelRepository::open(folder.path()).unwrap();
    (folder, repository)
}

fn utf16(text: &str) -> Vec<u8> {
    format!("\u{feff}{text}").encode_utf16().flat_map(u16::to_le_bytes).collect()
}

/// The labels of the completed model.
fn labels(repository: &ModelRepository) -> Arc<[String]> {
    let mut definition = repository.definition("m", None).unwrap();
    let spec =
        |name: &str, dims: &[i64]| TensorSpec { name: name.into(), datatype: DataType::Fp32, dims: dims.to_vec() };
    definition.complete(&Signature { inputs: vec![spec("x", &[4])], outputs: vec![spec("y", &[2])] }).unwrap();
    definition.outputs[0].labels.clone()
}

#[test]
fn the_first_label_does_not_begin_with_a_byte_order_mark() {
    let (folder, repository) = repository();
    for text in ["cat\ndog\n", "\u{feff}cat\ndog\n", "\u{feff}cat\r\ndog"] {
        fs::write(folder.path().join("m/labels.txt"), text).unwrap();
        assert_eq!(labels(&repository)[..], ["cat", "dog"], "{text:?}");
    }
}

#[test]
fn labels_in_another_encoding_are_refused_with_its_name() {
    let (folder, repository) = repository();
    let place = "REPO/m/config.pbtxt:1:49: output[0].label_filename: REPO/m/labels.txt";
    let said = |content: &[u8]| {
        fs::write(folder.path().join("m/labels.txt"), content).unwrap();
        message(&repository, "m")
    };
    let words = "is UTF-16 text, as its byte order mark says; save it as UTF-8";
    assert_eq!(said(&utf16("cat\ndog\n")), format!("{place} {words}"));
    let words = "is not UTF-8 text (line 2, column 3); save it as UTF-8";
    assert_eq!(said(b"cat\ncl\xe9"), format!("{place} {words}"));
}

#[test]
fn a_configuration_with_a_byte_order_mark_is_read() {
    let (folder, repository) = repository();
    fs::write(folder.path().join("m/config.pbtxt"), format!("\u{feff}{CONFIG}")).unwrap();
    assert_eq!(labels(&repository).len(), 2);
    fs::write(folder.path().join("m/config.pbtxt"), utf16(CONFIG)).unwrap();
    let words = "REPO/m/config.pbtxt: is UTF-16 text, as its byte order mark says; save it as UTF-8";
    assert_eq!(message(&repository, "m"), words);
    for config in ["\u{feff}{\"max_batch_size\": 8}", "\u{feff}max_batch_size: 8"] {
        assert_eq!(repository.definition("m", Some(config)).unwrap().config.max_batch_size, 8);
    }
}

#[test]
fn a_git_lfs_pointer_is_named_wherever_a_file_is_read() {
    let words = "is a git-lfs pointer to 23026053 bytes (sha256:4d7a214614ab2935) in place of the file; \
                 fetch the file: git lfs pull";
    let (folder, repository) = repository();
    fs::write(folder.path().join("m/labels.txt"), POINTER).unwrap();
    let place = "REPO/m/config.pbtxt:1:49: output[0].label_filename: REPO/m/labels.txt";
    assert_eq!(message(&repository, "m"), format!("{place} {words}"));
    fs::write(folder.path().join("m/config.pbtxt"), POINTER).unwrap();
    assert_eq!(message(&repository, "m"), format!("REPO/m/config.pbtxt: {words}"));
    fs::create_dir(folder.path().join("m/warmup")).unwrap();
    fs::write(folder.path().join("m/warmup/x"), POINTER).unwrap();
    let config =
        r#"model_warmup { inputs { key: "x" value { data_type: TYPE_STRING dims: 1 input_data_file: "x" } } }"#;
    let error = repository.definition("m", Some(config)).unwrap().warmups[0].request("m").unwrap_err();
    assert!(error.contains(&format!("warmup/x {words}")), "{error}");
}
