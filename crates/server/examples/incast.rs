//! A simulated scheduler around real frontends and a real backend: how long does a batch's plan
//! take on its way, with all that its inputs take (Symphony appendix B)? `tools/cluster_bench.py
//! incast` runs it: `cargo run --release -p downbeat-server --example incast -- LISTEN FRONTENDS
//! INPUTS BATCHES`.
//!
//! As soon as so many requests of a model wait, as many of each frontend, it plans them as one
//! batch, one after another. It measures the time from the plan to the report of the batch's end,
//! less the batch's time on the backend. This is the way of the plan, the claims, the inputs and
//! the report. After so many batches of a model, it prints a line with percentiles, and with the
//! time of one copy of as many bytes on this machine.

#[path = "support/peer.rs"]
mod peer;

use std::collections::BTreeMap;
use std::hint::black_box;

use anyhow::{Result, bail};
use downbeat_core::{BatchId, Duration, Time};
use downbeat_roles::{BatchKey, Epoch, Message, NodeId, Plan, QueueAlias, QueueKey, RequestKey, Role, ServedModel};
use downbeat_service::clock::Clock;
use futures_util::future::select_all;
use peer::{Peer, hello};
use tokio::net::TcpListener;

const EPOCH: Epoch = Epoch { number: 1, rank: 0 };
/// The interval at which links are served.
const TICK: std::time::Duration = std::time::Duration::from_millis(5);
/// Copies to time, and the bytes that they are taken from in turns, more than the caches hold.
const COPIES: usize = 201;
const COPIED_FROM: usize = 256 << 20;

/// The state of a model.
#[derive(Default)]
struct Queue {
    alias: u32,
    item_bytes: u64,
    /// By frontend.
    waiting: BTreeMap<NodeId, Vec<u64>>,
    took: Vec<Duration>,
}

struct Scheduler {
    clock: Clock,
    peers: Vec<Peer>,
    frontends: usize,
    inputs: usize,
    batches: usize,
    models: BTreeMap<String, Queue>,
    /// By frontend and alias.
    names: BTreeMap<(NodeId, QueueAlias), QueueKey>,
    served: Vec<ServedModel>,
    up: usize,
    is_introduced: bool,
    next_batch: u64,
    under_way: Option<(String, Time)>,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [listen, frontends, inputs, batches] = &arguments[..] else { bail!("incast LISTEN FRONTENDS INPUTS BATCHES") };
    let scheduler = Scheduler {
        clock: Clock::start(),
        peers: Vec::new(),
        frontends: frontends.parse()?,
        inputs: inputs.parse()?,
        batches: batches.parse()?,
        models: BTreeMap::new(),
        names: BTreeMap::new(),
        served: Vec::new(),
        up: 0,
        is_introduced: false,
        next_batch: 0,
        under_way: None,
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(scheduler.run(listen))
}

impl Scheduler {
    async fn run(mut self, listen: &str) -> Result<()> {
        let listener = TcpListener::bind(listen).await?;
        let me = hello(0, Role::Scheduler { rank: 0 }, "played", listen);
        while self.peers.len() < self.frontends + 1 {
            let (stream, _) = listener.accept().await?;
            self.peers.push(Peer::greet(stream, &me, self.clock.now()).await?);
        }
        loop {
            let ready = select_all(self.peers.iter().map(|peer| Box::pin(peer.readable())));
            let _ = tokio::time::timeout(TICK, ready).await;
            let now = self.clock.now();
            for place in 0..self.peers.len() {
                for message in self.peers[place].read(now)? {
                    self.hear(now, place, message)?;
                }
            }
            self.plan();
            let now = self.clock.now();
            for peer in &mut self.peers {
                peer.write(now)?;
            }
        }
    }

    /// Handles a message; `None` means that the link has come up.
    fn hear(&mut self, now: Time, place: usize, message: Option<Message<()>>) -> Result<()> {
        let from = self.peers[place].other.node;
        match message {
            None => {
                self.up += 1;
                self.peers[place].say(now, Message::Leads(EPOCH));
            }
            Some(Message::Queue { alias, key }) => drop(self.names.insert((from, alias), key)),
            Some(Message::Requests(requests)) => {
                for request in requests {
                    let Some(key) = self.names.get(&(from, request.queue)) else { bail!("a queue without a name") };
                    let queue = self.models.entry(key.model.clone()).or_default();
                    queue.waiting.entry(from).or_default().push(request.number);
                }
            }
            Some(Message::Offer(offer)) => {
                for model in offer.models {
                    let alias = self.models.len() as u32;
                    let queue = self.models.entry(model.model.clone()).or_default();
                    if queue.item_bytes == 0 {
                        (queue.alias, queue.item_bytes) = (alias, model.item_bytes);
                        let key = QueueKey { model: model.model.clone(), version: model.version, shape: Vec::new() };
                        self.peers[place].say(now, Message::Queue { alias: QueueAlias(alias), key });
                    }
                    self.served.push(ServedModel {
                        model: model.model,
                        version: model.version,
                        definition: model.definition,
                        may_repeat: true,
                    });
                }
            }
            Some(Message::Completed { batch: _, ran, missed }) => {
                let Some((model, planned)) = self.under_way.take() else { bail!("a batch that was not planned") };
                let Some((_, ran)) = ran.filter(|_| missed.is_empty()) else { bail!("a batch did not run") };
                let (queue, inputs) = (self.models.entry(model.clone()).or_default(), self.inputs);
                queue.took.push(now.since(planned).saturating_sub(ran));
                if queue.took.len() == self.batches {
                    report(&model, queue, inputs, self.clock);
                }
            }
            Some(_) => {}
        }
        if !self.is_introduced && !self.served.is_empty() && self.up == self.peers.len() {
            self.introduce(now);
        }
        Ok(())
    }

    /// Tells frontends of models, and the backend of frontends.
    fn introduce(&mut self, now: Time) {
        self.is_introduced = true;
        let others: Vec<_> = self.peers.iter().map(|peer| peer.other.clone()).collect();
        for peer in &mut self.peers {
            if peer.other.role == Role::Frontend {
                peer.say(now, Message::Models(self.served.clone()));
            } else {
                for frontend in others.iter().filter(|other| other.role == Role::Frontend) {
                    peer.say(now, Message::Meet { frontend: frontend.node, address: frontend.address.clone() });
                }
            }
        }
    }

    /// Plans a batch, if no batch is under way and enough requests wait.
    fn plan(&mut self) {
        let (each, frontends) = (self.inputs / self.frontends, self.frontends);
        if self.under_way.is_some() {
            return;
        }
        let has_enough = |queue: &Queue| queue.waiting.values().filter(|its| its.len() >= each).count() >= frontends;
        let Some((model, queue)) = self.models.iter_mut().find(|(_, queue)| has_enough(queue)) else { return };
        let mut members = Vec::new();
        for (frontend, numbers) in &mut queue.waiting {
            members.extend(numbers.drain(..each).map(|number| RequestKey { frontend: *frontend, number }));
        }
        let batch = BatchKey { epoch: EPOCH, batch: BatchId(self.next_batch) };
        self.next_batch += 1;
        let (size, expected) = (members.len() as u32, Duration::from_millis(1));
        let queue = QueueAlias(queue.alias);
        let now = self.clock.now();
        self.under_way = Some((model.clone(), now));
        let backend = self.peers.iter().find(|peer| peer.other.role == Role::Backend).map(|peer| peer.other.node);
        let Some(backend) = backend else { return };
        for peer in &mut self.peers {
            let node = peer.other.node;
            if peer.other.role == Role::Frontend {
                let its = members.iter().filter(|member| member.frontend == node);
                let numbers = its.map(|member| member.number).collect();
                peer.say(now, Message::Claim { batch, backend, numbers });
            } else {
                let (members, starts_in) = (members.clone(), Duration::ZERO);
                peer.say(now, Message::Plan(Plan { batch, slot: 0, queue, members, size, starts_in, expected }));
            }
        }
    }
}

#[expect(clippy::print_stdout, reason = "what it is for")]
fn report(model: &str, queue: &Queue, inputs: usize, clock: Clock) {
    let mut took = queue.took.clone();
    took.sort_unstable();
    let us = |share: f64| took[((took.len() - 1) as f64 * share) as usize].as_nanos() as f64 / 1e3;
    let bytes = inputs * queue.item_bytes as usize;
    println!(
        "{}",
        serde_json::json!({
            "model": model, "bytes": bytes, "batches": took.len(), "p50_us": us(0.5), "p90_us": us(0.9), "p99_us": us(0.99), "max_us": us(1.0),
            "one_copy_us": copy(bytes, clock).as_nanos() as f64 / 1e3,
        })
    );
}

/// The time of one copy of so many bytes that are in no cache, the median.
fn copy(bytes: usize, clock: Clock) -> Duration {
    let (from, mut to) = (vec![1u8; COPIED_FROM], vec![0u8; bytes]);
    let mut took: Vec<Duration> = (0..COPIES)
        .map(|n| {
            let begin = n * bytes % (COPIED_FROM - bytes);
            let before = clock.now();
            to.copy_from_slice(black_box(&from[begin..begin + bytes]));
            black_box(&mut to);
            clock.now().since(before)
        })
        .collect();
    took.sort_unstable();
    took[COPIES / 2]
}
