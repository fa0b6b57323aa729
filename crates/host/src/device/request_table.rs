//! The requests of a device: their calls, their inputs, and their states between launches.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use downbeat_core::device::{InputSource, Launch, RingRun};
use downbeat_core::{RequestId, Time};
use downbeat_engine::{State, StateError};
use downbeat_service::metrics::statistics::Phases;

use super::launch::{Body, Source};
use super::request_events::Watched;
use super::tensors::Member;
use crate::request::batch_codec::{Admitted, Outputs};
use crate::request::call::Call;

/// Hashes a request id, which is a counter. Spreading the ids is enough.
#[derive(Default)]
pub struct CounterHasher(u64);

impl Hasher for CounterHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = value.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(20);
    }
}

/// A request that is not answered.
pub struct Entry {
    /// The client that waits. Its tensors are in `input`.
    pub call: Call,
    pub rows: u32,
    /// The unpadded length of its inputs; 0 if the model's shapes are fixed.
    pub length: u32,
    /// Its inputs, while neither the ring nor a launch has them.
    pub input: Option<Admitted>,
    /// Its slots of the ring, once the inputs are written.
    pub slots: Option<RingRun>,
    pub begin: Option<Time>,
    pub phases: Phases,
    pub outputs: Option<Outputs>,
    /// Set if a listener hears of its end.
    pub watched: Option<Watched>,
}

impl Entry {
    /// A request of `length` that has just come.
    pub fn new(mut call: Call, length: u32) -> Self {
        let input = std::mem::take(&mut call.admitted);
        Entry {
            call,
            rows: input.rows,
            length,
            input: Some(input),
            slots: None,
            begin: None,
            phases: Phases::default(),
            outputs: None,
            watched: None,
        }
    }

    fn ran(&mut self, begin: Time, phases: Phases) {
        self.begin.get_or_insert(begin);
        self.phases.compute_input += phases.compute_input;
        self.phases.compute_infer += phases.compute_infer;
        self.phases.compute_output += phases.compute_output;
    }
}

/// The requests that are not answered, and their states between two segments.
#[derive(Default)]
pub struct RequestTable {
    entries: HashMap<RequestId, Entry, BuildHasherDefault<CounterHasher>>,
    /// The states that launches left, by a running number.
    batches: BTreeMap<u64, Batch>,
    /// The batch that has a request's rows.
    places: HashMap<RequestId, u64, BuildHasherDefault<CounterHasher>>,
    next: u64,
}

/// The state that a launch left.
struct Batch {
    /// The requests whose rows are in the batch, in their order, with their numbers of rows.
    members: Vec<(RequestId, u32)>,
    state: State,
}

impl RequestTable {
    pub fn insert(&mut self, request: RequestId, entry: Entry) {
        self.entries.insert(request, entry);
    }

    /// Whether the client of a request still waits.
    pub fn is_awaited(&self, request: RequestId) -> bool {
        self.entries.get(&request).is_some_and(|entry| !entry.call.reply.is_closed())
    }

    /// A request that is not answered.
    pub fn get(&mut self, request: RequestId) -> Option<&mut Entry> {
        self.entries.get_mut(&request)
    }

    /// Takes a request out that is answered, dropped or cancelled.
    pub fn remove(&mut self, request: RequestId) -> Option<Entry> {
        let entry = self.entries.remove(&request);
        if let Some(batch) = self.places.get(&request)
            && let Some(Batch { members, .. }) = self.batches.get(batch)
            && members.iter().all(|(member, _)| !self.entries.contains_key(member))
        {
            // None of the batch's members is left.
            self.take(*batch);
        }
        entry
    }

    /// Takes out the state that a launch left.
    fn take(&mut self, batch: u64) -> Option<Batch> {
        let batch = self.batches.remove(&batch)?;
        for (member, _) in &batch.members {
            self.places.remove(member);
        }
        Some(batch)
    }

    fn put(&mut self, batch: Batch) {
        let number = self.next;
        self.next += 1;
        self.places.extend(batch.members.iter().map(|(member, _)| (*member, number)));
        self.batches.insert(number, batch);
    }

    /// Keeps the answer of a request until its reply is due.
    pub fn answer(&mut self, request: RequestId, outputs: Outputs, begin: Time, phases: Phases) {
        if let Some(entry) = self.entries.get_mut(&request) {
            entry.ran(begin, phases);
            entry.outputs = Some(outputs);
        }
    }

    /// Keeps the answer of a request that leaves before the last segment. [`RequestTable::keep`]
    /// notes the time of its launch.
    pub fn exit(&mut self, request: RequestId, outputs: Outputs) {
        if let Some(entry) = self.entries.get_mut(&request) {
            entry.outputs = Some(outputs);
        }
    }

    /// Keeps the state of a launch for the next segments, and its members' inputs: a later launch
    /// may fail.
    pub fn keep(&mut self, members: Vec<Member>, state: State, begin: Time, phases: Phases) {
        let (mut waits, mut rows) = (false, Vec::with_capacity(members.len()));
        for member in members {
            rows.push((member.request, member.rows));
            if let Some(entry) = self.entries.get_mut(&member.request) {
                entry.ran(begin, phases);
                // The launch has read the slots.
                entry.slots = None;
                entry.input = member.input;
                waits = true;
            }
        }
        if waits {
            self.put(Batch { members: rows, state });
        }
    }

    /// Takes the body of a launch: the launch owns it from now on. Members that have gone without
    /// leaving rows are left out.
    pub fn take_body(&mut self, launch: &Launch) -> Body {
        if launch.segments.first > 0 {
            return self.resume(launch);
        }
        let members: Vec<Member> = launch.members.iter().filter_map(|request| self.member(*request)).collect();
        let in_ring = members.iter().all(|member| member.slots.is_some()) && members.len() == launch.members.len();
        let source = match launch.inputs {
            InputSource::Ring(run) if in_ring => Source::Ring(run),
            _ => Source::Inputs,
        };
        Body { members, source }
    }

    fn member(&mut self, request: RequestId) -> Option<Member> {
        let entry = self.entries.get_mut(&request)?;
        let (rows, length, slots, step) = (entry.rows, entry.length, entry.slots, entry.call.step.clone());
        let deadline = entry.call.deadline;
        Some(Member { request, rows, length, input: entry.input.take(), slots, step, deadline })
    }

    /// Takes out the state of a launch, if another launch continues exactly that batch.
    fn take_if_whole(&mut self, batch: u64, launch: &Launch) -> Option<Batch> {
        let its = self.batches.get(&batch)?.members.iter().map(|(member, _)| member);
        if its.eq(&launch.members) { self.take(batch) } else { None }
    }

    /// A member of a launch of later segments, whose client may have gone.
    fn resumed(&mut self, request: RequestId, rows: u32, launch: &Launch) -> Member {
        let (length, deadline) = (launch.length, Time::MAX);
        let gone = Member { request, rows, length, input: None, slots: None, step: None, deadline };
        self.member(request).map_or(gone, |member| Member { rows, slots: None, ..member })
    }

    /// The body of a launch of later segments: a batch as an earlier launch left it, or parts of
    /// several.
    fn resume(&mut self, launch: &Launch) -> Body {
        let mut touched: Vec<u64> =
            launch.members.iter().filter_map(|member| self.places.get(member).copied()).collect();
        touched.sort_unstable();
        touched.dedup();
        if let [batch] = touched[..]
            && let Some(batch) = self.take_if_whole(batch, launch)
        {
            let members = batch.members.into_iter().map(|(request, rows)| self.resumed(request, rows, launch));
            return Body { members: members.collect(), source: Source::States(vec![batch.state]) };
        }
        let order: HashMap<RequestId, usize, BuildHasherDefault<CounterHasher>> =
            launch.members.iter().enumerate().map(|(place, member)| (*member, place)).collect();
        let mut parts: Vec<(usize, Batch)> = Vec::new();
        // Rows were lost if a state could not be split for a neighbour's launch.
        let lost = |request: &RequestId| self.entries.contains_key(request) && !self.places.contains_key(request);
        let mut broken = launch
            .members
            .iter()
            .any(lost)
            .then(|| "the rows of the request could not be separated from other requests' rows".to_owned());
        for batch in touched {
            let Some(batch) = self.take(batch) else { continue };
            if let Err(reason) = self.part(batch, &order, &mut parts) {
                broken = Some(reason.to_string());
            }
        }
        if let Some(reason) = broken {
            // Each member runs once more, alone.
            let members = launch.members.iter().filter_map(|request| self.member(*request)).collect();
            return Body { members, source: Source::Broken(reason) };
        }
        parts.sort_by_key(|(place, _)| *place);
        let (mut members, mut states) = (Vec::new(), Vec::new());
        for (_, Batch { members: its, state }) in parts {
            members.extend(its.into_iter().map(|(request, rows)| self.resumed(request, rows, launch)));
            states.push(state);
        }
        Body { members, source: Source::States(states) }
    }

    /// Parts a batch: the rows of a launch become `parts` with their places in its `order`, and the
    /// other rows stay in the table.
    ///
    /// # Errors
    /// If the engine cannot split the state.
    fn part(
        &mut self,
        Batch { members, state }: Batch,
        order: &HashMap<RequestId, usize, BuildHasherDefault<CounterHasher>>,
        parts: &mut Vec<(usize, Batch)>,
    ) -> Result<(), StateError> {
        let places: Vec<Option<usize>> = members.iter().map(|(member, _)| order.get(member).copied()).collect();
        // Two neighbours stay together if they are neighbours in the launch, or both outside the
        // launch.
        let follows = |index: usize| match (places[index - 1], places[index]) {
            (Some(before), Some(after)) => before + 1 == after,
            (None, None) => true,
            _ => false,
        };
        let mut begins: Vec<usize> = vec![0];
        begins.extend((1..members.len()).filter(|index| !follows(*index)));
        let ends = begins.iter().skip(1).copied().chain([members.len()]);
        let ranges: Vec<_> = begins.iter().copied().zip(ends).map(|(begin, end)| begin..end).collect();
        let rows: Vec<usize> =
            ranges.iter().map(|range| members[range.clone()].iter().map(|(_, rows)| *rows as usize).sum()).collect();
        let states = state.split(&rows)?;
        for (range, state) in ranges.into_iter().zip(states) {
            let place = places.get(range.start).copied().flatten();
            let part = Batch { members: members[range].to_vec(), state };
            match place {
                Some(place) => parts.push((place, part)),
                None if part.members.iter().any(|(member, _)| self.entries.contains_key(member)) => self.put(part),
                // None of the part's members is left.
                None => {}
            }
        }
        Ok(())
    }
}
