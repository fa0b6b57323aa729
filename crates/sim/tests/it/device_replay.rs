//! The replay of recorded requests under device policies: the candidates that it may try, and its
//! counts.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, PastArrival};
use downbeat_core::device::{
    Overlap, OverlapPoint, PartitionId, PolicyModel, PolicyName, SegmentProfile, WrittenSettings,
};
use downbeat_core::{Duration, LatencyProfile, ModelId, Time};
use downbeat_sim::device_replay::{DeviceReplay, ReplayCount, ReplayedModel};

fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// Two lanes that together do `percent` percent of one lane's work, for all batch sizes.
fn overlap(percent: u64) -> Overlap {
    let point = |batch| OverlapPoint { batch, alone: us(percent), together: us(200) };
    Overlap::new(vec![point(1), point(8)])
}

/// A model that takes 1 ms an item and 4 ms a batch, with batches of at most 8.
fn model(overlap: Option<Overlap>) -> ReplayedModel {
    let profile = LatencyProfile::linear(us(1_000), us(4_000), 8).unwrap();
    let adaptive = DispatchPolicy::Adaptive { consolidate: false };
    ReplayedModel {
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
        shares: Vec::new(),
    }
}

fn names(model: &ReplayedModel) -> Vec<String> {
    model.candidates().iter().map(|one| one.candidate.to_string()).collect()
}

/// `count` requests of a model, `gap_us` apart, due after 50 ms. One of four comes early.
fn arrivals(gap_us: u64, count: u64) -> Vec<PastArrival> {
    let arrival = |number| {
        let early = if number % 4 == 3 { gap_us / 2 } else { 0 };
        let at = Time::ZERO + us(number * gap_us - early);
        PastArrival { at, budget: us(50_000), model: ModelId(0), size: 1, level: 0 }
    };
    (0..count).map(arrival).collect()
}

/// The outcome of the requests under each candidate.
fn replayed(model: &ReplayedModel, arrivals: &[PastArrival]) -> Vec<(PolicyName, ReplayCount)> {
    let models = vec![model.clone()];
    let replay = DeviceReplay { models, devices: 1, at_once: 1, wake_margin: Duration::ZERO, seed: 1 };
    let count = |policy| replay.run(&[policy], arrivals, 0..arrivals.len())[0];
    let candidates = model.candidates();
    candidates.iter().map(|one| (one.candidate.policy, count(one.spec.as_ref()))).collect()
}

/// The most requests that a candidate of a policy answers in time.
fn most(counts: &[(PolicyName, ReplayCount)], policy: PolicyName) -> u64 {
    counts.iter().filter(|(of, _)| *of == policy).map(|(_, count)| count.in_time).max().unwrap_or(0)
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
fn lanes_side_by_side_gain_only_without_disturbance() {
    let requests = arrivals(1_100, 4_000);
    let free = replayed(&model(Some(overlap(200))), &requests);
    assert!(most(&free, PolicyName::ELASTIC) > 3_960, "{free:?}");
    assert!(most(&free, PolicyName::EXCLUSIVE) < 3_200, "{free:?}");
    let in_turns = replayed(&model(Some(overlap(100))), &requests);
    assert!(most(&in_turns, PolicyName::ELASTIC) < 3_200, "{in_turns:?}");
}

#[test]
fn each_request_has_one_outcome_and_only_a_part_counts() {
    let (model, requests) = (model(Some(overlap(150))), arrivals(1_500, 2_000));
    for (policy, ReplayCount { requests, in_time, late, dropped, .. }) in replayed(&model, &requests) {
        assert_eq!((requests, in_time + late + dropped), (2_000, 2_000), "{policy}");
    }
    let models = vec![model];
    let replay = DeviceReplay { models, devices: 1, at_once: 1, wake_margin: Duration::ZERO, seed: 1 };
    let [part] = replay.run(&[None], &requests, 500..700)[..] else { panic!("there is one model") };
    assert_eq!((part.requests, part.in_time + part.late + part.dropped), (200, 200));
}

/// Launches that take twice their profile's time halve what a device can answer.
#[test]
fn measured_shares_of_the_profile_are_replayed() {
    let requests = arrivals(2_000, 2_000);
    let as_profiled = replayed(&model(None), &requests);
    let slower = replayed(&ReplayedModel { shares: vec![2.0; 8], ..model(None) }, &requests);
    let [fast, slow] = [as_profiled, slower].map(|counts| most(&counts, PolicyName::EXCLUSIVE));
    assert!(fast == 2_000 && slow < 1_500, "{fast} {slow}");
}
