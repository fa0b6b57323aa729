//! The checker notices each broken rule: a judge that never objects is none.

use downbeat_core::cluster::{DropPolicy, DropReason, Output};
use downbeat_core::{BatchId, DeviceId, Duration, ModelId, RequestId, Time};
use downbeat_sim::Checker;

const NOW: Time = Time::from_nanos(1_000);

/// One model with batches of at most 2, two devices, requests r0 to r3 due at 2,000 ns, r3 rejected.
fn checker() -> Checker {
    let mut checker = Checker::new(42);
    checker.model(2, DropPolicy::HeadDrop);
    checker.device();
    checker.device();
    for id in 0..4 {
        checker.request(RequestId(id), ModelId(0), Time::from_nanos(2_000), 1, id < 3);
    }
    checker
}

fn dispatch(batch: u64, device: u32, members: &[u64], size: u32) -> Output {
    Output::Dispatch {
        batch: BatchId(batch),
        device: DeviceId(device),
        model: ModelId(0),
        members: members.iter().copied().map(RequestId).collect(),
        size,
        expected: Duration::from_nanos(1_000),
    }
}

fn drop(request: u64) -> Output {
    Output::Drop { request: RequestId(request), model: ModelId(0), reason: DropReason::Hopeless }
}

#[test]
fn a_run_by_the_rules_passes() {
    let mut checker = checker();
    checker.output(NOW, &dispatch(0, 0, &[0, 1], 2));
    checker.output(NOW, &drop(2));
    checker.completion(NOW, DeviceId(0), BatchId(0));
    checker.end(NOW);
}

#[test]
#[should_panic(expected = "seed 42, t=1 us: r0 is Dispatched after Dropped")]
fn answered_twice() {
    let mut checker = checker();
    checker.output(NOW, &drop(0));
    checker.output(NOW, &dispatch(0, 0, &[0], 1));
}

#[test]
#[should_panic(expected = "r3 is Dropped after Rejected")]
fn answered_after_a_rejection() {
    checker().output(NOW, &drop(3));
}

#[test]
#[should_panic(expected = "d0 gets b1 while it runs Some(b0)")]
fn two_batches_on_a_device() {
    let mut checker = checker();
    checker.output(NOW, &dispatch(0, 0, &[0], 1));
    checker.output(NOW, &dispatch(1, 0, &[1], 1));
}

#[test]
#[should_panic(expected = "b0 of 3 items, the largest is 2")]
fn too_large_a_batch() {
    checker().output(NOW, &dispatch(0, 0, &[0, 1, 2], 3));
}

#[test]
#[should_panic(expected = "b0 has 1 items and says 2")]
fn a_wrong_size() {
    checker().output(NOW, &dispatch(0, 0, &[0], 2));
}

#[test]
#[should_panic(expected = "r0 of b0 is sent to miss its deadline")]
fn sent_to_be_late() {
    checker().output(NOW + Duration::from_nanos(1), &dispatch(0, 0, &[0], 1));
}

#[test]
#[should_panic(expected = "2 requests were never answered")]
fn lost() {
    let mut checker = checker();
    checker.output(NOW, &drop(1));
    checker.end(NOW);
}

#[test]
#[should_panic(expected = "a device still runs")]
fn never_completed() {
    let mut checker = checker();
    checker.output(NOW, &dispatch(0, 1, &[0, 1], 2));
    checker.output(NOW, &drop(2));
    checker.end(NOW);
}
