//! The requests of one model that wait, in the order in which they are served.

use super::indexed_heap::IndexedHeap;
use crate::ids::{ModelId, RequestId};
use crate::time::Time;

/// A request as the scheduler knows it: no payload, only what decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Chosen by the driver, for the driver: it comes back with the decision, and is not looked at.
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

/// Names a request that waits to the queue that it waits in, to cancel it. Never given out twice by a queue: a ticket of a request that
/// has left names nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ticket {
    slot: u32,
    /// Of the request, which no other of the queue has had: the generation of the slot.
    sequence: u64,
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

/// The requests of one model that wait, in the order in which they are served.
///
/// **Order.** All of a higher level before any of a lower one. A level is served in order of deadlines, equal deadlines in order of
/// arrival. Symphony's candidate is a prefix of the queue with `d` the earliest deadline in it; in deadline order that is
/// the head's, whatever the requests' own timeouts are, and if any order of the queue meets all deadlines with equal work, this
/// one does (earliest deadline first is optimal). In order of arrival one impatient request behind a patient one would shrink the
/// batch that both are in. With one SLO for all, both orders are the same. A request without a deadline comes after
/// all that have one; what protects it from waiting for ever is its `queue_expiry`, or a level of its own.
///
/// **Tiers.** A level is two tiers: the regular one, `2 * level`, and behind it those that were delayed, `2 * level + 1`.
///
/// **Cost.** `O(log n)` an operation; no allocation once the tables have grown.
#[derive(Debug)]
pub(super) struct RequestQueue {
    levels: Vec<PriorityLevel>,
    tiers: Vec<Tier>,
    slots: Vec<Waiting>,
    vacant: Vec<u32>,
    /// By slot: when the request needs attention on its own.
    timers: IndexedHeap<Time>,
    /// By slot: order of arrival, if it is kept.
    arrivals: Option<IndexedHeap<u64>>,
    /// Requests whose size is not 1.
    sized: u32,
    next_sequence: u64,
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

/// A request that waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub id: RequestId,
    pub deadline: Time,
    pub arrival: Time,
    pub size: u32,
    queue_expiry: Time,
    /// When it is certain not to meet its deadline, if that is to be told by its own timer; else `Time::MAX`.
    hopeless_at: Time,
    /// [`VACANT`] once it has left.
    sequence: u64,
    tier: u32,
}

/// The sequence number of a slot without a request.
const VACANT: u64 = u64::MAX;

/// Why a request needs attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Due {
    Hopeless(Ticket),
    /// Its level says [`TimeoutAction::Reject`].
    Expired(Ticket),
    /// Its level says [`TimeoutAction::Delay`], and it has gone behind the others.
    Delayed,
}

impl RequestQueue {
    /// An empty queue. No level at all is taken as one without a bound.
    pub fn new(mut levels: Vec<PriorityLevel>) -> Self {
        if levels.is_empty() {
            levels.push(PriorityLevel { max_queue: u32::MAX, timeout_action: TimeoutAction::Reject });
        }
        RequestQueue {
            tiers: (0..levels.len() * 2).map(|_| Tier::default()).collect(),
            levels,
            slots: Vec::new(),
            vacant: Vec::new(),
            timers: IndexedHeap::new(),
            arrivals: None,
            sized: 0,
            next_sequence: 0,
        }
    }

    /// Items, of all levels.
    pub fn weight(&self) -> u64 {
        self.tiers.iter().map(|tier| tier.weight).sum()
    }

    /// Whether every request is one item.
    pub fn unsized_only(&self) -> bool {
        self.sized == 0
    }

    /// The bound of a level, if there is such a level.
    pub fn bound(&self, level: u32) -> Option<u32> {
        self.levels.get(level as usize).map(|level| level.max_queue)
    }

    /// Whether `size` more items are within the bound of the level.
    pub fn has_room(&self, level: u32, size: u32) -> bool {
        let Some(bound) = self.bound(level) else { return false };
        let tier = level as usize * 2;
        let weight = self.tiers[tier].weight + self.tiers[tier + 1].weight;
        bound == u32::MAX || weight + u64::from(size) <= u64::from(bound)
    }

    /// Adds a request, of a level that is there. `hopeless_at` is told by [`RequestQueue::pop_due`].
    pub fn push(&mut self, now: Time, request: &Request, hopeless_at: Time) -> Ticket {
        let Request { id, model: _, deadline, queue_expiry, level, size } = *request;
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let tier = level * 2;
        let waiting = Waiting { id, deadline, arrival: now, size, queue_expiry, hopeless_at, sequence, tier };
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot as usize] = waiting;
                slot
            }
            None => {
                self.slots.push(waiting);
                self.slots.len() as u32 - 1
            }
        };
        self.tiers[tier as usize].enter(slot, &waiting);
        self.sized += u32::from(size != 1);
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.set(slot, sequence);
        }
        self.set_timer(slot);
        Ticket { slot, sequence }
    }

    /// Takes a request out, if it is there.
    pub fn remove(&mut self, ticket: Ticket) -> Option<Waiting> {
        let Ticket { slot, sequence } = ticket;
        let waiting = *self.slots.get(slot as usize).filter(|waiting| waiting.sequence == sequence)?;
        self.slots[slot as usize].sequence = VACANT;
        self.tiers[waiting.tier as usize].leave(slot, &waiting);
        self.sized -= u32::from(waiting.size != 1);
        self.timers.remove(slot);
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.remove(slot);
        }
        self.vacant.push(slot);
        Some(waiting)
    }

    /// Takes the head of a tier out.
    pub fn pop(&mut self, tier: usize) -> Option<Waiting> {
        self.remove(self.head_ticket(tier)?)
    }

    pub fn tiers(&self) -> std::ops::Range<usize> {
        0..self.tiers.len()
    }

    /// Items of a tier.
    pub fn tier_weight(&self, tier: usize) -> u64 {
        self.tiers[tier].weight
    }

    /// No request of the tier has a later deadline.
    pub fn last_deadline(&self, tier: usize) -> Time {
        self.tiers[tier].last_deadline
    }

    /// The head of a tier: the earliest deadline.
    pub fn head(&self, tier: usize) -> Option<&Waiting> {
        self.tiers[tier].order.peek().map(|(_, slot)| &self.slots[slot as usize])
    }

    /// The first of a tier among those that are due at `from` or later, with the items of those before it. `O(those before it)`.
    pub fn head_from(&self, tier: usize, from: Time) -> Option<(&Waiting, u64)> {
        let mut weight = 0;
        let first =
            self.tiers[tier].order.visit_below((from, 0), |slot| weight += u64::from(self.slots[slot as usize].size));
        first.map(|(_, slot)| (&self.slots[slot as usize], weight))
    }

    /// The name of the head of a tier.
    pub fn head_ticket(&self, tier: usize) -> Option<Ticket> {
        self.tiers[tier].order.peek().map(|(_, slot)| self.ticket(slot))
    }

    /// Items of the request in a slot.
    pub fn size(&self, slot: u32) -> u32 {
        self.slots[slot as usize].size
    }

    /// Hides the head of a tier from the order, to look at the next: its number for [`RequestQueue::put_back`].
    pub fn set_aside(&mut self, tier: usize) -> Option<u32> {
        self.tiers[tier].order.pop().map(|(_, slot)| slot)
    }

    /// Puts a request that was set aside back into its place.
    pub fn put_back(&mut self, slot: u32) -> Ticket {
        let Waiting { deadline, sequence, tier, .. } = self.slots[slot as usize];
        self.tiers[tier as usize].order.set(slot, (deadline, sequence));
        Ticket { slot, sequence }
    }

    /// When [`RequestQueue::pop_due`] will have something.
    pub fn next_due(&self) -> Option<Time> {
        self.timers.peek().map(|(at, _)| at)
    }

    /// When the next request is lost for having waited too long (or for being hopeless, if that comes first).
    pub fn next_rejection(&self) -> Option<Time> {
        let (at, slot) = self.timers.peek()?;
        let level = self.slots[slot as usize].tier as usize / 2;
        (self.levels[level].timeout_action == TimeoutAction::Reject).then_some(at)
    }

    /// The next request whose own timer is due, with what to do about it.
    pub fn pop_due(&mut self, now: Time) -> Option<Due> {
        let (_, slot) = self.timers.peek().filter(|(at, _)| *at <= now)?;
        let Waiting { queue_expiry, hopeless_at, tier, .. } = self.slots[slot as usize];
        if hopeless_at <= now {
            return Some(Due::Hopeless(self.ticket(slot)));
        }
        assert!(queue_expiry <= now, "a request's timer is set for one of two reasons");
        match self.levels[tier as usize / 2].timeout_action {
            TimeoutAction::Reject => Some(Due::Expired(self.ticket(slot))),
            TimeoutAction::Delay => {
                self.delay(slot);
                Some(Due::Delayed)
            }
        }
    }

    /// Sets every request's `hopeless_at` anew.
    pub fn set_hopeless(&mut self, hopeless_at: impl Fn(&Waiting) -> Time) {
        for slot in self.occupied() {
            let waiting = &mut self.slots[slot as usize];
            waiting.hopeless_at = hopeless_at(waiting);
            self.set_timer(slot);
        }
    }

    /// Keeps the order of arrival, or no longer.
    pub fn keep_arrivals(&mut self, keep: bool) {
        self.arrivals = keep.then(|| {
            let mut arrivals = IndexedHeap::new();
            for slot in self.occupied() {
                arrivals.set(slot, self.slots[slot as usize].sequence);
            }
            arrivals
        });
    }

    /// The first arrival, if the order is kept.
    pub fn first_arrival(&self) -> Option<Time> {
        let (_, slot) = self.arrivals.as_ref()?.peek()?;
        Some(self.slots[slot as usize].arrival)
    }

    /// The slots in use, in no order that means anything.
    fn occupied(&self) -> Vec<u32> {
        (0..self.slots.len() as u32).filter(|slot| self.slots[*slot as usize].sequence != VACANT).collect()
    }

    fn ticket(&self, slot: u32) -> Ticket {
        Ticket { slot, sequence: self.slots[slot as usize].sequence }
    }

    /// Moves a request behind all others of its level.
    fn delay(&mut self, slot: u32) {
        let waiting = &mut self.slots[slot as usize];
        let tier = waiting.tier as usize;
        assert!(tier.is_multiple_of(2), "a request is delayed once");
        self.tiers[tier].leave(slot, waiting);
        waiting.tier += 1;
        waiting.queue_expiry = Time::MAX;
        self.tiers[tier + 1].enter(slot, waiting);
        self.set_timer(slot);
    }

    fn set_timer(&mut self, slot: u32) {
        let Waiting { queue_expiry, hopeless_at, .. } = self.slots[slot as usize];
        match queue_expiry.min(hopeless_at) {
            Time::MAX => {
                self.timers.remove(slot);
            }
            at => self.timers.set(slot, at),
        }
    }
}

impl Tier {
    fn enter(&mut self, slot: u32, waiting: &Waiting) {
        let Waiting { deadline, sequence, size, .. } = *waiting;
        self.last_deadline = if self.order.is_empty() { deadline } else { self.last_deadline.max(deadline) };
        self.order.set(slot, (deadline, sequence));
        self.weight += u64::from(size);
    }

    fn leave(&mut self, slot: u32, waiting: &Waiting) {
        self.order.remove(slot);
        self.weight -= u64::from(waiting.size);
    }
}
