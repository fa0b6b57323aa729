//! A frontend: keeps its clients' requests until they are answered, and decides which batch runs
//! each of them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::open_requests::{NewRequest, Open, OpenRequests, Place, Streamed, Way};
use crate::asking::Asking;
use crate::epoch::Epoch;
use crate::following::Following;
use crate::link::{Frame, LinkTiming};
use crate::links::{LinkEvent, Links};
use crate::message::{
    A_MESSAGE, BatchKey, BatchRun, Doing, Hello, MOST_DECISION, Message, NodeId, Outcome, Refusal, Role, ServedModel,
    Told,
};
use crate::role_node::RoleNode;
use crate::rollouts::{Received, Rollouts};
use downbeat_core::time::{Duration, Time};

/// A request without a deadline ends once no scheduler has led for this many times `lost_after`:
/// 30 s if nothing else is set.
const WAITS_UNLED: u64 = 30;
/// How often a request may come back without a run, and for how many times `lost_after` since its
/// first return it may come back more often. Example: a backend that still connects to the frontend
/// returns a batch after 2 ms, so that a request comes back 16 times in 40 ms.
const MOST_RETURNS: (u8, u64) = (16, 30);

/// A batch that has claimed a request waits for its tensors until so long after they were expected.
/// Other requests of the batch, and its slot, wait as well.
const HELD_FOR: Duration = Duration::from_millis(2);

/// The most streams that a frontend has refused and whose last answer has not come. Only a lying
/// backend has more.
const MOST_REFUSED_STREAMS: usize = 65_536;

/// The end of a request, reported once for each request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RequestEnd<P> {
    /// A backend ran the request, in the batch with this run. `None`: the batch did not run as a
    /// whole. After [`Outcome::Streamed`] answers may still come, by [`FrontendOutput::Streamed`].
    Ran(Outcome<P>, Option<BatchRun>),
    /// The scheduler rejected or dropped the request.
    Refused(Refusal),
    /// The deadline passed without an answer: no scheduler led, the request's backend was lost, or
    /// the run did not end by `lost_after` past the deadline.
    TooLate,
    /// The request has no deadline, and no scheduler has led for 30 times `lost_after`.
    NoLeader,
    /// The request's backend is lost, and the request must not run twice, or was tried too often.
    Lost,
}

/// An action that a frontend asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FrontendOutput<P> {
    /// Send this frame.
    Send(NodeId, Frame<P>),
    /// Answer a request.
    End {
        /// The number of the request.
        number: u64,
        /// The end of the request.
        end: RequestEnd<P>,
        /// The way of the request to its end.
        way: Way,
    },
    /// The next answer of a decoupled model to a request. The request may have ended with
    /// [`Outcome::Streamed`]. [`FrontendNode::handle_room`] follows once the client has taken the answer.
    Streamed {
        /// The number of the request.
        number: u64,
        /// The answer; `None`: the answers end without another.
        answer: Option<Outcome<P>>,
        /// Whether no answer follows.
        is_last: bool,
    },
    /// The backend of this request is lost after the request's end, and before its last answer.
    StreamLost(u64),
    /// Clients may ask for these models from now on, and for no others.
    Models(Vec<ServedModel>),
    /// Another scheduler leads.
    Leader {
        /// The leader.
        scheduler: NodeId,
        /// The leader's epoch.
        epoch: Epoch,
        /// The number of requests that the frontend hands in to this leader at once.
        handed_in: u64,
    },
    /// The result of an order: a client wanted a change of a model.
    Ordered {
        /// The number of the order.
        number: u64,
        /// The result.
        result: Result<(), OrderFailure>,
    },
    /// Another frontend has made this decision about the rollout of a model.
    Rollout {
        /// Name of the model.
        model: String,
        /// The bytes that the other frontend gave to [`FrontendNode::handle_rollout`].
        decision: Vec<u8>,
    },
    /// A client of the cluster asks this question. [`FrontendNode::handle_tell`] takes the answer.
    Asked {
        /// The scheduler that hears the answer, and its number of the question.
        from: (NodeId, u64),
        /// The question.
        question: Vec<u8>,
    },
    /// An answer to the [question](FrontendNode::handle_ask) of this number; `None`: it has ended.
    Told(u64, Option<Told>),
    /// The link to this peer is given up: close what carried it.
    Lost(NodeId),
    /// Show this text to people, once.
    Note(String),
}

/// Why a change of a model was not made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OrderFailure {
    /// No scheduler leads, or another has begun to lead since. Backends may have made the change.
    NoLeader,
    /// In words.
    Refused(String),
}

/// Options of a frontend.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FrontendOptions {
    /// Longest silence of this node on a link.
    pub heartbeat: Duration,
    /// Silence after which a peer is lost.
    pub lost_after: Duration,
    /// How often a request is handed in again because its backend was lost.
    pub tries: u8,
}

/// Why a request comes back to the frontend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Back {
    /// No backend has run the request.
    NotRun,
    /// The backend that had the request is lost, and may have run it.
    PerhapsRun,
}

/// A frontend.
///
/// The frontend is the arbiter of its requests. A request is with the frontend, the leader, or the
/// batch that has claimed it, and only the frontend decides which. If a scheduler or a backend is
/// lost, the others may believe something else. Only the frontend's decision counts. One batch at a
/// time can claim a request, and each request ends once.
///
/// After any of the `handle_*` take all outputs. Events between two rounds of outputs share
/// messages and frames. At [`RoleNode::poll_timeout`] call [`RoleNode::handle_timeout`],
/// after all frames that have come. Time never goes back.
///
/// Bounds: the caller of [`FrontendNode::handle_request`] bounds the requests and their bytes.
/// Memory here is in proportion to the open requests. Links have bounds of their own.
#[derive(Debug)]
pub struct FrontendNode<P> {
    options: FrontendOptions,
    links: Links<P>,
    following: Following,
    requests: OpenRequests<P>,
    /// Requests to hand in to the leader.
    to_hand_in: Vec<u64>,
    /// Requests to take back from the leader.
    to_cancel: Vec<u64>,
    /// Announced requests whose tensors are ready, and of which the leader must hear.
    ready: Vec<u64>,
    /// Requests that batches have claimed before their tensors were ready, by the time until which
    /// the batches wait. An entry stays until then, also if the tensors are ready earlier.
    held: BTreeSet<(Time, u64)>,
    /// Requests that have ended with [`Outcome::Streamed`] and whose last answer has not come, by number:
    /// the backend of each.
    streams: BTreeMap<u64, NodeId>,
    /// The requests whose backend has heard at an answer that they are gone, until the last answer.
    refused_streams: BTreeSet<(NodeId, u64)>,
    /// The name, version and [`ServedModel::may_repeat`] of each model.
    models: Vec<(String, u64, bool)>,
    /// The numbers of orders that the leader has.
    orders: BTreeSet<u64>,
    rollouts: Rollouts,
    asking: Asking,
    /// When the frontend lost its last leader, or began.
    leaderless_since: Time,
    run_again: u64,
    late_answers: u64,
    outputs: VecDeque<FrontendOutput<P>>,
}

impl<P: Clone> FrontendNode<P> {
    /// A frontend without peers and requests.
    pub fn new(node: NodeId, options: FrontendOptions, now: Time) -> Self {
        FrontendNode {
            options,
            links: Links::of(node, Role::Frontend),
            following: Following::new(),
            requests: OpenRequests::new(),
            to_hand_in: Vec::new(),
            to_cancel: Vec::new(),
            ready: Vec::new(),
            held: BTreeSet::new(),
            streams: BTreeMap::new(),
            refused_streams: BTreeSet::new(),
            models: Vec::new(),
            orders: BTreeSet::new(),
            rollouts: Rollouts::default(),
            asking: Asking::default(),
            leaderless_since: now,
            run_again: 0,
            late_answers: 0,
            outputs: VecDeque::new(),
        }
    }

    /// The number of requests that have not ended.
    pub fn open(&self) -> usize {
        self.requests.len()
    }

    /// The number of requests that have ended with [`Outcome::Streamed`], and whose last answer has not
    /// come.
    pub fn streams(&self) -> usize {
        self.streams.len()
    }

    /// Requests so far that were handed in again because the backend that had them was lost.
    pub fn run_again(&self) -> u64 {
        self.run_again
    }

    /// Answers so far for requests that had ended, or that the backend had no claim on. None of them
    /// reached a client.
    pub fn late_answers(&self) -> u64 {
        self.late_answers
    }

    /// The scheduler that the frontend follows, if its link is up.
    pub fn leader(&self) -> Option<NodeId> {
        self.following.leader()
    }

    /// The highest epoch that the frontend has followed.
    pub fn epoch(&self) -> Epoch {
        self.following.epoch()
    }

    /// Takes a client's request. Returns the number that [`FrontendOutput::End`] will name.
    pub fn handle_request(&mut self, now: Time, request: NewRequest<P>) -> u64 {
        self.add(now, request.map(Some), Time::ZERO)
    }

    /// Takes a client's request whose tensors are expected at `ready_at` (Symphony §4.3). The
    /// request waits in the leader's queue meanwhile. [`FrontendNode::handle_ready`] follows, or
    /// [`FrontendNode::handle_cancel`] if the tensors cannot be made.
    pub fn handle_announced(&mut self, now: Time, request: NewRequest<()>, ready_at: Time) -> u64 {
        self.add(now, request.map(|()| None), ready_at)
    }

    fn add(&mut self, now: Time, request: NewRequest<Option<P>>, ready_at: Time) -> u64 {
        let number = self.requests.add(request, ready_at);
        self.wait(now, number);
        number
    }

    /// Takes the tensors of an announced request. A batch that has claimed the request gets them at
    /// once.
    pub fn handle_ready(&mut self, now: Time, number: u64, payload: P) {
        let Some(open) = self.requests.get_mut(number).filter(|open| open.payload.is_none()) else { return };
        let left = open.left(now);
        match open.place {
            Place::Here => {
                open.payload = Some(payload);
                self.wait(now, number);
            }
            Place::HandedIn | Place::Planned(..) => {
                open.payload = Some(payload);
                // Later the leader takes the request for ready without a word.
                if open.ready_at > now {
                    self.ready.push(number);
                }
            }
            Place::Claimed(backend, batch) => {
                open.payload = Some(payload.clone());
                let granted = vec![(number, left, payload)];
                self.links.say(now, backend, Message::Inputs { batch, granted, gone: Vec::new() });
            }
        }
    }

    /// Takes a client's wish to change a model, by the caller's number.
    /// [`FrontendOutput::Ordered`] follows.
    pub fn handle_order(&mut self, now: Time, number: u64, (model, doing): (String, Doing)) {
        match self.following.leader() {
            Some(leader) => {
                self.orders.insert(number);
                self.links.say(now, leader, Message::Order { number, model, doing });
                self.settle(now);
            }
            None => self.outputs.push_back(FrontendOutput::Ordered { number, result: Err(OrderFailure::NoLeader) }),
        }
    }

    /// Takes a decision of this frontend about the rollout of a model, and tells the others.
    pub fn handle_rollout(&mut self, now: Time, model: &str, decision: &[u8]) {
        if decision.len() > MOST_DECISION {
            let note = format!("a decision about the rollout of model '{model}' is too long for the other frontends");
            return self.outputs.push_back(FrontendOutput::Note(note));
        }
        let number = self.rollouts.decide(model, decision);
        if let Some(leader) = self.following.leader() {
            let (model, decision) = (model.to_owned(), decision.to_vec());
            self.links.say(now, leader, Message::Rollout { model, number, decision });
            self.settle(now);
        }
    }

    /// Asks all frontends and backends a question, by the caller's number. [`FrontendOutput::Told`]
    /// follows.
    pub fn handle_ask(&mut self, now: Time, number: u64, question: Vec<u8>) {
        if !self.asking.ask((now, &mut self.links), self.following.leader(), (number, question)) {
            self.outputs.push_back(FrontendOutput::Told(number, None));
        }
        self.settle(now);
    }

    /// Answers a [question](FrontendOutput::Asked). A scheduler that has left hears nothing.
    pub fn handle_tell(&mut self, now: Time, (scheduler, number): (NodeId, u64), answer: Vec<u8>) {
        self.links.say(now, scheduler, Message::Tell { number, answer });
        self.settle(now);
    }

    /// Takes the leader's decision about a rollout. If this frontend knows a newer decision, it tells
    /// the leader.
    fn handle_told_rollout(&mut self, now: Time, from: NodeId, model: String, (number, decision): (u64, Vec<u8>)) {
        match self.rollouts.handle(&model, number, &decision) {
            Received::New => self.outputs.push_back(FrontendOutput::Rollout { model, decision }),
            Received::Known => {}
            Received::Old => {
                if let Some(message) = self.rollouts.message(&model) {
                    self.links.say(now, from, message);
                }
            }
        }
    }

    /// Ends all orders and questions, whose leader is gone.
    fn end_orders(&mut self) {
        let ended = self.asking.end();
        self.outputs.extend(ended.into_iter().map(|number| FrontendOutput::Told(number, None)));
        for number in std::mem::take(&mut self.orders) {
            self.outputs.push_back(FrontendOutput::Ordered { number, result: Err(OrderFailure::NoLeader) });
        }
    }

    /// Removes the request of a client that has gone, or whose tensors cannot be made. No
    /// [`FrontendOutput::End`] follows.
    pub fn handle_cancel(&mut self, now: Time, number: u64) {
        if let Some(Open { payload: None, place: Place::Claimed(backend, batch), .. }) = self.requests.get(number) {
            // The batch need not wait for the tensors any longer.
            let (backend, batch) = (*backend, *batch);
            self.links.say(now, backend, Message::Inputs { batch, granted: Vec::new(), gone: vec![number] });
        } else if let Some(backend) = self.answering(number) {
            self.links.say(now, backend, Message::Cancel(vec![number]));
        }
        self.streams.remove(&number);
        self.remove(number);
    }

    /// The client has taken so many of a request's [streamed answers](FrontendOutput::Streamed).
    pub fn handle_room(&mut self, now: Time, number: u64, answers: u32) {
        if let Some(backend) = self.answering(number) {
            self.links.say(now, backend, Message::Room { number, answers });
        }
    }

    /// The backend that answers a request, during its run or after.
    fn answering(&self, number: u64) -> Option<NodeId> {
        self.streams.get(&number).copied().or_else(|| self.requests.get(number)?.holder())
    }

    /// The next action that the frontend asks for.
    pub fn poll_output(&mut self, now: Time) -> Option<FrontendOutput<P>> {
        if self.outputs.is_empty()
            && !(self.to_hand_in.is_empty() && self.to_cancel.is_empty() && self.ready.is_empty())
        {
            self.tell_leader(now);
            self.settle(now);
        }
        if let Some(output) = self.outputs.pop_front() {
            return Some(output);
        }
        if let Some(note) = self.links.poll_note() {
            return Some(FrontendOutput::Note(note));
        }
        self.links.poll_frame(now).map(|(peer, frame)| FrontendOutput::Send(peer, frame))
    }

    fn settle(&mut self, now: Time) {
        while let Some(event) = self.links.poll_event() {
            match event {
                LinkEvent::Up(hello) if hello.role == Role::Backend => self.handle_backend(now, hello.node),
                LinkEvent::Up(_) => self.following.tell_epoch(now, &mut self.links),
                LinkEvent::Message(from, message) => self.handle_message(now, from, message),
                LinkEvent::Lost { peer, close } => {
                    if close {
                        self.outputs.push_back(FrontendOutput::Lost(peer));
                    }
                    self.handle_lost(now, peer);
                }
            }
        }
    }

    fn handle_message(&mut self, now: Time, from: NodeId, message: Message<P>) {
        let Some(role) = self.links.hello(from).map(|hello| hello.role) else { return };
        let is_leader = self.following.leader() == Some(from);
        match (role, message) {
            (Role::Scheduler { .. }, Message::Leads(epoch)) => self.handle_leads(now, from, epoch),
            (Role::Scheduler { .. }, Message::Standing { .. }) if self.following.handle_stands_by(from) => {
                self.handle_no_leader(now);
            }
            (Role::Scheduler { .. }, Message::Refused(refused)) if is_leader => {
                for (number, refusal) in refused {
                    self.handle_refused(now, number, refusal);
                }
            }
            (Role::Scheduler { .. }, Message::Ordered { number, failed })
                if is_leader && self.orders.remove(&number) =>
            {
                let result = failed.map_or(Ok(()), |reason| Err(OrderFailure::Refused(reason)));
                self.outputs.push_back(FrontendOutput::Ordered { number, result });
            }
            (Role::Scheduler { .. }, Message::Rollout { model, number, decision }) if is_leader => {
                self.handle_told_rollout(now, from, model, (number, decision));
            }
            (Role::Scheduler { .. }, Message::Ask { number, question }) if is_leader => {
                self.outputs.push_back(FrontendOutput::Asked { from: (from, number), question });
            }
            (Role::Scheduler { .. }, Message::Told { number, told })
                if is_leader && self.asking.handle_told(number, told.as_ref()) =>
            {
                self.outputs.push_back(FrontendOutput::Told(number, told));
            }
            (Role::Scheduler { .. }, Message::Models(models)) if is_leader => {
                let known = |model: &ServedModel| (model.model.clone(), model.version, model.may_repeat);
                self.models = models.iter().map(known).collect();
                self.outputs.push_back(FrontendOutput::Models(models));
            }
            (Role::Scheduler { .. }, Message::Claim { batch, backend, numbers }) => {
                let is_planned = is_leader && batch.epoch == self.following.epoch();
                self.handle_claim(now, (backend, batch), numbers, is_planned);
            }
            (Role::Backend, Message::Release { batch, numbers }) => {
                for number in numbers {
                    let place = self.requests.get(number).map(|open| open.place);
                    if place == Some(Place::Claimed(from, batch)) {
                        self.take_back(now, number, Back::NotRun);
                    }
                }
            }
            (Role::Backend, Message::Answers { mut run, answers }) => {
                for (number, outcome) in answers {
                    let has_run = !outcome.is_failed();
                    let has_ended = self.handle_answer(from, number, (outcome, run));
                    // The first answer takes the count of the batch along.
                    if has_ended
                        && has_run
                        && let Some(run) = &mut run
                    {
                        run.counts = false;
                    }
                }
            }
            (Role::Backend, Message::Streamed { number, answer, is_last }) => {
                self.handle_streamed(now, from, number, (answer, is_last));
            }
            // From a scheduler that does not lead, or no message that a frontend handles.
            _ => {}
        }
    }

    /// Ends a request if its answer comes from the backend that has claimed it. Returns whether it
    /// does.
    fn handle_answer(&mut self, from: NodeId, number: u64, (outcome, run): (Outcome<P>, Option<BatchRun>)) -> bool {
        let Some(open) = self.requests.get(number).filter(|open| open.may_run_on(from)) else {
            self.late_answers += 1;
            return false;
        };
        if matches!(outcome, Outcome::Streamed) && open.streamed != Streamed::All {
            self.streams.insert(number, from);
        }
        self.end(number, RequestEnd::Ran(outcome, run));
        true
    }

    /// Takes one of the answers to a request, which may be before the end of its run or after.
    fn handle_streamed(&mut self, now: Time, from: NodeId, number: u64, (answer, is_last): (Option<Outcome<P>>, bool)) {
        if self.streams.get(&number) == Some(&from) {
            if is_last {
                self.streams.remove(&number);
            }
        } else {
            let is_its = |open: &&mut Open<P>| open.may_run_on(from) && open.streamed != Streamed::All;
            let Some(open) = self.requests.get_mut(number).filter(is_its) else {
                return self.refuse_stream(now, from, number, is_last);
            };
            open.streamed = if is_last { Streamed::All } else { Streamed::Some };
        }
        self.outputs.push_back(FrontendOutput::Streamed { number, answer, is_last });
    }

    /// Tells a backend that a request is gone, at its first answer. An earlier `Cancel` may have come
    /// before the request's run began. Later answers are only on their way.
    fn refuse_stream(&mut self, now: Time, backend: NodeId, number: u64, is_last: bool) {
        if is_last {
            self.refused_streams.remove(&(backend, number));
        } else if self.refused_streams.len() < MOST_REFUSED_STREAMS && self.refused_streams.insert((backend, number)) {
            self.links.say(now, backend, Message::Cancel(vec![number]));
        }
    }

    fn handle_leads(&mut self, now: Time, from: NodeId, epoch: Epoch) {
        if self.following.handle_leads(now, &mut self.links, from, epoch) {
            for message in self.rollouts.messages() {
                self.links.say(now, from, message);
            }
            self.end_orders();
            self.to_cancel.clear();
            self.ready.clear();
            self.to_hand_in = self.requests.withdraw();
            let handed_in = self.to_hand_in.len() as u64;
            self.outputs.push_back(FrontendOutput::Leader { scheduler: from, epoch, handed_in });
        }
    }

    fn handle_refused(&mut self, now: Time, number: u64, refusal: Refusal) {
        let Some(open) = self.requests.get_mut(number) else { return };
        let is_with_leader = matches!(open.place, Place::HandedIn | Place::Planned(..));
        match refusal {
            // Inputs may be lost with their link long before this side hears of its loss.
            Refusal::Missed(batch) => match open.place {
                Place::Claimed(_, holder) if holder == batch => self.take_back(now, number, Back::NotRun),
                // The request may have come back from the batch already, and wait anew.
                _ if is_with_leader && batch > open.given_back => self.take_back(now, number, Back::NotRun),
                _ => {}
            },
            _ if !is_with_leader => {}
            Refusal::Lost => self.take_back(now, number, Back::NotRun),
            Refusal::Rejected(_) | Refusal::Dropped(_) => {
                // The scheduler has already removed the request, so no cancel message is needed.
                open.place = Place::Here;
                self.end(number, RequestEnd::Refused(refusal));
            }
        }
    }

    /// Sends a backend that has connected the inputs for which its batches wait.
    fn handle_backend(&mut self, now: Time, backend: NodeId) {
        for (batch, numbers) in self.requests.planned_for(backend) {
            self.handle_claim(now, (backend, batch), numbers, true);
        }
    }

    /// Grants a batch its requests, and sends the backend their inputs. `is_planned`: the followed leader
    /// has planned the batch, in its epoch. Another scheduler's batch gets nothing, and its backend need
    /// not wait.
    fn handle_claim(&mut self, now: Time, (to, batch): (NodeId, BatchKey), numbers: Vec<u64>, is_planned: bool) {
        let is_up = self.links.is_up(to);
        let (mut granted, mut gone, mut is_held) = (Vec::new(), Vec::new(), false);
        for number in numbers {
            let open = match self.requests.get_mut(number) {
                // A claim that names the request twice. The batch has the inputs.
                Some(open) if open.place == Place::Claimed(to, batch) => continue,
                // A batch that gave the request back does not get it again.
                Some(open) if is_planned && !matches!(open.place, Place::Claimed(..)) && batch > open.given_back => {
                    open
                }
                _ => {
                    gone.push(number);
                    continue;
                }
            };
            if !is_up {
                open.place = Place::Planned(to, batch);
                continue;
            }
            let held_until = open.ready_at + HELD_FOR;
            match &open.payload {
                Some(payload) => granted.push((number, open.left(now), payload.clone())),
                None if held_until > now => {
                    is_held = true;
                    self.held.insert((held_until, number));
                }
                None => {
                    // The leader hears of the request again once its tensors are ready.
                    open.place = Place::Here;
                    gone.push(number);
                    continue;
                }
            }
            open.place = Place::Claimed(to, batch);
            open.claimed = (to, batch, now);
        }
        // The batch waits for the held ones, as long as it waits for any inputs. The answer comes at
        // once nevertheless: the backend measures its time as the network's.
        if is_held || !(granted.is_empty() && gone.is_empty()) {
            self.links.say(now, to, Message::Inputs { batch, granted, gone });
        }
    }

    fn handle_lost(&mut self, now: Time, peer: NodeId) {
        if self.following.handle_lost(now, &mut self.links, peer) {
            self.handle_no_leader(now);
        }
        for number in self.requests.claimed_by(peer) {
            let has_inputs = self.requests.get(number).is_some_and(|open| open.payload.is_some());
            self.take_back(now, number, if has_inputs { Back::PerhapsRun } else { Back::NotRun });
        }
        self.refused_streams.retain(|(backend, _)| *backend != peer);
        let lost = self.streams.extract_if(.., |_, backend| *backend == peer);
        self.outputs.extend(lost.map(|(number, _)| FrontendOutput::StreamLost(number)));
    }

    /// Tells batches that have waited long enough for tensors to go on without them.
    fn release_held(&mut self, now: Time) {
        while let Some((_, number)) = self.held.first().copied().filter(|(until, _)| *until <= now) {
            self.held.pop_first();
            let Some(open) = self.requests.get_mut(number).filter(|open| open.payload.is_none()) else { continue };
            let Place::Claimed(backend, batch) = open.place else { continue };
            (open.place, open.given_back) = (Place::Here, batch);
            self.links.say(now, backend, Message::Inputs { batch, granted: Vec::new(), gone: vec![number] });
        }
    }

    /// Takes back the requests that no batch has claimed, because nobody leads.
    fn handle_no_leader(&mut self, now: Time) {
        self.leaderless_since = now;
        self.end_orders();
        self.to_hand_in.clear();
        self.to_cancel.clear();
        self.ready.clear();
        for number in self.requests.withdraw() {
            self.wait(now, number);
        }
    }

    /// Takes a request back. The request waits again, or ends if its chances are used up.
    fn take_back(&mut self, now: Time, number: u64, back: Back) {
        let Some(open) = self.requests.get(number) else { return };
        let key = self.requests.queue(open);
        let may_repeat = |(model, version, may_repeat): &(String, u64, bool)| {
            *may_repeat && key.is_some_and(|key| key.model == *model && key.version == *version)
        };
        let has_chances = match back {
            Back::NotRun => {
                let (times, spans) = MOST_RETURNS;
                open.returned < times || now < open.first_returned + self.options.lost_after.saturating_mul(spans)
            }
            Back::PerhapsRun => open.tried < self.options.tries && self.models.iter().any(may_repeat),
        } && open.streamed == Streamed::None;
        let Some(open) = self.requests.get_mut(number) else { return };
        if let Place::Claimed(_, batch) = std::mem::replace(&mut open.place, Place::Here) {
            open.given_back = batch;
        }
        match back {
            Back::NotRun => {
                if open.returned == 0 {
                    open.first_returned = now;
                }
                open.returned = open.returned.saturating_add(1);
            }
            Back::PerhapsRun => open.tried = open.tried.saturating_add(1),
        }
        if open.deadline <= now {
            self.end(number, RequestEnd::TooLate);
        } else if has_chances {
            self.run_again += u64::from(back == Back::PerhapsRun);
            self.wait(now, number);
        } else {
            self.end(number, RequestEnd::Lost);
        }
    }

    /// Lets a request that is here wait for a leader, or queues it for the next message to the
    /// leader.
    fn wait(&mut self, now: Time, number: u64) {
        let Some(deadline) = self.requests.get(number).map(|open| open.deadline) else { return };
        if self.following.leader().is_some() {
            self.to_hand_in.push(number);
        } else if deadline <= now {
            self.end(number, RequestEnd::TooLate);
            return;
        } else if deadline == Time::MAX {
            let last = self.unled_until();
            match last <= now {
                true => self.end(number, RequestEnd::NoLeader),
                false => self.requests.watch(last, number),
            }
            return;
        }
        self.requests.watch(deadline, number);
    }

    /// Until when requests without a deadline wait if no scheduler leads.
    fn unled_until(&self) -> Time {
        self.leaderless_since + self.options.lost_after.saturating_mul(WAITS_UNLED)
    }

    /// Handles the end of a request's deadline, or of the grace after the deadline.
    fn expire(&mut self, now: Time, number: u64) {
        let Some(open) = self.requests.get(number) else { return };
        let (is_led, is_claimed) = (self.following.leader().is_some(), matches!(open.place, Place::Claimed(..)));
        if open.deadline == Time::MAX {
            // A claimed request waits for its backend, which answers or is lost.
            match self.unled_until() {
                _ if is_led || is_claimed => {}
                last if last <= now => self.end(number, RequestEnd::NoLeader),
                last => self.requests.watch(last, number),
            }
            return;
        }
        // By the end of the grace the frontend has heard the word of the leader or of the backend,
        // or of their loss. A backend that still runs the request then has broken its deadline.
        let grace = if is_led || is_claimed { self.options.lost_after } else { Duration::ZERO };
        let last = open.deadline + grace;
        if last <= now {
            if let Some(backend) = open.holder() {
                self.links.say(now, backend, Message::Cancel(vec![number]));
            }
            self.end(number, RequestEnd::TooLate);
        } else {
            self.requests.watch(last, number);
        }
    }

    fn end(&mut self, number: u64, end: RequestEnd<P>) {
        if let Some(way) = self.remove(number) {
            self.outputs.push_back(FrontendOutput::End { number, end, way });
        }
    }

    /// Removes a request here and at the leader. Returns its way, if the request was open.
    fn remove(&mut self, number: u64) -> Option<Way> {
        let open = self.requests.remove(number)?;
        if open.place == Place::HandedIn {
            self.to_cancel.push(number);
        }
        Some(open.way())
    }

    /// Tells the leader about new and cancelled requests.
    fn tell_leader(&mut self, now: Time) {
        let (new, gone) = (std::mem::take(&mut self.to_hand_in), std::mem::take(&mut self.to_cancel));
        let ready = std::mem::take(&mut self.ready);
        let Some(leader) = self.following.leader() else { return };
        for numbers in gone.chunks(A_MESSAGE) {
            self.links.say(now, leader, Message::Cancel(numbers.to_vec()));
        }
        for numbers in ready.chunks(A_MESSAGE) {
            self.links.say(now, leader, Message::Ready(numbers.to_vec()));
        }
        for numbers in new.chunks(A_MESSAGE) {
            let mut handed_in = Vec::with_capacity(numbers.len());
            for number in numbers {
                let Some((request, key)) = self.requests.hand_in(now, *number) else { continue };
                handed_in.push(request);
                if let Some(key) = key {
                    self.links.say(now, leader, Message::Queue { alias: request.queue, key });
                }
            }
            if !handed_in.is_empty() {
                self.links.say(now, leader, Message::Requests(handed_in));
            }
        }
    }
}

impl<P: Clone> RoleNode<P> for FrontendNode<P> {
    fn links(&self) -> &Links<P> {
        &self.links
    }

    fn handle_connected(&mut self, now: Time, peer: &Hello) {
        if peer.role == Role::Frontend {
            self.outputs.push_back(FrontendOutput::Lost(peer.node));
            return;
        }
        let FrontendOptions { heartbeat, lost_after, .. } = self.options;
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
        self.release_held(now);
        while let Some(numbers) = self.requests.expired(now) {
            for number in numbers {
                self.expire(now, number);
            }
        }
    }

    fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let expiry = self.requests.next_expiry().map(|at| (at, "a deadline"));
        let held = self.held.first().map(|(until, _)| (*until, "inputs that are not ready"));
        [self.links.poll_timeout(), expiry, held].into_iter().flatten().min()
    }
}
