//! Which candidate meets which device (Symphony §3.2, *OnModelTimer* and *OnGpuTimer*; §4.2, *RankThread*; appendix D).

use super::busy_times::BusyTimes;
use super::device_state::{DeviceState, Sent};
use super::in_flight::InFlight;
use super::kind_state::{KindState, Turn};
use super::messages::{Answer, Candidate, Grant};
use super::order::Order;
use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId};
use crate::time::Time;

/// Matches candidates with devices: the one place with global knowledge.
///
/// **Candidates.** One for each model and kind of device. It waits for its `exec` (*deferred*: the model timers, earliest first), then for
/// a device of its kind (*schedulable*: the most urgent `latest` first, and of those the one whose first request came first). Setting a
/// candidate replaces the former one, with its timer: none is ever stale.
///
/// **Whose turn.** As the [`Order`] says: unless it is another, the most urgent goes first, but where all that waits for devices of a kind can still make it, the shortest.
///
/// A grant is *open* until it is answered, which takes a while where queues run on other threads. Until then the model gets
/// no second grant: the candidates it sends may still hold the requests that it is about to take. What it sent last
/// counts once the answer is there, so the queue sends its new candidates first and its answer afterwards. A
/// model or a device may be removed while a grant is open: the removal holds, and the answer closes the grant.
///
/// **Devices.** A free device is taken in order of ids, the smallest first, so that under low load the devices with large ids stay idle
/// and can be released (§3.2). A device is busy from its grant to its completion event. When it was expected to be free is kept
/// for planning only: a device that is overdue is still busy, and gets nothing until it is done.
///
/// **Load.** A device may run what others than the scheduler send there: [`Matchmaker::set_load`] says when that will probably be done. It is a
/// preference among devices that could take a batch, the earliest first and those that have none before all, and never a reason to wait: a device without
/// a batch takes one whatever else it runs.
///
/// **Sending ahead.** A batch whose way to the device takes `delay` may be sent `delay` before the device is expected to be free, so that the device does
/// not wait for it. So a device may hold two batches, one that it runs (or that is on its way to it) and one behind that, and never more. Among the
/// devices that a candidate can have as soon as it gets there, the one with the smallest id is taken, idle or not. If there is none, the most urgent
/// candidate also takes the earliest device that any waiting candidate would have to be sent to now (the pseudo-code's *get_by_max_delay*): the device's
/// next batch is then on its way early rather than late.
///
/// **Kinds.** A candidate starts at its own kind's `exec`. Of the devices that could take a model's batch now, those of the kind fastest for the model
/// are taken, of these the least loaded, then the smallest id. While a device of a faster kind is free, no batch of the model goes to a slower one,
/// though the slower kind's window (which opens earlier) is open: the faster device will take it, and more of it. Kinds equally fast for a model are one
/// kind to it.
///
/// **Limits.** A model's batches in flight are limited, and models may share a limit. A candidate that finds its limit reached is *parked* until a batch
/// of one of these models is done.
///
/// `O(K (K + log M + log D))` an event with K kinds, and once for each that was parked; `D` more where the first device that could take a batch is
/// loaded. Nothing is allocated but when a model, a kind or a device joins.
#[derive(Debug, Default)]
pub struct Matchmaker {
    /// Time of the last event that had one.
    now: Time,
    models: Vec<ModelState>,
    in_flight: InFlight,
    kinds: Vec<KindState>,
    devices: Vec<DeviceState>,
    present: u32,
    free: u32,
    /// By device: when all it was granted is expected to be done.
    busy: BusyTimes,
    /// Devices with a load.
    loaded: u32,
    sends_ahead: bool,
    order: Order,
}

#[derive(Clone, Copy, Debug)]
struct ModelState {
    present: bool,
    /// A grant is open.
    granted: bool,
}

impl Matchmaker {
    /// Without models and devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a model; at most `max_in_flight` (at least 1) of its batches run at once.
    pub fn add_model(&mut self, max_in_flight: u32) -> ModelId {
        self.in_flight.add(max_in_flight.max(1));
        self.join()
    }

    /// Adds a model that shares the limit of `other`, which may have left: so many batches run at once of both together. Without such a
    /// model it is one batch.
    pub fn add_model_sharing(&mut self, other: ModelId) -> ModelId {
        self.in_flight.add_sharing(other);
        self.join()
    }

    fn join(&mut self) -> ModelId {
        let id = ModelId(self.models.len() as u32);
        self.models.push(ModelState { present: true, granted: false });
        for kind in &mut self.kinds {
            kind.join();
        }
        id
    }

    /// Removes a model with its candidates. Its running batches keep their devices until they complete.
    pub fn remove_model(&mut self, model: ModelId) {
        if let Some(state) = self.models.get_mut(model.0 as usize) {
            state.present = false;
            for kind in &mut self.kinds {
                if kind.candidates[model.0 as usize].take().is_some() {
                    kind.forget(model.0);
                }
            }
        }
    }

    /// Whether batches may be sent to a device that still runs another: there is a network.
    pub fn set_sends_ahead(&mut self, sends_ahead: bool) {
        if std::mem::replace(&mut self.sends_ahead, sends_ahead) == sends_ahead {
            return;
        }
        for device in 0..self.devices.len() {
            self.refresh_device(DeviceId(device as u32));
        }
        self.place_models();
    }

    /// In which order candidates get devices; at first [`Order::Shortest`]. What models had under [`Order::Fair`] counts from when it is set.
    pub fn set_order(&mut self, order: Order) {
        if std::mem::replace(&mut self.order, order) != order {
            self.kinds.iter_mut().for_each(|kind| kind.set_order(order));
            self.place_models();
        }
    }

    /// What [`Matchmaker::set_order`] said last.
    pub fn order(&self) -> Order {
        self.order
    }

    /// Adds a device, free. Kinds are dense: their number should be small.
    pub fn add_device(&mut self, kind: DeviceKind) -> DeviceId {
        assert!(
            kind <= DeviceKind::LARGEST,
            "kinds are numbered from 0, and few: {kind} would cost every event a look at all before it"
        );
        KindState::make_room(&mut self.kinds, kind, self.models.len(), self.order);
        let id = DeviceId(self.devices.len() as u32);
        let state = &mut self.kinds[kind.0 as usize];
        let place = state.devices.len() as u32;
        state.devices.push(id);
        state.ready.set(place, Time::ZERO);
        state.free += 1;
        state.present += 1;
        self.free += 1;
        self.present += 1;
        self.devices.push(DeviceState::new(kind, place));
        id
    }

    /// Removes a device; its kind, if it was there. Batches that it runs or that are on their way to it are no longer waited for: their
    /// completions, should they come, are strangers'.
    pub fn remove_device(&mut self, device: DeviceId) -> Option<DeviceKind> {
        let state = self.devices.get_mut(device.0 as usize).filter(|state| state.present)?;
        let gone = DeviceState { present: false, free_at: Time::MAX, ..DeviceState::new(state.kind, state.place) };
        let was = std::mem::replace(state, DeviceState { load: state.load, ..gone });
        self.present -= 1;
        self.kinds[was.kind.0 as usize].present -= 1;
        if was.is_free() {
            self.free -= 1;
            self.kinds[was.kind.0 as usize].free -= 1;
        }
        self.busy.set(device.0, Time::MAX);
        self.refresh_device(device);
        let sent = [was.first, was.second].into_iter().flatten().map(|sent| sent.model);
        sent.chain(was.granted).for_each(|model| self.landed(model));
        Some(was.kind)
    }

    /// When a device will probably be done with what others than the scheduler run there; `Time::ZERO`: there is nothing, as at first. It
    /// counts from the next grant on, and none is due for it. Unknown: nothing happens.
    pub fn set_load(&mut self, device: DeviceId, until: Time) {
        if let Some(state) = self.devices.get_mut(device.0 as usize) {
            let had = std::mem::replace(&mut state.load, until) != Time::ZERO;
            self.loaded = self.loaded - u32::from(had) + u32::from(until != Time::ZERO);
        }
    }

    /// What [`Matchmaker::set_load`] said of a device last; `Time::ZERO` for one that is unknown.
    pub fn load(&self, device: DeviceId) -> Time {
        self.devices.get(device.0 as usize).map_or(Time::ZERO, |state| state.load)
    }

    /// Devices present.
    pub fn devices(&self) -> u32 {
        self.present
    }

    /// Devices present, of one kind.
    pub fn devices_of(&self, kind: DeviceKind) -> u32 {
        self.kinds.get(kind.0 as usize).map_or(0, |kind| kind.present)
    }

    /// Devices without a batch.
    pub fn free_devices(&self) -> u32 {
        self.free
    }

    /// When the next device is expected to be done with all that it was granted: `Time::ZERO` if one has nothing, `Time::MAX` if there is none at all.
    pub fn expected_free(&mut self) -> Time {
        if self.free == 0 { self.busy.earliest() } else { Time::ZERO }
    }

    /// The model's newest candidate for a kind of device, in place of the former one.
    pub fn inform_candidate(&mut self, model: ModelId, kind: DeviceKind, candidate: Option<Candidate>) {
        if candidate.is_some() && self.kinds.len() <= kind.0 as usize {
            KindState::make_room(&mut self.kinds, kind, self.models.len(), self.order);
        }
        let index = kind.0 as usize;
        let Some(state) = self.kinds.get_mut(index) else { return };
        if let Some(known) = state.candidates.get_mut(model.0 as usize)
            && self.models[model.0 as usize].present
            && *known != candidate
        {
            let appears = known.is_some() != candidate.is_some();
            *known = candidate;
            self.place(model, index);
            if appears && self.kinds.len() > 1 {
                // What waits for slower kinds may now have a faster one to wait for, or no longer.
                for other in (0..self.kinds.len()).filter(|other| *other != index) {
                    self.place(model, other);
                }
            }
        }
    }

    /// The time of the last event.
    pub fn time(&self) -> Time {
        self.now
    }

    /// Moves time on; it never goes back.
    pub fn set_time(&mut self, now: Time) {
        self.now = self.now.max(now);
    }

    /// Whether some device can take a batch, or is about to. If not, nothing is granted and nothing due, whatever candidates there are.
    pub fn may_grant(&self) -> bool {
        self.kinds.iter().any(|kind| kind.ready.earliest() != Time::MAX)
    }

    /// Whether a grant is open, so that it can be answered.
    pub fn is_open(&self, grant: &Grant) -> bool {
        let model = self.models.get(grant.model.0 as usize);
        let device = self.devices.get(grant.device.0 as usize);
        model.is_some_and(|model| model.granted)
            && device.is_some_and(|d| d.kind == grant.kind && (!d.present || d.granted == Some(grant.model)))
    }

    /// The next match at `now`, if a candidate may be sent and a device is ready for it.
    pub fn poll_grant(&mut self, now: Time) -> Option<Grant> {
        self.now = self.now.max(now);
        let now = self.now;
        if let [kind] = &self.kinds[..]
            && !kind.is_awaited(now)
        {
            return None;
        }
        for kind in 0..self.kinds.len() {
            while let Some((send, model)) = self.kinds[kind].deferred.peek()
                && send <= now
            {
                self.place(ModelId(model), kind);
            }
        }
        loop {
            let mut next: Option<(Turn, u32, usize, u32)> = None;
            for kind in 0..self.kinds.len() {
                if self.kinds[kind].ready.earliest() != Time::MAX
                    && let Some((turn, model)) = KindState::next_turn(&self.kinds, kind)
                    && next.is_none_or(|(t, m, ..)| (turn, model) < (t, m))
                    && let Some(place) = self.device_for(kind, model)
                {
                    next = Some((turn, model, kind, place));
                }
            }
            let (_, model, kind, place) = next?;
            let cheapest = self.kinds[kind].cheapest(now, model);
            let cheapest = cheapest.and_then(|model| Some((model, self.device_for(kind, model)?)));
            let (model, place) = cheapest.unwrap_or((model, place));
            if self.park(ModelId(model)) {
                continue;
            }
            if self.kinds.len() == 1 {
                return Some(self.grant(ModelId(model), kind, place));
            }
            if let Some((kind, place)) = self.fastest(model, kind, place) {
                return Some(self.grant(ModelId(model), kind, place));
            }
        }
    }

    /// What came of a grant. The model's new candidates have to be known by now.
    pub fn handle_answer(&mut self, answer: Answer) {
        let (Answer::Started { grant, .. } | Answer::Declined { grant }) = answer;
        assert!(std::mem::take(&mut self.models[grant.model.0 as usize].granted), "a grant is answered once");
        let device = &mut self.devices[grant.device.0 as usize];
        // If it was removed meanwhile, then the model's batch was with it.
        if device.present {
            assert!(device.granted.take() == Some(grant.model), "a device that was granted stays so until the answer");
            match answer {
                Answer::Started { batch, arrives, expected, .. } => {
                    self.kinds[grant.kind.0 as usize].runs(grant.model, expected);
                    let sent = Sent { model: grant.model, batch, arrives, expected };
                    self.busy.set(grant.device.0, device.send(sent));
                }
                Answer::Declined { .. } => {
                    if device.first.is_none() {
                        self.free += 1;
                        self.kinds[grant.kind.0 as usize].free += 1;
                    }
                    self.landed(grant.model);
                }
            }
            // One that got a batch was taken when it was granted.
            if self.sends_ahead || matches!(answer, Answer::Declined { .. }) {
                self.refresh_device(grant.device);
            }
        }
        self.place_all(grant.model);
    }

    /// A batch is done at `now`: its device is free, or begins the next that was sent to it. The model it was of; `None` for a
    /// batch that is not there, which changes nothing.
    pub fn completed(&mut self, now: Time, device: DeviceId, batch: BatchId) -> Option<ModelId> {
        let state = self.devices.get_mut(device.0 as usize)?;
        let Sent { model, .. } = state.complete(now, batch)?;
        if state.first.is_some() {
            self.busy.set(device.0, state.free_at);
        } else {
            self.busy.set(device.0, Time::MAX);
            if state.granted.is_none() {
                self.free += 1;
                self.kinds[state.kind.0 as usize].free += 1;
            }
        }
        self.refresh_device(device);
        self.landed(model);
        Some(model)
    }

    /// When [`Matchmaker::poll_grant`] will next have something though nothing came, at the earliest: a candidate may be sent (its model
    /// timer), or is to be sent to a device that will be free when it arrives (a device timer). Without a device that can take a batch there is
    /// nothing to wake up for.
    pub fn poll_timeout(&self) -> Option<(Time, ModelId)> {
        if let [kind] = &self.kinds[..]
            && !kind.is_awaited(Time::MAX)
        {
            return None;
        }
        let mut next: Option<(Time, u32)> = None;
        for (index, kind) in self.kinds.iter().enumerate() {
            let free_at = kind.ready.earliest();
            if free_at == Time::MAX {
                continue;
            }
            let device_timer = || {
                let (_, model) = KindState::next_turn(&self.kinds, index)?;
                let Candidate { latest, delay, .. } = self.candidate(index, model)?;
                let ahead = if latest >= free_at { kind.reach() } else { delay };
                Some((free_at - ahead, model))
            };
            for timer in [kind.deferred.peek(), device_timer()].into_iter().flatten() {
                next = Some(next.map_or(timer, |next| next.min(timer)));
            }
        }
        next.map(|(at, model)| (at, ModelId(model)))
    }

    fn candidate(&self, kind: usize, model: u32) -> Option<Candidate> {
        self.kinds[kind].candidates[model as usize]
    }

    /// The device (its place) of this kind that the model's candidate takes now, if there is one.
    fn device_for(&mut self, kind: usize, model: u32) -> Option<u32> {
        let candidate = self.candidate(kind, model)?;
        let load = |device: DeviceId| if self.loaded == 0 { Time::ZERO } else { self.load(device) };
        let mut found = self.kinds[kind].least_loaded(self.now + candidate.delay, load);
        if found.is_none() && self.sends_ahead {
            let earliest = self.kinds[kind].ready.earliest();
            if earliest <= candidate.latest && earliest <= self.now + self.kinds[kind].reach() {
                found = self.kinds[kind].least_loaded(earliest, load);
            }
        }
        let place = found?;
        let device = &self.devices[self.kinds[kind].devices[place as usize].0 as usize];
        if device.first.is_some() && device.free_at <= self.now {
            // Overdue: nobody knows when it will be done.
            self.kinds[kind].ready.set(place, Time::MAX);
            return self.device_for(kind, model);
        }
        Some(place)
    }

    /// The kind that takes the model's batch, with a device of it, when `kind` could. None if a faster device is free and waits for its
    /// window: then the candidates of both are put where they wait for that, so that neither comes again before.
    fn fastest(&mut self, model: u32, kind: usize, place: u32) -> Option<(usize, u32)> {
        let rank = |s: &Self, kind: usize, place: u32| {
            let device = s.kinds[kind].devices[place as usize];
            (s.candidate(kind, model).map(|candidate| candidate.pace), s.load(device), device)
        };
        let mut best = (rank(self, kind, place), kind, place);
        for other in (0..self.kinds.len()).filter(|other| *other != kind) {
            if !self.kinds[other].is_schedulable(model) {
                continue;
            }
            if let Some(place) = self.device_for(other, model) {
                best = best.min((rank(self, other, place), other, place));
            }
        }
        let (_, best, place) = best;
        let waits_for = KindState::waits_for(&self.kinds, model, best, true);
        let Some(faster) = waits_for else { return Some((best, place)) };
        for kind in [kind, best] {
            let candidate = self.candidate(kind, model)?;
            self.kinds[kind].forget(model);
            self.kinds[kind].schedule(model, 1 + faster, &candidate, self.sends_ahead);
        }
        None
    }

    fn grant(&mut self, model: ModelId, kind: usize, place: u32) -> Grant {
        let device = self.kinds[kind].devices[place as usize];
        for kind in &mut self.kinds {
            kind.forget(model.0);
        }
        self.models[model.0 as usize].granted = true;
        self.in_flight.begin(model);
        let state = &mut self.devices[device.0 as usize];
        state.granted = Some(model);
        if state.first.is_none() {
            self.free -= 1;
            self.kinds[kind].free -= 1;
        }
        let free_at = state.free_at;
        self.kinds[kind].granted(model, place);
        Grant { model, device, kind: DeviceKind(kind as u32), free_at }
    }

    /// Says anew when a device can begin another batch.
    fn refresh_device(&mut self, device: DeviceId) {
        let state = &self.devices[device.0 as usize];
        self.kinds[state.kind.0 as usize].ready.set(state.place, state.ready_at(self.sends_ahead));
    }

    /// A batch of the model is no longer in flight.
    fn landed(&mut self, model: ModelId) {
        let Some(mut parked) = self.in_flight.end(model) else { return };
        for model in parked.drain(..) {
            self.place_all(model);
        }
        self.in_flight.give_back(model, parked);
    }

    /// Whether the model's limit is reached: then its candidates wait for that.
    fn park(&mut self, model: ModelId) -> bool {
        let parked = self.in_flight.park(model);
        if parked {
            for kind in &mut self.kinds {
                kind.forget(model.0);
            }
        }
        parked
    }

    /// Puts all candidates where they belong.
    fn place_models(&mut self) {
        for model in 0..self.models.len() {
            self.place_all(ModelId(model as u32));
        }
    }

    /// Puts all the model's candidates where they belong.
    fn place_all(&mut self, model: ModelId) {
        for kind in 0..self.kinds.len() {
            self.place(model, kind);
        }
    }

    /// Puts the model's candidate for a kind where it belongs.
    fn place(&mut self, model: ModelId, kind: usize) {
        if self.models[model.0 as usize].granted {
            // Nothing of the model waits anywhere since it was granted a device.
            return;
        }
        let candidate = self.candidate(kind, model.0);
        match candidate {
            Some(_) if self.park(model) => {}
            Some(candidate) if candidate.send() <= self.now => {
                let class = if self.kinds.len() == 1 {
                    self.kinds[kind].deferred.remove(model.0);
                    0
                } else {
                    self.kinds[kind].forget(model.0);
                    KindState::waits_for(&self.kinds, model.0, kind, false).map_or(0, |faster| 1 + faster)
                };
                self.kinds[kind].schedule(model.0, class, &candidate, self.sends_ahead);
            }
            Some(candidate) => self.kinds[kind].defer(model.0, &candidate),
            None => self.kinds[kind].forget(model.0),
        }
    }
}
