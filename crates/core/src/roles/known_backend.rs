//! What a scheduler that leads knows of one backend.

use std::collections::{BTreeMap, BTreeSet};

use super::assigner::BackendView;
use super::assignment::{Assignment, Stamp};
use super::message::{BatchKey, Delays, Hello, NodeId, Offer, OfferedModel, Slot};
use super::served_models::ModelKey;
use crate::ids::{DeviceId, DeviceKind};
use crate::time::Duration;

/// A slot of a backend. It is a device of the scheduler while nothing runs there that the scheduler does not know of.
#[derive(Debug, Default)]
pub(super) struct SlotState {
    pub kind: Option<DeviceKind>,
    pub device: Option<DeviceId>,
    /// What it has that is not the device's: batches of other epochs, and those of a device that it was before.
    pub foreign: BTreeSet<BatchKey>,
}

/// A backend whose link is up.
#[derive(Debug)]
pub(super) struct Backend {
    pub name: String,
    /// Who came first.
    pub joined: u64,
    pub offer: Option<Offer>,
    /// What it had under way is known.
    pub is_known: bool,
    /// It is to go.
    pub is_leaving: bool,
    /// It gets no more batches.
    pub is_let_go: bool,
    pub slots: Vec<SlotState>,
    /// Models of its offer that are not used.
    pub refused: BTreeSet<ModelKey>,
    /// By name, models that it is not to have: since which thing that was said. It may offer them still, or once they are loaded, as it has not heard of it.
    pub withheld: BTreeMap<String, Stamp>,
    /// What it has measured.
    pub delays: Option<Delays>,
    /// Places of the queues that it has been told of.
    pub told: BTreeSet<u32>,
    /// Places of the frontends that it has been told of.
    pub met: BTreeSet<u32>,
}

/// Hardware, and the models that run on it: slots that are equal in both are one kind.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct KindKey {
    pub hardware: String,
    pub models: BTreeSet<ModelKey>,
}

/// Names and versions of what is offered.
pub(super) fn keys_of(offer: &Offer) -> impl Iterator<Item = ModelKey> + '_ {
    offer.models.iter().map(|model| (model.model.clone(), model.version))
}

impl Backend {
    /// One that has said nothing yet, and came as the so many-th.
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

    /// Whether batches of a model that it offers are planned there.
    pub fn is_used(&self, key: &ModelKey) -> bool {
        !self.refused.contains(key) && !self.withheld.contains_key(&key.0)
    }

    /// It says what it has.
    pub fn set_offer(&mut self, offer: Offer) {
        let heard = offer.assigned.as_ref().map(|assigned| assigned.stamp);
        self.withheld.retain(|_, since| heard.is_none_or(|heard| heard < *since));
        self.offer = Some(offer);
    }

    /// It is told what to have. Models that it offers and is not to have.
    pub fn withhold(&mut self, assigned: &Assignment) -> BTreeSet<ModelKey> {
        let Some(offer) = &self.offer else { return BTreeSet::new() };
        let withheld =
            keys_of(offer).filter(|(name, _)| offer.loadable(name).is_some() && !assigned.has(name)).collect();
        let names = offer.repository.iter().map(|loadable| &loadable.model).filter(|name| !assigned.has(name));
        self.withheld.extend(names.map(|name| (name.clone(), assigned.stamp)));
        withheld
    }

    /// Whether it could load a model.
    pub fn can_load(&self, model: &str) -> bool {
        !self.is_leaving && self.offer.as_ref().is_some_and(|offer| offer.can_load(model))
    }

    /// As whoever says what it is to have sees it; `None`: it has not said what it has.
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

    /// Its devices.
    pub fn devices(&self) -> u32 {
        let slots = self.offer.iter().flat_map(|offer| &offer.slots);
        slots.map(|slot| slot.device).collect::<BTreeSet<u32>>().len() as u32
    }

    /// What a batch that took so long on a slot is of its device's time: a device's slots run side by side.
    pub fn busy(&self, slot: u32, took: Duration) -> Duration {
        let slots = self.offer.as_ref().map_or(&[][..], |offer| &offer.slots);
        let device = slots.get(slot as usize).map(|slot| slot.device);
        let beside = slots.iter().filter(|slot| Some(slot.device) == device).count().max(1);
        Duration::from_nanos(took.as_nanos() / beside as u64)
    }

    /// What it says of a model.
    pub fn offers<'a>(&'a self, key: &'a ModelKey) -> impl Iterator<Item = &'a OfferedModel> + 'a {
        let models = self.offer.iter().flat_map(|offer| &offer.models);
        models.filter(|model| model.model == key.0 && model.version == key.1)
    }

    /// What each slot is: its hardware, and the models that it runs; `None`: none. A model that may run so many times at once runs on so many slots.
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
            // Models that may not run everywhere are spread over the slots.
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
