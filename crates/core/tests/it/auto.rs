//! The choices of `auto`, and the cases in which it returns to `exclusive`.

use downbeat_core::device::{
    AutoGuard, AutoInputs, DeviceUse, GuardEnd, GuardOptions, GuardState, Joining, LaneMix, MARGIN, Overlap,
    OverlapPoint, PolicyName, SegmentProfile, Staging,
};
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time};
use proptest::prelude::*;

fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// `T(b) = alpha b + beta`, microseconds.
fn linear(alpha: u64, beta: u64, max_batch: u32) -> SegmentProfile {
    SegmentProfile::whole(&LatencyProfile::linear(us(alpha), us(beta), max_batch).unwrap())
}

/// Four stages and two pairs of buffers.
const TWO_PAIRS: Staging = Staging { stages: 4, pairs: 2, joining: Joining::IfSooner };

/// A model on two cores, of which each run keeps one busy.
fn inputs(profile: SegmentProfile) -> AutoInputs {
    AutoInputs {
        max_batch: profile.max_rows(),
        lanes: LaneMix::naive(2 << profile.max_rows().ilog2()).sizes().collect(),
        profile,
        cut: None,
        is_batched: true,
        varies: false,
        launch: us(8),
        cores: 2,
        threads: 1,
        at_once: 1,
        stagings: vec![TWO_PAIRS],
    }
}

/// Two lanes that together do `permille` thousandths of one lane's work.
fn overlap(permille: u64) -> Overlap {
    let point =
        |batch| OverlapPoint { batch, alone: Duration::from_nanos(permille), together: Duration::from_nanos(2000) };
    Overlap::new(vec![point(1), point(64)])
}

fn gain(inputs: &AutoInputs, permille: u64, policy: &str) -> f64 {
    let choice = inputs.choose(&overlap(permille));
    choice.candidates.iter().find(|candidate| candidate.policy.name() == policy).unwrap().gain
}

proptest! {
    /// If two lanes do no more than one, several batches at once, smaller batches and more launches
    /// gain nothing. This holds for every latency table.
    #[test]
    fn without_overlap_it_is_exclusive(
        times in prop::collection::vec(1u64..100_000, 1..48),
        (launch, threads, cores, stages, permille) in (1u64..2_000, 0u32..4, 1u32..4, 1u16..8, 0u64..=1000),
    ) {
        let table = times.iter().scan(0, |sum, time| { *sum += time; Some(us(*sum)) }).collect();
        let profile = SegmentProfile::whole(&LatencyProfile::from_table(table).unwrap());
        let threads = threads.min(cores);
        let inputs = AutoInputs { launch: us(launch), cores, threads, stagings: vec![Staging { stages, ..TWO_PAIRS }], ..inputs(profile) };
        let choice = inputs.choose(&overlap(permille));
        prop_assert_eq!(choice.policy, PolicyName::EXCLUSIVE, "{}", choice.reason);
    }

    /// Better lanes never make `exclusive` the better choice.
    #[test]
    fn more_overlap_never_gains_less(alpha in 1u64..500, beta in 0u64..5000, launch in 1u64..100, less in 0u64..2000) {
        let inputs = AutoInputs { launch: us(launch), ..inputs(linear(alpha, beta, 32)) };
        for policy in ["windowed", "elastic", "staged"] {
            prop_assert!(gain(&inputs, less, policy) <= gain(&inputs, 2000, policy) * 1.000_001);
        }
    }
}

#[test]
fn small_batches_that_do_not_disturb_each_other_are_run_together() {
    let model = inputs(linear(1000, 100, 16));
    let choice = model.choose(&overlap(1900));
    assert_eq!(choice.policy.name(), "elastic", "{}", choice.reason);
    assert!(choice.reason.starts_with("elastic is predicted to answer 1.87 times"), "{}", choice.reason);
    assert!(choice.reason.contains("1.90 times what one does"), "{}", choice.reason);
}

#[test]
fn where_only_large_batches_are_worth_it_these_are_cut_not_made_smaller() {
    // A launch of one item takes nearly as long as a launch of 16.
    let choice = inputs(linear(50, 10_000, 16)).choose(&overlap(1900));
    assert_eq!(choice.policy.name(), "staged", "{}", choice.reason);
    assert!(gain(&inputs(linear(50, 10_000, 16)), 1900, "elastic") < 1.0);
}

#[test]
fn a_gain_up_to_the_margin_is_none() {
    let model =
        AutoInputs { launch: Duration::ZERO, stagings: Vec::new(), lanes: vec![1, 1], ..inputs(linear(1000, 0, 1)) };
    assert_eq!(gain(&model, 1100, "elastic"), 1.0 + MARGIN);
    assert_eq!(model.choose(&overlap(1100)).policy, PolicyName::EXCLUSIVE);
    assert_eq!(model.choose(&overlap(1110)).policy.name(), "elastic");
}

#[test]
fn exclusive_keeps_a_model_whose_launches_take_microseconds() {
    // E²bird's naive lanes hand over seven launches where two do, and each answer takes a core as
    // long as a launch.
    let model = inputs(linear(1, 5, 32));
    let choice = model.choose(&overlap(2000));
    assert_eq!(choice.policy, PolicyName::EXCLUSIVE, "{}", choice.reason);
    assert!(!model.could_gain(), "so that nothing has to be measured");
    let reason = model.choose_at_best().reason;
    assert!(reason.ends_with("even if lanes did not disturb each other at all; a launch costs 8 us"), "{reason}");
    assert!(inputs(linear(1000, 100, 16)).could_gain());
}

#[test]
fn windowed_is_never_better_than_exclusive() {
    for model in
        [inputs(linear(100, 1000, 32)), inputs(linear(1, 1, 1)), AutoInputs { at_once: 2, ..inputs(linear(9, 9, 9)) }]
    {
        assert!(gain(&model, 2000, "windowed") <= 1.0);
    }
}

#[test]
fn what_exclusive_runs_at_once_by_itself_is_not_gained_again() {
    let model = AutoInputs { at_once: 2, ..inputs(linear(1000, 100, 16)) };
    let choice = model.choose(&overlap(1900));
    assert_eq!(choice.policy, PolicyName::EXCLUSIVE, "{}", choice.reason);
}

#[test]
fn what_cutting_costs_counts_once_it_is_known() {
    let model = inputs(linear(50, 10_000, 16));
    let half = LatencyProfile::linear(us(50), us(10_000), 16).unwrap();
    // Each of two segments takes as long as the whole model.
    let cut = SegmentProfile::new(vec![0], &[vec![half.clone()], vec![half]]).unwrap();
    assert!(gain(&model, 1900, "staged") > 1.5);
    assert!(gain(&AutoInputs { cut: Some(cut), ..model }, 1900, "staged") < 1.0);
}

#[test]
fn a_model_without_batches_or_whose_requests_vary_is_left_to_exclusive() {
    let choice = AutoInputs { is_batched: false, ..inputs(linear(1000, 100, 16)) }.choose(&overlap(2000));
    assert_eq!((choice.policy, choice.candidates.len()), (PolicyName::EXCLUSIVE, 0));
    assert!(choice.reason.contains("no batch dimension"), "{}", choice.reason);
    let choice = AutoInputs { varies: true, ..inputs(linear(1000, 100, 16)) }.choose(&overlap(2000));
    assert_eq!(choice.policy, PolicyName::EXCLUSIVE);
    assert!(choice.reason.contains("vary in shape"), "{}", choice.reason);
}

#[test]
fn lanes_that_would_refuse_the_largest_requests_are_no_choice() {
    // Lanes have sizes that are powers of two.
    let choice = AutoInputs { stagings: Vec::new(), ..inputs(linear(1000, 100, 12)) }.choose(&overlap(2000));
    assert_eq!(choice.policy, PolicyName::EXCLUSIVE);
    let names: Vec<_> = choice.candidates.iter().map(|candidate| candidate.policy.name()).collect();
    assert_eq!(names, ["exclusive", "windowed"]);
}

#[test]
fn auto_is_a_name_but_no_policy_of_the_table() {
    assert_eq!("auto".parse(), Ok(PolicyName::AUTO));
    assert!(PolicyName::all().all(|policy| policy != PolicyName::AUTO));
    let error = PolicyName::AUTO.read(&Default::default()).unwrap_err().to_string();
    assert!(error.contains("name one policy here"), "{error}");
    let error = "best".parse::<PolicyName>().unwrap_err().to_string();
    assert!(error.ends_with("exclusive, windowed, elastic, staged, overlap, auto"), "{error}");
}

#[test]
fn between_two_sizes_the_overlap_is_the_lesser_one() {
    let point = |batch, together| OverlapPoint { batch, alone: us(100), together: us(together) };
    let overlap = Overlap::new(vec![point(8, 200), point(1, 125)]);
    assert_eq!([1, 2, 8, 9].map(|rows| overlap.factor(rows)), [1.6, 1.0, 1.0, 1.0]);
    assert_eq!(Overlap::default().factor(4), 1.0);
    assert_eq!(Overlap::new(vec![point(1, 50)]).factor(1), 2.0, "two lanes do no more than twice");
}

/// Sends requests of one item, one every `every` microseconds, that each take `took`. Returns the
/// number after which the policy went back.
struct Requests {
    guard: AutoGuard,
    sent: u64,
    /// The share of the devices that other models have all the time.
    others: f64,
}

impl Requests {
    fn new(drop: bool) -> Self {
        let profile = linear(100, 900, 8);
        let options = GuardOptions { profile, max_batch: 8, launch: us(0), at_once: 1, drop };
        let mut requests = Requests { guard: AutoGuard::new(options), sent: 0, others: 0.0 };
        // The guard compares none of these requests.
        requests.send(64, 1, 0, LONG, GuardEnd::Answered);
        requests
    }

    /// Sends a window of requests, each `allowed` microseconds long, that end in this way. Returns
    /// whether the policy lost for good.
    fn window(&mut self, every: u64, took: u64, allowed: u64, end: GuardEnd) -> bool {
        self.send(256, every, took, allowed, end)
    }

    fn send(&mut self, count: u32, every: u64, took: u64, allowed: u64, end: GuardEnd) -> bool {
        (0..count).any(|_| {
            self.sent += 1;
            let (id, arrival) = (RequestId(self.sent), Time::from_nanos(self.sent * every * 1000));
            let (deadline, done) = (arrival + us(allowed), arrival + us(took));
            let others = |now: Time| Duration::from_secs_f64(now.since(Time::ZERO).as_secs_f64() * self.others);
            self.guard.handle_request(arrival, id, 1, deadline, || others(arrival));
            self.guard.handle_end(done, id, end, || others(done))
        })
    }

    fn report(&self) -> (GuardState, u64, u32) {
        let report = self.guard.report();
        (report.state, report.windows, report.losses)
    }
}

const LONG: u64 = 1_000_000;

#[test]
fn two_windows_lost_in_a_row_end_a_policy_and_no_fewer() {
    let mut requests = Requests::new(false);
    use GuardEnd::Answered;
    // With exclusive a request alone takes 1,000 us.
    assert!(!requests.window(5000, 1200, LONG, Answered));
    assert_eq!(requests.report(), (GuardState::Watching, 1, 1));
    assert!(!requests.window(5000, 1050, LONG, Answered), "within the margin");
    assert_eq!(requests.report(), (GuardState::Watching, 2, 0));
    assert!(!requests.window(5000, 1200, LONG, Answered));
    assert!(requests.window(5000, 1200, LONG, Answered));
    assert_eq!(requests.report(), (GuardState::Back, 4, 2));
    let last = requests.guard.report().last.unwrap();
    assert_eq!((last.latency, last.exclusive_latency), (us(1200), us(1000)));
    assert_eq!(last.to_string(), "of 256 requests 256 in time, 1.200 ms on average; exclusive: 256, 1.000 ms");
    assert!(!requests.window(5000, 1, LONG, Answered), "it is said once");
    assert_eq!(requests.report(), (GuardState::Back, 4, 2));
}

#[test]
fn a_load_that_exclusive_could_not_answer_is_won() {
    let mut requests = Requests::new(false);
    for windows in 1..4 {
        // 10,000 a second, of which exclusive's batches of 8 can answer 4,700.
        assert!(!requests.window(100, 5000, LONG, GuardEnd::Answered));
        assert_eq!(requests.report(), (GuardState::Watching, windows, 0));
    }
    let last = requests.guard.report().last.unwrap();
    assert!(last.exclusive_latency > us(10_000), "{last}");
}

#[test]
fn answers_in_time_count_before_latencies() {
    let mut requests = Requests::new(true);
    assert!(!requests.window(5000, 500, 1100, GuardEnd::Dropped));
    assert!(requests.window(5000, 1105, 1100, GuardEnd::Answered), "late");
    let last = requests.guard.report().last.unwrap();
    assert_eq!((last.in_time, last.exclusive_in_time), (0, 256));
}

#[test]
fn exclusive_drops_hopeless_requests_and_answers_more_others() {
    let deadlines = |drop: bool| {
        let mut requests = Requests::new(drop);
        requests.window(100, 1000, 5000, GuardEnd::Answered);
        requests.guard.report().last.unwrap().exclusive_in_time
    };
    assert!(deadlines(true) > deadlines(false) && deadlines(true) < 256, "{} {}", deadlines(true), deadlines(false));
}

#[test]
fn requests_whose_clients_left_say_nothing() {
    let mut requests = Requests::new(false);
    for _ in 0..4 {
        assert!(!requests.window(5000, 9000, LONG, GuardEnd::Gone));
    }
    assert_eq!(requests.report(), (GuardState::Watching, 0, 0));
    let arrival = Time::from_nanos(1);
    let nobody = RequestId(u64::MAX);
    assert!(!requests.guard.handle_end(arrival, nobody, GuardEnd::Answered, || us(0)));
}

#[test]
fn what_waits_when_a_window_begins_is_in_the_way_of_exclusive_too() {
    let mut requests = Requests::new(false);
    let mut at_once = |ids: std::ops::Range<u64>| {
        ids.for_each(|id| requests.guard.handle_request(Time::ZERO, RequestId(1_000_000 + id), 1, Time::MAX, || us(0)));
    };
    // 80 that come after the last of the first window, and stay.
    at_once(0..256 + 80);
    for id in 0..256 {
        requests.guard.handle_end(Time::ZERO, RequestId(1_000_000 + id), GuardEnd::Answered, || us(0));
    }
    requests.window(5000, 1000, LONG, GuardEnd::Answered);
    let last = requests.guard.report().last.unwrap();
    assert!(requests.guard.report().windows == 2 && last.exclusive_latency > us(1000), "{last}");
}

/// If others have half of a device, `exclusive` would have the other half.
#[test]
fn what_others_had_of_the_devices_exclusive_would_not_have() {
    let lost = |took| {
        let mut requests = Requests::new(false);
        requests.others = 0.5;
        let lost = (0..2).any(|_| requests.window(5000, took, LONG, GuardEnd::Answered));
        let last = requests.guard.report().last.unwrap();
        let exclusive = last.exclusive_latency.as_nanos();
        assert!(exclusive.abs_diff(2_000_000) < 10_000 && (last.others - 0.5).abs() < 0.01, "{last}");
        lost
    };
    assert!(!lost(2100), "within the margin of 2 ms");
    assert!(lost(2400), "a bad policy is no better for it");
}

#[test]
fn the_first_requests_of_a_policy_are_not_compared() {
    let mut requests = Requests { sent: 0, others: 0.0, ..Requests::new(false) };
    requests.guard = {
        let options =
            GuardOptions { profile: linear(100, 900, 8), max_batch: 8, launch: us(0), at_once: 1, drop: false };
        AutoGuard::new(options)
    };
    requests.send(64, 5000, 100_000, LONG, GuardEnd::Answered);
    requests.send(255, 5000, 1000, LONG, GuardEnd::Answered);
    assert_eq!(requests.report(), (GuardState::Watching, 0, 0));
    requests.send(1, 5000, 1000, LONG, GuardEnd::Answered);
    assert_eq!(requests.report(), (GuardState::Watching, 1, 0));
}

#[test]
fn launches_that_run_at_a_time_share_their_device() {
    let mut used = DeviceUse::default();
    let at = |us: u64| Time::from_nanos(us * 1000);
    let (one, two) = (ModelId(1), ModelId(2));
    used.begin(at(100), one);
    used.begin(at(200), two);
    used.begin(at(200), two);
    assert_eq!((used.others(at(200), one), used.others(at(200), two)), (us(0), us(100)));
    // For 300 us each of three launches has a third of the device.
    used.end(at(500), two);
    assert_eq!((used.others(at(500), one), used.others(at(500), two)), (us(200), us(200)));
    used.end(at(600), one);
    used.end(at(700), two);
    assert_eq!((used.others(at(900), one), used.others(at(900), two)), (us(350), us(250)));
    used.end(at(900), two);
    used.forget(one);
    assert_eq!((used.others(at(900), two), used.others(at(900), ModelId(3))), (us(250), us(600)), "nothing ran");
}
