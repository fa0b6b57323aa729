//! The leading scheduler's requests: the frontend and the place of each.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::message::{NodeId, QueueAlias, QueueKey, Refusal, RequestKey};
use downbeat_core::cluster::{Request, Ticket};
use downbeat_core::ids::{ModelId, RequestId};
use downbeat_core::time::Time;

/// The most requests of a scheduler, waiting and in batches. It refuses further ones.
pub(super) const MOST_REQUESTS: u32 = 1 << 22;
/// The most short names that a frontend may use.
pub(super) const MOST_ALIASES: u32 = 1 << 16;
/// The place of no queue.
const NO_QUEUE: u32 = u32::MAX;

/// The place of no frontend: the entry is vacant.
const NOBODY: u32 = u32::MAX;

/// The place of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// The request is in no queue, because no backend serves its model yet.
    Parked,
    /// The request is in no queue until this time, because its inputs are not ready.
    Coming(Time),
    /// The request is in the scheduler's queue of a model.
    Queued(ModelId, Ticket),
    /// The request is in a batch.
    Dispatched,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    number: u64,
    frontend: u32,
    place: Place,
    deadline: Time,
    queue_expiry: Time,
    level: u32,
}

/// A frontend that has requests with the scheduler.
#[derive(Debug)]
pub(super) struct Frontend {
    /// The frontend's node.
    pub node: NodeId,
    /// The address for backends' connections to the frontend.
    pub address: String,
    /// By alias: the queue that it stands for, and the place of that queue or `NO_QUEUE`.
    aliases: Vec<Option<(Arc<QueueKey>, u32)>>,
    /// By number: the entry that counts.
    by_number: BTreeMap<u64, u32>,
    /// Refusals to send to the frontend.
    pub refused: Vec<(u64, Refusal)>,
    /// The number of this frontend's entries.
    entries: u32,
    is_gone: bool,
}

/// The leading scheduler's requests. A request's [`RequestId`] is the place of its entry. Another
/// request gets the place once this one is over.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    entries: Vec<Entry>,
    vacant: Vec<u32>,
    frontends: Vec<Option<Frontend>>,
    /// Frontends whose links are up.
    by_node: BTreeMap<NodeId, u32>,
    /// Frontends with refusals to send.
    to_tell: Vec<u32>,
}

/// The result of handing a request in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Admitted {
    /// The request is new, or has left its batch.
    New(RequestId),
    /// The request already waits.
    Known,
    /// The scheduler has no room.
    Full,
}

impl Waiting {
    /// Adds a frontend whose link is up, and returns its place. An earlier frontend at the place
    /// has no entries left.
    pub fn handle_frontend(&mut self, node: NodeId, address: String) -> u32 {
        let new = Frontend {
            node,
            address,
            aliases: Vec::new(),
            by_number: BTreeMap::new(),
            refused: Vec::new(),
            entries: 0,
            is_gone: false,
        };
        let place = match self.frontends.iter().position(Option::is_none) {
            Some(place) => place,
            None => {
                self.frontends.push(None);
                self.frontends.len() - 1
            }
        };
        if let Some(vacant) = self.frontends.get_mut(place) {
            *vacant = Some(new);
        }
        self.by_node.insert(node, place as u32);
        place as u32
    }

    /// Removes a frontend whose link is lost. Returns its requests that are not in batches. The
    /// caller must take them out of their queues and give them to [`Waiting::end`].
    pub fn handle_frontend_lost(&mut self, node: NodeId) -> Vec<(RequestId, Place)> {
        let Some(place) = self.by_node.remove(&node) else { return Vec::new() };
        let Some(Some(frontend)) = self.frontends.get_mut(place as usize) else { return Vec::new() };
        frontend.is_gone = true;
        frontend.refused = Vec::new();
        let waits = |entry: &Entry| entry.frontend == place && entry.place != Place::Dispatched;
        let ids = if frontend.entries == 0 { 0 } else { self.entries.len() };
        let all = (0..).zip(self.entries.iter().take(ids));
        let waiting = all.filter(|(_, entry)| waits(entry)).map(|(id, entry)| (RequestId(id), entry.place)).collect();
        self.vacate_frontend(place);
        waiting
    }

    /// The place of a frontend whose link is up.
    pub fn place_of(&self, node: NodeId) -> Option<u32> {
        self.by_node.get(&node).copied()
    }

    /// The frontend at a place.
    pub fn frontend(&self, place: u32) -> Option<&Frontend> {
        self.frontends.get(place as usize)?.as_ref()
    }

    fn frontend_mut(&mut self, place: u32) -> Option<&mut Frontend> {
        self.frontends.get_mut(place as usize)?.as_mut()
    }

    /// Records the queue that a frontend's short name stands for. Returns false if the frontend
    /// uses too many names.
    pub fn set_alias(&mut self, frontend: u32, alias: QueueAlias, key: Arc<QueueKey>) -> bool {
        let Some(frontend) = self.frontend_mut(frontend) else { return false };
        if alias.0 >= MOST_ALIASES {
            return false;
        }
        let at = alias.0 as usize;
        if frontend.aliases.len() <= at {
            frontend.aliases.resize(at + 1, None);
        }
        frontend.aliases[at] = Some((key, NO_QUEUE));
        true
    }

    /// The queue that a frontend's alias stands for, and its place if that is known.
    pub fn named(&self, frontend: u32, alias: QueueAlias) -> Option<(&Arc<QueueKey>, Option<u32>)> {
        let (key, place) = self.frontend(frontend)?.aliases.get(alias.0 as usize)?.as_ref()?;
        Some((key, (*place != NO_QUEUE).then_some(*place)))
    }

    /// Records the place of the queue that a frontend's alias stands for.
    pub fn set_queue(&mut self, frontend: u32, alias: QueueAlias, place: u32) {
        let frontend = self.frontend_mut(frontend);
        if let Some(Some((_, known))) = frontend.and_then(|frontend| frontend.aliases.get_mut(alias.0 as usize)) {
            *known = place;
        }
    }

    /// Forgets the place of a queue.
    pub fn forget_queue(&mut self, place: u32) {
        let aliases = self.frontends.iter_mut().flatten().flat_map(|frontend| frontend.aliases.iter_mut().flatten());
        for (_, known) in aliases.filter(|(_, known)| *known == place) {
            *known = NO_QUEUE;
        }
    }

    /// Takes in a request that a frontend hands in, with its deadline, the end of its wait, and its
    /// level.
    pub fn admit(
        &mut self,
        frontend: u32,
        number: u64,
        (deadline, queue_expiry, level): (Time, Time, u32),
    ) -> Admitted {
        let Waiting { entries, vacant, frontends, .. } = self;
        let Some(Some(of)) = frontends.get_mut(frontend as usize) else { return Admitted::Full };
        let entry = Entry { number, frontend, place: Place::Parked, deadline, queue_expiry, level };
        let id = match vacant.last() {
            Some(id) => *id,
            None if entries.len() < MOST_REQUESTS as usize => entries.len() as u32,
            None => return Admitted::Full,
        };
        let known = of.by_number.entry(number).or_insert(id);
        if *known != id {
            if entries.get(*known as usize).is_some_and(|known| known.place != Place::Dispatched) {
                return Admitted::Known;
            }
            *known = id;
        }
        of.entries += 1;
        match entries.get_mut(id as usize) {
            Some(room) => {
                *room = entry;
                vacant.pop();
            }
            None => entries.push(entry),
        }
        Admitted::New(RequestId(u64::from(id)))
    }

    /// Sets the place of a request.
    pub fn set_place(&mut self, id: RequestId, place: Place) {
        if let Some(entry) = self.entries.get_mut(id.0 as usize) {
            entry.place = place;
        }
    }

    /// The place of a request's frontend, and that frontend's number for the request.
    pub fn owner(&self, id: RequestId) -> Option<(u32, u64)> {
        self.entries.get(id.0 as usize).map(|entry| (entry.frontend, entry.number))
    }

    /// A waiting request as its queue takes it in.
    pub fn request(&self, id: RequestId, model: ModelId, size: u32) -> Option<Request> {
        let Entry { deadline, queue_expiry, level, .. } = *self.entries.get(id.0 as usize)?;
        Some(Request { id, model, deadline, queue_expiry, level, size })
    }

    /// Whether a request's deadline has passed.
    pub fn is_late(&self, now: Time, id: RequestId) -> bool {
        self.entries.get(id.0 as usize).is_some_and(|entry| entry.deadline < now)
    }

    /// The cluster-wide name of a request.
    pub fn key(&self, id: RequestId) -> Option<RequestKey> {
        let (frontend, number) = self.owner(id)?;
        Some(RequestKey { frontend: self.frontend(frontend)?.node, number })
    }

    /// The names of a batch's members; and for each frontend that has members, their numbers.
    pub fn planned(&self, members: &[RequestId]) -> (Vec<RequestKey>, Vec<(NodeId, Vec<u64>)>) {
        let mut names = Vec::with_capacity(members.len());
        let mut claims: Vec<(NodeId, Vec<u64>)> = Vec::new();
        for name in members.iter().filter_map(|id| self.key(*id)) {
            names.push(name);
            match claims.iter_mut().find(|(frontend, _)| *frontend == name.frontend) {
                Some((_, numbers)) => numbers.push(name.number),
                None => claims.push((name.frontend, vec![name.number])),
            }
        }
        (names, claims)
    }

    /// The entry that counts of a frontend's request, and the request's place.
    pub fn find(&self, frontend: u32, number: u64) -> Option<(RequestId, Place)> {
        let id = *self.frontend(frontend)?.by_number.get(&number)?;
        Some((RequestId(id.into()), self.entries.get(id as usize)?.place))
    }

    /// Ends a request here. With a refusal, the scheduler tells the frontend, unless the frontend
    /// has already handed the request in anew.
    pub fn end(&mut self, id: RequestId, refusal: Option<Refusal>) {
        let Some(entry) = self.entries.get_mut(id.0 as usize).filter(|entry| entry.frontend != NOBODY) else { return };
        let (number, place) = (entry.number, std::mem::replace(&mut entry.frontend, NOBODY));
        self.vacant.push(id.0 as u32);
        let Some(Some(frontend)) = self.frontends.get_mut(place as usize) else { return };
        frontend.entries -= 1;
        let counts = frontend.by_number.get(&number).is_some_and(|known| u64::from(*known) == id.0);
        if counts {
            frontend.by_number.remove(&number);
            if let Some(refusal) = refusal {
                self.refuse(place, number, refusal);
            }
        }
        self.vacate_frontend(place);
    }

    /// Queues a refusal for a frontend.
    pub fn refuse(&mut self, place: u32, number: u64, refusal: Refusal) {
        let Some(Some(frontend)) = self.frontends.get_mut(place as usize) else { return };
        if frontend.is_gone {
            return;
        }
        if frontend.refused.is_empty() {
            self.to_tell.push(place);
        }
        frontend.refused.push((number, refusal));
    }

    /// The next frontend with refusals to send, and the refusals.
    pub fn poll_refused(&mut self) -> Option<(NodeId, Vec<(u64, Refusal)>)> {
        while let Some(place) = self.to_tell.pop() {
            if let Some(Some(frontend)) = self.frontends.get_mut(place as usize)
                && !frontend.refused.is_empty()
            {
                return Some((frontend.node, std::mem::take(&mut frontend.refused)));
            }
        }
        None
    }

    /// The number of requests with the scheduler.
    pub fn len(&self) -> usize {
        self.entries.len() - self.vacant.len()
    }

    fn vacate_frontend(&mut self, place: u32) {
        if let Some(vacant) = self.frontends.get_mut(place as usize)
            && vacant.as_ref().is_some_and(|frontend| frontend.is_gone && frontend.entries == 0)
        {
            *vacant = None;
        }
    }
}
