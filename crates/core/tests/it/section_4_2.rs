//! Symphony §4.2: model queues and the matchmaker are separate and talk in messages only, so that
//! they can run apart.

use downbeat_core::cluster::*;
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

const KIND: DeviceKind = DeviceKind(0);

fn candidate(exec: u64, latest: u64) -> Option<Candidate> {
    candidate_since(0, exec, latest)
}

fn candidate_since(since: u64, exec: u64, latest: u64) -> Option<Candidate> {
    let (delay, pace) = (Duration::ZERO, Duration::from_millis(37));
    let takes = Duration::from_millis(6);
    Some(Candidate { size: 1, exec: at(exec), latest: at(latest), since: at(since), delay, takes, pace })
}

fn queue(drop: DropPolicy) -> ModelQueue {
    let profile = LatencyProfile::linear(Duration::from_millis(1), Duration::from_millis(5), 32).unwrap();
    let options = ModelOptions {
        profiles: profile.into(),
        max_batch: 32,
        drop,
        dispatch: DispatchPolicy::Deferred,
        max_in_flight: u32::MAX,
        shares_limit: None,
        max_wait: Duration::MAX,
        levels: Vec::new(),
    };
    ModelQueue::new(at(0), options)
}

fn request(id: u64, deadline: u64) -> Request {
    let (id, model) = (RequestId(id), ModelId(0));
    Request { id, model, deadline: at(deadline), queue_expiry: Time::MAX, level: 0, size: 1 }
}

/// "RankThread only needs to pick up the latest candidate": a newer one replaces the former, timer
/// and all.
#[test]
fn only_the_newest_candidate_counts() {
    let mut matchmaker = Matchmaker::new();
    let (model, _) = (matchmaker.add_model(u32::MAX), matchmaker.add_device(KIND));
    matchmaker.inform_candidate(model, KIND, candidate(1, 2));
    matchmaker.inform_candidate(model, KIND, candidate(5, 6));
    assert_eq!(matchmaker.poll_timeout(), Some((at(5), model)));
    assert_eq!(matchmaker.poll_grant(at(4)), None, "the former candidate's timer is gone");
    matchmaker.inform_candidate(model, KIND, None);
    assert_eq!(matchmaker.poll_timeout(), None);
    assert_eq!(matchmaker.poll_grant(at(9)), None);
}

/// "RankThread sends a GPU Granted message and marks the GPU as unavailable": no other queue gets
/// the device until this queue has said when the device will be free.
#[test]
fn a_granted_device_is_unavailable_until_the_queue_answers() {
    let mut matchmaker = Matchmaker::new();
    let models = [matchmaker.add_model(u32::MAX), matchmaker.add_model(u32::MAX)];
    let device = matchmaker.add_device(KIND);
    for model in models {
        matchmaker.inform_candidate(model, KIND, candidate(0, 9));
    }
    let grant = matchmaker.poll_grant(at(1)).unwrap();
    assert_eq!(grant, Grant { model: models[0], device, kind: KIND, free_at: at(0) });
    assert_eq!(matchmaker.poll_grant(at(1)), None);
    matchmaker.inform_candidate(models[0], KIND, None);
    matchmaker.handle_answer(Answer::Started {
        grant,
        batch: BatchId(0),
        arrives: at(1),
        expected: Duration::from_millis(6),
    });
    assert_eq!(matchmaker.expected_free(), at(7));
    assert_eq!(matchmaker.poll_grant(at(8)), None, "expected free, and still busy until it says so");
    assert_eq!(matchmaker.completed(at(8), device, BatchId(0)), Some(models[0]));
    assert_eq!(matchmaker.poll_grant(at(8)), Some(Grant { model: models[1], device, kind: KIND, free_at: at(0) }));
}

/// A grant can cross a cancellation: the queue has nothing any more, and the device goes to the
/// next.
#[test]
fn a_declined_device_goes_to_the_next_model() {
    let mut matchmaker = Matchmaker::new();
    let models = [matchmaker.add_model(1), matchmaker.add_model(1)];
    matchmaker.add_device(KIND);
    let mut queue = queue(DropPolicy::HeadDrop);
    let ticket = queue.enqueue(at(0), &request(0, 12)).unwrap();
    matchmaker.inform_candidate(models[0], KIND, queue.update(at(0)));
    matchmaker.inform_candidate(models[1], KIND, candidate(5, 8));
    let grant = matchmaker.poll_grant(at(5)).unwrap();
    assert_eq!(grant.model, models[0]);
    assert!(queue.cancel(ticket));
    assert_eq!(queue.take(at(5), KIND, at(0), &mut Vec::new()), None);
    matchmaker.inform_candidate(models[0], KIND, queue.update(at(5)));
    matchmaker.handle_answer(Answer::Declined { grant });
    assert_eq!(matchmaker.poll_grant(at(5)).map(|grant| grant.model), Some(models[1]));
}

/// A candidate sent before the queue knows of a grant may hold requests that the grant takes. It
/// gets no device until the answer, and then the newest candidate counts.
#[test]
fn a_model_with_an_open_grant_gets_no_second_one() {
    let mut matchmaker = Matchmaker::new();
    let model = matchmaker.add_model(u32::MAX);
    let devices = [matchmaker.add_device(KIND), matchmaker.add_device(KIND)];
    matchmaker.inform_candidate(model, KIND, candidate(0, 9));
    let grant = matchmaker.poll_grant(at(1)).unwrap();
    matchmaker.inform_candidate(model, KIND, candidate(1, 9));
    assert_eq!(matchmaker.poll_grant(at(1)), None);
    matchmaker.inform_candidate(model, KIND, candidate(2, 20));
    matchmaker.handle_answer(Answer::Started {
        grant,
        batch: BatchId(0),
        arrives: at(1),
        expected: Duration::from_millis(6),
    });
    assert_eq!(matchmaker.poll_grant(at(1)), None);
    assert_eq!(matchmaker.poll_grant(at(2)), Some(Grant { model, device: devices[1], kind: KIND, free_at: at(0) }));
}

/// A device may leave while its grant is open. After either answer it is gone, and holds no batch
/// of the model.
#[test]
fn a_device_that_leaves_before_the_answer_is_gone() {
    for started in [true, false] {
        let mut matchmaker = Matchmaker::new();
        let (model, device) = (matchmaker.add_model(1), matchmaker.add_device(KIND));
        matchmaker.inform_candidate(model, KIND, candidate(0, 9));
        let grant = matchmaker.poll_grant(at(1)).unwrap();
        assert_eq!(matchmaker.devices(), 1, "a granted device is there");
        assert_eq!(matchmaker.remove_device(device), Some(KIND));
        assert_eq!((matchmaker.devices(), matchmaker.free_devices()), (0, 0));
        matchmaker.handle_answer(match started {
            true => Answer::Started { grant, batch: BatchId(0), arrives: at(1), expected: Duration::from_millis(6) },
            false => Answer::Declined { grant },
        });
        assert_eq!((matchmaker.devices(), matchmaker.free_devices()), (0, 0));
        assert_eq!(matchmaker.completed(at(8), device, BatchId(0)), None);
        let other = matchmaker.add_device(KIND);
        assert_eq!(
            matchmaker.poll_grant(at(1)),
            Some(Grant { model, device: other, kind: KIND, free_at: at(0) }),
            "its limit of one is free again"
        );
    }
}

/// A model may be removed while its grant is open: its queue declines, and the device goes to the
/// next.
#[test]
fn a_grant_for_a_removed_model_is_declined() {
    let mut matchmaker = Matchmaker::new();
    let models = [matchmaker.add_model(1), matchmaker.add_model(1)];
    let device = matchmaker.add_device(KIND);
    matchmaker.inform_candidate(models[0], KIND, candidate(0, 9));
    let grant = matchmaker.poll_grant(at(1)).unwrap();
    matchmaker.remove_model(models[0]);
    matchmaker.inform_candidate(models[1], KIND, candidate(0, 9));
    assert_eq!(matchmaker.poll_grant(at(1)), None);
    let mut shard = Shard::new(0, 1);
    shard.handle_grant(at(1), grant);
    let answer = shard.poll_answer().unwrap();
    assert_eq!(answer, Answer::Declined { grant });
    matchmaker.handle_answer(answer);
    assert_eq!(matchmaker.poll_grant(at(1)), Some(Grant { model: models[1], device, kind: KIND, free_at: at(0) }));
}

/// "When the ModelThread receives GPU Granted, it updates the candidate and sends out the finalized
/// batch": the batch includes requests that came in the meantime, if they fit. The next candidate
/// holds the rest.
#[test]
fn a_granted_queue_updates_its_candidate_first() {
    let mut queue = queue(DropPolicy::HeadDrop);
    queue.enqueue(at(0), &request(0, 12)).unwrap();
    assert_eq!(queue.update(at(0)), candidate(5, 6));
    for id in 1..4 {
        queue.enqueue(at(4), &request(id, 16)).unwrap();
    }
    let mut members = Vec::new();
    let departure = queue.take(at(4), KIND, at(0), &mut members).unwrap();
    assert_eq!((departure.size, departure.start), (3, at(4)), "l(3) = 8 meets r0's deadline at 12");
    assert_eq!(members, [0, 1, 2].map(RequestId));
    assert_eq!(queue.update(at(4)), candidate_since(4, 9, 10));
}

/// A message about a device or model that does not exist changes nothing.
#[test]
fn strangers_are_ignored() {
    let mut matchmaker = Matchmaker::new();
    matchmaker.inform_candidate(ModelId(3), KIND, candidate(0, 9));
    matchmaker.remove_model(ModelId(3));
    assert_eq!(matchmaker.remove_device(DeviceId(3)), None);
    assert_eq!(matchmaker.completed(at(8), DeviceId(3), BatchId(0)), None);
    let (model, device) = (matchmaker.add_model(1), matchmaker.add_device(KIND));
    matchmaker.remove_model(model);
    matchmaker.inform_candidate(model, KIND, candidate(0, 9));
    assert_eq!(matchmaker.poll_grant(at(1)), None, "a removed model's candidate");
    assert_eq!(matchmaker.remove_device(device), Some(KIND));
    assert_eq!(matchmaker.remove_device(device), None);
    assert_eq!((matchmaker.devices(), matchmaker.expected_free()), (0, Time::MAX));
}
