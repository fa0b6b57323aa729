//! A replay: the scheduler with emulated devices, on arrivals of the past.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::closed_loop::ClosedLoop;
use super::noise::{ExecutionNoise, Random};
use super::past::PastArrival;
use super::score::Tally;
use super::setting::Setting;
use crate::cluster::indexed_heap::IndexedHeap;
use crate::cluster::model_options::ModelOptions;
use crate::cluster::network::NetworkBudget;
use crate::cluster::output::Output;
use crate::cluster::request::Request;
use crate::cluster::scheduler::Scheduler;
use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId, RequestId};
use crate::time::{Duration, Time};

/// The present models and devices, on which a trial replays the past.
#[derive(Clone, Debug, Default)]
pub(super) struct Stage {
    /// By model; `None`: the model is gone.
    pub models: Vec<Option<ModelOptions>>,
    /// By kind: number of devices.
    pub devices: Vec<u32>,
    /// The network of models without networks of their own.
    pub network: NetworkBudget,
    /// By model: its networks, by the kind of device. Empty: `network` holds.
    pub networks: Vec<Vec<(DeviceKind, NetworkBudget)>>,
    pub wake_margin: Duration,
    /// By model.
    pub noise: Vec<ExecutionNoise>,
    /// By model.
    pub loops: Vec<ClosedLoop>,
    /// By model: the longest `wait` that is allowed, percent, if the model may not wait longer than
    /// now.
    pub patience: Vec<Option<u8>>,
    /// By model: whether waiting for company can save next to none of the device time that it can
    /// save in all models together. Such a model never waits.
    pub saves_little: Vec<bool>,
    /// Whether all clients that wait for answers are taken to be as quick as the quick ones were.
    pub hopeful: bool,
    /// Whether trials try other orders.
    pub tries_orders: bool,
    pub seed: u64,
}

impl Stage {
    /// The network between the scheduler, a device of this kind and the clients of a model.
    fn network(&self, model: ModelId, kind: DeviceKind) -> NetworkBudget {
        let own = self.networks.get(model.0 as usize).into_iter().flatten();
        own.filter(|(of, _)| *of == kind).map(|(_, network)| *network).next().unwrap_or(self.network)
    }

    /// Whether clients of a model wait for answers.
    pub fn is_closed(&self, model: ModelId) -> bool {
        self.loops.get(model.0 as usize).is_some_and(|closed| closed.clients().is_some())
    }

    /// Whether the setting makes no model wait longer than allowed.
    pub fn allows(&self, setting: &Setting) -> bool {
        let waits = setting.behaviours.iter().zip(&self.patience);
        waits.into_iter().all(|(behaviour, patience)| match (behaviour, patience) {
            (Some(behaviour), Some(patience)) => behaviour.wait <= *patience,
            _ => true,
        })
    }
}

/// A part of the past: the arrivals in `lead..end`, which count from `counted` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub lead: usize,
    pub counted: usize,
    pub end: usize,
}

/// A replay of the past under one setting.
#[derive(Debug)]
pub(super) struct Replay {
    scheduler: Scheduler,
    /// By the model's id outside: its id in the replay.
    ids: Vec<Option<ModelId>>,
    devices: Vec<Emulated>,
    /// By device: when its batch ends.
    ends: IndexedHeap<Time>,
    random: Random,
    /// By model whose clients wait for answers: the arrivals that are still to come, at times that
    /// depend on the answers.
    queues: Vec<Option<VecDeque<usize>>>,
    /// Times and arrivals of requests whose clients have had their answers.
    coming: BinaryHeap<Reverse<(Time, usize)>>,
    /// When each arrival of waiting clients came in the replay, from the first arrival on. Empty if
    /// no client waits for answers.
    came: Vec<Time>,
    lead: usize,
    /// The next arrival of clients that do not wait for answers.
    next: usize,
    end: usize,
    /// Rate of the arrivals, percent of the recorded rate.
    percent: u64,
    /// The recorded time of the first arrival.
    origin: Time,
    now: Time,
    tally: Tally,
}

/// A device that spends the time of its batches.
#[derive(Debug)]
struct Emulated {
    kind: DeviceKind,
    running: Option<Sent>,
    /// The batch that was sent while another one runs.
    next: Option<Sent>,
}

#[derive(Debug)]
struct Sent {
    batch: BatchId,
    members: Vec<RequestId>,
    /// When the batch reaches the device.
    ready: Time,
    took: Duration,
    start: Time,
}

impl Replay {
    /// A replay of the arrivals of `part` of the past, at `percent` of their recorded rate.
    pub fn new(stage: &Stage, setting: &Setting, past: &[PastArrival], part: Part, percent: u64) -> Self {
        let Part { lead, counted, end } = part;
        let mut scheduler = Scheduler::new();
        scheduler.set_network(Time::ZERO, stage.network);
        scheduler.set_wake_margin(Time::ZERO, stage.wake_margin);
        scheduler.set_order(Time::ZERO, setting.order);
        let mut devices = Vec::new();
        for (kind, count) in (0..).map(DeviceKind).zip(&stage.devices) {
            for _ in 0..*count {
                scheduler.add_device(Time::ZERO, kind);
                devices.push(Emulated { kind, running: None, next: None });
            }
        }
        let mut ids = Vec::with_capacity(stage.models.len());
        for (number, options) in stage.models.iter().enumerate() {
            ids.push(options.as_ref().map(|options| {
                // A limit is shared by the other model's id in the replay. If that model has left,
                // the limit is one batch.
                let shares_limit = options.shares_limit.and_then(|other| ids.get(other.0 as usize).copied().flatten());
                let shared = options.shares_limit.is_some();
                let max_in_flight = if shared && shares_limit.is_none() { 1 } else { options.max_in_flight };
                let id =
                    scheduler.add_model(Time::ZERO, ModelOptions { shares_limit, max_in_flight, ..options.clone() });
                if let Some(networks) = stage.networks.get(number).filter(|networks| !networks.is_empty()) {
                    scheduler.set_model_network(Time::ZERO, id, networks);
                }
                scheduler.set_behaviour(Time::ZERO, id, setting.behaviours.get(number).copied().flatten());
                id
            }));
        }
        let mut replay = Replay {
            scheduler,
            ids,
            devices,
            ends: IndexedHeap::new(),
            random: Random(stage.seed),
            queues: Vec::new(),
            coming: BinaryHeap::new(),
            came: Vec::new(),
            lead,
            next: lead,
            end,
            percent,
            origin: past.get(lead).map_or(Time::ZERO, |first| first.at),
            now: Time::ZERO,
            tally: Tally::new(stage.models.len(), counted..end),
        };
        replay.close_loops(stage, past);
        replay
    }

    /// Closes the loops: if a model has `n` waiting clients, its first `n` requests come at their
    /// recorded times. Each later request follows an answer.
    fn close_loops(&mut self, stage: &Stage, past: &[PastArrival]) {
        if stage.loops.iter().all(|closed| closed.clients().is_none()) {
            return;
        }
        self.queues = stage.loops.iter().map(|closed| closed.clients().map(|_| VecDeque::new())).collect();
        for (model, _) in (0..).map(ModelId).zip(&self.queues).filter(|(_, queue)| queue.is_some()) {
            self.tally.close(model);
        }
        self.came = vec![Time::ZERO; self.end - self.lead];
        let mut clients: Vec<u32> = stage.loops.iter().map(|closed| closed.clients().unwrap_or(0)).collect();
        for index in self.lead..self.end {
            let model = past[index].model.0 as usize;
            let Some(Some(queue)) = self.queues.get_mut(model) else { continue };
            if clients[model] > 0 {
                clients[model] -= 1;
                let at = self.time_of(past, index);
                self.coming.push(Reverse((at, index)));
            } else {
                queue.push_back(index);
            }
        }
        self.skip_closed(past);
    }

    /// Moves on to the next arrival of clients that do not wait for answers.
    fn skip_closed(&mut self, past: &[PastArrival]) {
        while self.next < self.end && self.is_closed(past[self.next].model) {
            self.next += 1;
        }
    }

    fn is_closed(&self, model: ModelId) -> bool {
        self.queues.get(model.0 as usize).is_some_and(Option::is_some)
    }

    /// A request was answered. If its client has waited for the answer, the client asks again, at a
    /// pace that does not depend on the rate of the replay.
    fn answered(&mut self, stage: &Stage, past: &[PastArrival], request: usize) {
        let model = past[request].model;
        if !self.is_closed(model) {
            return;
        }
        if self.percent == 100 {
            self.tally.ended(request, model, self.came(past, request), self.now);
        }
        let index = model.0 as usize;
        if let Some(Some(queue)) = self.queues.get_mut(index)
            && let Some(next) = queue.pop_front()
        {
            let pause = stage.loops[index].pause(&mut self.random, stage.hopeful);
            self.coming.push(Reverse((self.now + pause, next)));
        }
    }

    /// Whether a model's requests count at this rate.
    fn counts(&self, model: ModelId) -> bool {
        self.percent == 100 || !self.is_closed(model)
    }

    /// Goes on for at most `events` events. Returns the number of events, and whether the replay is
    /// finished.
    pub fn step(&mut self, stage: &Stage, past: &[PastArrival], events: u64) -> (u64, bool) {
        let mut used = 0;
        while used < events {
            let open = if self.next < self.end { self.time_of(past, self.next) } else { Time::MAX };
            let arrival = self.coming.peek().map_or(open, |Reverse((at, _))| open.min(*at));
            let end = self.ends.peek().map_or(Time::MAX, |(at, _)| at);
            let timeout = self.scheduler.poll_timeout().map_or(Time::MAX, |(at, _)| at);
            let next = end.min(arrival).min(timeout);
            if next == Time::MAX {
                return (used, true);
            }
            self.now = self.now.max(next);
            if end == next {
                self.complete(stage, past);
            } else if arrival == next {
                let index = self.take_arrival(past, open <= arrival);
                self.arrive(stage, past, index);
            } else {
                self.scheduler.handle_timeout(self.now);
            }
            self.decide(stage, past);
            used += 1;
        }
        (used, false)
    }

    /// The result of the replay.
    pub fn into_tally(mut self) -> Tally {
        self.tally.span = self.now.since(Time::ZERO);
        self.tally
    }

    /// Takes the next arrival: of clients that do not wait for answers (`open`), or of clients that
    /// do.
    fn take_arrival(&mut self, past: &[PastArrival], open: bool) -> usize {
        if !open && let Some(Reverse((_, index))) = self.coming.pop() {
            self.came[index - self.lead] = self.now;
            return index;
        }
        let index = self.next;
        self.next += 1;
        self.skip_closed(past);
        index
    }

    /// When a request came in the replay.
    fn came(&self, past: &[PastArrival], index: usize) -> Time {
        if self.is_closed(past[index].model) { self.came[index - self.lead] } else { self.time_of(past, index) }
    }

    /// When an arrival comes in the replay, if its client does not wait for answers.
    fn time_of(&self, past: &[PastArrival], index: usize) -> Time {
        Time::from_nanos(past[index].at.since(self.origin).as_nanos().saturating_mul(100) / self.percent)
    }

    fn arrive(&mut self, stage: &Stage, past: &[PastArrival], index: usize) {
        let PastArrival { budget, model, size, level, .. } = past[index];
        let Some(id) = self.ids.get(model.0 as usize).copied().flatten() else { return };
        let deadline = if budget == Duration::MAX { Time::MAX } else { self.now + budget };
        let request =
            Request { id: RequestId(index as u64), model: id, deadline, queue_expiry: Time::MAX, level, size };
        if self.counts(model) {
            self.tally.offered(index, model);
        }
        if self.scheduler.handle_request(self.now, request).is_err() {
            self.lost(stage, past, index);
        }
    }

    /// Notes that a request was rejected or dropped.
    fn lost(&mut self, stage: &Stage, past: &[PastArrival], index: usize) {
        let model = past[index].model;
        if self.counts(model) {
            self.tally.bad(index, model);
        }
        self.answered(stage, past, index);
    }

    fn complete(&mut self, stage: &Stage, past: &[PastArrival]) {
        let Some((_, device)) = self.ends.pop() else { return };
        let emulated = &mut self.devices[device as usize];
        let Some(Sent { batch, members, start, .. }) = emulated.running.take() else { return };
        let kind = emulated.kind;
        if let Some(next) = emulated.next.take() {
            self.start(device, next);
        }
        self.tally.busy += self.now.since(start);
        for member in &members {
            let index = member.0 as usize;
            let PastArrival { budget, model, .. } = past[index];
            let took = self.now.since(self.came(past, index)) + stage.network(model, kind).reply;
            if self.counts(model) {
                self.tally.done(index, model, took, budget);
            }
            self.answered(stage, past, index);
        }
        self.scheduler.recycle(members);
        self.scheduler.handle_completion(self.now, DeviceId(device), batch);
    }

    fn decide(&mut self, stage: &Stage, past: &[PastArrival]) {
        while let Some(output) = self.scheduler.poll_output() {
            match output {
                Output::Drop { request, .. } => {
                    self.lost(stage, past, request.0 as usize);
                }
                Output::Dispatch { batch, device, members, size, expected, .. } => {
                    let model = members.first().map(|member| past[member.0 as usize].model);
                    let noise = model.and_then(|model| stage.noise.get(model.0 as usize));
                    let took = noise.map_or(expected, |noise| noise.took(&mut self.random, expected));
                    let emulated = &mut self.devices[device.0 as usize];
                    let network = model.map(|model| stage.network(model, emulated.kind)).unwrap_or_default();
                    let ready = self.now + network.delay(size);
                    let sent = Sent { batch, members, ready, took, start: ready };
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
