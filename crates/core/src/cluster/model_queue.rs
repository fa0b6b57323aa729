//! The queue of one model with the candidate that it would send next.

use std::collections::VecDeque;

use super::batch_policy::{DropPolicy, staggered_batch};
use super::dispatch_policy::{DispatchPolicy, Forming};
use super::matchmaker::Candidate;
use super::rate_meter::RateMeter;
use super::request_queue::{Due, PriorityLevel, Request, RequestQueue, Ticket, Waiting};
use super::scheduler::{DropReason, Reject};
use crate::ids::RequestId;
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
/// **Order.** Higher levels first; within a level by deadline, equal deadlines by arrival. In deadline order the earliest deadline of a
/// prefix, Symphony's `d`, is the head's, whatever the requests' own timeouts are; in order of arrival one impatient request
/// behind a patient one would shrink the batch that both are in. With one SLO for all, both orders are the same. A request
/// without a deadline comes after all that have one; its `queue_expiry`, or a level of its own, keeps it from waiting for ever.
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
    queue: RequestQueue,
    meter: RateMeter,
    wake_margin: Duration,
    devices: u32,
    target: u32,
    /// The target must be worked out again.
    target_stale: bool,
    candidate: Option<Candidate>,
    dropped: VecDeque<Dropped>,
    /// Scratch: requests passed over while looking ahead.
    aside: Vec<u32>,
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
        let ModelOptions { profile, max_batch, drop, dispatch, max_in_flight: _, levels } = options;
        let mut queue = ModelQueue {
            profile,
            max_batch: max_batch.max(1),
            drop,
            dispatch: DispatchPolicy::Eager,
            queue: RequestQueue::new(levels),
            meter: RateMeter::new(now),
            wake_margin: Duration::ZERO,
            devices,
            target: 1,
            target_stale: true,
            candidate: None,
            dropped: VecDeque::new(),
            aside: Vec::new(),
        };
        queue.set_dispatch(dispatch);
        queue
    }

    /// Items in the queue.
    pub fn queued(&self) -> u32 {
        u32::try_from(self.queue.weight()).unwrap_or(u32::MAX)
    }

    /// The profile in use.
    pub fn profile(&self) -> &LatencyProfile {
        &self.profile
    }

    /// The batch size that [`DropPolicy::WindowDrop`] aims at.
    pub fn target(&self) -> u32 {
        self.target
    }

    /// Adds a request. The ticket is for [`ModelQueue::cancel`].
    ///
    /// # Errors
    /// If it is malformed, hopeless already, or there is no room for it.
    pub fn enqueue(&mut self, now: Time, request: &Request) -> Result<Ticket, Reject> {
        let Request { deadline, level, size, .. } = *request;
        let Some(bound) = self.queue.bound(level) else { return Err(Reject::UnknownLevel) };
        if size == 0 {
            return Err(Reject::ZeroSize);
        }
        if size > self.max_batch {
            return Err(Reject::TooLarge { max_batch: self.max_batch });
        }
        let allowed = if deadline == Time::MAX { Duration::MAX } else { deadline.since(now) };
        let needed = self.profile.latency(size);
        if self.drop != DropPolicy::None && needed > allowed {
            return Err(Reject::DeadlineImpossible { needed, allowed });
        }
        // The offered load counts, not only what finds room.
        self.target_stale |= self.meter.arrival(now, size, allowed);
        if !self.queue.has_room(level, size) {
            return Err(Reject::QueueFull { bound });
        }
        Ok(self.queue.push(now, request, hopeless_at(&self.profile, self.drop, deadline, size)))
    }

    /// Takes a request out; whether it was there.
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        self.queue.remove(ticket).is_some()
    }

    /// Replaces the profile.
    pub fn set_profile(&mut self, profile: LatencyProfile) {
        self.profile = profile;
        self.target_stale = true;
        if !self.queue.unsized_only() {
            let (profile, drop) = (&self.profile, self.drop);
            self.queue.set_hopeless(|waiting| hopeless_at(profile, drop, waiting.deadline, waiting.size));
        }
    }

    /// Replaces the dispatch policy.
    pub fn set_dispatch(&mut self, dispatch: DispatchPolicy) {
        self.queue.keep_arrivals(matches!(dispatch, DispatchPolicy::Timeout { .. }));
        self.dispatch = dispatch;
    }

    /// How late a wake-up may come: a candidate may start this much before the moment at which a member would be lost.
    pub fn set_wake_margin(&mut self, margin: Duration) {
        self.wake_margin = margin;
    }

    /// How many devices the cluster has, for the staggered target.
    pub fn set_devices(&mut self, devices: u32) {
        self.devices = devices;
        self.target_stale = true;
    }

    /// Drops every request because the model is going.
    pub fn clear(&mut self) {
        for tier in self.queue.tiers() {
            while let Some(ticket) = self.queue.head_ticket(tier) {
                self.give_up(ticket, DropReason::ModelRemoved);
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
        let mut wake = self.queue.next_due().unwrap_or(Time::MAX);
        if let Some(candidate) = self.candidate {
            wake = wake.min(candidate.latest + TICK);
        }
        if self.drop != DropPolicy::None {
            let single = self.profile.latency(1);
            for tier in self.queue.tiers() {
                if let Some(head) = self.queue.head(tier) {
                    wake = wake.min(head.deadline - single + TICK);
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

    /// Takes the batch that starts now: appends its members and returns its size; zero if none may start, which is so
    /// when giving up what held it below the target has moved its window.
    pub fn take(&mut self, now: Time, members: &mut Vec<RequestId>) -> u32 {
        self.expire(now);
        self.slide(now);
        self.candidate = None;
        let Some(forecast) = self.forecast(now) else { return 0 };
        let candidate = self.candidate_of(now, forecast);
        if candidate.exec > now {
            return 0;
        }
        let limit = u64::from(candidate.size);
        let mut size = 0;
        for tier in 0..=forecast.last_tier {
            while let Some(head) = self.queue.head(tier) {
                if size + u64::from(head.size) > limit {
                    assert!(size > 0, "a candidate has room for its head");
                    return size as u32;
                }
                size += u64::from(head.size);
                members.extend(self.queue.pop(tier).map(|head| head.id));
            }
        }
        size as u32
    }

    /// The largest prefix of the queue that may run together from now on.
    fn forecast(&self, now: Time) -> Option<Forecast> {
        let mut size = 0u64;
        let mut deadline = Time::MAX;
        let mut last_tier = 0;
        for tier in self.queue.tiers() {
            let Some(head) = self.queue.head(tier) else { continue };
            let earliest = deadline.min(head.deadline);
            let cap = u64::from(self.fit(now, earliest));
            if size + u64::from(head.size) > cap {
                // Higher levels come first, whole: a head of a lower level may not shrink their batch. The lead
                // head always fits, or `expire` had taken it.
                assert!(size > 0, "the head of the queue can meet its deadline alone");
                break;
            }
            deadline = earliest;
            last_tier = tier;
            size += self.queue.tier_weight(tier);
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
        // If the first arrival of the queue is not in the candidate, then the candidate is full, or its level blocked.
        let first_arrival = self.queue.first_arrival().unwrap_or(now);
        if let Some(preferred) = self.preferred_fill(now, first_arrival, size, last_tier) {
            size = preferred;
            full = true;
        }
        let forming = Forming { now, size, deadline, first_arrival, full, profile: &self.profile };
        let latest = if self.drop == DropPolicy::None { Time::MAX } else { deadline - self.profile.latency(size) };
        // No policy waits until a member is lost by it: `latest` bounds its delay, and so does a queue expiry.
        let lost = latest.min(self.queue.next_rejection().unwrap_or(Time::MAX) - TICK);
        let exec = self.dispatch.exec(&forming).min(lost - self.wake_margin).max(now);
        Candidate { size, exec, latest }
    }

    /// The largest preferred size that a prefix of the candidate fills exactly, while the delay has not passed. `O(b log n)` if
    /// the queue has requests of more than one item.
    fn preferred_fill(&mut self, now: Time, first_arrival: Time, size: u32, last_tier: usize) -> Option<u32> {
        let DispatchPolicy::Timeout { delay, preferred } = &self.dispatch else { return None };
        if preferred.is_empty() || now >= first_arrival + *delay {
            return None;
        }
        if self.queue.unsized_only() {
            return preferred.iter().copied().filter(|p| *p <= size && *p > 0).max();
        }
        // Walk the prefix sums, in order, and put everything back.
        let mut best = None;
        let mut sum = 0u64;
        'tiers: for tier in 0..=last_tier {
            while let Some(head) = self.queue.head(tier) {
                sum += u64::from(head.size);
                if sum > u64::from(size) {
                    break 'tiers;
                }
                if preferred.iter().any(|p| u64::from(*p) == sum) {
                    best = Some(sum as u32);
                }
                self.aside.extend(self.queue.set_aside(tier));
            }
        }
        for slot in self.aside.drain(..) {
            self.queue.put_back(slot);
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
        let Some(lead) = self.queue.tiers().find(|tier| self.queue.head(*tier).is_some()) else { return };
        let target = u64::from(self.target);
        // Nobody reaches further than who has most time: often enough to know that there is nothing to gain.
        let furthest = u64::from(self.fit(now, self.queue.last_deadline(lead)));
        let mut weight = self.queue.tier_weight(lead);
        let mut without = None;
        let mut gain = false;
        while let Some(head) = self.queue.head(lead) {
            let reach = u64::from(self.fit(now, head.deadline)).min(weight);
            let least = *without.get_or_insert(reach);
            if reach >= target.min(weight) {
                gain = reach > least;
                break;
            }
            weight -= u64::from(head.size);
            if weight.min(furthest) <= least {
                break;
            }
            self.aside.extend(self.queue.set_aside(lead));
        }
        let mut aside = std::mem::take(&mut self.aside);
        for slot in aside.drain(..) {
            let ticket = self.queue.put_back(slot);
            if gain {
                self.give_up(ticket, DropReason::Sacrificed);
            }
        }
        self.aside = aside;
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
        while let Some(due) = self.queue.pop_due(now) {
            match due {
                Due::Hopeless(ticket) => self.give_up(ticket, DropReason::Hopeless),
                Due::Expired(ticket) => self.give_up(ticket, DropReason::QueueTimeout),
                Due::Delayed => {}
            }
        }
        if self.drop == DropPolicy::None {
            return;
        }
        for tier in self.queue.tiers() {
            while let Some(&Waiting { deadline, size, .. }) = self.queue.head(tier)
                && deadline != Time::MAX
                && now + self.profile.latency(size) > deadline
                && let Some(ticket) = self.queue.head_ticket(tier)
            {
                self.give_up(ticket, DropReason::Hopeless);
            }
        }
    }

    fn give_up(&mut self, ticket: Ticket, reason: DropReason) {
        let dropped = self.queue.remove(ticket).map(|waiting| Dropped { request: waiting.id, reason });
        self.dropped.extend(dropped);
    }
}

/// When a request needs its own timer to be found hopeless: if it has more than one item, others that are due later may be
/// hopeless later, so that it is not found at the head. `Time::MAX`: it needs none.
fn hopeless_at(profile: &LatencyProfile, drop: DropPolicy, deadline: Time, size: u32) -> Time {
    if size == 1 || drop == DropPolicy::None { Time::MAX } else { deadline - profile.latency(size) + TICK }
}
