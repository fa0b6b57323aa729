//! The order of turns on a device. The most urgent candidate goes first. Where all candidates can
//! still be in time, the one with the least time an item goes first. Other orders are tested, too.

use downbeat_core::cluster::*;
use downbeat_core::{BatchId, DeviceKind, Duration, ModelId, Time};
use proptest::prelude::*;

const KIND: DeviceKind = DeviceKind(0);

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

/// A batch of `size` items that came at `since` and runs for `takes` milliseconds.
fn batch(size: u32, takes: u64, since: u64, latest: Time) -> Option<Candidate> {
    let (delay, takes) = (Duration::ZERO, Duration::from_millis(takes));
    Some(Candidate { size, exec: at(0), latest, since: at(since), delay, takes, pace: takes })
}

/// A matchmaker with a device, and models with such candidates.
fn waiting(candidates: &[Option<Candidate>]) -> (Matchmaker, Vec<ModelId>) {
    waiting_in(Order::default(), candidates)
}

fn waiting_in(order: Order, candidates: &[Option<Candidate>]) -> (Matchmaker, Vec<ModelId>) {
    let mut matchmaker = Matchmaker::new();
    matchmaker.set_order(order);
    matchmaker.add_device(KIND);
    let models: Vec<_> = candidates.iter().map(|_| matchmaker.add_model(u32::MAX)).collect();
    for (model, candidate) in models.iter().zip(candidates) {
        matchmaker.inform_candidate(*model, KIND, *candidate);
    }
    (matchmaker, models)
}

/// The model that gets the device at `now`. Its batch is done at once, and the model has no other
/// candidate.
fn turn(matchmaker: &mut Matchmaker, now: u64, number: u64) -> ModelId {
    turn_of(matchmaker, now, number, Duration::ZERO, None)
}

/// The same for a batch that was expected to take so long. Afterwards the model has another
/// candidate, or none.
fn turn_of(matchmaker: &mut Matchmaker, now: u64, number: u64, expected: Duration, next: Option<Candidate>) -> ModelId {
    let grant = matchmaker.poll_grant(at(now)).expect("the device is free");
    matchmaker.inform_candidate(grant.model, KIND, next);
    let batch = BatchId(number);
    matchmaker.handle_answer(Answer::Started { grant, batch, arrives: at(now), expected });
    assert_eq!(matchmaker.completed(at(now), grant.device, batch), Some(grant.model));
    grant.model
}

/// A small model with a long SLO stands beside a large one with a short SLO. One of them waits 1
/// ms, instead of the other 20 ms.
#[test]
fn where_all_can_still_make_it_the_cheapest_item_goes_first() {
    let (mut matchmaker, models) = waiting(&[batch(1, 20, 0, at(30)), batch(1, 1, 0, at(250))]);
    assert_eq!(turn(&mut matchmaker, 0, 0), models[1]);
    assert_eq!(turn(&mut matchmaker, 1, 1), models[0]);
}

/// Waiting counts by the item: 32 of them in 10 ms wait more than one that takes 1 ms.
#[test]
fn a_large_batch_may_be_the_cheaper_one() {
    let (mut matchmaker, models) = waiting(&[batch(1, 1, 0, at(200)), batch(32, 10, 0, at(250))]);
    assert_eq!(turn(&mut matchmaker, 0, 0), models[1]);
}

/// Profiles are not so exact: of nearly equal candidates the first to come goes first.
#[test]
fn of_batches_of_like_cost_the_longest_waiting_goes_first() {
    let (mut matchmaker, models) = waiting(&[batch(10, 100, 5, Time::MAX), batch(10, 99, 6, Time::MAX)]);
    assert_eq!(turn(&mut matchmaker, 10, 0), models[0]);
}

/// The large candidate must start within 15 ms, and the small ones before it take 16: nothing goes
/// before the most urgent.
#[test]
fn where_the_order_may_cost_a_deadline_the_most_urgent_goes_first() {
    let (mut matchmaker, models) =
        waiting(&[batch(1, 1, 0, at(250)), batch(1, 20, 0, at(15)), batch(1, 15, 0, at(200))]);
    assert_eq!(turn(&mut matchmaker, 0, 0), models[1]);
}

/// Small batches come again and again: the large one goes before them once it has waited for ten of
/// its own runs.
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

#[test]
fn by_urgency_the_most_urgent_goes_first_whatever_else_could_wait() {
    let (mut matchmaker, models) = waiting_in(Order::Urgency, &[batch(1, 20, 0, at(30)), batch(1, 1, 0, at(250))]);
    assert_eq!(turn(&mut matchmaker, 0, 0), models[0]);
    assert_eq!(turn(&mut matchmaker, 1, 1), models[1]);
}

/// A new order applies also to candidates that already wait.
#[test]
fn another_order_counts_from_when_it_is_set() {
    let (mut matchmaker, models) = waiting(&[batch(1, 20, 0, at(30)), batch(1, 1, 0, at(250))]);
    matchmaker.set_order(Order::Urgency);
    assert_eq!(turn(&mut matchmaker, 0, 0), models[0]);
}

/// Two models with batches of 9 ms and of 3 ms always have a candidate. Each gets half of the
/// device's time, though one is the more urgent.
#[test]
fn by_fair_shares_who_had_less_device_time_goes_first() {
    let takes = |long: bool| if long { 9 } else { 3 };
    let next = |model: usize| batch(1, takes(model == 0), 0, at(30 + 300 * model as u64));
    let (mut matchmaker, models) = waiting_in(Order::Fair, &[next(0), next(1)]);
    let mut had = [0, 0];
    for number in 0..40 {
        let model = usize::from(had[1] < had[0]);
        let expected = Duration::from_millis(takes(model == 0));
        assert_eq!(turn_of(&mut matchmaker, 10, number, expected, next(model)), models[model], "{had:?}");
        had[model] += takes(model == 0);
    }
    assert_eq!(had, [90, 90]);
}

/// A new model does not make up for the time that others had before it came. Otherwise the models
/// that waited would wait even longer.
#[test]
fn by_fair_shares_who_did_not_ask_has_saved_nothing_up() {
    let always = batch(1, 5, 0, at(300));
    let (mut matchmaker, models) = waiting_in(Order::Fair, &[always, None]);
    let takes = Duration::from_millis(5);
    (0..20).for_each(|number| assert_eq!(turn_of(&mut matchmaker, 10, number, takes, always), models[0]));
    matchmaker.inform_candidate(models[1], KIND, batch(1, 5, 10, at(400)));
    let next = |number| {
        let model = matchmaker.poll_grant(at(10)).map(|grant| {
            matchmaker.inform_candidate(grant.model, KIND, batch(1, 5, 10, at(400)));
            let answer = Answer::Started { grant, batch: BatchId(number), arrives: at(10), expected: takes };
            matchmaker.handle_answer(answer);
            matchmaker.completed(at(10), grant.device, BatchId(number));
            grant.model
        });
        model.expect("the device is free")
    };
    let turns: Vec<ModelId> = (20..26).map(next).collect();
    let [old, new] = [models[0], models[1]];
    assert_eq!(turns, [new, old, new, old, new, old]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Other models send candidates again and again, as urgent or as short as possible. A waiting
    /// model has its turn by its `latest`, or after a few batches of each other model.
    #[test]
    fn nobody_starves_in_any_order(
        order in prop::sample::select(Order::ALL.to_vec()),
        changes in prop::option::of(prop::sample::select(Order::ALL.to_vec())),
        mine in (1..6u32, 1..40u64, 0..400u64),
        has_deadline in any::<bool>(),
        others in prop::collection::vec((1..6u32, 1..40u64, prop::option::of(0..400u64)), 1..6),
    ) {
        let candidate = |(size, takes, slack): (u32, u64, Option<u64>), now: u64| {
            batch(size, takes, now, slack.map_or(Time::MAX, |slack| at(now + slack)))
        };
        // A model without a deadline beside models that have one is safe only under fair shares.
        let slack = Some(mine.2).filter(|_| has_deadline || order != Order::Fair || changes.is_some());
        let (mut matchmaker, models) = waiting_in(order, &[candidate((mine.0, mine.1, slack), 0)]);
        let models: Vec<ModelId> = models.into_iter().chain(others.iter().map(|_| matchmaker.add_model(u32::MAX))).collect();
        let mut now = 0;
        // Until the model's time has come, and then the candidates that precede it in each order
        // have run.
        let patience = mine.2 + others.iter().map(|other| 3 * other.1 + 40).sum::<u64>();
        for number in 0.. {
            for (model, other) in models[1..].iter().zip(&others) {
                matchmaker.inform_candidate(*model, KIND, candidate(*other, now));
            }
            if now > patience / 2 && let Some(changed) = changes {
                matchmaker.set_order(changed);
            }
            let grant = matchmaker.poll_grant(at(now)).expect("the device is free");
            if grant.model == models[0] {
                break;
            }
            let takes = others[models.iter().position(|model| *model == grant.model).unwrap() - 1].1;
            matchmaker.inform_candidate(grant.model, KIND, None);
            let expected = Duration::from_millis(takes);
            matchmaker.handle_answer(Answer::Started { grant, batch: BatchId(number), arrives: at(now), expected });
            now += takes;
            matchmaker.completed(at(now), grant.device, BatchId(number));
            prop_assert!(now <= 2 * patience, "{now} ms under {order}, patience {patience}");
        }
    }
}
