//! The requests that a device policy decides about: their calls, inputs, and what launches left of them.

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasherDefault;
use std::sync::Arc;

use downbeat_core::device::{InputSource, Launch, SlotRun};
use downbeat_core::{RequestId, Time};
use downbeat_engine::State;

use super::lane::{Member, Source, Work};
use crate::call::Call;
use crate::driver::CounterHasher;
use crate::plan::{Admitted, Outputs};
use crate::statistics::Phases;

/// A request that is not answered.
pub struct Entry {
    /// Who waits for it. Its tensors are in `input`.
    pub call: Call,
    /// Items.
    pub rows: u32,
    /// Of its inputs, unpadded; 0 where nothing varies.
    pub length: u32,
    /// Its inputs, as long as they are not in the ring.
    pub input: Option<Arc<Admitted>>,
    /// Its slots of the ring, once its inputs are there.
    pub slots: Option<SlotRun>,
    /// When its first launch began.
    pub begin: Option<Time>,
    /// What its launches took.
    pub phases: Phases,
    /// Its answer.
    pub outputs: Option<Outputs>,
}

impl Entry {
    /// A request that has just come.
    pub fn new(call: Call, input: Arc<Admitted>, length: u32) -> Self {
        Entry {
            call,
            rows: input.rows,
            length,
            input: Some(input),
            slots: None,
            begin: None,
            phases: Phases::default(),
            outputs: None,
        }
    }

    fn ran(&mut self, begin: Time, phases: Phases) {
        self.begin.get_or_insert(begin);
        self.phases.compute_input += phases.compute_input;
        self.phases.compute_infer += phases.compute_infer;
        self.phases.compute_output += phases.compute_output;
    }
}

/// The requests that are not answered, and the state of those that are between two segments.
#[derive(Default)]
pub struct Desk {
    entries: HashMap<RequestId, Entry, BuildHasherDefault<CounterHasher>>,
    /// What launches left, by a running number.
    batches: BTreeMap<u64, Batch>,
    /// The batch that has a request's rows.
    places: BTreeMap<RequestId, u64>,
    next: u64,
}

/// What a launch left.
struct Batch {
    /// Whose rows are in it, in their order.
    members: Vec<(RequestId, u32)>,
    state: State,
}

impl Desk {
    /// Takes a request in.
    pub fn insert(&mut self, request: RequestId, entry: Entry) {
        self.entries.insert(request, entry);
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
            // Nobody waits for it any more.
            self.take(*batch);
        }
        entry
    }

    /// Takes out what a launch left.
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

    /// Keeps the answer of a request that leaves before the last segment; what its launch took is known by [`Desk::keep`].
    pub fn exit(&mut self, request: RequestId, outputs: Outputs) {
        if let Some(entry) = self.entries.get_mut(&request) {
            entry.outputs = Some(outputs);
        }
    }

    /// Keeps what a launch left for the next segments.
    pub fn keep(&mut self, members: &[Member], state: State, begin: Time, phases: Phases) {
        let mut waits = false;
        for member in members {
            if let Some(entry) = self.entries.get_mut(&member.request) {
                entry.ran(begin, phases);
                // They have been read.
                entry.slots = None;
                waits = true;
            }
        }
        if waits {
            let members = members.iter().map(|member| (member.request, member.rows)).collect();
            self.put(Batch { members, state });
        }
    }

    /// What a launch runs on. Members that have gone without leaving rows are left out.
    pub fn work(&mut self, launch: Launch) -> Work {
        if launch.segments.first > 0 {
            return self.resume(launch);
        }
        let members: Vec<Member> = launch.members.iter().filter_map(|request| self.member(*request)).collect();
        let in_ring = members.iter().all(|member| member.slots.is_some()) && members.len() == launch.members.len();
        let source = match launch.inputs {
            InputSource::Ring(run) if in_ring => Source::Ring(run),
            _ => Source::Inputs,
        };
        Work { launch, members, source }
    }

    fn member(&self, request: RequestId) -> Option<Member> {
        let entry = self.entries.get(&request)?;
        let (rows, length, input, slots) = (entry.rows, entry.length, entry.input.clone(), entry.slots);
        Some(Member { request, rows, length, input, slots })
    }

    /// What a launch of later segments runs on: a batch as an earlier launch left it, or parts of some.
    fn resume(&mut self, launch: Launch) -> Work {
        let mut touched: Vec<u64> =
            launch.members.iter().filter_map(|member| self.places.get(member).copied()).collect();
        touched.sort_unstable();
        touched.dedup();
        let mut parts: Vec<(usize, Batch)> = Vec::new();
        // Rows that went lost when what a neighbour's launch found could not be parted.
        let lost = |request: &RequestId| self.entries.contains_key(request) && !self.places.contains_key(request);
        let mut broken =
            launch.members.iter().any(lost).then(|| "its rows could not be parted from its neighbours'".to_owned());
        for batch in touched {
            let Some(Batch { members, state }) = self.take(batch) else { continue };
            let places: Vec<Option<usize>> =
                members.iter().map(|(member, _)| launch.members.iter().position(|other| other == member)).collect();
            // What stays together: neighbours that are neighbours in the launch, or not in it.
            let follows = |index: usize| match (places[index - 1], places[index]) {
                (Some(before), Some(after)) => before + 1 == after,
                (None, None) => true,
                _ => false,
            };
            let mut begins: Vec<usize> = vec![0];
            begins.extend((1..members.len()).filter(|index| !follows(*index)));
            let ends = begins.iter().skip(1).copied().chain([members.len()]);
            let ranges: Vec<_> = begins.iter().copied().zip(ends).map(|(begin, end)| begin..end).collect();
            let rows: Vec<usize> = ranges
                .iter()
                .map(|range| members[range.clone()].iter().map(|(_, rows)| *rows as usize).sum())
                .collect();
            let states = match state.split(&rows) {
                Ok(states) => states,
                Err(reason) => {
                    broken = Some(reason.to_string());
                    continue;
                }
            };
            for (range, state) in ranges.into_iter().zip(states) {
                let place = places.get(range.start).copied().flatten();
                let part = Batch { members: members[range].to_vec(), state };
                match place {
                    Some(place) => parts.push((place, part)),
                    None if part.members.iter().any(|(member, _)| self.entries.contains_key(member)) => self.put(part),
                    // Nobody waits for it any more.
                    None => {}
                }
            }
        }
        parts.sort_by_key(|(place, _)| *place);
        let (mut members, mut states) = (Vec::new(), Vec::new());
        for (_, Batch { members: its, state }) in parts {
            for (request, rows) in its {
                let entry = self.entries.get(&request);
                let length = entry.map_or(launch.length, |entry| entry.length);
                let input = entry.and_then(|entry| entry.input.clone());
                members.push(Member { request, rows, length, input, slots: None });
            }
            states.push(state);
        }
        if let Some(reason) = broken {
            // Whoever was in it runs once more, alone.
            members = launch.members.iter().filter_map(|request| self.member(*request)).collect();
            return Work { launch, members, source: Source::Broken(reason) };
        }
        Work { launch, members, source: Source::States(states) }
    }
}
