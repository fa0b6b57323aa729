//! The checker notices each broken rule: a judge that never objects is none.

use downbeat_core::cluster::{DropPolicy, DropReason};
use downbeat_core::{BatchId, DeviceId, Duration, ModelId, RequestId, Time};
use downbeat_sim::{Checker, Decision};

const NOW: Time = Time::from_nanos(1_000);

/// A checker with one model with batches of at most 2, two devices, and requests r0 to r3 due at
/// 2,000 ns, r3 rejected.
fn checker() -> Checker {
    let mut checker = Checker::new(42);
    checker.model(2, DropPolicy::HeadDrop);
    checker.device();
    checker.device();
    for id in 0..4 {
        checker.request(Time::ZERO, RequestId(id), ModelId(0), Time::from_nanos(2_000), 1);
    }
    checker.rejection(NOW, RequestId(3));
    checker
}

fn dispatch(batch: u64, device: u32, members: &[u64], size: u32) -> Decision {
    Decision::Dispatch {
        batch: BatchId(batch),
        device: DeviceId(device),
        model: ModelId(0),
        members: members.iter().copied().map(RequestId).collect(),
        size,
        start: NOW,
        expected: Duration::from_nanos(1_000),
    }
}

fn drop(request: u64) -> Decision {
    Decision::Drop { request: RequestId(request), model: ModelId(0), reason: DropReason::Hopeless }
}

fn finish(checker: &mut Checker, request: u64) {
    checker.finished(NOW, RequestId(request), ModelId(0));
}

fn preempt(batch: u64) -> Decision {
    Decision::Preempt { batch: BatchId(batch), device: DeviceId(0) }
}

#[test]
fn a_run_by_the_rules_passes() {
    let mut checker = checker();
    checker.decision(NOW, &dispatch(0, 0, &[0, 1], 2));
    checker.decision(NOW, &drop(2));
    checker.completion(NOW, DeviceId(0), BatchId(0));
    [0, 1].into_iter().for_each(|id| finish(&mut checker, id));
    checker.end(NOW);
}

#[test]
#[should_panic(expected = "seed 42, t=1 us: r0 is Dispatched after Dropped")]
fn answered_twice() {
    let mut checker = checker();
    checker.decision(NOW, &drop(0));
    checker.decision(NOW, &dispatch(0, 0, &[0], 1));
}

#[test]
#[should_panic(expected = "r3 is Dropped after Rejected")]
fn answered_after_a_rejection() {
    checker().decision(NOW, &drop(3));
}

#[test]
#[should_panic(expected = "d0 gets b1 while it runs Some(b0)")]
fn two_batches_on_a_device() {
    let mut checker = checker();
    checker.decision(NOW, &dispatch(0, 0, &[0], 1));
    checker.decision(NOW, &dispatch(1, 0, &[1], 1));
}

#[test]
#[should_panic(expected = "b0 of 3 items, the largest is 2")]
fn too_large_a_batch() {
    checker().decision(NOW, &dispatch(0, 0, &[0, 1, 2], 3));
}

#[test]
#[should_panic(expected = "b0 has 1 items and says 2")]
fn a_wrong_size() {
    checker().decision(NOW, &dispatch(0, 0, &[0], 2));
}

#[test]
#[should_panic(expected = "r0 of b0 is sent to miss its deadline")]
fn sent_to_be_late() {
    let mut late = dispatch(0, 0, &[0], 1);
    if let Decision::Dispatch { start, .. } = &mut late {
        *start = NOW + Duration::from_nanos(1);
    }
    checker().decision(NOW, &late);
}

#[test]
#[should_panic(expected = "b0 is planned to start in the past")]
fn planned_before_it_is_decided() {
    checker().decision(NOW + Duration::from_nanos(1), &dispatch(0, 0, &[0], 1));
}

#[test]
fn with_a_network_a_device_may_have_one_more_batch_on_its_way() {
    let mut checker = checker();
    checker.network();
    checker.decision(NOW, &dispatch(0, 0, &[0], 1));
    checker.decision(NOW, &dispatch(1, 0, &[1], 1));
    checker.completion(NOW, DeviceId(0), BatchId(0));
    checker.decision(NOW, &dispatch(2, 0, &[2], 1));
    checker.completion(NOW, DeviceId(0), BatchId(1));
    checker.completion(NOW, DeviceId(0), BatchId(2));
    (0..3).for_each(|id| finish(&mut checker, id));
    checker.end(NOW);
}

#[test]
#[should_panic(expected = "d0 gets b2 while it runs Some(b1)")]
fn but_not_two_more() {
    let mut checker = checker();
    checker.network();
    (0..3).for_each(|id| checker.decision(NOW, &dispatch(id, 0, &[id], 1)));
}

#[test]
#[should_panic(expected = "2 requests were never answered")]
fn lost() {
    let mut checker = checker();
    checker.decision(NOW, &drop(1));
    checker.end(NOW);
}

#[test]
#[should_panic(expected = "a device still runs")]
fn never_completed() {
    let mut checker = checker();
    checker.decision(NOW, &dispatch(0, 1, &[0, 1], 2));
    checker.decision(NOW, &drop(2));
    checker.end(NOW);
}

#[test]
fn who_was_preempted_waits_again() {
    let mut checker = checker();
    checker.decision(NOW, &dispatch(0, 0, &[0, 1], 2));
    checker.decision(NOW, &preempt(0));
    [0, 1].into_iter().for_each(|id| checker.waits_again(NOW, RequestId(id), ModelId(0)));
    checker.decision(NOW, &dispatch(1, 0, &[2], 1));
    checker.decision(NOW, &dispatch(2, 1, &[0, 1], 2));
    checker.completion(NOW, DeviceId(0), BatchId(1));
    checker.completion(NOW, DeviceId(1), BatchId(2));
    (0..3).for_each(|id| finish(&mut checker, id));
    checker.end(NOW);
}

#[test]
#[should_panic(expected = "d0 preempts b1 but runs Some(b0)")]
fn preempting_what_does_not_run() {
    let mut checker = checker();
    checker.decision(NOW, &dispatch(0, 0, &[0, 1], 2));
    checker.decision(NOW, &preempt(1));
}

#[test]
#[should_panic(expected = "d0 completes b0 but runs None")]
fn a_preempted_batch_that_completes() {
    let mut checker = checker();
    checker.decision(NOW, &dispatch(0, 0, &[0], 1));
    checker.decision(NOW, &preempt(0));
    checker.completion(NOW, DeviceId(0), BatchId(0));
}

/// The ring of requests grows, and the checker still knows a request that ended long ago.
#[test]
#[should_panic(expected = "seed 1, t=5 us: r7 has ended or was never there")]
fn an_answer_to_a_request_that_ended_long_ago() {
    let mut checker = Checker::new(1);
    checker.model(2, DropPolicy::HeadDrop);
    checker.device();
    let request = |checker: &mut Checker, id| checker.request(NOW, RequestId(id), ModelId(0), Time::MAX, 1);
    (0..3_000).for_each(|id| request(&mut checker, id));
    (0..3_000).for_each(|id| checker.decision(NOW, &drop(id)));
    (3_000..30_000).for_each(|id| {
        request(&mut checker, id);
        checker.decision(NOW, &drop(id));
    });
    checker.end(NOW);
    checker.decision(Time::from_nanos(5_000), &drop(7));
}
