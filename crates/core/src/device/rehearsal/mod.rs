//! The rehearsal of device policies: `auto` replays the last seconds under other policies and
//! settings.

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

/// Nothing is tried before this many requests have come and this much time has passed.
const FEWEST: usize = 512;
const SHORTEST: Duration = Duration::from_millis(4_000);

/// Replays the last seconds under several device policies with their settings, and decides which
/// suits a model best.
///
/// A rehearsal is a pure state machine beside the models of a group of devices. A replay uses fresh
/// copies of the state machines that serve the models: a [`Scheduler`](crate::cluster::Scheduler)
/// for models under `exclusive`, and a [`DeviceScheduler`](super::DeviceScheduler) for each device.
/// The devices are emulated by measurements: profiles by batch size, latencies of segments, overlap
/// of two lanes, hand-over time, and noise. The driver reports arrivals and changes, and lends time
/// ([`Self::step`], in replayed events). The driver also brings the policy of a [`DeviceDecision`]
/// into service, and then reports it ([`Self::set_current`]).
///
/// **A trial** is of one model, while the other models stay as they are. It follows the rules of
/// [`Rehearsal`](crate::cluster::Rehearsal). All candidates get the same arrivals, at the real rate
/// and at 1.1 and 1.25 times this rate. The past is replayed in parts that double in length, after
/// each of which the worse half leaves. Three numbers count: the share of bad requests of the model
/// that fares worst, the share of all, and the mean time to the answer. Another policy wins only if
/// it is certainly better, or its answers come 10% sooner.
///
/// **The replay must match reality.** A policy changes only if the replay of the models' current
/// policies agrees with their requests' real outcome ([`Self::ended`]). The share of bad requests
/// and the mean time to the answer must match. Otherwise something matters that was not measured.
#[derive(Debug)]
pub struct DeviceRehearsal {
    past: Past,
    /// When the last request came.
    now: Time,
    /// The outcomes of as many requests as are remembered, under the models' current policies.
    real: VecDeque<End>,
    stage: Stage,
    trial: Option<Box<Trial>>,
    /// The model of the last trial.
    last: ModelId,
    /// The trials in a row that changed nothing.
    confirmed: u32,
    decision: Option<DeviceDecision>,
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug)]
struct End {
    /// The time to the answer; `None`: there was no answer.
    took: Option<Duration>,
    good: bool,
}

impl DeviceRehearsal {
    /// A rehearsal without models, on one device. `seed` chooses the noise of launches.
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

    /// Adds a model, under the policy `exclusive`. `None` removes the model.
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

    /// Sets a model's current policy. If it is no candidate, it cannot be replayed, and `exclusive`
    /// stands for it.
    pub fn set_current(&mut self, model: ModelId, current: &Candidate) {
        let Some(staged) = self.stage.models.get_mut(model.0 as usize).and_then(Option::as_mut) else { return };
        let found = staged.candidates.iter().position(|one| one.candidate == *current);
        staged.current = found.unwrap_or(0);
        self.changed();
    }

    /// Handles the loss of a model's policy against `exclusive` in reality ([`super::AutoGuard`]).
    /// The model goes back to `exclusive`. Nothing is tried for 8 seconds, twice as long after each
    /// further loss. The policy that lost is held off four times as long. So policies with wrong
    /// predictions are tried ever more rarely.
    pub fn set_lost(&mut self, now: Time, model: ModelId) {
        if let Some(staged) = self.stage.models.get_mut(model.0 as usize).and_then(Option::as_mut) {
            staged.hold_off.lose(now, staged.current);
            staged.current = 0;
        }
        self.changed();
    }

    /// Sets the number of devices, and the batches that the cluster's scheduler runs at once on
    /// each.
    pub fn set_devices(&mut self, devices: u32, at_once: u32) {
        (self.stage.devices, self.stage.at_once) = (devices, at_once);
        self.changed();
    }

    /// Sets how long before its last moment the cluster's scheduler starts a batch that waits for
    /// others.
    pub fn set_wake_margin(&mut self, margin: Duration) {
        self.stage.wake_margin = margin;
        self.changed();
    }

    /// Sets the behaviour of an adaptive model under `exclusive`, from the next trial on. `None`:
    /// the behaviour follows from the load of the moment.
    pub fn set_behaviour(&mut self, model: ModelId, behaviour: Option<Behaviour>) {
        if let Some(staged) = self.stage.models.get_mut(model.0 as usize).and_then(Option::as_mut) {
            staged.behaviour = behaviour;
        }
    }

    /// Handles a launch of a model that had its device for itself. Its latency was `share` times
    /// that of its profile, which counts from the next trial on.
    pub fn ran(&mut self, model: ModelId, share: f64) {
        if let Some(staged) = self.stage.models.get_mut(model.0 as usize).and_then(Option::as_mut) {
            staged.noise.add(share);
        }
    }

    /// Handles the arrival of a request, accepted or not.
    pub fn arrival(&mut self, arrival: PastArrival) {
        self.now = self.now.max(arrival.at);
        self.past.push(arrival);
    }

    /// Handles a gap: some arrivals and answers were not reported. Earlier outcomes are no longer
    /// compared with replays.
    pub fn missed(&mut self) {
        self.real.clear();
    }

    /// Handles the end of a request. `took` is the time to its answer (`None`: it was refused or
    /// given up). `good` tells whether it met its deadline. Requests whose clients left are not
    /// reported.
    pub fn ended(&mut self, took: Option<Duration>, good: bool) {
        while self.real.len() >= self.past.len().max(1) {
            self.real.pop_front();
        }
        self.real.push_back(End { took, good });
    }

    /// Replays at most `events` events, and returns their number. A smaller number means that
    /// nothing can be tried before more requests have come.
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

    /// Takes the decision of the last trial.
    pub fn poll_decision(&mut self) -> Option<DeviceDecision> {
        self.decision.take()
    }

    /// The share of bad requests, and the mean time to the answer in seconds.
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

    /// Begins a trial, if enough requests are new.
    fn begin(&mut self) -> bool {
        let (all, unseen) = (self.past.len(), self.past.unseen());
        // A model whose trials changed nothing waits longer for the next one.
        let share = 4usize.saturating_sub(self.confirmed.min(3) as usize);
        if all < FEWEST || self.real.len() < FEWEST || self.past.span() < SHORTEST || unseen < FEWEST.max(all / share) {
            return false;
        }
        let Some(model) = self.next_model() else { return false };
        let mut seen = self.past.seen();
        // Real outcomes are of recent requests, so only recent arrivals are replayed.
        let past = seen.arrivals.split_off(seen.rush);
        self.last = model;
        self.trial = Some(Box::new(Trial::new(past, self.stage.clone(), model, self.now)));
        true
    }

    /// The next model with several candidates that may be tried by now.
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
