//! Answers, segments and lanes.

use std::path::{Path, PathBuf};

use downbeat_engine::{Cut, State};
use downbeat_engine_ort::CudaOptions;

use super::{Gpu, micros, products, run, span, stands_in};
use crate::model::{self, FLOAT, FLOAT16};
use crate::support::{Random, assert_close, copy, example, lane};

/// Four convolutions, some with a residual, and a product.
fn convolutions(folder: &Path) -> PathBuf {
    let mut random = Random::new("convolutions");
    let mut weight = |name: &str, dims: &[i64]| {
        let count: i64 = dims.iter().product();
        let elements: Vec<f32> = (0..count).map(|_| random.float() * 0.3).collect();
        model::floats(name, dims, &elements)
    };
    let weights = vec![
        weight("w0", &[16, 3, 1, 1]),
        weight("w1", &[16, 16, 1, 1]),
        weight("w2", &[16, 16, 1, 1]),
        weight("w3", &[8, 16, 1, 1]),
    ];
    let nodes = vec![
        model::convolution("x", "w0", "c0"),
        model::node("Relu", &["c0"], &["r0"]),
        model::convolution("r0", "w1", "c1"),
        model::node("Relu", &["c1"], &["r1"]),
        model::convolution("r1", "w2", "c2"),
        model::node("Add", &["c2", "r0"], &["a2"]),
        model::node("Relu", &["a2"], &["r2"]),
        model::convolution("r2", "w3", "c3"),
        model::node("GlobalAveragePool", &["c3"], &["y"]),
    ];
    let (input, output) = (model::value("x", FLOAT, &[-1, 3, 24, 24]), model::value("y", FLOAT, &[-1, 8, 1, 1]));
    model::write(folder, "convolutions.onnx", &model::model(nodes, weights, vec![input], vec![output]))
}

/// `[n, 64]` by `[64, 64]` in FP16, converted on the way in and out.
fn half(folder: &Path) -> PathBuf {
    let mut random = Random::new("half");
    // IEEE 754: a power of two times 1 to 2 in eighths, all of which FP16 has.
    let bits = |x: u64| (((x >> 8 & 1) << 15) | ((12 + (x & 3)) << 10) | ((x >> 4 & 7) << 7)) as u16;
    let raw_data = (0..64 * 64).flat_map(|_| bits(random.bits()).to_le_bytes()).collect();
    let weight = model::TensorProto {
        name: "w".into(),
        data_type: FLOAT16,
        dims: vec![64, 64],
        raw_data,
        ..model::TensorProto::default()
    };
    let nodes =
        vec![model::cast("x", "h", FLOAT16), model::node("MatMul", &["h", "w"], &["p"]), model::cast("p", "y", FLOAT)];
    let ends = (model::value("x", FLOAT, &[-1, 64]), model::value("y", FLOAT, &[-1, 64]));
    model::write(folder, "half.onnx", &model::model(nodes, vec![weight], vec![ends.0], vec![ends.1]))
}

fn compare(options: &CudaOptions, paths: &[PathBuf], tolerance: f32) {
    let gpu = Gpu::with(options);
    let mut random = Random::new("answers_on_a_gpu");
    for path in paths {
        let (model, host) = (gpu.load(path, Cut::Whole), gpu.on_host(path));
        assert_eq!(model.signature(), host.signature());
        let (mut here, mut there) = (lane(&*host), lane(&*model));
        for rows in [1, 2, 5, 8, 3] {
            let inputs = random.inputs(model.signature(), |_, axis| if axis == 0 { rows } else { 5 });
            let expected = run(&mut *here, 1, copy(&inputs));
            let what = format!("{}, {rows} rows", path.display());
            assert_close(&what, &expected, &run(&mut *there, 1, inputs), tolerance);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_answers_in_fp32_are_those_of_the_cpu() {
    let folder = model::folder();
    let paths = [example("digits"), example("mlp"), example("encoder"), convolutions(folder.path())];
    compare(&CudaOptions { tf32: false, ..CudaOptions::default() }, &paths, 1e-4);
}

/// TF32 has 10 bits of mantissa.
#[test]
#[ignore = "needs a GPU"]
fn gpu_answers_in_tf32_are_close() {
    let folder = model::folder();
    compare(&CudaOptions::default(), &[example("digits"), example("mlp"), convolutions(folder.path())], 1e-2);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_answers_in_fp16_are_close() {
    let folder = model::folder();
    compare(&CudaOptions::default(), &[half(folder.path())], 1e-2);
}

/// Two lanes in turns, with batches parted and joined between the segments.
#[test]
#[ignore = "needs a GPU"]
fn gpu_segments_give_the_answers_of_the_whole() {
    let gpu = Gpu::with(&CudaOptions { tf32: false, ..CudaOptions::default() });
    let folder = model::folder();
    let mut random = Random::new("segments_on_a_gpu");
    for (path, cut) in
        [(example("encoder"), Cut::Stages(4)), (convolutions(folder.path()), Cut::At(vec!["r0".into(), "r2".into()]))]
    {
        let (whole, model) = (gpu.load(&path, Cut::Whole), gpu.load(&path, cut));
        let segments = model.segments();
        assert!(segments > 1);
        let mut lanes = [lane(&*model), lane(&*model)];
        let mut of_whole = lane(&*whole);
        for rows in [2, 5, 3] {
            let inputs = random.inputs(whole.signature(), |_, axis| if axis == 0 { rows } else { 7 });
            let expected = run(&mut *of_whole, 1, copy(&inputs));
            let cuts = [1, rows - 1];
            let mut parts = State { tensors: inputs }.split(&cuts).expect("parts are the batch");
            for segment in 0..segments {
                let lane = &mut lanes[segment % 2];
                if segment % 2 == 1 {
                    parts = vec![lane.join(parts).expect("neighbours fit")];
                }
                for part in &mut parts {
                    lane.run(segment..segment + 1, part).unwrap_or_else(|e| panic!("{e}"));
                }
                if segment % 2 == 1 && segment + 1 < segments {
                    parts = parts.remove(0).split(&cuts).expect("parts are the batch");
                }
            }
            let batch = State::join(parts).expect("outputs are on the host");
            assert_close(&format!("{}, {rows} rows", path.display()), &expected, &batch.tensors, 1e-4);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_lanes_overlap() {
    let gpu = Gpu::new();
    let folder = model::folder();
    let (width, layers) = if stands_in() { (64, 8) } else { (1024, 64) };
    let model = gpu.load(&products(folder.path(), width, layers, true), Cut::Whole);
    let mut lanes = [lane(&*model), lane(&*model)];
    let inputs = Random::new("gpu_lanes_overlap").inputs(model.signature(), |_, _| 8);
    // The first runs plan kernels and record graphs, which takes ten times as long as a run.
    for _ in 0..20 {
        lanes.iter_mut().for_each(|lane| drop(run(&mut **lane, 1, copy(&inputs))));
    }
    let alone = micros(&*lanes[0]);
    let overlapped = (0..50).find_map(|_| {
        let start = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for lane in &mut lanes {
                let (start, inputs) = (&start, copy(&inputs));
                scope.spawn(move || {
                    start.wait();
                    run(&mut **lane, 1, inputs);
                });
            }
        });
        let (begin, end) = span(&*lanes[1]).from_begin_of(&span(&*lanes[0])).expect("the device is there");
        let first = span(&*lanes[0]).took().expect("the device is there").as_nanos() as i64;
        (begin < first && end > 0).then_some(end.max(first) - begin.min(0))
    });
    // On the stand-in the order is luck; `gpu::lanes` looks at the stand-in's trace.
    let Some(both) = overlapped else {
        assert!(stands_in(), "the lanes have taken turns 50 times");
        return;
    };
    println!("alone {alone} us; both, one beside the other, {} us", both / 1000);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_launches_ahead_leave_no_gap() {
    let gpu = Gpu::new();
    let folder = model::folder();
    let (width, layers) = if stands_in() { (64, 8) } else { (1024, 64) };
    let model = gpu.load(&products(folder.path(), width, layers, true), Cut::Whole);
    let mut lane = lane(&*model);
    let inputs = Random::new("gpu_launches_ahead").inputs(model.signature(), |_, _| 8);
    (0..20).for_each(|_| drop(run(&mut *lane, 1, copy(&inputs))));
    let medians = [false, true].map(|is_ahead| {
        let mut gaps: Vec<i64> = (0..31)
            .map(|_| {
                let states = [0; 2].map(|_| State { tensors: copy(&inputs) });
                let (mut spans, mut under_way) = (Vec::new(), Vec::new());
                for state in states {
                    let pending = lane.enqueue(0..1, state).unwrap_or_else(|e| panic!("{e}"));
                    spans.push(span(&*lane));
                    if is_ahead {
                        under_way.push(pending);
                    } else {
                        pending.wait().unwrap_or_else(|e| panic!("{e}"));
                    }
                }
                under_way.into_iter().for_each(|pending| drop(pending.wait().unwrap_or_else(|e| panic!("{e}"))));
                let (begin, _) = spans[1].from_begin_of(&spans[0]).expect("both are over");
                begin - spans[0].took().expect("it is over").as_nanos() as i64
            })
            .collect();
        gaps.sort_unstable();
        gaps[15]
    });
    let [apart, ahead] = medians.map(|gap| gap as f64 / 1e3);
    println!(
        "between two launches: {ahead:.1} us if the second is enqueued ahead, {apart:.1} us if it is enqueued when the first is over"
    );
    assert!(stands_in() || (ahead < 10.0 && ahead < apart), "{ahead} us and {apart} us");
}
