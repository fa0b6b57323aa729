//! The leading scheduler's view of one backend.

use std::collections::{BTreeMap, BTreeSet};

use super::assigner::BackendView;
use super::served_models::ModelKey;
use crate::assignment::{Assignment, Stamp};
use crate::message::{BatchKey, Delays, Hello, NodeId, Offer, OfferedModel, Slot};
use downbeat_core::ids::{DeviceId, DeviceKind};
use downbeat_core::time::Duration;

/// A slot of a backend. The slot is a device of the scheduler only while no foreign batch runs on
/// it.
#[derive(Debug, Default)]
pub(super) struct SlotState {
    pub kind: Option<DeviceKind>,
    pub device: Option<DeviceId>,
    /// Foreign batches on the slot: batches of other epochs, and batches of an earlier device of
    /// the slot.
    pub foreign: BTreeSet<BatchKey>,
}

/// A backend whose link is up.
#[derive(Debug)]
pub(super) struct Backend {
    pub name: String,
    /// The order in which backends came.
    pub joined: u64,
    pub offer: Option<Offer>,
    /// Whether the backend has reported its batches under way.
    pub is_known: bool,
    /// Whether the backend wants to leave.
    pub is_leaving: bool,
    /// Whether the backend gets no more batches.
    pub is_let_go: bool,
    pub slots: Vec<SlotState>,
    /// Models of the backend's offer that the scheduler does not use.
    pub refused: BTreeSet<ModelKey>,
    /// By name: models taken away from the backend, with the stamp of the assignment that took
    /// each. The backend may still offer them until it has heard that assignment.
    pub withheld: BTreeMap<String, Stamp>,
    /// The delays that the backend has measured.
    pub delays: Option<Delays>,
    /// Places of the queues that the backend has heard of.
    pub told: BTreeSet<u32>,
    /// Places of the frontends that the backend has heard of.
    pub met: BTreeSet<u32>,
}

/// Hardware, and the models that run on it. Slots that are equal in both are one kind.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct KindKey {
    pub hardware: String,
    pub models: BTreeSet<ModelKey>,
}

/// The names and versions of the offered models.
pub(super) fn keys_of(offer: &Offer) -> impl Iterator<Item = ModelKey> + '_ {
    offer.models.iter().map(|model| (model.model.clone(), model.version))
}

impl Backend {
    /// A backend that has sent nothing yet. `joined`: its place in the order of arrivals.
    pub fn new(hello: &Hello, joined: u64) -> Self {
        Backend {
            name: hello.name.clone(),
            joined,
            offer: None,
            is_known: false,
            is_leaving: false,
            is_let_go: false,
            slots: Vec::new(),
            refused: BTreeSet::new(),
            withheld: BTreeMap::new(),
            delays: None,
            told: BTreeSet::new(),
            met: BTreeSet::new(),
        }
    }

    /// Whether batches of an offered model may be planned on the backend.
    pub fn is_used(&self, key: &ModelKey) -> bool {
        !self.refused.contains(key) && !self.withheld.contains_key(&key.0)
    }

    /// Takes the backend's offer.
    pub fn set_offer(&mut self, offer: Offer) {
        let heard = offer.assigned.as_ref().map(|assigned| assigned.stamp);
        self.withheld.retain(|_, since| heard.is_none_or(|heard| heard < *since));
        self.offer = Some(offer);
    }

    /// Takes away the models that a new assignment leaves out. Returns those that the backend
    /// offers.
    pub fn withhold(&mut self, assigned: &Assignment) -> BTreeSet<ModelKey> {
        let Some(offer) = &self.offer else { return BTreeSet::new() };
        let withheld =
            keys_of(offer).filter(|(name, _)| offer.loadable(name).is_some() && !assigned.has(name)).collect();
        let names = offer.repository.iter().map(|loadable| &loadable.model).filter(|name| !assigned.has(name));
        self.withheld.extend(names.map(|name| (name.clone(), assigned.stamp)));
        withheld
    }

    /// Whether the backend could load a model.
    pub fn can_load(&self, model: &str) -> bool {
        !self.is_leaving && self.offer.as_ref().is_some_and(|offer| offer.can_load(model))
    }

    /// The assigner's view of the backend; `None`: the backend has not sent an offer.
    pub fn view(&self, node: NodeId) -> Option<BackendView<'_>> {
        let offer = self.offer.as_ref()?;
        let is_ready = |model: &&OfferedModel| self.is_used(&(model.model.clone(), model.version));
        Some(BackendView {
            node,
            joined: self.joined,
            is_leaving: self.is_leaving,
            offer,
            ready: offer.models.iter().filter(is_ready).map(|model| &*model.model).collect(),
        })
    }

    /// The number of the backend's devices.
    pub fn devices(&self) -> u32 {
        let slots = self.offer.iter().flat_map(|offer| &offer.slots);
        slots.map(|slot| slot.device).collect::<BTreeSet<u32>>().len() as u32
    }

    /// The device time of a batch that ran for `took` on a slot. A device's slots run side by side,
    /// and each gets an equal part. The backend tells a seat's part itself.
    pub fn busy(&self, slot: u32, took: Duration) -> Duration {
        let slots = self.offer.as_ref().map_or(&[][..], |offer| &offer.slots);
        let Some(slot) = slots.get(slot as usize).filter(|slot| !slot.is_seat) else { return took };
        let beside = slots.iter().filter(|other| other.device == slot.device && !other.is_seat).count().max(1);
        Duration::from_nanos(took.as_nanos() / beside as u64)
    }

    /// Whether the backend has seats.
    pub fn has_seats(&self) -> bool {
        self.offer.iter().flat_map(|offer| &offer.slots).any(|slot| slot.is_seat)
    }

    /// The scheduler's devices that are seats of a device.
    pub fn seats(&self, device: u32) -> impl Iterator<Item = DeviceId> + '_ {
        let slots = self.offer.iter().flat_map(|offer| &offer.slots).zip(&self.slots);
        slots.filter(move |(slot, _)| slot.is_seat && slot.device == device).filter_map(|(_, state)| state.device)
    }

    /// The backend's offers of a model.
    pub fn offers<'a>(&'a self, key: &'a ModelKey) -> impl Iterator<Item = &'a OfferedModel> + 'a {
        let models = self.offer.iter().flat_map(|offer| &offer.models);
        models.filter(|model| model.model == key.0 && model.version == key.1)
    }

    /// The wanted kind of each slot: its hardware and the models that it runs; `None`: no models. A
    /// model with a limit of `n` batches at once runs on `n` slots.
    pub fn wanted_kinds(&self) -> Vec<Option<KindKey>> {
        let Some(offer) = &self.offer else { return Vec::new() };
        let mut models = vec![BTreeSet::new(); offer.slots.len()];
        for model in &offer.models {
            let number =
                offer.models.iter().take_while(|m| m.model != model.model || m.version != model.version).count();
            let key = (model.model.clone(), model.version);
            let slots = model.profiles.len();
            if !self.is_used(&key) || slots == 0 {
                continue;
            }
            // Models that may not run on all slots are spread over the slots.
            let at_once = (model.at_once.max(1) as usize).min(slots);
            let first = if at_once < slots { number * at_once } else { 0 };
            for (slot, _) in model.profiles.iter().cycle().skip(first % slots).take(at_once) {
                if let Some(models) = models.get_mut(*slot as usize) {
                    models.insert(key.clone());
                }
            }
        }
        let kind = |(slot, models): (&Slot, BTreeSet<ModelKey>)| {
            (!models.is_empty()).then(|| KindKey { hardware: slot.hardware.clone(), models })
        };
        offer.slots.iter().zip(models).map(kind).collect()
    }
}
