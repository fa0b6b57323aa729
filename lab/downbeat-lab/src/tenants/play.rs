//! Runs of tenants' requests in virtual time.

use std::ops::ControlFlow;

use downbeat_core::cluster::{IndexedHeap, ItemCost, ModelOptions, Output, Request, Scheduler};
use downbeat_core::tenants::{Ledger, Standing, TenantId, TenantPart, largest_lent_batch};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, ModelId, RequestId, Time};
use downbeat_sim::simulation::node::{self, Node};
use downbeat_sim::{ModelProfile, Policy, random};
use rand_distr::{Distribution, Normal};
use rand_pcg::Pcg64;

use super::workload::TenantArrival;

/// A cluster that tenants share.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// The models.
    pub models: Vec<ModelProfile>,
    /// The number of devices.
    pub devices: u32,
    /// The scheduler.
    pub policy: Policy,
    /// The tenants' parts; `None`: all requests are equal.
    pub tenants: Option<Vec<TenantPart>>,
    /// The time whose share a tenant may save up.
    pub depth: Duration,
    /// Standard deviation of an execution time, as a share of it.
    pub noise: f64,
    /// Chooses the execution times.
    pub seed: u64,
}

/// The end of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TenantEnd {
    /// The request, by its place in the arrivals.
    pub request: usize,
    /// When the request ended.
    pub at: Time,
    /// Whether the request has run.
    pub ran: bool,
}

/// A batch that ran.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TenantBatch {
    /// The device.
    pub device: u32,
    /// The begin of the run.
    pub start: Time,
    /// The end of the run.
    pub end: Time,
    /// The requests, by their places in the arrivals.
    pub members: Vec<usize>,
}

/// What happened in a run.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TenantLog {
    /// The ends, in order of time.
    pub ends: Vec<TenantEnd>,
    /// The batches, in order of their ends.
    pub batches: Vec<TenantBatch>,
}

/// Plays all arrivals, until every request has ended.
pub fn play(cluster: &Cluster, arrivals: &[TenantArrival]) -> TenantLog {
    let mut world = World::new(cluster, arrivals);
    node::run(&mut world, Time::ZERO);
    world.log
}

/// A model with its queues.
struct Served {
    slo: Duration,
    own: ModelId,
    /// The queue of requests beyond their tenants' shares.
    lent: ModelId,
    cost: ItemCost,
}

struct World<'a> {
    scheduler: Scheduler,
    ledger: Option<Ledger>,
    models: Vec<Served>,
    arrivals: &'a [TenantArrival],
    next: usize,
    /// By request: its standing, and its estimated time.
    taken: Vec<(Standing, Duration)>,
    /// By device: the running batch, with its expected time.
    running: Vec<Option<(BatchId, Duration, TenantBatch)>>,
    ends: IndexedHeap<Time>,
    noise: Option<Normal<f64>>,
    rng: Pcg64,
    seed: u64,
    log: TenantLog,
}

enum Event {
    Completion,
    Arrival,
    Timer,
}

impl Node for World<'_> {
    type Event = Event;
    type End = ();

    fn seed(&self) -> u64 {
        self.seed
    }

    fn poll_event(&mut self) -> Option<(Time, Event)> {
        let end = self.ends.peek().map_or(Time::MAX, |(at, _)| at);
        let arrival = self.arrivals.get(self.next).map_or(Time::MAX, |arrival| arrival.at);
        let timeout = self.scheduler.poll_timeout().map_or(Time::MAX, |(at, _)| at);
        match end.min(arrival).min(timeout) {
            Time::MAX => None,
            at if at == end => Some((at, Event::Completion)),
            at if at == arrival => Some((at, Event::Arrival)),
            at => Some((at, Event::Timer)),
        }
    }

    fn handle_event(&mut self, now: Time, event: Event) -> ControlFlow<()> {
        match event {
            Event::Completion => self.complete(now),
            Event::Arrival => self.arrive(now),
            Event::Timer => self.scheduler.handle_timeout(now),
        }
        self.decide(now);
        ControlFlow::Continue(())
    }
}

impl<'a> World<'a> {
    fn new(cluster: &Cluster, arrivals: &'a [TenantArrival]) -> Self {
        let mut scheduler = Scheduler::new();
        scheduler.set_order(Time::ZERO, cluster.policy.order().first());
        for _ in 0..cluster.devices {
            scheduler.add_device(Time::ZERO, DeviceKind(0));
        }
        let shortest = cluster.models.iter().map(ModelProfile::slo).min().unwrap_or(Duration::MAX);
        let served = |model: &ModelProfile| {
            let (slo, profile) = (model.slo(), model.latency(0));
            let cost = ItemCost::new(&profile, profile.max_batch(), slo, cluster.devices);
            let options = ModelOptions::new(profile.clone(), cluster.policy.dispatch(slo), cluster.policy.drop());
            let own = scheduler.add_model(Time::ZERO, options.clone());
            let lent = match cluster.tenants {
                None => own,
                Some(_) => {
                    let max_batch = largest_lent_batch(&profile, profile.max_batch(), shortest, cluster.devices);
                    let options = ModelOptions { max_batch, shares_limit: Some(own), ..options };
                    let lent = scheduler.add_model(Time::ZERO, options);
                    scheduler.set_lent(Time::ZERO, lent);
                    lent
                }
            };
            Served { slo, own, lent, cost }
        };
        let models = cluster.models.iter().map(served).collect();
        World {
            ledger: cluster.tenants.as_ref().map(|parts| Ledger::new(parts, cluster.devices, cluster.depth)),
            scheduler,
            models,
            arrivals,
            next: 0,
            taken: Vec::with_capacity(arrivals.len()),
            running: (0..cluster.devices).map(|_| None).collect(),
            ends: IndexedHeap::new(),
            noise: (cluster.noise > 0.0).then(|| Normal::new(1.0, cluster.noise).ok()).flatten(),
            rng: random(cluster.seed, u64::MAX),
            seed: cluster.seed,
            log: TenantLog::default(),
        }
    }

    fn arrive(&mut self, now: Time) {
        let request = self.next;
        let TenantArrival { tenant, model, .. } = self.arrivals[request];
        self.next += 1;
        let served = &self.models[model as usize];
        let estimate = served.cost.of(1);
        let arrived = self.ledger.as_mut().and_then(|ledger| ledger.arrive(now, TenantId(tenant), estimate));
        let standing = match arrived {
            None => Standing::Within,
            Some(Ok(standing)) => standing,
            Some(Err(_)) => {
                self.taken.push((Standing::Beyond, Duration::ZERO));
                self.log.ends.push(TenantEnd { request, at: now, ran: false });
                return;
            }
        };
        self.taken.push((standing, estimate));
        let queue = if standing == Standing::Within { served.own } else { served.lent };
        let asked = Request {
            id: RequestId(request as u64),
            model: queue,
            deadline: now + served.slo,
            queue_expiry: Time::MAX,
            level: 0,
            size: 1,
        };
        if self.scheduler.handle_request(now, asked).is_err() {
            self.give_up(now, request);
        }
    }

    fn give_up(&mut self, now: Time, request: usize) {
        self.settle(request, Duration::ZERO);
        self.log.ends.push(TenantEnd { request, at: now, ran: false });
    }

    fn settle(&mut self, request: usize, actual: Duration) {
        let (standing, estimate) = self.taken[request];
        if let Some(ledger) = &mut self.ledger {
            ledger.settle(TenantId(self.arrivals[request].tenant), standing, estimate, actual);
        }
    }

    fn complete(&mut self, now: Time) {
        let Some((_, device)) = self.ends.pop() else { return };
        let Some((batch, expected, run)) = self.running[device as usize].take() else { return };
        for request in &run.members {
            let cost = self.models[self.arrivals[*request].model as usize].cost;
            self.settle(*request, cost.corrected(1, run.end.since(run.start), expected));
            self.log.ends.push(TenantEnd { request: *request, at: now, ran: true });
        }
        self.log.batches.push(run);
        self.scheduler.handle_completion(now, DeviceId(device), batch);
    }

    fn decide(&mut self, now: Time) {
        while let Some(output) = self.scheduler.poll_output() {
            match output {
                Output::Drop { request, .. } => self.give_up(now, request.0 as usize),
                Output::Dispatch { batch, device, members, expected, .. } => {
                    let share = self.noise.as_ref().map_or(1.0, |noise| noise.sample(&mut self.rng).max(0.01));
                    let end = now + Duration::from_secs_f64(expected.as_secs_f64() * share);
                    let requests = members.iter().map(|id| id.0 as usize).collect();
                    let run = TenantBatch { device: device.0, start: now, end, members: requests };
                    assert!(
                        self.running[device.0 as usize].replace((batch, expected, run)).is_none(),
                        "seed {}, {now}: a device runs one batch at a time",
                        self.seed
                    );
                    self.ends.set(device.0, end);
                    self.scheduler.recycle(members);
                }
            }
        }
    }
}
