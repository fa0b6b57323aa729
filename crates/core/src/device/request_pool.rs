//! The requests of a device policy, from their arrival to their answer.

use std::collections::{BTreeMap, BTreeSet};

use super::input_ring::{InputRing, RingRun};
use super::note::Note;
use super::output::DeviceOutput;
use super::request::{DeviceDrop, DeviceReject, DeviceRequest};
use super::segment_profile::SegmentProfile;
use super::turn::{DeviceTimeout, Turn};
use crate::ids::{BatchId, LaunchId, RequestId};
use crate::time::{Duration, Time};

/// The requests of a device policy: the waiting ones, in the order of their arrival (E²bird §5.1),
/// and the running ones.
///
/// With a ring, an arriving request takes one neighbouring slot an item. The request is ready once
/// its input is in the slots. If the ring has no room, the request waits on the host, in order. The
/// pool's bound also limits these waiting requests. Without a ring each request is ready at once.
#[derive(Debug)]
pub struct RequestPool {
    ring: Option<InputRing>,
    bound: u32,
    /// The profile that judges deadlines; `None`: deadlines are not judged.
    judge: Option<SegmentProfile>,
    /// The waiting requests, by arrival.
    waiting: BTreeMap<u64, PooledRequest>,
    /// The arrival number of each waiting request.
    arrivals: BTreeMap<RequestId, u64>,
    /// The waiting requests with a deadline, by deadline.
    deadlines: BTreeSet<(Time, u64)>,
    /// With a ring: the arrival number from which on no request has slots. All earlier requests had
    /// slots.
    admitted: u64,
    /// The number of requests without slots.
    overflow: u32,
    /// The slots of requests that have gone while their inputs were on the way.
    abandoned: BTreeMap<RequestId, RingRun>,
    next: u64,
    rows: u32,
    ready_rows: u32,
    overflowed: u64,
    /// The items of each request in a launch.
    running: BTreeMap<RequestId, u32>,
    running_rows: u32,
    /// The running requests whose clients have gone.
    gone: BTreeSet<RequestId>,
}

/// A request that waits.
#[derive(Clone, Copy, Debug)]
pub struct PooledRequest {
    /// The request.
    pub request: DeviceRequest,
    /// When the request came.
    pub arrival: Time,
    /// The request's slots; `None`: there is no ring, or no room in it yet.
    pub slots: Option<RingRun>,
    /// Whether the request's input is on the device.
    pub ready: bool,
}

/// The items of a pool that wait or run, and the slots in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolStats {
    /// The items that wait for a launch.
    pub waiting: u32,
    /// The slots of the ring; 0: there is no ring.
    pub slots: u32,
    /// The slots in use.
    pub occupied: u32,
    /// The most slots that were in use at once.
    pub most_occupied: u32,
    /// The requests that ever found no room in the ring.
    pub overflowed: u64,
    /// The items in launches.
    pub running: u32,
}

impl PoolStats {
    /// The sums over both pools; `most_occupied` is the larger one.
    pub fn and(self, other: PoolStats) -> PoolStats {
        PoolStats {
            waiting: self.waiting.saturating_add(other.waiting),
            slots: self.slots.saturating_add(other.slots),
            occupied: self.occupied.saturating_add(other.occupied),
            most_occupied: self.most_occupied.max(other.most_occupied),
            overflowed: self.overflowed.saturating_add(other.overflowed),
            running: self.running.saturating_add(other.running),
        }
    }
}

impl RequestPool {
    /// An empty pool in which at most `bound` items wait. `slots` is the size of the ring; 0: there
    /// is no ring. With a `judge`, the pool refuses or gives up requests that would miss their
    /// deadline even alone, by this profile.
    pub fn new(bound: u32, slots: u32, judge: Option<SegmentProfile>) -> Self {
        RequestPool {
            judge,
            ring: (slots > 0).then(|| InputRing::new(slots)),
            bound,
            waiting: BTreeMap::new(),
            arrivals: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            admitted: 0,
            overflow: 0,
            abandoned: BTreeMap::new(),
            next: 0,
            rows: 0,
            ready_rows: 0,
            overflowed: 0,
            running: BTreeMap::new(),
            running_rows: 0,
            gone: BTreeSet::new(),
        }
    }

    /// The latency of a request alone. `None`: deadlines are not judged, or the request has none.
    fn needed(&self, request: &DeviceRequest) -> Option<Duration> {
        let judge = self.judge.as_ref().filter(|_| request.deadline != Time::MAX)?;
        Some(judge.total(request.size, request.length))
    }

    /// Accepts a request.
    ///
    /// # Errors
    /// If the deadline cannot be met, the request is empty, or it is larger than the ring or
    /// `largest`. Also if the pool is full, or has a request with this id.
    pub fn push(&mut self, turn: &mut Turn<'_>, request: &DeviceRequest, largest: u32) -> Result<(), DeviceReject> {
        let now = turn.now();
        if let Some(needed) = self.needed(request).filter(|needed| now + *needed > request.deadline) {
            return Err(DeviceReject::DeadlineImpossible { needed, allowed: request.deadline.since(now) });
        }
        let (size, id) = (request.size, request.id);
        if self.arrivals.contains_key(&id) || self.running.contains_key(&id) || self.abandoned.contains_key(&id) {
            return Err(DeviceReject::NameTaken(id));
        }
        if size == 0 {
            return Err(DeviceReject::Empty);
        }
        let largest = self.ring.as_ref().map_or(largest, |ring| largest.min(ring.slots()));
        if size > largest {
            return Err(DeviceReject::TooLarge { size, largest });
        }
        if size > self.bound.saturating_sub(self.rows) {
            return Err(DeviceReject::QueueFull { bound: self.bound });
        }
        let sequence = self.next;
        self.arrivals.insert(request.id, sequence);
        self.next += 1;
        self.rows += size;
        let ready = self.ring.is_none();
        self.ready_rows += if ready { size } else { 0 };
        self.waiting.insert(sequence, PooledRequest { request: *request, arrival: now, slots: None, ready });
        if request.deadline != Time::MAX {
            self.deadlines.insert((request.deadline, sequence));
        }
        if self.ring.is_some() {
            self.overflow += 1;
            self.admit(turn);
            if self.admitted <= sequence {
                self.overflowed += 1;
                turn.note(Note::RingFull { waiting: self.overflow });
            }
        }
        Ok(())
    }

    /// Gives slots to requests without any, oldest first.
    fn admit(&mut self, turn: &mut Turn<'_>) {
        let Some(ring) = &mut self.ring else { return };
        while let Some((sequence, waiting)) = self.waiting.range_mut(self.admitted..).next() {
            let Some(slots) = ring.allocate(waiting.request.size) else { return };
            waiting.slots = Some(slots);
            (self.admitted, self.overflow) = (sequence + 1, self.overflow - 1);
            turn.push(DeviceOutput::Admit { model: turn.model(), request: waiting.request.id, slots });
        }
    }

    /// Handles a request's input, which is in its slots now. Returns true if one more request is
    /// ready.
    pub fn mark_ready(&mut self, request: RequestId, turn: &mut Turn<'_>) -> bool {
        if let Some(slots) = self.abandoned.remove(&request) {
            self.release(slots, turn);
            return false;
        }
        let waiting = self.arrivals.get(&request).and_then(|sequence| self.waiting.get_mut(sequence));
        match waiting {
            Some(waiting) if !waiting.ready && waiting.slots.is_some() => {
                waiting.ready = true;
                self.ready_rows += waiting.request.size;
                true
            }
            _ => false,
        }
    }

    /// The waiting requests, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &PooledRequest> {
        self.waiting.values()
    }

    /// The oldest waiting request, ready or not.
    pub fn oldest(&self) -> Option<&PooledRequest> {
        self.waiting.values().next()
    }

    /// The ready requests before the first that is not ready, oldest first.
    pub fn ready(&self) -> impl Iterator<Item = &PooledRequest> {
        self.iter().take_while(|waiting| waiting.ready)
    }

    /// The largest length of the first `count` ready requests.
    pub fn longest(&self, count: usize) -> u32 {
        self.ready().take(count).map(|waiting| waiting.request.length).max().unwrap_or(0)
    }

    /// The items that wait.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// The items of ready requests.
    pub fn ready_rows(&self) -> u32 {
        self.ready_rows
    }

    /// The first ready requests that are neighbours in the ring, with at most `most` items. Returns
    /// the requests, their items, and their slots if there is a ring.
    pub fn neighbours(&self, most: u32) -> (Vec<RequestId>, u32, Option<RingRun>) {
        let (mut members, mut rows, mut run) = (Vec::new(), 0, None::<RingRun>);
        for waiting in self.ready() {
            let size = waiting.request.size;
            if rows + size > most {
                break;
            }
            if let (Some(ring), Some(slots)) = (&self.ring, waiting.slots) {
                match &mut run {
                    None => run = Some(slots),
                    Some(run) if ring.are_neighbours(*run, slots) => run.count += slots.count,
                    Some(_) => break,
                }
            }
            rows += size;
            members.push(waiting.request.id);
        }
        (members, rows, run)
    }

    /// Whether `next` begins in the ring where `run` ends.
    pub fn are_neighbours(&self, run: RingRun, next: RingRun) -> bool {
        self.ring.as_ref().is_some_and(|ring| ring.are_neighbours(run, next))
    }

    /// Takes a request into a launch. Its slots stay in use until [`RequestPool::release`].
    pub fn begin(&mut self, request: RequestId) -> Option<PooledRequest> {
        let waiting = self.take(request)?;
        self.running.insert(request, waiting.request.size);
        self.running_rows += waiting.request.size;
        Some(waiting)
    }

    /// Takes requests with `rows` items into a new batch. Returns the batch and its padded length,
    /// which is the longest request's.
    pub fn begin_batch(&mut self, turn: &mut Turn<'_>, members: &[RequestId], rows: u32) -> (BatchId, u32) {
        let taken = members.iter().filter_map(|request| self.begin(*request));
        let length = taken.map(|waiting| waiting.request.length).max().unwrap_or(0);
        let batch = turn.new_batch();
        turn.note(Note::New { batch, rows, length });
        (batch, length)
    }

    /// Ends a running request. It is answered with the outputs of `launch`, unless its client has
    /// gone. Returns its items.
    pub fn finish(&mut self, request: RequestId, launch: LaunchId, turn: &mut Turn<'_>) -> u32 {
        let Some(size) = self.running.remove(&request) else { return 0 };
        self.running_rows -= size;
        if !self.gone.remove(&request) {
            turn.push(DeviceOutput::Reply { request, launch });
        }
        size
    }

    /// Takes a request out of its batch before any launch, without an answer. Returns its items.
    pub fn forget(&mut self, request: RequestId) -> u32 {
        let size = self.running.remove(&request).unwrap_or(0);
        self.running_rows -= size;
        self.gone.remove(&request);
        size
    }

    /// The items of a running request.
    pub fn running_size(&self, request: RequestId) -> u32 {
        self.running.get(&request).copied().unwrap_or(0)
    }

    /// The items of all running requests.
    pub fn running_rows(&self) -> u32 {
        self.running_rows
    }

    /// Whether the client of a running request has gone.
    pub fn has_gone(&self, request: RequestId) -> bool {
        self.gone.contains(&request)
    }

    /// Handles a request whose client has gone. Returns true if the pool had the request. A running
    /// request stays in its launch, and gets no answer.
    pub fn cancel(&mut self, request: RequestId, turn: &mut Turn<'_>) -> bool {
        self.remove(request, turn) || (self.running.contains_key(&request) && self.gone.insert(request))
    }

    fn take(&mut self, request: RequestId) -> Option<PooledRequest> {
        let sequence = self.arrivals.remove(&request)?;
        let waiting = self.waiting.remove(&sequence)?;
        self.deadlines.remove(&(waiting.request.deadline, sequence));
        self.rows -= waiting.request.size;
        self.ready_rows -= if waiting.ready { waiting.request.size } else { 0 };
        Some(waiting)
    }

    /// Removes a waiting request; returns true if it waited. While its input is on the way, its
    /// slots stay taken.
    fn remove(&mut self, request: RequestId, turn: &mut Turn<'_>) -> bool {
        let Some(waiting) = self.take(request) else { return false };
        match waiting.slots {
            Some(slots) if waiting.ready => self.release(slots, turn),
            Some(slots) => {
                self.abandoned.insert(request, slots);
            }
            None if self.ring.is_some() => {
                self.overflow -= 1;
                // Requests that waited for room behind the removed one may get it.
                self.admit(turn);
            }
            None => {}
        }
        true
    }

    /// Releases slots whose inputs have been read, and gives them to requests that wait for room.
    pub fn release(&mut self, slots: RingRun, turn: &mut Turn<'_>) {
        if let Some(ring) = &mut self.ring {
            ring.release(slots);
            self.admit(turn);
        }
    }

    fn most_urgent(&self) -> Option<&DeviceRequest> {
        let (_, sequence) = self.deadlines.first()?;
        Some(&self.waiting.get(sequence)?.request)
    }

    /// Gives up requests that would miss their deadline even if they started now, the earliest
    /// deadline first. Each drop precedes the admission of another request to its slots.
    pub fn drop_hopeless(&mut self, turn: &mut Turn<'_>) {
        while let Some(request) = self.most_urgent()
            && let Some(needed) = self.needed(request)
            && turn.now() + needed > request.deadline
        {
            let request = request.id;
            turn.push(DeviceOutput::Drop { request, reason: DeviceDrop::Hopeless });
            self.remove(request, turn);
        }
    }

    /// Gives up all waiting requests, oldest first.
    pub fn drop_all(&mut self, turn: &mut Turn<'_>, reason: DeviceDrop) {
        while let Some(request) = self.oldest().map(|waiting| waiting.request.id) {
            turn.push(DeviceOutput::Drop { request, reason });
            self.remove(request, turn);
        }
    }

    /// When the request with the earliest deadline becomes hopeless; `None`: no request has a
    /// deadline, or deadlines are not judged.
    pub fn hopeless_at(&self) -> Option<(Time, DeviceTimeout)> {
        let request = self.most_urgent()?;
        let start = request.deadline.as_nanos().saturating_sub(self.needed(request)?.as_nanos());
        Some((Time::from_nanos(start.saturating_add(1)), DeviceTimeout::Hopeless))
    }

    /// The latency of all waiting requests in batches of at most `most` items, by `profile`.
    pub fn backlog(&self, profile: &SegmentProfile, most: u32) -> Duration {
        if self.rows == 0 {
            return Duration::ZERO;
        }
        let longest = self.iter().map(|waiting| waiting.request.length).max().unwrap_or(0);
        let (full, rest) = (self.rows / most.max(1), self.rows % most.max(1));
        let rest = if rest > 0 { profile.total(rest, longest) } else { Duration::ZERO };
        profile.total(most, longest).saturating_mul(u64::from(full)) + rest
    }

    /// The counters of the pool.
    pub fn stats(&self) -> PoolStats {
        let ring = self.ring.as_ref();
        PoolStats {
            waiting: self.rows,
            slots: ring.map_or(0, InputRing::slots),
            occupied: ring.map_or(0, InputRing::occupied),
            most_occupied: ring.map_or(0, InputRing::most_occupied),
            overflowed: self.overflowed,
            running: self.running_rows,
        }
    }
}
