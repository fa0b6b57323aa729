//! Work on devices beside the scheduler's batches: the scheduler prefers devices that finish this
//! work first, and waits for none.

use downbeat_core::cluster::*;
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use proptest::prelude::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn at(time: u64) -> Time {
    Time::ZERO + ms(time)
}

const KIND: DeviceKind = DeviceKind(0);

fn candidate(delay: u64, pace: u64) -> Option<Candidate> {
    let (latest, since) = (at(1_000), at(0));
    Some(Candidate { size: 1, exec: at(0), latest, since, delay: ms(delay), takes: ms(10), pace: ms(pace) })
}

/// Devices of one kind with such loads, and a model.
fn loaded(loads: &[u64]) -> (Matchmaker, ModelId, Vec<DeviceId>) {
    let mut matchmaker = Matchmaker::new();
    let model = matchmaker.add_model(u32::MAX);
    let devices: Vec<DeviceId> = loads.iter().map(|_| matchmaker.add_device(KIND)).collect();
    for (device, load) in devices.iter().zip(loads) {
        matchmaker.set_load(*device, at(*load));
    }
    (matchmaker, model, devices)
}

/// The next device at `now`, which gets a batch of 10 ms.
fn next(matchmaker: &mut Matchmaker, now: Time, model: ModelId, delay: u64, batch: u64) -> Option<DeviceId> {
    matchmaker.inform_candidate(model, KIND, candidate(delay, 10));
    let grant = matchmaker.poll_grant(now)?;
    matchmaker.inform_candidate(model, KIND, None);
    let arrives = (now + ms(delay)).max(grant.free_at);
    matchmaker.handle_answer(Answer::Started { grant, batch: BatchId(batch), arrives, expected: ms(10) });
    Some(grant.device)
}

/// Devices without other work go first. Then come the devices that will finish their other work
/// first, though they have not finished. Of equals the smallest id goes first.
#[test]
fn of_free_devices_the_one_that_is_done_first_with_other_work_is_taken() {
    let (mut matchmaker, model, d) = loaded(&[40, 0, 30, 0, 30, 7]);
    let taken: Vec<_> = (0..7).map(|batch| next(&mut matchmaker, at(10), model, 0, batch)).collect();
    // The other work that should have ended by 7 ms is late, and still runs.
    assert_eq!(taken, [Some(d[1]), Some(d[3]), Some(d[5]), Some(d[2]), Some(d[4]), Some(d[0]), None]);
    assert_eq!(matchmaker.free_devices(), 0, "none was left idle because it is loaded");
}

#[test]
fn a_device_is_taken_whatever_its_load_and_nothing_is_due_for_a_new_one() {
    let (mut matchmaker, model, d) = loaded(&[0]);
    matchmaker.set_load(d[0], Time::MAX);
    assert_eq!(matchmaker.poll_timeout(), None);
    matchmaker.inform_candidate(model, KIND, candidate(0, 10));
    assert_eq!(matchmaker.poll_timeout().map(|(_, model)| model), Some(model));
    let grant = matchmaker.poll_grant(at(0)).unwrap();
    assert_eq!((grant.device, grant.free_at), (d[0], Time::ZERO), "its own batches may begin at once");
    assert_eq!(matchmaker.expected_free(), Time::MAX, "but that it is granted");
    // A device that does not exist has no load.
    matchmaker.set_load(DeviceId(9), at(1));
    assert_eq!(matchmaker.load(DeviceId(9)), Time::ZERO);
}

/// A batch is not sent behind another to a device without load while a loaded one has no batch at
/// all.
#[test]
fn a_loaded_device_is_free_before_a_busy_one_is() {
    let (mut matchmaker, model, d) = loaded(&[0, 500]);
    matchmaker.set_sends_ahead(true);
    let taken: Vec<_> = (0..2).map(|batch| next(&mut matchmaker, at(1), model, 1, batch)).collect();
    assert_eq!(taken, [Some(d[0]), Some(d[1])]);
    // Both devices have a batch that runs when the next batch arrives.
    matchmaker.set_load(d[0], at(900));
    assert_eq!(next(&mut matchmaker, at(11), model, 1, 2), Some(d[1]));
    assert_eq!(next(&mut matchmaker, at(11), model, 1, 3), Some(d[0]));
}

/// Speed counts before load; kinds that are equally fast are one kind.
#[test]
fn faster_kinds_go_first_then_the_less_loaded_device() {
    for (slow, expected) in [(20, 0), (10, 1)] {
        let mut matchmaker = Matchmaker::new();
        let model = matchmaker.add_model(u32::MAX);
        let devices = [DeviceKind(0), DeviceKind(1)].map(|kind| matchmaker.add_device(kind));
        matchmaker.set_load(devices[0], at(50));
        matchmaker.inform_candidate(model, DeviceKind(0), candidate(0, 10));
        matchmaker.inform_candidate(model, DeviceKind(1), candidate(0, slow));
        assert_eq!(matchmaker.poll_grant(at(0)).map(|grant| grant.device), Some(devices[expected]));
    }
}

/// Batches that start, with their devices.
fn batches(scheduler: &mut Scheduler) -> Vec<(Time, u32, DeviceId, BatchId)> {
    let mut batches = Vec::new();
    while let Some(output) = scheduler.poll_output() {
        let Output::Dispatch { batch, device, size, start, .. } = output else { panic!("nothing is dropped") };
        batches.push((start, size, device, batch));
    }
    batches
}

proptest! {
    /// On devices of one kind, a load decides where batches run. It decides neither when they run
    /// nor which requests they hold.
    #[test]
    fn loads_change_no_batch(
        steps in prop::collection::vec((0..40u64, 0..4usize, 0..100u64), 1..80),
        devices in 1..4u32,
    ) {
        let profile = LatencyProfile::linear(ms(1), ms(5), 8).unwrap();
        let options = ModelOptions::new(profile, DispatchPolicy::Deferred, DropPolicy::None);
        let run = |loads: bool| {
            let mut scheduler = Scheduler::new();
            let model = scheduler.add_model(at(0), options.clone());
            let devices: Vec<DeviceId> = (0..devices).map(|_| scheduler.add_device(at(0), KIND)).collect();
            let (mut now, mut ends, mut started) = (at(0), Vec::new(), Vec::new());
            for (id, (gap, device, load)) in steps.iter().enumerate() {
                let until = now + ms(*gap);
                // Completions and timers up to the next request.
                loop {
                    for (start, size, device, batch) in batches(&mut scheduler) {
                        started.push((start, size));
                        ends.push((start + ms(5 + u64::from(size)), batch, device));
                    }
                    ends.sort();
                    let end = ends.first().map(|(at, ..)| *at);
                    let timer = scheduler.poll_timeout().map(|(at, _)| at);
                    let Some(event) = [end, timer].into_iter().flatten().min().filter(|at| *at <= until) else { break };
                    now = now.max(event);
                    if end == Some(event) {
                        let (_, batch, device) = ends.remove(0);
                        scheduler.handle_completion(now, device, batch);
                    } else {
                        scheduler.handle_timeout(now);
                    }
                }
                now = until;
                if loads && let Some(device) = devices.get(*device) {
                    scheduler.set_load(*device, at(*load));
                }
                let (id, deadline) = (RequestId(id as u64), now + ms(40));
                let request = Request { id, model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
                scheduler.handle_request(now, request).unwrap();
            }
            started
        };
        prop_assert_eq!(run(false), run(true));
    }
}
