//! The waiting requests of one model, in the order in which they are served.

use std::collections::VecDeque;
use std::ops::{Index, IndexMut};

use serde::{Deserialize, Serialize};

use super::indexed_heap::IndexedHeap;
use super::request::{PriorityLevel, Request, TimeoutAction};
use crate::ids::RequestId;
use crate::time::Time;

/// Names a waiting request in its queue, so that it can be cancelled. A queue never gives a ticket
/// out twice: the ticket of a request that has left names no request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Ticket {
    index: u32,
    /// The request's sequence number, unique in its queue: the generation of the entry.
    sequence: u64,
}

/// The waiting requests of one model, in the order in which they are served.
///
/// The order is that of [`super::ModelQueue`].
///
/// **Tiers.** A level has two tiers: the regular tier `2 * level`, and behind it the tier of
/// delayed requests, `2 * level + 1`.
///
/// **Line and strays.** Requests come nearly in the order of their deadlines. A request that
/// belongs at or near the end of its tier joins the tier's line, a list through the entries. Any
/// other request is a stray, in a heap. The head of a tier is the first of the line or the first of
/// the strays.
///
/// **Cost.** `O(1)` an operation on a request in line and without a timer, `O(log n)` on any other;
/// no allocation once the tables have grown.
///
/// **Layout.** The fields come in the order in which a request needs them. With thousands of models
/// each request finds its queue's memory cold. [`RequestQueue::push_last`] reads only the first two
/// cache lines, and writes the new entry and the one before it.
#[derive(Debug)]
#[repr(C)]
pub(super) struct RequestQueue {
    tiers: Tiers,
    entries: Vec<QueuedRequest>,
    next_sequence: u64,
    /// Items, of all tiers.
    weight: u64,
    /// The entry that was vacated last, the first of a list through the vacant entries; or `NONE`.
    vacant: u32,
    /// Requests whose size is not 1.
    sized: u32,
    /// The order of arrival, if it is kept.
    arrivals: Option<Arrivals>,
    /// By entry: when the request needs attention on its own.
    timers: IndexedHeap<Time>,
}

/// The tiers of a queue. The first holds nearly all requests, so it has its place in the queue
/// itself.
#[derive(Debug)]
#[repr(C)]
struct Tiers {
    first: Tier,
    others: Box<[Tier]>,
}

#[derive(Debug)]
#[repr(C)]
struct Tier {
    /// The first and the last entry of the line; `NONE` if it is empty.
    first: u32,
    last: u32,
    /// Items.
    weight: u64,
    /// The latest deadline that entered since the tier was empty.
    last_deadline: Time,
    /// The tier's priority level.
    level: PriorityLevel,
    /// By entry: `(deadline, sequence)` of the requests that are not in line.
    strays: IndexedHeap<(Time, u64)>,
}

/// Requests in order of arrival, each with its entry and its sequence number. The first one waits;
/// of the others some may have left.
#[derive(Debug, Default)]
struct Arrivals(VecDeque<(u32, u64)>);

/// A request that waits: one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct QueuedRequest {
    pub id: RequestId,
    pub deadline: Time,
    pub arrival: Time,
    queue_expiry: Time,
    /// When a timer must report that the request cannot meet its deadline; `Time::MAX`: no timer is
    /// needed.
    hopeless_at: Time,
    /// [`VACANT`] once the request has left.
    sequence: u64,
    pub size: u32,
    tier: u32,
    /// The entry before the request in line, or `NONE`; `STRAY` if the request is not in line.
    before: u32,
    /// The entry after the request in line, or `NONE`. In a vacant entry: the entry that was
    /// vacated before.
    after: u32,
}

/// The sequence number of an entry without a request.
const VACANT: u64 = u64::MAX;
/// No entry.
const NONE: u32 = u32::MAX;
/// The value of `before` in a request that is not in line.
const STRAY: u32 = u32::MAX - 1;
/// How many places before the end of its line a request may enter: enough for deadlines that jitter
/// by a few gaps between arrivals.
const NEAR_END: usize = 4;

/// Why a request needs attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Due {
    Hopeless(Ticket),
    /// The level's action is [`TimeoutAction::Reject`].
    Expired(Ticket),
    /// The level's action is [`TimeoutAction::Delay`], and the request has moved behind the others.
    Delayed,
}

impl RequestQueue {
    /// An empty queue. Without any level, it has one level without a bound.
    pub fn new(mut levels: Vec<PriorityLevel>) -> Self {
        if levels.is_empty() {
            levels.push(PriorityLevel { max_queue: u32::MAX, timeout_action: TimeoutAction::Reject });
        }
        let tier = |level| Tier {
            first: NONE,
            last: NONE,
            weight: 0,
            last_deadline: Time::ZERO,
            level,
            strays: IndexedHeap::new(),
        };
        let others = levels.iter().flat_map(|level| [*level; 2]).skip(1);
        RequestQueue {
            tiers: Tiers { first: tier(levels[0]), others: others.map(tier).collect() },
            entries: Vec::new(),
            next_sequence: 0,
            weight: 0,
            vacant: NONE,
            sized: 0,
            arrivals: None,
            timers: IndexedHeap::new(),
        }
    }

    /// Items, of all levels.
    pub fn weight(&self) -> u64 {
        self.weight
    }

    /// Whether every request is one item.
    pub fn unsized_only(&self) -> bool {
        self.sized == 0
    }

    /// The bound of a level, if there is such a level.
    pub fn bound(&self, level: u32) -> Option<u32> {
        let tier = level as usize * 2;
        (tier < self.tiers.len()).then(|| self.tiers[tier].level.max_queue)
    }

    /// Whether `size` more items are within the bound of the level.
    pub fn has_room(&self, level: u32, size: u32) -> bool {
        let Some(bound) = self.bound(level) else { return false };
        if bound == u32::MAX {
            return true;
        }
        let tier = level as usize * 2;
        let weight = self.tiers[tier].weight + self.tiers[tier + 1].weight;
        weight + u64::from(size) <= u64::from(bound)
    }

    /// Adds a request of an existing level. [`RequestQueue::pop_due`] reports the request at
    /// `hopeless_at`.
    pub fn push(&mut self, now: Time, request: &Request, hopeless_at: Time) -> Ticket {
        let Request { id, model: _, deadline, queue_expiry, level, size } = *request;
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let waiting = QueuedRequest {
            id,
            deadline,
            arrival: now,
            queue_expiry,
            hopeless_at,
            sequence,
            size,
            tier: level * 2,
            before: NONE,
            after: NONE,
        };
        let index = self.occupy(waiting);
        self.enter(index);
        self.sized += u32::from(size != 1);
        self.weight += u64::from(size);
        if waiting.timer() != Time::MAX {
            self.timers.set(index, waiting.timer());
        }
        Ticket { index, sequence }
    }

    /// Whether [`RequestQueue::push_last`] may add a request with this deadline.
    #[inline(always)]
    pub fn takes_last(&self, deadline: Time) -> bool {
        let Tier { weight, last_deadline, level, .. } = &self.tiers.first;
        (*weight == 0 || *last_deadline <= deadline) && level.max_queue == u32::MAX
    }

    /// [`RequestQueue::push`] of a request of one item and without a timer at the end of the first
    /// tier.
    #[inline(always)]
    pub fn push_last(&mut self, now: Time, id: RequestId, deadline: Time) -> Ticket {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.weight += 1;
        let tier = &mut self.tiers.first;
        (tier.weight, tier.last_deadline) = (tier.weight + 1, deadline);
        let (before, never) = (tier.last, Time::MAX);
        let index = self.occupy(QueuedRequest {
            id,
            deadline,
            arrival: now,
            queue_expiry: never,
            hopeless_at: never,
            sequence,
            size: 1,
            tier: 0,
            before,
            after: NONE,
        });
        self.tiers.first.last = index;
        match before {
            NONE => self.tiers.first.first = index,
            before => self.entries[before as usize].after = index,
        }
        Ticket { index, sequence }
    }

    /// Puts a request into the entry that was vacated last, or into a new entry.
    #[inline(always)]
    fn occupy(&mut self, waiting: QueuedRequest) -> u32 {
        let mut index = self.vacant;
        match self.entries.get_mut(index as usize) {
            Some(vacant) => {
                self.vacant = vacant.after;
                *vacant = waiting;
            }
            None => index = self.add_entry(waiting),
        }
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.add(index, waiting.sequence, &self.entries);
        }
        index
    }

    #[cold]
    fn add_entry(&mut self, waiting: QueuedRequest) -> u32 {
        let index = self.entries.len() as u32;
        assert!(index < STRAY, "entries are counted in 32 bits");
        self.entries.push(waiting);
        index
    }

    /// Whether the ticket's request still waits.
    pub fn holds(&self, ticket: Ticket) -> bool {
        let Ticket { index, sequence } = ticket;
        sequence != VACANT && self.entries.get(index as usize).is_some_and(|waiting| waiting.sequence == sequence)
    }

    /// Takes a request out, if it still waits.
    pub fn remove(&mut self, ticket: Ticket) -> Option<QueuedRequest> {
        let Ticket { index, sequence } = ticket;
        let waiting =
            *self.entries.get(index as usize).filter(|waiting| waiting.sequence == sequence && sequence != VACANT)?;
        self.leave(index);
        self.vacate(index);
        Some(waiting)
    }

    /// Takes requests from the head of a tier for as long as they fit into `room` items, and
    /// appends them to `members`. Returns the remaining room.
    pub fn pop_into(&mut self, tier: usize, mut room: u32, members: &mut Vec<RequestId>) -> u32 {
        if self.sized == 0 && self.timers.is_empty() && self.tiers[tier].strays.is_empty() {
            return self.pop_line(tier, room, members);
        }
        while let Some(index) = self.head_index(tier) {
            let QueuedRequest { id, size, .. } = self.entries[index as usize];
            if size > room {
                break;
            }
            room -= size;
            members.push(id);
            self.leave(index);
            self.vacate(index);
        }
        room
    }

    /// [`RequestQueue::pop_into`] for a tier that is only a line of requests of one item without
    /// timers. It walks the line once, and sets its ends once.
    fn pop_line(&mut self, tier: usize, room: u32, members: &mut Vec<RequestId>) -> u32 {
        let tier = &mut self.tiers[tier];
        let mut left = room;
        members.reserve(room.min(u32::try_from(tier.weight).unwrap_or(u32::MAX)) as usize);
        let mut first = tier.first;
        while left > 0
            && let Some(waiting) = self.entries.get_mut(first as usize)
        {
            members.push(waiting.id);
            waiting.sequence = VACANT;
            let after = std::mem::replace(&mut waiting.after, self.vacant);
            self.vacant = std::mem::replace(&mut first, after);
            left -= 1;
        }
        tier.first = first;
        match self.entries.get_mut(first as usize) {
            Some(waiting) => waiting.before = NONE,
            None => tier.last = NONE,
        }
        tier.weight -= u64::from(room - left);
        self.weight -= u64::from(room - left);
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.forget_left(&self.entries);
        }
        left
    }

    pub fn tiers(&self) -> std::ops::Range<usize> {
        0..self.tiers.len()
    }

    /// Whether `request` would join the end of a tier that is not empty, and need no timer. The
    /// request must have no timer other than for its `queue_expiry`.
    pub fn joins_end(&self, request: &Request) -> bool {
        let tier = &self.tiers[request.level as usize * 2];
        request.queue_expiry == Time::MAX && tier.weight > 0 && tier.last_deadline <= request.deadline
    }

    /// Items of a tier.
    pub fn tier_weight(&self, tier: usize) -> u64 {
        self.tiers[tier].weight
    }

    /// No request of the tier has a later deadline.
    pub fn last_deadline(&self, tier: usize) -> Time {
        self.tiers[tier].last_deadline
    }

    /// The deadline of the `n`th request of a tier from its end; `n = 1` is the last request.
    /// `None` if there are fewer requests, or if there are strays, which would make this a search.
    /// `O(n)`.
    pub fn deadline_from_end(&self, tier: usize, n: u32) -> Option<Time> {
        let Tier { last, strays, .. } = &self.tiers[tier];
        let mut waiting = self.entries.get(*last as usize).filter(|_| strays.is_empty())?;
        for _ in 1..n {
            waiting = self.entries.get(waiting.before as usize)?;
        }
        Some(waiting.deadline)
    }

    /// The head of a tier: the earliest deadline.
    pub fn head(&self, tier: usize) -> Option<&QueuedRequest> {
        self.head_index(tier).map(|index| &self.entries[index as usize])
    }

    /// The first request of a tier that is due at `from` or later, and the items of the requests
    /// before it. `O(n)` in the number of requests before it.
    pub fn head_from(&self, tier: usize, from: Time) -> Option<(&QueuedRequest, u64)> {
        let Tier { first, strays, .. } = &self.tiers[tier];
        let mut weight = 0;
        let stray = strays.visit_below((from, 0), |index| weight += u64::from(self.entries[index as usize].size));
        let mut in_line = self.entries.get(*first as usize);
        while let Some(waiting) = in_line
            && waiting.deadline < from
        {
            weight += u64::from(waiting.size);
            in_line = self.entries.get(waiting.after as usize);
        }
        let stray = stray.map(|(_, index)| &self.entries[index as usize]);
        let first = match (in_line, stray) {
            (Some(a), Some(b)) => Some(if (a.deadline, a.sequence) < (b.deadline, b.sequence) { a } else { b }),
            (a, b) => a.or(b),
        };
        first.map(|waiting| (waiting, weight))
    }

    /// The ticket of the head of a tier.
    pub fn head_ticket(&self, tier: usize) -> Option<Ticket> {
        self.head_index(tier).map(|index| self.ticket(index))
    }

    /// Items of the request in an entry.
    pub fn size(&self, index: u32) -> u32 {
        self.entries[index as usize].size
    }

    /// Hides the head of a tier, so that the next request becomes the head. Returns the hidden
    /// entry for [`RequestQueue::put_back`].
    pub fn set_aside(&mut self, tier: usize) -> Option<u32> {
        let index = self.head_index(tier)?;
        self.unlink(index);
        Some(index)
    }

    /// Hides the requests of a tier that are due before `from`.
    pub fn set_aside_before(&mut self, tier: usize, from: Time, aside: &mut Vec<u32>) {
        while self.head(tier).is_some_and(|head| head.deadline < from) {
            aside.extend(self.set_aside(tier));
        }
    }

    /// Puts requests back into their places. `aside` must be in the order in which they were set
    /// aside.
    pub fn put_back(&mut self, aside: &[u32]) {
        // Backwards, so that each request that was in line was its first.
        for &index in aside.iter().rev() {
            let QueuedRequest { deadline, sequence, tier, before, .. } = self.entries[index as usize];
            let tier = &mut self.tiers[tier as usize];
            if before == STRAY {
                tier.strays.set(index, (deadline, sequence));
                continue;
            }
            let after = std::mem::replace(&mut tier.first, index);
            match after {
                NONE => tier.last = index,
                after => self.entries[after as usize].before = index,
            }
            self.entries[index as usize].after = after;
        }
    }

    /// When [`RequestQueue::pop_due`] will next report a request.
    pub fn next_due(&self) -> Option<Time> {
        self.timers.peek().map(|(at, _)| at)
    }

    /// When the next request is lost for having waited too long (or for being hopeless, if that
    /// comes first).
    pub fn next_rejection(&self) -> Option<Time> {
        let (at, index) = self.timers.peek()?;
        let tier = self.entries[index as usize].tier as usize;
        (self.tiers[tier].level.timeout_action == TimeoutAction::Reject).then_some(at)
    }

    /// The next request whose own timer is due, and the reason.
    pub fn pop_due(&mut self, now: Time) -> Option<Due> {
        let (_, index) = self.timers.peek().filter(|(at, _)| *at <= now)?;
        let QueuedRequest { queue_expiry, hopeless_at, tier, .. } = self.entries[index as usize];
        if hopeless_at <= now {
            return Some(Due::Hopeless(self.ticket(index)));
        }
        assert!(queue_expiry <= now, "a request's timer is set for one of two reasons");
        match self.tiers[tier as usize].level.timeout_action {
            TimeoutAction::Reject => Some(Due::Expired(self.ticket(index))),
            TimeoutAction::Delay => {
                self.delay(index);
                Some(Due::Delayed)
            }
        }
    }

    /// Sets every request's `hopeless_at` anew.
    pub fn set_hopeless(&mut self, hopeless_at: impl Fn(&QueuedRequest) -> Time) {
        for index in self.occupied() {
            let waiting = &mut self.entries[index as usize];
            waiting.hopeless_at = hopeless_at(waiting);
            self.set_timer(index);
        }
    }

    /// Sets whether the order of arrival is kept.
    pub fn keep_arrivals(&mut self, keep: bool) {
        self.arrivals = keep.then(|| {
            let mut arrivals: Vec<_> =
                self.occupied().into_iter().map(|index| (index, self.entries[index as usize].sequence)).collect();
            arrivals.sort_unstable_by_key(|(_, sequence)| *sequence);
            Arrivals(arrivals.into())
        });
    }

    /// The first arrival, if the order is kept.
    pub fn first_arrival(&self) -> Option<Time> {
        let (index, _) = self.arrivals.as_ref()?.0.front()?;
        Some(self.entries[*index as usize].arrival)
    }

    /// The entries in use, in arbitrary order.
    fn occupied(&self) -> Vec<u32> {
        (0..self.entries.len() as u32).filter(|index| self.entries[*index as usize].sequence != VACANT).collect()
    }

    fn ticket(&self, index: u32) -> Ticket {
        Ticket { index, sequence: self.entries[index as usize].sequence }
    }

    fn head_index(&self, tier: usize) -> Option<u32> {
        let tier = &self.tiers[tier];
        let Some((stray, index)) = tier.strays.peek() else {
            return (tier.first != NONE).then_some(tier.first);
        };
        match self.entries.get(tier.first as usize) {
            Some(first) if (first.deadline, first.sequence) < stray => Some(tier.first),
            _ => Some(index),
        }
    }

    /// Puts a request into its tier.
    fn enter(&mut self, index: u32) {
        let QueuedRequest { deadline, sequence, size, tier, .. } = self.entries[index as usize];
        let tier = &mut self.tiers[tier as usize];
        tier.last_deadline = if tier.weight == 0 { deadline } else { tier.last_deadline.max(deadline) };
        tier.weight += u64::from(size);
        let (mut before, mut after) = (tier.last, NONE);
        for _ in 0..NEAR_END {
            let Some(QueuedRequest { deadline: d, sequence: s, before: further, .. }) =
                self.entries.get(before as usize)
            else {
                break;
            };
            if (*d, *s) < (deadline, sequence) {
                break;
            }
            (before, after) = (*further, before);
        }
        if let Some(QueuedRequest { deadline: d, sequence: s, .. }) = self.entries.get(before as usize)
            && (*d, *s) > (deadline, sequence)
        {
            tier.strays.set(index, (deadline, sequence));
            self.entries[index as usize].before = STRAY;
            return;
        }
        match before {
            NONE => tier.first = index,
            before => self.entries[before as usize].after = index,
        }
        match after {
            NONE => tier.last = index,
            after => self.entries[after as usize].before = index,
        }
        let waiting = &mut self.entries[index as usize];
        (waiting.before, waiting.after) = (before, after);
    }

    /// Takes a request out of its tier.
    fn leave(&mut self, index: u32) {
        let QueuedRequest { tier, size, .. } = self.entries[index as usize];
        self.tiers[tier as usize].weight -= u64::from(size);
        self.unlink(index);
    }

    /// Takes a request out of its tier's order.
    fn unlink(&mut self, index: u32) {
        let QueuedRequest { tier, before, after, .. } = self.entries[index as usize];
        let tier = &mut self.tiers[tier as usize];
        match before {
            STRAY => {
                tier.strays.remove(index);
                return;
            }
            NONE => tier.first = after,
            before => self.entries[before as usize].after = after,
        }
        match after {
            NONE => tier.last = before,
            after => self.entries[after as usize].before = before,
        }
    }

    /// Gives up the entry of a request that has left its tier.
    fn vacate(&mut self, index: u32) {
        let waiting = &mut self.entries[index as usize];
        waiting.sequence = VACANT;
        self.weight -= u64::from(waiting.size);
        self.sized -= u32::from(waiting.size != 1);
        waiting.after = std::mem::replace(&mut self.vacant, index);
        if waiting.timer() != Time::MAX {
            self.timers.remove(index);
        }
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.forget_left(&self.entries);
        }
    }

    /// Moves a request behind all others of its level.
    fn delay(&mut self, index: u32) {
        self.leave(index);
        let waiting = &mut self.entries[index as usize];
        assert!(waiting.tier.is_multiple_of(2), "a request is delayed once");
        waiting.tier += 1;
        waiting.queue_expiry = Time::MAX;
        self.enter(index);
        self.set_timer(index);
    }

    fn set_timer(&mut self, index: u32) {
        match self.entries[index as usize].timer() {
            Time::MAX => {
                self.timers.remove(index);
            }
            at => self.timers.set(index, at),
        }
    }
}

impl Tiers {
    fn len(&self) -> usize {
        1 + self.others.len()
    }
}

impl Index<usize> for Tiers {
    type Output = Tier;

    #[inline(always)]
    fn index(&self, tier: usize) -> &Tier {
        if tier == 0 { &self.first } else { &self.others[tier - 1] }
    }
}

impl IndexMut<usize> for Tiers {
    #[inline(always)]
    fn index_mut(&mut self, tier: usize) -> &mut Tier {
        if tier == 0 { &mut self.first } else { &mut self.others[tier - 1] }
    }
}

impl Arrivals {
    /// Adds the request that came last.
    fn add(&mut self, index: u32, sequence: u64, entries: &[QueuedRequest]) {
        // The clean-up keeps at most as many as there are entries. It thus costs no more than the
        // arrivals since the last clean-up.
        if self.0.len() > 2 * entries.len() {
            self.0.retain(|(index, sequence)| entries[*index as usize].sequence == *sequence);
        }
        self.0.push_back((index, sequence));
    }

    /// Removes requests from the front until the first one waits.
    fn forget_left(&mut self, entries: &[QueuedRequest]) {
        while let Some((index, sequence)) = self.0.front()
            && entries[*index as usize].sequence != *sequence
        {
            self.0.pop_front();
        }
    }
}

impl QueuedRequest {
    /// When the request's timer fires; `Time::MAX`: never.
    fn timer(&self) -> Time {
        self.queue_expiry.min(self.hopeless_at)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::ids::ModelId;

    #[derive(Clone, Debug)]
    enum Step {
        Push { deadline: u64, size: u32 },
        Remove(usize),
        Look(usize),
        PopInto(u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        // Queues of requests of one item have ways of their own.
        prop_oneof![Just(2u32), Just(4u32)].prop_flat_map(steps_below)
    }

    fn steps_below(size: u32) -> impl Strategy<Value = Vec<Step>> {
        // Mostly in order, some a little out of order, some far out of order, and some without a
        // deadline.
        let deadline = prop_oneof![8 => 90..100u64, 2 => 0..100u64, 1 => Just(u64::MAX)];
        let step = prop_oneof![
            8 => (deadline, 1..size).prop_map(|(deadline, size)| Step::Push { deadline, size }),
            2 => any::<usize>().prop_map(Step::Remove),
            1 => (0..9usize).prop_map(Step::Look),
            1 => (0..12u32).prop_map(Step::PopInto),
        ];
        prop::collection::vec(step, 0..200)
    }

    fn request(id: u64, deadline: Time, size: u32) -> Request {
        Request { id: RequestId(id), model: ModelId(0), deadline, queue_expiry: Time::MAX, level: 0, size }
    }

    proptest! {
        /// A sorted map gives the same heads and the same first arrival after any operation, for
        /// requests in line and for strays.
        #[test]
        fn is_served_in_order_of_deadline_and_arrival(steps in steps()) {
            let mut queue = RequestQueue::new(Vec::new());
            queue.keep_arrivals(true);
            let mut map: BTreeMap<(Time, u64), (Ticket, u32)> = BTreeMap::new();
            let mut tickets = Vec::new();
            for (number, step) in (0u64..).zip(steps) {
                match step {
                    Step::Push { deadline, size } => {
                        // Deadlines wander on with time.
                        let deadline = Time::from_nanos(deadline.saturating_add(number * 3));
                        let now = Time::from_nanos(number);
                        let ticket = if size == 1 && queue.takes_last(deadline) {
                            queue.push_last(now, RequestId(number), deadline)
                        } else {
                            queue.push(now, &request(number, deadline, size), Time::MAX)
                        };
                        map.insert((deadline, number), (ticket, size));
                        tickets.push(ticket);
                    }
                    Step::Remove(n) => {
                        let Some(&ticket) = tickets.get(n % tickets.len().max(1)) else { continue };
                        let key = map.iter().find(|(_, (t, _))| *t == ticket).map(|(key, _)| *key);
                        let removed = queue.remove(ticket).map(|waiting| (waiting.deadline, waiting.id.0));
                        prop_assert_eq!(removed, key);
                        key.and_then(|key| map.remove(&key));
                    }
                    Step::Look(depth) => {
                        let aside: Vec<u32> = (0..depth).map_while(|_| queue.set_aside(0)).collect();
                        prop_assert_eq!(aside.len(), depth.min(map.len()));
                        prop_assert_eq!(queue.head(0).map(|head| head.id.0), map.keys().nth(depth).map(|key| key.1));
                        queue.put_back(&aside);
                    }
                    Step::PopInto(room) => {
                        let (mut members, mut expected, mut left) = (Vec::new(), Vec::new(), room);
                        let rest = queue.pop_into(0, room, &mut members);
                        while let Some(entry) = map.first_entry().filter(|entry| entry.get().1 <= left) {
                            left -= entry.get().1;
                            expected.push(RequestId(entry.remove_entry().0.1));
                        }
                        prop_assert_eq!((members, rest), (expected, left));
                    }
                }
                prop_assert_eq!(queue.head(0).map(|head| (head.deadline, head.id.0)), map.keys().next().copied());
                let first = map.keys().map(|(_, number)| Time::from_nanos(*number)).min();
                prop_assert_eq!(queue.first_arrival(), first);
                prop_assert_eq!(queue.weight(), map.values().map(|(_, size)| u64::from(*size)).sum::<u64>());
            }
        }
    }

    /// A far deadline at the end of the line makes strays of all later requests. The strays are
    /// still served first.
    #[test]
    fn a_patient_request_does_not_stand_in_the_way() {
        let mut queue = RequestQueue::new(Vec::new());
        queue.push(Time::ZERO, &request(0, Time::MAX, 1), Time::MAX);
        for id in 1..50 {
            queue.push(Time::ZERO, &request(id, Time::from_nanos(id), 1), Time::MAX);
        }
        let mut members = Vec::new();
        assert_eq!(queue.pop_into(0, 60, &mut members), 10);
        let expected: Vec<RequestId> = (1..50).chain([0]).map(RequestId).collect();
        assert_eq!(members, expected);
    }
}
