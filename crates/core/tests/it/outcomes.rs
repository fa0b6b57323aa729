//! Every unusual event has a clear outcome: one test for each, named after it.

use downbeat_core::cluster::*;
use downbeat_core::profile::ProfileError;
use downbeat_core::{
    BatchId, DeviceId, DeviceKind, DeviceProfiles, Duration, LatencyProfile, ModelId, RequestId, Time,
};

const KIND: DeviceKind = DeviceKind(0);
/// A model that does not exist.
const STRANGER: ModelId = ModelId(7);

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

/// `l(b) = b + 5` ms, eager.
fn model() -> ModelOptions {
    ModelOptions {
        profiles: LatencyProfile::linear_ms(1.0, 5.0, 8).unwrap().into(),
        max_batch: 8,
        drop: DropPolicy::HeadDrop,
        dispatch: DispatchPolicy::Eager,
        max_in_flight: u32::MAX,
        shares_limit: None,
        max_wait: Duration::MAX,
        levels: Vec::new(),
    }
}

fn scheduler(devices: u32) -> Scheduler {
    let mut scheduler = Scheduler::new();
    scheduler.add_model(at(0), model());
    for _ in 0..devices {
        scheduler.add_device(at(0), KIND);
    }
    scheduler
}

fn request(id: u64, deadline: Time) -> Request {
    Request { id: RequestId(id), model: ModelId(0), deadline, queue_expiry: Time::MAX, level: 0, size: 1 }
}

fn dispatched(scheduler: &mut Scheduler) -> Option<(DeviceId, BatchId)> {
    match scheduler.poll_output()? {
        Output::Dispatch { device, batch, .. } => Some((device, batch)),
        drop => panic!("{drop:?}"),
    }
}

#[test]
fn unknown_model_is_a_rejection_and_its_commands_do_nothing() {
    let mut s = scheduler(1);
    let ticket = s.handle_request(at(0), request(0, at(90))).unwrap();
    assert_eq!(s.handle_request(at(0), Request { model: STRANGER, ..request(1, at(90)) }), Err(Reject::UnknownModel));
    assert!(!s.handle_cancel(at(0), STRANGER, ticket));
    s.remove_model(at(0), STRANGER);
    s.set_profile(at(0), STRANGER, LatencyProfile::linear_ms(1.0, 0.0, 1).unwrap());
    s.set_dispatch(at(0), STRANGER, DispatchPolicy::Latest);
    assert_eq!((s.queued(STRANGER), s.target(STRANGER)), (0, 0));
    assert_eq!(dispatched(&mut s), Some((DeviceId(0), BatchId(0))), "the others go on");
}

#[test]
fn a_removed_model_is_an_unknown_model() {
    let mut s = scheduler(0);
    s.handle_request(at(0), request(0, Time::MAX)).unwrap();
    s.remove_model(at(1), ModelId(0));
    let dropped = s.poll_output();
    assert!(matches!(dropped, Some(Output::Drop { reason: DropReason::ModelRemoved, .. })), "{dropped:?}");
    assert_eq!(s.handle_request(at(1), request(1, Time::MAX)), Err(Reject::UnknownModel));
    s.remove_model(at(1), ModelId(0));
    assert_eq!((s.poll_output(), s.poll_timeout()), (None, None));
}

#[test]
fn negative_profile_is_an_error() {
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        let said = LatencyProfile::linear_ms(bad, 5.0, 8).unwrap_err().to_string();
        assert_eq!(said, format!("alpha must be a number of milliseconds, zero or more, not {bad}"));
        let said = LatencyProfile::linear_ms(1.0, bad, 8).unwrap_err().to_string();
        assert_eq!(said, format!("beta must be a number of milliseconds, zero or more, not {bad}"));
    }
    assert_eq!(LatencyProfile::linear_ms(0.0, 0.0, 8), Err(ProfileError::NotPositive { batch: 1 }));
}

#[test]
fn non_monotone_profile_is_an_error_as_a_table_and_noise_as_a_measurement() {
    let ms = Duration::from_millis;
    let falling = LatencyProfile::from_table(vec![ms(5), ms(4)]);
    assert_eq!(falling, Err(ProfileError::Decreasing { batch: 2 }));
    let said = falling.unwrap_err().to_string();
    assert_eq!(
        said,
        "the latency of batch size 2 is lower than that of 1; latencies must not fall with the batch size"
    );
    let measured = LatencyProfile::from_points(&[(1, ms(5)), (2, ms(4))]).unwrap();
    let mean = Duration::from_micros(4_500);
    assert_eq!([1, 2].map(|b| measured.latency(b)), [mean; 2], "a larger batch takes no less");
}

#[test]
fn no_profile_at_all_is_an_error() {
    assert_eq!(DeviceProfiles::by_kind([]), Err(ProfileError::Empty));
    assert_eq!(LatencyProfile::from_table(Vec::new()), Err(ProfileError::Empty));
}

#[test]
fn slo_below_l_1_is_a_rejection_with_the_numbers() {
    let mut s = scheduler(1);
    let (needed, allowed) = (Duration::from_millis(6), Duration::from_millis(5));
    let rejected = s.handle_request(at(3), request(0, at(8)));
    assert_eq!(rejected, Err(Reject::DeadlineImpossible { needed, allowed }));
    let said = "the deadline cannot be met: execution takes 6 ms, 5 ms are left";
    assert_eq!(rejected.unwrap_err().to_string(), said);
    assert!(s.handle_request(at(3), request(1, at(9))).is_ok(), "l(1) itself is enough");
    let past = s.handle_request(at(3), request(2, at(1)));
    assert_eq!(past, Err(Reject::DeadlineImpossible { needed, allowed: Duration::ZERO }));
}

#[test]
fn slo_below_l_1_on_every_kind_but_one_is_served_by_that() {
    let mut s = Scheduler::new();
    let profile = |beta| LatencyProfile::linear_ms(1.0, beta, 8).unwrap();
    let profiles = DeviceProfiles::by_kind([(KIND, profile(50.0)), (DeviceKind(1), profile(5.0))]).unwrap();
    s.add_model(at(0), ModelOptions { profiles, ..model() });
    s.add_device(at(0), KIND);
    assert!(s.handle_request(at(0), request(0, at(9))).is_err());
    let fast = s.add_device(at(0), DeviceKind(1));
    assert!(s.handle_request(at(0), request(1, at(9))).is_ok());
    assert_eq!(dispatched(&mut s), Some((fast, BatchId(0))));
}

#[test]
fn empty_cluster_keeps_requests_until_they_are_hopeless() {
    let mut s = scheduler(0);
    assert_eq!((s.devices(), s.free_devices(), s.expected_free()), (0, 0, Time::MAX));
    s.handle_request(at(0), request(0, at(10))).unwrap();
    s.handle_request(at(0), request(1, Time::MAX)).unwrap();
    // First the batch of both expires, then the batch of the remaining request.
    let mut dropped = None;
    while dropped.is_none() {
        let (due, _) = s.poll_timeout().unwrap();
        s.handle_timeout(due);
        dropped = s.poll_output().inspect(|_| assert_eq!(due, at(4) + Duration::from_nanos(1)));
    }
    assert!(matches!(dropped, Some(Output::Drop { request: RequestId(0), reason: DropReason::Hopeless, .. })));
    assert_eq!((s.poll_output(), s.poll_timeout(), s.queued(ModelId(0))), (None, None, 1));
    s.add_device(at(20), KIND);
    assert_eq!(
        dispatched(&mut s),
        Some((DeviceId(0), BatchId(0))),
        "who has no deadline is served when a device comes"
    );
}

#[test]
fn cluster_without_models_has_nothing_to_do() {
    let mut s = Scheduler::new();
    s.add_device(at(0), KIND);
    s.handle_timeout(at(5));
    s.handle_completion(at(5), DeviceId(0), BatchId(0));
    s.remove_device(at(6), DeviceId(0));
    assert_eq!((s.poll_output(), s.poll_timeout(), s.stats().stray_completions), (None, None, 1));
}

#[test]
fn duplicate_completion_is_counted_and_ignored() {
    let mut s = scheduler(1);
    s.handle_request(at(0), request(0, at(90))).unwrap();
    s.handle_request(at(0), request(1, at(90))).unwrap();
    let (device, batch) = dispatched(&mut s).unwrap();
    s.handle_completion(at(6), device, batch);
    let second = dispatched(&mut s);
    assert_eq!(second, Some((device, BatchId(1))));
    s.handle_completion(at(7), device, batch);
    assert_eq!((s.stats().stray_completions, s.free_devices()), (1, 0), "the device still has the second");
    s.handle_completion(at(12), device, BatchId(1));
    s.handle_completion(at(12), device, BatchId(1));
    assert_eq!((s.stats().stray_completions, s.free_devices()), (2, 1));
}

#[test]
fn completion_for_a_removed_device_is_counted_and_ignored() {
    let mut s = scheduler(2);
    s.handle_request(at(0), request(0, at(90))).unwrap();
    let (device, batch) = dispatched(&mut s).unwrap();
    s.remove_device(at(1), device);
    s.remove_device(at(1), device);
    s.handle_completion(at(6), device, batch);
    assert_eq!((s.stats().stray_completions, s.devices(), s.free_devices()), (1, 1, 1));
    s.handle_request(at(7), request(1, at(90))).unwrap();
    assert_eq!(dispatched(&mut s), Some((DeviceId(1), BatchId(1))), "what is left goes on");
}

#[test]
fn a_foreign_completion_is_counted_and_ignored() {
    let mut s = scheduler(2);
    s.handle_request(at(0), request(0, at(90))).unwrap();
    let (_, batch) = dispatched(&mut s).unwrap();
    for (device, batch) in [(DeviceId(1), batch), (DeviceId(0), BatchId(9)), (DeviceId(u32::MAX), batch)] {
        s.handle_completion(at(1), device, batch);
    }
    assert_eq!((s.stats().stray_completions, s.free_devices()), (3, 1));
}

#[test]
fn time_going_backwards_is_taken_as_standing_still() {
    let mut s = scheduler(1);
    s.handle_timeout(at(50));
    // The scheduler judges as of 50, its latest time: a deadline of 40 is over, though the caller's
    // clock says 10.
    let allowed = Duration::ZERO;
    let rejected = s.handle_request(at(10), request(0, at(40)));
    assert_eq!(rejected, Err(Reject::DeadlineImpossible { needed: Duration::from_millis(6), allowed }));
    s.handle_request(at(10), request(1, at(90))).unwrap();
    let Some(Output::Dispatch { start, .. }) = s.poll_output() else { panic!() };
    assert_eq!((start, s.stats().time_reversals), (at(50), 2));
    assert!(s.poll_timeout().is_none_or(|(due, _)| due > at(50)));
}

/// With a broken clock, or a log of one, the scheduler still decides each request once.
#[test]
fn the_end_of_time_is_a_time() {
    let dispatch = DispatchPolicy::Adaptive { consolidate: false };
    let mut s = Scheduler::new();
    let model = s.add_model(at(0), ModelOptions { dispatch, drop: DropPolicy::Adaptive, ..model() });
    s.add_device(at(0), KIND);
    // The last 3 s have ever more requests, so that the demand differs in each tenth of a second.
    for id in 0..=300 {
        let left = (300 - id) * (300 - id) * 33_333 + if id < 300 { 20_000_000 } else { 0 };
        let now = Time::from_nanos(u64::MAX - left);
        let request = Request { model, ..request(id, now + Duration::from_millis(100)) };
        s.handle_request(now, request).unwrap();
        s.handle_timeout(now);
        while let Some((device, batch)) = dispatched(&mut s) {
            s.handle_completion(now, device, batch);
        }
    }
}
