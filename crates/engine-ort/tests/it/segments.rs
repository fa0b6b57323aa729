//! Models in segments: the same answers as whole, with batches parted and joined on the way.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_engine::{Cut, Emulated, Engine, LoadError, LoadOptions, Model, OperatorProfile, State, Tensor};

use crate::engines::engines;
use crate::model::{FLOAT, convolution, floats, folder, model, node, value, write};
use crate::support::{Random, assert_close, copy, example, lane, load, run};

/// The tolerance, relative to the largest output, as between engines.
const TOLERANCE: f32 = 1e-4;

fn cut(engine: &dyn Engine, path: &Path, cut: Cut) -> Result<Arc<dyn Model>, LoadError> {
    engine.load(&LoadOptions::new(path, 1).with_cut(cut))
}

fn stages(engine: &dyn Engine, path: &Path, stages: usize) -> Arc<dyn Model> {
    cut(engine, path, Cut::Stages(stages)).unwrap_or_else(|e| panic!("{e}"))
}

/// A residual network of `layers` dense layers. It has an output in the middle (`early`), one at
/// the end (`late`), and a mask that the last layer reads.
fn two_exits(folder: &Path, layers: usize) -> PathBuf {
    const WIDTH: i64 = 6;
    let mut random = Random::new("two_exits");
    let mut nodes = Vec::new();
    let mut weights = Vec::new();
    let mut x = "x".to_owned();
    for layer in 0..layers {
        let name = |what: &str| format!("{what}{layer}");
        let numbers: Vec<f32> = (0..WIDTH * WIDTH).map(|_| random.float() / 2.0).collect();
        weights.push(floats(&name("w"), &[WIDTH, WIDTH], &numbers));
        nodes.push(node("MatMul", &[&x, &name("w")], &[&name("product")]));
        nodes.push(node("Tanh", &[&name("product")], &[&name("tanh")]));
        let sum = if layer == layers / 2 { "early".to_owned() } else { name("sum") };
        nodes.push(node("Add", &[&name("tanh"), &x], &[&sum]));
        x = sum;
    }
    nodes.push(node("Mul", &[&x, "mask"], &["late"]));
    let dims = [-1, WIDTH];
    let inputs = vec![value("x", FLOAT, &dims), value("mask", FLOAT, &dims)];
    let outputs = vec![value("early", FLOAT, &dims), value("late", FLOAT, &dims)];
    write(folder, "exits.onnx", &model(nodes, weights, inputs, outputs))
}

fn state(tensors: Vec<Tensor>) -> State {
    State { tensors }
}

#[test]
fn segments_one_after_the_other_give_the_answers_of_the_whole() {
    let mut random = Random::new("segments_one_after_the_other");
    let folder = folder();
    let models = [example("digits"), example("mlp"), example("encoder"), two_exits(folder.path(), 5)];
    for engine in engines() {
        for path in &models {
            let whole = load(&*engine, path);
            let most = if path.ends_with("mlp/1/model.onnx") { 2 } else { 3 };
            for count in 1..=most {
                let cut = stages(&*engine, path, count);
                let what = format!("{}, {}, {count} segments", engine.info().name, path.display());
                assert_eq!((cut.segments(), cut.segment_info().len()), (count, count), "{what}");
                assert_eq!(cut.signature(), whole.signature(), "{what}");
                let length = 1 + random.below(20) as usize;
                let inputs = random.inputs(whole.signature(), |_, axis| if axis == 0 { 3 } else { length });
                let expected = run(&mut *lane(&*whole), copy(&inputs)).expect("runs");
                let mut lane = lane(&*cut);
                let mut steps = state(copy(&inputs));
                for (index, info) in cut.segment_info().iter().enumerate() {
                    lane.run(index..index + 1, &mut steps).unwrap_or_else(|e| panic!("{what}: {e}"));
                    assert_eq!(steps.tensors.len(), info.live.len(), "{what}");
                    for (tensor, spec) in steps.tensors.iter().zip(&info.live) {
                        assert_eq!((tensor.datatype, tensor.shape.len()), (spec.datatype, spec.dims.len()), "{what}");
                        assert_eq!(tensor.shape.first(), Some(&3), "{what}: {}", spec.name);
                    }
                }
                assert_close(&what, &expected, &steps.tensors, TOLERANCE);
                let mut at_once = state(inputs);
                lane.run(0..count, &mut at_once).expect("runs");
                assert_close(&what, &expected, &at_once.tensors, TOLERANCE);
            }
        }
    }
}

/// E²bird and DVABatch rest on this rule: each row has the same answer as alone, for every batch
/// and for all rows that leave or join it on the way.
#[test]
fn batches_parted_and_joined_at_random_between_segments() {
    let mut random = Random::new("batches_parted_and_joined_at_random");
    let folder = folder();
    let path = two_exits(folder.path(), 6);
    for engine in engines() {
        for (path, count) in [(&path, 5), (&example("encoder"), 4)] {
            let whole = load(&*engine, path);
            let cut = stages(&*engine, path, count);
            for _ in 0..6 {
                let rows = 1 + random.below(6) as usize;
                let inputs = random.inputs(whole.signature(), |_, axis| if axis == 0 { rows } else { 7 });
                let expected = run(&mut *lane(&*whole), copy(&inputs)).expect("runs");
                let mut lane = lane(&*cut);
                let mut batches = vec![state(inputs)];
                for index in 0..count {
                    // A part is joined with its neighbour or not, then parted or not: the order of
                    // rows stays.
                    let mut mixed: Vec<State> = Vec::new();
                    for batch in std::mem::take(&mut batches) {
                        match mixed.pop() {
                            Some(before) if random.below(2) == 0 => {
                                mixed.push(State::join(vec![before, batch]).expect("neighbours fit"));
                            }
                            before => mixed.extend(before.into_iter().chain([batch])),
                        }
                    }
                    for batch in mixed {
                        let rows = batch.rows();
                        let first = random.below(rows as u64) as usize;
                        let parts = if first == 0 { vec![rows] } else { vec![first, rows - first] };
                        batches.extend(batch.split(&parts).expect("parts are the batch"));
                    }
                    for batch in &mut batches {
                        lane.run(index..index + 1, batch).unwrap_or_else(|e| panic!("{}: {e}", engine.info().name));
                    }
                }
                let joined = State::join(batches).expect("outputs fit");
                assert_close(
                    &format!("{}, {}", engine.info().name, path.display()),
                    &expected,
                    &joined.tensors,
                    TOLERANCE,
                );
            }
        }
    }
}

/// A residual that a convolution adds is overwritten in place only where it is the batch's own.
#[test]
fn parts_of_a_batch_that_share_memory_do_not_see_each_others_results() {
    let mut random = Random::new("parts_that_share_memory");
    let folder = folder();
    let path = residual_convolutions(folder.path());
    for engine in engines() {
        let whole = load(&*engine, &path);
        let cut = cut(&*engine, &path, Cut::At(vec!["sum0".into(), "sum1".into()]));
        let cut = cut.unwrap_or_else(|e| panic!("{e}"));
        let inputs = random.inputs(whole.signature(), |_, _| 4);
        let expected = run(&mut *lane(&*whole), copy(&inputs)).expect("runs");
        let mut lane = lane(&*cut);
        let mut batch = state(copy(&inputs));
        lane.run(0..1, &mut batch).expect("runs");
        let place = |batch: &State| batch.tensors[0].data.as_slice().as_ptr();
        let before = place(&batch);
        lane.run(1..2, &mut batch).expect("runs");
        if engine.info().name == "onnxruntime" {
            assert_eq!(place(&batch), before, "a sum is left where its residual was");
        }
        lane.run(2..3, &mut batch).expect("runs");
        assert_close(engine.info().name, &expected, &batch.tensors, TOLERANCE);

        let mut batch = state(inputs);
        lane.run(0..1, &mut batch).expect("runs");
        let mut parts = batch.split(&[1, 3]).expect("parts are the batch");
        let kept: Vec<Vec<u8>> = parts[1].tensors.iter().map(|t| t.data.as_slice().to_vec()).collect();
        lane.run(1..3, &mut parts[0]).expect("runs");
        let after: Vec<Vec<u8>> = parts[1].tensors.iter().map(|t| t.data.as_slice().to_vec()).collect();
        assert_eq!(kept, after, "{}: the other part's state has changed", engine.info().name);
        lane.run(1..3, &mut parts[1]).expect("runs");
        let joined = State::join(parts).expect("outputs fit");
        assert_close(engine.info().name, &expected, &joined.tensors, TOLERANCE);
    }
}

/// `sum2` of `sum(i) = Relu(sum(i-1) + Conv(Relu(Conv(sum(i-1)))))`, where `sum(-1)` is a
/// convolution of the input.
fn residual_convolutions(folder: &Path) -> PathBuf {
    const CHANNELS: i64 = 16;
    let mut random = Random::new("residual_convolutions");
    let mut nodes = Vec::new();
    let mut weights = Vec::new();
    let mut weight = |name: &str| {
        let numbers: Vec<f32> = (0..CHANNELS * CHANNELS).map(|_| random.float() / 4.0).collect();
        weights.push(floats(name, &[CHANNELS, CHANNELS, 1, 1], &numbers));
    };
    weight("u");
    nodes.push(convolution("x", "u", "stem"));
    let mut x = "stem".to_owned();
    for block in 0..3 {
        let name = |what: &str| format!("{what}{block}");
        ["v", "w"].iter().for_each(|w| weight(&name(w)));
        nodes.push(convolution(&x, &name("v"), &name("first")));
        nodes.push(node("Relu", &[&name("first")], &[&name("inner")]));
        nodes.push(convolution(&name("inner"), &name("w"), &name("second")));
        nodes.push(node("Add", &[&name("second"), &x], &[&name("added")]));
        let sum = name("sum");
        nodes.push(node("Relu", &[&name("added")], &[&sum]));
        x = sum;
    }
    let dims = [-1, CHANNELS, 5, 5];
    write(
        folder,
        "residual.onnx",
        &model(nodes, weights, vec![value("x", FLOAT, &dims)], vec![value(&x, FLOAT, &dims)]),
    )
}

/// An exit beside the way to the last layer, which the file lists last.
#[test]
fn an_early_exit_is_made_early() {
    let folder = folder();
    let mut random = Random::new("an_early_exit");
    let mut weight = |name: &str| {
        let numbers: Vec<f32> = (0..36).map(|_| random.float()).collect();
        floats(name, &[6, 6], &numbers)
    };
    let weights = vec![weight("u"), weight("v"), weight("w"), weight("e")];
    let mut nodes = vec![node("MatMul", &["x", "u"], &["a"]), node("Tanh", &["a"], &["b"])];
    nodes.extend([node("MatMul", &["b", "v"], &["c"]), node("Tanh", &["c"], &["d"])]);
    nodes.extend([
        node("MatMul", &["d", "w"], &["late"]),
        node("MatMul", &["b", "e"], &["f"]),
        node("Tanh", &["f"], &["early"]),
    ]);
    let dims = [-1, 6];
    let outputs = vec![value("late", FLOAT, &dims), value("early", FLOAT, &dims)];
    let path = write(folder.path(), "exit.onnx", &model(nodes, weights, vec![value("x", FLOAT, &dims)], outputs));
    for engine in engines() {
        let whole = load(&*engine, &path);
        let cut = cut(&*engine, &path, Cut::At(vec!["early".into()])).unwrap_or_else(|e| panic!("{e}"));
        let inputs = random.inputs(whole.signature(), |_, _| 3);
        let expected = run(&mut *lane(&*whole), copy(&inputs)).expect("runs");
        let mut batch = state(inputs);
        let mut lane = lane(&*cut);
        lane.run(0..1, &mut batch).expect("runs");
        let live = &cut.segment_info()[0].live;
        let exit = live.iter().position(|l| l.name == "early").expect("it is an output of the model");
        assert_close(engine.info().name, &expected[1..], &batch.tensors[exit..=exit], TOLERANCE);
        lane.run(1..2, &mut batch).expect("runs");
        assert_close(engine.info().name, &expected, &batch.tensors, TOLERANCE);
    }
}

/// `y = table0[ids] + table1[ids]`, with tables of 4 MiB.
fn two_tables(folder: &Path) -> PathBuf {
    let numbers = vec![0.5; 4096 * 256];
    let weights = vec![floats("table0", &[4096, 256], &numbers), floats("table1", &[4096, 256], &numbers)];
    let nodes = vec![
        node("Gather", &["table0", "ids"], &["first"]),
        node("Gather", &["table1", "ids"], &["second"]),
        node("Add", &["first", "second"], &["y"]),
    ];
    const INT64: i32 = 7;
    let (input, output) = (value("ids", INT64, &[-1]), value("y", FLOAT, &[-1, 256]));
    write(folder, "tables.onnx", &model(nodes, weights, vec![input], vec![output]))
}

/// The library maps the weights of segments from one file, which is deleted by then. No weight is
/// mapped twice.
#[test]
#[cfg(target_os = "linux")]
fn weights_are_mapped_once() {
    let Some(engine) = crate::engines::onnxruntime() else { return };
    let folder = folder();
    let path = two_tables(folder.path());
    let mapped = || -> u64 {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux says what is mapped");
        let lines = maps.lines().filter(|l| l.contains("optimised.weights"));
        let sizes = lines.filter_map(|line| {
            let (start, end) = line.split_once(' ')?.0.split_once('-')?;
            Some(u64::from_str_radix(end, 16).ok()? - u64::from_str_radix(start, 16).ok()?)
        });
        // Other tests have small mappings at the same time.
        sizes.filter(|size| *size > 1 << 20).sum()
    };
    let cut = stages(&engine, &path, 3);
    let _lanes = [lane(&*cut), lane(&*cut)];
    let (tables, page) = (2 * 4096 * 256 * 4, 4096);
    assert!((tables..=tables + 2 * page).contains(&mapped()), "{} bytes of weights are mapped, not {tables}", mapped());
    assert_eq!(cut.segment_info().iter().map(|s| s.weight_bytes).sum::<u64>(), tables);
}

#[test]
fn named_places_are_cut_at() {
    let folder = folder();
    let path = two_exits(folder.path(), 4);
    for engine in engines() {
        let cut = cut(&*engine, &path, Cut::At(vec!["early".into(), "sum0".into()])).unwrap_or_else(|e| panic!("{e}"));
        let ends: Vec<Vec<&str>> =
            cut.segment_info().iter().map(|s| s.live.iter().map(|l| l.name.as_str()).collect()).collect();
        assert_eq!(
            ends,
            [vec!["mask", "sum0"], vec!["mask", "early"], vec!["early", "late"]],
            "{}",
            engine.info().name
        );
        let weights: Vec<u64> = cut.segment_info().iter().map(|s| s.weight_bytes).collect();
        assert_eq!(weights, [144, 288, 144], "{}", engine.info().name);
        assert!(cut.segment_info().iter().all(|s| s.time.is_some()));
    }
}

#[test]
fn what_cannot_be_cut_is_said_in_words() {
    let folder = folder();
    let path = two_exits(folder.path(), 2);
    let fixed = {
        let dims = [2, 4];
        let nodes = vec![node("Relu", &["x"], &["h"]), node("Tanh", &["h"], &["y"])];
        write(
            folder.path(),
            "fixed.onnx",
            &model(nodes, vec![], vec![value("x", FLOAT, &dims)], vec![value("y", FLOAT, &dims)]),
        )
    };
    // Between the model's operators is a tensor whose first axis is not the batch.
    let transposed = {
        let mut turn = node("Transpose", &["x"], &["t"]);
        turn.attribute.clear();
        let nodes = vec![turn, node("Tanh", &["t"], &["h"]), node("Transpose", &["h"], &["y"])];
        let dims = [-1, 4];
        write(
            folder.path(),
            "turned.onnx",
            &model(nodes, vec![], vec![value("x", FLOAT, &dims)], vec![value("y", FLOAT, &dims)]),
        )
    };
    let at = |name: &str| Cut::At(vec![name.into()]);
    for engine in engines() {
        let refused = |path: &Path, how: Cut, expected: &str| {
            let said = match cut(&*engine, path, how.clone()) {
                Ok(_) => panic!("{}: {how:?} of {}", engine.info().name, path.display()),
                Err(e) => e.to_string(),
            };
            assert!(said.contains(expected), "{}: {said}", engine.info().name);
        };
        refused(&path, Cut::Stages(0), "0 segments");
        refused(&path, Cut::Stages(100), "Ask for at most");
        refused(&transposed, Cut::Stages(2), "the batch");
        refused(&path, at("erly"), "The nearest is 'early'");
        refused(&path, at("late"), "nothing comes after it");
        refused(&path, Cut::At(vec!["early".into(), "early".into()]), "are the same place");
        refused(&fixed, Cut::Stages(2), "'x' [2, 4] is not a batch");
    }
}

#[test]
fn a_range_beyond_the_segments_is_an_error() {
    for engine in engines() {
        let model = stages(&*engine, &example("mlp"), 2);
        let mut random = Random::new("a_range_beyond");
        let mut batch = state(random.inputs(model.signature(), |_, _| 1));
        let error = lane(&*model).run(1..3, &mut batch).expect_err("there are two");
        assert!(error.reason.contains("there are 2 segments"), "{error}");
        assert!(batch.tensors.is_empty());
    }
}

#[test]
fn a_state_of_another_place_is_refused() {
    for engine in engines() {
        let model = stages(&*engine, &example("encoder"), 2);
        let mut random = Random::new("a_state_of_another_place");
        let mut batch = state(random.inputs(model.signature(), |_, axis| if axis == 0 { 2 } else { 5 }));
        batch.tensors.truncate(1);
        assert!(lane(&*model).run(1..2, &mut batch).is_err(), "{}", engine.info().name);
    }
}

#[test]
fn the_emulated_engine_cuts_its_profile() {
    let folder = folder();
    let path = folder.path().join("m.emulated.toml");
    let text = "alpha_ms = 0.1\nbeta_ms = 0.2\nmax_batch = 4\n[[inputs]]\nname = \"x\"\ndatatype = \"FP32\"\ndims = [-1, 3]\n\
                [[outputs]]\nname = \"y\"\ndatatype = \"FP32\"\ndims = [-1, 2]\n";
    std::fs::write(&path, text).expect("temporary folder");
    let engine = Emulated::new();
    let model = stages(&engine, &path, 7);
    assert_eq!(model.segments(), 7);
    let total: u64 = model.segment_info().iter().filter_map(|s| s.time).map(|t| t.as_nanos()).sum();
    assert_eq!(total, 300_000, "the parts add up to l(1)");
    let mut random = Random::new("the_emulated_engine");
    let mut batch = state(random.inputs(model.signature(), |_, _| 4));
    let mut lane = lane(&*model);
    lane.run(0..3, &mut batch).expect("runs");
    let parts = batch.split(&[1, 3]).expect("parts are the batch");
    let mut batch = State::join(parts).expect("they fit");
    lane.run(3..7, &mut batch).expect("runs");
    assert_eq!(batch.tensors[0].shape, [4, 2]);
    let named = cut(&engine, &path, Cut::At(vec!["x".into()]));
    assert!(named.err().is_some_and(|e| e.to_string().contains("equal stages")));
}

/// A model whose operators have been measured is cut again without a run. Measurements of another
/// model count for nothing.
#[test]
fn a_model_is_cut_by_what_is_known_of_its_operators() {
    let Some(engine) = crate::engines::onnxruntime() else { return };
    let measured = stages(&engine, &example("mlp"), 2);
    let known = measured.operators().expect("it was measured");
    // The measurements say that the first operator took nearly all of the time.
    let mut changed = serde_json::to_value(&**known).expect("is written");
    let times = changed["times"].as_array_mut().expect("a list");
    times.iter_mut().for_each(|time| *time = 1.into());
    times[0] = 1_000_000.into();
    let changed: Arc<OperatorProfile> = Arc::new(serde_json::from_value(changed).expect("is read"));
    let load = |path: &Path, known: &Arc<OperatorProfile>| {
        let options =
            LoadOptions { operators: Some(known.clone()), ..LoadOptions::new(path, 1).with_cut(Cut::Stages(2)) };
        engine.load(&options).unwrap_or_else(|e| panic!("{e}"))
    };
    let again = load(&example("mlp"), &changed);
    assert_eq!(again.segment_info()[0].operators, 1);
    assert_eq!(again.segment_info()[0].time, Some(Duration::from_nanos(1_000_000)));
    assert_eq!(again.operators(), Some(&changed));
    let other = load(&example("digits"), &changed);
    assert_ne!(other.operators(), Some(&changed), "it is another model's");
}
