//! The rehearsal of device policies: the candidates that it may try, its findings, and that only
//! its inputs decide.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, PastArrival};
use downbeat_core::device::{
    Candidate, DeviceDecision, DeviceRehearsal, Overlap, OverlapPoint, PartitionId, PolicyModel, PolicyName,
    RehearsedModel, SegmentProfile, WrittenSettings,
};
use downbeat_core::{Duration, LatencyProfile, ModelId, Time};

const MODEL: ModelId = ModelId(0);

fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// Two lanes that together do `percent` percent of one lane's work, for all batch sizes.
fn overlap(percent: u64) -> Overlap {
    let point = |batch| OverlapPoint { batch, alone: us(percent), together: us(200) };
    Overlap::new(vec![point(1), point(8)])
}

/// A model that takes 1 ms an item and 4 ms a batch, with batches of at most 8.
fn model(overlap: Option<Overlap>) -> RehearsedModel {
    let profile = LatencyProfile::linear(us(1_000), us(4_000), 8).unwrap();
    let adaptive = DispatchPolicy::Adaptive { consolidate: false };
    RehearsedModel {
        options: ModelOptions::new(profile.clone(), adaptive, DropPolicy::Adaptive),
        model: PolicyModel {
            partition: PartitionId::default(),
            profile: SegmentProfile::whole(&profile),
            max_batch: 8,
            padded: false,
            queue_delay: Duration::ZERO,
            drop: true,
            queue_bound: 1 << 20,
            ring_slots: 0,
            cores: None,
        },
        overlap,
        cuts: Vec::new(),
        launch: us(10),
        written: WrittenSettings::new(),
    }
}

fn names(model: &RehearsedModel) -> Vec<String> {
    model.candidates().iter().map(|one| one.candidate.to_string()).collect()
}

/// A rehearsal of a model, of which `count` requests came, `gap_us` apart.
fn fed(model: RehearsedModel, gap_us: u64, count: u64) -> DeviceRehearsal {
    let mut rehearsal = DeviceRehearsal::new(1);
    rehearsal.set_model(MODEL, Some(model));
    for number in 0..count {
        // One of four requests comes early.
        let early = if number % 4 == 3 { gap_us / 2 } else { 0 };
        let at = Time::ZERO + us(number * gap_us - early);
        rehearsal.arrival(PastArrival { at, budget: us(50_000), model: MODEL, size: 1, level: 0 });
    }
    rehearsal
}

/// Reports the end of a thousand requests after so many seconds, with this share of bad ones.
fn end(rehearsal: &mut DeviceRehearsal, bad: f64, delay: f64) {
    for number in 0..1_000 {
        rehearsal.ended(Some(Duration::from_secs_f64(delay)), f64::from(number) >= bad * 1_000.0);
    }
}

fn trial(rehearsal: &mut DeviceRehearsal) -> DeviceDecision {
    rehearsal.step(u64::MAX);
    rehearsal.poll_decision().expect("enough has come for a trial")
}

/// The decision of a trial whose replay agrees with the requests' real ends. Checks too that a
/// trial changes nothing if the replay disagrees.
fn decision(make: impl Fn() -> DeviceRehearsal) -> DeviceDecision {
    let mut other = make();
    end(&mut other, 0.5, 3.0);
    let other = trial(&mut other);
    assert!(!other.faithful && !other.changed && other.best == other.tried[0].candidate, "{other:?}");
    let mut same = make();
    end(&mut same, other.tried[0].bad[0].1, other.tried[0].delay);
    let found = trial(&mut same);
    assert!(found.faithful && found.tried == other.tried, "{found:?}");
    found
}

#[test]
fn only_what_was_measured_is_a_candidate() {
    let mut model = model(None);
    let known = |names: &[String], policy: &str| names.iter().any(|name| name.starts_with(policy));
    let plain = names(&model);
    assert_eq!(plain[0], "exclusive");
    assert!(known(&plain, "windowed") && !known(&plain, "elastic") && !known(&plain, "staged"), "{plain:?}");
    let profile = LatencyProfile::linear(us(1_000), us(4_000), 8).unwrap();
    model.cuts = vec![SegmentProfile::even(&profile, 2)];
    assert_eq!(names(&model), plain, "stages run side by side, too, which was not measured");
    model.overlap = Some(overlap(90));
    let slower = names(&model);
    assert!(known(&slower, "staged (stages = 2)") && !known(&slower, "elastic"), "{slower:?}");
    model.overlap = Some(overlap(140));
    let all = names(&model);
    assert!(known(&all, "elastic") && !known(&all, "staged (stages = 4)"), "{all:?}");
    // No measurement says how long a lane takes whose batches hold fewer items than a request may
    // have.
    model.model.max_batch = 7;
    assert!(!known(&names(&model), "elastic"));
}

#[test]
fn what_was_said_about_a_policy_holds() {
    let mut model = model(Some(overlap(140)));
    model.written = WrittenSettings::from([("window_ms".to_owned(), 2.into()), ("mixes".to_owned(), "naive".into())]);
    let found = names(&model);
    assert_eq!(found, ["exclusive", "windowed", "elastic"], "{found:?}");
}

/// 900 requests a second are more than batches one after another can answer (8 of 12 ms: 667). They
/// are less than two lanes can answer that do not disturb each other.
#[test]
fn lanes_side_by_side_are_found_where_they_gain_and_only_there() {
    let found = decision(|| fed(model(Some(overlap(200))), 1_100, 8_000));
    assert!(found.changed && found.best.policy == PolicyName::ELASTIC, "{found:?}");
    let of = |found: &DeviceDecision, best: &Candidate| {
        found.tried.iter().find(|tried| tried.candidate == *best).unwrap().bad[0].1
    };
    assert!(of(&found, &found.best) < 0.01 && of(&found, &Candidate::exclusive()) > 0.2, "{found:?}");
    let taking_turns = decision(|| fed(model(Some(overlap(100))), 1_100, 8_000));
    assert!(taking_turns.best.policy != PolicyName::ELASTIC, "{taking_turns:?}");
}

/// With next to nothing to do all policies do the same, except those that make requests wait.
#[test]
fn sparse_requests_change_nothing() {
    let found = decision(|| fed(model(Some(overlap(200))), 40_000, 600));
    assert!(!found.changed && found.best == Candidate::exclusive(), "{found:?}");
    let waits = |tried: &&downbeat_core::device::TriedPolicy| tried.delay > found.tried[0].delay * 1.1;
    assert!(found.tried.iter().filter(waits).count() < found.tried.len() - 1, "{found:?}");
}

#[test]
fn from_where_it_stands_it_goes_back() {
    let model = model(Some(overlap(200)));
    let mut all = model.candidates().into_iter().map(|one| one.candidate);
    let slowest = all.rfind(|one| one.policy == PolicyName::WINDOWED).unwrap();
    let found = decision(|| {
        let mut rehearsal = fed(model.clone(), 20_000, 1_000);
        rehearsal.set_current(MODEL, &slowest);
        rehearsal
    });
    assert!(found.tried[0].candidate == slowest && found.changed, "{found:?}");
}

#[test]
fn no_trial_before_the_first_request_and_none_without_new_requests() {
    let mut rehearsal = fed(model(None), 10_000, 500);
    assert_eq!(rehearsal.step(u64::MAX), 0);
    let mut rehearsal = fed(model(None), 2_500, 2_000);
    assert_eq!(rehearsal.step(u64::MAX), 0, "nobody knows yet how they fare");
    end(&mut rehearsal, 0.0, 0.006);
    assert!(rehearsal.step(u64::MAX) > 2_000);
    assert!(rehearsal.poll_decision().is_some() && rehearsal.poll_decision().is_none());
    assert_eq!(rehearsal.step(u64::MAX), 0);
}

/// The portions in which a trial gets its time change nothing.
#[test]
fn a_trial_follows_from_what_came_alone() {
    let mut whole = fed(model(Some(overlap(150))), 1_500, 3_000);
    let mut parts = fed(model(Some(overlap(150))), 1_500, 3_000);
    for rehearsal in [&mut whole, &mut parts] {
        [0.95, 1.0, 1.02, 1.1].into_iter().for_each(|share| rehearsal.ran(MODEL, share));
        end(rehearsal, 0.0, 0.01);
    }
    let expected = trial(&mut whole);
    let found = std::iter::repeat_with(|| {
        parts.step(37);
        parts.poll_decision()
    });
    assert_eq!(found.take(1 << 20).flatten().next(), Some(expected));
}

/// After a loss nothing is tried for 8 s, then what has not lost; after the next it is 16 s.
#[test]
fn what_has_lost_in_reality_is_held_off_ever_longer() {
    const GAP_US: u64 = 2_500;
    // Feeds `seconds` seconds of requests, all answered in time.
    fn more(rehearsal: &mut DeviceRehearsal, sent: &mut u64, seconds: u64) {
        for number in *sent..*sent + seconds * 1_000_000 / GAP_US {
            let at = Time::ZERO + us(number * GAP_US);
            rehearsal.arrival(PastArrival { at, budget: us(50_000), model: MODEL, size: 1, level: 0 });
        }
        *sent += seconds * 1_000_000 / GAP_US;
        end(rehearsal, 0.0, 0.01);
    }
    let mut rehearsal = DeviceRehearsal::new(1);
    rehearsal.set_model(MODEL, Some(model(Some(overlap(200)))));
    let loser = model(Some(overlap(200))).candidates().remove(4).candidate;
    assert_eq!(loser.policy, PolicyName::ELASTIC);
    let mut sent = 0;
    more(&mut rehearsal, &mut sent, 8);
    for held in [8, 16] {
        rehearsal.set_current(MODEL, &loser);
        rehearsal.set_lost(Time::ZERO + us(sent * GAP_US), MODEL);
        more(&mut rehearsal, &mut sent, held - 1);
        assert_eq!(rehearsal.step(u64::MAX), 0, "{held}");
        more(&mut rehearsal, &mut sent, 2);
        let tried = trial(&mut rehearsal).tried;
        assert!(tried.len() > 1 && tried.iter().all(|tried| tried.candidate != loser), "{held} {tried:?}");
    }
}
