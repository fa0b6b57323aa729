//! The rehearsal: the scheduler tries behaviours on the last seconds' arrivals.

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
pub use noise::{ExecutionNoise, Random};
use past::Past;
pub use past::PastArrival;
use replay::Stage;
pub use score::Ground;
pub(crate) use score::RATES;
use setting::Setting;
use trial::Trial;
pub use trial::{Decision, Tried};
use watch::{Rate, Watch};

use super::dispatch_policy::DispatchPolicy;
use super::model_options::ModelOptions;
use super::network::NetworkBudget;
use super::order::OrderPolicy;
use crate::device_profiles::DeviceProfiles;
use crate::ids::{DeviceKind, ModelId};
use crate::time::{Duration, Time};

/// If clients wait for answers, their pause before they ask again depends on the behaviour. On
/// machines that they share with the device they are slow while it computes, and the device never
/// waits for slow clients. Therefore a *hopeful* trial takes the clients for quick. If they stay
/// slow once the device waits for them, the next trial reverses the decision. Then no trial is
/// hopeful for this many trials, twice as many each time.
const FIRST_SOBER: u32 = 4;
const MOST_SOBER: u32 = 256;
/// No trial begins before so many requests have come, over at least this time.
const FEWEST: usize = 64;
const SHORTEST: Duration = Duration::from_millis(300);
/// No trial begins before so many of the longest budgets have passed, as queues must fill.
/// [`LONGEST`] bounds this wait.
const SHORTEST_BUDGETS: u64 = 8;
const LONGEST: Duration = Duration::from_millis(1_000);

/// Tries behaviours of the scheduler on the last seconds' arrivals, and finds the best.
///
/// A pure state machine beside a [`super::Scheduler`] (or its shards). For each behaviour that a
/// model can have, it replays the arrivals of the last seconds. It does so with a fresh scheduler,
/// the same models and as many devices. The driver reports events and changes to the rehearsal, and
/// lends it time ([`Rehearsal::step`], in replayed events). The driver hands each [`Decision`] to
/// the scheduler ([`super::Scheduler::set_behaviour`], [`super::Scheduler::set_order`]).
///
/// **A trial** replays all remembered arrivals, in parts, the newest first, and then a rush of the
/// minute before. After each part, all but the best candidates leave. All candidates get the same
/// arrivals, at their own rate and at 1.1 and 1.25 times that rate. So a setting that fails at a
/// slightly higher load is found out early. [`Decision`] tells what counts. Another behaviour is
/// taken only for a gain beyond its noise, or if it is better in a second trial as well.
#[derive(Debug)]
pub struct Rehearsal {
    past: Past,
    stage: Stage,
    consolidate: bool,
    /// The setting by the last decision.
    current: Setting,
    trial: Option<Box<Trial>>,
    contender: Option<Contender>,
    /// Trials in a row that changed nothing.
    confirmed: u32,
    decision: Option<Decision>,
    /// By model.
    rates: Vec<Rate>,
    /// The last change, while it may still turn out that fewer requests come because of it.
    watch: Option<Watch>,
    /// When the last request came or was answered.
    now: Time,
    trials: u64,
    /// Trials until a trial may be hopeful again.
    sober: u32,
    /// The value of `sober` after the next hopeful trial that changes the setting.
    soberer: u32,
}

impl Rehearsal {
    /// A rehearsal without models and devices. `consolidate`: few busy devices are better than
    /// short answers, as long as no request is lost. `seed` chooses the noise of executions.
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

    /// Sets the options of a model; `None`: the model is gone.
    pub fn set_model(&mut self, model: ModelId, options: Option<ModelOptions>) {
        let index = model.0 as usize;
        if self.stage.models.len() <= index {
            self.stage.models.resize(index + 1, None);
            self.stage.networks.resize(index + 1, Vec::new());
            self.stage.noise.resize(index + 1, ExecutionNoise::default());
            self.stage.loops.resize(index + 1, ClosedLoop::default());
            self.rates.resize(index + 1, Rate::default());
            self.current.behaviours.resize(index + 1, None);
        }
        if options.is_none() {
            self.past.forget(model);
            self.stage.networks[index] = Vec::new();
            self.stage.noise[index] = ExecutionNoise::default();
            self.stage.loops[index] = ClosedLoop::default();
            self.rates[index] = Rate::default();
            self.current.behaviours[index] = None;
        }
        self.stage.models[index] = options;
        self.changed();
    }

    /// Replaces a model's profiles, from the next trial on.
    pub fn set_profile(&mut self, model: ModelId, profiles: DeviceProfiles) {
        if let Some(options) = self.stage.models.get_mut(model.0 as usize).and_then(Option::as_mut) {
            options.profiles = profiles;
        }
    }

    /// Replaces a model's dispatch policy, from the next trial on.
    pub fn set_dispatch(&mut self, model: ModelId, dispatch: DispatchPolicy) {
        if let Some(options) = self.stage.models.get_mut(model.0 as usize).and_then(Option::as_mut) {
            options.dispatch = dispatch;
        }
    }

    /// Sets the number of devices of a kind.
    pub fn set_devices(&mut self, kind: DeviceKind, devices: u32) {
        let index = kind.0 as usize;
        if self.stage.devices.len() <= index {
            self.stage.devices.resize(index + 1, 0);
        }
        self.stage.devices[index] = devices;
        self.changed();
    }

    /// Sets the network budget, and how late wake-ups may come.
    pub fn set_delays(&mut self, network: NetworkBudget, wake_margin: Duration) {
        (self.stage.network, self.stage.wake_margin) = (network, wake_margin);
        self.changed();
    }

    /// Sets the networks of a model by the kind of device, in place of the budget of all models, from
    /// the next trial on. The model must be known.
    pub fn set_network(&mut self, model: ModelId, networks: Vec<(DeviceKind, NetworkBudget)>) {
        if let Some(known) = self.stage.networks.get_mut(model.0 as usize) {
            *known = networks;
        }
    }

    /// Sets whether few busy devices are better than short answers, as long as no request is lost.
    /// The next trial is the first that uses it.
    pub fn set_consolidate(&mut self, consolidate: bool) {
        self.consolidate = consolidate;
    }

    /// Sets how the order of candidates is chosen; at first the default policy.
    pub fn set_order(&mut self, policy: OrderPolicy) {
        (self.stage.tries_orders, self.current.order) = (policy == OrderPolicy::Rehearsed, policy.first());
        self.changed();
    }

    /// Notes that an execution of a model took `share` of its profile's time. The next trial is the
    /// first that uses it.
    pub fn execution(&mut self, model: ModelId, share: f64) {
        if let Some(noise) = self.stage.noise.get_mut(model.0 as usize) {
            noise.add(share);
        }
    }

    /// Notes that a request came, whether accepted or rejected.
    pub fn arrival(&mut self, arrival: PastArrival) {
        // The rehearsal is not told of lent queues: behaviours suit the requests within shares.
        if self.stage.models.get(arrival.model.0 as usize).is_none_or(Option::is_none) {
            return;
        }
        if let Some(closed) = self.stage.loops.get_mut(arrival.model.0 as usize) {
            closed.arrived(arrival.at);
        }
        if let Some(rate) = self.rates.get_mut(arrival.model.0 as usize) {
            rate.arrived(arrival.at);
        }
        self.now = self.now.max(arrival.at);
        self.past.push(arrival);
    }

    /// Notes that requests of a model were answered, well or (`lost`) by a rejection or a drop. The
    /// driver should report every answer, in the order of time with the arrivals. Then the
    /// rehearsal sees which clients wait for their answers, and replays them as closed loops.
    pub fn answered(&mut self, at: Time, model: ModelId, requests: u32, lost: bool) {
        if let Some(closed) = self.stage.loops.get_mut(model.0 as usize) {
            closed.answered(at, requests, lost);
        }
        self.now = self.now.max(at);
    }

    /// Notes that some answers were not reported, so that clients must be counted again.
    pub fn missed_answers(&mut self) {
        self.watch = None;
        self.stage.loops.iter_mut().for_each(|closed| *closed = ClosedLoop::default());
    }

    /// Goes on for at most `events` replayed events. Returns the number of events. Fewer than
    /// asked: a decision waits, or no trial may begin before more requests have come.
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

    /// The decision of the last trial.
    pub fn poll_decision(&mut self) -> Option<Decision> {
        self.decision.take()
    }

    /// Number of finished trials.
    pub fn trials(&self) -> u64 {
        self.trials
    }

    /// Goes back to the former setting if fewer requests come because answers come later.
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
            // Hold off hopeful trials: the next trial must first show the effect of this change.
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

    /// Begins a trial, if enough requests are new.
    fn begin(&mut self) -> bool {
        let (all, unseen) = (self.past.len(), self.past.unseen());
        // After a trial that changed nothing, the next trial takes more new requests.
        let share = 4usize.saturating_sub(self.confirmed.min(3) as usize) * 2;
        // Example: a change cuts the rate to a hundredth. The next trial comes after as long a
        // time, not after as many requests.
        let long = self.past.span_unseen().saturating_mul(share as u64) >= self.past.span();
        let enough = unseen >= FEWEST && (long || unseen >= all / share);
        if all < FEWEST || self.past.span() < SHORTEST || !enough {
            return false;
        }
        // Without a deadline no candidate waits and no request is given up: all behaviours are one.
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
