//! Requests that cannot meet their deadline by a profile that may be wrong. A guess keeps no
//! request from being tried, and an old measurement is tried again.

use downbeat_core::cluster::*;
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};

const MODEL: ModelId = ModelId(0);
const SECOND: u64 = 1_000;

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

/// `l(b)` milliseconds alone, and a tenth of it for each item more.
fn profile(ms: f64) -> LatencyProfile {
    LatencyProfile::linear_ms(ms / 10.0, ms * 0.9, 8).unwrap()
}

/// A scheduler with one device and one model of this profile.
struct World {
    scheduler: Scheduler,
    next: u64,
}

impl World {
    fn new(profile: LatencyProfile) -> Self {
        let mut scheduler = Scheduler::new();
        let options = ModelOptions::new(profile, DispatchPolicy::Eager, DropPolicy::HeadDrop);
        assert_eq!(scheduler.add_model(at(0), options), MODEL);
        scheduler.add_device(at(0), DeviceKind(0));
        World { scheduler, next: 0 }
    }

    /// Whether the scheduler accepts a request of so many items with 5 s to its deadline.
    fn is_taken(&mut self, ms: u64, size: u32) -> bool {
        let (id, deadline) = (RequestId(self.next), at(ms + 5 * SECOND));
        self.next += 1;
        let request = Request { id, model: MODEL, deadline, queue_expiry: Time::MAX, level: 0, size };
        match self.scheduler.handle_request(at(ms), request) {
            Ok(_) => true,
            Err(Reject::DeadlineImpossible { allowed, .. }) => {
                assert_eq!(allowed, Duration::from_millis(5 * SECOND));
                false
            }
            Err(other) => panic!("{other}"),
        }
    }

    /// The batch that was started, if any.
    fn started(&mut self) -> Option<(DeviceId, BatchId)> {
        match self.scheduler.poll_output()? {
            Output::Dispatch { device, batch, .. } => Some((device, batch)),
            other => panic!("{other:?}"),
        }
    }

    /// The batch under way is done. The driver has learned the profile `learned`.
    fn done(&mut self, ms: u64, (device, batch): (DeviceId, BatchId), learned: LatencyProfile) {
        self.scheduler.handle_completion(at(ms), device, batch);
        self.scheduler.set_profile(at(ms), MODEL, learned);
    }
}

/// A shape of 200,000 elements, guessed from one of 2: it "needs 200 s even on an idle device", and
/// takes 20 ms.
#[test]
fn a_guess_keeps_no_request_from_being_tried_and_is_corrected() {
    let mut world = World::new(profile(200_000.0).learned(0));
    assert!(world.is_taken(0, 1));
    let batch = world.started().expect("the device is idle");
    assert!(!world.is_taken(0, 1), "one is enough to see");
    world.done(20, batch, profile(20.0).learned(1));
    for ms in 20..30 {
        assert!(world.is_taken(ms, 1), "it is known now");
    }
}

/// Requests of other models were refused for 200 s, as all devices were "busy".
#[test]
fn a_guess_makes_no_device_look_busy() {
    let mut world = World::new(profile(200_000.0).learned(0));
    assert!(world.is_taken(100, 1) && world.started().is_some());
    assert!(world.scheduler.expected_free() <= at(100));
    let mut known = World::new(profile(3_000.0).learned(8));
    assert!(known.is_taken(100, 1) && known.started().is_some());
    assert_eq!(known.scheduler.expected_free(), at(3_100));
}

#[test]
fn a_batch_size_that_was_never_run_is_tried_though_smaller_ones_are_known() {
    let mut world = World::new(profile(4_900.0).learned(1));
    assert!(world.is_taken(0, 1), "as measured");
    assert!(world.is_taken(0, 8), "nobody knows");
    assert!(!world.is_taken(0, 8));
    // A measured smaller batch takes too long already.
    let mut slow = World::new(profile(5_100.0).learned(1));
    assert!(!slow.is_taken(0, 8));
}

#[test]
fn slow_sets_are_refused_and_tried_again_ever_more_rarely() {
    let mut world = World::new(profile(200_000.0).learned(0));
    assert!(world.is_taken(0, 1));
    let batch = world.started().unwrap();
    world.done(7 * SECOND, batch, profile(7_000.0).learned(1));
    let (mut tried, mut second) = (Vec::new(), 7);
    while second < 200 {
        if world.is_taken(second * SECOND, 1) {
            tried.push(second);
            let batch = world.started().expect("one at a time");
            second += 7;
            world.done(second * SECOND, batch, profile(7_000.0).learned(1));
        } else {
            second += 1;
        }
    }
    assert_eq!(tried, [17, 44, 91, 178], "10, 20, 40, 80 s after what was learned last");
}

/// A busy minute made the profile 57 s; the machine is quiet again.
#[test]
fn a_wrong_belief_heals_itself() {
    let mut world = World::new(profile(57_000.0).learned(8));
    let refused = (0..10).filter(|second| !world.is_taken(second * SECOND, 4)).count();
    assert_eq!(refused, 10, "it was measured");
    assert!(world.is_taken(10 * SECOND, 4), "long ago");
    let batch = world.started().unwrap();
    // The first run corrects it in part; the next may follow at once.
    world.done(10 * SECOND + 30, batch, profile(9_000.0).learned(8));
    assert!(world.is_taken(10 * SECOND + 31, 4));
    let batch = world.started().unwrap();
    world.done(10 * SECOND + 61, batch, profile(30.0).learned(8));
    assert!((0..20).all(|ms| world.is_taken(10 * SECOND + 62 + ms, 4)), "all that come");
}

#[test]
fn what_is_certain_is_never_tried() {
    let mut world = World::new(profile(57_000.0));
    assert!((0..10_000).all(|second| !world.is_taken(second * SECOND, 1)));
}
