//! Whose turn it is on a device: the most urgent first, but where all that waits can still make it, what takes the least time an item.

use downbeat_core::cluster::*;
use downbeat_core::{BatchId, DeviceKind, Duration, ModelId, Time};

const KIND: DeviceKind = DeviceKind(0);

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

/// A batch of `size` items that came at `since` and runs for `takes`; milliseconds.
fn batch(size: u32, takes: u64, since: u64, latest: Time) -> Option<Candidate> {
    let (delay, takes) = (Duration::ZERO, Duration::from_millis(takes));
    Some(Candidate { size, exec: at(0), latest, since: at(since), delay, takes, pace: takes })
}

/// A matchmaker with a device, and models with such candidates.
fn waiting(candidates: &[Option<Candidate>]) -> (Matchmaker, Vec<ModelId>) {
    let mut matchmaker = Matchmaker::new();
    matchmaker.add_device(KIND);
    let models: Vec<_> = candidates.iter().map(|_| matchmaker.add_model(u32::MAX)).collect();
    for (model, candidate) in models.iter().zip(candidates) {
        matchmaker.inform_candidate(*model, KIND, *candidate);
    }
    (matchmaker, models)
}

/// Which model the device goes to at `now`; it is done with its batch, and has no other.
fn turn(matchmaker: &mut Matchmaker, now: u64, number: u64) -> ModelId {
    let grant = matchmaker.poll_grant(at(now)).expect("the device is free");
    matchmaker.inform_candidate(grant.model, KIND, None);
    let (batch, expected) = (BatchId(number), Duration::ZERO);
    matchmaker.handle_answer(Answer::Started { grant, batch, arrives: at(now), expected });
    assert_eq!(matchmaker.completed(at(now), grant.device, batch), Some(grant.model));
    grant.model
}

/// A small model with a long SLO beside a large one with a short SLO: 1 ms of waiting for one, not 20 for the other.
#[test]
fn where_all_can_still_make_it_the_cheapest_item_goes_first() {
    let (mut matchmaker, models) = waiting(&[batch(1, 20, 0, at(30)), batch(1, 1, 0, at(250))]);
    assert_eq!(turn(&mut matchmaker, 0, 0), models[1]);
    assert_eq!(turn(&mut matchmaker, 1, 1), models[0]);
}

/// By the item: 32 of them in 10 ms wait more than one that takes 1 ms.
#[test]
fn a_large_batch_may_be_the_cheaper_one() {
    let (mut matchmaker, models) = waiting(&[batch(1, 1, 0, at(200)), batch(32, 10, 0, at(250))]);
    assert_eq!(turn(&mut matchmaker, 0, 0), models[1]);
}

/// Profiles are not so exact: who came first goes first.
#[test]
fn of_batches_that_cost_about_the_same_the_one_that_waits_longest_goes_first() {
    let (mut matchmaker, models) = waiting(&[batch(10, 100, 5, Time::MAX), batch(10, 99, 6, Time::MAX)]);
    assert_eq!(turn(&mut matchmaker, 10, 0), models[0]);
}

/// The large one has to start within 15 ms, and others are before it that take 16: nothing is put before the most urgent.
#[test]
fn where_the_order_may_cost_a_deadline_the_most_urgent_goes_first() {
    let (mut matchmaker, models) =
        waiting(&[batch(1, 1, 0, at(250)), batch(1, 20, 0, at(15)), batch(1, 15, 0, at(200))]);
    assert_eq!(turn(&mut matchmaker, 0, 0), models[1]);
}

/// Small ones come again and again: the large one goes before them once it has waited for ten of its own runs.
#[test]
fn who_has_no_deadline_is_not_passed_over_for_good() {
    let (mut matchmaker, models) = waiting(&[batch(1, 4, 0, Time::MAX), None]);
    let mut passed = 0;
    for now in 0..100 {
        matchmaker.inform_candidate(models[1], KIND, batch(1, 1, now, Time::MAX));
        if turn(&mut matchmaker, now, now) == models[0] {
            break;
        }
        passed += 1;
    }
    assert!((2..50).contains(&passed), "passed over {passed} times");
}
