//! The form in which a log is written.

use serde::Serialize;

use super::machine::{MachineKind, Records};
use crate::time::Time;

/// The first bytes of a log.
pub(super) const MAGIC: &[u8; 5] = b"DBLOG";
/// The version of the format, which follows them.
pub(super) const VERSION: u8 = 4;

/// The tag of an input, with the time since the input before.
pub(super) const INPUT: u8 = 0x40;
/// The tag of a refusal.
pub(super) const REFUSAL: u8 = 0x41;
/// The tag of a decision. Short forms have other tags.
pub(super) const DECISION: u8 = 0x42;

/// Writes a log.
#[derive(Debug)]
pub(super) struct Writer<R> {
    pub bytes: Vec<u8>,
    /// The time of the last input.
    pub now: Time,
    pub records: R,
}

impl<R: Records> Writer<R> {
    pub fn new(machine: MachineKind) -> Self {
        let mut bytes = MAGIC.to_vec();
        bytes.push(VERSION);
        push(&mut bytes, &machine);
        Writer { bytes, now: Time::ZERO, records: R::default() }
    }

    pub fn input(&mut self, now: Time, input: &R::Input) {
        let after = self.after(now);
        if !self.records.write_input(&mut self.bytes, now, after, input) {
            push(&mut self.bytes, &(INPUT, after, input));
        }
    }

    /// The time since the input before, which is no longer the last.
    pub fn after(&mut self, now: Time) -> i64 {
        difference(now.as_nanos(), std::mem::replace(&mut self.now, now).as_nanos())
    }

    pub fn refusal(&mut self, refusal: &R::Refusal) {
        push(&mut self.bytes, &(REFUSAL, refusal));
    }

    pub fn decision(&mut self, decision: &R::Decision) {
        if !self.records.write_decision(&mut self.bytes, self.now, decision) {
            push(&mut self.bytes, &(DECISION, decision));
        }
    }
}

/// A difference that wraps, so that [`sum`] finds any number again.
pub(super) fn difference(new: u64, old: u64) -> i64 {
    new.wrapping_sub(old) as i64
}

pub(super) fn sum(old: u64, difference: i64) -> u64 {
    old.wrapping_add(difference as u64)
}

/// Appends a value.
pub(super) fn push(log: &mut Vec<u8>, value: &impl Serialize) {
    let appender = Appender { bytes: log, entry: [0; BLOCK], filled: 0 };
    let written = postcard::serialize_with_flavor(value, appender);
    written.unwrap_or_else(|error| panic!("memory takes every entry, and its form has no error: {error}"));
}

/// Most entries are shorter.
const BLOCK: usize = 64;

/// Appends to a buffer. Entries are made of pieces of a few bytes. To append each piece to the
/// vector would check the capacity and call a copy function for each.
struct Appender<'a> {
    bytes: &'a mut Vec<u8>,
    entry: [u8; BLOCK],
    filled: usize,
}

impl postcard::ser_flavors::Flavor for Appender<'_> {
    type Output = ();

    #[inline]
    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        if self.filled == BLOCK {
            self.bytes.extend_from_slice(&self.entry);
            self.filled = 0;
        }
        self.entry[self.filled] = byte;
        self.filled += 1;
        Ok(())
    }

    #[inline]
    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        bytes.iter().try_for_each(|byte| self.try_push(*byte))
    }

    fn finalize(self) -> postcard::Result<()> {
        self.bytes.extend_from_slice(&self.entry[..self.filled]);
        Ok(())
    }
}
