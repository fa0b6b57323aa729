//! The checker of device policies notices each broken rule. A checker that never objects is
//! useless.

use downbeat_core::device::{
    DeviceRequest, InputSource, LaneId, LaneSpec, Launch, LaunchId, PartitionId, RingRun, SegmentRange,
};
use downbeat_core::{BatchId, ModelId, RequestId, Time};
use downbeat_lab::device::LaunchChecker;

const NOW: Time = Time::from_nanos(1_000);

/// Two models of two segments, each with a ring of 8 slots; r0 to r3 with a length of 5, all with
/// their inputs in slots 0 to 3.
fn checker() -> LaunchChecker {
    let mut checker = LaunchChecker::new(42);
    checker.model(ModelId(0), 2, 8);
    checker.model(ModelId(1), 2, 8);
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
    checker.admit(NOW, RequestId(id), RingRun { first: slot, count: 1 });
}

/// Both segments for some requests on lane 2, which takes two items, out of the ring.
fn launch(id: u64, members: &[u64]) -> Launch {
    Launch {
        id: LaunchId(id),
        batch: BatchId(id),
        granted: None,
        model: ModelId(0),
        lane: LaneId(2),
        segments: SegmentRange::new(0, 2),
        members: members.iter().copied().map(RequestId).collect(),
        rows: members.len() as u32,
        computed_rows: members.len() as u32,
        length: 5,
        inputs: InputSource::Ring(RingRun { first: members[0] as u32, count: members.len() as u32 }),
    }
}

/// Launches on a lane of all segments; lane 2 takes two items, the others one.
fn begin(checker: &mut LaunchChecker, launch: &Launch) {
    let max_rows = if launch.lane == LaneId(2) { 2 } else { 1 };
    let lane = LaneSpec { partition: PartitionId(0), max_rows, segments: SegmentRange::new(0, 2) };
    checker.launch(NOW, launch, Some(lane));
}

fn run(checker: &mut LaunchChecker, launch: &Launch) {
    begin(checker, launch);
    checker.completion(NOW, launch, &[]);
}

#[test]
fn a_run_by_the_rules_passes() {
    let mut checker = checker();
    run(&mut checker, &launch(0, &[0, 1]));
    // A request that exits after the first segment is complete.
    let first = Launch { segments: SegmentRange::new(0, 1), ..launch(1, &[2]) };
    begin(&mut checker, &first);
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
    begin(&mut checker, &launch(1, &[0]));
}

#[test]
#[should_panic(expected = "r0 has run 0 of SegmentRange { first: 1, end: 2 }")]
fn a_segment_that_is_passed_over() {
    begin(
        &mut checker(),
        &Launch { segments: SegmentRange::new(1, 2), inputs: InputSource::Device, ..launch(0, &[0]) },
    );
}

#[test]
#[should_panic(expected = "l2 gets x1 while it runs")]
fn two_launches_on_a_lane() {
    let mut checker = checker();
    begin(&mut checker, &launch(0, &[0]));
    begin(&mut checker, &launch(1, &[1]));
}

/// A lane may have a second launch behind the running one; a third is too many.
#[test]
#[should_panic(expected = "l2 gets x2 while it runs [x0, x1]")]
fn three_launches_on_a_lane() {
    let mut checker = checker();
    checker.ahead();
    (0..3).for_each(|id| begin(&mut checker, &launch(id, &[id])));
}

#[test]
#[should_panic(expected = "r0 of m0 is in x0 of m1")]
fn members_of_another_model() {
    begin(&mut checker(), &Launch { model: ModelId(1), segments: SegmentRange::new(0, 1), ..launch(0, &[0]) });
}

#[test]
#[should_panic(expected = "l2 is free and runs [x0]")]
fn a_lane_that_goes_while_it_runs() {
    let mut checker = checker();
    begin(&mut checker, &launch(0, &[0]));
    checker.free_lane(NOW, LaneId(2));
}

#[test]
#[should_panic(expected = "r0 is in x1 and in Some(x0)")]
fn in_two_launches() {
    let mut checker = checker();
    begin(&mut checker, &launch(0, &[0]));
    begin(&mut checker, &Launch { lane: LaneId(1), ..launch(1, &[0]) });
}

#[test]
#[should_panic(expected = "r2 is no neighbour in x0")]
fn slots_that_are_no_neighbours() {
    begin(&mut checker(), &launch(0, &[0, 2]));
}

#[test]
#[should_panic(expected = "x0 of 3 items, at most 2")]
fn too_many_for_a_lane() {
    begin(&mut checker(), &launch(0, &[0, 1, 2]));
}

#[test]
#[should_panic(expected = "r0 is longer than 4")]
fn cut_off() {
    begin(&mut checker(), &Launch { length: 4, ..launch(0, &[0]) });
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
    begin(&mut checker, &launch(0, &[4]));
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
    begin(&mut checker, &launch(0, &[0]));
    checker.end(NOW);
}
