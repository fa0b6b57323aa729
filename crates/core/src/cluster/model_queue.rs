//! The queue of one model with the candidate that it would send next.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::batch_policy::{DropPolicy, remote_staggered_batch};
use super::demand::{Demand, Load, Stance};
use super::dispatch_policy::{DispatchPolicy, Forming};
use super::matchmaker::Candidate;
use super::network::NetworkBudget;
use super::rate_meter::RateMeter;
use super::reason::{DispatchReason, DropDetail, StartBound};
use super::request_queue::{Due, PriorityLevel, Request, RequestQueue, Ticket, Waiting};
use super::scheduler::{DropReason, Reject};
use crate::device_profiles::DeviceProfiles;
use crate::ids::{DeviceKind, ModelId, RequestId};
use crate::profile::LatencyProfile;
use crate::time::{Duration, Time};

/// One nanosecond: a deadline is kept at its instant and missed after it.
const TICK: Duration = Duration::from_nanos(1);

/// Largest batches that a request without a deadline waits for, however long they take.
pub const PATIENCE: u32 = 10;

/// How a model is to be scheduled.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ModelOptions {
    /// `l(b)` of the model on each kind of device.
    pub profiles: DeviceProfiles,
    /// The largest batch, in items; 0 is taken as 1. A profile is extended if it ends before.
    pub max_batch: u32,
    /// What is given up for deadlines.
    pub drop: DropPolicy,
    /// When a candidate may start.
    pub dispatch: DispatchPolicy,
    /// Batches of the model that may run at once; `u32::MAX`: as many as there are devices. 0 is taken as 1.
    pub max_in_flight: u32,
    /// The model with which it shares that model's `max_in_flight`: so many batches run at once of both together, and its own does not count.
    pub shares_limit: Option<ModelId>,
    /// How long a request may wait that has neither a deadline nor a queue expiry, or as long as [`PATIENCE`] of the largest batches take if that is
    /// longer; `Duration::MAX`: as long as it takes. One that would wait longer is rejected, one that has is dropped.
    pub max_wait: Duration,
    /// The priority levels, the highest first. None at all is taken as one without a bound.
    pub levels: Vec<PriorityLevel>,
}

impl ModelOptions {
    /// A model with this profile on every kind of device, in batches as large as it goes, as many at once as there are devices, and with
    /// one priority level without a bound.
    pub fn new(profile: LatencyProfile, dispatch: DispatchPolicy, drop: DropPolicy) -> Self {
        let max_batch = profile.max_batch();
        ModelOptions {
            profiles: profile.into(),
            max_batch,
            drop,
            dispatch,
            max_in_flight: u32::MAX,
            shares_limit: None,
            max_wait: Duration::MAX,
            levels: Vec::new(),
        }
    }
}

/// A request that left the queue without running.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dropped {
    /// The request.
    pub request: RequestId,
    /// Why.
    pub reason: DropReason,
    /// What it was judged by.
    pub detail: DropDetail,
}

/// A batch that leaves its queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Departure {
    /// Items.
    pub size: u32,
    /// When it gets to its device.
    pub arrives: Time,
    /// When it is planned to start: once it is there and the device is expected to be done with what it has.
    pub start: Time,
    /// `l(size)` on its device.
    pub expected: Duration,
    /// Why now.
    pub reason: DispatchReason,
}

/// The queue of one model: requests in, a [`Candidate`] out (Symphony §3.2, *UpdateCandidate*; §4.2, *ModelThread*).
///
/// **Order.** Higher levels first; within a level by deadline, equal deadlines by arrival. In deadline order the earliest deadline of a
/// prefix, Symphony's `d`, is the head's, whatever the requests' own timeouts are; in order of arrival one impatient request
/// behind a patient one would shrink the batch that both are in. With one SLO for all, both orders are the same. A request
/// without a deadline comes after all that have one; its `queue_expiry`, or a level of its own, keeps it from waiting for ever, and
/// [`ModelOptions::max_wait`] says when it is told that this takes too long.
///
/// **Kinds of devices.** There is a candidate for each kind that the model has a profile for and the cluster a device of (for each profile, while
/// there is no such device at all). A request is hopeless when the fastest of them cannot serve it in time. A slower kind's candidate passes over the
/// requests that only a faster kind can still serve, or that would hold its batch below its target; they stay. Requests are
/// sacrificed only for batches of the fastest kind, the one with the least `l(max_batch)`.
///
/// **Network.** Whatever is planned is planned by when a batch can start, [`NetworkBudget::delay`] after it is sent.
///
/// **Bound.** [`PriorityLevel::max_queue`] items a level; beyond it a request is rejected. In time: [`ModelOptions::max_wait`]. A request without a
/// deadline is rejected when what waits before it in its level takes longer than that by the profile, on all devices that the model may have; and
/// dropped when it has waited for so long, in whatever way the devices were kept from it.
///
/// **Cost.** `O(log n)` a request, where n is the queue's length; no allocation once the tables have grown. The exceptions are
/// at the functions: preferred sizes with mixed request sizes, window drop of requests out of order or of several items when nearly all is about to expire, and requests that a slower kind
/// of device passes over.
///
/// **Contract.** `enqueue`, `cancel`, `take` and the setters change the queue; call [`ModelQueue::update`] afterwards (after `enqueue` only
/// unless [`ModelQueue::is_settled`]), and whenever [`ModelQueue::wake`] comes, and pass its candidates on. Whatever was dropped on the way is in [`ModelQueue::pop_dropped`].
#[derive(Debug)]
pub struct ModelQueue {
    /// In order of kinds, at least one.
    lines: Vec<Line>,
    /// The line in use with the least `l(max_batch)`: it alone sacrifices requests.
    fastest: usize,
    /// [`ModelQueue::needed`] for one item, which nearly every request is.
    needed_alone: Duration,
    max_batch: u32,
    drop: DropPolicy,
    dispatch: DispatchPolicy,
    max_in_flight: u32,
    max_wait: Duration,
    /// In order of arrival: those that `max_wait` is for. The first waits, as of the last [`ModelQueue::update`]; of the others some may
    /// have left.
    waiters: VecDeque<(Time, Ticket)>,
    /// Who came by then waits for no others ([`ModelQueue::flush`]).
    flushed: Option<Time>,
    queue: RequestQueue,
    meter: RateMeter,
    wake_margin: Duration,
    network: NetworkBudget,
    /// By kind: devices of the cluster.
    devices: Vec<u32>,
    /// The targets must be worked out again.
    target_stale: bool,
    demand: Demand,
    stance: Stance,
    dropped: VecDeque<Dropped>,
    slack: Slack,
    /// Scratch: requests passed over while looking ahead.
    aside: Vec<u32>,
}

/// What may happen without the candidate being worked out anew.
///
/// A candidate that cannot grow is not changed by who comes after it. One that grows and is deferred may start earlier with every request that joins;
/// but as long as that is not before an update that is due anyway, nobody needs to know. So some growth is foreseen and [`ModelQueue::wake`]
/// set to when a candidate of that size would start: most requests then cost no update, and a wake-up that comes too early is paid only where
/// the growth does not come.
#[derive(Debug, Default)]
struct Slack {
    /// Items that may still join at the end of the queue.
    items: u32,
    /// The tier that the candidate ends in.
    tier: usize,
    /// The candidate is full: it is not changed by whatever joins after it, also in a later tier.
    full: bool,
    /// When the growth foreseen could let the candidate start.
    until: Option<Time>,
    /// The time of `until` came before the growth did: none is foreseen until the batch has left.
    exhausted: bool,
    /// The last request joined within the slack.
    held: bool,
}

/// The smallest candidate whose growth is foreseen: below it, requests are so few that every one may cost an update.
const LEAST_FORESEEN: u32 = 4;

/// What there is for one kind of device, or for all kinds if they are the same to the model.
#[derive(Debug)]
struct Line {
    /// `None`: all kinds.
    kind: Option<DeviceKind>,
    /// `l(b)`: from the start of a batch.
    profile: LatencyProfile,
    /// `l(b) + delay(b)`: from the decision to send it.
    sent: LatencyProfile,
    /// Whether the cluster has a device for it, or for none of the lines.
    in_use: bool,
    /// `l(max_batch)`.
    pace: Duration,
    devices: u32,
    target: u32,
    candidate: Option<Candidate>,
}

/// What the next batch would be.
#[derive(Clone, Copy, Debug)]
struct Forecast {
    /// Requests that are due before are passed over.
    from: Time,
    /// Items at most.
    size: u32,
    /// Earliest deadline in it.
    deadline: Time,
    /// Arrival of its first request.
    since: Time,
    /// Nothing may join it any more.
    full: bool,
    /// The last tier it takes from.
    last_tier: usize,
}

impl ModelQueue {
    /// An empty queue, for a cluster without devices.
    pub fn new(now: Time, options: ModelOptions) -> Self {
        let ModelOptions { profiles, max_batch, drop, dispatch, max_in_flight, shares_limit: _, max_wait, levels } =
            options;
        let mut queue = ModelQueue {
            lines: Vec::new(),
            fastest: 0,
            needed_alone: Duration::ZERO,
            max_batch: max_batch.max(1),
            drop,
            dispatch: DispatchPolicy::Eager,
            max_in_flight: max_in_flight.max(1),
            max_wait,
            waiters: VecDeque::new(),
            flushed: None,
            queue: RequestQueue::new(levels),
            meter: RateMeter::new(now),
            wake_margin: Duration::ZERO,
            network: NetworkBudget::default(),
            devices: Vec::new(),
            target_stale: true,
            demand: Demand::default(),
            stance: Stance::default(),
            dropped: VecDeque::new(),
            slack: Slack::default(),
            aside: Vec::new(),
        };
        queue.set_profiles(&profiles);
        queue.set_dispatch(dispatch);
        queue
    }

    /// Items in the queue.
    pub fn queued(&self) -> u32 {
        u32::try_from(self.queue.weight()).unwrap_or(u32::MAX)
    }

    /// The profile on the fastest kind of device.
    pub fn profile(&self) -> &LatencyProfile {
        &self.lines[self.fastest].profile
    }

    /// The profile on a kind of device; `None`: the model does not run there.
    pub fn profile_on(&self, kind: DeviceKind) -> Option<&LatencyProfile> {
        self.line(kind).map(|line| &self.lines[line].profile)
    }

    /// The batch size that [`DropPolicy::WindowDrop`] and [`DropPolicy::Adaptive`] aim at, on the fastest kind of device.
    pub fn target(&self) -> u32 {
        self.lines[self.fastest].target
    }

    /// The candidate for a kind of device, as of the last [`ModelQueue::update`].
    pub fn candidate(&self, kind: DeviceKind) -> Option<Candidate> {
        self.lines[self.line(kind)?].candidate
    }

    /// Adds a request. The ticket is for [`ModelQueue::cancel`].
    ///
    /// # Errors
    /// If it is malformed, hopeless already, or there is no room for it.
    pub fn enqueue(&mut self, now: Time, request: &Request) -> Result<Ticket, Reject> {
        let request = Request { deadline: request.deadline - self.network.reply, ..*request };
        let Request { deadline, level, size, .. } = request;
        let Some(bound) = self.queue.bound(level) else { return Err(Reject::UnknownLevel) };
        if size == 0 {
            return Err(Reject::ZeroSize);
        }
        if size > self.max_batch {
            return Err(Reject::TooLarge { max_batch: self.max_batch });
        }
        let allowed = if deadline == Time::MAX { Duration::MAX } else { deadline.since(now) };
        let needed = self.needed(size);
        if self.drop != DropPolicy::None && needed > allowed {
            return Err(Reject::DeadlineImpossible { needed, allowed });
        }
        // The offered load counts, not only what finds room.
        self.target_stale |= self.meter.arrival(now, size, allowed);
        if !self.queue.has_room(level, size) {
            return Err(Reject::QueueFull { bound });
        }
        let waits = self.max_wait != Duration::MAX && deadline == Time::MAX && request.queue_expiry == Time::MAX;
        if waits {
            let wait = self.wait_before(level);
            let bound = self.patience();
            if wait > bound {
                return Err(Reject::WaitTooLong { wait, bound });
            }
        }
        let hopeless_at = hopeless_at(needed, self.drop, deadline, size);
        let Slack { items, tier, full, .. } = self.slack;
        let own = level as usize * 2;
        self.slack.held = size <= items
            && (own == tier || full && own > tier)
            && hopeless_at == Time::MAX
            && !(self.target_stale && self.is_adaptive())
            && self.queue.joins_end(&request);
        if !full && self.slack.held {
            self.slack.items -= size;
        }
        let ticket = self.queue.push(now, &request, hopeless_at);
        if waits {
            self.waiters.push_back((now, ticket));
        }
        Ok(ticket)
    }

    /// Whether the request that was enqueued last changes nothing that anybody has to know before [`ModelQueue::wake`], as that was after the last
    /// update. Then [`ModelQueue::update`] may be left out.
    pub fn is_settled(&self) -> bool {
        self.slack.held
    }

    /// How long what waits in a level and those above takes, at least: in batches as large as possible, as many at once as may be, and if
    /// the devices do nothing else.
    fn wait_before(&self, level: u32) -> Duration {
        let items: u64 = (0..(level as usize + 1) * 2).map(|tier| self.queue.tier_weight(tier)).sum();
        let Line { pace, .. } = self.lines[self.fastest];
        let at_once = match self.max_in_flight {
            u32::MAX => self.devices.iter().fold(0u32, |all, devices| all.saturating_add(*devices)).max(1),
            // Whoever limits it may know of more devices than the plans do.
            most => most,
        };
        let wait = u128::from(pace.as_nanos()) * u128::from(items) / (u128::from(self.max_batch) * u128::from(at_once));
        Duration::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX))
    }

    /// How long a request without a deadline may wait.
    fn patience(&self) -> Duration {
        self.max_wait.max(self.lines[self.fastest].pace.saturating_mul(u64::from(PATIENCE)))
    }

    /// Lets those that wait now go without waiting for others to join ([`DispatchPolicy::Timeout`]): somebody came who cannot.
    pub fn flush(&mut self, now: Time) {
        self.flushed = Some(now);
        self.slack = Slack::default();
    }

    /// Takes a request out; whether it was there.
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        let left = self.queue.remove(ticket).is_some();
        if left {
            self.slack = Slack::default();
        }
        left
    }

    /// Replaces the profiles.
    pub fn set_profiles(&mut self, profiles: &DeviceProfiles) {
        let former = std::mem::take(&mut self.lines);
        self.lines.extend(profiles.iter().map(|(kind, profile)| {
            let sent = profile.with_overhead(self.network.control, self.network.data);
            // The candidate stays until the next update, which looks whether it has expired.
            let candidate = former.iter().find(|line| line.kind == kind).and_then(|line| line.candidate);
            let pace = profile.latency(self.max_batch);
            Line { kind, profile: profile.clone(), sent, in_use: true, pace, devices: 0, target: 1, candidate }
        }));
        self.lines_changed();
        self.slack = Slack::default();
    }

    /// Sets what messages take. A reply's delay is taken off the deadlines of requests that come from now on.
    pub fn set_network(&mut self, network: NetworkBudget) {
        self.network = network;
        for line in &mut self.lines {
            line.sent = line.profile.with_overhead(network.control, network.data);
        }
        self.lines_changed();
        self.slack = Slack::default();
    }

    /// Replaces the dispatch policy.
    pub fn set_dispatch(&mut self, dispatch: DispatchPolicy) {
        self.slack = Slack::default();
        self.queue.keep_arrivals(matches!(dispatch, DispatchPolicy::Timeout { .. }));
        self.dispatch = dispatch;
        self.target_stale = true;
        if !self.is_adaptive() {
            self.demand = Demand::default();
        }
    }

    /// How late a wake-up may come: a candidate may start this much before the moment at which a member would be lost.
    pub fn set_wake_margin(&mut self, margin: Duration) {
        self.slack = Slack::default();
        self.wake_margin = margin;
    }

    /// How many devices of a kind the cluster has: for the staggered target, and for what the fastest kind is. Whether that needs
    /// an update: which kinds there are has changed.
    pub fn set_devices(&mut self, kind: DeviceKind, devices: u32) -> bool {
        let kind = kind.0 as usize;
        if self.devices.len() <= kind {
            self.devices.resize(kind + 1, 0);
        }
        self.devices[kind] = devices;
        self.lines_changed()
    }

    /// Sets how adaptive models behave at the load of the moment.
    pub fn set_stance(&mut self, stance: Stance) {
        self.target_stale |= stance != self.stance;
        self.stance = stance;
    }

    /// What the model asks of the devices; nothing but under [`DispatchPolicy::Adaptive`] or [`DropPolicy::Adaptive`].
    pub fn demand(&self) -> Demand {
        self.demand
    }

    /// Works the demand out anew if time has made it stale. [`ModelQueue::update`] does it too.
    pub fn refresh_demand(&mut self, now: Time) {
        if self.is_adaptive() {
            self.refresh_target(now);
        }
    }

    /// Whether it behaves by the [`Stance`].
    pub fn is_adaptive(&self) -> bool {
        self.drop == DropPolicy::Adaptive || matches!(self.dispatch, DispatchPolicy::Adaptive { .. })
    }

    /// Drops every request because the model is going.
    pub fn clear(&mut self) {
        for tier in self.queue.tiers() {
            while let Some(ticket) = self.queue.head_ticket(tier) {
                self.give_up(ticket, DropReason::ModelRemoved);
            }
        }
        for line in &mut self.lines {
            line.candidate = None;
        }
        self.slack = Slack::default();
    }

    /// The next request that was dropped, with the reason.
    pub fn pop_dropped(&mut self) -> Option<Dropped> {
        self.dropped.pop_front()
    }

    /// When the queue needs [`ModelQueue::update`] though nothing came: its candidate expires, a request becomes hopeless or
    /// has waited for too long, or requests for which no update was needed would let the candidate start.
    pub fn wake(&self) -> Option<Time> {
        let mut wake = self.queue.next_due().unwrap_or(Time::MAX).min(self.slack.until.unwrap_or(Time::MAX));
        for candidate in self.lines.iter().filter_map(|line| line.candidate) {
            wake = wake.min(candidate.latest - candidate.delay + TICK);
        }
        if self.drop != DropPolicy::None {
            let single = self.needed(1);
            for tier in self.queue.tiers() {
                if let Some(head) = self.queue.head(tier) {
                    wake = wake.min(head.deadline - single + TICK);
                }
            }
        }
        if let Some((arrival, _)) = self.waiters.front() {
            wake = wake.min(*arrival + self.patience());
        }
        (wake != Time::MAX).then_some(wake)
    }

    /// Works out the candidates anew (Symphony §3.2, *UpdateCandidate*) and returns that for the fastest kind. Requests that became hopeless or
    /// waited for too long leave or move first.
    pub fn update(&mut self, now: Time) -> Option<Candidate> {
        self.expire(now);
        self.refresh_demand(now);
        if let Some(candidate) = self.lines[self.fastest].candidate
            && now + candidate.delay > candidate.latest
        {
            // The candidate was schedulable and found no device: its head can only leave in a smaller batch.
            if let Some(from) = self.slide(now, Time::ZERO, self.fastest, Time::ZERO) {
                self.sacrifice(from);
            }
        }
        let mut forecast = None;
        for line in 0..self.lines.len() {
            forecast = if self.lines[line].in_use { self.forecast(now, Time::ZERO, line) } else { None };
            let candidate = forecast.map(|forecast| self.window(now, Time::ZERO, line, forecast).0);
            self.lines[line].candidate = candidate;
        }
        self.slack = match (forecast, self.lines.len()) {
            (Some(forecast), 1) => self.foresee(now, forecast),
            _ => Slack::default(),
        };
        self.lines[self.fastest].candidate
    }

    /// How much the candidate of the only line may grow without an update.
    fn foresee(&mut self, now: Time, forecast: Forecast) -> Slack {
        let Forecast { size, full, last_tier, .. } = forecast;
        let slack = Slack { tier: last_tier, ..Slack::default() };
        if matches!(&self.dispatch, DispatchPolicy::Timeout { preferred, .. } if !preferred.is_empty()) {
            // Which preferred size is filled changes with every request.
            return slack;
        }
        if full {
            return Slack { items: u32::MAX, full, ..slack };
        }
        // Had the update been due for the growth, it would have come with a request.
        let exhausted = self.slack.exhausted || self.slack.until.is_some_and(|until| until <= now);
        let slack = Slack { exhausted, ..slack };
        if exhausted || size < LEAST_FORESEEN || u64::from(size) != self.queue.weight() {
            return slack;
        }
        let mut items = size.min(self.max_batch - size - 1);
        while items > 0 {
            let grown = Forecast { size: size + items, ..forecast };
            let Candidate { exec, delay, .. } = self.window(now, Time::ZERO, 0, grown).0;
            if exec - delay > now {
                return Slack { items, until: Some(exec - delay), ..slack };
            }
            items /= 2;
        }
        slack
    }

    /// Takes the batch that is sent now to a device of this kind, which is expected to be free at `free_at`: appends its members. `None` if none may
    /// be sent, which is so when giving up what held it below the target has moved its window, or when a grant crossed
    /// a change of the queue.
    pub fn take(
        &mut self,
        now: Time,
        kind: DeviceKind,
        free_at: Time,
        members: &mut Vec<RequestId>,
    ) -> Option<Departure> {
        let line = self.line(kind).filter(|line| self.lines[*line].in_use)?;
        let waited = self.lines[line].candidate.is_some_and(|c| c.exec - c.delay < now);
        self.expire(now);
        let passed = if self.lines.len() == 1 { Time::ZERO } else { self.forecast(now, free_at, line)?.from };
        let slid = self.slide(now, free_at, line, passed);
        // What a slower kind cannot make good use of is left to the faster ones.
        let gives_up = line == self.fastest && passed == Time::ZERO;
        let mut starting = None;
        if let Some(from) = slid {
            if gives_up {
                self.sacrifice(from);
            } else {
                starting = self.starting(now, free_at, line, from);
            }
        }
        if starting.is_none() {
            starting = self.starting(now, free_at, line, Time::ZERO);
        }
        for line in &mut self.lines {
            line.candidate = None;
        }
        self.slack = Slack::default();
        let (forecast, Candidate { size, .. }, exec, bound) = starting?;
        for tier in 0..=forecast.last_tier {
            pass_over(&mut self.queue, &mut self.aside, tier, forecast.from);
        }
        // Requests of several items may leave some of the room.
        let size = self.pop_batch(size, forecast.last_tier, members);
        self.restore();
        let arrives = now + self.network.delay(size);
        let start = arrives.max(free_at);
        let bound = if waited || start > arrives { StartBound::Device } else { bound };
        let Forecast { deadline, .. } = forecast;
        let expected = self.lines[line].profile.latency(size);
        let latest = if self.drop == DropPolicy::None { Time::MAX } else { deadline - expected };
        let reason = DispatchReason { bound, exec, latest, deadline, left: self.queued() };
        Some(Departure { size, arrives, start, expected, reason })
    }

    /// The batch whose window is open when it gets to a device that is free at `free_at`, if it is sent now.
    fn starting(
        &mut self,
        now: Time,
        free_at: Time,
        line: usize,
        from: Time,
    ) -> Option<(Forecast, Candidate, Time, StartBound)> {
        let forecast = self.forecast_from(now, free_at, line, from)?;
        let (candidate, opens, bound) = self.window(now, free_at, line, forecast);
        (opens <= (now + candidate.delay).max(free_at)).then_some((forecast, candidate, opens, bound))
    }

    /// Moves a batch of at most `limit` items from the heads of the tiers to `members`; its size.
    fn pop_batch(&mut self, limit: u32, last_tier: usize, members: &mut Vec<RequestId>) -> u32 {
        let mut room = limit;
        for tier in 0..=last_tier {
            room = self.queue.pop_into(tier, room, members);
            if self.queue.head(tier).is_some() {
                break;
            }
        }
        assert!(room < limit, "a candidate has room for its head");
        limit - room
    }

    /// Puts back what was hidden.
    fn restore(&mut self) {
        self.queue.put_back(&self.aside);
        self.aside.clear();
    }

    /// The largest prefix of the queue that may run together from now on. With several kinds of devices it passes over those
    /// that this one cannot serve in time.
    fn forecast(&self, now: Time, free_at: Time, line: usize) -> Option<Forecast> {
        self.forecast_from(now, free_at, line, Time::ZERO)
    }

    /// As [`ModelQueue::forecast`], of the requests that are due at `from` or later. `O(n)` in the number passed over, for each time that a request
    /// of several items is.
    fn forecast_from(&self, now: Time, free_at: Time, line: usize, mut from: Time) -> Option<Forecast> {
        'from: loop {
            let mut size = 0u64;
            let mut deadline = Time::MAX;
            let mut since = Time::MAX;
            let mut last_tier = 0;
            for tier in self.queue.tiers() {
                let head = if from == Time::ZERO {
                    self.queue.head(tier).map(|head| (head, 0))
                } else {
                    self.queue.head_from(tier, from)
                };
                let Some((head, passed)) = head else { continue };
                let earliest = deadline.min(head.deadline);
                let cap = u64::from(self.fit(now, free_at, line, earliest));
                if size + u64::from(head.size) > cap {
                    if size > 0 {
                        // Higher levels come first, whole: a head of a lower level may not shrink their batch.
                        break;
                    }
                    if self.lines.len() == 1 {
                        assert!(free_at > now, "the head of the queue can meet its deadline alone");
                        return None;
                    }
                    let Line { profile, sent, .. } = &self.lines[line];
                    from = from.max(head.deadline + TICK).max(now + sent.latency(1)).max(free_at + profile.latency(1));
                    continue 'from;
                }
                if size == 0 {
                    since = head.arrival;
                }
                deadline = earliest;
                last_tier = tier;
                size += self.queue.tier_weight(tier) - passed;
                if size >= cap {
                    // Exactly `cap` would be full as well if it is `max_batch`; if the deadline sets it, `exec` says the same.
                    let full = size > cap || cap == u64::from(self.max_batch);
                    return Some(Forecast { from, size: cap as u32, deadline, since, full, last_tier });
                }
            }
            let size = size as u32;
            return (size > 0).then_some(Forecast { from, size, deadline, since, full: false, last_tier });
        }
    }

    /// The candidate with its schedulable window; with when the window opened, which may have passed, and what that was counted from.
    fn window(&mut self, now: Time, free_at: Time, line: usize, forecast: Forecast) -> (Candidate, Time, StartBound) {
        let Forecast { from, mut size, deadline, since, mut full, last_tier } = forecast;
        // If the first arrival of the queue is not in the candidate, then the candidate is full, its level blocked, or the first
        // arrival passed over.
        let first_arrival = self.queue.first_arrival().unwrap_or(now);
        if self.flushed.is_some_and(|flushed| first_arrival <= flushed) {
            full = true;
        } else if let Some(preferred) = self.preferred_fill(now, first_arrival, size, last_tier, from) {
            size = preferred;
            full = true;
        }
        let delay = self.network.delay(size);
        let Line { profile, pace, .. } = &self.lines[line];
        let pace = *pace;
        let waits = match self.dispatch {
            DispatchPolicy::Adaptive { consolidate } => self.stance.waits(consolidate),
            _ => false,
        };
        let (mut opens, mut bound) =
            self.dispatch.opens(&Forming { size, deadline, first_arrival, full, waits, profile, delay });
        let latest = if self.drop == DropPolicy::None { Time::MAX } else { deadline - profile.latency(size) };
        // No policy waits until a member is lost by it: `latest` bounds its delay, and so does a queue expiry, by which it is sent.
        let lost = latest.min(self.queue.next_rejection().unwrap_or(Time::MAX) - TICK + delay);
        let safe = lost - self.wake_margin;
        if safe < opens {
            opens = safe;
            bound = if self.wake_margin > Duration::ZERO { StartBound::WakeMargin } else { StartBound::Latest };
        }
        let exec = opens.max(now + delay).max(free_at);
        (Candidate { size, exec, latest, since, delay, pace }, opens, bound)
    }

    /// The largest preferred size that a prefix of the candidate fills exactly, or else, where the next request would go beyond all
    /// preferred sizes or the first one does, what is there before it; while the delay has not passed. So does Triton. `O(b log n)` if the queue has
    /// requests of more than one item.
    fn preferred_fill(
        &mut self,
        now: Time,
        first_arrival: Time,
        size: u32,
        last_tier: usize,
        from: Time,
    ) -> Option<u32> {
        let DispatchPolicy::Timeout { delay, preferred } = &self.dispatch else { return None };
        if preferred.is_empty() || now >= first_arrival + *delay {
            return None;
        }
        if self.queue.unsized_only() {
            return preferred.iter().copied().filter(|p| *p <= size && *p > 0).max();
        }
        let largest = preferred.iter().copied().max().map_or(0, u64::from);
        // Walk the prefix sums, in order, and put everything back.
        let mut best = None;
        let mut sum = 0u64;
        'tiers: for tier in 0..=last_tier {
            pass_over(&mut self.queue, &mut self.aside, tier, from);
            while let Some(head) = self.queue.head(tier) {
                let before = sum;
                sum += u64::from(head.size);
                if sum > largest {
                    let beyond = if before == 0 { sum } else { before };
                    best = best.or((beyond <= u64::from(size)).then_some(beyond as u32));
                    break 'tiers;
                }
                if sum > u64::from(size) {
                    break 'tiers;
                }
                if preferred.iter().any(|p| u64::from(*p) == sum) {
                    best = Some(sum as u32);
                }
                self.aside.extend(self.queue.set_aside(tier));
            }
        }
        self.restore();
        best
    }

    /// The largest batch that, sent now to a device that is free at `free_at`, would meet `deadline`.
    fn fit(&self, now: Time, free_at: Time, line: usize, deadline: Time) -> u32 {
        if self.drop == DropPolicy::None || deadline == Time::MAX {
            return self.max_batch;
        }
        let Line { profile, sent, .. } = &self.lines[line];
        let fit = sent.largest_up_to(self.max_batch, deadline.since(now));
        if free_at <= now { fit } else { fit.min(profile.largest_up_to(self.max_batch, deadline.since(free_at))) }
    }

    /// Window drop: slides the start of the batch past heads of the leading tier that hold it below the target. If that gains something, the
    /// deadline that the batch begins with.
    ///
    /// Called when a decision cannot wait: the batch is sent, or it expired. Until then nothing is given up, because a device
    /// may come in time for the head. Heads are given up only if the batch without them is larger than the one they would lead: then
    /// this start serves more, and what they would have led later is smaller still, for their time only gets shorter. None of those
    /// given up would fit beside the larger batch.
    ///
    /// `O(1)` for each head given up, and `O(max_batch)` to find that there is nothing to gain. With requests of several items, or strays, that can take
    /// `O(n log n)`, if nearly the whole queue is about to expire.
    fn slide(&mut self, now: Time, free_at: Time, line: usize, from: Time) -> Option<Time> {
        if !matches!(self.drop, DropPolicy::WindowDrop | DropPolicy::Adaptive) {
            return None;
        }
        self.refresh_target(now);
        let lead = self.queue.tiers().find(|tier| {
            let head = if from == Time::ZERO {
                self.queue.head(*tier)
            } else {
                self.queue.head_from(*tier, from).map(|h| h.0)
            };
            head.is_some()
        })?;
        pass_over(&mut self.queue, &mut self.aside, lead, from);
        let target = u64::from(self.lines[line].target);
        // Nobody reaches further than who has most time: often enough to know that there is nothing to gain.
        let furthest = u64::from(self.fit(now, free_at, line, self.queue.last_deadline(lead)));
        let mut weight = self.queue.tier_weight(lead) - self.weight_aside();
        let mut without = None;
        let mut gain = None;
        while let Some(head) = self.queue.head(lead) {
            let reach = u64::from(self.fit(now, free_at, line, head.deadline)).min(weight);
            let least = *without.get_or_insert(reach);
            if reach >= target.min(weight) {
                gain = (reach > least).then_some(head.deadline);
                break;
            }
            weight -= u64::from(head.size);
            if weight.min(furthest) <= least {
                break;
            }
            // Later deadlines reach further, but have fewer behind them. So if anything is gained, then already by the last request that has enough behind it
            // for a larger batch.
            if self.aside.is_empty()
                && self.queue.unsized_only()
                && let Some(deadline) = self.queue.deadline_from_end(lead, least as u32 + 1)
                && u64::from(self.fit(now, free_at, line, deadline)) <= least
            {
                break;
            }
            self.aside.extend(self.queue.set_aside(lead));
        }
        self.restore();
        gain
    }

    /// Items of the requests that are hidden.
    fn weight_aside(&self) -> u64 {
        self.aside.iter().map(|slot| u64::from(self.queue.size(*slot))).sum()
    }

    /// Gives up the requests of the leading tier that are due before `from`.
    fn sacrifice(&mut self, from: Time) {
        let Some(lead) = self.queue.tiers().find(|tier| self.queue.head(*tier).is_some()) else { return };
        while self.queue.head(lead).is_some_and(|head| head.deadline < from)
            && let Some(ticket) = self.queue.head_ticket(lead)
        {
            self.give_up(ticket, DropReason::Sacrificed);
        }
    }

    fn refresh_target(&mut self, now: Time) {
        self.target_stale |= self.meter.roll(now);
        if !std::mem::take(&mut self.target_stale) {
            return;
        }
        let budget = self.meter.budget().unwrap_or(Duration::MAX);
        let (max_batch, rate, network) = (self.max_batch, self.meter.rate(), &self.network);
        if self.is_adaptive() {
            let devices = self.devices.iter().fold(0u32, |all, devices| all.saturating_add(*devices));
            let profile = &self.lines[self.fastest].sent;
            // Before the first rates are known nothing can be said, and without deadlines nothing is late.
            self.demand = match rate {
                Some(rate) if budget != Duration::MAX && budget != Duration::ZERO => {
                    let load =
                        Load { rate, variance: self.meter.variance(), even_variance: self.meter.even_variance() };
                    Demand::of(profile, max_batch, budget, load, devices)
                }
                _ => Demand::default(),
            };
        }
        for line in self.lines.iter_mut().filter(|line| line.in_use) {
            let staggered = remote_staggered_batch(&line.profile, max_batch, budget, rate, line.devices, network);
            line.target = match self.drop {
                DropPolicy::Adaptive => self.stance.target(&line.sent, staggered),
                _ => staggered,
            };
        }
    }

    /// The line that a kind of device takes its batches from.
    fn line(&self, kind: DeviceKind) -> Option<usize> {
        self.lines.iter().position(|line| line.kind.is_none_or(|k| k == kind))
    }

    /// The least time from the decision to send a request alone until it is done.
    fn needed(&self, size: u32) -> Duration {
        if size == 1 { self.needed_alone } else { self.look_up_needed(size) }
    }

    fn look_up_needed(&self, size: u32) -> Duration {
        let in_use = self.lines.iter().filter(|line| line.in_use);
        in_use.map(|line| line.sent.latency(size)).min().unwrap_or(Duration::MAX)
    }

    /// Works out what follows from the lines; whether others are in use than before.
    fn lines_changed(&mut self) -> bool {
        let all = self.devices.iter().fold(0u32, |all, devices| all.saturating_add(*devices));
        for line in &mut self.lines {
            line.devices = match line.kind {
                None => all,
                Some(kind) => self.devices.get(kind.0 as usize).copied().unwrap_or(0),
            };
        }
        let none = self.lines.iter().all(|line| line.devices == 0);
        let mut others = false;
        for line in &mut self.lines {
            let in_use = none || line.devices > 0;
            others |= std::mem::replace(&mut line.in_use, in_use) != in_use;
        }
        let in_use = (0..self.lines.len()).filter(|line| self.lines[*line].in_use);
        let fastest = in_use.min_by_key(|line| self.lines[*line].pace);
        self.fastest = fastest.unwrap_or(0);
        self.needed_alone = self.look_up_needed(1);
        self.target_stale = true;
        if !self.queue.unsized_only() {
            let (lines, drop) = (&self.lines, self.drop);
            let needed = |size| lines.iter().filter(|line| line.in_use).map(|line| line.sent.latency(size)).min();
            self.queue.set_hopeless(|waiting| {
                hopeless_at(needed(waiting.size).unwrap_or(Duration::MAX), drop, waiting.deadline, waiting.size)
            });
        }
        others
    }

    /// Drops the hopeless and those whose time in the queue is up.
    fn expire(&mut self, now: Time) {
        while let Some(due) = self.queue.pop_due(now) {
            match due {
                Due::Hopeless(ticket) => self.give_up(ticket, DropReason::Hopeless),
                Due::Expired(ticket) => self.give_up(ticket, DropReason::QueueTimeout),
                Due::Delayed => {}
            }
        }
        while let Some((arrival, ticket)) = self.waiters.front().copied() {
            if self.queue.holds(ticket) && arrival + self.patience() > now {
                break;
            }
            self.waiters.pop_front();
            self.give_up(ticket, DropReason::WaitTooLong);
        }
        if self.drop == DropPolicy::None {
            return;
        }
        for tier in self.queue.tiers() {
            while let Some(&Waiting { deadline, size, .. }) = self.queue.head(tier)
                && deadline != Time::MAX
                && now + self.needed(size) > deadline
                && let Some(ticket) = self.queue.head_ticket(tier)
            {
                self.give_up(ticket, DropReason::Hopeless);
            }
        }
    }

    fn give_up(&mut self, ticket: Ticket, reason: DropReason) {
        let Some(Waiting { id, deadline, size, .. }) = self.queue.remove(ticket) else { return };
        let has_target = matches!(self.drop, DropPolicy::WindowDrop | DropPolicy::Adaptive);
        let target = if has_target { self.target() } else { 0 };
        let detail = DropDetail { size, deadline, needed: self.needed(size), target };
        self.dropped.push_back(Dropped { request: id, reason, detail });
    }
}

/// Hides the requests of a tier that are due before `from`, until [`ModelQueue::restore`].
fn pass_over(queue: &mut RequestQueue, aside: &mut Vec<u32>, tier: usize, from: Time) {
    while queue.head(tier).is_some_and(|head| head.deadline < from) {
        aside.extend(queue.set_aside(tier));
    }
}

/// When a request needs its own timer to be found hopeless: if it has more than one item, others that are due later may be
/// hopeless later, so that it is not found at the head. `Time::MAX`: it needs none.
fn hopeless_at(needed: Duration, drop: DropPolicy, deadline: Time, size: u32) -> Time {
    if size == 1 || drop == DropPolicy::None { Time::MAX } else { deadline - needed + TICK }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// [`ModelQueue::slide`] finds what a search through the whole queue finds.
        #[test]
        fn the_slide_gives_up_what_a_full_search_would(
            (alpha, beta, max_batch) in (1..9u64, 0..30u64, 1..12u32),
            slos in prop::collection::vec(1..80u64, 1..40),
            jitter in prop::bool::weighted(0.3),
            target in 1..12u32,
        ) {
            let mut slos = slos;
            if !jitter {
                slos.sort_unstable();
            }
            let profile = LatencyProfile::linear(Duration::from_nanos(alpha), Duration::from_nanos(beta), max_batch).unwrap();
            let options = ModelOptions {
                profiles: profile.clone().into(),
                max_batch,
                drop: DropPolicy::WindowDrop,
                dispatch: DispatchPolicy::Deferred,
                max_in_flight: u32::MAX,
                shares_limit: None,
                max_wait: Duration::MAX,
                levels: Vec::new(),
            };
            let mut queue = ModelQueue::new(Time::ZERO, options);
            for (id, slo) in (0..).map(RequestId).zip(&slos) {
                let deadline = Time::from_nanos(*slo);
                let request = Request { id, model: ModelId(0), deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
                let _ = queue.enqueue(Time::ZERO, &request);
            }
            let mut deadlines: Vec<u64> = slos.into_iter().filter(|slo| *slo >= profile.latency(1).as_nanos()).collect();
            deadlines.sort_unstable();
            queue.refresh_target(Time::ZERO);
            queue.lines[0].target = target;
            let fit = |slo: u64| u64::from(profile.largest_up_to(max_batch, Duration::from_nanos(slo)));
            let reach = |at: usize| fit(deadlines[at]).min((deadlines.len() - at) as u64);
            let stop = (0..deadlines.len())
                .find(|at| reach(*at) >= u64::from(target).min((deadlines.len() - at) as u64))
                .filter(|at| reach(*at) > reach(0));
            let expected = stop.map(|at| Time::from_nanos(deadlines[at]));
            prop_assert_eq!(queue.slide(Time::ZERO, Time::ZERO, 0, Time::ZERO), expected);
            prop_assert_eq!(u64::from(queue.queued()), deadlines.len() as u64, "nothing is lost by looking");
        }
    }
}
