//! Models with numbers of few bits inside, in the forms that onnxruntime's and other tools write.
//! They are served like others, and answer like the same model in 32-bit floats, except for the
//! rounding.

use std::path::{Path, PathBuf};

use downbeat_core::tensor::DataType;
use downbeat_engine::{Buffer, Cut, LoadOptions, Tensor};

use crate::engines::{engines, onnxruntime};
use crate::gpu;
use crate::model::{FLOAT, ModelProto, NodeProto, TensorProto, cast, floats, folder, model, node, value, write};
use crate::support::{self, Random, as_floats, assert_close, copy, lane, load, run, try_load};

const WIDTH: i64 = 64;
const LAYERS: usize = 3;
const UINT8: i32 = 2;
const INT8: i32 = 3;
const FLOAT8E4M3FN: i32 = 17;
const INT4: i32 = 22;

/// The form in which a model keeps its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// Integers between `QuantizeLinear` and `DequantizeLinear`, products of floats.
    Pairs,
    /// Operators on integers.
    Operators,
    /// The scale of activations follows from their values in the run.
    Dynamic,
    /// Floats of 8 bits between `QuantizeLinear` and `DequantizeLinear`.
    Floats8,
    /// Weights of 4 bits.
    Weights4,
}

const FORMS: [Form; 5] = [Form::Pairs, Form::Operators, Form::Dynamic, Form::Floats8, Form::Weights4];

/// A weight of bytes.
fn bytes(name: &str, data_type: i32, dims: &[i64], raw_data: Vec<u8>) -> TensorProto {
    TensorProto { name: name.into(), data_type, dims: dims.to_vec(), raw_data, ..TensorProto::default() }
}

/// The value of a float of 8 bits that is neither subnormal nor a special value.
fn float8(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let value = (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7);
    if bits & 0x80 == 0 { value } else { -value }
}

/// The nearest float of 8 bits that is not larger than 448.
fn rounded(x: f32) -> f32 {
    let quantum = 2f32.powi((x.abs().log2().floor() as i32).max(-6) - 3);
    if x == 0.0 { x } else { (x / quantum).round_ties_even() * quantum }
}

/// The weights of a layer: in their stored form, and their values.
fn weights(random: &mut Random, form: Form) -> (Vec<u8>, Vec<f32>) {
    let count = (WIDTH * WIDTH) as usize;
    match form {
        Form::Floats8 => {
            // Values between 1/32 and 1/4, of either sign.
            let kept: Vec<u8> =
                (0..count).map(|_| (random.below(24) as u8 + 16) | (random.below(2) as u8) << 7).collect();
            let values = kept.iter().map(|bits| float8(*bits)).collect();
            (kept, values)
        }
        Form::Weights4 => {
            let numbers: Vec<i8> = (0..count).map(|_| random.below(15) as i8 - 7).collect();
            let kept = numbers.chunks(2).map(|pair| (pair[0] as u8 & 15) | (pair[1] as u8) << 4).collect();
            (kept, numbers.iter().map(|n| f32::from(*n) / 32.0).collect())
        }
        Form::Pairs | Form::Operators | Form::Dynamic => {
            // 7 bits: without VNNI, x86 adds two products of 8 bits in 16 bits, which overflow.
            let numbers: Vec<i8> = (0..count).map(|_| random.below(127) as i8 - 63).collect();
            (numbers.iter().map(|n| *n as u8).collect(), numbers.iter().map(|n| f32::from(*n) / 256.0).collect())
        }
    }
}

/// The answer of [`network`] of [`Form::Floats8`]. Its activations are rounded so much that plain
/// floats come nowhere near.
fn in_floats8(x: &Tensor) -> Tensor {
    let mut random = Random::new("quantised");
    let width = WIDTH as usize;
    let mut rows = as_floats(x);
    for _ in 0..LAYERS {
        let (_, weights) = weights(&mut random, Form::Floats8);
        let row = |row: &[f32]| {
            let sum =
                |column| row.iter().enumerate().map(|(i, x)| rounded(*x) * weights[i * width + column]).sum::<f32>();
            (0..width).map(|column| sum(column).max(0.0)).collect::<Vec<_>>()
        };
        rows = rows.chunks(width).flat_map(row).collect();
    }
    support::floats(&x.shape, &rows)
}

/// Dense layers with activations, and the same in floats. Both take and return floats.
fn network(form: Form) -> (ModelProto, ModelProto) {
    let mut random = Random::new("quantised");
    let (mut nodes, mut plain) = (Vec::new(), Vec::new());
    let mut initializers = vec![
        floats(
            "weight_scale",
            &[],
            &[match form {
                Form::Floats8 => 1.0,
                Form::Weights4 => 1.0 / 32.0,
                _ => 1.0 / 256.0,
            }],
        ),
        floats("scale", &[], &[if form == Form::Floats8 { 1.0 } else { 1.0 / 64.0 }]),
        bytes("middle", UINT8, &[], vec![128]),
        bytes("zero", UINT8, &[], vec![0]),
        bytes("weight_zero", INT8, &[], vec![0]),
        bytes("float_zero", FLOAT8E4M3FN, &[], vec![0]),
    ];
    if form != Form::Floats8 {
        initializers.pop();
    }
    let mut plain_weights = Vec::new();
    let (mut x, mut plain_x) = ("x".to_owned(), "x".to_owned());
    for layer in 0..LAYERS {
        let name = |what: &str| format!("{what}{layer}");
        let (kept, values) = weights(&mut random, form);
        let data_type = match form {
            Form::Floats8 => FLOAT8E4M3FN,
            Form::Weights4 => INT4,
            _ => INT8,
        };
        let (w, q, wf, product, y) = (name("w"), name("q"), name("wf"), name("product"), name("y"));
        initializers.push(bytes(&w, data_type, &[WIDTH, WIDTH], kept));
        plain_weights.push(floats(&w, &[WIDTH, WIDTH], &values));
        let zero = match (form, layer) {
            (Form::Floats8, _) => "float_zero",
            (_, 0) => "middle",
            _ => "zero",
        };
        match form {
            Form::Pairs | Form::Floats8 => {
                let (back, weight_zero) =
                    (name("back"), if form == Form::Pairs { "weight_zero" } else { "float_zero" });
                nodes.extend([
                    node("QuantizeLinear", &[&x, "scale", zero], &[&q]),
                    node("DequantizeLinear", &[&q, "scale", zero], &[&back]),
                    node("DequantizeLinear", &[&w, "weight_scale", weight_zero], &[&wf]),
                    node("MatMul", &[&back, &wf], &[&product]),
                    node("Relu", &[&product], &[&y]),
                ]);
            }
            Form::Weights4 => nodes.extend([
                node("DequantizeLinear", &[&w, "weight_scale"], &[&wf]),
                node("MatMul", &[&x, &wf], &[&product]),
                node("Relu", &[&product], &[&y]),
            ]),
            Form::Operators => {
                if layer == 0 {
                    nodes.push(node("QuantizeLinear", &[&x, "scale", zero], &["q"]));
                }
                let from = if layer == 0 { "q".to_owned() } else { x.clone() };
                let inputs = [&from, "scale", zero, &w, "weight_scale", "weight_zero", "scale", "zero"];
                // No value is below the zero point: an activation.
                nodes.push(node("QLinearMatMul", &inputs, &[&y]));
            }
            Form::Dynamic => nodes.extend([
                node("DynamicQuantizeLinear", &[&x], &[&q, &name("s"), &name("z")]),
                node("MatMulInteger", &[&q, &w, &name("z"), "weight_zero"], &[&name("sums")]),
                cast(&name("sums"), &name("float"), FLOAT),
                node("Mul", &[&name("float"), &name("s")], &[&name("scaled")]),
                node("Mul", &[&name("scaled"), "weight_scale"], &[&product]),
                node("Relu", &[&product], &[&y]),
            ]),
        }
        plain.extend([node("MatMul", &[&plain_x, &w], &[&product]), node("Relu", &[&product], &[&y])]);
        (x, plain_x) = (y.clone(), y);
    }
    nodes.push(match form {
        Form::Operators => node("DequantizeLinear", &[&x, "scale", "zero"], &["out"]),
        _ => node("Identity", &[&x], &["out"]),
    });
    plain.push(node("Identity", &[&plain_x], &["out"]));
    let ends = || (vec![value("x", FLOAT, &[-1, WIDTH])], vec![value("out", FLOAT, &[-1, WIDTH])]);
    let of = |nodes: Vec<NodeProto>, weights| {
        let (inputs, outputs) = ends();
        let mut model = model(nodes, weights, inputs, outputs);
        model.ir_version = 10;
        // 8-bit floats came with 19, 4-bit integers with 21.
        model.opset_import[0].version = if form == Form::Weights4 { 21 } else { 19 };
        model
    };
    let used: Vec<String> = nodes.iter().flat_map(|node| node.input.clone()).collect();
    initializers.retain(|weight| used.contains(&weight.name));
    (of(nodes, initializers), of(plain, plain_weights))
}

/// The tolerance, relative to the largest output: values are rounded to 8 bits three times.
const TOLERANCE: f32 = 0.03;

fn write_both(folder: &Path, form: Form) -> (PathBuf, PathBuf) {
    let (quantised, plain) = network(form);
    (write(folder, "quantised.onnx", &quantised), write(folder, "plain.onnx", &plain))
}

#[test]
fn quantised_models_give_what_the_same_in_floats_gives() {
    let mut random = Random::new("quantised_models");
    let folder = folder();
    for form in FORMS {
        let (quantised, plain) = write_both(folder.path(), form);
        for engine in engines() {
            let what = format!("{}, {form:?}", engine.info().name);
            let model = match try_load(&*engine, &quantised) {
                Err(error) if engine.info().name == "rten" && !matches!(form, Form::Pairs | Form::Dynamic) => {
                    println!("{what}: {error}");
                    continue;
                }
                loaded => loaded.unwrap_or_else(|e| panic!("{what}: {e}")),
            };
            let reference = load(&*engine, &plain);
            assert_eq!(model.signature(), reference.signature(), "{what}");
            let inputs = random.inputs(model.signature(), |_, _| 5);
            let mut expected = run(&mut *lane(&*reference), copy(&inputs)).expect("runs");
            if form == Form::Floats8 {
                expected = vec![in_floats8(&inputs[0])];
            }
            let largest = as_floats(&expected[0]).into_iter().fold(0.0f32, f32::max);
            assert!(largest > 0.5, "{what}: {largest}");
            let got = run(&mut *lane(&*model), copy(&inputs)).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_close(&what, &expected, &got, TOLERANCE);
            // The arithmetic is the same, wherever the model is cut.
            let cut = engine.load(&LoadOptions::new(&quantised, 1).with_cut(Cut::Stages(2)));
            let cut = cut.unwrap_or_else(|e| panic!("{what}: {e}"));
            let in_segments = gpu::run(&mut *lane(&*cut), cut.segments(), inputs);
            assert_eq!(cut.segments(), 2, "{what}");
            assert_close(&format!("{what}, in segments"), &got, &in_segments, 1e-5);
        }
    }
}

/// Requests may have 8-bit integers themselves.
#[test]
fn integers_of_8_bits_come_in_and_go_out() {
    let folder = folder();
    let network = model(
        vec![
            node("DequantizeLinear", &["x", "in_scale", "in_zero"], &["a"]),
            node("Mul", &["a", "factor"], &["b"]),
            node("QuantizeLinear", &["b", "out_scale", "out_zero"], &["y"]),
        ],
        vec![
            floats("in_scale", &[], &[0.5]),
            floats("out_scale", &[], &[0.25]),
            floats("factor", &[], &[-1.0]),
            bytes("in_zero", INT8, &[], vec![2]),
            bytes("out_zero", UINT8, &[], vec![100]),
        ],
        vec![value("x", INT8, &[-1, 3])],
        vec![value("y", UINT8, &[-1, 3])],
    );
    let path = write(folder.path(), "bytes.onnx", &network);
    for engine in engines() {
        let model = load(&*engine, &path);
        let numbers: [i8; 6] = [2, 3, -10, 127, -128, 0];
        let data = Buffer::from(numbers.map(|n| n as u8).as_slice());
        let x = Tensor { datatype: DataType::Int8, shape: vec![2, 3], data };
        let y = run(&mut *lane(&*model), vec![x]).expect("runs").remove(0);
        assert_eq!((y.datatype, &*y.shape), (DataType::Uint8, &[2, 3][..]), "{}", engine.info().name);
        // 100 - 2 * (x - 2), within what a byte holds.
        assert_eq!(y.data.as_slice(), [100, 98, 124, 0, 255, 104], "{}", engine.info().name);
    }
}

#[test]
fn datatypes_that_requests_cannot_have_are_named() {
    let folder = folder();
    let node = cast("x", "y", FLOAT);
    for (element, name) in [(FLOAT8E4M3FN, "17 (FLOAT8E4M3FN)"), (INT4, "22 (INT4)")] {
        let network =
            model(vec![node.clone()], vec![], vec![value("x", element, &[-1])], vec![value("y", FLOAT, &[-1])]);
        let error = downbeat_engine::inspect(&write(folder.path(), "m.onnx", &network)).unwrap_err().to_string();
        assert!(error.contains(&format!("input 'x' has ONNX element type {name}")), "{error}");
        assert!(error.contains("FP32") && error.contains("Cast"), "{error}");
    }
}

/// The same holds on a GPU, where the weights of few bits are copied once.
#[test]
fn quantised_models_run_on_gpus() {
    let mut random = Random::new("quantised_on_gpus");
    let folder = folder();
    for form in FORMS {
        let Some((stand_in, engine)) = gpu::gpus(1) else { return };
        let (quantised, _) = write_both(folder.path(), form);
        let host = load(&onnxruntime().expect("found before"), &quantised);
        for cut in [Cut::Whole, Cut::Stages(2)] {
            let model = gpu::load(&engine, &quantised, cut);
            let (mut here, mut there) = (lane(&*host), lane(&*model));
            let inputs = random.inputs(model.signature(), |_, _| 3);
            let expected = run(&mut *here, copy(&inputs)).expect("runs");
            let got = gpu::run(&mut *there, model.segments(), inputs);
            if !gpu::has_provider(&engine) {
                assert_close(&format!("{form:?} in {} segments", model.segments()), &expected, &got, 1e-2);
            }
            assert_eq!(got[0].shape, [3, WIDTH as usize]);
            drop((there, model));
        }
        drop(engine);
        assert_eq!(stand_in.leaks(), Vec::<String>::new());
    }
}
