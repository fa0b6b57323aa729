//! Launches as CUDA graphs: the same answers, and graphs only where they are not slower.

use std::sync::Arc;

use cuda_stand_in::{Order, StandIn};
use downbeat_engine::{Cut, GraphOutcome, Lane, Model, State, Tensor};
use downbeat_engine_ort::{CudaOptions, OnnxruntimeCuda};

use super::{gpus, gpus_with, has_provider, load, run};
use crate::engines::onnxruntime;
use crate::support::{Random, assert_close, copy, example, lane, load as load_on};

const TOLERANCE: f32 = 1e-5;

/// Nanoseconds of the host for a kernel, with which a graph is faster than its kernels one by one
/// although its inputs are copied.
const SLOW_HOST: u64 = 50_000;

/// The answer of the whole model on the host.
fn expected(name: &str, inputs: &[Tensor]) -> Vec<Tensor> {
    let host = load_on(&onnxruntime().expect("found before"), &example(name));
    run(&mut *lane(&*host), 1, copy(inputs))
}

fn inputs(random: &mut Random, model: &Arc<dyn Model>, rows: usize) -> Vec<Tensor> {
    random.inputs(model.signature(), |_, _| rows)
}

/// Runs a batch until its shapes have been tried as a graph.
fn try_graph(lane: &mut dyn Lane, segments: usize, inputs: &[Tensor]) {
    (0..2).for_each(|_| drop(run(lane, segments, copy(inputs))));
}

/// How many graphs a launch launches, and how many single kernels it gives to the stream.
fn calls(stand_in: &StandIn, launch: impl FnOnce()) -> (u64, u64) {
    let count = || (stand_in.calls("cuGraphLaunch"), stand_in.calls("cuLaunchHostFunc"));
    let before = count();
    launch();
    let after = count();
    (after.0 - before.0, after.1 - before.1)
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn graphs_give_the_answers_of_the_host() {
    for order in [Order::Lazy, Order::Random(4), Order::Random(5)] {
        for (name, cut) in
            [("mlp", Cut::Whole), ("mlp", Cut::Stages(2)), ("digits", Cut::Whole), ("digits", Cut::Stages(2))]
        {
            let Some((stand_in, engine)) = gpus(1) else { return };
            stand_in.set_order(order);
            stand_in.set_launch_time(SLOW_HOST);
            let mut random = Random::new("graphs_give_the_answers");
            let what = format!("{order:?}, {name}, {cut:?}");
            let model = load(&engine, &example(name), cut);
            let segments = model.segments();
            let mut lanes = [lane(&*model), lane(&*model)];
            for round in 0..24 {
                let rows = if round < 8 { round + 1 } else { 1 + random.below(8) as usize };
                let inputs = inputs(&mut random, &model, rows);
                let expected = expected(name, &inputs);
                let lane = &mut lanes[random.below(2) as usize];
                assert_close(
                    &format!("{what}, {rows} rows"),
                    &expected,
                    &run(&mut **lane, segments, inputs),
                    TOLERANCE,
                );
                assert_eq!(stand_in.mistakes(), Vec::<String>::new(), "{what}, {rows} rows");
            }
            for lane in &mut lanes {
                let tensors = inputs(&mut random, &model, 4);
                try_graph(&mut **lane, segments, &tensors);
                let launch = calls(&stand_in, || drop(run(&mut **lane, segments, tensors)));
                assert_eq!(launch, (segments as u64, 0), "{what}");
            }
            drop((lanes, model, engine));
            stand_in.assert_clean();
        }
    }
}

/// One thread's work does not spoil another thread's recording at the same time. Here both threads
/// record.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn lanes_record_beside_each_other() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    stand_in.set_launch_time(SLOW_HOST);
    let model = load(&engine, &example("mlp"), Cut::Stages(2));
    let mut random = Random::new("record_beside_each_other");
    // The load has timed segments, and recorded them.
    stand_in.forget();
    for _ in 0..8 {
        let batches = [1, 2, 4, 8].map(|rows| inputs(&mut random, &model, rows));
        let mut lanes = [lane(&*model), lane(&*model)];
        let start = std::sync::Barrier::new(lanes.len());
        std::thread::scope(|scope| {
            for lane in &mut lanes {
                let (start, batches) = (&start, &batches);
                scope.spawn(move || {
                    start.wait();
                    batches.iter().for_each(|batch| try_graph(&mut **lane, 2, batch));
                });
            }
        });
        for lane in &mut lanes {
            for batch in &batches {
                let rows = batch[0].shape[0];
                let outputs = run(&mut **lane, 2, copy(batch));
                assert_close(&format!("{rows} rows"), &expected("mlp", batch), &outputs, TOLERANCE);
            }
        }
    }
    // By rounds, lanes, sizes and segments. Which graphs are kept depends on how the other lane
    // slows the host.
    let tried = 8 * 2 * 4 * 2;
    assert_eq!(stand_in.calls("cuStreamBeginCapture_v2"), tried);
    assert_eq!(stand_in.calls("cuGraphInstantiateWithFlags"), tried, "nothing spoilt a capture");
    drop((model, engine));
    stand_in.assert_clean();
}

/// Each launch of a graph writes to the graph's memory: tensors that leave the lane in between are
/// copies.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn what_is_between_two_segments_outlasts_the_next_launch() {
    for order in [Order::Lazy, Order::Random(6)] {
        let Some((stand_in, engine)) = gpus(1) else { return };
        stand_in.set_order(order);
        stand_in.set_launch_time(SLOW_HOST);
        let mut random = Random::new("outlasts_the_next_launch");
        let model = load(&engine, &example("mlp"), Cut::Stages(2));
        let mut lane = lane(&*model);
        let inputs: Vec<_> = (0..4).map(|_| inputs(&mut random, &model, 2)).collect();
        try_graph(&mut *lane, 2, &inputs[0]);
        let mut states: Vec<State> = inputs.iter().map(|inputs| State { tensors: copy(inputs) }).collect();
        for segment in 0..2 {
            for state in &mut states {
                let launch = || lane.run(segment..segment + 1, state).unwrap_or_else(|e| panic!("{e}"));
                assert_eq!(calls(&stand_in, launch), (1, 0), "it is a graph");
            }
        }
        for (inputs, state) in inputs.iter().zip(&states) {
            assert_close(&format!("{order:?}"), &expected("mlp", inputs), &state.tensors, TOLERANCE);
        }
        drop((states, lane, model, engine));
        stand_in.assert_clean();
    }
}

/// The number of kernels in a run of mlp.
fn kernels(engine: &OnnxruntimeCuda) -> u64 {
    if has_provider(engine) { 5 } else { 1 }
}

/// Runs a batch until it was tried as a graph, and checks that it then runs as single kernels.
fn assert_plain(what: &str, stand_in: &StandIn, lane: &mut dyn Lane, inputs: &[Tensor], kernels: u64) {
    let expected = expected("mlp", inputs);
    for _ in 0..2 {
        assert_close(what, &expected, &run(lane, 1, copy(inputs)), TOLERANCE);
    }
    let launch = calls(stand_in, || assert_close(what, &expected, &run(lane, 1, copy(inputs)), TOLERANCE));
    assert_eq!(launch, (0, kernels), "{what}");
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_segment_that_cannot_be_recorded_runs_as_before() {
    /// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
    const UNSUPPORTED: u32 = 900;
    // The fourth run is the recorded one: the size is seen first, then asked for, then compared
    // with. A failing call spoils the capture.
    for (call, nth) in [
        ("cuLaunchHostFunc", 0),
        ("cuStreamBeginCapture_v2", 1),
        ("cuGraphGetNodes", 1),
        ("cuGraphGetNodes", 2),
        ("cuGraphNodeGetType", 1),
        ("cuGraphInstantiateWithFlags", 1),
        ("cuGraphLaunch", 1),
        ("cuGraphLaunch", 2),
    ] {
        let Some((stand_in, engine)) = gpus(1) else { return };
        stand_in.set_launch_time(SLOW_HOST);
        let model = load(&engine, &example("mlp"), Cut::Whole);
        let mut lane = lane(&*model);
        let inputs = inputs(&mut Random::new("cannot_be_recorded"), &model, 2);
        let kernels = kernels(&engine);
        let nth = if nth == 0 { 3 * kernels + 1 } else { nth };
        stand_in.fail_call(call, nth, UNSUPPORTED);
        assert_plain(&format!("{call}, call {nth}"), &stand_in, &mut *lane, &inputs, kernels);
        let [report] = model.graphs().try_into().expect("one shape was tried");
        assert_eq!(report.shapes, [[2, 784]], "{call}");
        assert!(matches!(report.outcome, GraphOutcome::Refused { .. }), "{call}: {report:?}");
        drop((lane, model, engine));
        stand_in.assert_clean();
    }
}

/// Whichever allocation fails, the launch succeeds or reports the failure, and the next launch is
/// right.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_graph_without_memory_is_given_up() {
    let mut failed = 0;
    for nth in 1..=16 {
        let Some((stand_in, engine)) = gpus(1) else { return };
        stand_in.set_launch_time(SLOW_HOST);
        let model = load(&engine, &example("mlp"), Cut::Whole);
        let mut lane = lane(&*model);
        let inputs = inputs(&mut Random::new("without_memory"), &model, 2);
        let expected = expected("mlp", &inputs);
        stand_in.fail_allocation(nth);
        let mut state = State { tensors: Vec::new() };
        for _ in 0..2 {
            state.tensors = copy(&inputs);
            match lane.run(0..1, &mut state) {
                Ok(()) => assert_close(&format!("allocation {nth}"), &expected, &state.tensors, TOLERANCE),
                Err(error) => {
                    failed += 1;
                    assert!(error.to_string().contains("GPU 0 is out of memory"), "allocation {nth}: {error}");
                }
            }
        }
        stand_in.fail_allocation(0);
        assert_close(&format!("after {nth}"), &expected, &run(&mut *lane, 1, inputs), TOLERANCE);
        drop((state, lane, model, engine));
        stand_in.assert_clean();
    }
    assert!((1..16).contains(&failed), "{failed} launches failed");
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_graph_that_is_slower_is_not_kept() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    stand_in.set_launch_time(0);
    let model = load(&engine, &example("mlp"), Cut::Whole);
    let mut lane = lane(&*model);
    let inputs = inputs(&mut Random::new("slower"), &model, 64);
    assert_plain("slower", &stand_in, &mut *lane, &inputs, kernels(&engine));
    assert_eq!(stand_in.calls("cuGraphLaunch"), 6, "it was tried");
    assert_eq!(stand_in.calls("cuGraphExecDestroy"), 1);
    let reports = model.graphs();
    assert!(matches!(reports[0].outcome, GraphOutcome::Slower { plain, graph, .. } if plain < graph), "{reports:?}");
    drop((lane, model, engine));
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn without_the_option_nothing_is_recorded() {
    let options = CudaOptions { graphs: false, ..CudaOptions::default() };
    let Some((stand_in, engine)) = gpus_with(1, &options) else { return };
    stand_in.set_launch_time(SLOW_HOST);
    let model = load(&engine, &example("mlp"), Cut::Whole);
    let mut lane = lane(&*model);
    let inputs = inputs(&mut Random::new("without_the_option"), &model, 2);
    assert_plain("without graphs", &stand_in, &mut *lane, &inputs, kernels(&engine));
    assert_eq!((stand_in.calls("cuStreamBeginCapture_v2"), stand_in.calls("cuGraphLaunch")), (0, 0));
    let [report] = model.graphs().try_into().expect("of one segment");
    let reason = "graphs are off (cuda.graphs)".to_owned();
    assert_eq!((report.shapes, report.outcome), (Vec::new(), GraphOutcome::Refused { reason }));
    drop((lane, model, engine));
    stand_in.assert_clean();
}

/// The graph still leaves the host more time.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_graph_that_is_as_fast_is_kept() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    if has_provider(&engine) {
        return;
    }
    // The time of copying the inputs, by the stand-in's clock.
    stand_in.set_launch_time(1_000 + 2 * 784 * 4 / 25);
    let model = load(&engine, &example("mlp"), Cut::Whole);
    let mut lane = lane(&*model);
    let inputs = inputs(&mut Random::new("as_fast"), &model, 2);
    try_graph(&mut *lane, 1, &inputs);
    assert_eq!(calls(&stand_in, || drop(run(&mut *lane, 1, inputs))), (1, 0));
    drop((lane, model, engine));
    stand_in.assert_clean();
}

/// BERT has no launch of fixed shapes: it runs as graphs all the same, one for each shape that
/// comes again.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn models_whose_lengths_vary_run_as_graphs() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    if has_provider(&engine) {
        // The stand-ins of the provider's libraries do not compute this model.
        return;
    }
    stand_in.set_launch_time(SLOW_HOST);
    for cut in [Cut::Whole, Cut::Stages(3)] {
        let model = load(&engine, &example("encoder"), cut);
        let segments = model.segments();
        let mut lane = lane(&*model);
        let mut random = Random::new("lengths_vary");
        let mut batch =
            |rows, length| random.inputs(model.signature(), |_, axis| if axis == 0 { rows } else { length });
        let shapes = [(1, 7), (2, 7), (2, 12), (3, 5)];
        for round in 0..4 {
            for (rows, length) in shapes {
                let inputs = batch(rows, length);
                let expected = expected("encoder", &inputs);
                let mut outputs = Vec::new();
                let launch = calls(&stand_in, || outputs = run(&mut *lane, segments, inputs));
                assert_close(&format!("{rows} rows of {length}"), &expected, &outputs, TOLERANCE);
                if round >= 2 {
                    assert_eq!(launch, (segments as u64, 0), "{rows} rows of {length}");
                }
            }
        }
        let launch = calls(&stand_in, || drop(run(&mut *lane, segments, batch(2, 9))));
        assert_eq!(launch, (0, segments as u64), "a shape that is new");
        let reports = model.graphs();
        assert_eq!(reports.len(), shapes.len() * segments);
        assert!(reports.iter().all(|report| matches!(report.outcome, GraphOutcome::Recorded { .. })), "{reports:?}");
        drop((lane, model));
    }
    drop(engine);
    stand_in.assert_clean();
}

/// Graphs of a session use the same memory, and so do the session's other runs. Tensors between
/// segments stay valid in every order of runs.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn graphs_and_other_runs_of_a_session_do_not_disturb_each_other() {
    for order in [Order::Lazy, Order::Random(8)] {
        let Some((stand_in, engine)) = gpus(1) else { return };
        stand_in.set_order(order);
        stand_in.set_launch_time(SLOW_HOST);
        let mut random = Random::new("do_not_disturb");
        let model = load(&engine, &example("mlp"), Cut::Stages(2));
        let mut lane = lane(&*model);
        // The first state is older than all graphs.
        let mut batches = vec![inputs(&mut random, &model, 5)];
        let mut states = vec![State { tensors: copy(&batches[0]) }];
        lane.run(0..1, &mut states[0]).expect("runs");
        for rows in [2, 5, 3, 2, 7, 5, 3, 2, 6, 5, 3, 7, 2] {
            let batch = inputs(&mut random, &model, rows);
            let mut state = State { tensors: copy(&batch) };
            lane.run(0..1, &mut state).expect("runs");
            // Some go on at once, others when more have run.
            if random.below(3) == 0 {
                lane.run(1..2, &mut state).expect("runs");
                assert_close(&format!("{order:?}, {rows} rows"), &expected("mlp", &batch), &state.tensors, TOLERANCE);
            } else {
                batches.push(batch);
                states.push(state);
            }
        }
        let graphs =
            model.graphs().into_iter().filter(|report| matches!(report.outcome, GraphOutcome::Recorded { .. }));
        assert!(graphs.filter(|report| report.segment == 0).count() >= 4, "{:?}", model.graphs());
        for (batch, state) in batches.iter().zip(&mut states) {
            lane.run(1..2, state).expect("runs");
            let what = format!("{order:?}, {} rows", batch[0].shape[0]);
            assert_close(&what, &expected("mlp", batch), &state.tensors, TOLERANCE);
        }
        assert_eq!(stand_in.mistakes(), Vec::<String>::new());
        drop((states, lane, model, engine));
        stand_in.assert_clean();
    }
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn graphs_of_many_shapes_make_room_for_others() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    stand_in.set_launch_time(SLOW_HOST);
    let mut random = Random::new("make_room");
    let model = load(&engine, &example("mlp"), Cut::Whole);
    let mut lane = lane(&*model);
    let most = 66;
    for rows in 1..=most {
        try_graph(&mut *lane, 1, &inputs(&mut random, &model, rows));
    }
    let recorded = || -> Vec<usize> { model.graphs().iter().map(|report| report.shapes[0][0]).collect() };
    // The discarded graph had paid back nothing of its cost: shapes have to come more often from
    // then on.
    assert_eq!((recorded(), stand_in.calls("cuGraphExecDestroy")), ((2..=65).collect(), 1));
    try_graph(&mut *lane, 1, &inputs(&mut random, &model, most));
    assert_eq!((recorded(), stand_in.calls("cuGraphExecDestroy")), ((3..=66).collect(), 2));
    for rows in [1, 2, 3, most] {
        let batch = inputs(&mut random, &model, rows);
        assert_close(&format!("{rows} rows"), &expected("mlp", &batch), &run(&mut *lane, 1, batch), TOLERANCE);
    }
    drop((lane, model, engine));
    stand_in.assert_clean();
}

/// A warm-up may send only zeros.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_graph_is_judged_on_numbers_in_place_of_zeros() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    stand_in.set_launch_time(SLOW_HOST);
    let model = load(&engine, &example("mlp"), Cut::Whole);
    let mut lane = lane(&*model);
    let mut random = Random::new("in_place_of_zeros");
    let mut uploads = |rows, zeros: bool| {
        let mut batch = inputs(&mut random, &model, rows);
        if zeros {
            let len = batch[0].data.len();
            batch[0].data = downbeat_engine::Buffer::from(vec![0; len].as_slice());
        }
        run(&mut *lane, 1, copy(&batch));
        let before = stand_in.calls("cuMemcpyHtoDAsync_v2");
        let expected = expected("mlp", &batch);
        assert_close("the run that is tried", &expected, &run(&mut *lane, 1, batch), TOLERANCE);
        stand_in.calls("cuMemcpyHtoDAsync_v2") - before
    };
    assert_eq!((uploads(2, false), uploads(3, true)), (1, 2));
    drop((lane, model, engine));
    stand_in.assert_clean();
}
