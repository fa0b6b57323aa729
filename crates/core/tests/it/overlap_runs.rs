//! Abacus' controller step by step and in runs: the order of requests, drops, the next group beside
//! the running one, wrong predictors.

use std::collections::{BTreeMap, BTreeSet};

use downbeat_core::device::overlap::*;
use downbeat_core::device::{DeviceDrop, DeviceReject, DeviceRequest, SegmentRange, Span};
use downbeat_core::{Duration, ModelId, RequestId, Time};
use proptest::prelude::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

fn request(id: u64, model: u32, deadline: u64) -> DeviceRequest {
    DeviceRequest { id: RequestId(id), model: ModelId(model), deadline: at(deadline), size: 1, length: 0 }
}

/// A device on which an operator takes a millisecond. Each shorter request of a group adds 40% of
/// its own time. Two factors make the predictions wrong: one for a request alone, one for several.
#[derive(Clone, Copy, Debug)]
struct Biased {
    alone: f64,
    together: f64,
}

const RIGHT: Biased = Biased { alone: 1.0, together: 1.0 };

fn takes(group: &[GroupPart]) -> Duration {
    let of = |part: &GroupPart| u64::from(part.operators.end - part.operators.first);
    let (longest, all) = (group.iter().map(of).max().unwrap(), group.iter().map(of).sum::<u64>());
    Duration::from_micros(longest * 1000 + (all - longest) * 400)
}

impl Predictor for Biased {
    fn predict(&self, groups: &[&[GroupPart]]) -> Vec<Option<Duration>> {
        let one = |group: &&[GroupPart]| {
            let factor = if group.len() > 1 { self.together } else { self.alone };
            Some(Duration::from_secs_f64(takes(group).as_secs_f64() * factor))
        };
        groups.iter().map(one).collect()
    }
}

fn model(operators: u16) -> OverlapModel {
    OverlapModel { operators, drop: true }
}

fn overlap<P: Predictor>(predictor: P, models: &[u16]) -> Overlap<P> {
    let mut overlap = Overlap::new(OverlapOptions { error: 0.0, worth: 0.0, ..OverlapOptions::default() }, predictor);
    for (id, operators) in (0..).zip(models) {
        overlap.handle_model(Time::ZERO, ModelId(id), Some(model(*operators)));
    }
    overlap
}

/// The same device, after so many groups that its predictions for requests alone are believed.
fn measured<P: Predictor>(predictor: P, models: &[u16]) -> Overlap<P> {
    let mut overlap = overlap(predictor, models);
    overlap.handle_model(Time::ZERO, ModelId(99), Some(model(10)));
    for id in 1000..1008 {
        overlap.handle_request(at(0), &request(id, 99, 99)).unwrap();
        let (run, _) = group(&mut overlap);
        overlap.handle_completion(at(0), run.id, Span { start: at(0), end: at(10) });
        outputs(&mut overlap);
    }
    overlap
}

/// Takes the controller's outputs and carries them out at once.
fn outputs<P: Predictor>(overlap: &mut Overlap<P>) -> Vec<OverlapOutput> {
    let mut outputs = Vec::new();
    loop {
        outputs.extend(std::iter::from_fn(|| overlap.poll_output()));
        let Some(at) = overlap.poll_timeout() else { return outputs };
        overlap.handle_timeout(at);
    }
}

/// The only group among the outputs: requests with their operators.
fn group<P: Predictor>(overlap: &mut Overlap<P>) -> (OperatorGroup, Vec<(u64, SegmentRange)>) {
    let mut groups: Vec<OperatorGroup> = outputs(overlap)
        .into_iter()
        .filter_map(|output| match output {
            OverlapOutput::Run(group) => Some(group),
            _ => None,
        })
        .collect();
    assert_eq!(groups.len(), 1, "one group at a time");
    let group = groups.remove(0);
    let parts = group.parts.iter().map(|part| (part.request.0, part.operators)).collect();
    (group, parts)
}

fn complete<P: Predictor>(overlap: &mut Overlap<P>, group: &OperatorGroup, from: u64, to: u64) {
    overlap.handle_completion(at(to), group.id, Span { start: at(from), end: at(to) });
}

fn range(first: u16, end: u16) -> SegmentRange {
    SegmentRange::new(first, end)
}

/// The order in which three requests run behind one that takes until `free`, and the requests that
/// are dropped. They have 20, 30 and 10 operators, and deadlines at 80, 60 and 70 ms.
fn in_order(order: GroupOrder, free: u64) -> (Vec<u64>, Vec<u64>) {
    let mut overlap = overlap(RIGHT, &[5, 20, 30, 10]);
    overlap.handle_request(at(0), &request(0, 0, 500)).unwrap();
    let (mut running, _) = group(&mut overlap);
    // The order holds also for requests that already wait.
    overlap.handle_request(at(1), &request(1, 1, 80)).unwrap();
    overlap.handle_order(at(1), order);
    overlap.handle_request(at(1), &request(2, 2, 60)).unwrap();
    overlap.handle_request(at(1), &request(3, 3, 70)).unwrap();
    let (mut ran, mut dropped, mut start, mut now) = (Vec::new(), Vec::new(), 0, free);
    loop {
        complete(&mut overlap, &running, start, now);
        start = now;
        let mut next = None;
        for output in outputs(&mut overlap) {
            match output {
                OverlapOutput::Run(group) => next = Some(group),
                OverlapOutput::Drop { request, reason } => {
                    assert_eq!(reason, DeviceDrop::Hopeless);
                    dropped.push(request.0);
                }
                OverlapOutput::Reply { .. } => {}
            }
        }
        let Some(group) = next else { return (ran, dropped) };
        let [part] = group.parts[..] else { panic!("one at a time: {group:?}") };
        assert_eq!(part.operators.first, 0, "and whole");
        ran.push(part.request.0);
        now += takes(&[part]).as_nanos() / 1_000_000;
        running = group;
    }
}

#[test]
fn section_7_1_baselines_run_in_order_and_drop_late_requests() {
    assert_eq!(in_order(GroupOrder::Fcfs, 5), (vec![1, 2, 3], vec![]), "as they came");
    assert_eq!(in_order(GroupOrder::Sjf, 5), (vec![3, 1, 2], vec![]), "the shortest first");
    assert_eq!(in_order(GroupOrder::Edf, 5), (vec![2, 3, 1], vec![]), "the earliest deadline first");
    // At 45 ms all can be in time. The second gets its turn at 65 and is late, which no prediction
    // could tell before.
    assert_eq!(in_order(GroupOrder::Fcfs, 45), (vec![1, 3], vec![2]));
    // A request that cannot be in time runs as long as it is not late: until 75 ms, when the third
    // is late.
    assert_eq!(in_order(GroupOrder::Edf, 45), (vec![2, 1], vec![3]));
}

#[test]
fn equation_2_the_least_headroom_goes_first_and_others_while_it_has_room() {
    let mut overlap = overlap(RIGHT, &[10, 20, 30]);
    overlap.handle_request(at(0), &request(1, 0, 100)).unwrap();
    let (first, parts) = group(&mut overlap);
    assert_eq!(parts, [(1, range(0, 10))], "nobody else is there");
    overlap.handle_request(at(1), &request(2, 1, 90)).unwrap();
    overlap.handle_request(at(2), &request(3, 2, 41)).unwrap();
    complete(&mut overlap, &first, 0, 10);
    // 31 ms are left for the third, which takes 30 alone; two operators of the second add 0.8 ms.
    let (next, parts) = group(&mut overlap);
    assert_eq!(parts, [(3, range(0, 30)), (2, range(0, 2))]);
    assert_eq!(next.waited_for, 0, "decided while the first ran");
    complete(&mut overlap, &next, 10, 41);
    assert_eq!(group(&mut overlap).1, [(2, range(2, 20))], "it goes on where it was");
}

#[test]
fn section_6_2_who_cannot_make_it_even_alone_is_given_up() {
    let mut overlap = measured(RIGHT, &[10, 20]);
    overlap.handle_request(at(0), &request(1, 1, 19)).unwrap();
    assert_eq!(outputs(&mut overlap), [OverlapOutput::Drop { request: RequestId(1), reason: DeviceDrop::Hopeless }]);
    overlap.handle_request(at(0), &request(2, 1, 20)).unwrap();
    assert_eq!(group(&mut overlap).1, [(2, range(0, 20))], "just in time");
}

#[test]
fn equation_3_takes_off_what_still_runs_whatever_the_predictor_is_off_by() {
    // The times of earlier groups correct a predictor that says half of the truth, or four times
    // the truth.
    for off in [1.0, 0.5, 4.0] {
        let mut overlap = measured(Biased { alone: off, together: off }, &[10, 20]);
        overlap.handle_request(at(0), &request(1, 1, 20)).unwrap();
        let (first, parts) = group(&mut overlap);
        assert_eq!(parts, [(1, range(0, 20))]);
        overlap.handle_request(at(5), &request(2, 0, 29)).unwrap();
        let dropped = |id| OverlapOutput::Drop { request: RequestId(id), reason: DeviceDrop::Hopeless };
        assert_eq!(outputs(&mut overlap), [dropped(2)], "15 of its 24 ms are another's: x{off}");
        overlap.handle_request(at(5), &request(3, 0, 30)).unwrap();
        assert_eq!(outputs(&mut overlap), [], "x{off}");
        overlap.handle_cancel(at(6), RequestId(3));
        // The group takes longer than expected: from then on it may end at any time.
        overlap.handle_request(at(25), &request(4, 0, 34)).unwrap();
        assert_eq!(outputs(&mut overlap), [dropped(4)], "x{off}");
        overlap.handle_request(at(25), &request(5, 0, 35)).unwrap();
        assert_eq!(outputs(&mut overlap), [], "x{off}");
        complete(&mut overlap, &first, 0, 25);
        assert_eq!(group(&mut overlap).1, [(5, range(0, 10))], "x{off}");
    }
}

#[test]
fn equation_3_a_group_that_is_done_before_its_time_is_followed_at_once() {
    let mut overlap = overlap(Biased { alone: 2.0, together: 2.0 }, &[10, 20]);
    overlap.handle_request(at(0), &request(1, 0, 90)).unwrap();
    let (first, _) = group(&mut overlap);
    overlap.handle_request(at(1), &request(2, 1, 90)).unwrap();
    assert_eq!(outputs(&mut overlap), [], "planned for 20");
    complete(&mut overlap, &first, 0, 10);
    let (next, parts) = group(&mut overlap);
    assert_eq!((parts, next.waited_for), (vec![(2, range(0, 20))], 0));
}

#[test]
fn section_6_3_a_group_that_was_overtaken_is_decided_again() {
    let mut overlap = overlap(RIGHT, &[10, 20, 10]);
    overlap.handle_request(at(0), &request(1, 0, 10)).unwrap();
    let (first, _) = group(&mut overlap);
    overlap.handle_request(at(1), &request(2, 0, 24)).unwrap();
    overlap.handle_request(at(1), &request(3, 1, 90)).unwrap();
    // The plan covers 10 to 24: all of the second request, with ten operators of the third. The
    // running group is three late.
    complete(&mut overlap, &first, 0, 13);
    let (next, parts) = group(&mut overlap);
    assert_eq!(parts, [(2, range(0, 10)), (3, range(0, 2))], "11 ms are left");
    assert_eq!((next.waited_for > 0, overlap.stats().overtaken), (true, 1));
}

#[test]
fn a_group_has_one_request_of_each_model() {
    let mut overlap = overlap(RIGHT, &[10, 10]);
    overlap.handle_request(at(0), &request(0, 0, 500)).unwrap();
    let (first, _) = group(&mut overlap);
    for (id, model) in [(1, 0), (2, 0), (3, 1)] {
        overlap.handle_request(at(0), &request(id, model, 500)).unwrap();
    }
    complete(&mut overlap, &first, 0, 10);
    assert_eq!(group(&mut overlap).1, [(1, range(0, 10)), (3, range(0, 10))]);
}

#[test]
fn what_saves_too_little_does_not_run_side_by_side() {
    for (worth, together) in [(0.0, true), (0.4, true), (0.45, false)] {
        let options = OverlapOptions { error: 0.0, worth, ..OverlapOptions::default() };
        let mut overlap = Overlap::new(options, RIGHT);
        (0..3).for_each(|id| overlap.handle_model(at(0), ModelId(id), Some(model(10))));
        overlap.handle_request(at(0), &request(1, 2, 90)).unwrap();
        let (first, _) = group(&mut overlap);
        overlap.handle_request(at(0), &request(2, 0, 90)).unwrap();
        overlap.handle_request(at(0), &request(3, 1, 91)).unwrap();
        complete(&mut overlap, &first, 0, 10);
        // 14 ms. One after the other takes 20: 43% more.
        let (next, parts) = group(&mut overlap);
        assert_eq!((parts.len() == 2, next.predicted == Some(ms(10))), (together, !together), "{worth}");
    }
}

#[test]
fn without_a_predictor_requests_run_one_at_a_time_the_most_urgent_first() {
    let mut overlap = overlap(Unpredicted, &[10, 1, 3]);
    overlap.handle_request(at(0), &request(1, 0, 50)).unwrap();
    let (first, _) = group(&mut overlap);
    overlap.handle_request(at(0), &request(2, 1, 60)).unwrap();
    overlap.handle_request(at(0), &request(3, 2, 40)).unwrap();
    overlap.handle_request(at(0), &request(4, 1, 9)).unwrap();
    complete(&mut overlap, &first, 0, 10);
    let (second, parts) = group(&mut overlap);
    assert_eq!(parts, [(3, range(0, 3))], "the fourth is late for certain");
    complete(&mut overlap, &second, 10, 13);
    assert_eq!(group(&mut overlap).1, [(2, range(0, 1))], "a model of one operator");
}

/// A predictor that knows pairs only.
struct Pairs;

impl Predictor for Pairs {
    fn predict(&self, groups: &[&[GroupPart]]) -> Vec<Option<Duration>> {
        groups.iter().map(|group| (group.len() <= 2).then(|| takes(group))).collect()
    }
}

#[test]
fn eight_models_under_a_predictor_of_pairs_run_in_pairs() {
    let mut overlap = overlap(Pairs, &[10; 8]);
    overlap.handle_request(at(0), &request(100, 0, 900)).unwrap();
    let (first, _) = group(&mut overlap);
    for model in 0..8 {
        overlap.handle_request(at(0), &request(u64::from(model), model, 900)).unwrap();
    }
    complete(&mut overlap, &first, 0, 10);
    assert_eq!(group(&mut overlap).1, [(0, range(0, 10)), (1, range(0, 10))]);
}

/// A predictor trained on models 0 and 90, each of so many operators.
fn trained_for_others(operators: u16) -> LearnedPredictor {
    let known = |model| FeatureModel { model: ModelId(model), operators };
    let layout = FeatureLayout { models: vec![known(0), known(90)], at_once: 2 };
    // The predictor says the logarithm of 10 ms for all groups.
    let layer = Layer { weights: vec![0.0; layout.len()], biases: vec![10.0_f32.ln()] };
    let mlp = Mlp::new(vec![0.0; layout.len()], vec![1.0; layout.len()], vec![layer]).unwrap();
    LearnedPredictor::new(layout, mlp).unwrap()
}

#[test]
fn models_outside_the_predictor_run_alone_and_lose_no_request() {
    // The second predictor knows 5 operators of model 0. On this device model 0 has 10, so it is
    // another model.
    for predictor in [trained_for_others(10), trained_for_others(5)] {
        let mut overlap = measured(predictor, &[10, 10, 10]);
        for (id, model) in [(1, 2), (2, 0), (3, 1), (4, 2)] {
            overlap.handle_request(at(10), &request(id, model, 100 + id)).unwrap();
        }
        for id in 1..=4 {
            let (run, parts) = group(&mut overlap);
            assert_eq!(parts.iter().map(|(request, _)| *request).collect::<Vec<_>>(), [id]);
            complete(&mut overlap, &run, id * 10, id * 10 + 10);
        }
        assert_eq!(outputs(&mut overlap), [OverlapOutput::Reply { request: RequestId(4) }]);
    }
}

#[test]
fn a_model_of_one_operator_is_in_a_group_whole_or_not_at_all() {
    // A request takes a millisecond an operator, and beside others 40% of that: 20 ms, then 20.4,
    // and 20.8 with the second small request.
    for (headroom, ids) in [(20, vec![1]), (21, vec![1, 2, 3]), (19, vec![])] {
        let mut overlap = measured(RIGHT, &[20, 1, 1]);
        overlap.handle_request(at(0), &request(9, 0, 900)).unwrap();
        let (first, _) = group(&mut overlap);
        for (id, model, deadline) in [(1, 0, 20 + headroom), (2, 1, 800), (3, 2, 900)] {
            overlap.handle_request(at(0), &request(id, model, deadline)).unwrap();
        }
        complete(&mut overlap, &first, 0, 20);
        let (_, parts) = group(&mut overlap);
        let found: Vec<u64> = parts.iter().map(|(request, _)| *request).collect();
        assert_eq!(found, if ids.is_empty() { vec![2, 3] } else { ids }, "headroom of {headroom} ms");
        assert!(parts.iter().all(|(_, operators)| operators.first == 0), "{parts:?}");
    }
    // The same holds alone on the device.
    let mut overlap = overlap(RIGHT, &[1]);
    overlap.handle_request(at(0), &request(1, 0, 5)).unwrap();
    assert_eq!(group(&mut overlap).1, [(1, range(0, 1))]);
}

#[test]
fn what_is_late_unknown_or_there_twice_changes_nothing() {
    let mut overlap = overlap(RIGHT, &[10, 20]);
    assert_eq!(overlap.handle_request(at(0), &request(1, 7, 90)), Err(DeviceReject::NoModel(ModelId(7))));
    let empty = DeviceRequest { size: 0, ..request(1, 0, 90) };
    assert_eq!(overlap.handle_request(at(0), &empty), Err(DeviceReject::Empty));
    let large = DeviceRequest { size: 4097, ..request(1, 0, 90) };
    assert_eq!(overlap.handle_request(at(0), &large), Err(DeviceReject::QueueFull { bound: 4096 }));
    overlap.handle_request(at(0), &request(1, 0, 90)).unwrap();
    let taken = Err(DeviceReject::NameTaken(RequestId(1)));
    assert_eq!(overlap.handle_request(at(0), &request(1, 0, 90)), taken, "it runs");
    overlap.handle_request(at(0), &request(2, 0, 90)).unwrap();
    assert_eq!(
        overlap.handle_request(at(0), &request(2, 0, 90)),
        Err(DeviceReject::NameTaken(RequestId(2))),
        "it waits"
    );
    let (first, _) = group(&mut overlap);
    overlap.handle_completion(at(1), GroupId(77), Span { start: at(0), end: at(1) });
    overlap.handle_cancel(at(1), RequestId(66));
    overlap.handle_model(at(1), ModelId(9), None);
    assert_eq!(outputs(&mut overlap), []);
    complete(&mut overlap, &first, 0, 10);
    let (second, _) = group(&mut overlap);
    complete(&mut overlap, &first, 0, 10);
    assert_eq!(outputs(&mut overlap), [], "of a group that was done already");
    complete(&mut overlap, &second, 10, 20);
    assert_eq!(outputs(&mut overlap), [OverlapOutput::Reply { request: RequestId(2) }]);
}

#[test]
fn who_goes_takes_nobody_along() {
    let mut overlap = overlap(RIGHT, &[10, 20]);
    overlap.handle_request(at(0), &request(1, 0, 90)).unwrap();
    let (first, _) = group(&mut overlap);
    for (id, model) in [(2, 0), (3, 1), (4, 1)] {
        overlap.handle_request(at(0), &request(id, model, 90)).unwrap();
    }
    overlap.handle_cancel(at(1), RequestId(1));
    overlap.handle_cancel(at(1), RequestId(3));
    overlap.handle_model(at(2), ModelId(0), None);
    assert_eq!(outputs(&mut overlap), [OverlapOutput::Drop { request: RequestId(2), reason: DeviceDrop::Removed }]);
    complete(&mut overlap, &first, 0, 10);
    assert_eq!(group(&mut overlap).1, [(4, range(0, 20))], "nobody wants the answer of the first");
}

/// The result of a run: the numbers of requests in time, late and dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Came {
    good: u32,
    late: u32,
    dropped: u32,
}

impl Came {
    fn bad(self) -> f64 {
        f64::from(self.late + self.dropped) / f64::from(self.good + self.late + self.dropped)
    }
}

/// Requests of two models on the device of [`takes`], so many a thousand milliseconds; `slower`:
/// what groups of several take from some time on. Checks that each is answered once, and that
/// operators run in order, one group at a time.
fn run<P: Predictor>(predictor: P, rate: u64, count: u64, seed: u64, slower: impl Fn(Time) -> f64) -> Came {
    const MODELS: [u16; 2] = [18, 26];
    let mut overlap = overlap(predictor, &MODELS);
    let (mut came, mut state, mut now) = (Came::default(), seed, Time::ZERO);
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let (mut sent, mut next_arrival) = (0, Time::ZERO);
    let mut running: Option<(GroupId, Time, Time)> = None;
    let mut open: BTreeMap<RequestId, (Time, u16, u16)> = BTreeMap::new();
    let mut done = BTreeSet::new();
    while sent < count || running.is_some() {
        let arrives = if sent < count { next_arrival } else { Time::MAX };
        let ends = running.map_or(Time::MAX, |(_, _, end)| end);
        now = now.max(arrives.min(ends));
        if ends <= arrives {
            let (id, start, end) = running.take().unwrap();
            overlap.handle_completion(now, id, Span { start, end });
        } else {
            let model = random(2) as u32;
            let deadline = now + ms(2 * u64::from(MODELS[model as usize]));
            let request = DeviceRequest { deadline, ..request(sent, model, 0) };
            open.insert(request.id, (deadline, 0, MODELS[model as usize]));
            overlap.handle_request(now, &request).unwrap();
            sent += 1;
            next_arrival = now + Duration::from_micros(1 + random(2_000_000 / rate));
        }
        for output in outputs(&mut overlap) {
            match output {
                OverlapOutput::Run(group) => {
                    assert!(running.is_none(), "one group at a time");
                    let models: BTreeSet<ModelId> = group.parts.iter().map(|part| part.model).collect();
                    assert_eq!(models.len(), group.parts.len(), "one request of each model");
                    for part in &group.parts {
                        let (_, next, all) = open.get_mut(&part.request).unwrap();
                        assert!(part.operators.first == *next && part.operators.end <= *all, "operators run in order");
                        *next = part.operators.end;
                    }
                    let factor = if group.parts.len() > 1 { slower(now) } else { 1.0 };
                    let end = now + Duration::from_secs_f64(takes(&group.parts).as_secs_f64() * factor);
                    running = Some((group.id, now, end));
                }
                OverlapOutput::Reply { request } => {
                    let (deadline, next, all) = open.remove(&request).unwrap();
                    assert!(next == all && done.insert(request), "answered once, when all has run");
                    *(if now <= deadline { &mut came.good } else { &mut came.late }) += 1;
                }
                OverlapOutput::Drop { request, .. } => {
                    open.remove(&request).unwrap();
                    assert!(done.insert(request), "given up once");
                    came.dropped += 1;
                }
            }
        }
    }
    assert_eq!(done.len() as u64, count, "every request is answered");
    came
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn every_request_is_answered_once_whatever_is_predicted(
        seed in 0..1000u64, rate in 5..120u64, alone in 0.0..5.0f64, together in 0.0..5.0f64,
    ) {
        run(Biased { alone, together }, rate, 200, seed, |_| 1.0);
    }
}

#[test]
fn side_by_side_more_requests_are_in_time_than_one_at_a_time() {
    for seed in 1..6 {
        let (abacus, alone) = (run(RIGHT, 50, 2000, seed, |_| 1.0), run(Unpredicted, 50, 2000, seed, |_| 1.0));
        assert!(abacus.late <= 8, "seed {seed}: only before it is seen that the predictor is right: {abacus:?}");
        assert!(abacus.bad() < 0.8 * alone.bad(), "seed {seed}: {abacus:?}, one at a time {alone:?}");
    }
}

#[test]
fn a_biased_predictor_does_not_make_violations_explode() {
    for (alone, together) in [(0.5, 0.5), (2.0, 2.0), (0.2, 0.2), (6.0, 6.0), (1.0, 0.4), (1.0, 3.0), (0.5, 2.0)] {
        for seed in 1..4 {
            let right = run(RIGHT, 40, 2000, seed, |_| 1.0);
            let biased = run(Biased { alone, together }, 40, 2000, seed, |_| 1.0);
            let late = f64::from(biased.late) / 2000.0;
            assert!(
                biased.bad() < right.bad() + 0.02,
                "seed {seed}, x{alone} x{together}: {biased:?}, right {right:?}"
            );
            assert!(late < 0.02, "seed {seed}, x{alone} x{together}: {biased:?}");
        }
    }
}

#[test]
fn what_has_become_slow_side_by_side_runs_alone_and_comes_back() {
    // From 10 s to 20 s groups take four times their usual time.
    let disturbed = |now: Time| if (at(10_000)..at(20_000)).contains(&now) { 4.0 } else { 1.0 };
    let came = run(RIGHT, 40, 4000, 3, disturbed);
    let (never, alone) = (run(RIGHT, 40, 4000, 3, |_| 1.0), run(Unpredicted, 40, 4000, 3, |_| 1.0));
    assert!(came.bad() < alone.bad(), "{came:?}, never disturbed {never:?}, one at a time {alone:?}");
}
