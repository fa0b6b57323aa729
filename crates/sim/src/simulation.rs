//! A run of a cluster scheduler under virtual time.

use std::sync::Arc;

use downbeat_core::cluster::{DispatchPolicy, ModelOptions, OrderPolicy, Request};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, ModelId, RequestId, Time};
use rand::seq::IndexedRandom;
use rand_distr::{Distribution, Normal};
use rand_pcg::Pcg64;

use crate::arrivals::{Arrivals, BadArrivals, random};
use crate::checker::Checker;
use crate::cluster::{Cluster, Decision};
use crate::execution::{Devices, Execution};
use crate::feed::{Arrival, Source};
use crate::network::Network;
use crate::pace::Pace;
use crate::rehearsed::EVENTS_PER_SECOND;
use crate::report::Report;
use crate::system::{Downbeat, System};
use crate::tally::{Run, Tally};

/// A model and its requests.
#[derive(Clone, Debug)]
pub struct Load {
    /// The model's options for the scheduler.
    pub options: ModelOptions,
    /// Time from a request's arrival to its deadline.
    pub slo: Duration,
    /// The arrival process.
    pub arrivals: Arrivals,
    /// Requests per second, before [`Load::pace`] changes it.
    pub rate: f64,
    /// The change of the rate over time.
    pub pace: Pace,
}

/// A cluster, its load, and the length of the run. By default there is neither a model nor a
/// device, and 10 s count after a warm-up of 1 s.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// The kind of scheduler.
    pub system: Arc<dyn System>,
    /// The models.
    pub loads: Vec<Load>,
    /// Devices, all free at the start.
    pub devices: u32,
    /// The kind of each device; a device without an entry is of kind 0.
    pub kinds: Vec<DeviceKind>,
    /// Devices with execution times of their own; `None`: the times of the profiles, with
    /// [`Simulation::noise`].
    pub given: Option<Arc<dyn Devices>>,
    /// Arrivals before this are served but not counted.
    pub warm_up: Duration,
    /// Time in which arrivals count, after the warm-up.
    pub span: Duration,
    /// Standard deviation of an execution time as a share of the profile's; 0: the profile's time
    /// without noise.
    pub noise: f64,
    /// For each model: equally likely execution times, as shares of the profile's time. A model
    /// without entry or with an empty one has [`Simulation::noise`].
    pub executions: Vec<Arc<[f64]>>,
    /// Chooses all random numbers.
    pub seed: u64,
    /// End the run early once more than this share of some model's requests is certain to be
    /// dropped or late.
    pub give_up_above: Option<f64>,
    /// Length of the windows of time of [`Report::windows`]; zero: none.
    pub window: Duration,
    /// Record every batch and request.
    pub record: bool,
    /// The delays of messages.
    pub network: Network,
    /// A time, and the dispatch policy that each model has from then on.
    pub switch: Option<(Time, Vec<DispatchPolicy>)>,
    /// Events that the rehearsal of adaptive models may replay in a second. 0: no rehearsal; the
    /// models' behaviour follows from the load of the moment.
    pub rehearsal: u64,
    /// The order in which candidates get devices, in Downbeat's own scheduler.
    pub order: OrderPolicy,
    /// Requests in order of their time, which replace the requests that the loads would draw.
    /// Requests of the warm-up do not count.
    pub recorded: Option<Arc<[Arrival]>>,
}

impl Default for Simulation {
    fn default() -> Self {
        Simulation {
            system: Arc::new(Downbeat),
            loads: Vec::new(),
            devices: 0,
            kinds: Vec::new(),
            given: None,
            warm_up: Duration::from_millis(1_000),
            span: Duration::from_millis(10_000),
            noise: 0.0,
            executions: Vec::new(),
            seed: 1,
            give_up_above: None,
            window: Duration::ZERO,
            record: false,
            network: Network::default(),
            switch: None,
            rehearsal: EVENTS_PER_SECOND,
            order: OrderPolicy::default(),
            recorded: None,
        }
    }
}

/// A batch on its way, or at its device.
struct Sent {
    batch: BatchId,
    device: DeviceId,
    model: ModelId,
    members: Vec<RequestId>,
    size: u32,
    /// The time at which the batch and its inputs are at the device.
    ready: Time,
    took: Duration,
}

struct World<C> {
    cluster: C,
    checker: Checker,
    tally: Tally,
    next_request: u64,
    /// For each device: the running batch.
    running: Vec<Option<(BatchId, Run)>>,
    /// For each device: the batch that was sent while another one runs.
    sent: Vec<Option<Sent>>,
    network: Network,
    execution: Execution,
    noise: Option<Normal<f64>>,
    executions: Vec<Arc<[f64]>>,
    rng: Pcg64,
}

impl Simulation {
    /// Runs the simulation. Panics, with the seed, if the scheduler breaks one of the [`Checker`]'s
    /// rules.
    ///
    /// # Errors
    /// If an arrival process has no positive, finite rate and shape.
    pub fn run(&self) -> Result<Report, BadArrivals> {
        self.system.run(self)
    }

    /// Runs the simulation on this cluster scheduler instead of [`Simulation::system`]. The
    /// scheduler has neither models nor devices yet. Panics, with the seed, if it breaks one of the
    /// [`Checker`]'s rules.
    ///
    /// # Errors
    /// If an arrival process has no positive, finite rate and shape.
    pub fn run_on<C: Cluster>(&self, cluster: C) -> Result<Report, BadArrivals> {
        let mut world = World {
            cluster,
            checker: Checker::new(self.seed),
            tally: Tally::new(self),
            next_request: 0,
            running: (0..self.devices).map(|_| None).collect(),
            sent: (0..self.devices).map(|_| None).collect(),
            network: self.network,
            execution: Execution::new(self.given.as_deref()),
            noise: (self.noise > 0.0).then(|| Normal::new(1.0, self.noise).ok()).flatten(),
            executions: self.executions.clone(),
            rng: random(self.seed, u64::MAX),
        };
        if self.network.budget.is_remote() {
            world.checker.network();
        }
        world.cluster.set_network(Time::ZERO, self.network.budget);
        for device in 0..self.devices as usize {
            world.cluster.add_device(Time::ZERO, self.kinds.get(device).copied().unwrap_or_default());
            world.checker.device();
        }
        for load in &self.loads {
            world.cluster.add_model(Time::ZERO, load.options.clone(), load.slo, load.rate);
            world.checker.model(load.options.max_batch.max(1), load.options.drop);
        }
        let mut feed = Source::new(self)?;
        let mut now = Time::ZERO;
        let mut switch = self.switch.as_ref();
        loop {
            let arrival = feed.peek();
            let end = world.execution.next_event();
            let timeout = world.cluster.poll_timeout().unwrap_or(Time::MAX);
            // At one instant: completions, then arrivals, then timers.
            let next = end.min(arrival).min(timeout);
            if let Some((at, dispatches)) = switch.filter(|(at, _)| *at <= next) {
                switch = None;
                for (dispatch, model) in dispatches.iter().zip(0..) {
                    world.cluster.set_dispatch(*at, ModelId(model), dispatch.clone());
                }
                now = now.max(*at);
                world.decide(now);
                continue;
            }
            if next == Time::MAX {
                world.checker.end(now);
                break;
            }
            now = now.max(next);
            if end == next {
                world.complete(now);
            } else if arrival == next {
                let Some(arrival) = feed.pop() else { break };
                world.arrive(now, arrival);
            } else {
                world.cluster.handle_timeout(now);
            }
            world.decide(now);
            if world.tally.gave_up() {
                break;
            }
        }
        Ok(world.tally.report(now))
    }
}

impl<C: Cluster> World<C> {
    fn arrive(&mut self, now: Time, arrival: Arrival) {
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let Arrival { at: _, model, deadline, queue_expiry, level, size } = arrival;
        let request = Request { id, model, deadline, queue_expiry, level, size };
        self.checker.request(now, id, model, deadline, size);
        self.tally.arrival(now, model);
        if self.cluster.handle_request(now, request).is_err() {
            self.checker.rejection(now, id);
            self.tally.rejection(now, model);
        }
    }

    fn complete(&mut self, now: Time) {
        let Some(device) = self.execution.ended(now) else { return };
        let Some((batch, run)) = self.running[device.0 as usize].take() else { return };
        self.tally.stopped(now, &run, false);
        self.checker.completion(now, run.device, batch);
        for member in &run.members {
            let known = self.checker.finished(now, *member, run.model);
            self.tally.finished(now + self.network.budget.reply, &run, *member, &known);
        }
        self.cluster.recycle(run.members);
        if let Some(next) = self.sent[device.0 as usize].take() {
            self.start(now, next);
        }
        self.cluster.handle_completion(now, device, batch);
    }

    fn decide(&mut self, now: Time) {
        while let Some(decision) = self.cluster.poll_decision() {
            self.checker.decision(now, &decision);
            match decision {
                Decision::Drop { request, model, reason } => {
                    self.tally.dropped(self.checker.known(now, request), model, reason);
                }
                Decision::Dispatch { batch, device, model, members, size, start: _, expected } => {
                    let measured =
                        self.executions.get(model.0 as usize).and_then(|shares| shares.choose(&mut self.rng));
                    let share = measured.copied().or_else(|| Some(self.noise.as_ref()?.sample(&mut self.rng)));
                    // An execution takes at least 1% of the expected time, whatever the noise.
                    let took = share
                        .map_or(expected, |share| Duration::from_secs_f64(expected.as_secs_f64() * share.max(0.01)));
                    let ready = now + self.network.delay(size, &mut self.rng);
                    let sent = Sent { batch, device, model, members, size, ready, took };
                    if self.running[device.0 as usize].is_some() {
                        self.sent[device.0 as usize] = Some(sent);
                    } else {
                        self.start(now, sent);
                    }
                }
                Decision::Preempt { batch: _, device } => {
                    self.execution.stop(device);
                    let Some((_, run)) = self.running[device.0 as usize].take() else { continue };
                    self.tally.stopped(now, &run, true);
                    for member in &run.members {
                        self.checker.waits_again(now, *member, run.model);
                    }
                    self.cluster.recycle(run.members);
                }
            }
        }
    }

    /// The free device starts the batch as soon as the batch is there.
    fn start(&mut self, now: Time, sent: Sent) {
        let Sent { batch, device, model, members, size, ready, took } = sent;
        let start = now.max(ready);
        let run = self.tally.started(start, device, model, members, size);
        self.running[device.0 as usize] = Some((batch, run));
        self.execution.start(start, device, model, size, took);
    }
}
