//! Limits the time for measuring before a model version serves. Measurements that this time does
//! not allow are made later, while the version serves.
//!
//! All measuring of a load draws on one budget: threads, batch sizes, lanes, sites
//! (`measuring.rs`), segments, overlap of two lanes, and rows. A step that the remaining time does
//! not allow is left out. The version serves with the known values, and is measured again behind the
//! service. The second time no step is left out, but each run waits for requests, and another load
//! ends the measuring.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use downbeat_core::Duration;
use downbeat_service::clock::Clock;

use crate::load::load_turns::LoadTurn;
use crate::measure::giving_way::{GivingWay, Traffic};
use crate::measure::sampler::Watch;

/// Behind the service, the runs of a step are repeated for at least this long.
const LEAST_BEHIND: Duration = Duration::from_millis(3_000);

/// The measuring time of one load of a version.
pub struct MeasuringTime<'a> {
    budget: Duration,
    /// The version serves already.
    is_behind: bool,
    /// The requests that go first, behind the service.
    giving_way: Option<GivingWay<'a>>,
    spent_ns: AtomicU64,
    is_short: AtomicBool,
}

impl<'a> MeasuringTime<'a> {
    /// The budget of a version that does not serve yet.
    pub fn before_service(budget: Duration) -> Self {
        let (spent_ns, is_short) = Default::default();
        MeasuringTime { budget, is_behind: false, giving_way: None, spent_ns, is_short }
    }

    /// Unlimited time, behind a version that serves. The runs of a step are repeated for `budget`,
    /// or for 3 s if that is longer.
    pub fn behind_service(budget: Duration) -> Self {
        MeasuringTime { is_behind: true, ..MeasuringTime::before_service(budget.max(LEAST_BEHIND)) }
    }

    /// Lets the requests of `traffic` go first, if the version serves already.
    #[must_use]
    pub fn giving_way_to(self, traffic: &'a dyn Traffic) -> Self {
        MeasuringTime { giving_way: self.is_behind.then(|| GivingWay::new(traffic)), ..self }
    }

    /// Waits for requests that go first. Returns whether the next run may begin.
    pub fn gives_way(&self) -> bool {
        self.giving_way.as_ref().is_none_or(GivingWay::goes_on)
    }

    /// Whether requests have left no time for the measurement.
    pub fn is_given_up(&self) -> bool {
        self.giving_way.as_ref().is_some_and(GivingWay::is_given_up)
    }

    /// Whether the version serves already.
    pub fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// The rest of the budget. Behind the service each step has the whole budget.
    pub fn left(&self) -> Duration {
        match self.is_behind {
            true => self.budget,
            false => self.budget.saturating_sub(Duration::from_nanos(self.spent_ns.load(Ordering::Relaxed))),
        }
    }

    /// A share of the rest.
    pub fn part(&self, share: f64) -> Duration {
        Duration::from_secs_f64(self.left().as_secs_f64() * share)
    }

    /// Whether a step may begin that is expected to take `expected`. If not, the version was not
    /// measured in full. Behind the service this waits for requests.
    pub fn allows(&self, expected: Duration) -> bool {
        let is_allowed = if self.is_behind { self.gives_way() } else { expected <= self.left() };
        if !is_allowed {
            self.fall_short();
        }
        is_allowed
    }

    /// Something was left out.
    pub fn fall_short(&self) {
        self.is_short.store(true, Ordering::Relaxed);
    }

    /// Whether a step was left out: it must be measured again behind the service.
    pub fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Relaxed)
    }

    /// Does something, and takes note of the time.
    pub fn spend<T>(&self, clock: Clock, what: impl FnOnce() -> T) -> T {
        let begin = clock.now();
        let done = what();
        self.spent_ns.fetch_add(clock.now().since(begin).as_nanos(), Ordering::Relaxed);
        done
    }
}

/// Ends measuring that the time does not allow, or that keeps another load waiting behind the
/// service.
pub struct Within<'a, M> {
    pub time: &'a MeasuringTime<'a>,
    pub turn: &'a LoadTurn<'a>,
    /// Hears of each case.
    pub told: &'a mut dyn Watch<M>,
}

impl<M> Watch<M> for Within<'_, M> {
    fn goes_on(&self, _fraction: f64) -> bool {
        !(self.time.is_behind && self.turn.is_waited_for()) && self.time.gives_way()
    }

    fn fits(&self, expected: Duration, left: Duration) -> bool {
        self.time.is_behind || expected <= left
    }

    fn measured(&mut self, case: &M, fraction: f64) {
        self.told.measured(case, fraction);
    }
}
