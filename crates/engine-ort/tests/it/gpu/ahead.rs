//! Launches that are enqueued before the one before them is over.

use cuda_stand_in::{Count, Kind, Order, StandIn};
use cudarc::driver::result;
use downbeat_engine::{Cut, Lane, Pending, State, Tensor};
use downbeat_engine_ort::CudaOptions;

use super::{gpus, gpus_with, has_provider, load, run, to_cut};
use crate::engines::onnxruntime;
use crate::support::{Random, assert_close, copy, example, lane, load as load_on};

const TOLERANCE: f32 = 1e-5;

fn enqueue(lane: &mut dyn Lane, segments: usize, tensors: &[Tensor]) -> Box<dyn Pending> {
    lane.enqueue(0..segments, State { tensors: copy(tensors) }).unwrap_or_else(|e| panic!("{e}"))
}

fn wait(pending: Box<dyn Pending>) -> Vec<Tensor> {
    pending.wait().unwrap_or_else(|e| panic!("{e}")).tensors
}

fn kernels(stand_in: &StandIn) -> usize {
    stand_in.trace().iter().filter(|work| work.kind == Kind::Kernel).count()
}

/// The stand-in runs nothing before a thread waits for it, however often a thread asks for the
/// state.
fn only_where_waited_for(stand_in: &StandIn) {
    stand_in.set_order(Order::Lazy);
    stand_in.set_patience(u32::MAX);
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn one_launch_waits_behind_the_running_one_and_a_third_does_not() {
    // Without graphs, and with graphs: a graph reads and writes the same memory in all its
    // launches.
    for graphs in [false, true] {
        let Some((stand_in, engine)) = gpus_with(1, &CudaOptions { graphs, ..CudaOptions::default() }) else { return };
        stand_in.set_launch_time(50_000);
        let model = load(&engine, &example("mlp"), Cut::Stages(2));
        let mut lane = lane(&*model);
        let mut random = Random::new("enqueued_while_the_first");
        let batches = [0; 3].map(|_| random.inputs(model.signature(), |_, _| 4));
        let expected = batches.each_ref().map(|batch| run(&mut *lane, 2, copy(batch)));
        only_where_waited_for(&stand_in);
        stand_in.forget();
        let first = enqueue(&mut *lane, 2, &batches[0]);
        let of_first = stand_in.count(Count::Waiting);
        let span = lane.last_run().expect("it is enqueued");
        assert!(of_first > 0 && !first.is_over() && span.took().is_none());
        let second = enqueue(&mut *lane, 2, &batches[1]);
        assert_eq!(kernels(&stand_in), 0, "neither has begun");
        assert!(stand_in.count(Count::Waiting) > of_first, "both are enqueued");
        let third = enqueue(&mut *lane, 2, &batches[2]);
        assert!(
            first.is_over() && !second.is_over() && !third.is_over(),
            "the third has waited for the first, and not for the second"
        );
        assert_eq!(stand_in.calls("cuGraphLaunch"), if graphs { 6 } else { 0 });
        // The waits may come in any order.
        for (pending, expected) in [(third, &expected[2]), (first, &expected[0]), (second, &expected[1])] {
            assert_close(&format!("graphs: {graphs}"), expected, &wait(pending), TOLERANCE);
        }
        assert!(span.took().is_some() && lane.last_run().is_some_and(|last| last.from_begin_of(&span).is_some()));
        drop((expected, span, lane, model, engine));
        stand_in.assert_clean();
    }
}

/// Launches at random on two lanes, up to three of each without a wait. Their states are parted and
/// joined between segments.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn launches_ahead_give_the_answers_of_the_host() {
    for order in [Order::Lazy, Order::Random(21), Order::Random(22), Order::Random(23)] {
        for graphs in [false, true] {
            let Some((stand_in, engine)) = gpus_with(1, &CudaOptions { graphs, ..CudaOptions::default() }) else {
                return;
            };
            stand_in.set_order(order);
            stand_in.set_launch_time(50_000);
            let mut random = Random::new("launches_ahead");
            // mlp has graphs, as only its batch size varies.
            let (path, segments) = if graphs { (example("mlp"), 2) } else { to_cut(&engine) };
            let host = load_on(&onnxruntime().expect("found before"), &path);
            let model = load(&engine, &path, Cut::Stages(segments));
            let mut lanes = [lane(&*model), lane(&*model)];
            // The batches before each segment, and the expected answer of each row.
            let mut ready: Vec<Vec<(State, Vec<usize>)>> = (0..segments).map(|_| Vec::new()).collect();
            let mut under_way: Vec<(Box<dyn Pending>, usize, Vec<usize>)> = Vec::new();
            let mut expected: Vec<Vec<State>> = Vec::new();
            let what = format!("{order:?}, graphs: {graphs}");
            for step in 0..240 {
                match random.below(4) {
                    0 if step < 160 => {
                        let rows = 1 + random.below(4) as usize;
                        let inputs = random.inputs(model.signature(), |_, axis| if axis == 0 { rows } else { 6 });
                        let answers = State { tensors: run(&mut *lane(&*host), 1, copy(&inputs)) };
                        let first = expected.len();
                        expected.extend(answers.split(&vec![1; rows]).expect("rows").into_iter().map(|row| vec![row]));
                        ready[0].push((State { tensors: inputs }, (first..first + rows).collect()));
                    }
                    1 | 2 => {
                        let segment = random.below(segments as u64) as usize;
                        let lane = &mut lanes[random.below(2) as usize];
                        let Some((mut state, mut rows)) = ready[segment].pop() else { continue };
                        if segment > 0
                            && let Some((other, more)) = ready[segment].pop()
                        {
                            state = lane.join(vec![state, other]).expect("they fit");
                            rows.extend(more);
                        }
                        let pending = lane.enqueue(segment..segment + 1, state).unwrap_or_else(|e| panic!("{e}"));
                        under_way.push((pending, segment, rows));
                    }
                    _ if !under_way.is_empty() => {
                        let (pending, segment, rows) = under_way.remove(random.below(under_way.len() as u64) as usize);
                        let state = pending.wait().unwrap_or_else(|e| panic!("{e}"));
                        if segment + 1 == segments {
                            for (row, state) in rows.iter().zip(state.split(&vec![1; rows.len()]).expect("rows")) {
                                let expected = expected[*row].pop().expect("each is answered once");
                                assert_close(&what, &expected.tensors, &state.tensors, TOLERANCE);
                            }
                        } else if rows.len() > 1 && random.below(2) == 0 {
                            let parts = state.split(&[1, rows.len() - 1]).expect("rows");
                            let rows = [rows[..1].to_vec(), rows[1..].to_vec()];
                            ready[segment + 1].extend(parts.into_iter().zip(rows));
                        } else {
                            ready[segment + 1].push((state, rows));
                        }
                    }
                    _ => {}
                }
                assert_eq!(stand_in.mistakes(), Vec::<String>::new(), "{what}");
            }
            assert!(expected.iter().filter(|row| row.is_empty()).count() > 10, "{what}: some were answered");
            // Dropping a launch that no thread waits for ends it properly.
            drop(under_way);
            drop((ready, lanes, model, engine));
            stand_in.assert_clean();
        }
    }
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_launch_that_cannot_be_enqueued_leaves_the_one_before_it_alone() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let model = load(&engine, &example("digits"), Cut::Whole);
    let mut lane = lane(&*model);
    let inputs = Random::new("cannot_be_enqueued").inputs(model.signature(), |_, _| 3);
    let expected = run(&mut *lane, 1, copy(&inputs));
    for fails in [
        |stand_in: &StandIn| stand_in.fail_allocation(1),
        // Halfway: its upload is enqueued.
        |stand_in: &StandIn| stand_in.fail_call("cuMemcpyDtoHAsync_v2", 1, 1),
    ] {
        let first = enqueue(&mut *lane, 1, &inputs);
        fails(&stand_in);
        let second = lane.enqueue(0..1, State { tensors: copy(&inputs) });
        assert!(second.is_err_and(|error| !error.to_string().contains("lost")));
        assert_close("the one before", &expected, &wait(first), TOLERANCE);
        assert_close("the next", &expected, &run(&mut *lane, 1, copy(&inputs)), TOLERANCE);
    }
    drop((expected, lane, model, engine));
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_device_that_is_lost_fails_all_that_is_under_way() {
    for (nth, order) in [(1, Order::Lazy), (1, Order::Random(31)), (4, Order::Random(32))] {
        let Some((stand_in, engine)) = gpus(1) else { return };
        let model = load(&engine, &example("digits"), Cut::Whole);
        let mut lane = lane(&*model);
        let inputs = Random::new("all_that_is_under_way").inputs(model.signature(), |_, _| 2);
        run(&mut *lane, 1, copy(&inputs));
        only_where_waited_for(&stand_in);
        let pending = [0; 2].map(|_| enqueue(&mut *lane, 1, &inputs));
        // An illegal address.
        stand_in.fail_work(None, nth, 700);
        stand_in.set_order(order);
        for pending in pending {
            // The first answer may be ready before the second launch fails: then `wait` returns it.
            if let Err(error) = pending.wait() {
                assert!(error.of_device && error.to_string().contains("GPU 0 is lost"), "{error}");
            } else {
                assert!(nth > 1, "the first piece of work has failed");
            }
        }
        let error = lane.enqueue(0..1, State { tensors: copy(&inputs) }).err().expect("nothing runs any more");
        assert!(error.of_device, "{error}");
    }
}

/// A waiting thread may do other things until shortly before the end of a launch. Earlier launches
/// like it tell when this is.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn the_time_until_a_launch_is_over_is_known_from_those_like_it() {
    const SECOND: u64 = 1_000_000_000;
    let options = CudaOptions { graphs: false, ..CudaOptions::default() };
    let Some((stand_in, engine)) = gpus_with(1, &options) else { return };
    let model = load(&engine, &example("digits"), Cut::Whole);
    let mut lane = lane(&*model);
    let mut random = Random::new("until_a_launch_is_over");
    let mut inputs = |rows| random.inputs(model.signature(), |_, _| rows);
    // A thread that asks finds the launch over: time passes on the device only.
    stand_in.set_patience(1);
    stand_in.set_launch_time(1000 * SECOND);
    for _ in 0..4 {
        let pending = enqueue(&mut *lane, 1, &inputs(2));
        assert_eq!(pending.spare().as_nanos(), 0, "too few have said");
        wait(pending);
    }
    stand_in.set_patience(u32::MAX);
    let first = enqueue(&mut *lane, 1, &inputs(2));
    assert!(first.spare().as_nanos() > 500 * SECOND);
    let second = enqueue(&mut *lane, 1, &inputs(2));
    assert_eq!(second.spare().as_nanos(), 0, "the first is not over");
    stand_in.set_patience(1);
    wait(first);
    assert!(second.spare().as_nanos() > 500 * SECOND, "it has begun when the first was over");
    wait(second);
    let other = enqueue(&mut *lane, 1, &inputs(3));
    assert_eq!(other.spare().as_nanos(), 0, "none was like it");
    wait(other);
    drop((lane, model, engine));
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn what_nobody_waits_for_is_kept_until_it_is_over() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let model = load(&engine, &example("digits"), Cut::Whole);
    let mut lane = lane(&*model);
    let inputs = Random::new("nobody_waits_for").inputs(model.signature(), |_, _| 2);
    // A graph is tried, or not, before.
    (0..4).for_each(|_| drop(run(&mut *lane, 1, copy(&inputs))));
    only_where_waited_for(&stand_in);
    stand_in.forget();
    let (first, second) = (enqueue(&mut *lane, 1, &inputs), enqueue(&mut *lane, 1, &inputs));
    assert_eq!(kernels(&stand_in), 0);
    drop(first);
    assert!(kernels(&stand_in) > 0, "whoever drops it has waited for it");
    assert!(!second.is_over());
    drop((lane, second, model, engine));
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn times_of_launches_are_exact_however_long_the_device_has_been_at_work() {
    const DAYS: u64 = 30 * 24 * 3600 * 1_000_000_000;
    let Some((stand_in, engine)) = gpus(1) else { return };
    if has_provider(&engine) {
        // The provider launches several kernels, with gaps.
        return;
    }
    let model = load(&engine, &example("digits"), Cut::Whole);
    let mut lanes = [lane(&*model), lane(&*model)];
    let inputs = Random::new("times_of_launches").inputs(model.signature(), |_, _| 2);
    lanes.iter_mut().for_each(|lane| drop(run(&mut **lane, 1, copy(&inputs))));
    let long_ago = lanes[0].last_run().expect("it has run");
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking).expect("the device is there");
    StandIn::kernel(stream as u64, || StandIn::spend(DAYS)).expect("the device is there");
    // SAFETY: made in this test, and used nowhere else.
    unsafe { result::stream::synchronize(stream).and_then(|()| result::stream::destroy(stream)) }.expect("it is over");
    let mut spans = Vec::new();
    for lane in [0, 1, 1, 0] {
        stand_in.forget();
        run(&mut *lanes[lane], 1, copy(&inputs));
        let mut trace = stand_in.trace();
        // The launch before freed this memory.
        trace.retain(|work| work.kind != Kind::Free);
        let begin = trace.iter().map(|work| work.start).min().expect("something ran");
        let end =
            trace.iter().filter(|work| work.kind == Kind::Download).map(|work| work.end).max().expect("an answer");
        let span = lanes[lane].last_run().expect("it has run");
        assert_eq!(span.took().expect("it is there").as_nanos(), end - begin);
        spans.push((span, begin, end));
    }
    let (first, zero, _) = &spans[0];
    for (span, begin, end) in &spans {
        let expected = ((begin - zero) as i64, (end - zero) as i64);
        assert_eq!(span.from_begin_of(first).expect("it is there"), expected);
    }
    let (since, _) = spans[0].0.from_begin_of(&long_ago).expect("it is there");
    assert!(since > DAYS as i64 / 10 * 9, "{since}");
    let (before, _) = long_ago.from_begin_of(&spans[0].0).expect("it is there");
    assert!(before < 0, "{before}");
    drop((spans, long_ago, lanes, model, engine));
    stand_in.assert_clean();
}
