//! A run of a cluster scheduler under virtual time.

use std::ops::ControlFlow;
use std::sync::Arc;

use downbeat_core::cluster::{DispatchPolicy, Request};
use downbeat_core::{BatchId, DeviceId, Duration, ModelId, RequestId, Time};
use rand::seq::IndexedRandom;
use rand_distr::{Distribution, Normal};
use rand_pcg::Pcg64;

use crate::arrivals::arrival::Arrival;
use crate::arrivals::feed::Source;
use crate::arrivals::{BadArrivals, random};
use crate::simulation::Simulation;
use crate::simulation::checker::Checker;
use crate::simulation::cluster::{ClusterScheduler, Decision};
use crate::simulation::execution::Execution;
use crate::simulation::network::Network;
use crate::simulation::node::{self, Node};
use crate::simulation::tally::{Run, Tally};
use crate::tables::report::Report;

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

struct World<'a, C> {
    cluster: C,
    feed: Source<'a>,
    /// A time, and the dispatch policies from then on.
    switch: Option<&'a (Time, Vec<DispatchPolicy>)>,
    seed: u64,
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
    pub fn run_on<C: ClusterScheduler>(&self, cluster: C) -> Result<Report, BadArrivals> {
        let mut world = World::new(self, cluster)?;
        let (now, gave_up) = node::run(&mut world, Time::ZERO);
        if gave_up.is_none() {
            world.checker.end(now);
        }
        Ok(world.tally.report(now))
    }
}

/// The next event of a run. At one instant they come in this order.
enum Event {
    Switch,
    Completion,
    Arrival,
    Timer,
}

impl<C: ClusterScheduler> Node for World<'_, C> {
    type Event = Event;
    /// Some model has too many bad requests.
    type End = ();

    /// Thousands of models may have an arrival at one instant.
    const STUCK: u32 = u32::MAX;

    fn seed(&self) -> u64 {
        self.seed
    }

    fn poll_event(&mut self) -> Option<(Time, Event)> {
        let (end, arrival) = (self.execution.next_event(), self.feed.peek());
        let timeout = self.cluster.poll_timeout().unwrap_or(Time::MAX);
        let next = end.min(arrival).min(timeout);
        match self.switch {
            Some((at, _)) if *at <= next => Some((*at, Event::Switch)),
            _ if next == Time::MAX => None,
            _ if end == next => Some((next, Event::Completion)),
            _ if arrival == next => Some((next, Event::Arrival)),
            _ => Some((next, Event::Timer)),
        }
    }

    fn handle_event(&mut self, now: Time, event: Event) -> ControlFlow<()> {
        match event {
            Event::Switch => {
                let dispatches = self.switch.take().map_or(&[][..], |(_, dispatches)| dispatches);
                for (dispatch, model) in dispatches.iter().zip(0..) {
                    self.cluster.set_dispatch(now, ModelId(model), dispatch.clone());
                }
            }
            Event::Completion => self.complete(now),
            Event::Arrival => {
                if let Some(arrival) = self.feed.pop() {
                    self.arrive(now, arrival);
                }
            }
            Event::Timer => self.cluster.handle_timeout(now),
        }
        self.decide(now);
        if self.tally.gave_up() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl<'a, C: ClusterScheduler> World<'a, C> {
    /// The cluster with its devices and models, before the first request.
    fn new(simulation: &'a Simulation, cluster: C) -> Result<Self, BadArrivals> {
        let mut world = World {
            cluster,
            feed: Source::new(simulation)?,
            switch: simulation.switch.as_ref(),
            seed: simulation.seed,
            checker: Checker::new(simulation.seed),
            tally: Tally::new(simulation),
            next_request: 0,
            running: (0..simulation.devices).map(|_| None).collect(),
            sent: (0..simulation.devices).map(|_| None).collect(),
            network: simulation.network,
            execution: Execution::new(simulation.given.as_deref()),
            noise: (simulation.noise > 0.0).then(|| Normal::new(1.0, simulation.noise).ok()).flatten(),
            executions: simulation.executions.clone(),
            rng: random(simulation.seed, u64::MAX),
        };
        if simulation.network.budget.is_remote() {
            world.checker.network();
        }
        world.cluster.set_network(Time::ZERO, simulation.network.budget);
        for device in 0..simulation.devices as usize {
            world.cluster.add_device(Time::ZERO, simulation.kinds.get(device).copied().unwrap_or_default());
            world.checker.device();
        }
        for (index, load) in simulation.loads.iter().enumerate() {
            let model = world.cluster.add_model(Time::ZERO, load.options.clone(), load.slo, load.rate);
            if let Some(behaviour) = simulation.behaviours.get(index).copied().flatten() {
                world.cluster.set_behaviour(Time::ZERO, model, behaviour);
            }
            world.checker.model(load.options.max_batch.max(1), load.options.drop);
        }
        Ok(world)
    }

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
