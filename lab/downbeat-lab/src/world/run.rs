//! The events of the world, and the faults that it injects.

mod changes;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::ControlFlow;

use downbeat_core::cluster::{ModelOptions, Output, Request};
use downbeat_core::device::{
    DeviceModel, DeviceRequest, GrantedBatch, LaneId, Launch, Layout, ModelSpec, Note, SegmentRange,
};
use downbeat_core::{DeviceId, DeviceKind, Duration, ModelId, RequestId, Time};
use downbeat_driver::{Cluster, QueueHandle};
use downbeat_sim::simulation::node::{self, Node};
use downbeat_sim::{Network, random};
use rand_distr::Normal;
use rand_pcg::Pcg64;

use super::host::{Done, Host};
use super::ledger::{Ending, Failure, Ledger};
use super::mailboxes::{Event, Mailboxes, Order, Said, Virtual};
use crate::device::{DeviceLimits, Direction, EmulatedModel};

/// The scheduler that makes a model's batches.
#[derive(Clone, PartialEq, Debug)]
pub enum Serving {
    /// The cluster's scheduler makes them, for the slots of all devices: the policy `exclusive`.
    Cluster(ModelOptions),
    /// A policy on each of these devices, by number, makes them. A request goes to the device that
    /// is predicted to be free first.
    Devices(ModelSpec, Vec<usize>),
}

/// A change of the world, other than a request.
#[derive(Clone, PartialEq, Debug)]
pub enum Fault {
    /// A device, by number, is lost: its requests and batches fail, and its slots go.
    Lost(usize),
    /// A lost device returns as it was. Its models are loaded afresh.
    Back(usize),
    /// The next launch that begins on a device takes this much longer.
    Late(usize, Duration),
    /// A device gets another layout. The device keeps its layout if the new one is refused.
    Layout(usize, Layout),
    /// A model, by number, is loaded. A loaded one is reloaded, perhaps under another policy.
    Load(usize, Serving),
    /// A model is removed.
    Remove(usize),
    /// Every client that waits for an answer of this model goes away.
    Leave(usize),
    /// From now on, messages to the shards and the matchmaker of the cluster's scheduler, and
    /// between them, wait up to this long.
    Delay(Duration),
}

/// A request that arrives now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub model: usize,
    pub size: u32,
    pub length: u32,
    /// Its priority level.
    pub level: u32,
    /// The deadline; [`Time::MAX`] means none.
    pub deadline: Time,
}

/// The world's surroundings: the source of requests, and the observer of launches and endings.
pub(crate) trait Outside {
    /// Returns the time of the next request.
    fn next_arrival(&self) -> Option<Time>;

    /// Hands over the next request, which the world calls `request`.
    fn arrive(&mut self, now: Time, request: RequestId) -> Ask;

    /// Learns that the request was accepted or refused. Returns the time when its client will go
    /// away, if it will.
    fn arrived(&mut self, now: Time, request: RequestId, accepted: bool) -> Option<Time>;

    /// Learns that an accepted request ended.
    fn ended(&mut self, now: Time, request: RequestId, ending: Ending);

    fn launched(&mut self, _device: usize, _: &Launch) {}

    /// Learns that a launch has its lane.
    fn began(&mut self, _now: Time, _device: usize, _: &Launch) {}

    /// Learns that a launch is done. Returns the members whose answers are final although some of
    /// the model's `all` segments have not run.
    fn completed(
        &mut self,
        _now: Time,
        _start: Time,
        _device: usize,
        _: &Launch,
        _all: SegmentRange,
    ) -> Vec<RequestId> {
        Vec::new()
    }

    /// Learns that a copy is done.
    fn copied(&mut self, _now: Time, _start: Time, _: Direction) {}

    fn noted(&mut self, _device: usize, _: &Note) {}

    /// Returns a change that happens now, in addition to the faults that were set before the run.
    fn change(&mut self, _now: Time) -> Option<Fault> {
        None
    }

    /// Returns true to end the run, even if events are left.
    fn is_over(&mut self, _now: Time) -> bool {
        false
    }
}

/// The world: the cluster's scheduler, the devices, and the messages between them.
pub(crate) struct World<'c> {
    seed: u64,
    now: Time,
    cluster: Mailboxes<'c>,
    pub hosts: Vec<Host>,
    kinds: Vec<DeviceKind>,
    models: Vec<ServedModel>,
    /// The models of the cluster's scheduler.
    clustered: BTreeMap<ModelId, usize>,
    /// All slots, with removed ones: a batch that was decided just before the removal may name a
    /// removed slot.
    /// one.
    slots: BTreeMap<DeviceId, Slot>,
    network: Network,
    /// Batches on their way, by their time of arrival.
    sent: BTreeMap<(Time, u64), SentBatch>,
    /// Lanes that are being prepared.
    preparing: VecDeque<(Time, usize, ModelId)>,
    preparation: Duration,
    faults: VecDeque<(Time, Fault)>,
    requests: BTreeMap<RequestId, Open>,
    leaves: BTreeSet<(Time, RequestId)>,
    next_request: u64,
    next_sent: u64,
    ledger: Ledger,
    rng: Pcg64,
}

struct ServedModel {
    emulated: EmulatedModel,
    /// `None` while the model is not loaded.
    serving: Option<Serving>,
    /// The model's queue at the cluster's scheduler.
    clustered: Option<QueueHandle>,
    /// The devices that have the model loaded.
    on: BTreeSet<usize>,
}

/// An accepted request that has not ended.
struct Open {
    request: DeviceRequest,
    place: Place,
}

#[derive(Clone, Copy)]
enum Place {
    /// The request is in the queue of the cluster's scheduler, or on its way there.
    Queue(QueueHandle),
    /// The request's batch is on its way to a device.
    OnItsWay,
    Device(usize),
}

/// A slot, which is a device to the cluster's scheduler.
#[derive(Clone, Copy)]
struct Slot {
    host: usize,
    lane: LaneId,
    present: bool,
}

struct SentBatch {
    slot: DeviceId,
    host: usize,
    batch: GrantedBatch,
}

/// The next event of a world. At one instant they come in this order.
enum Next {
    /// A launch or a copy is done, or takes its next step.
    Device,
    /// A batch arrives at its device.
    Sent,
    Fault,
    /// Lanes have been prepared.
    Prepared,
    Arrival,
    /// A client goes away.
    Leave,
    Timer,
}

/// A world in its surroundings.
struct Running<'w, 'c, 'o> {
    world: &'w mut World<'c>,
    outside: &'o mut dyn Outside,
}

impl Node for Running<'_, '_, '_> {
    type Event = Next;
    /// The surroundings end the run.
    type End = ();

    fn seed(&self) -> u64 {
        self.world.seed
    }

    fn poll_event(&mut self) -> Option<(Time, Next)> {
        let World { hosts, sent, faults, preparing, leaves, cluster, now, .. } = &*self.world;
        let timers = hosts.iter().filter_map(|host| host.scheduler.poll_timeout());
        let times = [
            (hosts.iter().filter_map(Host::next_event).min(), Next::Device),
            (sent.first_key_value().map(|((at, _), _)| *at), Next::Sent),
            (faults.front().map(|(at, _)| *at), Next::Fault),
            (preparing.front().map(|(at, _, _)| *at), Next::Prepared),
            (self.outside.next_arrival(), Next::Arrival),
            (leaves.first().map(|(at, _)| *at), Next::Leave),
            (timers.map(|(at, _)| at).chain(cluster.next_event()).min(), Next::Timer),
        ];
        // A late event is due now.
        let next = times.iter().filter_map(|(at, _)| *at).min()?.max(*now);
        times.into_iter().find_map(|(at, event)| at.is_some_and(|at| at <= next).then_some((next, event)))
    }

    fn handle_event(&mut self, now: Time, event: Next) -> ControlFlow<()> {
        let Running { world, outside } = self;
        world.happen(now, event, *outside);
        world.decide(*outside);
        while let Some(fault) = outside.change(now) {
            world.go_wrong(fault, *outside);
            world.decide(*outside);
        }
        if outside.is_over(now) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl<'c> World<'c> {
    /// Makes a world without devices and models, with a cluster that was made for this network.
    pub fn new(seed: u64, network: Network, cluster: &'c Cluster<Virtual>, order: Order) -> Self {
        World {
            seed,
            now: Time::ZERO,
            cluster: Mailboxes::new(cluster, order, seed),
            hosts: Vec::new(),
            kinds: Vec::new(),
            models: Vec::new(),
            clustered: BTreeMap::new(),
            slots: BTreeMap::new(),
            network,
            sent: BTreeMap::new(),
            preparing: VecDeque::new(),
            preparation: Duration::from_millis(50),
            faults: VecDeque::new(),
            requests: BTreeMap::new(),
            leaves: BTreeSet::new(),
            next_request: 0,
            next_sent: 0,
            ledger: Ledger::new(seed, network.budget.is_remote()),
            rng: random(seed, u64::MAX),
        }
    }

    /// Adds a device of one partition without slots. Returns its number.
    pub fn add_device(&mut self, limits: DeviceLimits, kind: DeviceKind, noise: f64) -> usize {
        let number = self.hosts.len();
        let noise = (noise > 0.0).then(|| Normal::new(1.0, noise).ok()).flatten();
        let noise = noise.map(|noise| (noise, random(self.seed, u64::MAX - 1 - number as u64)));
        self.hosts.push(Host::new(number, self.seed, limits, noise));
        self.kinds.push(kind);
        number
    }

    /// Adds a model that is not loaded. Returns its number.
    pub fn add_model(&mut self, emulated: EmulatedModel) -> usize {
        self.models.push(ServedModel { emulated, serving: None, clustered: None, on: BTreeSet::new() });
        self.models.len() - 1
    }

    /// Sets the faults of the run.
    pub fn set_faults(&mut self, mut faults: Vec<(Time, Fault)>) {
        faults.sort_by_key(|(at, _)| *at);
        self.faults = faults.into();
    }

    /// Puts a model on one device. This policy decides about its requests.
    pub fn place(&mut self, model: usize, device: usize, policy: DeviceModel) {
        let ServedModel { emulated, on, .. } = &mut self.models[model];
        let placed = self.hosts[device].model(self.now, ModelId(model as u32), Some((emulated, policy)));
        if placed.is_ok() {
            on.insert(device);
        }
        self.ledger.changed(device);
    }

    /// Runs until no event is left, or until `outside` ends the run. Returns true if no event is
    /// left. Panics, with the seed, if one of the schedulers breaks a rule.
    pub fn run(&mut self, outside: &mut dyn Outside) -> bool {
        self.decide(outside);
        let begin = self.now;
        let (_, over) = node::run(&mut Running { world: self, outside }, begin);
        over.is_none()
    }

    fn happen(&mut self, now: Time, event: Next, outside: &mut dyn Outside) {
        self.now = now;
        self.cluster.set_time(now);
        for host in &mut self.hosts {
            host.advance(now, outside);
        }
        match event {
            // The devices have been advanced.
            Next::Device => {}
            Next::Sent => self.deliver(),
            Next::Fault => {
                if let Some((_, fault)) = self.faults.pop_front() {
                    self.go_wrong(fault, outside);
                }
            }
            Next::Prepared => {
                if let Some((_, host, model)) = self.preparing.pop_front() {
                    self.hosts[host].scheduler.handle_prepared(now, model, Ok(()));
                }
            }
            Next::Arrival => self.arrive(outside),
            Next::Leave => {
                if let Some((_, request)) = self.leaves.pop_first() {
                    self.leave(request, outside);
                }
            }
            Next::Timer => {
                self.cluster.work();
                for host in &mut self.hosts {
                    host.scheduler.handle_timeout(now);
                }
            }
        }
    }

    /// Checks at the end of the run that no request is left, removes all models, and checks that
    /// their state went with them.
    pub fn finish(&mut self, outside: &mut dyn Outside) {
        for model in 0..self.models.len() {
            self.remove(model);
            self.decide(outside);
        }
        self.cluster.settle();
        self.decide(outside);
        self.ledger.end(self.now);
        let present = self.slots.values().filter(|slot| slot.present).count() as u32;
        let free = self.cluster.devices();
        assert!(free == (present, present), "seed {}: of {present} slots (there, free) are {free:?}", self.seed);
        for host in &self.hosts {
            host.check_empty(self.now, self.seed);
        }
    }

    /// The world's time.
    pub fn now(&self) -> Time {
        self.now
    }

    fn arrive(&mut self, outside: &mut dyn Outside) {
        let (now, id) = (self.now, RequestId(self.next_request));
        self.next_request += 1;
        let Ask { model, size, length, level, deadline } = outside.arrive(now, id);
        let ServedModel { clustered, on, .. } = &self.models[model];
        // The cluster's scheduler knows no lengths.
        let length = if clustered.is_some() { 0 } else { length };
        let request = DeviceRequest { id, model: ModelId(model as u32), deadline, size, length };
        self.ledger.request(now, id, request.model, size);
        if let Some(place) = *clustered {
            self.requests.insert(id, Open { request, place: Place::Queue(place) });
            let asked = Request { id, model: place.model, deadline, queue_expiry: Time::MAX, level, size };
            // The shard's acceptance or refusal is heard later.
            self.cluster.post(|cluster| cluster.post(place, Event::Submit(asked), &mut ()));
            return;
        }
        let free_at = |device: &usize| self.hosts[*device].scheduler.free_at(now, request.model);
        let device = on.iter().copied().min_by_key(|device| (free_at(device), *device));
        let device = device.filter(|device| self.hosts[*device].request(now, &request).is_ok());
        self.requests.extend(device.map(|device| (id, Open { request, place: Place::Device(device) })));
        self.taken(id, device.is_some(), outside);
    }

    /// Records that a request was accepted or refused.
    fn taken(&mut self, id: RequestId, accepted: bool, outside: &mut dyn Outside) {
        self.ledger.taken(self.now, id, accepted);
        let leave = outside.arrived(self.now, id, accepted);
        if accepted {
            self.leaves.extend(leave.map(|at| (at, id)));
        } else {
            self.requests.remove(&id);
        }
    }

    fn leave(&mut self, id: RequestId, outside: &mut dyn Outside) {
        let Some(Open { request, place }) = self.requests.get(&id) else { return };
        match *place {
            // The shard's confirmation is heard later.
            Place::Queue(place) => {
                self.cluster.post(|cluster| cluster.post(place, Event::Cancel(place.model, id), &mut ()))
            }
            Place::Device(device) => {
                if self.hosts[device].cancel(self.now, request.model, id) {
                    self.end(id, Ending::Cancelled, outside);
                }
            }
            // The batch is answered all the same.
            Place::OnItsWay => {}
        }
        self.decide(outside);
    }

    fn end(&mut self, id: RequestId, ending: Ending, outside: &mut dyn Outside) {
        self.ledger.end_request(self.now, id, ending);
        self.requests.remove(&id);
        outside.ended(self.now, id, ending);
    }

    /// Carries out every decision of the schedulers.
    fn decide(&mut self, outside: &mut dyn Outside) {
        let now = self.now;
        loop {
            let mut more = false;
            self.tell_loads();
            self.cluster.work();
            while let Some(said) = self.cluster.hear() {
                more = true;
                match said {
                    Said::Taken(id, accepted) => self.taken(id, accepted, outside),
                    Said::Cancelled(id) => self.end(id, Ending::Cancelled, outside),
                    Said::Decided(output) => self.dispatch(output, outside),
                }
            }
            for index in 0..self.hosts.len() {
                self.hosts[index].carry_out(now, outside);
                while let Some(done) = self.hosts[index].done.pop_front() {
                    more = true;
                    match done {
                        Done::Request(id, ending) => self.end(id, ending, outside),
                        Done::Batch(slot, batch) => {
                            self.ledger.completed(now, slot, batch);
                            self.cluster.post(|cluster| cluster.complete(slot, batch, &mut ()));
                        }
                        Done::Prepare(model) => self.preparing.push_back((now + self.preparation, index, model)),
                    }
                }
            }
            if !more {
                return;
            }
        }
    }

    /// Tells the cluster's scheduler until when each slot's device is busy with models that have
    /// lanes of their own.
    fn tell_loads(&self) {
        for (id, Slot { host, lane, .. }) in self.slots.iter().filter(|(_, slot)| slot.present) {
            let scheduler = &self.hosts[*host].scheduler;
            let load = scheduler.lane(*lane).map_or(Time::ZERO, |lane| scheduler.load(self.now, lane.partition));
            self.cluster.tell(|cluster| cluster.set_load(*id, load));
        }
    }

    fn dispatch(&mut self, output: Output, outside: &mut dyn Outside) {
        let now = self.now;
        match output {
            Output::Drop { request, .. } => self.end(request, Ending::Dropped, outside),
            Output::Dispatch { batch, device: slot, model, members, size, .. } => {
                let model = ModelId(self.clustered[&model] as u32);
                self.ledger.granted(now, slot, batch, model, &members, size);
                for member in &members {
                    if let Some(open) = self.requests.get_mut(member) {
                        open.place = Place::OnItsWay;
                    }
                }
                let Some(Slot { host, lane, .. }) = self.slots.get(&slot).copied() else {
                    panic!("seed {}, {now}: {batch} is sent to {slot}, which is none", self.seed);
                };
                let there = now + self.network.delay(size, &mut self.rng);
                let batch = GrantedBatch { id: batch, model, lane, members, rows: size };
                self.sent.insert((there, self.next_sent), SentBatch { slot, host, batch });
                self.next_sent += 1;
                if there <= now {
                    self.deliver();
                }
            }
        }
    }

    /// Delivers the next batch to its device.
    fn deliver(&mut self) {
        let Some((_, SentBatch { slot, host, batch })) = self.sent.pop_first() else { return };
        let now = self.now;
        let members: Vec<DeviceRequest> =
            batch.members.iter().filter_map(|id| self.requests.get(id)).map(|open| open.request).collect();
        let id = batch.id;
        let there = self.slots.get(&slot).is_some_and(|slot| slot.present);
        if there && self.hosts[host].batch(now, slot, batch, &members).is_ok() {
            for member in members {
                if let Some(open) = self.requests.get_mut(&member.id) {
                    open.place = Place::Device(host);
                }
            }
        } else {
            let refused = Ending::Failed(Failure::Refused(host));
            let done = members.into_iter().map(|member| Done::Request(member.id, refused));
            self.hosts[host].done.extend(done.chain([Done::Batch(slot, id)]));
        }
    }
}
