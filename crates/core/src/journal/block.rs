//! The blocks of a log, which can be read one by one.

use std::ops::Range;

use crate::time::Time;

/// The head of a block: the entries that a driver took from the journal at one time.
///
/// A reader that looks for an instant or a request hops from head to head, and reads only the blocks
/// that it needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockHead {
    /// The length of the entries behind the head, in bytes.
    pub length: u32,
    /// The time of the last input before the block.
    pub now: Time,
    /// The log's time zero, in nanoseconds since the Unix epoch, as the wall clock said when the
    /// block was taken; 0: unknown.
    pub zero_unix_ns: u64,
    /// The kind of the block.
    pub kind: BlockKind,
}

/// A kind of block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockKind {
    /// Entries.
    Plain,
    /// Entries. Among them are inputs that a reader of later blocks needs, such as names of models.
    Setup,
    /// The first block of a file that continues an earlier one: the inputs of all earlier files that
    /// a reader of this file needs. A replay of all files passes over the block.
    Prelude,
}

/// The first byte of a block, by kind.
const TAGS: [(BlockKind, u8); 3] = [(BlockKind::Plain, 0x43), (BlockKind::Setup, 0x44), (BlockKind::Prelude, 0x45)];

impl BlockHead {
    /// The length of a head, in bytes.
    pub const LENGTH: usize = 21;
    const LENGTH_AT: Range<usize> = 1..5;
    const NOW_AT: Range<usize> = 5..13;
    const ZERO_AT: Range<usize> = 13..21;

    /// Whether a reader of later blocks needs this one.
    pub fn has_setup(&self) -> bool {
        self.kind != BlockKind::Plain
    }

    /// The head at the begin of `bytes`; `None`: there is no whole head.
    pub fn read(bytes: &[u8]) -> Option<BlockHead> {
        let head: &[u8; Self::LENGTH] = bytes.first_chunk()?;
        let number = |at: Range<usize>| head.get(at)?.try_into().ok().map(u64::from_le_bytes);
        let length = head.get(Self::LENGTH_AT)?.try_into().ok().map(u32::from_le_bytes)?;
        let (now, zero_unix_ns) = (Time::from_nanos(number(Self::NOW_AT)?), number(Self::ZERO_AT)?);
        let (kind, _) = TAGS.iter().find(|(_, tag)| *tag == head[0])?;
        Some(BlockHead { length, now, zero_unix_ns, kind: *kind })
    }

    pub(super) fn bytes(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[0] = TAGS[self.kind as usize].1;
        bytes[Self::LENGTH_AT].copy_from_slice(&self.length.to_le_bytes());
        bytes[Self::NOW_AT].copy_from_slice(&self.now.as_nanos().to_le_bytes());
        bytes[Self::ZERO_AT].copy_from_slice(&self.zero_unix_ns.to_le_bytes());
        bytes
    }
}
