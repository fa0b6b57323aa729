//! Model files that must be refused, with words that help.

use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;

use downbeat_core::tensor::DataType;
use downbeat_engine::{inspect, onnx};
use prost::Message;

use crate::engines::engines;
use crate::model::{
    AttributeProto, FLOAT, GraphProto, ModelProto, OperatorSetIdProto, SequenceTypeProto, StringStringEntryProto,
    TypeProto, ValueInfoProto, folder, identity, model, node, product, value, write,
};
use crate::support::{Random, example, floats, lane, load, run, try_load};

/// Every engine, and the look without an engine, refuse the file; the message has all of `words`.
/// Afterwards a good file loads.
fn refused(path: &Path, words: &[&str]) {
    let expect = |who: &str, message: String| {
        assert!(message.contains(&path.display().to_string()), "{who} does not name the file: {message}");
        for word in words {
            assert!(message.contains(word), "{who}: no '{word}' in: {message}");
        }
        println!("{message}");
    };
    expect("inspect", inspect(path).expect_err("refused").to_string());
    for engine in engines() {
        let name = engine.info().name;
        expect(name, try_load(&*engine, path).err().unwrap_or_else(|| panic!("{name} took it")).to_string());
        still_works(&*engine);
    }
}

/// Every engine refuses the file, in its own words, which contain all of `words`.
fn refused_by_engines(path: &Path, words: &[&str]) {
    for engine in engines() {
        let name = engine.info().name;
        let message = try_load(&*engine, path).err().unwrap_or_else(|| panic!("{name} took it")).to_string();
        for word in words {
            assert!(message.contains(word), "{name}: no '{word}' in: {message}");
        }
        println!("{message}");
        still_works(&*engine);
    }
}

fn still_works(engine: &dyn downbeat_engine::Engine) {
    let folder = folder();
    let path = write(folder.path(), "good.onnx", &product());
    let model = load(engine, &path);
    run(&mut *lane(&*model), vec![floats(&[1, 4], &[0.0; 4])]).expect("a good model still runs");
}

#[test]
fn signature_of_the_examples() {
    let mlp = inspect(&example("mlp")).expect("reads");
    let shape = |specs: &[downbeat_core::tensor::TensorSpec]| {
        specs.iter().map(|s| (s.datatype, s.dims.clone())).collect::<Vec<_>>()
    };
    assert_eq!(shape(&mlp.inputs), [(DataType::Fp32, vec![-1, 784])]);
    assert_eq!(shape(&mlp.outputs), [(DataType::Fp32, vec![-1, 10])]);
    for name in ["digits", "mlp", "encoder"] {
        let expected = inspect(&example(name)).expect("reads");
        for engine in engines() {
            assert_eq!(*load(&*engine, &example(name)).signature(), expected, "{name}, {}", engine.info().name);
        }
    }
}

#[test]
fn missing_file() {
    refused(Path::new("/nonexistent/model.onnx"), &["cannot be read", "No such file"]);
}

#[test]
fn folder_in_place_of_a_file() {
    let folder = folder();
    refused(folder.path(), &["not a regular file", "expected an ONNX model"]);
}

#[test]
fn empty_file() {
    let folder = folder();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, b"").expect("writes");
    refused(&path, &["empty", "expected an ONNX model"]);
}

#[test]
fn other_formats() {
    let folder = folder();
    let cases: [(&str, &[u8]); 4] = [
        ("text", b"Hello, I am a text file and no model.\n"),
        ("html", b"<!DOCTYPE html><html><body>404</body></html>"),
        ("zip", b"PK\x03\x04\x14\0\0\0\x08\0rest of an archive"),
        ("zeros", &[0; 4096]),
    ];
    for (name, bytes) in cases {
        let path = folder.path().join(format!("{name}.onnx"));
        std::fs::write(&path, bytes).expect("writes");
        refused(&path, &["not an ONNX model"]);
    }
}

#[test]
fn random_bytes() {
    let mut random = Random::new("random_bytes");
    let folder = folder();
    let path = folder.path().join("model.onnx");
    for round in 0..200 {
        let len = 1 + random.below(300) as usize;
        let bytes: Vec<u8> = (0..len).map(|_| random.bits() as u8).collect();
        std::fs::write(&path, &bytes).expect("writes");
        assert!(inspect(&path).is_err(), "round {round}: {bytes:?}");
    }
    refused(&path, &["not an ONNX model"]);
}

/// Every change of a byte is refused or loaded. Nothing panics, and no length is trusted.
#[test]
fn flipped_bits() {
    let mut random = Random::new("flipped_bits");
    let folder = folder();
    let path = folder.path().join("model.onnx");
    let good = product().encode_to_vec();
    let engines = engines();
    for _ in 0..300 {
        let mut bytes = good.clone();
        let at = random.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << random.below(8);
        std::fs::write(&path, &bytes).expect("writes");
        for engine in &engines {
            if let Ok(model) = try_load(&**engine, &path) {
                let inputs = model.signature().inputs.len();
                let mut lane = lane(&*model);
                let _ = run(&mut *lane, (0..inputs).map(|_| floats(&[1, 4], &[1.0; 4])).collect());
            }
        }
    }
}

#[test]
fn truncated_file() {
    let folder = folder();
    let path = folder.path().join("model.onnx");
    for whole in [product().encode_to_vec(), std::fs::read(example("digits")).expect("reads")] {
        for part in [whole.len() / 10, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..part]).expect("writes");
            refused(&path, &["truncated", "Export or copy it again"]);
        }
    }
}

/// A sparse file: it looks large, and takes nothing on the disk.
#[test]
fn gigabytes_of_garbage() {
    let folder = folder();
    let path = folder.path().join("model.onnx");
    let mut file = std::fs::File::create(&path).expect("creates");
    file.set_len(8 << 30).expect("grows");
    refused(&path, &["more than a model file can have", "external data"]);
    file.set_len(onnx::FILE_LIMIT).expect("shrinks");
    refused(&path, &["not an ONNX model"]);
    // A first field that claims the whole file, so that only the second level can tell.
    file.write_all(&[0x3a, 0xf9, 0xff, 0xff, 0xff, 0x07]).expect("writes");
    refused(&path, &["not an ONNX model"]);
}

#[test]
fn graphs_nested_without_end() {
    let folder = folder();
    let mut graph = GraphProto::default();
    for _ in 0..100 {
        let attribute = AttributeProto { name: "body".into(), g: Some(graph), r#type: 5, ..AttributeProto::default() };
        let mut holder = node("Loop", &[], &["y"]);
        holder.attribute.push(attribute);
        graph = GraphProto { node: vec![holder], ..GraphProto::default() };
    }
    graph.output.push(value("y", FLOAT, &[1]));
    let proto = ModelProto { ir_version: 8, graph: Some(graph), opset_import: vec![] };
    refused(&write(folder.path(), "model.onnx", &proto), &["nested more than 16 deep"]);
}

#[test]
fn no_graph_or_version() {
    let folder = folder();
    let mut proto = product();
    proto.ir_version = 0;
    refused(&write(folder.path(), "a.onnx", &proto), &["IR version"]);
    proto.ir_version = 8;
    proto.graph = None;
    refused(&write(folder.path(), "b.onnx", &proto), &["the file has no graph"]);
}

#[test]
fn unsupported_operator() {
    let folder = folder();
    let path = write(
        folder.path(),
        "model.onnx",
        &model(
            vec![node("Frobnicate", &["x"], &["y"])],
            vec![],
            vec![value("x", FLOAT, &[-1])],
            vec![value("y", FLOAT, &[-1])],
        ),
    );
    refused_by_engines(&path, &["Frobnicate"]);
    let message = try_load(&downbeat_engine::Rten::new(), &path).err().expect("refused").to_string();
    assert!(message.contains("downbeat engine install"), "{message}");
}

#[test]
fn versions_too_new() {
    let folder = folder();
    let mut proto = product();
    proto.ir_version = 99;
    refused_by_engines(&write(folder.path(), "ir.onnx", &proto), &["99", "xport", "older version"]);
    let mut proto = product();
    proto.opset_import = vec![OperatorSetIdProto { domain: String::new(), version: 999 }];
    refused_by_engines(&write(folder.path(), "opset.onnx", &proto), &["999", "xport", "older version"]);
}

#[test]
fn values_that_are_no_tensors() {
    let folder = folder();
    let sequence = SequenceTypeProto { elem_type: None };
    let info = TypeProto { tensor_type: None, sequence_type: Some(sequence) };
    let output = ValueInfoProto { name: "y".into(), r#type: Some(info) };
    let proto = model(vec![node("Identity", &["x"], &["y"])], vec![], vec![value("x", FLOAT, &[1])], vec![output]);
    refused(&write(folder.path(), "sequence.onnx", &proto), &["'y'", "sequence", "zipmap"]);
    // FLOAT8E5M2 has no name in the protocol.
    refused(&write(folder.path(), "float8.onnx", &identity(19, &[1])), &["'x'", "19", "expected one of"]);
}

/// `product` with its weight in another file.
fn external(location: &str, offset: &str, length: &str) -> ModelProto {
    let mut proto = product();
    let graph = proto.graph.as_mut().expect("has a graph");
    let weight = &mut graph.initializer[0];
    weight.raw_data.clear();
    weight.data_location = 1;
    let entry = |key: &str, value: &str| StringStringEntryProto { key: key.into(), value: value.into() };
    weight.external_data = vec![entry("location", location), entry("offset", offset), entry("length", length)];
    proto
}

fn weight_bytes() -> Vec<u8> {
    product().graph.expect("has a graph").initializer.remove(0).raw_data
}

#[test]
fn external_data_beside_the_model() {
    let folder = folder();
    for location in ["weights.data", "./model.onnx_data_1", "weights.bin"] {
        std::fs::write(folder.path().join(location), weight_bytes()).expect("writes");
        let path = write(folder.path(), "model.onnx", &external(location, "0", "32"));
        for engine in engines() {
            let model = load(&*engine, &path);
            let outputs = run(&mut *lane(&*model), vec![floats(&[1, 4], &[1., 0., 0., 0.])]).expect("runs");
            assert_eq!(crate::support::as_floats(&outputs[0]), [1.0, -2.0], "{}", engine.info().name);
        }
    }
}

#[test]
fn external_data_outside_the_folder() {
    let folder = folder();
    let secret = folder.path().join("secret.bin");
    std::fs::write(&secret, weight_bytes()).expect("writes");
    let inner = folder.path().join("model");
    std::fs::create_dir(&inner).expect("creates");
    let absolute = secret.display().to_string();
    for location in ["../secret.bin", "a/../../secret.bin", absolute.as_str(), ""] {
        let path = write(&inner, "model.onnx", &external(location, "0", "32"));
        refused(&path, &["'w'", location, "relative path without '..'"]);
    }
    symlink(&secret, inner.join("link.bin")).expect("links");
    let path = write(&inner, "model.onnx", &external("link.bin", "0", "32"));
    refused(&path, &["'w'", "link.bin", "outside of the model's folder"]);
    symlink(folder.path(), inner.join("up")).expect("links");
    let path = write(&inner, "model.onnx", &external("up/secret.bin", "0", "32"));
    refused(&path, &["'w'", "up/secret.bin", "outside of the model's folder"]);
}

/// A git-lfs pointer, as a clone without git-lfs has in the place of a large file.
const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 23026053\n";

#[test]
fn a_git_lfs_pointer_in_the_place_of_a_model_or_its_weights() {
    let folder = folder();
    let words = ["is a git-lfs pointer to 23026053 bytes (sha256:4d7a214614ab2935)", "git lfs pull"];
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, POINTER).expect("writes");
    refused(&path, &words);
    std::fs::write(folder.path().join("weights.data"), POINTER).expect("writes");
    write(folder.path(), "model.onnx", &external("weights.data", "0", "32"));
    refused(&path, &[&["'w'", "'weights.data'"], &words[..]].concat());
}

/// `snapshots/REVISION/FILE` are links to `blobs/DIGEST`. Only beside the link do weights have the
/// name that the model refers to.
#[test]
fn a_model_in_a_cache_of_downloads() {
    let folder = folder();
    let (blobs, snapshot) = (folder.path().join("blobs"), folder.path().join("snapshots/5c38ec7"));
    std::fs::create_dir_all(&blobs).expect("creates");
    std::fs::create_dir_all(&snapshot).expect("creates");
    write(&blobs, "4d7a", &external("model.onnx_data", "0", "32"));
    std::fs::write(blobs.join("93ab"), weight_bytes()).expect("writes");
    symlink("../../blobs/4d7a", snapshot.join("model.onnx")).expect("links");
    let version = folder.path().join("1");
    symlink("snapshots/5c38ec7", &version).expect("links");
    let path = version.join("model.onnx");
    refused(&path, &["model.onnx_data", "No such file", "link it where the model is a link"]);
    symlink("../../blobs/93ab", snapshot.join("model.onnx_data")).expect("links");
    for engine in engines() {
        let model = load(&*engine, &path);
        let outputs = run(&mut *lane(&*model), vec![floats(&[1, 4], &[1., 0., 0., 0.])]).expect("runs");
        assert_eq!(crate::support::as_floats(&outputs[0]), [1.0, -2.0], "{}", engine.info().name);
    }
    // Weights in another folder than the model's file: onnxruntime would not read such weights,
    // either.
    std::fs::create_dir(folder.path().join("other")).expect("creates");
    std::fs::write(folder.path().join("other/w"), weight_bytes()).expect("writes");
    std::fs::remove_file(snapshot.join("model.onnx_data")).expect("removes");
    symlink("../../other/w", snapshot.join("model.onnx_data")).expect("links");
    refused(&path, &["outside of the model's folder", "make the model a link into the folder of that file"]);
}

/// The same holds where a tensor is an attribute of a node in a nested graph.
#[test]
fn external_data_of_an_attribute() {
    let folder = folder();
    let tensor = external("/etc/passwd", "0", "4").graph.expect("has a graph").initializer.remove(0);
    let mut constant = node("Constant", &[], &["c"]);
    constant.attribute.push(AttributeProto {
        name: "value".into(),
        t: Some(tensor),
        r#type: 4,
        ..AttributeProto::default()
    });
    let body = GraphProto { node: vec![constant], ..GraphProto::default() };
    let mut branch = node("If", &["x"], &["y"]);
    branch.attribute.push(AttributeProto {
        name: "then_branch".into(),
        g: Some(body),
        r#type: 5,
        ..AttributeProto::default()
    });
    let proto = model(vec![branch], vec![], vec![value("x", 9, &[])], vec![value("y", FLOAT, &[4, 2])]);
    refused(&write(folder.path(), "model.onnx", &proto), &["/etc/passwd", "relative path"]);
}

#[test]
fn external_data_missing_or_short() {
    let folder = folder();
    let path = write(folder.path(), "model.onnx", &external("weights.bin", "0", "32"));
    refused(&path, &["weights.bin", "No such file", "beside the model"]);
    std::fs::write(folder.path().join("weights.bin"), [0; 31]).expect("writes");
    refused(&path, &["weights.bin", "31 bytes", "truncated"]);
    let path = write(folder.path(), "model.onnx", &external("weights.bin", "18446744073709551615", "32"));
    refused(&path, &["weights.bin", "31 bytes"]);
}

/// Kubernetes mounts files as links into a folder of their own.
#[test]
fn model_that_is_a_link() {
    let folder = folder();
    let real = folder.path().join("..data");
    std::fs::create_dir(&real).expect("creates");
    write(&real, "model.onnx", &product());
    let link = folder.path().join("model.onnx");
    symlink("..data/model.onnx", &link).expect("links");
    for engine in engines() {
        load(&*engine, &link);
    }
}
