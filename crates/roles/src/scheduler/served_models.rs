//! The models that the leading scheduler serves, and the queues of each.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::budgets::{Budgets, Measured, Planned, are_near, budgets, cost, fitting, least};
use super::orphans::Orphans;
use super::rehearsed::RehearsedScheduler;
use crate::delay::Least;
use crate::message::{OfferedModel, QueueKey, ServedModel};
use downbeat_core::cluster::{ModelOptions, NetworkBudget, Reject};
use downbeat_core::device_profiles::DeviceProfiles;
use downbeat_core::ids::{DeviceKind, ModelId};
use downbeat_core::profile::LatencyProfile;
use downbeat_core::shape_guess::{guessed_profile, nearest_shape};
use downbeat_core::time::{Duration, Time};

/// The most queues of one model. Beyond them, a queue unused for [`FORGOTTEN_AFTER`] must make
/// room.
const MOST_SHAPES: u32 = 1024;
/// The most queues of all models.
const MOST_QUEUES: usize = 1 << 14;
/// A queue unused for this long may be forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_millis(60_000);
/// How long the time budgets of a queue's requests count.
const LEFT_FOR: Duration = Duration::from_millis(1_000);

/// The device kind of models that no device runs. Such a model keeps its last profile for this
/// kind, so that its waiting requests are still judged.
pub(super) const NOBODY: DeviceKind = DeviceKind::LARGEST;

/// Name and version.
pub(super) type ModelKey = (String, u64);

/// The model of a queue.
fn model_key(queue: &QueueKey) -> ModelKey {
    (queue.model.clone(), queue.version)
}

/// A shape, and its profile on each kind that has one.
type ShapeProfiles = (Vec<i64>, Vec<(DeviceKind, LatencyProfile)>);

/// An offered model, and the kinds of devices that run it.
#[derive(Debug)]
struct Served {
    /// The first backend's offer, without profiles.
    offered: OfferedModel,
    /// By shape: its profile on each kind.
    shapes: Vec<ShapeProfiles>,
    queues: u32,
    /// The network budgets of the model's queues.
    budgets: Budgets,
}

#[derive(Debug)]
struct Queue {
    key: Arc<QueueKey>,
    /// The queue's model in the scheduler; `None`: not offered, or no request yet.
    model: Option<ModelId>,
    /// The time budget of the first request, for guessed profiles.
    slo: Option<Duration>,
    used: Time,
    /// The profiles of the queue's model, as the scheduler has them.
    profiles: Option<DeviceProfiles>,
    /// The longest time until the deadline of a request that came lately.
    left: Least<Reverse<Duration>>,
    /// The network budgets that the queue is planned with.
    planned: Planned,
}

impl Queue {
    /// The least time that a request of `size` items runs.
    fn run_time(&self, size: u32) -> Duration {
        let profiles = self.profiles.iter().flat_map(|profiles| profiles.iter());
        profiles.map(|(_, profile)| profile.latency(size)).min().unwrap_or_default()
    }

    /// The budgets to plan the queue with. Messages may take half of the time that its requests
    /// have besides their run, unless fresh measurements say more.
    fn fitting(&self, budgets: &Budgets, left: Option<Duration>) -> Planned {
        let room = left.map_or(Duration::MAX, |left| left.saturating_sub(self.run_time(1)));
        fitting(budgets, Duration::from_nanos(room.as_nanos() / 2))
    }
}

/// Why a request has no queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NoQueue {
    /// No backend offers the request's model.
    Unknown,
    /// The scheduler has too many queues.
    Full,
}

/// The offered models, and their queues. The place of a forgotten queue goes to another queue.
#[derive(Debug)]
pub(super) struct ServedModels {
    models: BTreeMap<ModelKey, Served>,
    queues: Vec<Option<Queue>>,
    by_key: BTreeMap<Arc<QueueKey>, u32>,
    /// By [`ModelId`]: the place of its queue.
    by_model: Vec<u32>,
    orphans: Orphans,
}

impl ServedModels {
    /// No models. `lost_after`: the silence after which a peer is lost.
    pub fn new(lost_after: Duration) -> Self {
        ServedModels {
            models: BTreeMap::new(),
            queues: Vec::new(),
            by_key: BTreeMap::new(),
            by_model: Vec::new(),
            orphans: Orphans::new(lost_after),
        }
    }

    /// The models, for frontends.
    pub fn list(&self) -> Vec<ServedModel> {
        let model = |(key, served): (&ModelKey, &Served)| ServedModel {
            model: key.0.clone(),
            version: key.1,
            definition: served.offered.definition.clone(),
            may_repeat: served.offered.may_repeat,
        };
        self.models.iter().map(model).collect()
    }

    /// The fingerprint of the model in use; `None`: the model is not offered.
    pub fn fingerprint(&self, key: &ModelKey) -> Option<&str> {
        Some(&self.models.get(key)?.offered.fingerprint)
    }

    /// Sets each model's network budgets from the present delays of the backends that have the
    /// model.
    pub fn set_budgets(&mut self, now: Time, scheduler: &mut RehearsedScheduler, backends: &[Measured]) {
        for served in self.models.values_mut() {
            let budgets = budgets(backends, &served.kinds(), served.offered.item_bytes);
            // A model without a backend keeps its last budgets.
            if !budgets.is_empty() {
                served.budgets = budgets;
            }
        }
        for queue in self.queues.iter_mut().flatten() {
            let Some(model) = queue.model else { continue };
            let Some(served) = self.models.get(&model_key(&queue.key)) else { continue };
            let planned = queue.fitting(&served.budgets, queue.left.get().map(|Reverse(left)| left));
            if !are_near(&planned, &queue.planned) {
                scheduler.set_model_network(now, model, &planned);
                queue.planned = planned;
            }
        }
    }

    /// Handles a request that the scheduler refuses for want of time. Fresh measurements of the
    /// network may allow the request. Its queue is then planned with lower budgets from now on, and
    /// the caller hands the request in again.
    ///
    /// # Errors
    /// If the refusal is right, perhaps with a better reason.
    pub fn relent(
        &mut self,
        now: Time,
        scheduler: &mut RehearsedScheduler,
        model: ModelId,
        (size, left): (u32, Duration),
    ) -> Result<(), Option<Reject>> {
        let place = self.by_model.get(model.0 as usize).ok_or(None)?;
        let Some(Some(queue)) = self.queues.get_mut(*place as usize) else { return Err(None) };
        if cost(&queue.planned, size) == Duration::ZERO {
            return Err(None);
        }
        let served = self.models.get(&model_key(&queue.key)).ok_or(None)?;
        let needed = queue.run_time(size);
        let network = cost(&least(&served.budgets), size);
        if needed > left {
            return Err(Some(Reject::DeadlineImpossible { needed, allowed: left }));
        }
        if needed + network > left {
            return Err(Some(Reject::NetworkTooSlow { network, needed, allowed: left }));
        }
        if needed + cost(&queue.planned, size) > left {
            queue.planned = queue.fitting(&served.budgets, Some(left));
            if needed + cost(&queue.planned, size) > left {
                // One item leaves more time for the network than a whole request does.
                queue.planned = least(&served.budgets);
            }
            scheduler.set_model_network(now, model, &queue.planned);
        }
        Ok(())
    }

    /// The network budgets of each model on each kind of device.
    pub fn budgets(&self) -> impl Iterator<Item = (&ModelKey, (DeviceKind, NetworkBudget))> {
        self.models
            .iter()
            .flat_map(|(key, served)| served.budgets.iter().map(move |budget| (key, (budget.kind, budget.high))))
    }

    /// Seconds of device time for an item of a model in its largest batch, on the fastest device. A
    /// model without an offer gets the mean of the others.
    pub fn least_seconds(&self, name: &str) -> f64 {
        let seconds = |served: &Served| {
            let profiles = served.shapes.iter().flat_map(|(_, kinds)| kinds).map(|(_, profile)| profile);
            let of = |profile: &LatencyProfile| {
                profile.latency(profile.max_batch()).as_secs_f64() / f64::from(profile.max_batch().max(1))
            };
            profiles.map(of).reduce(f64::min)
        };
        let of_name = self.models.iter().filter(|((model, _), _)| model == name);
        let own = of_name.filter_map(|(_, served)| seconds(served)).reduce(f64::max);
        own.unwrap_or_else(|| {
            let all: Vec<f64> = self.models.values().filter_map(seconds).collect();
            if all.is_empty() { 1.0 } else { all.iter().sum::<f64>() / all.len() as f64 }
        })
    }

    /// The place of a queue, which gets a place if it has none. Also returns the place of a queue
    /// that was forgotten to make room. `None`: there are too many queues.
    pub fn place(
        &mut self,
        now: Time,
        scheduler: &mut RehearsedScheduler,
        key: &Arc<QueueKey>,
    ) -> Option<(u32, Option<u32>)> {
        if let Some(place) = self.by_key.get(key) {
            return Some((*place, None));
        }
        let forgotten = if self.queues.len() < MOST_QUEUES { None } else { self.forget(now, scheduler, None) };
        let place = match forgotten {
            Some(place) => place,
            None if self.queues.len() < MOST_QUEUES => {
                self.queues.push(None);
                self.queues.len() as u32 - 1
            }
            None => return None,
        };
        if let Some(room) = self.queues.get_mut(place as usize) {
            let (left, planned) = (Least::new(LEFT_FOR, now), Planned::new());
            *room = Some(Queue { key: key.clone(), model: None, slo: None, used: now, profiles: None, left, planned });
        }
        self.by_key.insert(key.clone(), place);
        Some((place, forgotten))
    }

    /// The longest time that a batch of the queue at a place is planned to take to its backend, with
    /// the backend's claims.
    pub fn control(&self, place: u32) -> Duration {
        let queue = self.queues.get(place as usize).and_then(Option::as_ref);
        let budgets = queue.iter().flat_map(|queue| &queue.planned);
        budgets.map(|(_, budget)| budget.control).max().unwrap_or_default()
    }

    /// Makes room: forgets an unused queue, of the model `of` if given. Returns its place.
    fn forget(&mut self, now: Time, scheduler: &mut RehearsedScheduler, of: Option<(&str, u64)>) -> Option<u32> {
        let is_unused = |queue: &Queue| {
            now.since(queue.used) >= FORGOTTEN_AFTER
                && of.is_none_or(|of| (queue.key.model.as_str(), queue.key.version) == of && queue.model.is_some())
                && queue.model.is_none_or(|model| scheduler.queued(model) == 0)
        };
        let unused = (0u32..).zip(&self.queues).filter_map(|(place, queue)| Some((queue.as_ref()?, place)));
        let (_, place) =
            unused.filter(|(queue, _)| is_unused(queue)).map(|(queue, place)| (queue.used, place)).min()?;
        self.close(now, scheduler, place);
        if of.is_none()
            && let Some(queue) = self.queues.get_mut(place as usize).and_then(Option::take)
        {
            self.by_key.remove(&queue.key);
        }
        Some(place)
    }

    /// Takes a queue out of the scheduler.
    fn close(&mut self, now: Time, scheduler: &mut RehearsedScheduler, place: u32) {
        let Some(Some(queue)) = self.queues.get_mut(place as usize) else { return };
        let Some(model) = queue.model.take() else { return };
        scheduler.remove_model(now, model);
        if let Some(served) = self.models.get_mut(&(queue.key.model.clone(), queue.key.version)) {
            served.queues = served.queues.saturating_sub(1);
        }
    }

    /// The scheduler's model of the queue at a place, for a request with `left` until its deadline.
    ///
    /// # Errors
    /// If no backend offers the request's model, or the model has too many queues.
    pub fn model_of(
        &mut self,
        now: Time,
        scheduler: &mut RehearsedScheduler,
        place: u32,
        left: Duration,
    ) -> Result<ModelId, NoQueue> {
        let Some(Some(queue)) = self.queues.get_mut(place as usize) else { return Err(NoQueue::Unknown) };
        queue.used = now;
        if left < Duration::MAX {
            queue.left.record(now, Reverse(left));
        }
        match queue.model {
            Some(model) => Ok(model),
            None => self.open(now, scheduler, place, left),
        }
    }

    #[cold]
    fn open(
        &mut self,
        now: Time,
        scheduler: &mut RehearsedScheduler,
        place: u32,
        left: Duration,
    ) -> Result<ModelId, NoQueue> {
        let Some(Some(queue)) = self.queues.get_mut(place as usize) else { return Err(NoQueue::Unknown) };
        let key = queue.key.clone();
        queue.slo.get_or_insert(left);
        let slo = queue.slo.filter(|slo| *slo < Duration::MAX && *slo > Duration::ZERO);
        let served = self.models.get(&(key.model.clone(), key.version)).ok_or(NoQueue::Unknown)?;
        if served.queues >= MOST_SHAPES && self.forget(now, scheduler, Some((&key.model, key.version))).is_none() {
            return Err(NoQueue::Full);
        }
        let served = self.models.get_mut(&(key.model.clone(), key.version)).ok_or(NoQueue::Unknown)?;
        let profiles = served.profiles(&key.shape, slo).ok_or(NoQueue::Unknown)?;
        served.queues += 1;
        let offered = &served.offered;
        let options = ModelOptions {
            profiles: profiles.clone(),
            max_batch: offered.max_batch,
            drop: offered.drop,
            dispatch: offered.dispatch.clone(),
            max_in_flight: u32::MAX,
            shares_limit: None,
            max_wait: offered.max_wait,
            levels: offered.levels.clone(),
        };
        let model = scheduler.add_model(now, &key.model, options);
        if let Some(Some(queue)) = self.queues.get_mut(place as usize) {
            (queue.model, queue.profiles) = (Some(model), Some(profiles));
            queue.planned = queue.fitting(&served.budgets, queue.slo);
            scheduler.set_model_network(now, model, &queue.planned);
        }
        self.by_model.resize(self.by_model.len().max(model.0 as usize + 1), u32::MAX);
        self.by_model[model.0 as usize] = place;
        Ok(model)
    }

    /// The queue that a model of the scheduler stands for, and its place.
    pub fn queue_of(&self, model: ModelId) -> Option<(u32, &Arc<QueueKey>)> {
        let place = *self.by_model.get(model.0 as usize)?;
        Some((place, &self.queues.get(place as usize)?.as_ref()?.key))
    }

    /// Removes a model that no backend serves any more. The scheduler drops its queued requests.
    /// Returns whether the model was known.
    pub fn remove(&mut self, now: Time, scheduler: &mut RehearsedScheduler, key: &ModelKey) -> bool {
        let is_known = self.models.contains_key(key);
        self.close_all(now, scheduler, key);
        self.models.remove(key);
        self.orphans.remove(key);
        is_known
    }

    /// Gives up models that have had no backend for too long. `may_come`: whether a connected
    /// backend could load the model. Returns true if frontends must learn of a change.
    pub fn give_up(
        &mut self,
        now: Time,
        scheduler: &mut RehearsedScheduler,
        may_come: impl Fn(&ModelKey) -> bool,
    ) -> bool {
        let mut changed = false;
        while let Some(key) = self.orphans.pop(now, &may_come) {
            changed |= self.remove(now, scheduler, &key);
        }
        changed
    }

    /// When [`ServedModels::give_up`] next has something to do.
    pub fn gives_up_at(&self) -> Time {
        self.orphans.next()
    }

    fn close_all(&mut self, now: Time, scheduler: &mut RehearsedScheduler, key: &ModelKey) {
        let places: Vec<u32> = self.places_of(key).collect();
        for place in places {
            self.close(now, scheduler, place);
        }
    }

    fn places_of<'a>(&'a self, key: &'a ModelKey) -> impl Iterator<Item = u32> + 'a {
        let first = QueueKey { model: key.0.clone(), version: key.1, shape: Vec::new() };
        let of = move |(queue, _): &(&Arc<QueueKey>, &u32)| queue.model == key.0 && queue.version == key.1;
        self.by_key.range(first..).take_while(of).map(|(_, place)| *place)
    }

    /// Replaces the offers of a model: one for each backend that serves it, with the device kind of
    /// each slot. The first offer defines the model. A slot with `None` does not run it. Returns
    /// true if frontends must learn of a change.
    pub fn set(
        &mut self,
        now: Time,
        scheduler: &mut RehearsedScheduler,
        key: &ModelKey,
        offers: &[(&OfferedModel, Vec<Option<DeviceKind>>)],
    ) -> bool {
        let Some((first, _)) = offers.first() else {
            self.set_idle(now, scheduler, key);
            return false;
        };
        self.orphans.remove(key);
        let offered = OfferedModel { profiles: Vec::new(), shape: Vec::new(), ..(*first).clone() };
        let mut shapes = merged(offers);
        for (shape, kinds) in &mut shapes {
            let any = || {
                offers.iter().filter(|(offer, _)| offer.shape == *shape).find_map(|(offer, _)| offer.profiles.first())
            };
            if kinds.is_empty()
                && let Some((_, profile)) = any()
            {
                kinds.push((NOBODY, profile.clone()));
            }
        }
        let known = self.models.get_mut(key);
        let is_new = known.as_ref().is_none_or(|known| known.offered.definition != offered.definition)
            || known.as_ref().is_some_and(|known| known.offered.may_repeat != offered.may_repeat);
        match known {
            Some(known) if known.offered == offered => {
                if known.shapes == shapes {
                    return false;
                }
                known.shapes = shapes;
                self.refresh(now, scheduler, key);
            }
            known => {
                // The settings changed. The model's queues begin anew, and frontends hand in the
                // waiting requests again.
                let (queues, budgets) =
                    known.map_or((0, Budgets::new()), |known| (known.queues, known.budgets.clone()));
                self.models.insert(key.clone(), Served { offered, shapes, queues, budgets });
                self.close_all(now, scheduler, key);
            }
        }
        is_new
    }

    /// Keeps a model that no connected backend has. Its requests go on waiting for a while.
    fn set_idle(&mut self, now: Time, scheduler: &mut RehearsedScheduler, key: &ModelKey) {
        let Some(served) = self.models.get_mut(key) else { return };
        self.orphans.insert(now, key);
        for (_, kinds) in &mut served.shapes {
            kinds.truncate(1);
            if let Some((kind, _)) = kinds.first_mut() {
                *kind = NOBODY;
            }
        }
        self.refresh(now, scheduler, key);
    }

    /// Gives the scheduler the present profiles of a model's queues.
    fn refresh(&mut self, now: Time, scheduler: &mut RehearsedScheduler, key: &ModelKey) {
        let Some(served) = self.models.get(key) else { return };
        for place in self.places_of(key).collect::<Vec<_>>() {
            let Some(Some(queue)) = self.queues.get_mut(place as usize) else { continue };
            let Some(model) = queue.model else { continue };
            if let Some(profiles) = served.profiles(&queue.key.shape, queue.slo.filter(|slo| *slo < Duration::MAX)) {
                scheduler.set_profile(now, model, profiles.clone());
                queue.profiles = Some(profiles);
            }
        }
    }
}

impl Served {
    /// The kinds of devices that run the model.
    fn kinds(&self) -> BTreeSet<DeviceKind> {
        self.shapes.iter().flat_map(|(_, kinds)| kinds.iter().map(|(kind, _)| *kind)).collect()
    }

    /// The profiles for a shape: as offered, or guessed from the most similar offered shape.
    /// `None`: no device runs the model.
    fn profiles(&self, shape: &[i64], slo: Option<Duration>) -> Option<DeviceProfiles> {
        let known = self.shapes.iter().filter(|(_, kinds)| !kinds.is_empty());
        let exact = known.clone().find(|(known, _)| known == shape);
        let (kinds, scale) = match exact {
            Some((_, kinds)) => (kinds, None),
            None => {
                let (kinds, scale) = nearest_shape(known.map(|(shape, kinds)| (shape.as_slice(), kinds)), shape)?;
                (kinds, Some(scale))
            }
        };
        let profile = |profile: &LatencyProfile| match scale {
            None => profile.clone(),
            Some(scale) => guessed_profile(profile, scale, slo),
        };
        DeviceProfiles::by_kind(kinds.iter().map(|(kind, known)| (*kind, profile(known)))).ok()
    }
}

/// The profiles of all offers by shape, then by kind. Where two slots of a kind differ, the slower
/// profile counts.
fn merged(offers: &[(&OfferedModel, Vec<Option<DeviceKind>>)]) -> Vec<ShapeProfiles> {
    let mut shapes: BTreeMap<&[i64], BTreeMap<DeviceKind, LatencyProfile>> = BTreeMap::new();
    for (offer, kinds) in offers {
        let of_shape = shapes.entry(&offer.shape).or_default();
        for (slot, profile) in &offer.profiles {
            let Some(Some(kind)) = kinds.get(*slot as usize) else { continue };
            match of_shape.get_mut(kind) {
                None => drop(of_shape.insert(*kind, profile.clone())),
                Some(known) if known == profile => {}
                Some(known) => *known = slower(known, profile),
            }
        }
    }
    shapes.into_iter().map(|(shape, kinds)| (shape.to_vec(), kinds.into_iter().collect())).collect()
}

fn slower(a: &LatencyProfile, b: &LatencyProfile) -> LatencyProfile {
    let sizes = a.max_batch().max(b.max_batch());
    let table = (1..=sizes).map(|size| a.latency(size).max(b.latency(size))).collect();
    // The table is positive and not falling, since both profiles are.
    let slower = LatencyProfile::from_table(table).unwrap_or_else(|_| a.clone());
    match a.known().into_iter().chain(b.known()).min() {
        Some(known) => slower.learned(known),
        None => slower,
    }
}
