//! Reading a log.

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
    let (machine, mut rest) = header(bytes)?;
    if !R::are_of(machine) {
        return Err(LogError::Machine(machine));
    }
    let (mut records, mut now, mut number) = (R::default(), Time::ZERO, 0);
    let entries = std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (record, after) = match take(&mut records, now, rest) {
            Ok(taken) => taken,
            Err(error) => {
                rest = &[];
                let is_cut = error == postcard::Error::DeserializeUnexpectedEnd;
                return (!is_cut).then(|| Err(LogError::Damaged { after: number, why: error.to_string() }));
            }
        };
        rest = after;
        number += 1;
        if let Record::Input(at, _) = &record {
            now = *at;
        }
        Some(Ok(Entry { number, record }))
    });
    Ok((machine, entries))
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
