//! Requests of a frontend that have not ended, and where each is.

use super::expiries::Expiries;
use super::message::{BatchKey, HandedIn, NodeId, QueueAlias, QueueKey};
use super::numbered::Numbered;
use super::queue_names::GivenNames;
use crate::time::{Duration, Time};

/// A request of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewRequest<P> {
    /// Whose queue it joins.
    pub queue: QueueKey,
    /// Its tensors.
    pub payload: P,
    /// When it has to be answered; `Time::MAX`: at any time.
    pub deadline: Time,
    /// When it has waited in a queue for too long; `Time::MAX`: never.
    pub queue_expiry: Time,
    /// Priority level, 0 the highest.
    pub level: u32,
    /// Items.
    pub size: u32,
}

/// Where a request is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// Here: nobody leads, or it is about to be handed in.
    Here,
    /// The leader has been handed it.
    HandedIn,
    /// A batch of this backend has it.
    Claimed(NodeId, BatchKey),
}

/// A request that has not ended.
#[derive(Clone, Debug)]
pub(super) struct Open<P> {
    pub payload: P,
    pub deadline: Time,
    pub place: Place,
    /// Backends that had it and were lost.
    pub tried: u8,
    /// How often it came back and nobody had run it.
    pub returned: u8,
    queue: QueueAlias,
    queue_expiry: Time,
    level: u32,
    size: u32,
    /// It is among the expiries.
    is_watched: bool,
}

impl<P> Open<P> {
    /// What is left until its deadline; `Duration::MAX`: it has none.
    pub fn left(&self, now: Time) -> Duration {
        left(now, self.deadline)
    }
}

fn left(now: Time, at: Time) -> Duration {
    if at == Time::MAX { Duration::MAX } else { at.since(now) }
}

/// Requests of a frontend that have not ended. Whatever it takes is in proportion to how many there are.
#[derive(Clone, Debug)]
pub(super) struct OpenRequests<P> {
    requests: Numbered<Open<P>>,
    names: GivenNames,
    expiries: Expiries,
}

impl<P> OpenRequests<P> {
    /// None.
    pub fn new() -> Self {
        OpenRequests { requests: Numbered::new(), names: GivenNames::new(), expiries: Expiries::new() }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// One has come, and is here; its number.
    pub fn add(&mut self, request: NewRequest<P>) -> u64 {
        let NewRequest { queue, payload, deadline, queue_expiry, level, size } = request;
        let (queue, place, is_watched) = (self.names.take(queue), Place::Here, false);
        let (tried, returned) = (0, 0);
        let open = Open { payload, deadline, place, tried, returned, queue, queue_expiry, level, size, is_watched };
        self.requests.push(open)
    }

    /// The one of that number.
    pub fn get(&self, number: u64) -> Option<&Open<P>> {
        self.requests.get(number)
    }

    /// The one of that number.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut Open<P>> {
        self.requests.get_mut(number)
    }

    /// Whose queue it joins.
    pub fn queue(&self, open: &Open<P>) -> Option<&QueueKey> {
        self.names.key(open.queue)
    }

    /// Takes the one of that number out.
    pub fn remove(&mut self, number: u64) -> Option<Open<P>> {
        let open = self.requests.remove(number)?;
        self.names.give_back(open.queue);
        Some(open)
    }

    /// Whoever was handed requests has them no more: those that nobody has claimed are here, all of them, in order.
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

    /// Those that batches of a backend have, in order.
    pub fn claimed_by(&self, backend: NodeId) -> Vec<u64> {
        let is_its = |(number, open): (u64, &Open<P>)| {
            matches!(open.place, Place::Claimed(of, _) if of == backend).then_some(number)
        };
        self.requests.iter().filter_map(is_its).collect()
    }

    /// A request that is here is handed in: what is said of it, and before that of its queue.
    pub fn hand_in(&mut self, now: Time, number: u64) -> Option<(HandedIn, Option<QueueKey>)> {
        let open = self.requests.get_mut(number).filter(|open| open.place == Place::Here)?;
        open.place = Place::HandedIn;
        let (left, queue_left) = (open.left(now), left(now, open.queue_expiry));
        let Open { queue, level, size, tried, .. } = *open;
        Some((HandedIn { number, queue, left, queue_left, level, size, tried }, self.names.tell(queue)))
    }

    /// Has a request named by [`OpenRequests::expired`] at that time, unless it is to be named before.
    pub fn watch(&mut self, at: Time, number: u64) {
        let Some(open) = self.requests.get_mut(number).filter(|open| !open.is_watched && at < Time::MAX) else {
            return;
        };
        open.is_watched = true;
        self.expiries.insert(at, number);
        // Those that have ended stay among the expiries.
        if self.expiries.len() > 4 * self.requests.len() + 1024 {
            self.expiries.retain(|number| self.requests.get(number).is_some());
        }
    }

    /// Requests whose time has come, until there are no more.
    pub fn expired(&mut self, now: Time) -> Option<Vec<u64>> {
        let numbers = self.expiries.pop(now)?;
        for number in &numbers {
            if let Some(open) = self.requests.get_mut(*number) {
                open.is_watched = false;
            }
        }
        Some(numbers)
    }

    /// When to ask for these.
    pub fn next_expiry(&self) -> Option<Time> {
        self.expiries.next()
    }
}
