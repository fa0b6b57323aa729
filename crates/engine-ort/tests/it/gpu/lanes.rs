//! Lanes: the answers of the whole model on the host, for all ways to part and join batches on the
//! device.

use cuda_stand_in::{Count, Kind, Order};
use downbeat_engine::{Cut, Engine, LoadOptions, Place, Share, State, StreamPriority};
use downbeat_engine_ort::Onnxruntime;

use super::{gpus, has_provider, load, run, to_cut};
use crate::engines::onnxruntime;
use crate::support::{Random, assert_close, copy, example, lane, load as load_on};

const TOLERANCE: f32 = 1e-5;

fn host() -> Onnxruntime {
    onnxruntime().expect("the test has found it before")
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn whole_models_give_the_answers_of_the_host() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let mut random = Random::new("whole_models_on_a_gpu");
    let computed = if has_provider(&engine) { 2 } else { 3 };
    for path in ["digits", "mlp", "encoder"].map(example).into_iter().take(computed) {
        let expected = load_on(&host(), &path);
        let model = load(&engine, &path, Cut::Whole);
        assert_eq!(model.signature(), expected.signature());
        let (mut on_host, mut on_gpu) = (lane(&*expected), lane(&*model));
        for rows in 1..=7 {
            let inputs = random.inputs(model.signature(), |_, axis| if axis == 0 { rows } else { 5 });
            let expected = run(&mut *on_host, 1, copy(&inputs));
            let what = format!("{}, {rows} rows", path.display());
            assert_close(&what, &expected, &run(&mut *on_gpu, 1, inputs), TOLERANCE);
        }
    }
    drop(engine);
    if computed == 3 {
        // The provider does both when it makes a session.
        assert_eq!(stand_in.calls("cuCtxSynchronize"), 0, "nothing waits for the whole device");
        assert_eq!(
            stand_in.calls("pageable upload") + stand_in.calls("pageable download"),
            0,
            "copies overlap kernels"
        );
    }
    stand_in.assert_clean();
}

/// Like `batches_parted_and_joined_at_random_between_segments` on the host: on two lanes, and
/// without a copy to the host in between.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn batches_are_parted_and_joined_on_the_device() {
    for order in [Order::Lazy, Order::Random(1), Order::Random(2)] {
        let Some((stand_in, engine)) = gpus(1) else { return };
        stand_in.set_order(order);
        let mut random = Random::new("batches_on_the_device");
        let (path, segments) = to_cut(&engine);
        let whole = load_on(&host(), &path);
        let model = load(&engine, &path, Cut::Stages(segments));
        assert_eq!((model.segments(), model.segment_info().len()), (segments, segments));
        let mut lanes = [lane(&*model), lane(&*model)];
        for (rows, lane) in (1..=6).flat_map(|rows| [(rows, 0), (rows, 1), (rows, 0), (rows, 1)]) {
            // Sessions allocate their memory when they first see a size, and try the size as a
            // graph the second time.
            let inputs = random.inputs(whole.signature(), |_, axis| if axis == 0 { rows } else { 7 });
            run(&mut *lanes[lane], segments, inputs);
        }
        for round in 0..6 {
            let rows = 1 + random.below(6) as usize;
            let inputs = random.inputs(whole.signature(), |_, axis| if axis == 0 { rows } else { 7 });
            let expected = run(&mut *lane(&*whole), 1, copy(&inputs));
            let mut batches = vec![State { tensors: inputs }];
            for index in 0..segments {
                let lane = &mut lanes[(index + round) % 2];
                if index > 0 && batches.len() > 1 && random.below(2) == 0 {
                    batches = vec![lane.join(batches).expect("neighbours fit")];
                }
                let mut parts = Vec::new();
                for batch in batches {
                    let rows = batch.rows();
                    let first = random.below(rows as u64) as usize;
                    let cut = if first == 0 { vec![rows] } else { vec![first, rows - first] };
                    parts.extend(batch.split(&cut).expect("parts are the batch"));
                }
                batches = parts;
                for batch in &mut batches {
                    stand_in.forget();
                    lane.run(index..index + 1, batch).unwrap_or_else(|e| panic!("{e}"));
                    let copies = |kind| stand_in.trace().iter().filter(|work| work.kind == kind).count();
                    if index > 0 {
                        assert_eq!(copies(Kind::Upload), 0, "what is between segments is on the device");
                    }
                    if index + 1 < segments {
                        assert_eq!(copies(Kind::Download), 0, "and stays there");
                    }
                    assert_eq!(stand_in.mistakes(), Vec::<String>::new());
                }
            }
            let joined = State::join(batches).expect("outputs are on the host");
            assert_close(&format!("{order:?}, round {round}"), &expected, &joined.tensors, TOLERANCE);
        }
        drop((lanes, model, engine));
        stand_in.assert_clean();
    }
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_state_on_the_device_can_be_fetched() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let (path, _) = to_cut(&engine);
    let model = load(&engine, &path, Cut::Stages(2));
    let inputs = Random::new("fetched").inputs(model.signature(), |_, axis| if axis == 0 { 2 } else { 4 });
    let expected = run(&mut *lane(&*load_on(&host(), &path)), 1, copy(&inputs));
    let mut on_device = lane(&*model);
    let mut state = State { tensors: inputs };
    on_device.run(0..1, &mut state).expect("runs");
    let fetch = |tensor: &mut downbeat_engine::Tensor| tensor.data.fetch().expect("is there");
    state.tensors.iter_mut().for_each(fetch);
    // The rest of the model needs only the fetched tensors.
    let fetched = copy(&state.tensors);
    drop(state);
    let mut state = State { tensors: fetched };
    on_device.run(1..2, &mut state).expect("runs");
    assert_close("fetched after the first segment", &expected, &state.tensors, TOLERANCE);
    drop((state, on_device, model, engine));
    stand_in.assert_clean();
}

/// No event orders the work of two lanes (E²bird §6.1): at some time both compute.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn two_lanes_overlap() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let path = example("digits");
    let model = load(&engine, &path, Cut::Whole);
    let mut lanes = [lane(&*model), lane(&*model)];
    let inputs = Random::new("two_lanes").inputs(model.signature(), |_, _| 2);
    stand_in.forget();
    let overlapped = (0..200).any(|_| {
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
        let trace = stand_in.trace();
        let kernels: Vec<_> = trace.iter().filter(|work| work.kind == Kind::Kernel).collect();
        kernels.iter().any(|a| kernels.iter().any(|b| a.stream != b.stream && a.overlaps(b)))
    });
    assert!(overlapped, "the lanes have taken turns 200 times");
    drop((lanes, model, engine));
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn memory_of_launches_is_used_again() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let (path, _) = to_cut(&engine);
    let model = load(&engine, &path, Cut::Stages(3));
    let mut lane = lane(&*model);
    let mut random = Random::new("memory_of_launches");
    let mut bytes = Vec::new();
    for _ in 0..6 {
        let inputs = random.inputs(model.signature(), |_, axis| if axis == 0 { 3 } else { 6 });
        run(&mut *lane, 3, inputs);
        bytes.push((stand_in.count(Count::Bytes), stand_in.count(Count::Pinned)));
    }
    // The second one is tried as a graph.
    assert!(bytes.windows(2).skip(1).all(|pair| pair[0] == pair[1]), "{bytes:?}");
    drop((lane, model, engine));
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn kernels_have_the_priority_of_their_model() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    for (priority, expected) in [(StreamPriority::Default, 0), (StreamPriority::Max, -5), (StreamPriority::Min, 0)] {
        let options = LoadOptions { priority, ..LoadOptions::new(example("digits"), 1) };
        let model = engine.load(&options).unwrap_or_else(|e| panic!("{e}"));
        for share in [Share::Whole, Share::Units(40)] {
            let mut lane = model.lane_at(Place { device: 0, share }).unwrap_or_else(|e| panic!("{e}"));
            stand_in.forget();
            run(&mut *lane, 1, Random::new("priorities").inputs(model.signature(), |_, _| 2));
            let kernels = stand_in.trace().into_iter().filter(|work| work.kind == Kind::Kernel);
            let priorities: Vec<i32> = kernels.map(|work| work.priority).collect();
            assert!(
                !priorities.is_empty() && priorities.iter().all(|p| *p == expected),
                "{priority:?}: {priorities:?}"
            );
        }
    }
    drop(engine);
    stand_in.assert_clean();
}
