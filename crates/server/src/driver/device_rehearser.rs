//! The rehearsal of device policies: its inputs and its results.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crossbeam_queue::ArrayQueue;
use downbeat_core::cluster::{Behaviour, PastArrival};
use downbeat_core::device::{Candidate, DeviceDecision, DeviceRehearsal};
use downbeat_core::{Duration, ModelId, Time};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::WAKE_MARGIN;
use super::arrival_rings::{ArrivalFeed, ArrivalRings, Event};
use super::rehearser::{MOST, RUNS};
use super::scheduler_status::{DevicePolicyStatus, DeviceRehearsalStatus};
use crate::auto_model::{AutoModel, DeviceSet};
use crate::clock::Clock;
use crate::metrics::RehearsalMetrics;
use crate::policy_report::DeviceTrialStatus;

/// The ends of requests and launches of models with the policy `auto`, on their way to the
/// rehearsal.
pub struct DeviceEvents {
    clock: Clock,
    arrivals: ArrivalRings,
    /// Times of launches, as shares of their profiles' times.
    runs: ArrayQueue<(ModelId, f64)>,
    /// The rehearsal's number of each version.
    numbers: Mutex<BTreeMap<(String, String), ModelId>>,
    generations: AtomicU32,
}

impl DeviceEvents {
    fn new(clock: Clock, rings: usize) -> Arc<Self> {
        Arc::new(DeviceEvents {
            clock,
            arrivals: ArrivalRings::new(rings, MOST),
            runs: ArrayQueue::new(RUNS),
            numbers: Mutex::default(),
            generations: AtomicU32::new(0),
        })
    }

    /// The rehearsal's number of a version, the same for each load, and the generation of this
    /// load.
    pub fn name(&self, model: &str, version: &str) -> (ModelId, u32) {
        let mut numbers = self.numbers.lock();
        let next = ModelId(numbers.len() as u32);
        let number = *numbers.entry((model.to_owned(), version.to_owned())).or_insert(next);
        (number, self.generations.fetch_add(1, Ordering::Relaxed))
    }

    /// Records that a request came.
    pub fn came(&self, arrival: PastArrival) {
        if self.arrivals.is_open() {
            self.arrivals.push(self.arrivals.spread(arrival.at), Event::Came(arrival));
        }
    }

    /// Records that a request ended, now.
    pub fn ended(&self, model: ModelId, generation: u32, took: Option<Duration>, good: bool) {
        if self.arrivals.is_open() {
            let at = self.clock.now();
            self.arrivals.push(self.arrivals.spread(at), Event::Ended { at, model, generation, took, good });
        }
    }

    /// Records that a launch took `share` of its profile's time.
    pub fn ran(&self, model: ModelId, share: f64) {
        if self.arrivals.is_open() {
            self.runs.force_push((model, share));
        }
    }
}

/// A better policy that a trial has found for a version.
pub struct Found {
    /// The version, as it was loaded at the trial.
    pub auto: Arc<AutoModel>,
    pub decision: DeviceDecision,
}

/// The inputs and the last results of the rehearsal of device policies.
pub struct DeviceRehearser {
    /// Whether policies are rehearsed.
    is_on: bool,
    pub events: Arc<DeviceEvents>,
    told: Mutex<Told>,
    /// Notified when a trial finds a better policy.
    finds: Notify,
}

#[derive(Default)]
struct Told {
    served: BTreeMap<ModelId, Served>,
    /// Changes that the rehearsal's thread has not read yet.
    changes: Vec<Change>,
    /// Better policies that the server has not taken up yet.
    found: Vec<Found>,
}

/// A version in service.
struct Served {
    auto: Arc<AutoModel>,
    trials: u64,
    changes: u64,
    unfaithful: u64,
    losses: u64,
    /// The last trial, and when it ended.
    last: Option<(Time, DeviceDecision)>,
}

enum Change {
    /// The version is in service. The id is its queue in the scheduler, if the scheduler makes its
    /// batches.
    Serves(Arc<AutoModel>, Option<ModelId>),
    Gone(ModelId),
    /// The version's policy has lost against `exclusive`.
    Lost(ModelId),
    /// The version stays as it was. The policy that should have replaced its own was refused.
    Stays(Arc<AutoModel>, Option<Candidate>),
    /// The scheduler has so many slots on each of these devices.
    Slots(DeviceSet, u32),
    /// The new behaviours of the scheduler's queues.
    Behaviours(Vec<(ModelId, Option<Behaviour>)>),
}

impl DeviceRehearser {
    /// A rehearser with so many rings. Without `on` it rehearses nothing.
    pub fn new(clock: Clock, rings: usize, on: bool) -> Self {
        DeviceRehearser {
            is_on: on,
            events: DeviceEvents::new(clock, rings),
            told: Mutex::default(),
            finds: Notify::new(),
        }
    }

    /// Sets the versions of a model that are in service. Each comes with its queue in the
    /// scheduler, if the scheduler makes its batches. `slots`: the scheduler's slots on each of
    /// some devices.
    pub fn serves(
        &self,
        model: &str,
        versions: Vec<(Arc<AutoModel>, Option<ModelId>)>,
        slots: impl Fn(&DeviceSet) -> u32,
    ) {
        let mut told = self.told.lock();
        let Told { served, changes, .. } = &mut *told;
        let is_there = |number: ModelId| versions.iter().any(|(auto, _)| auto.number == number);
        for (number, gone) in served.extract_if(.., |number, of| of.auto.name == model && !is_there(*number)) {
            tracing::debug!(model, version = %gone.auto.version, "its policies are rehearsed no more");
            changes.push(Change::Gone(number));
        }
        for (auto, queue) in versions {
            match served.get_mut(&auto.number) {
                Some(served) => served.auto = auto.clone(),
                None => {
                    let (trials, changes, unfaithful, losses, last) = Default::default();
                    let its = Served { auto: auto.clone(), trials, changes, unfaithful, losses, last };
                    served.insert(auto.number, its);
                }
            }
            changes.push(Change::Serves(auto, queue));
        }
        let on: BTreeSet<&DeviceSet> = served.values().map(|served| &served.auto.on).collect();
        changes.extend(on.into_iter().map(|on| Change::Slots(on.clone(), slots(on))));
        if !self.is_on {
            changes.clear();
        }
    }

    /// Records that a version's policy has lost against `exclusive`, with which the version is
    /// about to be loaded.
    pub fn lost(&self, auto: &AutoModel) {
        if let Some(served) = self.told.lock().served.get_mut(&auto.number) {
            served.losses += 1;
        }
        self.tell(Change::Lost(auto.number));
    }

    /// Records that a version stays as it was. `refused`: the policy that should have replaced its
    /// own.
    pub fn stays(&self, auto: &Arc<AutoModel>, refused: Option<&Candidate>) {
        self.tell(Change::Stays(auto.clone(), refused.cloned()));
    }

    /// Sets the new behaviours of the scheduler's queues.
    pub fn behave(&self, behaviours: Vec<(ModelId, Option<Behaviour>)>) {
        self.tell(Change::Behaviours(behaviours));
    }

    fn tell(&self, change: Change) {
        if self.is_on {
            self.told.lock().changes.push(change);
        }
    }

    /// Completes once a trial has found a better policy.
    pub async fn finds(&self) {
        self.finds.notified().await;
    }

    /// The better policies found since the last call. The caller takes them up.
    pub fn found(&self) -> Vec<Found> {
        std::mem::take(&mut self.told.lock().found)
    }

    /// The result of the last trial of a version's policies.
    pub fn last_trial(&self, number: ModelId) -> Option<DeviceTrialStatus> {
        let now = self.events.clock.now();
        self.told.lock().served.get(&number)?.last_trial(now)
    }

    /// The policies of all models with `auto`, and the trials so far.
    pub fn status(&self) -> DeviceRehearsalStatus {
        let (now, told) = (self.events.clock.now(), self.told.lock());
        let models = told.served.values().map(|served| served.status(now));
        let models: Vec<DevicePolicyStatus> = models.collect();
        let sum = |of: fn(&DevicePolicyStatus) -> u64| models.iter().map(of).sum();
        DeviceRehearsalStatus {
            trials: sum(|model| model.trials),
            changes: sum(|model| model.changes),
            unfaithful: sum(|model| model.unfaithful),
            losses: sum(|model| model.losses),
            models,
        }
    }

    /// Passes changes and events to the rehearsals.
    pub fn hear(&self, trials: &mut DeviceTrials, metrics: &RehearsalMetrics) {
        if !self.is_on {
            return;
        }
        let DeviceEvents { clock, arrivals, runs, .. } = &*self.events;
        let changes = std::mem::take(&mut self.told.lock().changes);
        // Like the arrivals' times, `now` leaves out the time that was skipped.
        let now = Time::ZERO + clock.now().since(Time::ZERO + trials.feed.skipped());
        changes.into_iter().for_each(|change| trials.change(now, change));
        std::iter::from_fn(|| runs.pop())
            .for_each(|(model, share)| trials.of(model, |group| group.rehearsal.ran(model, share)));
        let (lost, skipped) = (trials.feed.lost(), trials.feed.skipped());
        trials.feed.set_open(arrivals, trials.have_choice(), || clock.now());
        for event in trials.feed.take(arrivals, || clock.now()) {
            trials.happen(event);
        }
        if trials.feed.skipped() > skipped {
            trials.groups.values_mut().for_each(|group| group.rehearsal.missed());
        }
        metrics.arrivals_lost.inc_by(trials.feed.lost() - lost);
    }

    /// Rehearses for at most `events` replayed events. Returns how many were replayed.
    pub fn step(&self, trials: &mut DeviceTrials, events: u64, metrics: &RehearsalMetrics) -> u64 {
        let mut used = 0;
        for group in trials.groups.values_mut().filter(|group| group.changing.is_empty()) {
            used += group.rehearsal.step(events - used);
            if let Some(decision) = group.rehearsal.poll_decision() {
                self.say(group, decision, metrics);
            }
            if used >= events {
                break;
            }
        }
        used
    }

    /// Records the result of a trial.
    fn say(&self, group: &mut Group, decision: DeviceDecision, metrics: &RehearsalMetrics) {
        let number = decision.model;
        let Some((auto, _)) = group.models.get(&number) else { return };
        let (changed, faithful) = (decision.changed, decision.faithful);
        metrics.device_trials.inc();
        metrics.device_changes.inc_by(u64::from(changed));
        metrics.device_unfaithful.inc_by(u64::from(!faithful));
        tracing::debug!(model = %auto.name, ?decision, "its policies were tried");
        let mut told = self.told.lock();
        if let Some(served) = told.served.get_mut(&number) {
            served.trials += 1;
            served.changes += u64::from(changed);
            served.unfaithful += u64::from(!faithful);
            served.last = Some((self.events.clock.now(), decision.clone()));
        }
        if changed {
            told.found.push(Found { auto: auto.clone(), decision });
            drop(told);
            self.finds.notify_one();
            group.changing.insert(number);
        }
    }
}

impl Served {
    fn last_trial(&self, now: Time) -> Option<DeviceTrialStatus> {
        self.last.as_ref().map(|(at, decision)| DeviceTrialStatus::of(decision, now.since(*at)))
    }

    fn status(&self, now: Time) -> DevicePolicyStatus {
        let auto = &self.auto;
        let Served { trials, changes, unfaithful, losses, .. } = *self;
        DevicePolicyStatus {
            model: auto.name.clone(),
            version: auto.version.clone(),
            candidate: auto.chosen.candidate.clone(),
            candidates: auto.choice(),
            trials,
            changes,
            unfaithful,
            losses,
            last_trial: self.last_trial(now),
        }
    }
}

/// The rehearsals, one for each set of devices that models share.
#[derive(Default)]
pub struct DeviceTrials {
    feed: ArrivalFeed,
    groups: BTreeMap<DeviceSet, Group>,
}

/// Models on the same devices.
struct Group {
    rehearsal: DeviceRehearsal,
    slots: u32,
    /// Each model with its queue in the scheduler.
    models: BTreeMap<ModelId, (Arc<AutoModel>, Option<ModelId>)>,
    /// Models that are about to be loaded with another policy. Until then the group runs no trial.
    changing: BTreeSet<ModelId>,
}

impl Group {
    fn new() -> Self {
        let mut rehearsal = DeviceRehearsal::new(1);
        rehearsal.set_wake_margin(WAKE_MARGIN);
        let (slots, models, changing) = Default::default();
        Group { rehearsal, slots, models, changing }
    }

    fn remove(&mut self, model: ModelId) {
        self.changing.remove(&model);
        if self.models.remove(&model).is_some() {
            self.rehearsal.set_model(model, None);
        }
    }

    /// Puts a model into service.
    fn serve(&mut self, now: Time, auto: Arc<AutoModel>, queue: Option<ModelId>) {
        let number = auto.number;
        self.changing.remove(&number);
        let Some(rehearsed) = &auto.chosen.rehearsed else { return self.remove(number) };
        let before = self.models.get(&number).and_then(|(before, _)| before.chosen.rehearsed.as_ref());
        if !before.is_some_and(|before| Arc::ptr_eq(before, rehearsed)) {
            self.rehearsal.set_model(number, Some((**rehearsed).clone()));
        }
        self.rehearsal.set_behaviour(number, None);
        self.refuse(now, number, auto.chosen.refused.as_ref());
        self.rehearsal.set_current(number, &auto.chosen.candidate);
        self.models.insert(number, (auto, queue));
    }

    /// Records that a model could not have this policy.
    fn refuse(&mut self, now: Time, model: ModelId, refused: Option<&Candidate>) {
        if let Some(refused) = refused {
            self.rehearsal.set_current(model, refused);
            self.rehearsal.set_lost(now, model);
        }
    }
}

impl DeviceTrials {
    /// Whether any model may have several policies.
    fn have_choice(&self) -> bool {
        self.groups.values().any(|group| group.models.values().any(|(auto, _)| auto.choice() > 1))
    }

    /// Calls `with` for the group that has a model.
    fn of(&mut self, model: ModelId, with: impl FnOnce(&mut Group)) {
        if let Some(group) = self.groups.values_mut().find(|group| group.models.contains_key(&model)) {
            with(group);
        }
    }

    fn change(&mut self, now: Time, change: Change) {
        match change {
            Change::Serves(auto, queue) => {
                let others = self.groups.iter_mut().filter(|(on, _)| **on != auto.on);
                others.for_each(|(_, group)| group.remove(auto.number));
                self.groups.entry(auto.on.clone()).or_insert_with(Group::new).serve(now, auto, queue);
            }
            Change::Gone(model) => self.of(model, |group| group.remove(model)),
            Change::Lost(model) => self.of(model, |group| {
                group.rehearsal.set_lost(now, model);
                group.changing.insert(model);
            }),
            Change::Stays(auto, refused) => self.of(auto.number, |group| {
                group.changing.remove(&auto.number);
                group.refuse(now, auto.number, refused.as_ref());
                group.rehearsal.set_current(auto.number, &auto.chosen.candidate);
            }),
            Change::Slots(on, slots) => {
                if let Some(group) = self.groups.get_mut(&on).filter(|group| group.slots != slots) {
                    group.slots = slots;
                    group.rehearsal.set_devices(on.devices.len() as u32, slots);
                }
            }
            Change::Behaviours(behaviours) => {
                for group in self.groups.values_mut() {
                    for (number, (_, queue)) in &group.models {
                        let said = behaviours.iter().find(|(model, _)| *queue == Some(*model));
                        said.into_iter().for_each(|(_, said)| group.rehearsal.set_behaviour(*number, *said));
                    }
                }
            }
        }
        self.groups.retain(|_, group| !group.models.is_empty());
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Came(arrival) => self.of(arrival.model, |group| group.rehearsal.arrival(arrival)),
            Event::Ended { model, generation, took, good, .. } => self.of(model, |group| {
                if group.models.get(&model).is_some_and(|(auto, _)| auto.generation == generation) {
                    group.rehearsal.ended(took, good);
                }
            }),
            Event::Answered { .. } => {}
        }
    }
}
