//! Launches as CUDA graphs: the same answers, where it is faster.

use std::sync::Arc;

use cuda_stand_in::{Order, StandIn};
use downbeat_engine::{CudaOptions, Cut, Lane, Model, OnnxruntimeCuda, State, Tensor};

use super::{gpus, gpus_with, has_provider, load, run};
use crate::support::{Random, assert_close, copy, example, lane, load as load_on, onnxruntime};

const TOLERANCE: f32 = 1e-5;

/// Nanoseconds of the host for a kernel, with which a graph is faster than its kernels one by one although its inputs are copied.
const SLOW_HOST: u64 = 50_000;

/// What the whole model on the host answers.
fn expected(name: &str, inputs: &[Tensor]) -> Vec<Tensor> {
    let host = load_on(&onnxruntime().expect("found before"), &example(name));
    run(&mut *lane(&*host), 1, copy(inputs))
}

fn inputs(random: &mut Random, model: &Arc<dyn Model>, rows: usize) -> Vec<Tensor> {
    random.inputs(model.signature(), |_, _| rows)
}

/// How many graphs a launch launches, and how many kernels it gives to the stream one by one.
fn calls(stand_in: &StandIn, launch: impl FnOnce()) -> (u64, u64) {
    let count = || (stand_in.calls("cuGraphLaunch"), stand_in.calls("cuLaunchHostFunc"));
    let before = count();
    launch();
    let after = count();
    (after.0 - before.0, after.1 - before.1)
}

#[test]
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
                run(&mut **lane, segments, copy(&tensors));
                let launch = calls(&stand_in, || drop(run(&mut **lane, segments, tensors)));
                assert_eq!(launch, (segments as u64, 0), "{what}");
            }
            drop((lanes, model, engine));
            stand_in.assert_clean();
        }
    }
}

/// What one thread records is not spoilt by what another does at the same time, which is the same here.
#[test]
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
                    batches.iter().for_each(|batch| drop(run(&mut **lane, 2, copy(batch))));
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
    // By rounds, lanes, sizes and segments. Which are kept depends on what the other lane does to the time of the host.
    let tried = 8 * 2 * 4 * 2;
    assert_eq!(stand_in.calls("cuStreamBeginCapture_v2"), tried);
    assert_eq!(stand_in.calls("cuGraphInstantiateWithFlags"), tried, "nothing spoilt a capture");
    drop((model, engine));
    stand_in.assert_clean();
}

/// The memory of a graph is written by each of its launches: what leaves the lane in between is a copy.
#[test]
fn what_is_between_two_segments_outlasts_the_next_launch() {
    for order in [Order::Lazy, Order::Random(6)] {
        let Some((stand_in, engine)) = gpus(1) else { return };
        stand_in.set_order(order);
        stand_in.set_launch_time(SLOW_HOST);
        let mut random = Random::new("outlasts_the_next_launch");
        let model = load(&engine, &example("mlp"), Cut::Stages(2));
        let mut lane = lane(&*model);
        let inputs: Vec<_> = (0..4).map(|_| inputs(&mut random, &model, 2)).collect();
        run(&mut *lane, 2, copy(&inputs[0]));
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

/// How many kernels a run of mlp is.
fn kernels(engine: &OnnxruntimeCuda) -> u64 {
    if has_provider(engine) { 5 } else { 1 }
}

/// Runs a batch and, once more, checks that it runs without a graph.
fn assert_plain(what: &str, stand_in: &StandIn, lane: &mut dyn Lane, inputs: &[Tensor], kernels: u64) {
    let expected = expected("mlp", inputs);
    assert_close(what, &expected, &run(lane, 1, copy(inputs)), TOLERANCE);
    let launch = calls(stand_in, || assert_close(what, &expected, &run(lane, 1, copy(inputs)), TOLERANCE));
    assert_eq!(launch, (0, kernels), "{what}");
}

#[test]
fn a_segment_that_cannot_be_recorded_runs_as_before() {
    /// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
    const UNSUPPORTED: u32 = 900;
    // The fourth run is the recorded one; failing, it spoils the capture.
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
        let nth = if nth == 0 { 4 * kernels + 1 } else { nth };
        stand_in.fail_call(call, nth, UNSUPPORTED);
        assert_plain(&format!("{call}, call {nth}"), &stand_in, &mut *lane, &inputs, kernels);
        drop((lane, model, engine));
        stand_in.assert_clean();
    }
}

/// Whatever memory is missing, the launch succeeds or says so, and the next one is right.
#[test]
fn a_graph_without_memory_is_given_up() {
    let mut failed = 0;
    for nth in 1..=12 {
        let Some((stand_in, engine)) = gpus(1) else { return };
        stand_in.set_launch_time(SLOW_HOST);
        let model = load(&engine, &example("mlp"), Cut::Whole);
        let mut lane = lane(&*model);
        let inputs = inputs(&mut Random::new("without_memory"), &model, 2);
        let expected = expected("mlp", &inputs);
        stand_in.fail_allocation(nth);
        let mut state = State { tensors: copy(&inputs) };
        match lane.run(0..1, &mut state) {
            Ok(()) => assert_close(&format!("allocation {nth}"), &expected, &state.tensors, TOLERANCE),
            Err(error) => {
                failed += 1;
                assert!(error.to_string().contains("GPU 0 is out of memory"), "allocation {nth}: {error}");
            }
        }
        stand_in.fail_allocation(0);
        assert_close(&format!("after {nth}"), &expected, &run(&mut *lane, 1, inputs), TOLERANCE);
        drop((state, lane, model, engine));
        stand_in.assert_clean();
    }
    assert!((1..12).contains(&failed), "{failed} launches failed");
}

#[test]
fn a_graph_that_is_no_faster_is_not_kept() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    stand_in.set_launch_time(0);
    let model = load(&engine, &example("mlp"), Cut::Whole);
    let mut lane = lane(&*model);
    let inputs = inputs(&mut Random::new("no_faster"), &model, 2);
    assert_plain("no faster", &stand_in, &mut *lane, &inputs, kernels(&engine));
    assert_eq!(stand_in.calls("cuGraphLaunch"), 4, "it was tried");
    assert_eq!(stand_in.calls("cuGraphExecDestroy"), 1);
    drop((lane, model, engine));
    stand_in.assert_clean();
}

#[test]
fn without_the_option_nothing_is_recorded() {
    let options = CudaOptions { graphs: false, ..CudaOptions::default() };
    let Some((stand_in, engine)) = gpus_with(1, &options) else { return };
    stand_in.set_launch_time(SLOW_HOST);
    let model = load(&engine, &example("mlp"), Cut::Whole);
    let mut lane = lane(&*model);
    let inputs = inputs(&mut Random::new("without_the_option"), &model, 2);
    assert_plain("without graphs", &stand_in, &mut *lane, &inputs, kernels(&engine));
    assert_eq!((stand_in.calls("cuStreamBeginCapture_v2"), stand_in.calls("cuGraphLaunch")), (0, 0));
    drop((lane, model, engine));
    stand_in.assert_clean();
}
