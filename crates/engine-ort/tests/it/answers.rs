//! The answers that engines compute.

use std::path::{Path, PathBuf};

use downbeat_core::tensor::DataType;
use downbeat_engine::{Buffer, Engine, LoadOptions, Tensor};

use crate::engines::{engines, onnxruntime};
use crate::model::{self, FLOAT, NodeProto, folder, identity, node, product, value, write};
use crate::support::{Random, as_floats, assert_close, copy, example, floats, lane, load, run};

/// The tolerance within which the examples and generated models agree, relative to their largest
/// output.
const TOLERANCE: f32 = 1e-3;

/// ONNX lets a convolution leave out the size of its kernel, which the weight tells, and a pool its
/// strides.
#[test]
fn what_onnx_lets_a_file_leave_out_is_completed() {
    let folder = folder();
    let pool = NodeProto { attribute: vec![model::ints("kernel_shape", &[1, 1])], ..node("MaxPool", &["b"], &["y"]) };
    let nodes = vec![node("Conv", &["x", "w"], &["a"]), node("ConvTranspose", &["a", "w"], &["b"]), pool];
    let weights = model::floats("w", &[1, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let (input, output) = (value("x", FLOAT, &[-1, 1, 2, 2]), value("y", FLOAT, &[-1, 1, 2, 2]));
    let made = model::model(nodes, vec![weights], vec![input], vec![output]);
    for name in ["model.onnx", "model.bin"] {
        let path = write(folder.path(), name, &made);
        for engine in engines() {
            let model = load(&*engine, &path);
            let outputs = run(&mut *lane(&*model), vec![floats(&[1, 1, 2, 2], &[1.0; 4])]).expect("runs");
            assert_eq!(as_floats(&outputs[0]), [10.0, 20.0, 30.0, 40.0], "{}", engine.info().name);
        }
    }
}

#[test]
fn known_product() {
    let folder = folder();
    let path = write(folder.path(), "model.onnx", &product());
    for engine in engines() {
        let model = load(&*engine, &path);
        assert_eq!(model.signature().inputs.len(), 1, "the weight is no input");
        let outputs = run(&mut *lane(&*model), vec![floats(&[2, 4], &[1., 0., 0., 0., 1., 2., 3., 4.])]).expect("runs");
        assert_eq!(outputs[0].shape, [2, 2]);
        assert_eq!(as_floats(&outputs[0]), [1.0, -2.0, 1.0 + 1.0 - 4.5 + 8.0, -2.0 + 8.0 + 9.0 + 1.0]);
    }
}

#[test]
fn engines_agree_on_examples() {
    let mut random = Random::new("engines_agree_on_examples");
    let engines = engines();
    for name in ["digits", "mlp", "encoder"] {
        let models: Vec<_> = engines.iter().map(|e| load(&**e, &example(name))).collect();
        for batch in [1usize, 3, 8] {
            let length = 1 + random.below(24) as usize;
            let inputs = random.inputs(models[0].signature(), |_, axis| if axis == 0 { batch } else { length });
            let outputs: Vec<_> = models
                .iter()
                .map(|m| run(&mut *lane(&**m), copy(&inputs)).unwrap_or_else(|e| panic!("{name}: {e}")))
                .collect();
            for other in &outputs[1..] {
                assert_close(name, &outputs[0], other, TOLERANCE);
            }
            for (spec, tensor) in models[0].signature().outputs.iter().zip(&outputs[0]) {
                assert_eq!((spec.datatype, spec.dims.len()), (tensor.datatype, tensor.shape.len()), "{name}");
                assert_eq!(tensor.shape[0], batch, "{name}");
            }
        }
    }
}

#[test]
fn rows_of_a_batch_do_not_depend_on_each_other() {
    let mut random = Random::new("rows_of_a_batch");
    for engine in engines() {
        for name in ["digits", "mlp"] {
            let model = load(&*engine, &example(name));
            let mut lane = lane(&*model);
            let inputs = random.inputs(model.signature(), |_, _| 5);
            let whole = run(&mut *lane, copy(&inputs)).expect("runs");
            for row in 0..5 {
                let alone = inputs.iter().map(|t| take_row(t, row)).collect();
                let alone = run(&mut *lane, alone).expect("runs");
                let of_batch: Vec<Tensor> = whole.iter().map(|t| take_row(t, row)).collect();
                assert_close(name, &of_batch, &alone, 1e-5);
            }
        }
    }
}

fn take_row(tensor: &Tensor, row: usize) -> Tensor {
    let rows = tensor.shape[0];
    let len = tensor.data.len() / rows;
    let mut shape = tensor.shape.clone();
    shape[0] = 1;
    Tensor { datatype: tensor.datatype, shape, data: Buffer::from(&tensor.data.as_slice()[row * len..][..len]) }
}

#[test]
fn lanes_share_a_model_at_the_same_time() {
    let mut random = Random::new("lanes_share_a_model");
    for engine in engines() {
        let model = load(&*engine, &example("mlp"));
        let cases: Vec<_> = (1..=8).map(|n| random.inputs(model.signature(), |_, _| n)).collect();
        let mut first = lane(&*model);
        let expected: Vec<_> = cases.iter().map(|c| run(&mut *first, copy(c)).expect("runs")).collect();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut lane = lane(&*model);
                    for _ in 0..50 {
                        for (inputs, expected) in cases.iter().zip(&expected) {
                            let outputs = run(&mut *lane, copy(inputs)).expect("runs");
                            assert_close("concurrent", &outputs, expected, 1e-6);
                        }
                    }
                });
            }
        });
    }
}

#[test]
fn outputs_outlive_their_model() {
    let folder = folder();
    let path = write(folder.path(), "model.onnx", &product());
    for engine in engines() {
        let model = load(&*engine, &path);
        let mut lane = lane(&*model);
        let mut first = run(&mut *lane, vec![floats(&[1, 4], &[1., 0., 0., 0.])]).expect("runs");
        let bytes = first.remove(0).data.into_bytes();
        let slice = bytes.slice(4..8);
        // These runs would overwrite the memory if it was not the output's own.
        for _ in 0..8 {
            run(&mut *lane, vec![floats(&[1, 4], &[0., 9., 9., 9.])]).expect("runs");
        }
        drop((lane, model, bytes));
        assert_eq!(slice[..], (-2.0f32).to_le_bytes());
    }
}

/// The engine may use an input's or a weight's own memory for an output. The output must outlive
/// both.
#[test]
fn outputs_that_are_inputs_or_weights() {
    let folder = folder();
    let mut proto = model::model(
        vec![node("Relu", &["x"], &["y"])],
        vec![crate::model::floats("w", &[2], &[3.0, 4.0])],
        vec![value("x", FLOAT, &[-1, 2])],
        vec![value("y", FLOAT, &[-1, 2]), value("x", FLOAT, &[-1, 2]), value("w", FLOAT, &[2])],
    );
    proto.ir_version = 8;
    let path = write(folder.path(), "model.onnx", &proto);
    for engine in engines() {
        let Ok(model) = crate::support::try_load(&*engine, &path) else {
            panic!("{} refuses it", engine.info().name);
        };
        let mut lane = lane(&*model);
        let outputs = run(&mut *lane, vec![floats(&[1, 2], &[-5.0, 6.0])]).expect("runs");
        let again = run(&mut *lane, vec![floats(&[1, 2], &[1.0, 1.0])]).expect("runs");
        drop((lane, model, again));
        let outputs: Vec<_> = outputs.iter().map(as_floats).collect();
        assert_eq!(outputs, [[0.0, 6.0], [-5.0, 6.0], [3.0, 4.0]]);
    }
}

/// Bytes of three elements of a datatype, in a client's form.
fn three(datatype: DataType) -> Vec<u8> {
    match datatype {
        DataType::Bool => vec![1, 0, 1],
        DataType::Bytes => b"\x02\0\0\0hi\0\0\0\0\x05\0\0\0a\0b\xff!".to_vec(),
        other => (1..=3 * other.size().unwrap_or(0)).map(|n| n as u8).collect(),
    }
}

fn element_type(datatype: DataType) -> i32 {
    match datatype {
        DataType::Fp32 => 1,
        DataType::Uint8 => 2,
        DataType::Int8 => 3,
        DataType::Uint16 => 4,
        DataType::Int16 => 5,
        DataType::Int32 => 6,
        DataType::Int64 => 7,
        DataType::Bytes => 8,
        DataType::Bool => 9,
        DataType::Fp16 => 10,
        DataType::Fp64 => 11,
        DataType::Uint32 => 12,
        DataType::Uint64 => 13,
        DataType::Bf16 => 16,
    }
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn every_datatype_passes_through_onnxruntime() {
    let Some(engine) = onnxruntime() else { return };
    let folder = folder();
    for datatype in DataType::ALL {
        let path = write(folder.path(), &format!("{datatype}.onnx"), &identity(element_type(datatype), &[-1]));
        let model = load(&engine, &path);
        assert_eq!(model.signature().inputs[0].datatype, datatype);
        let bytes = three(datatype);
        let input = Tensor { datatype, shape: vec![3], data: Buffer::from(bytes.as_slice()) };
        let outputs = run(&mut *lane(&*model), vec![input]).unwrap_or_else(|e| panic!("{datatype}: {e}"));
        assert_eq!((outputs[0].datatype, outputs[0].shape.as_slice()), (datatype, &[3][..]));
        assert_eq!(outputs[0].data.as_slice(), bytes, "{datatype}");
        let empty = Tensor { datatype, shape: vec![0], data: Buffer::new() };
        let outputs = run(&mut *lane(&*model), vec![empty]).unwrap_or_else(|e| panic!("{datatype}, empty: {e}"));
        assert_eq!((outputs[0].shape.as_slice(), outputs[0].data.len()), (&[0][..], 0));
    }
}

#[test]
fn rten_passes_its_datatypes_and_names_the_others() {
    let engine = downbeat_engine::Rten::new();
    let folder = folder();
    for datatype in DataType::ALL {
        let path = write(folder.path(), &format!("{datatype}.onnx"), &identity(element_type(datatype), &[-1]));
        let loaded = engine.load(&LoadOptions::new(path, 1));
        use DataType::{Bool, Fp32, Int8, Int32, Int64, Uint8};
        if matches!(datatype, Fp32 | Int64 | Int32 | Int8 | Uint8 | Bool) {
            let model = loaded.unwrap_or_else(|e| panic!("{e}"));
            let mut bytes = three(datatype);
            if datatype == Int64 {
                bytes = [-7i64, 0, 1 << 30].iter().flat_map(|n| n.to_le_bytes()).collect();
            }
            let input = Tensor { datatype, shape: vec![3], data: Buffer::from(bytes.as_slice()) };
            let outputs = run(&mut *lane(&*model), vec![input]).unwrap_or_else(|e| panic!("{datatype}: {e}"));
            assert_eq!(outputs[0].data.as_slice(), bytes, "{datatype}");
        } else {
            let message = loaded.err().map(|e| e.to_string()).unwrap_or_default();
            assert!(message.contains("'x'") && message.contains(datatype.name()), "{datatype}: {message}");
            assert!(message.contains("downbeat engine install"), "{message}");
        }
    }
}

#[test]
fn rten_refuses_integers_beyond_its_own() {
    let folder = folder();
    let path = write(folder.path(), "model.onnx", &identity(7, &[-1]));
    let model = load(&downbeat_engine::Rten::new(), &path);
    let mut lane = lane(&*model);
    let wide = |n: i64| Tensor { datatype: DataType::Int64, shape: vec![1], data: Buffer::from(&n.to_le_bytes()[..]) };
    let error = run(&mut *lane, vec![wide(1 << 31)]).expect_err("it has 32 bits");
    assert!(error.reason.contains("2147483648"), "{error}");
    assert!(run(&mut *lane, vec![wide(1)]).is_ok());
}

#[test]
fn booleans_are_made_zero_or_one() {
    let folder = folder();
    let path = write(folder.path(), "model.onnx", &identity(9, &[-1]));
    for engine in engines() {
        let model = load(&*engine, &path);
        let input = Tensor { datatype: DataType::Bool, shape: vec![3], data: Buffer::from(&[7, 0, 255][..]) };
        let outputs = run(&mut *lane(&*model), vec![input]).expect("runs");
        assert_eq!(outputs[0].data.as_slice(), [1, 0, 1], "{}", engine.info().name);
    }
}

/// Needs the graphs that `python tools/zoo.py` generates, a few hundred megabytes.
#[test]
#[ignore = "needs generated models: python tools/zoo.py, then cargo test --release -p downbeat-engine -- --ignored generated"]
fn engines_agree_on_generated_models() {
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/zoo");
    let zoo = std::env::var_os("DOWNBEAT_ZOO").map_or(default, PathBuf::from);
    let mut paths = Vec::new();
    models_in(&zoo, 4, &mut paths);
    paths.sort();
    assert!(
        !paths.is_empty(),
        "no models in {}: generate them with `python tools/zoo.py`, or set DOWNBEAT_ZOO to where they are",
        zoo.display()
    );
    let engines = engines();
    let mut random = Random::new("engines_agree_on_generated_models");
    for path in paths {
        let name = path.display().to_string();
        let models: Vec<_> = engines.iter().map(|e| load(&**e, &path)).collect();
        for batch in [1usize, 2] {
            let inputs = random.inputs(models[0].signature(), |_, axis| if axis == 0 { batch } else { 16 });
            let outputs: Vec<_> = models
                .iter()
                .map(|m| run(&mut *lane(&**m), copy(&inputs)).unwrap_or_else(|e| panic!("{name}: {e}")))
                .collect();
            for other in &outputs[1..] {
                assert_close(&name, &outputs[0], other, TOLERANCE);
            }
        }
        println!("{name}: {} engines agree", engines.len());
    }
}

fn models_in(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for path in entries.filter_map(Result::ok).map(|e| e.path()) {
        if path.is_dir() && depth > 0 {
            models_in(&path, depth - 1, found);
        } else if path.extension().is_some_and(|e| e == "onnx") {
            found.push(path);
        }
    }
}
