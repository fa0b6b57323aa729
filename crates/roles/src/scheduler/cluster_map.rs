//! The leading scheduler's view of backends: their slots, their kinds and the batches on them.

use std::collections::{BTreeMap, BTreeSet};

use super::known_backend::{Backend, KindKey, SlotState, keys_of};
use super::rehearsed::RehearsedScheduler;
use super::seat_loads::Site;
use super::served_models::{ModelKey, NOBODY, ServedModels};
use crate::assignment::Assignment;
use crate::epoch::Epoch;
use crate::message::{BatchKey, Hello, NodeId, Offer, Running};
use downbeat_core::ids::{BatchId, DeviceId, DeviceKind, ModelId, RequestId};
use downbeat_core::time::{Duration, Time};

/// The most slots of one backend.
const MOST_SLOTS: usize = 4096;

/// A batch that the scheduler has sent.
#[derive(Debug)]
pub(super) struct InFlight {
    /// The backend that has the batch.
    pub backend: NodeId,
    slot: u32,
    device: DeviceId,
    /// The queue of the members.
    pub model: ModelId,
    /// The time that the batch takes by its profile.
    pub expected: Duration,
    /// The part of its time that is needed, from 0 to 1.
    needed: f64,
    /// The requests in the batch.
    pub members: Vec<RequestId>,
}

#[derive(Debug)]
struct Kind {
    key: KindKey,
    slots: u32,
}

/// The leading scheduler's view of all backends.
#[derive(Debug)]
pub(super) struct ClusterMap {
    epoch: Epoch,
    /// Whether the scheduler assigns models to backends.
    assigns: bool,
    backends: BTreeMap<NodeId, Backend>,
    joined: u64,
    kinds: Vec<Option<Kind>>,
    devices: BTreeMap<DeviceId, (NodeId, u32)>,
    batches: BTreeMap<BatchId, InFlight>,
    /// Whether any backend has seats.
    has_seats: bool,
    notes: Vec<String>,
}

impl ClusterMap {
    /// A map without backends, in this epoch. `assigns`: whether the scheduler assigns models to
    /// backends.
    pub fn new(epoch: Epoch, assigns: bool) -> Self {
        ClusterMap {
            epoch,
            assigns,
            backends: BTreeMap::new(),
            joined: 0,
            kinds: Vec::new(),
            devices: BTreeMap::new(),
            batches: BTreeMap::new(),
            has_seats: false,
            notes: Vec::new(),
        }
    }

    /// Adds a backend whose link is up.
    pub fn handle_up(&mut self, hello: &Hello) {
        self.joined += 1;
        self.backends.insert(hello.node, Backend::new(hello, self.joined));
    }

    /// Removes a backend whose link is lost. Returns its batches, and whether frontends must hear of a
    /// change of models.
    pub fn handle_lost(
        &mut self,
        now: Time,
        scheduler: &mut RehearsedScheduler,
        models: &mut ServedModels,
        node: NodeId,
    ) -> (Vec<InFlight>, bool) {
        let mut changed = false;
        if !self.backends.contains_key(&node) {
            return (Vec::new(), changed);
        }
        self.retire(now, scheduler, node);
        let lost: Vec<BatchId> =
            self.batches.iter().filter(|(_, batch)| batch.backend == node).map(|(id, _)| *id).collect();
        let batches = lost.into_iter().filter_map(|id| self.batches.remove(&id)).collect();
        if let Some(backend) = self.backends.remove(&node) {
            let mut keys = backend.offer.iter().flat_map(keys_of).collect();
            for kind in backend.slots.iter().filter_map(|slot| slot.kind) {
                self.leave_kind(kind, &mut keys);
            }
            // A backend that left without notice may come back, or another with its models. For
            // this reason these models stay known for a while.
            for key in keys.iter().filter(|_| backend.is_leaving) {
                if !self.may_have(key) {
                    changed |= models.remove(now, scheduler, key);
                }
            }
            changed |= self.settle(now, scheduler, models, &keys);
        }
        self.has_seats = self.backends.values().any(Backend::has_seats);
        (batches, changed)
    }

    /// Marks a backend as leaving. Returns true if it was not marked before.
    pub fn handle_leave(&mut self, node: NodeId) -> bool {
        self.backends.get_mut(&node).is_some_and(|backend| !std::mem::replace(&mut backend.is_leaving, true))
    }

    /// Plans no more batches on a backend. Returns true if batches were planned there before.
    pub fn let_go(&mut self, now: Time, scheduler: &mut RehearsedScheduler, node: NodeId) -> bool {
        let Some(backend) = self.backends.get_mut(&node) else { return false };
        let is_new = !std::mem::replace(&mut backend.is_let_go, true);
        self.retire(now, scheduler, node);
        is_new
    }

    /// Stops planning models on a backend that its new assignment takes away. Returns true if
    /// frontends must hear of a change of models.
    pub fn handle_assigned(
        &mut self,
        now: Time,
        scheduler: &mut RehearsedScheduler,
        models: &mut ServedModels,
        (node, assigned): (NodeId, &Assignment),
    ) -> bool {
        let withheld = self.backends.get_mut(&node).map(|backend| backend.withhold(assigned)).unwrap_or_default();
        !withheld.is_empty() && self.settle(now, scheduler, models, &withheld)
    }

    /// Whether any backend has a model, or could load it on an order.
    pub fn may_have(&self, key: &ModelKey) -> bool {
        let may =
            |backend: &Backend| backend.offers(key).next().is_some() || (self.assigns && backend.can_load(&key.0));
        self.backends.values().any(may)
    }

    /// Removes a backend's devices from the scheduler. Running batches go on.
    fn retire(&mut self, now: Time, scheduler: &mut RehearsedScheduler, node: NodeId) {
        let slots = self.backends.get(&node).map_or(0, |backend| backend.slots.len());
        for slot in 0..slots {
            self.remove_device(now, scheduler, node, slot);
        }
    }

    fn remove_device(&mut self, now: Time, scheduler: &mut RehearsedScheduler, node: NodeId, slot: usize) {
        let Some(state) = self.backends.get_mut(&node).and_then(|backend| backend.slots.get_mut(slot)) else { return };
        let Some(device) = state.device.take() else { return };
        scheduler.remove_device(now, device);
        self.devices.remove(&device);
    }

    /// Takes a backend's list of batches that it has under way.
    pub fn handle_under_way(
        &mut self,
        now: Time,
        scheduler: &mut RehearsedScheduler,
        node: NodeId,
        running: &[Running],
    ) {
        let ours: BTreeSet<BatchId> =
            self.batches.iter().filter(|(_, batch)| batch.backend == node).map(|(id, _)| *id).collect();
        let Some(backend) = self.backends.get_mut(&node) else { return };
        backend.is_known = true;
        for Running { batch, slot, .. } in running {
            let slot = *slot as usize;
            if slot >= MOST_SLOTS || (batch.epoch == self.epoch && ours.contains(&batch.batch)) {
                continue;
            }
            if backend.slots.len() <= slot {
                backend.slots.resize_with(slot + 1, SlotState::default);
            }
            backend.slots[slot].foreign.insert(*batch);
        }
        self.add_devices(now, scheduler, node);
    }

    /// Takes a backend's offer. Returns true if frontends must hear of a change of models.
    pub fn handle_offer(
        &mut self,
        now: Time,
        scheduler: &mut RehearsedScheduler,
        models: &mut ServedModels,
        node: NodeId,
        mut offer: Offer,
    ) -> bool {
        let Some(backend) = self.backends.get_mut(&node) else { return false };
        if offer.slots.len() > MOST_SLOTS {
            offer.slots.truncate(MOST_SLOTS);
            self.notes.push(format!("'{}' has more than {MOST_SLOTS} slots; the others are not used", backend.name));
        }
        let had: BTreeSet<ModelKey> = backend.offer.iter().flat_map(keys_of).collect();
        let has: BTreeSet<ModelKey> = keys_of(&offer).collect();
        backend.slots.resize_with(backend.slots.len().max(offer.slots.len()), SlotState::default);
        backend.set_offer(offer);
        self.has_seats = self.backends.values().any(Backend::has_seats);
        let mut changed = false;
        for key in had.difference(&has) {
            if !self.may_have(key) {
                changed |= models.remove(now, scheduler, key);
            }
        }
        changed | self.settle(now, scheduler, models, &had.union(&has).cloned().collect())
    }

    /// Makes the scheduler plan with the present offers of these models. Returns true if frontends
    /// must hear of a change.
    fn settle(
        &mut self,
        now: Time,
        scheduler: &mut RehearsedScheduler,
        models: &mut ServedModels,
        keys: &BTreeSet<ModelKey>,
    ) -> bool {
        let mut order: Vec<(u64, NodeId)> =
            self.backends.iter().map(|(node, backend)| (backend.joined, *node)).collect();
        order.sort_unstable();
        let order: Vec<NodeId> = order.into_iter().map(|(_, node)| node).collect();
        for key in keys {
            self.accept(models, &order, key);
        }
        let mut keys = keys.clone();
        for node in &order {
            self.place_kinds(now, scheduler, *node, &mut keys);
        }
        let mut changed = false;
        for key in &keys {
            let offers: Vec<_> = order
                .iter()
                .filter_map(|node| self.backends.get(node))
                .filter(|backend| backend.is_used(key))
                .flat_map(|backend| backend.offers(key).map(|offer| (offer, self.kinds_of(backend, key))))
                .collect();
            changed |= models.set(now, scheduler, key, &offers);
        }
        for node in order {
            self.add_devices(now, scheduler, node);
        }
        changed
    }

    /// Chooses the offers of a model that are used: all with the fingerprint in use. If no backend
    /// has that fingerprint any more, the fingerprint of the backend that came first is used.
    fn accept(&mut self, models: &ServedModels, order: &[NodeId], key: &ModelKey) {
        let offered = |node: &NodeId| Some(self.backends.get(node)?.offers(key).next()?.fingerprint.clone());
        let all: Vec<(NodeId, String)> = order.iter().filter_map(|node| Some((*node, offered(node)?))).collect();
        let used = models.fingerprint(key).filter(|used| all.iter().any(|(_, print)| print == used));
        let Some(used) = used.or(all.first().map(|(_, print)| print.as_str())).map(str::to_owned) else { return };
        for (node, print) in &all {
            let Some(backend) = self.backends.get_mut(node) else { continue };
            if *print == used {
                backend.refused.remove(key);
            } else if backend.refused.insert(key.clone()) {
                self.notes.push(format!(
                    "model '{}' version {} of '{}' is not used: its files or configuration differ from those of \
                     the backends before it; it is used once these are gone",
                    key.0, key.1, backend.name
                ));
            }
        }
    }

    /// Recomputes the kinds of a backend's slots.
    fn place_kinds(
        &mut self,
        now: Time,
        scheduler: &mut RehearsedScheduler,
        node: NodeId,
        keys: &mut BTreeSet<ModelKey>,
    ) {
        let Some(backend) = self.backends.get(&node) else { return };
        let wanted = backend.wanted_kinds();
        for (slot, wanted) in wanted.into_iter().enumerate() {
            let state = self.backends.get(&node).and_then(|backend| backend.slots.get(slot));
            let known = state.and_then(|state| state.kind);
            let is_same = match (&wanted, known.and_then(|kind| self.kinds.get(kind.0 as usize)?.as_ref())) {
                (Some(wanted), Some(kind)) => kind.key == *wanted,
                (None, None) => true,
                _ => false,
            };
            if is_same {
                continue;
            }
            self.retire_slot(now, scheduler, node, slot);
            if let Some(kind) = known {
                self.leave_kind(kind, keys);
            }
            let kind = wanted.and_then(|wanted| self.join_kind(wanted, keys));
            if let Some(state) = self.backends.get_mut(&node).and_then(|backend| backend.slots.get_mut(slot)) {
                state.kind = kind;
            }
        }
    }

    /// Removes a slot's device. The slot becomes another device once its running batches are done.
    fn retire_slot(&mut self, now: Time, scheduler: &mut RehearsedScheduler, node: NodeId, slot: usize) {
        let device = self.backends.get(&node).and_then(|backend| backend.slots.get(slot)?.device);
        self.remove_device(now, scheduler, node, slot);
        let Some(device) = device else { return };
        let running = self.batches.iter().filter(|(_, batch)| batch.device == device);
        let running: Vec<BatchKey> = running.map(|(id, _)| BatchKey { epoch: self.epoch, batch: *id }).collect();
        if let Some(state) = self.backends.get_mut(&node).and_then(|backend| backend.slots.get_mut(slot)) {
            state.foreign.extend(running);
        }
    }

    /// By slot: its kind, if the kind runs the model; otherwise `None`.
    fn kinds_of(&self, backend: &Backend, key: &ModelKey) -> Vec<Option<DeviceKind>> {
        let runs = |kind: &DeviceKind| {
            let kind = self.kinds.get(kind.0 as usize).and_then(Option::as_ref);
            kind.is_some_and(|kind| kind.key.models.contains(key))
        };
        backend.slots.iter().map(|slot| slot.kind.filter(runs)).collect()
    }

    /// Takes a slot out of a kind. If the kind has no slots left, its number becomes vacant, and
    /// its models join `keys` to be settled.
    fn leave_kind(&mut self, kind: DeviceKind, keys: &mut BTreeSet<ModelKey>) {
        let Some(place) = self.kinds.get_mut(kind.0 as usize) else { return };
        let Some(known) = place else { return };
        known.slots = known.slots.saturating_sub(1);
        if known.slots == 0 {
            keys.extend(std::mem::take(&mut known.key.models));
            *place = None;
        }
    }

    fn join_kind(&mut self, key: KindKey, keys: &mut BTreeSet<ModelKey>) -> Option<DeviceKind> {
        let known = self.kinds.iter().position(|kind| kind.as_ref().is_some_and(|kind| kind.key == key));
        let vacant = || self.kinds.iter().position(Option::is_none);
        let place = known.or_else(vacant).unwrap_or(self.kinds.len());
        if place >= NOBODY.0 as usize {
            self.notes.push(format!(
                "a slot of '{}' is not used: there are {} combinations of hardware and models already, the most that are \
                 told apart; have backends of one hardware serve the same models",
                key.hardware, NOBODY.0
            ));
            return None;
        }
        keys.extend(key.models.iter().cloned());
        match self.kinds.get_mut(place) {
            Some(Some(kind)) => kind.slots += 1,
            Some(vacant) => *vacant = Some(Kind { key, slots: 1 }),
            None => self.kinds.push(Some(Kind { key, slots: 1 })),
        }
        Some(DeviceKind(place as u32))
    }

    /// Adds the backend's slots that can be devices of the scheduler from now on.
    fn add_devices(&mut self, now: Time, scheduler: &mut RehearsedScheduler, node: NodeId) {
        let Some(backend) = self.backends.get_mut(&node) else { return };
        if !backend.is_known || backend.is_let_go {
            return;
        }
        let offered = backend.offer.as_ref().map(|offer| &*offer.slots).unwrap_or_default();
        for (slot, state) in (0..).zip(&mut backend.slots) {
            if let (Some(kind), None, true) = (state.kind, state.device, state.foreign.is_empty()) {
                let is_seat = offered.get(slot as usize).is_some_and(|slot| slot.is_seat);
                let device = if is_seat { scheduler.add_seat(now, kind) } else { scheduler.add_device(now, kind) };
                state.device = Some(device);
                self.devices.insert(device, (node, slot));
            }
        }
    }

    /// Whether any backend has seats.
    pub fn has_seats(&self) -> bool {
        self.has_seats
    }

    /// The backend's device that has this device of the scheduler, and whether the latter is a seat.
    /// `None`: the backend has no seats.
    pub fn site(&self, device: DeviceId) -> Option<(Site, bool)> {
        let (node, slot) = *self.devices.get(&device)?;
        let backend = self.backends.get(&node).filter(|backend| backend.has_seats())?;
        let slot = backend.offer.as_ref()?.slots.get(slot as usize)?;
        Some(((node, slot.device), slot.is_seat))
    }

    /// Tells the scheduler when a device with seats will be done with its work: the next request goes
    /// to the device that is done first.
    pub fn set_load(&self, scheduler: &mut RehearsedScheduler, (node, device): Site, until: Time) {
        let seats = self.backends.get(&node).into_iter().flat_map(|backend| backend.seats(device));
        seats.for_each(|seat| scheduler.set_load(seat, until));
    }

    /// Records that a batch of a queue is sent to a device, its expected time, and which part of that
    /// time is needed. Returns the backend and its slot.
    ///
    /// # Errors
    /// The members, if the device has left.
    pub fn handle_dispatch(
        &mut self,
        batch: BatchId,
        device: DeviceId,
        (model, expected, needed): (ModelId, Duration, f64),
        members: Vec<RequestId>,
    ) -> Result<(NodeId, u32), Vec<RequestId>> {
        let Some((backend, slot)) = self.devices.get(&device).copied() else { return Err(members) };
        self.batches.insert(batch, InFlight { backend, slot, device, model, expected, needed, members });
        Ok((backend, slot))
    }

    /// The members of a batch that was sent.
    pub fn members(&self, batch: BatchId) -> &[RequestId] {
        self.batches.get(&batch).map_or(&[], |batch| &batch.members)
    }

    /// A backend is done with a batch. Returns the batch, if this lead planned it.
    pub fn handle_completed(
        &mut self,
        now: Time,
        scheduler: &mut RehearsedScheduler,
        node: NodeId,
        key: BatchKey,
    ) -> Option<InFlight> {
        let batch =
            match key.epoch == self.epoch && self.batches.get(&key.batch).is_some_and(|batch| batch.backend == node) {
                true => self.batches.remove(&key.batch),
                false => None,
            };
        let backend = self.backends.get_mut(&node)?;
        for state in &mut backend.slots {
            state.foreign.remove(&key);
        }
        if let Some(batch) = &batch {
            let state = backend.slots.get(batch.slot as usize);
            if state.is_some_and(|state| state.device == Some(batch.device)) {
                scheduler.handle_completion(now, batch.device, key.batch);
            }
        }
        self.add_devices(now, scheduler, node);
        batch
    }

    /// A backend whose link is up, mutable.
    pub fn backend_mut(&mut self, node: NodeId) -> Option<&mut Backend> {
        self.backends.get_mut(&node)
    }

    /// Whether a backend has heard of the frontend at this place.
    pub fn has_met(&self, node: NodeId, frontend: u32) -> bool {
        self.backends.get(&node).is_some_and(|backend| backend.met.contains(&frontend))
    }

    /// All backends whose links are up.
    pub fn backends(&self) -> impl Iterator<Item = (NodeId, &Backend)> {
        self.backends.iter().map(|(node, backend)| (*node, backend))
    }

    /// Whether any backend whose link is up has not sent its offer.
    pub fn awaits_offer(&self) -> bool {
        self.backends.values().any(|backend| backend.offer.is_none())
    }

    /// Whether there are backends, and all of them have sent their offers.
    pub fn is_complete(&self) -> bool {
        !self.backends.is_empty() && !self.awaits_offer()
    }

    /// The number of devices of all backends that do not leave.
    pub fn devices(&self) -> u32 {
        let stays = self.backends.values().filter(|backend| !backend.is_leaving);
        stays.map(Backend::devices).fold(0, u32::saturating_add)
    }

    /// The device time of a batch of this lead that ran for `took`, and the part of that time that was
    /// needed.
    pub fn busy(&self, batch: BatchKey, took: Duration) -> Option<(Duration, f64)> {
        let sent = self.batches.get(&batch.batch).filter(|_| batch.epoch == self.epoch)?;
        Some((self.backends.get(&sent.backend)?.busy(sent.slot, took), sent.needed))
    }

    /// Forgets that backends heard of a queue or a frontend, whose place another one takes from now
    /// on.
    pub fn forget(&mut self, queue: Option<u32>, frontend: Option<u32>) {
        for backend in self.backends.values_mut() {
            queue.map(|place| backend.told.remove(&place));
            frontend.map(|place| backend.met.remove(&place));
        }
    }

    /// The next text to show to people.
    pub fn poll_note(&mut self) -> Option<String> {
        self.notes.pop()
    }
}
