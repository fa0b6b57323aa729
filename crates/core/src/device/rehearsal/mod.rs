//! The rehearsal of device policies: `auto` tries them, with their parameters, on the last seconds.

mod candidate;
mod emulated;
mod hold_off;
mod replay;
mod trial;

pub use candidate::{Candidate, RehearsedModel, Replayable};
use hold_off::HoldOff;
use replay::{Stage, StagedModel};
use trial::Trial;
pub use trial::{DeviceDecision, TriedPolicy};

use std::collections::VecDeque;

use crate::cluster::{Behaviour, ExecutionNoise, Past, PastArrival};
use crate::ids::ModelId;
use crate::time::{Duration, Time};

/// Before so many requests have come, and for so long, nothing is tried.
const FEWEST: usize = 512;
const SHORTEST: Duration = Duration::from_millis(4_000);

/// Tries device policies with their parameters on the last seconds, and says which suits a model best.
///
/// A pure state machine beside the models of a group of devices. A replay is what serves them, fresh: a [`Scheduler`](crate::cluster::Scheduler) for models under
/// `exclusive`, a [`DeviceScheduler`](super::DeviceScheduler) for each device with the models' policies, on devices that take what was measured (profiles by
/// batch size, of segments, what two lanes do together, what it takes to hand something over, and noise). The driver tells it what comes and what changes, lends it time
/// ([`Self::step`], in replayed events), and brings a model into service by the policy of a [`DeviceDecision`], which it says in turn
/// ([`Self::set_current`]).
///
/// **A trial** is of one model, the others as they are, and goes as one of [`Rehearsal`](crate::cluster::Rehearsal) does: the same arrivals for all
/// candidates, as they came and at 1.1 and 1.25 times their rate, in parts of the past that double in length, after each of which the worse half leaves. What counts
/// is the share of bad requests of the model that fares worst, of all, and the mean time to the answer; another policy is better only if that is
/// certain, or its answers come 10% sooner.
///
/// **What is replayed has to be what is.** A change is made only where the replay of what the models have comes to what became of their requests
/// ([`Self::ended`]): the share that was bad, and the mean time to the answer. Where it does not, something counts that was not measured.
#[derive(Debug)]
pub struct DeviceRehearsal {
    past: Past,
    /// When the last request came.
    now: Time,
    /// What became of as many requests as are remembered, under the policies that the models have.
    real: VecDeque<End>,
    stage: Stage,
    trial: Option<Box<Trial>>,
    /// The model that was tried last.
    last: ModelId,
    /// Trials in a row after which nothing changed.
    confirmed: u32,
    decision: Option<DeviceDecision>,
}

/// How a request ended.
#[derive(Clone, Copy, Debug)]
struct End {
    /// Until its answer; `None`: it had none.
    took: Option<Duration>,
    good: bool,
}

impl DeviceRehearsal {
    /// Without models, on one device. `seed` chooses the noise of launches.
    pub fn new(seed: u64) -> Self {
        DeviceRehearsal {
            past: Past::default(),
            now: Time::ZERO,
            real: VecDeque::new(),
            stage: Stage { models: Vec::new(), devices: 1, at_once: 1, wake_margin: Duration::ZERO, seed },
            trial: None,
            last: ModelId(0),
            confirmed: 0,
            decision: None,
        }
    }

    /// A model is there, under the policy `exclusive`, or (`None`) gone.
    pub fn set_model(&mut self, model: ModelId, comes: Option<RehearsedModel>) {
        let index = model.0 as usize;
        if self.stage.models.len() <= index {
            self.stage.models.resize(index + 1, None);
        }
        if comes.is_none() {
            self.past.forget(model);
        }
        let staged = |model: RehearsedModel| StagedModel {
            candidates: model.candidates(),
            model,
            noise: ExecutionNoise::default(),
            current: 0,
            behaviour: None,
            hold_off: HoldOff::default(),
        };
        self.stage.models[index] = comes.map(staged);
        self.changed();
    }

    /// A model has this policy now. One that is no candidate stands for `exclusive`, as it cannot be replayed.
    pub fn set_current(&mut self, model: ModelId, current: &Candidate) {
        let Some(staged) = self.stage.models.get_mut(model.0 as usize).and_then(Option::as_mut) else { return };
        let found = staged.candidates.iter().position(|one| one.candidate == *current);
        staged.current = found.unwrap_or(0);
        self.changed();
    }

    /// The policy of a model has lost against `exclusive` in reality ([`super::AutoGuard`]), to which it goes back. Nothing is tried for 8 seconds, twice as long after each
    /// further loss, and for four times as long not what has lost: so policies come and go ever more rarely where what is predicted of them is wrong.
    pub fn set_lost(&mut self, now: Time, model: ModelId) {
        if let Some(staged) = self.stage.models.get_mut(model.0 as usize).and_then(Option::as_mut) {
            staged.hold_off.lose(now, staged.current);
            staged.current = 0;
        }
        self.changed();
    }

    /// There are so many devices, and the cluster's scheduler has so many batches run at once on each.
    pub fn set_devices(&mut self, devices: u32, at_once: u32) {
        (self.stage.devices, self.stage.at_once) = (devices, at_once);
        self.changed();
    }

    /// How much before its last moment the cluster's scheduler starts a batch that waits for others.
    pub fn set_wake_margin(&mut self, margin: Duration) {
        self.stage.wake_margin = margin;
        self.changed();
    }

    /// What a model does under `exclusive`, where that is adaptive, from the next trial on; `None`: what follows from the load of the moment.
    pub fn set_behaviour(&mut self, model: ModelId, behaviour: Option<Behaviour>) {
        if let Some(staged) = self.stage.models.get_mut(model.0 as usize).and_then(Option::as_mut) {
            staged.behaviour = behaviour;
        }
    }

    /// A launch of a model that had its device for itself took `share` of what its profile says. It counts from the next trial on.
    pub fn ran(&mut self, model: ModelId, share: f64) {
        if let Some(staged) = self.stage.models.get_mut(model.0 as usize).and_then(Option::as_mut) {
            staged.noise.add(share);
        }
    }

    /// A request came, accepted or not.
    pub fn arrival(&mut self, arrival: PastArrival) {
        self.now = self.now.max(arrival.at);
        self.past.push(arrival);
    }

    /// Requests came of which nobody knows, and answers went: what became of those before is not compared with what comes.
    pub fn missed(&mut self) {
        self.real.clear();
    }

    /// A request ended: `took` so long to its answer (`None`: it was refused or given up), by its deadline (`good`) or not. Of one whose client left
    /// nothing is said.
    pub fn ended(&mut self, took: Option<Duration>, good: bool) {
        while self.real.len() >= self.past.len().max(1) {
            self.real.pop_front();
        }
        self.real.push_back(End { took, good });
    }

    /// Goes on for at most so many replayed events; how many there were. Fewer: there is nothing to be tried before more has come.
    pub fn step(&mut self, events: u64) -> u64 {
        let mut used = 0;
        while used < events {
            if self.trial.is_none() && !self.begin() {
                break;
            }
            let Some(trial) = &mut self.trial else { break };
            used += trial.step(events - used);
            if let Some(mut decision) = trial.poll_decision() {
                decision.check(self.real());
                self.trial = None;
                self.confirmed = if decision.changed { 0 } else { self.confirmed + 1 };
                self.decision = Some(decision);
            }
        }
        used
    }

    /// What the last trial came to.
    pub fn poll_decision(&mut self) -> Option<DeviceDecision> {
        self.decision.take()
    }

    /// Share of requests that were bad, and mean time to the answer, seconds.
    fn real(&self) -> (f64, f64) {
        let bad = self.real.iter().filter(|end| !end.good).count() as f64 / self.real.len().max(1) as f64;
        let took: Vec<f64> = self.real.iter().filter_map(|end| Some(end.took?.as_secs_f64())).collect();
        (bad, took.iter().sum::<f64>() / took.len().max(1) as f64)
    }

    fn changed(&mut self) {
        self.real.clear();
        self.trial = None;
        self.confirmed = 0;
    }

    /// Begins a trial, if enough is new.
    fn begin(&mut self) -> bool {
        let (all, unseen) = (self.past.len(), self.past.unseen());
        // A trial that changed nothing is not worth much the next time.
        let share = 4usize.saturating_sub(self.confirmed.min(3) as usize);
        if all < FEWEST || self.real.len() < FEWEST || self.past.span() < SHORTEST || unseen < FEWEST.max(all / share) {
            return false;
        }
        let Some(model) = self.next_model() else { return false };
        let mut seen = self.past.seen();
        // What is compared with what was real is what came lately.
        let past = seen.arrivals.split_off(seen.rush);
        self.last = model;
        self.trial = Some(Box::new(Trial::new(past, self.stage.clone(), model, self.now)));
        true
    }

    /// The next model that may have several policies by now.
    fn next_model(&self) -> Option<ModelId> {
        let count = self.stage.models.len() as u32;
        let after = (1..=count).map(|step| (self.last.0 + step) % count);
        let may = |number: &u32| {
            let staged = self.stage.models[*number as usize].as_ref();
            staged.is_some_and(|staged| staged.candidates.len() > 1 && staged.hold_off.is_over(self.now))
        };
        after.filter(may).map(ModelId).next()
    }
}
