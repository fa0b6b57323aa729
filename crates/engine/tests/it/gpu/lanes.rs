//! Lanes: the answers of the whole model on the host, whatever is parted and joined on the device.

use cuda_stand_in::{Count, Kind, Order};
use downbeat_engine::{Cut, Onnxruntime, State};

use super::{gpus, load, run};
use crate::support::{Random, assert_close, copy, example, lane, load as load_on, onnxruntime};

const TOLERANCE: f32 = 1e-5;

fn host() -> Onnxruntime {
    onnxruntime().expect("the test has found it before")
}

#[test]
fn whole_models_give_the_answers_of_the_host() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let mut random = Random::new("whole_models_on_a_gpu");
    for path in ["digits", "mlp", "encoder"].map(example) {
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
    assert_eq!(stand_in.calls("cuCtxSynchronize"), 0, "nothing waits for the whole device");
    assert_eq!(stand_in.calls("pageable upload") + stand_in.calls("pageable download"), 0, "copies overlap kernels");
    stand_in.assert_clean();
}

/// As `batches_parted_and_joined_at_random_between_segments` on the host, on two lanes, and without a copy to the host in between.
#[test]
fn batches_are_parted_and_joined_on_the_device() {
    for order in [Order::Lazy, Order::Random(1), Order::Random(2)] {
        let Some((stand_in, engine)) = gpus(1) else { return };
        stand_in.set_order(order);
        let mut random = Random::new("batches_on_the_device");
        let path = example("encoder");
        let whole = load_on(&host(), &path);
        let model = load(&engine, &path, Cut::Stages(4));
        assert_eq!((model.segments(), model.segment_info().len()), (4, 4));
        let mut lanes = [lane(&*model), lane(&*model)];
        for round in 0..6 {
            let rows = 1 + random.below(6) as usize;
            let inputs = random.inputs(whole.signature(), |_, axis| if axis == 0 { rows } else { 7 });
            let expected = run(&mut *lane(&*whole), 1, copy(&inputs));
            let mut batches = vec![State { tensors: inputs }];
            for index in 0..4 {
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
                    if index < 3 {
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
fn a_state_on_the_device_can_be_fetched() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let path = example("encoder");
    let on_host = cut(&host(), &path);
    let behind = on_host.segment_info()[0].last.clone();
    let on_gpu = load(&engine, &path, Cut::At(vec![behind]));
    let inputs = Random::new("fetched").inputs(on_gpu.signature(), |_, axis| if axis == 0 { 2 } else { 4 });
    let (mut here, mut there) = (State { tensors: copy(&inputs) }, State { tensors: inputs });
    lane(&*on_host).run(0..1, &mut here).expect("runs");
    let mut on_device = lane(&*on_gpu);
    on_device.run(0..1, &mut there).expect("runs");
    there.tensors.iter_mut().for_each(|tensor| tensor.data.fetch().expect("is there"));
    assert_close("after the first segment", &here.tensors, &there.tensors, TOLERANCE);
    drop((there, on_device, on_gpu, engine));
    stand_in.assert_clean();
}

fn cut(engine: &Onnxruntime, path: &std::path::Path) -> std::sync::Arc<dyn downbeat_engine::Model> {
    use downbeat_engine::{Engine, LoadOptions};
    engine.load(&LoadOptions::new(path, 1).with_cut(Cut::Stages(2))).expect("loads")
}

/// Nothing orders the work of two lanes (E²bird §6.1): at some time both compute.
#[test]
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
    let spans = lanes.each_ref().map(|lane| lane.last_run().expect("they have run"));
    assert!(spans.iter().all(|(begin, end)| begin < end), "{spans:?}");
    drop((lanes, model, engine));
    stand_in.assert_clean();
}

#[test]
fn memory_of_launches_is_used_again() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let model = load(&engine, &example("encoder"), Cut::Stages(3));
    let mut lane = lane(&*model);
    let mut random = Random::new("memory_of_launches");
    let mut bytes = Vec::new();
    for _ in 0..4 {
        let inputs = random.inputs(model.signature(), |_, axis| if axis == 0 { 3 } else { 6 });
        run(&mut *lane, 3, inputs);
        bytes.push((stand_in.count(Count::Bytes), stand_in.count(Count::Pinned)));
    }
    assert!(bytes.windows(2).all(|pair| pair[0] == pair[1]), "{bytes:?}");
    drop((lane, model, engine));
    stand_in.assert_clean();
}
