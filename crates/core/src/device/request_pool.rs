//! The requests that wait for a launch, with their places in the input ring.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::input_ring::{InputRing, SlotRun};
use super::launch::DeviceOutput;
use super::note::Note;
use super::request::{DeviceReject, DeviceRequest};
use crate::ids::RequestId;
use crate::time::{Duration, Time};

/// The requests that wait for a launch, in the order of their arrival (E²bird §5.1).
///
/// With a ring, each takes one neighbouring slot an item when it comes, and is ready once its input is there. Where there is no room, it
/// waits with the host, in order, until there is: back-pressure, bounded by the pool's bound. Without a ring each is ready at once.
#[derive(Debug)]
pub struct InputPool {
    ring: Option<InputRing>,
    bound: u32,
    /// By arrival.
    waiting: BTreeMap<u64, Waiting>,
    /// The arrival of each.
    arrivals: BTreeMap<RequestId, u64>,
    /// Those that have a deadline, by it.
    deadlines: BTreeSet<(Time, u64)>,
    /// Those without slots, oldest first; may name some that have gone.
    overflow: VecDeque<u64>,
    /// Slots of requests that have gone while their inputs were on the way.
    abandoned: BTreeMap<RequestId, SlotRun>,
    next: u64,
    rows: u32,
    ready_rows: u32,
    overflowed: u64,
}

/// A request that waits.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// The request.
    pub request: DeviceRequest,
    /// When it came.
    pub arrival: Time,
    /// Its slots; `None` without a ring, or as long as there is no room.
    pub slots: Option<SlotRun>,
    /// Whether its input is there.
    pub ready: bool,
}

/// What waits where.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolStats {
    /// Items that wait for a launch.
    pub waiting: u32,
    /// Slots of the ring; 0: there is none.
    pub slots: u32,
    /// Slots in use.
    pub occupied: u32,
    /// The most slots that were in use at a time.
    pub most_occupied: u32,
    /// Requests that found no room in the ring, ever.
    pub overflowed: u64,
    /// Items in launches.
    pub running: u32,
}

impl InputPool {
    /// An empty pool in which at most `bound` items wait, with a ring of `slots` slots if that is not 0.
    pub fn new(bound: u32, slots: u32) -> Self {
        InputPool {
            ring: (slots > 0).then(|| InputRing::new(slots)),
            bound,
            waiting: BTreeMap::new(),
            arrivals: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            overflow: VecDeque::new(),
            abandoned: BTreeMap::new(),
            next: 0,
            rows: 0,
            ready_rows: 0,
            overflowed: 0,
        }
    }

    /// Takes a request in. What is to be done for it is appended to `outputs`.
    ///
    /// # Errors
    /// If it is empty, larger than the ring or `largest`, or the pool is full. An id that waits already is a defect of the driver, asserted.
    pub fn push(
        &mut self,
        now: Time,
        request: &DeviceRequest,
        largest: u32,
        outputs: &mut VecDeque<DeviceOutput>,
    ) -> Result<(), DeviceReject> {
        let size = request.size;
        if size == 0 {
            return Err(DeviceReject::Empty);
        }
        let largest = self.ring.as_ref().map_or(largest, |ring| largest.min(ring.slots()));
        if size > largest {
            return Err(DeviceReject::TooLarge { size, largest });
        }
        if self.rows.saturating_add(size) > self.bound {
            return Err(DeviceReject::QueueFull { bound: self.bound });
        }
        let sequence = self.next;
        let before = self.arrivals.insert(request.id, sequence);
        assert!(before.is_none(), "the name of a request that waits is not given to another");
        self.next += 1;
        self.rows += size;
        let ready = self.ring.is_none();
        self.ready_rows += if ready { size } else { 0 };
        self.waiting.insert(sequence, Waiting { request: *request, arrival: now, slots: None, ready });
        if request.deadline != Time::MAX {
            self.deadlines.insert((request.deadline, sequence));
        }
        if self.ring.is_some() {
            self.overflow.push_back(sequence);
            self.admit(outputs);
            if self.waiting.get(&sequence).is_some_and(|waiting| waiting.slots.is_none()) {
                self.overflowed += 1;
                outputs.push_back(DeviceOutput::Note(Note::RingFull { waiting: self.overflow.len() as u32 }));
            }
        }
        Ok(())
    }

    /// Gives slots to those that wait for some, oldest first.
    fn admit(&mut self, outputs: &mut VecDeque<DeviceOutput>) {
        let Some(ring) = &mut self.ring else { return };
        while let Some(sequence) = self.overflow.front() {
            if let Some(waiting) = self.waiting.get_mut(sequence) {
                let Ok(slots) = ring.allocate(waiting.request.size) else { return };
                waiting.slots = Some(slots);
                outputs.push_back(DeviceOutput::Admit { request: waiting.request.id, slots });
            }
            self.overflow.pop_front();
        }
    }

    /// The input of a request is in its slots; says whether there is a request more that is ready.
    pub fn mark_ready(&mut self, request: RequestId, outputs: &mut VecDeque<DeviceOutput>) -> bool {
        if let Some(slots) = self.abandoned.remove(&request) {
            self.release(slots, outputs);
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

    /// The requests that wait, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Waiting> {
        self.waiting.values()
    }

    /// The oldest request, ready or not.
    pub fn oldest(&self) -> Option<&Waiting> {
        self.waiting.values().next()
    }

    /// The ready requests up to the first that is not, oldest first.
    pub fn ready(&self) -> impl Iterator<Item = &Waiting> {
        self.iter().take_while(|waiting| waiting.ready)
    }

    /// Items that wait.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Items of requests that are ready.
    pub fn ready_rows(&self) -> u32 {
        self.ready_rows
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The first ready requests that are neighbours in the ring and have at most `most` items; their slots, if there is a ring.
    pub fn neighbours(&self, most: u32) -> (Vec<RequestId>, u32, Option<SlotRun>) {
        let (mut members, mut rows, mut run) = (Vec::new(), 0, None::<SlotRun>);
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

    /// Whether `next` begins where `run` ends, in the ring.
    pub fn are_neighbours(&self, run: SlotRun, next: SlotRun) -> bool {
        self.ring.as_ref().is_some_and(|ring| ring.are_neighbours(run, next))
    }

    /// Takes a request out for a launch: its slots stay in use until [`InputPool::release`].
    pub fn take(&mut self, request: RequestId) -> Option<Waiting> {
        let sequence = self.arrivals.remove(&request)?;
        let waiting = self.waiting.remove(&sequence)?;
        self.deadlines.remove(&(waiting.request.deadline, sequence));
        self.rows -= waiting.request.size;
        self.ready_rows -= if waiting.ready { waiting.request.size } else { 0 };
        Some(waiting)
    }

    /// Takes a request out for good. While its input is on the way, nobody else gets its slots.
    pub fn remove(&mut self, request: RequestId, outputs: &mut VecDeque<DeviceOutput>) -> Option<Waiting> {
        let waiting = self.take(request)?;
        match waiting.slots {
            Some(slots) if waiting.ready => self.release(slots, outputs),
            Some(slots) => {
                self.abandoned.insert(request, slots);
            }
            // Whoever waited for room behind it may have it.
            None => self.admit(outputs),
        }
        Some(waiting)
    }

    /// Slots have been read: whoever waits for room gets it.
    pub fn release(&mut self, slots: SlotRun, outputs: &mut VecDeque<DeviceOutput>) {
        if let Some(ring) = &mut self.ring {
            ring.release(slots);
            self.admit(outputs);
        }
    }

    /// The request with the earliest deadline, if it would miss it by starting at `now`: `needed` says what one takes alone.
    pub fn hopeless(&self, now: Time, needed: impl Fn(&DeviceRequest) -> Duration) -> Option<RequestId> {
        let (_, sequence) = self.deadlines.first()?;
        let request = &self.waiting.get(sequence)?.request;
        (now + needed(request) > request.deadline).then_some(request.id)
    }

    /// When the request with the earliest deadline becomes hopeless; `None` if none has one.
    pub fn hopeless_at(&self, needed: impl Fn(&DeviceRequest) -> Duration) -> Option<Time> {
        let (_, sequence) = self.deadlines.first()?;
        let request = &self.waiting.get(sequence)?.request;
        let start = request.deadline.as_nanos().saturating_sub(needed(request).as_nanos());
        Some(Time::from_nanos(start.saturating_add(1)))
    }

    /// What waits where; `running` is the policy's.
    pub fn stats(&self, running: u32) -> PoolStats {
        let ring = self.ring.as_ref();
        PoolStats {
            waiting: self.rows,
            slots: ring.map_or(0, InputRing::slots),
            occupied: ring.map_or(0, InputRing::occupied),
            most_occupied: ring.map_or(0, InputRing::most_occupied),
            overflowed: self.overflowed,
            running,
        }
    }
}
