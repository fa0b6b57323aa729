//! The batch that a model would send next: Symphony's *UpdateCandidate* (§3.2, algorithm 1).

use super::batch_policy::DropPolicy;
use super::dispatch_policy::{DispatchPolicy, Forming};
use super::kind_plan::{KindPlan, KindPlans};
use super::messages::Candidate;
use super::reason::StartBound;
use super::request_queue::{QueuedRequest, RequestQueue};
use crate::ids::RequestId;
use crate::time::{Duration, Time};

/// One nanosecond. A deadline is kept at its instant, and missed one nanosecond later.
pub(super) const TICK: Duration = Duration::from_nanos(1);

/// The waiting requests of a model, and the rules by which a batch of them is made.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Batcher {
    pub queue: RequestQueue,
    pub kinds: KindPlans,
    pub drop: DropPolicy,
    /// How far a candidate of an adaptive model waits: [`super::Behaviour::wait`].
    pub wait: u8,
    pub dispatch: DispatchPolicy,
    /// Requests that came by this time wait for no others.
    pub flushed: Option<Time>,
    pub wake_margin: Duration,
    /// Scratch: the requests that a look ahead passes over.
    aside: Vec<u32>,
}

/// The largest prefix of the queue that may run together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefix {
    /// Requests with an earlier deadline are passed over.
    pub from: Time,
    /// Most items.
    pub size: u32,
    /// Earliest deadline of the prefix.
    pub deadline: Time,
    /// Arrival of the prefix's first request.
    pub since: Time,
    /// No other request may join the prefix.
    pub full: bool,
    /// The last tier that the prefix takes requests from.
    pub last_tier: usize,
}

/// A candidate with its origin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Formed {
    pub prefix: Prefix,
    pub candidate: Candidate,
    /// When the window opened, which may be in the past.
    pub opens: Time,
    /// The rule that set `opens`.
    pub bound: StartBound,
}

impl Batcher {
    pub fn new(queue: RequestQueue, kinds: KindPlans, drop: DropPolicy, dispatch: DispatchPolicy) -> Self {
        let (flushed, wake_margin, aside) = (None, Duration::ZERO, Vec::new());
        Batcher { queue, kinds, drop, dispatch, wait: 0, flushed, wake_margin, aside }
    }

    /// *UpdateCandidate*: finds the largest batch `B` of the queue's head that meets its earliest
    /// deadline `d`, and its schedulable window. The window opens at
    /// `exec = max(now, d - l(|B| + 1))`, when no other request could join in time
    /// ([`DispatchPolicy`] has other rules). It ends at `latest = d - l(|B|)`. With several kinds
    /// of devices it passes over the requests that this kind cannot serve in time. It always passes
    /// over requests that are due before `from`. `free_at`: when the device will be free, if the
    /// device is known.
    #[inline(always)]
    pub fn update_candidate(&mut self, now: Time, free_at: Time, plan: usize, from: Time) -> Option<Formed> {
        let prefix = self.get_batch(now, free_at, plan, from)?;
        Some(self.window(now, free_at, plan, prefix))
    }

    /// *GetBatch*. `O(n)` in the number of requests passed over, each time that it passes over a
    /// request of several items.
    pub fn get_batch(&self, now: Time, free_at: Time, plan: usize, mut from: Time) -> Option<Prefix> {
        if self.queue.weight() == 0 {
            return None;
        }
        // Whether more than one item beyond the queue would fit never matters, and would cost a
        // search.
        let most = self.kinds.max_batch.min(u32::try_from(self.queue.weight() + 1).unwrap_or(u32::MAX));
        'from: loop {
            let mut size = 0u64;
            let mut deadline = Time::MAX;
            let mut since = Time::MAX;
            let mut last_tier = 0;
            let mut limit = u64::from(self.kinds.plans[plan].limit);
            for tier in self.queue.tiers() {
                let Some((head, passed)) = self.head_due_from(tier, from) else { continue };
                let earliest = deadline.min(head.deadline);
                if size == 0 {
                    // A request that is larger than the limit runs alone.
                    limit = limit.max(u64::from(head.size));
                }
                let cap = u64::from(self.fit(now, free_at, plan, earliest, most)).min(limit);
                if size + u64::from(head.size) > cap {
                    if size > 0 {
                        // Higher levels come first, whole: a head of a lower level may not shrink
                        // their batch.
                        break;
                    }
                    if self.kinds.plans.len() == 1 {
                        assert!(free_at > now, "the head of the queue can meet its deadline alone");
                        return None;
                    }
                    let KindPlan { profile, sent, .. } = &self.kinds.plans[plan];
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
                    // A size of exactly `cap` is full too if it is the largest batch. If the
                    // deadline sets `cap`, `exec` has the same effect.
                    let full = size > cap || cap == limit;
                    return Some(Prefix { from, size: cap as u32, deadline, since, full, last_tier });
                }
                if size == self.queue.weight() {
                    // No request waits in a lower tier.
                    break;
                }
            }
            let size = size as u32;
            return (size > 0).then_some(Prefix { from, size, deadline, since, full: false, last_tier });
        }
    }

    /// The first request of a tier that is due at `from` or later, and the number of items before
    /// it.
    #[inline(always)]
    fn head_due_from(&self, tier: usize, from: Time) -> Option<(&QueuedRequest, u64)> {
        if from == Time::ZERO { self.queue.head(tier).map(|head| (head, 0)) } else { self.queue.head_from(tier, from) }
    }

    /// The schedulable window of a batch. Inlined, as its callers are: otherwise the result would
    /// be copied from place to place right after it was written.
    #[inline(always)]
    pub fn window(&mut self, now: Time, free_at: Time, plan: usize, prefix: Prefix) -> Formed {
        let Prefix { mut size, deadline, since, mut full, .. } = prefix;
        // The first arrival of the queue may be missing from the candidate. Then the candidate is
        // full, the arrival's level is blocked, or the arrival is passed over.
        let first_arrival = self.queue.first_arrival().unwrap_or(now);
        if self.flushed.is_some_and(|flushed| first_arrival <= flushed) {
            full = true;
        } else if let Some(preferred) = self.preferred_fill(now, first_arrival, prefix) {
            (size, full) = (preferred, true);
        }
        let KindPlan { profile, pace, network, enough, .. } = &self.kinds.plans[plan];
        let delay = network.delay(size);
        let forming = Forming { size, deadline, first_arrival, full, wait: self.wait, since, profile, delay };
        let (mut opens, mut bound) = self.dispatch.opens(&forming);
        // Only `EarlyLeave` has such a size.
        if size >= *enough && !full {
            (opens, bound) = (Time::ZERO, StartBound::KeepsUp);
        }
        let latest = if self.drop == DropPolicy::None { Time::MAX } else { deadline - profile.latency(size) };
        // No policy waits until a member is lost. `latest` bounds its delay, and so does a queue
        // expiry, before which the batch must be sent.
        let lost = latest.min(self.queue.next_rejection().unwrap_or(Time::MAX) - TICK + delay);
        let safe = lost - self.wake_margin;
        if safe < opens {
            opens = safe;
            bound = if self.wake_margin > Duration::ZERO { StartBound::WakeMargin } else { StartBound::Latest };
        }
        let exec = opens.max(now + delay).max(free_at);
        let takes = profile.latency(size);
        Formed { prefix, candidate: Candidate { size, exec, latest, since, delay, takes, pace: *pace }, opens, bound }
    }

    /// The batch whose window is open when it reaches a device that is free at `free_at`, if it is
    /// sent now.
    pub fn starting(&mut self, now: Time, free_at: Time, plan: usize, from: Time) -> Option<Formed> {
        let prefix = self.get_batch(now, free_at, plan, from)?;
        self.starting_with(now, free_at, plan, prefix)
    }

    /// [`Batcher::starting`] with the given prefix.
    #[inline(always)]
    pub fn starting_with(&mut self, now: Time, free_at: Time, plan: usize, prefix: Prefix) -> Option<Formed> {
        let formed = self.window(now, free_at, plan, prefix);
        (formed.opens <= (now + formed.candidate.delay).max(free_at)).then_some(formed)
    }

    /// Moves a batch to `members`. Returns its size: requests of several items may leave some of
    /// the room.
    pub fn pop(&mut self, formed: &Formed, members: &mut Vec<RequestId>) -> u32 {
        let Prefix { from, last_tier, .. } = formed.prefix;
        if from > Time::ZERO {
            for tier in 0..=last_tier {
                self.pass_over(tier, from);
            }
        }
        let limit = formed.candidate.size;
        let mut room = limit;
        for tier in 0..=last_tier {
            room = self.queue.pop_into(tier, room, members);
            if self.queue.head(tier).is_some() {
                break;
            }
        }
        assert!(room < limit, "a candidate has room for its head");
        self.restore();
        limit - room
    }

    /// The size of a batch that may start before the delay has passed: the largest preferred size
    /// that a prefix of the candidate fills exactly. If no prefix does, and the next request would
    /// go beyond all preferred sizes, it is the size before that request, or of the first request
    /// alone. Triton does the same. `O(b log n)` if the queue has requests of more than one item.
    fn preferred_fill(&mut self, now: Time, first_arrival: Time, prefix: Prefix) -> Option<u32> {
        let DispatchPolicy::Timeout { delay, preferred } = &self.dispatch else { return None };
        if preferred.is_empty() || now >= first_arrival + *delay {
            return None;
        }
        let Prefix { from, size, last_tier, .. } = prefix;
        if self.queue.unsized_only() {
            return preferred.iter().copied().filter(|p| *p <= size && *p > 0).max();
        }
        let largest = preferred.iter().copied().max().map_or(0, u64::from);
        // Walk the prefix sums in order. Then put all requests back.
        let mut best = None;
        let mut sum = 0u64;
        'tiers: for tier in 0..=last_tier {
            self.queue.set_aside_before(tier, from, &mut self.aside);
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

    /// The largest batch of up to `most` items that meets `deadline` if it is sent now to a device
    /// that is free at `free_at`. `O(1)` if a batch of `most` does.
    fn fit(&self, now: Time, free_at: Time, plan: usize, deadline: Time, most: u32) -> u32 {
        if self.drop == DropPolicy::None || deadline == Time::MAX {
            return most;
        }
        let KindPlan { profile, sent, .. } = &self.kinds.plans[plan];
        let fit = sent.largest_up_to(most, deadline.since(now));
        if free_at <= now { fit } else { fit.min(profile.largest_up_to(most, deadline.since(free_at))) }
    }

    /// The result of [`Batcher::get_batch`] for the whole queue and the only plan. The last
    /// candidate must be made of all of `former`, and since then requests may only have joined at
    /// the end of its last tier. `None` if `get_batch` must be called: `former` was the largest
    /// batch, or can no longer leave in time.
    #[inline(always)]
    pub fn grow(&self, now: Time, former: Prefix) -> Option<Prefix> {
        let KindPlan { limit, candidate, .. } = &self.kinds.plans[0];
        candidate.as_ref().filter(|c| former.size < *limit && now + c.delay <= c.latest)?;
        let limit = *limit;
        let size = u32::try_from(self.queue.weight()).unwrap_or(u32::MAX);
        let cap = self.fit(now, Time::ZERO, 0, former.deadline, limit.min(size.saturating_add(1)));
        Some(Prefix { size: size.min(cap), full: size > cap || size == limit, ..former })
    }

    /// When something is due though no event comes: a candidate or a request expires, or a request
    /// becomes hopeless. [`Time::MAX`]: never.
    pub fn next_due(&self) -> Time {
        let Batcher { queue, kinds, drop, .. } = self;
        let mut due = queue.next_due().unwrap_or(Time::MAX);
        for candidate in kinds.plans.iter().filter_map(|plan| plan.candidate.as_ref()) {
            due = due.min(candidate.latest - candidate.delay + TICK);
        }
        // With one plan, no request of the first tier is hopeless before the candidate expires.
        if *drop != DropPolicy::None && (kinds.plans.len() > 1 || queue.tier_weight(0) < queue.weight()) {
            let alone = kinds.needed(1);
            for head in queue.tiers().filter_map(|tier| queue.head(tier)) {
                due = due.min(head.deadline - alone + TICK);
            }
        }
        due
    }

    /// Window drop: slides the start of the batch past heads of the leading tier that hold the
    /// batch below the target. If that gains anything, it returns the deadline of the batch's new
    /// head.
    ///
    /// Called when a decision cannot wait: the batch is sent, or it expired. Until then no request
    /// is given up, because a device may come in time for the head. Heads are given up only if the
    /// batch becomes larger without them. Then this start serves more requests. The given-up heads
    /// would later lead even smaller batches, as their time only gets shorter. No head that is
    /// given up would fit beside the larger batch.
    ///
    /// `O(1)` for each head given up, and `O(max_batch)` to find that there is nothing to gain.
    /// With requests of several items, or strays, it can take `O(n log n)` if nearly the whole
    /// queue is about to expire.
    pub fn slide(&mut self, now: Time, free_at: Time, plan: usize, from: Time) -> Option<Time> {
        let lead = self.queue.tiers().find(|tier| {
            let head = if from == Time::ZERO {
                self.queue.head(*tier)
            } else {
                self.queue.head_from(*tier, from).map(|h| h.0)
            };
            head.is_some()
        })?;
        self.pass_over(lead, from);
        let KindPlan { target, .. } = self.kinds.plans[plan];
        let max_batch = self.kinds.max_batch;
        let aside: u64 = self.aside.iter().map(|index| u64::from(self.queue.size(*index))).sum();
        let mut weight = self.queue.tier_weight(lead) - aside;
        let aim = target.min(u32::try_from(weight).unwrap_or(u32::MAX));
        if let Some(head) = self.queue.head(lead)
            && aim <= max_batch
            && self.fit(now, free_at, plan, head.deadline, aim) == aim
        {
            // The common case.
            self.restore();
            return None;
        }
        let target = u64::from(target);
        // No request reaches further than the latest deadline does. That alone often shows that
        // there is nothing to gain.
        let furthest = u64::from(self.fit(now, free_at, plan, self.queue.last_deadline(lead), max_batch));
        let mut without = None;
        let mut gain = None;
        while let Some(head) = self.queue.head(lead) {
            let reach = u64::from(self.fit(now, free_at, plan, head.deadline, max_batch)).min(weight);
            let least = *without.get_or_insert(reach);
            if reach >= target.min(weight) {
                gain = (reach > least).then_some(head.deadline);
                break;
            }
            weight -= u64::from(head.size);
            if weight.min(furthest) <= least {
                break;
            }
            // Later deadlines reach further, but have fewer requests behind them. If anything is
            // gained, the last request with enough requests behind it for a larger batch already
            // gains.
            if self.aside.is_empty()
                && self.queue.unsized_only()
                && let Some(deadline) = self.queue.deadline_from_end(lead, least as u32 + 1)
                && u64::from(self.fit(now, free_at, plan, deadline, max_batch)) <= least
            {
                break;
            }
            self.aside.extend(self.queue.set_aside(lead));
        }
        self.restore();
        gain
    }

    /// Hides the requests of a tier that are due before `from`, until [`Batcher::restore`].
    fn pass_over(&mut self, tier: usize, from: Time) {
        self.queue.set_aside_before(tier, from, &mut self.aside);
    }

    /// Puts the hidden requests back.
    fn restore(&mut self) {
        self.queue.put_back(&self.aside);
        self.aside.clear();
    }
}

/// When a request's own timer must find it hopeless; `Time::MAX`: no timer is needed. A request of
/// more than one item needs a timer. Requests that are due later may become hopeless later, so that
/// it may never be found at the head.
pub(super) fn hopeless_at(needed: Duration, drop: DropPolicy, deadline: Time, size: u32) -> Time {
    if size == 1 || drop == DropPolicy::None { Time::MAX } else { deadline - needed + TICK }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cluster::request::Request;
    use crate::ids::ModelId;
    use crate::profile::LatencyProfile;

    proptest! {
        /// [`Batcher::slide`] finds the same start as a search through the whole queue.
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
            let mut kinds = KindPlans::new(&profile.clone().into(), max_batch);
            kinds.plans[0].target = target;
            let queue = RequestQueue::new(Vec::new());
            let mut batcher = Batcher::new(queue, kinds, DropPolicy::WindowDrop, DispatchPolicy::Deferred);
            slos.retain(|slo| *slo >= profile.latency(1).as_nanos());
            for (id, slo) in (0..).map(RequestId).zip(&slos) {
                let deadline = Time::from_nanos(*slo);
                let request = Request { id, model: ModelId(0), deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
                batcher.queue.push(Time::ZERO, &request, Time::MAX);
            }
            let mut deadlines = slos;
            deadlines.sort_unstable();
            let fit = |slo: u64| u64::from(profile.largest_up_to(max_batch, Duration::from_nanos(slo)));
            let reach = |at: usize| fit(deadlines[at]).min((deadlines.len() - at) as u64);
            let stop = (0..deadlines.len())
                .find(|at| reach(*at) >= u64::from(target).min((deadlines.len() - at) as u64))
                .filter(|at| reach(*at) > reach(0));
            let expected = stop.map(|at| Time::from_nanos(deadlines[at]));
            prop_assert_eq!(batcher.slide(Time::ZERO, Time::ZERO, 0, Time::ZERO), expected);
            prop_assert_eq!(batcher.queue.weight(), deadlines.len() as u64, "nothing is lost by looking");
        }
    }
}
