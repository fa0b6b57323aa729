//! Broken and hostile files: no panic, and no allocation of the sizes that a file claims.

use std::fs::File as OsFile;

use downbeat_engine::onnx::message::{put, put_head};
use downbeat_repair::repair;
use prost::Message;

use crate::support::*;

fn seed() -> Vec<u8> {
    let graph = graph(
        vec![
            of_ml(node("LinearClassifier", &["x"], &["label", "scores"], Vec::new())),
            of_ml(node("ZipMap", &["scores"], &["p"], vec![strings("classlabels_strings", &["a", "b"])])),
        ],
        vec![value("x", 1, &[-1, 2])],
        vec![value("label", 7, &[1]), list("p", 1)],
    );
    model(14, &[("", 28), (ML, 1)], graph).encode_to_vec()
}

/// Repairs a file. The repaired file needs no repair.
fn try_out(bytes: &[u8]) {
    let file = File::with(bytes);
    if let Ok(Some(planned)) = repair(&file.path()) {
        let mut repaired = Vec::new();
        planned.write(&mut repaired).unwrap();
        let again = repair(&File::with(&repaired).path()).unwrap().map(|again| again.done);
        assert_eq!(again, None, "after {:?} of {bytes:?}", planned.done);
    }
}

#[test]
fn a_file_cut_off_anywhere_is_no_panic() {
    let whole = seed();
    (0..whole.len()).for_each(|len| try_out(&whole[..len]));
}

#[test]
fn a_changed_byte_is_no_panic() {
    let whole = seed();
    for index in 0..whole.len() {
        for bit in [0x01, 0x08, 0x80, 0xff] {
            let mut changed = whole.clone();
            changed[index] ^= bit;
            try_out(&changed);
        }
    }
}

#[test]
fn graphs_inside_of_graphs_end() {
    // Each graph has an operator with a graph.
    let mut graph = Vec::new();
    for _ in 0..10_000 {
        let (mut attribute, mut node, mut outer) = (Vec::new(), Vec::new(), Vec::new());
        put(&mut attribute, 6, &graph);
        put(&mut node, 4, b"If");
        put(&mut node, 5, &attribute);
        put(&mut outer, 1, &node);
        graph = outer;
    }
    let mut model = vec![8, 14];
    put(&mut model, 7, &graph);
    let file = File::with(&model);
    assert!(repair(&file.path()).unwrap().is_none(), "the engine says what is wrong");
}

#[test]
fn an_operator_of_a_gigabyte_is_refused_unread() {
    // A sparse file that claims an operator of 1 GiB.
    let (node, mut graph) = (1u64 << 30, Vec::new());
    put_head(&mut graph, 1, node);
    let mut model = vec![8, 14];
    put_head(&mut model, 7, graph.len() as u64 + node);
    model.extend(graph);
    let file = File::with(&model);
    let len = model.len() as u64 + node;
    OsFile::options().write(true).open(file.path()).unwrap().set_len(len).unwrap();
    let refused = file.refused();
    assert!(refused.contains("takes 1073741824 bytes") && refused.contains("onnx.save"), "{refused}");
}

#[test]
fn a_pipe_a_folder_and_an_empty_file_are_left_to_the_engine() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    assert!(repair(&pipe).unwrap().is_none());
    assert!(repair(folder.path()).unwrap().is_none());
    assert!(repair(&folder.path().join("none")).unwrap().is_none());
    assert!(repair(&File::with(b"").path()).unwrap().is_none());
}
