//! The queue of one model, with its next candidate.

use std::collections::VecDeque;

use super::batch_policy::DropPolicy;
use super::batcher::{Batcher, Formed, Prefix, hopeless_at};
use super::behaviour::Behaviour;
use super::demand::Demand;
use super::dispatch_policy::DispatchPolicy;
use super::item_cost::ItemCost;
use super::kind_plan::{KindPlan, KindPlans};
use super::load_regime::LoadRegime;
use super::messages::Candidate;
use super::model_demand::ModelDemand;
use super::model_options::{ModelOptions, PATIENCE};
use super::network::NetworkBudget;
use super::output::{Departure, DropReason, Dropped, Reject};
use super::reason::{DispatchReason, DropDetail, StartBound};
use super::request::Request;
use super::request_queue::{Due, QueuedRequest, RequestQueue, Ticket};
use super::update_elision::UpdateElision;
use crate::device_profiles::DeviceProfiles;
use crate::ids::{DeviceKind, RequestId};
use crate::probes::{Doubt, Probes};
use crate::profile::LatencyProfile;
use crate::time::{Duration, Time};

/// The queue of one model: requests in, a [`Candidate`] out (Symphony §3.2, *UpdateCandidate*;
/// §4.2, *ModelThread*).
///
/// **Order.** Higher levels first; within a level by deadline, equal deadlines by arrival. In
/// deadline order the earliest deadline of a prefix, Symphony's `d`, is always the head's, also if
/// requests have timeouts of their own. In order of arrival one impatient request behind a patient
/// one would shrink the batch of both. With one SLO for all, both orders are the same. Requests
/// without a deadline come last. A `queue_expiry`, or a level of their own, keeps them from waiting
/// for ever, and [`ModelOptions::max_wait`] bounds their wait.
///
/// **Kinds of devices.** The queue has a candidate for each kind with a profile and a device in the
/// cluster. While there is no such device at all, it has one for each profile. A request is
/// hopeless when the fastest of these kinds cannot serve it in time. A slower kind's candidate
/// passes over requests that only a faster kind can still serve. It also passes over requests that
/// would hold its batch below its target. These requests stay. Requests are sacrificed only for
/// batches of the fastest kind, which has the least `l(max_batch)`.
///
/// **Wrong profiles.** A request that needs more time than it has is refused. But a profile may be
/// a guess, or measured long ago. Therefore, now and then such a request becomes a *probe*
/// ([`Probes`]): it waits without a deadline, and the driver learns how long it takes. The queue
/// never doubts a profile that is certain.
///
/// **Network.** All planning counts from when a batch can start, [`NetworkBudget::delay`] after it
/// is sent.
///
/// **Bound.** A level holds [`super::PriorityLevel::max_queue`] items; a request beyond this bound
/// is rejected. [`ModelOptions::max_wait`] bounds the wait of a request without a deadline. It is
/// rejected if the requests before it, in its level and above, take longer. This counts by the
/// profile, with all devices that the model may have. The request is dropped once it has waited
/// that long, no matter why no device was free.
///
/// **Cost.** `O(log n)` a request, where n is the queue's length; no allocation once the tables
/// have grown. The exceptions stand at the functions: preferred sizes with mixed request sizes,
/// requests that a slower kind of device passes over, and window drop. Window drop costs more for
/// requests out of order or of several items, when nearly all requests are about to expire.
///
/// **Contract.** `enqueue`, `cancel`, `take` and the setters change the queue. Call
/// [`ModelQueue::update`] after each of them, and whenever [`ModelQueue::wake`] comes. Then pass
/// the queue's candidates on. After `enqueue`, leave the update out if [`ModelQueue::is_settled`]
/// returns true. [`ModelQueue::pop_dropped`] gives the requests dropped meanwhile.
///
/// **Layout.** The fields come in the order in which most requests need them (`ModelQueue::join`).
/// With thousands of models their memory is cold, and each cache line costs time.
#[derive(Debug)]
#[repr(C)]
pub struct ModelQueue {
    elision: UpdateElision,
    demand: ModelDemand,
    batcher: Batcher,
    /// [`ModelQueue::wake`], as of the last update. Before this time, only requests that came since
    /// can make anything due. [`Time::ZERO`]: no update since a change.
    wake: Time,
    max_in_flight: u32,
    max_wait: Duration,
    /// The requests that `max_wait` applies to, in order of arrival. The first one waits, as of the
    /// last [`ModelQueue::update`]. Some of the rest may have left.
    waiters: VecDeque<(Time, Ticket)>,
    dropped: VecDeque<Dropped>,
    probes: Probes,
    /// The last probe of a measured size. Kept until a profile shows that its refusal was needless.
    probed: Option<Probed>,
    /// A probe of a guess may be in the queue.
    tries_guess: bool,
}

/// A request that was tried although it would have been refused.
#[derive(Clone, Copy, Debug)]
struct Probed {
    size: u32,
    /// The time that it seemed to need, more than was allowed.
    needed: Duration,
    allowed: Duration,
}

impl Probed {
    /// Whether the request would be admitted now that it needs so long, or nearly so.
    fn was_needless(&self, needed: Duration) -> bool {
        needed <= self.allowed || needed.saturating_mul(4) < self.needed.saturating_mul(3)
    }
}

impl ModelQueue {
    /// An empty queue, for a cluster without devices.
    pub fn new(now: Time, options: ModelOptions) -> Self {
        let ModelOptions { profiles, max_batch, drop, dispatch, max_in_flight, shares_limit: _, max_wait, levels } =
            options;
        let kinds = KindPlans::new(&profiles, max_batch.max(1));
        let mut queue = ModelQueue {
            batcher: Batcher::new(RequestQueue::new(levels), kinds, drop, DispatchPolicy::Eager),
            demand: ModelDemand::new(now),
            elision: UpdateElision::default(),
            wake: Time::ZERO,
            max_in_flight: max_in_flight.max(1),
            max_wait,
            waiters: VecDeque::new(),
            dropped: VecDeque::new(),
            probes: Probes::default(),
            probed: None,
            tries_guess: false,
        };
        queue.set_dispatch(dispatch);
        queue
    }

    /// Items in the queue.
    pub fn queued(&self) -> u32 {
        u32::try_from(self.batcher.queue.weight()).unwrap_or(u32::MAX)
    }

    /// The profile on the fastest kind of device.
    #[expect(
        clippy::misnamed_getters,
        reason = "that which is planned with, a margin above it, is nobody else's business"
    )]
    pub fn profile(&self) -> &LatencyProfile {
        &self.batcher.kinds.fastest().measured
    }

    /// The device time that an item needs on the fastest kind of device, by the SLO of the latest
    /// requests.
    pub fn item_cost(&self) -> ItemCost {
        let kinds = &self.batcher.kinds;
        let budget = self.demand.meter.budget().unwrap_or(Duration::MAX);
        ItemCost::new(self.profile(), kinds.max_batch, budget, kinds.devices())
    }

    /// The batch size that [`DropPolicy::WindowDrop`] and [`DropPolicy::Adaptive`] aim at, on the
    /// fastest kind of device.
    pub fn target(&self) -> u32 {
        self.batcher.kinds.fastest().target
    }

    /// The candidate for a kind of device, as of the last [`ModelQueue::update`].
    pub fn candidate(&self, kind: DeviceKind) -> Option<Candidate> {
        let kinds = &self.batcher.kinds;
        kinds.plans[kinds.of(kind)?].candidate
    }

    /// Adds a request. The ticket is for [`ModelQueue::cancel`].
    ///
    /// # Errors
    /// If the request is malformed, already hopeless, or finds no room.
    #[inline(always)]
    pub fn enqueue(&mut self, now: Time, request: &Request) -> Result<Ticket, Reject> {
        match self.join(now, request) {
            Some(ticket) => Ok(ticket),
            None => self.enqueue_any(now, request),
        }
    }

    /// Adds a request to the end of the first tier, if it has one item and its deadline can be met.
    /// Nearly all requests are of this sort. `None`: this request is not, and nothing has changed.
    /// [`ModelQueue::enqueue_any`] would do the same.
    #[inline(always)]
    fn join(&mut self, now: Time, request: &Request) -> Option<Ticket> {
        let Batcher { queue, kinds, .. } = &self.batcher;
        let Request { id, model: _, deadline, queue_expiry, level, size } = *request;
        let is_plain = size == 1 && level == 0 && deadline != Time::MAX && queue_expiry == Time::MAX;
        let deadline = deadline - kinds.network.reply;
        let allowed = deadline.since(now);
        let is_known = is_plain && self.demand.meter.may_count(now) && allowed >= kinds.needed_alone;
        if !(is_known && queue.takes_last(deadline)) {
            return None;
        }
        let at_end = queue.tier_weight(0) > 0 && !(self.demand.stale && self.follows_load());
        if at_end && self.elision.takes_one() {
            self.elision.join_one();
        } else {
            self.elision.join(now, 0, 1, || at_end);
        }
        self.demand.meter.count(allowed);
        Some(self.batcher.queue.push_last(now, id, deadline))
    }

    /// [`ModelQueue::enqueue`] of any request.
    #[inline(never)]
    fn enqueue_any(&mut self, now: Time, request: &Request) -> Result<Ticket, Reject> {
        let Batcher { queue, kinds, drop, .. } = &self.batcher;
        let mut request = Request { deadline: request.deadline - kinds.network.reply, ..*request };
        let Request { level, size, .. } = request;
        let Some(bound) = queue.bound(level) else { return Err(Reject::UnknownLevel) };
        if size == 0 {
            return Err(Reject::ZeroSize);
        }
        if size > kinds.max_batch {
            return Err(Reject::TooLarge { max_batch: kinds.max_batch });
        }
        let mut allowed = if request.deadline == Time::MAX { Duration::MAX } else { request.deadline.since(now) };
        let (needed, drop) = (kinds.needed(size), *drop);
        if drop != DropPolicy::None && needed > allowed {
            // A late request, or one that finds no room, must not use up the try.
            let may_try = allowed > Duration::ZERO && queue.has_room(level, size);
            if !may_try || !self.is_probe(now, size, needed, allowed) {
                return Err(Reject::DeadlineImpossible { needed, allowed });
            }
            (request.deadline, allowed) = (Time::MAX, Duration::MAX);
        }
        let deadline = request.deadline;
        self.demand.arrival(now, size, allowed);
        if !self.batcher.queue.has_room(level, size) {
            return Err(Reject::QueueFull { bound });
        }
        let waits = self.max_wait != Duration::MAX && deadline == Time::MAX && request.queue_expiry == Time::MAX;
        if waits {
            let (wait, bound) = (self.wait_before(level), self.patience());
            if wait > bound {
                return Err(Reject::WaitTooLong { wait, bound });
            }
        }
        let hopeless_at = hopeless_at(needed, drop, deadline, size);
        // The first request with a bounded wait makes a wake-up due.
        let is_due = self.demand.stale && self.follows_load() || waits && self.waiters.is_empty();
        self.elision.join(now, level as usize * 2, size, || {
            hopeless_at == Time::MAX && !is_due && self.batcher.queue.joins_end(&request)
        });
        let ticket = self.batcher.queue.push(now, &request, hopeless_at);
        if waits {
            self.waiters.push_back((now, ticket));
        }
        Ok(ticket)
    }

    /// Whether a request that needs longer than is allowed is let through, without a deadline.
    #[cold]
    fn is_probe(&mut self, now: Time, size: u32, needed: Duration, allowed: Duration) -> bool {
        let Some(doubt) = self.batcher.kinds.doubt(size, allowed) else { return false };
        let is_probe = self.probes.tries(now, doubt, needed);
        // One run replaces a guess. A run corrects a measurement only in part, so that another
        // probe may have to follow.
        match doubt {
            Doubt::Measured if is_probe => self.probed = Some(Probed { size, needed, allowed }),
            Doubt::Guess if is_probe => self.tries_guess = true,
            _ => {}
        }
        is_probe
    }

    /// Whether the request enqueued last has no effect before [`ModelQueue::wake`], as it stood
    /// after the last update. Then [`ModelQueue::update`] may be left out.
    pub fn is_settled(&self) -> bool {
        self.elision.elided
    }

    /// How long the requests in a level and the levels above take, at least. It assumes the largest
    /// batches, as many at once as allowed, and devices that do nothing else.
    fn wait_before(&self, level: u32) -> Duration {
        let Batcher { queue, kinds, .. } = &self.batcher;
        let items: u64 = (0..(level as usize + 1) * 2).map(|tier| queue.tier_weight(tier)).sum();
        let at_once = match self.max_in_flight {
            u32::MAX => kinds.devices().max(1),
            // The caller that set the limit may know of more devices than the plans do.
            most => most,
        };
        let pace = u128::from(kinds.fastest().pace.as_nanos());
        let wait = pace * u128::from(items) / (u128::from(kinds.max_batch) * u128::from(at_once));
        Duration::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX))
    }

    /// How long a request without a deadline may wait.
    fn patience(&self) -> Duration {
        self.max_wait.max(self.batcher.kinds.fastest().pace.saturating_mul(u64::from(PATIENCE)))
    }

    /// Lets all waiting requests go without waiting for others to join
    /// ([`DispatchPolicy::Timeout`]). For use when a request came that cannot join.
    pub fn flush(&mut self, now: Time) {
        self.batcher.flushed = Some(now);
        self.elision = UpdateElision::default();
    }

    /// Takes a request out. Returns whether the request was still queued.
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        let left = self.batcher.queue.remove(ticket).is_some();
        if left {
            self.elision = UpdateElision::default();
        }
        left
    }

    /// Replaces the profiles by new ones, learned by the driver from batches.
    pub fn set_profiles(&mut self, now: Time, profiles: &DeviceProfiles) {
        self.change_kinds(|kinds| kinds.set_profiles(profiles));
        self.elision = UpdateElision::default();
        match self.probed.take_if(|probed| probed.was_needless(self.batcher.kinds.needed(probed.size))) {
            Some(_) => self.probes.was_wrong(),
            None => self.probes.has_learned(now),
        }
    }

    /// Sets the network budget. Requests that come from now on lose a reply's delay from their
    /// deadlines.
    pub fn set_network(&mut self, network: NetworkBudget) {
        self.change_kinds(|kinds| kinds.set_network(network));
        self.elision = UpdateElision::default();
    }

    /// [`ModelQueue::set_network`] by kind of device. For other kinds, and for replies, the worst
    /// of these budgets is expected.
    pub fn set_networks(&mut self, networks: &[(DeviceKind, NetworkBudget)]) {
        self.change_kinds(|kinds| kinds.set_networks(networks));
        self.elision = UpdateElision::default();
    }

    /// Sets how many devices of a kind the cluster has, which changes the staggered target and
    /// perhaps the fastest kind. Returns whether the queue needs an update because other kinds are
    /// in use.
    pub fn set_devices(&mut self, kind: DeviceKind, devices: u32) -> bool {
        self.change_kinds(|kinds| kinds.set_devices(kind, devices))
    }

    fn change_kinds<T>(&mut self, change: impl FnOnce(&mut KindPlans) -> T) -> T {
        let Batcher { queue, kinds, drop, .. } = &mut self.batcher;
        let changed = change(kinds);
        self.demand.stale = true;
        self.wake = Time::ZERO;
        if !queue.unsized_only() {
            queue
                .set_hopeless(|waiting| hopeless_at(kinds.needed(waiting.size), *drop, waiting.deadline, waiting.size));
        }
        changed
    }

    /// Replaces the dispatch policy.
    pub fn set_dispatch(&mut self, dispatch: DispatchPolicy) {
        self.elision = UpdateElision::default();
        self.batcher.queue.keep_arrivals(matches!(dispatch, DispatchPolicy::Timeout { .. }));
        self.batcher.dispatch = dispatch;
        self.behave();
        if !self.is_adaptive() {
            self.demand.set_demand(Demand::default());
        }
    }

    /// Sets how late a wake-up may come. A candidate may start this much before the moment at which
    /// a member would be lost.
    pub fn set_wake_margin(&mut self, margin: Duration) {
        self.elision = UpdateElision::default();
        self.wake = Time::ZERO;
        self.batcher.wake_margin = margin;
    }

    /// Sets how adaptive models behave at the load of the moment.
    pub fn set_regime(&mut self, regime: LoadRegime) {
        if regime != self.demand.regime {
            self.demand.regime = regime;
            self.behave();
        }
    }

    /// Makes the queue a lent one, for good: its requests are no demand on the devices.
    pub fn set_lent(&mut self) {
        (self.demand.lent, self.demand.stale) = (true, true);
        self.elision = UpdateElision::default();
    }

    /// Sets the model's behaviour where it is adaptive, at any load; `None`: the behaviour follows
    /// from the regime.
    pub fn set_behaviour(&mut self, behaviour: Option<Behaviour>) {
        self.elision = UpdateElision::default();
        self.demand.set = behaviour;
        self.behave();
    }

    /// Takes over the model's current behaviour.
    fn behave(&mut self) {
        let Behaviour { wait, margin, .. } = self.behaviour();
        self.batcher.wait = wait;
        self.demand.stale = true;
        let margin = if self.batcher.dispatch.is_adaptive() { margin } else { 0 };
        if margin != self.batcher.kinds.margin() {
            self.change_kinds(|kinds| kinds.set_margin(margin));
        }
    }

    /// The model's behaviour where it is adaptive.
    pub fn behaviour(&self) -> Behaviour {
        let consolidate = self.batcher.dispatch.adaptive() == Some(true);
        self.demand.behaviour(consolidate)
    }

    /// The model's demand on the devices; zero except under [`DispatchPolicy::Adaptive`] or
    /// [`DropPolicy::Adaptive`].
    pub fn demand(&self) -> Demand {
        self.demand.demand
    }

    /// Whether the demand may have changed since the last call.
    pub fn take_demand_change(&mut self) -> bool {
        std::mem::take(&mut self.demand.changed)
    }

    /// Computes the demand again if time has made it stale. [`ModelQueue::update`] also does this.
    pub fn refresh_demand(&mut self, now: Time) {
        if self.follows_load() {
            self.refresh_target(now);
        }
    }

    fn refresh_target(&mut self, now: Time) {
        let is_adaptive = self.is_adaptive();
        let Batcher { kinds, drop, dispatch, .. } = &mut self.batcher;
        self.demand.refresh(now, is_adaptive, *drop, dispatch, kinds);
    }

    /// Whether the model behaves by the [`LoadRegime`].
    pub fn is_adaptive(&self) -> bool {
        self.batcher.drop == DropPolicy::Adaptive || self.batcher.dispatch.is_adaptive()
    }

    /// Whether the rate of the arrivals changes when a candidate may start, or what drops aim at,
    /// from one update to the next.
    fn follows_load(&self) -> bool {
        self.is_adaptive() || matches!(self.batcher.dispatch, DispatchPolicy::EarlyLeave { .. })
    }

    /// Drops every request, because the model is removed.
    pub fn clear(&mut self) {
        for tier in self.batcher.queue.tiers() {
            while let Some(ticket) = self.batcher.queue.head_ticket(tier) {
                self.give_up(ticket, DropReason::ModelRemoved);
            }
        }
        self.batcher.kinds.clear_candidates();
        self.elision = UpdateElision::default();
    }

    /// The next request that was dropped, with the reason.
    pub fn pop_dropped(&mut self) -> Option<Dropped> {
        self.dropped.pop_front()
    }

    /// When the queue needs [`ModelQueue::update`] though no event comes. Then its candidate
    /// expires, a request becomes hopeless or has waited for too long, or requests that needed no
    /// update would let the candidate start.
    pub fn wake(&self) -> Option<Time> {
        let wake = if self.wake == Time::ZERO { self.next_wake() } else { self.wake };
        (wake != Time::MAX).then_some(wake)
    }

    fn next_wake(&self) -> Time {
        let due = self.batcher.next_due().min(self.elision.until.unwrap_or(Time::MAX));
        self.waiters.front().map_or(due, |(arrival, _)| due.min(*arrival + self.patience()))
    }

    /// Computes the candidates again (Symphony §3.2, *UpdateCandidate*) and returns the one for the
    /// fastest kind. Requests that became hopeless or waited for too long leave or move first.
    pub fn update(&mut self, now: Time) -> Option<Candidate> {
        self.refresh(now);
        self.batcher.kinds.fastest().candidate
    }

    /// [`ModelQueue::update`] without its result.
    pub(super) fn refresh(&mut self, now: Time) {
        self.update_candidates(now);
        // An empty queue has no candidate and no timer.
        self.wake = if self.batcher.queue.weight() == 0 { Time::MAX } else { self.next_wake() };
    }

    #[inline(always)]
    fn update_candidates(&mut self, now: Time) {
        if self.is_bare() {
            self.elision = UpdateElision::default();
            self.refresh_demand(now);
            return;
        }
        if let Some(former) = self.elision.grows(now)
            && !(self.demand.stale && self.follows_load())
            && let Some(grown) = self.batcher.grow(now, former)
        {
            // All that is due by now was done before these requests came.
            let formed = self.batcher.window(now, Time::ZERO, 0, grown);
            self.batcher.kinds.plans[0].candidate = Some(formed.candidate);
            self.foresee(now, &formed);
            return;
        }
        self.expire(now);
        self.refresh_demand(now);
        let fastest = self.batcher.kinds.fastest;
        if let Some(candidate) = self.batcher.kinds.fastest().candidate
            && now + candidate.delay > candidate.latest
        {
            // The candidate was schedulable and found no device: its head can only leave in a
            // smaller batch. A head that the fastest kind passes over is left to the other kinds.
            if self.passed(now, Time::ZERO, fastest) == Some(Time::ZERO)
                && let Some(from) = self.slide(now, Time::ZERO, fastest, Time::ZERO)
            {
                self.sacrifice(from);
            }
        }
        let mut formed = None;
        for plan in 0..self.batcher.kinds.plans.len() {
            let in_use = self.batcher.kinds.plans[plan].in_use;
            formed = if in_use { self.batcher.update_candidate(now, Time::ZERO, plan, Time::ZERO) } else { None };
            self.batcher.kinds.plans[plan].candidate = formed.map(|formed| formed.candidate);
        }
        match (formed, self.batcher.kinds.plans.len()) {
            (Some(formed), 1) => self.foresee(now, &formed),
            _ => self.elision = UpdateElision::default(),
        }
    }

    /// [`UpdateElision::foresee`], by the rate of the arrivals unless the model is adaptive. An
    /// adaptive model learns the regime and reports its demand with each update, so that skipped
    /// updates would change decisions.
    fn foresee(&mut self, now: Time, formed: &Formed) {
        let meter = if self.follows_load() { None } else { Some(&self.demand.meter) };
        self.elision.foresee(now, &mut self.batcher, formed, meter);
    }

    /// Whether no request waits, so that there is no candidate and no timer.
    fn is_bare(&self) -> bool {
        let Batcher { queue, kinds, .. } = &self.batcher;
        queue.weight() == 0 && self.waiters.is_empty() && kinds.plans.iter().all(|plan| plan.candidate.is_none())
    }

    /// Takes the batch that is sent now to a device of this kind, expected to be free at `free_at`,
    /// and appends its members. `None` if no batch may be sent. One cause: its window has moved,
    /// because heads that held it below the target were given up. Another cause: a grant crossed a
    /// change of the queue.
    #[inline(always)]
    pub fn take(
        &mut self,
        now: Time,
        kind: DeviceKind,
        free_at: Time,
        members: &mut Vec<RequestId>,
    ) -> Option<Departure> {
        let kinds = &self.batcher.kinds;
        let plan = kinds.of(kind).filter(|plan| kinds.plans[*plan].in_use)?;
        let waited = kinds.plans[plan].candidate.is_some_and(|c| c.exec - c.delay < now);
        self.expire(now);
        let passed = self.passed(now, free_at, plan)?;
        let starting = match self.whole(now, free_at) {
            Some(whole) => self.batcher.starting_with(now, free_at, plan, whole),
            None => self.starting(now, free_at, plan, passed),
        };
        self.batcher.kinds.clear_candidates();
        self.elision = UpdateElision::default();
        let formed = starting?;
        let size = self.batcher.pop(&formed, members);
        let Batcher { kinds, drop, .. } = &self.batcher;
        let KindPlan { measured, profile, network, .. } = &kinds.plans[plan];
        let arrives = now + network.delay(size);
        let start = arrives.max(free_at);
        let bound = if waited || start > arrives { StartBound::Device } else { formed.bound };
        let deadline = formed.prefix.deadline;
        // The guess of a probe would make the device look busy, so that other requests would be
        // refused.
        let expected = if self.tries_guess { measured.known_latency(size) } else { measured.latency(size) };
        self.tries_guess &= self.batcher.queue.weight() > 0;
        let latest = if *drop == DropPolicy::None { Time::MAX } else { deadline - profile.latency(size) };
        let reason = DispatchReason { bound, exec: formed.opens, latest, deadline, left: self.queued() };
        Some(Departure { size, arrives, start, expected, reason })
    }

    /// A plan passes over the requests with a deadline before this time: its devices are too slow.
    /// `None`: it passes over all requests.
    fn passed(&self, now: Time, free_at: Time, plan: usize) -> Option<Time> {
        match self.batcher.kinds.plans.len() {
            1 => Some(Time::ZERO),
            _ => self.batcher.get_batch(now, free_at, plan, Time::ZERO).map(|prefix| prefix.from),
        }
    }

    /// The batch that starts now. Requests may be given up for a batch of the fastest kind. A
    /// slower kind gives up no requests; it leaves them to the faster kinds.
    fn starting(&mut self, now: Time, free_at: Time, plan: usize, passed: Time) -> Option<Formed> {
        let gives_up = plan == self.batcher.kinds.fastest && passed == Time::ZERO;
        if let Some(from) = self.slide(now, free_at, plan, passed) {
            if gives_up {
                self.sacrifice(from);
            } else if let Some(starting) = self.batcher.starting(now, free_at, plan, from) {
                return Some(starting);
            }
        }
        self.batcher.starting(now, free_at, plan, Time::ZERO)
    }

    /// All waiting requests, if they were the candidate and may leave together now on a free device
    /// of the only kind. Then no request has to be given up.
    fn whole(&mut self, now: Time, free_at: Time) -> Option<Prefix> {
        let former = self.elision.whole()?;
        if self.has_target() {
            self.refresh_target(now);
        }
        let whole = self.batcher.grow(now, former)?;
        (free_at <= now && u64::from(whole.size) == self.batcher.queue.weight()).then_some(whole)
    }

    fn has_target(&self) -> bool {
        matches!(self.batcher.drop, DropPolicy::WindowDrop | DropPolicy::Adaptive)
    }

    /// [`Batcher::slide`], for the drop policies with a target.
    fn slide(&mut self, now: Time, free_at: Time, plan: usize, from: Time) -> Option<Time> {
        if !self.has_target() {
            return None;
        }
        self.refresh_target(now);
        self.batcher.slide(now, free_at, plan, from)
    }

    /// Gives up the requests of the leading tier that are due before `from`.
    fn sacrifice(&mut self, from: Time) {
        let queue = &self.batcher.queue;
        let Some(lead) = queue.tiers().find(|tier| queue.head(*tier).is_some()) else { return };
        while self.batcher.queue.head(lead).is_some_and(|head| head.deadline < from)
            && let Some(ticket) = self.batcher.queue.head_ticket(lead)
        {
            self.give_up(ticket, DropReason::Sacrificed);
        }
    }

    /// Drops the hopeless requests and the requests whose time in the queue is up.
    fn expire(&mut self, now: Time) {
        if now < self.wake && self.waiters.is_empty() && self.batcher.queue.next_due().is_none_or(|due| due > now) {
            return;
        }
        while let Some(due) = self.batcher.queue.pop_due(now) {
            match due {
                Due::Hopeless(ticket) => self.give_up(ticket, DropReason::Hopeless),
                Due::Expired(ticket) => self.give_up(ticket, DropReason::QueueTimeout),
                Due::Delayed => {}
            }
        }
        while let Some((arrival, ticket)) = self.waiters.front().copied() {
            if self.batcher.queue.holds(ticket) && arrival + self.patience() > now {
                break;
            }
            self.waiters.pop_front();
            self.give_up(ticket, DropReason::WaitTooLong);
        }
        if self.batcher.drop == DropPolicy::None {
            return;
        }
        for tier in self.batcher.queue.tiers() {
            while let Some(&QueuedRequest { deadline, size, .. }) = self.batcher.queue.head(tier)
                && deadline != Time::MAX
                && now + self.batcher.kinds.needed(size) > deadline
                && let Some(ticket) = self.batcher.queue.head_ticket(tier)
            {
                self.give_up(ticket, DropReason::Hopeless);
            }
        }
    }

    fn give_up(&mut self, ticket: Ticket, reason: DropReason) {
        let Some(QueuedRequest { id, deadline, size, .. }) = self.batcher.queue.remove(ticket) else { return };
        let target = if self.has_target() { self.target() } else { 0 };
        let detail = DropDetail { size, deadline, needed: self.batcher.kinds.needed(size), target };
        self.dropped.push_back(Dropped { request: id, reason, detail });
    }
}
