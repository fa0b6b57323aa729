//! A shard: the queues of some models, on one thread.

use std::collections::VecDeque;

use super::behaviour::Behaviour;
use super::demand::Demand;
use super::dispatch_policy::DispatchPolicy;
use super::indexed_heap::IndexedHeap;
use super::load_regime::LoadRegime;
use super::messages::{Answer, Candidate, Grant};
use super::model_options::ModelOptions;
use super::model_queue::ModelQueue;
use super::network::NetworkBudget;
use super::output::{Departure, Dropped, Output, Reject};
use super::request::Request;
use super::request_queue::Ticket;
use crate::device_profiles::DeviceProfiles;
use crate::ids::{BatchId, DeviceKind, ModelId, RequestId};
use crate::time::{Duration, Time};

/// Most spare vectors that are kept.
const MAX_SPARE: usize = 1024;

/// A model computes its demand again after a silence of this length, which is a part of the time
/// that its meter looks back.
const SILENCE: Duration = Duration::from_millis(200);

/// The queues of some models, which one thread works on (Symphony §4.2, several *ModelThreads* in
/// one).
///
/// A pure state machine that knows nothing of the other shards and exchanges messages with the
/// matchmaker. The messages may take any time on their way, as long as messages of one kind arrive
/// in the order in which they were sent:
///
/// | message | from | to | lost if a newer one comes first |
/// |---|---|---|---|
/// | [`Candidate`] of a model for a kind of device, [`Shard::poll_candidate`] | shard | matchmaker | yes: only the newest counts |
/// | [`Grant`], [`Shard::handle_grant`] | matchmaker | shard | no |
/// | [`Answer`], [`Shard::poll_answer`] | shard | matchmaker | no |
///
/// After each event the driver takes first every [`Shard::poll_candidate`], then every
/// [`Shard::poll_answer`]. So the matchmaker knows a model's new candidate before it hears the
/// answer about the last one. Last come all [`Shard::poll_output`], so that the matchmaker knows a
/// batch before the batch can complete. Then [`Shard::poll_timeout`] gives the time to call
/// [`Shard::handle_timeout`] if no event comes before.
///
/// **Races**, all of them ordinary. A grant may meet a queue that has changed since its candidate
/// was sent (an arrival, a cancellation, an expiry, another profile). The grant takes the batch
/// that may start by now, or is declined if none may. A grant for a model that was removed is
/// declined. A grant of a device that was removed starts a batch on this device, as if it had been
/// removed a moment later.
///
/// Time never goes back: an event with an earlier time than its predecessor is taken as of the
/// predecessor's time.
#[derive(Debug)]
pub struct Shard {
    now: Time,
    /// By model, over all shards; `None`: a removed model, or one of another shard.
    members: Vec<Option<Box<Member>>>,
    /// By model: when its queue needs attention, or earlier. An entry is updated only when it comes
    /// first, or moves to an earlier time. The first entry is exact.
    wakes: IndexedHeap<Time>,
    /// Models whose candidate differs from the one sent last.
    changed: Vec<ModelId>,
    answers: VecDeque<Answer>,
    outputs: VecDeque<Output>,
    next_batch: u64,
    index: u32,
    shards: u64,
    /// Vectors given back by [`Shard::recycle`].
    spare: Vec<Vec<RequestId>>,
    /// By kind: number of the cluster's devices.
    devices: Vec<u32>,
    /// The demand of this shard's models.
    demand: Demand,
    /// The demand of other shards' models.
    other_demand: Demand,
    /// The regime for the demand of all models.
    regime: LoadRegime,
    /// How often `regime` has changed.
    regimes: u64,
    /// The models are being told of a new regime. If it changes once more meanwhile, the models
    /// told already learn it at their next event.
    changing_regime: bool,
    /// By model with a demand: when the demand is computed again though no event came.
    quiet: IndexedHeap<Time>,
    wake_margin: Duration,
    network: NetworkBudget,
    batches: u64,
    items: u64,
    time_reversals: u64,
    updates: u64,
}

/// A model of the shard, aligned to a pair of cache lines.
#[derive(Debug)]
#[repr(C, align(128))]
struct Member {
    queue: ModelQueue,
    /// By kind: the candidate that the matchmaker was told last.
    sent: Vec<Option<Candidate>>,
    /// The value of [`Shard::regimes`] when the model was last told the regime.
    regimes: u64,
    /// The model's demand as counted in the shard's sum.
    counted: Demand,
    /// The model is in [`Shard::changed`].
    changed: bool,
    /// When the queue needs attention, as of its last update.
    wake: Option<Time>,
}

impl Shard {
    /// Shard `index` of `shards`, without models, for a cluster without devices. No two shards give
    /// out the same batch id.
    pub fn new(index: u32, shards: u32) -> Self {
        assert!(index < shards, "shards are counted from zero");
        Shard {
            now: Time::ZERO,
            members: Vec::new(),
            wakes: IndexedHeap::new(),
            changed: Vec::new(),
            answers: VecDeque::new(),
            outputs: VecDeque::new(),
            next_batch: u64::from(index),
            index,
            shards: u64::from(shards),
            spare: Vec::new(),
            devices: Vec::new(),
            demand: Demand::default(),
            other_demand: Demand::default(),
            regime: LoadRegime::default(),
            regimes: 0,
            changing_regime: false,
            quiet: IndexedHeap::new(),
            wake_margin: Duration::ZERO,
            network: NetworkBudget::default(),
            batches: 0,
            items: 0,
            time_reversals: 0,
            updates: 0,
        }
    }

    /// The shard's index, and the number of shards.
    pub fn place(&self) -> (u32, u32) {
        (self.index, self.shards as u32)
    }

    /// The model's queue, if this shard has the model.
    pub fn queue(&self, model: ModelId) -> Option<&ModelQueue> {
        Some(&self.members.get(model.0 as usize)?.as_deref()?.queue)
    }

    /// Batches started, and the items in these batches.
    pub fn started(&self) -> (u64, u64) {
        (self.batches, self.items)
    }

    /// Events that came with an earlier time than their predecessor.
    pub fn time_reversals(&self) -> u64 {
        self.time_reversals
    }

    /// How often a queue was updated. If an event does not change this number, there is nothing to
    /// poll, and [`Shard::poll_timeout`] has not changed. This is the common case: most requests
    /// only enlarge a batch that will leave later.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Takes a request that has arrived. The ticket is for [`Shard::handle_cancel`].
    ///
    /// # Errors
    /// If the request cannot be accepted. The error is its answer, and no output will name it.
    pub fn handle_request(&mut self, now: Time, request: &Request) -> Result<Ticket, Reject> {
        let now = self.advance(now);
        self.enqueue(now, request)
    }

    /// [`Shard::handle_request`] after all that was due by `now` was done.
    #[inline(always)]
    pub(super) fn enqueue(&mut self, now: Time, request: &Request) -> Result<Ticket, Reject> {
        let member = member(&mut self.members, request.model).ok_or(Reject::UnknownModel)?;
        let ticket = member.queue.enqueue(now, request)?;
        if !member.queue.is_settled() {
            self.refresh(now, request.model);
        }
        Ok(ticket)
    }

    /// A client has cancelled. `true`: the request that `model` gave this ticket to was queued and
    /// has left. `false`: the request no longer waits (it runs, or was answered before).
    pub fn handle_cancel(&mut self, now: Time, model: ModelId, ticket: Ticket) -> bool {
        let now = self.advance(now);
        let left = member(&mut self.members, model).is_some_and(|member| member.queue.cancel(ticket));
        if left {
            self.refresh(now, model);
        }
        left
    }

    /// Takes a device for one of the models. The model's batch starts, or the grant is declined;
    /// [`Shard::poll_answer`] gives the answer.
    pub fn handle_grant(&mut self, now: Time, grant: Grant) {
        let now = self.advance(now);
        let Grant { model, device, kind, free_at } = grant;
        let Some(member) = member(&mut self.members, model) else {
            self.answers.push_back(Answer::Declined { grant });
            return;
        };
        let mut members = self.spare.pop().unwrap_or_default();
        match member.queue.take(now, kind, free_at, &mut members) {
            None => {
                self.answers.push_back(Answer::Declined { grant });
                self.recycle(members);
            }
            Some(Departure { size, arrives, start, expected, reason }) => {
                let batch = BatchId(self.next_batch);
                self.next_batch += self.shards;
                self.batches += 1;
                self.items += u64::from(size);
                self.answers.push_back(Answer::Started { grant, batch, arrives, expected });
                let dispatch = Output::Dispatch { batch, device, model, members, size, start, expected, reason };
                self.outputs.push_back(dispatch);
            }
        }
        self.refresh(now, model);
    }

    /// Does all that is due. Returns the time as of which it was done: `now`, or later if time went
    /// back.
    pub fn handle_timeout(&mut self, now: Time) -> Time {
        self.advance(now)
    }

    /// Adds a model, which no shard may have yet. The matchmaker gives out the id, and must know
    /// the model before its candidate.
    pub fn add_model(&mut self, now: Time, model: ModelId, options: ModelOptions) {
        let now = self.advance(now);
        let mut queue = ModelQueue::new(now, options);
        queue.set_wake_margin(self.wake_margin);
        queue.set_network(self.network);
        for (kind, devices) in (0..).map(DeviceKind).zip(&self.devices) {
            queue.set_devices(kind, *devices);
        }
        let index = model.0 as usize;
        if self.members.len() <= index {
            self.members.resize_with(index + 1, || None);
        }
        assert!(self.members[index].is_none(), "a model is added once, or its requests would be lost");
        self.members[index] = Some(Box::new(Member {
            queue,
            sent: vec![None; self.devices.len()],
            regimes: 0,
            counted: Demand::default(),
            changed: false,
            wake: None,
        }));
    }

    /// Removes a model. Returns whether this shard had the model. Its queued requests are dropped,
    /// its running batches go on. The caller must tell the matchmaker.
    pub fn remove_model(&mut self, now: Time, model: ModelId) -> bool {
        self.advance(now);
        let Some(mut member) = self.members.get_mut(model.0 as usize).and_then(Option::take) else { return false };
        member.queue.clear();
        collect_dropped(&mut self.outputs, model, &mut member.queue);
        self.wakes.remove(model.0);
        self.settle_first_wake();
        self.quiet.remove(model.0);
        self.demand = self.demand.minus(member.counted);
        true
    }

    /// Replaces a model's latency profiles, also for queued requests. For an unknown model nothing
    /// happens.
    pub fn set_profile(&mut self, now: Time, model: ModelId, profiles: impl Into<DeviceProfiles>) {
        let profiles = profiles.into();
        self.change(now, model, |queue| queue.set_profiles(now, &profiles));
    }

    /// Replaces a model's dispatch policy, also for queued requests. For an unknown model nothing
    /// happens.
    pub fn set_dispatch(&mut self, now: Time, model: ModelId, dispatch: DispatchPolicy) {
        self.change(now, model, |queue| queue.set_dispatch(dispatch));
    }

    /// Sets the behaviour of a model where it is adaptive; see [`super::Scheduler::set_behaviour`].
    pub fn set_behaviour(&mut self, now: Time, model: ModelId, behaviour: Option<Behaviour>) {
        self.change(now, model, |queue| queue.set_behaviour(behaviour));
    }

    /// Makes the queue of a model a lent one; see [`super::Scheduler::set_lent`]. The caller must tell
    /// the matchmaker as well. For an unknown model nothing happens.
    pub fn set_lent(&mut self, now: Time, model: ModelId) {
        self.change(now, model, ModelQueue::set_lent);
    }

    /// Lets a model's waiting requests go at once; see [`super::Scheduler::flush`]. For an unknown
    /// model nothing happens.
    pub fn flush(&mut self, now: Time, model: ModelId) {
        self.change(now, model, |queue| queue.flush(now));
    }

    /// Sets how late the driver's wake-ups may come; see [`super::Scheduler::set_wake_margin`].
    pub fn set_wake_margin(&mut self, now: Time, margin: Duration) {
        let now = self.advance(now);
        self.wake_margin = margin;
        for index in 0..self.members.len() {
            if let Some(member) = &mut self.members[index] {
                member.queue.set_wake_margin(margin);
                self.refresh(now, ModelId(index as u32));
            }
        }
    }

    /// Sets the network budget; see [`super::Scheduler::set_network`]. The caller must tell the
    /// matchmaker as well.
    pub fn set_network(&mut self, now: Time, network: NetworkBudget) {
        let now = self.advance(now);
        self.network = network;
        for index in 0..self.members.len() {
            if let Some(member) = &mut self.members[index] {
                member.queue.set_network(network);
                self.refresh(now, ModelId(index as u32));
            }
        }
    }

    /// Sets the network budgets of one model; see [`super::Scheduler::set_model_network`]. The
    /// caller must tell the matchmaker as well. For an unknown model nothing happens.
    pub fn set_model_network(&mut self, now: Time, model: ModelId, networks: &[(DeviceKind, NetworkBudget)]) {
        self.change(now, model, |queue| queue.set_networks(networks));
    }

    /// Sets how many devices of a kind the cluster has. The staggered target and the set of
    /// candidates depend on this number.
    pub fn set_devices(&mut self, now: Time, kind: DeviceKind, devices: u32) {
        let now = self.advance(now);
        let index = kind.0 as usize;
        let is_new = self.devices.len() <= index;
        if is_new {
            self.devices.resize(index + 1, 0);
        }
        self.devices[index] = devices;
        for index in 0..self.members.len() {
            if let Some(member) = &mut self.members[index] {
                member.sent.resize(self.devices.len(), None);
                if member.queue.set_devices(kind, devices) || is_new {
                    self.refresh(now, ModelId(index as u32));
                }
            }
        }
    }

    /// The demand of this shard's models, for the other shards.
    pub fn demand(&self) -> Demand {
        self.demand
    }

    /// Sets the demand of the other shards' models. It may be a little out of date: it changes ten
    /// times a second.
    pub fn set_other_demand(&mut self, now: Time, demand: Demand) {
        let now = self.advance(now);
        self.other_demand = demand;
        self.refresh_regime(now);
    }

    /// The next model and kind of device whose candidate differs from the one polled last, with the
    /// newest candidate.
    pub fn poll_candidate(&mut self) -> Option<(ModelId, DeviceKind, Option<Candidate>)> {
        while let Some(&model) = self.changed.last() {
            let mut next = None;
            if let Some(member) = member(&mut self.members, model) {
                for (kind, sent) in (0..).map(DeviceKind).zip(&mut member.sent) {
                    let newest = member.queue.candidate(kind);
                    if newest == *sent {
                        continue;
                    }
                    if next.is_some() {
                        // The model has another candidate to report.
                        return next;
                    }
                    *sent = newest;
                    next = Some((model, kind, newest));
                }
                member.changed = false;
            }
            // Popped now, not at the next poll: the order of later messages must not depend on
            // whether another poll came.
            self.changed.pop();
            if next.is_some() {
                return next;
            }
        }
        None
    }

    /// Whether a grant has an answer that was not polled yet.
    pub fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// The answers that were not polled yet.
    pub fn answers(&self) -> impl Iterator<Item = &Answer> {
        self.answers.iter()
    }

    /// The next answer to a grant.
    pub fn poll_answer(&mut self) -> Option<Answer> {
        self.answers.pop_front()
    }

    /// The next decision.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to call [`Shard::handle_timeout`] if no event comes before, and for which model. Then
    /// its candidate expires, or a request becomes hopeless or has waited for too long.
    pub fn poll_timeout(&self) -> Option<(Time, ModelId)> {
        self.wakes.peek().map(|(at, model)| (at, ModelId(model)))
    }

    /// Returns the member vector of a dispatch, for reuse.
    pub fn recycle(&mut self, mut members: Vec<RequestId>) {
        if self.spare.len() < MAX_SPARE {
            members.clear();
            self.spare.push(members);
        }
    }

    fn change(&mut self, now: Time, model: ModelId, change: impl FnOnce(&mut ModelQueue)) {
        let now = self.advance(now);
        if let Some(member) = member(&mut self.members, model) {
            change(&mut member.queue);
            self.refresh(now, model);
        }
    }

    /// Moves time on and does all that was due by then.
    #[inline(always)]
    fn advance(&mut self, now: Time) -> Time {
        if now < self.now {
            self.time_reversals += 1;
        }
        self.now = self.now.max(now);
        let now = self.now;
        if self.wakes.peek().is_some_and(|(at, _)| at <= now) {
            self.wake_up(now);
        }
        now
    }

    /// Updates every queue in which anything is due.
    #[inline(never)]
    fn wake_up(&mut self, now: Time) {
        while let Some((at, model)) = self.wakes.peek()
            && at <= now
        {
            self.refresh(now, ModelId(model));
            assert!(
                self.wakes.get(model).is_none_or(|next| next > now),
                "a queue that was attended to has nothing due, or time would stand still"
            );
        }
    }

    /// Lets the queue compute its candidate, and passes the results on.
    fn refresh(&mut self, now: Time, model: ModelId) {
        let Some(member) = member(&mut self.members, model) else { return };
        self.updates += 1;
        if std::mem::replace(&mut member.regimes, self.regimes) != self.regimes {
            member.queue.set_regime(self.regime);
        }
        member.queue.refresh(now);
        let demands = member.queue.take_demand_change() && member.queue.demand() != member.counted;
        let sends =
            || (0..).map(DeviceKind).zip(&member.sent).any(|(kind, sent)| member.queue.candidate(kind) != *sent);
        match (member.changed, sends()) {
            (false, true) => {
                member.changed = true;
                self.changed.push(model);
            }
            // The candidate is the one sent last: there is nothing to report, and the model needs
            // no place in the order.
            (true, false) => {
                member.changed = false;
                self.changed.retain(|changed| *changed != model);
            }
            _ => {}
        }
        collect_dropped(&mut self.outputs, model, &mut member.queue);
        let wake = member.queue.wake();
        member.wake = wake;
        if let Some(at) = wake
            && self.wakes.get(model.0).is_none_or(|set| at < set)
        {
            self.wakes.set(model.0, at);
        } else if self.wakes.peek().is_some_and(|(at, first)| first == model.0 && wake != Some(at)) {
            self.settle_first_wake();
        }
        if demands {
            self.demand_changed(now, model);
        }
    }

    /// Corrects the first wakes until the first is exact. A wake may be earlier than its queue
    /// needs.
    fn settle_first_wake(&mut self) {
        while let Some((at, model)) = self.wakes.peek() {
            match member(&mut self.members, ModelId(model)).and_then(|member| member.wake) {
                Some(wake) if wake == at => return,
                Some(wake) => self.wakes.set(model, wake),
                None => {
                    self.wakes.remove(model);
                }
            }
        }
    }

    /// Keeps the sum of the demands up to date, and lets models that fell silent compute their
    /// demand again.
    #[cold]
    fn demand_changed(&mut self, now: Time, model: ModelId) {
        self.quiet.set(model.0, now);
        while let Some((at, model)) = self.quiet.peek()
            && at <= now
        {
            self.quiet.remove(model);
            let Some(member) = member(&mut self.members, ModelId(model)) else { continue };
            member.queue.refresh_demand(now);
            let demand = member.queue.demand();
            self.demand = self.demand.minus(std::mem::replace(&mut member.counted, demand)).plus(demand);
            // At the end of time no model falls silent any more.
            if demand != Demand::default() && now < Time::MAX {
                self.quiet.set(model, now + SILENCE);
            }
        }
        self.refresh_regime(now);
    }

    /// Computes the regime. If it has changed, every candidate may have to start at another time.
    /// That is a scan over the models, but regimes are sticky.
    fn refresh_regime(&mut self, now: Time) {
        let devices = self.devices.iter().fold(0u32, |all, devices| all.saturating_add(*devices));
        let regime = self.regime.next(self.demand.plus(self.other_demand), devices);
        if regime == std::mem::replace(&mut self.regime, regime) {
            return;
        }
        self.regimes += 1;
        if std::mem::replace(&mut self.changing_regime, true) {
            return;
        }
        for index in 0..self.members.len() {
            if self.members[index].as_deref().is_some_and(|member| member.queue.is_adaptive()) {
                self.refresh(now, ModelId(index as u32));
            }
        }
        self.changing_regime = false;
    }
}

fn member(members: &mut [Option<Box<Member>>], model: ModelId) -> Option<&mut Member> {
    members.get_mut(model.0 as usize)?.as_deref_mut()
}

fn collect_dropped(outputs: &mut VecDeque<Output>, model: ModelId, queue: &mut ModelQueue) {
    while let Some(dropped) = queue.pop_dropped() {
        let Dropped { request, reason, detail } = dropped;
        outputs.push_back(Output::Drop { request, model, reason, detail });
    }
}
