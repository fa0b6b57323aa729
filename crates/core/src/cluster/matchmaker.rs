//! Which candidate meets which device (Symphony §3.2, *OnModelTimer* and *OnGpuTimer*; §4.2,
//! *RankThread*; appendix D).

use super::busy_times::BusyTimes;
use super::device_state::{DeviceState, Sent};
use super::in_flight::InFlight;
use super::kind_state::{Choice, KindState, Turn};
use super::messages::{Answer, Candidate, Grant};
use super::order::Order;
use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId};
use crate::time::Time;

/// Matches candidates with devices, as the one place with global knowledge.
///
/// **Candidates.** A model has one for each kind of device. A candidate waits first for its `exec`:
/// it is *deferred*, among the model timers, earliest first. Then it waits for a device of its
/// kind: it is *schedulable*. The most urgent `latest` comes first, and among equals the oldest
/// first request. A new candidate replaces the former one and its timer, so that none is ever
/// stale.
///
/// **Whose turn.** The [`Order`] decides. By default the most urgent candidate goes first, but if
/// all candidates that wait for a kind can still make it, the shortest goes first.
///
/// A grant is *open* until it is answered, which takes a while if queues run on other threads.
/// Until then the model gets no second grant: its candidates may still hold the requests that it is
/// about to take. When the answer arrives, the matchmaker goes by the newest candidates that it
/// has. Therefore a queue sends its new candidates before its answer. A model or a device may be
/// removed while a grant is open: the removal holds, and the answer closes the grant.
///
/// **Devices.** Of the free devices, the one with the smallest id is taken. Thus under low load the
/// devices with large ids stay idle and can be released (§3.2). A device is busy from its grant to
/// its completion event. The time when it should be free is for planning only: an overdue device is
/// still busy, and gets no batch until it is done.
///
/// **Load.** A device may also run work from outside the scheduler. [`Matchmaker::set_load`] tells
/// when that work will probably be done. The load only ranks the devices that could take a batch:
/// devices without a load come first, then the earliest. A load is never a reason to wait: a device
/// without a batch takes one even if it runs other work.
///
/// **Sending ahead.** A batch that takes `delay` to its device may be sent `delay` before the
/// device is expected to be free. Then the device does not wait. A device holds at most two
/// batches: the first runs or is on its way, and the second is behind it. Among the devices that a
/// candidate can have on its arrival, the smallest id is taken, whether idle or busy. If there is
/// no such device, the most urgent candidate may take the device that is free earliest. It does so
/// once this device is free within the longest delay of a waiting candidate (the pseudo-code's
/// *get_by_max_delay*). The device's next batch is then on its way early rather than late.
///
/// **Kinds.** A candidate starts at its own kind's `exec`. Several devices may be able to take a
/// model's batch now. The kind that is fastest for the model comes first, then the least loaded
/// device, then the smallest id. While a device of a faster kind is free, no batch of the model
/// goes to a slower kind. The slower kind's window opens earlier, but the faster device will take
/// the batch, with more requests. Kinds that are equally fast for a model are one kind to this
/// model.
///
/// **Lent queues.** Requests beyond their tenants' shares wait in lent queues
/// ([`Matchmaker::set_lent`]). Their candidates come after all others. A lent batch may start only
/// if it delays no candidate that waits for its own `exec`. Each such candidate that may start before
/// the lent batch ends must still find a device. Running batches that end by then count. This
/// is back-filling with reservations (EASY; Lifka 1995). The last free device is lent only if a
/// device is free again soon: within the shortest wait that candidates of other queues had lately.
/// Thus lent batches begin one after another, and devices come back one after another. A single
/// device has no such rule. Otherwise the lent candidate is put off to the first of these starts
/// and ends.
///
/// **Limits.** A model's batches in flight are limited, and models may share a limit. A candidate
/// that finds its limit reached is *parked* until a batch of one of the limit's models is done.
///
/// `O(K (K + log M + log D))` an event with K kinds, and the same for each parked model that it
/// wakes. `D` more if the first device that could take a batch is loaded. `D log D` more if a lent
/// batch may start while candidates wait for their `exec`. The matchmaker allocates only when a model,
/// a kind or a device joins.
#[derive(Debug, Default)]
pub struct Matchmaker {
    /// Latest time of any event so far.
    now: Time,
    models: Vec<ModelState>,
    in_flight: InFlight,
    kinds: Vec<KindState>,
    devices: Vec<DeviceState>,
    present: u32,
    free: u32,
    /// By device: when it is expected to be done with all its batches.
    busy: BusyTimes,
    /// Devices with a load.
    loaded: u32,
    sends_ahead: bool,
    order: Order,
    /// Scratch: the starts that a lent batch must not delay, and the ends of running batches.
    starts: Vec<Time>,
    ends: Vec<Time>,
}

#[derive(Clone, Copy, Debug)]
struct ModelState {
    present: bool,
    /// A grant is open.
    granted: bool,
}

impl Matchmaker {
    /// A matchmaker without models and devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a model. At most `max_in_flight` (at least 1) of its batches run at once.
    pub fn add_model(&mut self, max_in_flight: u32) -> ModelId {
        self.in_flight.add(max_in_flight.max(1));
        self.join()
    }

    /// Adds a model that shares the limit of `other`, which may have left. The limit counts the
    /// batches of both models together. If there is no such model, the limit is one batch.
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

    /// Removes a model with its candidates. Its running batches keep their devices until they
    /// complete.
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

    /// Sets whether batches may be sent to a device that still runs another batch. They may if
    /// there is a network.
    pub fn set_sends_ahead(&mut self, sends_ahead: bool) {
        if std::mem::replace(&mut self.sends_ahead, sends_ahead) == sends_ahead {
            return;
        }
        for device in 0..self.devices.len() {
            self.refresh_device(DeviceId(device as u32));
        }
        self.place_models();
    }

    /// Sets the order in which candidates get devices; at first [`Order::Shortest`]. Under
    /// [`Order::Fair`], shares count from this call on.
    pub fn set_order(&mut self, order: Order) {
        if std::mem::replace(&mut self.order, order) != order {
            self.kinds.iter_mut().for_each(|kind| kind.set_order(order));
            self.place_models();
        }
    }

    /// Makes the queue of a model a lent one, for good: it gets only time that no other queue needs.
    /// For an unknown model nothing happens.
    pub fn set_lent(&mut self, model: ModelId) {
        if (model.0 as usize) < self.models.len() {
            KindState::make_room(&mut self.kinds, DeviceKind(0), self.models.len(), self.order);
            self.kinds.iter_mut().for_each(|kind| kind.set_lent(model.0));
            self.place_models();
        }
    }

    /// The order set last by [`Matchmaker::set_order`].
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

    /// Removes a device. Returns its kind if the device was present. Batches that it runs, or that
    /// are on their way, are no longer waited for: their completions, if they come, count as stray.
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

    /// Sets when a device will probably be done with work from outside the scheduler; `Time::ZERO`,
    /// the default: there is no such work. The load counts from the next grant on, and needs no
    /// timer. For an unknown device nothing happens.
    pub fn set_load(&mut self, device: DeviceId, until: Time) {
        if let Some(state) = self.devices.get_mut(device.0 as usize) {
            let had = std::mem::replace(&mut state.load, until) != Time::ZERO;
            self.loaded = self.loaded - u32::from(had) + u32::from(until != Time::ZERO);
        }
    }

    /// The load set last by [`Matchmaker::set_load`]; `Time::ZERO` for an unknown device.
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

    /// When the next device is expected to be done with all its batches. `Time::ZERO` if a device
    /// has no batch, `Time::MAX` if there is no device at all.
    pub fn expected_free(&mut self) -> Time {
        if self.free == 0 { self.busy.earliest() } else { Time::ZERO }
    }

    /// Takes the model's newest candidate for a kind of device, in place of the former one.
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
                // A candidate for a slower kind may now have a faster kind to wait for, or have
                // lost it.
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

    /// Whether some device can take a batch, or is about to. If not, no candidate gets a grant, and
    /// no timer is due.
    pub fn may_grant(&self) -> bool {
        self.kinds.iter().any(|kind| kind.ready.earliest() != Time::MAX)
    }

    /// Whether a grant is open, so that an answer is expected.
    pub fn is_open(&self, grant: &Grant) -> bool {
        let model = self.models.get(grant.model.0 as usize);
        let device = self.devices.get(grant.device.0 as usize);
        model.is_some_and(|model| model.granted)
            && device.is_some_and(|d| d.kind == grant.kind && (!d.present || d.granted == Some(grant.model)))
    }

    /// The next grant at `now`, if a candidate may be sent and a device is ready to take it.
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
            let (model, place) = match self.kinds[kind].choose(now, model) {
                Choice::First => (model, place),
                Choice::Other(other) => self.device_for(kind, other).map_or((model, place), |place| (other, place)),
                Choice::Lent if self.may_lend(kind, model) => (model, place),
                Choice::Lent => continue,
            };
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

    /// Takes the answer to a grant. The model's new candidates must be known before.
    pub fn handle_answer(&mut self, answer: Answer) {
        let (Answer::Started { grant, .. } | Answer::Declined { grant }) = answer;
        assert!(std::mem::take(&mut self.models[grant.model.0 as usize].granted), "a grant is answered once");
        let device = &mut self.devices[grant.device.0 as usize];
        // If the device was removed meanwhile, the model's batch was removed with it.
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
            // A device that got a batch was marked as taken when it was granted.
            if self.sends_ahead || matches!(answer, Answer::Declined { .. }) {
                self.refresh_device(grant.device);
            }
        }
        self.place_all(grant.model);
    }

    /// A batch is done at `now`: its device is free, or begins the next batch that was sent to it.
    /// Returns the batch's model. `None` if the device has no such batch; then nothing changes.
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

    /// When [`Matchmaker::poll_grant`] may next give a grant though no event comes, at the
    /// earliest. Then a candidate may be sent (its model timer), or must be sent to reach a device
    /// in time (a device timer). While no device can take a batch, no timer is due.
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

    /// The device (its place) of this kind that the model's candidate takes now.
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
            // Overdue: nothing tells when the device will be done.
            self.kinds[kind].ready.set(place, Time::MAX);
            return self.device_for(kind, model);
        }
        Some(place)
    }

    /// The kind that takes the model's batch, with a device of that kind, when `kind` could take
    /// it. `None` if a faster device is free and waits for its window. Then the candidates of both
    /// kinds move to heaps that wait for the faster kind, so that neither comes again before.
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

    /// Whether the candidate of a lent queue may start now on one of the free devices. If not, it is
    /// put off.
    #[cold]
    fn may_lend(&mut self, kind: usize, model: u32) -> bool {
        let Some(Candidate { takes, delay, .. }) = self.candidate(kind, model) else { return false };
        let Matchmaker { now, kinds, devices, starts, ends, .. } = self;
        let state = &mut kinds[kind];
        let end = *now + delay + takes;
        // The lent batch takes one of the free devices.
        let idle = (state.free as usize).saturating_sub(1);
        starts.clear();
        state.reserved(*now, end, starts);
        if idle >= starts.len().max(1) {
            return true;
        }
        ends.clear();
        let running = state.devices.iter().map(|device| &devices[device.0 as usize]);
        // Nobody knows when an overdue batch ends.
        let due = running.filter(|device| device.present && !device.is_free()).map(|device| device.free_at);
        ends.extend(due.filter(|at| (*now..end).contains(at)));
        starts.sort_unstable();
        ends.sort_unstable();
        let finds = |(before, start): (usize, &Time)| idle + ends.partition_point(|at| at <= start) > before;
        let comes_back = match state.shortest_wait() {
            Some(wait) if idle == 0 && state.present > 1 => end.min(ends.first().map_or(end, |at| *at)) <= *now + wait,
            _ => true,
        };
        if comes_back && starts.iter().enumerate().all(finds) {
            return true;
        }
        let next = starts.iter().chain(ends.iter()).filter(|at| **at > *now).min();
        let until = next.map_or(end, |at| *at);
        state.hold(model, until);
        false
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

    /// Updates when a device can begin another batch.
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

    /// Whether the model's limit is reached. If so, its candidates wait for the limit.
    fn park(&mut self, model: ModelId) -> bool {
        let parked = self.in_flight.park(model);
        if parked {
            for kind in &mut self.kinds {
                kind.forget(model.0);
            }
        }
        parked
    }

    /// Puts all candidates into their heaps.
    fn place_models(&mut self) {
        for model in 0..self.models.len() {
            self.place_all(ModelId(model as u32));
        }
    }

    /// Puts all the model's candidates into their heaps.
    fn place_all(&mut self, model: ModelId) {
        for kind in 0..self.kinds.len() {
            self.place(model, kind);
        }
    }

    /// Puts the model's candidate for a kind into its heap.
    fn place(&mut self, model: ModelId, kind: usize) {
        if self.models[model.0 as usize].granted {
            // The grant took the model out of all heaps.
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
