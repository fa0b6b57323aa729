//! The scheduler with emulated devices, on arrivals of the past.

use super::noise::{ExecutionNoise, Random};
use super::past::Arrival;
use super::score::Tally;
use crate::cluster::behaviour::Behaviour;
use crate::cluster::indexed_heap::IndexedHeap;
use crate::cluster::model_options::ModelOptions;
use crate::cluster::network::NetworkBudget;
use crate::cluster::output::Output;
use crate::cluster::request::Request;
use crate::cluster::scheduler::Scheduler;
use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId, RequestId};
use crate::time::{Duration, Time};

/// What the past is replayed on: the models and devices as they are now.
#[derive(Clone, Debug, Default)]
pub(super) struct Stage {
    /// By model; `None`: it is gone.
    pub models: Vec<Option<ModelOptions>>,
    /// By kind: devices.
    pub devices: Vec<u32>,
    pub network: NetworkBudget,
    pub wake_margin: Duration,
    /// By model.
    pub noise: Vec<ExecutionNoise>,
    pub seed: u64,
}

/// A part of the past: the arrivals in `lead..end`, of which those from `counted` on count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub lead: usize,
    pub counted: usize,
    pub end: usize,
}

/// A run of the past under some behaviours.
#[derive(Debug)]
pub(super) struct Replay {
    scheduler: Scheduler,
    /// By the model's number outside: its number here.
    ids: Vec<Option<ModelId>>,
    devices: Vec<Emulated>,
    /// By device: when its batch ends.
    ends: IndexedHeap<Time>,
    random: Random,
    network: NetworkBudget,
    /// The next arrival.
    next: usize,
    /// Arrivals from this one on count.
    counted: usize,
    end: usize,
    /// Rate of the arrivals, percent of what it was.
    percent: u64,
    /// When the first came.
    origin: Time,
    now: Time,
    tally: Tally,
}

/// A device that spends what batches take.
#[derive(Debug, Default)]
struct Emulated {
    running: Option<Sent>,
    /// What was sent while it runs that.
    next: Option<Sent>,
}

#[derive(Debug)]
struct Sent {
    batch: BatchId,
    members: Vec<RequestId>,
    /// When it is there.
    ready: Time,
    took: Duration,
    start: Time,
}

impl Replay {
    /// Of the arrivals of `part` of the past, at `percent` of the rate they came at.
    pub fn new(stage: &Stage, behaviours: &[Option<Behaviour>], past: &[Arrival], part: Part, percent: u64) -> Self {
        let Part { lead, counted, end } = part;
        let mut scheduler = Scheduler::new();
        scheduler.set_network(Time::ZERO, stage.network);
        scheduler.set_wake_margin(Time::ZERO, stage.wake_margin);
        let mut devices = Vec::new();
        for (kind, count) in (0..).map(DeviceKind).zip(&stage.devices) {
            for _ in 0..*count {
                scheduler.add_device(Time::ZERO, kind);
                devices.push(Emulated::default());
            }
        }
        let mut ids = Vec::with_capacity(stage.models.len());
        for (number, options) in stage.models.iter().enumerate() {
            ids.push(options.as_ref().map(|options| {
                // Who shares a limit with another knows it by its number here; one that has left leaves the limit of one batch.
                let shares_limit = options.shares_limit.and_then(|other| ids.get(other.0 as usize).copied().flatten());
                let shared = options.shares_limit.is_some();
                let max_in_flight = if shared && shares_limit.is_none() { 1 } else { options.max_in_flight };
                let id =
                    scheduler.add_model(Time::ZERO, ModelOptions { shares_limit, max_in_flight, ..options.clone() });
                scheduler.set_behaviour(Time::ZERO, id, behaviours.get(number).copied().flatten());
                id
            }));
        }
        Replay {
            scheduler,
            ids,
            devices,
            ends: IndexedHeap::new(),
            random: Random(stage.seed),
            network: stage.network,
            next: lead,
            counted,
            end,
            percent,
            origin: past.get(lead).map_or(Time::ZERO, |first| first.at),
            now: Time::ZERO,
            tally: Tally::new(stage.models.len()),
        }
    }

    /// Goes on for at most so many events; how many there were, and whether it is through.
    pub fn step(&mut self, stage: &Stage, past: &[Arrival], events: u64) -> (u64, bool) {
        let mut used = 0;
        while used < events {
            let arrival = if self.next < self.end { self.time_of(past, self.next) } else { Time::MAX };
            let end = self.ends.peek().map_or(Time::MAX, |(at, _)| at);
            let timeout = self.scheduler.poll_timeout().map_or(Time::MAX, |(at, _)| at);
            let next = end.min(arrival).min(timeout);
            if next == Time::MAX {
                return (used, true);
            }
            self.now = self.now.max(next);
            if end == next {
                self.complete(past);
            } else if arrival == next {
                self.arrive(past);
            } else {
                self.scheduler.handle_timeout(self.now);
            }
            self.decide(stage, past);
            used += 1;
        }
        (used, false)
    }

    /// What came of it.
    pub fn into_tally(mut self) -> Tally {
        self.tally.span = self.now.since(Time::ZERO);
        self.tally
    }

    /// When an arrival comes here.
    fn time_of(&self, past: &[Arrival], index: usize) -> Time {
        Time::from_nanos(past[index].at.since(self.origin).as_nanos().saturating_mul(100) / self.percent)
    }

    fn arrive(&mut self, past: &[Arrival]) {
        let index = self.next;
        self.next += 1;
        let Arrival { budget, model, size, level, .. } = past[index];
        let Some(id) = self.ids.get(model.0 as usize).copied().flatten() else { return };
        let deadline = if budget == Duration::MAX { Time::MAX } else { self.now + budget };
        let request =
            Request { id: RequestId(index as u64), model: id, deadline, queue_expiry: Time::MAX, level, size };
        if index >= self.counted {
            self.tally.offered(model);
        }
        if self.scheduler.handle_request(self.now, request).is_err() && index >= self.counted {
            self.tally.bad(model);
        }
    }

    fn complete(&mut self, past: &[Arrival]) {
        let Some((_, device)) = self.ends.pop() else { return };
        let emulated = &mut self.devices[device as usize];
        let Some(Sent { batch, members, start, .. }) = emulated.running.take() else { return };
        if let Some(next) = emulated.next.take() {
            self.start(device, next);
        }
        self.tally.busy += self.now.since(start);
        for member in &members {
            let index = member.0 as usize;
            if index >= self.counted {
                let took = self.now.since(self.time_of(past, index)) + self.network.reply;
                let Arrival { budget, model, .. } = past[index];
                self.tally.done(model, took, budget);
            }
        }
        self.scheduler.recycle(members);
        self.scheduler.handle_completion(self.now, DeviceId(device), batch);
    }

    fn decide(&mut self, stage: &Stage, past: &[Arrival]) {
        while let Some(output) = self.scheduler.poll_output() {
            match output {
                Output::Drop { request, .. } => {
                    let index = request.0 as usize;
                    if index >= self.counted {
                        self.tally.bad(past[index].model);
                    }
                }
                Output::Dispatch { batch, device, members, size, expected, .. } => {
                    let model = members.first().map(|member| past[member.0 as usize].model);
                    let noise = model.and_then(|model| stage.noise.get(model.0 as usize));
                    let took = noise.map_or(expected, |noise| noise.took(&mut self.random, expected));
                    let ready = self.now + self.network.delay(size);
                    let sent = Sent { batch, members, ready, took, start: ready };
                    let emulated = &mut self.devices[device.0 as usize];
                    if emulated.running.is_some() {
                        emulated.next = Some(sent);
                    } else {
                        self.start(device.0, sent);
                    }
                }
            }
        }
    }

    fn start(&mut self, device: u32, sent: Sent) {
        let start = self.now.max(sent.ready);
        self.ends.set(device, start + sent.took);
        self.devices[device as usize].running = Some(Sent { start, ..sent });
    }
}
