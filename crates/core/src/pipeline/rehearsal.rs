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
///
/// A driver whose models or loads change calls [`WeightRehearsal::set_stage`]. Until a trial has
/// found better weights, a pipeline then has the shares of the fixed rule. These shares are also one
/// of the tries, so that a pipeline goes back to the rule once the rule is better.
#[derive(Debug)]
pub struct WeightRehearsal {
    stage: Stage,
    options: RehearsalOptions,
    /// The shares that are in use.
    current: Vec<Shares>,
    /// By pipeline: whether a trial has found its weights.
    found: Vec<bool>,
    /// The shares by the fixed rule at the load of the moment, if the driver tells them.
    rule: Option<Vec<Shares>>,
    past: VecDeque<PipelineArrival>,
    unseen: usize,
    random: Random,
    trial: Option<Trial>,
    /// The shares have changed, and the caller has not taken them yet.
    is_decided: bool,
    trials: u64,
    last: Option<TrialOutcome>,
}

/// The outcome of a trial.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TrialOutcome {
    /// Requests that were replayed, at all rates.
    pub asked: u64,
    /// Requests of these that the weights before the trial lost.
    pub lost_before: u64,
    /// Requests of these that the best weights lost.
    pub lost: u64,
}

#[derive(Debug)]
struct Trial {
    /// The stage as the trial began.
    stage: Stage,
    arrivals: Vec<PipelineArrival>,
    best: Vec<Shares>,
    /// The shares that the best weights were made from, and which of them earlier trials found.
    base: (Vec<Shares>, Vec<bool>),
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
        let (past, random, found) = (VecDeque::new(), Random(seed), vec![false; shares.len()]);
        Ok(WeightRehearsal {
            stage,
            options,
            current: shares,
            found,
            rule: None,
            past,
            unseen: 0,
            random,
            trial: None,
            is_decided: false,
            trials: 0,
            last: None,
        })
    }

    /// Replaces the stage, and tells the shares by the fixed rule. `former` has for each pipeline its
    /// number in the stage before; `None`: the pipeline is new. Pipelines that stay keep their
    /// arrivals and the weights that a trial found. A running trial ends without a decision, unless
    /// only profiles, options and the rule's shares have changed.
    ///
    /// # Errors
    /// If a number of the stage names nothing. Then nothing has changed.
    ///
    /// # Panics
    /// If `rule` or `former` does not have one entry for each pipeline.
    pub fn set_stage(&mut self, stage: Stage, rule: Vec<Shares>, former: &[Option<usize>]) -> Result<(), StageError> {
        stage.check()?;
        assert!(
            rule.len() == stage.pipelines.len() && former.len() == rule.len(),
            "each pipeline has shares and a former number, or other pipelines would get them"
        );
        let is_same = self.stage.pipelines == stage.pipelines
            && self.stage.models.len() == stage.models.len()
            && (0..).zip(former).all(|(number, former)| *former == Some(number));
        let stays = |(number, former): (usize, &Option<usize>)| {
            let former = former.filter(|former| self.found.get(*former) == Some(&true))?;
            let shape = &stage.pipelines[number].shape;
            (self.stage.pipelines[former].shape == *shape)
                .then(|| rule[number].dividing_as(shape, &self.current[former]))
        };
        let kept: Vec<Option<Shares>> = former.iter().enumerate().map(stays).collect();
        self.found = kept.iter().map(Option::is_some).collect();
        self.current = kept.into_iter().zip(&rule).map(|(kept, rule)| kept.unwrap_or_else(|| rule.clone())).collect();
        if !is_same {
            (self.trial, self.is_decided) = (None, false);
            let place = |arrival: &mut PipelineArrival| {
                let now = former.iter().position(|former| *former == Some(arrival.pipeline));
                now.is_some_and(|now| {
                    arrival.pipeline = now;
                    true
                })
            };
            self.past.retain_mut(place);
        }
        (self.stage, self.rule) = (stage, Some(rule));
        Ok(())
    }

    /// By pipeline: whether a trial has found its weights. The others have the shares of the rule.
    pub fn found(&self) -> &[bool] {
        &self.found
    }

    /// The outcome of the last trial.
    pub fn last_trial(&self) -> Option<TrialOutcome> {
        self.last
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
        let Some(run) = self.run(&self.stage, 0, 0, Vec::new()) else { return false };
        self.trial = Some(Trial {
            stage: self.stage.clone(),
            base: (self.current.clone(), self.found.clone()),
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

    fn run(&self, stage: &Stage, rate: usize, lost: u64, course: Vec<u64>) -> Option<Run> {
        let replay = Replay::new(stage, self.options.rates[rate]).ok()?;
        Some(Run { replay, rate, lost, course })
    }

    /// A replay is over: the next rate, the next try or the decision follows.
    fn end_of_run(&mut self) {
        let Some(mut trial) = self.trial.take() else { return };
        let (rate, lost) = (trial.run.rate + 1, trial.run.lost);
        if rate < self.options.rates.len() && !trial.is_worse() {
            let course = std::mem::take(&mut trial.run.course);
            let Some(run) = self.run(&trial.stage, rate, lost, course) else { return };
            trial.run = run;
            self.trial = Some(trial);
            return;
        }
        let mut is_better = true;
        match trial.losses {
            None => trial.before = lost,
            Some(least) if lost < least && !trial.is_worse() => {
                trial.best.clone_from(&trial.tried);
                if trial.tries == 1 && self.tries_rule() {
                    trial.base = (trial.tried.clone(), vec![false; trial.tried.len()]);
                }
            }
            Some(_) => is_better = false,
        }
        if is_better {
            (trial.losses, trial.course) = (Some(lost), std::mem::take(&mut trial.run.course));
        }
        if trial.losses == Some(0) || trial.tries >= self.options.tries {
            return self.decide(&trial);
        }
        trial.tries += 1;
        let Some(run) = self.run(&trial.stage, 0, 0, Vec::new()) else { return };
        trial.tried = match &self.rule {
            Some(rule) if trial.tries == 1 && self.tries_rule() => rule.clone(),
            _ => self.near(&trial.best),
        };
        trial.run = run;
        self.trial = Some(trial);
    }

    /// Whether the shares of the rule are the first try of a trial.
    fn tries_rule(&self) -> bool {
        self.rule.is_some() && self.found.contains(&true)
    }

    fn decide(&mut self, trial: &Trial) {
        self.trials += 1;
        let asked = (trial.arrivals.len() * self.options.rates.len()) as u64;
        let losses = trial.losses.unwrap_or(trial.before);
        let (served, before) = (asked.saturating_sub(losses), asked.saturating_sub(trial.before));
        self.last = Some(TrialOutcome { asked, lost_before: trial.before, lost: losses });
        if served as f64 > before as f64 * (1.0 + self.options.gain) {
            self.take(trial);
            self.is_decided = true;
        }
    }

    /// Takes over the best weights of a trial.
    fn take(&mut self, trial: &Trial) {
        let (base, found) = &trial.base;
        for (number, best) in trial.best.iter().enumerate() {
            self.found[number] = found[number] || !best.divides_as(&base[number]);
            self.current[number] = match &self.rule {
                None => best.clone(),
                Some(rule) if !self.found[number] => rule[number].clone(),
                Some(rule) => rule[number].dividing_as(&self.stage.pipelines[number].shape, best),
            };
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
