//! The rehearsal of weights: which division would have served the last arrivals best?

use std::collections::VecDeque;

use super::flow::Outcome;
use super::replay::{PipelineArrival, Replay};
use super::shares::Shares;
use super::stage::{Stage, StageError};
use crate::cluster::Random;
use crate::time::Duration;

/// How a [`WeightRehearsal`] looks for weights.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RehearsalOptions {
    /// Weights that one trial tries.
    pub tries: u32,
    /// Arrivals that a trial replays: the last ones.
    pub stretch: usize,
    /// Rates at which they are replayed, percent of the recorded rate.
    pub rates: [u64; 2],
    /// A trial changes the weights only for this gain of requests that are in time.
    pub gain: f64,
    /// How far a try is from the best weights so far: the standard deviation of the logarithm of a
    /// weight.
    pub reach: f64,
}

impl Default for RehearsalOptions {
    fn default() -> Self {
        RehearsalOptions { tries: 40, stretch: 2_048, rates: [140, 100], gain: 0.003, reach: 0.7 }
    }
}

/// No trial begins before so many requests have come.
const FEWEST: usize = 256;

/// The most patience that a try has. More serves an overload badly, which the last arrivals may not
/// show.
const MOST_PATIENCE: f64 = 0.6;

/// Tries weights on the last arrivals, and finds the best.
///
/// A pure state machine beside the schedulers of the steps. The driver reports each arrival, and
/// lends time ([`WeightRehearsal::step`], in replayed events). After a trial it takes the new
/// [`Shares`], if weights near the present ones would have answered at least 0.3% more requests in
/// time. A trial begins once half of the stretch is new. If the present weights lose no request,
/// there is nothing to gain and the trial ends at once.
#[derive(Debug)]
pub struct WeightRehearsal {
    stage: Stage,
    options: RehearsalOptions,
    /// The shares that are in use.
    current: Vec<Shares>,
    past: VecDeque<PipelineArrival>,
    unseen: usize,
    random: Random,
    trial: Option<Trial>,
    /// The shares have changed, and the caller has not taken them yet.
    is_decided: bool,
    trials: u64,
}

#[derive(Debug)]
struct Trial {
    arrivals: Vec<PipelineArrival>,
    best: Vec<Shares>,
    /// Requests that the best weights lost, at all rates; `None` before the present ones have run.
    losses: Option<u64>,
    /// The losses of the present weights.
    before: u64,
    /// The course of the best weights' losses: how many they had lost at each mark of each rate.
    course: Vec<u64>,
    tried: Vec<Shares>,
    tries: u32,
    run: Run,
}

/// Marks in the course of a replay. A try that is far behind the best one at a mark is given up.
const MARKS: usize = 8;

/// A replay of one try at one rate.
#[derive(Debug)]
struct Run {
    replay: Replay,
    rate: usize,
    lost: u64,
    /// The losses at each mark so far, at this rate and the rates before.
    course: Vec<u64>,
}

impl WeightRehearsal {
    /// A rehearsal that begins with these shares. `seed` chooses the tries.
    ///
    /// # Errors
    /// If a number of the stage names nothing.
    pub fn new(stage: Stage, shares: Vec<Shares>, options: RehearsalOptions, seed: u64) -> Result<Self, StageError> {
        stage.check()?;
        let (past, random) = (VecDeque::new(), Random(seed));
        Ok(WeightRehearsal {
            stage,
            options,
            current: shares,
            past,
            unseen: 0,
            random,
            trial: None,
            is_decided: false,
            trials: 0,
        })
    }

    /// Trials that have ended.
    pub fn trials(&self) -> u64 {
        self.trials
    }

    /// Notes that a request came. Refused requests count too.
    pub fn arrival(&mut self, arrival: PipelineArrival) {
        if self.past.len() >= self.options.stretch {
            self.past.pop_front();
        }
        self.past.push_back(arrival);
        self.unseen += 1;
    }

    /// Goes on for at most `events` replayed events. Returns their number. Fewer than asked: a
    /// decision waits, or no trial may begin before more requests have come.
    pub fn step(&mut self, events: u64) -> u64 {
        let mut used = 0;
        while used < events && !self.is_decided {
            if self.trial.is_none() && !self.begin() {
                break;
            }
            let Some(trial) = &mut self.trial else { break };
            used += 1;
            if trial.run.replay.step(&trial.arrivals, &mut trial.tried) {
                trial.count();
                if !trial.is_worse() {
                    continue;
                }
            }
            self.end_of_run();
        }
        used
    }

    /// The shares that the last trial found better.
    pub fn poll_decision(&mut self) -> Option<Vec<Shares>> {
        std::mem::take(&mut self.is_decided).then(|| self.current.clone())
    }

    fn begin(&mut self) -> bool {
        let has_deadline = |arrival: &PipelineArrival| arrival.budget != Duration::MAX;
        if self.past.len() < FEWEST || self.unseen < self.past.len() / 2 || !self.past.iter().any(has_deadline) {
            return false;
        }
        self.unseen = 0;
        let Some(run) = self.run(0, 0, Vec::new()) else { return false };
        self.trial = Some(Trial {
            arrivals: self.past.iter().copied().collect(),
            best: self.current.clone(),
            losses: None,
            course: Vec::new(),
            before: 0,
            tried: self.current.clone(),
            tries: 0,
            run,
        });
        true
    }

    fn run(&self, rate: usize, lost: u64, course: Vec<u64>) -> Option<Run> {
        let replay = Replay::new(&self.stage, self.options.rates[rate]).ok()?;
        Some(Run { replay, rate, lost, course })
    }

    /// A replay is over: the next rate, the next try or the decision follows.
    fn end_of_run(&mut self) {
        let Some(mut trial) = self.trial.take() else { return };
        let (rate, lost) = (trial.run.rate + 1, trial.run.lost);
        if rate < self.options.rates.len() && !trial.is_worse() {
            let Some(run) = self.run(rate, lost, std::mem::take(&mut trial.run.course)) else { return };
            trial.run = run;
            self.trial = Some(trial);
            return;
        }
        let mut is_better = true;
        match trial.losses {
            None => trial.before = lost,
            Some(least) if lost < least && !trial.is_worse() => trial.best.clone_from(&trial.tried),
            Some(_) => is_better = false,
        }
        if is_better {
            (trial.losses, trial.course) = (Some(lost), std::mem::take(&mut trial.run.course));
        }
        if trial.losses == Some(0) || trial.tries >= self.options.tries {
            return self.decide(&trial);
        }
        trial.tries += 1;
        let Some(run) = self.run(0, 0, Vec::new()) else { return };
        trial.tried = self.near(&trial.best);
        trial.run = run;
        self.trial = Some(trial);
    }

    fn decide(&mut self, trial: &Trial) {
        self.trials += 1;
        let asked = (trial.arrivals.len() * self.options.rates.len()) as u64;
        let losses = trial.losses.unwrap_or(trial.before);
        let (served, before) = (asked.saturating_sub(losses), asked.saturating_sub(trial.before));
        if served as f64 > before as f64 * (1.0 + self.options.gain) {
            self.current.clone_from(&trial.best);
            self.is_decided = true;
        }
    }

    /// Weights near these: one pipeline's or all, one step's or all.
    fn near(&mut self, shares: &[Shares]) -> Vec<Shares> {
        let only = (shares.len() > 1 && self.random.even() < 0.5).then(|| self.pick(shares.len()));
        let mut near = Vec::with_capacity(shares.len());
        for (number, shares) in shares.iter().enumerate() {
            if only.is_some_and(|only| only != number) {
                near.push(shares.clone());
                continue;
            }
            let mut weights = shares.weights().to_vec();
            let step = (self.random.even() < 0.5).then(|| self.pick(weights.len()));
            for (index, weight) in weights.iter_mut().enumerate() {
                if step.is_none_or(|step| step == index) {
                    *weight *= (self.options.reach * self.normal()).exp();
                }
            }
            let mut patience = shares.patience();
            if step.is_none() && self.random.even() < 0.5 {
                patience = MOST_PATIENCE * self.random.even();
            }
            near.push(shares.reweighted(&self.stage.pipelines[number].shape, weights).with_patience(patience));
        }
        near
    }

    fn pick(&mut self, of: usize) -> usize {
        ((self.random.even() * of as f64) as usize).min(of.saturating_sub(1))
    }

    /// A number that is about normally distributed, between -6 and 6.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.random.even()).sum::<f64>() - 6.0
    }
}

impl Trial {
    fn count(&mut self) {
        while let Some(end) = self.run.replay.poll_end() {
            let Some(arrival) = self.arrivals.get(end.request as usize) else { continue };
            let due = self.run.replay.comes(&self.arrivals, end.request as usize) + arrival.budget;
            self.run.lost += u64::from(end.outcome != Outcome::Done || end.at > due);
        }
        let passed = self.run.rate * MARKS + self.run.replay.arrived() * MARKS / self.arrivals.len().max(1);
        while self.run.course.len() < passed {
            self.run.course.push(self.run.lost);
        }
    }

    /// Whether this try has already lost as many requests as the best, or many more at the last mark.
    fn is_worse(&self) -> bool {
        let at_mark =
            self.run.course.last().zip(self.run.course.len().checked_sub(1).and_then(|at| self.course.get(at)));
        self.losses.is_some_and(|least| self.run.lost >= least)
            || at_mark.is_some_and(|(lost, best)| *lost > best + best / 4 + 8)
    }
}
