//! Batches that `windowed` makes ahead, as in the Triton that DVABatch measured. For the rest of
//! the device such a batch waits like a request in no batch.

use downbeat_core::device::*;
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time};

const MODEL: ModelId = ModelId(0);

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

fn request(id: u64) -> DeviceRequest {
    DeviceRequest { id: RequestId(id), model: MODEL, deadline: Time::MAX, size: 1, length: 0 }
}

/// r0 runs for 10 ms, r1 is in a batch made ahead, r2 waits: one batch ahead, of at most two.
fn one_ahead() -> DeviceScheduler {
    let profile = SegmentProfile::whole(&LatencyProfile::from_table(vec![Duration::from_millis(10); 2]).unwrap());
    let windowed = WindowedOptions {
        profile,
        max_batch: 2,
        window: Duration::ZERO,
        fill: false,
        drop: false,
        queue_bound: 1,
        ahead: 1,
    };
    let mut scheduler = DeviceScheduler::new();
    scheduler.handle_model(Time::ZERO, MODEL, Some(windowed.build())).unwrap();
    (0..3).for_each(|id| scheduler.handle_request(at(0), &request(id)).unwrap());
    assert_eq!(outputs(&mut scheduler).len(), 1, "r0 is launched");
    scheduler
}

fn outputs(scheduler: &mut DeviceScheduler) -> Vec<DeviceOutput> {
    let outputs = std::iter::from_fn(|| scheduler.poll_output());
    outputs.filter(|output| !matches!(output, DeviceOutput::Note { .. })).collect()
}

#[test]
fn who_is_in_a_frozen_batch_waits_but_not_in_the_queue() {
    let mut scheduler = one_ahead();
    let stats = scheduler.stats(MODEL);
    assert_eq!((stats.waiting, stats.running), (2, 1));
    assert_eq!(scheduler.handle_request(at(0), &request(3)), Err(DeviceReject::QueueFull { bound: 1 }));
    assert_eq!(scheduler.handle_request(at(0), &request(1)), Err(DeviceReject::NameTaken(RequestId(1))));
}

#[test]
fn frozen_batches_are_in_the_forecast_each_by_itself() {
    assert_eq!(one_ahead().free_at(at(0), MODEL), at(30), "r1 and r2 do not run together");
}

#[test]
fn a_model_that_goes_drops_who_is_in_a_frozen_batch() {
    let mut scheduler = one_ahead();
    scheduler.handle_model(at(1), MODEL, None).unwrap();
    let dropped = |id| DeviceOutput::Drop { request: RequestId(id), reason: DeviceDrop::Removed };
    assert_eq!(outputs(&mut scheduler), [dropped(1), dropped(2)]);
    scheduler.handle_completion(at(10), LaunchId(0), Span { start: at(0), end: at(10) }, &[]);
    let reply = DeviceOutput::Reply { request: RequestId(0), launch: LaunchId(0) };
    assert_eq!(outputs(&mut scheduler), [reply, DeviceOutput::Free { model: Some(MODEL), lanes: vec![LaneId(0)] }]);
}

#[test]
fn a_model_that_changes_ends_its_frozen_batches() {
    let mut scheduler = one_ahead();
    let granted = ExclusiveOptions {
        profile: SegmentProfile::whole(&LatencyProfile::from_table(vec![Duration::from_millis(10)]).unwrap()),
    };
    scheduler.handle_model(at(1), MODEL, Some(granted.build())).unwrap();
    let mut answered = Vec::new();
    for launch in 0..3 {
        scheduler.handle_completion(
            at(10 * (launch + 1)),
            LaunchId(launch),
            Span { start: at(10 * launch), end: at(10 * launch + 10) },
            &[],
        );
        let replies = outputs(&mut scheduler).into_iter();
        answered.extend(replies.filter_map(|output| match output {
            DeviceOutput::Reply { request, .. } => Some(request.0),
            _ => None,
        }));
    }
    assert_eq!(answered, [0, 1, 2]);
}
