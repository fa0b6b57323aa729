//! The checker of device policies notices each broken rule: a judge that never objects is none.

use downbeat_core::device::{
    DeviceModel, DeviceRequest, DeviceScheduler, Elastic, ElasticOptions, InputSource, LaneId, Launch, LaunchId,
    MixTable, SegmentProfile, SegmentRange, SlotRun,
};
use downbeat_core::{BatchId, Duration, LatencyProfile, ModelId, RequestId, Time};
use downbeat_sim::device::LaunchChecker;

const NOW: Time = Time::from_nanos(1_000);

/// Two segments, lanes of 1, 1 and 2 items, a ring of 8 slots; r0 to r3 with a length of 5, all with their inputs in slots 0 to 3.
fn checker() -> LaunchChecker {
    let segment = vec![LatencyProfile::linear(Duration::from_millis(1), Duration::ZERO, 4).unwrap()];
    let profile = SegmentProfile::new(vec![0], &[segment.clone(), segment]).unwrap();
    let policy = Elastic::new(ElasticOptions {
        profile: profile.clone(),
        mixes: MixTable::naive(4),
        max_running: 4,
        ring_slots: 8,
        drop: false,
        queue_bound: 100,
    });
    let mut scheduler = DeviceScheduler::new();
    scheduler.handle_model(Time::ZERO, ModelId(0), Some(DeviceModel::new(policy, profile))).unwrap();
    assert_eq!(scheduler.lanes(ModelId(0)).len(), 3);
    let mut checker = LaunchChecker::new(42, 2, &scheduler, ModelId(0));
    for id in 0..4 {
        admit(&mut checker, id, id as u32);
        checker.input(NOW, RequestId(id));
    }
    checker
}

/// A request with a length of 5 that gets this slot.
fn admit(checker: &mut LaunchChecker, id: u64, slot: u32) {
    let request = DeviceRequest { id: RequestId(id), model: ModelId(0), deadline: Time::MAX, size: 1, length: 5 };
    checker.request(NOW, &request, true);
    checker.admit(NOW, RequestId(id), SlotRun { first: slot, count: 1 });
}

/// Both segments for some requests on lane 2, which takes two items, out of the ring.
fn launch(id: u64, members: &[u64]) -> Launch {
    Launch {
        id: LaunchId(id),
        batch: BatchId(id),
        model: ModelId(0),
        lane: LaneId(2),
        segments: SegmentRange::new(0, 2),
        members: members.iter().copied().map(RequestId).collect(),
        rows: members.len() as u32,
        computed_rows: members.len() as u32,
        length: 5,
        inputs: InputSource::Ring(SlotRun { first: members[0] as u32, count: members.len() as u32 }),
    }
}

fn run(checker: &mut LaunchChecker, launch: &Launch) {
    checker.launch(NOW, launch);
    checker.completion(NOW, launch, &[]);
}

#[test]
fn a_run_by_the_rules_passes() {
    let mut checker = checker();
    run(&mut checker, &launch(0, &[0, 1]));
    // One that exits after the first segment is complete.
    let first = Launch { segments: SegmentRange::new(0, 1), ..launch(1, &[2]) };
    checker.launch(NOW, &first);
    checker.completion(NOW, &first, &first.members);
    [0, 1, 2].into_iter().for_each(|id| checker.reply(NOW, RequestId(id)));
    checker.cancelled(NOW, RequestId(3));
    checker.end(NOW);
}

#[test]
#[should_panic(expected = "seed 42, t=1 us: r0 is Answered after Answered")]
fn answered_twice() {
    let mut checker = checker();
    run(&mut checker, &launch(0, &[0]));
    checker.reply(NOW, RequestId(0));
    checker.reply(NOW, RequestId(0));
}

#[test]
#[should_panic(expected = "r0 is answered after 1 of 2 segments")]
fn answered_too_early() {
    let mut checker = checker();
    run(&mut checker, &Launch { segments: SegmentRange::new(0, 1), ..launch(0, &[0]) });
    checker.reply(NOW, RequestId(0));
}

#[test]
#[should_panic(expected = "r0 has run 2 of SegmentRange { first: 0, end: 2 }")]
fn a_segment_that_is_run_twice() {
    let mut checker = checker();
    run(&mut checker, &launch(0, &[0]));
    checker.launch(NOW, &launch(1, &[0]));
}

#[test]
#[should_panic(expected = "r0 has run 0 of SegmentRange { first: 1, end: 2 }")]
fn a_segment_that_is_passed_over() {
    checker()
        .launch(NOW, &Launch { segments: SegmentRange::new(1, 2), inputs: InputSource::Device, ..launch(0, &[0]) });
}

#[test]
#[should_panic(expected = "l2 gets x1 while it runs")]
fn two_launches_on_a_lane() {
    let mut checker = checker();
    checker.launch(NOW, &launch(0, &[0]));
    checker.launch(NOW, &launch(1, &[1]));
}

#[test]
#[should_panic(expected = "r0 is in x1 and in Some(x0)")]
fn in_two_launches() {
    let mut checker = checker();
    checker.launch(NOW, &launch(0, &[0]));
    checker.launch(NOW, &Launch { lane: LaneId(1), ..launch(1, &[0]) });
}

#[test]
#[should_panic(expected = "r2 is no neighbour in x0")]
fn slots_that_are_no_neighbours() {
    checker().launch(NOW, &launch(0, &[0, 2]));
}

#[test]
#[should_panic(expected = "x0 of 3 items, at most 2")]
fn too_many_for_a_lane() {
    checker().launch(NOW, &launch(0, &[0, 1, 2]));
}

#[test]
#[should_panic(expected = "r0 is longer than 4")]
fn cut_off() {
    checker().launch(NOW, &Launch { length: 4, ..launch(0, &[0]) });
}

#[test]
#[should_panic(expected = "r4 gets slot 1, which Some(r1) has")]
fn a_slot_given_twice() {
    let mut checker = checker();
    admit(&mut checker, 4, 1);
}

#[test]
#[should_panic(expected = "r4 has no input in the ring")]
fn read_before_it_is_there() {
    let mut checker = checker();
    admit(&mut checker, 4, 4);
    checker.launch(NOW, &launch(0, &[4]));
}

#[test]
#[should_panic(expected = "r0 is Answered after Dropped")]
fn answered_after_it_was_dropped() {
    let mut checker = checker();
    run(&mut checker, &launch(0, &[0]));
    checker.drop_request(NOW, RequestId(0));
    checker.reply(NOW, RequestId(0));
}

#[test]
#[should_panic(expected = "4 requests were never answered")]
fn lost() {
    checker().end(NOW);
}

#[test]
#[should_panic(expected = "a lane still runs")]
fn never_completed() {
    let mut checker = checker();
    checker.launch(NOW, &launch(0, &[0]));
    checker.end(NOW);
}
