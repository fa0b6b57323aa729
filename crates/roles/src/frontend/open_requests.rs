//! The requests of a frontend that have not ended, each with its place.

use std::collections::BTreeMap;

use super::expiries::Expiries;
use super::numbered::Numbered;
use crate::epoch::Epoch;
use crate::message::{BatchKey, HandedIn, NodeId, QueueAlias, QueueKey};
use crate::queue_names::GivenNames;
use downbeat_core::ids::BatchId;
use downbeat_core::time::{Duration, Time};

/// A request of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewRequest<P> {
    /// The queue that the request joins.
    pub queue: QueueKey,
    /// The request's tensors.
    pub payload: P,
    /// When the client needs the answer; `Time::MAX`: at any time.
    pub deadline: Time,
    /// Until when the request may wait in a queue; `Time::MAX`: for ever.
    pub queue_expiry: Time,
    /// The request's priority level, 0 the highest.
    pub level: u32,
    /// Items in the request.
    pub size: u32,
}

impl<P> NewRequest<P> {
    /// The same request with other tensors.
    pub(super) fn map<Q>(self, with: impl FnOnce(P) -> Q) -> NewRequest<Q> {
        let NewRequest { queue, payload, deadline, queue_expiry, level, size } = self;
        NewRequest { queue, payload: with(payload), deadline, queue_expiry, level, size }
    }
}

/// The way of a request that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Way {
    /// How often the request came back without a run.
    pub returned: u8,
    /// How many backends were lost that had the request.
    pub lost: u8,
    /// The backend of the last claim that was granted, its batch, and when.
    pub claim: Option<(NodeId, BatchKey, Time)>,
}

/// The name of no batch: less than all names of batches.
const NO_BATCH: BatchKey = BatchKey { epoch: Epoch::NONE, batch: BatchId(0) };

/// The place of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// The frontend has the request: no scheduler leads, or the frontend is about to hand the
    /// request in.
    Here,
    /// The leader has the request.
    HandedIn,
    /// The leader has planned the request in this batch of a backend whose link is not up. The inputs
    /// go once the link is. Until then the request is the leader's.
    Planned(NodeId, BatchKey),
    /// This batch of this backend has claimed the request.
    Claimed(NodeId, BatchKey),
}

/// A request that has not ended.
#[derive(Clone, Debug)]
pub(super) struct Open<P> {
    /// The request's tensors; `None`: they are not ready yet.
    pub payload: Option<P>,
    /// When the tensors are expected, if they are not ready yet.
    pub ready_at: Time,
    pub deadline: Time,
    pub place: Place,
    /// How many backends had the request and were lost.
    pub tried: u8,
    /// How often the request came back without a run.
    pub returned: u8,
    /// When the request first came back without a run, if it did.
    pub first_returned: Time,
    /// The last batch that gave the request back. This batch and earlier ones cannot claim it again.
    pub given_back: BatchKey,
    /// The backend of the last claim that was granted, its batch, and when; [`NO_BATCH`]: there was none.
    pub claimed: (NodeId, BatchKey, Time),
    queue: QueueAlias,
    queue_expiry: Time,
    level: u32,
    size: u32,
    /// Whether the request is among the expiries.
    is_watched: bool,
    /// Whether streamed answers have come.
    pub streamed: Streamed,
}

/// How many streamed answers to a request have come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Streamed {
    /// No answer has come.
    None,
    /// Some answers have come. The request must not run again.
    Some,
    /// The last answer has come.
    All,
}

impl<P> Open<P> {
    /// The request's way until now.
    pub fn way(&self) -> Way {
        let claim = Some(self.claimed).filter(|(_, batch, _)| *batch != NO_BATCH);
        Way { returned: self.returned, lost: self.tried, claim }
    }

    /// The backend whose batch has claimed the request.
    pub fn holder(&self) -> Option<NodeId> {
        match self.place {
            Place::Claimed(backend, _) => Some(backend),
            _ => None,
        }
    }

    /// Whether a backend has claimed the request and has its inputs.
    pub fn may_run_on(&self, backend: NodeId) -> bool {
        self.holder() == Some(backend) && self.payload.is_some()
    }

    /// The time left until the deadline; `Duration::MAX`: no deadline.
    pub fn left(&self, now: Time) -> Duration {
        left(now, self.deadline)
    }

    /// Whether the leader may hear of the request.
    fn may_hand_in(&self, now: Time) -> bool {
        self.place == Place::Here && (self.payload.is_some() || self.ready_at > now)
    }
}

fn left(now: Time, at: Time) -> Duration {
    if at == Time::MAX { Duration::MAX } else { at.since(now) }
}

/// The requests of a frontend that have not ended. Memory and time are in proportion to their
/// number.
#[derive(Clone, Debug)]
pub(super) struct OpenRequests<P> {
    requests: Numbered<Open<P>>,
    names: GivenNames,
    expiries: Expiries,
}

impl<P> OpenRequests<P> {
    /// No requests.
    pub fn new() -> Self {
        OpenRequests { requests: Numbered::new(), names: GivenNames::new(), expiries: Expiries::new() }
    }

    /// The number of open requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Adds a request, whose place is [`Place::Here`], and returns its number. `ready_at`: when its
    /// tensors are expected, if they are not ready.
    pub fn add(&mut self, request: NewRequest<Option<P>>, ready_at: Time) -> u64 {
        let NewRequest { queue, payload, deadline, queue_expiry, level, size } = request;
        let (queue, place, is_watched) = (self.names.take(queue), Place::Here, false);
        let (tried, returned, given_back) = (0, 0, NO_BATCH);
        self.requests.push(Open {
            payload,
            ready_at,
            deadline,
            place,
            tried,
            returned,
            first_returned: Time::ZERO,
            given_back,
            claimed: (NodeId(0), NO_BATCH, Time::ZERO),
            queue,
            queue_expiry,
            level,
            size,
            is_watched,
            streamed: Streamed::None,
        })
    }

    /// The request of this number.
    pub fn get(&self, number: u64) -> Option<&Open<P>> {
        self.requests.get(number)
    }

    /// The request of this number, mutable.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut Open<P>> {
        self.requests.get_mut(number)
    }

    /// The queue that a request joins.
    pub fn queue(&self, open: &Open<P>) -> Option<&QueueKey> {
        self.names.key(open.queue)
    }

    /// Removes and returns the request of this number.
    pub fn remove(&mut self, number: u64) -> Option<Open<P>> {
        let open = self.requests.remove(number)?;
        self.names.give_back(open.queue);
        Some(open)
    }

    /// Takes back every request that no batch has claimed, after the link to the leader broke or
    /// the lead changed. Returns their numbers, oldest first.
    pub fn withdraw(&mut self) -> Vec<u64> {
        self.names.handle_new_link();
        let is_unclaimed =
            |(number, open): (u64, &Open<P>)| (!matches!(open.place, Place::Claimed(..))).then_some(number);
        let unclaimed: Vec<u64> = self.requests.iter().filter_map(is_unclaimed).collect();
        for number in &unclaimed {
            if let Some(open) = self.requests.get_mut(*number) {
                open.place = Place::Here;
            }
        }
        unclaimed
    }

    /// The requests that a backend's batches have claimed, oldest first.
    pub fn claimed_by(&self, backend: NodeId) -> Vec<u64> {
        let is_its = |(number, open): (u64, &Open<P>)| {
            matches!(open.place, Place::Claimed(of, _) if of == backend).then_some(number)
        };
        self.requests.iter().filter_map(is_its).collect()
    }

    /// The requests in batches of a backend whose link was not up, by batch.
    pub fn planned_for(&self, backend: NodeId) -> BTreeMap<BatchKey, Vec<u64>> {
        let mut planned: BTreeMap<BatchKey, Vec<u64>> = BTreeMap::new();
        for (number, open) in self.requests.iter() {
            if let Place::Planned(of, batch) = open.place
                && of == backend
            {
                planned.entry(batch).or_default().push(number);
            }
        }
        planned
    }

    /// Hands in a request whose place is [`Place::Here`]. Returns its metadata, and its queue if
    /// the leader has not yet heard of that queue. The method hands in no request whose tensors are overdue.
    pub fn hand_in(&mut self, now: Time, number: u64) -> Option<(HandedIn, Option<QueueKey>)> {
        let open = self.requests.get_mut(number).filter(|open| open.may_hand_in(now))?;
        open.place = Place::HandedIn;
        let (left, queue_left) = (open.left(now), left(now, open.queue_expiry));
        let ready_in = if open.payload.is_some() { Duration::ZERO } else { open.ready_at.since(now) };
        let Open { queue, level, size, tried, .. } = *open;
        Some((HandedIn { number, queue, left, queue_left, ready_in, level, size, tried }, self.names.tell(queue)))
    }

    /// Makes [`OpenRequests::expired`] return the request at `at`, unless the request is already
    /// watched.
    pub fn watch(&mut self, at: Time, number: u64) {
        let Some(open) = self.requests.get_mut(number).filter(|open| !open.is_watched && at < Time::MAX) else {
            return;
        };
        open.is_watched = true;
        self.expiries.insert(at, number);
        // Ended requests stay among the expiries until this sweep.
        if self.expiries.len() > 4 * self.requests.len() + 1024 {
            self.expiries.retain(|number| self.requests.get(number).is_some());
        }
    }

    /// The next group of requests that have expired by `now`; `None` when no more have.
    pub fn expired(&mut self, now: Time) -> Option<Vec<u64>> {
        let numbers = self.expiries.pop(now)?;
        for number in &numbers {
            if let Some(open) = self.requests.get_mut(*number) {
                open.is_watched = false;
            }
        }
        Some(numbers)
    }

    /// When [`OpenRequests::expired`] next returns requests.
    pub fn next_expiry(&self) -> Option<Time> {
        self.expiries.next()
    }
}
