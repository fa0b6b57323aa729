//! A scheduler for tests of the other roles: it plans any request that was handed in, on any
//! backend.

use std::collections::{BTreeMap, BTreeSet};

use downbeat_core::{BatchId, Duration, Time};
use downbeat_roles::*;

pub type P = u64;

/// splitmix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// A scheduler that plans any request that was handed in, on any backend, and sometimes requests
/// that were not handed in.
pub struct Planner {
    pub links: Links<P>,
    pub epoch: Option<Epoch>,
    pub peers: BTreeMap<NodeId, Role>,
    pub waiting: Vec<(RequestKey, QueueKey)>,
    pub names: BTreeMap<(NodeId, QueueAlias), QueueKey>,
    pub under_way: BTreeMap<BatchKey, (NodeId, Vec<RequestKey>)>,
    pub told: BTreeSet<(NodeId, NodeId)>,
    pub batches: u64,
}

impl Planner {
    pub fn new(node: NodeId) -> Self {
        Planner {
            links: Links::new(node),
            epoch: None,
            peers: BTreeMap::new(),
            waiting: Vec::new(),
            names: BTreeMap::new(),
            under_way: BTreeMap::new(),
            told: BTreeSet::new(),
            batches: 0,
        }
    }

    pub fn lead(&mut self, now: Time, epoch: Epoch) {
        self.epoch = Some(epoch);
        self.waiting.clear();
        self.under_way.clear();
        for peer in self.peers.keys().copied().collect::<Vec<_>>() {
            self.greet(now, peer);
        }
    }

    fn greet(&mut self, now: Time, peer: NodeId) {
        let Some(epoch) = self.epoch else { return };
        let is_frontend = self.peers.get(&peer) == Some(&Role::Frontend);
        self.links.say(now, peer, Message::Leads(epoch));
        if is_frontend {
            let model = |model: &str, may_repeat| ServedModel {
                model: model.to_owned(),
                version: 1,
                definition: Vec::new(),
                may_repeat,
            };
            self.links.say(now, peer, Message::Models(vec![model("m", true), model("once", false)]));
        }
    }

    pub fn handle(&mut self, now: Time, event: LinkEvent<P>) {
        match event {
            LinkEvent::Up(hello) => {
                self.peers.insert(hello.node, hello.role);
                self.told.retain(|(backend, _)| *backend != hello.node);
                self.greet(now, hello.node);
            }
            LinkEvent::Lost { peer, .. } => {
                self.peers.remove(&peer);
                self.waiting.retain(|(request, _)| request.frontend != peer);
                let its = |(_, (backend, _)): &(&BatchKey, &(NodeId, Vec<RequestKey>))| *backend == peer;
                let lost: Vec<BatchKey> = self.under_way.iter().filter(its).map(|(key, _)| *key).collect();
                for batch in lost {
                    let members = self.under_way.remove(&batch).map_or(Vec::new(), |(_, members)| members);
                    self.refuse(now, members, Refusal::Lost);
                }
            }
            LinkEvent::Message(from, Message::Queue { alias, key }) => drop(self.names.insert((from, alias), key)),
            LinkEvent::Message(from, Message::Requests(requests)) => {
                for request in requests {
                    let key = RequestKey { frontend: from, number: request.number };
                    for (_, members) in self.under_way.values_mut() {
                        members.retain(|member| *member != key);
                    }
                    let queue = self.names.get(&(from, request.queue)).expect("its queue was named before").clone();
                    assert_eq!(queue.model == "once", key.number % 2 == 1, "of the queue that it is of");
                    if !self.waiting.iter().any(|(other, _)| *other == key) {
                        self.waiting.push((key, queue));
                    }
                }
            }
            LinkEvent::Message(from, Message::Cancel(gone)) => {
                self.waiting.retain(|(request, _)| request.frontend != from || !gone.contains(&request.number));
            }
            LinkEvent::Message(_, Message::Completed { batch, missed, .. }) => {
                if let Some((_, members)) = self.under_way.remove(&batch) {
                    let missed = members.into_iter().filter(|member| missed.contains(member)).collect();
                    self.refuse(now, missed, Refusal::Missed(batch));
                }
            }
            LinkEvent::Message(_, Message::Taken(epoch)) if Some(epoch) == self.epoch => self.epoch = None,
            LinkEvent::Message(from, Message::Standing { epoch, .. }) => {
                // The scheduler steps down.
                if Some(epoch) > self.epoch && self.peers.contains_key(&from) {
                    self.epoch = None;
                }
            }
            LinkEvent::Message(..) => {}
        }
    }

    fn refuse(&mut self, now: Time, members: Vec<RequestKey>, why: Refusal) {
        for member in members {
            self.links.say(now, member.frontend, Message::Refused(vec![(member.number, why)]));
        }
    }

    pub fn plan(&mut self, now: Time, random: &mut Random, addresses: &BTreeMap<NodeId, String>) {
        let Some(epoch) = self.epoch else { return };
        let backends: Vec<NodeId> =
            self.peers.iter().filter(|(_, role)| **role == Role::Backend).map(|(id, _)| *id).collect();
        if backends.is_empty() || self.waiting.is_empty() || self.under_way.len() > 20 {
            return;
        }
        let backend = backends[random.below(backends.len())];
        let key = self.waiting[0].1.clone();
        let mut members = Vec::new();
        self.waiting.retain(|(request, queue)| {
            let is_in = *queue == key && members.len() < 4;
            if is_in {
                members.push(*request);
            }
            !is_in
        });
        for member in &members {
            if self.told.insert((backend, member.frontend))
                && let Some(address) = addresses.get(&member.frontend)
            {
                let (frontend, address) = (member.frontend, address.clone());
                self.links.say(now, backend, Message::Meet { frontend, address });
            }
        }
        let alias = QueueAlias(u32::from(key.model == "once"));
        self.links.say(now, backend, Message::Queue { alias, key });
        let batch = BatchKey { epoch, batch: BatchId(self.batches) };
        self.batches += 1;
        let (slot, size) = (random.below(2) as u32, members.len() as u32);
        let (starts_in, expected) = (Duration::ZERO, Duration::from_millis(2));
        self.under_way.insert(batch, (backend, members.clone()));
        let frontends: BTreeSet<NodeId> = members.iter().map(|member| member.frontend).collect();
        for frontend in frontends {
            let numbers = members.iter().filter(|member| member.frontend == frontend).map(|member| member.number);
            self.links.say(now, frontend, Message::Claim { batch, backend, numbers: numbers.collect() });
        }
        let plan = Plan { batch, slot, queue: alias, members, size, starts_in, expected };
        self.links.say(now, backend, Message::Plan(plan));
    }
}
