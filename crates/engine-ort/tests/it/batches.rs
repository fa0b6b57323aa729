//! Batches that a model cannot take: an error, and the lane serves the next.

use downbeat_core::tensor::DataType;
use downbeat_engine::{Buffer, Tensor};

use crate::engines::{engines, onnxruntime};
use crate::model::{FLOAT, floats as weight, folder, identity, model, node, product, value, write};
use crate::support::{as_floats, floats, lane, load, run};

#[test]
fn wrong_inputs() {
    let folder = folder();
    let path = write(folder.path(), "model.onnx", &product());
    let good = || floats(&[1, 4], &[1., 0., 0., 0.]);
    let cases: [(Vec<Tensor>, &str); 8] = [
        (vec![], "expected 1 inputs, got 0"),
        (vec![good(), good()], "expected 1 inputs, got 2"),
        (vec![floats(&[1, 5], &[0.; 5])], "expected shape [-1, 4], got [1, 5]"),
        (vec![floats(&[4], &[0.; 4])], "expected shape [-1, 4], got [4]"),
        (vec![floats(&[2, 4], &[0.; 4])], "takes 32 bytes, got 16"),
        (vec![Tensor { datatype: DataType::Int32, ..good() }], "expected datatype FP32, got INT32"),
        (vec![Tensor { shape: vec![usize::MAX / 2, 4], ..good() }], "larger than memory"),
        (vec![Tensor { shape: vec![usize::MAX, 4], ..good() }], "larger than memory"),
    ];
    let engines = engines();
    let mut lanes: Vec<_> = engines.iter().map(|e| (e.info().name, lane(&*load(&**e, &path)))).collect();
    for (tensors, words) in cases {
        for (name, lane) in &mut lanes {
            let error = run(&mut **lane, crate::support::copy(&tensors)).expect_err("refused");
            assert!(error.reason.contains(words), "{name}: no '{words}' in: {error}");
            assert_eq!(error.engine, *name);
            let outputs = run(&mut **lane, vec![good()]).expect("the lane still runs");
            assert_eq!(as_floats(&outputs[0]), [1.0, -2.0]);
        }
    }
}

/// Shapes that each input allows, but not together: only the engine can tell.
#[test]
fn shapes_that_do_not_go_together() {
    let folder = folder();
    let inputs = vec![value("a", FLOAT, &[-1]), value("b", FLOAT, &[-1])];
    let proto = model(vec![node("Add", &["a", "b"], &["y"])], vec![], inputs, vec![value("y", FLOAT, &[-1])]);
    let path = write(folder.path(), "model.onnx", &proto);
    for engine in engines() {
        let mut lane = lane(&*load(&*engine, &path));
        let error = run(&mut *lane, vec![floats(&[2], &[0.; 2]), floats(&[3], &[0.; 3])]).expect_err("fails");
        println!("{error}");
        assert!(!error.reason.is_empty());
        let outputs = run(&mut *lane, vec![floats(&[2], &[1., 2.]), floats(&[2], &[3., 4.])]).expect("still runs");
        assert_eq!(as_floats(&outputs[0]), [4.0, 6.0]);
    }
}

#[test]
fn index_out_of_range() {
    let folder = folder();
    let table = weight("w", &[3], &[1.0, 2.0, 3.0]);
    let proto = model(
        vec![node("Gather", &["w", "x"], &["y"])],
        vec![table],
        vec![value("x", 7, &[-1])],
        vec![value("y", FLOAT, &[-1])],
    );
    let path = write(folder.path(), "model.onnx", &proto);
    let index = |n: i64| Tensor { datatype: DataType::Int64, shape: vec![1], data: Buffer::from(&n.to_le_bytes()[..]) };
    for engine in engines() {
        let mut lane = lane(&*load(&*engine, &path));
        run(&mut *lane, vec![index(7)]).expect_err("out of range");
        let outputs = run(&mut *lane, vec![index(2)]).expect("still runs");
        assert_eq!(as_floats(&outputs[0]), [3.0]);
    }
}

#[test]
fn empty_batch() {
    let folder = folder();
    let path = write(folder.path(), "model.onnx", &product());
    for engine in engines() {
        let mut lane = lane(&*load(&*engine, &path));
        let outputs = run(&mut *lane, vec![floats(&[0, 4], &[])]).expect("runs");
        assert_eq!(outputs[0].shape, [0, 2], "{}", engine.info().name);
        assert!(outputs[0].data.is_empty());
    }
}

#[test]
fn memory_that_is_not_aligned() {
    let folder = folder();
    let path = write(folder.path(), "model.onnx", &product());
    let mut bytes = vec![0u8];
    [1f32, 0., 0., 0.].iter().for_each(|f| bytes.extend(f.to_le_bytes()));
    let bytes = bytes::Bytes::from(bytes);
    for engine in engines() {
        let mut lane = lane(&*load(&*engine, &path));
        // One of the two buffers starts at an odd address, wherever the allocation is.
        for bytes in [bytes.slice(1..), bytes::Bytes::copy_from_slice(&bytes[1..])] {
            let input = Tensor { datatype: DataType::Fp32, shape: vec![1, 4], data: Buffer::from_bytes(bytes) };
            assert_eq!(as_floats(&run(&mut *lane, vec![input]).expect("runs")[0]), [1.0, -2.0]);
        }
    }
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn strings_that_are_not_whole() {
    let Some(engine) = onnxruntime() else { return };
    let folder = folder();
    let path = write(folder.path(), "model.onnx", &identity(8, &[-1]));
    let mut lane = lane(&*load(&engine, &path));
    let strings = |shape: usize, bytes: &[u8]| Tensor {
        datatype: DataType::Bytes,
        shape: vec![shape],
        data: Buffer::from(bytes),
    };
    for (tensor, words) in [
        (strings(1, b"\x05\0\0\0abc"), "element 0: its length says 5 bytes, but 3 are left"),
        (strings(2, b"\x01\0\0\0a\x01\0"), "element 1: its length says 4 bytes, but 2 are left"),
        (strings(2, b"\x01\0\0\0a"), "expected 2 strings, got 1"),
        (strings(1, b"\xff\xff\xff\xffa"), "says 4294967295 bytes"),
    ] {
        let error = run(&mut *lane, vec![tensor]).expect_err("refused");
        assert!(error.reason.contains(words), "{error}");
    }
    run(&mut *lane, vec![strings(1, b"\x01\0\0\0a")]).expect("still runs");
}
