//! onnxruntime's CUDA provider and its use of the driver. The tests run only where the provider is
//! found (`just gpu-stand-ins`).

use cuda_stand_in::{Count, Kind, StandIn};
use downbeat_engine::{Cut, Engine, GraphOutcome, GraphReport, LoadOptions, Model, Place, Share, State};
use downbeat_engine_ort::{CudaOptions, OnnxruntimeCuda};
use libloading::os::unix::{Library, RTLD_LAZY};

use super::{gpus, has_provider, load, run};
use crate::engines::onnxruntime;
use crate::model::{FLOAT, convolution, floats, folder, model, node, value, write};
use crate::support::{Random, assert_close, copy, example, lane, load as load_on};

/// The most that a session may allocate for itself: the small weights that it does not share,
/// rounded up to the grain of allocations.
const OF_A_SESSION: u64 = 8 << 10;

/// As [`gpus`], with the counters of the libraries' stand-ins; `None` without the provider.
fn provider(count: u32) -> Option<(StandIn, OnnxruntimeCuda, Libraries)> {
    let (stand_in, engine) = gpus(count)?;
    if !has_provider(&engine) {
        println!("skipped: onnxruntime's CUDA provider is not there; `just gpu-stand-ins` tests it");
        return None;
    }
    // SAFETY: it is loaded already, or made to be.
    let library = unsafe { Library::open(Some("libcudart.so.13"), RTLD_LAZY) }.unwrap_or_else(|e| panic!("{e}"));
    Some((stand_in, engine, Libraries(library)))
}

/// The stand-ins of NVIDIA's libraries (lab/nvidia-stand-ins).
struct Libraries(Library);

impl Libraries {
    /// How often a function was called.
    fn calls(&self, name: &str) -> i64 {
        let name = std::ffi::CString::new(name).expect("a name");
        // SAFETY: the symbol has this type, and the name lives until the call returns.
        unsafe {
            let calls = self.0.get::<unsafe extern "C" fn(*const i8) -> i64>(b"stand_ins_calls").expect("is there");
            calls(name.as_ptr())
        }
    }

    /// Makes the `nth` call of a function fail.
    fn fail(&self, name: &str, nth: i64, code: i32) {
        let name = std::ffi::CString::new(name).expect("a name");
        // SAFETY: as above.
        unsafe {
            let fail = self.0.get::<unsafe extern "C" fn(*const i8, i64, i32)>(b"stand_ins_fail").expect("is there");
            fail(name.as_ptr(), nth, code);
        }
    }
}

/// The calls of the driver that hold up the host until work is over, or take or give back memory of
/// the device. The engine's own memory is the stream's.
const STALLS: [&str; 9] = [
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocHost_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
];

#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn weights_are_on_a_device_once() {
    let Some((stand_in, engine, libraries)) = provider(2) else { return };
    let path = example("mlp");
    let file = std::fs::metadata(&path).expect("is there").len();
    for segments in [1, 2, 3] {
        let model = load(&engine, &path, if segments == 1 { Cut::Whole } else { Cut::Stages(segments) });
        let segments = model.segments() as u64;
        let bytes = || stand_in.count(Count::Bytes);
        let before = bytes();
        let first = lane(&*model);
        let of_first = bytes() - before;
        assert!(of_first < file + file / 10 + segments * OF_A_SESSION, "{of_first} of {file} bytes");
        assert!(of_first > file / 10 * 9, "{of_first} of {file} bytes: the weights are not there");
        let copies = libraries.calls("cudaMemcpy");
        let second = lane(&*model);
        let of_second = bytes() - before - of_first;
        assert!(of_second <= segments * OF_A_SESSION, "a second lane of {segments} segments takes {of_second} bytes");
        let copies = libraries.calls("cudaMemcpy") - copies;
        assert!(copies <= 4 * segments as i64, "{copies} copies for a second lane");
        let elsewhere = model.lane_at(Place { device: 1, share: Share::Whole }).expect("there is memory");
        let of_other = bytes() - before - of_first - of_second;
        assert!(of_other.abs_diff(of_first) <= segments * OF_A_SESSION, "{of_other} and {of_first} bytes");
        drop((first, elsewhere, second, model));
        assert_eq!(bytes(), before, "{segments} segments");
    }
    drop(engine);
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn a_warm_launch_stalls_nothing() {
    let Some((stand_in, engine, libraries)) = provider(1) else { return };
    for cut in [Cut::Whole, Cut::Stages(3)] {
        let model = load(&engine, &example("digits"), cut);
        let segments = model.segments();
        let mut lane = lane(&*model);
        let mut random = Random::new("a_warm_launch");
        let mut inputs = |rows| random.inputs(model.signature(), |_, _| rows);
        for rows in (1..=6).rev() {
            run(&mut *lane, segments, inputs(rows));
            run(&mut *lane, segments, inputs(rows));
        }
        for rows in [6, 1, 3, 2, 3, 5, 4] {
            let inputs = inputs(rows);
            stand_in.forget();
            let synchronised = libraries.calls("cudaStreamSynchronize");
            run(&mut *lane, segments, inputs);
            for stall in STALLS {
                assert_eq!(stand_in.calls(stall), 0, "{stall} for {rows} rows in {segments} segments");
            }
            assert_eq!(libraries.calls("cudaStreamSynchronize"), synchronised);
            let trace = stand_in.trace();
            let kernels = trace.iter().filter(|work| work.kind == Kind::Kernel).count();
            assert!(kernels >= 5, "{kernels} kernels");
            assert!(trace.iter().all(|work| work.stream == trace[0].stream), "work in other streams: {trace:?}");
        }
        drop((lane, model));
    }
    drop(engine);
    stand_in.assert_clean();
}

/// A launch enqueued behind another one does not stall the device either, once one has been before.
/// It cannot have the memory that the first gives back at its end.
#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn a_launch_ahead_stalls_nothing() {
    let Some((stand_in, engine, libraries)) = provider(1) else { return };
    for cut in [Cut::Whole, Cut::Stages(3)] {
        let host = load_on(&onnxruntime().expect("found before"), &example("digits"));
        let model = load(&engine, &example("digits"), cut);
        let segments = model.segments();
        let (mut on_host, mut lane) = (lane(&*host), lane(&*model));
        let mut random = Random::new("a_launch_ahead");
        for (turn, rows) in [6, 5, 4, 3, 2, 1, 6, 1, 3, 2].into_iter().enumerate() {
            let batches = [0; 2].map(|_| random.inputs(model.signature(), |_, _| rows));
            let expected = batches.each_ref().map(|batch| run(&mut *on_host, 1, copy(batch)));
            stand_in.forget();
            let synchronised = libraries.calls("cudaStreamSynchronize");
            let enqueue = |batch: &Vec<_>| lane.enqueue(0..segments, State { tensors: copy(batch) });
            let pending = batches.each_ref().map(enqueue);
            let (of_both, what) = (stand_in.count(Count::Waiting), format!("{rows} rows in {segments} segments"));
            if turn >= 6 {
                assert!(of_both > 10, "{what}: both are under way");
                for stall in STALLS {
                    assert_eq!(stand_in.calls(stall), 0, "{stall} for {what}");
                }
                assert_eq!(libraries.calls("cudaStreamSynchronize"), synchronised);
            }
            for (pending, expected) in pending.into_iter().zip(&expected) {
                let state = pending.and_then(|pending| pending.wait()).unwrap_or_else(|e| panic!("{e}"));
                assert_close(&what, expected, &state.tensors, 1e-5);
            }
        }
        drop((lane, model));
    }
    drop(engine);
    stand_in.assert_clean();
}

/// If launching takes long, batches of recorded sizes are one launch a segment, and give the same
/// answers.
#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn segments_run_as_graphs_where_that_is_not_slower() {
    let Some((stand_in, engine, libraries)) = provider(1) else { return };
    stand_in.set_launch_time(20_000);
    for cut in [Cut::Whole, Cut::Stages(3)] {
        let host = load_on(&onnxruntime().expect("found before"), &example("digits"));
        let model = load(&engine, &example("digits"), cut);
        let segments = model.segments();
        let (mut on_host, mut lane) = (lane(&*host), lane(&*model));
        let mut random = Random::new("graphs");
        for (turn, rows) in [8, 4, 8, 4, 8, 3, 4, 8].into_iter().enumerate() {
            let inputs = random.inputs(model.signature(), |_, _| rows);
            let expected = run(&mut *on_host, 1, copy(&inputs));
            let kernels = libraries.calls("kernel");
            stand_in.forget();
            let got = run(&mut *lane, segments, inputs);
            assert_close(&format!("{rows} rows in {segments} segments"), &expected, &got, 1e-5);
            if turn >= 4 && rows != 3 {
                assert_eq!(stand_in.calls("cuGraphLaunch"), segments as u64, "{rows} rows in {segments} segments");
                assert_eq!(libraries.calls("kernel"), kernels, "kernels are launched one by one");
            }
        }
        assert!(libraries.calls("cublas workspace") > 0, "products take their workspace in the graph");
        drop((lane, model));
    }
    drop(engine);
    stand_in.assert_clean();
}

/// Sizes without a session of their own share one session a segment, also for their graphs. Its
/// memory is that of the largest size.
#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn graphs_of_all_sizes_share_a_session() {
    let Some((stand_in, engine, libraries)) = provider(1) else { return };
    stand_in.set_launch_time(20_000);
    let model = load(&engine, &example("mlp"), Cut::Stages(2));
    let mut lane = lane(&*model);
    let mut random = Random::new("share_a_session");
    let mut inputs = |rows| random.inputs(model.signature(), |_, _| rows);
    let mut warm = |rows| (0..3).for_each(|_| drop(run(&mut *lane, 2, inputs(rows))));
    warm(16);
    let (sessions, bytes) = (libraries.calls("cublasCreate_v2"), stand_in.count(Count::Bytes));
    let sizes = model.sizes_to_warm(16);
    assert!(sizes.len() >= 10, "{sizes:?}");
    sizes.iter().for_each(|rows| warm(*rows));
    assert_eq!(libraries.calls("cublasCreate_v2"), sessions);
    let recorded = |report: &GraphReport| matches!(report.outcome, GraphOutcome::Recorded { .. });
    assert_eq!(model.graphs().iter().filter(|report| recorded(report)).count(), sizes.len() * 2);
    let more = stand_in.count(Count::Bytes) - bytes;
    // The workspace of each product, one a segment and graph. The stand-in keeps one for each.
    assert!(more <= sizes.len() as u64 * 4 * 4096, "{more} bytes more for {} sizes", sizes.len());
    drop((lane, model, engine));
    stand_in.assert_clean();
}

/// A convolution has the plans of its last shapes, and the graph of its last shapes.
#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn a_convolution_has_the_graph_of_its_last_shapes() {
    let Some((stand_in, engine, _libraries)) = provider(1) else { return };
    stand_in.set_launch_time(50_000);
    let folder = folder();
    let weights: Vec<f32> = (0..512).map(|i| i as f32 / 512.0).collect();
    let network = model(
        vec![convolution("x", "w", "h"), node("Relu", &["h"], &["y"])],
        vec![floats("w", &[32, 16, 1, 1], &weights)],
        vec![value("x", FLOAT, &[-1, 16, -1, 4])],
        vec![value("y", FLOAT, &[-1, 32, -1, 4])],
    );
    let model = load(&engine, &write(folder.path(), "conv.onnx", &network), Cut::Whole);
    let mut lane = lane(&*model);
    let mut random = Random::new("last_shapes");
    let mut lengths_after = |length| {
        let inputs = random.inputs(model.signature(), |_, axis| if axis == 0 { 2 } else { length });
        run(&mut *lane, 1, inputs);
        model.graphs().iter().map(|report| report.shapes[0][2]).collect::<Vec<_>>()
    };
    let none: [usize; 0] = [];
    assert_eq!((lengths_after(4), lengths_after(4), lengths_after(4)), (none.to_vec(), vec![4], vec![4]));
    // The graph was of no use yet, so shapes have to come more often from then on.
    assert_eq!((lengths_after(6), lengths_after(6), lengths_after(6)), (none.to_vec(), none.to_vec(), none.to_vec()));
    assert_eq!((lengths_after(6), lengths_after(6)), (vec![6], vec![6]));
    assert_eq!(lengths_after(4), none);
    drop((lane, model, engine));
    assert_eq!(stand_in.leaks(), Vec::<String>::new());
}

/// A CUDA convolution keeps the plan of one input shape, so that there is a session for each size
/// of batch.
#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn batches_of_other_sizes_plan_nothing_anew() {
    let Some((stand_in, engine, libraries)) = provider(1) else { return };
    let folder = folder();
    let weights: Vec<f32> = (0..512).map(|i| i as f32 / 512.0).collect();
    let network = model(
        vec![convolution("x", "w", "h"), node("Relu", &["h"], &["y"])],
        vec![floats("w", &[32, 16, 1, 1], &weights)],
        vec![value("x", FLOAT, &[-1, 16, 4, 4])],
        vec![value("y", FLOAT, &[-1, 32, 4, 4])],
    );
    let model = load(&engine, &write(folder.path(), "conv.onnx", &network), Cut::Whole);
    let mut lane = lane(&*model);
    let mut random = Random::new("other_sizes");
    let mut inputs = |rows| random.inputs(model.signature(), |_, _| rows);
    let sizes = model.sizes_to_warm(8);
    assert!(sizes.len() > 2, "{sizes:?}");
    for rows in sizes {
        run(&mut *lane, 1, inputs(rows));
        run(&mut *lane, 1, inputs(rows));
    }
    let plans = libraries.calls("cudnn plan");
    assert!(plans > 0);
    let executed = libraries.calls("cudnnBackendExecute");
    let allocated = stand_in.calls("cuMemAlloc_v2");
    for rows in [1, 8, 2, 7, 3, 8, 1, 5, 4, 6] {
        let outputs = run(&mut *lane, 1, inputs(rows));
        assert_eq!(outputs[0].shape, [rows, 32, 4, 4]);
    }
    assert_eq!(libraries.calls("cudnnBackendExecute") - executed, 10, "the convolutions have run");
    assert_eq!(libraries.calls("cudnn plan"), plans);
    assert_eq!(stand_in.calls("cuMemAlloc_v2"), allocated);
    drop((lane, model, engine));
    assert_eq!(stand_in.leaks(), Vec::<String>::new());
}

/// All operators are measured in one session, however many they are. Known times are not measured
/// again.
#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn a_cut_takes_one_session_and_none_where_it_is_known() {
    let Some((stand_in, engine, libraries)) = provider(1) else { return };
    let path = example("digits");
    let counts = || ["cublasCreate_v2", "cudnnCreate", "cudaDeviceSynchronize"].map(|name| libraries.calls(name));
    let since = |before: [i64; 3]| {
        let now = counts();
        [0, 1, 2].map(|index| now[index] - before[index])
    };
    let before = counts();
    stand_in.forget();
    let first = load(&engine, &path, Cut::Stages(3));
    // A mark passes tensors on in place, except the model's outputs. Otherwise each mark would copy
    // in each of ten runs.
    let copies = stand_in.trace().iter().filter(|work| work.kind == Kind::Copy).count();
    assert!(copies < 40, "{copies} copies");
    let [products, convolutions, waits] = since(before);
    // One session optimises the model, and one is measured.
    assert!(products == 2 && convolutions <= 2 && waits <= 2, "{products}, {convolutions}, {waits}");
    for segment in first.segment_info() {
        let time = segment.time.expect("it was measured");
        // A kernel of the stand-in takes 10 us of its device.
        assert!(time.as_nanos() >= 10_000, "{} to {}: {time}", segment.first, segment.last);
    }
    let known = first.operators().expect("it was measured").clone();
    let before = counts();
    let options = LoadOptions { operators: Some(known.clone()), ..LoadOptions::new(&path, 1).with_cut(Cut::Stages(3)) };
    let second = engine.load(&options).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(since(before)[0], 1, "it is optimised, and not measured");
    let last = |model: &dyn Model| model.segment_info().iter().map(|s| s.last.clone()).collect::<Vec<_>>();
    assert_eq!(last(&*first), last(&*second));
    assert_eq!(second.operators(), Some(&known));
    let host = load_on(&onnxruntime().expect("found before"), &path);
    let (mut on_host, mut on_device) = (lane(&*host), lane(&*second));
    let inputs = Random::new("a_cut").inputs(host.signature(), |_, _| 3);
    let expected = run(&mut *on_host, 1, copy(&inputs));
    assert_close("cut by what is known", &expected, &run(&mut *on_device, 3, inputs), 1e-5);
    drop((on_device, first, second, engine));
    stand_in.assert_clean();
}

/// With channels last, cuDNN adds the bias of a convolution in its own kernel. With channels first
/// it would also add a tensor. The library clears that tensor in the null stream, only in the first
/// run of a shape. The lane's stream is not ordered with the null stream.
#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn biases_are_added_by_convolutions_with_channels_last() {
    let Some((stand_in, engine, libraries)) = provider(1) else { return };
    drop(engine);
    let with = |nhwc| {
        let options = CudaOptions { nhwc, graphs: false, ..CudaOptions::default() };
        onnxruntime().expect("found before").on_gpus(&[0], &options).unwrap_or_else(|e| panic!("{e}"))
    };
    let folder = folder();
    let weights: Vec<f32> = (0..1024).map(|i| i as f32 / 1024.0).collect();
    let with_bias = |input: &str, output: &str| {
        let mut node = convolution(input, "w", output);
        node.input.push("b".into());
        node
    };
    let network = model(
        vec![
            with_bias("x", "a"),
            node("Relu", &["a"], &["h"]),
            with_bias("h", "c"),
            node("Add", &["c", "x"], &["d"]),
            node("Relu", &["d"], &["y"]),
        ],
        vec![floats("w", &[32, 32, 1, 1], &weights), floats("b", &[32], &weights[..32])],
        vec![value("x", FLOAT, &[-1, 32, 4, 4])],
        vec![value("y", FLOAT, &[-1, 32, 4, 4])],
    );
    let path = write(folder.path(), "sum.onnx", &network);
    let launches = ["kernel", "cudnnBackendExecute", "cudnnAddTensor"];
    // Two activations, a sum, two biases. With channels last the input and the output are
    // transposed.
    for (engine, expected) in [(with(false), [3, 2, 2]), (with(true), [5, 2, 0])] {
        let version = engine.info().version;
        for cut in [Cut::Whole, Cut::Stages(2)] {
            let model = load(&engine, &path, cut);
            let segments = model.segments();
            let mut lane = lane(&*model);
            let mut random = Random::new("channels_last");
            let mut inputs = || random.inputs(model.signature(), |_, _| 3);
            let cleared = || libraries.calls("cudaMemset");
            let before = cleared();
            run(&mut *lane, segments, inputs());
            let called = || launches.map(|name| libraries.calls(name));
            let first = called();
            let outputs = run(&mut *lane, segments, inputs());
            assert_eq!(outputs[0].shape, [3, 32, 4, 4], "{version}");
            let mut made = called();
            made.iter_mut().zip(first).for_each(|(made, first)| *made -= first);
            if segments == 1 {
                assert_eq!(made, expected, "{version}: {launches:?}");
            } else {
                assert_eq!(made[1..], expected[1..], "{version}: {launches:?}");
            }
            assert_eq!(cleared(), before, "{version}: nothing is cleared in another stream");
            drop((outputs, lane, model));
        }
    }
    assert_eq!(stand_in.leaks(), Vec::<String>::new());
}

#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn memory_that_is_missing_is_said_and_nothing_else_fails() {
    let Some((stand_in, engine, _libraries)) = provider(1) else { return };
    let path = example("mlp");
    let says =
        |error: String| assert!(error.contains("GPU 0") && error.contains("Serve fewer or smaller models"), "{error}");
    stand_in.fail_allocations_above(300_000);
    says(engine.load(&LoadOptions::new(&path, 1)).err().expect("weights do not fit").to_string());
    stand_in.fail_allocations_above(u64::MAX);
    let model = load(&engine, &path, Cut::Whole);
    let before = stand_in.count(Count::Bytes);
    stand_in.fail_allocations_above(300_000);
    says(model.lane().err().expect("weights do not fit").to_string());
    assert_eq!(stand_in.count(Count::Bytes), before);
    stand_in.fail_allocations_above(u64::MAX);
    let mut lane = lane(&*model);
    let mut random = Random::new("memory_that_is_missing");
    let mut inputs = |rows| random.inputs(model.signature(), |_, _| rows);
    let small = inputs(2);
    let expected = run(&mut *lane, 1, copy(&small));
    // The activations of the library: 128 numbers a row.
    stand_in.fail_call("cuMemAlloc_v2", 1, 2);
    let error = lane.run(0..1, &mut State { tensors: inputs(3000) }).expect_err("there is no memory").to_string();
    assert!(error.contains("GPU 0 is out of memory"), "{error}");
    says(error);
    let again = run(&mut *lane, 1, small);
    assert_eq!(again[0].data.as_slice(), expected[0].data.as_slice(), "the lane goes on");
    run(&mut *lane, 1, inputs(3000));
    drop((expected, again, lane, model, engine));
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn a_library_that_fails_is_quoted_and_the_lane_goes_on() {
    let Some((stand_in, engine, libraries)) = provider(1) else { return };
    let model = load(&engine, &example("digits"), Cut::Whole);
    let mut lane = lane(&*model);
    let inputs = Random::new("a_library_that_fails").inputs(model.signature(), |_, _| 2);
    let expected = run(&mut *lane, 1, copy(&inputs));
    // 98: cudaErrorInvalidDeviceFunction, 13: CUBLAS_STATUS_EXECUTION_FAILED.
    for (name, code, words) in [("kernel", 98, "CUDA error"), ("cublasSgemm_v2", 13, "CUBLAS failure 13")] {
        libraries.fail(name, 1, code);
        let error = lane.run(0..1, &mut State { tensors: copy(&inputs) }).expect_err("it has failed").to_string();
        assert!(error.contains(words) && !error.contains("lost"), "{error}");
        let again = run(&mut *lane, 1, copy(&inputs));
        assert_eq!(again[0].data.as_slice(), expected[0].data.as_slice());
    }
    drop((expected, lane, model, engine));
    stand_in.assert_clean();
}

/// Memory that goes back to a lost device leaves its error in the thread. The next launch of the
/// library would find the error.
#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn a_lost_device_does_not_fail_launches_elsewhere() {
    let Some((stand_in, engine, _libraries)) = provider(2) else { return };
    let model = load(&engine, &example("digits"), Cut::Whole);
    let at = |device| model.lane_at(Place { device, share: Share::Whole }).expect("there is memory");
    let (mut first, mut second) = (at(0), at(1));
    let inputs = Random::new("a_lost_device").inputs(model.signature(), |_, _| 2);
    let expected = run(&mut *second, 1, copy(&inputs));
    // The fault comes in the middle of the kernels.
    stand_in.fail_work(None, 4, 700);
    let error = first.run(0..1, &mut State { tensors: copy(&inputs) }).expect_err("the device is lost").to_string();
    assert!(error.contains("GPU 0 is lost"), "{error}");
    drop(first);
    let again = run(&mut *second, 1, inputs);
    assert_eq!(again[0].data.as_slice(), expected[0].data.as_slice());
}

#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn models_and_lanes_may_go_in_any_order() {
    let Some((stand_in, engine, _libraries)) = provider(1) else { return };
    let mut random = Random::new("any_order");
    for order in 0..6 {
        let (one, two) =
            (load(&engine, &example("mlp"), Cut::Whole), load(&engine, &example("digits"), Cut::Stages(3)));
        let mut lanes = [lane(&*one), lane(&*two), lane(&*two)];
        let inputs = random.inputs(two.signature(), |_, _| 3);
        let expected = run(&mut *lanes[1], two.segments(), copy(&inputs));
        let mut between = State { tensors: inputs };
        lanes[2].run(0..1, &mut between).expect("runs");
        let mut things: Vec<Option<Box<dyn std::any::Any>>> =
            vec![Some(Box::new(one.clone())), Some(Box::new(two.clone()))];
        drop(one);
        let segments = two.segments();
        let [first, mut second, third] = lanes;
        match order {
            0 => drop((first, third)),
            1 => drop((third, things[0].take(), first)),
            2 => drop((things[0].take(), things[1].take(), third, first)),
            3 => drop((third, things[1].take(), first, things[0].take())),
            4 => drop((first, things[0].take(), third)),
            _ => drop((things[1].take(), first, third, things[0].take())),
        }
        drop(two);
        // The tensors that its lane has left on the device still exist.
        second.run(1..segments, &mut between).unwrap_or_else(|e| panic!("{e}"));
        assert_close(&format!("order {order}"), &expected, &between.tensors, 1e-6);
        let outputs = between;
        drop((second, things));
        assert_close(&format!("order {order}"), &expected, &outputs.tensors, 1e-6);
    }
    assert_eq!(stand_in.count(Count::Bytes), 0);
    drop(engine);
    stand_in.assert_clean();
}

/// Half precision: products of the device's own kernels, and weights that are shared.
#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn halves_are_computed_on_the_device() {
    let Some((stand_in, engine, libraries)) = provider(1) else { return };
    const FLOAT16: i32 = 10;
    let folder = folder();
    // Numbers that halves hold: the sign and the exponent of 1, 1/2 or 1/4.
    let mut weights = floats("w", &[64, 32], &[]);
    weights.data_type = FLOAT16;
    weights.raw_data =
        (0..2048u16).flat_map(|i| (0x3400 + (i * 7 % 3) * 0x400 + (i % 2) * 0x8000).to_le_bytes()).collect();
    let cast = |input: &str, output: &str, to: i64| {
        let mut node = node("Cast", &[input], &[output]);
        node.attribute =
            vec![crate::model::AttributeProto { name: "to".into(), i: to, r#type: 2, ..Default::default() }];
        node
    };
    let network = model(
        vec![
            cast("x", "a", i64::from(FLOAT16)),
            node("Gemm", &["a", "w"], &["b"]),
            node("Relu", &["b"], &["c"]),
            cast("c", "y", i64::from(FLOAT)),
        ],
        vec![weights],
        vec![value("x", FLOAT, &[-1, 64])],
        vec![value("y", FLOAT, &[-1, 32])],
    );
    let path = write(folder.path(), "half.onnx", &network);
    let host = load_on(&onnxruntime().expect("found before"), &path);
    let model = load(&engine, &path, Cut::Whole);
    let (mut here, mut there) = (lane(&*host), lane(&*model));
    let products = libraries.calls("cublasGemmEx");
    for rows in [1, 5] {
        let inputs = Random::new("halves").inputs(model.signature(), |_, _| rows);
        let expected = run(&mut *here, 1, copy(&inputs));
        assert_close(&format!("{rows} rows"), &expected, &run(&mut *there, 1, inputs), 2e-2);
    }
    assert!(libraries.calls("cublasGemmEx") >= products + 2);
    drop((there, model, engine));
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_cuda_provider), ignore = "needs onnxruntime's CUDA provider: just gpu-stand-ins")]
fn memory_of_a_session_can_be_limited() {
    let Some((_stand_in, _engine, _libraries)) = provider(1) else { return };
    let options = CudaOptions { memory_limit: Some(1 << 20), ..CudaOptions::default() };
    let engine = onnxruntime().expect("found before").on_gpus(&[0], &options).unwrap_or_else(|e| panic!("{e}"));
    let model = load(&engine, &example("mlp"), Cut::Whole);
    let mut lane = lane(&*model);
    let mut random = Random::new("limited");
    run(&mut *lane, 1, random.inputs(model.signature(), |_, _| 16));
    let tensors = random.inputs(model.signature(), |_, _| 4096);
    let error = lane.run(0..1, &mut State { tensors }).expect_err("above the limit").to_string();
    assert!(error.contains("GPU 0 is out of memory") && error.contains("cuda.memory_limit_mb"), "{error}");
    run(&mut *lane, 1, random.inputs(model.signature(), |_, _| 16));
}
