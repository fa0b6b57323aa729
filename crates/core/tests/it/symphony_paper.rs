//! One test per claim of Symphony §3-4.

use downbeat_core::cluster::*;
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time};

/// A quarter of the paper's time unit, so that its example is in whole milliseconds.
fn at(quarters: u64) -> Time {
    Time::ZERO + Duration::from_millis(quarters)
}

#[test]
fn section_3_3_the_first_four_requests_leave_together_when_the_fourth_arrives() {
    let mut s = Scheduler::new();
    for _ in 0..3 {
        s.add_device(at(0));
    }
    let profile = LatencyProfile::linear(Duration::from_millis(4), Duration::from_millis(20), 32).unwrap();
    let level = PriorityLevel { max_queue: u32::MAX, timeout_action: TimeoutAction::Reject };
    let model = s.add_model(
        at(0),
        ModelOptions {
            profile,
            max_batch: 32,
            drop: DropPolicy::HeadDrop,
            dispatch: DispatchPolicy::Deferred,
            max_in_flight: u32::MAX,
            levels: vec![level],
        },
    );
    assert_eq!(model, ModelId(0));
    for i in 0..4 {
        assert_eq!(s.poll_output(), None);
        let now = at(3 * i);
        let deadline = now + Duration::from_millis(48);
        s.handle_request(
            now,
            Request { id: RequestId(i), model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 },
        )
        .unwrap();
    }
    let Some(Output::Dispatch { members, size, expected, .. }) = s.poll_output() else { panic!("no dispatch") };
    assert_eq!(members, [0, 1, 2, 3].map(RequestId));
    assert_eq!((size, expected), (4, Duration::from_millis(36)));
}
