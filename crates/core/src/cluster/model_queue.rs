//! The queue of one model, and the candidate that it would send next.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use super::batch_policy::{DropPolicy, staggered_batch};
use super::dispatch_policy::{DispatchPolicy, Forming};
use super::indexed_heap::IndexedHeap;
use super::matchmaker::Candidate;
use super::rate_meter::RateMeter;
use super::scheduler::{DropReason, Reject};
use crate::ids::{ModelId, RequestId};
use crate::profile::LatencyProfile;
use crate::time::{Duration, Time};

/// One nanosecond: a deadline is kept at its instant and missed after it.
const TICK: Duration = Duration::from_nanos(1);

/// How a model is to be scheduled.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// `l(b)` of the model.
    pub profile: LatencyProfile,
    /// The largest batch, in items; 0 is taken as 1. The profile is extended if it ends before.
    pub max_batch: u32,
    /// What is given up for deadlines.
    pub drop: DropPolicy,
    /// When a candidate may start.
    pub dispatch: DispatchPolicy,
    /// Batches of the model that may run at once; `u32::MAX`: as many as there are devices. 0 is taken as 1.
    pub max_in_flight: u32,
    /// The priority levels, the highest first. None at all is taken as one without a bound.
    pub levels: Vec<PriorityLevel>,
}

/// The queue of one priority level.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PriorityLevel {
    /// Items (requests weighted by size) that may wait, exactly; a request that does not fit whole is rejected. 0: none may
    /// wait, so that every request is rejected. `u32::MAX`: without a bound.
    pub max_queue: u32,
    /// What happens when a request's `queue_expiry` passes.
    pub timeout_action: TimeoutAction,
}

/// What happens to a request whose time in the queue is up (Triton's `timeout_action`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TimeoutAction {
    /// It is dropped.
    #[default]
    Reject,
    /// It goes behind all others of its level and stays there.
    Delay,
}

/// A request as the scheduler knows it: no payload, only what decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Chosen by the driver.
    pub id: RequestId,
    /// Whose queue it joins.
    pub model: ModelId,
    /// When the batch it is in must have finished; `Time::MAX`: no deadline.
    pub deadline: Time,
    /// When it must have left the queue; `Time::MAX`: never.
    pub queue_expiry: Time,
    /// Its priority level, 0 the highest.
    pub level: u32,
    /// Items: its extent in the batch dimension.
    pub size: u32,
}

/// A request that left the queue without running.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dropped {
    /// The request.
    pub request: RequestId,
    /// Why.
    pub reason: DropReason,
}

/// The queue of one model: requests in, a [`Candidate`] out (Symphony §3.2, *UpdateCandidate*; §4.2, *ModelThread*).
///
/// **Order.** A level is served in order of deadlines, equal deadlines in order of arrival. Symphony's candidate is a prefix of the
/// queue with `d` the earliest deadline in it; in deadline order that is the head's, whatever the requests' own timeouts
/// are, and if any order of the queue meets all deadlines with equal work, this one does (earliest deadline first is
/// optimal). In order of arrival one impatient request behind a patient one would shrink the batch that both are in. With one
/// SLO for all, both orders are the same. A request without a deadline comes after all that have one; what protects it from
/// waiting for ever is its `queue_expiry`, or a level of its own. All of a higher level go before any of a lower one.
///
/// **Bound.** [`PriorityLevel::max_queue`] items a level; beyond it a request is rejected.
///
/// **Cost.** `O(log n)` a request, where n is the queue's length; no allocation once the tables have grown. The exceptions are
/// at the functions: preferred sizes with mixed request sizes, and window drop when nearly all is about to expire.
///
/// **Contract.** `enqueue`, `cancel`, `take` and the setters change the queue; call [`ModelQueue::update`] afterwards, and whenever
/// [`ModelQueue::wake`] comes, and pass its candidate on. Whatever was dropped on the way is in [`ModelQueue::pop_dropped`].
#[derive(Debug)]
pub struct ModelQueue {
    profile: LatencyProfile,
    max_batch: u32,
    drop: DropPolicy,
    dispatch: DispatchPolicy,
    levels: Vec<PriorityLevel>,
    /// Two a level: `2 * level` in regular order, `2 * level + 1` those that were delayed.
    tiers: Vec<Tier>,
    slots: Vec<Entry>,
    vacant: Vec<u32>,
    slot_of: HashMap<RequestId, u32, BuildHasherDefault<IdHasher>>,
    /// By slot: when the request needs attention on its own, because of its `queue_expiry`, or because its size makes it
    /// hopeless before others of its deadline.
    timers: IndexedHeap<Time>,
    /// By slot: order of arrival. Kept for [`DispatchPolicy::Timeout`] alone.
    arrivals: IndexedHeap<u64>,
    /// Requests in the queue whose size is not 1.
    sized: u32,
    next_sequence: u64,
    meter: RateMeter,
    devices: u32,
    target: u32,
    /// The target must be worked out again.
    target_stale: bool,
    candidate: Option<Candidate>,
    dropped: VecDeque<Dropped>,
    /// Scratch: requests passed over while looking ahead.
    aside: Vec<(Time, u64, u32)>,
}

#[derive(Debug, Default)]
struct Tier {
    /// By slot: `(deadline, sequence)`.
    order: IndexedHeap<(Time, u64)>,
    /// Items.
    weight: u64,
    /// The latest deadline that entered since the tier was empty.
    last_deadline: Time,
}

impl Tier {
    fn enter(&mut self, slot: u32, entry: &Entry) {
        self.last_deadline =
            if self.order.is_empty() { entry.deadline } else { self.last_deadline.max(entry.deadline) };
        self.order.set(slot, (entry.deadline, entry.sequence));
        self.weight += u64::from(entry.size);
    }

    fn leave(&mut self, slot: u32, entry: &Entry) {
        self.order.remove(slot);
        self.weight -= u64::from(entry.size);
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    id: RequestId,
    deadline: Time,
    queue_expiry: Time,
    arrival: Time,
    sequence: u64,
    size: u32,
    tier: u32,
}

/// What the next batch would be.
#[derive(Clone, Copy, Debug)]
struct Forecast {
    /// Items at most.
    size: u32,
    /// Earliest deadline in it.
    deadline: Time,
    /// Nothing may join it any more.
    full: bool,
    /// The last tier it takes from.
    last_tier: usize,
}

impl ModelQueue {
    /// An empty queue, for a cluster of `devices` devices.
    pub fn new(now: Time, options: ModelOptions, devices: u32) -> Self {
        let ModelOptions { profile, max_batch, drop, dispatch, max_in_flight: _, mut levels } = options;
        if levels.is_empty() {
            levels.push(PriorityLevel { max_queue: u32::MAX, timeout_action: TimeoutAction::Reject });
        }
        let tiers = (0..levels.len() * 2).map(|_| Tier::default()).collect();
        ModelQueue {
            profile,
            max_batch: max_batch.max(1),
            drop,
            dispatch,
            levels,
            tiers,
            slots: Vec::new(),
            vacant: Vec::new(),
            slot_of: HashMap::default(),
            timers: IndexedHeap::new(),
            arrivals: IndexedHeap::new(),
            sized: 0,
            next_sequence: 0,
            meter: RateMeter::new(now),
            devices,
            target: 1,
            target_stale: true,
            candidate: None,
            dropped: VecDeque::new(),
            aside: Vec::new(),
        }
    }

    /// Items in the queue.
    pub fn queued(&self) -> u32 {
        let items: u64 = self.tiers.iter().map(|t| t.weight).sum();
        u32::try_from(items).unwrap_or(u32::MAX)
    }

    /// The profile in use.
    pub fn profile(&self) -> &LatencyProfile {
        &self.profile
    }

    /// The batch size that [`DropPolicy::WindowDrop`] aims at.
    pub fn target(&self) -> u32 {
        self.target
    }

    /// Adds a request.
    ///
    /// # Errors
    /// If it is malformed, hopeless already, or there is no room for it.
    pub fn enqueue(&mut self, now: Time, request: &Request) -> Result<(), Reject> {
        let Request { id, model: _, deadline, queue_expiry, level, size } = *request;
        let Some(bound) = self.levels.get(level as usize).map(|l| l.max_queue) else {
            return Err(Reject::UnknownLevel);
        };
        if size == 0 {
            return Err(Reject::ZeroSize);
        }
        if size > self.max_batch {
            return Err(Reject::TooLarge { max_batch: self.max_batch });
        }
        if self.slot_of.contains_key(&id) {
            return Err(Reject::DuplicateId);
        }
        let allowed = if deadline == Time::MAX { Duration::MAX } else { deadline.since(now) };
        let needed = self.profile.latency(size);
        if self.drop != DropPolicy::None && needed > allowed {
            return Err(Reject::DeadlineImpossible { needed, allowed });
        }
        // The offered load counts, not only what finds room.
        self.target_stale |= self.meter.arrival(now, size, allowed);
        let tier = level as usize * 2;
        let waiting = self.tiers[tier].weight + self.tiers[tier + 1].weight;
        if bound != u32::MAX && waiting + u64::from(size) > u64::from(bound) {
            return Err(Reject::QueueFull { bound });
        }

        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let entry = Entry { id, deadline, queue_expiry, arrival: now, sequence, size, tier: tier as u32 };
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot as usize] = entry;
                slot
            }
            None => {
                self.slots.push(entry);
                self.slots.len() as u32 - 1
            }
        };
        self.slot_of.insert(id, slot);
        self.tiers[tier].enter(slot, &entry);
        self.sized += u32::from(size != 1);
        if matches!(self.dispatch, DispatchPolicy::Timeout { .. }) {
            self.arrivals.set(slot, sequence);
        }
        self.set_timer(slot);
        Ok(())
    }

    /// Takes a request out; whether it was there.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        match self.slot_of.get(&request) {
            Some(&slot) => {
                self.leave(slot);
                true
            }
            None => false,
        }
    }

    /// Replaces the profile.
    pub fn set_profile(&mut self, profile: LatencyProfile) {
        self.profile = profile;
        self.target_stale = true;
        // How long before its deadline a larger request is hopeless has changed.
        if self.sized > 0 {
            for slot in self.waiting() {
                self.set_timer(slot);
            }
        }
    }

    /// Replaces the dispatch policy.
    pub fn set_dispatch(&mut self, dispatch: DispatchPolicy) {
        self.dispatch = dispatch;
        self.arrivals = IndexedHeap::new();
        if matches!(self.dispatch, DispatchPolicy::Timeout { .. }) {
            for slot in self.waiting() {
                self.arrivals.set(slot, self.slots[slot as usize].sequence);
            }
        }
    }

    /// The slots of the requests in the queue, in no order that means anything.
    fn waiting(&self) -> Vec<u32> {
        let waits = |slot: &u32| self.tiers[self.slots[*slot as usize].tier as usize].order.get(*slot).is_some();
        (0..self.slots.len() as u32).filter(waits).collect()
    }

    /// How many devices the cluster has, for the staggered target.
    pub fn set_devices(&mut self, devices: u32) {
        self.devices = devices;
        self.target_stale = true;
    }

    /// Drops every request because the model is going.
    pub fn clear(&mut self) {
        for tier in 0..self.tiers.len() {
            while let Some((_, slot)) = self.tiers[tier].order.peek() {
                self.give_up(slot, DropReason::ModelRemoved);
            }
        }
        self.candidate = None;
    }

    /// The next request that was dropped, with the reason.
    pub fn pop_dropped(&mut self) -> Option<Dropped> {
        self.dropped.pop_front()
    }

    /// When the queue needs [`ModelQueue::update`] though nothing came: its candidate expires, a request becomes hopeless or
    /// has waited for too long.
    pub fn wake(&self) -> Option<Time> {
        let mut wake = self.timers.peek().map_or(Time::MAX, |(at, _)| at);
        if let Some(candidate) = self.candidate
            && candidate.latest != Time::MAX
        {
            wake = wake.min(candidate.latest + TICK);
        }
        if self.drop != DropPolicy::None {
            let single = self.profile.latency(1);
            for tier in &self.tiers {
                if let Some(((deadline, _), _)) = tier.order.peek()
                    && deadline != Time::MAX
                {
                    wake = wake.min(deadline - single + TICK);
                }
            }
        }
        (wake != Time::MAX).then_some(wake)
    }

    /// Works out the candidate anew (Symphony §3.2, *UpdateCandidate*). Requests that became hopeless or waited
    /// for too long leave or move first.
    pub fn update(&mut self, now: Time) -> Option<Candidate> {
        self.expire(now);
        if let Some(candidate) = self.candidate
            && now > candidate.latest
        {
            // The candidate was schedulable and found no device: its head can only leave in a smaller batch.
            self.slide(now);
        }
        self.candidate = self.forecast(now).map(|forecast| self.candidate_of(now, forecast));
        self.candidate
    }

    /// Takes the batch that starts now: appends its members and returns its size; zero if there is none.
    /// What would have held it below the target is dropped.
    pub fn take(&mut self, now: Time, members: &mut Vec<RequestId>) -> u32 {
        self.expire(now);
        self.slide(now);
        self.candidate = None;
        let Some(forecast) = self.forecast(now) else { return 0 };
        let candidate = self.candidate_of(now, forecast);
        if candidate.exec > now {
            // Giving up heads has moved the window.
            return 0;
        }
        let limit = u64::from(candidate.size);
        let mut size = 0;
        for tier in 0..=forecast.last_tier {
            while let Some((_, slot)) = self.tiers[tier].order.peek() {
                let entry = self.slots[slot as usize];
                if size + u64::from(entry.size) > limit {
                    assert!(size > 0, "a candidate has room for its head");
                    return size as u32;
                }
                size += u64::from(entry.size);
                members.push(entry.id);
                self.leave(slot);
            }
        }
        size as u32
    }

    /// The largest prefix of the queue that may run together from now on.
    fn forecast(&self, now: Time) -> Option<Forecast> {
        let mut size = 0u64;
        let mut deadline = Time::MAX;
        let mut last_tier = 0;
        for (index, tier) in self.tiers.iter().enumerate() {
            let Some(((head_deadline, _), slot)) = tier.order.peek() else { continue };
            let earliest = deadline.min(head_deadline);
            let cap = u64::from(self.fit(now, earliest));
            let head = u64::from(self.slots[slot as usize].size);
            if size + head > cap {
                // Higher levels come first, whole: a head of a lower level may not shrink their batch. The lead
                // head always fits, or `expire` had taken it.
                assert!(size > 0, "the head of the queue can meet its deadline alone");
                break;
            }
            deadline = earliest;
            last_tier = index;
            size += tier.weight;
            if size >= cap {
                // Exactly `cap` would be full as well if it is `max_batch`; if the deadline sets it, `exec` says the same.
                let full = size > cap || cap == u64::from(self.max_batch);
                return Some(Forecast { size: cap as u32, deadline, full, last_tier });
            }
        }
        (size > 0).then_some(Forecast { size: size as u32, deadline, full: false, last_tier })
    }

    fn candidate_of(&mut self, now: Time, forecast: Forecast) -> Candidate {
        let Forecast { mut size, deadline, mut full, last_tier } = forecast;
        let mut first_arrival = now;
        if matches!(self.dispatch, DispatchPolicy::Timeout { .. }) {
            // If the oldest request of the queue is not in the candidate, then the candidate is full, or its level blocked.
            if let Some((_, slot)) = self.arrivals.peek() {
                first_arrival = self.slots[slot as usize].arrival;
            }
            if let Some(preferred) = self.preferred_fill(now, first_arrival, size, last_tier) {
                size = preferred;
                full = true;
            }
        }
        let forming = Forming { now, size, deadline, first_arrival, full, profile: &self.profile };
        let latest = if self.drop == DropPolicy::None { Time::MAX } else { deadline - self.profile.latency(size) };
        // A delay longer than the head's slack is cut short: to wait for `latest` to pass serves nobody.
        let exec = self.dispatch.exec(&forming).min(latest);
        Candidate { size, exec, latest }
    }

    /// The largest preferred size that a prefix of the candidate fills exactly, while the delay has not passed.
    fn preferred_fill(&mut self, now: Time, first_arrival: Time, size: u32, last_tier: usize) -> Option<u32> {
        let DispatchPolicy::Timeout { delay, preferred } = &self.dispatch else { return None };
        if preferred.is_empty() || now >= first_arrival + *delay {
            return None;
        }
        if self.sized == 0 {
            return preferred.iter().copied().filter(|p| *p <= size && *p > 0).max();
        }
        // Sizes mix: walk the prefix sums, in order, and put everything back.
        let mut best = None;
        let mut sum = 0u64;
        'tiers: for tier in 0..=last_tier {
            let from = self.aside.len();
            let order = &mut self.tiers[tier].order;
            let mut end = false;
            while let Some(((deadline, sequence), slot)) = order.peek() {
                sum += u64::from(self.slots[slot as usize].size);
                if sum > u64::from(size) {
                    end = true;
                    break;
                }
                if preferred.iter().any(|p| u64::from(*p) == sum) {
                    best = Some(sum as u32);
                }
                order.pop();
                self.aside.push((deadline, sequence, slot));
            }
            for (deadline, sequence, slot) in self.aside.drain(from..) {
                order.set(slot, (deadline, sequence));
            }
            if end {
                break 'tiers;
            }
        }
        best
    }

    /// The largest batch that started now would meet `deadline`.
    fn fit(&self, now: Time, deadline: Time) -> u32 {
        if self.drop == DropPolicy::None || deadline == Time::MAX {
            return self.max_batch;
        }
        self.profile.largest_up_to(self.max_batch, deadline.since(now))
    }

    /// Window drop: slides the start of the batch past heads of the leading tier that hold it below the target.
    ///
    /// Called when a decision cannot wait: the batch starts, or it expired. Until then nothing is given up, because a device
    /// may come in time for the head. Heads are given up only if the batch without them is larger than the one they would lead: then
    /// this start serves more, and what they would have led later is smaller still, for their time only gets shorter. None of those
    /// given up would fit beside the larger batch.
    ///
    /// `O(log n)` for each head given up. A search that finds nothing to gain can take `O(n log n)`, if nearly the whole queue is about
    /// to expire.
    fn slide(&mut self, now: Time) {
        if self.drop != DropPolicy::WindowDrop {
            return;
        }
        self.refresh_target(now);
        let Some(lead) = self.tiers.iter().position(|t| !t.order.is_empty()) else { return };
        let target = u64::from(self.target);
        // Nobody reaches further than who has most time: often enough to know that there is nothing to gain.
        let furthest = u64::from(self.fit(now, self.tiers[lead].last_deadline));
        let mut weight = self.tiers[lead].weight;
        let mut without = None;
        let mut gain = false;
        while let Some(((deadline, sequence), slot)) = self.tiers[lead].order.peek() {
            let reach = u64::from(self.fit(now, deadline)).min(weight);
            let least = *without.get_or_insert(reach);
            if reach >= target.min(weight) {
                gain = reach > least;
                break;
            }
            weight -= u64::from(self.slots[slot as usize].size);
            if weight.min(furthest) <= least {
                break;
            }
            self.tiers[lead].order.pop();
            self.aside.push((deadline, sequence, slot));
        }
        while let Some((deadline, sequence, slot)) = self.aside.pop() {
            self.tiers[lead].order.set(slot, (deadline, sequence));
            if gain {
                self.give_up(slot, DropReason::Sacrificed);
            }
        }
    }

    fn refresh_target(&mut self, now: Time) {
        self.target_stale |= self.meter.roll(now);
        if std::mem::take(&mut self.target_stale) {
            let budget = self.meter.budget().unwrap_or(Duration::MAX);
            self.target = staggered_batch(&self.profile, self.max_batch, budget, self.meter.rate(), self.devices);
        }
    }

    /// Drops the hopeless and those whose time in the queue is up.
    fn expire(&mut self, now: Time) {
        while let Some((at, slot)) = self.timers.peek()
            && at <= now
        {
            let Entry { queue_expiry, tier, .. } = self.slots[slot as usize];
            if self.hopeless(now, slot) {
                self.give_up(slot, DropReason::Hopeless);
            } else {
                assert!(queue_expiry <= now, "a request's timer is set for one of the two reasons");
                match self.levels[tier as usize / 2].timeout_action {
                    TimeoutAction::Reject => self.give_up(slot, DropReason::QueueTimeout),
                    TimeoutAction::Delay => self.delay(slot),
                }
            }
        }
        if self.drop == DropPolicy::None {
            return;
        }
        for tier in 0..self.tiers.len() {
            while let Some((_, slot)) = self.tiers[tier].order.peek()
                && self.hopeless(now, slot)
            {
                self.give_up(slot, DropReason::Hopeless);
            }
        }
    }

    /// Whether the request can no longer meet its deadline, even alone.
    fn hopeless(&self, now: Time, slot: u32) -> bool {
        let Entry { deadline, size, .. } = self.slots[slot as usize];
        self.drop != DropPolicy::None && deadline != Time::MAX && now + self.profile.latency(size) > deadline
    }

    /// Sets the request's own timer, or removes it if it needs none.
    fn set_timer(&mut self, slot: u32) {
        let Entry { deadline, queue_expiry, size, tier, .. } = self.slots[slot as usize];
        let delayed = tier % 2 == 1;
        let mut at = if delayed { Time::MAX } else { queue_expiry };
        if size > 1 && self.drop != DropPolicy::None && deadline != Time::MAX {
            at = at.min(deadline - self.profile.latency(size) + TICK);
        }
        if at == Time::MAX {
            self.timers.remove(slot);
        } else {
            self.timers.set(slot, at);
        }
    }

    /// Moves a request behind all others of its level.
    fn delay(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        let tier = entry.tier as usize;
        assert!(tier.is_multiple_of(2), "a request is delayed once");
        self.tiers[tier].leave(slot, entry);
        entry.tier += 1;
        self.tiers[tier + 1].enter(slot, entry);
        self.set_timer(slot);
    }

    fn give_up(&mut self, slot: u32, reason: DropReason) {
        let request = self.slots[slot as usize].id;
        self.leave(slot);
        self.dropped.push_back(Dropped { request, reason });
    }

    fn leave(&mut self, slot: u32) {
        let entry @ Entry { id, size, tier, .. } = self.slots[slot as usize];
        self.tiers[tier as usize].leave(slot, &entry);
        self.sized -= u32::from(size != 1);
        self.timers.remove(slot);
        self.arrivals.remove(slot);
        self.slot_of.remove(&id);
        self.vacant.push(slot);
    }
}

/// Hash of a request id: one multiplication. The ids are the driver's own, so nobody can choose them to collide; the order of
/// the table is never looked at.
#[derive(Clone, Copy, Debug, Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        // Fibonacci hashing; the fold brings the mixed high bits down to where the table looks.
        let mixed = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}
