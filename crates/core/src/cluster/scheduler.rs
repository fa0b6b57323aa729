//! The cluster scheduler: all model queues and the matchmaker on one thread.

use super::behaviour::Behaviour;
use super::dispatch_policy::DispatchPolicy;
use super::item_cost::ItemCost;
use super::matchmaker::Matchmaker;
use super::model_options::ModelOptions;
use super::model_queue::ModelQueue;
use super::network::NetworkBudget;
use super::order::Order;
use super::output::{Output, Reject};
use super::request::Request;
use super::request_queue::Ticket;
use super::shard::Shard;
use crate::device_profiles::DeviceProfiles;
use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId, RequestId};
use crate::time::{Duration, Time};

/// The cluster scheduler: requests and completions in, dispatches and drops out.
///
/// The scheduler is one [`Shard`] with all models, and the [`Matchmaker`]. Messages between them
/// take no time. A driver on several threads runs the same parts with several shards.
///
/// A pure state machine. The driver calls a `handle_*` (or a command: `add_*`, `remove_*`, `set_*`)
/// with the time of the event. Then it takes every [`Scheduler::poll_output`], and asks
/// [`Scheduler::poll_timeout`] when to call [`Scheduler::handle_timeout`] if no event comes before.
/// A call too early, too late or once too often does no harm. Before each event the scheduler does
/// everything that is due by then.
///
/// Time never goes back: an event with an earlier time than its predecessor is taken as of the
/// predecessor's time.
///
/// Each accepted request is answered exactly once. It is a member of one [`Output::Dispatch`], or
/// the subject of one [`Output::Drop`], or a [`Scheduler::handle_cancel`] returned `true`.
#[derive(Debug)]
pub struct Scheduler {
    shard: Shard,
    matchmaker: Matchmaker,
    stray_completions: u64,
    /// The value of [`Scheduler::poll_timeout`]. Before this time there is no message to exchange,
    /// unless the shard updates a queue or a device changes.
    timeout: Option<(Time, TimeoutReason)>,
}

impl Default for Scheduler {
    fn default() -> Self {
        Scheduler { shard: Shard::new(0, 1), matchmaker: Matchmaker::new(), stray_completions: 0, timeout: None }
    }
}

/// Why the scheduler needs a wake-up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeoutReason {
    /// A candidate may start (its `exec`), and a device is free.
    Schedulable(ModelId),
    /// A candidate expires, or a request becomes hopeless or has waited for too long.
    QueueDue(ModelId),
}

/// Counters since the beginning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Batches dispatched.
    pub batches: u64,
    /// Items in the dispatched batches.
    pub items: u64,
    /// Completions that named no running batch: late, duplicate, or of a removed device.
    pub stray_completions: u64,
    /// Events that came with an earlier time than their predecessor.
    pub time_reversals: u64,
}

impl Scheduler {
    /// A scheduler without models and devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Items that wait for `model`.
    pub fn queued(&self, model: ModelId) -> u32 {
        self.shard.queue(model).map_or(0, ModelQueue::queued)
    }

    /// Devices present.
    pub fn devices(&self) -> u32 {
        self.matchmaker.devices()
    }

    /// Devices without a batch.
    pub fn free_devices(&self) -> u32 {
        self.matchmaker.free_devices()
    }

    /// When the next device is expected to be free: `Time::ZERO` if a device is free, `Time::MAX`
    /// if there is no device at all.
    pub fn expected_free(&mut self) -> Time {
        self.matchmaker.expected_free()
    }

    /// The batch size that the model's window drop aims at; zero if there is no such model.
    pub fn target(&self, model: ModelId) -> u32 {
        self.shard.queue(model).map_or(0, ModelQueue::target)
    }

    /// The device time that an item of the model needs; `None` if there is no such model.
    pub fn item_cost(&self, model: ModelId) -> Option<ItemCost> {
        self.shard.queue(model).map(ModelQueue::item_cost)
    }

    /// The counters since the beginning.
    pub fn stats(&self) -> Stats {
        let (batches, items) = self.shard.started();
        let time_reversals = self.shard.time_reversals();
        Stats { batches, items, stray_completions: self.stray_completions, time_reversals }
    }

    /// Takes a request that has arrived. The ticket is for [`Scheduler::handle_cancel`].
    ///
    /// # Errors
    /// If the request cannot be accepted. The error is its answer, and no output will name it.
    pub fn handle_request(&mut self, now: Time, request: Request) -> Result<Ticket, Reject> {
        let now = self.advance(now);
        let updates = self.shard.updates();
        let ticket = self.shard.enqueue(now, &request)?;
        if self.shard.updates() != updates {
            self.exchange(now);
        }
        Ok(ticket)
    }

    /// A client has cancelled. `true`: the request that `model` gave this ticket to was queued and
    /// has left. `false`: the request no longer waits (it runs, or was answered before).
    pub fn handle_cancel(&mut self, now: Time, model: ModelId, ticket: Ticket) -> bool {
        let now = self.advance(now);
        let left = self.shard.handle_cancel(now, model, ticket);
        self.exchange(now);
        left
    }

    /// A batch is done, well or badly: its device is free. A batch that does not run on this device
    /// (late, duplicate, unknown, of a removed device) is counted and ignored.
    pub fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        let now = self.advance(now);
        match self.matchmaker.completed(now, device, batch) {
            Some(_) => self.exchange(now),
            None => self.stray_completions += 1,
        }
    }

    /// Does all that is due by `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        self.advance(now);
    }

    /// Adds a model.
    pub fn add_model(&mut self, now: Time, options: ModelOptions) -> ModelId {
        let now = self.advance(now);
        let id = match options.shares_limit {
            Some(other) => self.matchmaker.add_model_sharing(other),
            None => self.matchmaker.add_model(options.max_in_flight),
        };
        self.shard.add_model(now, id, options);
        id
    }

    /// Removes a model. Its queued requests are dropped, its running batches go on. For an unknown
    /// model nothing happens.
    pub fn remove_model(&mut self, now: Time, model: ModelId) {
        let now = self.advance(now);
        if self.shard.remove_model(now, model) {
            self.matchmaker.remove_model(model);
            self.exchange(now);
        }
    }

    /// Replaces a model's latency profiles, also for queued requests. For an unknown model nothing
    /// happens.
    pub fn set_profile(&mut self, now: Time, model: ModelId, profiles: impl Into<DeviceProfiles>) {
        let now = self.advance(now);
        self.shard.set_profile(now, model, profiles);
        self.exchange(now);
    }

    /// Replaces a model's dispatch policy, also for queued requests. For an unknown model nothing
    /// happens.
    pub fn set_dispatch(&mut self, now: Time, model: ModelId, dispatch: DispatchPolicy) {
        let now = self.advance(now);
        self.shard.set_dispatch(now, model, dispatch);
        self.exchange(now);
    }

    /// Sets the behaviour of a model where it is adaptive; `None`: it follows from the load of the
    /// moment ([`super::LoadRegime`]). For an unknown model nothing happens.
    pub fn set_behaviour(&mut self, now: Time, model: ModelId, behaviour: Option<Behaviour>) {
        let now = self.advance(now);
        self.shard.set_behaviour(now, model, behaviour);
        self.exchange(now);
    }

    /// Makes the queue of a model a lent one, for good. Requests beyond their tenants' shares wait
    /// there ([`crate::tenants`]). The queue gets only device time that no other queue needs, and
    /// other queues do not plan with its requests. For an unknown model nothing happens.
    pub fn set_lent(&mut self, now: Time, model: ModelId) {
        let now = self.advance(now);
        self.matchmaker.set_lent(model);
        self.shard.set_lent(now, model);
        self.exchange(now);
    }

    /// The behaviour of a model where it is adaptive; `None` for an unknown model.
    pub fn behaviour(&self, model: ModelId) -> Option<Behaviour> {
        self.shard.queue(model).map(ModelQueue::behaviour)
    }

    /// Sets the order in which the candidates of all models get devices
    /// ([`Matchmaker::set_order`]).
    pub fn set_order(&mut self, now: Time, order: Order) {
        let now = self.advance(now);
        self.matchmaker.set_order(order);
        self.exchange(now);
    }

    /// The order set last by [`Scheduler::set_order`]; at first [`Order::Shortest`].
    pub fn order(&self) -> Order {
        self.matchmaker.order()
    }

    /// Lets a model's waiting requests go, even if its dispatch policy would wait for others to
    /// join ([`DispatchPolicy::Timeout`]). For an unknown model nothing happens.
    pub fn flush(&mut self, now: Time, model: ModelId) {
        let now = self.advance(now);
        self.shard.flush(now, model);
        self.exchange(now);
    }

    /// Sets how late the driver's wake-ups may come (zero at first, as in the simulator). A batch
    /// that is deferred on purpose starts at least this much before the moment at which a member
    /// would be lost. The margin matters for queue expiries, and where `l(b+1)` is close to `l(b)`:
    /// the schedulable window is then narrower than the clock is punctual.
    pub fn set_wake_margin(&mut self, now: Time, margin: Duration) {
        let now = self.advance(now);
        self.shard.set_wake_margin(now, margin);
        self.exchange(now);
    }

    /// Sets the network budget (zero at first) of all models, also of models added later. Queued
    /// requests keep their deadlines.
    pub fn set_network(&mut self, now: Time, network: NetworkBudget) {
        let now = self.advance(now);
        self.matchmaker.set_sends_ahead(network.is_remote());
        self.shard.set_network(now, network);
        self.exchange(now);
    }

    /// Sets the network budgets of one model, in place of the former ones, by the kind of device
    /// that runs its batches. For other kinds the worst of these budgets is expected. The same
    /// holds for replies, which are taken off deadlines before the kind is known. For an unknown
    /// model nothing happens.
    pub fn set_model_network(&mut self, now: Time, model: ModelId, networks: &[(DeviceKind, NetworkBudget)]) {
        let now = self.advance(now);
        // With one remote model, sending ahead is on for all. Models without a network behave as
        // before.
        if networks.iter().any(|(_, network)| network.is_remote()) {
            self.matchmaker.set_sends_ahead(true);
        }
        self.shard.set_model_network(now, model, networks);
        self.exchange(now);
    }

    /// Adds a device, free. Kinds should be few, numbered from 0: every event looks at each kind.
    pub fn add_device(&mut self, now: Time, kind: DeviceKind) -> DeviceId {
        let now = self.advance(now);
        let id = self.matchmaker.add_device(kind);
        self.devices_changed(now, kind);
        id
    }

    /// Removes a device. The batches that were sent to it are no longer waited for. For an unknown
    /// device nothing happens.
    pub fn remove_device(&mut self, now: Time, device: DeviceId) {
        let now = self.advance(now);
        if let Some(kind) = self.matchmaker.remove_device(device) {
            self.devices_changed(now, kind);
        }
    }

    /// Sets when a device will probably be done with work from outside the scheduler; `Time::ZERO`,
    /// the default: there is no such work. Of the devices that could take a batch, the one that is
    /// done first takes it; no batch waits for the load ([`Matchmaker::set_load`]). The load starts
    /// no timer, so this call needs no time. For an unknown device nothing happens.
    pub fn set_load(&mut self, device: DeviceId, until: Time) {
        self.matchmaker.set_load(device, until);
    }

    /// The next decision.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.shard.poll_output()
    }

    /// When to call [`Scheduler::handle_timeout`] if no event comes before, and why.
    pub fn poll_timeout(&self) -> Option<(Time, TimeoutReason)> {
        self.timeout
    }

    fn next_timeout(&self) -> Option<(Time, TimeoutReason)> {
        let due = self.shard.poll_timeout().map(|(at, model)| (at, TimeoutReason::QueueDue(model)));
        let exec = self.matchmaker.poll_timeout().map(|(at, model)| (at, TimeoutReason::Schedulable(model)));
        match (due, exec) {
            (Some(due), Some(exec)) => Some(if due.0 < exec.0 { due } else { exec }),
            (due, exec) => due.or(exec),
        }
    }

    /// Returns the member vector of a dispatch, for reuse.
    pub fn recycle(&mut self, members: Vec<RequestId>) {
        self.shard.recycle(members);
    }

    /// Moves time on and does all that was due by then.
    fn advance(&mut self, now: Time) -> Time {
        let now = self.shard.handle_timeout(now);
        if self.timeout.is_some_and(|(at, _)| at <= now) {
            self.exchange(now);
        }
        now
    }

    /// Exchanges messages until candidates or devices have run out. While no device can take a
    /// batch, candidates stay with their queues. Once a device can, only the newest candidate of
    /// each queue is sent.
    fn exchange(&mut self, now: Time) {
        self.matchmaker.set_time(now);
        while self.matchmaker.may_grant() || self.shard.has_answers() {
            while let Some((model, kind, candidate)) = self.shard.poll_candidate() {
                self.matchmaker.inform_candidate(model, kind, candidate);
            }
            while let Some(answer) = self.shard.poll_answer() {
                self.matchmaker.handle_answer(answer);
            }
            let Some(grant) = self.matchmaker.poll_grant(now) else { break };
            self.shard.handle_grant(now, grant);
        }
        self.timeout = self.next_timeout();
    }

    fn devices_changed(&mut self, now: Time, kind: DeviceKind) {
        self.shard.set_devices(now, kind, self.matchmaker.devices_of(kind));
        self.exchange(now);
    }
}
