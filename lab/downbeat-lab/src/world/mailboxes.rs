//! The cluster's scheduler in the world. One thread works off the shards and the matchmaker of
//! `driver`'s cluster, in virtual time.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use downbeat_core::cluster::{NetworkBudget, Output, Request, Shard, Ticket};
use downbeat_core::journal::Journal;
use downbeat_core::{Duration, ModelId, RequestId, Time};
use downbeat_driver::{Cluster, Handler, MAX_SHARDS, Moment, OwnMatchmaker, OwnShard, Setup, TURN};
use rand_distr::{Distribution, StandardUniform};
use rand_pcg::Pcg64;

use downbeat_sim::random;

/// The order in which the shards and the matchmaker are worked off when several have something to
/// do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Round robin, as one thread does after it posts a message.
    #[default]
    InTurn,
    /// The seed chooses the mailbox and the number of messages taken at a time: an order that
    /// threads could produce.
    Seeded,
}

/// An event that is posted to a shard.
pub(crate) enum Event {
    Submit(Request),
    Cancel(ModelId, RequestId),
}

/// An answer of a shard.
pub(crate) enum Said {
    /// A request was accepted (true) or refused.
    Taken(RequestId, bool),
    /// A request whose client has gone has left its queue.
    Cancelled(RequestId),
    Decided(Output),
}

/// The virtual clock, and the answers of the shards that the world has not read.
#[derive(Default)]
pub(crate) struct Virtual {
    now_ns: AtomicU64,
    said: Mutex<VecDeque<Said>>,
}

impl Virtual {
    fn said(&self) -> MutexGuard<'_, VecDeque<Said>> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Handler for Virtual {
    type Event = Event;
    /// The tickets of waiting requests.
    type RequestTable = BTreeMap<RequestId, Ticket>;
    type Context = ();

    fn now(&self) -> Time {
        Time::from_nanos(self.now_ns.load(Ordering::Relaxed))
    }

    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, requests: &mut Self::RequestTable, event: Event) {
        match event {
            Event::Submit(request) => {
                let ticket = shard.handle_request(moment.now, &request).ok();
                self.said().push_back(Said::Taken(request.id, ticket.is_some()));
                requests.extend(ticket.map(|ticket| (request.id, ticket)));
            }
            Event::Cancel(model, request) => {
                if let Some(ticket) = requests.get(&request)
                    && shard.handle_cancel(moment.now, model, *ticket)
                {
                    requests.remove(&request);
                    self.said().push_back(Said::Cancelled(request));
                }
            }
        }
    }

    fn carry_out(
        &self,
        _: Moment,
        _: &mut Journal<Shard>,
        requests: &mut Self::RequestTable,
        output: Output,
        (): &mut (),
    ) {
        match &output {
            Output::Dispatch { members, .. } => {
                for member in members {
                    requests.remove(member);
                }
            }
            Output::Drop { request, .. } => {
                requests.remove(request);
            }
        }
        self.said().push_back(Said::Decided(output));
    }
}

/// Makes a cluster of this many shards (at least one), without models and devices.
pub(crate) fn cluster(shards: u32, kinds: u32, network: NetworkBudget) -> Cluster<Virtual> {
    let shards = (shards.max(1) as usize).min(MAX_SHARDS);
    let setup = Setup { kinds, network, ..Setup::new(0) };
    Cluster::new(Virtual::default(), vec![BTreeMap::new(); shards], setup)
}

/// The shards and the matchmaker of a cluster, run by one thread. Posted messages wait until the
/// thread works the mailboxes off, in an order that follows from the seed.
///
/// A mailbox with a message or a due timer is worked off at once, or up to the delay later. The
/// delay stands for a thread that was held up. A mailbox keeps its order, as it does on threads.
/// Interleavings within the handling of one message are not explored; `just loom` explores them.
pub(crate) struct Mailboxes<'c> {
    cluster: &'c Cluster<Virtual>,
    shards: Vec<OwnShard<'c, Virtual>>,
    matchmaker: OwnMatchmaker<'c, Virtual>,
    order: Order,
    rng: Pcg64,
    /// The longest delay of a message.
    pub delay: Duration,
    /// For each mailbox with something to do, the time when it is worked off. The matchmaker's is
    /// the last.
    due: Vec<Option<Time>>,
    /// The mailbox that was worked off last.
    last: usize,
}

impl<'c> Mailboxes<'c> {
    /// Takes all mailboxes of a cluster.
    pub fn new(cluster: &'c Cluster<Virtual>, order: Order, seed: u64) -> Self {
        Mailboxes {
            cluster,
            shards: (0..cluster.shards()).map(|shard| cluster.own_shard(shard)).collect(),
            matchmaker: cluster.own_matchmaker(),
            order,
            rng: random(seed, 4),
            delay: Duration::ZERO,
            due: vec![None; cluster.shards() + 1],
            last: 0,
        }
    }

    /// Moves the time on to `now`.
    pub fn set_time(&self, now: Time) {
        self.cluster.handler().now_ns.store(now.as_nanos(), Ordering::Relaxed);
    }

    /// Posts a message, and works off the mailboxes that are due.
    pub fn post<R>(&mut self, post: impl FnOnce(&Cluster<Virtual>) -> R) -> R {
        let posted = post(self.cluster);
        self.work();
        posted
    }

    /// Posts a message without working any mailbox off: its mailbox finds it with the next message.
    pub fn tell(&self, tell: impl FnOnce(&Cluster<Virtual>)) {
        tell(self.cluster);
    }

    /// Takes the next answer of a shard.
    pub fn hear(&mut self) -> Option<Said> {
        self.cluster.handler().said().pop_front()
    }

    /// Returns the time when the next mailbox is due.
    pub fn next_event(&self) -> Option<Time> {
        (0..self.due.len()).filter_map(|mailbox| self.due[mailbox].or_else(|| self.timer(mailbox))).min()
    }

    /// Works mailboxes off until none is due.
    pub fn work(&mut self) {
        let now = self.cluster.handler().now();
        loop {
            let mailboxes = self.due.len();
            for mailbox in 0..mailboxes {
                let has_work = !self.is_done(mailbox) || self.timer(mailbox).is_some_and(|at| at <= now);
                if has_work && self.due[mailbox].is_none() {
                    self.due[mailbox] = Some(now + self.draw_delay());
                }
            }
            let is_due = |mailbox: &usize| self.due[*mailbox].is_some_and(|due| due <= now);
            let mut ready: Vec<usize> = (0..mailboxes).filter(is_due).collect();
            ready.sort_by_key(|mailbox| (mailbox + mailboxes - self.last - 1) % mailboxes);
            let (next, most) = match self.order {
                Order::InTurn => (0, TURN),
                Order::Seeded if ready.is_empty() => return,
                Order::Seeded => (self.below(ready.len()), 1 << self.below(1 + TURN.ilog2() as usize)),
            };
            let Some(mailbox) = ready.get(next).copied() else { return };
            self.due[mailbox] = None;
            self.last = mailbox;
            match self.shards.get_mut(mailbox) {
                Some(shard) => shard.turn(most),
                None => self.matchmaker.turn(most),
            };
        }
    }

    /// Ends all delays: delayed messages are handled now.
    pub fn settle(&mut self) {
        self.delay = Duration::ZERO;
        self.due.fill(None);
        self.work();
    }

    /// Returns the number of devices, and the number of devices without a batch.
    pub fn devices(&self) -> (u32, u32) {
        (self.matchmaker.devices(), self.matchmaker.free_devices())
    }

    fn is_done(&self, mailbox: usize) -> bool {
        self.shards.get(mailbox).map_or_else(|| self.matchmaker.is_done(), OwnShard::is_done)
    }

    fn timer(&self, mailbox: usize) -> Option<Time> {
        let of_matchmaker = || self.matchmaker.poll_timeout().map(|(at, _)| at);
        self.shards.get(mailbox).map_or_else(of_matchmaker, OwnShard::poll_timeout)
    }

    fn below(&mut self, count: usize) -> usize {
        let chance: f64 = StandardUniform.sample(&mut self.rng);
        (chance * count as f64) as usize
    }

    /// Half of all messages are not delayed, so that they overtake delayed ones.
    fn draw_delay(&mut self) -> Duration {
        if self.delay == Duration::ZERO || self.below(2) == 0 {
            return Duration::ZERO;
        }
        Duration::from_nanos(self.below(self.delay.as_nanos() as usize + 1) as u64)
    }
}
