//! Reading a log.

use super::block::{BlockHead, BlockKind};
use super::entry::Entry;
use super::machine::{MachineKind, Record, Records};
use super::writer::{DECISION, INPUT, MAGIC, REFUSAL, VERSION, sum};
use crate::time::Time;

/// Why a log cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LogError {
    /// It does not begin as a log does.
    #[error("not a decision log: it does not begin with 'DBLOG'")]
    NotALog,
    /// An older or a newer Downbeat wrote it.
    #[error(
        "a decision log of version {0}, which this program cannot read: it reads version {VERSION}; use the downbeat that wrote the log"
    )]
    Version(u8),
    /// An older Downbeat wrote it, as lines of JSON.
    #[error(
        "the decision log of a device as lines of JSON, the form before version 4, which this program cannot read: it reads version {VERSION}; use the downbeat that wrote the log"
    )]
    Json,
    /// It has other records.
    #[error("this is the decision log of {0}: this command needs a log of the other kind")]
    Machine(MachineKind),
    /// The first files of the log are gone.
    #[error(
        "the begin of the log is gone: the server removed its oldest files, as the options decision_log_bytes and \
         decision_log_age_h say. A replay needs all files of a run"
    )]
    BeginIsGone,
    /// The bytes behind an entry are no entry.
    #[error("the log is damaged after entry {after}: {why}")]
    Damaged {
        /// The last good entry.
        after: u64,
        /// What was wrong.
        why: String,
    },
}

/// The machine of a log, and the bytes of its entries.
pub(super) fn header(bytes: &[u8]) -> Result<(MachineKind, &[u8]), LogError> {
    if bytes.starts_with(b"{\"at\":") {
        return Err(LogError::Json);
    }
    let (version, rest) = bytes.strip_prefix(MAGIC).and_then(<[u8]>::split_first).ok_or(LogError::NotALog)?;
    if *version != VERSION {
        return Err(LogError::Version(*version));
    }
    let damaged = |why: &str| LogError::Damaged { after: 0, why: why.to_owned() };
    let (machine, rest) = postcard::take_from_bytes(rest).map_err(|_| damaged("it names no machine"))?;
    match machine {
        MachineKind::Shard { index, shards } if index >= shards => Err(damaged("shards are counted from zero")),
        machine => Ok((machine, rest)),
    }
}

/// The entries of a log, one after another; after an error, none. A log whose last entry was cut
/// off ends before that.
///
/// # Errors
/// If it is no log, of another version, or of a machine that has other records.
pub fn read<R: Records>(
    bytes: &[u8],
) -> Result<(MachineKind, impl Iterator<Item = Result<Entry<R>, LogError>>), LogError> {
    let (machine, rest) = header(bytes)?;
    if !R::are_of(machine) {
        return Err(LogError::Machine(machine));
    }
    Ok((machine, read_blocks(rest)))
}

/// The machine of a log, and the place of its first block. `bytes` has the begin of the log.
///
/// # Errors
/// If it is no log, or of another version.
pub fn machine_of(bytes: &[u8]) -> Result<(MachineKind, usize), LogError> {
    header(bytes).map(|(machine, rest)| (machine, bytes.len() - rest.len()))
}

/// As [`read`], of whole blocks from anywhere in a log. The entries are numbered from 1.
pub fn read_blocks<R: Records>(bytes: &[u8]) -> impl Iterator<Item = Result<Entry<R>, LogError>> {
    let mut blocks = Blocks { rest: bytes, block: &[], is_cut: false, head: None, read: R::default(), number: 0 };
    std::iter::from_fn(move || {
        let next = blocks.next().transpose();
        if !matches!(next, Some(Ok(_))) {
            (blocks.rest, blocks.block) = (&[], &[]);
        }
        next
    })
}

/// Blocks that are being read.
struct Blocks<'a, R> {
    /// The blocks that were not begun yet.
    rest: &'a [u8],
    /// The rest of the block that was begun, and whether the log ends within that block.
    block: &'a [u8],
    is_cut: bool,
    /// The head of that block, with the time of the last input that was read.
    head: Option<BlockHead>,
    read: R,
    /// The entries that were read.
    number: u64,
}

impl<R: Records> Blocks<'_, R> {
    fn next(&mut self) -> Result<Option<Entry<R>>, LogError> {
        while self.block.is_empty() {
            if self.rest.len() < BlockHead::LENGTH {
                return Ok(None);
            }
            let head = BlockHead::read(self.rest).ok_or_else(|| self.damaged("a block should begin there"))?;
            // The blocks before have the same inputs.
            let is_repeated = head.kind == BlockKind::Prelude && self.head.is_some();
            let behind = &self.rest[BlockHead::LENGTH..];
            let length = (head.length as usize).min(behind.len());
            let is_cut = length < head.length as usize;
            (self.block, self.rest) = behind.split_at(length);
            self.is_cut = is_cut;
            if is_repeated {
                self.block = &[];
                continue;
            }
            (self.head, self.read) = (Some(head), R::default());
        }
        let Some(head) = &mut self.head else { return Ok(None) };
        let (record, after) = match take(&mut self.read, head.now, self.block) {
            Ok(taken) => taken,
            Err(postcard::Error::DeserializeUnexpectedEnd) if self.is_cut => return Ok(None),
            Err(error) => return Err(self.damaged(&error.to_string())),
        };
        self.block = after;
        self.number += 1;
        if let Record::Input(at, _) = &record {
            head.now = *at;
        }
        Ok(Some(Entry { number: self.number, zero_unix_ns: head.zero_unix_ns, record }))
    }

    fn damaged(&self, why: &str) -> LogError {
        LogError::Damaged { after: self.number, why: why.to_owned() }
    }
}

/// The first entry in `bytes`, and the bytes behind it.
fn take<'a, R: Records>(records: &mut R, now: Time, bytes: &'a [u8]) -> postcard::Result<(Record<R>, &'a [u8])> {
    let (tag, rest) = bytes.split_first().ok_or(postcard::Error::DeserializeUnexpectedEnd)?;
    match *tag {
        INPUT => {
            let ((after, input), rest) = postcard::take_from_bytes(rest)?;
            Ok((Record::Input(Time::from_nanos(sum(now.as_nanos(), after)), input), rest))
        }
        REFUSAL => postcard::take_from_bytes(rest).map(|(refusal, rest)| (Record::Refused(refusal), rest)),
        DECISION => postcard::take_from_bytes(rest).map(|(decision, rest)| (Record::Decision(decision), rest)),
        _ => records.read_short(now, bytes),
    }
}
