//! The rehearsal: the scheduler tries behaviours on the last seconds.

mod candidates;
#[cfg(test)]
mod clients;
mod closed_loop;
mod contender;
mod noise;
mod past;
mod replay;
mod score;
mod setting;
mod trial;
mod watch;

use closed_loop::ClosedLoop;
use contender::Contender;
pub(crate) use noise::{ExecutionNoise, Random};
pub(crate) use past::Past;
pub use past::PastArrival;
use replay::Stage;
pub use score::Ground;
pub(crate) use score::{RATES, Score, Tally};
use setting::Setting;
use trial::Trial;
pub use trial::{Decision, Tried};
use watch::{Rate, Watch};

use super::model_options::ModelOptions;
use super::network::NetworkBudget;
use super::order::OrderPolicy;
use crate::device_profiles::DeviceProfiles;
use crate::ids::{DeviceKind, ModelId};
use crate::time::{Duration, Time};

/// Where clients wait for answers, how long they take to ask again depends on what is done: on machines that they share with the device they are slow while it
/// computes, and it never waits for them because they are slow. So a trial takes them for quick; if they are not once they are waited for, the
/// next trial takes that back, and none is hopeful for so many trials, twice as many each time.
const FIRST_SOBER: u32 = 4;
const MOST_SOBER: u32 = 256;
/// Before so many requests have come, and for so long, nothing is tried.
const FEWEST: usize = 64;
const SHORTEST: Duration = Duration::from_millis(300);
/// Nor before so many of the longest budgets have passed, unless they are very long: queues have to fill.
const SHORTEST_BUDGETS: u64 = 8;
const LONGEST: Duration = Duration::from_millis(1_000);

/// The scheduler tries behaviours on the last seconds, and says which is best.
///
/// A pure state machine beside a [`super::Scheduler`] (or its shards), which it replays: a fresh one, with the same models and as many devices, on the
/// arrivals of the last seconds, under each of the behaviours that a model can have. The driver tells it what comes and what changes, lends it time
/// ([`Rehearsal::step`], in replayed events) and hands each [`Decision`] to the scheduler ([`super::Scheduler::set_behaviour`], [`super::Scheduler::set_order`]).
///
/// **A trial** takes all that is remembered, in parts, the newest first, and then a rush of the minute before. After each, all but the best of the candidates leave. All meet the same arrivals, as they came and at 1.1 and 1.25 times their rate, so that a cliff is seen before it is reached.
/// What counts is said in [`Decision`]; another behaviour is taken only for a gain beyond its noise, or if it is better in a second trial as well.
#[derive(Debug)]
pub struct Rehearsal {
    past: Past,
    stage: Stage,
    consolidate: bool,
    /// What it was decided to do.
    current: Setting,
    trial: Option<Box<Trial>>,
    contender: Option<Contender>,
    /// Trials in a row after which nothing changed.
    confirmed: u32,
    decision: Option<Decision>,
    /// By model.
    rates: Vec<Rate>,
    /// A change that may have fewer requests come.
    watch: Option<Watch>,
    /// When something came or was answered last.
    now: Time,
    trials: u64,
    /// Trials until it may be hopeful again.
    sober: u32,
    /// And after the next time.
    soberer: u32,
}

impl Rehearsal {
    /// Without models and devices. `consolidate`: few busy devices are better than short answers, where no request is lost by it. `seed` chooses the noise of executions.
    pub fn new(consolidate: bool, seed: u64) -> Self {
        let mut rehearsal = Rehearsal {
            past: Past::default(),
            stage: Stage { seed, ..Stage::default() },
            consolidate,
            current: Setting::default(),
            trial: None,
            contender: None,
            confirmed: 0,
            decision: None,
            rates: Vec::new(),
            watch: None,
            now: Time::ZERO,
            trials: 0,
            sober: 0,
            soberer: FIRST_SOBER,
        };
        rehearsal.set_order(OrderPolicy::default());
        rehearsal
    }

    /// A model is there with these options, or (`None`) gone.
    pub fn set_model(&mut self, model: ModelId, options: Option<ModelOptions>) {
        let index = model.0 as usize;
        if self.stage.models.len() <= index {
            self.stage.models.resize(index + 1, None);
            self.stage.noise.resize(index + 1, ExecutionNoise::default());
            self.stage.loops.resize(index + 1, ClosedLoop::default());
            self.rates.resize(index + 1, Rate::default());
            self.current.behaviours.resize(index + 1, None);
        }
        if options.is_none() {
            self.past.forget(model);
            self.stage.noise[index] = ExecutionNoise::default();
            self.stage.loops[index] = ClosedLoop::default();
            self.rates[index] = Rate::default();
            self.current.behaviours[index] = None;
        }
        self.stage.models[index] = options;
        self.changed();
    }

    /// A model has other profiles. They count from the next trial on.
    pub fn set_profile(&mut self, model: ModelId, profiles: DeviceProfiles) {
        if let Some(options) = self.stage.models.get_mut(model.0 as usize).and_then(Option::as_mut) {
            options.profiles = profiles;
        }
    }

    /// There are so many devices of a kind.
    pub fn set_devices(&mut self, kind: DeviceKind, devices: u32) {
        let index = kind.0 as usize;
        if self.stage.devices.len() <= index {
            self.stage.devices.resize(index + 1, 0);
        }
        self.stage.devices[index] = devices;
        self.changed();
    }

    /// What messages take, and how late wake-ups may come.
    pub fn set_delays(&mut self, network: NetworkBudget, wake_margin: Duration) {
        (self.stage.network, self.stage.wake_margin) = (network, wake_margin);
        self.changed();
    }

    /// Whether few busy devices are better than short answers, where no request is lost by it. It counts from the next trial on.
    pub fn set_consolidate(&mut self, consolidate: bool) {
        self.consolidate = consolidate;
    }

    /// Who says in which order candidates get devices; at first as is the default.
    pub fn set_order(&mut self, policy: OrderPolicy) {
        (self.stage.tries_orders, self.current.order) = (policy == OrderPolicy::Rehearsed, policy.first());
        self.changed();
    }

    /// An execution of a model took `share` of what its profile says. It counts from the next trial on.
    pub fn execution(&mut self, model: ModelId, share: f64) {
        if let Some(noise) = self.stage.noise.get_mut(model.0 as usize) {
            noise.add(share);
        }
    }

    /// A request came, accepted or not.
    pub fn arrival(&mut self, arrival: PastArrival) {
        if let Some(closed) = self.stage.loops.get_mut(arrival.model.0 as usize) {
            closed.arrived(arrival.at);
        }
        if let Some(rate) = self.rates.get_mut(arrival.model.0 as usize) {
            rate.arrived(arrival.at);
        }
        self.now = self.now.max(arrival.at);
        self.past.push(arrival);
    }

    /// Requests of a model were answered, well or (`lost`) by a rejection or a drop. Where it is told of each, in the order of time with the arrivals, it sees which
    /// clients wait for their answers, and replays them so.
    pub fn answered(&mut self, at: Time, model: ModelId, requests: u32, lost: bool) {
        if let Some(closed) = self.stage.loops.get_mut(model.0 as usize) {
            closed.answered(at, requests, lost);
        }
        self.now = self.now.max(at);
    }

    /// Some answers were not told: clients are counted anew.
    pub fn missed_answers(&mut self) {
        self.watch = None;
        self.stage.loops.iter_mut().for_each(|closed| *closed = ClosedLoop::default());
    }

    /// Goes on for at most so many replayed events; how many there were. Fewer: there is a decision, or nothing to be tried before more has come.
    pub fn step(&mut self, events: u64) -> u64 {
        let mut used = 0;
        self.look_back();
        while used < events && self.decision.is_none() {
            if self.trial.is_none() && !self.begin() {
                break;
            }
            let Some(trial) = &mut self.trial else { break };
            used += trial.step(events - used);
            if let Some((decision, contender, later)) = trial.poll_decision() {
                (self.trial, self.contender) = (None, contender);
                self.decide(decision, later);
            }
        }
        used
    }

    /// What the last trial came to.
    pub fn poll_decision(&mut self) -> Option<Decision> {
        self.decision.take()
    }

    /// Trials that came to an end.
    pub fn trials(&self) -> u64 {
        self.trials
    }

    /// Goes back to what was done before where fewer requests come since answers come later.
    fn look_back(&mut self) {
        let Some(watch) = self.watch.take() else { return };
        match watch.judge(self.now, &mut self.rates) {
            Ok(watch) => self.watch = watch,
            Err((before, decision)) => {
                self.changed();
                self.current = before;
                self.decision = Some(decision);
            }
        }
    }

    fn decide(&mut self, decision: Decision, later: Vec<usize>) {
        self.trials += 1;
        self.sober = self.sober.saturating_sub(1);
        if self.stage.hopeful && decision.changed {
            // The next trial sees what came of it.
            (self.sober, self.soberer) = (self.soberer, self.soberer.saturating_mul(2).min(MOST_SOBER));
        }
        self.confirmed = if decision.changed { 0 } else { self.confirmed + 1 };
        let now = Setting { behaviours: decision.behaviours.clone(), order: decision.order };
        let before = std::mem::replace(&mut self.current, now);
        if decision.changed {
            let told = |model: &usize| self.stage.loops[*model].is_told();
            let later = later.into_iter().filter(told).collect();
            self.watch = Watch::new(self.now, before, decision.clone(), later, &mut self.rates);
        }
        self.decision = Some(decision);
    }

    fn changed(&mut self) {
        (self.trial, self.contender, self.watch) = (None, None, None);
        self.confirmed = 0;
    }

    /// Begins a trial, if enough is new.
    fn begin(&mut self) -> bool {
        let (all, unseen) = (self.past.len(), self.past.unseen());
        // A trial that changed nothing is not worth much the next time.
        let share = 4usize.saturating_sub(self.confirmed.min(3) as usize) * 2;
        // Example: a change cuts the rate to a hundredth. The next trial comes after as long a time, not after as many requests.
        let long = self.past.span_unseen().saturating_mul(share as u64) >= self.past.span();
        let enough = unseen >= FEWEST && (long || unseen >= all / share);
        if all < FEWEST || self.past.span() < SHORTEST || !enough {
            return false;
        }
        // Without a deadline there is nothing to wait for, and nothing is given up: all behaviours are one.
        let budget = self.past.longest_budget();
        if budget == Duration::ZERO || self.past.span() < budget.saturating_mul(SHORTEST_BUDGETS).min(LONGEST) {
            return false;
        }
        let patience = |(model, rate): (usize, &Rate)| {
            let wait = self.current.behaviours[model].map_or(0, |behaviour| behaviour.wait);
            let closed = self.stage.is_closed(ModelId(model as u32));
            (!closed && !rate.may_wait(self.now)).then_some(wait)
        };
        self.stage.patience = self.rates.iter().enumerate().map(patience).collect();
        let together = candidates::together(&self.stage, &self.current);
        self.stage.hopeful = self.sober == 0 && together.is_some_and(|together| together != self.current);
        let stage = self.stage.clone();
        self.trial = Some(Box::new(Trial::new(
            self.past.seen(),
            stage,
            &self.current,
            self.contender.take(),
            self.consolidate,
            self.trials,
        )));
        true
    }
}
