//! A process of a network: its clock, its state machine, its slots.

use std::collections::{BTreeMap, VecDeque};

use downbeat_core::cluster::Order;
use downbeat_core::{Duration, Time};
use downbeat_roles::{
    BackendNode, BackendOptions, BatchKey, Divided, Doing, Frame, FrontendNode, FrontendOptions, Hello, Loadable,
    NewRequest, NodeId, Offer, OfferedModel, Outcome, PROTOCOL, QueueKey, RequestKey, Role, RoleNode, SchedulerNode,
    SchedulerOptions, Slot, SubClusterPlan,
};

use super::rehearsing::Rehearsing;
use super::run::ROOM_EVERY;
use super::scenario::{Host, NetworkScenario};
use super::streams::{OpenStreams, Turn};
use super::sub_clusters::{MODEL_BYTES, SubClusters};

/// Stands for tensors: the number of the request that they belong to.
pub(super) type Tensors = u64;

/// An input of a process.
#[derive(Clone, Debug)]
pub(super) enum Inbound {
    Frame(Frame<Tensors>),
    Connected(Hello),
    Disconnected(NodeId),
    /// A client's request for a model.
    Request {
        model: usize,
        input: u64,
    },
    /// The inputs of a request, by the frontend's number, are ready.
    Ready {
        number: u64,
        input: u64,
    },
    Cancel(u64),
    /// The code of a request has a turn, and may give an answer.
    Turn(RequestKey),
    /// The client of a request, by the frontend's number, has taken [`ROOM_EVERY`] answers.
    Taken(u64),
    /// A slot is done with a batch.
    Ran {
        batch: BatchKey,
        model: usize,
        members: Vec<RequestKey>,
        took: Duration,
        outcomes: Vec<(RequestKey, Outcome<Tensors>)>,
    },
    /// The store's answer: the epoch that it allots, and the plan that it keeps.
    Epoch(Option<u64>, Option<SubClusterPlan>),
    /// The answer to the question of this number: the sub-clusters, or an error.
    Planned(u64, Result<Divided, String>),
    /// An administrator asks to divide the models anew.
    Divide,
    /// A model is loaded or unloaded, or the attempt failed.
    Done {
        model: usize,
        doing: Doing,
        result: Result<(), String>,
    },
    Drain,
}

/// The state machine of a process.
#[derive(Debug)]
pub(super) enum Machine {
    Frontend(Box<FrontendNode<Tensors>>),
    Scheduler(Box<SchedulerNode<Tensors>>),
    Backend(Box<BackendNode<Tensors>>),
    /// The process is dead.
    None,
}

impl Machine {
    /// The state machine; `None`: the process is dead.
    fn node_mut(&mut self) -> Option<&mut dyn RoleNode<Tensors>> {
        match self {
            Machine::Frontend(node) => Some(&mut **node),
            Machine::Scheduler(node) => Some(&mut **node),
            Machine::Backend(node) => Some(&mut **node),
            Machine::None => None,
        }
    }
}

/// A model's state on a backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Copy {
    /// The backend does not have the model, or not yet.
    No,
    /// The last load failed.
    Failed,
    /// The last load found no memory.
    NoRoom,
    /// The backend is loading the model.
    Loading,
    /// The model is loaded. The number counts its batches that have not ended.
    Loaded(u32),
    /// The backend is unloading the model.
    Unloading,
}

/// A process.
#[derive(Debug)]
pub(super) struct Process {
    pub hello: Hello,
    pub host: Host,
    pub machine: Machine,
    /// The reading of its clock at the run's begin.
    clock: Duration,
    /// True while the process is paused: it does nothing.
    pub is_paused: bool,
    /// The inputs that came during the pause.
    pub inbox: VecDeque<Inbound>,
    /// Until when its inputs are delayed, and by how much.
    pub slow: (Time, Duration),
    /// The arrival of the last delayed input, which later inputs must not overtake.
    pub slow_until: Time,
    /// The next wake-up.
    pub wakes_at: Time,
    /// By slot: the time when it is free.
    pub slots: Vec<Time>,
    /// By model: its state here, if the process is a backend.
    pub copies: Vec<Copy>,
    /// By model: whether the process, if a frontend, has heard of the model.
    pub models: Vec<bool>,
    /// The rehearsal of its lead, if the process is a scheduler.
    pub rehearsing: Option<Rehearsing>,
    /// The streams of a backend's decoupled models.
    pub streams: OpenStreams,
    /// By a frontend's number: the answers since the last [`Inbound::Taken`].
    pub taken: BTreeMap<u64, u32>,
}

impl Process {
    /// Starts the process of a host.
    pub fn new(scenario: &NetworkScenario, host: Host, node: NodeId, clock: Duration, now: Time) -> Self {
        let timing = scenario.timing;
        let (role, name) = match host {
            Host::Frontend(_) => (Role::Frontend, host.to_string()),
            Host::Scheduler(rank) => (Role::Scheduler { rank }, host.to_string()),
            Host::Backend(_) => (Role::Backend, host.to_string()),
        };
        let local = now + clock;
        let clusters = scenario.sub_clusters.as_ref();
        let begins_loaded = clusters.is_none_or(|clusters| clusters.begins_loaded);
        let most = clusters.and_then(SubClusters::most_models).unwrap_or(usize::MAX);
        let is_loaded = |model| begins_loaded && matches!(host, Host::Backend(_)) && model < most;
        let first = |model| if is_loaded(model) { Copy::Loaded(0) } else { Copy::No };
        let copies: Vec<Copy> = (0..scenario.models.len()).map(first).collect();
        let machine = match host {
            Host::Frontend(_) => {
                let options = FrontendOptions {
                    heartbeat: timing.peer_heartbeat,
                    lost_after: timing.lost_after,
                    tries: timing.tries,
                };
                Machine::Frontend(Box::new(FrontendNode::new(node, options, local)))
            }
            Host::Scheduler(rank) => {
                let options = SchedulerOptions {
                    rank,
                    schedulers: scenario.roles.schedulers,
                    heartbeat: timing.heartbeat,
                    takeover_after: timing.takeover_after,
                    peer_heartbeat: timing.peer_heartbeat,
                    lost_after: timing.lost_after,
                    wake_margin: timing.wakes_late,
                    order: Order::default(),
                    is_rehearsed: scenario.rehearsed,
                    epochs_are_allotted: scenario.has_store,
                    sub_clusters: scenario.sub_clusters.as_ref().map(|clusters| clusters.options),
                };
                Machine::Scheduler(Box::new(SchedulerNode::new(node, options, local)))
            }
            Host::Backend(_) => {
                let options = BackendOptions {
                    heartbeat: timing.peer_heartbeat,
                    lost_after: timing.lost_after,
                    fetch_within: timing.fetch_within,
                };
                let mut backend = BackendNode::new(node, options, local);
                backend.handle_offer(local, offer(scenario, &copies));
                Machine::Backend(Box::new(backend))
            }
        };
        Process {
            hello: Hello { protocol: PROTOCOL, node, role, address: name.clone(), name },
            host,
            machine,
            clock,
            is_paused: false,
            inbox: VecDeque::new(),
            slow: (Time::ZERO, Duration::ZERO),
            slow_until: Time::ZERO,
            wakes_at: Time::MAX,
            slots: vec![Time::ZERO; scenario.roles.slots as usize],
            copies,
            models: vec![false; scenario.models.len()],
            rehearsing: None,
            streams: OpenStreams::default(),
            taken: BTreeMap::new(),
        }
    }

    pub fn is_dead(&self) -> bool {
        matches!(self.machine, Machine::None)
    }

    pub fn node(&self) -> NodeId {
        self.hello.node
    }

    /// Whether a backend has memory for one more model.
    pub fn has_room(&self, clusters: &SubClusters) -> bool {
        let holds = |copy: &&Copy| matches!(copy, Copy::Loading | Copy::Loaded(_) | Copy::Unloading);
        clusters.most_models().is_none_or(|most| self.copies.iter().filter(holds).count() < most)
    }

    /// Returns the reading of its clock at `now`.
    pub fn local(&self, now: Time) -> Time {
        now + self.clock
    }

    /// Returns the time when its clock shows `local`.
    pub fn global(&self, local: Time) -> Time {
        Time::from_nanos(local.as_nanos().saturating_sub(self.clock.as_nanos()))
    }

    /// Returns the time when its machine wants to be woken up.
    pub fn timeout(&self) -> Option<Time> {
        let node: &dyn RoleNode<Tensors> = match &self.machine {
            Machine::Frontend(node) => &**node,
            Machine::Scheduler(node) => &**node,
            Machine::Backend(node) => &**node,
            Machine::None => return None,
        };
        node.poll_timeout().map(|(at, _)| self.global(at))
    }

    /// Handles a due timeout.
    pub fn handle_timeout(&mut self, now: Time) {
        let local = self.local(now);
        if let Some(node) = self.machine.node_mut() {
            node.handle_timeout(local);
        }
    }

    /// Whether the process has a link to a peer that is up.
    pub fn is_linked(&mut self, peer: NodeId) -> bool {
        self.machine.node_mut().is_some_and(|node| node.links().is_up(peer))
    }

    /// Handles an input that any role may get.
    pub fn handle(&mut self, now: Time, inbound: Inbound) {
        let local = self.local(now);
        let Some(node) = self.machine.node_mut() else { return };
        match inbound {
            Inbound::Frame(frame) => return node.handle_frame(local, frame),
            Inbound::Connected(hello) => return node.handle_connected(local, &hello),
            Inbound::Disconnected(peer) => return node.handle_disconnected(local, peer),
            _ => {}
        }
        match (&mut self.machine, inbound) {
            (Machine::Frontend(node), Inbound::Cancel(number)) => node.handle_cancel(local, number),
            (Machine::Frontend(node), Inbound::Taken(number)) => node.handle_room(local, number, ROOM_EVERY),
            (Machine::Frontend(node), Inbound::Ready { number, input }) => node.handle_ready(local, number, input),
            (Machine::Scheduler(node), Inbound::Epoch(number, plan)) => {
                plan.into_iter().for_each(|plan| node.handle_kept_plan(plan));
                node.handle_epoch(local, number);
            }
            (Machine::Scheduler(node), Inbound::Planned(number, planned)) => node.handle_planned(number, planned),
            (Machine::Scheduler(node), Inbound::Divide) => drop(node.handle_plan_wanted(local)),
            (Machine::Backend(node), Inbound::Drain) => node.handle_drain(local),
            (Machine::Backend(node), Inbound::Ran { batch, members, took, outcomes, .. }) => {
                node.handle_ran(local, batch, Some((members.len() as u32, took)), None, outcomes);
            }
            _ => {}
        }
    }

    /// Hands a client's request to a frontend. `ready_in`: when the frontend expects the inputs, if
    /// it must make them. Returns the frontend's number for the request.
    pub fn ask(
        &mut self,
        now: Time,
        (model, input): (usize, u64),
        slo: Option<Duration>,
        ready_in: Option<Duration>,
    ) -> Option<u64> {
        let local = self.local(now);
        let Machine::Frontend(node) = &mut self.machine else { return None };
        let deadline = slo.map_or(Time::MAX, |slo| local + slo);
        let (queue, queue_expiry) = (queue(model), Time::MAX);
        Some(match ready_in {
            None => {
                let request = NewRequest { queue, payload: input, deadline, queue_expiry, level: 0, size: 1 };
                node.handle_request(local, request)
            }
            Some(ready_in) => {
                let request = NewRequest { queue, payload: (), deadline, queue_expiry, level: 0, size: 1 };
                node.handle_announced(local, request, local + ready_in)
            }
        })
    }

    /// Lets the code of a request go on. Returns when it next has a turn.
    pub fn turn(&mut self, now: Time, request: RequestKey) -> Option<Duration> {
        let local = self.local(now);
        let Machine::Backend(node) = &mut self.machine else { return None };
        let Turn { gives, next } = self.streams.turn(request)?;
        if let Some((answer, is_last)) = gives {
            node.handle_streamed(local, request, answer.map(Outcome::Outputs), is_last);
        }
        next
    }

    /// Lets the rehearsal of a scheduler's lead go on. Returns the number of trials that changed the
    /// behaviour of models.
    pub fn rehearse(&mut self, now: Time) -> u64 {
        let local = self.local(now);
        match (&mut self.machine, &mut self.rehearsing) {
            (Machine::Scheduler(node), Some(rehearsing)) => rehearsing.rehearse(local, node),
            _ => 0,
        }
    }

    /// Returns the number of items that its machine still keeps.
    pub fn keeps(&self) -> usize {
        match &self.machine {
            Machine::Frontend(node) => node.open() + node.streams(),
            Machine::Scheduler(node) => node.requests(),
            Machine::Backend(node) => node.batches() + node.streams(),
            Machine::None => 0,
        }
    }
}

/// Returns the queue of a model.
pub(super) fn queue(model: usize) -> QueueKey {
    QueueKey { model: model_name(model), version: 1, shape: Vec::new() }
}

pub(super) fn model_name(model: usize) -> String {
    format!("m{model}")
}

/// Returns the model of a name.
pub(super) fn model_of(name: &str) -> Option<usize> {
    name.strip_prefix('m')?.parse().ok()
}

/// Returns the offer of a backend with these copies.
pub(super) fn offer(scenario: &NetworkScenario, copies: &[Copy]) -> Offer {
    let slots = scenario.roles.slots;
    let model = |(number, model): (usize, &super::scenario::NetworkModel)| OfferedModel {
        model: model_name(number),
        version: 1,
        fingerprint: format!("f{number}"),
        definition: Vec::new(),
        max_batch: model.profile.max_batch(),
        drop: model.drop,
        dispatch: model.dispatch.clone(),
        max_wait: Duration::MAX,
        levels: Vec::new(),
        at_once: slots,
        item_bytes: 1024,
        may_repeat: model.may_repeat,
        shape: Vec::new(),
        profiles: (0..slots).map(|slot| (slot, model.profile.clone())).collect(),
    };
    let is_seat = scenario.roles.seats;
    let slot = |number| Slot { hardware: "emulated".into(), device: if is_seat { 0 } else { number }, is_seat };
    let has = |number: &usize| matches!(copies.get(*number), Some(Copy::Loaded(_) | Copy::Unloading));
    let load_time = scenario.sub_clusters.as_ref().map(|clusters| clusters.load_time);
    let loadable =
        |number| Loadable { model: model_name(number), memory: MODEL_BYTES, run_memory: 0, load_time, failed: None };
    let clusters: Option<&SubClusters> = scenario.sub_clusters.as_ref();
    Offer {
        slots: (0..slots).map(slot).collect(),
        models: scenario.models.iter().enumerate().filter(|(number, _)| has(number)).map(model).collect(),
        repository: scenario.sub_clusters.iter().flat_map(|_| (0..scenario.models.len()).map(loadable)).collect(),
        memory: clusters.and_then(|clusters| clusters.memory),
        runs: None,
        assigned: None,
    }
}
