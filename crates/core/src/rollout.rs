//! The rollout of a model's new version beside the old one: which version takes a request, and when
//! the new version is taken back.
//!
//! ```
//! use downbeat_core::rollout::{Outcome, Rollout, RolloutState, RolloutTerms, Route, Side, request_hash};
//! use downbeat_core::{Duration, Time};
//!
//! let terms = RolloutTerms { share: 0.25, ..RolloutTerms::default() };
//! let mut rollout = Rollout::new(terms);
//! let routes: Vec<Route> = (1..9).map(|number| rollout.route(request_hash("", number), false)).collect();
//! assert_eq!(routes.iter().filter(|route| **route == Route::New).count(), 2);
//! assert_eq!(rollout.route(request_hash("", 1), true), Route::New, "the header asks for the new version");
//!
//! // The old version answers all requests in time, and the new version fails.
//! let mut now = Time::ZERO;
//! while rollout.state() == RolloutState::Running {
//!     now = now + Duration::from_millis(10);
//!     rollout.handle_outcome(now, Side::Old, Outcome::InTime);
//!     rollout.handle_outcome(now, Side::New, Outcome::Failed);
//! }
//! assert_eq!((rollout.state(), rollout.counts(Side::New).failed), (RolloutState::RolledBack, 100));
//! ```
//!
//! Why not roll back as soon as the attainment is below the limit? An overload, or a slow machine, makes
//! both versions late. The old version would then take the requests without being better. Therefore
//! the new version also has to be worse than the old one, by more than chance explains.

use serde::{Deserialize, Serialize};

use crate::time::{Duration, Time};

/// The parts of the window, each of which is forgotten as a whole.
const PARTS: usize = 12;
/// The standard deviations between two attainments that chance does not explain. The comparison is made
/// after each request, so two are too few.
const MARGIN: f64 = 3.0;

/// The settings of a rollout, as a configuration writes them.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutTerms {
    /// The new version; `None`: the newest.
    pub version: Option<u64>,
    /// The share of the requests that the new version takes, from 0 to 1.
    pub share: f64,
    /// A request with this header goes to the new version, too.
    pub header: Option<String>,
    /// Whether the new version only gets copies of requests, whose answers no client sees.
    pub shadow: bool,
    /// How far two numbers of a shadow's answers may lie apart, absolute or relative to their size.
    pub tolerance: f64,
    /// When the server ends the rollout by itself; `None`: never.
    pub roll_back: Option<RollBackRule>,
}

/// When a server takes a new version back by itself.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RollBackRule {
    /// The attainment that the new version has to keep, from 0 to 1.
    pub least_attainment: f64,
    /// The attainment counts the requests of this many last seconds.
    pub over_s: f64,
    /// With fewer requests of the new version there is no verdict.
    pub least_requests: u64,
}

impl Default for RolloutTerms {
    fn default() -> Self {
        RolloutTerms {
            version: None,
            share: 0.0,
            header: None,
            shadow: false,
            tolerance: 1e-3,
            roll_back: Some(RollBackRule::default()),
        }
    }
}

impl Default for RollBackRule {
    fn default() -> Self {
        RollBackRule { least_attainment: 0.99, over_s: 60.0, least_requests: 100 }
    }
}

impl RolloutTerms {
    /// The old and the new version among the loaded ones, which ascend; `None`: one of the two is missing.
    pub fn versions(&self, loaded: impl DoubleEndedIterator<Item = u64>) -> Option<[u64; 2]> {
        let mut old = None;
        let mut new = None;
        for version in loaded.rev() {
            let is_new = self.version.map_or(new.is_none(), |wanted| wanted == version);
            let place = if is_new { &mut new } else { &mut old };
            place.get_or_insert(version);
        }
        Some([old?, new?])
    }

    /// Checks the values.
    ///
    /// # Errors
    /// In words, with the name of the value and the expected range.
    pub fn check(&self) -> Result<(), String> {
        if self.version == Some(0) {
            return Err("version is 0; versions start at 1".to_owned());
        }
        check_part("share", self.share)?;
        let is_name = |name: &str| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
        };
        if let Some(header) = self.header.as_deref().filter(|header| !is_name(header)) {
            return Err(format!("header is '{header}'; must be the name of a header, such as \"x-canary\""));
        }
        if self.share == 0.0 && self.header.is_none() {
            return Err("sends no request to the new version; give it a share, such as 0.05, or a header".to_owned());
        }
        if !(self.tolerance.is_finite() && self.tolerance >= 0.0) {
            return Err(format!("tolerance is {}; must be a number of at least 0", self.tolerance));
        }
        let Some(rule) = &self.roll_back else { return Ok(()) };
        check_part("roll_back.least_attainment", rule.least_attainment)?;
        if !(1.0..=86_400.0).contains(&rule.over_s) {
            return Err(format!("roll_back.over_s is {}; must be from 1 second to a day, 86400", rule.over_s));
        }
        if rule.least_requests == 0 {
            return Err("roll_back.least_requests is 0; must be at least 1".to_owned());
        }
        Ok(())
    }
}

fn check_part(name: &str, value: f64) -> Result<(), String> {
    match (0.0..=1.0).contains(&value) {
        true => Ok(()),
        false => Err(format!("{name} is {value}; must be from 0 to 1")),
    }
}

/// A change of a rollout by request. `None`: the value stays.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutChange {
    /// As [`RolloutTerms::share`].
    pub share: Option<f64>,
    /// As [`RolloutTerms::shadow`].
    pub shadow: Option<bool>,
    /// The wanted state.
    pub state: Option<RolloutState>,
}

/// The state of a rollout, as the frontends of a cluster share it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RolloutDecision {
    /// As [`RolloutTerms::share`].
    pub share: f64,
    /// As [`RolloutTerms::shadow`].
    pub shadow: bool,
    /// The state.
    pub state: RolloutState,
    /// Why the rollout has ended, in a sentence; empty while it goes on.
    pub reason: String,
}

/// Which versions take requests that name no version.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutState {
    /// Both versions, by the terms.
    Running,
    /// The new version alone.
    Finished,
    /// The old version alone.
    RolledBack,
}

impl RolloutState {
    /// All states.
    pub const ALL: [RolloutState; 3] = [RolloutState::Running, RolloutState::Finished, RolloutState::RolledBack];

    /// The name in reports and metrics.
    pub fn name(self) -> &'static str {
        match self {
            RolloutState::Running => "running",
            RolloutState::Finished => "finished",
            RolloutState::RolledBack => "rolled_back",
        }
    }
}

/// The way of a request that names no version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// The rollout has ended, and counts no requests.
    Ended,
    /// The old version answers.
    Old,
    /// The new version answers. If that version fails, the old version answers.
    New,
    /// The old version answers, and the new one gets a copy.
    Shadow,
}

/// A version in a rollout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The version that served before.
    Old,
    /// The version that is rolled out.
    New,
}

/// The end of a request in one of the versions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The version answered by the deadline.
    InTime,
    /// The version answered after the deadline.
    Late,
    /// The version gave no answer, or one that clients of the old version would not understand.
    Failed,
    /// The answer to a copy differs from the old version's.
    Differed,
    /// The copy did not run, because the server had no time or memory to spare.
    Skipped,
}

impl Outcome {
    /// The name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::InTime => "in_time",
            Outcome::Late => "late",
            Outcome::Failed => "failed",
            Outcome::Differed => "differed",
            Outcome::Skipped => "skipped",
        }
    }
}

/// The requests of one version since the rollout began, by outcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[allow(missing_docs, reason = "the fields are the outcomes")]
pub struct OutcomeCounts {
    pub in_time: u64,
    pub late: u64,
    pub failed: u64,
    pub differed: u64,
    pub skipped: u64,
}

/// The number of all requests of a version, and of the good requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Tally {
    good: u64,
    all: u64,
}

impl Tally {
    fn share(self) -> Option<f64> {
        (self.all > 0).then(|| self.good as f64 / self.all as f64)
    }

    /// The share and its variance, with one more good and one more bad request. By these two a few
    /// requests that are all good, or all bad, do not seem certain (Agresti and Caffo).
    fn careful(self) -> (f64, f64) {
        let all = self.all as f64 + 2.0;
        let share = (self.good as f64 + 1.0) / all;
        (share, share * (1.0 - share) / all)
    }
}

/// The requests of both versions in the last seconds.
#[derive(Clone, Debug)]
struct Window {
    part: Duration,
    parts: [[Tally; 2]; PARTS],
    /// The number of the latest part since the epoch.
    latest: u64,
}

impl Window {
    fn over(seconds: f64) -> Self {
        let part = Duration::from_secs_f64(seconds / PARTS as f64).max(Duration::from_nanos(1));
        Window { part, parts: Default::default(), latest: 0 }
    }

    /// The place of a part.
    fn place(number: u64) -> usize {
        (number % PARTS as u64) as usize
    }

    fn advance(&mut self, now: Time) {
        let number = now.as_nanos() / self.part.as_nanos();
        for passed in 0..number.saturating_sub(self.latest).min(PARTS as u64) {
            self.parts[Self::place(number - passed)] = Default::default();
        }
        self.latest = self.latest.max(number);
    }

    fn add(&mut self, side: Side, is_good: bool) {
        let tally = &mut self.parts[Self::place(self.latest)][side as usize];
        tally.all += 1;
        tally.good += u64::from(is_good);
    }

    fn sum(&self, side: Side) -> Tally {
        let of_side = self.parts.iter().map(|part| part[side as usize]);
        of_side.fold(Tally::default(), |sum, part| Tally { good: sum.good + part.good, all: sum.all + part.all })
    }
}

/// A rollout. Time never goes back: an earlier time than that of the call before is taken as that time.
#[derive(Clone, Debug)]
pub struct Rollout {
    terms: RolloutTerms,
    state: RolloutState,
    reason: String,
    window: Window,
    counts: [OutcomeCounts; 2],
}

impl Rollout {
    /// A rollout by these terms, which were checked.
    pub fn new(terms: RolloutTerms) -> Self {
        let window = Window::over(terms.roll_back.unwrap_or_default().over_s);
        Rollout { terms, state: RolloutState::Running, reason: String::new(), window, counts: Default::default() }
    }

    /// The present terms.
    pub fn terms(&self) -> &RolloutTerms {
        &self.terms
    }

    /// The present state.
    pub fn state(&self) -> RolloutState {
        self.state
    }

    /// Why the rollout has ended, in a sentence; empty while it goes on.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// The requests of a version since the rollout began.
    pub fn counts(&self, side: Side) -> OutcomeCounts {
        self.counts[side as usize]
    }

    /// The attainment of a version in the window until `now`, and the number of requests that it
    /// counts; `None`: there was no request.
    pub fn attainment(&mut self, now: Time, side: Side) -> (Option<f64>, u64) {
        self.window.advance(now);
        let tally = self.window.sum(side);
        (tally.share(), tally.all)
    }

    /// The way of a request. `hash`: its [`request_hash`]. `is_marked`: it asks for the new version.
    pub fn route(&self, hash: u64, is_marked: bool) -> Route {
        if self.state != RolloutState::Running {
            return Route::Ended;
        }
        // The upper 53 bits are exact as a number from 0 to 1.
        let place = (hash >> 11) as f64 / (1_u64 << 53) as f64;
        match (is_marked || place < self.terms.share, self.terms.shadow) {
            (false, _) => Route::Old,
            (true, false) => Route::New,
            (true, true) => Route::Shadow,
        }
    }

    /// Notes the end of a request. Returns whether the new version was taken back now.
    pub fn handle_outcome(&mut self, now: Time, side: Side, outcome: Outcome) -> bool {
        let counts = &mut self.counts[side as usize];
        let count = match outcome {
            Outcome::InTime => &mut counts.in_time,
            Outcome::Late => &mut counts.late,
            Outcome::Failed => &mut counts.failed,
            Outcome::Differed => &mut counts.differed,
            Outcome::Skipped => &mut counts.skipped,
        };
        *count += 1;
        if outcome == Outcome::Skipped || self.state != RolloutState::Running {
            return false;
        }
        // A copy waits behind the clients' requests: it may be late.
        let is_good = outcome == Outcome::InTime || (outcome == Outcome::Late && self.terms.shadow);
        self.window.advance(now);
        self.window.add(side, is_good);
        let Some(reason) = self.verdict() else { return false };
        (self.state, self.reason) = (RolloutState::RolledBack, reason);
        true
    }

    /// Changes the rollout by request. Counts begin anew with another share or kind, and as the rollout goes on.
    ///
    /// # Errors
    /// In words, if the changed terms would be wrong; then nothing changes.
    pub fn change(&mut self, change: &RolloutChange) -> Result<(), String> {
        let mut terms = self.terms.clone();
        terms.share = change.share.unwrap_or(terms.share);
        terms.shadow = change.shadow.unwrap_or(terms.shadow);
        terms.check()?;
        let state = change.state.unwrap_or(self.state);
        if terms != self.terms || (state == RolloutState::Running && self.state != RolloutState::Running) {
            self.window = Window::over(terms.roll_back.unwrap_or_default().over_s);
        }
        if state != self.state {
            self.reason = match state {
                RolloutState::Running => String::new(),
                RolloutState::Finished | RolloutState::RolledBack => "by request".to_owned(),
            };
        }
        (self.terms, self.state) = (terms, state);
        Ok(())
    }

    /// The present decision, for other frontends of the model.
    pub fn decision(&self) -> RolloutDecision {
        let (share, shadow) = (self.terms.share, self.terms.shadow);
        RolloutDecision { share, shadow, state: self.state, reason: self.reason.clone() }
    }

    /// Takes over another frontend's decision. Counts begin anew as by [`Rollout::change`].
    ///
    /// # Errors
    /// In words, if the changed terms would be wrong; then nothing changes.
    pub fn follow(&mut self, decision: &RolloutDecision) -> Result<(), String> {
        let RolloutDecision { share, shadow, state, ref reason } = *decision;
        self.change(&RolloutChange { share: Some(share), shadow: Some(shadow), state: Some(state) })?;
        self.reason.clone_from(reason);
        Ok(())
    }

    /// Why the new version has to be taken back, if it has.
    fn verdict(&self) -> Option<String> {
        let rule = self.terms.roll_back?;
        let (old, new) = (self.window.sum(Side::Old), self.window.sum(Side::New));
        let attainment = new.share().filter(|share| *share < rule.least_attainment)?;
        if new.all < rule.least_requests {
            return None;
        }
        let (new_share, new_variance) = new.careful();
        // With a share of nearly 1 the old version has no requests to compare with.
        let is_compared = old.all >= rule.least_requests;
        let (bound, variance) = if is_compared { old.careful() } else { (rule.least_attainment, 0.0) };
        if bound - new_share <= MARGIN * (new_variance + variance).sqrt() {
            return None;
        }
        let percent = |share: f64| format!("{:.1}%", share * 100.0);
        let (kept, beside) = match self.terms.shadow {
            false => ("of the new version's requests were answered in time", "of the old version's"),
            true => ("of the copies got the old version's answer", "of the old version's requests were answered"),
        };
        let compared = match old.share().filter(|_| is_compared) {
            Some(share) => format!(", and {} {beside}", percent(share)),
            None => String::new(),
        };
        Some(format!(
            "{} {kept} ({} requests in {} s), fewer than {}{compared}",
            percent(attainment),
            new.all,
            rule.over_s,
            percent(rule.least_attainment)
        ))
    }
}

/// The hash of a request. Requests with the same id go the same way. A request without an id goes by
/// its `number`. Of any `n` such requests in a row, the new version takes nearly its share of `n`.
pub fn request_hash(id: &str, number: u64) -> u64 {
    // Steps of the golden ratio fill the range evenly.
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    if id.is_empty() {
        return number.wrapping_mul(GOLDEN);
    }
    // FNV-1a, and the mixing of SplitMix64: neighbouring ids lie far apart.
    let hash =
        id.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3));
    let mixed = (hash ^ (hash >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}
