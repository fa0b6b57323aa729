//! The production scheduler with its rehearsal.

use downbeat_core::cluster::{
    DispatchPolicy, ModelOptions, NetworkBudget, PastArrival, Rehearsal, Reject, Request, Scheduler,
};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, ModelId, RequestId, Time};

use crate::simulation::Simulation;
use crate::simulation::cluster::{ClusterScheduler, Decision};

/// The interval at which the rehearsal gets its share of events.
const TICK: Duration = Duration::from_millis(20);

/// The production [`Scheduler`] with its [`Rehearsal`], which may replay as many events a second as
/// a server has time for.
#[derive(Debug)]
pub(crate) struct Rehearsed {
    scheduler: Scheduler,
    rehearsal: Rehearsal,
    /// Events that the rehearsal may replay in a second.
    pace: u64,
    /// The options of each model.
    options: Vec<ModelOptions>,
    /// The number of devices of each kind.
    devices: Vec<u32>,
    /// The last time that the rehearsal got events.
    ticked: Time,
    /// For each device: the running batch, its model, its start, and its expected duration.
    running: Vec<Option<(BatchId, ModelId, Time, Duration)>>,
    network: NetworkBudget,
    /// How long before its last moment a batch that waits starts.
    wake_margin: Duration,
}

impl Rehearsed {
    /// A scheduler without models and devices; `None` if no model is adaptive or the rehearsal is
    /// off. It consolidates if all adaptive models are consolidating.
    pub fn of(simulation: &Simulation) -> Option<Self> {
        let adaptive = simulation.loads.iter().map(|load| &load.options).filter(|options| options.is_adaptive());
        let wishes = adaptive.map(|options| options.dispatch.adaptive() == Some(true));
        let consolidate = wishes.reduce(|all, wish| all && wish).filter(|_| simulation.rehearsal > 0)?;
        let (mut scheduler, mut rehearsal) = (Scheduler::new(), Rehearsal::new(consolidate, simulation.seed));
        let (network, wake_margin) = (NetworkBudget::default(), simulation.wake_margin);
        scheduler.set_order(Time::ZERO, simulation.order.first());
        scheduler.set_wake_margin(Time::ZERO, wake_margin);
        rehearsal.set_order(simulation.order);
        rehearsal.set_delays(network, wake_margin);
        Some(Rehearsed {
            scheduler,
            rehearsal,
            pace: simulation.rehearsal,
            options: Vec::new(),
            devices: Vec::new(),
            ticked: Time::ZERO,
            running: Vec::new(),
            network,
            wake_margin,
        })
    }

    /// Lets the rehearsal replay events for the time that has passed, and carries out its
    /// decisions.
    fn rehearse(&mut self, now: Time) {
        let passed = now.since(self.ticked);
        if passed < TICK {
            return;
        }
        self.ticked = now;
        let events = self.pace as f64 * passed.as_secs_f64().min(1.0);
        self.rehearsal.step(events as u64);
        while let Some(decision) = self.rehearsal.poll_decision() {
            for (behaviour, model) in decision.behaviours.iter().zip(0..).filter(|_| decision.changed) {
                self.scheduler.set_behaviour(now, ModelId(model), *behaviour);
            }
            self.scheduler.set_order(now, decision.order);
        }
    }
}

impl ClusterScheduler for Rehearsed {
    fn set_dispatch(&mut self, now: Time, model: ModelId, dispatch: DispatchPolicy) {
        if let Some(options) = self.options.get_mut(model.0 as usize) {
            options.dispatch = dispatch.clone();
            self.rehearsal.set_model(model, Some(options.clone()));
        }
        self.scheduler.set_dispatch(now, model, dispatch);
    }

    fn set_network(&mut self, now: Time, network: NetworkBudget) {
        self.network = network;
        self.rehearsal.set_delays(network, self.wake_margin);
        ClusterScheduler::set_network(&mut self.scheduler, now, network);
    }

    fn add_model(&mut self, now: Time, options: ModelOptions, slo: Duration, rate: f64) -> ModelId {
        let model = ClusterScheduler::add_model(&mut self.scheduler, now, options.clone(), slo, rate);
        self.options.push(options.clone());
        self.rehearsal.set_model(model, Some(options));
        model
    }

    fn add_device(&mut self, now: Time, kind: DeviceKind) -> DeviceId {
        let index = kind.0 as usize;
        self.devices.resize(self.devices.len().max(index + 1), 0);
        self.devices[index] += 1;
        self.running.push(None);
        self.rehearsal.set_devices(kind, self.devices[index]);
        ClusterScheduler::add_device(&mut self.scheduler, now, kind)
    }

    fn handle_request(&mut self, now: Time, request: Request) -> Result<(), Reject> {
        let Request { model, deadline, size, level, .. } = request;
        let budget = if deadline == Time::MAX { Duration::MAX } else { deadline.since(now) };
        self.rehearsal.arrival(PastArrival { at: now, budget, model, size, level });
        self.rehearse(now);
        ClusterScheduler::handle_request(&mut self.scheduler, now, request)
    }

    fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        let running = self.running[device.0 as usize].take_if(|(running, ..)| *running == batch);
        if let Some((_, model, start, expected)) = running {
            self.rehearsal.execution(model, now.since(start).as_secs_f64() / expected.as_secs_f64());
        }
        ClusterScheduler::handle_completion(&mut self.scheduler, now, device, batch);
    }

    fn handle_timeout(&mut self, now: Time) {
        ClusterScheduler::handle_timeout(&mut self.scheduler, now);
    }

    fn poll_decision(&mut self) -> Option<Decision> {
        let decision = ClusterScheduler::poll_decision(&mut self.scheduler);
        if let Some(Decision::Dispatch { batch, device, model, start, expected, .. }) = &decision
            && !self.network.is_remote()
        {
            self.running[device.0 as usize] = Some((*batch, *model, *start, *expected));
        }
        decision
    }

    fn poll_timeout(&self) -> Option<Time> {
        ClusterScheduler::poll_timeout(&self.scheduler)
    }

    fn recycle(&mut self, members: Vec<RequestId>) {
        ClusterScheduler::recycle(&mut self.scheduler, members);
    }
}
