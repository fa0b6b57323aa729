//! Which candidate meets which device (Symphony §3.2, *OnModelTimer* and *OnGpuTimer*; §4.2, *RankThread*).

use super::indexed_heap::IndexedHeap;
use crate::ids::{BatchId, DeviceId, ModelId};
use crate::time::Time;

/// The batch that a model would send next, and when: it may start in `[exec, latest]`, never before
/// (Symphony §3.1, *schedulable window*).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// Items.
    pub size: u32,
    /// The earliest start.
    pub exec: Time,
    /// The last start that meets its earliest deadline.
    pub latest: Time,
}

/// A device for a model, now. To be answered with an [`Answer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Whose candidate may start.
    pub model: ModelId,
    /// Where.
    pub device: DeviceId,
}

/// What a model's queue says to a [`Grant`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// A batch runs there.
    Started {
        /// What was granted.
        grant: Grant,
        /// The batch, as its completion will name it.
        batch: BatchId,
        /// When it is expected to be done.
        expected_free: Time,
    },
    /// There was nothing to run after all.
    Declined {
        /// What was granted.
        grant: Grant,
    },
}

/// Matches candidates with devices: the one place with global knowledge.
///
/// A candidate waits for its `exec` (*deferred*: the model timers, earliest first), then for a device (*schedulable*: the
/// most urgent `latest` first). A free device is taken in order of ids, the smallest first, so that under low load the
/// devices with large ids stay idle and can be released (§3.2). Setting a candidate replaces the model's former one, with its timer: none is
/// ever stale.
///
/// A grant is *open* until it is answered, which takes a while where queues run on other threads. Until then the model gets
/// no second grant: the candidates it sends may still hold the requests that it is about to take. What it sent last
/// counts once the answer is there, so the queue sends its new candidate first and its answer afterwards. A
/// model or a device may be removed while a grant is open: the removal holds, and the answer closes the grant.
///
/// A device is busy from its grant to its completion event. When it was expected to be free is kept for planning only:
/// a device that is overdue is still busy.
///
/// `O(log M + log D)` an event; nothing is allocated but when a model or a device joins.
#[derive(Debug, Default)]
pub struct Matchmaker {
    models: Vec<ModelState>,
    /// By model: `exec` of the candidates that may not start yet.
    deferred: IndexedHeap<Time>,
    /// By model: `latest` of the candidates that may start.
    schedulable: IndexedHeap<Time>,
    devices: Vec<DeviceState>,
    free: IndexedHeap<()>,
    /// How many devices are not gone.
    present: u32,
    /// By device: when its batch is expected to complete.
    busy: IndexedHeap<Time>,
}

#[derive(Clone, Copy, Debug)]
struct ModelState {
    present: bool,
    /// A grant is open.
    granted: bool,
    candidate: Option<Candidate>,
    in_flight: u32,
    max_in_flight: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DeviceState {
    Free,
    Granted(ModelId),
    Busy { model: ModelId, batch: BatchId },
    Gone,
}

impl Matchmaker {
    /// Without models and devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a model; at most `max_in_flight` (at least 1) of its batches run at once.
    pub fn add_model(&mut self, max_in_flight: u32) -> ModelId {
        let id = ModelId(self.models.len() as u32);
        self.models.push(ModelState {
            present: true,
            granted: false,
            candidate: None,
            in_flight: 0,
            max_in_flight: max_in_flight.max(1),
        });
        id
    }

    /// Removes a model with its candidate. Its running batches keep their devices until they complete.
    pub fn remove_model(&mut self, model: ModelId) {
        if let Some(state) = self.models.get_mut(model.0 as usize) {
            state.present = false;
            state.candidate = None;
            self.place(model);
        }
    }

    /// Adds a device, free.
    pub fn add_device(&mut self) -> DeviceId {
        let id = DeviceId(self.devices.len() as u32);
        self.devices.push(DeviceState::Free);
        self.free.set(id.0, ());
        self.present += 1;
        id
    }

    /// Removes a device; whether it was there. A batch that runs on it, or is about to by an open grant, is no longer waited
    /// for: its completion, should it come, is a stranger's.
    pub fn remove_device(&mut self, device: DeviceId) -> bool {
        let Some(state) = self.devices.get_mut(device.0 as usize) else { return false };
        let was = std::mem::replace(state, DeviceState::Gone);
        self.free.remove(device.0);
        self.busy.remove(device.0);
        match was {
            DeviceState::Busy { model, .. } | DeviceState::Granted(model) => self.landed(model),
            DeviceState::Free => {}
            DeviceState::Gone => return false,
        }
        self.present -= 1;
        true
    }

    /// Devices present.
    pub fn devices(&self) -> u32 {
        self.present
    }

    /// Devices without a batch.
    pub fn free_devices(&self) -> u32 {
        self.free.len() as u32
    }

    /// When the next device is expected to be free: `Time::ZERO` if one is, `Time::MAX` if there is none at all.
    pub fn expected_free(&self) -> Time {
        if self.free.is_empty() { self.busy.peek().map_or(Time::MAX, |(at, _)| at) } else { Time::ZERO }
    }

    /// The model's newest candidate, in place of the former one.
    pub fn inform_candidate(&mut self, model: ModelId, candidate: Option<Candidate>) {
        if let Some(state) = self.models.get_mut(model.0 as usize)
            && state.present
            && state.candidate != candidate
        {
            state.candidate = candidate;
            self.place(model);
        }
    }

    /// The next match at `now`, if a device is free and a candidate may start.
    pub fn poll_grant(&mut self, now: Time) -> Option<Grant> {
        while let Some((exec, model)) = self.deferred.peek()
            && exec <= now
        {
            self.deferred.pop();
            if let Some(candidate) = self.models[model as usize].candidate {
                self.schedulable.set(model, candidate.latest);
            }
        }
        if self.schedulable.is_empty() {
            return None;
        }
        let (_, device) = self.free.pop()?;
        let (_, model) = self.schedulable.pop()?;
        let (model, device) = (ModelId(model), DeviceId(device));
        let state = &mut self.models[model.0 as usize];
        state.granted = true;
        state.in_flight += 1;
        self.devices[device.0 as usize] = DeviceState::Granted(model);
        Some(Grant { model, device })
    }

    /// What came of a grant. The model's new candidate has to be known by now.
    pub fn handle_answer(&mut self, answer: Answer) {
        let (Answer::Started { grant, .. } | Answer::Declined { grant }) = answer;
        let model = &mut self.models[grant.model.0 as usize];
        assert!(model.granted, "a grant is answered once");
        model.granted = false;
        let device = &mut self.devices[grant.device.0 as usize];
        match answer {
            // It was removed meanwhile, and the model's batch with it.
            _ if *device != DeviceState::Granted(grant.model) => {
                assert!(*device == DeviceState::Gone, "a device that was granted stays so until the answer");
            }
            Answer::Started { batch, expected_free, .. } => {
                *device = DeviceState::Busy { model: grant.model, batch };
                self.busy.set(grant.device.0, expected_free);
            }
            Answer::Declined { .. } => {
                *device = DeviceState::Free;
                self.free.set(grant.device.0, ());
                self.models[grant.model.0 as usize].in_flight -= 1;
            }
        }
        self.place(grant.model);
    }

    /// A batch is done: its device is free. The model it was of; `None` for a batch that does not run there, which changes
    /// nothing.
    pub fn completed(&mut self, device: DeviceId, batch: BatchId) -> Option<ModelId> {
        match self.devices.get_mut(device.0 as usize) {
            Some(state @ DeviceState::Busy { .. }) => {
                let DeviceState::Busy { model, batch: running } = *state else { return None };
                if running != batch {
                    return None;
                }
                *state = DeviceState::Free;
                self.busy.remove(device.0);
                self.free.set(device.0, ());
                self.landed(model);
                Some(model)
            }
            _ => None,
        }
    }

    /// When [`Matchmaker::poll_grant`] will next have something though nothing came: a candidate's `exec`. Without a free
    /// device there is nothing to wake up for.
    pub fn poll_timeout(&self) -> Option<(Time, ModelId)> {
        if self.free.is_empty() {
            return None;
        }
        self.deferred.peek().map(|(exec, model)| (exec, ModelId(model)))
    }

    /// A batch of the model is no longer in flight.
    fn landed(&mut self, model: ModelId) {
        let state = &mut self.models[model.0 as usize];
        assert!(state.in_flight > 0, "a batch that ends had begun");
        state.in_flight -= 1;
        // It may have been held back by its limit.
        if state.in_flight + 1 == state.max_in_flight {
            self.place(model);
        }
    }

    /// Puts the model where its candidate belongs.
    fn place(&mut self, model: ModelId) {
        let state = &self.models[model.0 as usize];
        self.deferred.remove(model.0);
        self.schedulable.remove(model.0);
        if let Some(candidate) = state.candidate
            && !state.granted
            && state.in_flight < state.max_in_flight
        {
            self.deferred.set(model.0, candidate.exec);
        }
    }
}
