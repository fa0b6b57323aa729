//! What happens before what: finds work that touches the same memory and that nothing orders, also where it happened to go well.
//!
//! Each stream knows how far every other one has come when its next operation begins (a vector clock): by the events it waits for,
//! by the rules of the null stream, and by what the host has waited for before it enqueued. The host counts as one thread, so what one
//! thread has waited for orders what another enqueues: the program hands work over between threads in ways that are not seen here.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::Range;

use crate::address;
use crate::machine::Machine;
use crate::stream::{Source, What};

/// How many accesses that the host has not waited for are remembered.
const REMEMBERED: usize = 10_000;

/// For each stream, the number of its last operation that is known to be over.
#[derive(Clone, Debug, Default)]
pub struct Clock(BTreeMap<u64, u64>);

impl Clock {
    /// Knows also what another clock knows.
    pub fn join(&mut self, other: &Self) {
        for (stream, number) in &other.0 {
            self.reach(*stream, *number);
        }
    }

    /// Knows also that a stream has come to an operation.
    pub fn reach(&mut self, stream: u64, number: u64) {
        let known = self.0.entry(stream).or_default();
        *known = number.max(*known);
    }

    /// How far a stream is known to have come.
    pub fn at(&self, stream: u64) -> u64 {
        self.0.get(&stream).copied().unwrap_or(0)
    }

    /// Whether an operation of a stream is known to be over.
    pub fn knows(&self, stream: u64, number: u64) -> bool {
        self.0.get(&stream).is_some_and(|known| *known >= number)
    }
}

/// An operation that reads or writes memory.
#[derive(Debug)]
pub struct Access {
    stream: u64,
    number: u64,
    bytes: Range<u64>,
    writes: bool,
    what: &'static str,
}

impl Machine {
    /// The bytes that an operation touches, whether it writes there, and what it is called.
    fn touched(&self, what: &What) -> Vec<(Range<u64>, bool, &'static str)> {
        let ranges = match what {
            What::Upload { to, from: Source::Pinned(from), len } => {
                vec![(*to, *len, true, "an upload"), (*from as u64, *len, false, "an upload")]
            }
            What::Upload { to, from: Source::Staged(_), len } => vec![(*to, *len, true, "an upload")],
            What::Download { to, pinned, from, len } => {
                let to = (*to as u64, if *pinned { *len } else { 0 }, true, "a download");
                vec![(*from, *len, false, "a download"), to]
            }
            What::Copy { to, from, len } => vec![(*to, *len, true, "a copy"), (*from, *len, false, "a copy")],
            What::Set { to, len, .. } => vec![(*to, *len, true, "a fill")],
            What::Touch { at, len, writes } => vec![(*at, *len, *writes, "a kernel")],
            What::Allocate { start } | What::Free { start } => {
                let len = self.memory.region(*start).map_or(0, |(_, region)| region.len);
                let name = if matches!(what, What::Free { .. }) { "cuMemFreeAsync" } else { "cuMemAllocAsync" };
                vec![(*start, len, true, name)]
            }
            What::Wait { .. } | What::Record { .. } | What::Kernel { .. } => Vec::new(),
        };
        let bytes = |(start, len, writes, name): (u64, u64, bool, _)| (start..start.saturating_add(len), writes, name);
        ranges.into_iter().filter(|(_, len, ..)| *len > 0).map(bytes).collect()
    }

    /// Compares an operation that is enqueued as number `number` of a stream with those it is not ordered after.
    pub fn check_order(&mut self, stream: u64, number: u64, what: &What) {
        let touched = self.touched(what);
        let Some(known) = self.streams.get(&stream).map(|stream| stream.order.clone()) else { return };
        for (bytes, writes, name) in touched {
            let clash = self.accesses.iter().find(|other| {
                (writes || other.writes) && overlap(&bytes, &other.bytes) && !known.knows(other.stream, other.number)
            });
            if let Some(other) = clash {
                let where_ = if address::view(bytes.start).is_null() { "host" } else { "device" };
                let mistake = format!(
                    "nothing orders {name} in stream {stream:#x} after {} in stream {:#x}: both touch bytes {:#x}..{:#x} of {where_} \
                     memory",
                    other.what,
                    other.stream,
                    bytes.start.max(other.bytes.start),
                    bytes.end.min(other.bytes.end),
                );
                self.mistake(mistake);
            }
            self.accesses.push_back(Access { stream, number, bytes, writes, what: name });
        }
        while self.accesses.len() > REMEMBERED {
            self.accesses.pop_front();
        }
    }

    /// The host has waited for this: whatever is enqueued from now on is ordered after it.
    pub fn host_knows(&mut self, known: &Clock) {
        let streams = &self.streams;
        self.accesses
            .retain(|access| !known.knows(access.stream, access.number) && streams.contains_key(&access.stream));
    }

    /// [`Self::check_gone`] of pinned host memory.
    pub fn check_host_gone(&mut self, start: *const c_void, call: &str) {
        let len = self.host.ranges.get(&(start as usize)).map_or(0, |pinned| pinned.len);
        self.check_gone(start as u64, len as u64, call);
    }

    /// Nothing of a device runs any more: it has failed, or its contexts are gone.
    pub fn forget_accesses(&mut self, device: i32) {
        let streams = &self.streams;
        self.accesses.retain(|access| streams.get(&access.stream).is_some_and(|stream| stream.device != device));
    }

    /// Memory is taken away, which nothing orders but the host: writes down whose work may still touch it.
    pub fn check_gone(&mut self, start: u64, len: u64, call: &str) {
        let user = self.accesses.iter().find(|other| overlap(&(start..start.saturating_add(len)), &other.bytes));
        if let Some(user) = user {
            let what = format!(
                "{call} of {start:#x}, while the host has not waited for {} of it in stream {:#x}",
                user.what, user.stream
            );
            self.mistake(what);
        }
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
