//! A run of a network: what each event does.

mod faults;
mod models;
mod truth;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use downbeat_core::{Duration, Time};
use downbeat_roles::{
    BackendOutput, BatchKey, Frame, FrontendOutput, Member, NodeId, Outcome, QueueKey, RequestEnd, RequestKey, Role,
    SchedulerOutput, SubClusterPlan,
};
use downbeat_sim::random;
use downbeat_sim::simulation::node::{self, Node};
use rand::RngExt;
use rand_distr::{Distribution, Exp};
use rand_pcg::Pcg64;

use super::copies::CopyJudge;
use super::events::Events;
use super::judge::NetworkJudge;
use super::outcome::NetworkOutcome;
use super::process::{Copy, Inbound, Machine, Process, Tensors, model_name, model_of};
use super::refusals::RefusalJudge;
use super::rehearsing::Rehearsing;
use super::scenario::{Fault, Host, NetworkScenario, Preparation};
use super::streams::Streaming;
use super::wires::Wiring;

/// The time within which everything must have ended after all faults were mended. Requests without
/// a deadline have [`NetworkRun::backlog_time`] more.
const ENDS_WITHIN: Duration = Duration::from_millis(20_000);
/// The interval of the checks for that.
const LOOKS_EVERY: Duration = Duration::from_millis(5);
/// The time of an answer of the store.
const STORE: Duration = Duration::from_millis(1);
/// The time of an unanswered question while the store is away.
const STORE_AWAY: Duration = Duration::from_millis(20);
/// A gap between answers counts towards a fault within this time.
const GAP_WITHIN: Duration = Duration::from_millis(150);
/// The number of answers after which a client's frontend tells the backend that there is room.
pub const ROOM_EVERY: u32 = 16;
/// The longest time that a client needs for these answers.
const SLOWEST_CLIENT: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) enum Event {
    /// An input reaches a process.
    Comes(usize, Inbound),
    Wakes(usize),
    /// A process checks its connection to a host that it must be connected to.
    Dials(usize, Host),
    /// A client of a frontend asks for a model.
    Asks(usize, usize),
    Fault(usize),
    GoesOn(usize),
    Begins(Host),
    /// A process pauses for a while, as on a busy machine.
    Pauses(usize),
    Mend,
    Look,
}

/// A run of a network.
pub(super) struct NetworkRun<'a> {
    scenario: &'a NetworkScenario,
    now: Time,
    events: Events<Event>,
    rng: Pcg64,
    wiring: Wiring,
    processes: Vec<Process>,
    by_node: BTreeMap<NodeId, usize>,
    /// The process of each host, dead or alive.
    by_host: BTreeMap<Host, usize>,
    connections: BTreeSet<(usize, usize)>,
    /// The end of the last connection between two processes.
    ended: BTreeMap<(usize, usize), Time>,
    /// Draining backends, with the delay of their next begin.
    drains: BTreeMap<usize, Option<Duration>>,
    store: (u64, Time),
    /// The plan that the store keeps.
    kept_plan: Option<SubClusterPlan>,
    /// By model: requests a second.
    rates: Vec<f64>,
    is_mended: bool,
    /// When everything must have ended.
    ends_by: Time,
    judge: NetworkJudge,
    copies: CopyJudge,
    refusals: RefusalJudge,
    /// By request: its model, if models move between backends.
    models: BTreeMap<RequestKey, usize>,
    outcome: NetworkOutcome,
    next_input: u64,
    /// The times of answers, for gaps.
    answers: Vec<Time>,
    is_over: bool,
}

impl Node for NetworkRun<'_> {
    type Event = Event;
    /// Everything has ended, or a rule is broken.
    type End = ();

    fn seed(&self) -> u64 {
        self.scenario.seed
    }

    fn poll_event(&mut self) -> Option<(Time, Event)> {
        self.events.pop()
    }

    fn handle_event(&mut self, now: Time, event: Event) -> ControlFlow<()> {
        self.now = now;
        self.handle(event);
        let is_done = self.is_over || self.judge.broken().is_some();
        if is_done { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl<'a> NetworkRun<'a> {
    pub fn new(scenario: &'a NetworkScenario) -> Self {
        let timing = scenario.timing;
        let claimed_before = timing.lost_after + timing.fetch_within + Duration::from_millis(2_000);
        NetworkRun {
            scenario,
            now: Time::ZERO,
            events: Events::new(),
            rng: random(scenario.seed, 1),
            wiring: Wiring::new(scenario.wires, random(scenario.seed, 2)),
            processes: Vec::new(),
            by_node: BTreeMap::new(),
            by_host: BTreeMap::new(),
            connections: BTreeSet::new(),
            ended: BTreeMap::new(),
            drains: BTreeMap::new(),
            store: (0, Time::ZERO),
            kept_plan: None,
            rates: scenario.models.iter().map(|model| model.rate).collect(),
            copies: CopyJudge::new(
                timing.lost_after.saturating_mul(3)
                    + scenario.wires.redial.saturating_mul(2)
                    + Duration::from_millis(100),
            ),
            refusals: RefusalJudge::default(),
            models: BTreeMap::new(),
            is_mended: false,
            ends_by: Time::MAX,
            judge: NetworkJudge::new(scenario.has_store, claimed_before),
            outcome: NetworkOutcome { seed: scenario.seed, ..NetworkOutcome::default() },
            next_input: 0,
            answers: Vec::new(),
            is_over: false,
        }
    }

    /// Runs to the end, or to the first broken rule.
    pub fn run(mut self) -> NetworkOutcome {
        for host in self.scenario.hosts() {
            let is_absent = matches!(host, Host::Backend(n) if self.scenario.absent.contains(&n));
            if !is_absent {
                self.events.push(Time::ZERO, Event::Begins(host));
            }
        }
        for (number, (at, _)) in self.scenario.faults.iter().enumerate() {
            self.events.push(*at, Event::Fault(number));
        }
        self.events.push(Time::ZERO + self.scenario.span, Event::Mend);
        node::run(&mut self, Time::ZERO);
        if self.judge.broken().is_none() {
            self.judge.finish(self.now);
        }
        let gap = |(at, _): &(Time, Fault)| (*at, self.gap_around(*at));
        self.outcome.gaps = self.scenario.faults.iter().map(gap).collect();
        self.outcome.needless = self.refusals.needless();
        self.outcome.repeated = self.judge.repeated();
        self.outcome.broken = self.judge.broken().cloned();
        self.outcome
    }

    fn gap_around(&self, at: Time) -> Duration {
        let last = (at + GAP_WITHIN).min(Time::ZERO + self.scenario.span);
        let before = self.answers.iter().rev().find(|answer| **answer <= at).copied().unwrap_or(Time::ZERO);
        let within = self.answers.iter().copied().filter(|answer| *answer > at && *answer <= last);
        let mut longest = Duration::ZERO;
        let mut previous = before;
        for answer in within.chain([last]) {
            longest = longest.max(answer.since(previous));
            previous = answer;
        }
        longest
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Comes(process, inbound) => self.comes(process, inbound),
            Event::Wakes(at) => {
                let process = &mut self.processes[at];
                if process.wakes_at != self.now || process.is_paused || process.is_dead() {
                    return;
                }
                process.wakes_at = Time::MAX;
                process.handle_timeout(self.now);
                self.pump(at);
            }
            Event::Dials(process, host) => self.dial(process, host),
            Event::Asks(process, model) => self.client_asks(process, model),
            Event::Fault(number) => {
                if !self.is_mended
                    && let Some((_, fault)) = self.scenario.faults.get(number)
                {
                    self.outcome.faults += 1;
                    self.fault(fault.clone());
                }
            }
            Event::GoesOn(process) => self.goes_on(process),
            Event::Begins(host) => self.begins(host),
            Event::Pauses(process) => self.pauses(process),
            Event::Mend => self.mend(),
            Event::Look => self.look(),
        }
    }

    /// Delivers an input to a process: now, or after its pause.
    fn comes(&mut self, at: usize, inbound: Inbound) {
        let now = self.now;
        let process = &mut self.processes[at];
        if process.is_dead() {
            return;
        }
        if process.is_paused {
            process.inbox.push_back(inbound);
            return;
        }
        match inbound {
            Inbound::Request { model, input } => self.ask(at, model, input),
            Inbound::Cancel(number) => {
                let request = RequestKey { frontend: process.node(), number };
                self.refusals.ended(request);
                if self.judge.cancelled(request) {
                    self.outcome.cancelled += 1;
                }
                self.processes[at].handle(now, Inbound::Cancel(number));
            }
            Inbound::Ready { number, input } => {
                self.judge.ready(RequestKey { frontend: process.node(), number });
                process.handle(now, Inbound::Ready { number, input });
            }
            Inbound::Frame(frame) => {
                let peer = frame.from;
                let was_linked = process.is_linked(peer);
                process.handle(now, Inbound::Frame(frame));
                // The peer has begun a new link, and this process has not heard of the last one's end.
                if was_linked && !process.is_linked(peer) {
                    self.judge.lost(now, process.node(), peer);
                }
            }
            Inbound::Done { model, doing, result } => self.model_done(at, model, doing, result),
            Inbound::Disconnected(peer) => {
                self.copies_part(self.processes[at].node(), peer);
                let process = &mut self.processes[at];
                self.judge.lost(now, process.node(), peer);
                process.handle(now, Inbound::Disconnected(peer));
            }
            Inbound::Ran { batch, model, members, took, outcomes } => {
                self.judge.is_done(process.node(), batch, &members);
                self.batch_ends(at, model);
                let process = &mut self.processes[at];
                process.handle(now, Inbound::Ran { batch, model, members, took, outcomes });
            }
            Inbound::Turn(request) => {
                if let Some(next) = process.turn(now, request) {
                    self.events.push(now + next, Event::Comes(at, Inbound::Turn(request)));
                }
            }
            inbound => process.handle(now, inbound),
        }
        self.pump(at);
    }

    /// Carries out the outputs of a process, and schedules its next wake-up.
    fn pump(&mut self, at: usize) {
        loop {
            let local = self.processes[at].local(self.now);
            match &mut self.processes[at].machine {
                Machine::Frontend(node) => match node.poll_output(local) {
                    Some(output) => self.frontend_does(at, output),
                    None => break,
                },
                Machine::Scheduler(node) => match node.poll_output(local) {
                    Some(output) => self.scheduler_does(at, output),
                    None => match self.processes[at].rehearse(self.now) {
                        0 => break,
                        changes => self.outcome.rehearsed += changes,
                    },
                },
                Machine::Backend(node) => match node.poll_output(local) {
                    Some(output) => self.backend_does(at, output),
                    None => break,
                },
                Machine::None => return,
            }
        }
        let late = self.scenario.timing.wakes_late.as_nanos();
        let process = &mut self.processes[at];
        let Some(due) = process.timeout() else { return };
        let wakes_at = due.max(self.now) + Duration::from_nanos(1 + self.rng.random_range(0..=late));
        if wakes_at < process.wakes_at {
            process.wakes_at = wakes_at;
            self.events.push(wakes_at, Event::Wakes(at));
        }
    }

    fn frontend_does(&mut self, at: usize, output: FrontendOutput<Tensors>) {
        match output {
            FrontendOutput::Send(to, frame) => self.send(at, to, frame),
            FrontendOutput::End { number, end, .. } => self.ends(at, number, &end),
            FrontendOutput::Streamed { number, answer, is_last } => self.streamed(at, number, answer, is_last),
            FrontendOutput::StreamLost(number) => {
                self.judge.stream_lost(self.now, RequestKey { frontend: self.processes[at].node(), number });
            }
            FrontendOutput::Models(models) => {
                let known = |number: usize| models.iter().any(|model| model.model == model_name(number));
                self.processes[at].models = (0..self.scenario.models.len()).map(known).collect();
            }
            // No client of these networks orders changes of models, or asks about the cluster.
            FrontendOutput::Leader { .. }
            | FrontendOutput::Ordered { .. }
            | FrontendOutput::Asked { .. }
            | FrontendOutput::Rollout { .. }
            | FrontendOutput::Told(..) => {}
            FrontendOutput::Lost(peer) => self.close(at, peer),
            FrontendOutput::Note(note) => self.judge.breaks(self.now, "peers say what they may", || note),
        }
    }

    fn ends(&mut self, at: usize, number: u64, end: &RequestEnd<Tensors>) {
        let request = RequestKey { frontend: self.processes[at].node(), number };
        self.refusals.ended(request);
        let in_time = self.judge.ended(self.now, request, end);
        if let Some(wrong) =
            self.models.remove(&request).and_then(|model| self.copies.request_ends(self.now, model, end))
        {
            self.judge.breaks(self.now, "moves refuse nothing", || wrong);
        }
        let outcome = &mut self.outcome;
        let count = match end {
            RequestEnd::Ran(Outcome::Outputs(_) | Outcome::Streamed, _) if in_time => &mut outcome.good,
            RequestEnd::Ran(Outcome::Outputs(_) | Outcome::Streamed, _) => &mut outcome.late,
            RequestEnd::Ran(Outcome::Failed { .. }, _) => &mut outcome.failed,
            RequestEnd::Refused(_) => &mut outcome.refused,
            RequestEnd::TooLate | RequestEnd::NoLeader => &mut outcome.too_late,
            RequestEnd::Lost => &mut outcome.lost,
        };
        *count += 1;
        if matches!(end, RequestEnd::Ran(..)) {
            self.answers.push(self.now);
        }
    }

    /// A client gets one of the answers to its request, and takes it after a while.
    fn streamed(&mut self, at: usize, number: u64, answer: Option<Outcome<Tensors>>, is_last: bool) {
        let request = RequestKey { frontend: self.processes[at].node(), number };
        let answer = answer.and_then(|outcome| match outcome {
            Outcome::Outputs(answer) => Some(answer),
            Outcome::Failed { .. } | Outcome::Streamed => None,
        });
        self.judge.streamed(self.now, request, answer, is_last);
        self.outcome.streamed += u64::from(answer.is_some());
        let taken = self.processes[at].taken.entry(number).or_default();
        *taken += 1;
        if !is_last && *taken == ROOM_EVERY {
            *taken = 0;
            let takes = Duration::from_nanos(self.rng.random_range(0..=SLOWEST_CLIENT.as_nanos()));
            self.events.push(self.now + takes, Event::Comes(at, Inbound::Taken(number)));
        }
        if is_last {
            self.processes[at].taken.remove(&number);
        }
    }

    fn scheduler_does(&mut self, at: usize, output: SchedulerOutput<Tensors>) {
        match output {
            SchedulerOutput::Send(to, frame) => self.send(at, to, frame),
            SchedulerOutput::WantEpoch(above) => {
                let (last, away_until) = &mut self.store;
                let (number, takes) = if *away_until > self.now {
                    (None, STORE_AWAY)
                } else {
                    *last = above.max(*last) + 1;
                    (Some(*last), STORE)
                };
                self.events.push(self.now + takes, Event::Comes(at, Inbound::Epoch(number, self.kept_plan.clone())));
            }
            SchedulerOutput::Leads(epoch) => {
                self.outcome.leads += 1;
                let process = &mut self.processes[at];
                process.rehearsing = self.scenario.rehearsed.then(|| Rehearsing::new(process.local(self.now)));
                self.judge.leads(self.now, self.processes[at].node(), epoch);
            }
            SchedulerOutput::StandsBy(_) | SchedulerOutput::Told(..) => {}
            SchedulerOutput::Lost(peer) => self.close(at, peer),
            SchedulerOutput::WantPlan(wanted) => self.want_plan(at, &wanted),
            SchedulerOutput::KeepPlan(plan) => self.keep_plan(plan),
            // The models do not fit into as few sub-clusters as there are backends.
            SchedulerOutput::Note(_) if self.copies.take_unsaid() => {}
            SchedulerOutput::Note(note) => self.judge.breaks(self.now, "nothing waits", || note),
        }
    }

    fn backend_does(&mut self, at: usize, output: BackendOutput<Tensors>) {
        match output {
            BackendOutput::Send(to, frame) => self.send(at, to, frame),
            BackendOutput::Connect { address, .. } => {
                if let Some(host) = self.by_host.keys().copied().find(|host| host.to_string() == address) {
                    self.connect(at, host);
                }
            }
            BackendOutput::Run { batch, slot, queue, members } => self.run_batch(at, batch, slot, &queue, &members),
            BackendOutput::Model(name, doing) => self.model_does(at, &name, doing),
            BackendOutput::Left(requests) => self.processes[at].streams.left(&requests),
            BackendOutput::PeerLost(peer) => self.processes[at].streams.handle_lost(peer),
            BackendOutput::Room(request, answers) => self.processes[at].streams.has_room(request, answers),
            BackendOutput::Order { .. } | BackendOutput::Asked { .. } | BackendOutput::Told(..) => {}
            BackendOutput::Leader(_, epoch) => self.judge.obeys(self.now, self.processes[at].node(), epoch),
            BackendOutput::Lost(peer) => self.close(at, peer),
            BackendOutput::Note(note) => self.judge.breaks(self.now, "peers say what they may", || note),
            BackendOutput::Drained => {
                let restart_after = self.drains.remove(&at).flatten();
                // Once all faults are mended, every host must have its process.
                let restart_after = restart_after.or(self.is_mended.then_some(Duration::ZERO));
                self.dies(at, false);
                if let Some(after) = restart_after {
                    self.events.push(self.now + after, Event::Begins(self.processes[at].host));
                }
            }
        }
    }

    fn run_batch(&mut self, at: usize, batch: BatchKey, slot: u32, queue: &QueueKey, members: &[Member<Tensors>]) {
        let process = &mut self.processes[at];
        let (node, local) = (process.node(), process.local(self.now));
        self.judge.begins(self.now, (node, slot), batch, members, local);
        self.outcome.batches += 1;
        let Some(number) = model_of(&queue.model) else { return };
        let Some(model) = self.scenario.models.get(number) else { return };
        match process.copies.get_mut(number) {
            Some(Copy::Loaded(batches)) => *batches += 1,
            other => {
                let what = || format!("{node:?} begins {batch:?} of {}, which is {other:?}", queue.model);
                self.judge.breaks(self.now, "runs where it is loaded", what);
                return;
            }
        }
        let noise = 1.0 + self.scenario.noise * (2.0 * self.rng.random::<f64>() - 1.0);
        let latency = model.profile.latency(members.len() as u32).as_secs_f64();
        let took = Duration::from_secs_f64(latency * noise.max(0.0));
        let Some(free) = process.slots.get_mut(slot as usize) else { return };
        *free = (*free).max(self.now) + took;
        let (at_time, failed) = (*free, self.scenario.failed);
        let streaming = model.streams;
        let mut turns = Vec::new();
        let mut outcome = |member: &Member<Tensors>| {
            let fails = failed > 0.0 && self.rng.random::<f64>() < failed;
            let outcome = match fails {
                true => Outcome::Failed { code: 1, message: "the model says so".into() },
                false => match streaming {
                    Some(Streaming { most, every }) => {
                        let of = self.rng.random_range(1..=u64::from(most));
                        process.streams.begin(member.request, member.payload, (of, every));
                        let begins = Duration::from_nanos(self.rng.random_range(0..=2 * took.as_nanos()));
                        turns.push((self.now + begins, member.request));
                        Outcome::Streamed
                    }
                    None => Outcome::Outputs(member.payload),
                },
            };
            (member.request, outcome)
        };
        let outcomes = members.iter().map(&mut outcome).collect();
        let members = members.iter().map(|member| member.request).collect();
        for (comes, request) in turns {
            self.events.push(comes, Event::Comes(at, Inbound::Turn(request)));
        }
        self.events.push(at_time, Event::Comes(at, Inbound::Ran { batch, model: number, members, took, outcomes }));
    }

    fn send(&mut self, from: usize, to: NodeId, frame: Frame<Tensors>) {
        self.outcome.frames += 1;
        self.judge.sent(self.now, &frame);
        for message in &frame.messages {
            if let Some(wrong) = self.copies.sent(self.now, frame.from, to, message) {
                self.judge.breaks(self.now, "last copy stays", || wrong);
            }
        }
        self.judge_refusals(from, to, &frame);
        let Some(to) = self.by_node.get(&to).copied() else { return };
        if !self.connections.contains(&pair(from, to)) {
            return;
        }
        let end = |process: &Process| (process.node(), process.host);
        let (sender, receiver) = (end(&self.processes[from]), end(&self.processes[to]));
        let [first, second] = self.wiring.send(self.now, sender, receiver);
        if let Some(second) = second {
            let at = self.slowed(to, second);
            self.events.push(at, Event::Comes(to, Inbound::Frame(frame.clone())));
        }
        if let Some(first) = first {
            let at = self.slowed(to, first);
            self.events.push(at, Event::Comes(to, Inbound::Frame(frame)));
        }
    }

    fn slowed(&mut self, to: usize, at: Time) -> Time {
        let process = &mut self.processes[to];
        if process.slow.0 <= at {
            return at;
        }
        process.slow_until = process.slow_until.max(at + process.slow.1);
        process.slow_until
    }

    /// Closes a process's connection to another process.
    fn close(&mut self, at: usize, peer: NodeId) {
        self.judge.lost(self.now, self.processes[at].node(), peer);
        self.copies_part(self.processes[at].node(), peer);
        self.troubled(Duration::ZERO);
        let Some(other) = self.by_node.get(&peer).copied() else { return };
        if self.connections.remove(&pair(at, other)) {
            self.ended.insert(pair(at, other), self.now);
            self.tell_end(at, other);
        }
    }

    /// Tells the other process of the end of a connection, if the message can reach it.
    fn tell_end(&mut self, at: usize, other: usize) {
        let hosts = (self.processes[at].host, self.processes[other].host);
        if !self.wiring.is_cut(self.now, hosts.0, hosts.1) {
            let comes = self.now + self.wiring.delay();
            let inbound = Inbound::Disconnected(self.processes[at].node());
            self.events.push(comes, Event::Comes(other, inbound));
        }
    }

    /// Checks a process's connection to a host that it must be connected to, and checks again
    /// later.
    fn dial(&mut self, at: usize, host: Host) {
        if self.processes[at].is_dead() {
            return;
        }
        if !self.processes[at].is_paused {
            self.connect(at, host);
        }
        self.events.push(self.now + self.scenario.wires.redial, Event::Dials(at, host));
    }

    /// Connects a process to a host, if both are able to.
    fn connect(&mut self, at: usize, host: Host) {
        let Some(other) = self.by_host.get(&host).copied() else { return };
        let answers = !self.processes[other].is_dead() && !self.processes[other].is_paused;
        let mine = self.processes[at].host;
        let is_cut = self.wiring.is_cut(self.now, mine, host) || self.wiring.is_cut(self.now, host, mine);
        let ended = self.ended.get(&pair(at, other)).copied();
        // The end of the last connection must be heard first.
        let is_early = ended.is_some_and(|ended| self.now < ended + self.scenario.wires.redial);
        if !answers || is_cut || is_early || !self.connections.insert(pair(at, other)) {
            return;
        }
        let takes = self.wiring.delay() + self.wiring.delay();
        for (to, of) in [(at, other), (other, at)] {
            let hello = self.processes[of].hello.clone();
            self.events.push(self.now + takes, Event::Comes(to, Inbound::Connected(hello)));
        }
    }

    fn begins(&mut self, host: Host) {
        if self.by_host.get(&host).is_some_and(|at| !self.processes[*at].is_dead()) {
            return;
        }
        let node = NodeId(self.rng.random());
        let clock = Duration::from_nanos(self.rng.random_range(0..1_000_000_000_000));
        let at = self.processes.len();
        self.processes.push(Process::new(self.scenario, host, node, clock, self.now));
        self.by_node.insert(node, at);
        if matches!(host, Host::Backend(_)) {
            self.copies.begins(self.now, node);
            for model in 0..self.scenario.models.len() {
                if self.processes[at].copies[model] == Copy::Loaded(0) {
                    self.copies.loaded(self.now, node, model, true);
                }
            }
        }
        self.by_host.insert(host, at);
        self.refusals.troubled(self.now);
        self.next_pause(at);
        let dials: Vec<Host> = match host {
            Host::Scheduler(rank) => (0..rank).map(Host::Scheduler).collect(),
            _ => (0..self.scenario.roles.schedulers).map(Host::Scheduler).collect(),
        };
        for to in dials {
            let soon = Duration::from_nanos(self.rng.random_range(0..1_000_000));
            self.events.push(self.now + soon, Event::Dials(at, to));
        }
        if matches!(host, Host::Frontend(_)) {
            for model in 0..self.scenario.models.len() {
                self.next_client(at, model);
            }
        }
        self.pump(at);
    }

    fn next_client(&mut self, at: usize, model: usize) {
        let rate = self.rates[model] / f64::from(self.scenario.roles.frontends);
        let Ok(gaps) = Exp::new(rate) else { return };
        let next = self.now + Duration::from_secs_f64(gaps.sample(&mut self.rng));
        if next < Time::ZERO + self.scenario.span {
            self.events.push(next, Event::Asks(at, model));
        }
    }

    fn client_asks(&mut self, at: usize, model: usize) {
        if self.processes[at].is_dead() {
            return;
        }
        let input = self.next_input;
        self.next_input += 1;
        self.comes(at, Inbound::Request { model, input });
        self.next_client(at, model);
    }

    fn ask(&mut self, at: usize, model: usize, input: u64) {
        let Some(asked) = self.scenario.models.get(model) else { return };
        let process = &mut self.processes[at];
        if !process.models.get(model).copied().unwrap_or(false) {
            self.outcome.unserved += 1;
            return;
        }
        let ready_in = asked.prepares.map(|prepares| prepares.expected);
        let Some(number) = process.ask(self.now, (model, input), asked.slo, ready_in) else { return };
        self.outcome.requests += 1;
        let request = RequestKey { frontend: process.node(), number };
        if self.scenario.sub_clusters.is_some() {
            self.models.insert(request, model);
        }
        let deadline = asked.slo.map_or(Time::MAX, |slo| self.now + slo);
        self.refusals.asked(request, model, deadline);
        self.judge.asked(self.now, request, deadline, input, asked.may_repeat);
        if let Some(Preparation { expected, fails }) = asked.prepares {
            self.judge.announced(request);
            let takes = Duration::from_secs_f64(expected.as_secs_f64() * self.rng.random_range(0.2..2.5));
            let is_made = self.rng.random::<f64>() >= fails;
            let made = if is_made { Inbound::Ready { number, input } } else { Inbound::Cancel(number) };
            self.events.push(self.now + takes, Event::Comes(at, made));
        }
        if self.scenario.cancelled > 0.0 && self.rng.random::<f64>() < self.scenario.cancelled {
            let longest = asked.slo.unwrap_or(Duration::from_millis(50)).as_nanos();
            let after = Duration::from_nanos(self.rng.random_range(0..=longest));
            self.events.push(self.now + after, Event::Comes(at, Inbound::Cancel(number)));
        }
    }

    /// Records that trouble lasts this long.
    fn troubled(&mut self, lasts: Duration) {
        self.refusals.troubled(self.now + lasts);
        self.copies.troubled(self.now + lasts);
    }

    /// Records that two processes have lost their link.
    fn copies_part(&mut self, a: NodeId, b: NodeId) {
        for (a, b) in [(a, b), (b, a)] {
            let of = |node: NodeId| Some(&self.processes[*self.by_node.get(&node)?]);
            let is_pair = of(a).is_some_and(|a| a.hello.role == Role::Backend)
                && of(b).is_some_and(|b| matches!(b.hello.role, Role::Scheduler { .. }));
            if is_pair {
                self.copies.lost(a, b);
            }
        }
    }

    /// Records that a batch has ended.
    fn batch_ends(&mut self, at: usize, model: usize) {
        if let Some(Copy::Loaded(batches)) = self.processes[at].copies.get_mut(model) {
            *batches = batches.saturating_sub(1);
        }
    }

    /// Checks that every request has ended, and that no process keeps any.
    fn look(&mut self) {
        let late = self.now > self.ends_by;
        let is_done = |process: &Process| process.keeps() == 0;
        let leads = |process: &Process| matches!(&process.machine, Machine::Scheduler(node) if node.leads().is_some());
        let is_quiet = self.judge.open() == 0 && self.processes.iter().all(is_done);
        let leaders = self.processes.iter().filter(|process| leads(process)).count();
        let layout = if leaders == 1 { self.check_layout() } else { Err(format!("{leaders} lead")) };
        self.is_over = late || (is_quiet && leaders == 1 && layout.is_ok());
        if late
            && is_quiet
            && let Err(wrong) = layout
        {
            self.judge.breaks(self.now, "the layout is reached", || wrong);
        }
        if late && self.judge.open() == 0 {
            let keeps = |process: &Process| format!("{} keeps {}", process.hello.name, process.keeps());
            let all: Vec<String> = self.processes.iter().filter(|process| !is_done(process)).map(keeps).collect();
            self.judge.breaks(self.now, "nothing waits", || format!("{leaders} lead; {}", all.join(", ")));
        }
        if !self.is_over {
            self.events.push(self.now + LOOKS_EVERY, Event::Look);
        }
    }
}

fn pair(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}
