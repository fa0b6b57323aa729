//! A backend: obeys the leading scheduler, fetches the inputs of its batches from frontends, and
//! sends the answers to frontends.

use std::collections::{BTreeMap, VecDeque};

use super::early_inputs::{Early, EarlyInputs};
use super::gathering::{Batch, Member};
use super::late_fetches::LateFetches;
use super::loading::Loading;
use super::streams::Streams;
use super::under_way::UnderWay;
use crate::asking::Asking;
use crate::delay::FetchEstimate;
use crate::epoch::Epoch;
use crate::following::Following;
use crate::link::{Frame, LinkTiming};
use crate::links::{LinkEvent, Links};
use crate::message::{
    BatchKey, BatchRun, Delays, Doing, Hello, Message, NodeId, Offer, Outcome, Plan, QueueKey, RequestKey, Role, Told,
};
use crate::queue_names::HeardNames;
use crate::role_node::RoleNode;
use downbeat_core::ids::BatchId;
use downbeat_core::time::{Duration, Time};

/// The most batches that a backend holds. A plan beyond that goes back to the leader without a run.
const MOST_BATCHES: usize = 4096;
/// The most frontends that a backend remembers, including frontends without a link.
const MOST_ADDRESSES: usize = 4096;
/// How often the leader hears of measured delays.
const DELAYS_EVERY: Duration = Duration::from_millis(1_000);
/// How often the backend checks whether the leader must hear of them earlier.
const CHECKS_EVERY: Duration = Duration::from_millis(100);
/// After this time a measured fetch counts for half.
const HALF_LIFE: Duration = Duration::from_millis(1_000);

/// Options of a backend.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackendOptions {
    /// Longest silence of this node on a link.
    pub heartbeat: Duration,
    /// Silence after which a peer is lost.
    pub lost_after: Duration,
    /// How long inputs may take at least. After that a batch runs without the missing inputs. If
    /// fetches take longer than that, a batch waits as long as they do, up to `lost_after`.
    pub fetch_within: Duration,
}

/// An action that a backend asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BackendOutput<P> {
    /// Send this frame.
    Send(NodeId, Frame<P>),
    /// Connect to this frontend.
    Connect {
        /// The frontend.
        frontend: NodeId,
        /// `host:port`.
        address: String,
    },
    /// Run this batch on a slot, after the slot's earlier batches. [`BackendNode::handle_ran`]
    /// takes the result.
    Run {
        /// The name of the batch.
        batch: BatchKey,
        /// The slot.
        slot: u32,
        /// The queue of the batch's requests.
        queue: QueueKey,
        /// The members, at least one, in order.
        members: Vec<Member<P>>,
    },
    /// Load or unload a model. [`BackendNode::handle_done`] takes the result, and
    /// [`BackendNode::handle_offer`] the new list of models.
    Model(String, Doing),
    /// A client wants this change of a model. [`BackendNode::handle_ordered`] takes the result.
    Order {
        /// The scheduler that hears of the result, and its number of the order.
        from: (NodeId, u64),
        /// Name of the model.
        model: String,
        /// The change.
        doing: Doing,
    },
    /// A client of the cluster asks this question. [`BackendNode::handle_tell`] takes the answer.
    Asked {
        /// The scheduler that hears the answer, and its number of the question.
        from: (NodeId, u64),
        /// The question.
        question: Vec<u8>,
    },
    /// An answer to the [question](BackendNode::handle_ask) of this number; `None`: it has ended.
    Told(u64, Option<Told>),
    /// The clients of these requests have gone. The frontend ignores further answers to these requests.
    Left(Vec<RequestKey>),
    /// The link to this peer is lost. If the peer is a frontend, the clients of its requests have gone.
    PeerLost(NodeId),
    /// The client of this request has taken so many of the
    /// [streamed answers](BackendNode::handle_streamed).
    Room(RequestKey, u32),
    /// Another scheduler leads.
    Leader(NodeId, Epoch),
    /// The link to this peer is given up: close what carried it.
    Lost(NodeId),
    /// The backend was told to go, and has nothing left to do.
    Drained,
    /// Show this text to people, once.
    Note(String),
}

/// A frontend that a scheduler has named.
#[derive(Clone, Debug)]
struct Met {
    address: String,
    /// When a connection was last asked for, if none has come since.
    asked: Option<Time>,
}

/// A backend.
///
/// A backend obeys the highest epoch that it has heard of. Batches of lower epochs that the backend
/// already has run on. A slot runs batches in the order of their plans. After a batch of a higher
/// epoch it begins no batch of a lower one. Frontends decide which members of a batch may run, one
/// by one.
///
/// After any of the `handle_*` take all outputs. At [`RoleNode::poll_timeout`] call
/// [`RoleNode::handle_timeout`], after all frames that have come. Time never goes back.
///
/// Bounds: 4096 batches, 4096 frontends without a link, 65 536 names of queues for each scheduler.
/// Inputs may come before their plan: those of two full batches for each slot are kept. Links have
/// bounds of their own.
#[derive(Debug)]
pub struct BackendNode<P> {
    options: BackendOptions,
    links: Links<P>,
    following: Following,
    /// All slots and models, including models that will be unloaded.
    offer: Offer,
    loading: Box<Loading>,
    under_way: UnderWay<P>,
    early: EarlyInputs<P>,
    /// The most requests in `early`: those of two full batches for each slot. A leader has no more on
    /// their way.
    most_early: usize,
    /// The last batch of all plans.
    planned: BatchKey,
    /// By scheduler: the queue names that it gave.
    names: BTreeMap<NodeId, HeardNames>,
    met: BTreeMap<NodeId, Met>,
    fetches: FetchEstimate,
    late_fetches: LateFetches,
    streams: Streams,
    asking: Asking,
    /// The delays that the leader last heard, and when.
    said: Option<(Delays, Time)>,
    /// When the delays are next compared with `said`.
    checks_at: Time,
    is_draining: bool,
    /// The leader has said that no more batches come.
    is_let_go: bool,
    /// When the backend lost its last leader, or began.
    leaderless_since: Time,
    is_drained: bool,
    refused_plans: u64,
    outputs: VecDeque<BackendOutput<P>>,
}

impl<P: Clone> BackendNode<P> {
    /// A backend without peers and models.
    pub fn new(node: NodeId, options: BackendOptions, now: Time) -> Self {
        BackendNode {
            options,
            links: Links::of(node, Role::Backend),
            following: Following::new(),
            offer: Offer::default(),
            loading: Box::default(),
            under_way: UnderWay::new(),
            early: EarlyInputs::new(),
            most_early: 0,
            planned: BatchKey { epoch: Epoch::NONE, batch: BatchId(0) },
            names: BTreeMap::new(),
            met: BTreeMap::new(),
            fetches: FetchEstimate::new(1_000, HALF_LIFE),
            late_fetches: LateFetches::default(),
            streams: Streams::default(),
            asking: Asking::default(),
            said: None,
            checks_at: now + CHECKS_EVERY,
            is_draining: false,
            is_let_go: false,
            leaderless_since: now,
            is_drained: false,
            refused_plans: 0,
            outputs: VecDeque::new(),
        }
    }

    /// The scheduler that the backend obeys, if its link is up.
    pub fn leader(&self) -> Option<NodeId> {
        self.following.leader()
    }

    /// The highest epoch that the backend has obeyed.
    pub fn epoch(&self) -> Epoch {
        self.following.epoch()
    }

    /// The number of batches that the backend has.
    pub fn batches(&self) -> usize {
        self.under_way.len()
    }

    /// The number of requests that have given a [streamed answer](BackendNode::handle_streamed) or have
    /// run, and may give more answers.
    pub fn streams(&self) -> usize {
        self.streams.len()
    }

    /// Plans so far from schedulers that the backend no longer obeys.
    pub fn refused_plans(&self) -> u64 {
        self.refused_plans
    }

    /// Sets the slots and models that the backend has from now on.
    pub fn handle_offer(&mut self, now: Time, offer: Offer) {
        self.offer = offer;
        self.under_way.set_slots(self.offer.slots.len());
        let most = self.offer.models.iter().map(|model| model.max_batch as usize).max().unwrap_or(0);
        self.most_early = most.saturating_mul(2 * self.offer.slots.len());
        self.loading.handle_offer(&self.offer);
        self.have(now);
        self.settle(now);
    }

    /// Handles the result of a load or an unload that the backend asked for.
    pub fn handle_done(&mut self, now: Time, model: &str, doing: Doing, result: Result<(), String>) {
        if self.loading.handle_done(model, doing, result) {
            self.have(now);
        }
        self.settle(now);
    }

    /// Handles the result of an order. A scheduler that has left hears nothing.
    pub fn handle_ordered(&mut self, now: Time, (scheduler, number): (NodeId, u64), result: Result<(), String>) {
        self.links.say(now, scheduler, Message::Ordered { number, failed: result.err() });
    }

    /// Asks all frontends and backends a question, by the caller's number. [`BackendOutput::Told`]
    /// follows.
    pub fn handle_ask(&mut self, now: Time, number: u64, question: Vec<u8>) {
        if !self.asking.ask((now, &mut self.links), self.following.leader(), (number, question)) {
            self.outputs.push_back(BackendOutput::Told(number, None));
        }
        self.settle(now);
    }

    /// Answers a [question](BackendOutput::Asked). A scheduler that has left hears nothing.
    pub fn handle_tell(&mut self, now: Time, (scheduler, number): (NodeId, u64), answer: Vec<u8>) {
        self.links.say(now, scheduler, Message::Tell { number, answer });
        self.settle(now);
    }

    /// Ends all questions, whose leader is gone.
    fn end_questions(&mut self) {
        let ended = self.asking.end();
        self.outputs.extend(ended.into_iter().map(|number| BackendOutput::Told(number, None)));
    }

    /// Begins the loads and unloads that the assignment needs, and tells the leader the offer.
    fn have(&mut self, now: Time) {
        self.begin();
        let said = self.loading.said(&self.offer);
        self.tell_leader(now, Message::offer(said));
    }

    fn begin(&mut self) {
        let begun = self.loading.begin(&self.offer, |model| self.under_way.has(model));
        self.outputs.extend(begun.into_iter().map(|(model, doing)| BackendOutput::Model(model, doing)));
    }

    /// Stops offering a version of a model that is unloaded. The caller returns batches of the
    /// version that are still to run with [`BackendNode::handle_ran`].
    pub fn handle_unloaded(&mut self, now: Time, model: &str, version: u64) {
        let before = self.offer.models.len();
        self.offer.models.retain(|offered| offered.model != model || offered.version != version);
        if self.offer.models.len() < before {
            self.loading.handle_offer(&self.offer);
            self.have(now);
            self.settle(now);
        }
    }

    /// A batch that the backend asked for is done. `ran`: the items that ran and the time of the
    /// run (`None`: nothing ran). `run`: the counts of the run for the members' frontends, one of
    /// which counts the batch (`None`: the batch did not run as a whole). `outcomes`: the result of
    /// each member. Members without an outcome did not run, and go back to their frontends.
    pub fn handle_ran(
        &mut self,
        now: Time,
        batch: BatchKey,
        ran: Option<(u32, Duration)>,
        mut run: Option<BatchRun>,
        outcomes: Vec<(RequestKey, Outcome<P>)>,
    ) {
        let Some(done) = self.under_way.get_mut(batch).filter(|batch| batch.is_running()) else { return };
        let (missed, slot) = (done.missed(), done.slot as usize);
        let device = self.offer.slots.get(slot).map_or(0, |slot| slot.device);
        let mut answers: BTreeMap<NodeId, Vec<(u64, Outcome<P>)>> = BTreeMap::new();
        for (request, outcome) in outcomes {
            if done.take_ran(request) {
                match &outcome {
                    Outcome::Streamed => self.streams.ran(request),
                    Outcome::Failed { .. } => self.streams.failed(request),
                    Outcome::Outputs(_) => {}
                }
                answers.entry(request.frontend).or_default().push((request.number, outcome));
            }
        }
        let not_run = done.left_ran();
        for (frontend, answers) in answers {
            let has_run = answers.iter().any(|(_, outcome)| !outcome.is_failed());
            let its = run.map(|run| BatchRun { counts: run.counts && has_run, device, ..run });
            if has_run && let Some(run) = &mut run {
                run.counts = false;
            }
            self.links.say(now, frontend, Message::Answers { run: its, answers });
        }
        for (frontend, numbers) in not_run {
            self.links.say(now, frontend, Message::Release { batch, numbers });
        }
        self.complete(now, batch, ran, missed);
        self.start(now, slot);
        self.settle(now);
    }

    /// Sends an answer of a request that may have any number of them; `None`: the answers end without
    /// another. The request is in a running batch, or [`BackendNode::handle_ran`] has had
    /// [`Outcome::Streamed`] for it. The caller sends at most [`MOST_STREAMED`](crate::MOST_STREAMED) answers
    /// before it hears of [room](BackendOutput::Room).
    pub fn handle_streamed(&mut self, now: Time, request: RequestKey, answer: Option<Outcome<P>>, is_last: bool) {
        self.streams.answered(request, is_last);
        self.links.say(now, request.frontend, Message::Streamed { number: request.number, answer, is_last });
        self.settle(now);
    }

    /// Begins to leave. The backend goes once the scheduler lets it and its batches are done. The
    /// scheduler may first have other backends load its models.
    pub fn handle_drain(&mut self, now: Time) {
        if !std::mem::replace(&mut self.is_draining, true) {
            self.tell_leader(now, Message::Leave);
            self.settle(now);
        }
    }

    /// When a backend that leaves stops waiting for a leader that could let it go: `lost_after`
    /// after it lost the last leader.
    fn is_left_alone_at(&self) -> Option<Time> {
        let is_alone = self.is_draining && !self.is_let_go && self.following.leader().is_none();
        is_alone.then(|| self.leaderless_since + self.options.lost_after)
    }

    /// The next action that the backend asks for.
    pub fn poll_output(&mut self, now: Time) -> Option<BackendOutput<P>> {
        if let Some(output) = self.outputs.pop_front() {
            return Some(output);
        }
        if let Some(note) = self.links.poll_note() {
            return Some(BackendOutput::Note(note));
        }
        if let Some((peer, frame)) = self.links.poll_frame(now) {
            return Some(BackendOutput::Send(peer, frame));
        }
        let has_nothing = || self.under_way.len() == 0 && self.streams.len() == 0 && self.links.is_acknowledged();
        if self.is_let_go && !self.is_drained && has_nothing() {
            self.is_drained = true;
            return Some(BackendOutput::Drained);
        }
        None
    }

    fn settle(&mut self, now: Time) {
        while let Some(event) = self.links.poll_event() {
            match event {
                LinkEvent::Up(hello) if hello.role == Role::Frontend => self.handle_frontend(hello.node),
                LinkEvent::Up(_) => self.following.tell_epoch(now, &mut self.links),
                LinkEvent::Message(from, message) => self.handle_message(now, from, message),
                LinkEvent::Lost { peer, close } => {
                    if close {
                        self.outputs.push_back(BackendOutput::Lost(peer));
                    }
                    self.handle_lost(now, peer);
                }
            }
        }
    }

    fn handle_message(&mut self, now: Time, from: NodeId, message: Message<P>) {
        let Some(role) = self.links.hello(from).map(|hello| hello.role) else { return };
        match (role, message) {
            (Role::Scheduler { .. }, Message::Leads(epoch)) => self.handle_leads(now, from, epoch),
            (Role::Scheduler { .. }, Message::Standing { .. }) if self.following.handle_stands_by(from) => {
                self.handle_no_leader(now);
            }
            (Role::Scheduler { .. }, Message::Queue { alias, key }) => {
                self.names.entry(from).or_default().insert(alias, key);
            }
            (Role::Scheduler { .. }, Message::Meet { frontend, address }) => self.handle_meet(frontend, address),
            (Role::Scheduler { .. }, Message::Plan(plan)) => self.handle_plan(now, from, plan),
            (Role::Scheduler { .. }, Message::Assign(assigned)) if self.following.leader() == Some(from) => {
                self.loading.handle_assigned(assigned);
                self.have(now);
            }
            (Role::Scheduler { .. }, Message::Order { number, model, doing })
                if self.following.leader() == Some(from) =>
            {
                self.outputs.push_back(BackendOutput::Order { from: (from, number), model, doing });
            }
            (Role::Scheduler { .. }, Message::Ask { number, question }) if self.following.leader() == Some(from) => {
                self.outputs.push_back(BackendOutput::Asked { from: (from, number), question });
            }
            (Role::Scheduler { .. }, Message::Told { number, told })
                if self.following.leader() == Some(from) && self.asking.handle_told(number, told.as_ref()) =>
            {
                self.outputs.push_back(BackendOutput::Told(number, told));
            }
            (Role::Scheduler { .. }, Message::LetGo) if self.following.leader() == Some(from) => {
                self.is_let_go = self.is_draining;
                self.give_up_early(now, |_| true);
            }
            (Role::Frontend, Message::Inputs { batch, granted, gone }) => {
                self.handle_inputs(now, from, batch, granted, gone);
            }
            (Role::Frontend, Message::Cancel(numbers)) => {
                let left = numbers.into_iter().map(|number| RequestKey { frontend: from, number });
                self.outputs.push_back(BackendOutput::Left(left.collect()));
            }
            (Role::Frontend, Message::Room { number, answers }) => {
                self.outputs.push_back(BackendOutput::Room(RequestKey { frontend: from, number }, answers));
            }
            // No message that a backend handles.
            _ => {}
        }
    }

    fn tell_leader(&mut self, now: Time, message: Message<P>) {
        if let Some(leader) = self.following.leader() {
            self.links.say(now, leader, message);
        }
    }

    fn handle_leads(&mut self, now: Time, from: NodeId, epoch: Epoch) {
        if !self.following.handle_leads(now, &mut self.links, from, epoch) {
            return;
        }
        self.end_questions();
        self.outputs.push_back(BackendOutput::Leader(from, epoch));
        self.give_up_early(now, |of| of < epoch);
        let under_way = self.under_way.running(now);
        self.links.say(now, from, Message::UnderWay(under_way));
        self.is_let_go = false;
        self.links.say(now, from, Message::offer(self.loading.said(&self.offer)));
        if self.is_draining {
            self.links.say(now, from, Message::Leave);
        }
        self.said = None;
        self.tell_delays(now);
    }

    fn handle_meet(&mut self, frontend: NodeId, address: String) {
        if self.met.len() >= MOST_ADDRESSES && !self.met.contains_key(&frontend) {
            let links = &self.links;
            self.met.retain(|frontend, _| links.is_up(*frontend));
        }
        let is_new = self.met.get(&frontend).is_none_or(|met| met.address != address);
        if is_new && (self.met.len() < MOST_ADDRESSES || self.met.contains_key(&frontend)) {
            self.met.insert(frontend, Met { address, asked: None });
        }
    }

    fn handle_plan(&mut self, now: Time, from: NodeId, plan: Plan) {
        if plan.batch.epoch > self.following.epoch() {
            self.handle_leads(now, from, plan.batch.epoch);
        }
        let is_obeyed = self.following.leader() == Some(from) && plan.batch.epoch == self.following.epoch();
        if !is_obeyed {
            self.refused_plans += 1;
            return;
        }
        if self.under_way.contains(plan.batch) {
            return;
        }
        self.planned = self.planned.max(plan.batch);
        let early = self.early.take(plan.batch);
        let queue = self.names.get(&from).and_then(|names| names.get(plan.queue)).cloned();
        let has_room = !self.is_let_go && self.under_way.len() < MOST_BATCHES;
        let (key, slot) = (plan.batch, plan.slot as usize);
        let Some(queue) = queue.filter(|_| has_room && slot < self.under_way.slots()) else {
            let Plan { batch, members, .. } = plan;
            self.tell_leader(now, Message::Completed { batch, ran: None, missed: members });
            for Early { frontend, granted, .. } in early {
                self.release(now, frontend, batch, granted);
            }
            return;
        };
        let model = self.offer.models.iter().find(|model| model.model == queue.model && model.version == queue.version);
        let bytes = model.map_or(0, |model| model.item_bytes);
        let gather_until = now + self.gathers_for(bytes.saturating_mul(plan.size.into()));
        let batch = Batch::new(plan, queue, bytes, gather_until);
        let frontends = batch.frontends();
        self.under_way.insert(key, batch);
        for frontend in frontends {
            self.fetch(now, key, frontend);
        }
        for Early { frontend, granted, gone, .. } in early {
            self.take_inputs(now, frontend, key, (granted, gone));
        }
        self.start(now, slot);
    }

    /// How long a batch with so many bytes of inputs waits for them: as long as such fetches take
    /// lately. A batch that runs earlier returns its requests, again and again. What the leader was
    /// told covers sizes that were never fetched, but is up to a second old.
    fn gathers_for(&self, bytes: u64) -> Duration {
        let BackendOptions { fetch_within, lost_after, .. } = self.options;
        let told = self.said.as_ref().map_or(Duration::ZERO, |(delays, _)| delays.fetch_of(bytes));
        let lately = self.fetches.high_up_to(bytes).unwrap_or_default();
        told.max(lately).min(lost_after).max(fetch_within)
    }

    /// Awaits the inputs of a frontend, or asks for a connection to the frontend, which then sends them.
    fn fetch(&mut self, now: Time, key: BatchKey, frontend: NodeId) {
        let Some(batch) = self.under_way.get_mut(key) else { return };
        if self.links.is_up(frontend) {
            return batch.fetch(now, frontend);
        }
        let Some(met) = self.met.get_mut(&frontend) else { return batch.handle_lost(frontend) };
        if met.asked.is_none_or(|asked| asked + self.options.lost_after <= now) {
            met.asked = Some(now);
            self.outputs.push_back(BackendOutput::Connect { frontend, address: met.address.clone() });
        }
    }

    fn handle_frontend(&mut self, frontend: NodeId) {
        if let Some(met) = self.met.get_mut(&frontend) {
            met.asked = None;
        }
    }

    fn handle_inputs(
        &mut self,
        now: Time,
        frontend: NodeId,
        key: BatchKey,
        granted: Vec<(u64, Duration, P)>,
        gone: Vec<u64>,
    ) {
        let member = |(number, left, payload)| {
            let deadline = if left == Duration::MAX { Time::MAX } else { now + left };
            Member { request: RequestKey { frontend, number }, deadline, payload }
        };
        let granted: Vec<Member<P>> = granted.into_iter().map(member).collect();
        if let Some(slot) = self.take_inputs(now, frontend, key, (granted, gone)) {
            self.start(now, slot);
        }
    }

    /// Gives a batch its inputs. Returns the slot of the batch. Without such a batch the inputs wait for
    /// its plan, or go back.
    fn take_inputs(
        &mut self,
        now: Time,
        frontend: NodeId,
        key: BatchKey,
        (granted, gone): (Vec<Member<P>>, Vec<u64>),
    ) -> Option<usize> {
        let fetched = match self.under_way.get_mut(key) {
            Some(batch) => batch.fetched(frontend, granted.len()),
            None => self.late_fetches.fetched(key, frontend, granted.len()),
        };
        if let Some((bytes, since)) = fetched {
            // An own pause delayed the inputs; the network did not.
            let waited = self.links.paused_within(since, now);
            self.fetches.record(now, bytes, now.since(since).saturating_sub(waited));
        }
        let Some(batch) = self.under_way.get_mut(key) else {
            let most = if self.is_awaited(key) { self.most_early } else { 0 };
            let until = now + self.options.lost_after;
            if let Err(late) = self.early.add(key, (frontend, granted, gone), until, most) {
                self.release(now, frontend, key, late);
            }
            return None;
        };
        let slot = batch.slot as usize;
        let late: Vec<Member<P>> = granted.into_iter().filter_map(|member| batch.handle_input(member).err()).collect();
        for number in gone {
            batch.handle_gone(RequestKey { frontend, number });
        }
        self.release(now, frontend, key, late);
        Some(slot)
    }

    /// Whether the plan of a batch may still come. The numbers of batches rise in an epoch.
    fn is_awaited(&self, key: BatchKey) -> bool {
        let is_led = self.following.leader().is_some() && !self.is_let_go;
        let first = self.following.epoch();
        key > self.planned && (key.epoch > first || (key.epoch == first && is_led))
    }

    /// Gives back the inputs of batches whose plans do not come in time, or whose epochs are over.
    fn give_up_early(&mut self, now: Time, is_over: impl Fn(Epoch) -> bool) {
        for (batch, Early { frontend, granted, .. }) in self.early.give_up(now, is_over) {
            self.release(now, frontend, batch, granted);
        }
    }

    /// Gives members back to their frontend.
    fn release(&mut self, now: Time, frontend: NodeId, batch: BatchKey, members: Vec<Member<P>>) {
        if !members.is_empty() {
            let numbers = members.iter().map(|member| member.request.number).collect();
            self.links.say(now, frontend, Message::Release { batch, numbers });
        }
    }

    fn handle_no_leader(&mut self, now: Time) {
        self.leaderless_since = now;
        self.end_questions();
        let last = self.following.epoch();
        self.give_up_early(now, |of| of <= last);
    }

    fn handle_lost(&mut self, now: Time, peer: NodeId) {
        if self.following.handle_lost(now, &mut self.links, peer) {
            self.handle_no_leader(now);
        }
        self.names.remove(&peer);
        if let Some(met) = self.met.get_mut(&peer) {
            met.asked = None;
        }
        self.under_way.handle_lost(peer);
        self.late_fetches.handle_lost(peer);
        self.streams.handle_lost(peer);
        self.outputs.push_back(BackendOutput::PeerLost(peer));
        self.early.handle_lost(peer);
        for slot in 0..self.under_way.slots() {
            self.start(now, slot);
        }
    }

    /// Begins the slot's batches whose turn has come.
    fn start(&mut self, now: Time, slot: usize) {
        while let Some((key, members)) = self.under_way.start(now, slot) {
            let Some(batch) = self.under_way.get_mut(key) else { return };
            if members.is_empty() {
                let missed = batch.missed();
                self.complete(now, key, None, missed);
            } else {
                let (slot, queue) = (batch.slot, batch.queue.clone());
                self.outputs.push_back(BackendOutput::Run { batch: key, slot, queue, members });
            }
        }
    }

    /// Removes a batch that is done, and tells the leader.
    fn complete(&mut self, now: Time, batch: BatchKey, ran: Option<(u32, Duration)>, missed: Vec<RequestKey>) {
        if let Some(done) = self.under_way.remove(now, batch) {
            let (fetches, bytes) = done.into_fetches();
            self.late_fetches.add(batch, bytes, fetches);
            self.tell_leader(now, Message::Completed { batch, ran, missed });
            if self.loading.waits() {
                self.begin();
            }
        }
    }

    /// Tells the leader the measured delays if they have changed: soon if they differ much.
    fn tell_delays(&mut self, now: Time) {
        if self.following.leader().is_none() {
            return;
        }
        let frontends = self.links.peers().filter(|peer| peer.role == Role::Frontend).map(|peer| peer.node);
        let frontends: Vec<NodeId> = frontends.collect();
        let ways = frontends.iter().filter_map(|peer| self.links.one_way(*peer));
        let fresh = frontends.iter().filter_map(|peer| self.links.fresh_way(now, *peer));
        let (fetch, fetch_per_kib) = self.fetches.line().unwrap_or_default();
        let delays = Delays {
            control: ways.max().unwrap_or_default(),
            fetch,
            fetch_per_kib,
            fresh_control: fresh.min().unwrap_or_default(),
            fresh_fetches: self.fetches.fresh(now),
        };
        let is_news = match &self.said {
            None => delays != Delays::default(),
            Some((said, at)) => delays.differs(said) || (*at + DELAYS_EVERY <= now && delays != *said),
        };
        if is_news {
            self.said = Some((delays.clone(), now));
            self.tell_leader(now, Message::Delays(delays));
        }
    }
}

impl<P: Clone> RoleNode<P> for BackendNode<P> {
    fn links(&self) -> &Links<P> {
        &self.links
    }

    fn handle_connected(&mut self, now: Time, peer: &Hello) {
        if peer.role == Role::Backend {
            self.outputs.push_back(BackendOutput::Lost(peer.node));
            return;
        }
        let BackendOptions { heartbeat, lost_after, .. } = self.options;
        self.links.handle_connected(now, peer, LinkTiming { heartbeat, lost_after });
        self.settle(now);
    }

    fn handle_disconnected(&mut self, now: Time, peer: NodeId) {
        self.links.handle_disconnected(peer);
        self.settle(now);
    }

    fn handle_frame(&mut self, now: Time, frame: Frame<P>) {
        self.links.handle_frame(now, frame);
        self.settle(now);
    }

    fn handle_timeout(&mut self, now: Time) {
        self.links.handle_timeout(now);
        self.settle(now);
        for slot in 0..self.under_way.slots() {
            self.start(now, slot);
        }
        self.give_up_early(now, |_| false);
        self.is_let_go |= self.is_left_alone_at().is_some_and(|at| at <= now);
        if self.checks_at <= now {
            self.checks_at = now + CHECKS_EVERY;
            self.tell_delays(now);
        }
        self.settle(now);
    }

    fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let gathers = self.under_way.next_due().map(|at| (at, "inputs that have not come"));
        let early = self.early.next_due().map(|at| (at, "inputs whose plan has not come"));
        let delays = self.following.leader().map(|_| (self.checks_at, "delays"));
        let alone = self.is_left_alone_at().map(|at| (at, "a scheduler that lets it go"));
        [self.links.poll_timeout(), gathers, early, delays, alone].into_iter().flatten().min()
    }
}
