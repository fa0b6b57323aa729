//! Finds unordered work on the same memory, by the happens-before order of operations. Example: one
//! stream writes memory, another reads it, and neither waits for the other. This is a mistake, even
//! if the write happened to come first.
//!
//! Each stream has a vector clock. For every other stream it holds the last operation that is
//! certainly over when this stream's next operation begins. Three things move the clock on. The
//! stream waits for an event, the null stream's rules make it wait, or the host waited before it
//! enqueued. The host counts as one thread. A wait in one thread orders the later work of all
//! threads. The program hands work over between threads in ways that the stand-in cannot see.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::Range;

use crate::address;
use crate::machine::Machine;
use crate::stream::{Source, What};

/// The most accesses that are remembered until the host has waited for them.
const REMEMBERED: usize = 10_000;

/// For each stream, the number of its last operation that is certainly over.
#[derive(Clone, Debug, Default)]
pub struct Clock(BTreeMap<u64, u64>);

impl Clock {
    /// Adds the knowledge of another clock.
    pub fn join(&mut self, other: &Self) {
        for (stream, number) in &other.0 {
            self.reach(*stream, *number);
        }
    }

    /// Adds the knowledge that a stream has reached an operation.
    pub fn reach(&mut self, stream: u64, number: u64) {
        let known = self.0.entry(stream).or_default();
        *known = number.max(*known);
    }

    /// Returns a stream's known progress.
    pub fn at(&self, stream: u64) -> u64 {
        self.0.get(&stream).copied().unwrap_or(0)
    }

    /// Returns true if an operation of a stream is known to be over.
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
    /// Returns the bytes that an operation touches, whether it writes them, and its name.
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

    /// Compares an operation that is enqueued as number `number` of a stream with the earlier
    /// operations that it is not ordered after.
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

    /// Records that the host has waited for this clock: every later operation is ordered after it.
    pub fn host_knows(&mut self, known: &Clock) {
        let streams = &self.streams;
        self.accesses
            .retain(|access| !known.knows(access.stream, access.number) && streams.contains_key(&access.stream));
    }

    /// Does [`Self::check_gone`] for pinned host memory.
    pub fn check_host_gone(&mut self, start: *const c_void, call: &str) {
        let len = self.host.ranges.get(&(start as usize)).map_or(0, |pinned| pinned.len);
        self.check_gone(start as u64, len as u64, call);
    }

    /// Forgets a device's accesses: the device has failed, or its contexts are gone.
    pub fn forget_accesses(&mut self, device: i32) {
        let streams = &self.streams;
        self.accesses.retain(|access| streams.get(&access.stream).is_some_and(|stream| stream.device != device));
    }

    /// Checks memory that is taken away, which only the host's waits order: records the operations
    /// that may still touch it.
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
