//! Rollouts: shares, the verdict on a new version, and changes by request.

use downbeat_core::rollout::{
    Outcome, RollBackRule, Rollout, RolloutChange, RolloutState, RolloutTerms, Route, Side, request_hash,
};
use downbeat_core::{Duration, Time};
use proptest::prelude::*;

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

fn half() -> RolloutTerms {
    RolloutTerms { share: 0.5, ..RolloutTerms::default() }
}

/// SplitMix64.
fn next(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*seed ^ (*seed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// Whether an event of this probability happens.
fn happens(seed: &mut u64, probability: f64) -> bool {
    ((next(seed) >> 11) as f64 / (1_u64 << 53) as f64) < probability
}

/// Notes `count` requests of both versions, one every 10 ms, which fail with these probabilities. Returns whether the
/// new version was taken back.
fn play(rollout: &mut Rollout, seed: u64, count: u64, (old, new): (f64, f64)) -> bool {
    let mut seed = seed;
    let outcome = |fails| if fails { Outcome::Failed } else { Outcome::InTime };
    (0..count).any(|number| {
        let now = at(number * 10);
        let by_old = rollout.handle_outcome(now, Side::Old, outcome(happens(&mut seed, old)));
        rollout.handle_outcome(now, Side::New, outcome(happens(&mut seed, new))) || by_old
    })
}

#[test]
fn a_request_goes_by_its_share_its_mark_and_the_state() {
    let mut rollout = Rollout::new(RolloutTerms { share: 0.0, header: Some("x".into()), ..half() });
    assert_eq!((rollout.route(0, false), rollout.route(u64::MAX, true)), (Route::Old, Route::New));
    rollout.change(&RolloutChange { share: Some(1.0), shadow: Some(true), state: None }).unwrap();
    assert_eq!(rollout.route(u64::MAX, false), Route::Shadow);
    rollout.change(&RolloutChange { state: Some(RolloutState::Finished), ..RolloutChange::default() }).unwrap();
    assert_eq!((rollout.route(0, true), rollout.reason()), (Route::Ended, "by request"));
}

#[test]
fn a_new_version_that_fails_is_taken_back_after_the_least_requests() {
    let mut rollout = Rollout::new(half());
    assert!(!play(&mut rollout, 1, 99, (0.0, 1.0)), "99 requests are too few");
    assert!(rollout.handle_outcome(at(1_000), Side::New, Outcome::Failed));
    assert_eq!(rollout.state(), RolloutState::RolledBack);
    let reason = "0.0% of the new version's requests were answered in time (100 requests in 60 s), fewer than 99.0%";
    assert_eq!(rollout.reason(), reason);
    assert!(!rollout.handle_outcome(at(1_010), Side::New, Outcome::Failed), "it is taken back once");
}

#[test]
fn the_reason_has_both_attainments() {
    let mut rollout = Rollout::new(half());
    assert!(play(&mut rollout, 1, 1_000, (0.0, 0.2)));
    assert!(rollout.reason().ends_with("fewer than 99.0%, and 100.0% of the old version's"), "{}", rollout.reason());
}

#[test]
fn requests_before_the_window_do_not_count() {
    let mut rollout = Rollout::new(half());
    for number in 0..99 {
        rollout.handle_outcome(at(number), Side::New, Outcome::Failed);
    }
    assert_eq!(rollout.attainment(at(50_000), Side::New), (Some(0.0), 99));
    assert_eq!(rollout.attainment(at(61_000), Side::New), (None, 0));
    assert!(!rollout.handle_outcome(at(61_000), Side::New, Outcome::Failed));
    assert_eq!(rollout.counts(Side::New).failed, 100);
    // A clock that goes back, and one that leaps, harm nothing.
    assert_eq!(rollout.attainment(at(0), Side::New), (Some(0.0), 1));
    assert_eq!(rollout.attainment(Time::MAX, Side::New), (None, 0));
}

#[test]
fn the_old_version_is_the_newest_of_the_others() {
    let versions = |version, loaded: &[u64]| RolloutTerms { version, ..half() }.versions(loaded.iter().copied());
    assert_eq!(versions(None, &[1, 2, 5]), Some([2, 5]));
    assert_eq!(versions(Some(2), &[1, 2, 5]), Some([5, 2]));
    assert_eq!((versions(Some(3), &[1, 2]), versions(None, &[1]), versions(None, &[])), (None, None, None));
}

#[test]
fn a_copy_may_be_late_and_skipped_but_not_different() {
    let mut rollout = Rollout::new(RolloutTerms { shadow: true, ..half() });
    for number in 0..500 {
        rollout.handle_outcome(at(number), Side::New, Outcome::Late);
        rollout.handle_outcome(at(number), Side::New, Outcome::Skipped);
    }
    assert_eq!(rollout.state(), RolloutState::Running);
    let taken_back = (500..1_000).any(|number| rollout.handle_outcome(at(number), Side::New, Outcome::Differed));
    assert!(taken_back && rollout.reason().contains("of the copies got the old version's answer"));
}

#[test]
fn a_rollout_goes_on_by_request_with_an_empty_window() {
    let mut rollout = Rollout::new(half());
    assert!(play(&mut rollout, 1, 200, (0.0, 1.0)));
    rollout.change(&RolloutChange { state: Some(RolloutState::Running), ..RolloutChange::default() }).unwrap();
    assert_eq!((rollout.state(), rollout.reason()), (RolloutState::Running, ""));
    assert_eq!(rollout.attainment(at(2_000), Side::New).1, 0);
}

#[test]
fn wrong_terms_are_refused_in_words() {
    let wrong = |terms: RolloutTerms| terms.check().unwrap_err();
    assert!(wrong(RolloutTerms::default()).contains("give it a share"));
    assert!(wrong(RolloutTerms { share: f64::NAN, ..half() }).contains("share is NaN; must be from 0 to 1"));
    assert!(wrong(RolloutTerms { version: Some(0), ..half() }).contains("versions start at 1"));
    assert!(wrong(RolloutTerms { header: Some("x canary".into()), ..half() }).contains("the name of a header"));
    assert!(wrong(RolloutTerms { tolerance: -1.0, ..half() }).contains("tolerance is -1"));
    let rule = RollBackRule { over_s: 0.0, ..RollBackRule::default() };
    assert!(wrong(RolloutTerms { roll_back: Some(rule), ..half() }).contains("over_s is 0"));
    let mut rollout = Rollout::new(half());
    assert!(rollout.change(&RolloutChange { share: Some(2.0), ..RolloutChange::default() }).is_err());
    assert_eq!(rollout.terms().share, 0.5, "nothing changes");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// A failure prints the seed. Both versions are alike bad, as in an overload.
    #[test]
    fn a_version_as_bad_as_the_old_one_is_seldom_taken_back(seed in any::<u64>(), fails in 0.02..0.9) {
        let mut seed = seed;
        let taken_back = |seed| play(&mut Rollout::new(half()), seed, 3_000, (fails, fails));
        let wrongly = (0..20).filter(|_| taken_back(next(&mut seed))).count();
        prop_assert!(wrongly <= 5, "{wrongly} of 20");
    }

    #[test]
    fn a_version_that_is_much_worse_is_taken_back(seed in any::<u64>(), fails in 0.0..0.2) {
        prop_assert!(play(&mut Rollout::new(half()), seed, 3_000, (fails, fails + 0.25)));
    }

    #[test]
    fn a_version_without_faults_is_never_taken_back(seed in any::<u64>(), fails in 0.0..1.0) {
        prop_assert!(!play(&mut Rollout::new(half()), seed, 1_000, (fails, 0.0)));
    }

    #[test]
    fn of_requests_in_a_row_the_new_version_takes_its_share(first in any::<u64>(), share in 0.0..1.0) {
        let rollout = Rollout::new(RolloutTerms { share, header: Some("x".into()), ..RolloutTerms::default() });
        let is_new = |number: u64| rollout.route(request_hash("", first.wrapping_add(number)), false) == Route::New;
        let taken = (0..1_000).filter(|number| is_new(*number)).count() as f64;
        prop_assert!((taken - share * 1_000.0).abs() <= 8.0, "{taken} of 1000");
    }

    #[test]
    fn an_id_keeps_its_version_while_the_share_grows(id in "[a-z0-9-]{1,20}", share in 0.0..0.5) {
        let route = |share| Rollout::new(RolloutTerms { share, ..RolloutTerms::default() }).route(request_hash(&id, 7), false);
        prop_assert!(route(share) == Route::Old || route(share * 2.0) == Route::New);
        prop_assert_eq!(request_hash(&id, 7), request_hash(&id, 8));
    }
}

#[test]
fn ids_in_a_row_are_spread_over_the_versions() {
    let rollout = Rollout::new(RolloutTerms { share: 0.25, ..RolloutTerms::default() });
    let is_new = |number: &u64| rollout.route(request_hash(&format!("request-{number}"), 0), false) == Route::New;
    let taken = (0..4_000).filter(is_new).count();
    assert!((850..1150).contains(&taken), "{taken} of 4000");
}
