//! The batch that a model would send next: Symphony's *UpdateCandidate* (§3.2, algorithm 1).

use super::batch_policy::DropPolicy;
use super::dispatch_policy::{DispatchPolicy, Forming};
use super::kind_plan::{KindPlan, KindPlans};
use super::messages::Candidate;
use super::reason::StartBound;
use super::request_queue::RequestQueue;
use crate::ids::RequestId;
use crate::time::{Duration, Time};

/// One nanosecond: a deadline is kept at its instant and missed after it.
pub(super) const TICK: Duration = Duration::from_nanos(1);

/// The requests of a model that wait, and what a batch of them is made by.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Batcher {
    pub queue: RequestQueue,
    pub kinds: KindPlans,
    pub drop: DropPolicy,
    /// How far a candidate waits under [`DispatchPolicy::Adaptive`]: [`super::Behaviour::wait`].
    pub wait: u8,
    pub dispatch: DispatchPolicy,
    /// Who came by then waits for no others.
    pub flushed: Option<Time>,
    pub wake_margin: Duration,
    /// Scratch: requests passed over while looking ahead.
    aside: Vec<u32>,
}

/// The largest prefix of the queue that may run together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefix {
    /// Requests that are due before are passed over.
    pub from: Time,
    /// Items at most.
    pub size: u32,
    /// Earliest deadline in it.
    pub deadline: Time,
    /// Arrival of its first request.
    pub since: Time,
    /// Nothing may join it any more.
    pub full: bool,
    /// The last tier it takes from.
    pub last_tier: usize,
}

/// A candidate with what it comes from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Formed {
    pub prefix: Prefix,
    pub candidate: Candidate,
    /// When its window opened, which may have passed.
    pub opens: Time,
    /// What that was counted from.
    pub bound: StartBound,
}

impl Batcher {
    pub fn new(queue: RequestQueue, kinds: KindPlans, drop: DropPolicy, dispatch: DispatchPolicy) -> Self {
        let (flushed, wake_margin, aside) = (None, Duration::ZERO, Vec::new());
        Batcher { queue, kinds, drop, dispatch, wait: 0, flushed, wake_margin, aside }
    }

    /// *UpdateCandidate*: the largest batch `B` of the queue's head that meets its earliest deadline `d`, with its schedulable window. It may start from
    /// `exec = max(now, d - l(|B| + 1))` on, when nobody else could join in time ([`DispatchPolicy`] has other rules), until `latest = d - l(|B|)`.
    /// With several kinds of devices it passes over the requests that this one cannot serve in time, and over all that are due before `from`.
    /// `free_at`: when the device will be free, if it is known which.
    #[inline(always)]
    pub fn update_candidate(&mut self, now: Time, free_at: Time, plan: usize, from: Time) -> Option<Formed> {
        let prefix = self.get_batch(now, free_at, plan, from)?;
        Some(self.window(now, free_at, plan, prefix))
    }

    /// *GetBatch*. `O(n)` in the number passed over, for each time that a request of several items is.
    pub fn get_batch(&self, now: Time, free_at: Time, plan: usize, mut from: Time) -> Option<Prefix> {
        if self.queue.weight() == 0 {
            return None;
        }
        // Nobody asks how many more than are there, and one, would fit: that would have to be searched for.
        let most = self.kinds.max_batch.min(u32::try_from(self.queue.weight() + 1).unwrap_or(u32::MAX));
        'from: loop {
            let mut size = 0u64;
            let mut deadline = Time::MAX;
            let mut since = Time::MAX;
            let mut last_tier = 0;
            let mut limit = u64::from(self.kinds.plans[plan].limit);
            for tier in self.queue.tiers() {
                let head = if from == Time::ZERO {
                    self.queue.head(tier).map(|head| (head, 0))
                } else {
                    self.queue.head_from(tier, from)
                };
                let Some((head, passed)) = head else { continue };
                let earliest = deadline.min(head.deadline);
                if size == 0 {
                    // Who is larger alone goes alone.
                    limit = limit.max(u64::from(head.size));
                }
                let cap = u64::from(self.fit(now, free_at, plan, earliest, most)).min(limit);
                if size + u64::from(head.size) > cap {
                    if size > 0 {
                        // Higher levels come first, whole: a head of a lower level may not shrink their batch.
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
                    // Exactly `cap` would be full as well if it is the largest batch; if the deadline sets it, `exec` says the same.
                    let full = size > cap || cap == limit;
                    return Some(Prefix { from, size: cap as u32, deadline, since, full, last_tier });
                }
                if size == self.queue.weight() {
                    // Nobody waits further down.
                    break;
                }
            }
            let size = size as u32;
            return (size > 0).then_some(Prefix { from, size, deadline, since, full: false, last_tier });
        }
    }

    /// The schedulable window of a batch. Inlined, as its callers are: what they make would be copied from place to place right after it was written.
    #[inline(always)]
    pub fn window(&mut self, now: Time, free_at: Time, plan: usize, prefix: Prefix) -> Formed {
        let Prefix { mut size, deadline, since, mut full, .. } = prefix;
        // If the first arrival of the queue is not in the candidate, then the candidate is full, its level blocked, or the first
        // arrival passed over.
        let first_arrival = self.queue.first_arrival().unwrap_or(now);
        if self.flushed.is_some_and(|flushed| first_arrival <= flushed) {
            full = true;
        } else if let Some(preferred) = self.preferred_fill(now, first_arrival, prefix) {
            (size, full) = (preferred, true);
        }
        let KindPlan { profile, pace, network, .. } = &self.kinds.plans[plan];
        let delay = network.delay(size);
        let forming = Forming { size, deadline, first_arrival, full, wait: self.wait, since, profile, delay };
        let (mut opens, mut bound) = self.dispatch.opens(&forming);
        let latest = if self.drop == DropPolicy::None { Time::MAX } else { deadline - profile.latency(size) };
        // No policy waits until a member is lost by it: `latest` bounds its delay, and so does a queue expiry, by which it is sent.
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

    /// The batch whose window is open when it gets to a device that is free at `free_at`, if it is sent now.
    pub fn starting(&mut self, now: Time, free_at: Time, plan: usize, from: Time) -> Option<Formed> {
        let prefix = self.get_batch(now, free_at, plan, from)?;
        self.starting_with(now, free_at, plan, prefix)
    }

    /// [`Batcher::starting`], of this prefix.
    #[inline(always)]
    pub fn starting_with(&mut self, now: Time, free_at: Time, plan: usize, prefix: Prefix) -> Option<Formed> {
        let formed = self.window(now, free_at, plan, prefix);
        (formed.opens <= (now + formed.candidate.delay).max(free_at)).then_some(formed)
    }

    /// Moves a batch to `members`; its size: requests of several items may leave some of the room.
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

    /// The largest preferred size that a prefix of the candidate fills exactly, or else, where the next request would go beyond all
    /// preferred sizes or the first one does, what is there before it; while the delay has not passed. So does Triton. `O(b log n)` if the queue has
    /// requests of more than one item.
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
        // Walk the prefix sums, in order, and put everything back.
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

    /// The largest batch of up to `most` items that, sent now to a device that is free at `free_at`, would meet `deadline`. `O(1)` if `most` would.
    fn fit(&self, now: Time, free_at: Time, plan: usize, deadline: Time, most: u32) -> u32 {
        if self.drop == DropPolicy::None || deadline == Time::MAX {
            return most;
        }
        let KindPlan { profile, sent, .. } = &self.kinds.plans[plan];
        let fit = sent.largest_up_to(most, deadline.since(now));
        if free_at <= now { fit } else { fit.min(profile.largest_up_to(most, deadline.since(free_at))) }
    }

    /// What [`Batcher::get_batch`] makes of the whole queue for the only plan, if its candidate was made of `former`, all of it, and since then nothing
    /// happened but that others joined at the end of its last tier. `None` if it has to be asked: `former` was the largest batch or cannot leave any more.
    #[inline(always)]
    pub fn grow(&self, now: Time, former: Prefix) -> Option<Prefix> {
        let KindPlan { limit, candidate, .. } = &self.kinds.plans[0];
        candidate.as_ref().filter(|c| former.size < *limit && now + c.delay <= c.latest)?;
        let limit = *limit;
        let size = u32::try_from(self.queue.weight()).unwrap_or(u32::MAX);
        let cap = self.fit(now, Time::ZERO, 0, former.deadline, limit.min(size.saturating_add(1)));
        Some(Prefix { size: size.min(cap), full: size > cap || size == limit, ..former })
    }

    /// When something is due though nothing comes: a candidate expires, or a request does or becomes hopeless. [`Time::MAX`]: nothing.
    pub fn next_due(&self) -> Time {
        let Batcher { queue, kinds, drop, .. } = self;
        let mut due = queue.next_due().unwrap_or(Time::MAX);
        for candidate in kinds.plans.iter().filter_map(|plan| plan.candidate.as_ref()) {
            due = due.min(candidate.latest - candidate.delay + TICK);
        }
        // With one plan, none of the first tier is hopeless before the candidate expires.
        if *drop != DropPolicy::None && (kinds.plans.len() > 1 || queue.tier_weight(0) < queue.weight()) {
            let alone = kinds.needed(1);
            for head in queue.tiers().filter_map(|tier| queue.head(tier)) {
                due = due.min(head.deadline - alone + TICK);
            }
        }
        due
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
            // As nearly always.
            self.restore();
            return None;
        }
        let target = u64::from(target);
        // Nobody reaches further than who has most time: often enough to know that there is nothing to gain.
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
            // Later deadlines reach further, but have fewer behind them. So if anything is gained, then already by the last request that has enough behind it
            // for a larger batch.
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

    /// Puts back what was hidden.
    fn restore(&mut self) {
        self.queue.put_back(&self.aside);
        self.aside.clear();
    }
}

/// When a request needs its own timer to be found hopeless: if it has more than one item, others that are due later may be
/// hopeless later, so that it is not found at the head. `Time::MAX`: it needs none.
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
        /// [`Batcher::slide`] finds what a search through the whole queue finds.
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
