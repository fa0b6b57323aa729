//! The scheduler's parts, run by threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_core::cluster::{Behaviour, Demand, DispatchPolicy, Matchmaker, ModelOptions, ModelQueue, Order, Shard};
use downbeat_core::journal::cluster::{Input, TrialRecord};
use downbeat_core::journal::{Journal, Machine, QueueName};
use downbeat_core::{BatchId, DeviceId, DeviceKind, DeviceProfiles, ModelId, Time};
use parking_lot::{Mutex, RwLock};

use crate::alarm::Alarm;
use crate::handler::{Handler, LogSink, hand_over};
use crate::held_back::HeldBack;
use crate::latest_candidates::LatestCandidates;
use crate::mailbox::Mailbox;
use crate::matchmaker_state::{MatchmakerState, ToMatchmaker};
use crate::published_demand::PublishedDemand;
use crate::round::{MAX_SHARDS, Round};
use crate::setup::{Setup, planned_as};
use crate::shard_state::{ShardState, ToShard};
use crate::sync::Line;

/// The most messages that a thread handles in one mailbox before it looks after the others. A busy
/// shard then cannot keep the matchmaker from its grants.
pub const TURN: usize = 32;

/// A model, and the shard of its queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueHandle {
    /// The scheduler's name for the model.
    pub model: ModelId,
    shard: u32,
}

impl QueueHandle {
    /// The queue of a model where there is one shard.
    pub fn alone(model: ModelId) -> Self {
        QueueHandle { model, shard: 0 }
    }

    /// The shard of the model's queue, from zero.
    pub fn shard(self) -> usize {
        self.shard as usize
    }
}

/// The shards and the matchmaker, each a `Mailbox`. See the crate's documentation.
pub struct Cluster<H: Handler> {
    pub(crate) handler: H,
    pub(crate) shards: Box<[ShardMailbox<H>]>,
    pub(crate) matchmaker: Mailbox<MatchmakerState, ToMatchmaker>,
    /// The alarms by mailbox; the matchmaker's is the last.
    pub(crate) alarm: Alarm,
    pub(crate) expected_free_ns: Line<AtomicU64>,
    /// By shard: its models' demand on the devices.
    pub(crate) demands: Box<[PublishedDemand]>,
    /// How often any demand has changed. Every event reads this.
    pub(crate) demand_changes: Line<AtomicU64>,
    /// By device: when it will be done with work from outside the scheduler, in nanoseconds.
    /// Readers write to the lock.
    pub(crate) loads: Line<RwLock<Vec<AtomicU64>>>,
    /// How often any load has changed. Every turn of the matchmaker reads this.
    pub(crate) load_changes: Line<AtomicU64>,
    kinds: u32,
    planned: Option<u32>,
    members: Mutex<Members>,
    log: Option<Arc<dyn LogSink>>,
}

type ShardMailbox<H> = Mailbox<ShardState<H>, ToShard<<H as Handler>::Event>>;

/// Gives out ids of models and devices. Models and devices that come or go take its lock; requests
/// do not.
struct Members {
    next_model: u32,
    /// By shard: the number of its models.
    models: Vec<u32>,
    /// By device: its kind, or `None` after its removal.
    devices: Vec<Option<DeviceKind>>,
}

impl<H: Handler> Cluster<H> {
    /// Creates one shard for each of the tables (1 to [`MAX_SHARDS`]), without models.
    pub fn new(handler: H, tables: Vec<H::RequestTable>, setup: Setup) -> Self {
        let shards = tables.len();
        assert!((1..=MAX_SHARDS).contains(&shards), "there are 1 to {MAX_SHARDS} shards");
        let Setup { devices, planned, kinds, wake_margin, network, log } = setup;
        let mut matchmaker = journal(Matchmaker::new(), &log);
        matchmaker.apply(Time::ZERO, Input::SetNetwork(network));
        for kind in &devices {
            assert!(kind.0 < kinds, "the kinds of devices are known from the start");
            matchmaker.apply(Time::ZERO, Input::AddDevice(*kind));
        }
        let expected_free = matchmaker.expected_free();
        let mailbox = |(index, requests)| {
            let mut shard = journal(Shard::new(index as u32, shards as u32), &log);
            shard.apply(Time::ZERO, Input::SetWakeMargin(wake_margin));
            shard.apply(Time::ZERO, Input::SetNetwork(network));
            for kind in (0..kinds).map(DeviceKind) {
                let devices = planned_as(planned, matchmaker.machine().devices_of(kind));
                shard.apply(Time::ZERO, Input::SetDevices(kind, devices));
            }
            Mailbox::new(ShardState {
                shard,
                requests,
                latest: Vec::new(),
                demand: Demand::default(),
                demand_changes: 0,
                held_back: (kinds == 1).then(HeldBack::default),
                news: Vec::new(),
                changed: Vec::new(),
            })
        };
        Cluster {
            handler,
            shards: tables.into_iter().enumerate().map(mailbox).collect(),
            matchmaker: Mailbox::new(MatchmakerState {
                matchmaker,
                models: Vec::new(),
                gone: Arc::new(LatestCandidates::new(kinds as usize)),
                load_changes: 0,
                along: Vec::new(),
            }),
            alarm: Alarm::new(shards + 1),
            expected_free_ns: Line(AtomicU64::new(expected_free.as_nanos())),
            demands: (0..shards).map(|_| PublishedDemand::default()).collect(),
            demand_changes: Line::default(),
            loads: Line(RwLock::new(devices.iter().map(|_| AtomicU64::new(0)).collect())),
            load_changes: Line::default(),
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

    /// The handler of events and decisions.
    pub fn handler(&self) -> &H {
        &self.handler
    }

    /// The number of shards.
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Adds a model to the shard with the fewest models.
    pub fn add_model(&self, options: ModelOptions) -> QueueHandle {
        let latest = Arc::new(LatestCandidates::new(self.kinds as usize));
        let limit = match options.shares_limit {
            Some(other) => Input::AddSharedLimit(other),
            None => Input::AddLimit(options.max_in_flight),
        };
        let queue;
        {
            let mut members = self.members.lock();
            let fewest = members.models.iter().enumerate().min_by_key(|(_, models)| **models);
            let shard = fewest.map_or(0, |(shard, _)| shard);
            members.models[shard] += 1;
            queue = QueueHandle { model: ModelId(members.next_model), shard: shard as u32 };
            members.next_model += 1;
            // This put is under the lock, so the matchmaker hears of models in the order of their
            // ids. The put comes before the shard's message, so the matchmaker knows a model before
            // its first candidate.
            self.matchmaker.put(ToMatchmaker::AddModel {
                limit: limit.into(),
                shard: queue.shard,
                latest: latest.clone(),
            });
        }
        let QueueHandle { model, .. } = queue;
        self.shards[queue.shard()].put(ToShard::AddModel { model, options: Box::new(options), latest });
        self.work(Round::new(&mut H::Context::default()).matchmaker().shard(queue.shard()));
        queue
    }

    /// Names a model in the decision logs, if there are any.
    pub fn name_model(&self, queue: QueueHandle, name: QueueName) {
        if self.log.is_none() {
            return;
        }
        let input = Box::new(Input::Name(queue.model, Box::new(name)));
        self.matchmaker.put(ToMatchmaker::Command(input.clone()));
        self.shards[queue.shard()].put(ToShard::Command(input));
        self.work(Round::new(&mut H::Context::default()).matchmaker().shard(queue.shard()));
    }

    /// Removes a model. Its queued requests are dropped, and its running batches go on. A second
    /// call does nothing.
    pub fn remove_model(&self, queue: QueueHandle) {
        self.tell(queue, ToShard::RemoveModel(queue.model), &mut H::Context::default());
    }

    /// Removes a model unless requests wait for it, and returns whether it did. Waits until the
    /// shard has done so.
    pub fn remove_idle_model(&self, queue: QueueHandle) -> bool {
        let mut context = H::Context::default();
        let mut round = Round::new(&mut context);
        let mut state = self.shards[queue.shard()].enter();
        // Earlier messages come first.
        let mut moment;
        loop {
            let messages;
            (messages, moment) = self.shard_turn(queue.shard(), &mut state, TURN, &mut round);
            self.send_news(&mut state, moment.now, &mut round);
            self.end_turn(queue.shard(), moment, &mut state, &mut round);
            if messages == 0 {
                break;
            }
        }
        let idle = state.shard.machine().queue(queue.model).is_none_or(|queue| queue.queued() == 0);
        if idle {
            let message = ToShard::RemoveModel(queue.model);
            self.handle_in_shard(queue.shard(), &mut state, moment, message, &mut round);
        }
        self.leave_shard(queue.shard(), moment, state, &mut round);
        self.work(round);
        idle
    }

    /// Lets a model's waiting requests go without waiting for others to join
    /// ([`downbeat_core::cluster::Scheduler::flush`]).
    pub fn flush_model(&self, queue: QueueHandle, context: &mut H::Context) {
        self.tell(queue, ToShard::Command(Input::Flush(queue.model).into()), context);
    }

    /// Sets the behaviour of an adaptive model
    /// ([`downbeat_core::cluster::Scheduler::set_behaviour`]).
    pub fn set_behaviour(&self, queue: QueueHandle, behaviour: Option<Behaviour>) {
        self.tell(
            queue,
            ToShard::Command(Input::SetBehaviour(queue.model, behaviour).into()),
            &mut H::Context::default(),
        );
    }

    /// Replaces a model's dispatch policy, also for its queued requests.
    pub fn set_dispatch(&self, queue: QueueHandle, dispatch: DispatchPolicy) {
        self.tell(
            queue,
            ToShard::Command(Input::SetDispatch(queue.model, dispatch).into()),
            &mut H::Context::default(),
        );
    }

    /// Makes the queue of a model, to which no request came yet, a lent one
    /// ([`downbeat_core::cluster::Scheduler::set_lent`]).
    pub fn set_lent(&self, queue: QueueHandle) {
        self.matchmaker.put(ToMatchmaker::Command(Input::SetLent(queue.model).into()));
        for shard in &self.shards {
            shard.put(ToShard::HoldNothingBack);
        }
        self.work(Round::new(&mut H::Context::default()).everywhere(self.shards.len()));
        self.tell(queue, ToShard::Command(Input::SetLent(queue.model).into()), &mut H::Context::default());
    }

    /// Sets the order in which the candidates of all models get devices
    /// ([`downbeat_core::cluster::Matchmaker::set_order`]).
    pub fn set_order(&self, order: Order) {
        self.matchmaker.put(ToMatchmaker::Command(Input::SetOrder(order).into()));
        self.work(Round::new(&mut H::Context::default()).matchmaker());
    }

    /// Writes a trial to the decision log of a queue's shard.
    pub fn note_trial(&self, queue: QueueHandle, trial: TrialRecord) {
        self.tell(queue, ToShard::Command(Input::Trial(Box::new(trial)).into()), &mut H::Context::default());
    }

    /// The behaviour of an adaptive model, set or following from the present load
    /// ([`downbeat_core::cluster::Scheduler::behaviour`]). `None` if the model is gone. Waits for
    /// the thread in the shard.
    pub fn behaviour(&self, queue: QueueHandle) -> Option<Behaviour> {
        let state = self.shards[queue.shard()].enter();
        let behaviour = state.shard.machine().queue(queue.model).map(ModelQueue::behaviour);
        drop(state);
        // A thread that came meanwhile has left its message.
        self.work(Round::new(&mut H::Context::default()).shard(queue.shard()));
        behaviour
    }

    /// Replaces a model's latency profiles, also for its queued requests.
    pub fn set_profile(&self, queue: QueueHandle, profiles: impl Into<DeviceProfiles>) {
        self.tell(
            queue,
            ToShard::Command(Input::SetProfile(queue.model, Box::new(profiles.into())).into()),
            &mut H::Context::default(),
        );
    }

    /// Adds a free device, of a kind that is known from the start.
    pub fn add_device(&self, kind: DeviceKind) -> DeviceId {
        assert!(kind.0 < self.kinds, "the kinds of devices are known from the start");
        let device;
        {
            let mut members = self.members.lock();
            device = DeviceId(members.devices.len() as u32);
            members.devices.push(Some(kind));
            self.loads.0.write().push(AtomicU64::new(0));
            self.matchmaker.put(ToMatchmaker::Command(Input::AddDevice(kind).into()));
            self.tell_devices(&members, kind);
        }
        self.work(Round::new(&mut H::Context::default()).everywhere(self.shards.len()));
        device
    }

    /// Removes a device. The scheduler no longer waits for a batch on the device, or for a grant on
    /// its way there. The handler may still get one dispatch to the device. An unknown device
    /// changes nothing.
    pub fn remove_device(&self, device: DeviceId) {
        {
            let mut members = self.members.lock();
            let Some(kind) = members.devices.get_mut(device.0 as usize).and_then(Option::take) else { return };
            self.matchmaker.put(ToMatchmaker::Command(Input::RemoveDevice(device).into()));
            self.tell_devices(&members, kind);
        }
        self.work(Round::new(&mut H::Context::default()).everywhere(self.shards.len()));
    }

    /// Sets when a device will probably be done with work from outside the scheduler;
    /// [`Time::ZERO`], the initial value: no such work. A batch goes to the possible device that is
    /// done first, but no batch waits for that ([`Matchmaker::set_load`]). This call wakes no
    /// thread; the matchmaker reads the load at its next grant. One thread at a time may call this
    /// for a device. An unknown device changes nothing.
    pub fn set_load(&self, device: DeviceId, until: Time) {
        let loads = self.loads.0.read();
        let Some(load) = loads.get(device.0 as usize) else { return };
        if load.load(Ordering::Relaxed) != until.as_nanos() {
            load.store(until.as_nanos(), Ordering::Relaxed);
            self.load_changes.0.fetch_add(1, Ordering::Release);
        }
    }

    fn tell_devices(&self, members: &Members, kind: DeviceKind) {
        let devices = members.devices.iter().filter(|device| **device == Some(kind)).count() as u32;
        let devices = planned_as(self.planned, devices);
        for shard in &self.shards {
            shard.put(ToShard::Command(Input::SetDevices(kind, devices).into()));
        }
    }

    /// Leaves an event for the shard of `queue`, and handles it unless another thread does. The
    /// decisions that this thread carries out get `context`.
    pub fn post(&self, queue: QueueHandle, event: H::Event, context: &mut H::Context) {
        self.tell(queue, ToShard::Event(event), context);
    }

    /// Posts several events to the shards of their queues, and handles them together. The caller
    /// meets the matchmaker once for all events.
    pub fn post_all(&self, events: impl IntoIterator<Item = (QueueHandle, H::Event)>, context: &mut H::Context) {
        let mut round = Round::new(context);
        for (queue, event) in events {
            self.shards[queue.shard()].put(ToShard::Event(event));
            round = round.shard(queue.shard());
        }
        self.work(round);
    }

    fn tell(&self, queue: QueueHandle, message: ToShard<H::Event>, context: &mut H::Context) {
        let index = queue.shard();
        let mut round = Round::new(context);
        match self.shards[index].enter_idle() {
            Some(mut state) => {
                let moment = self.moment();
                self.handle_in_shard(index, &mut state, moment, message, &mut round);
                self.leave_shard(index, moment, state, &mut round);
            }
            None => {
                self.shards[index].put(message);
                round = round.shard(index);
            }
        }
        self.work(round);
    }

    /// Reports a batch as done. Its device is free, and gets the next batch if one waits.
    pub fn complete(&self, device: DeviceId, batch: BatchId, context: &mut H::Context) {
        let message = ToMatchmaker::Completed(device, batch);
        let mut round = Round::new(context);
        match self.matchmaker.enter_idle() {
            Some(mut state) => {
                self.matchmaker_turn(&mut state, Some(message), 1, None, &mut round);
                drop(state);
                round.matched = true;
                round.matchmaker = !self.matchmaker.is_done();
            }
            None => {
                self.matchmaker.put(message);
                round = round.matchmaker();
            }
        }
        self.work(round);
    }

    /// The life of the thread that wakes mailboxes up. [`Cluster::stop_alarm`] ends it.
    pub fn ring_alarms(&self) {
        while let Some(mailbox) = self.alarm.wait(|| self.handler.now()) {
            self.wake(mailbox);
        }
    }

    /// Wakes up every mailbox whose alarm is due, on the calling thread.
    pub fn ring_due(&self) {
        while let Some((due, mailbox)) = self.alarm.earliest()
            && due <= self.handler.now()
        {
            if self.alarm.clear(mailbox, due) {
                self.wake(mailbox);
            }
        }
    }

    fn wake(&self, mailbox: usize) {
        match self.shards.get(mailbox) {
            Some(shard) => {
                shard.put(ToShard::Alarm);
                self.work(Round::new(&mut H::Context::default()).shard(mailbox));
            }
            None => {
                self.matchmaker.put(ToMatchmaker::Alarm);
                self.work(Round::new(&mut H::Context::default()).matchmaker());
            }
        }
    }

    /// Waits for the thread in each mailbox, one mailbox after another. Returns if none of these threads
    /// hangs. A thread with an event must not call this, and no thread may while a mailbox has a
    /// thread of its own.
    pub fn visit(&self) {
        for shard in &self.shards {
            drop(shard.enter());
        }
        drop(self.matchmaker.enter());
        // Threads left their messages to this one while it was in the mailboxes.
        self.work(Round::new(&mut H::Context::default()).everywhere(self.shards.len()));
    }

    /// Ends [`Cluster::ring_alarms`].
    pub fn stop_alarm(&self) {
        self.alarm.stop();
    }

    /// Forgets a model of the shard.
    pub(crate) fn forget_model(&self, shard: usize) {
        self.members.lock().models[shard] -= 1;
    }

    /// Gives the sink the part of the decision logs that it does not have yet. Waits for the thread
    /// in each mailbox. A thread with an event must not call this, and no thread may while a
    /// mailbox has a thread of its own.
    pub fn flush_log(&self) {
        if self.log.is_none() {
            return;
        }
        for shard in &self.shards {
            self.hand_over(&mut shard.enter().shard, 1);
        }
        self.hand_over(&mut self.matchmaker.enter().matchmaker, 1);
        // Threads left their messages to this one while it was in the mailboxes.
        self.work(Round::new(&mut H::Context::default()).everywhere(self.shards.len()));
    }

    /// Gives the sink a machine's log if it has at least `at_least` bytes.
    pub(crate) fn hand_over<M: Machine>(&self, journal: &mut Journal<M>, at_least: usize) {
        if let Some(log) = &self.log {
            hand_over(&**log, journal, at_least);
        }
    }
}

/// A journal that writes the machine's log if there is a sink.
fn journal<M: Machine>(machine: M, log: &Option<Arc<dyn LogSink>>) -> Journal<M> {
    if log.is_some() { Journal::on(machine) } else { Journal::off(machine) }
}
