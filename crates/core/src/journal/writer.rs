//! The form in which a log is written.

use serde::Serialize;

use super::block::{BlockHead, BlockKind};
use super::machine::{MachineKind, Records};
use crate::time::Time;

/// The first bytes of a log.
pub(super) const MAGIC: &[u8; 5] = b"DBLOG";
/// The version of the format, which follows them.
pub(super) const VERSION: u8 = 5;

/// The tag of an input, with the time since the input before.
pub(super) const INPUT: u8 = 0x40;
/// The tag of a refusal.
pub(super) const REFUSAL: u8 = 0x41;
/// The tag of a decision. Short forms have other tags.
pub(super) const DECISION: u8 = 0x42;

/// Writes a log.
#[derive(Debug)]
pub(super) struct Writer<R: Records> {
    /// Perhaps the head of the log, then a block whose head is not filled in yet.
    pub bytes: Vec<u8>,
    /// The place of the block's head in `bytes`.
    block: usize,
    /// The time of the last input before the block.
    since: Time,
    kind: BlockKind,
    /// The setup of the log so far, for the next file.
    setup: Vec<(Time, R::Input)>,
    machine: MachineKind,
    /// The time of the last input.
    pub now: Time,
    pub records: R,
}

impl<R: Records> Writer<R> {
    pub fn new(machine: MachineKind) -> Self {
        let (bytes, setup, block, records) = Default::default();
        let (since, now) = (Time::ZERO, Time::ZERO);
        let mut writer = Writer { bytes, block, since, kind: BlockKind::Plain, setup, machine, now, records };
        writer.write_header();
        writer.begin_block();
        writer
    }

    fn write_header(&mut self) {
        self.bytes.extend_from_slice(MAGIC);
        self.bytes.push(VERSION);
        push(&mut self.bytes, &self.machine);
    }

    /// Begins the next file of the log: gives its first bytes, to the end of `into`. The entries
    /// before were taken.
    pub fn begin_file(&mut self, zero_unix_ns: u64, into: &mut Vec<u8>) {
        debug_assert!(!self.has_entries(), "entries belong to the file before");
        self.bytes.clear();
        self.write_header();
        let now = std::mem::take(&mut self.now);
        self.begin_block();
        self.kind = BlockKind::Prelude;
        let setup = std::mem::take(&mut self.setup);
        for (at, input) in &setup {
            self.write_input(*at, input);
        }
        (self.setup, self.now) = (setup, now);
        self.take(zero_unix_ns, into);
    }

    /// Begins a block, which can be read without the blocks before.
    fn begin_block(&mut self) {
        (self.block, self.since, self.kind) = (self.bytes.len(), self.now, BlockKind::Plain);
        self.records = R::default();
        self.bytes.extend_from_slice(&[0; BlockHead::LENGTH]);
    }

    /// The bytes that [`Writer::take`] would give.
    pub fn pending(&self) -> usize {
        if self.has_entries() { self.bytes.len() } else { self.block }
    }

    fn has_entries(&self) -> bool {
        self.bytes.len() > self.block + BlockHead::LENGTH
    }

    /// Moves the bytes to the end of `into`. The log's time zero is `zero_unix_ns` nanoseconds after
    /// the Unix epoch; 0: that is unknown.
    pub fn take(&mut self, zero_unix_ns: u64, into: &mut Vec<u8>) {
        if self.has_entries() {
            let entries = self.block + BlockHead::LENGTH;
            let length = self.bytes.len() - entries;
            assert!(u32::try_from(length).is_ok(), "the driver takes the log before a block has 4 GiB");
            let (length, now, kind) = (length as u32, self.since, self.kind);
            let head = BlockHead { length, now, zero_unix_ns, kind };
            self.bytes[self.block..entries].copy_from_slice(&head.bytes());
        } else {
            self.bytes.truncate(self.block);
        }
        into.append(&mut self.bytes);
        self.begin_block();
    }

    pub fn input(&mut self, now: Time, input: &R::Input) {
        if R::is_setup(input) {
            self.kind = BlockKind::Setup;
        }
        R::remember(&mut self.setup, now, input);
        self.write_input(now, input);
    }

    fn write_input(&mut self, now: Time, input: &R::Input) {
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
    let appender = Appender { bytes: log, entry: [0; PIECE], filled: 0 };
    let written = postcard::serialize_with_flavor(value, appender);
    written.unwrap_or_else(|error| panic!("memory takes every entry, and its form has no error: {error}"));
}

/// Most entries are shorter.
const PIECE: usize = 64;

/// Appends to a buffer. Entries are made of pieces of a few bytes. To append each piece to the
/// vector would check the capacity and call a copy function for each.
struct Appender<'a> {
    bytes: &'a mut Vec<u8>,
    entry: [u8; PIECE],
    filled: usize,
}

impl postcard::ser_flavors::Flavor for Appender<'_> {
    type Output = ();

    #[inline]
    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        if self.filled == PIECE {
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
