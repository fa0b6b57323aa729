//! Finds the highest request rate at which the server keeps the user's targets, such as a p99
//! latency of 50 ms.

use std::fmt;

use anyhow::Result;
use downbeat_core::Duration;
use downbeat_report::note;
use serde::Serialize;

use crate::load::Pace;
use crate::load::arrivals::Schedule;
use crate::load::plan::{Plan, Search, Targets};
use crate::load::run::{Hopeless, Outcome, run};
use crate::results::outcome::Failure;
use crate::results::report::{keeps_up, short};

/// Most trials of a search.
const MOST_TRIALS: usize = 60;
/// Lowest rate of a search.
const LOWEST: f64 = 0.01;
/// A trial ends early if it exceeds its bound by this factor. The margin is for last requests that
/// may still be good, and for the varying number of requests of a random process.
const HOPELESS: f64 = 1.5;

/// Bisects rates. First doubles (or halves) the rate until one passes and one fails, then halves
/// the interval in logarithm. Pure: it takes the result of each trial and returns the next rate.
#[derive(Clone, Debug)]
pub struct Bisection {
    next: Option<f64>,
    passed: Option<f64>,
    failed: Option<f64>,
    most: f64,
    precision: f64,
}

impl Bisection {
    /// Begins at `start`, never exceeds `most`, and ends when the bounds are within `precision` (a
    /// part of 1).
    pub fn new(start: f64, most: f64, precision: f64) -> Self {
        Bisection { next: Some(start.min(most)), passed: None, failed: None, most, precision }
    }

    /// The next rate to try; `None`: the search is over.
    pub fn next_rate(&self) -> Option<f64> {
        self.next
    }

    /// Records whether the rate of [`Bisection::next_rate`] has passed.
    pub fn handle_result(&mut self, passed: bool) {
        let Some(rate) = self.next else { return };
        if passed {
            self.passed = Some(rate);
        } else {
            self.failed = Some(rate);
        }
        self.next = match (self.passed, self.failed) {
            (Some(low), None) => (low < self.most).then(|| (low * 2.0).min(self.most)),
            (None, Some(high)) => (high / 2.0 >= LOWEST).then_some(high / 2.0),
            (Some(low), Some(high)) => (high / low > 1.0 + self.precision).then(|| (low * high).sqrt()),
            (None, None) => None,
        };
    }

    /// The highest rate that passed.
    pub fn highest(&self) -> Option<f64> {
        self.passed
    }

    /// The lowest rate that failed.
    pub fn lowest_failed(&self) -> Option<f64> {
        self.failed
    }
}

/// One rate that was tried.
#[derive(Clone, Debug, Serialize)]
pub struct Trial {
    /// Requests per second.
    pub rate: f64,
    /// Whether every target was met.
    pub passed: bool,
    /// The reasons for a failure; empty if passed.
    pub reason: String,
    /// 99th percentile of all requests, failed ones counted as infinitely slow (`null`), milliseconds.
    pub p99_ms: Option<f64>,
    /// Worst model's bad part, percent.
    pub bad_percent: f64,
    /// Whether the trial was ended early because it could not pass any more.
    pub ended_early: bool,
    /// Whether the generator itself was too slow and may have caused the failure.
    pub generator_late: bool,
}

/// The result of a search.
#[derive(Clone, Debug, Serialize)]
pub struct Capacity {
    /// The highest rate that passed, requests per second; `None` if none did.
    pub rate: Option<f64>,
    /// The lowest rate that failed; `None` if the search ended at its upper bound.
    pub failed_rate: Option<f64>,
    /// The targets, in words.
    pub target: String,
    /// Whether the generator could not keep up in a failed trial: the capacity is then at least
    /// `rate`.
    pub generator_limited: bool,
    /// Whether a person has ended the search: the capacity is then at least `rate`.
    pub interrupted: bool,
    /// The trials, in their order.
    pub trials: Vec<Trial>,
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.rate, self.failed_rate) {
            (Some(rate), Some(failed)) => write!(f, "capacity {}/s ({}/s fails)", short(rate), short(failed))?,
            (Some(rate), None) if self.interrupted => write!(f, "capacity at least {}/s (interrupted)", short(rate))?,
            (Some(rate), None) => write!(f, "capacity at least {}/s (upper bound)", short(rate))?,
            (None, _) if self.interrupted => f.write_str("interrupted before a rate met the target")?,
            (None, _) => f.write_str("no rate met the target")?,
        }
        write!(f, ": {}", self.target)
    }
}

impl Targets {
    /// The targets in words.
    pub fn describe(&self, slo: Option<Duration>) -> String {
        let late = slo.map_or(String::new(), |slo| format!(" or later than {slo}"));
        let bad = format!("at most {}% of each model's requests failed{late}", (self.bad * 1e5).round() / 1e3);
        match self.p99 {
            Some(p99) => format!("p99 <= {p99}, {bad}"),
            None => bad,
        }
    }

    /// The 99th percentile of all requests of a run; failed ones are infinitely slow. `None`:
    /// infinite.
    pub fn p99(outcome: &Outcome) -> Option<Duration> {
        let total = outcome.record.total();
        let rank = (total.scheduled as f64 * 0.99).ceil() as u64;
        if rank > total.ok || total.ok == 0 {
            return None;
        }
        Some(Duration::from_nanos(total.latency.value_at_quantile(rank as f64 / total.ok as f64)))
    }

    /// The largest bad part of any model with requests. Requests without an answer when the run was
    /// stopped do not count.
    pub fn worst_bad(outcome: &Outcome) -> f64 {
        let parts = outcome.record.models.iter().map(|m| {
            let abandoned = m.failures.get(&Failure::Abandoned).map_or(0, |f| f.count);
            let ended = m.scheduled - abandoned;
            if ended == 0 { 0.0 } else { (m.bad() - abandoned) as f64 / ended as f64 }
        });
        parts.fold(0.0, f64::max)
    }

    /// Judges a run.
    fn judge(&self, rate: f64, outcome: &Outcome) -> Trial {
        let p99 = Self::p99(outcome);
        let bad = Self::worst_bad(outcome);
        let mut reasons = Vec::new();
        if outcome.record.stopped {
            reasons.push("ended early: too many bad or slow requests".to_owned());
        } else {
            if bad > self.bad {
                reasons.push(format!("{:.2}% bad", bad * 100.0));
            }
            if let Some(target) = self.p99
                && p99.is_none_or(|p99| p99 > target)
            {
                let p99 = p99.map_or("unknown, because too many requests failed".to_owned(), |p| {
                    format!("{:.2} ms", p.as_millis_f64())
                });
                reasons.push(format!("p99 {p99}"));
            }
            if outcome.record.total().scheduled == 0 {
                reasons.push("no request was due: the duration is too short for this rate".to_owned());
            }
        }
        Trial {
            rate,
            passed: reasons.is_empty(),
            reason: reasons.join(", "),
            p99_ms: p99.map(Duration::as_millis_f64),
            bad_percent: bad * 100.0,
            ended_early: outcome.record.stopped,
            generator_late: !keeps_up(&outcome.record),
        }
    }
}

/// Searches with trials on the plan's server.
///
/// # Errors
/// As [`run()`].
pub fn search(plan: &Plan, search: &Search, quiet: bool) -> Result<(Outcome, Capacity)> {
    search_with(search, plan.duration, plan.slo, |rate, hopeless| {
        let pace = Pace::Open(Schedule::steady(search.gaps, rate));
        let outcome = run(plan, &pace, hopeless, &mut |_| {})?;
        if !quiet && !outcome.interrupted {
            let trial = search.targets.judge(rate, &outcome);
            let verdict = if trial.passed { "passed" } else { &trial.reason };
            let p99 = trial.p99_ms.map_or("-".to_owned(), |ms| format!("{ms:.2} ms"));
            let bad = trial.bad_percent;
            note(format_args!("{rate:>12.1}/s  p99 {p99:>12}  bad {bad:>6.2}%  {verdict}"));
        }
        Ok(outcome)
    })
}

/// Searches with the trials that `trial` makes, each of length `duration`. Returns the run at the
/// highest rate that passed (or the last run, if no rate passed) and the search.
///
/// # Errors
/// The first error of a trial.
pub fn search_with(
    search: &Search,
    duration: Duration,
    slo: Option<Duration>,
    mut trial: impl FnMut(f64, Hopeless) -> Result<Outcome>,
) -> Result<(Outcome, Capacity)> {
    let mut bisection = Bisection::new(search.start, search.most, search.precision);
    let mut trials = Vec::new();
    let mut best: Option<Outcome> = None;
    let (mut last, mut interrupted) = (None, false);
    while let Some(rate) = bisection.next_rate()
        && trials.len() < MOST_TRIALS
    {
        let expected = rate * duration.as_secs_f64();
        let beyond = |part: f64| (expected * part * HOPELESS) as u64 + 10;
        let hopeless = Hopeless {
            // The bound holds for all models together, whose bad requests are never fewer than one
            // model's.
            bad: beyond(search.targets.bad),
            over: if search.targets.p99.is_some() { beyond(0.01) } else { 0 },
            target: search.targets.p99,
        };
        let outcome = trial(rate, hopeless)?;
        if outcome.interrupted {
            last = Some(outcome);
            interrupted = true;
            break;
        }
        let judged = search.targets.judge(rate, &outcome);
        bisection.handle_result(judged.passed);
        if judged.passed {
            best = Some(outcome);
        } else {
            last = Some(outcome);
        }
        trials.push(judged);
    }
    let capacity = Capacity {
        rate: bisection.highest(),
        failed_rate: bisection.lowest_failed(),
        target: search.targets.describe(slo),
        generator_limited: trials.iter().any(|t| !t.passed && t.generator_late),
        interrupted,
        trials,
    };
    let outcome = best.or(last).ok_or_else(|| anyhow::anyhow!("no rate was tried"))?;
    Ok((outcome, capacity))
}
