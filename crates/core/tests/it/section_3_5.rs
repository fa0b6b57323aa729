//! Symphony §3.5: the autoscale advisor's conclusions from bad rates and idle time.

use downbeat_core::cluster::*;
use downbeat_core::{Duration, Time};
use proptest::prelude::*;

/// The paper's formulas alone: no gap, no spare.
fn paper() -> AutoscaleOptions {
    AutoscaleOptions { idle_threshold: 0.0, spare: 0.0, ..AutoscaleOptions::default() }
}

/// A cluster that follows the advice. Once a second its counters grow, by the share of the load
/// that its number of devices serves.
#[derive(Clone)]
struct World {
    advisor: Autoscale,
    now: Time,
    sample: AutoscaleSample,
    /// How many devices there were, by time of change.
    changes: Vec<(Time, u32)>,
}

const SECOND: Duration = Duration::from_millis(1_000);

impl World {
    fn new(options: AutoscaleOptions, devices: u32) -> Self {
        let sample = AutoscaleSample { devices, ..AutoscaleSample::default() };
        World { advisor: Autoscale::new(options).unwrap(), now: Time::ZERO, sample, changes: Vec::new() }
    }

    /// A second with so many requests, of which so many are bad. Devices are busy for this share of
    /// their time.
    fn second(&mut self, requests: u64, bad: u64, busy: f64) -> Advice {
        self.now += SECOND;
        self.sample.good += requests - bad;
        self.sample.bad += bad;
        self.sample.busy += Duration::from_secs_f64(busy * f64::from(self.sample.devices));
        self.advisor.handle_sample(self.now, self.sample).unwrap()
    }

    /// The same for so many seconds; the last advice.
    fn seconds(&mut self, seconds: u32, requests: u64, bad: u64, busy: f64) -> Advice {
        (0..seconds).map(|_| self.second(requests, bad, busy)).last().unwrap()
    }

    /// A second of a cluster that behaves as `behave` says of its number of devices: bad requests
    /// and busy share; advice is followed at once.
    fn follow(&mut self, requests: u64, behave: &dyn Fn(u32) -> (u64, f64)) {
        let (bad, busy) = behave(self.sample.devices);
        let change = self.second(requests, bad, busy).change;
        if change != 0 {
            self.sample.devices = u32::try_from(i64::from(self.sample.devices) + change).unwrap();
            self.changes.push((self.now, self.sample.devices));
        }
    }
}

/// "If the bad rate r is above a threshold, the autoscaler requests N r / (1 - r) additional GPUs."
#[test]
fn allocate_n_r_over_1_minus_r() {
    // 24 devices serve 80% of the requests in time: 30 would serve all.
    let advice = World::new(paper(), 24).seconds(12, 1000, 200, 1.0);
    assert_eq!((advice.change, advice.reason), (6, AdviceReason::Overloaded));
    assert!((advice.bad_rate.unwrap() - 0.2).abs() < 1e-9);
    // Devices are whole.
    assert_eq!(World::new(paper(), 10).seconds(12, 1000, 50, 1.0).change, 1);
    assert_eq!(World::new(paper(), 10).seconds(12, 1000, 100, 1.0).change, 2);
    // At the threshold is not above the threshold.
    let advice = World::new(paper(), 24).seconds(12, 1000, 10, 1.0);
    assert_eq!(advice.change, 0);
}

/// "If the GPU idle time fraction is f, then it deallocates N f GPUs."
#[test]
fn deallocate_n_f() {
    let advice = World::new(paper(), 24).seconds(61, 1000, 0, 0.5);
    assert_eq!((advice.change, advice.reason), (-12, AdviceReason::Idle));
    assert!((advice.idle_fraction.unwrap() - 0.5).abs() < 1e-6);
    assert_eq!(World::new(paper(), 10).seconds(61, 1000, 0, 0.88).change, -1, "1.2 devices are idle");
    assert_eq!(World::new(paper(), 10).seconds(61, 1000, 0, 0.91).change, 0, "not even one is");
    assert_eq!(World::new(paper(), 10).seconds(61, 0, 0, 0.0).change, -9, "one stays");
}

/// Goodput stability and load-proportional use: where both hold, one piece of advice leads to the
/// right number at once.
#[test]
fn on_a_flat_top_one_step_is_enough() {
    for (devices, needed) in [(8, 24.0), (24, 24.0), (60, 24.0), (1, 9.5), (40, 0.5)] {
        let mut world = World::new(AutoscaleOptions { grow_window: SECOND, ..AutoscaleOptions::default() }, devices);
        let behave = |n: u32| {
            let short = (1.0 - f64::from(n) / needed).max(0.0);
            ((1000.0 * short) as u64, (needed / f64::from(n)).min(1.0))
        };
        for _ in 0..300 {
            world.follow(1000, &behave);
        }
        assert!(world.changes.len() <= 1, "{devices} devices, {needed} needed: {:?}", world.changes);
        let end = f64::from(world.sample.devices);
        assert!((needed..=(needed / 0.75).max(1.0).ceil()).contains(&end), "{end} devices, {needed} needed");
    }
}

#[test]
fn a_few_bad_requests_are_no_overload() {
    let advice = World::new(AutoscaleOptions::default(), 4).seconds(30, 3, 1, 0.9);
    assert_eq!((advice.change, advice.reason), (0, AdviceReason::Settling), "33 requests in a window say nothing");
    let options = AutoscaleOptions { min_requests: 10, ..AutoscaleOptions::default() };
    assert_eq!(World::new(options, 4).seconds(30, 3, 1, 0.9).change, 2);
}

/// 3% of the requests are late whatever the number of devices. The formula alone would ask for one
/// device more for ever.
#[test]
fn more_devices_that_do_not_help_are_not_advised_again() {
    let mut world = World::new(AutoscaleOptions::default(), 8);
    let behave = |n: u32| (30, (6.0 / f64::from(n)).min(1.0));
    for _ in 0..600 {
        world.follow(1000, &behave);
    }
    assert_eq!(world.changes.iter().map(|(_, devices)| *devices).collect::<Vec<_>>(), [9, 7]);
    let advice = world.advisor.advice();
    assert_eq!((advice.change, advice.reason), (0, AdviceReason::MoreDoNotHelp));
    // A lack of devices is still seen, and only what comes on top counts.
    let lack = |n: u32| (30 + if n < 14 { 500 } else { 0 }, 12.0 / f64::from(n.max(12)));
    for _ in 0..60 {
        world.follow(2000, &lack);
    }
    assert!(world.sample.devices >= 14, "{:?}", world.changes);
    // Once the reason is gone, so is the allowance.
    world.seconds(70, 1000, 0, 0.8);
    assert_eq!(world.seconds(12, 1000, 30, 0.8).reason, AdviceReason::Overloaded);
}

#[test]
fn a_change_is_judged_only_by_what_came_after_it() {
    let mut world = World::new(AutoscaleOptions::default(), 8);
    assert_eq!(world.seconds(12, 1000, 500, 1.0).change, 8);
    world.sample.devices = 16;
    // The bad requests were with 8 devices. The first seconds with 16 are not yet a window.
    assert_eq!(world.seconds(9, 1000, 300, 1.0).reason, AdviceReason::Settling);
    assert_eq!(world.seconds(3, 1000, 0, 0.9).change, 5, "2100 of 10000 at most; the window is over");
    // Idle time takes its own, longer window.
    world.sample.devices = 17;
    assert_eq!(world.seconds(59, 700, 0, 0.3).reason, AdviceReason::Settling);
    assert_eq!(world.seconds(3, 700, 0, 0.3).reason, AdviceReason::Idle);
    // At a load for which 16 devices were too few, idle devices stay.
    let mut same = world.clone();
    assert_eq!(same.seconds(70, 1000, 0, 0.3).reason, AdviceReason::TooFewBefore);
}

/// A user who scales by the absolute number starts devices one by one. This must not make the
/// advice give up devices that are still to come.
#[test]
fn the_number_wanted_stands_until_the_next_judgement() {
    let mut world = World::new(AutoscaleOptions::default(), 4);
    assert_eq!(world.advisor.wanted(), None);
    world.seconds(12, 1000, 500, 1.0);
    assert_eq!(world.advisor.wanted(), Some(8));
    for devices in 5..=8 {
        world.sample.devices = devices;
        assert_eq!(world.seconds(2, 1000, 100, 1.0).reason, AdviceReason::Settling);
        assert_eq!(world.advisor.wanted(), Some(8), "{devices} are there");
    }
    assert_eq!(world.seconds(70, 1000, 0, 0.8).reason, AdviceReason::Enough);
    assert_eq!(world.advisor.wanted(), Some(8));
    world.seconds(70, 500, 0, 0.3);
    assert_eq!(world.advisor.wanted(), Some(3), "2.4 are busy, and a tenth is to be idle");
}

#[test]
fn bounds_are_kept() {
    let bounded = AutoscaleOptions { min_devices: 4, max_devices: 10, ..AutoscaleOptions::default() };
    assert_eq!(World::new(bounded.clone(), 8).seconds(12, 1000, 900, 1.0).change, 2);
    assert_eq!(World::new(bounded.clone(), 10).seconds(12, 1000, 900, 1.0).reason, AdviceReason::AtMost);
    assert_eq!(World::new(bounded, 8).seconds(70, 1000, 0, 0.0).change, -4);
    // All are bad: the formula would ask for infinitely many.
    assert_eq!(World::new(AutoscaleOptions::default(), 2).seconds(12, 1000, 1000, 1.0).change, 18);
}

#[test]
fn no_devices_is_advised_against_only_where_there_are_requests() {
    let mut empty = World::new(AutoscaleOptions::default(), 0);
    let advice = empty.seconds(12, 0, 0, 0.0);
    assert_eq!((advice.change, advice.reason, advice.idle_fraction), (0, AdviceReason::Enough, None));
    let advice = empty.seconds(1, 5, 5, 0.0);
    assert_eq!((advice.change, advice.reason), (1, AdviceReason::NoDevices));
}

#[test]
fn samples_that_contradict_the_last_are_told() {
    let mut world = World::new(AutoscaleOptions::default(), 4);
    let before = world.seconds(12, 1000, 500, 1.0);
    let error = world.advisor.handle_sample(Time::ZERO, world.sample).unwrap_err();
    assert_eq!(error, BadSample::TimeWentBack { now: Time::ZERO, last: world.now });
    assert_eq!(world.advisor.advice(), before, "a late sample changes nothing");
    let fell = [
        (AutoscaleSample { good: 0, ..world.sample }, "the count of good requests"),
        (AutoscaleSample { bad: 0, ..world.sample }, "the count of bad requests"),
        (AutoscaleSample { busy: Duration::ZERO, ..world.sample }, "the devices' busy time"),
    ];
    for (sample, what) in fell {
        let mut advisor = world.advisor.clone();
        assert_eq!(advisor.handle_sample(world.now, sample), Err(BadSample::CountFell { what }));
        assert_eq!(advisor.advice().reason, AdviceReason::Settling);
        assert!(advisor.handle_sample(world.now + SECOND, sample).is_ok(), "counting goes on from there");
    }
    // The same instant twice is no contradiction.
    assert!(world.advisor.handle_sample(world.now, world.sample).is_ok());
}

#[test]
fn options_that_contradict_themselves_are_told() {
    let with = |change: &dyn Fn(&mut AutoscaleOptions)| {
        let mut options = AutoscaleOptions::default();
        change(&mut options);
        Autoscale::new(options).unwrap_err().to_string()
    };
    assert_eq!(with(&|o| o.bad_threshold = 1.0), "bad_threshold is 1; it must be at least 0 and below 1");
    assert_eq!(with(&|o| o.idle_threshold = f64::NAN), "idle_threshold is NaN; it must be at least 0 and below 1");
    assert_eq!(with(&|o| o.spare = 0.3), "spare (0.3) is above idle_threshold (0.25); it must be at most that");
    assert_eq!(with(&|o| o.shrink_window = Duration::ZERO), "shrink_window is 0; a window needs some time");
    assert_eq!(with(&|o| o.max_devices = 0), "max_devices (0) is below min_devices (1)");
}

proptest! {
    /// On a constant load the advice comes to rest, for every relation of devices to bad requests:
    /// also where fewer devices mean fewer bad requests.
    #[test]
    fn advice_does_not_oscillate_on_a_constant_load(
        bad in prop::collection::vec(prop_oneof![2 => Just(0_u64), 1 => 0..400_u64], 21),
        busy in prop::collection::vec(0.0..=1.0_f64, 21),
        start in 0..20_u32,
        jitter in prop::collection::vec(0..40_u64, 16),
    ) {
        let most = 20;
        let options = AutoscaleOptions { max_devices: most, ..AutoscaleOptions::default() };
        let mut world = World::new(options, start);
        let behave = |n: u32| (bad[n as usize], busy[n as usize]);
        for second in 0..6_000_usize {
            // Constant up to 4% from second to second.
            world.follow(1_000 + jitter[second % jitter.len()], &behave);
        }
        // Each number of devices is found too small at most once, and left downwards at most once
        // after each.
        prop_assert!(world.changes.len() as u32 <= 2 * most, "{:?}", world.changes);
        let last = world.changes.last().map_or(Time::ZERO, |(at, _)| *at);
        prop_assert!(last < Time::ZERO + Duration::from_millis(4_500_000), "still changing: {:?}", world.changes);
        // Advice that is not followed does not change any more either.
        let rest = world.advisor.advice();
        for second in 0..200_usize {
            let (bad, busy) = behave(world.sample.devices);
            let advice = world.second(1_000 + jitter[second % jitter.len()], bad, busy);
            prop_assert_eq!(advice.change, rest.change);
        }
    }

    /// Where more devices never serve less, the number at which the advice comes to rest serves the
    /// load, if any number does.
    #[test]
    fn advice_ends_where_the_load_is_served(needed in 1..20_u32, start in 1..20_u32, efficiency in 0.5..1.0_f64) {
        let mut world = World::new(AutoscaleOptions::default(), start);
        // Devices may be idle while the load is too much: the advice must not believe the busy
        // share everywhere.
        let behave = |n: u32| {
            let bad = if n < needed { 50 + u64::from(needed - n) * 40 } else { 0 };
            (bad, efficiency * (f64::from(needed) / f64::from(n)).min(1.0))
        };
        for _ in 0..4_000 {
            world.follow(1_000, &behave);
        }
        let end = world.sample.devices;
        prop_assert!(end >= needed, "{end} of {needed}: {:?}", world.changes);
        prop_assert!(f64::from(end) <= f64::from(needed) / 0.7 + 1.0 || start > needed, "{end} of {needed}");
    }
}
