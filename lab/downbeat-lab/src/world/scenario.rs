//! The parts of a world: devices, models, clients and faults. A report tells the outcome.

use std::collections::BTreeMap;

use downbeat_core::cluster::NetworkBudget;
use downbeat_core::device::{Launch, Layout};
use downbeat_core::{DeviceKind, Duration, RequestId, Time};
use rand_distr::{Distribution, StandardUniform};
use rand_pcg::Pcg64;

use super::ledger::Ending;
use super::mailboxes::{self, Order};
use super::run::{Ask, Fault, Outside, Serving, World};
use crate::device::{DeviceLimits, EmulatedModel};
use downbeat_sim::Network;
use downbeat_sim::{ArrivalStream, Arrivals, BadArrivals, random};

/// A world: devices, models, clients and faults. A run is determined by the world and its seed.
#[derive(Clone, Debug, Default)]
pub struct WorldScenario {
    /// The devices.
    pub devices: Vec<WorldDevice>,
    /// The models.
    pub models: Vec<WorldModel>,
    /// The clients.
    pub clients: Vec<Client>,
    /// The faults, with their times.
    pub faults: Vec<(Time, Fault)>,
    /// The network between the cluster's scheduler and the devices, for the batches that the
    /// scheduler makes.
    pub network: Network,
    /// The number of shards of the cluster's scheduler, at most [`downbeat_driver::MAX_SHARDS`]; 0
    /// is taken as 1.
    pub shards: u32,
    /// The order in which shards are worked off.
    pub order: Order,
    /// Standard deviation of a launch's time, as a share of its model's time. With 0 a launch takes
    /// exactly that time.
    pub noise: f64,
    /// The seed of all random numbers.
    pub seed: u64,
}

/// A device.
#[derive(Clone, Debug)]
pub struct WorldDevice {
    /// The resources that its launches share; each partition has an equal part of its units.
    pub limits: DeviceLimits,
    /// Its partitions, and the slots in each.
    pub layout: Layout,
    /// Its kind, which selects the profile that the cluster's scheduler uses.
    pub kind: DeviceKind,
}

/// A model.
#[derive(Clone, Debug)]
pub struct WorldModel {
    /// The emulated work of its launches.
    pub emulated: EmulatedModel,
    /// The scheduler of its batches at the start; `None`: the model is not loaded.
    pub serving: Option<Serving>,
}

/// A client that sends requests to one model.
#[derive(Clone, Debug)]
pub struct Client {
    /// The model, by number.
    pub model: usize,
    /// The times at which it sends.
    pub pattern: Pattern,
    /// The most requests that it sends.
    pub requests: u64,
    /// The time when it stops sending.
    pub until: Time,
    /// The most items of a request; each request has 1 up to this many.
    pub most_items: u32,
    /// The greatest length; each request has 1 up to this much. 0: requests have no length.
    pub most_length: u32,
    /// The lowest priority level, 0 being the highest; each request draws its level.
    pub lowest_level: u32,
    /// The time from arrival to deadline; `None`: requests have no deadline.
    pub slo: Option<Duration>,
    /// The share of requests whose clients go away, within twice the SLO (or a second without one).
    pub leaves: f64,
}

/// The times at which a client sends.
#[derive(Clone, Copy, Debug)]
pub enum Pattern {
    /// At this many requests per second, whether or not earlier ones are answered.
    Open(Arrivals, f64),
    /// This long after its last request ended.
    Closed(Duration),
}

impl Client {
    /// A client without think time: it sends a request of one item as soon as the last one has
    /// ended.
    pub fn closed(model: usize, requests: u64) -> Self {
        Client {
            model,
            pattern: Pattern::Closed(Duration::ZERO),
            requests,
            until: Time::MAX,
            most_items: 1,
            most_length: 0,
            lowest_level: 0,
            slo: None,
            leaves: 0.0,
        }
    }
}

/// The outcomes of a model's requests. Each request is counted once.
#[derive(Clone, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct ModelOutcome {
    /// All requests.
    pub offered: u64,
    /// Answered by their deadlines.
    pub good: u64,
    /// Answered after their deadlines.
    pub late: u64,
    /// Dropped by a scheduler.
    pub dropped: u64,
    /// Rejected on arrival.
    pub rejected: u64,
    /// Cancelled, because their clients went away.
    pub cancelled: u64,
    /// Answered with an error, because of a fault.
    pub failed: u64,
    /// The times from arrival to answer, in the order of the answers.
    #[serde(skip)]
    pub latencies: Vec<Duration>,
}

/// The outcome of a run.
#[derive(Clone, PartialEq, Debug)]
pub struct WorldReport {
    /// The outcomes of each model.
    pub models: Vec<ModelOutcome>,
    /// By device: the time in which a launch ran on it.
    pub busy: Vec<Duration>,
    /// By device: the number of launches.
    pub launches: Vec<u64>,
    /// The time of the last event.
    pub end: Time,
}

impl WorldScenario {
    /// Runs the world until no event is left. Panics, with the seed, if a scheduler breaks one of
    /// the rules of [`super::Ledger`] or [`LaunchChecker`](crate::device::LaunchChecker).
    ///
    /// # Errors
    /// If a client's arrival process has no positive, finite rate and shape.
    pub fn run(&self) -> Result<WorldReport, BadArrivals> {
        let kinds = self.devices.iter().map(|device| device.kind.0 + 1).max().unwrap_or(1);
        let budget = NetworkBudget { reply: Duration::ZERO, ..self.network.budget };
        let cluster = mailboxes::cluster(self.shards, kinds, budget);
        let mut world = World::new(self.seed, self.network, &cluster, self.order);
        for (device, number) in self.devices.iter().zip(0..) {
            world.add_device(device.limits, device.kind, self.noise);
            world.divide(number, &device.layout);
            world.hosts[number].checker.ahead();
        }
        for model in &self.models {
            let number = world.add_model(model.emulated.clone());
            if let Some(serving) = &model.serving {
                world.load(number, serving);
            }
        }
        world.set_faults(self.faults.clone());
        let mut crowd = Crowd {
            clients: &self.clients,
            rng: random(self.seed, 3),
            streams: Vec::new(),
            next: Vec::new(),
            left: self.clients.iter().map(|client| client.requests).collect(),
            open: BTreeMap::new(),
            report: WorldReport {
                models: vec![ModelOutcome::default(); self.models.len()],
                busy: Vec::new(),
                launches: vec![0; self.devices.len()],
                end: Time::ZERO,
            },
        };
        for (client, stream) in self.clients.iter().zip(16..) {
            let mut stream = match client.pattern {
                Pattern::Open(arrivals, rate) => Some(arrivals.stream(rate, self.seed, stream)?),
                Pattern::Closed(_) => None,
            };
            let first = stream.as_mut().map_or(Time::ZERO, ArrivalStream::next_arrival);
            crowd.next.push((client.requests > 0).then_some(first));
            crowd.streams.push(stream);
        }
        world.run(&mut crowd);
        crowd.report.end = world.now();
        world.finish(&mut crowd);
        crowd.report.busy = world.hosts.iter().map(|host| host.busy).collect();
        Ok(crowd.report)
    }
}

/// All clients.
struct Crowd<'a> {
    clients: &'a [Client],
    rng: Pcg64,
    /// By client; `None`: it sends after its last request has ended.
    streams: Vec<Option<ArrivalStream>>,
    /// By client, the time of its next request.
    next: Vec<Option<Time>>,
    /// By client, the number of requests left to send.
    left: Vec<u64>,
    /// Requests that have not ended.
    open: BTreeMap<RequestId, SentRequest>,
    report: WorldReport,
}

#[derive(Clone, Copy)]
struct SentRequest {
    client: usize,
    arrival: Time,
    deadline: Time,
}

impl Crowd<'_> {
    fn chance(&mut self) -> f64 {
        StandardUniform.sample(&mut self.rng)
    }

    fn up_to(&mut self, most: u32) -> u32 {
        (self.chance() * f64::from(most)) as u32
    }

    fn outcome(&mut self, client: usize) -> &mut ModelOutcome {
        &mut self.report.models[self.clients[client].model]
    }

    /// Ends a request: its client may send another one.
    fn over(&mut self, now: Time, client: usize) {
        if let Pattern::Closed(think) = self.clients[client].pattern
            && self.left[client] > 0
        {
            self.next[client] = Some(now + think);
        }
    }
}

impl Outside for Crowd<'_> {
    fn next_arrival(&self) -> Option<Time> {
        let next = self.next.iter().zip(self.clients);
        next.filter_map(|(next, client)| next.filter(|at| *at <= client.until)).min()
    }

    fn arrive(&mut self, now: Time, request: RequestId) -> Ask {
        let due =
            |client: &usize| self.next[*client].filter(|at| *at <= self.clients[*client].until).unwrap_or(Time::MAX);
        let client = (0..self.next.len()).min_by_key(due).unwrap_or(0);
        self.left[client] -= 1;
        let next = self.streams[client].as_mut().filter(|_| self.left[client] > 0).map(ArrivalStream::next_arrival);
        self.next[client] = next;
        let Client { model, most_items, most_length, lowest_level, slo, .. } = self.clients[client];
        let deadline = slo.map_or(Time::MAX, |slo| now + slo);
        self.open.insert(request, SentRequest { client, arrival: now, deadline });
        self.outcome(client).offered += 1;
        let size = 1 + self.up_to(most_items.max(1));
        let length = if most_length > 0 { 1 + self.up_to(most_length) } else { 0 };
        let level = self.up_to(lowest_level + 1);
        Ask { model, size: size.min(most_items.max(1)), length, level, deadline }
    }

    fn arrived(&mut self, now: Time, request: RequestId, accepted: bool) -> Option<Time> {
        let client = self.open.get(&request)?.client;
        if !accepted {
            self.open.remove(&request);
            self.outcome(client).rejected += 1;
            // A refused client waits 1 ms before its next request.
            self.over(now + Duration::from_millis(1), client);
            return None;
        }
        let Client { slo, leaves, .. } = self.clients[client];
        let patience = slo.unwrap_or(Duration::from_millis(500)).as_secs_f64() * 2.0;
        (self.chance() < leaves).then(|| now + Duration::from_secs_f64(patience * self.chance()))
    }

    fn ended(&mut self, now: Time, request: RequestId, ending: Ending) {
        let Some(SentRequest { client, arrival, deadline }) = self.open.remove(&request) else { return };
        let outcome = self.outcome(client);
        match ending {
            Ending::Replied => {
                outcome.latencies.push(now.since(arrival));
                *(if now <= deadline { &mut outcome.good } else { &mut outcome.late }) += 1;
            }
            Ending::Dropped => outcome.dropped += 1,
            Ending::Cancelled => outcome.cancelled += 1,
            Ending::Failed(_) => outcome.failed += 1,
        }
        self.over(now, client);
    }

    fn launched(&mut self, device: usize, _: &Launch) {
        self.report.launches[device] += 1;
    }
}
