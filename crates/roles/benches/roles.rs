//! The cost of a request in a frontend, a scheduler and a backend on one core, without wires and
//! tensors: `cargo bench -p downbeat-roles --bench roles`.
//!
//! Requests come at 100 000 a second of virtual time, so many in a round before outputs are polled.
//! Batches of 8 are planned, claimed, run and answered a millisecond later. Peers' messages come
//! over links of their own, which are not counted. The benchmark prints nanoseconds for each
//! request, the median of rounds of 100 000 requests, and messages and frames for each request.

use std::collections::VecDeque;
use std::time::Instant;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, Order};
use downbeat_core::{BatchId, Duration, LatencyProfile, Time, median};
use downbeat_roles::*;

type P = u64;

const REQUESTS: u64 = 100_000;
const ROUNDS: usize = 15;
const BATCH: usize = 8;
const EVERY: Duration = Duration::from_micros(10);
const TIMING: LinkTiming =
    LinkTiming { heartbeat: Duration::from_millis(10), lost_after: Duration::from_millis(1_000) };
const FRONTEND: NodeId = NodeId(1);
const SCHEDULER: NodeId = NodeId(2);
const BACKEND: NodeId = NodeId(3);
const EPOCH: Epoch = Epoch { number: 1, rank: 0 };

#[expect(clippy::disallowed_methods, reason = "a benchmark measures time")]
fn now() -> Instant {
    Instant::now()
}

fn hello(node: NodeId) -> Hello {
    let role = match node {
        FRONTEND => Role::Frontend,
        SCHEDULER => Role::Scheduler { rank: 0 },
        _ => Role::Backend,
    };
    Hello { protocol: PROTOCOL, node, role, name: String::new(), address: "f:1".to_owned() }
}

fn key(number: u64) -> RequestKey {
    RequestKey { frontend: FRONTEND, number }
}

fn queue() -> QueueKey {
    QueueKey { model: "resnet50".to_owned(), version: 1, shape: Vec::new() }
}

/// 32 slots, on which a batch of 8 takes 1 ms: more than the load needs.
fn offer() -> Offer {
    let micros = Duration::from_micros;
    let profile = LatencyProfile::linear(micros(50), micros(600), 8).expect("a profile");
    let model = OfferedModel {
        model: queue().model,
        version: 1,
        fingerprint: String::new(),
        definition: Vec::new(),
        max_batch: 8,
        drop: DropPolicy::WindowDrop,
        dispatch: DispatchPolicy::Deferred,
        max_wait: Duration::MAX,
        levels: Vec::new(),
        at_once: 32,
        item_bytes: 0,
        may_repeat: true,
        shape: Vec::new(),
        profiles: (0..32).map(|slot| (slot, profile.clone())).collect(),
    };
    Offer {
        slots: (0..32).map(|_| Slot { hardware: "cpu".to_owned(), device: 0, is_seat: false }).collect(),
        models: vec![model],
        ..Offer::default()
    }
}

fn batch(number: u64) -> BatchKey {
    BatchKey { epoch: EPOCH, batch: BatchId(number) }
}

/// The node that is measured.
enum Node {
    Frontend(FrontendNode<P>),
    Scheduler(Box<SchedulerNode<P>>),
    Backend(BackendNode<P>),
}

struct World {
    node: Node,
    me: NodeId,
    peers: Vec<(NodeId, Links<P>)>,
    time: Time,
    nanos: u64,
    frames: u64,
    messages: u64,
    /// Requests that were handed in or answered, and are not yet in a batch.
    waiting: VecDeque<u64>,
    ran: VecDeque<(Time, BatchKey, Vec<RequestKey>)>,
    batches: u64,
    done: u64,
}

impl World {
    fn new(me: NodeId) -> Self {
        let mut time = Time::ZERO;
        let LinkTiming { heartbeat, lost_after } = TIMING;
        let node = if me == FRONTEND {
            Node::Frontend(FrontendNode::new(me, FrontendOptions { heartbeat, lost_after, tries: 2 }, time))
        } else if me == SCHEDULER {
            let options = SchedulerOptions {
                rank: 0,
                schedulers: 1,
                heartbeat,
                takeover_after: heartbeat,
                peer_heartbeat: heartbeat,
                lost_after,
                wake_margin: Duration::ZERO,
                order: Order::default(),
                is_rehearsed: false,
                epochs_are_allotted: false,
                sub_clusters: None,
            };
            let mut node = SchedulerNode::new(me, options, time);
            time += heartbeat;
            node.handle_timeout(time);
            Node::Scheduler(Box::new(node))
        } else {
            let fetch_within = Duration::from_millis(5);
            let mut node = BackendNode::new(me, BackendOptions { heartbeat, lost_after, fetch_within }, time);
            let slots = vec![Slot { hardware: "cpu".to_owned(), device: 0, is_seat: false }];
            node.handle_offer(time, Offer { slots, ..Offer::default() });
            Node::Backend(node)
        };
        let others = [FRONTEND, SCHEDULER, BACKEND].into_iter().filter(|peer| *peer != me);
        let peers = others.map(|peer| (peer, Links::new(peer))).collect();
        let (waiting, ran) = (VecDeque::new(), VecDeque::new());
        let mut world =
            World { node, me, peers, time, nanos: 0, frames: 0, messages: 0, waiting, ran, batches: 0, done: 0 };
        for (peer, links) in &mut world.peers {
            links.handle_connected(time, &hello(me), TIMING);
            match &mut world.node {
                Node::Frontend(node) => node.handle_connected(time, &hello(*peer)),
                Node::Scheduler(node) => node.handle_connected(time, &hello(*peer)),
                Node::Backend(node) => node.handle_connected(time, &hello(*peer)),
            }
        }
        world.exchange();
        world.say(SCHEDULER, Message::Leads(EPOCH));
        for from in [FRONTEND, SCHEDULER] {
            world.say(from, Message::Queue { alias: QueueAlias(0), key: queue() });
        }
        world.say(BACKEND, Message::UnderWay(Vec::new()));
        world.say(BACKEND, Message::offer(offer()));
        world.exchange();
        world
    }

    fn say(&mut self, from: NodeId, message: Message<P>) {
        let (time, me) = (self.time, self.me);
        for (_, links) in self.peers.iter_mut().filter(|(peer, _)| *peer == from) {
            links.say(time, me, message.clone());
        }
    }

    /// The measured part: the node handles its inputs until it has no more output.
    fn exchange(&mut self) {
        loop {
            let mut to_node = Vec::new();
            for (_, links) in &mut self.peers {
                links.handle_timeout(self.time);
                while let Some((_, frame)) = links.poll_frame(self.time) {
                    to_node.push(frame);
                }
            }
            let mut sent = Vec::new();
            let begin = now();
            match &mut self.node {
                Node::Frontend(node) => {
                    to_node.into_iter().for_each(|frame| node.handle_frame(self.time, frame));
                    node.handle_timeout(self.time);
                    while let Some(output) = node.poll_output(self.time) {
                        match output {
                            FrontendOutput::Send(to, frame) => sent.push((to, frame)),
                            FrontendOutput::End { .. } => self.done += 1,
                            _ => {}
                        }
                    }
                }
                Node::Scheduler(node) => {
                    to_node.into_iter().for_each(|frame| node.handle_frame(self.time, frame));
                    node.handle_timeout(self.time);
                    while let Some(output) = node.poll_output(self.time) {
                        if let SchedulerOutput::Send(to, frame) = output {
                            sent.push((to, frame));
                        }
                    }
                }
                Node::Backend(node) => {
                    to_node.into_iter().for_each(|frame| node.handle_frame(self.time, frame));
                    node.handle_timeout(self.time);
                    while let Some(output) = node.poll_output(self.time) {
                        match output {
                            BackendOutput::Send(to, frame) => sent.push((to, frame)),
                            BackendOutput::Run { batch, members, .. } => {
                                let members = members.into_iter().map(|member| member.request).collect();
                                self.ran.push_back((self.time + Duration::from_millis(1), batch, members));
                            }
                            _ => {}
                        }
                    }
                }
            }
            self.nanos += begin.elapsed().as_nanos() as u64;
            if sent.is_empty() {
                return;
            }
            for (to, frame) in sent {
                self.frames += 1;
                self.messages += frame.messages.len() as u64;
                self.hear(to, frame);
            }
        }
    }

    fn hear(&mut self, to: NodeId, frame: Frame<P>) {
        let Some((_, links)) = self.peers.iter_mut().find(|(peer, _)| *peer == to) else { return };
        links.handle_frame(self.time, frame);
        while let Some(event) = links.poll_event() {
            match event {
                LinkEvent::Message(_, Message::Requests(requests)) => {
                    self.waiting.extend(requests.iter().map(|request| request.number));
                }
                LinkEvent::Message(_, Message::Plan(plan)) => {
                    self.done += plan.members.len() as u64;
                    self.ran.push_back((self.time + plan.expected, plan.batch, plan.members));
                }
                LinkEvent::Message(_, Message::Inputs { batch, granted, .. }) => {
                    let members = granted.into_iter().map(|(number, ..)| key(number)).collect();
                    self.ran.push_back((self.time + Duration::from_millis(1), batch, members));
                }
                LinkEvent::Message(_, Message::Answers { answers, .. }) => self.done += answers.len() as u64,
                _ => {}
            }
        }
    }

    /// Sends so many requests, and handles the consequences of the earlier ones.
    fn round(&mut self, requests: u64, next: &mut u64) {
        self.time += EVERY.saturating_mul(requests);
        let deadline = self.time + Duration::from_millis(50);
        let new: Vec<NewRequest<P>> = (0..requests)
            .map(|n| NewRequest {
                queue: queue(),
                payload: *next + n,
                deadline,
                queue_expiry: Time::MAX,
                level: 0,
                size: 1,
            })
            .collect();
        match &mut self.node {
            Node::Frontend(node) => {
                let begin = now();
                for request in new {
                    node.handle_request(self.time, request);
                }
                self.nanos += begin.elapsed().as_nanos() as u64;
            }
            Node::Scheduler(_) => {
                let handed = |n| HandedIn {
                    number: *next + n,
                    queue: QueueAlias(0),
                    left: Duration::from_millis(50),
                    queue_left: Duration::MAX,
                    ready_in: Duration::ZERO,
                    level: 0,
                    size: 1,
                    tried: 0,
                };
                self.say(FRONTEND, Message::Requests((0..requests).map(handed).collect()));
            }
            Node::Backend(_) => self.waiting.extend(*next..*next + requests),
        }
        *next += requests;
        while self.waiting.len() >= BATCH {
            let numbers: Vec<u64> = self.waiting.drain(..BATCH).collect();
            let batch = batch(self.batches);
            self.batches += 1;
            if self.me == FRONTEND {
                self.say(SCHEDULER, Message::Claim { batch, backend: BACKEND, numbers });
            } else {
                let left = Duration::from_millis(50);
                let granted = numbers.iter().map(|number| (*number, left, *number)).collect();
                let members = numbers.into_iter().map(key).collect();
                let (starts_in, expected) = (Duration::ZERO, Duration::from_millis(1));
                let (slot, queue, size) = (0, QueueAlias(0), BATCH as u32);
                let plan = Plan { batch, slot, queue, members, size, starts_in, expected };
                self.say(SCHEDULER, Message::Plan(plan));
                self.say(FRONTEND, Message::Inputs { batch, granted, gone: Vec::new() });
            }
        }
        while self.ran.front().is_some_and(|(at, ..)| *at <= self.time) {
            let Some((_, batch, members)) = self.ran.pop_front() else { break };
            match &mut self.node {
                Node::Scheduler(_) => {
                    let ran = Some((members.len() as u32, Duration::from_millis(1)));
                    self.say(BACKEND, Message::Completed { batch, ran, missed: Vec::new() });
                }
                Node::Frontend(_) => {
                    let answers = members.iter().map(|member| (member.number, Outcome::Outputs(0))).collect();
                    self.say(BACKEND, Message::Answers { run: None, answers });
                }
                Node::Backend(node) => {
                    let outcomes = members.iter().map(|member| (*member, Outcome::Outputs(0))).collect();
                    let ran = Some((members.len() as u32, Duration::from_millis(1)));
                    let begin = now();
                    node.handle_ran(self.time, batch, ran, None, outcomes);
                    self.nanos += begin.elapsed().as_nanos() as u64;
                }
            }
        }
        self.exchange();
    }
}

fn main() {
    println!("{:10}{:>12}{:>12}{:>12}{:>12}", "", "a round", "ns/request", "messages", "frames");
    for (name, me) in [("frontend", FRONTEND), ("scheduler", SCHEDULER), ("backend", BACKEND)] {
        for requests in [1, 8, 64] {
            let (mut world, mut next, mut each) = (World::new(me), 0, Vec::new());
            for _ in 0..ROUNDS {
                (world.nanos, world.frames, world.messages) = (0, 0, 0);
                for _ in 0..REQUESTS / requests {
                    world.round(requests, &mut next);
                }
                each.push(world.nanos / REQUESTS);
            }
            assert!(world.done + 10_000 > next, "{} of {next} were answered", world.done);
            let nanos = median(each).unwrap_or_default();
            let [messages, frames] = [world.messages, world.frames].map(|count| count as f64 / REQUESTS as f64);
            println!("{name:10}{requests:12}{nanos:12}{messages:12.3}{frames:12.3}");
        }
    }
}
