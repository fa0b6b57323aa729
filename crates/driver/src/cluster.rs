//! The scheduler's parts on threads.

use std::fmt::Debug;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_core::cluster::journal::{Input, Journal, Machine, MachineKind, Reply};
use downbeat_core::cluster::{
    Answer, Demand, Grant, Matchmaker, ModelOptions, ModelQueue, NetworkBudget, Output, Shard,
};
use downbeat_core::{BatchId, DeviceId, DeviceKind, DeviceProfiles, Duration, ModelId, Time};
use parking_lot::{Mutex, RwLock};

use crate::alarm::Alarm;
use crate::newest::Newest;
use crate::station::Station;
use crate::sync::MutexGuard;

/// The most shards there can be.
pub const MAX_SHARDS: usize = 64;

/// Messages that a thread works off in one station before it looks after the others: a busy shard may not keep the
/// matchmaker from its grants.
pub const TURN: usize = 32;

/// What is done with events and decisions: the part of a driver that has a clock and knows payloads.
pub trait Handler: Send + Sync + 'static {
    /// What comes to a shard: a request, a cancellation.
    type Event: Send;
    /// What a shard has beside its queues: the payloads of what waits there. Only whoever is in the shard touches it.
    type Desk: Send;

    /// The time. It never goes back, on any thread, seen from any other.
    fn now(&self) -> Time;

    /// Does what an event asks for, with the `handle_*` of the shard.
    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, desk: &mut Self::Desk, event: Self::Event);

    /// Carries a decision out. The members of a dispatch are to be recycled, in the shard or later in any other.
    fn carry_out(&self, moment: Moment, shard: &mut Journal<Shard>, desk: &mut Self::Desk, output: Output);
}

/// Where the decision logs go ([`downbeat_core::cluster::journal`]).
pub trait LogSink: Send + Sync + Debug {
    /// The next bytes of a machine's log, whole entries. It must not wait: whoever calls it has an event to work off. `false`: the log
    /// ends before these bytes, and the machine is not written down any more.
    fn append(&self, machine: MachineKind, bytes: Vec<u8>) -> bool;
}

/// Bytes of a log that are written before the sink gets them.
const LOG_BUFFER: usize = 64 << 10;

/// When something is handled, and what is known by then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moment {
    /// The time.
    pub now: Time,
    /// When the next device is expected to be free, as the matchmaker said last: `Time::ZERO` if one is, `Time::MAX` if there is none at
    /// all.
    pub expected_free: Time,
}

/// A cluster as it is at the start.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The kind of each device, all of them free.
    pub devices: Vec<DeviceKind>,
    /// As how many devices of each kind the shards plan, whatever comes and goes: for devices that share what they run on. `None`: as many as
    /// there are.
    pub planned: Option<u32>,
    /// How many kinds of devices there will ever be.
    pub kinds: u32,
    /// How late a wake-up may come: a batch that is deferred on purpose starts at least so much before its last moment
    /// ([`downbeat_core::cluster::Scheduler::set_wake_margin`]).
    pub wake_margin: Duration,
    /// What messages take between the scheduler, the devices and the clients.
    pub network: NetworkBudget,
    /// Where the shards and the matchmaker are written down, each in a log of its own; `None`: nowhere, and it costs nothing.
    pub log: Option<Arc<dyn LogSink>>,
}

impl Setup {
    /// So many devices of one kind, next to the scheduler, with timers that are never late.
    pub fn new(devices: u32) -> Self {
        Setup {
            devices: vec![DeviceKind(0); devices as usize],
            planned: None,
            kinds: 1,
            wake_margin: Duration::ZERO,
            network: NetworkBudget::default(),
            log: None,
        }
    }
}

/// A model, and where its queue is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The scheduler's name for the model.
    pub model: ModelId,
    shard: u32,
}

impl Place {
    /// Which shard its queue is in, from zero.
    pub fn shard(self) -> usize {
        self.shard as usize
    }
}

/// The shards and the matchmaker, each a `Station`. See the crate's documentation.
pub struct Cluster<H: Handler> {
    handler: H,
    shards: Box<[ShardStation<H>]>,
    matchmaker: Station<MatchmakerDesk, ToMatchmaker>,
    /// By station; the matchmaker's is the last.
    alarm: Alarm,
    expected_free_ns: AtomicU64,
    /// By shard: what its models ask of the devices.
    demands: Box<[PublishedDemand]>,
    /// How often any of them has changed.
    demand_changes: AtomicU64,
    /// By device: when it will be done with what others run there, in nanoseconds.
    loads: RwLock<Vec<AtomicU64>>,
    /// How often any of them has changed.
    load_changes: AtomicU64,
    kinds: u32,
    planned: Option<u32>,
    members: Mutex<Members>,
    log: Option<Arc<dyn LogSink>>,
}

type ShardStation<H> = Station<ShardDesk<H>, ToShard<<H as Handler>::Event>>;

/// Who gives names out. Its lock is taken where models and devices come and go, by no request.
struct Members {
    next_model: u32,
    /// By shard: its models.
    models: Vec<u32>,
    /// By device: its kind, if it is there.
    devices: Vec<Option<DeviceKind>>,
}

struct ShardDesk<H: Handler> {
    shard: Journal<Shard>,
    desk: H::Desk,
    /// By model, of whichever shard.
    newest: Vec<Option<Arc<Newest>>>,
    /// The demand that the other shards know.
    demand: Demand,
    /// The changes of demands that this shard has heard of.
    demand_changes: u64,
}

/// A shard's demand, for the others. It changes ten times a second, and is read as a mixture of two if it changes at that moment, which
/// the next change puts right.
#[derive(Default)]
struct PublishedDemand {
    least: AtomicU64,
    deferred: AtomicU64,
    overhead: AtomicU64,
    variance: AtomicU64,
    even_variance: AtomicU64,
}

impl PublishedDemand {
    fn put(&self, demand: Demand) {
        let Demand { least, deferred, overhead, variance, even_variance } = demand;
        for (place, value) in [
            (&self.least, least),
            (&self.deferred, deferred),
            (&self.overhead, overhead),
            (&self.variance, variance),
            (&self.even_variance, even_variance),
        ] {
            place.store(value.to_bits(), Ordering::Relaxed);
        }
    }

    fn get(&self) -> Demand {
        let value = |place: &AtomicU64| f64::from_bits(place.load(Ordering::Relaxed));
        Demand {
            least: value(&self.least),
            deferred: value(&self.deferred),
            overhead: value(&self.overhead),
            variance: value(&self.variance),
            even_variance: value(&self.even_variance),
        }
    }
}

enum ToShard<E> {
    Event(E),
    Grant(Grant),
    AddModel { model: ModelId, options: Box<ModelOptions>, newest: Arc<Newest> },
    RemoveModel(ModelId),
    SetProfile(ModelId, DeviceProfiles),
    Flush(ModelId),
    Devices(DeviceKind, u32),
    Alarm,
}

struct MatchmakerDesk {
    matchmaker: Journal<Matchmaker>,
    /// By model: its shard, and where its newest candidate is.
    models: Vec<(u32, Arc<Newest>)>,
    /// Where models that were removed have theirs: none.
    gone: Arc<Newest>,
    /// The changes of loads that it has heard of.
    load_changes: u64,
}

enum ToMatchmaker {
    /// A model's newest candidate is another.
    Changed(ModelId),
    Answer(Answer),
    Completed(DeviceId, BatchId),
    AddModel {
        limit: NewLimit,
        shard: u32,
        newest: Arc<Newest>,
    },
    RemoveModel(ModelId),
    AddDevice(DeviceKind),
    RemoveDevice(DeviceId),
    Alarm,
}

/// How many batches of a new model may run at once.
enum NewLimit {
    Own(u32),
    Shared(ModelId),
}

/// The stations that a thread has to look after because it put something in.
#[derive(Clone, Copy, Default)]
struct Round {
    shards: u64,
    matchmaker: bool,
    /// The shard after the last one visited.
    next: u32,
    /// The last station visited was the matchmaker.
    matched: bool,
}

impl<H: Handler> Cluster<H> {
    /// One shard for each desk (1 to [`MAX_SHARDS`]), without models.
    pub fn new(handler: H, desks: Vec<H::Desk>, setup: Setup) -> Self {
        let shards = desks.len();
        assert!((1..=MAX_SHARDS).contains(&shards), "there are 1 to {MAX_SHARDS} shards");
        let Setup { devices, planned, kinds, wake_margin, network, log } = setup;
        let mut matchmaker = journal(Matchmaker::new(), &log);
        matchmaker.apply(Time::ZERO, Input::SetNetwork(network));
        for kind in &devices {
            assert!(kind.0 < kinds, "the kinds of devices are known from the start");
            matchmaker.apply(Time::ZERO, Input::AddDevice(*kind));
        }
        let expected_free = matchmaker.machine().expected_free();
        let station = |(index, desk)| {
            let mut shard = journal(Shard::new(index as u32, shards as u32), &log);
            shard.apply(Time::ZERO, Input::SetWakeMargin(wake_margin));
            shard.apply(Time::ZERO, Input::SetNetwork(network));
            for kind in (0..kinds).map(DeviceKind) {
                let devices = planned_as(planned, matchmaker.machine().devices_of(kind));
                shard.apply(Time::ZERO, Input::SetDevices(kind, devices));
            }
            Station::new(ShardDesk { shard, desk, newest: Vec::new(), demand: Demand::default(), demand_changes: 0 })
        };
        Cluster {
            handler,
            shards: desks.into_iter().enumerate().map(station).collect(),
            matchmaker: Station::new(MatchmakerDesk {
                matchmaker,
                models: Vec::new(),
                gone: Arc::new(Newest::new(kinds as usize)),
                load_changes: 0,
            }),
            alarm: Alarm::new(shards + 1),
            expected_free_ns: AtomicU64::new(expected_free.as_nanos()),
            demands: (0..shards).map(|_| PublishedDemand::default()).collect(),
            demand_changes: AtomicU64::new(0),
            loads: RwLock::new(devices.iter().map(|_| AtomicU64::new(0)).collect()),
            load_changes: AtomicU64::new(0),
            kinds,
            planned,
            members: Mutex::new(Members {
                next_model: 0,
                models: vec![0; shards],
                devices: devices.into_iter().map(Some).collect(),
            }),
            log,
        }
    }

    /// What the events and decisions go through.
    pub fn handler(&self) -> &H {
        &self.handler
    }

    /// How many shards there are.
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Adds a model to the shard that has the fewest.
    pub fn add_model(&self, options: ModelOptions) -> Place {
        let newest = Arc::new(Newest::new(self.kinds as usize));
        let limit = match options.shares_limit {
            Some(other) => NewLimit::Shared(other),
            None => NewLimit::Own(options.max_in_flight),
        };
        let place;
        {
            let mut members = self.members.lock();
            let fewest = members.models.iter().enumerate().min_by_key(|(_, models)| **models);
            let shard = fewest.map_or(0, |(shard, _)| shard);
            members.models[shard] += 1;
            place = Place { model: ModelId(members.next_model), shard: shard as u32 };
            members.next_model += 1;
            // Under the lock, so that the matchmaker hears of models in the order of their ids, and before the shard, so that it knows
            // a model before its first candidate.
            self.matchmaker.put(ToMatchmaker::AddModel { limit, shard: place.shard, newest: newest.clone() });
        }
        let Place { model, .. } = place;
        self.shards[place.shard()].put(ToShard::AddModel { model, options: Box::new(options), newest });
        self.work(Round::default().matchmaker().shard(place.shard()));
        place
    }

    /// Removes a model. Its queued requests are dropped, its running batches go on. Once, or nothing happens.
    pub fn remove_model(&self, place: Place) {
        self.shards[place.shard()].put(ToShard::RemoveModel(place.model));
        self.work(Round::default().shard(place.shard()));
    }

    /// Removes a model unless requests wait for it; whether it did. Waits until the shard has done it.
    pub fn remove_idle_model(&self, place: Place) -> bool {
        let mut round = Round::default();
        let mut desk = self.shards[place.shard()].enter();
        // What was put in before comes first.
        self.shard_turn(place.shard(), &mut desk, usize::MAX, &mut round);
        let idle = desk.shard.machine().queue(place.model).is_none_or(|queue| queue.queued() == 0);
        if idle {
            self.handle_in_shard(
                place.shard(),
                &mut desk,
                self.moment(),
                ToShard::RemoveModel(place.model),
                &mut round,
            );
        }
        drop(desk);
        self.work(round.shard(place.shard()));
        idle
    }

    /// Lets what waits for a model go without waiting for others to join ([`downbeat_core::cluster::Scheduler::flush`]).
    pub fn flush_model(&self, place: Place) {
        self.shards[place.shard()].put(ToShard::Flush(place.model));
        self.work(Round::default().shard(place.shard()));
    }

    /// Replaces a model's latency profiles, also for what is queued.
    pub fn set_profile(&self, place: Place, profiles: impl Into<DeviceProfiles>) {
        self.shards[place.shard()].put(ToShard::SetProfile(place.model, profiles.into()));
        self.work(Round::default().shard(place.shard()));
    }

    /// Adds a device, free, of one of the kinds that are known from the start.
    pub fn add_device(&self, kind: DeviceKind) -> DeviceId {
        assert!(kind.0 < self.kinds, "the kinds of devices are known from the start");
        let device;
        {
            let mut members = self.members.lock();
            device = DeviceId(members.devices.len() as u32);
            members.devices.push(Some(kind));
            self.loads.write().push(AtomicU64::new(0));
            self.matchmaker.put(ToMatchmaker::AddDevice(kind));
            self.tell_devices(&members, kind);
        }
        self.work(Round::everywhere(self.shards.len()));
        device
    }

    /// Removes a device. A batch that runs on it, or is about to by a grant on its way, is no longer waited for: the handler may
    /// still get one dispatch to it. Unknown: nothing happens.
    pub fn remove_device(&self, device: DeviceId) {
        {
            let mut members = self.members.lock();
            let Some(kind) = members.devices.get_mut(device.0 as usize).and_then(Option::take) else { return };
            self.matchmaker.put(ToMatchmaker::RemoveDevice(device));
            self.tell_devices(&members, kind);
        }
        self.work(Round::everywhere(self.shards.len()));
    }

    /// When a device will probably be done with what others than the scheduler run there; [`Time::ZERO`]: there is nothing, as at first. Of the devices
    /// that could take a batch the one that is done first gets it; none waits for that ([`Matchmaker::set_load`]). So nobody is woken up: the matchmaker
    /// finds it when it next grants something. Of one device this is to be said by one thread at a time. Unknown: nothing happens.
    pub fn set_load(&self, device: DeviceId, until: Time) {
        let loads = self.loads.read();
        let Some(load) = loads.get(device.0 as usize) else { return };
        if load.load(Ordering::Relaxed) != until.as_nanos() {
            load.store(until.as_nanos(), Ordering::Relaxed);
            self.load_changes.fetch_add(1, Ordering::Release);
        }
    }

    fn tell_devices(&self, members: &Members, kind: DeviceKind) {
        let devices = members.devices.iter().filter(|device| **device == Some(kind)).count() as u32;
        let devices = planned_as(self.planned, devices);
        for shard in &self.shards {
            shard.put(ToShard::Devices(kind, devices));
        }
    }

    /// Leaves an event for the shard of `place`, and works it off unless somebody else does.
    pub fn post(&self, place: Place, event: H::Event) {
        self.shards[place.shard()].put(ToShard::Event(event));
        self.work(Round::default().shard(place.shard()));
    }

    /// A batch is done: its device is free, and gets its next batch if there is one.
    pub fn complete(&self, device: DeviceId, batch: BatchId) {
        self.matchmaker.put(ToMatchmaker::Completed(device, batch));
        self.work(Round::default().matchmaker());
    }

    /// The life of the thread that wakes stations up; ends with [`Cluster::stop_alarm`].
    pub fn ring_alarms(&self) {
        while let Some(station) = self.alarm.wait(|| self.handler.now()) {
            let mut round = Round::default();
            match self.shards.get(station) {
                Some(shard) => {
                    shard.put(ToShard::Alarm);
                    round = round.shard(station);
                }
                None => {
                    self.matchmaker.put(ToMatchmaker::Alarm);
                    round = round.matchmaker();
                }
            }
            self.work(round);
        }
    }

    /// Ends [`Cluster::ring_alarms`].
    pub fn stop_alarm(&self) {
        self.alarm.stop();
    }

    /// Makes the calling thread the shard's own, after waiting for whoever is in it: nobody else works there until it leaves.
    pub fn own_shard(&self, shard: usize) -> OwnShard<'_, H> {
        OwnShard { cluster: self, index: shard, desk: self.shards[shard].enter() }
    }

    /// Makes the calling thread the matchmaker's own, as [`Cluster::own_shard`].
    pub fn own_matchmaker(&self) -> OwnMatchmaker<'_, H> {
        OwnMatchmaker { cluster: self, desk: self.matchmaker.enter() }
    }

    /// Looks after stations until there is nothing left in them, or somebody else is there.
    fn work(&self, mut round: Round) {
        loop {
            // The matchmaker first, for devices that wait are what costs most; but a shard after each of its turns, and the shards in turn.
            if round.matchmaker && !(std::mem::take(&mut round.matched) && round.shards > 0) {
                (round.matchmaker, round.matched) = (false, true);
                let Some(mut desk) = self.matchmaker.try_enter() else { continue };
                self.matchmaker_turn(&mut desk, TURN, &mut round);
                drop(desk);
                round.matchmaker |= !self.matchmaker.is_done();
            } else if let Some(index) = round.next_shard() {
                let shard = &self.shards[index];
                let Some(mut desk) = shard.try_enter() else { continue };
                self.shard_turn(index, &mut desk, TURN, &mut round);
                drop(desk);
                if !shard.is_done() {
                    round = round.shard(index);
                }
            } else {
                return;
            }
        }
    }

    fn moment(&self) -> Moment {
        self.moment_at(self.handler.now())
    }

    fn moment_at(&self, now: Time) -> Moment {
        Moment { now, expected_free: Time::from_nanos(self.expected_free_ns.load(Ordering::Relaxed)) }
    }

    /// Works off up to `most` messages of a shard, and sets its alarm; how many there were.
    fn shard_turn(&self, index: usize, desk: &mut ShardDesk<H>, most: usize, round: &mut Round) -> usize {
        let mut messages = 0;
        while messages < most
            && let Some(message) = self.shards[index].pop()
        {
            self.handle_in_shard(index, desk, self.moment(), message, round);
            messages += 1;
        }
        self.alarm.set(index, desk.shard.machine().poll_timeout().map_or(Time::MAX, |(at, _)| at));
        self.hand_over(&mut desk.shard, LOG_BUFFER);
        messages
    }

    fn handle_in_shard(
        &self,
        index: usize,
        desk: &mut ShardDesk<H>,
        moment: Moment,
        message: ToShard<H::Event>,
        round: &mut Round,
    ) {
        let now = moment.now;
        let changes = self.demand_changes.load(Ordering::Acquire);
        if changes != desk.demand_changes {
            desk.demand_changes = changes;
            desk.shard.apply(now, Input::SetOtherDemand(self.demand_beside(index)));
        }
        let shard = &mut desk.shard;
        match message {
            ToShard::Event(event) => self.handler.handle(moment, shard, &mut desk.desk, event),
            ToShard::Grant(grant) => shard.handle_grant(now, grant),
            ToShard::AddModel { model, options, newest } => {
                let index = model.0 as usize;
                if desk.newest.len() <= index {
                    desk.newest.resize_with(index + 1, || None);
                }
                desk.newest[index] = Some(newest);
                shard.apply(now, Input::AddModel(model, options));
            }
            ToShard::RemoveModel(model) => {
                if shard.machine().queue(model).is_some() {
                    shard.apply(now, Input::RemoveModel(model));
                    desk.newest[model.0 as usize] = None;
                    self.members.lock().models[index] -= 1;
                    self.matchmaker.put(ToMatchmaker::RemoveModel(model));
                    round.matchmaker = true;
                }
            }
            ToShard::SetProfile(model, profiles) => {
                shard.apply(now, Input::SetProfile(model, Box::new(profiles)));
            }
            ToShard::Flush(model) => {
                shard.apply(now, Input::Flush(model));
            }
            ToShard::Devices(kind, devices) => {
                shard.apply(now, Input::SetDevices(kind, devices));
            }
            ToShard::Alarm => {
                shard.apply(now, Input::Timeout);
            }
        }
        self.flush(index, moment, desk, round);
    }

    /// What the models of all other shards ask of the devices.
    fn demand_beside(&self, index: usize) -> Demand {
        let others = self.demands.iter().enumerate().filter(|(shard, _)| *shard != index);
        others.fold(Demand::default(), |sum, (_, demand)| sum.plus(demand.get()))
    }

    /// Sends what came of an event: candidates, then answers, then decisions, for the reasons that [`Shard`] gives.
    fn flush(&self, index: usize, moment: Moment, desk: &mut ShardDesk<H>, round: &mut Round) {
        let ShardDesk { shard, desk, newest, demand, .. } = desk;
        while let Some((model, kind, candidate)) = shard.poll_candidate() {
            if let Some(newest) = &newest[model.0 as usize]
                && newest.put(kind, candidate)
            {
                self.matchmaker.put(ToMatchmaker::Changed(model));
                round.matchmaker = true;
            }
        }
        while let Some(answer) = shard.poll_answer() {
            self.matchmaker.put(ToMatchmaker::Answer(answer));
            round.matchmaker = true;
        }
        while let Some(output) = shard.poll_output() {
            self.handler.carry_out(moment, shard, desk, output);
        }
        if self.shards.len() > 1 && shard.machine().demand() != *demand {
            *demand = shard.machine().demand();
            self.demands[index].put(*demand);
            self.demand_changes.fetch_add(1, Ordering::Release);
        }
    }

    /// Works off up to `most` messages of the matchmaker's, grants what it can, and sets its alarm; how many messages there were.
    fn matchmaker_turn(&self, desk: &mut MatchmakerDesk, most: usize, round: &mut Round) -> usize {
        let mut messages = 0;
        while messages < most
            && let Some(message) = self.matchmaker.pop()
        {
            desk.handle(message, || self.handler.now());
            messages += 1;
        }
        let now = self.handler.now();
        let changes = self.load_changes.load(Ordering::Acquire);
        let matchmaker = &mut desk.matchmaker;
        if changes != std::mem::replace(&mut desk.load_changes, changes) {
            for (device, load) in (0..).map(DeviceId).zip(self.loads.read().iter()) {
                let until = Time::from_nanos(load.load(Ordering::Relaxed));
                if matchmaker.machine().load(device) != until {
                    matchmaker.apply(now, Input::SetLoad(device, until));
                }
            }
        }
        matchmaker.handle_timeout(now);
        while let Some(grant) = matchmaker.poll_grant() {
            let shard = desk.models[grant.model.0 as usize].0 as usize;
            self.shards[shard].put(ToShard::Grant(grant));
            *round = round.shard(shard);
        }
        let expected_free = matchmaker.machine().expected_free().as_nanos();
        if self.expected_free_ns.load(Ordering::Relaxed) != expected_free {
            self.expected_free_ns.store(expected_free, Ordering::Relaxed);
        }
        let due = matchmaker.machine().poll_timeout().map_or(Time::MAX, |(at, _)| at);
        self.alarm.set(self.shards.len(), due);
        self.hand_over(matchmaker, LOG_BUFFER);
        messages
    }

    /// Gives the sink what it has not got of the decision logs. Waits for whoever is in a station, so it is not for a thread that has an
    /// event, nor while a station has a thread of its own.
    pub fn flush_log(&self) {
        if self.log.is_none() {
            return;
        }
        for shard in &self.shards {
            self.hand_over(&mut shard.enter().shard, 1);
        }
        self.hand_over(&mut self.matchmaker.enter().matchmaker, 1);
        // What was put in meanwhile was left to whoever was in there.
        self.work(Round::everywhere(self.shards.len()));
    }

    /// Gives the sink a machine's log if there are at least so many bytes of it.
    fn hand_over<M: Machine>(&self, journal: &mut Journal<M>, at_least: usize) {
        if let Some(log) = &self.log
            && journal.pending() >= at_least
        {
            let mut bytes = Vec::with_capacity(journal.pending());
            journal.take_log(&mut bytes);
            if !log.append(journal.machine().kind(), bytes) {
                journal.stop();
            }
        }
    }
}

/// As how many devices the shards plan where there are so many: none is none.
fn planned_as(planned: Option<u32>, there: u32) -> u32 {
    planned.map_or(there, |planned| planned.min(there))
}

/// A machine that is written down if there is a place for it.
fn journal<M: Machine>(machine: M, log: &Option<Arc<dyn LogSink>>) -> Journal<M> {
    if log.is_some() { Journal::on(machine) } else { Journal::off(machine) }
}

impl MatchmakerDesk {
    fn handle(&mut self, message: ToMatchmaker, now: impl Fn() -> Time) {
        let matchmaker = &mut self.matchmaker;
        match message {
            ToMatchmaker::Changed(model) => self.models[model.0 as usize].1.take(|kind, newest| {
                // If it is being written, the writer will say so once more.
                if let Ok(candidate) = newest {
                    matchmaker.inform_candidate(model, kind, candidate);
                }
            }),
            ToMatchmaker::Answer(answer) => {
                let (Answer::Started { grant, .. } | Answer::Declined { grant }) = answer;
                // What the shard left before it answered, or something newer. If that is being written, it will be told.
                self.models[grant.model.0 as usize].1.take(|kind, newest| {
                    matchmaker.inform_candidate(grant.model, kind, newest.unwrap_or(None));
                });
                matchmaker.handle_answer(answer);
            }
            ToMatchmaker::Completed(device, batch) => matchmaker.completed(now(), device, batch),
            ToMatchmaker::AddModel { limit, shard, newest } => {
                let input = match limit {
                    NewLimit::Own(most) => Input::AddLimit(most),
                    NewLimit::Shared(other) => Input::AddSharedLimit(other),
                };
                let model = matchmaker.apply(matchmaker.machine().time(), input);
                let expected = Reply::Model(ModelId(self.models.len() as u32));
                assert!(model == expected, "models are announced in the order of their ids");
                self.models.push((shard, newest));
            }
            ToMatchmaker::RemoveModel(model) => {
                matchmaker.apply(matchmaker.machine().time(), Input::RemoveModel(model));
                self.models[model.0 as usize].1 = self.gone.clone();
            }
            ToMatchmaker::AddDevice(kind) => {
                matchmaker.apply(matchmaker.machine().time(), Input::AddDevice(kind));
            }
            ToMatchmaker::RemoveDevice(device) => {
                matchmaker.apply(matchmaker.machine().time(), Input::RemoveDevice(device));
            }
            ToMatchmaker::Alarm => {}
        }
    }
}

impl Round {
    fn everywhere(shards: usize) -> Self {
        Round { shards: u64::MAX >> (MAX_SHARDS - shards), matchmaker: true, ..Round::default() }
    }

    fn matchmaker(self) -> Self {
        Round { matchmaker: true, ..self }
    }

    fn shard(self, index: usize) -> Self {
        Round { shards: self.shards | 1 << index, ..self }
    }

    fn next_shard(&mut self) -> Option<usize> {
        if self.shards == 0 {
            return None;
        }
        let index = (self.next + self.shards.rotate_right(self.next).trailing_zeros()) % MAX_SHARDS as u32;
        self.shards &= !(1 << index);
        self.next = (index + 1) % MAX_SHARDS as u32;
        Some(index as usize)
    }
}

/// A shard that belongs to this thread. It has to take its turns: nobody else looks after the shard.
pub struct OwnShard<'a, H: Handler> {
    cluster: &'a Cluster<H>,
    index: usize,
    desk: MutexGuard<'a, ShardDesk<H>>,
}

impl<'a, H: Handler> OwnShard<'a, H> {
    /// Works off up to `most` messages, such as [`TURN`], and what is due; how many messages there were.
    pub fn turn(&mut self, most: usize) -> usize {
        let mut round = Round::default();
        let messages = self.cluster.shard_turn(self.index, &mut self.desk, most, &mut round);
        let moment = self.cluster.moment();
        if self.desk.shard.machine().poll_timeout().is_some_and(|(at, _)| at <= moment.now) {
            self.cluster.handle_in_shard(self.index, &mut self.desk, moment, ToShard::Alarm, &mut round);
        }
        messages
    }

    /// Whether nothing is in the mailbox.
    pub fn is_done(&self) -> bool {
        self.cluster.shards[self.index].is_done()
    }

    /// Handles an event of this thread's own as of `now`, past the mailbox.
    pub fn handle(&mut self, now: Time, event: H::Event) {
        let moment = self.cluster.moment_at(now);
        self.cluster.handle_in_shard(self.index, &mut self.desk, moment, ToShard::Event(event), &mut Round::default());
    }

    /// What the events and decisions go through.
    pub fn handler(&self) -> &'a H {
        &self.cluster.handler
    }

    /// When the shard has something to do though nothing comes; its turn does it.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.desk.shard.machine().poll_timeout().map(|(at, _)| at)
    }

    /// Items that wait for a model of the shard.
    pub fn queued(&self, model: ModelId) -> u32 {
        self.desk.shard.machine().queue(model).map_or(0, ModelQueue::queued)
    }

    /// [`Cluster::complete`].
    pub fn complete(&self, device: DeviceId, batch: BatchId) {
        self.cluster.complete(device, batch);
    }
}

impl<H: Handler> Deref for OwnShard<'_, H> {
    type Target = H::Desk;

    fn deref(&self) -> &H::Desk {
        &self.desk.desk
    }
}

impl<H: Handler> DerefMut for OwnShard<'_, H> {
    fn deref_mut(&mut self) -> &mut H::Desk {
        &mut self.desk.desk
    }
}

/// The matchmaker, belonging to this thread. It has to take its turns: nobody else looks after it.
pub struct OwnMatchmaker<'a, H: Handler> {
    cluster: &'a Cluster<H>,
    desk: MutexGuard<'a, MatchmakerDesk>,
}

impl<H: Handler> OwnMatchmaker<'_, H> {
    /// Works off up to `most` messages, such as [`TURN`], and grants what it can; how many messages there were. Fewer: the mailbox was empty in between.
    pub fn turn(&mut self, most: usize) -> usize {
        self.cluster.matchmaker_turn(&mut self.desk, most, &mut Round::default())
    }

    /// Whether nothing is in the mailbox.
    pub fn is_done(&self) -> bool {
        self.cluster.matchmaker.is_done()
    }
}

impl<H: Handler> Deref for OwnMatchmaker<'_, H> {
    type Target = Matchmaker;

    fn deref(&self) -> &Matchmaker {
        self.desk.matchmaker.machine()
    }
}
